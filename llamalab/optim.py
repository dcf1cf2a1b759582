"""Parameter groups, optimizers by name, and the learning rate of a step."""

from __future__ import annotations

import logging
import math
import os
import shutil
from collections.abc import Iterable
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from llamalab.errors import UserError
from llamalab.quant.rounding import stochastic_round_to_bf16

OPTIMIZERS = ("adamw", "adamw8bit", "muon", "sgd")
#: Elements updated at a time on a CPU: the float32 temporaries stay in cache, five times as fast as whole tensors.
UPDATE_BLOCK = 1 << 18
SCHEDULES = ("cosine", "linear", "constant", "wsd")


# --- parameter groups -------------------------------------------------------------------------------------


def decays(name: str, parameter: Tensor) -> bool:
    """Whether weight decay applies: to matrices, embedding and head among them (as in GPT-2); never to the gains of
    norms or to biases.

    Decided by name first, so that a parameter that was flattened or sharded keeps its group.
    """
    owner, _, kind = name.rpartition(".")
    if kind == "bias" or owner.rpartition(".")[2].endswith("norm"):
        return False
    return kind == "weight" or parameter.ndim >= 2


def is_hidden_matrix(name: str, parameter: Tensor) -> bool:
    """Whether Muon takes it: a matrix inside a block, not the embedding and not the head."""
    return name.startswith("layers.") and parameter.ndim == 2 and decays(name, parameter)


