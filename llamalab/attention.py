"""Attention, three ways that give the same numbers.

    attend             one call of torch's scaled_dot_product_attention: the default everywhere
    windowed_attention the same with a sliding window, in memory linear in the length
    blocked_attention  causal attention for *compiled bf16 training on a CPU*, where torch's own kernel
                       takes 40 % of a block's step: about half the time of `attend` there (docs/log.md)

Shapes: B batch, H query heads, K key/value heads, G = H / K queries share one key head, T tokens, D head_dim.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from llamalab.errors import UserError


def attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
    """Causal attention, or attention under a mask. Keys and values are shared by their queries, not copied.

    Args:
        q: [B, H, T, D]. k, v: [B, K, S, D].
        mask: bool, broadcastable to [B, H, T, S], True where a query may look; None: causal, S = T.

    Returns:
        [B, H, T, D] in q's dtype.
    """
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None, enable_gqa=q.shape[1] != k.shape[1])


def windowed_attention(q: Tensor, k: Tensor, v: Tensor, window: int) -> Tensor:
    """Causal attention to oneself and the window - 1 tokens before: blocks of `window` queries see two blocks of keys."""
    T, out = q.shape[2], []
    distance = torch.arange(window, device=q.device)[:, None] + window - torch.arange(2 * window, device=q.device)
    mask = (distance >= 0) & (distance < window)  # [window, 2 window]; shared by all blocks, the first sees its right half
    for start in range(0, T, window):
        stop, first = min(start + window, T), max(start - window, 0)
        columns = slice(window - (start - first), window + stop - start)
        out.append(attend(q[:, :, start:stop], k[:, :, first:stop], v[:, :, first:stop], mask[: stop - start, columns]))
    return torch.cat(out, dim=2)


def document_positions(documents: Tensor) -> tuple[Tensor, Tensor]:
    """First index of each token's document, and its position in it. documents [B, T] -> two [B, T] int64."""
    at = torch.arange(documents.shape[1], device=documents.device).expand_as(documents)
    begins = torch.ones_like(documents, dtype=torch.bool)
    begins[:, 1:] = documents[:, 1:] != documents[:, :-1]
    starts = torch.where(begins, at, 0).cummax(dim=1).values
    return starts, at - starts


def longest_document(positions: Tensor, trained: int) -> int:
    """Tokens of the longest packed document, the length that dynamic RoPE scaling adapts to. positions [B, T], as above.

    Raises:
        UserError: it is longer than the trained length, and packed with others, which would be stretched with it.
    """
    longest = int(positions.max()) + 1
    if longest > trained and int((positions == 0).sum()) > len(positions):  # more than one document a row
        raise UserError(f"dynamic RoPE scaling depends on a document's length past {trained} tokens, so one of {longest} tokens "
                        "cannot be packed with others; cut it, or train on it alone")
    return longest


BLOCK = 128  # queries a block; smaller ones waste less work above the diagonal, larger ones compile faster
LONGEST = 1024  # blocks are unrolled in the compiled graph, so longer sequences use `attend`


def blocked_attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
    """`attend` as plain matrix products over blocks of queries, for the compiler to fuse the rest.

    Scores and softmax are float32, as in torch's kernel; like FlashAttention (Dao et al. 2022,
    arXiv:2205.14135) the backward forms them anew from the saved log-sum-exp, so nothing of size T x T is
    kept. With a mask, or beyond LONGEST tokens, it is `attend`.
    """
    if mask is not None or q.shape[2] > LONGEST:
        return attend(q, k, v, mask)
    B, H, T, D = q.shape
    K = k.shape[1]
    out, _ = _Blocked.apply(q.reshape(B * K, H // K, T, D), k.reshape(B * K, T, D), v.reshape(B * K, T, D))
    return out.view(B, H, T, D)


class _Blocked(torch.autograd.Function):
    """q [N, G, T, D], k and v [N, T, D] with N = B * K -> output [N, G, T, D], log-sum-exp [N, G, T] float32."""

    @staticmethod
    def forward(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        N, G, T, D = q.shape
        wide_k, outs, sums = k.float(), [], []
        for s, e in _blocks(T):
            queries = (q[:, :, s:e].float() / math.sqrt(D)).reshape(N, -1, D)
            scores = torch.bmm(queries, wide_k[:, :e].transpose(1, 2)).view(N, G, e - s, e)
            at = torch.arange(e, device=q.device)
            scores = torch.where(at <= at[s:, None], scores, -torch.inf)
            top = scores.amax(-1, keepdim=True)
            weights = (scores - top).exp()
            total = weights.sum(-1, keepdim=True)
            weights = (weights / total).to(v.dtype)
            outs.append(torch.bmm(weights.view(N, -1, e), v[:, :e]).view(N, G, e - s, D))
            sums.append((top + total.log()).squeeze(-1))
        return torch.cat(outs, 2), torch.cat(sums, 2)

    @staticmethod
    def setup_context(ctx, inputs, output) -> None:
        ctx.save_for_backward(*inputs, *output)
        ctx.mark_non_differentiable(output[1])

    @staticmethod
    def backward(ctx, d_out: Tensor, _) -> tuple[Tensor, Tensor, Tensor]:
        # Scores are formed transposed, keys by queries: dK and dV then need no transposed copy, and the
        # compiler does not take them for the forward's scores and keep those instead.
        q, k, v, out, sums = ctx.saved_tensors
        N, G, T, D = q.shape
        delta = (d_out.float() * out.float()).sum(-1)  # [N, G, T]
        wide_k, d_q, d_k, d_v = k.float(), [], [], []
        for s, e in _blocks(T):
            queries, d_o = q[:, :, s:e].reshape(N, -1, D), d_out[:, :, s:e].reshape(N, -1, D)
            scores = torch.bmm(wide_k[:, :e], (queries.float() / math.sqrt(D)).transpose(1, 2)).view(N, e, G, e - s)
            at = torch.arange(e, device=q.device)
            weights = torch.where(at[:, None, None] <= at[s:], (scores - sums[:, None, :, s:e]).exp(), 0.0)
            d_weights = torch.bmm(v[:, :e], d_o.transpose(1, 2)).view(N, e, G, e - s)
            d_scores = (weights * (d_weights.float() - delta[:, None, :, s:e]) / math.sqrt(D)).to(q.dtype).view(N, e, -1)
            d_v.append(torch.bmm(weights.to(q.dtype).view(N, e, -1), d_o))
            d_k.append(torch.bmm(d_scores, queries))
            d_q.append(torch.bmm(d_scores.transpose(1, 2), k[:, :e]).view(N, G, e - s, D))
        return torch.cat(d_q, 2), _sum_blocks(d_k).to(k.dtype), _sum_blocks(d_v).to(v.dtype)


def _blocks(T: int) -> list[tuple[int, int]]:
    return [(s, min(s + BLOCK, T)) for s in range(0, T, BLOCK)]


def _sum_blocks(parts: list[Tensor]) -> Tensor:
    """Sum, in float32, over query blocks; part i covers keys 0 .. (i + 1) BLOCK."""
    T = parts[-1].shape[1]
    return torch.cat([sum(p[:, s:e].float() for p in parts[i:]) for i, (s, e) in enumerate(_blocks(T))], dim=1)
