"""The model against the original (golden numbers), the float64 formulas, and itself in its other modes."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from conftest import build_tiny
from reference import reference_logits
from safetensors import safe_open
from safetensors.torch import load_file

from llamalab import ModelArgs, Transformer
from llamalab.errors import UserError
from llamalab.rope import precompute_freqs_cis

GOLDEN = Path(__file__).parent / "seed_golden.safetensors"
# float32 against float64: about 1e-6 a layer on logits of order one
CLOSE = dict(atol=1e-5, rtol=1e-5)


@pytest.fixture(scope="module")
def golden() -> tuple[Transformer, dict[str, torch.Tensor]]:
    numbers = load_file(GOLDEN)
    with safe_open(GOLDEN, "pt") as f:
        sizes = dict(pair.split("=") for pair in f.metadata()["config"].split())
    sizes = {k: float(v) if k == "norm_eps" else int(v) for k, v in sizes.items()}
    model = Transformer(ModelArgs(**sizes))
    model.load_state_dict({k.removeprefix("weights."): v for k, v in numbers.items() if k.startswith("weights.")})
    return model, numbers


def test_the_original_is_reproduced(golden):
    model, numbers = golden
    model.setup_caches(2, 64, training=True)
    logits = model(numbers["idx"])
    # 2e-5: what the original itself differs by between prefill and decode (7e-6), doubled for another order of sums
    torch.testing.assert_close(logits, numbers["training_logits"], atol=2e-5, rtol=0)
    loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), numbers["idx"][:, 1:].flatten())
    torch.testing.assert_close(loss, numbers["loss"][0], atol=2e-6, rtol=0)
    model.zero_grad()
    loss.backward()
    for name, p in model.named_parameters():
        want = numbers["grad." + name]
        assert (p.grad - want).norm() <= 1e-4 * want.norm(), name

    model.setup_caches(2, 64)
    with torch.no_grad():
        parts = [model(numbers["idx"][:, :16], torch.arange(16))]
        parts += [model(numbers["idx"][:, i : i + 1], torch.tensor([i])) for i in range(16, 24)]
    torch.testing.assert_close(torch.cat(parts, dim=1), numbers["inference_logits"], atol=2e-5, rtol=0)


def test_separate_projections_load_as_the_fused_one(golden):
    model, numbers = golden
    state = {}
    for name, w in ((k.removeprefix("weights."), v) for k, v in numbers.items() if k.startswith("weights.")):
        if "wqkv" in name:
            for part, rows in zip(("wq", "wk", "wv"), w.split(model.layers[0].attention.sizes)):
                state[name.replace("wqkv", part)] = rows
        else:
            state[name] = w
    other = Transformer(model.config)
    other.load_state_dict(state)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), other.parameters()))


VARIANTS = {
    "gqa": {},
    "own head_dim": {"head_dim": 10, "n_head": 8},
    "multi-query": {"n_local_heads": 1},
    "biases": {"qkv_bias": True, "out_bias": True, "mlp_bias": True},
    "qk_norm": {"qk_norm": True, "family": "qwen3"},
    "window": {"sliding_window": 5, "family": "mistral"},
    "window of 1": {"sliding_window": 1, "family": "mistral"},
}


@pytest.mark.parametrize("variant", VARIANTS, ids=str)
def test_every_mode_agrees_with_the_formulas(variant):
    """FAULTS A11: plain, cached prefill in any chunking, token by token, and after a plain call, 30 tokens."""
    model = build_tiny(**VARIANTS[variant])
    idx = torch.randint(97, (2, 30), generator=torch.Generator().manual_seed(1))
    want = reference_logits(model.state_dict(), model.config, idx).float()
    with torch.no_grad():
        torch.testing.assert_close(model(idx), want, **CLOSE)
        for chunks in ([30], [1] * 30, [7, 1, 13, 9], [16, 14]):
            caches = model.make_caches(2, 32)
            at, parts = 0, []
            for n in chunks:
                parts.append(model(idx[:, at : at + n], torch.arange(at, at + n), caches))
                at += n
            torch.testing.assert_close(torch.cat(parts, dim=1), want, **CLOSE)
        assert torch.equal(model(idx), model(idx))


def test_int8_cache_agrees_with_itself_in_any_chunking_and_nearly_with_the_exact_one():
    model = build_tiny()
    idx = torch.randint(97, (2, 24), generator=torch.Generator().manual_seed(1))

    def run(chunks: list[int], quantized: bool) -> torch.Tensor:
        caches, at, parts = model.make_caches(2, 24, quantized), 0, []
        for n in chunks:
            parts.append(model(idx[:, at : at + n], torch.arange(at, at + n), caches))
            at += n
        return torch.cat(parts, dim=1)

    with torch.no_grad():
        whole, single, exact = run([24], True), run([1] * 24, True), run([24], False)
    # Rounding to int8 depends on each token alone; a value at a rounding edge may fall either way with the last float32
    # bit, which moves it by 1/127 of its row's largest.
    torch.testing.assert_close(single, whole, atol=1e-2, rtol=0)
    # int8 keeps 1/254 of the largest of 16 values at worst: about 0.5 % noise on keys and values, twice over 2 layers
    assert 0 < (whole - exact).norm() / exact.norm() < 0.02


@pytest.mark.parametrize("quantized", [False, True])
def test_rows_of_different_length_equal_their_solo_runs(quantized):
    """Rows are padded at the end; the padding is overwritten by the row's own tokens before it can be seen."""
    model = build_tiny()
    rows = [torch.randint(97, (n + 4,), generator=torch.Generator().manual_seed(n)) for n in (3, 12, 7)]
    padded = torch.zeros(3, 12, dtype=torch.long)
    for b, row in enumerate(rows):
        padded[b, : len(row) - 4] = row[:-4]
    lengths = torch.tensor([len(row) - 4 for row in rows])
    caches = model.make_caches(3, 20, quantized)
    with torch.no_grad():
        logits = model(padded, torch.arange(12).expand(3, 12), caches)
        got = [[logits[b, lengths[b] - 1]] for b in range(3)]
        for step in range(4):
            token = torch.stack([row[len(row) - 4 + step] for row in rows])[:, None]
            logits = model(token, (lengths + step)[:, None], caches)
            for b in range(3):
                got[b].append(logits[b, 0])
        for b, row in enumerate(rows):
            solo, n = model.make_caches(1, 20, quantized), int(lengths[b])
            want = [model(row[None, :n], torch.arange(n), solo)[0, -1]]
            want += [model(row[None, i : i + 1], torch.tensor([i]), solo)[0, 0] for i in range(n, n + 4)]
            # the same arithmetic in matrix products of another height: the last float32 bits (and one int8 step, see above)
            torch.testing.assert_close(torch.stack(got[b]), torch.stack(want), atol=1e-2 if quantized else 1e-5, rtol=0)


