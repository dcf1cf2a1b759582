"""Generation: each token is the one the plain forward gives, alone or in a batch; limits, sampling, stops, text."""

from __future__ import annotations

import random
import warnings

import pytest
import torch
from reference import reference_logits
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models

from llamalab.checkpoint import load_model
from llamalab.config import RopeScaling
from llamalab.errors import UserError
from llamalab.generate import TextStream, common_prefix, generate, inference, prefill, sample, stream_text, warp
from llamalab.sampling import Sampling
from llamalab.tokenizer import load_tokenizer

PROMPTS = [[5, 80, 33], [7, 1, 0, 44, 96, 12, 3], [9, 8, 7, 6, 5, 4, 3, 2, 1, 0, 90, 91]]  # 3, 7 and 12 tokens
NEW = 20


BYTES = load_tokenizer("bytes")  # id = byte; characters span tokens


def greedy_by_reference(model, prompt: list[int], new: int) -> list[int]:
    """Argmax of the float64 reference, the whole sequence anew for every token."""
    ids = list(prompt)
    with torch.no_grad():
        for _ in range(new):
            ids.append(int(reference_logits(model.state_dict(), model.config, torch.tensor(ids))[-1].argmax()))
    return ids[len(prompt) :]


def columns(steps) -> list[list[int]]:
    """A batch's steps as one list of tokens per row, without the Nones."""
    return [[token for token in row if token is not None] for row in zip(*steps)]


# --- against the reference, and against itself -------------------------------------------------------------


@pytest.mark.parametrize(
    "switches", [{}, {"n_local_heads": 1}, {"sliding_window": 5}, {"qk_norm": True, "qkv_bias": True}, {"preset": "tiny-tied"}]
)
def test_greedy_is_the_argmax_of_the_reference(tiny, switches):
    model = tiny(**switches)
    for prompt in PROMPTS:
        assert list(generate(model, prompt, NEW)) == greedy_by_reference(model, prompt, NEW)


def test_four_modes_agree_with_the_reference(tiny):
    """A11: plain, cached prefill, token by token, cached after a plain call."""
    model, idx = tiny(), torch.randint(0, 97, (1, 30), generator=torch.Generator().manual_seed(1))
    right = reference_logits(model.state_dict(), model.config, idx)

    def cached(chunk: int) -> torch.Tensor:
        caches = model.make_caches(1, 30)
        return torch.cat([model(idx[:, i : i + chunk], torch.arange(i, min(i + chunk, 30)), caches) for i in range(0, 30, chunk)], dim=1)

    with torch.no_grad():
        modes = {"plain": model(idx), "prefill": cached(30), "token by token": cached(1), "chunks": cached(7), "after plain": cached(30)}
    for name, logits in modes.items():
        # float32 against float64, logits of order one over two layers: 3e-6 seen; the fault is of order one
        assert (logits - right).abs().max() < 3e-5, name
    changed = idx.clone()
    changed[0, 20] = (changed[0, 20] + 1) % 97
    with torch.no_grad():
        assert torch.equal(model(changed)[:, :20], modes["plain"][:, :20])
        assert not torch.equal(model(changed)[:, 20:], modes["plain"][:, 20:])


@pytest.mark.parametrize("switches", [{}, {"sliding_window": 4}])
def test_ragged_batch_equals_solo(tiny, switches):
    """A10, with padding at the end instead of the beginning."""
    model = tiny(**switches)
    solo = [list(generate(model, prompt, NEW)) for prompt in PROMPTS]
    assert columns(generate(model, PROMPTS, NEW)) == solo
    assert columns(generate(model, PROMPTS[::-1], NEW, chunk=5)) == solo[::-1]
    assert [len(row) for row in solo] == [NEW] * 3

    with torch.no_grad():
        batched = prefill(model, PROMPTS, model.make_caches(3, 32))
        for row, prompt in zip(batched, PROMPTS):
            # the bound FAULTS.md names; the same float32 sums in another blocking differ by about 1e-6
            assert (row - prefill(model, [prompt], model.make_caches(1, 32))[0]).abs().max() < 1e-5


