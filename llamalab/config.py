"""What a model is, as numbers: `ModelArgs`, its presets, and Hugging Face's config.json in and out.

Nothing here imports torch, so that `llamalab --help` stays fast.

A family (Llama, Mistral, Qwen2, ...) is not a class: it is a few switches on one config
(`qkv_bias`, `qk_norm`, `sliding_window`, `rope_scaling`). What no switch covers is refused by name.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import Any

from llamalab.errors import UserError

#: Hugging Face `model_type` -> (architecture, switches the family turns on whatever its config.json says)
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaForCausalLM", {}),
    "mistral": ("MistralForCausalLM", {}),
    "qwen2": ("Qwen2ForCausalLM", {"qkv_bias": True}),
    "qwen3": ("Qwen3ForCausalLM", {"qk_norm": True}),
}
ROPE_TYPES = ("linear", "dynamic", "llama3", "yarn")
_ROPE_NEEDS = {
    "linear": ("factor",),
    "dynamic": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    "yarn": ("factor",),
}


@dataclass(frozen=True)
class RopeScaling:
    """How rotary frequencies are stretched past the trained length. Field names are Hugging Face's."""

    type: str
    factor: float | None = None  # every type needs it
    original_max_position_embeddings: int | None = None  # default: the model's block_size
    low_freq_factor: float | None = None  # llama3
    high_freq_factor: float | None = None  # llama3
    beta_fast: float | None = None  # yarn, default 32
    beta_slow: float | None = None  # yarn, default 1
    attention_factor: float | None = None  # yarn: multiplies cos and sin
    mscale: float | None = None  # yarn
    mscale_all_dim: float | None = None  # yarn
    truncate: bool | None = None  # yarn, default true: round the correction range to whole pairs

    def __post_init__(self) -> None:
        if self.type not in ROPE_TYPES:
            raise UserError(f"rope scaling type {self.type!r} is not supported; known types: default, {', '.join(ROPE_TYPES)}")
        missing = [name for name in _ROPE_NEEDS[self.type] if getattr(self, name) is None]
        if missing:
            raise UserError(f"rope scaling of type {self.type!r} needs {', '.join(missing)}")
        if not 1 <= self.factor < math.inf:
            raise UserError(f"rope scaling factor must be >= 1, got {self.factor}")
        if self.type == "llama3" and not 0 < self.low_freq_factor < self.high_freq_factor:
            raise UserError(f"rope scaling of type 'llama3' needs 0 < low_freq_factor ({self.low_freq_factor}) < high_freq_factor "
                            f"({self.high_freq_factor})")

    @classmethod
    def from_hf(cls, entry: dict[str, Any] | None) -> RopeScaling | None:
        """Read a `rope_scaling` (or transformers-5 `rope_parameters`) entry, its type under either spelling.

        Raises:
            UserError: unknown type, a missing field, or a field that would have been ignored.
        """
        if not entry:
            return None
        if not isinstance(entry, dict):
            raise UserError(f"rope scaling should be an object, got {entry!r}")
        entry = {k: v for k, v in entry.items() if v is not None and k != "rope_theta"}
        kinds = {entry.pop(key) for key in ("rope_type", "type") if key in entry}
        if len(kinds) != 1:
            raise UserError(f"rope scaling must name one type under 'rope_type' or 'type', got {sorted(kinds) or entry}")
        kind = kinds.pop()
        if kind == "default":
            return None
        if entry.pop("partial_rotary_factor", 1.0) != 1.0:
            raise UserError("partial_rotary_factor other than 1 is not supported")
        unknown = sorted(set(entry) - {f.name for f in dataclasses.fields(cls)})
        if unknown:
            raise UserError(f"rope scaling of type {kind!r} has fields this version does not know: {', '.join(unknown)}")
        return cls(type=kind, **entry)

    def to_hf(self) -> dict[str, Any]:
        """The `rope_scaling` entry of config.json."""
        fields = {k: v for k, v in dataclasses.asdict(self).items() if v is not None}
        return {"rope_type": fields.pop("type"), **fields}


