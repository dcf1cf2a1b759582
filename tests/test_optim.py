"""Groups, optimizers, rates, stochastic rounding."""

from __future__ import annotations

import copy
import subprocess
import sys

import pytest
import torch
from torch import nn

from llamalab.config import ModelArgs
from llamalab.errors import UserError
from llamalab.model import Transformer
from llamalab.optim import AdamWStochastic, build_optimizer, decays, lr_at, param_groups, set_lr


def tiny(tied=False, **changes) -> Transformer:
    args = ModelArgs.from_name("tiny-tied" if tied else "tiny")
    for name, value in changes.items():
        setattr(args, name, value)
    return Transformer(args).init_weights(0)


# --- groups (FAULTS A26) ----------------------------------------------------------------------------------


@pytest.mark.parametrize("tied", [False, True])
def test_every_parameter_is_in_one_group(tied):
    model = tiny(tied, qkv_bias=True, out_bias=True, mlp_bias=True, qk_norm=True)
    groups = param_groups(model, 0.1)
    ids = [id(p) for group in groups for p in group["params"]]
    assert len(ids) == len(set(ids)) and set(ids) == {id(p) for p in model.parameters()}
    assert [g["weight_decay"] for g in groups] == [0.1, 0.0]
    assert all(p.ndim == 2 for p in groups[0]["params"]) and all(p.ndim == 1 for p in groups[1]["params"])


def test_grouping_survives_flattening():
    for name, p in tiny(qkv_bias=True, qk_norm=True).named_parameters():
        assert decays(name, p.detach().flatten()) == decays(name, p) == (p.ndim == 2)


def test_frozen_parameters_are_left_out_and_all_frozen_is_refused():
    model = tiny()
    model.tok_embeddings.weight.requires_grad_(False)
    assert all(p is not model.tok_embeddings.weight for g in param_groups(model, 0.1) for p in g["params"])
    model.requires_grad_(False)
    with pytest.raises(UserError, match="no trainable parameter"):
        build_optimizer("adamw", model, lr=1e-3)


@pytest.mark.parametrize("name", ["adamw", "muon", "sgd"])
@pytest.mark.parametrize("tied", [False, True])
def test_zero_gradients_decay_matrices_only(name, tied):
    model = tiny(tied, qkv_bias=True)
    before = copy.deepcopy(model)
    optimizer = build_optimizer(name, model, lr=0.01, weight_decay=0.1)
    for _ in range(10):
        for p in model.parameters():
            p.grad = torch.zeros_like(p)
        optimizer.step()
    # torch's SGD adds the decay to the gradient, through momentum 0.9: w (1 - lr wd sum of 0.9^i), another closed form
    velocity, factor = 0.0, 1.0
    for _ in range(10):
        velocity = 0.9 * velocity + 0.1 * factor
        factor = factor - 0.01 * velocity if name == "sgd" else factor * (1 - 0.01 * 0.1)
    for (key, p), old in zip(model.named_parameters(), before.parameters()):
        if p.ndim == 1:
            assert torch.equal(p, old), key
        else:
            torch.testing.assert_close(p, old * factor, rtol=3e-6, atol=0)  # ten float32 roundings of 6e-8, and slack


# --- optimizers -------------------------------------------------------------------------------------------


def test_adamw_is_torchs_fused_one():
    optimizer = build_optimizer("adamw", tiny(), lr=1e-3)
    assert type(optimizer) is torch.optim.AdamW and optimizer.defaults["fused"] and optimizer.defaults["betas"] == (0.9, 0.95)


def test_muon_takes_hidden_matrices_and_adamw_the_rest():
    model = tiny(tied=True)
    muon, adamw = build_optimizer("muon", model, lr=1e-3).parts
    by_muon = {id(p) for g in muon.param_groups for p in g["params"]}
    for name, p in model.named_parameters():
        assert (id(p) in by_muon) == (name.startswith("layers.") and p.ndim == 2), name
    assert sum(len(g["params"]) for g in muon.param_groups + adamw.param_groups) == len(list(model.parameters()))


