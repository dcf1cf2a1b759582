"""Run `llamalab pretrain` and nanoGPT's CPU recipe on the same text for the same wall time, and compare bits per byte.

    git clone https://github.com/karpathy/nanoGPT
    python scripts/beside_nanogpt.py nanoGPT

nanoGPT gets its README's CPU settings (character level, 4 layers, 4 heads, 128 dim, context 64, batch 12, no dropout) on
our training part, its rate decaying over as many iterations as fit into the time that our run took, start to end. Its
validation loss over 200 batches of our held-out part, in nats a character, is bits per byte times ln 2: the text is ASCII.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import pickle
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

from llamalab.corpus import embedded_corpus, split_corpus

SETTINGS = {
    "device": "cpu", "compile": False, "log_interval": 10, "block_size": 64, "batch_size": 12, "n_layer": 4, "n_head": 4,
    "n_embd": 128, "dropout": 0.0, "always_save_checkpoint": False,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("nanogpt", type=Path, help="a checkout of nanoGPT")
    parser.add_argument("--threads", type=int, default=2, help="CPU threads for both")
    options = parser.parse_args()
    env = os.environ | {"OMP_NUM_THREADS": str(options.threads)}
    with tempfile.TemporaryDirectory() as folder:
        ours, seconds = our_run(Path(folder), env)
        write_characters(options.nanogpt / "data" / "llamalab_corpus")
        probe = [their_run(options.nanogpt, Path(folder), env, n)[1] for n in (200, 500)]
        start, each = probe[0], (probe[1] - probe[0]) / 300
        iterations = int(200 + (seconds - start) / each)
        loss, their_seconds = their_run(options.nanogpt, Path(folder), env, iterations)
    theirs = loss / math.log(2)
    print(f"llamalab pretrain: {ours:.3f} bits per byte in {seconds:.0f} s")
    print(f"nanoGPT, {iterations} iterations: {theirs:.3f} bits per byte in {their_seconds:.0f} s")
    print(f"ratio {ours / theirs:.3f}, {options.threads} threads")


def our_run(folder: Path, env: dict[str, str]) -> tuple[float, float]:
    """Bits per byte and wall seconds of the main job."""
    began = time.perf_counter()
    subprocess.run([sys.executable, "-m", "llamalab", "pretrain", "--out", str(folder / "run")], env=env, check=True)
    seconds = time.perf_counter() - began
    rows = [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]
    return [row["bits_per_byte"] for row in rows if row.get("bits_per_byte")][-1], seconds


def write_characters(folder: Path) -> None:
    """The two parts of the embedded text as nanoGPT's character-level data set."""
    folder.mkdir(parents=True, exist_ok=True)
    characters = sorted(set(embedded_corpus()))
    ids = {c: i for i, c in enumerate(characters)}
    for name, text in zip(("train", "val"), split_corpus(embedded_corpus())):
        np.array([ids[c] for c in text], dtype=np.uint16).tofile(folder / f"{name}.bin")
    (folder / "meta.pkl").write_bytes(pickle.dumps({"vocab_size": len(characters), "stoi": ids, "itos": dict(enumerate(characters))}))


def their_run(checkout: Path, folder: Path, env: dict[str, str], iterations: int) -> tuple[float, float]:
    """Last validation loss (nats a character) and wall seconds of nanoGPT."""
    flags = SETTINGS | {
        "dataset": "llamalab_corpus", "out_dir": str(folder / "nanogpt"), "max_iters": iterations, "lr_decay_iters": iterations,
        "eval_interval": iterations, "eval_iters": 200 if iterations > 500 else 1,
    }
    command = [sys.executable, "train.py", "config/train_shakespeare_char.py", *(f"--{k}={v}" for k, v in flags.items())]
    began = time.perf_counter()
    run = subprocess.run(command, cwd=checkout, env=env, check=True, capture_output=True, text=True)
    return float(re.findall(r"val loss ([\d.]+)", run.stdout)[-1]), time.perf_counter() - began


if __name__ == "__main__":
    main()
