"""Configurations: presets, config.json in and out, and what is refused."""

from __future__ import annotations

import dataclasses

import pytest
from transformers import AutoConfig

from llamalab.config import PRESETS, ModelArgs
from llamalab.errors import UserError
from llamalab.model import Transformer

BASE = dict(vocab_size=97, hidden_size=64, num_hidden_layers=2, num_attention_heads=4, intermediate_size=96)


@pytest.mark.parametrize("name", PRESETS)
def test_presets_build_and_survive_config_json(name):
    config = ModelArgs.from_name(name)
    assert ModelArgs.from_hf(config.to_hf()) == dataclasses.replace(config, rope_base=float(config.rope_base))


@pytest.mark.parametrize(
    ("name", "millions"),
    # parameter counts as their publishers give them
    [("7B", 6738), ("Llama-3-8B", 8030), ("Llama-3.2-1B", 1236), ("Llama-3.2-3B", 3213), ("SmolLM2-135M", 134.5), ("Mistral-7B", 7242)],
)
def test_presets_have_the_published_sizes(name, millions):
    import torch

    with torch.device("meta"):
        model = Transformer.from_name(name)
    assert abs(sum(p.numel() for p in model.parameters()) / 1e6 - millions) < 0.6


def test_llama_3_2_is_stretched_by_32_and_tied():
    for name in ("Llama-3.2-1B", "Llama-3.2-3B"):
        config = ModelArgs.from_name(name)
        assert config.rope_scaling.factor == 32 and config.tie_word_embeddings
    assert ModelArgs.from_name("Llama-3.1-8B").rope_scaling.factor == 8


def test_names_are_found_in_longer_names_or_refused():
    assert ModelArgs.from_name("meta-llama/Llama-3.1-8B-Instruct") == ModelArgs.from_name("Llama-3.1-8B")
    assert ModelArgs.from_name("mistralai/Mistral-7B-v0.1").n_local_heads == 8
    with pytest.raises(UserError, match=r"unknown model 'gpt2'; known: .*Llama-3-8B"):
        ModelArgs.from_name("gpt2")


def test_explicit_head_dim_is_kept():
    assert ModelArgs(dim=48, n_head=8, head_dim=10).head_dim == 10
    assert ModelArgs(dim=64, n_head=4).head_dim == 16


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "gpt2"}, "model_type 'gpt2' is not supported; known: llama, mistral, qwen2, qwen3"),
        ({"model_type": None}, "without model_type"),
        ({"hidden_act": "gelu"}, "hidden_act='gelu'"),
        ({"attention_dropout": 0.1}, "attention_dropout=0.1"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({"quantization_config": {"quant_method": "gptq"}}, "gptq"),
        ({"model_type": "qwen2", "use_sliding_window": True, "sliding_window": 8}, "use_sliding_window"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "layer_types mixes"),
        ({"rope_scaling": {"rope_type": "longrope", "factor": 2.0}}, "longrope"),
        ({"num_key_value_heads": 3}, "n_head 4 is not a multiple of n_local_heads 3"),
        ({"rope_scaling": "llama3"}, "should be an object, got 'llama3'"),
        ({"rope_parameters": {"rope_type": "default"}, "rope_scaling": {"type": "linear", "factor": 2.0}}, "rope_scaling differ"),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}, "rope_theta": 1e4}, "rope_theta is given as 10000.0 and"),
        ({"rope_theta": -1}, "rope_base must be a positive number"),
        ({"rms_norm_eps": None}, "norm_eps must be a small number"),
    ],
)
def test_what_is_not_computed_is_refused_by_name(changes, message):
    with pytest.raises(UserError, match=message):
        ModelArgs.from_hf({"model_type": "llama", **BASE, **changes})


def test_end_ids_are_numbers():
    """A14: an id of another type would never be met, and text would run on."""
    for entry, ids in ((None, ()), (7, (7,)), ([7, 0, 7], (7, 0)), ([], ())):
        assert ModelArgs.from_hf({"model_type": "llama", **BASE, "eos_token_id": entry}).eos_token_ids == ids
    for entry in ("7", 7.0, [7, "9"], [7, None], True, -1, {"a": 1}):
        with pytest.raises(UserError, match="eos_token_id should be a token id or a list of them"):
            ModelArgs.from_hf({"model_type": "llama", **BASE, "eos_token_id": entry})


def test_sizes_that_do_not_fit_are_refused():
    for wrong, message in (({"dim": 10, "n_head": 4}, "not a multiple of n_head"), ({"head_dim": 5}, "must be even"),
                           ({"n_layer": 0}, "n_layer must be at least 1"), ({"sliding_window": 0}, "sliding_window")):
        with pytest.raises(UserError, match=message):
            ModelArgs(**wrong)


def test_switches_no_family_has_are_not_written():
    with pytest.raises(UserError, match=r"qwen3.*qkv_bias=True"):
        ModelArgs(family="qwen3", qk_norm=True, qkv_bias=True).to_hf()
    with pytest.raises(UserError, match="sliding_window=8"):
        ModelArgs(sliding_window=8).to_hf()


def test_both_generations_of_transformers_spellings_are_read():
    scaling = {"factor": 4.0, "original_max_position_embeddings": 32}
    old = {"model_type": "llama", **BASE, "rope_theta": 5e5, "rope_scaling": {"type": "yarn", **scaling}}
    new = {"model_type": "llama", **BASE, "rope_parameters": {"rope_type": "yarn", "rope_theta": 5e5, **scaling}}
    assert ModelArgs.from_hf(old) == ModelArgs.from_hf(new)
    assert ModelArgs.from_hf(old).rope_base == 5e5


def test_transformers_reads_what_is_written():
    config = ModelArgs.from_name("Llama-3.2-1B")
    theirs = AutoConfig.for_model(**config.to_hf())
    assert theirs.rope_parameters["factor"] == 32 and theirs.rope_parameters["rope_theta"] == 500000
    assert (theirs.head_dim, theirs.num_key_value_heads, theirs.tie_word_embeddings) == (64, 8, True)
    assert ModelArgs.from_hf(theirs.to_dict()) == config
