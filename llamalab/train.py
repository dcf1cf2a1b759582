"""The mechanics of a training step, once: accumulate, check, clip, step. The loop stays with the caller.

    model = load_model("HuggingFaceTB/SmolLM2-135M")
    optimizer = build_optimizer("adamw", model, lr=1e-4)
    for step in train_steps(model, optimizer, windows, TrainConfig(steps=100, lr=1e-4)):
        print(step.index, step.loss)

Between two steps the caller owns the model: it may evaluate, sample, save, or break.
"""

from __future__ import annotations

import math
import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from llamalab.data import Batch
from llamalab.errors import UserError
from llamalab.loss import IGNORE, cross_entropy_sum
from llamalab.optim import lr_at, set_lr
from llamalab.train_state import newest_state

#: What --dtype means in training: dtype of the weights, and whether products run under bf16 autocast.
POLICIES: dict[str, tuple[torch.dtype, bool]] = {
    "fp32": (torch.float32, False),
    "bf16": (torch.bfloat16, False),
    "autocast": (torch.float32, True),
}


#: Settings that are counts of at least 1, here and in the recipes.
COUNTS = ("steps", "accumulate", "batch", "seq_len", "eval_every", "eval_tokens", "save_every", "keep")


@dataclass
class TrainConfig:
    """What `train_steps` reads of a config; a recipe's own Config has fields of these names."""

    steps: int
    lr: float = 1e-3
    min_lr: float = 0.0  # the last step's rate, where the schedule decays
    warmup: int = 0  # steps
    schedule: str = "cosine"  # cosine, linear, constant, wsd: see optim.lr_at
    decay_fraction: float = 0.2  # share of the steps in which wsd decays
    accumulate: int = 1  # micro-batches an optimizer step
    clip: float = 1.0  # largest global gradient norm; 0 is off
    dtype: str = "fp32"  # fp32, bf16 (weights and all), autocast (float32 weights, bf16 products)


@dataclass(frozen=True)
class Step:
    """One optimizer step, done. `loss` and `grad_norm` are None where no token was trained and no step taken."""

    index: int  # from 0
    loss: float | None  # nats per trained token, before the step
    lr: float  # the rate this step used
    grad_norm: float | None  # before clipping
    tokens: int  # trained tokens
    seconds: float
    skipped: bool = False


class TrainingDiverged(UserError):
    """Loss or gradient is not finite. Raised before the optimizer step, so the weights are still good."""

    def __init__(self, step: int, loss: float, grad_norm: float, good: Path | None) -> None:
        self.step, self.loss, self.grad_norm, self.good = step, loss, grad_norm, good
        super().__init__(
            f"training diverged at step {step}: loss {loss}, gradient norm {grad_norm}. Nothing of this step was applied or saved. "
            f"Last good checkpoint: {good or 'none was saved'}. "
            "Try a lower --lr, a longer --warmup, a lower --clip, or --dtype fp32."
        )


def train_steps(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    batch_at: Callable[[int], Batch],
    config: TrainConfig,
    start: int = 0,
    micro_batches: int | None = None,
    run_dir: Path | None = None,
) -> Iterator[Step]:
    """Train from step `start` to `config.steps`, yielding after each optimizer step.

    Step s uses micro-batches s * accumulate ... s * accumulate + accumulate - 1. Its loss is the sum over all its
    trained tokens divided by their number, whatever the split into micro-batches. A step whose labels are all
    IGNORE changes nothing (no decay either) and is yielded with `skipped`.

    Args:
        model: weights in the dtype of the policy (`POLICIES[config.dtype]`).
        optimizer: over the model's parameters; its rates are set here.
        batch_at: micro-batch of an index, pure, so that resuming needs the step number only.
        config: a TrainConfig, or any object with its attributes.
        start: the first step to run; what `load_state` returned.
        micro_batches: how many there are, where data ends; the last step then takes what is left.
        run_dir: where checkpoints are; named when training diverges.

    Raises:
        UserError: a setting makes no sense; raised here, before any compute.
        TrainingDiverged: loss or gradient norm is not finite.
    """
    check_config(config, micro_batches)
    weights, autocast = POLICIES[config.dtype]
    params = [p for p in model.parameters() if p.requires_grad]
    odd = {str(p.dtype).removeprefix("torch.") for p in params if autocast and p.dtype is not weights}
    if odd:
        raise UserError(f"--dtype autocast trains float32 weights, but the model has {', '.join(sorted(odd))} ones")
    return _train_steps(model, params, optimizer, batch_at, config, start, micro_batches, run_dir)