def test_muon_state_dict_round_trip():
    model = tiny()
    other = copy.deepcopy(model)
    first, second = build_optimizer("muon", model, lr=1e-2), build_optimizer("muon", other, lr=1e-2)
    g = torch.Generator().manual_seed(0)
    gradients = [[torch.randn(p.shape, generator=g) for p in model.parameters()] for _ in range(2)]
    for p, grad in zip(model.parameters(), gradients[0]):
        p.grad = grad
    first.step()
    other.load_state_dict(model.state_dict())
    second.load_state_dict(copy.deepcopy(first.state_dict()))
    for one, optimizer in ((model, first), (other, second)):
        for p, grad in zip(one.parameters(), gradients[1]):
            p.grad = grad.clone()
        optimizer.step()
        optimizer.zero_grad()
        assert all(p.grad is None for p in one.parameters())
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), other.parameters()))


@pytest.mark.parametrize("name", ["adamw", "muon", "adamw8bit"])
def test_set_lr_is_what_the_step_uses(name):
    model = tiny()
    optimizer = build_optimizer(name, model, lr=1.0, weight_decay=0.0)
    set_lr(optimizer, 0.0)
    before = copy.deepcopy(model)
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    if name == "adamw8bit":  # its step compiles for minutes on a slow machine; the rate is a tensor it reads
        assert all(isinstance(g["lr"], torch.Tensor) and g["lr"].item() == 0 for g in optimizer.param_groups)
        return
    optimizer.step()
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), before.parameters()))


def test_wrong_names_and_combinations_are_refused():
    with pytest.raises(UserError, match="unknown optimizer 'adam'; known: adamw"):
        build_optimizer("adam", tiny(), lr=1e-3)
    with pytest.raises(UserError, match="not with muon"):
        build_optimizer("muon", tiny().bfloat16(), lr=1e-3, stochastic_rounding=True)
    with pytest.raises(UserError, match=r"for bf16 weights; these are torch\.float32"):
        build_optimizer("adamw", tiny(), lr=1e-3, stochastic_rounding=True)


def test_no_compiler_is_said_before_compute(monkeypatch):
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("CXX", raising=False)
    with pytest.raises(UserError, match=r"needs a C\+\+ compiler"):
        build_optimizer("adamw8bit", tiny(), lr=1e-3)


