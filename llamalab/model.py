"""One Llama that trains and generates (pytorch/ao #674).

The arguments choose the mode, no flag does:

    model(idx)                      train or score: causal attention, nothing kept
    model(idx, input_pos)           prefill or decode with the model's own caches (`setup_caches`)
    model(idx, input_pos, caches)   the same with the caller's caches (`make_caches`)
    model(idx, documents=ids)       train on packed rows: each document sees itself only

Shapes: B batch, T tokens in this call, S tokens in the cache, H query heads, Hkv key/value heads,
D head_dim, V vocabulary. Parameter names are Meta's; pairs of a head are interleaved (see rope.py).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from llamalab.attention import attend, document_positions, longest_document, windowed_attention
from llamalab.cache import KVCache, QuantizedKVCache
from llamalab.config import ModelArgs, find_multiple
from llamalab.errors import UserError
from llamalab.rope import apply_rotary_emb, precompute_freqs_cis
from llamalab.surgery import fuse_qkv

__all__ = ["Attention", "FeedForward", "KVCache", "ModelArgs", "RMSNorm", "Transformer", "TransformerBlock",
           "apply_rotary_emb", "precompute_freqs_cis"]


class Transformer(nn.Module):
    """Embedding, blocks, norm, head. Build, load weights, `setup_caches`, run.

    With `tie_word_embeddings`, `output.weight` is the same Parameter as `tok_embeddings.weight`.
    """

    def __init__(self, config: ModelArgs) -> None:
        super().__init__()
        self.config = config
        self.tok_embeddings = nn.Embedding(config.vocab_size, config.dim)
        self.layers = nn.ModuleList(TransformerBlock(config) for _ in range(config.n_layer))
        self.norm = RMSNorm(config.dim, config.norm_eps)
        self.output = nn.Linear(config.dim, config.vocab_size, bias=False)
        self.tie_weights()
        self.register_buffer("freqs_cis", None, persistent=False)  # [max_seq_length, D/2, 2] float32
        self.caches: nn.ModuleList | None = None
        self.max_batch_size = -1
        self.max_seq_length = -1
        self._rope_length = 0  # the unrounded length asked for; dynamic RoPE scaling adapts to it
        self.register_load_state_dict_post_hook(lambda module, _: module._loaded())

    @classmethod
    def from_name(cls, name: str) -> Transformer:
        """A freshly built model of a preset's sizes (no weights are fetched)."""
        return cls(ModelArgs.from_name(name))

    def tie_weights(self) -> None:
        """Make head and embedding one parameter where the config says so (again after assigning weights)."""
        if self.config.tie_word_embeddings:
            self.output.weight = self.tok_embeddings.weight

    @torch.no_grad()
    def init_weights(self, seed: int) -> Transformer:
        """Normal(0, 0.02) matrices, zero biases, unit norms; the two outputs into the residual stream are
        scaled by 1/sqrt(2 n_layer) (GPT-2). The numbers depend on the seed only, not on device or dtype."""
        generator = torch.Generator().manual_seed(seed)
        for name, p in self.named_parameters():
            if p.dim() == 1:
                p.fill_(0.0 if name.endswith("bias") else 1.0)
            else:
                residual = name.endswith(("wo.weight", "w2.weight"))
                std = 0.02 / math.sqrt(2 * self.config.n_layer) if residual else 0.02
                p.copy_(torch.empty(p.shape, dtype=torch.float32).normal_(0, std, generator=generator))
        return self

    # --- caches ---------------------------------------------------------------------------------------

    def setup_caches(
        self,
        max_batch_size: int,
        max_seq_length: int,
        training: bool = False,
        kv_cache_quantization: bool = False,
        linear_causal_mask: bool = False,
        prompt_length: int | None = None,
    ) -> None:
        """Allocate what forward needs for sequences up to max_seq_length (rounded up to 8).

        training=True: the RoPE table and nothing else; key/value caches of an earlier generation are freed.
        training=False: the table and one cache per layer. Returns early when what exists suffices.

        linear_causal_mask and prompt_length are the seed's way to avoid its S x S mask. No such mask is
        ever made here, so they choose nothing; they are checked as the seed checked them.
        """
        if linear_causal_mask and (prompt_length is None or prompt_length <= 1):
            raise AssertionError("linear_causal_mask needs prompt_length > 1")
        limit = self.config.max_length
        if limit is not None and max_seq_length > limit:
            raise UserError(f"max_seq_length {max_seq_length} is beyond this model's limit of {limit} tokens (block_size)")
        length = find_multiple(max_seq_length, 8)
        if self.freqs_cis is None or self.max_seq_length < length:
            self.max_seq_length = length
            self._refresh_table()
        self._rope_length = max_seq_length  # of this sequence: a longer one before it leaves no trace
        self.max_batch_size = max(self.max_batch_size, max_batch_size)
        if training:
            self.caches = None
            return
        kind = QuantizedKVCache if kv_cache_quantization else KVCache
        have = self.caches[0] if self.caches is not None else None
        if type(have) is not kind or have.max_seq_length < length or have.max_batch_size < max_batch_size:
            self.caches = self.make_caches(self.max_batch_size, self.max_seq_length, kv_cache_quantization)

    def make_caches(self, max_batch_size: int, max_seq_length: int, quantized: bool = False) -> nn.ModuleList:
        """Empty caches, one per layer, for the caller to hold and pass to `forward`."""
        c, kind = self.config, QuantizedKVCache if quantized else KVCache
        like = self.tok_embeddings.weight
        sizes = (max_batch_size, max_seq_length, c.n_local_heads, c.head_dim)
        return nn.ModuleList(kind(*sizes, like.dtype, like.device) for _ in range(c.n_layer))

    def reset_caches(self) -> None:
        """Forget table and caches; `setup_caches` must be called again."""
        self.freqs_cis, self.caches = None, None
        self.max_batch_size = self.max_seq_length = -1

    def _table(self, rows: int, length: int, device: torch.device) -> Tensor:
        c = self.config
        return precompute_freqs_cis(rows, c.head_dim, c.rope_base, c.rope_scaling, c.block_size, length, device)

    def _refresh_table(self) -> None:
        if self.max_seq_length > 0:
            self.freqs_cis = self._table(self.max_seq_length, self.max_seq_length, self.tok_embeddings.weight.device)

    def _loaded(self) -> None:
        self.tie_weights()  # load_state_dict(..., assign=True) makes a parameter of each name
        self._refresh_table()

    def _apply(self, fn, recurse=True):
        # .to(), .half(), to_empty(): whatever they did to the table (rounded it to bf16, left it unset), make it anew.
        super()._apply(fn, recurse)
        self._refresh_table()
        return self

    def _rope_rows(self, n_tokens: int, input_pos: Tensor | None, caches: Sequence[nn.Module] | None) -> Tensor:
        """cos and sin for this call: [T, D/2, 2], or [B, T, D/2, 2] where rows have positions of their own."""
        table = self.freqs_cis
        if self.config.max_length is None:  # dynamic scaling: a function of this sequence's length alone
            rows = length = n_tokens if caches is None else caches[0].max_seq_length
            if caches is not None and caches is self.caches:
                length = self._rope_length
            elif caches is None and input_pos is not None:
                length = longest_document(input_pos, self.config.block_size)
            table = self._table(rows, length, table.device)
        return table[:n_tokens] if input_pos is None else table[input_pos]

    # --- forward --------------------------------------------------------------------------------------

    def hidden(
        self, idx: Tensor, input_pos: Tensor | None = None, caches: Sequence[nn.Module] | None = None, documents: Tensor | None = None
    ) -> Tensor:
        """The last norm's output, [B, T, dim]: what the head, a chunked loss or a last-token step starts from.

        Args:
            idx: [B, T] token ids.
            input_pos: [T] or [B, T] positions, with caches. A row shorter than T is padded at its end with
                further positions; its padding is overwritten, or never looked at, by what follows.
            documents: [B, T] ids of the packed documents, each one a contiguous run.

        Raises:
            AssertionError: before `setup_caches`.
            UserError: more tokens than were set up for, or arguments that exclude each other; with dynamic scaling, packed
                documents beyond the trained length.
        """
        assert self.freqs_cis is not None, "Caches must be initialized first: call setup_caches(batch, length, training=True or False)"
        T = idx.shape[1]
        if input_pos is None:
            if caches is not None:
                raise UserError("caches were given without input_pos")
            limit = self.max_seq_length if self.config.max_length is not None else T
        else:
            caches = self.caches if caches is None else caches
            assert caches is not None, "Caches must be initialized first: call setup_caches(batch, length) without training=True"
            if documents is not None:
                raise UserError("documents (packed training) and input_pos (cached generation) exclude each other")
            if idx.shape[0] > caches[0].max_batch_size:
                raise UserError(f"batch of {idx.shape[0]} rows, but the caches hold {caches[0].max_batch_size}")
            limit = caches[0].max_seq_length
        if T > limit:
            raise UserError(f"{T} tokens, but caches were set up for {limit}: call setup_caches with a larger max_seq_length")

        mask, window = None, self.config.sliding_window
        if input_pos is not None:
            freqs_cis = self._rope_rows(T, input_pos, caches)
            keys = torch.arange(limit, device=idx.device)
            mask = keys <= input_pos[..., None]  # [T, S] or [B, T, S]
            if window is not None:
                mask = mask & (keys > input_pos[..., None] - window)
            mask = mask.unsqueeze(-3)  # [(B,) 1, T, S]: the same for every head
        elif documents is not None:
            starts, positions = document_positions(documents)
            freqs_cis = self._rope_rows(T, positions, None)
            at = torch.arange(T, device=idx.device)
            mask = (at[:, None] >= at) & (at >= starts[..., None])  # [B, T, T]: my document, up to me
            if window is not None:
                mask = mask & (at > at[:, None] - window)
            mask = mask.unsqueeze(1)
        else:
            freqs_cis = self._rope_rows(T, None, None)

        x = self.tok_embeddings(idx)  # [B, T, dim]
        for i, layer in enumerate(self.layers):
            x = layer(x, freqs_cis, mask, input_pos, None if caches is None else caches[i])
        return self.norm(x)

    def forward(
        self, idx: Tensor, input_pos: Tensor | None = None, caches: Sequence[nn.Module] | None = None, documents: Tensor | None = None
    ) -> Tensor:
        """Logits [B, T, V] in the weights' dtype; arguments as for `hidden`."""
        return self.output(self.hidden(idx, input_pos, caches, documents))


