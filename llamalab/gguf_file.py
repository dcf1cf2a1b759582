"""GGUF, llama.cpp's one-file format, in and out (layout: ggml's docs/gguf.md).

    model = load_model("SmolLM2-135M-Instruct.Q4_1.gguf")            # checkpoint.py reads through `read_gguf` here
    print(write_gguf("out.gguf", model, "q8_0", tokenizer).table())

Three architectures of llama.cpp cover the families: llama (Llama and Mistral), qwen2, qwen3. llama turns neighbouring
numbers of a head together, as we do; qwen2 and qwen3 turn numbers half a head apart. What llama.cpp would compute
differently from us is refused by name before a byte is written.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor

from llamalab.config import ModelArgs, RopeScaling
from llamalab.convert import Part, plain_state, to_layout, unwrap
from llamalab.errors import UserError
from llamalab.files import temporary_beside
from llamalab.gguf_tokenizer import add_tokenizer, check_tokenizer
from llamalab.rope import rope_frequencies
from llamalab.tensor_files import Stored, few
from llamalab.tokenizer import Tokenizer
from llamalab.tokenizer_formats import gguf_head

#: architecture -> (family, layout of its tensors)
ARCHITECTURES = {"llama": ("llama", "gguf"), "qwen2": ("qwen2", "gguf-half"), "qwen3": ("qwen3", "gguf-half")}
_ARCHITECTURE_OF = {"llama": "llama", "mistral": "llama", "qwen2": "qwen2", "qwen3": "qwen3"}

#: kind -> number of llama.cpp's file type (`general.file_type`)
KINDS = {"f32": 0, "f16": 1, "bf16": 32, "q8_0": 7, "q4_0": 2}

#: Where the parameters of llama3 scaling stand in files we write: [factor, low, high, original length].
#: llama.cpp knows only the divisors that follow from them (tensor rope_freqs.weight).
_LLAMA3_KEY = "llamalab.rope.llama3"


def _gguf() -> ModuleType:
    try:
        import gguf
    except ImportError:
        raise UserError("GGUF files need the package gguf: pip install 'llamalab[gguf]'") from None
    return gguf


# --- in -------------------------------------------------------------------------------------------------


def read_gguf(path: Path) -> tuple[ModelArgs, str, dict[str, Stored]]:
    """Config, layout and tensors of a GGUF file. Quantized tensors are dequantized to float32 as they are read.

    Raises:
        UserError: not GGUF, cut, split into several files, or a model this code does not compute, by name.
    """
    metadata, directory = gguf_head(path)
    if metadata.get("split.count", 0) > 1:
        raise UserError(f"{path} is one of {metadata['split.count']} parts; join them first (llama.cpp: llama-gguf-split --merge)")
    architecture = metadata.get("general.architecture")
    if architecture not in ARCHITECTURES:
        raise UserError(f"{path}: GGUF architecture {architecture!r} is not supported; known: {', '.join(ARCHITECTURES)}")
    tensors = _stored(path, directory)
    keys = {key.removeprefix(f"{architecture}."): value for key, value in metadata.items() if key.startswith(f"{architecture}.")}
    try:
        config = _read_config(keys, architecture, tensors)
    except KeyError as error:
        raise UserError(f"{path} lacks {architecture}.{error.args[0]} in its metadata") from None
    except UserError as error:
        raise UserError(f"{path}: {error}") from None
    ids = {name: metadata.get(f"tokenizer.ggml.{name}_token_id") for name in ("bos", "eos", "eot", "eom", "padding")}
    ends = tuple(dict.fromkeys(ids[name] for name in ("eos", "eot", "eom") if ids[name] is not None))
    scaling = _llama3_scaling(path, config, tensors, metadata.get(_LLAMA3_KEY)) or config.rope_scaling
    config = dataclasses.replace(
        config, rope_scaling=scaling, bos_token_id=ids["bos"], eos_token_ids=ends, pad_token_id=ids["padding"]
    )
    return config, ARCHITECTURES[architecture][1], tensors


def _stored(path: Path, directory: dict[str, tuple[tuple[int, ...], int, int]]) -> dict[str, Stored]:
    """directory: name -> (shape, ggml type, first byte in the file)."""
    gguf = _gguf()
    size, found, cut = path.stat().st_size, {}, []
    for name, (shape, number, begin) in directory.items():
        kind = gguf.GGMLQuantizationType(number) if number in gguf.GGMLQuantizationType.__members__.values() else None
        if kind is None or not _can_read(kind):
            found[name] = Stored(shape, kind.name if kind else f"ggml type {number}", path, _unreadable)
            continue
        block, block_bytes = gguf.GGML_QUANT_SIZES[kind]
        if not shape or shape[-1] % block:
            raise UserError(f"{path}: tensor {name} of type {kind.name} has shape {list(shape)}, rows that no block of {block} divides")
        row = shape[-1] if len(shape) > 1 else block  # a vector is read block by block
        row_bytes = row // block * block_bytes
        if begin + math.prod(shape) // block * block_bytes > size:
            cut.append(name)
        reader = _Rows(path, begin, kind, shape, block if len(shape) == 1 else 1, row_bytes)
        found[name] = Stored(shape, reader.dtype, path, reader)
    if cut:
        raise UserError(f"{path} is cut off: it ends ({size} bytes) before tensor {cut[0]} does, and {len(cut) - 1} more are missing")
    return found


@dataclass(frozen=True)
class _Rows:
    """Reads rows of one tensor; `per` numbers of the first dimension make one row of `row_bytes`."""

    path: Path
    begin: int
    kind: Any  # gguf.GGMLQuantizationType
    shape: tuple[int, ...]
    per: int
    row_bytes: int

    @property
    def dtype(self) -> torch.dtype:
        return {"F16": torch.float16, "BF16": torch.bfloat16, "F64": torch.float64}.get(self.kind.name, torch.float32)

    def __call__(self, start: int, stop: int) -> Tensor:
        first, last = start // self.per, -(-stop // self.per)
        raw = np.fromfile(self.path, np.uint8, (last - first) * self.row_bytes, offset=self.begin + first * self.row_bytes)
        if self.kind.name in ("F32", "F16", "BF16", "F64"):
            values = torch.from_numpy(raw).view(self.dtype)
        else:
            values = torch.from_numpy(_gguf().quants.dequantize(raw.reshape(last - first, -1), self.kind))
        values = values.reshape(-1, *self.shape[1:])
        return values[start - first * self.per : stop - first * self.per]


def _can_read(kind: Any) -> bool:
    gguf = _gguf()
    if kind.name in ("F32", "F16", "F64"):
        return True
    try:
        gguf.quants.dequantize(np.zeros((1, gguf.GGML_QUANT_SIZES[kind][1]), np.uint8), kind)
    except NotImplementedError:
        return False
    return True


def _unreadable(start: int, stop: int) -> Tensor:
    raise UserError("a tensor of a type that cannot be read was asked for")


def _read_config(keys: dict[str, Any], architecture: str, tensors: dict[str, Stored]) -> ModelArgs:
    for key, harmless in {"expert_count": 0, "attention.sliding_window": 0, "attention.scale": 0.0, "rope.scaling.alpha": 0.0}.items():
        if keys.get(key, harmless) != harmless:
            raise UserError(f"GGUF metadata has {architecture}.{key} = {keys[key]}, which this model does not compute")
    heads = keys["attention.head_count"]
    for key in ("attention.head_count", "attention.head_count_kv", "feed_forward_length"):
        if isinstance(keys.get(key), list):
            raise UserError(f"{architecture}.{key} differs from layer to layer, which is not supported")
    head_dim = keys.get("attention.key_length") or keys["embedding_length"] // heads
    for key in ("attention.value_length", "rope.dimension_count"):
        if keys.get(key, head_dim) != head_dim:
            raise UserError(f"{architecture}.{key} is {keys[key]}; only the head size, {head_dim}, is supported")
    if "token_embd.weight" not in tensors:
        raise UserError("there is no tensor token_embd.weight")

    def has(name: str) -> bool:
        return f"blk.0.{name}.bias" in tensors

    return ModelArgs(
        block_size=keys["context_length"],
        vocab_size=tensors["token_embd.weight"].shape[0],
        n_layer=keys["block_count"],
        n_head=heads,
        dim=keys["embedding_length"],
        intermediate_size=keys["feed_forward_length"],
        n_local_heads=keys.get("attention.head_count_kv", heads),
        head_dim=head_dim,
        rope_base=_shortest(keys.get("rope.freq_base", 10000.0)),
        norm_eps=_shortest(keys["attention.layer_norm_rms_epsilon"]),
        tie_word_embeddings="output.weight" not in tensors,
        rope_scaling=_read_scaling(keys, architecture),
        qkv_bias=has("attn_q") or architecture == "qwen2",
        out_bias=has("attn_output"),
        mlp_bias=has("ffn_gate"),
        qk_norm=architecture == "qwen3",
        family=ARCHITECTURES[architecture][0],
    )


def _read_scaling(keys: dict[str, Any], architecture: str) -> RopeScaling | None:
    factor = _shortest(keys.get("rope.scaling.factor") or keys.get("rope.scale_linear") or 1.0)
    kind = keys.get("rope.scaling.type", "linear")
    if kind == "none" or factor == 1.0:
        return None
    if kind == "linear":
        return RopeScaling("linear", factor)
    if kind == "yarn":
        sharpen = _shortest(keys.get("rope.scaling.attn_factor", 1.0) * (0.1 * math.log(factor) + 1.0))
        explicit = sharpen if "rope.scaling.attn_factor" in keys else None
        return RopeScaling("yarn", factor, keys.get("rope.scaling.original_context_length"), attention_factor=explicit)
    raise UserError(f"{architecture}.rope.scaling.type {kind!r} is not supported; known: none, linear, yarn")


def _llama3_scaling(path: Path, config: ModelArgs, tensors: dict[str, Stored], known: list[float] | None) -> RopeScaling | None:
    """The parameters behind the divisors in rope_freqs.weight: those we wrote, or Meta's with the factor seen there.

    Raises:
        UserError: the divisors follow from neither.
    """
    if "rope_freqs.weight" not in tensors:
        return None
    if config.rope_scaling is not None:
        raise UserError(f"{path} has both rope_freqs.weight and rope scaling {config.rope_scaling.type!r}; only one is supported")
    stored = tensors["rope_freqs.weight"]
    divisors = stored.rows(0, stored.shape[0]).float()
    if torch.equal(divisors, torch.ones_like(divisors)):
        return None
    factor, low, high, original = known or (divisors.max().item(), 1.0, 4.0, 8192)
    scaling = RopeScaling("llama3", _shortest(factor), int(original), _shortest(low), _shortest(high))
    expected = rope_divisors(dataclasses.replace(config, rope_scaling=scaling))
    # float32 on both sides; converters form the divisors in another order of operations
    if divisors.shape != expected.shape or not torch.allclose(divisors, expected, rtol=1e-4):
        raise UserError(f"{path}: the divisors in rope_freqs.weight are not those of llama3 scaling with {scaling.to_hf()}")
    return scaling


def rope_divisors(config: ModelArgs) -> Tensor:
    """What llama3 scaling divides each pair's frequency by, [head_dim / 2] float32."""
    plain, scaled = (
        rope_frequencies(config.head_dim, config.rope_base, scaling, config.block_size, config.block_size)[0]
        for scaling in (None, config.rope_scaling)
    )
    return plain / scaled


