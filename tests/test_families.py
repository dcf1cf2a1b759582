"""Every family against transformers, in both directions: their files in our model, our files in theirs.

Small random models whose shapes tell wrong formulas apart: 6 query heads on 2 key/value heads (2 is not 6/2), an odd
vocabulary, head_dim that is not dim / heads, norms and biases away from 1 and 0.
"""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from llamalab.checkpoint import load_model, save_model
from llamalab.config import ModelArgs, RopeScaling
from llamalab.convert import hf_tensors, to_layout
from llamalab.errors import UserError

transformers = pytest.importorskip("transformers")

VOCAB, LENGTH, T = 97, 64, 40
SIZES = dict(vocab_size=VOCAB, max_position_embeddings=LENGTH, hidden_size=48, intermediate_size=80, num_hidden_layers=2,
             num_attention_heads=6, num_key_value_heads=2, initializer_range=0.15)
LLAMA3 = dict(rope_type="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=16)

#: name -> (model_type, fields of the Hugging Face config, tokens in the sequence)
FAMILIES = {
    "llama": ("llama", {}, T),
    "llama-tied-head_dim": ("llama", dict(head_dim=10, tie_word_embeddings=True), T),
    "llama-one-kv-head": ("llama", dict(num_key_value_heads=1), T),
    "llama-attention_bias": ("llama", dict(attention_bias=True), T),
    "llama-mlp_bias": ("llama", dict(mlp_bias=True), T),
    "llama-llama3": ("llama", dict(rope_parameters=dict(LLAMA3, rope_theta=500000.0)), T),
    "llama-linear": ("llama", dict(rope_parameters=dict(rope_type="linear", factor=4.0, rope_theta=10000.0)), T),
    "llama-dynamic-short": ("llama", dict(rope_parameters=dict(rope_type="dynamic", factor=2.0, rope_theta=10000.0)), T),
    "llama-dynamic-long": ("llama", dict(rope_parameters=dict(rope_type="dynamic", factor=2.0, rope_theta=10000.0)), 2 * LENGTH),
    "llama-yarn": ("llama", dict(rope_parameters=dict(rope_type="yarn", factor=4.0, original_max_position_embeddings=16,
                                                      rope_theta=10000.0)), T),
    "llama-yarn-set": ("llama", dict(rope_parameters=dict(
        rope_type="yarn", factor=4.0, original_max_position_embeddings=16, beta_fast=8.0, beta_slow=0.5, mscale=0.7, mscale_all_dim=1.2,
        truncate=False, rope_theta=10000.0)), T),
    "mistral": ("mistral", dict(sliding_window=None), T),
    "mistral-window": ("mistral", dict(sliding_window=9, head_dim=10), T),
    "qwen2": ("qwen2", {}, T),
    "qwen2-tied": ("qwen2", dict(tie_word_embeddings=True), T),
    "qwen3": ("qwen3", dict(head_dim=14), T),
    "qwen3-tied-bias-yarn": ("qwen3", dict(head_dim=14, attention_bias=True, tie_word_embeddings=True, rope_parameters=dict(
        rope_type="yarn", factor=2.0, original_max_position_embeddings=32, rope_theta=1000000.0)), T),
}


def build_theirs(model_type: str, fields: dict, seed: int = 0) -> torch.nn.Module:
    config = transformers.AutoConfig.for_model(model_type, **{**SIZES, **fields}, attn_implementation="eager")
    torch.manual_seed(seed)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    with torch.no_grad():
        for name, p in model.named_parameters():
            if p.dim() == 1:
                p.copy_(0.3 * torch.randn_like(p) + (0 if name.endswith("bias") else 1))
    return model


def tokens(count: int) -> torch.Tensor:
    return torch.randint(0, VOCAB, (2, count), generator=torch.Generator().manual_seed(1))


def gradients(model: torch.nn.Module, logits: torch.Tensor, idx: torch.Tensor) -> dict[str, torch.Tensor]:
    F.cross_entropy(logits[:, :-1].flatten(0, 1), idx[:, 1:].flatten()).backward()
    return {name: p.grad for name, p in model.named_parameters()}


@pytest.mark.parametrize("name", FAMILIES)
def test_their_files_in_our_model(name: str, tmp_path: Path) -> None:
    model_type, fields, count = FAMILIES[name]
    theirs = build_theirs(model_type, fields)
    theirs.save_pretrained(tmp_path)
    ours, idx = load_model(tmp_path), tokens(count)

    expected, logits = theirs(idx, use_cache=False).logits, ours(idx)
    # Logits of order 1; both float32 with sums of at most 80 products: a few 1e-6. A wrong formula is off by 1e-2 and more.
    assert expected.abs().max() > 0.5
    torch.testing.assert_close(logits, expected, rtol=0, atol=1e-5)

    wanted = gradients(theirs, expected, idx)
    grads = gradients(ours, logits, idx)
    found = {part.name: grad for part, grad in to_layout(ours.config, "hf", grads.__getitem__)}
    assert found.keys() == wanted.keys()
    for key, grad in wanted.items():
        assert torch.linalg.vector_norm(found[key] - grad) <= 1e-4 * torch.linalg.vector_norm(grad), key


@pytest.mark.parametrize("name", FAMILIES)
def test_our_files_in_their_model(name: str, tmp_path: Path) -> None:
    model_type, fields, count = FAMILIES[name]
    build_theirs(model_type, fields, seed=2).save_pretrained(tmp_path / "theirs")
    ours, idx = load_model(tmp_path / "theirs"), tokens(count)
    save_model(tmp_path / "ours", ours)
    theirs, info = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "ours", dtype=torch.float32, attn_implementation="sdpa", output_loading_info=True
    )
    assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    torch.testing.assert_close(theirs(idx, use_cache=False).logits, ours(idx), rtol=0, atol=1e-5)  # as above
    assert ModelArgs.from_hf(theirs.config.to_dict()) == ours.config

    again = load_model(tmp_path / "ours")
    assert again.config == ours.config
    assert torch.equal(again(idx), ours(idx))


