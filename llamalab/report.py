"""What a run shows and leaves: run directory, recipe.json, metrics.jsonl, loss.png, the progress line."""

from __future__ import annotations

import dataclasses
import json
import re
import shlex
import sys
import time
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.live import Live
from rich.text import Text

from llamalab.config import ModelArgs
from llamalab.errors import UserError
from llamalab.files import temporary_beside, write_atomic
from llamalab.runtime import git_commit, peak_memory, versions
from llamalab.train_state import refuse_changes

if TYPE_CHECKING:
    import torch

# --- run directory ----------------------------------------------------------------------------------------


def run_directory(recipe: str, config: Any, root: str | Path = "runs") -> Path:
    """Where a run goes: config.out, or the next free runs/<recipe>-<n>; with config.resume the run that is there, or the last one.

    Raises:
        UserError: a new run would go into a directory that holds something; there is no run to resume; or it had
            other settings, in what changes the result.
    """
    if config.resume:
        path = Path(config.out) if config.out else next(reversed(_numbered(recipe, root)), None)
        if path is None or not (path / "recipe.json").is_file():
            raise UserError(f"there is no run to resume: no recipe.json in {path or Path(root) / f'{recipe}-<n>'}")
        saved = json.loads((path / "recipe.json").read_text())
        try:
            refuse_changes(saved["config"], dataclasses.asdict(config), path)
        except UserError as error:
            where = "" if saved["config"]["out"] else f" --out {shlex.quote(str(path))}"
            raise UserError(f"{error}. Its command was: {saved['command']}{where} --resume") from None
        return path
    if config.out is None:
        last = [int(p.name.rpartition("-")[2]) for p in _numbered(recipe, root)[-1:]]
        return Path(root) / f"{recipe}-{sum(last) + 1}"
    path = Path(config.out)
    if path.exists() and (not path.is_dir() or any(path.iterdir())):
        raise UserError(f"{path} exists and is not an empty directory; choose another --out, or add --resume to go on with that run")
    return path


def _numbered(recipe: str, root: str | Path) -> list[Path]:
    found = [p for p in Path(root).glob(f"{recipe}-*") if re.fullmatch(r"\d+", p.name.removeprefix(f"{recipe}-"))]
    return sorted(found, key=lambda p: int(p.name.rpartition("-")[2]))


def command(verb: str, config: Any, **changes: Any) -> str:
    """The command line that gives this config: options that differ from the defaults, with `changes` made.

    Args:
        config: a recipe's Config, a dataclass whose options have the names of its fields.
    """
    words = ["llamalab", verb]
    for field in dataclasses.fields(config):
        value = changes.get(field.name, getattr(config, field.name))
        if value == field.default:
            continue
        flag = field.name.replace("_", "-")
        words += [f"--{flag}" if value else f"--no-{flag}"] if isinstance(value, bool) else [f"--{flag}", shlex.quote(str(value))]
    return " ".join(words)


def write_recipe(run_dir: Path, recipe: str, config: Any, model: ModelArgs, parameters: int, **more: Any) -> None:
    """recipe.json: every setting, the model's sizes, versions and commit; enough to run it again."""
    content = {
        "recipe": recipe,
        "command": command(recipe, config),
        "config": dataclasses.asdict(config),
        "model": {"parameters": parameters, **dataclasses.asdict(model)},
        "versions": versions(),
        "git_commit": git_commit(),
        "written": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        **more,
    }
    write_atomic(run_dir / "recipe.json", json.dumps(content, indent=2) + "\n")


# --- cost -------------------------------------------------------------------------------------------------


