"""Resumed runs are the straight run, bit for bit: same process, new process, after kill -9 (FAULTS A8, A23)."""

from __future__ import annotations

import json
import multiprocessing
import os
import pickle
import random
import signal
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import pytest
import torch
from test_train import random_batch

from llamalab.checkpoint import load_model
from llamalab.config import ModelArgs
from llamalab.errors import UserError
from llamalab.model import Transformer
from llamalab.optim import build_optimizer
from llamalab.train import TrainConfig, train_steps
from llamalab.train_state import load_state, newest_state, read_state, save_state, weights


@dataclass
class Settings(TrainConfig):
    """What a recipe's Config would hold."""

    optimizer: str = "adamw"
    stochastic_rounding: bool = False
    preset: str = "tiny"
    out: str = "runs/a"
    keep: int = 2


SETTINGS = Settings(steps=10, lr=3e-3, warmup=3)
KINDS = {
    "fp32 adamw": SETTINGS,
    "fp32 tied, accumulated": replace(SETTINGS, preset="tiny-tied", accumulate=2),
    "bf16 adamw": replace(SETTINGS, dtype="bf16"),
    "bf16 stochastic": replace(SETTINGS, dtype="bf16", stochastic_rounding=True),
    "autocast": replace(SETTINGS, dtype="autocast"),
    "muon, wsd": replace(SETTINGS, optimizer="muon", schedule="wsd"),
    "bf16 muon": replace(SETTINGS, optimizer="muon", dtype="bf16"),
    "sgd": replace(SETTINGS, optimizer="sgd"),
}
EIGHT_BIT = {
    "8-bit adamw": replace(SETTINGS, optimizer="adamw8bit"),
    "8-bit bf16 stochastic": replace(SETTINGS, optimizer="adamw8bit", dtype="bf16", stochastic_rounding=True),
}


def build(settings: Settings, seed: int = 0):
    dtype = torch.bfloat16 if settings.dtype == "bf16" else torch.float32
    model = Transformer(ModelArgs.from_name(settings.preset)).init_weights(seed).to(dtype)
    if settings.optimizer == "adamw8bit":  # it compiles once a shape: two are enough, one quantized, one too small to be
        for name, p in model.named_parameters():
            p.requires_grad_(name in ("layers.1.feed_forward.w1.weight", "norm.weight"))
    model.layers[0].register_forward_hook(lambda m, i, out: torch.nn.functional.dropout(out, 0.1))  # uses torch's generator
    optimizer = build_optimizer(settings.optimizer, model, settings.lr, stochastic_rounding=settings.stochastic_rounding, seed=seed)
    return model, optimizer


def run(settings: Settings, run_dir: Path, save_at: tuple[int, ...] = (), stop: int | None = None, seed: int = 0) -> dict:
    """Train from the newest state, or from the start; returns what a straight and a resumed run must share."""
    torch.manual_seed(5)
    model, optimizer = build(settings, seed)
    found = newest_state(run_dir)
    start = load_state(found, model, optimizer, settings) if found else 0
    log = []
    for step in train_steps(model, optimizer, random_batch, settings, start, run_dir=run_dir):
        log.append((step.index, step.loss, step.lr, step.grad_norm))
        if step.index + 1 in save_at:
            save_state(run_dir, step.index + 1, model, optimizer, settings, settings.keep)
        if step.index + 1 == stop:
            break
    state = {name: value.clone() for name, value in weights(model).items()}
    for part in getattr(optimizer, "parts", (optimizer,)):
        for i, entries in part.state_dict()["state"].items():
            for key, value in entries.items():
                if hasattr(value, "__tensor_flatten__"):
                    state |= {f"{type(part)} {i} {key} {n}": getattr(value, n).clone() for n in value.__tensor_flatten__()[0]}
                else:
                    state[f"{type(part)} {i} {key}"] = value.clone()
    return {"log": log, "state": state, "random": torch.rand(3)}


def assert_same(resumed: dict, straight: dict) -> None:
    first = resumed["log"][0][0]
    assert resumed["log"] == straight["log"][first:]
    assert resumed["state"].keys() == straight["state"].keys()
    for name, value in straight["state"].items():
        assert torch.equal(resumed["state"][name], value) and resumed["state"][name].dtype == value.dtype, name
    assert torch.equal(resumed["random"], straight["random"])


def in_new_process(settings: Settings, run_dir: Path, answer: Path, threads: int) -> None:
    torch.set_num_threads(threads)
    torch.save(run(settings, run_dir, seed=1), answer)


def kill_worker(settings: Settings, run_dir: Path, answer: Path, threads: int) -> None:
    torch.set_num_threads(threads)
    torch.save(run(settings, run_dir, save_at=tuple(range(1, settings.steps + 1))), answer)