def test_padding_is_never_seen(tiny):
    """A row's logits do not depend, in any bit, on what pads it: here, on what stands in the cache's later slots."""
    model = tiny()
    clean, dirty = model.make_caches(1, 32), model.make_caches(1, 32)
    for layer in dirty:
        layer.k_cache.fill_(1e3)
        layer.v_cache.fill_(-1e3)
    assert list(generate(model, PROMPTS[0], NEW, caches=dirty)) == list(generate(model, PROMPTS[0], NEW, caches=clean))
    for a, b in zip(clean, dirty):
        assert torch.equal(a.k_cache[:, :, : 3 + NEW - 1], b.k_cache[:, :, : 3 + NEW - 1])


def test_chunks_and_kept_caches_change_nothing(tiny):
    model = tiny()
    whole = list(generate(model, PROMPTS[2], NEW))
    for chunk in (1, 4, 11, 12, 13):
        assert list(generate(model, PROMPTS[2], NEW, chunk=chunk)) == whole
    caches = model.make_caches(1, 64)
    first = list(generate(model, PROMPTS[2], 6, caches=caches))
    assert first == whole[:6]
    # The caches now hold the prompt and all but the last of the six: go on from there.
    assert list(generate(model, PROMPTS[2] + first, NEW - 6, caches=caches, cached=12 + 5)) == whole[6:]


def test_kept_prefix_is_not_computed_again(tiny, monkeypatch):
    model, widths = tiny(), []
    hidden = model.hidden
    monkeypatch.setattr(model, "hidden", lambda idx, *rest: widths.append(idx.shape[1]) or hidden(idx, *rest))
    caches = model.make_caches(1, 64)
    list(generate(model, PROMPTS[2], 1, caches=caches))
    list(generate(model, [*PROMPTS[2], 50, 51], 3, caches=caches, cached=12))
    assert widths == [12, 2, 1, 1]


def test_quantized_caches(tiny):
    model = tiny()
    solo = [list(generate(model, p, NEW, caches=model.make_caches(1, 32, quantized=True))) for p in PROMPTS]
    assert columns(generate(model, PROMPTS, NEW, caches=model.make_caches(3, 32, quantized=True))) == solo


def test_nothing_of_the_caller_changes(tiny):
    model = tiny()
    model.reset_caches()
    model.setup_caches(2, 16)  # shorter than what will be generated
    own, table = model.caches, model.max_seq_length
    before = list(generate(model, PROMPTS[0], NEW))
    model.train()
    model.layers[0].eval()  # one part frozen
    torch.manual_seed(1)
    state = torch.get_rng_state()
    for _ in generate(model, PROMPTS[0], 3, temperature=1.0, seed=4):
        assert model.training and not model.layers[0].training and torch.is_grad_enabled()
        torch.zeros(1, requires_grad=True).exp().backward()  # the caller may train between two tokens
    assert torch.equal(torch.get_rng_state(), state)
    assert model.caches is own and model.max_seq_length >= table
    assert all(not layer.k_cache.any() for layer in own)
    assert list(generate(model, PROMPTS[0], NEW)) == before
    assert all(p.grad is None for p in model.parameters())


def test_table_is_made_where_missing(tiny):
    model = tiny()
    right = list(generate(model, PROMPTS[0], NEW))
    model.reset_caches()
    assert list(generate(model, PROMPTS[0], NEW)) == right
    assert model.caches is None


def test_inference_restores_on_error(tiny):
    model = tiny().train()
    with pytest.raises(RuntimeError), inference(model):
        raise RuntimeError
    assert model.training and torch.is_grad_enabled()


# --- A12: lengths -----------------------------------------------------------------------------------------


