"""Rounding functions, pure: the same ones serve caches, optimizers, fake quantization and packing."""

from __future__ import annotations

import torch
from torch import Tensor


def quantize_int8_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """Symmetric int8 with one scale per row of the last axis: x ~ q * scale.

    Args:
        x: [..., D], any float dtype; computed in float32.

    Returns:
        q [..., D] int8 in -127 .. 127, scale [..., 1] float32. A row of zeros gives q = 0, scale = 0.
    """
    x = x.float()
    scale = x.abs().amax(dim=-1, keepdim=True) / 127
    q = torch.where(scale > 0, x / scale.clamp_min(torch.finfo(torch.float32).tiny), 0.0).round().clamp(-127, 127)
    return q.to(torch.int8), scale


def stochastic_round_to_bf16(x: Tensor, generator: torch.Generator | None = None) -> Tensor:
    """Round float32 to one of its two bf16 neighbours with E[result] = x (pytorch/ao #1124).

    bf16 is the upper half of a float32, so adding a uniform 16-bit integer to the lower half and cutting
    it off rounds up with probability (x - lo) / (hi - lo). Values on the grid, signs, zeros, infinities
    and NaN are kept; the largest finite values may round to infinity exactly as round-to-nearest may.
    """
    if x.dtype != torch.float32:
        raise TypeError(f"stochastic rounding takes float32, got {x.dtype}")
    bits = x.contiguous().view(torch.int32)
    noise = torch.randint(0, 1 << 16, x.shape, dtype=torch.int32, device=x.device, generator=generator)
    rounded = ((bits + noise) & -65536).view(torch.float32)
    return torch.where(x.isfinite(), rounded, x).to(torch.bfloat16)
