"""Names and layouts of other people's checkpoints, as one table that is read in both directions.

A layout is how a kind of file spells the model:

    hf             Hugging Face: q_proj, k_proj, v_proj; the two numbers of a rotary pair lie half a head apart
    meta           Meta's consolidated.*.pth, older gpt-fast: wq, wk, wv; pairs side by side, as in memory
    fused          torchao and gpt-fast: wqkv; our own names
    gguf           llama.cpp, architecture llama: attn_q, ...; pairs side by side
    gguf-half      llama.cpp, architectures qwen2 and qwen3: the same names; pairs half a head apart

`parts(config, layout)` lists every tensor such a file holds. Each is a run of rows of one of our parameters, in our order
or with the pairs of each head taken apart; loading copies along the list, saving copies back.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from llamalab.config import PRESETS, ModelArgs
from llamalab.errors import UserError
from llamalab.model import Transformer

LAYOUTS = ("hf", "meta", "fused", "gguf", "gguf-half")

#: our name -> (Hugging Face's, GGUF's); within a layer, and outside
_LAYER_NAMES = {
    "attention.wq": ("self_attn.q_proj", "attn_q"),
    "attention.wk": ("self_attn.k_proj", "attn_k"),
    "attention.wv": ("self_attn.v_proj", "attn_v"),
    "attention.wo": ("self_attn.o_proj", "attn_output"),
    "attention.q_norm": ("self_attn.q_norm", "attn_q_norm"),
    "attention.k_norm": ("self_attn.k_norm", "attn_k_norm"),
    "feed_forward.w1": ("mlp.gate_proj", "ffn_gate"),
    "feed_forward.w2": ("mlp.down_proj", "ffn_down"),
    "feed_forward.w3": ("mlp.up_proj", "ffn_up"),
    "attention_norm": ("input_layernorm", "attn_norm"),
    "ffn_norm": ("post_attention_layernorm", "ffn_norm"),
}
_OUTER_NAMES = {
    "tok_embeddings": ("model.embed_tokens", "token_embd"),
    "norm": ("model.norm", "output_norm"),
    "output": ("lm_head", "output"),
}

#: Tensors that some files carry and nobody needs: rotary tables and key/value caches, which are made anew.
HARMLESS = re.compile(
    r"(model\.)?(layers\.\d+\.self_attn\.)?rotary_emb\.(inv_freq|cos_cached|sin_cached)"  # Hugging Face
    r"|rope\.freqs"  # Meta
    r"|freqs_cis|causal_mask|layers\.\d+\.attention\.kv_cache\.[kv]_cache(_scale)?"  # gpt-fast and torchao, after setup_caches
    r"|rope_freqs\.weight"  # GGUF; gguf_file reads it as part of the config
)

_WRAPPERS = ("_orig_mod", "module", "_checkpoint_wrapped_module", "_fsdp_wrapped_module")


@dataclass(frozen=True)
class Part:
    """One tensor of a file: rows [start, stop) of one of our parameters."""

    name: str  # in the file
    ours: str  # our parameter
    start: int
    stop: int
    shape: tuple[int, ...]
    heads: int = 0  # 0: rows in our order; else the rows are this many heads whose pairs the file keeps half a head apart


def parts(config: ModelArgs, layout: str) -> list[Part]:
    """Every tensor of a file in this layout. A tied matrix is listed once, as the embedding.

    Raises:
        UserError: unknown layout.
    """
    if layout not in LAYOUTS:
        raise UserError(f"unknown checkpoint layout {layout!r}; known: {', '.join(LAYOUTS)}")
    half_split = layout in ("hf", "gguf-half")
    kv_dim = config.n_local_heads * config.head_dim
    qkv = [("wq", config.n_head * config.head_dim, config.n_head), ("wk", kv_dim, config.n_local_heads), ("wv", kv_dim, 0)]
    found = []
    for ours, shape in parameter_shapes(config).items():
        module, kind = ours.rsplit(".", 1)  # kind: weight or bias
        if module.endswith("wqkv") and layout != "fused":
            start = 0
            for part, rows, heads in qkv:
                name = f"{rename(module.removesuffix('wqkv') + part, layout)}.{kind}"
                found.append(Part(name, ours, start, start + rows, (rows, *shape[1:]), heads if half_split else 0))
                start += rows
        else:
            heads = 1 if half_split and module.endswith(("q_norm", "k_norm")) else 0  # a norm's gain goes with the numbers it scales
            found.append(Part(f"{rename(module, layout)}.{kind}", ours, 0, shape[0], shape, heads))
    return found


def parameter_shapes(config: ModelArgs) -> dict[str, tuple[int, ...]]:
    """Name and shape of each parameter, a tied one once. Allocates nothing."""
    with torch.device("meta"):
        return {name: tuple(p.shape) for name, p in Transformer(config).named_parameters()}


def rename(module: str, layout: str) -> str:
    """The name of one of our modules (with wq, wk, wv apart) in a layout."""
    if layout in ("meta", "fused"):
        return module
    column = 0 if layout == "hf" else 1
    layer = re.fullmatch(r"layers\.(\d+)\.(.+)", module)
    if layer is None:
        return _OUTER_NAMES[module][column]
    return f"{'model.layers' if layout == 'hf' else 'blk'}.{layer[1]}.{_LAYER_NAMES[layer[2]][column]}"


def head_name(layout: str) -> str:
    """The output head's name in a layout: what a tied checkpoint may hold instead of, or beside, the embedding."""
    return f"{rename('output', layout)}.weight"


