"""Key/value caches, one layer each.

The slot of a token in the cache is its position, so a cache needs no bookkeeping: what may be seen follows
from positions alone (`key position <= query position`), and entries left by an earlier sequence or by
padding at later positions are overwritten before they can be seen. Buffers are non-persistent: they move
with `.to()` and never enter `state_dict()`.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from llamalab.quant.rounding import quantize_int8_rows


class KVCache(nn.Module):
    """Keys and values of one layer.

    Args:
        max_batch_size, max_seq_length: capacity, in rows and tokens.
        n_heads: key/value heads.
    """

    def __init__(self, max_batch_size: int, max_seq_length: int, n_heads: int, head_dim: int,
                 dtype: torch.dtype = torch.bfloat16, device: torch.device | str | None = None) -> None:
        super().__init__()
        shape = (max_batch_size, n_heads, max_seq_length, head_dim)
        self.register_buffer("k_cache", torch.zeros(shape, dtype=dtype, device=device), persistent=False)
        self.register_buffer("v_cache", torch.zeros(shape, dtype=dtype, device=device), persistent=False)

    @property
    def max_batch_size(self) -> int:
        return self.k_cache.shape[0]

    @property
    def max_seq_length(self) -> int:
        return self.k_cache.shape[2]

    def update(self, input_pos: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Store k and v at their positions and return all that is stored.

        Args:
            input_pos: [T], or [B, T] where rows differ.
            k, v: [B, Hkv, T, D]; B may be smaller than the capacity.

        Returns:
            keys and values [B, Hkv, S, D], S = max_seq_length.
        """
        store(self.k_cache, input_pos, k)
        store(self.v_cache, input_pos, v)
        return self.k_cache[: k.shape[0]], self.v_cache[: v.shape[0]]


class QuantizedKVCache(nn.Module):
    """As KVCache, in int8 with a float32 scale per token and head: 1 + 4/D bytes a value.

    New tokens are read back through the int8 values like old ones, so results do not depend on how a
    prompt was cut into chunks.
    """

    def __init__(self, max_batch_size: int, max_seq_length: int, n_heads: int, head_dim: int,
                 dtype: torch.dtype = torch.bfloat16, device: torch.device | str | None = None) -> None:
        super().__init__()
        shape = (max_batch_size, n_heads, max_seq_length, head_dim)
        for name in ("k_cache", "v_cache"):
            self.register_buffer(name, torch.zeros(shape, dtype=torch.int8, device=device), persistent=False)
            self.register_buffer(name + "_scale", torch.zeros((*shape[:3], 1), device=device), persistent=False)

    max_batch_size = KVCache.max_batch_size
    max_seq_length = KVCache.max_seq_length

    def update(self, input_pos: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """As `KVCache.update`; returns values of k's dtype."""
        out = []
        for name, new in (("k_cache", k), ("v_cache", v)):
            values, scales = getattr(self, name), getattr(self, name + "_scale")
            q, scale = quantize_int8_rows(new)
            store(values, input_pos, q)
            store(scales, input_pos, scale)
            rows = new.shape[0]
            out.append((values[:rows] * scales[:rows]).to(new.dtype))
        return out[0], out[1]


def store(cache: Tensor, input_pos: Tensor, new: Tensor) -> None:
    """cache[b, :, input_pos[b, t]] = new[b, :, t], in place. cache [B', H, S, D], new [B, H, T, D], B <= B'."""
    new = new.to(cache.dtype)  # under autocast keys are narrower than the weights
    if input_pos.dim() == 1:
        cache[: new.shape[0], :, input_pos] = new
    else:
        rows = torch.arange(new.shape[0], device=new.device)[:, None]
        cache[rows, :, input_pos] = new.transpose(1, 2)  # advanced indices around a slice put [B, T] first