def test_torchaos_import_is_quiet():
    code = (
        "from llamalab.model import Transformer; from llamalab.optim import build_optimizer;"
        "build_optimizer('adamw8bit', Transformer.from_name('tiny'), lr=1e-3)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "" and done.stderr == ""


# --- stochastic rounding (FAULTS A27) ---------------------------------------------------------------------


def one_parameter(value: float, n: int, dtype: torch.dtype) -> nn.Parameter:
    return nn.Parameter(torch.full((n,), value, dtype=dtype))


def test_small_updates_survive_in_bf16():
    """50 steps of 1e-4 from 1.0: exactly 1.005. The spacing of bf16 above 1 is 2^-7 = 0.0078."""
    p = one_parameter(1.0, 4096, torch.bfloat16)
    nearest = one_parameter(1.0, 4096, torch.bfloat16)
    ours = AdamWStochastic([p], lr=1e-4, seed=0)
    torchs = torch.optim.AdamW([nearest], lr=1e-4, weight_decay=0.0)
    for _ in range(50):
        p.grad, nearest.grad = -torch.ones_like(p), -torch.ones_like(p)
        ours.step()
        torchs.step()
    assert nearest.float().mean().item() == 1.0
    # a weight is at 1 or 1 + 2^-7: standard error sqrt(0.64 * 0.36) * 2^-7 / sqrt(4096) = 6e-5; 4e-4 is FAULTS' bound
    assert p.float().mean().item() == pytest.approx(1.005, abs=4e-4)


def test_float32_parameters_get_adamw():
    g = torch.Generator().manual_seed(0)
    p = nn.Parameter(torch.randn(33, 7, generator=g))
    q = nn.Parameter(p.detach().clone())
    ours = AdamWStochastic([p], lr=1e-2, weight_decay=0.1)
    torchs = torch.optim.AdamW([q], lr=1e-2, betas=(0.9, 0.95), weight_decay=0.1)
    for _ in range(5):
        p.grad = torch.randn(33, 7, generator=g)
        q.grad = p.grad.clone()
        ours.step()
        torchs.step()
    torch.testing.assert_close(p, q, rtol=1e-5, atol=1e-6)  # the same formula, operations in another order


def test_updates_in_blocks_are_updates(monkeypatch):
    results = []
    for block in (1 << 18, 5):
        monkeypatch.setattr("llamalab.optim.UPDATE_BLOCK", block)
        p = nn.Parameter(torch.linspace(-1, 1, 33).view(3, 11).clone())
        optimizer = AdamWStochastic([p], lr=1e-2, weight_decay=0.1)
        for i in range(3):
            p.grad = torch.full((11, 3), i - 1.5).T  # not contiguous
            optimizer.step()
        results.append(p.detach())
    torch.testing.assert_close(*results, rtol=1e-6, atol=1e-7)  # vectorized and scalar float32 may differ in the last place


def test_noise_depends_on_seed_and_step_only():
    def run(seed: int, disturb: bool = False) -> torch.Tensor:
        p = one_parameter(1.0, 512, torch.bfloat16)
        optimizer = AdamWStochastic([p], lr=1e-3, seed=seed)
        for _ in range(3):
            p.grad = -torch.ones_like(p)
            if disturb:
                torch.rand(5)
            optimizer.step()
        return p.detach()

    assert torch.equal(run(1), run(1, disturb=True)) and not torch.equal(run(1), run(2))


def test_stochastic_adamw_goes_on_bit_equal_through_state_dict():
    p = one_parameter(1.0, 512, torch.bfloat16)
    optimizer = AdamWStochastic([p], lr=1e-3, seed=3)
    g = torch.Generator().manual_seed(0)
    gradients = torch.randn(6, 512, generator=g).bfloat16()
    for grad in gradients[:3]:
        p.grad = grad
        optimizer.step()
    q = nn.Parameter(p.detach().clone())
    other = AdamWStochastic([q], lr=1e-3, seed=0)
    other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    assert other.state[q]["exp_avg"].dtype == torch.float32
    for grad in gradients[3:]:
        p.grad, q.grad = grad, grad.clone()
        optimizer.step()
        other.step()
    assert torch.equal(p, q)


# --- learning rate (FAULTS A25) ---------------------------------------------------------------------------


@pytest.mark.parametrize("schedule", ["cosine", "linear", "constant", "wsd"])
@pytest.mark.parametrize("warmup", [0, 1, 4])
def test_shape_of_every_schedule(schedule, warmup):
    rates = [lr_at(t, 10, 1.0, 0.1, warmup, schedule) for t in range(10)]
    assert rates[:warmup] == [(t + 1) / warmup for t in range(warmup)]  # 0.25, 0.5, 0.75, 1: never 0
    top = max(warmup - 1, 0)
    assert rates[top] == 1.0 and all(a >= b for a, b in zip(rates[top:], rates[top + 1 :]))
    assert rates[-1] == (1.0 if schedule == "constant" else pytest.approx(0.1, abs=1e-15))  # float64


def test_known_values():
    assert lr_at(5, 11, 1.0, 0.0, 1, "cosine") == pytest.approx(0.5)  # half-way from step 0 to step 10
    assert lr_at(5, 11, 1.0, 0.0, 1, "linear") == pytest.approx(0.5)
    assert [lr_at(t, 10, 1.0, 0.0, 0, "wsd") for t in range(6, 10)] == [1.0, 1.0, 0.5, 0.0]  # last 2 of 10 steps decay
    assert lr_at(0, 1, 1.0, 0.1, 0, "cosine") == 1.0


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        (dict(schedule="cos"), "unknown schedule"),
        (dict(warmup=11), "warmup must be between"),
        (dict(warmup=-1), "warmup must be between"),
        (dict(min_lr=2.0), "min_lr must be between"),
        (dict(schedule="wsd", decay_fraction=0.0), "decay_fraction"),
        (dict(step=10), "not among the 10 steps"),
    ],
)
def test_settings_that_make_no_sense_are_refused(kwargs, message):
    with pytest.raises(UserError, match=message):
        lr_at(**{"step": 0, "steps": 10, "lr": 1.0, **kwargs})
