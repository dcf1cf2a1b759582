"""A conversation with a model, on a kept cache.

    llamalab chat SmolLM2-135M-Instruct.Q4_1.gguf
    echo "What is the capital of France?" | llamalab chat runs/my-model

Each turn renders the whole conversation with the model's chat template, finds how much of it the key/value
caches hold already, and computes only the rest; a long conversation answers as fast as a short one.
/reset starts anew, /exit or Ctrl-D leaves, Ctrl-C stops the answer that is being written.
"""

from __future__ import annotations

import sys
from contextlib import suppress
from dataclasses import dataclass
from typing import Annotated

import tyro

from llamalab.sampling import Sampling


@dataclass
class Config:
    model: tyro.conf.Positional[Annotated[str, tyro.conf.arg(metavar="MODEL")]]
    """Model directory, file, or Hugging Face hub id; it must have a chat template."""
    system: str | None = None
    """System message: who the model should be."""
    context: int | None = None
    """Tokens the conversation may take, answers included; default: 4096, or the model's limit if that is less."""
    max_new_tokens: int = 512
    """Most tokens of one answer."""
    sampling: tyro.conf.OmitArgPrefixes[Sampling] = Sampling()  # noqa: RUF009  frozen, so it can be shared
    """How a token is chosen."""
    seed: int | None = None
    """The same seed and the same messages give the same answers; without one, fresh ones each time."""
    dtype: str | None = None
    """float32, bfloat16 or float16; default: as stored."""
    device: str | None = None
    """cpu, cuda, mps; default: the best there is."""


def main(cfg: Config) -> None:
    from llamalab import chat
    from llamalab.checkpoint import load_model, local_path
    from llamalab.errors import UserError
    from llamalab.generate import TextStream, common_prefix, generate
    from llamalab.runtime import pick_device, pick_dtype, set_threads
    from llamalab.tokenizer import load_tokenizer

    for name in cfg.sampling.idle:
        say(f"note: --{name.replace('_', '-')} has no effect at temperature 0")
    if cfg.max_new_tokens < 1:
        raise UserError(f"--max-new-tokens must be at least 1, got {cfg.max_new_tokens}")
    set_threads()
    path = local_path(cfg.model)
    tokenizer = load_tokenizer(path)
    if not tokenizer.chat_template:
        raise UserError(f"{cfg.model} has no chat template, so it is no chat model; continue a text with llamalab generate")
    model = load_model(path, pick_device(cfg.device), pick_dtype(cfg.dtype)).eval()
    limit = model.config.max_length or sys.maxsize
    context = min(4096, limit) if cfg.context is None else cfg.context
    if not 1 < context <= limit:
        raise UserError(f"--context must be from 2 to {limit}, this model's limit, got {context}")

    caches = model.make_caches(1, context)
    held: list[int] = []  # tokens whose keys and values are in the caches
    opening = [{"role": "system", "content": cfg.system}] if cfg.system is not None else []
    messages = list(opening)
    if sys.stdin.isatty():
        with suppress(ImportError):  # absent on Windows
            import readline  # noqa: F401  makes input() edit lines and remember them
        say("/reset starts anew, /exit leaves, Ctrl-C stops an answer")

    while (line := ask()) not in (None, "/exit"):
        if line == "/reset":
            messages = list(opening)
            say("a new conversation")
            continue
        if not line.strip():
            continue
        messages.append({"role": "user", "content": line})
        ids = chat.encode(tokenizer, messages, add_generation_prompt=True)
        room = context - len(ids)
        if room < 1:
            messages.pop()
            say(f"with this message the conversation has {len(ids)} tokens and the context holds {context}: say less, "
                f"/reset, or start with a larger --context (this model's limit: {limit})")
            continue

        kept = min(common_prefix(held, ids), len(ids) - 1)
        held, new, pieces, text = ids[:kept], [], [], TextStream(tokenizer)
        seed = None if cfg.seed is None else cfg.seed + len(messages)
        try:
            for token in generate(model, ids, min(cfg.max_new_tokens, room), seed=seed, tokenizer=tokenizer, caches=caches,
                                  cached=kept, **vars(cfg.sampling)):
                held = ids + new  # this token itself is read when the next one is asked for
                new.append(token)
                pieces.append(text.push(token))
                print(pieces[-1], end="", flush=True)
            cut = "the context is full" if len(new) == room else "--max-new-tokens" if len(new) == cfg.max_new_tokens else ""
        except KeyboardInterrupt:
            cut = "Ctrl-C"
        pieces.append(text.flush())
        print(pieces[-1], flush=True)
        if cut:
            say(f"(answer cut after {len(new)} tokens: {cut})")
        messages.append({"role": "assistant", "content": "".join(pieces)})


def ask() -> str | None:
    """The next line typed or piped in; None at the end."""
    try:
        return input("> " if sys.stdin.isatty() else "")
    except EOFError:
        return None
    except KeyboardInterrupt:
        say("\n/exit or Ctrl-D leaves")
        return ""


def say(note: str) -> None:
    """To the person, not into the answer: standard error."""
    print(note, file=sys.stderr, flush=True)


if __name__ == "__main__":
    main(tyro.cli(Config))