def test_no_token_sees_the_future():
    model = build_tiny()
    idx = torch.randint(97, (1, 20), generator=torch.Generator().manual_seed(2))
    changed = idx.clone()
    changed[0, 12] += 1
    with torch.no_grad():
        a, b = model(idx), model(changed)
    assert torch.equal(a[:, :12], b[:, :12])
    assert not torch.equal(a[:, 12:], b[:, 12:])


def test_packed_documents_are_strangers():
    """FAULTS A18: logits as alone, no change from a neighbour's change, no gradient into a neighbour."""
    model = build_tiny()
    lengths = [5, 9, 1, 3]
    documents = torch.repeat_interleave(torch.arange(4), torch.tensor(lengths))[None]
    idx = torch.randint(97, (1, 18), generator=torch.Generator().manual_seed(3))
    packed = model(idx, documents=documents)
    for solo, part in zip(idx[0].split(lengths), packed[0].split(lengths)):
        torch.testing.assert_close(model(solo[None])[0], part, **CLOSE)
    changed = idx.clone()
    changed[0, 2] += 1
    assert torch.equal(model(changed, documents=documents)[0, 5:], packed[0, 5:])

    seen = {}
    handle = model.tok_embeddings.register_forward_hook(lambda _m, _i, out: (out.retain_grad(), seen.update(out=out))[1])
    model(idx, documents=documents)[0, 5:14].sum().backward()
    handle.remove()
    assert torch.count_nonzero(seen["out"].grad[0, :5]) == 0 and torch.count_nonzero(seen["out"].grad[0, 14:]) == 0
    assert torch.count_nonzero(seen["out"].grad[0, 5:14]) > 0


# --- setup_caches: the seed's contract ------------------------------------------------------------------------


def test_training_mode_makes_the_table_only_and_passes_no_mask(monkeypatch):
    model = Transformer.from_name("tiny")
    model.setup_caches(2, 61, training=True)
    assert model.max_seq_length == 64 and model.freqs_cis.shape == (64, 8, 2)
    assert model.caches is None and [name for name, _ in model.named_buffers()] == ["freqs_cis"]
    calls = []
    real = F.scaled_dot_product_attention

    def spy(*args, **kwargs):
        calls.append(kwargs)
        return real(*args, **kwargs)

    monkeypatch.setattr(F, "scaled_dot_product_attention", spy)
    model(torch.zeros(1, 10, dtype=torch.long))
    assert len(calls) == 2 and all(c["is_causal"] and c["attn_mask"] is None for c in calls)


