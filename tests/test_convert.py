"""Names and orders of rows: fault A5's numbers, round trips, and Meta's params.json."""

from __future__ import annotations

import dataclasses
import itertools

import pytest
import torch
from reference import reference_logits

from llamalab.config import ModelArgs, RopeScaling
from llamalab.convert import (
    LAYOUTS,
    clean_name,
    config_from_name,
    config_from_params,
    guess_layout,
    parameter_shapes,
    parts,
    to_half_split,
    to_interleaved,
    to_layout,
)
from llamalab.errors import UserError
from llamalab.model import Transformer


def test_order_of_rows() -> None:
    """A5: one head of 8 rows, two heads of 4 rows."""
    rows = torch.arange(8)
    assert to_half_split(rows, 1).tolist() == [0, 2, 4, 6, 1, 3, 5, 7]
    assert to_half_split(rows, 2).tolist() == [0, 2, 1, 3, 4, 6, 5, 7]
    matrix = torch.arange(24.0).reshape(8, 3)
    assert torch.equal(to_half_split(matrix, 2), matrix[[0, 2, 1, 3, 4, 6, 5, 7]])


@pytest.mark.parametrize("heads", [1, 2, 3, 6])
def test_order_of_rows_round_trip(heads: int) -> None:
    matrix = torch.randn(heads * 10, 5)
    assert torch.equal(to_interleaved(to_half_split(matrix, heads), heads), matrix)
    assert torch.equal(to_half_split(to_interleaved(matrix, heads), heads), matrix)


def test_heads_are_counted_for_each_matrix(tiny) -> None:
    """A5: with 8 query and 2 key/value heads a count taken from the wrong matrix shows: Hugging Face's files, read as half-split,
    and ours, read as interleaved, give the same logits in the float64 reference."""
    model = tiny(n_head=8, n_local_heads=2, qkv_bias=True, qk_norm=True)
    state = model.state_dict()
    files = {part.name: rows for part, rows in to_layout(model.config, "hf", state.__getitem__)}
    heads = {part.name.split(".")[-2]: part.heads for part in parts(model.config, "hf") if ".0." in part.name}
    assert heads["q_proj"] == 8 and heads["k_proj"] == 2 and heads["v_proj"] == 0 and heads["q_norm"] == heads["k_norm"] == 1

    half = dict(state)
    for i in range(model.config.n_layer):
        at = f"model.layers.{i}.self_attn."
        for kind in ("weight", "bias"):
            half[f"layers.{i}.attention.wqkv.{kind}"] = torch.cat([files[f"{at}{x}_proj.{kind}"] for x in "qkv"])
        for x in "qk":
            half[f"layers.{i}.attention.{x}_norm.weight"] = files[f"{at}{x}_norm.weight"]
    idx = torch.randint(0, 97, (24,), generator=torch.Generator().manual_seed(0))
    ours = reference_logits(state, model.config, idx, layout="interleaved")
    theirs = reference_logits(half, model.config, idx, layout="half")
    torch.testing.assert_close(theirs, ours, rtol=0, atol=1e-12)  # float64; the same numbers in another order


@pytest.mark.parametrize("layout", LAYOUTS)
def test_parts_cover_the_model(layout: str) -> None:
    """Each row of each parameter is in exactly one part, and no name comes twice."""
    config = ModelArgs(n_layer=2, dim=48, n_head=6, n_local_heads=2, head_dim=10, vocab_size=97, intermediate_size=80,
                       qkv_bias=True, out_bias=True, mlp_bias=True, qk_norm=True)
    found = parts(config, layout)
    assert len({part.name for part in found}) == len(found)
    for name, shape in parameter_shapes(config).items():
        spans = sorted((part.start, part.stop) for part in found if part.ours == name)
        assert spans[0][0] == 0 and spans[-1][1] == shape[0]
        assert all(a[1] == b[0] for a, b in itertools.pairwise(spans))
    with pytest.raises(UserError, match="layout"):
        parts(config, "onnx")


def test_guess_layout() -> None:
    config = ModelArgs.from_name("tiny")
    for layout in ("hf", "meta", "fused"):
        assert guess_layout(part.name for part in parts(config, layout)) == layout


def test_clean_name() -> None:
    """A7: what compile, DDP, FSDP and activation checkpointing put into names; nothing else."""
    assert clean_name("_orig_mod.module.layers.0._checkpoint_wrapped_module._orig_mod.ffn_norm.weight") == "layers.0.ffn_norm.weight"
    for name in Transformer.from_name("tiny").state_dict():
        assert clean_name(name) == name


PARAMS = {"dim": 48, "n_layers": 2, "n_heads": 6, "norm_eps": 1e-5, "vocab_size": -1, "multiple_of": 16}
SHAPES = {"tok_embeddings.weight": (97, 48), "layers.0.feed_forward.w1.weight": (80, 48)}


@pytest.mark.parametrize(("change", "length", "base", "scaling"), [
    (dict(norm_eps=1e-6), 2048, 1e4, None),  # Llama 1
    ({}, 4096, 1e4, None),  # Llama 2
    (dict(rope_theta=1e6), 16384, 1e6, None),  # CodeLlama
    (dict(rope_theta=5e5, n_kv_heads=2), 8192, 5e5, None),  # Llama 3
    (dict(rope_theta=5e5, n_kv_heads=2, use_scaled_rope=True), 131072, 5e5, 8.0),  # 3.1
    (dict(rope_theta=5e5, use_scaled_rope=True, rope_scaling_factor=16.0), 131072, 5e5, 16.0),
    (dict(max_seq_len=512), 512, 1e4, None),
])
def test_params_json(change: dict, length: int, base: float, scaling: float | None) -> None:
    config = config_from_params({**PARAMS, **change}, SHAPES, tied=False)
    assert (config.block_size, config.rope_base, config.vocab_size, config.intermediate_size) == (length, base, 97, 80)
    assert config.n_local_heads == change.get("n_kv_heads", 6)
    assert config.rope_scaling == (scaling and RopeScaling("llama3", scaling, 8192, 1.0, 4.0))


def test_params_json_of_llama_32_scales_by_32() -> None:
    """Meta's file says use_scaled_rope only; the factor that Llama 3.2 was released with is 32."""
    params = {"dim": 2048, "n_layers": 16, "n_heads": 32, "n_kv_heads": 8, "rope_theta": 5e5, "use_scaled_rope": True}
    shapes = {"tok_embeddings.weight": (128256, 2048), "layers.0.feed_forward.w1.weight": (8192, 2048)}
    read = dataclasses.asdict(config_from_params(params, shapes, tied=True))
    assert read == dataclasses.asdict(ModelArgs.from_name("Llama-3.2-1B"))


def test_params_json_refuses_what_it_does_not_know() -> None:
    with pytest.raises(UserError, match="moe_args"):
        config_from_params({**PARAMS, "moe_args": {}}, SHAPES, tied=False)
    with pytest.raises(UserError, match="n_layers"):
        config_from_params({"dim": 48, "n_heads": 6}, SHAPES, tied=False)
    with pytest.raises(UserError, match=r"tok_embeddings\.weight"):
        config_from_params(PARAMS, {}, tied=False)


def test_config_from_name() -> None:
    config = config_from_name("my-stories15M-v2", {"tok_embeddings.weight": (32016, 288)}, tied=True)
    assert (config.n_layer, config.dim, config.vocab_size, config.tie_word_embeddings) == (6, 288, 32016, True)
    with pytest.raises(UserError, match="directory's name"):
        config_from_name("weights", {}, tied=False)