class TransformerBlock(nn.Module):
    """Attention and feed-forward, each on a normed copy of the residual stream. Holds no state."""

    def __init__(self, config: ModelArgs) -> None:
        super().__init__()
        self.attention = Attention(config)
        self.feed_forward = FeedForward(config)
        self.attention_norm = RMSNorm(config.dim, config.norm_eps)
        self.ffn_norm = RMSNorm(config.dim, config.norm_eps)

    def forward(self, x: Tensor, freqs_cis: Tensor, mask: Tensor | None = None, input_pos: Tensor | None = None,
                cache: nn.Module | None = None) -> Tensor:
        x = x + self.attention(self.attention_norm(x), freqs_cis, mask, input_pos, cache)
        return x + self.feed_forward(self.ffn_norm(x))


class Attention(nn.Module):
    """Grouped-query attention; wqkv is the fused projection, its rows Q, then K, then V."""

    def __init__(self, config: ModelArgs) -> None:
        super().__init__()
        self.n_head, self.n_local_heads, self.head_dim = config.n_head, config.n_local_heads, config.head_dim
        self.sliding_window = config.sliding_window
        self.attend = attend  # see attention.py for the others
        kv_dim = self.n_local_heads * self.head_dim
        self.sizes = [self.n_head * self.head_dim, kv_dim, kv_dim]
        self.wqkv = nn.Linear(config.dim, sum(self.sizes), bias=config.qkv_bias)
        self.wo = nn.Linear(self.sizes[0], config.dim, bias=config.out_bias)
        if config.qk_norm:
            self.q_norm, self.k_norm = (RMSNorm(config.head_dim, config.norm_eps) for _ in range(2))
        else:
            self.q_norm = self.k_norm = None
        self.register_load_state_dict_pre_hook(fuse_qkv)

    def forward(self, x: Tensor, freqs_cis: Tensor, mask: Tensor | None = None, input_pos: Tensor | None = None,
                cache: nn.Module | None = None) -> Tensor:
        q, k, v = (part.unflatten(-1, (-1, self.head_dim)) for part in self.wqkv(x).split(self.sizes, dim=-1))  # [B, T, H, D]
        if self.q_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        q, k = apply_rotary_emb(q, freqs_cis), apply_rotary_emb(k, freqs_cis)
        q, k, v = (part.transpose(1, 2) for part in (q, k, v))  # [B, H, T, D]
        if cache is not None:
            k, v = cache.update(input_pos, k, v)  # [B, Hkv, S, D]
        if mask is None and self.sliding_window is not None and x.shape[1] > self.sliding_window:
            y = windowed_attention(q, k, v, self.sliding_window)
        else:
            y = self.attend(q, k, v, mask)
        return self.wo(y.transpose(1, 2).flatten(2))


class FeedForward(nn.Module):
    """SwiGLU (Shazeer 2020, arXiv:2002.05202)."""

    def __init__(self, config: ModelArgs) -> None:
        super().__init__()
        self.w1 = nn.Linear(config.dim, config.intermediate_size, bias=config.mlp_bias)
        self.w3 = nn.Linear(config.dim, config.intermediate_size, bias=config.mlp_bias)
        self.w2 = nn.Linear(config.intermediate_size, config.dim, bias=config.mlp_bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


class RMSNorm(nn.Module):
    """x / rms(x) * weight; the statistics are float32 whatever x is."""

    def __init__(self, dim: int, eps: float = 1e-5) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(dim))

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        return wide.to(x.dtype) * self.weight
