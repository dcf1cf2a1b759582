"""The mechanics of a step: normalisation, clipping, skipping, divergence, names under wrappers, ranks."""

from __future__ import annotations

import copy
import math
import os
import signal
import socket
from dataclasses import replace

import pytest
import torch
import torch.multiprocessing as mp
import torch.nn.functional as F
from torch import nn

from llamalab import surgery
from llamalab.config import ModelArgs
from llamalab.data import Batch
from llamalab.errors import UserError
from llamalab.loss import IGNORE
from llamalab.model import Transformer
from llamalab.optim import build_optimizer
from llamalab.train import TrainConfig, TrainingDiverged, grad_norm, scale_gradients_, stop_on_signal, train_steps
from llamalab.train_state import load_state, save_state, weights


def tiny(seed=0, **options) -> Transformer:
    return Transformer(replace(ModelArgs.from_name("tiny"), **options)).init_weights(seed)


def random_batch(index: int, rows: int = 2, length: int = 12) -> Batch:
    g = torch.Generator().manual_seed(index)
    tokens = torch.randint(0, 97, (rows, length + 1), generator=g)
    return Batch(tokens[:, :-1], tokens[:, 1:].clone())


def samples(trained: list[int], length: int = 24) -> Batch:
    """One row a sample; only its first `trained` labels count."""
    batch = random_batch(0, len(trained), length)
    for row, n in zip(batch.labels, trained):
        row[n:] = IGNORE
    return batch


def rows_of(batch: Batch, size: int):
    """batch_at that cuts a batch into micro-batches of `size` rows."""
    return lambda i: Batch(batch.inputs[i * size : (i + 1) * size], batch.labels[i * size : (i + 1) * size])


def mean_loss_gradients(model, batch):
    """Reference: one mean over all trained tokens, by torch's own cross entropy."""
    model = copy.deepcopy(model)
    model.setup_caches(1, 64, training=True)
    F.cross_entropy(model(batch.inputs).flatten(0, 1), batch.labels.flatten(), ignore_index=IGNORE).backward()
    return [p.grad for p in model.parameters()]


def sgd(model, lr=1.0):
    return torch.optim.SGD(model.parameters(), lr=lr)


# --- normalisation (FAULTS A20, A22) ----------------------------------------------------------------------