def test_length_limit(tiny, monkeypatch):
    model = tiny()  # limit 64
    prompt = [i % 97 for i in range(65)]
    fresh = list(generate(model, prompt[:3], 5))
    for n, new in [(43, 20), (44, 20), (63, 1), (64, 0), (1, 63)]:  # 63 or 64 in all
        assert len(list(generate(model, prompt[:n], new))) == new

    def never(*_, **__):
        raise AssertionError("computed before the check")

    with monkeypatch.context() as patch:
        patch.setattr(model, "hidden", never)
        patch.setattr(model, "make_caches", never)
        for n, new in [(45, 20), (64, 1), (65, 1), (65, 0), (1, 64)]:
            with pytest.raises(UserError, match=f"{n} tokens.* {new} new.*limit is 64"):
                generate(model, prompt[:n], new)
        wrong = [([], "empty"), ([[1], []], "row 1 .*empty"), ([97], "97"), ([-1], "-1"), ([1.5], "1.5"), ("Once", "text"), (5, "got int")]
        for bad, message in wrong:
            with pytest.raises(UserError, match=message):
                generate(model, bad, 5)
        for new in (-1, 2.5, None):
            with pytest.raises(UserError, match="max_new_tokens must be a whole number"):
                generate(model, [1], new)
        assert list(generate(model, [1], 0)) == []
        assert list(generate(model, [[1], [2]], 0)) == []
    assert list(generate(model, prompt[:3], 5)) == fresh


def test_cache_limits(tiny):
    model = tiny()
    caches = model.make_caches(1, 10)
    assert len(list(generate(model, [1, 2, 3], 7, caches=caches))) == 7
    with pytest.raises(UserError, match="hold 1 rows of 10"):
        generate(model, [1, 2, 3], 8, caches=caches)
    with pytest.raises(UserError, match="hold 1 rows of 10"):
        generate(model, [[1], [2]], 1, caches=caches)
    with pytest.raises(UserError, match="at least one token"):
        generate(model, [1, 2, 3], 2, caches=caches, cached=3)
    with pytest.raises(UserError, match="no caches"):
        generate(model, [1, 2, 3], 2, cached=1)
    with pytest.raises(UserError, match="chunk"):
        generate(model, [1, 2, 3], 2, chunk=0)


def test_prompt_kinds(tiny):
    model = tiny()
    right = list(generate(model, [1, 2, 3], 4))
    for prompt in (torch.tensor([1, 2, 3]), torch.tensor([1, 2, 3]).numpy(), (1, 2, 3)):
        assert list(generate(model, prompt, 4)) == right
    for prompts in (torch.tensor([[1, 2, 3]]), [torch.tensor([1, 2, 3])], [[1, 2, 3]], torch.tensor([[1, 2, 3]]).numpy()):
        assert list(generate(model, prompts, 4)) == [[token] for token in right]


def test_dynamic_rope(tiny):
    """Past the trained length the angles depend on a row's length, so ragged rows there are refused and equal ones agree with solo."""
    model = tiny(rope_scaling=RopeScaling("dynamic", factor=2.0))
    assert columns(generate(model, PROMPTS, NEW)) == [list(generate(model, p, NEW)) for p in PROMPTS]
    with pytest.raises(UserError, match="dynamic"):
        generate(model, PROMPTS, 60)
    pair = [PROMPTS[0], PROMPTS[0][::-1]]
    assert columns(generate(model, pair, 70)) == [list(generate(model, p, 70)) for p in pair]


# --- A13: sampling ----------------------------------------------------------------------------------------