def train_flops_per_token(config: ModelArgs, seq_len: int) -> float:
    """Floating-point operations of forward and backward for one token: 6 per weight of a matrix it is multiplied
    with (the embedding is looked up, the head is multiplied), and causal attention's 6 * seq_len * heads * head_dim a
    layer, which counts only the half of the scores that is needed (arXiv:2204.02311, appendix B, halved)."""
    attention = config.head_dim * (2 * config.n_head + 2 * config.n_local_heads) * config.dim
    matrices = config.n_layer * (attention + 3 * config.dim * config.intermediate_size) + config.vocab_size * config.dim
    span = seq_len if config.sliding_window is None else min(seq_len, 2 * config.sliding_window)
    return 6.0 * matrices + 6.0 * config.n_layer * span * config.n_head * config.head_dim


# --- metrics ----------------------------------------------------------------------------------------------


def read_metrics(run_dir: str | Path) -> list[dict[str, Any]]:
    """metrics.jsonl, one dict a line; an unfinished last line (a killed process) is left out."""
    path = Path(run_dir) / "metrics.jsonl"
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    return [json.loads(line) for line in lines if line.endswith("\n")]


class Report:
    """Metrics and progress of one run, as a context manager around its loop.

    metrics.jsonl gets one JSON object a step, written as it happens; a resumed run first drops the lines of steps
    it will do again. The progress line is live on a terminal; elsewhere a line is printed now and then.

    Args:
        done: steps done before (where a resumed run goes on).
        steps: of the whole run.
        flops_per_token: for the GFLOP/s shown; 0 shows none.
        device: whose peak memory is shown.
        every: seconds between lines where standard error is not a terminal.
    """

    def __init__(
        self, run_dir: Path, steps: int, device: torch.device, done: int = 0, flops_per_token: float = 0.0, every: float = 10.0
    ) -> None:
        self.run_dir, self.steps, self.first, self.device = run_dir, steps, done, device
        self.flops_per_token, self.every = flops_per_token, every
        self.skipped = 0
        self.seconds = 0.0  # in training steps
        self._shown: dict[str, Any] = {}
        self._speed = 0.0
        self._printed = self._began = time.monotonic()
        kept = [line for line in read_metrics(run_dir) if line["step"] <= done]
        write_atomic(run_dir / "metrics.jsonl", "".join(json.dumps(line) + "\n" for line in kept))
        for line in kept:
            self._shown |= line
        self._console = Console(stderr=True, highlight=False)
        self._live = Live(console=self._console, auto_refresh=False, redirect_stdout=False) if self._console.is_terminal else None

    def __enter__(self) -> Report:
        self._file = open(self.run_dir / "metrics.jsonl", "a", encoding="utf-8")
        if self._live:
            self._live.start()
        return self

    def __exit__(self, *error: object) -> None:
        if self._live:
            self._live.update(Text(self.line()), refresh=True)
            self._live.stop()
        self._file.close()

    def step(self, step: Any, **more: float | None) -> None:
        """Record a train.Step, and what else was measured after it (val_loss, bits_per_byte, ...)."""
        entry = {"step": step.index + 1, "loss": step.loss, "lr": step.lr, "grad_norm": step.grad_norm,
                 "tokens": step.tokens, "seconds": step.seconds, **more}
        if step.skipped:
            self.skipped += 1
            entry["skipped"] = True
        self._file.write(json.dumps(entry) + "\n")
        self._file.flush()
        self._shown |= {k: v for k, v in entry.items() if v is not None}
        self.seconds += step.seconds
        speed = step.tokens / max(step.seconds, 1e-9)
        self._speed = speed if step.index <= self.first + 1 else 0.9 * self._speed + 0.1 * speed  # the first step compiles
        self._refresh(important=bool(more) or entry["step"] == self.steps)

    def before_training(self, measured: dict[str, float]) -> None:
        """Record what a checkpoint scores before its first step, as step 0."""
        entry = {"step": 0, **measured}
        self._file.write(json.dumps(entry) + "\n")
        self._file.flush()
        self._shown |= entry
        self._refresh(important=True)

    def say(self, text: str) -> None:
        """Print to standard error, above the progress line."""
        self._console.print(text, markup=False, soft_wrap=True)

    def line(self) -> str:
        """The progress line."""
        done, shown = self._shown.get("step", self.first), self._shown
        parts = [f"step {done}/{self.steps}"]
        if "loss" in shown:
            parts.append(f"loss {shown['loss']:.3f}")
        if "val_loss" in shown:
            bits = f" ({shown['bits_per_byte']:.3f} bits/byte)" if "bits_per_byte" in shown else ""
            parts.append(f"val {shown['val_loss']:.3f}{bits}")
        if self._speed:
            parts.append(f"{self._speed:,.0f} tok/s")
            if self.flops_per_token:
                parts.append(f"{self._speed * self.flops_per_token / 1e9:,.0f} GFLOP/s")
        parts.append(f"{peak_memory(self.device) / 2**20:,.0f} MiB")
        if done > self.first:
            left = (time.monotonic() - self._began) / (done - self.first) * (self.steps - done)
            parts.append(f"{int(left) // 60}:{int(left) % 60:02d} left")
        if self.skipped:
            parts.append(f"{self.skipped} steps without a trained token")
        return " | ".join(parts)

    def summary(self) -> str:
        """One line for the end: steps, time, and the last validation."""
        seconds, shown = int(time.monotonic() - self._began), self._shown
        parts = [f"{shown.get('step', self.first)} steps; {seconds // 60}:{seconds % 60:02d} since start or resume"]
        if "val_loss" in shown:
            parts.append(f"validation loss {shown['val_loss']:.3f} nats per token, {shown['bits_per_byte']:.3f} bits per byte")
        if self.skipped:
            parts.append(f"{self.skipped} steps had no trained token and were skipped")
        return "; ".join(parts)

    def _refresh(self, important: bool) -> None:
        now = time.monotonic()
        if self._live:
            if important or now - self._printed > 0.1:
                self._live.update(Text(self.line()), refresh=True)
                self._printed = now
        elif important or now - self._printed > self.every:
            print(self.line(), file=sys.stderr, flush=True)
            self._printed = now


