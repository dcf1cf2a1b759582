"""Rotary frequencies: every scaling against its formula in float64 and against transformers, bit for bit."""

from __future__ import annotations

import math

import pytest
import torch
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from llamalab.config import ModelArgs, RopeScaling
from llamalab.errors import UserError
from llamalab.rope import apply_rotary_emb, precompute_freqs_cis, rope_frequencies

LLAMA3 = dict(low_freq_factor=1.0, high_freq_factor=4.0)
SCALINGS = {
    "linear": {"factor": 4.0},
    "dynamic": {"factor": 2.0},
    "llama3": {"factor": 8.0, "original_max_position_embeddings": 64, **LLAMA3},
    "yarn": {"factor": 4.0, "original_max_position_embeddings": 64},
    "yarn ends": {"factor": 4.0, "original_max_position_embeddings": 64, "beta_fast": 16.0, "beta_slow": 2.0, "truncate": False},
    "yarn attention factor": {"factor": 4.0, "original_max_position_embeddings": 64, "attention_factor": 1.5},
    "yarn mscale": {"factor": 40.0, "original_max_position_embeddings": 64, "mscale": 0.707, "mscale_all_dim": 1.0},
}


@pytest.mark.parametrize("name", SCALINGS)
@pytest.mark.parametrize("length", [20, 500])
def test_frequencies_are_those_of_transformers(name, length):
    kind, fields = name.split()[0], SCALINGS[name]
    block_size = 256
    theirs = LlamaConfig(hidden_size=64, num_attention_heads=4, max_position_embeddings=block_size,
                         rope_parameters={"rope_type": kind, "rope_theta": 10000.0, **fields})
    want, want_factor = ROPE_INIT_FUNCTIONS[kind](theirs, torch.device("cpu"), seq_len=length)
    got, factor = rope_frequencies(16, 10000.0, RopeScaling(kind, **fields), block_size, length)
    assert torch.equal(got, want)
    assert factor == want_factor


@pytest.mark.parametrize("key", ["rope_type", "type"])
def test_llama3_scaling_is_applied_in_full(key):
    """FAULTS A2: values from the formula, both spellings of the type, factor 8 and 32."""
    entry = {key: "llama3", "factor": 8.0, "original_max_position_embeddings": 64, **LLAMA3}
    got, _ = rope_frequencies(16, 10000.0, RopeScaling.from_hf(entry), 64, 64)
    want = torch.tensor([1, 0.2443846, 0.0130423, 0.0039528, 0.00125, 0.0003953, 0.000125, 0.0000395])
    torch.testing.assert_close(got, want, rtol=5e-4, atol=5e-8)  # the figures have four to seven digits

    got, _ = rope_frequencies(64, 500000.0, ModelArgs.from_name("Llama-3.2-1B").rope_scaling, 131072, 100)
    plain = torch.tensor([500000.0 ** (-2 * i / 64) for i in range(32)])
    torch.testing.assert_close(got[:15], plain[:15])
    torch.testing.assert_close(got[15:18], torch.tensor([1.290548e-3, 4.295568e-4, 9.708288e-5]))
    torch.testing.assert_close(got[18:], plain[18:] / 32)


def test_dynamic_base_grows_past_the_trained_length_only():
    """FAULTS A3: the base for each length."""
    scaling = RopeScaling("dynamic", 2.0)
    for length, base in ((20, 10000.0), (64, 10000.0), (128, 35097.92), (256, 92432.85)):
        got, _ = rope_frequencies(16, 10000.0, scaling, 64, length)
        torch.testing.assert_close(got, torch.tensor([base ** (-2 * i / 16) for i in range(8)]))


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ({"rope_type": "longrope", "factor": 2.0}, "'longrope' is not supported.*yarn"),
        ({"factor": 2.0}, "must name one type"),
        ({"rope_type": "linear", "type": "yarn", "factor": 2.0}, "must name one type"),
        ({"rope_type": "llama3", "factor": 8.0}, "needs low_freq_factor"),
        ({"rope_type": "linear", "factor": 2.0, "short_factor": [1]}, "short_factor"),
        ({"rope_type": "linear", "factor": 0.5}, "must be >= 1"),
        ({"rope_type": "linear", "factor": float("nan")}, "must be >= 1"),
        ({"rope_type": "linear"}, "needs factor"),
        ({"rope_type": "dynamic"}, "needs factor"),
        ({"rope_type": "yarn"}, "needs factor"),
        ({"type": "llama3", "original_max_position_embeddings": 64, **LLAMA3}, "needs factor"),
        ({"type": "llama3", "factor": 8.0, "original_max_position_embeddings": 64, **LLAMA3, "high_freq_factor": 1.0}, "low_freq"),
    ],
)
def test_what_is_not_computed_is_refused(entry, message):
    with pytest.raises(UserError, match=message):
        RopeScaling.from_hf(entry)


def test_rotation_is_a_complex_product_with_positions_of_each_row():
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(2, 5, 3, 8, generator=generator)
    positions = torch.tensor([[0, 1, 2, 3, 4], [9, 9, 0, 30, 31]])
    table = precompute_freqs_cis(32, 8)
    got = apply_rotary_emb(x, table[positions])
    z = torch.view_as_complex(x.double().unflatten(-1, (4, 2)))
    angle = positions[:, :, None, None] * torch.tensor([10000.0 ** (-2 * i / 8) for i in range(4)], dtype=torch.float64)
    want = torch.view_as_real(z * torch.polar(torch.ones_like(angle), angle)).flatten(-2)
    torch.testing.assert_close(got, want.float(), atol=1e-5, rtol=1e-5)  # 31 radians rounded to float32
    assert math.isclose(float(got.norm()), float(x.norm()), rel_tol=1e-6)
