"""Train the tokenizer that comes with the package: byte-level BPE on the training part of the embedded corpus.

    python scripts/train_tokenizer.py                     # writes llamalab/assets/tokenizer.json again, bit for bit
    python scripts/train_tokenizer.py --vocab 8192 --out larger

Words are cut as in Llama 3, digits one by one; every byte is a token, so any text can be encoded. Id 0 is
<|endoftext|>, which begins and ends a document. The held-out tenth of the text is never seen; what it compresses to
is printed: 3.95 bytes a token at a vocabulary of 4096.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import tyro

from llamalab.corpus import ASSETS, embedded_corpus, split_corpus
from llamalab.errors import UserError


@dataclass
class Config:
    vocab: int = 4096
    """Tokens, the 256 bytes and <|endoftext|> among them."""
    out: Path = ASSETS
    """Directory that gets tokenizer.json and tokenizer_config.json."""


def main(cfg: Config) -> None:
    from tokenizers import trainers

    from llamalab.tokenizer import Tokenizer
    from llamalab.tokenizer_formats import END_OF_TEXT, PATTERNS, Parts, byte_alphabet, byte_level_bpe

    if cfg.vocab < 257:
        raise UserError(f"--vocab {cfg.vocab} is too small: 256 bytes and <|endoftext|> need 257")
    train, held_out = split_corpus(embedded_corpus())
    backend = byte_level_bpe({}, [], PATTERNS["qwen2"])
    trainer = trainers.BpeTrainer(
        vocab_size=cfg.vocab, special_tokens=[END_OF_TEXT], initial_alphabet=list(byte_alphabet().values()), show_progress=False
    )
    backend.train_from_iterator([train], trainer)
    tok = Tokenizer(Parts(backend, bos_id=0, eos_ids=(0,)))
    if tok.vocab_size != cfg.vocab:
        raise UserError(f"the text yields only {tok.vocab_size} tokens; set --vocab to that or less")
    tok.save(cfg.out)
    for name, text in (("training", train), ("held-out", held_out)):
        size, tokens = len(text.encode()), len(tok.encode(text))
        print(f"{name} part: {size} bytes, {tokens} tokens, {size / tokens:.3f} bytes/token")


if __name__ == "__main__":
    main(tyro.cli(Config))
