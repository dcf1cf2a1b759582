"""What a training recipe needs around its loop: a model to start from, text, validation, samples."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from llamalab.checkpoint import load_model
from llamalab.config import PRESETS, ModelArgs
from llamalab.corpus import embedded_corpus, split_corpus
from llamalab.data import TokenFile, encode_text, prepare
from llamalab.errors import UserError
from llamalab.evaluate import bits_per_byte, score
from llamalab.generate import generate
from llamalab.model import Transformer
from llamalab.optim import require_compiler
from llamalab.surgery import block_attention_, checkpoint_blocks_, compile_blocks_
from llamalab.tokenizer import Tokenizer


def is_checkpoint(model: str | None) -> bool:
    """Whether --model names weights to go on with; otherwise a preset (new weights), or nothing (new sizes too).

    Raises:
        UserError: it is a word that names nothing.
    """
    if model is None or model in PRESETS:
        return False
    if "/" not in model and not Path(model).expanduser().exists():
        raise UserError(f"--model {model}: no such file or directory, and no preset ({', '.join(PRESETS)})")
    return True


def start_model(
    name: str | None, sizes: dict[str, int], tokenizer: Tokenizer, seq_len: int, seed: int, device: torch.device, dtype: torch.dtype
) -> Transformer:
    """The model a run starts from.

    Args:
        name: a checkpoint (path or hub id), or a preset, whose vocabulary becomes the tokenizer's; None: `sizes`.
        sizes: ModelArgs fields of a new model, with tied head and seq_len as its limit.

    Raises:
        UserError: checkpoint, tokenizer and seq_len don't fit together.
    """
    if is_checkpoint(name):
        model = load_model(name, device, dtype)
    else:
        ids = dict(vocab_size=tokenizer.vocab_size, bos_token_id=tokenizer.bos_id, eos_token_ids=tokenizer.eos_ids)
        given = PRESETS[name] if name else dict(sizes, block_size=seq_len, tie_word_embeddings=True)
        model = Transformer(ModelArgs(**{**given, **ids})).init_weights(seed).to(device, dtype)
    if tokenizer.vocab_size > model.config.vocab_size:
        raise UserError(f"the tokenizer has {tokenizer.vocab_size} ids, the model only {model.config.vocab_size}")
    limit = model.config.max_length
    if limit is not None and seq_len > limit:
        raise UserError(f"seq_len {seq_len} is beyond the model's limit of {limit} tokens")
    return model


def prepare_(model: nn.Module, compile: bool = False, checkpoint_activations: bool = False) -> nn.Module:
    """Wrap the blocks for training, in place. Names and results stay as they are.

    Args:
        compile: compile each block, with the attention that is fastest where the model is.
        checkpoint_activations: keep only each block's input for backward: less memory, a third more compute.

    Raises:
        UserError: compiling needs a compiler that isn't there.
    """
    weight = next(model.parameters())
    if compile and weight.device.type == "cpu":
        require_compiler("--compile")
        if weight.dtype is torch.bfloat16:
            block_attention_(model)
    if checkpoint_activations:
        checkpoint_blocks_(model)
    return compile_blocks_(model) if compile else model


def read_texts(data: str | None, val_data: str | None, tokenizer: Tokenizer, directory: Path) -> tuple[Any, np.ndarray]:
    """Token ids to train on and ids to validate on, each a TokenFile or an array.

    Args:
        data, val_data: sources of `data.prepare`. Without data: the embedded novel and its held-out tail. Without val_data,
            the last tenth of data's tokens is held out.
        directory: where token files are kept, so that a source is tokenized once.
    """
    if data is None:
        train, held_out = (encode_text(tokenizer, text) for text in split_corpus(embedded_corpus()))
    else:
        train = prepare(data, tokenizer, directory)
        train.require_vocabulary(tokenizer.vocab_size)
        cut = len(train) - len(train) // 10
        held_out = train.tokens[cut:]
        if val_data is None:
            train = train.tokens[:cut]
    if val_data is not None:
        validation = prepare(val_data, tokenizer, directory)
        validation.require_vocabulary(tokenizer.vocab_size)
        held_out = validation.tokens
    return train, held_out


def digest(tokens: Any) -> str:
    """Changes when the ids do: a run that is resumed must find the text it began with."""
    ids = np.ascontiguousarray(tokens.tokens if isinstance(tokens, TokenFile) else tokens)
    return hashlib.blake2b(memoryview(ids).cast("B"), digest_size=8).hexdigest()


class Watch:
    """Validation and samples during training. Neither touches torch's global generator, or what training compiled.

    Args:
        config: eval_tokens, seq_len and batch of the validation; prompt, sample_tokens and seed of the samples.
        held_out: [N] token ids to validate on, of which the first eval_tokens are used.

    Raises:
        UserError: too little text to validate on, or a prompt that leaves no room for a sample.
    """

    def __init__(self, config: Any, model: Transformer, tokenizer: Tokenizer, held_out: np.ndarray) -> None:
        self.config, self.model, self.tokenizer = config, model, tokenizer
        self.tokens = np.asarray(held_out[: config.eval_tokens], np.int64)
        if len(self.tokens) < 2:
            raise UserError(f"{len(self.tokens)} tokens are too few to validate on: give more text, --val-data, or a larger --eval-tokens")
        self.text_bytes = len(tokenizer.decode(self.tokens[1:].tolist()).encode())
        front = [t for t in (tokenizer.bos_id, *tokenizer.eos_ids) if t is not None][:1]
        self.prompt = tokenizer.encode(config.prompt) or front
        limit = model.config.block_size
        if not 0 < len(self.prompt) < limit:
            raise UserError(f"--prompt has {len(self.prompt)} tokens; the model's limit is {limit} tokens; "
                            "a sample needs a prompt of at least one token and room for one more")
        self.sample_tokens = min(config.sample_tokens, limit - len(self.prompt))

    def validate(self) -> dict[str, float]:
        """Mean loss in nats per token, and bits per byte of text."""
        with eager():
            found = score(self.model, self.tokens, self.config.seq_len, self.config.seq_len, self.config.batch)
        return {"val_loss": found.nats_per_token, "bits_per_byte": bits_per_byte(found.nll, self.text_bytes)}

    def sample(self, temperature: float = 0.8) -> str:
        """The prompt and what the model makes of it."""
        with eager():
            new = list(generate(self.model, self.prompt, self.sample_tokens, temperature=temperature, top_p=0.9, seed=self.config.seed))
        return self.tokenizer.decode(self.prompt + new)


@contextmanager
def eager() -> Iterator[None]:
    """Run compiled blocks uncompiled: validation and generation come in many shapes, each of which would be compiled."""
    with torch.compiler.set_stance("force_eager"):
        yield