@dataclass
class ModelArgs:
    """Sizes and switches of one model; field names are those of torchao's Llama (pytorch/ao #674).

    Raises:
        UserError: sizes that don't fit together.
    """

    block_size: int = 2048  # longest sequence, in tokens
    vocab_size: int = 32000
    n_layer: int = 32
    n_head: int = 32  # query heads
    dim: int = 4096
    intermediate_size: int | None = None  # default: 2/3 of 4 * dim, rounded up to 256
    n_local_heads: int = -1  # key/value heads; -1: as many as query heads
    head_dim: int | None = None  # default: dim / n_head
    rope_base: float = 10000.0
    norm_eps: float = 1e-5
    tie_word_embeddings: bool = False
    rope_scaling: RopeScaling | None = None
    qkv_bias: bool = False
    out_bias: bool = False  # bias on the attention output (Llama's `attention_bias` sets both)
    mlp_bias: bool = False
    qk_norm: bool = False  # RMSNorm on each query and key head (Qwen3)
    sliding_window: int | None = None  # a token sees itself and the window - 1 tokens before it
    family: str = "llama"  # Hugging Face model_type, one of FAMILIES
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    pad_token_id: int | None = None

    def __post_init__(self) -> None:
        if self.n_local_heads == -1:
            self.n_local_heads = self.n_head
        if self.intermediate_size is None:
            self.intermediate_size = find_multiple(int(8 * self.dim / 3), 256)
        if self.head_dim is None:
            if self.dim % self.n_head:
                raise UserError(f"dim {self.dim} is not a multiple of n_head {self.n_head}; set head_dim")
            self.head_dim = self.dim // self.n_head
        if isinstance(self.rope_scaling, dict):  # a saved recipe.json gives back a dict
            self.rope_scaling = RopeScaling(**self.rope_scaling)
        self.eos_token_ids = end_ids(list(self.eos_token_ids))
        for name in ("block_size", "vocab_size", "n_layer", "n_head", "dim", "intermediate_size", "n_local_heads", "head_dim"):
            if getattr(self, name) < 1:
                raise UserError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.n_head % self.n_local_heads:
            raise UserError(f"n_head {self.n_head} is not a multiple of n_local_heads {self.n_local_heads}")
        if self.head_dim % 2:
            raise UserError(f"head_dim must be even for rotary embeddings, got {self.head_dim}")
        if not 0 < self.rope_base < math.inf:
            raise UserError(f"rope_base must be a positive number, got {self.rope_base}")
        if not isinstance(self.norm_eps, (int, float)) or not 0 <= self.norm_eps < 1:
            raise UserError(f"norm_eps must be a small number, got {self.norm_eps!r}")
        if self.sliding_window is not None and self.sliding_window < 1:
            raise UserError(f"sliding_window must be at least 1, got {self.sliding_window}")
        if self.family not in FAMILIES:
            raise UserError(f"model_type {self.family!r} is not supported; known: {', '.join(FAMILIES)}")

    @property
    def max_length(self) -> int | None:
        """Longest sequence that may be asked for; None where dynamic scaling sets no end."""
        return None if self.rope_scaling and self.rope_scaling.type == "dynamic" else self.block_size

    @classmethod
    def from_name(cls, name: str) -> ModelArgs:
        """A preset by exact name, or by the longest preset name that `name` contains (case ignored).

        Raises:
            UserError: no preset matches; the message lists them all.
        """
        if name in PRESETS:
            return cls(**PRESETS[name])
        matches = sorted((p for p in PRESETS if p.lower() in name.lower()), key=len)
        if not matches:
            raise UserError(f"unknown model {name!r}; known: {', '.join(PRESETS)}")
        return cls(**PRESETS[matches[-1]])

    @classmethod
    def from_hf(cls, config: dict[str, Any]) -> ModelArgs:
        """Read a Hugging Face config.json.

        Raises:
            UserError: a family, activation, or setting that this model does not compute.
        """
        family = config.get("model_type")
        if family not in FAMILIES:
            named = f"model_type {family!r}" if family else "a config.json without model_type"
            raise UserError(f"{named} is not supported; known: {', '.join(FAMILIES)}")
        refuse_unsupported(config)
        heads = config["num_attention_heads"]
        rope_base, rope_scaling = _rope(config)
        attention_bias = bool(config.get("attention_bias", False))
        qkv_bias = FAMILIES[family][1].get("qkv_bias", attention_bias)
        return cls(
            block_size=config.get("max_position_embeddings", 2048),
            vocab_size=config["vocab_size"],
            n_layer=config["num_hidden_layers"],
            n_head=heads,
            dim=config["hidden_size"],
            intermediate_size=config["intermediate_size"],
            n_local_heads=config.get("num_key_value_heads") or heads,
            head_dim=config.get("head_dim") or (128 if family == "qwen3" else None),
            rope_base=rope_base,
            norm_eps=config.get("rms_norm_eps", 1e-6),
            tie_word_embeddings=bool(config.get("tie_word_embeddings", False)),
            rope_scaling=rope_scaling,
            qkv_bias=qkv_bias,
            out_bias=attention_bias and family != "qwen2",
            mlp_bias=bool(config.get("mlp_bias", False)),
            qk_norm=FAMILIES[family][1].get("qk_norm", False),
            sliding_window=_sliding_window(config),
            family=family,
            bos_token_id=config.get("bos_token_id"),
            eos_token_ids=end_ids(config.get("eos_token_id")),
            pad_token_id=config.get("pad_token_id"),
        )

    def to_hf(self, dtype: str = "float32") -> dict[str, Any]:
        """The config.json of this model, as transformers 4 and 5, vLLM and SGLang read it.

        Raises:
            UserError: a combination of switches that no supported Hugging Face family has.
        """
        self.check_family()
        config: dict[str, Any] = {
            "architectures": [FAMILIES[self.family][0]],
            "model_type": self.family,
            "vocab_size": self.vocab_size,
            "hidden_size": self.dim,
            "intermediate_size": self.intermediate_size,
            "num_hidden_layers": self.n_layer,
            "num_attention_heads": self.n_head,
            "num_key_value_heads": self.n_local_heads,
            "head_dim": self.head_dim,
            "hidden_act": "silu",
            "max_position_embeddings": self.block_size,
            "rms_norm_eps": self.norm_eps,
            "rope_theta": self.rope_base,
            "rope_scaling": self.rope_scaling.to_hf() if self.rope_scaling else None,
            "tie_word_embeddings": self.tie_word_embeddings,
            "torch_dtype": dtype,
            "bos_token_id": self.bos_token_id,
            "eos_token_id": self.eos_token_ids[0] if len(self.eos_token_ids) == 1 else list(self.eos_token_ids) or None,
            "pad_token_id": self.pad_token_id,
        }
        if self.family in ("llama", "qwen3"):
            config["attention_bias"] = self.out_bias
        if self.family == "llama":
            config["mlp_bias"] = self.mlp_bias
        if self.family == "mistral":
            config["sliding_window"] = self.sliding_window
        if self.family in ("qwen2", "qwen3"):
            config["use_sliding_window"] = False
        return config

    def check_family(self) -> None:
        """Refuse switches the family's own code would not compute (a saved model must load elsewhere)."""
        forced = FAMILIES[self.family][1]
        expect = {
            "qkv_bias": forced.get("qkv_bias", self.out_bias),
            "qk_norm": forced.get("qk_norm", False),
            "out_bias": self.out_bias and self.family in ("llama", "qwen3"),
            "mlp_bias": self.mlp_bias and self.family == "llama",
            "sliding_window": self.sliding_window if self.family == "mistral" else None,
        }
        wrong = [f"{k}={getattr(self, k)}" for k, v in expect.items() if getattr(self, k) != v]
        if wrong:
            raise UserError(f"no Hugging Face model of type {self.family!r} has {', '.join(wrong)}; set family to one that does")