# --- plot -------------------------------------------------------------------------------------------------


def plot_loss(run_dir: Path, title: str) -> Path:
    """loss.png from metrics.jsonl: training loss, each step and smoothed, and validation loss."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    metrics = read_metrics(run_dir)
    train = [(m["step"], m["loss"]) for m in metrics if m.get("loss") is not None]
    validation = [(m["step"], m["val_loss"]) for m in metrics if m.get("val_loss") is not None]
    figure, axes = pyplot.subplots(figsize=(8, 5), layout="constrained")
    if train:
        steps, losses = zip(*train)
        axes.plot(steps, losses, color="tab:blue", alpha=0.25, linewidth=0.8)
        axes.plot(steps, smoothed(losses), color="tab:blue", label="training (running mean)")
    if validation:
        axes.plot(*zip(*validation), color="tab:orange", marker="o", markersize=4, label="validation")
        last = validation[-1]
        axes.annotate(f"{last[1]:.3f}", last, xytext=(0, 8), textcoords="offset points", ha="right", color="tab:orange",
                      bbox={"facecolor": "white", "edgecolor": "none", "alpha": 0.8, "pad": 1})
    axes.set(xlabel="optimizer step", ylabel="loss (nats per token)", title=title)
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.grid(alpha=0.3)
    if train or validation:
        axes.legend()
    with temporary_beside(run_dir / "loss.png") as tmp:
        figure.savefig(tmp, format="png", dpi=120)
    pyplot.close(figure)
    return run_dir / "loss.png"


def smoothed(values: tuple[float, ...] | list[float], share: float = 0.02) -> list[float]:
    """Mean of the last `share` of the run, or of the last 10 values, up to each value."""
    window = max(1, int(share * len(values)), min(10, len(values) // 4))  # in a short run a fiftieth smooths nothing
    out, total = [], 0.0
    for i, value in enumerate(values):
        total += value - (values[i - window] if i >= window else 0.0)
        out.append(total / min(i + 1, window))
    return out
