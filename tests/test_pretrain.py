"""`llamalab pretrain` as a user meets it: what it leaves, stopping, resuming, mistakes."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch

from llamalab import cli
from llamalab.checkpoint import load_model, local_path
from llamalab.config import ModelArgs
from llamalab.errors import UserError
from llamalab.recipes import pretrain
from llamalab.recipes.pretrain import Config
from llamalab.report import Report, command, read_metrics, run_directory, smoothed, train_flops_per_token
from llamalab.tokenizer import load_tokenizer
from llamalab.train import Step
from llamalab.train_state import newest_state

SMALL = Config(
    n_layer=1, n_head=2, n_local_heads=1, dim=16, intermediate_size=32, steps=6, batch=2, seq_len=16, lr=1e-2, optimizer="adamw",
    eval_every=3, eval_tokens=200, sample_tokens=5, save_every=2, device="cpu",
)


def weights_of(run_dir: Path) -> dict[str, torch.Tensor]:
    return load_model(run_dir).state_dict()


def same_weights(a: Path, b: Path) -> bool:
    one, other = weights_of(a), weights_of(b)
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def losses(run_dir: Path) -> list[tuple]:
    return [(m["step"], m["loss"], m["lr"], m["grad_norm"], m.get("val_loss")) for m in read_metrics(run_dir)]


@pytest.fixture(scope="module")
def straight(tmp_path_factory) -> Path:
    """A finished run."""
    run_dir = tmp_path_factory.mktemp("straight") / "run"
    pretrain.main(replace(SMALL, out=str(run_dir)))
    return run_dir


# --- what a run leaves ------------------------------------------------------------------------------------


def test_a_run_directory_holds_what_is_promised(straight):
    promised = {"model.safetensors", "config.json", "tokenizer.json", "recipe.json", "metrics.jsonl", "loss.png", "sample.txt", "state"}
    assert {p.name for p in straight.iterdir()} >= promised
    assert (straight / "loss.png").read_bytes().startswith(b"\x89PNG")
    assert (straight / "sample.txt").read_text().startswith("It is")
    assert newest_state(straight).name == "step-00000006" and len(list((straight / "state").iterdir())) == 2
    recipe = json.loads((straight / "recipe.json").read_text())
    assert recipe["config"] == asdict(replace(SMALL, out=str(straight), warmup=0))
    assert recipe["model"]["parameters"] == sum(p.numel() for p in load_model(straight).parameters())
    assert recipe["versions"]["torch"] == torch.__version__ and "git_commit" in recipe
    assert load_tokenizer(straight).decode(load_tokenizer(straight).encode("It is")) == "It is"


def test_metrics_have_every_step_once_and_validation_in_between(straight):
    metrics = read_metrics(straight)
    assert [m["step"] for m in metrics] == [1, 2, 3, 4, 5, 6]
    assert [m["step"] for m in metrics if "val_loss" in m] == [3, 6]
    assert all(m["tokens"] == 32 and m["loss"] > 0 and m["seconds"] > 0 for m in metrics)
    # tokens of English are about 4 bytes each
    assert 3 < metrics[-1]["val_loss"] / 0.6931 / metrics[-1]["bits_per_byte"] < 5


def test_the_commands_to_try_next_work(tmp_path, monkeypatch, capsys):
    """Also with a directory that needs quoting, a prompt with a quote, and a model whose limit is below generate's default."""
    import shlex

    monkeypatch.chdir(tmp_path)
    pretrain.main(replace(SMALL, out="my runs", prompt="It's"))
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("  llamalab ")]
    assert len(lines) == 3
    for line in lines[:2]:
        assert cli.main(shlex.split(line)[1:]) == 0
    assert shlex.split(lines[2])[:4] == ["llamalab", "pretrain", "--model", "my runs"]


def test_a_run_that_was_cut_names_its_state(tmp_path):
    (tmp_path / "state" / "step-00000002").mkdir(parents=True)
    with pytest.raises(UserError, match=r"take a state of it, such as .*step-00000002, or --resume it"):
        local_path(tmp_path)


def test_transformers_loads_the_run_directory(straight):
    from transformers import AutoModelForCausalLM

    theirs, ours = AutoModelForCausalLM.from_pretrained(straight, dtype=torch.float32), load_model(straight)
    idx = torch.arange(12)[None]
    torch.testing.assert_close(theirs(idx).logits, ours(idx), rtol=1e-4, atol=1e-5)  # float32, operations in another order