def gen(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def draw(logits: torch.Tensor, seed: int = 0, **settings) -> list[int]:
    return sample(logits, Sampling(**settings), [gen(seed + b) for b in range(len(logits))]).tolist()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_argmax_and_tiny_temperatures(dtype):
    logits = torch.randn(5, 97, generator=gen()).to(dtype)
    logits[0, 40] = logits[0, 60] = 9  # equal maxima
    best = [row.tolist().index(max(row.tolist())) for row in logits]
    assert best[0] == 40
    for seed in range(5):
        assert draw(logits, seed) == draw(logits, seed, top_k=1, temperature=1.0) == draw(logits, seed, top_k=500) == best
    for temperature in (1e-8, 1e-38, 1e-45, 1e-300):
        assert draw(logits[1:], temperature=temperature) == best[1:]
        assert {draw(logits[:1], seed, temperature=temperature)[0] for seed in range(20)} == {40, 60}
        assert warp(logits, Sampling(temperature=temperature)).isnan().sum() == 0


def test_top_k_beyond_the_vocabulary_is_no_limit():
    logits = torch.randn(3, 97, generator=gen())
    for k in (97, 98, 5000):
        assert torch.equal(warp(logits, Sampling(temperature=0.7, top_k=k)), warp(logits, Sampling(temperature=0.7)))


@pytest.mark.parametrize(
    "bad",
    [{"temperature": -0.1}, {"temperature": float("nan")}, {"temperature": float("inf")}, {"top_k": 0}, {"top_p": 0.0}, {"top_p": 1.1},
     {"min_p": -0.1}, {"min_p": 1.0}, {"repetition_penalty": 0.0}],
)
def test_settings_out_of_range(tiny, bad):
    with pytest.raises(UserError, match=next(iter(bad))):
        generate(tiny(), [1], 3, **bad)


@pytest.mark.parametrize(
    "settings",
    [
        {"temperature": 0.3}, {"temperature": 1.7}, {"top_k": 1}, {"top_k": 13}, {"top_p": 0.05}, {"top_p": 0.9}, {"top_p": 1.0},
        {"min_p": 0.0}, {"min_p": 0.1}, {"repetition_penalty": 1.3}, {"repetition_penalty": 0.8},
        {"repetition_penalty": 1.2, "temperature": 0.8, "top_k": 40, "top_p": 0.85, "min_p": 0.05},
    ],
)
def test_filters_equal_transformers(settings):
    from transformers.generation import logits_process as hf

    settings = {"temperature": 1.0, **settings}
    logits = 3 * torch.randn(16, 97, generator=gen(3))
    ids = torch.randint(0, 97, (16, 20), generator=gen(4))
    seen = torch.zeros(16, 97, dtype=torch.bool).scatter(1, ids, True)

    chain = []  # in the order transformers applies them
    if "repetition_penalty" in settings:
        chain.append(hf.RepetitionPenaltyLogitsProcessor(settings["repetition_penalty"]))
    chain.append(hf.TemperatureLogitsWarper(settings["temperature"]))
    if "top_k" in settings:
        chain.append(hf.TopKLogitsWarper(settings["top_k"]))
    if "top_p" in settings:
        chain.append(hf.TopPLogitsWarper(settings["top_p"]))
    if "min_p" in settings:
        chain.append(hf.MinPLogitsWarper(settings["min_p"]))
    right = logits
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for step in chain:
            right = step(ids, right)

    ours = warp(logits, Sampling(**settings), seen)
    assert torch.equal(ours.isinf(), right.isinf())
    # ours are shifted by a constant per row; as probabilities they agree to float32 rounding of logits of order ten
    torch.testing.assert_close(ours.softmax(-1), right.softmax(-1), rtol=1e-5, atol=1e-7)


def test_draws_follow_the_probabilities():
    logits = torch.tensor([[0.0, 2.0, -torch.inf, 1.0, 0.5]])
    generator, n = gen(7), 20000
    settings = Sampling(temperature=1.0)
    counts = torch.bincount(torch.cat([sample(logits, settings, [generator]) for _ in range(n)]), minlength=5)
    p = logits.softmax(-1)[0]
    assert counts[2] == 0
    # five standard deviations of a binomial count
    assert ((counts - n * p).abs() <= 5 * (n * p * (1 - p)).sqrt()).all()


def test_draws_at_the_edges(monkeypatch):
    """The smallest and the largest uniform number hit tokens with probability > 0, also when the ends of the vocabulary have none."""
    logits = torch.full((1, 97), -torch.inf)
    logits[0, 30:50] = torch.randn(20, generator=gen())
    for number, token in [(0.0, 30), (1 - 2**-53, 49)]:
        monkeypatch.setattr(torch, "rand", lambda *_, number=number, **__: torch.tensor([number], dtype=torch.float64))
        assert sample(logits, Sampling(temperature=1.0), [None]).tolist() == [token]


def test_broken_logits_are_an_error(tiny):
    for bad in (torch.nan, torch.inf):
        logits = torch.zeros(2, 97)
        logits[1, 50] = bad
        for temperature in (0.0, 1.0):
            with pytest.raises(UserError, match="logits"):
                draw(logits, temperature=temperature)
    with pytest.raises(UserError, match="logits"):
        draw(torch.full((1, 97), -torch.inf))
    model = tiny()
    with torch.no_grad():
        model.norm.weight[3] = torch.nan
    with pytest.raises(UserError, match="logits"):
        list(generate(model, [1, 2], 3))


def test_seeds(tiny):
    model, how = tiny(), dict(temperature=1.2, top_p=0.95)
    a = list(generate(model, PROMPTS[0], NEW, seed=5, **how))
    assert list(generate(model, PROMPTS[0], NEW, seed=5, **how)) == a
    assert list(generate(model, PROMPTS[0], NEW, seed=6, **how)) != a
    assert list(generate(model, PROMPTS[0], NEW, **how)) != list(generate(model, PROMPTS[0], NEW, **how))
    batch = columns(generate(model, PROMPTS, NEW, seed=5, **how))
    assert batch == [list(generate(model, p, NEW, seed=5 + b, **how)) for b, p in enumerate(PROMPTS)]
    assert columns(generate(model, PROMPTS[:2], NEW, seed=[9, 5], **how))[1] == list(generate(model, PROMPTS[1], NEW, seed=5, **how))
    with pytest.raises(UserError, match="2 seeds for 3"):
        generate(model, PROMPTS, NEW, seed=[1, 2])


def test_repetition_penalty_counts_prompt_and_answer(tiny):
    """A penalty beyond any ratio of logits forbids repeats among tokens with positive logits; each row has its own memory."""
    model = tiny()
    answer = list(generate(model, PROMPTS[1], NEW, repetition_penalty=1e6))
    assert len({*PROMPTS[1], *answer}) == len(PROMPTS[1]) + NEW
    solo = [list(generate(model, p, NEW, repetition_penalty=1e6)) for p in PROMPTS]
    assert columns(generate(model, PROMPTS, NEW, repetition_penalty=1e6)) == solo


def test_idle_filters_are_named():
    assert Sampling(top_k=5, min_p=0.1).idle == ["top_k", "min_p"]
    assert Sampling(temperature=0.5, top_k=5).idle == []


# --- A14: ends --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("source", ["config", "second of config", "tokenizer", "stop_ids"])
def test_every_source_of_end_ids(tiny, source):
    model = tiny()
    run = list(generate(model, PROMPTS[0], NEW))
    end = run[4]
    right = run[: run.index(end)]
    how = {}
    if source == "config":
        model.config.eos_token_ids = (end,)
    elif source == "second of config":
        model.config.eos_token_ids = (next(i for i in range(97) if i not in run), end)
    elif source == "tokenizer":
        how["tokenizer"] = load_tokenizer("bytes")
        how["tokenizer"].eos_ids = (next(i for i in range(97) if i not in run), end)
    else:
        how["stop_ids"] = [end]
    assert list(generate(model, PROMPTS[0], NEW, **how)) == right


def test_a_finished_row_leaves_the_others_alone(tiny):
    model = tiny()
    solo = [list(generate(model, p, NEW)) for p in PROMPTS]
    end = next(token for token in solo[1] if token not in solo[0] + solo[2])
    right = [solo[0], solo[1][: solo[1].index(end)], solo[2]]
    steps = list(generate(model, PROMPTS, NEW, stop_ids=[end]))
    assert columns(steps) == right and len(steps) == NEW
    assert all(step[1] is None for step in steps[len(right[1]) :])
    every = list(generate(model, PROMPTS, NEW, stop_ids=range(97)))
    assert every == []


# --- text -------------------------------------------------------------------------------------------------


def until_stop(text: str, stops: list[str]) -> str:
    """One-shot: cut at the stop that is complete first, the longer of two that end together."""
    for end in range(len(text) + 1):
        starts = [end - len(stop) for stop in stops if text[:end].endswith(stop)]
        if starts:
            return text[: min(starts)]
    return text


class Words:
    """A tokenizer whose tokens are their texts, of any length."""

    def stream(self) -> Words:
        return self

    def push(self, word: str) -> str:
        return word

    def flush(self) -> str:
        return ""


def test_stop_strings_equal_one_shot_for_every_cut():
    """Random texts over few letters, so that stops and false beginnings abound, in bytes and in words; pieces never go past a stop."""
    rng = random.Random(0)
    stopped = 0
    for _ in range(3000):
        text = "".join(rng.choice("abé😀") for _ in range(rng.randint(0, 14)))
        stops = ["".join(rng.choice("abé") for _ in range(rng.randint(1, 4))) for _ in range(rng.randint(0, 3))]
        pieces = list(stream_text(BYTES, text.encode(), stops))
        cuts = sorted(rng.choices(range(len(text) + 1), k=rng.randint(0, 4)))
        words = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)])]
        assert "".join(pieces) == "".join(stream_text(Words(), words, stops)) == until_stop(text, stops)
        assert "" not in pieces and not any("\ufffd" in piece for piece in pieces)
        stopped += until_stop(text, stops) != text
    assert 500 < stopped < 2500  # both outcomes were tried


