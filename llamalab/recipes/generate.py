"""Text from a model, as it is written.

    llamalab generate runs/pretrain-1 "It is a truth universally" --temperature 0.8
    llamalab generate SmolLM2-135M-Instruct.Q4_1.gguf "What is the capital of France?" --chat

The new text goes to standard output, token by token; what it took goes to standard error. Generation ends at
an end token of the model, at a --stop string, or after --max-new-tokens. Temperature 0, the default, always
takes the most likely token; a small model then soon repeats itself: try --temperature 0.8 --top-p 0.95.
"""

from __future__ import annotations

import json
import sys
import time
from dataclasses import dataclass
from typing import Annotated

import tyro

from llamalab.sampling import Sampling


@dataclass
class Config:
    model: tyro.conf.Positional[Annotated[str, tyro.conf.arg(metavar="MODEL")]]
    """Model directory, file, or Hugging Face hub id."""
    prompt: tyro.conf.Positional[Annotated[str, tyro.conf.arg(metavar="PROMPT")]]
    """Text to continue; - reads it from standard input."""
    chat: bool = False
    """The prompt is a user's message: put it into the model's chat template."""
    system: str | None = None
    """System message, with --chat."""
    max_new_tokens: int = 128
    """Most tokens to write."""
    sampling: tyro.conf.OmitArgPrefixes[Sampling] = Sampling()  # noqa: RUF009  frozen, so it can be shared
    """How a token is chosen."""
    seed: int | None = None
    """The same seed gives the same text; without one, a fresh one each time."""
    stop: tyro.conf.UseAppendAction[tuple[str, ...]] = ()
    """Text that ends generation and is not printed; repeat the flag for more."""
    dtype: str | None = None
    """float32, bfloat16 or float16; default: as stored."""
    device: str | None = None
    """cpu, cuda, mps; default: the best there is."""
    json: bool = False
    """One JSON object instead of the stream: prompt, text, tokens, finish, seconds."""


def main(cfg: Config) -> None:
    from llamalab import chat
    from llamalab.checkpoint import load_model, local_path
    from llamalab.errors import UserError
    from llamalab.generate import TextStream, generate
    from llamalab.runtime import pick_device, pick_dtype, set_threads
    from llamalab.tokenizer import load_tokenizer

    for name in cfg.sampling.idle:
        print(f"note: --{name.replace('_', '-')} has no effect at temperature 0", file=sys.stderr)
    if cfg.system is not None and not cfg.chat:
        raise UserError("--system needs --chat")
    prompt = sys.stdin.read() if cfg.prompt == "-" else cfg.prompt
    set_threads()
    path = local_path(cfg.model)
    tokenizer = load_tokenizer(path)
    if cfg.chat:
        system = [{"role": "system", "content": cfg.system}] if cfg.system is not None else []
        ids = chat.encode(tokenizer, [*system, {"role": "user", "content": prompt}], add_generation_prompt=True)
    else:
        ids = tokenizer.encode(prompt)
    if not ids and tokenizer.bos_id is not None:
        ids = [tokenizer.bos_id]  # an empty prompt: the model starts a text of its own
    text = TextStream(tokenizer, cfg.stop, after=() if cfg.chat else ids)
    model = load_model(path, pick_device(cfg.device), pick_dtype(cfg.dtype)).eval()
    tokens = generate(model, ids, cfg.max_new_tokens, seed=cfg.seed, tokenizer=tokenizer, **vars(cfg.sampling))

    begin, first, count, pieces = time.perf_counter(), 0.0, 0, []
    for token in tokens:
        count += 1
        if count == 1:
            first = time.perf_counter() - begin
        pieces.append(text.push(token))
        if not cfg.json:
            print(pieces[-1], end="", flush=True)
        if text.stopped:
            break
    pieces.append(text.flush())
    seconds = time.perf_counter() - begin
    finish = "length" if count == cfg.max_new_tokens and not text.stopped else "stop"

    if cfg.json:
        found = dict(prompt=prompt, text="".join(pieces), prompt_tokens=len(ids), tokens=count, finish=finish, seconds=seconds)
        print(json.dumps(found, ensure_ascii=False))
        return
    print(pieces[-1], flush=True)
    speed = f", {(count - 1) / (seconds - first):.1f} tok/s" if count > 1 else ""
    print(f"{len(ids)} prompt tokens in {first:.2f} s, {count} new in {seconds - first:.2f} s{speed} ({finish})", file=sys.stderr)


if __name__ == "__main__":
    main(tyro.cli(Config))