def test_the_end_names_three_commands(tmp_path, capsys):
    pretrain.main(replace(SMALL, steps=1, out=str(tmp_path / "run")))
    out = capsys.readouterr()
    commands = re.findall(r"^  llamalab (\w+) ", out.out, re.M)
    assert commands == ["generate", "evaluate", "pretrain"] and "bits per byte" in out.out and "It is" in out.out
    assert "step 1/1 | loss" in out.err and "tok/s" in out.err  # progress, plain because this is no terminal


@pytest.mark.parametrize(
    "change",
    [
        dict(dtype="bf16", stochastic_rounding=True),
        dict(dtype="autocast", accumulate=2),
        dict(optimizer="muon", schedule="wsd", decay_fraction=0.5),
        dict(checkpoint_activations=True, clip=0.0, sample_every=1),
        dict(tokenizer="bytes", schedule="constant"),
    ],
)
def test_options_run(change, tmp_path):
    cfg = replace(SMALL, steps=2, out=str(tmp_path / "run"), **change)
    pretrain.main(cfg)
    assert len(read_metrics(tmp_path / "run")) == 2
    assert next(load_model(tmp_path / "run").parameters()).dtype == (torch.bfloat16 if cfg.dtype == "bf16" else torch.float32)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_compiled_run_is_the_eager_one_but_for_rounding(dtype, tmp_path):
    for name, compile in (("eager", False), ("compiled", True)):
        pretrain.main(replace(SMALL, dtype=dtype, compile=compile, sample_every=2, out=str(tmp_path / name)))
    eager, compiled = read_metrics(tmp_path / "eager"), read_metrics(tmp_path / "compiled")
    # fused operations round elsewhere: 2^-24 or 2^-9 an operation, grown by a few steps at a rate of 1e-2
    assert [m["loss"] for m in compiled] == pytest.approx([m["loss"] for m in eager], rel=1e-4 if dtype == "fp32" else 2e-2)


def test_training_learns_text(tmp_path):
    (tmp_path / "a.txt").write_text("the cat sat on the mat. " * 400)
    cfg = replace(SMALL, data=str(tmp_path / "a.txt"), tokenizer="bytes", out=str(tmp_path / "run"))
    pretrain.main(replace(cfg, steps=100, batch=8, lr=2e-2, eval_every=100))
    metrics = read_metrics(tmp_path / "run")
    assert metrics[0]["loss"] > 5 and metrics[-1]["val_loss"] < 1 and metrics[-1]["bits_per_byte"] < 1.5


def test_own_data_goes_on_from_a_model_directory(straight, tmp_path):
    (tmp_path / "a.txt").write_text("It was a dark and stormy night. " * 200)
    (tmp_path / "b.txt").write_text("It was a bright and sunny day. " * 50)
    cfg = replace(SMALL, data=str(tmp_path / "a.txt"), val_data=str(tmp_path / "b.txt"), out=str(tmp_path / "run"), steps=20)
    own_sizes = {name: getattr(Config, name) for name in ("n_layer", "n_head", "n_local_heads", "dim", "intermediate_size")}
    cfg = replace(cfg, model=str(straight), **own_sizes)
    pretrain.main(cfg)
    metrics = read_metrics(tmp_path / "run")
    assert [m["step"] for m in metrics] == list(range(21)) and "loss" not in metrics[0]  # step 0: the checkpoint as it came
    assert metrics[1]["loss"] < 8.31 and metrics[-1]["val_loss"] < metrics[0]["val_loss"]
    assert len(list((tmp_path / "tokens").glob("*.tokens"))) == 2  # prepared once, beside the runs


# --- stopping and resuming --------------------------------------------------------------------------------