def check_config(config: TrainConfig, micro_batches: int | None = None) -> None:
    """Refuse settings that make no sense, among them those of a recipe that are named in COUNTS.

    Raises:
        UserError: names the setting.
    """
    for name in COUNTS:
        if getattr(config, name, 1) < 1:
            raise UserError(f"{name} must be at least 1, got {getattr(config, name)}")
    for name in ("sample_every", "sample_tokens"):
        if getattr(config, name, 0) < 0:
            raise UserError(f"{name} must be at least 0, got {getattr(config, name)}")
    if not (math.isfinite(config.lr) and config.lr > 0):
        raise UserError(f"lr must be a positive number, got {config.lr}")
    if not config.clip >= 0:
        raise UserError(f"clip must be positive, or 0 for no clipping, got {config.clip}")
    if config.dtype not in POLICIES:
        raise UserError(f"unknown dtype {config.dtype!r} for training; known: {', '.join(POLICIES)}")
    learning_rate(0, config)
    if config.decay_fraction != TrainConfig.decay_fraction and config.schedule != "wsd":
        raise UserError(f"decay_fraction is of the schedule wsd; {config.schedule} has none")
    if config.min_lr and config.schedule == "constant":
        raise UserError("min_lr is of schedules that decay; constant does not")
    if micro_batches is not None and (config.steps - 1) * config.accumulate >= micro_batches:
        raise UserError(f"{config.steps} steps of {config.accumulate} micro-batches, but the data has {micro_batches}")


def learning_rate(step: int, config: TrainConfig) -> float:
    """The rate that `train_steps` uses at this step."""
    return lr_at(step, config.steps, config.lr, config.min_lr, config.warmup, config.schedule, config.decay_fraction)


def _train_steps(model, params, optimizer, batch_at, config, start, micro_batches, run_dir) -> Iterator[Step]:
    device = params[0].device
    autocast = POLICIES[config.dtype][1]
    optimizer.zero_grad(set_to_none=True)
    for index in range(start, config.steps):
        began = time.perf_counter()
        lr = learning_rate(index, config)
        first = index * config.accumulate
        end = first + config.accumulate if micro_batches is None else min(first + config.accumulate, micro_batches)
        batches = [batch_at(i) for i in range(first, end)]
        # Counted before backward, so that every gradient has the whole step's denominator.
        counts = [int((batch.labels != IGNORE).sum()) for batch in batches]
        tokens = sum(counts)
        if tokens == 0:
            yield Step(index, None, lr, None, 0, time.perf_counter() - began, skipped=True)
            continue

        total = torch.zeros((), device=device)
        for batch, count in zip(batches, counts):
            if count == 0:
                continue
            model.setup_caches(*batch.inputs.shape, training=True)
            with torch.autocast(device.type, torch.bfloat16, enabled=autocast):
                loss_sum, _ = cross_entropy_sum(model, batch.to(device))
            (loss_sum / tokens).backward()
            total += loss_sum.detach()

        loss, norm = torch.stack([total / tokens, grad_norm(params).to(device)]).tolist()
        if not (math.isfinite(loss) and math.isfinite(norm)):
            raise TrainingDiverged(index, loss, norm, newest_state(run_dir) if run_dir else None)
        factor = config.clip / (norm + 1e-6) if config.clip else 1.0
        if factor < 1:
            scale_gradients_(params, factor)
        set_lr(optimizer, lr)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        yield Step(index, loss, lr, norm, tokens, time.perf_counter() - began)


@torch.no_grad()
def grad_norm(params: Iterable[nn.Parameter]) -> Tensor:
    """Global L2 norm of the gradients, a float32 scalar, the same on every rank.

    Plain and sharded (DTensor) gradients may be mixed: the norms of the sharded ones are summed over their mesh.
    """
    by_mesh: dict[object, list[Tensor]] = {}
    for p in params:
        if p.grad is not None:
            norm = _norm(p.grad)
            by_mesh.setdefault(getattr(norm, "device_mesh", None), []).append(norm)
    if not by_mesh:
        return torch.zeros(())
    norms = [torch.linalg.vector_norm(torch.stack(norms)) for norms in by_mesh.values()]
    return torch.linalg.vector_norm(torch.stack([n.full_tensor() if hasattr(n, "full_tensor") else n for n in norms]))


def _norm(x: Tensor, piece: int = 1 << 20) -> Tensor:
    """L2 norm in float32. A narrow tensor on a CPU is widened piece by piece: torch would make a whole float32 copy,
    a tenth of a SmolLM2 step."""
    if x.device.type != "cpu" or x.dtype is torch.float32 or hasattr(x, "device_mesh"):
        return torch.linalg.vector_norm(x, dtype=torch.float32)
    return torch.linalg.vector_norm(torch.stack([torch.linalg.vector_norm(part.float()) for part in x.flatten().split(piece)]))


@torch.no_grad()
def scale_gradients_(params: Iterable[nn.Parameter], factor: float) -> None:
    """Multiply all gradients in place."""
    for p in params:
        if p.grad is not None:
            p.grad.mul_(factor)


@contextmanager
def stop_on_signal() -> Iterator[threading.Event]:
    """Turn Ctrl-C and SIGTERM into an event, to be looked at between steps; a second Ctrl-C interrupts at once.

    Outside the main thread, where Python allows no handlers, the event is simply never set by a signal.
    """
    stop = threading.Event()

    def handle(number: int, frame: object) -> None:
        if stop.is_set():
            raise KeyboardInterrupt
        stop.set()

    main = threading.current_thread() is threading.main_thread()
    before = {number: signal.signal(number, handle) for number in (signal.SIGINT, signal.SIGTERM)} if main else {}
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