def llama3_frequency(i: int, factor: float) -> float:
    """Fault A2's formula at head_dim 16, base 10000, low 1, high 4, original length 64, in float64."""
    f = 10000 ** (-i / 8)
    turns = 64 * f / (2 * math.pi)  # original length / wavelength
    smooth = min(max((turns - 1) / 3, 0), 1)
    return (1 - smooth) * f / factor + smooth * f


def test_llama3_block_of_a_config_is_applied_whole(tmp_path: Path) -> None:
    """A2: from config.json to the table the model turns by; factors 8 and 32, both spellings of the key, an unknown type."""
    given = [1, 0.2443846, 0.0130423, 0.0039528, 0.00125, 0.0003953, 0.000125, 0.0000395]  # the fault's own numbers, factor 8
    assert [llama3_frequency(i, 8.0) for i in range(8)] == pytest.approx(given, rel=2e-3, abs=1e-7)  # as many digits as they have
    build_theirs("llama", dict(num_attention_heads=3, num_key_value_heads=1, head_dim=16)).save_pretrained(tmp_path)
    at = tmp_path / "config.json"
    plain = json.loads(at.read_text())
    plain.pop("rope_parameters")
    block = dict(LLAMA3, original_max_position_embeddings=64)
    kind = block.pop("rope_type")
    for key in ("rope_type", "type"):
        for factor in (8.0, 32.0):
            at.write_text(json.dumps({**plain, "rope_theta": 10000.0, "rope_scaling": {**block, key: kind, "factor": factor}}))
            cos, sin = load_model(tmp_path).freqs_cis[1].unbind(-1)
            # the angle at position 1 is the frequency; float32 atan2 and frequencies: 1e-6 relative
            expected = torch.tensor([llama3_frequency(i, factor) for i in range(8)])
            torch.testing.assert_close(torch.atan2(sin, cos), expected, rtol=1e-5, atol=0)
    at.write_text(json.dumps({**plain, "rope_scaling": {"rope_type": "longrope", "factor": 2.0}}))
    with pytest.raises(UserError, match="longrope"):
        load_model(tmp_path)


def test_only_what_a_family_computes_is_saved(tiny, tmp_path: Path) -> None:
    """A Llama with a sliding window has no Hugging Face class: refused by name, nothing written."""
    for change in (dict(sliding_window=8), dict(qk_norm=True), dict(family="mistral", qkv_bias=True), dict(family="qwen2")):
        with pytest.raises(UserError, match="no Hugging Face model of type"):
            save_model(tmp_path / "out", tiny(**change))
    assert not list(tmp_path.iterdir())


def test_every_parameter_has_one_place(tiny) -> None:
    """The table of names covers each row of each parameter once, in every family's combination of switches."""
    model = tiny("tiny-tied", qkv_bias=True, out_bias=True, mlp_bias=True, qk_norm=True, rope_scaling=RopeScaling("linear", 2.0))
    written = dict(hf_tensors(model))
    assert sum(t.numel() for t in written.values()) == sum(p.numel() for p in model.parameters())
    assert "lm_head.weight" not in written