def param_groups(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Two groups of trainable parameters, with and without decay; each parameter is in one, a tied one once.

    Raises:
        UserError: nothing in the model is trainable.
    """
    return _groups(_trainable(model), weight_decay)


def _trainable(model: nn.Module) -> list[tuple[str, nn.Parameter]]:
    named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]  # a tied parameter comes once
    if not named:
        raise UserError("the model has no trainable parameter: every requires_grad is False")
    return named


def _groups(named: Iterable[tuple[str, nn.Parameter]], weight_decay: float) -> list[dict[str, Any]]:
    groups = [{"params": [], "weight_decay": weight_decay}, {"params": [], "weight_decay": 0.0}]
    for name, p in named:
        groups[0 if decays(name, p) else 1]["params"].append(p)
    return [group for group in groups if group["params"]]


# --- optimizers -------------------------------------------------------------------------------------------


def build_optimizer(
    name: str,
    model: nn.Module,
    lr: float,
    weight_decay: float = 0.1,
    betas: tuple[float, float] = (0.9, 0.95),
    stochastic_rounding: bool = False,
    seed: int = 0,
) -> torch.optim.Optimizer | MuonAndAdamW:
    """An optimizer over the model's trainable parameters.

    Args:
        name: adamw (torch's fused one), adamw8bit (torchao: moments in 8 bits), muon (torch's, for the matrices of
            the blocks; AdamW for the rest), sgd (momentum betas[0]).
        stochastic_rounding: round updates of bf16 weights up or down at random, so that small ones are not lost
            (see AdamWStochastic). adamw and adamw8bit only.
        seed: of the stochastic rounding.

    Raises:
        UserError: unknown name, a number outside its range, or stochastic rounding where it can't be had.
    """
    if name not in OPTIMIZERS:
        raise UserError(f"unknown optimizer {name!r}; known: {', '.join(OPTIMIZERS)}")
    if not 0 <= weight_decay < math.inf:
        raise UserError(f"weight_decay must be a number >= 0, got {weight_decay}")
    for number, beta in enumerate(betas, 1):
        if not 0 <= beta < 1:
            raise UserError(f"beta{number} must be in [0, 1), got {beta}")
    named = _trainable(model)
    if stochastic_rounding:
        if name not in ("adamw", "adamw8bit"):
            raise UserError(f"stochastic rounding is offered with adamw and adamw8bit, not with {name}")
        if not any(p.dtype is torch.bfloat16 for _, p in named):
            raise UserError(f"stochastic rounding is for bf16 weights; these are {named[0][1].dtype}")
    if name == "muon":
        hidden = [(n, p) for n, p in named if is_hidden_matrix(n, p)]
        rest = [(n, p) for n, p in named if not is_hidden_matrix(n, p)]
        if not hidden or not rest:
            raise UserError("muon needs both matrices in blocks and other parameters to train; use adamw")
        # Scaled to the update size of AdamW, so that one rate and one schedule serve both (arXiv:2502.16982).
        muon = torch.optim.Muon(_groups(hidden, weight_decay), lr=lr, momentum=0.95, adjust_lr_fn="match_rms_adamw")
        return MuonAndAdamW(muon, _adamw(_groups(rest, weight_decay), lr, betas))
    groups = _groups(named, weight_decay)
    if name == "sgd":
        return torch.optim.SGD(groups, lr=lr, momentum=betas[0])
    if name == "adamw8bit":
        require_compiler("adamw8bit compiles its step")
        with _quiet_logs():
            from torchao.optim import AdamW8bit
        return AdamW8bit(groups, lr=lr, betas=betas, bf16_stochastic_round=stochastic_rounding)
    if stochastic_rounding:
        return AdamWStochastic(groups, lr=lr, betas=betas, seed=seed)
    return _adamw(groups, lr, betas)


def _adamw(groups: list[dict[str, Any]], lr: float, betas: tuple[float, float]) -> torch.optim.AdamW:
    fused = all(p.device.type in ("cpu", "cuda", "mps", "xpu") for group in groups for p in group["params"])
    return torch.optim.AdamW(groups, lr=lr, betas=betas, fused=fused)


def set_lr(optimizer: torch.optim.Optimizer | MuonAndAdamW, lr: float) -> None:
    """Give every group this rate, in place where the optimizer keeps it in a tensor (torchao's do)."""
    for group in optimizer.param_groups:
        if isinstance(group["lr"], Tensor):
            group["lr"].fill_(lr)
        else:
            group["lr"] = lr


class MuonAndAdamW:
    """Two optimizers that share the model's parameters, behind the methods of one."""

    def __init__(self, *parts: torch.optim.Optimizer) -> None:
        self.parts = parts

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        return [group for part in self.parts for group in part.param_groups]

    def step(self) -> None:
        for part in self.parts:
            part.step()

    def zero_grad(self, set_to_none: bool = True) -> None:
        for part in self.parts:
            part.zero_grad(set_to_none)

    def state_dict(self) -> dict[str, Any]:
        return {"parts": [part.state_dict() for part in self.parts]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for part, saved in zip(self.parts, state["parts"], strict=True):
            part.load_state_dict(saved)


class AdamWStochastic(torch.optim.Optimizer):
    """AdamW (arXiv:1711.05101) for bf16 weights: the update is made in float32 and rounded stochastically.

    A bf16 weight has 8 bits: an update below 1/512 of it is lost when rounded to nearest, and training stalls
    (pytorch/ao #1124). Rounded up with probability (x - lo) / (hi - lo), no update is lost on average. Moments are
    float32, for the same reason: with beta2 = 0.999 a bf16 second moment would never grow.

    The noise is a pure function of (seed, step), so a resumed run draws what the straight one does and nothing but
    the step count needs saving. Other dtypes are updated as AdamW does.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float,
        betas: tuple[float, float] = (0.9, 0.95),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        seed: int = 0,
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "seed": seed, "steps": 0})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        generators: dict[torch.device, torch.Generator] = {}
        for group in self.param_groups:
            group["steps"] += 1
            for p in group["params"]:
                if p.grad is None:
                    continue
                if p.device not in generators:
                    generators[p.device] = torch.Generator(p.device).manual_seed(group["seed"] * 1_000_003 + group["steps"])
                self._update(p, group, generators[p.device])

    def _update(self, p: nn.Parameter, group: dict[str, Any], generator: torch.Generator) -> None:
        state = self.state[p]
        if not state:
            state["step"] = torch.zeros((), dtype=torch.float32)
            state["exp_avg"] = torch.zeros_like(p, dtype=torch.float32)
            state["exp_avg_sq"] = torch.zeros_like(p, dtype=torch.float32)
        state["step"] += 1
        t, (beta1, beta2) = state["step"].item(), group["betas"]
        size = UPDATE_BLOCK if p.device.type == "cpu" else p.numel()
        tensors = (_local(x).view(-1).split(size) for x in (p, p.grad.contiguous(), state["exp_avg"], state["exp_avg_sq"]))
        for weight, grad, mean, square in zip(*tensors):
            grad = grad.float()
            mean.lerp_(grad, 1 - beta1)
            square.mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
            scale = (square / (1 - beta2**t)).sqrt_().add_(group["eps"])
            updated = weight.float() * (1 - group["lr"] * group["weight_decay"])
            updated.addcdiv_(mean, scale, value=-group["lr"] / (1 - beta1**t))
            weight.copy_(stochastic_round_to_bf16(updated, generator) if weight.dtype is torch.bfloat16 else updated)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)  # which rounds moments to the weights' dtype: put the exact ones back
        ids = [i for group in state_dict["param_groups"] for i in group["params"]]
        params = [p for group in self.param_groups for p in group["params"]]
        for i, p in zip(ids, params, strict=True):
            for key in ("exp_avg", "exp_avg_sq"):
                if i in state_dict["state"]:
                    self.state[p][key] = state_dict["state"][i][key].to(p.device, copy=True)


def _local(x: Tensor) -> Tensor:
    """This rank's part of a sharded tensor; of another, itself."""
    return x.to_local() if hasattr(x, "to_local") else x


def require_compiler(why: str) -> None:
    """Refuse now what torch.compile would fail at later: it needs a C++ compiler.

    Raises:
        UserError: none is found.
    """
    if not any(shutil.which(name) for name in (os.environ.get("CXX"), "g++", "clang++", "c++", "cl") if name):
        raise UserError(f"{why}, which needs a C++ compiler (g++ or clang++), and none is on the PATH")


@contextmanager
def _quiet_logs():
    """torchao's import logs extensions and deprecations that mean nothing to a user of its optimizers."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        yield
    finally:
        logging.disable(before)


# --- learning rate ----------------------------------------------------------------------------------------


def lr_at(
    step: int,
    steps: int,
    lr: float,
    min_lr: float = 0.0,
    warmup: int = 0,
    schedule: str = "cosine",
    decay_fraction: float = 0.2,
) -> float:
    """Learning rate of step `step`, counted from 0, of `steps`. A pure function: resuming needs the step number alone.

    Warm-up is linear, lr * (step + 1) / warmup: the first step moves, and step warmup - 1 has the peak rate. Then

    - cosine, linear: from lr down to min_lr, which the last step has (a run of one step after warm-up has lr);
    - constant: lr to the end;
    - wsd (warm-up, stable, decay; arXiv:2404.06395): lr, then linearly down to min_lr over the last
      decay_fraction of the steps.

    Raises:
        UserError: a setting that makes no sense.
    """
    if schedule not in SCHEDULES:
        raise UserError(f"unknown schedule {schedule!r}; known: {', '.join(SCHEDULES)}")
    if not 0 <= warmup <= steps:
        raise UserError(f"warmup must be between 0 and steps ({steps}), got {warmup}")
    if not 0 <= min_lr <= lr:
        raise UserError(f"min_lr must be between 0 and lr ({lr}), got {min_lr}")
    if not 0 < decay_fraction <= 1:
        raise UserError(f"decay_fraction must be above 0 and at most 1, got {decay_fraction}")
    if not 0 <= step < steps:
        raise UserError(f"step {step} is not among the {steps} steps of the run")
    if step < warmup:
        return lr * (step + 1) / warmup
    peak, last = max(warmup - 1, 0), steps - 1
    if schedule == "wsd":
        peak = max(peak, last - math.ceil(decay_fraction * steps))
    if schedule == "constant" or step <= peak:
        return lr
    progress = (step - peak) / (last - peak)
    share = (1 + math.cos(math.pi * progress)) / 2 if schedule == "cosine" else 1 - progress
    return min_lr + share * (lr - min_lr)
