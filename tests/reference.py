"""A Llama forward in float64, written from the formulas: the referee of the real one.

Slow on purpose. One sequence at a time, one head at a time, rotations as complex numbers, softmax spelled out;
nothing is shared with `llamalab.model` or `llamalab.rope`. It is plain torch in float64, so gradients come by `backward()`.
"""

from __future__ import annotations

import torch
from torch import Tensor


def reference_logits(
    weights: dict[str, Tensor],
    config,
    idx: Tensor,
    frequencies: Tensor | None = None,
    rope_factor: float = 1.0,
    layout: str = "interleaved",
    positions: Tensor | None = None,
    documents: Tensor | None = None,
) -> Tensor:
    """Logits of a whole sequence.

    Args:
        weights: Meta's names (`model.state_dict()`), any dtype; used in float64. Biases and q_norm, k_norm are
            applied where they are present.
        config: has n_layer, n_head, n_local_heads, head_dim, norm_eps, rope_base, sliding_window.
        idx: [T] token ids, or [B, T].
        frequencies: [D/2] radians per token, for scaled RoPE; default rope_base^(-2i/D).
        rope_factor: what cos and sin are multiplied by (yarn).
        layout: which two numbers of a head turn together: "interleaved" (2i, 2i+1) or "half" (i, i + D/2), Hugging Face's.
        positions: [T], default 0 .. T-1.
        documents: [T] document of each token; a token sees its own document only. Positions do not restart by themselves.

    Returns:
        [T, V] or [B, T, V] float64.
    """
    if idx.dim() == 2:
        rows = [
            reference_logits(weights, config, row, frequencies, rope_factor, layout,
                             positions if positions is None or positions.dim() == 1 else positions[b],
                             documents if documents is None or documents.dim() == 1 else documents[b])
            for b, row in enumerate(idx)
        ]
        return torch.stack(rows)

    w = {name: tensor.double() for name, tensor in weights.items()}
    T, D = len(idx), config.head_dim
    if frequencies is None:
        frequencies = torch.tensor([config.rope_base ** (-2 * i / D) for i in range(D // 2)], dtype=torch.float64)
    at = torch.arange(T) if positions is None else positions
    turn = torch.polar(torch.full((T, D // 2), float(rope_factor), dtype=torch.float64), at.double()[:, None] * frequencies.double())
    query, key = torch.arange(T)[:, None], torch.arange(T)
    visible = key <= query  # [T, T]
    if config.sliding_window is not None:
        visible &= query - key < config.sliding_window
    if documents is not None:
        visible &= documents[:, None] == documents

    x = w["tok_embeddings.weight"][idx]  # [T, dim]
    for i in range(config.n_layer):
        layer = {name.removeprefix(f"layers.{i}."): t for name, t in w.items() if name.startswith(f"layers.{i}.")}
        x = x + attention(layer, config, norm(x, layer["attention_norm.weight"], config.norm_eps), turn, visible, layout)
        h = norm(x, layer["ffn_norm.weight"], config.norm_eps)
        gate, up = linear(layer, "feed_forward.w1", h), linear(layer, "feed_forward.w3", h)
        x = x + linear(layer, "feed_forward.w2", gate / (1 + torch.exp(-gate)) * up)
    x = norm(x, w["norm.weight"], config.norm_eps)
    return x @ w.get("output.weight", w["tok_embeddings.weight"]).T


def attention(w: dict[str, Tensor], config, x: Tensor, turn: Tensor, visible: Tensor, layout: str) -> Tensor:
    """x [T, dim] -> [T, dim]; query head h reads key/value head h // (H / Hkv)."""
    H, Hkv, D = config.n_head, config.n_local_heads, config.head_dim
    qkv = linear(w, "attention.wqkv", x)
    heads = [qkv[:, i * D : (i + 1) * D] for i in range(H + 2 * Hkv)]  # H queries, Hkv keys, Hkv values
    out = []
    for h in range(H):
        shared = h // (H // Hkv)
        q, k, v = heads[h], heads[H + shared], heads[H + Hkv + shared]
        if "attention.q_norm.weight" in w:
            q = norm(q, w["attention.q_norm.weight"], config.norm_eps)
            k = norm(k, w["attention.k_norm.weight"], config.norm_eps)
        scores = rotate(q, turn, layout) @ rotate(k, turn, layout).T / D**0.5
        weight = torch.where(visible, torch.exp(scores - scores.detach().amax(1, keepdim=True)), 0.0)
        out.append(weight / weight.sum(1, keepdim=True) @ v)
    return linear(w, "attention.wo", torch.cat(out, dim=1))


def rotate(x: Tensor, turn: Tensor, layout: str) -> Tensor:
    """Turn each pair of x [T, D] by multiplying it, as a complex number, with turn [T, D/2]."""
    half = x.shape[1] // 2
    first, second = (x[:, 0::2], x[:, 1::2]) if layout == "interleaved" else (x[:, :half], x[:, half:])
    z = torch.complex(first, second) * turn
    return torch.stack([z.real, z.imag], dim=2).flatten(1) if layout == "interleaved" else torch.cat([z.real, z.imag], dim=1)


def norm(x: Tensor, gain: Tensor, eps: float) -> Tensor:
    return x / torch.sqrt((x * x).mean(dim=-1, keepdim=True) + eps) * gain


def linear(w: dict[str, Tensor], name: str, x: Tensor) -> Tensor:
    y = x @ w[f"{name}.weight"].T
    return y + w[f"{name}.bias"] if f"{name}.bias" in w else y
