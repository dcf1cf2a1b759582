"""How good a model is: perplexity and bits per byte of a text, multiple choice, lm-eval tasks.

    llamalab evaluate runs/pretrain-1                              # on the part of the novel that no run trains on
    llamalab evaluate MODEL --text book.txt --seq-len 1024 --stride 512
    llamalab evaluate MODEL --task piqa.jsonl --limit 100
    llamalab evaluate MODEL --lm-eval arc_easy hellaswag --include-path my-tasks/

Bits per byte compare models with different tokenizers; perplexity does not. A smaller --stride gives each token more
context (at least seq_len - stride tokens) and costs seq_len / stride as much. Rows of a --task file are
{"question" and/or "context": text, "choices": [texts], "answer": index, letter or text}; the accuracy to quote is
the one per byte. Nothing depends on --batch but speed and memory.
"""

from __future__ import annotations

import json
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import tyro


@dataclass
class Config:
    model: tyro.conf.Positional[Annotated[str, tyro.conf.arg(metavar="MODEL")]]
    """Model directory, file, or Hugging Face hub id."""
    text: str | None = None
    """Text file (UTF-8, also .gz) to predict; default, if no task is given: the held-out part of the embedded novel."""
    seq_len: int | None = None
    """Tokens of a window; default: 1024, or the model's limit if that is less."""
    stride: int | None = None
    """Tokens the window moves on by; default: seq_len."""
    task: str | None = None
    """Multiple-choice questions, JSON lines."""
    prompt: str | None = None
    """What the choices of --task continue, with {question} and {context} of the row and \\n for a new line; default: the question
    or the context as it is, and for rows with both "Q: {context} {question}\\nA:"."""
    limit: int | None = None
    """Only the first questions of --task, or of each lm-eval task."""
    lm_eval: tuple[str, ...] = ()
    """Tasks of lm-eval, by name."""
    include_path: str | None = None
    """Folder with lm-eval tasks of your own."""
    batch: int = 8
    """Rows computed at once."""
    dtype: str | None = None
    """float32, bfloat16 or float16; default: as stored."""
    device: str | None = None
    """cpu, cuda, mps; default: the best there is."""
    json: str | None = None
    """Write the results to this file too."""


def main(cfg: Config) -> None:
    from llamalab.checkpoint import load_model, local_path
    from llamalab.corpus import embedded_corpus, split_corpus
    from llamalab.data_sources import read_text
    from llamalab.errors import UserError
    from llamalab.evaluate import multiple_choice, read_questions, score_text
    from llamalab.files import write_atomic
    from llamalab.runtime import pick_device, pick_dtype, set_threads, versions
    from llamalab.tokenizer import load_tokenizer

    on_text = cfg.text is not None or not (cfg.task or cfg.lm_eval)
    needs = {"seq_len": on_text, "stride": on_text, "prompt": cfg.task, "limit": cfg.task or cfg.lm_eval, "include_path": cfg.lm_eval}
    for name, used in needs.items():
        if getattr(cfg, name) is not None and not used:
            raise UserError(f"--{name.replace('_', '-')} has nothing to act on here: see llamalab evaluate --help")
    if cfg.batch < 1 or (cfg.limit is not None and cfg.limit < 1):
        raise UserError("--batch and --limit must be at least 1")
    text = None
    if on_text:
        text = read_text(cfg.text) if cfg.text is not None else split_corpus(embedded_corpus())[1]
    prompt = None if cfg.prompt is None else cfg.prompt.replace("\\n", "\n")
    questions = read_questions(cfg.task, cfg.limit, prompt) if cfg.task else []
    if cfg.lm_eval:
        from llamalab.lm_eval_adapter import find_tasks, run_tasks

        manager = find_tasks(cfg.lm_eval, cfg.include_path)

    set_threads()
    path = local_path(cfg.model)
    tokenizer = load_tokenizer(path)
    model = load_model(path, pick_device(cfg.device), pick_dtype(cfg.dtype))
    results: dict[str, dict[str, Any]] = {}
    if text is not None:
        seq_len = cfg.seq_len if cfg.seq_len is not None else min(1024, model.config.max_length or model.config.block_size)
        began = time.perf_counter()
        found = score_text(model, tokenizer, text, seq_len, cfg.stride, cfg.batch, progress=True)
        results[Path(cfg.text).name if cfg.text else "held-out text"] = {
            "perplexity": found.perplexity, "nats per token": found.nats_per_token, "bits per byte": found.bits_per_byte,
            "tokens": found.tokens, "bytes": found.bytes, "seq_len": seq_len, "stride": cfg.stride or seq_len,
            "tokens per second": found.tokens / (time.perf_counter() - began),
        }
    if questions:
        accuracy = multiple_choice(model, tokenizer, questions, cfg.batch, progress=True)
        results[Path(cfg.task).name] = {
            "accuracy per byte": accuracy.per_byte, "standard error": accuracy.standard_error, "accuracy raw": accuracy.raw,
            "accuracy per token": accuracy.per_token, "chance": accuracy.chance, "questions": accuracy.questions,
        }
    if cfg.lm_eval:
        results |= run_tasks(model, tokenizer, cfg.lm_eval, manager, cfg.batch, cfg.limit)

    show(cfg.model, results)
    if cfg.json:
        write_atomic(cfg.json, json.dumps({"model": cfg.model, "results": results, "versions": versions()}, indent=1) + "\n")


def show(model: str, results: dict[str, dict[str, Any]]) -> None:
    """One table on standard output."""
    from rich.console import Console
    from rich.table import Table

    table = Table("", "", title=model, show_header=False)
    table.columns[1].justify = "right"
    for name, numbers in results.items():
        table.add_section()
        table.add_row(f"[bold]{name}[/bold]", "")
        for what, value in numbers.items():
            table.add_row(what, f"{value:,}" if isinstance(value, int) else f"{value:,.4f}" if value < 1000 else f"{value:,.0f}")
    Console().print(table)


if __name__ == "__main__":
    main(tyro.cli(Config))
