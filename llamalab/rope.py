"""Rotary position embeddings (Su et al. 2021, arXiv:2104.09864) under every scaling in use.

Pair i of a head turns by `position * frequency[i]`. Frequencies, angles and the finished table are
float32 whatever the weights are: a bf16 position above 256 is already another position. The order of
operations is that of transformers (`modeling_rope_utils.py`), so that both give the same float32 bits.

In memory the pairs are interleaved, (0, 1), (2, 3), ...: Meta's order. Hugging Face stores the halves
apart; `convert.py` permutes the rows of Q and K on the way in and out, and nowhere else.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from llamalab.config import RopeScaling


def rope_frequencies(
    head_dim: int, base: float, scaling: RopeScaling | None, block_size: int, length: int, device: torch.device | str = "cpu"
) -> tuple[Tensor, float]:
    """Angle per position of each pair, and the factor on cos and sin.

    Args:
        head_dim: size of a head; there are head_dim / 2 pairs.
        block_size: the model's longest sequence (`max_position_embeddings`).
        length: tokens in the sequence at hand; only dynamic scaling reads it.

    Returns:
        frequencies [head_dim / 2] float32 in radians per token, and yarn's attention factor (else 1.0).
    """
    kind = scaling.type if scaling else None
    if kind == "dynamic" and length > block_size:
        # Dynamic NTK: enlarge the base just enough for this length, and only for it.
        base = base * (scaling.factor * length / block_size - (scaling.factor - 1)) ** (head_dim / (head_dim - 2))
    exponents = torch.arange(0, head_dim, 2, dtype=torch.int64, device=device).float() / head_dim
    periods = base**exponents  # tokens a radian, [D/2]
    frequencies = 1.0 / periods
    if kind == "linear":
        return frequencies / scaling.factor, 1.0
    if kind == "llama3":
        return _llama3(frequencies, scaling), 1.0
    if kind == "yarn":
        return _yarn(periods, head_dim, base, scaling, block_size)
    return frequencies, 1.0


def _llama3(frequencies: Tensor, s: RopeScaling) -> Tensor:
    """Llama 3.1: long wavelengths are stretched by `factor`, short ones kept, those between blended."""
    original = s.original_max_position_embeddings
    wavelength = 2 * math.pi / frequencies
    keep = (original / wavelength - s.low_freq_factor) / (s.high_freq_factor - s.low_freq_factor)
    blended = (1 - keep) * frequencies / s.factor + keep * frequencies
    long, short = wavelength > original / s.low_freq_factor, wavelength < original / s.high_freq_factor
    return torch.where(long, frequencies / s.factor, torch.where(short, frequencies, blended))


def _yarn(periods: Tensor, head_dim: int, base: float, s: RopeScaling, block_size: int) -> tuple[Tensor, float]:
    """YaRN (Peng et al. 2023, arXiv:2309.00071): interpolate slow pairs, keep fast ones, sharpen attention."""
    original = s.original_max_position_embeddings or block_size

    def pair_that_turns(turns: float) -> float:  # index of the pair that makes this many turns in the trained length
        return head_dim * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(base))

    low = pair_that_turns(32 if s.beta_fast is None else s.beta_fast)
    high = pair_that_turns(1 if s.beta_slow is None else s.beta_slow)
    if s.truncate is not False:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    high += 0.001 if low == high else 0
    pairs = torch.arange(head_dim // 2, dtype=torch.float32, device=periods.device)
    keep = 1 - ((pairs - low) / (high - low)).clamp(0, 1)
    scaled = 1.0 / (s.factor * periods) * (1 - keep) + 1.0 / periods * keep

    def mscale(weight: float) -> float:
        return 0.1 * weight * math.log(s.factor) + 1.0 if s.factor > 1 else 1.0

    if s.attention_factor is not None:
        return scaled, s.attention_factor
    if s.mscale and s.mscale_all_dim:
        return scaled, mscale(s.mscale) / mscale(s.mscale_all_dim)
    return scaled, mscale(1.0)


def precompute_freqs_cis(
    seq_len: int,
    n_elem: int,
    base: float = 10000.0,
    scaling: RopeScaling | None = None,
    block_size: int | None = None,
    length: int | None = None,
    device: torch.device | str | None = None,
) -> Tensor:
    """The table of cos and sin for positions 0 .. seq_len - 1.

    Args:
        n_elem: head_dim.
        block_size: trained length, for yarn and dynamic; default seq_len.
        length: the sequence length dynamic scaling adapts to; default seq_len.

    Returns:
        [seq_len, n_elem / 2, 2] float32, (cos, sin) last.
    """
    device = torch.get_default_device() if device is None else device
    frequencies, factor = rope_frequencies(n_elem, base, scaling, block_size or seq_len, length or seq_len, device)
    angles = torch.outer(torch.arange(seq_len, dtype=torch.float32, device=device), frequencies)  # [T, D/2]
    return torch.stack([angles.cos(), angles.sin()], dim=-1) * factor


def apply_rotary_emb(x: Tensor, freqs_cis: Tensor) -> Tensor:
    """Turn each (even, odd) pair of x by its angle, in float32.

    Args:
        x: [B, T, H, D], any float dtype.
        freqs_cis: [T, D/2, 2] or [B, T, D/2, 2] float32.

    Returns:
        [B, T, H, D] in x's dtype.
    """
    if freqs_cis.dim() == 3:
        freqs_cis = freqs_cis.unsqueeze(0)
    cos, sin = freqs_cis.unsqueeze(3).unbind(-1)  # [B or 1, T, D/2, 1] ...
    cos, sin = cos.transpose(2, 3), sin.transpose(2, 3)  # [B or 1, T, 1, D/2]
    even, odd = x.float().unflatten(-1, (-1, 2)).unbind(-1)  # [B, T, H, D/2]
    turned = torch.stack([even * cos - odd * sin, odd * cos + even * sin], dim=-1)
    return turned.flatten(-2).to(x.dtype)