def test_nothing_grows_with_the_square_of_131072_positions():
    model = Transformer(ModelArgs(block_size=131072, vocab_size=32, n_layer=1, n_head=2, dim=16, intermediate_size=16))
    for training in (True, False):
        model.setup_caches(1, 131072, training=training)
        # table: 131072 x 4 pairs x 2 in float32; caches: keys and values of 16 numbers
        assert sum(b.nbytes for b in model.buffers()) == 131072 * (8 * 4 + (0 if training else 2 * 16 * 4))
    with torch.no_grad():
        model(torch.zeros(1, 64, dtype=torch.long), torch.arange(131008, 131072))


def test_setup_returns_early_and_grows_when_it_must():
    model = Transformer.from_name("tiny")
    model.setup_caches(2, 32)
    table, caches = model.freqs_cis, model.caches
    model.setup_caches(1, 20)
    assert model.freqs_cis is table and model.caches is caches
    model.setup_caches(3, 20)
    assert model.caches is not caches and model.caches[0].k_cache.shape == (3, 2, 32, 16)
    model.setup_caches(1, 64)
    assert model.max_seq_length == 64 and model.caches[0].k_cache.shape == (3, 2, 64, 16)
    model.setup_caches(1, 8, kv_cache_quantization=True)
    assert model.caches[0].k_cache.dtype == torch.int8
    model.setup_caches(1, 8)
    assert model.caches[0].k_cache.dtype == torch.float32


def test_forward_before_setup_says_so():
    model = Transformer.from_name("tiny")
    idx = torch.zeros(1, 4, dtype=torch.long)
    with pytest.raises(AssertionError, match="Caches must be initialized first"):
        model(idx)
    model.setup_caches(1, 8, training=True)
    model(idx)
    with pytest.raises(AssertionError, match="Caches must be initialized first"):
        model(idx, torch.arange(4))
    model.reset_caches()
    with pytest.raises(AssertionError, match="Caches must be initialized first"):
        model(idx)


def test_limits_are_named():
    model = Transformer.from_name("tiny")
    with pytest.raises(UserError, match="65 is beyond this model's limit of 64"):
        model.setup_caches(1, 65)
    model.setup_caches(2, 16)
    with pytest.raises(UserError, match="17 tokens, but caches were set up for 16"):
        model(torch.zeros(1, 17, dtype=torch.long))
    with pytest.raises(UserError, match="batch of 3 rows, but the caches hold 2"):
        model(torch.zeros(3, 1, dtype=torch.long), torch.arange(1))
    with pytest.raises(UserError, match="without input_pos"):
        model(torch.zeros(1, 1, dtype=torch.long), caches=model.caches)
    with pytest.raises(AssertionError, match="prompt_length > 1"):
        model.setup_caches(1, 8, linear_causal_mask=True)
    model(torch.zeros(1, 1, dtype=torch.long), torch.arange(1))  # fewer rows than the cache has


def test_training_and_inference_follow_each_other():
    model = build_tiny()
    idx = torch.randint(97, (2, 16), generator=torch.Generator().manual_seed(4))

    def loss_and_gradient() -> tuple[torch.Tensor, torch.Tensor]:
        model.zero_grad()
        loss = model(idx).float().logsumexp(-1).mean()
        loss.backward()
        return loss.detach(), model.layers[0].attention.wqkv.weight.grad.clone()

    before = loss_and_gradient()
    model.setup_caches(2, 16)
    with torch.no_grad():
        first = model(idx, torch.arange(16))
    model.setup_caches(2, 16, training=True)
    assert model.caches is None
    after = loss_and_gradient()
    assert torch.equal(before[0], after[0]) and torch.equal(before[1], after[1])
    model.setup_caches(2, 16)
    with torch.no_grad():
        assert torch.equal(model(idx, torch.arange(16)), first)


def test_a_second_generation_does_not_see_the_first():
    model = build_tiny()
    model.setup_caches(1, 32)
    long, short = torch.randint(97, (2, 30), generator=torch.Generator().manual_seed(5))[:, None]
    with torch.no_grad():
        fresh = model(short[:, :6], torch.arange(6))
        model(long, torch.arange(30))
        again = model(short[:, :6], torch.arange(6))
    assert torch.equal(fresh, again)