def _shortest(value: float) -> float:
    """The float with the fewest digits that is this float32: GGUF keeps 1e-05 as 9.99999974e-06."""
    return float(str(np.float32(value)))


# --- out ------------------------------------------------------------------------------------------------


@dataclass
class Written:
    """What went into a GGUF file: (name, type, shape, bytes) of each tensor, and what is not as one might expect."""

    tensors: list[tuple[str, str, tuple[int, ...], int]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def table(self) -> str:
        """Tensors and bytes by type, then the notes."""
        lines = []
        for kind in dict.fromkeys(kind for _, kind, _, _ in self.tensors):
            of_kind = [(shape, size) for _, of, shape, size in self.tensors if of == kind]
            numbers, size = sum(math.prod(shape) for shape, _ in of_kind), sum(size for _, size in of_kind)
            lines.append(f"  {kind:5} {len(of_kind):5} tensors {numbers:15,} numbers {size / 1e6:10.1f} MB")
        return "\n".join(lines + [f"  note: {note}" for note in self.notes])


def write_gguf(path: str | Path, model: torch.nn.Module, kind: str = "f16", tokenizer: Tokenizer | None = None) -> Written:
    """Write a model, and its tokenizer and chat template, as llama.cpp reads them.

    Vectors stay float32. With q4_0 the embedding and the head are Q8_0 (as llama.cpp keeps them finer too). A matrix whose
    rows 32 does not divide stays F16; the notes name it. Without a tokenizer, llama.cpp needs token ids.

    Args:
        kind: f32, f16, bf16, q8_0 or q4_0.

    Raises:
        UserError: a kind or a model llama.cpp does not know or would compute otherwise, a tokenizer it would encode
            otherwise with, a number too large for float16.
    """
    gguf = _gguf()
    if kind not in KINDS:
        raise UserError(f"unknown GGUF kind {kind!r}; known: {', '.join(KINDS)}")
    if Path(path).is_dir():
        raise UserError(f"{path} is a directory; a GGUF file cannot take its place")
    config = unwrap(model).config
    architecture, length, notes = _check(config, tokenizer)
    state = plain_state(model)
    found = list(to_layout(config, ARCHITECTURES[architecture][1], state.__getitem__))
    kinds = {part.name: _kind_for(part, kind) for part, _ in found}
    odd = [part.name for part, _ in found if len(part.shape) > 1 and part.shape[-1] % 32]
    if odd and kind.startswith("q"):
        notes.append(f"rows are no multiple of 32, so these stay F16: {few(odd)}")

    with temporary_beside(path) as tmp:
        writer = gguf.GGUFWriter(tmp, architecture)
        try:
            _add_config(writer, config, length, kind, Path(path).stem)
            expects = add_tokenizer(writer, tokenizer, config.vocab_size, notes)
            divisors = rope_divisors(config).numpy() if config.rope_scaling and config.rope_scaling.type == "llama3" else None
            if divisors is not None:
                writer.add_tensor_info("rope_freqs.weight", divisors.shape, divisors.dtype, divisors.nbytes)
            written = Written(notes=notes)
            for part, _ in found:
                block, block_bytes = gguf.GGML_QUANT_SIZES[kinds[part.name]]
                size = math.prod(part.shape) // block * block_bytes
                writer.add_tensor_info(part.name, part.shape, np.dtype(np.float32), size, raw_dtype=kinds[part.name])
                written.tensors.append((part.name, kinds[part.name].name, part.shape, size))
            writer.write_header_to_file()
            writer.write_kv_data_to_file()
            writer.write_ti_data_to_file()
            if tokenizer is not None:
                check_tokenizer(tmp, tokenizer, expects)
            if divisors is not None:
                writer.write_tensor_data(divisors)
            for part, rows in found:
                writer.write_tensor_data(_encode(part.name, rows, kinds[part.name]))
        finally:
            writer.close()
    return written


def _check(config: ModelArgs, tokenizer: Tokenizer | None) -> tuple[str, int, list[str]]:
    """(architecture, context length, notes), or UserError for what llama.cpp does not compute."""
    config.check_family()
    architecture, scaling, notes = _ARCHITECTURE_OF[config.family], config.rope_scaling, []
    refused = {
        "dynamic rope scaling": scaling and scaling.type == "dynamic",
        "llama3 rope scaling in a Qwen model": scaling and scaling.type == "llama3" and architecture != "llama",
        "yarn with beta_fast, beta_slow or truncate of its own": scaling and scaling.type == "yarn" and (
            scaling.beta_fast not in (None, 32) or scaling.beta_slow not in (None, 1) or scaling.truncate is False),
        "a Qwen2 model whose head_dim is not dim / n_head": architecture == "qwen2" and config.head_dim * config.n_head != config.dim,
        "a Qwen3 model with attention_bias": architecture == "qwen3" and config.out_bias,
    }
    if any(refused.values()):
        raise UserError(f"llama.cpp does not compute {', '.join(name for name, is_so in refused.items() if is_so)}; no GGUF was written")
    if tokenizer is not None and tokenizer.vocab_size > config.vocab_size:
        raise UserError(f"the tokenizer has {tokenizer.vocab_size} ids, the model only {config.vocab_size}")
    length = config.block_size
    if config.sliding_window is not None and config.sliding_window < length:
        length = config.sliding_window
        notes.append(f"GGUF has no sliding window for this architecture: context_length is the window, {length}, up to which all agree")
    return architecture, length, notes


def _add_config(writer: Any, config: ModelArgs, length: int, kind: str, name: str) -> None:
    writer.add_name(name)
    writer.add_file_type(KINDS[kind])
    writer.add_quantization_version(2)  # ggml's current one
    writer.add_vocab_size(config.vocab_size)
    writer.add_context_length(length)
    writer.add_embedding_length(config.dim)
    writer.add_block_count(config.n_layer)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.n_head)
    writer.add_head_count_kv(config.n_local_heads)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_rope_freq_base(config.rope_base)
    writer.add_layer_norm_rms_eps(config.norm_eps)
    scaling = config.rope_scaling
    if scaling is None:
        return
    if scaling.type == "llama3":
        values = [scaling.factor, scaling.low_freq_factor, scaling.high_freq_factor, scaling.original_max_position_embeddings]
        writer.add_array(_LLAMA3_KEY, [float(value) for value in values])
        return
    gguf = _gguf()
    writer.add_rope_scaling_type(gguf.RopeScalingType(scaling.type))
    writer.add_rope_scaling_factor(scaling.factor)
    if scaling.type == "yarn":
        writer.add_rope_scaling_orig_ctx_len(scaling.original_max_position_embeddings or config.block_size)
        # llama.cpp multiplies this by the factor YaRN's paper gives; it is 1 unless the config sets attention_factor or mscale
        sharpen = rope_frequencies(config.head_dim, config.rope_base, scaling, config.block_size, config.block_size)[1]
        usual = 0.1 * math.log(scaling.factor) + 1.0
        if abs(sharpen / usual - 1) > 1e-6:
            writer.add_rope_scaling_attn_factors(sharpen / usual)


def _kind_for(part: Part, kind: str) -> Any:
    kinds = _gguf().GGMLQuantizationType
    if len(part.shape) == 1:
        return kinds.F32
    if kind == "q4_0" and part.name in ("token_embd.weight", "output.weight"):
        kind = "q8_0"
    if kind.startswith("q") and part.shape[-1] % 32:
        return kinds.F16
    return kinds[kind.upper()]


def _encode(name: str, rows: Tensor, kind: Any) -> np.ndarray:
    values = rows.float().cpu().contiguous().numpy()
    # F16 itself, and the float16 scales of Q8_0 and Q4_0: 127 or 8 steps below the largest number
    limit = {"F16": 65504.0, "Q8_0": 65504.0 * 127, "Q4_0": 65504.0 * 8}.get(kind.name)
    if limit is not None and not np.abs(values).max() <= limit:
        raise UserError(f"{name} holds numbers that {kind.name} cannot (up to {np.abs(values).max():g}); use bf16 or f32")
    return _gguf().quants.quantize(values, kind)