@pytest.mark.parametrize("size", [1, 2, 4])
def test_gradient_does_not_depend_on_the_split(size):
    model, batch = tiny(), samples([1, 9, 3, 20])
    expected, before = mean_loss_gradients(model, batch), [p.detach().clone() for p in model.parameters()]
    config = TrainConfig(steps=1, lr=1.0, accumulate=4 // size, clip=0, schedule="constant")
    (step,) = train_steps(model, sgd(model), rows_of(batch, size), config)
    assert step.tokens == 33
    for p, old, grad in zip(model.parameters(), before, expected):
        # the step is the gradient: w - g in float32, whose rounding is half a unit in the last place of w (6e-8 |w|)
        torch.testing.assert_close(old - p, grad, rtol=1e-5, atol=2e-7 + 6e-8 * old.abs().max().item())


def test_loss_is_not_a_mean_of_means():
    model, batch = tiny(), samples([1, 9, 3, 20])
    reference = copy.deepcopy(model)
    reference.setup_caches(1, 64, training=True)
    losses = F.cross_entropy(reference(batch.inputs).transpose(1, 2), batch.labels, ignore_index=IGNORE, reduction="none").sum(1)
    (step,) = train_steps(model, sgd(model), rows_of(batch, 1), TrainConfig(steps=1, accumulate=4))
    assert step.loss == pytest.approx(losses.sum().item() / 33, rel=1e-6)  # float32 sums in another order
    mean_of_means = (losses / torch.tensor([1, 9, 3, 20])).mean().item()
    assert abs(step.loss - mean_of_means) > 1e-3


def test_leftover_window_has_its_own_denominator():
    model, batch = tiny(), samples([4, 9, 3, 20, 7])
    config = TrainConfig(steps=3, lr=1e-9, accumulate=2, schedule="constant")  # a rate so small that weights stay
    steps = list(train_steps(model, sgd(model, 1e-9), rows_of(batch, 1), config, micro_batches=5))
    assert [s.tokens for s in steps] == [13, 23, 7]
    reference = tiny()
    reference.setup_caches(1, 64, training=True)
    last = F.cross_entropy(reference(batch.inputs[4:]).flatten(0, 1), batch.labels[4], ignore_index=IGNORE)
    assert steps[2].loss == pytest.approx(last.item(), rel=1e-5)  # weights moved by 1e-9
    with pytest.raises(UserError, match="4 steps of 2 micro-batches, but the data has 5"):
        train_steps(model, sgd(model), rows_of(batch, 1), replace(config, steps=4), micro_batches=5)


def test_a_label_is_trained_whatever_its_id():
    # padding is known by IGNORE alone: an end token that is also the padding id is a label like any other
    batch = random_batch(0)
    batch.labels[:] = 0
    model = tiny(pad_token_id=0, eos_token_ids=(0,))
    (step,) = train_steps(model, sgd(model), lambda i: batch, TrainConfig(steps=1))
    assert step.tokens == batch.labels.numel()


# --- windows without a trained token (FAULTS A21) ---------------------------------------------------------


def test_no_trained_token_takes_no_step():
    model = tiny()
    optimizer = build_optimizer("adamw", model, lr=1e-2, weight_decay=0.1)
    list(train_steps(model, optimizer, random_batch, TrainConfig(steps=2, lr=1e-2)))
    weights_before = [p.detach().clone() for p in model.parameters()]
    moments_before = copy.deepcopy(optimizer.state_dict()["state"])
    (step,) = train_steps(model, optimizer, lambda i: samples([0]), TrainConfig(steps=1, lr=1e-2))
    assert step.skipped and step.loss is None and step.grad_norm is None and step.tokens == 0
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), weights_before))
    for i, entries in optimizer.state_dict()["state"].items():
        assert all(torch.equal(entries[key], moments_before[i][key]) for key in entries)


def test_empty_micro_batch_changes_nothing():
    batch = samples([5, 0])
    results = []
    for micro in ([0, 1], [0]):
        model = tiny()
        at = [rows_of(batch, 1)(i) for i in micro]
        (step,) = train_steps(model, sgd(model), at.__getitem__, TrainConfig(steps=1, accumulate=len(micro)))
        results.append((step.loss, step.tokens, [p.detach() for p in model.parameters()]))
    assert results[0][:2] == results[1][:2]
    assert all(torch.equal(a, b) for a, b in zip(results[0][2], results[1][2]))


# --- rate, clipping, divergence (FAULTS A25) --------------------------------------------------------------


def test_logged_rate_is_the_one_used_and_the_first_step_moves():
    model = tiny()
    config = TrainConfig(steps=10, lr=0.4, warmup=4, clip=0)
    before, grads = [p.detach().clone() for p in model.parameters()], mean_loss_gradients(model, random_batch(0))
    steps = train_steps(model, sgd(model, 123.0), random_batch, config)
    first = next(steps)
    assert first.lr == 0.1
    for p, old, grad in zip(model.parameters(), before, grads):
        torch.testing.assert_close(old - p, 0.1 * grad, rtol=1e-5, atol=2e-7)  # float32 of w - lr g
    assert [s.lr for s in steps][:3] == pytest.approx([0.2, 0.3, 0.4])


@pytest.mark.parametrize("share", [0.5, 2.0])
def test_clipping_scales_all_gradients_at_once(share):
    model = tiny()
    grads = mean_loss_gradients(model, random_batch(0))
    norm = math.sqrt(sum(g.double().square().sum().item() for g in grads))
    before = [p.detach().clone() for p in model.parameters()]
    config = TrainConfig(steps=1, lr=1.0, clip=share * norm, schedule="constant")
    (step,) = train_steps(model, sgd(model), random_batch, config)
    assert step.grad_norm == pytest.approx(norm, rel=1e-5)  # float32 sums
    factor = min(1.0, share * norm / (norm + 1e-6))
    for p, old, grad in zip(model.parameters(), before, grads):
        torch.testing.assert_close(old - p, factor * grad, rtol=1e-5, atol=2e-7)