def start(cfg: Config) -> subprocess.Popen:
    line = command("pretrain", cfg).split()[1:]
    return subprocess.Popen([sys.executable, "-m", "llamalab", *line], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def wait_for_step(run_dir: Path, step: int, process: subprocess.Popen) -> None:
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline and process.poll() is None:
        if len(read_metrics(run_dir)) >= step:
            return
        time.sleep(0.005)
    raise AssertionError(f"the run never came to step {step}: {process.communicate()}")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_stopped_by_a_signal_and_resumed_is_straight(number, tmp_path):
    steps = 150
    cfg = replace(SMALL, steps=steps, eval_every=60, save_every=60, out=str(tmp_path / "run"))
    process = start(cfg)
    wait_for_step(tmp_path / "run", 3, process)
    process.send_signal(number)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 0 and "Traceback" not in err
    stopped = newest_state(tmp_path / "run")
    done = int(stopped.name.removeprefix("step-"))
    assert 3 <= done < steps and [m["step"] for m in read_metrics(tmp_path / "run")] == list(range(1, done + 1))
    assert load_model(tmp_path / "run").config.dim == 16  # what it has learnt so far can be used
    line = re.search(r"^  (llamalab pretrain .*)$", out, re.M)[1]
    assert line.endswith("--resume")
    assert cli.main(line.split()[1:]) == 0
    pretrain.main(replace(cfg, out=str(tmp_path / "straight")))
    assert losses(tmp_path / "run") == losses(tmp_path / "straight")
    assert same_weights(tmp_path / "run", tmp_path / "straight")


def test_killed_and_resumed_is_straight(straight, tmp_path):
    process = start(replace(SMALL, out=str(tmp_path / "run")))
    wait_for_step(tmp_path / "run", 3, process)
    os.kill(process.pid, signal.SIGKILL)
    process.communicate()
    with open(tmp_path / "run" / "metrics.jsonl", "a") as file:
        file.write('{"step": 4, "lo')  # as a kill within a write leaves it
    pretrain.main(replace(SMALL, out=str(tmp_path / "run"), resume=True))
    assert losses(tmp_path / "run") == losses(straight) and same_weights(tmp_path / "run", straight)


def test_killed_before_the_first_state_starts_anew(straight, tmp_path):
    pretrain.main(replace(SMALL, out=str(tmp_path / "run")))
    for state in (tmp_path / "run" / "state").iterdir():
        state.rename(tmp_path / state.name)
    pretrain.main(replace(SMALL, out=str(tmp_path / "run"), resume=True))
    assert losses(tmp_path / "run") == losses(straight) and same_weights(tmp_path / "run", straight)


def test_other_text_is_not_resumed_on(tmp_path):
    """A23: the settings name a file, and what is in it may have changed."""
    text = tmp_path / "my.txt"
    text.write_text("Some words, and then some more of them. " * 30)
    cfg = replace(SMALL, data=str(text), out=str(tmp_path / "run"))
    pretrain.main(cfg)
    text.write_text(text.read_text().replace("more", "less", 1))
    with pytest.raises(UserError, match=r"cannot resume .*digest of the text was"):
        pretrain.main(replace(cfg, resume=True))


def test_killed_after_the_last_step_finishes_the_directory(straight, tmp_path):
    pretrain.main(replace(SMALL, out=str(tmp_path / "run")))
    for name in ("model.safetensors", "sample.txt", "loss.png"):
        (tmp_path / "run" / name).unlink()
    pretrain.main(replace(SMALL, out=str(tmp_path / "run"), resume=True))
    assert same_weights(tmp_path / "run", straight)
    assert (tmp_path / "run" / "sample.txt").read_text() == (straight / "sample.txt").read_text()


def test_watching_more_changes_nothing(straight, tmp_path):
    pretrain.main(replace(SMALL, eval_every=1, sample_every=1, save_every=1, out=str(tmp_path / "run")))
    assert same_weights(tmp_path / "run", straight)
    assert [m[:4] for m in losses(tmp_path / "run")] == [m[:4] for m in losses(straight)]


def test_divergence_names_the_last_good_state_and_saves_nothing_bad(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    args = command("pretrain", replace(SMALL, lr=1e30, schedule="constant", clip=0.0, save_every=1)).split()[1:]
    assert cli.main(args) == 2
    err = capsys.readouterr().err
    good = newest_state(tmp_path / "runs" / "pretrain-1")
    assert re.search(r"^error: training diverged at step \d+: loss", err, re.M) and good.name in err
    assert all(t.isfinite().all() for t in weights_of(good).values())
    assert not (tmp_path / "runs" / "pretrain-1" / "model.safetensors").exists()


# --- mistakes ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (dict(steps=0), "steps must be at least 1"),
        (dict(warmup=7), "warmup must be between 0 and steps"),
        (dict(batch=0), "batch must be at least 1"),
        (dict(seq_len=10**6), "too few for a window of seq_len 1000000"),
        (dict(n_local_heads=3), "n_head 2 is not a multiple of n_local_heads 3"),
        (dict(model="tiny"), "--model tiny has its own sizes; leave out n_layer, n_head, n_local_heads, dim, intermediate_size"),
        (dict(data="no-such-file.txt"), "no-such-file.txt"),
        (dict(device="cuda:99"), "device 'cuda:99' cannot be used here"),
        (dict(device="abacus"), "expected cpu, cuda, cuda:N or mps"),
        (dict(model="tinny"), "no preset (CodeLlama"),
        (dict(sample_every=-1), "sample_every must be at least 0"),
        (dict(sample_tokens=-1), "sample_tokens must be at least 0"),
        (dict(weight_decay=-0.1), "weight_decay must be a number >= 0"),
        (dict(beta2=1.5), "beta2 must be in [0, 1)"),
        (dict(optimizer="sgd", beta2=0.9), "sgd has none"),
        (dict(decay_fraction=0.5), "decay_fraction is of the schedule wsd"),
        (dict(schedule="constant", min_lr=1e-5), "constant does not"),
        (dict(eval_tokens=1), "too few to validate on"),
        (dict(eval_every=0), "eval_every must be at least 1"),
        (dict(save_every=0), "save_every must be at least 1"),
        (dict(keep=0), "keep must be at least 1"),
        (dict(stochastic_rounding=True), "stochastic rounding is for bf16 weights"),
        (dict(prompt="It is" * 20), "the model's limit is 16 tokens"),
        (dict(resume=True), "there is no run to resume"),
    ],
)
def test_mistakes_are_refused_before_anything_is_written(change, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match=re.escape(message)):
        pretrain.main(replace(SMALL, **change))
    assert list(tmp_path.iterdir()) == []


