"""Measure training or generation beside transformers, in one run.

    llamalab bench train                      # SmolLM2-135M's shape, bf16, 4 x 512 tokens
    llamalab bench generate --max-new-tokens 64

Contenders run in processes of their own and take turns; the table gives medians over the rounds, and ratios
to the best peer taken round by round. Weights are random: speed and memory don't depend on them.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Literal

import tyro


@dataclass
class Config:
    kind: tyro.conf.Positional[Literal["train", "generate"]]
    """What to measure."""
    model: str = "SmolLM2-135M"
    """Name of a preset; its sizes are what counts."""
    contenders: str = "all"
    """Comma-separated names, or all: train has llamalab, llamalab-checkpointed, llamalab-eager, transformers, transformers-compiled."""
    batch: int | None = None
    """Rows; default 4 for train, 1 for generate."""
    seq_len: int | None = None
    """Tokens a row (train, default 512) or prompt tokens (generate, default 128)."""
    max_new_tokens: int = 128
    """Tokens to generate a round."""
    steps: int = 1
    """Optimizer steps a round (train)."""
    rounds: int = 5
    """How often each contender is measured, after its first, cold round."""
    dtype: str = "bfloat16"
    """Weights and arithmetic: bfloat16 or float32."""
    device: str = "auto"
    """auto, cpu, cuda."""
    threads: int | None = None
    """CPU threads of each contender; default: all this process may use."""
    seed: int = 0
    """Seed of weights and tokens."""
    json: str | None = None
    """Also write every measurement to this file."""


def main(cfg: Config) -> None:
    from rich.console import Console

    from llamalab import bench, files, runtime
    from llamalab.config import ModelArgs

    train = cfg.kind == "train"
    names = choose_contenders(cfg, list(bench.CONTENDERS[cfg.kind]))
    args = ModelArgs.from_name(cfg.model)
    work = bench.Workload(
        cfg.kind, cfg.model, str(runtime.pick_dtype(cfg.dtype)).removeprefix("torch."), str(runtime.pick_device(cfg.device)),
        runtime.set_threads() if cfg.threads is None else cfg.threads,
        (4 if train else 1) if cfg.batch is None else cfg.batch, (512 if train else 128) if cfg.seq_len is None else cfg.seq_len,
        cfg.steps if train else cfg.max_new_tokens, cfg.seed,
    )
    check_sizes(cfg, work, args)
    console = Console()
    workers = {name: bench.Worker(name, work) for name in names}
    cold, rounds = {}, {name: [] for name in names}
    try:
        for name, worker in workers.items():
            with console.status(f"{name}: first round (imports, weights, compile)"):
                cold[name] = worker.ask("start")
        for i in range(cfg.rounds):
            for name, worker in workers.items():
                with console.status(f"round {i + 1} of {cfg.rounds}: {name}"):
                    answer = worker.ask("round")
                if train:
                    answer["tok/s"] = work.batch * work.seq_len * work.steps / answer["seconds"]
                rounds[name].append(answer)
    finally:
        for worker in workers.values():
            worker.close()

    print_table(console, cfg, work, cold, rounds)
    versions = runtime.versions() | {"threads": str(work.threads)}
    console.print(", ".join(f"{k} {v}" for k, v in versions.items()), highlight=False)
    if cfg.json:
        record = {"workload": asdict(work), "versions": versions, "cold": cold, "rounds": rounds}
        files.write_atomic(Path(cfg.json), json.dumps(record, indent=1))


def choose_contenders(cfg: Config, known: list[str]) -> list[str]:
    """The contenders asked for; an unknown one is refused with the list."""
    from llamalab.errors import UserError

    names = known if cfg.contenders == "all" else [name.strip() for name in cfg.contenders.split(",")]
    unknown = [name for name in names if name not in known]
    if unknown or not names:
        raise UserError(f"unknown contender {', '.join(unknown) or repr(cfg.contenders)}; for {cfg.kind}: {', '.join(known)}")
    return names


def check_sizes(cfg: Config, work, args) -> None:
    """Refuse what cannot run before any process is started."""
    from llamalab.errors import UserError

    if work.dtype not in ("bfloat16", "float32"):
        raise UserError(f"bench runs bfloat16 or float32, got {cfg.dtype}")
    for name in ("batch", "seq_len", "steps", "threads"):
        if getattr(work, name) < 1:
            flag = "max-new-tokens" if name == "steps" and cfg.kind == "generate" else name.replace("_", "-")
            raise UserError(f"--{flag} must be at least 1, got {getattr(work, name)}")
    if cfg.rounds < 1:
        raise UserError(f"--rounds must be at least 1, got {cfg.rounds}")
    need = work.seq_len if cfg.kind == "train" else work.seq_len + work.steps
    if args.max_length is not None and need > args.max_length:
        raise UserError(f"{need} tokens a row, but {cfg.model} takes {args.max_length}")


def print_table(console, cfg: Config, work, cold: dict, rounds: dict) -> None:
    """Medians, and ratios to the best peer of the same round."""
    from rich.table import Table

    speed = "tok/s" if cfg.kind == "train" else "total tok/s"
    middle = {name: {key: median(r[key] for r in rows if key in r) for key in rows[0]} for name, rows in rounds.items()}
    peers = [name for name in rounds if not name.startswith("llamalab")]
    best = max(peers, key=lambda name: middle[name][speed]) if peers else None
    eager = "transformers" if "transformers" in rounds else None
    columns = [speed] if cfg.kind == "train" else [speed, "decode tok/s", "first token s"]
    what = "optimizer steps" if cfg.kind == "train" else "new tokens"
    table = Table(title=f"{cfg.kind} {cfg.model}: {work.dtype}, {work.batch} x {work.seq_len} tokens, {work.steps} {what} a round, "
                        f"{work.threads} threads, medians of {cfg.rounds} rounds")
    table.add_column("contender", no_wrap=True)
    for column in [*columns, "ratio", "peak MiB", "ratio", "first round s"]:
        table.add_column(column, justify="right")
    for name, rows in rounds.items():
        m = middle[name]
        fast = median(a[speed] / b[speed] for a, b in zip(rows, rounds[best], strict=True)) if best else None
        small = median(a["peak bytes"] / b["peak bytes"] for a, b in zip(rows, rounds[eager], strict=True)) if eager else None
        speeds = ["-" if c not in m else f"{m[c]:.0f}" if m[c] >= 1000 else f"{m[c]:.2f}" for c in columns]
        table.add_row(
            name, *speeds, f"{fast:.2f}" if fast else "-", f"{m['peak bytes'] / 2**20:.0f}",
            f"{small:.2f}" if small else "-", f"{cold[name]['seconds']:.1f}",
        )
    console.print(table)
    if best:
        console.print(f"ratios: {speed} over {best}" + (f", peak MiB over {eager}" if eager else ""), highlight=False)


if __name__ == "__main__":
    main(tyro.cli(Config))