def guess_layout(names: Iterable[str]) -> str:
    """hf, meta or fused, by the names in a file."""
    names = set(names)
    if any(name.startswith(("tok_embeddings.", "layers.", "output.")) for name in names):
        return "fused" if any(".wqkv." in name for name in names) else "meta"
    return "hf"


def clean_name(name: str) -> str:
    """A parameter's name without what torch.compile, DistributedDataParallel, FSDP or activation checkpointing put into it."""
    return ".".join(step for step in name.split(".") if step not in _WRAPPERS)


# --- order of rows --------------------------------------------------------------------------------------


def to_interleaved(rows: Tensor, heads: int) -> Tensor:
    """Half-split heads to ours: row i and row i + D/2 of each head become rows 2i and 2i + 1. [heads * D, ...] -> same."""
    return rows.unflatten(0, (heads, 2, -1)).transpose(1, 2).flatten(0, 2)


def to_half_split(rows: Tensor, heads: int) -> Tensor:
    """The inverse of `to_interleaved`: of 8 rows of one head, 0 2 4 6 1 3 5 7."""
    return rows.unflatten(0, (heads, -1, 2)).transpose(1, 2).flatten(0, 2)


# --- a model's weights under other names ----------------------------------------------------------------


def unwrap(model: nn.Module) -> Transformer:
    """The model inside torch.compile's, DistributedDataParallel's or FSDP's wrapper."""
    while not isinstance(model, Transformer):
        inner = getattr(model, "_orig_mod", None) or getattr(model, "module", None)
        if inner is None:
            raise UserError(f"expected a llamalab Transformer, got {type(model).__name__}")
        model = inner
    return model


def plain_state(model: nn.Module) -> dict[str, Tensor]:
    """Parameters under our own names, whatever wraps the model or its blocks; a tied one once.

    Raises:
        UserError: parameters that are not a plain Llama's, or a tie the config does not tell of.
    """
    inner = unwrap(model)
    params = {clean_name(name): p for name, p in inner.named_parameters(remove_duplicate=False)}
    odd = sorted({"output.weight", *parameter_shapes(inner.config)} ^ set(params))
    if odd:
        raise UserError(f"only a plain model can be written in another format; this one differs in {', '.join(odd[:8])} "
                        "(merge adapters first)")
    tied = params["output.weight"] is params["tok_embeddings.weight"]
    if tied != inner.config.tie_word_embeddings:
        raise UserError(f"config.tie_word_embeddings is {inner.config.tie_word_embeddings}, but head and embedding are "
                        f"{'one matrix' if tied else 'two matrices'}")
    if tied:
        del params["output.weight"]
    return {name: p.detach() for name, p in params.items()}