def test_text_is_held_back_no_longer_than_needed():
    text = TextStream(BYTES, ["</s>", "\n\n"])
    assert [text.push(b) for b in b"a<b\n</"] == ["a", "", "<b", "", "\n", ""]
    assert text.flush() == "</"
    with pytest.raises(UserError, match="empty"):
        TextStream(BYTES, [""])
    assert list(stream_text(BYTES, b"one two", " t")) == ["o", "n", "e"]  # a single string is one stop, not its letters


def test_broken_characters_stream_as_they_decode():
    """A16: split characters wait for their end; truly invalid bytes come out as the one-shot decode has them."""
    for data in ("aé😀".encode(), b"a\xff" + "👩‍👧é".encode() + b"\xf0\x9f", b"\xc3"):
        pieces = list(stream_text(BYTES, data))
        assert "".join(pieces) == BYTES.decode(data)
    assert list(stream_text(BYTES, "aé😀".encode())) == ["a", "é", "😀"]


def test_text_after_a_prompt_keeps_its_space(tmp_path):
    """Sentencepiece: the text of an answer is what the whole decodes to, minus what the prompt decodes to."""
    backend = Backend(models.WordLevel({"<unk>": 0, "\u2581Once": 1, "\u2581upon": 2, "on": 3}, unk_token="<unk>"))
    backend.decoder = decoders.Sequence([decoders.Replace("\u2581", " "), decoders.Fuse(), decoders.Strip(" ", 1, 0)])
    backend.save(str(tmp_path / "tokenizer.json"))
    tokenizer = load_tokenizer(tmp_path)
    assert tokenizer.decode([1, 2]) == "Once upon"
    assert "".join(stream_text(tokenizer, [2, 3], after=[1])) == " uponon"
    assert "".join(stream_text(tokenizer, [2, 3])) == "uponon"