def test_stale_gradients_are_dropped():
    model, fresh = tiny(), tiny()
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    for one in (model, fresh):
        list(train_steps(one, sgd(one), random_batch, TrainConfig(steps=1)))
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), fresh.parameters()))


@pytest.mark.parametrize("poison", [math.nan, math.inf])
def test_divergence_stops_before_the_step(poison, tmp_path):
    model = tiny()
    optimizer = build_optimizer("adamw", model, lr=1e-3)
    steps = train_steps(model, optimizer, random_batch, TrainConfig(steps=5), run_dir=tmp_path)
    next(steps)
    good = save_state(tmp_path, 1, model, optimizer, {})
    with torch.no_grad():
        model.norm.weight[0] = poison
    before = [p.detach().clone() for p in model.parameters()]
    with pytest.raises(TrainingDiverged, match=r"diverged at step 1: .*step-00000001\. Try a lower --lr") as caught:
        next(steps)
    assert caught.value.step == 1 and caught.value.good == good and isinstance(caught.value, UserError)
    assert all(torch.equal(a, b) or a.isnan().any() for a, b in zip(model.parameters(), before))
    assert optimizer.state_dict()["state"][0]["step"].item() == 1


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (dict(steps=0), "steps must be at least 1"),
        (dict(accumulate=0), "accumulate must be at least 1"),
        (dict(lr=0.0), "lr must be a positive number"),
        (dict(lr=math.nan), "lr must be a positive number"),
        (dict(clip=-1.0), "clip must be positive"),
        (dict(dtype="fp16"), "unknown dtype 'fp16' for training; known: fp32, bf16, autocast"),
        (dict(warmup=9), "warmup must be between"),
        (dict(schedule="step"), "unknown schedule"),
    ],
)
def test_settings_are_checked_at_the_call(change, message):
    model = tiny()
    with pytest.raises(UserError, match=message):
        train_steps(model, sgd(model), random_batch, replace(TrainConfig(steps=5), **change))


# --- dtypes, checkpointing, compile (FAULTS A7) -----------------------------------------------------------


def test_autocast_trains_float32_weights_in_bf16_products():
    model = tiny()
    seen = set()
    model.layers[0].feed_forward.w1.register_forward_hook(lambda m, i, out: seen.add(out.dtype))
    plain = [s.loss for s in train_steps(tiny(), sgd(model, 0.0), random_batch, TrainConfig(steps=1))]
    losses = [s.loss for s in train_steps(model, sgd(model), random_batch, TrainConfig(steps=1, dtype="autocast"))]
    assert seen == {torch.bfloat16} and {p.dtype for p in model.parameters()} == {torch.float32}
    assert losses[0] == pytest.approx(plain[0], rel=2**-8) and losses != plain  # bf16 products
    with pytest.raises(UserError, match="autocast trains float32 weights, but the model has bfloat16 ones"):
        train_steps(tiny().bfloat16(), sgd(model), random_batch, TrainConfig(steps=1, dtype="autocast"))


def test_pure_bf16_learns():
    model = tiny().bfloat16()
    config = TrainConfig(steps=30, lr=1e-2, dtype="bf16", warmup=5)
    optimizer = build_optimizer("adamw", model, lr=1e-2, stochastic_rounding=True)
    losses = [s.loss for s in train_steps(model, optimizer, lambda i: random_batch(0), config)]
    assert losses[-1] < 0.5 * losses[0] and {p.dtype for p in model.parameters()} == {torch.bfloat16}


def plain_(model):
    return model


def eager_compiled_(model):
    # dynamo without a code generator: what could change names is all there, and it takes no C++ compiler
    return surgery.compile_blocks_(model, backend="eager")


def checkpointed_and_compiled_(model):
    return eager_compiled_(surgery.checkpoint_blocks_(model))


WRAPS = [plain_, surgery.checkpoint_blocks_, eager_compiled_, checkpointed_and_compiled_]