def to_layout(config: ModelArgs, layout: str, tensor_of: Callable[[str], Tensor]) -> Iterator[tuple[Part, Tensor]]:
    """What a file in this layout holds, part by part: weights, or gradients, whichever `tensor_of(our name)` gives.

    Tensors whose rows keep their order are views.
    """
    for part in parts(config, layout):
        rows = tensor_of(part.ours)[part.start : part.stop]
        yield part, to_half_split(rows, part.heads) if part.heads else rows


def hf_tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """(Hugging Face name, tensor) of every weight, a tied matrix once; half-split Q and K are copies, the rest views.

    Raises:
        UserError: as for `plain_state`.
    """
    state = plain_state(model)
    return ((part.name, tensor) for part, tensor in to_layout(unwrap(model).config, "hf", state.__getitem__))


# --- Meta's params.json ---------------------------------------------------------------------------------

_PARAMS = {"dim", "n_layers", "n_heads", "n_kv_heads", "vocab_size", "multiple_of", "ffn_dim_multiplier", "norm_eps", "rope_theta",
           "use_scaled_rope", "rope_scaling_factor", "max_seq_len", "max_batch_size"}


def config_from_params(params: dict[str, Any], shapes: dict[str, tuple[int, ...]], tied: bool) -> ModelArgs:
    """Read Meta's params.json. What it leaves out comes from the tensors or from the release it describes.

    Vocabulary and feed-forward sizes are read off `shapes`: the file says -1, or gives a rule with roundings.
    Sequence length: Llama 1 (eps 1e-6) 2048, Llama 2 4096, CodeLlama (rope base 1e6) 16384, Llama 3 8192, 3.1 and later
    131072. Llama 3.2 says only `use_scaled_rope`, like 3.1, but scales by 32; it is known by its size.

    Args:
        shapes: of the whole (merged) tensors, by Meta's names.
        tied: whether head and embedding are one matrix.

    Raises:
        UserError: a setting that this model does not compute, or one that is missing.
    """
    unknown = sorted(set(params) - _PARAMS)
    if unknown:
        raise UserError(f"params.json has settings this version does not know: {', '.join(unknown)}")
    needed = ("tok_embeddings.weight", "layers.0.feed_forward.w1.weight")
    missing = [name for name in ("dim", "n_layers", "n_heads") if name not in params] + [name for name in needed if name not in shapes]
    if missing:
        raise UserError(f"a Meta checkpoint needs {', '.join(missing)}, which are not there")
    base, eps = float(params.get("rope_theta", 10000.0)), float(params.get("norm_eps", 1e-5))
    scaling = None
    if params.get("use_scaled_rope"):
        sizes = (params["dim"], params["n_layers"])
        like = next((p for p in PRESETS.values() if (p.get("dim"), p.get("n_layer")) == sizes and "rope_scaling" in p), None)
        scaling = dict((like or PRESETS["Llama-3.1-8B"])["rope_scaling"])
        scaling["factor"] = float(params.get("rope_scaling_factor") or scaling["factor"])
    length = 131072 if scaling else {500000.0: 8192, 1000000.0: 16384}.get(base, 2048 if eps == 1e-6 else 4096)
    return ModelArgs(
        block_size=params.get("max_seq_len") or length,
        vocab_size=shapes["tok_embeddings.weight"][0],
        n_layer=params["n_layers"],
        n_head=params["n_heads"],
        dim=params["dim"],
        intermediate_size=shapes["layers.0.feed_forward.w1.weight"][0],
        n_local_heads=params.get("n_kv_heads") or params["n_heads"],
        rope_base=base,
        norm_eps=eps,
        tie_word_embeddings=tied,
        rope_scaling=scaling,
    )


def config_from_name(name: str, shapes: dict[str, tuple[int, ...]], tied: bool) -> ModelArgs:
    """A preset by directory name, for a model.pth with no config beside it (gpt-fast's way); its sizes are checked on loading.

    Raises:
        UserError: no preset has a name that is part of this one.
    """
    try:
        config = ModelArgs.from_name(name)
    except UserError as error:
        raise UserError(f"no config.json or params.json beside the weights, and the directory's name does not say: {error}") from None
    vocab = shapes.get("tok_embeddings.weight", (config.vocab_size,))[0]  # fine-tuned vocabularies grow
    return dataclasses.replace(config, tie_word_embeddings=tied, vocab_size=vocab)