def test_common_prefix():
    assert [common_prefix(a, b) for a, b in [([], [1]), ([1, 2], [1, 2, 3]), ([1, 2, 3], [1, 5, 3]), ([4], [5])]] == [0, 2, 1, 0]


def test_stop_strings_end_generation(tiny):
    model = tiny(vocab_size=256)  # bytes
    solo = [list(generate(model, p, NEW)) for p in PROMPTS]
    texts = [BYTES.decode(run) for run in solo]
    stop = texts[1][5:7]
    assert stop and stop not in texts[0] + texts[2]
    got = columns(generate(model, PROMPTS, NEW, tokenizer=BYTES, stop_strings=[stop]))
    assert [got[0], got[2]] == [solo[0], solo[2]] and len(got[1]) < NEW
    assert BYTES.decode(solo[1]).startswith(BYTES.decode(got[1]))
    assert "".join(stream_text(BYTES, generate(model, PROMPTS[1], NEW), [stop])) == until_stop(texts[1], [stop])
    with pytest.raises(UserError, match="tokenizer"):
        generate(model, PROMPTS[1], NEW, stop_strings=["x"])


# --- the real checkpoint ----------------------------------------------------------------------------------


@pytest.mark.real
def test_real_ragged_batch_equals_solo(real_data):
    """Greedy and sampled, in float32; prompts of 2 to 8 tokens."""
    gguf = real_data / "model" / "SmolLM2-135M-Instruct.Q4_1.gguf"
    model, tokenizer = load_model(gguf).eval(), load_tokenizer(gguf)
    prompts = [tokenizer.encode(text) for text in ("The sea", "Once upon a time there was a king who")]
    for how in ({}, {"temperature": 0.9, "top_p": 0.9}):
        solo = [list(generate(model, prompt, 12, seed=3 + b, **how)) for b, prompt in enumerate(prompts)]
        assert columns(generate(model, prompts, 12, seed=3, **how)) == solo