@pytest.mark.parametrize("wrap", WRAPS)
def test_wrapped_models_train_alike_and_save_the_same_names(wrap, tmp_path):
    straight, wrapped = tiny(), wrap(tiny())
    for model in (straight, wrapped):
        optimizer = build_optimizer("adamw", model, lr=1e-2)
        list(train_steps(model, optimizer, random_batch, TrainConfig(steps=2, lr=1e-2)))
    assert weights(wrapped).keys() == weights(straight).keys()
    for name, value in weights(straight).items():
        torch.testing.assert_close(weights(wrapped)[name], value, rtol=1e-5, atol=1e-6)  # the same operations, float32
    path = save_state(tmp_path, 2, wrapped, optimizer, {})
    for other_wrap in WRAPS:
        other = other_wrap(tiny(seed=1))
        assert load_state(path, other, build_optimizer("adamw", other, lr=1e-2)) == 2
        assert all(torch.equal(a, b) for a, b in zip(weights(other).values(), weights(wrapped).values()))


def test_whole_model_wrappers_do_not_change_names():
    model = tiny()
    compiled = torch.compile(model, backend="eager")
    assert any(name.startswith("_orig_mod.") for name in compiled.state_dict())
    names = dict(model.named_parameters()).keys()
    assert weights(compiled).keys() == weights(model).keys() == names
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        distributed = nn.parallel.DistributedDataParallel(model)
        assert any(name.startswith("module.") for name in distributed.state_dict())
        assert weights(distributed).keys() == names
    finally:
        torch.distributed.destroy_process_group()


@pytest.mark.slow
def test_compiled_blocks_with_inductor_agree(tmp_path):
    losses = []
    for wrap in (plain_, surgery.compile_blocks_):
        model = wrap(tiny())
        losses.append([s.loss for s in train_steps(model, build_optimizer("adamw", model, lr=1e-2), random_batch, TrainConfig(steps=3))])
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)  # fused float32 operations round elsewhere


# --- signals ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_becomes_an_event_and_handlers_come_back(number):
    before = signal.getsignal(number)
    with stop_on_signal() as stop:
        assert not stop.is_set()
        os.kill(os.getpid(), number)
        assert stop.is_set()
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), number)
    assert signal.getsignal(number) is before


# --- ranks (FAULTS A24) -----------------------------------------------------------------------------------


def sharded_norm(rank: int, port: int, out) -> None:
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    dist.init_process_group("gloo", rank=rank, world_size=2)
    mesh = init_device_mesh("cpu", (2,))
    params = []
    for i, grad in enumerate(gradients()):
        if i == 3:  # one that isn't sharded at all
            p = nn.Parameter(torch.zeros_like(grad))
            p.grad = grad.clone()
        else:
            place = [Replicate()] if i == 2 else [Shard(0)]
            p = nn.Parameter(distribute_tensor(torch.zeros_like(grad), mesh, place))
            p.grad = distribute_tensor(grad, mesh, place)
        params.append(p)
    norm = grad_norm(params)
    scale_gradients_(params, 0.5)
    out[rank] = (norm.item(), [(p.grad.full_tensor() if hasattr(p.grad, "full_tensor") else p.grad).tolist() for p in params])
    dist.destroy_process_group()


def gradients() -> list[torch.Tensor]:
    g = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=g) for shape in ((5, 3), (8,), (4, 4), (7,))]  # 5 and 7: uneven shards


def test_norm_of_sharded_and_plain_gradients_is_global_on_every_rank():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    with mp.Manager() as manager:
        out = manager.dict()
        mp.spawn(sharded_norm, (port, out), nprocs=2)
        results = dict(out)
    expected = math.sqrt(sum(g.double().square().sum().item() for g in gradients()))
    for rank in (0, 1):
        norm, scaled = results[rank]
        assert norm == pytest.approx(expected, rel=1e-6)  # float32
        for got, grad in zip(scaled, gradients()):
            assert torch.equal(torch.tensor(got), grad * 0.5)


def test_norm_without_gradients_is_zero():
    assert grad_norm(tiny().parameters()).item() == 0.0
