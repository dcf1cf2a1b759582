"""How a token is chosen: the settings, apart from what they do (`llamalab.generate.warp` and `sample`).

They are here, without torch, so that `generate` and `chat` show the same flags with the same help.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from llamalab.errors import UserError


@dataclass(frozen=True)
class Sampling:
    """Applied in transformers' order: penalty, temperature, top-k, top-p, min-p. The text under a field is its --help.

    Raises:
        UserError: a number outside its range.
    """

    temperature: float = 0.0
    """0: always the most likely token; 1: as the model says; between: bolder with size."""
    top_k: int | None = None
    """Only the k most likely tokens."""
    top_p: float | None = None
    """Only the most likely tokens that together have this probability."""  # nucleus sampling, arXiv:1904.09751
    min_p: float | None = None
    """Only tokens at least this probable relative to the likeliest."""  # arXiv:2407.01082
    repetition_penalty: float = 1.0
    """Above 1: tokens that were there before become less likely."""  # arXiv:1909.05858: logit / penalty, or * penalty below 0

    def __post_init__(self) -> None:
        wanted = {
            "temperature": ("a number >= 0", 0 <= self.temperature < math.inf),
            "top_k": ("at least 1 (leave it out for no limit)", self.top_k is None or self.top_k >= 1),
            "top_p": ("in (0, 1]", self.top_p is None or 0 < self.top_p <= 1),
            "min_p": ("in [0, 1)", self.min_p is None or 0 <= self.min_p < 1),
            "repetition_penalty": ("a number > 0", 0 < self.repetition_penalty < math.inf),
        }
        for name, (expected, holds) in wanted.items():
            if not holds:
                raise UserError(f"{name} must be {expected}, got {getattr(self, name)}")

    @property
    def greedy(self) -> bool:
        """Whether the result is the most likely token, with nothing left to chance."""
        return self.temperature == 0 or self.top_k == 1

    @property
    def idle(self) -> list[str]:
        """Filters that were set and choose nothing, because temperature 0 keeps one token anyway."""
        return [name for name in ("top_k", "top_p", "min_p") if self.temperature == 0 and getattr(self, name) is not None]