def test_caches_and_table_stay_out_of_the_state_and_follow_the_model():
    model = build_tiny()
    names = set(model.state_dict())
    model.setup_caches(1, 32)
    assert set(model.state_dict()) == names
    assert not any("cache" in n or "freqs" in n for n in names)
    table = model.freqs_cis.clone()
    model.to(torch.bfloat16)
    assert torch.equal(model.freqs_cis, table) and model.caches[0].k_cache.dtype == torch.bfloat16
    model.to("meta")
    assert model.freqs_cis.is_meta
    with torch.device("meta"):
        made = Transformer.from_name("tiny")
        made.setup_caches(1, 32)
    assert made.freqs_cis.is_meta and made.caches[0].k_cache.is_meta


def test_table_is_right_after_meta_construction():
    """FAULTS A9: built on meta, materialised empty over dirtied memory, loaded strictly (copied or assigned)."""
    scaling = {"type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 32}
    normal = build_tiny(rope_scaling=scaling)
    idx = torch.randint(97, (1, 40), generator=torch.Generator().manual_seed(6))
    for assign in (False, True):
        junk = [torch.full((64, 8, 2), float("nan")) for _ in range(64)]
        del junk
        with torch.device("meta"):
            model = Transformer(normal.config)
            model.setup_caches(1, 64, training=True)
        if not assign:
            model.to_empty(device="cpu")
        model.load_state_dict({k: v.clone() for k, v in normal.state_dict().items()}, assign=assign)
        assert torch.equal(model.freqs_cis, normal.freqs_cis)
        assert torch.equal(model(idx), normal(idx))


# --- RoPE in the model ------------------------------------------------------------------------------------------


def test_bf16_weights_keep_float32_angles():
    """FAULTS A1."""
    model = Transformer(ModelArgs(block_size=16384, vocab_size=97, n_layer=1, n_head=4, n_local_heads=2, dim=64)).to(torch.bfloat16)
    model.setup_caches(1, 16384, training=True)
    for position, cosine in ((257, 0.8193), (4097, 0.9348), (15962, -0.9080)):
        assert abs(model.freqs_cis[position, 0, 0].item() - cosine) < 2**-8 + 2e-3
    # Scores depend on distance alone. bf16 q and k: 2^-8 relative on a score of |q||k|
    q, k = torch.randn(2, 1, 1, 1, 16, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)
    from llamalab.rope import apply_rotary_emb

    def score(a: int, b: int) -> torch.Tensor:
        return (apply_rotary_emb(q, model.freqs_cis[a : a + 1]) * apply_rotary_emb(k, model.freqs_cis[b : b + 1])).float().sum()

    for p in (300, 5000, 15900):
        torch.testing.assert_close(score(p + 17, p), score(17, 0), atol=float(q.norm() * k.norm()) * 2**-7, rtol=0)


def test_dynamic_scaling_has_no_memory():
    """FAULTS A3: a long prompt between two short ones changes nothing."""
    model = build_tiny(rope_scaling={"type": "dynamic", "factor": 2.0})
    generator = torch.Generator().manual_seed(7)
    short, long = torch.randint(97, (1, 20), generator=generator), torch.randint(97, (1, 200), generator=generator)
    with torch.no_grad():
        first, middle, again = model(short), model(long), model(short)
        assert torch.equal(first, again) and middle.shape == (1, 200, 97)
        # cached: the base follows the capacity asked for, so prefill and decode share one table
        caches = model.make_caches(1, 200)
        parts = [model(long[:, a : a + n], torch.arange(a, a + n), caches) for a, n in ((0, 150), (150, 1), (151, 49))]
    torch.testing.assert_close(torch.cat(parts, dim=1), middle, **CLOSE)
    base = 10000 * (2 * 200 / 64 - 1) ** (16 / 14)
    frequencies = torch.tensor([base ** (-2 * i / 16) for i in range(8)], dtype=torch.float64)
    torch.testing.assert_close(middle, reference_logits(model.state_dict(), model.config, long, frequencies).float(), **CLOSE)


def test_dynamic_scaling_has_no_memory_in_the_models_own_caches():
    """FAULTS A3: each sequence is scaled for the length its caches were asked for, to the last rounded-up slot."""
    model = build_tiny(rope_scaling={"type": "dynamic", "factor": 2.0})
    short, long = torch.randint(97, (1, 20)), torch.randint(97, (1, 204))

    def cached(idx: torch.Tensor) -> torch.Tensor:
        model.setup_caches(1, idx.shape[1])
        return model(idx, torch.arange(idx.shape[1]))

    with torch.no_grad():
        first, middle, again = cached(short), cached(long), cached(short)
        assert torch.equal(first, again)
        torch.testing.assert_close(middle, model(long), **CLOSE)
        torch.testing.assert_close(first, model(short), **CLOSE)
        fresh = build_tiny(rope_scaling={"type": "dynamic", "factor": 2.0})
        fresh.setup_caches(1, 20)  # 24 slots
        assert fresh(short[:, :1], torch.tensor([23])).isfinite().all()


def test_dynamic_scaling_and_packed_documents():
    """FAULTS A3, A18: a row longer than the trained length does not stretch the documents in it; a longer document has no room."""
    model = build_tiny(rope_scaling={"type": "dynamic", "factor": 2.0})
    idx = torch.randint(97, (1, 100))
    ids = torch.tensor([[0] * 60 + [1] * 40])
    with torch.no_grad():
        packed = model(idx, documents=ids)
        torch.testing.assert_close(packed[:, :60], model(idx[:, :60]), **CLOSE)
        torch.testing.assert_close(packed[:, 60:], model(idx[:, 60:]), **CLOSE)
        torch.testing.assert_close(model(idx, documents=torch.zeros_like(ids)), model(idx), **CLOSE)
        with pytest.raises(UserError, match="one of 70 tokens cannot be packed"):
            model(idx, documents=torch.tensor([[0] * 70 + [1] * 30]))


def test_assigned_weights_stay_tied():
    """FAULTS A4: load_state_dict(assign=True) makes a parameter of each of the two names."""
    normal = build_tiny("tiny-tied")
    with torch.device("meta"):
        model = Transformer(normal.config)
    model.load_state_dict(normal.state_dict(), assign=True)
    assert model.output.weight is model.tok_embeddings.weight
    assert torch.equal(model.output.weight, normal.output.weight)


@pytest.mark.parametrize("quantized", [False, True])
def test_cached_generation_under_autocast(quantized):
    """Keys are then bf16 and caches in the weights' float32."""
    model, idx = build_tiny(), torch.randint(97, (1, 12), generator=torch.Generator().manual_seed(8))
    caches = model.make_caches(1, 12, quantized)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        got, plain = model(idx, torch.arange(12), caches), model(idx)
    # bf16 products: 2^-8 relative each, on logits of order one; int8 keys and values another 2^-7
    torch.testing.assert_close(got.float(), plain.float(), atol=0.15 if quantized else 0.05, rtol=0)


def test_tied_head_and_embedding_are_one_parameter():
    """FAULTS A4, the model's side."""
    model = build_tiny("tiny-tied")
    assert model.output.weight is model.tok_embeddings.weight
    assert sum(1 for n, _ in model.named_parameters() if re.search("output|tok_emb", n)) == 1
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(torch.zeros(1, 4, dtype=torch.long)).float().logsumexp(-1).sum().backward()
    before = model.output.weight.detach().clone()
    optimizer.step()
    assert not torch.equal(model.output.weight, before) and torch.equal(model.output.weight, model.tok_embeddings.weight)


def test_initial_weights_depend_on_the_seed_alone():
    a, b = Transformer.from_name("tiny").init_weights(3), Transformer.from_name("tiny").to(torch.bfloat16).init_weights(3)
    other = Transformer.from_name("tiny").init_weights(4)
    for (name, p), q, r in zip(a.named_parameters(), b.parameters(), other.parameters()):
        assert torch.equal(p.to(torch.bfloat16), q), name
        assert p.dim() == 1 or not torch.equal(p, r)
    assert abs(a.tok_embeddings.weight.std().item() - 0.02) < 1e-3  # 6208 draws: a standard error of 2e-4
    assert abs(a.layers[0].feed_forward.w2.weight.std().item() - 0.01) < 5e-4


def test_gqa_keys_are_not_copied(monkeypatch):
    seen = []
    real = F.scaled_dot_product_attention
    monkeypatch.setattr(F, "scaled_dot_product_attention", lambda q, k, v, **kw: seen.append((q.shape, k.shape, kw)) or real(q, k, v, **kw))
    build_tiny()(torch.zeros(1, 8, dtype=torch.long))
    assert all(q[1] == 4 and k[1] == 2 and kw["enable_gqa"] for q, k, kw in seen)


def test_table_equals_the_formula():
    table = precompute_freqs_cis(100, 16, 10000.0)
    angle = torch.tensor(57 * 10000.0 ** (-2 * 3 / 16), dtype=torch.float64)
    # float32: the frequency and the product each round once, 57 radians * 6e-8
    torch.testing.assert_close(table[57, 3].double(), torch.stack([angle.cos(), angle.sin()]), atol=1e-5, rtol=0)