def refuse_unsupported(config: dict[str, Any]) -> None:
    """Name every setting of a Hugging Face config.json that this model would silently not compute."""
    expected = {"hidden_act": "silu", "attention_dropout": 0.0, "partial_rotary_factor": 1.0}
    for key, value in expected.items():
        if config.get(key, value) != value:
            raise UserError(f"config.json has {key}={config[key]!r}; only {value!r} is supported")
    if config.get("quantization_config"):
        method = config["quantization_config"].get("quant_method", "unnamed")
        raise UserError(f"config.json has a quantization_config ({method}); use the full-precision checkpoint")
    if config.get("use_sliding_window") and config.get("sliding_window"):
        raise UserError("use_sliding_window=true (a window on some layers only) is not supported")
    if len(set(config.get("layer_types") or ["full_attention"])) > 1:
        raise UserError(f"layer_types mixes {sorted(set(config['layer_types']))}; only one kind for all layers is supported")


def end_ids(entry: Any) -> tuple[int, ...]:
    """The ids under `eos_token_id`: none, one, or a list, each once.

    Raises:
        UserError: anything else. The id "2" would never be met, and text would run on.
    """
    found = entry if isinstance(entry, list) else [] if entry is None else [entry]
    odd = [i for i in found if not isinstance(i, int) or isinstance(i, bool) or i < 0]
    if odd:
        raise UserError(f"eos_token_id should be a token id or a list of them, got {odd[0]!r}")
    return tuple(dict.fromkeys(found))


