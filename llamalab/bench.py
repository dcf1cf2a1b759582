"""Timing ourselves beside peers: the contenders of `llamalab bench`, each in a process of its own.

A contender is a function that sets up and returns a `round`: called again and again, it does a fixed amount
of work and returns its measurements. The parent starts one process per contender and lets them take turns,
A B C A B C ..., so that a machine that slows down slows all of them, and ratios are taken round by round.
A process of its own gives each its own peak memory, compile cache (empty at first) and thread pool.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llamalab.errors import UserError

if TYPE_CHECKING:
    from llamalab.config import ModelArgs

Round = Callable[[], dict[str, float]]


@dataclass
class Workload:
    """What every contender is given."""

    kind: str  # train or generate
    model: str  # a preset's name; weights are random, the same sizes for all
    dtype: str
    device: str
    threads: int
    batch: int
    seq_len: int  # train: tokens a row; generate: prompt tokens
    steps: int  # train: optimizer steps a round; generate: new tokens
    seed: int


# --- contenders: (workload) -> round ------------------------------------------------------------------------


def train_llamalab(work: Workload, compiled: bool = False, checkpointed: bool = False) -> Round:
    from llamalab.data import Batch
    from llamalab.optim import build_optimizer
    from llamalab.surgery import block_attention_, checkpoint_blocks_, compile_blocks_
    from llamalab.train import TrainConfig, train_steps

    model, device = _our_model(work)
    if compiled and device.type == "cpu":
        block_attention_(model)
    if checkpointed:
        checkpoint_blocks_(model)
    if compiled:
        compile_blocks_(model)
    inputs, labels = _tokens(work, model.config.vocab_size, device)
    config = TrainConfig(steps=10**6, lr=1e-4, schedule="constant", dtype="fp32" if work.dtype == "float32" else "bf16")
    steps = train_steps(model, build_optimizer("adamw", model, lr=1e-4), lambda _: Batch(inputs, labels, None), config)
    return lambda: {"loss": [next(steps) for _ in range(work.steps)][-1].loss}


def train_transformers(work: Workload, compiled: bool = False, checkpointed: bool = False) -> Round:
    import torch

    model, device = _their_model(work)
    if checkpointed:
        model.gradient_checkpointing_enable()
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    inputs, labels = _tokens(work, model.config.vocab_size, device)
    run = torch.compile(model) if compiled else model

    def step() -> float:
        loss = run(input_ids=inputs, labels=inputs, shift_labels=labels, use_cache=False).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.item()

    return lambda: {"loss": [step() for _ in range(work.steps)][-1]}


def generate_llamalab(work: Workload) -> Round:
    from llamalab.generate import generate

    model, device = _our_model(work)
    model.setup_caches(work.batch, work.seq_len + work.steps)
    prompt = _tokens(work, model.config.vocab_size, device)[0].tolist()
    prompt = prompt if work.batch > 1 else prompt[0]

    def once() -> dict[str, float]:
        began, first, n = time.perf_counter(), None, 0
        for _ in generate(model, prompt, work.steps):
            first, n = first or time.perf_counter(), n + 1
        assert n == work.steps, f"{n} tokens came, {work.steps} were asked for"
        return _generation_times(work, began, first)

    return once


def generate_transformers(work: Workload, compiled: bool = False) -> Round:
    import torch

    model, device = _their_model(work)
    model.eval()
    prompt = _tokens(work, model.config.vocab_size, device)[0]
    options: dict[str, Any] = dict(max_new_tokens=work.steps, min_new_tokens=work.steps, do_sample=False, pad_token_id=0)
    if compiled:
        model.forward = torch.compile(model.forward)
        options["cache_implementation"] = "static"

    class Clock:  # transformers calls put() with the prompt, then once a token; without one, first would need a second run
        def __init__(self) -> None:
            self.times: list[float] = []

        def put(self, _) -> None:
            self.times.append(time.perf_counter())

        def end(self) -> None:
            self.times.append(time.perf_counter())

    def once() -> dict[str, float]:
        began, clock = time.perf_counter(), Clock()
        class_limit = work.batch == 1  # its streamers take one row only
        out = model.generate(prompt, attention_mask=torch.ones_like(prompt), streamer=clock if class_limit else None, **options)
        assert out.shape[1] == work.seq_len + work.steps, f"{out.shape[1] - work.seq_len} tokens came, {work.steps} were asked for"
        return _generation_times(work, began, clock.times[1] if class_limit else None)

    return once


def _generation_times(work: Workload, began: float, first: float | None) -> dict[str, float]:
    ended = time.perf_counter()
    times = {"total tok/s": work.batch * work.steps / (ended - began)}
    if first is not None:
        times["first token s"] = first - began
        times["decode tok/s"] = work.batch * (work.steps - 1) / (ended - first)
    return times


CONTENDERS: dict[str, dict[str, tuple[Callable[..., Round], dict[str, bool]]]] = {
    "train": {
        "llamalab": (train_llamalab, {"compiled": True}),
        "llamalab-checkpointed": (train_llamalab, {"compiled": True, "checkpointed": True}),
        "llamalab-eager": (train_llamalab, {}),
        "transformers": (train_transformers, {}),
        "transformers-compiled": (train_transformers, {"compiled": True}),
    },
    "generate": {
        "llamalab": (generate_llamalab, {}),
        "transformers": (generate_transformers, {}),
        "transformers-compiled": (generate_transformers, {"compiled": True}),
    },
}


def _args(work: Workload) -> ModelArgs:
    from llamalab.config import ModelArgs

    return ModelArgs.from_name(work.model)


def _our_model(work: Workload):
    import torch

    from llamalab.model import Transformer
    from llamalab.runtime import pick_device, pick_dtype

    device = pick_device(work.device)
    with torch.device("meta"):
        model = Transformer(_args(work))
    model = model.to(pick_dtype(work.dtype)).to_empty(device=device).init_weights(work.seed)
    model.setup_caches(work.batch, work.seq_len, training=True)
    return model, device


def _their_model(work: Workload):
    import torch

    try:
        from transformers import AutoConfig, AutoModelForCausalLM
    except ImportError:
        raise UserError("the transformers contenders need transformers: pip install transformers") from None
    from llamalab.runtime import pick_device, pick_dtype

    device = pick_device(work.device)
    config = _args(work).to_hf(work.dtype)
    torch.manual_seed(work.seed)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config), dtype=pick_dtype(work.dtype))
    return model.to(device), device


def _tokens(work: Workload, vocab_size: int, device):
    import torch

    ids = torch.randint(vocab_size, (work.batch, work.seq_len + 1), generator=torch.Generator().manual_seed(work.seed))
    return ids[:, :-1].to(device).contiguous(), ids[:, 1:].to(device).contiguous()


# --- processes ------------------------------------------------------------------------------------------------


class Worker:
    """A contender in a process of its own. `ask("start")` sets up and runs the first round, `ask("round")` one more."""

    def __init__(self, name: str, work: Workload) -> None:
        self.name = name
        self.folder = tempfile.TemporaryDirectory(prefix="llamalab-bench-")
        self.log = Path(self.folder.name) / "stderr.txt"
        threads = str(work.threads)
        env = os.environ | {
            "OMP_NUM_THREADS": threads,
            "MKL_NUM_THREADS": threads,
            "OMP_PROC_BIND": "true",
            "TORCHINDUCTOR_CACHE_DIR": self.folder.name + "/inductor",  # empty: the first round is a cold start
            "TOKENIZERS_PARALLELISM": "false",
        }
        command = [sys.executable, "-m", "llamalab.bench", name, json.dumps(asdict(work))]
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self.log.open("w"), text=True, env=env
        )

    def ask(self, what: str) -> dict[str, float]:
        """One answer of the worker.

        Raises:
            UserError: the worker ended; with the last lines it wrote.
        """
        try:
            self.process.stdin.write(what + "\n")
            self.process.stdin.flush()
            line = self.process.stdout.readline()
        except BrokenPipeError:
            line = ""
        if not line:
            self.process.wait()
            tail = "\n".join(self.log.read_text().splitlines()[-5:])
            raise UserError(f"contender {self.name} ended with code {self.process.returncode}:\n{tail}")
        return json.loads(line)

    def close(self) -> None:
        """End the process and remove its compile cache."""
        self.process.stdin.close()
        try:
            self.process.wait(timeout=20)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self.folder.cleanup()


def serve(name: str, work: Workload) -> None:
    """The worker's side: one JSON line out for each line in."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever a library prints goes to the log, not between the answers
    from llamalab import runtime

    runtime.set_threads(work.threads)
    runtime.reuse_freed_memory()  # for all contenders alike
    device = runtime.pick_device(work.device)
    build, options = CONTENDERS[work.kind][name]
    run: Round | None = None
    for line in sys.stdin:
        began = time.perf_counter()
        if line.strip() == "start":
            run = build(work, **options)
            began = time.perf_counter()  # cold start: from a model in memory to the first result
        else:
            runtime.reset_peak_memory(device)
            began = time.perf_counter()
        answer = run()
        answer["seconds"] = time.perf_counter() - began
        answer["peak bytes"] = runtime.peak_memory(device)
        answers.write(json.dumps(answer) + "\n")
        answers.flush()


if __name__ == "__main__":
    serve(sys.argv[1], Workload(**json.loads(sys.argv[2])))