def spawn(target, *args) -> multiprocessing.Process:
    """A process that has this module and torch, forked from a clean server."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["test_resume"])
    process = context.Process(target=target, args=(*args, torch.get_num_threads()))
    process.start()
    return process


# --- bit-equal --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_resumed_is_straight(kind, tmp_path):
    settings = KINDS[kind]
    straight = run(settings, tmp_path / "none")
    run(settings, tmp_path / "run", save_at=(4,), stop=4)
    assert_same(run(settings, tmp_path / "run", seed=1), straight)  # seed 1: everything comes from the state


@pytest.mark.slow
@pytest.mark.parametrize("kind", EIGHT_BIT)
def test_resumed_is_straight_with_8_bit_moments(kind, tmp_path):
    settings = EIGHT_BIT[kind]
    straight = run(settings, tmp_path / "none")
    run(settings, tmp_path / "run", save_at=(4,), stop=4)
    resumed = run(settings, tmp_path / "run", seed=1)
    assert any(value.dtype == torch.uint8 for value in resumed["state"].values())
    assert_same(resumed, straight)


@pytest.mark.parametrize("kind", ["fp32 adamw", "bf16 stochastic"])
def test_resumed_in_a_new_process_is_straight(kind, tmp_path):
    settings = KINDS[kind]
    straight = run(settings, tmp_path / "none")
    run(settings, tmp_path / "run", save_at=(4,), stop=4)
    process = spawn(in_new_process, settings, tmp_path / "run", tmp_path / "answer.pt")
    process.join(60)
    assert process.exitcode == 0
    assert_same(torch.load(tmp_path / "answer.pt", weights_only=True), straight)


def test_saving_disturbs_nothing(tmp_path):
    assert_same(run(SETTINGS, tmp_path / "saved", save_at=(2, 5, 7)), run(SETTINGS, tmp_path / "none"))


def test_kill_at_any_moment_leaves_a_state_to_resume_from(tmp_path):
    settings = replace(SETTINGS, steps=40)
    straight = run(settings, tmp_path / "none")
    moments, kills, seen = random.Random(0), 0, None
    for _ in range(40):
        process = spawn(kill_worker, settings, tmp_path / "run", tmp_path / "answer.pt")
        while kills < 4 and process.is_alive() and newest_state(tmp_path / "run") == seen:
            time.sleep(0.001)  # until it has gone further than the one before
        process.join(moments.uniform(0, 0.05) if kills < 4 else 60)  # a step and its save take about 0.02 s
        if process.is_alive():
            os.kill(process.pid, signal.SIGKILL)
            process.join()
            kills += 1
        seen = newest_state(tmp_path / "run")
        if seen.name == "step-00000040":
            break
    assert kills >= 2, "the run was over before it could be killed"
    model, optimizer = build(settings, seed=1)
    assert load_state(seen, model, optimizer, settings) == 40
    assert all(torch.equal(value, straight["state"][name]) for name, value in weights(model).items())
    save_state(tmp_path / "run", 41, model, optimizer, settings)
    assert not list((tmp_path / "run" / "state").glob(".*"))  # what killed processes left is cleared away


# --- what is kept, and what is refused --------------------------------------------------------------------


def test_last_k_are_kept_and_steps_sort_as_numbers(tmp_path):
    model, optimizer = build(SETTINGS)
    assert newest_state(tmp_path) is None
    for step in (1, 2, 10, 9):
        save_state(tmp_path, step, model, optimizer, SETTINGS, keep=2)
    assert sorted(p.name for p in (tmp_path / "state").iterdir()) == ["step-00000009", "step-00000010"]
    assert newest_state(tmp_path).name == "step-00000010"
    with pytest.raises(UserError, match="keep must be at least 1"):
        save_state(tmp_path, 11, model, optimizer, SETTINGS, keep=0)


@pytest.mark.parametrize("preset", ["tiny", "tiny-tied"])
def test_a_state_is_a_model_that_loads(preset, tmp_path):
    model, optimizer = build(replace(SETTINGS, preset=preset, dtype="bf16"))
    loaded = load_model(save_state(tmp_path, 4, model, optimizer, SETTINGS))
    assert weights(loaded).keys() == weights(model).keys()
    assert all(torch.equal(a, b) and a.dtype == b.dtype for a, b in zip(weights(loaded).values(), weights(model).values()))


def test_a_states_files_can_be_read_by_those_who_may(tmp_path):
    """safetensors makes its files private; ours follow the umask."""
    model, optimizer = build(SETTINGS)
    before = os.umask(0o027)
    try:
        path = save_state(tmp_path, 1, model, optimizer, SETTINGS)
    finally:
        os.umask(before)
    assert {file.name: oct(file.stat().st_mode & 0o777) for file in path.iterdir()} == {file.name: "0o640" for file in path.iterdir()}
    assert path.stat().st_mode & 0o777 == 0o750


def test_a_failed_save_leaves_the_older_state(tmp_path, monkeypatch):
    model, optimizer = build(SETTINGS)
    good = save_state(tmp_path, 1, model, optimizer, SETTINGS, keep=1)
    monkeypatch.setattr("llamalab.train_state.versions", lambda: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        save_state(tmp_path, 2, model, optimizer, SETTINGS, keep=1)
    assert newest_state(tmp_path) == good and [p.name for p in good.parent.iterdir()] == [good.name]


@pytest.mark.parametrize(
    "change", [dict(lr=1e-3), dict(accumulate=2), dict(steps=20), dict(warmup=0), dict(optimizer="sgd"), dict(dtype="bf16")]
)
def test_settings_that_matter_may_not_change(change, tmp_path):
    model, optimizer = build(SETTINGS)
    path = save_state(tmp_path, 4, model, optimizer, SETTINGS)
    (name, value), before = next(iter(change.items())), [p.detach().clone() for p in model.parameters()]
    other = Transformer(model.config).init_weights(1)
    with pytest.raises(UserError, match=f"{name} was {asdict(SETTINGS)[name]!r} and is now {value!r}"):
        load_state(path, other, optimizer, replace(SETTINGS, **change))
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), before))


def test_settings_that_only_keep_or_watch_may_change(tmp_path):
    model, optimizer = build(SETTINGS)
    path = save_state(tmp_path, 4, model, optimizer, SETTINGS)
    assert load_state(path, model, optimizer, replace(SETTINGS, out="elsewhere", keep=5)) == 4
    constant = replace(SETTINGS, schedule="constant")
    path = save_state(tmp_path / "constant", 4, model, optimizer, constant)
    assert load_state(path, model, optimizer, replace(constant, steps=99)) == 4  # no rate depends on the last step


def test_another_model_or_optimizer_is_named(tmp_path):
    model, optimizer = build(SETTINGS)
    list(train_steps(model, optimizer, random_batch, replace(SETTINGS, steps=1, warmup=0)))
    path = save_state(tmp_path, 1, model, optimizer, SETTINGS)
    tied, tied_optimizer = build(replace(SETTINGS, preset="tiny-tied"))
    with pytest.raises(UserError, match=r"different tensors: output\.weight"):
        load_state(path, tied, tied_optimizer)
    with pytest.raises(UserError, match=r"is float32 \[.*, the model's is bfloat16"):
        load_state(path, *build(replace(SETTINGS, dtype="bf16")))
    with pytest.raises(UserError, match="saved with optimizer AdamW, not SGD"):
        load_state(path, model, build(replace(SETTINGS, optimizer="sgd"))[1])


@pytest.mark.parametrize("file", ["model.safetensors", "optimizer.safetensors", "rng.safetensors", "state.json"])
@pytest.mark.parametrize("damage", ["missing", "cut"])
def test_damage_is_found_before_anything_changes(file, damage, tmp_path):
    model, optimizer = build(SETTINGS)
    list(train_steps(model, optimizer, random_batch, replace(SETTINGS, steps=1, warmup=0)))
    path = save_state(tmp_path, 1, model, optimizer, SETTINGS)
    if damage == "missing":
        (path / file).unlink()
    else:
        (path / file).write_bytes((path / file).read_bytes()[:-40])
    other, other_optimizer = build(SETTINGS, seed=1)
    before = [p.detach().clone() for p in other.parameters()]
    with pytest.raises(UserError, match=str(path)):
        load_state(path, other, other_optimizer)
    assert all(torch.equal(a, b) for a, b in zip(other.parameters(), before)) and not other_optimizer.state


class Bomb:
    """Unpickling this writes a file."""

    def __init__(self, marker: Path) -> None:
        self.marker = str(marker)

    def __reduce__(self):
        return (open, (self.marker, "w"))


@pytest.mark.parametrize("file", ["model.safetensors", "optimizer.safetensors", "rng.safetensors", "state.json"])
def test_nothing_in_a_state_can_run_code(file, tmp_path):
    model, optimizer = build(SETTINGS)
    path = save_state(tmp_path, 1, model, optimizer, SETTINGS)
    marker = tmp_path / "marker"
    for payload in (pickle.dumps(Bomb(marker)), None):
        if payload is None:
            torch.save(Bomb(marker), path / file)
        else:
            (path / file).write_bytes(payload)
        with pytest.raises(UserError, match=str(path)):
            load_state(path, model, optimizer)
        assert not marker.exists()


def test_optimizer_entry_classes_are_a_closed_list(tmp_path):
    model, optimizer = build(SETTINGS)
    list(train_steps(model, optimizer, random_batch, replace(SETTINGS, steps=1, warmup=0)))
    path = save_state(tmp_path, 1, model, optimizer, SETTINGS)
    state = read_state(path)
    state["optimizer"]["state"]["norm.weight"] = {"exp_avg": {"quantized": "system", "parts": [], "attributes": []}}
    (path / "state.json").write_text(json.dumps(state))
    with pytest.raises(UserError, match="unknown kind 'system'"):
        load_state(path, model, optimizer)