def _rope(config: dict[str, Any]) -> tuple[float, RopeScaling | None]:
    """Base and scaling, from where transformers 4 writes them (rope_theta, rope_scaling) or 5 (rope_parameters)."""
    entries = [config[key] for key in ("rope_parameters", "rope_scaling") if config.get(key)]
    scalings = [RopeScaling.from_hf(entry) for entry in entries]
    if len(set(scalings)) > 1:
        raise UserError("rope_parameters and rope_scaling differ; remove the one that is wrong")
    stated = [float(part["rope_theta"]) for part in (config, *entries) if part.get("rope_theta") is not None]
    if len(set(stated)) > 1:
        raise UserError(f"rope_theta is given as {stated[0]} and as {stated[1]}; remove the one that is wrong")
    return stated[0] if stated else 10000.0, scalings[0] if scalings else None


def _sliding_window(config: dict[str, Any]) -> int | None:
    # Qwen writes a window and switches it off with use_sliding_window=false; Llama has none.
    return config.get("sliding_window") if config["model_type"] == "mistral" else None


def find_multiple(n: int, k: int) -> int:
    """The smallest multiple of k that is at least n."""
    return -(-n // k) * k


_LLAMA31 = dict(type="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=8192)
_LLAMA32 = {**_LLAMA31, "factor": 32.0}  # Llama 3.2 stretches by 32; torchao's table used 8
_LLAMA3 = dict(block_size=8192, n_local_heads=8, vocab_size=128256, rope_base=500000.0)
_LLAMA3_LONG = {**_LLAMA3, "block_size": 131072}

PRESETS: dict[str, dict[str, Any]] = {
    "CodeLlama-7b-Python-hf": dict(block_size=16384, rope_base=1000000.0),
    "7B": dict(),
    "13B": dict(n_layer=40, n_head=40, dim=5120),
    "30B": dict(n_layer=60, n_head=52, dim=6656),
    "34B": dict(n_layer=48, n_head=64, dim=8192, n_local_heads=8, intermediate_size=22016, rope_base=1000000.0),
    "70B": dict(n_layer=80, n_head=64, dim=8192, n_local_heads=8, intermediate_size=28672),
    "Mistral-7B": dict(n_local_heads=8, intermediate_size=14336),
    "stories15M": dict(n_layer=6, n_head=6, dim=288),
    "stories110M": dict(n_layer=12, n_head=12, dim=768),
    "Llama-3-8B": dict(_LLAMA3, intermediate_size=14336),
    "Llama-3.1-8B": dict(_LLAMA3_LONG, intermediate_size=14336, rope_scaling=_LLAMA31),
    "Llama-3.1-70B": dict(_LLAMA3_LONG, n_layer=80, n_head=64, dim=8192, intermediate_size=28672, rope_scaling=_LLAMA31),
    "Llama-3.1-405B": dict(_LLAMA3_LONG, n_layer=126, n_head=128, dim=16384, intermediate_size=53248, rope_scaling=_LLAMA31),
    "Llama-3.2-1B": dict(
        _LLAMA3_LONG, n_layer=16, dim=2048, head_dim=64, intermediate_size=8192, rope_scaling=_LLAMA32, tie_word_embeddings=True
    ),
    "Llama-3.2-3B": dict(
        _LLAMA3_LONG, n_layer=28, n_head=24, dim=3072, intermediate_size=8192, rope_scaling=_LLAMA32, tie_word_embeddings=True
    ),
    "SmolLM2-135M": dict(
        block_size=8192, vocab_size=49152, n_layer=30, n_head=9, n_local_heads=3, dim=576, intermediate_size=1536,
        rope_base=100000.0, tie_word_embeddings=True, bos_token_id=1, eos_token_ids=(2,),
    ),
    "tiny": dict(block_size=64, vocab_size=97, n_layer=2, n_head=4, n_local_heads=2, dim=64, intermediate_size=96),
    "tiny-tied": dict(
        block_size=64, vocab_size=97, n_layer=2, n_head=8, n_local_heads=2, dim=48, head_dim=10, intermediate_size=80,
        tie_word_embeddings=True,
    ),
}