def test_an_old_run_is_not_overwritten(straight):
    with pytest.raises(UserError, match="exists and is not an empty directory"):
        pretrain.main(replace(SMALL, out=str(straight)))
    with pytest.raises(UserError, match=r"lr was 0\.01 and is now 0\.02"):
        pretrain.main(replace(SMALL, out=str(straight), lr=0.02, resume=True))
    with pytest.raises(UserError, match=re.escape(json.loads((straight / "recipe.json").read_text())["command"]) + " --resume$"):
        pretrain.main(replace(SMALL, out=str(straight), lr=0.02, resume=True))


# --- report -----------------------------------------------------------------------------------------------


def test_run_directories_are_numbered(tmp_path):
    assert run_directory("pretrain", SMALL, tmp_path) == tmp_path / "pretrain-1"
    for name in ("pretrain-1", "pretrain-9", "pretrain-10", "pretrain-x", "finetune-30"):
        (tmp_path / name).mkdir()
    assert run_directory("pretrain", SMALL, tmp_path) == tmp_path / "pretrain-11"
    (tmp_path / "pretrain-10" / "recipe.json").write_text(json.dumps({"config": asdict(SMALL)}))
    assert run_directory("pretrain", replace(SMALL, resume=True), tmp_path) == tmp_path / "pretrain-10"


def test_the_command_of_a_config_gives_the_config():
    import tyro

    cfg = replace(SMALL, out="a b", compile=True, model="x", prompt="It's", warmup=3)
    import shlex

    assert tyro.cli(Config, args=shlex.split(command("pretrain", cfg))[2:]) == cfg
    assert command("pretrain", Config()) == "llamalab pretrain"


def test_metrics_are_there_as_they_happen_and_cut_on_resume(tmp_path):
    report = Report(tmp_path, 5, torch.device("cpu"))
    with report:
        for i in range(4):
            report.step(Step(i, 1.0, 0.1, 2.0, 10, 0.1))
            assert read_metrics(tmp_path)[-1]["step"] == i + 1
        report.step(Step(4, None, 0.1, None, 0, 0.1, skipped=True))
    assert read_metrics(tmp_path)[-1]["skipped"] and "1 steps without a trained token" in report.line()
    Report(tmp_path, 5, torch.device("cpu"), done=2)
    assert [m["step"] for m in read_metrics(tmp_path)] == [1, 2]


def test_flops_count_what_is_multiplied():
    args = ModelArgs(n_layer=2, dim=8, n_head=4, n_local_heads=2, head_dim=6, intermediate_size=10, vocab_size=11, block_size=32)
    matrices = 2 * (8 * (4 + 2 + 2) * 6 + 4 * 6 * 8 + 3 * 8 * 10) + 11 * 8
    # forward and backward of attention: 3 * 2 products of 2 operations over on average half of 32 keys, all heads
    assert train_flops_per_token(args, 32) == 6 * matrices + 2 * 12 * (32 / 2) * 4 * 6


def test_smoothing_is_a_running_mean():
    assert smoothed([1.0, 2.0, 3.0, 4.0], share=0.5) == [1.0, 1.5, 2.5, 3.5]
