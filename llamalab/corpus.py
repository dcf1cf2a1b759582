"""The text that comes with the package, and the one place where it is split.

*Pride and Prejudice* (1813, public domain), 684,584 bytes of ASCII. Its last tenth is held out: neither the
tokenizer in `assets/` nor a model of `llamalab pretrain` has seen it.
"""

from __future__ import annotations

from pathlib import Path

from llamalab.errors import UserError

ASSETS = Path(__file__).resolve().parent / "assets"
TRAIN_FRACTION = 0.9


def embedded_corpus() -> str:
    """The whole text."""
    return (ASSETS / "pride_and_prejudice.txt").read_text(encoding="utf-8")


def split_corpus(text: str) -> tuple[str, str]:
    """Cut a text in two at the last paragraph boundary in its first 90 % (of characters).

    Returns:
        training part and held-out part; joined they are the text.

    Raises:
        UserError: no paragraph ends (two newlines) in the first 90 %, so one of the parts would be empty.
    """
    boundary = text.rfind("\n\n", 0, int(TRAIN_FRACTION * len(text)))
    if boundary < 0:
        raise UserError(f"cannot hold out a part of this text: no empty line in its first {TRAIN_FRACTION:.0%} ({len(text)} characters)")
    cut = boundary + 2
    return text[:cut], text[cut:]
