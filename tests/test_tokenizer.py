"""Tokenizers: every format against the library it comes from, streaming against one-shot, saved against transformers."""

from __future__ import annotations

import base64
import io
import json
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from pathlib import Path

import gguf
import pytest
import sentencepiece
import tiktoken
import tokenizers
from archives import members, only, references
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer

from llamalab.corpus import ASSETS, embedded_corpus, split_corpus
from llamalab.errors import UserError
from llamalab.tokenizer import Tokenizer, load_tokenizer
from llamalab.tokenizer_formats import (
    PATTERNS,
    Parts,
    byte_alphabet,
    byte_bpe_of_ranks,
    gguf_metadata,
    merges_of,
    parse_sentencepiece,
    parse_tiktoken,
)

TRAIN = split_corpus(embedded_corpus())[0]
SCRIPT = Path(__file__).parents[1] / "scripts" / "train_tokenizer.py"
TEXTS = [
    "", " ", "   ", "\n", "\t\n ", "Hello world", " Hello  world \n", "Élan naïve 漢字 かな", "3333 ½ 0x1F", "don't I'LL", "<0x41> ▁x▁",
    "👨‍👩‍👧 joined", "e\u0301 combining", "\x00\x01\x7f", "if (a){\n\tb();\n}", "\ufeffmark",
    "aaaaaaaaaaaaaaaa", "<|endoftext|></s><s><unk>",
]
# Letters that make merges overlap, spaces of all kinds, multi-byte characters, and any character at all.
text = st.one_of(st.text(alphabet="ab cde.'\n1"), st.text(alphabet="aé漢🦙\u200d \u2581\u0301"), st.text())
few = settings(max_examples=60, deadline=None)  # each example takes about a millisecond, the first one loads a vocabulary


def spm(**options) -> bytes:
    """A small sentencepiece BPE model trained on the corpus; Llama's settings unless `options` say otherwise."""
    out = io.BytesIO()
    options = dict(
        model_type="bpe", vocab_size=450, byte_fallback=True, normalization_rule_name="identity", remove_extra_whitespaces=False,
        character_coverage=0.9995, minloglevel=2, num_threads=1,
    ) | options
    sentencepiece.SentencePieceTrainer.train(sentence_iterator=iter(TRAIN[:60_000].split("\n")), model_writer=out, **options)
    return out.getvalue()


@lru_cache
def spm_model(kind: str = "llama") -> bytes:
    settings_of = {
        "llama": {},
        "squeeze": dict(remove_extra_whitespaces=True),
        "no prefix": dict(add_dummy_prefix=False),
        "no bytes": dict(byte_fallback=False, vocab_size=300),
        "user-defined": dict(user_defined_symbols=["<sep>", "=="]),
        "unigram": dict(model_type="unigram", vocab_size=400),
    }
    return spm(**settings_of[kind])


@lru_cache
def reference(kind: str = "llama") -> sentencepiece.SentencePieceProcessor:
    return sentencepiece.SentencePieceProcessor(model_proto=spm_model(kind))


@lru_cache
def tokenizer(name: str) -> Tokenizer:
    """"bytes", "austen" (the one we ship), or a kind of sentencepiece model."""
    if name == "bytes":
        return load_tokenizer("bytes")
    if name == "austen":
        return load_tokenizer(ASSETS / "tokenizer.json")
    return Tokenizer(parse_sentencepiece(spm_model(name), name))


KINDS = ["bytes", "austen", "llama"]


# --- decoding -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", KINDS)
@few
@given(data=st.data())
def test_streamed_pieces_joined_are_the_decoded_text(name, data):
    """A16, for ids of texts and for ids at random: invalid bytes, cut characters, control tokens, ids that no token has."""
    tok = tokenizer(name)
    of_text = text.map(lambda t: tok.encode(t, bos=True))
    ids = data.draw(of_text | st.lists(st.integers(0, 300) | st.integers(0, tok.vocab_size + 3), max_size=12))
    skip = data.draw(st.booleans())
    stream = tok.stream(skip)
    pieces = [stream.push(i) for i in ids]
    assert "".join(pieces) + stream.flush() == tok.decode(ids, skip)


@pytest.mark.parametrize("name", KINDS)
@few
@given(text)
def test_text_comes_back_and_no_piece_ends_inside_a_character(name, original):
    tok = tokenizer(name)
    if name == "llama":
        original = original.replace("\u2581", " ")  # sentencepiece's own sign for a space, which it cannot tell from one
    ids = tok.encode(original)
    assert tok.decode(ids) == original
    stream, so_far = tok.stream(), ""
    for i in ids:
        so_far += stream.push(i)
        assert original.startswith(so_far)  # half a character would show as U+FFFD, or not be a prefix
    assert so_far == original and stream.flush() == ""


def test_broken_bytes_while_streaming():
    """A16's recipe: 2-, 3- and 4-byte characters, joined emoji, an invalid byte in the middle and one at the end."""
    tok = tokenizer("bytes")
    ids = tok.encode("aé😀")
    assert len(ids) == 7 and [tok.decode([i]) for i in ids] == ["a"] + ["\ufffd"] * 6 and tok.decode(ids) == "aé😀"
    ids = [*"é漢👨‍👩‍👧".encode(), 0xFF, *b"x", *"漢".encode()[:2]]
    stream = tok.stream()
    pieces = [stream.push(i) for i in ids]
    assert pieces[:5] == ["", "é", "", "", "漢"]
    assert "".join(pieces) == "é漢👨‍👩‍👧\ufffdx" and stream.flush() == "\ufffd"
    assert tok.decode(ids) == bytes(ids).decode(errors="replace")


@pytest.mark.parametrize("name", ["bytes", "austen"])
@few
@given(data=st.data())
def test_byte_level_decoding_is_the_librarys_for_any_ids(name, data):
    tok = tokenizer(name)
    ids = data.draw(st.lists(st.integers(0, 256) | st.integers(0, tok.vocab_size - 1), max_size=12))
    skip = data.draw(st.booleans())
    assert tok.decode(ids, skip) == tok.backend.decode(ids, skip_special_tokens=skip)


@few
@given(ids=st.lists(st.integers(3, 300) | st.integers(3, 449), max_size=12))
def test_byte_fallback_decoding_is_sentencepieces_for_any_ids(ids):
    tok = tokenizer("llama")
    while ids[:1] == [tok.backend.token_to_id("<0x20>")]:
        ids = ids[1:]  # a space spelled as a byte, never encoded so: kept in front by sentencepiece, not by transformers' Strip
    assert tok.decode(ids) == reference().decode(ids)


def test_token_bytes_add_up_to_the_text():
    sample = "Élan 漢字 😀 has\n3 parts"
    for name in KINDS:
        tok = tokenizer(name)
        joined = b"".join(map(tok.token_bytes, tok.encode(sample, bos=False)))
        assert joined == (b" " if name == "llama" else b"") + sample.encode()


# --- encoding -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["llama", "squeeze", "no prefix", "no bytes", "user-defined"])
@few
@given(text | st.text(alphabet="a <sep>= "))
def test_sentencepiece_ids_are_sentencepieces(kind, original):
    assert tokenizer(kind).encode(original, bos=False) == reference(kind).encode(original)


@few
@given(text)
def test_ranks_encode_as_in_tiktoken(original):
    letters = byte_alphabet()
    vocab = tokenizer("austen").backend.get_vocab(with_added_tokens=False)
    back = {letter: byte for byte, letter in letters.items()}
    ranks = {bytes(back[c] for c in piece): i for piece, i in vocab.items() if piece != "<|endoftext|>"}
    ours = tiktoken_backend(tuple(ranks.items()))
    theirs = tiktoken.Encoding("test", pat_str=PATTERNS["llama-bpe"][0], mergeable_ranks=ranks, special_tokens={})
    assert ours.encode(original).ids == theirs.encode(original, disallowed_special=())


@lru_cache
def tiktoken_backend(ranks: tuple[tuple[bytes, int], ...]) -> tokenizers.Tokenizer:
    return byte_bpe_of_ranks(dict(ranks), PATTERNS["llama-bpe"])


def test_merges_recovered_from_ranks_give_the_trained_ids():
    """The merges of our own tokenizer, thrown away and recovered from the order of its vocabulary."""
    tok = tokenizer("austen")
    vocab = tok.backend.get_vocab(with_added_tokens=False)
    model = tokenizers.models.BPE(vocab, merges_of(sorted(vocab, key=vocab.__getitem__), vocab))
    ids = tok.encode(TRAIN[:50_000])
    backend = tokenizers.Tokenizer.from_str(tok.backend.to_str())
    backend.model = model
    assert backend.encode(TRAIN[:50_000]).ids == ids


def test_control_tokens_in_a_text_are_read_only_when_asked():
    for name, token, id in (("bytes", "<|endoftext|>", 256), ("austen", "<|endoftext|>", 0), ("llama", "</s>", 2)):
        tok, sample = tokenizer(name), f"a{token}b"
        assert id not in tok.encode(sample, bos=False)
        assert tok.decode(tok.encode(sample)) == sample
        assert tok.encode(sample, special=True).count(id) == 1
        assert tok.decode([id]) == "" and tok.decode([id], skip_special=False) == token


def test_the_special_switch_holds_under_threads():
    tok = tokenizer("bytes")
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda i: tok.encode("a<|endoftext|>", special=i % 2 == 1), range(400)))
    assert all((256 in ids) == (i % 2 == 1) for i, ids in enumerate(found))


def test_start_token():
    tok = tokenizer("llama")
    assert tok.adds_bos and tok.encode("a")[0] == tok.encode("a", bos=True)[0] == tok.bos_id == 1
    assert tok.encode("a") == [1, *tok.encode("a", bos=False)] and tok.encode("") == [1] and tok.encode("", bos=False) == []
    assert not tokenizer("bytes").adds_bos and tokenizer("bytes").encode("a", bos=True) == [256, 97]
    none = Tokenizer(Parts(tokenizers.Tokenizer.from_str(tok.backend.to_str())))
    with pytest.raises(UserError, match="no start token"):
        none.encode("a", bos=True)


def test_batches_and_offsets_agree_with_encode():
    for name in KINDS:
        tok = tokenizer(name)
        assert tok.encode_batch(TEXTS) == [tok.encode(t) for t in TEXTS]
        assert tok.encode_batch(TEXTS, bos=True) == [tok.encode(t, bos=True) for t in TEXTS]
        ids, offsets = tok.encode_with_offsets("Hello wörld")
        assert ids == tok.encode("Hello wörld", bos=False) and offsets[-1][1] == 11
        assert all("Hello wörld"[begin:end].endswith(tok.decode([i]).strip()) for i, (begin, end) in zip(ids, offsets) if end <= 7)


@pytest.mark.parametrize("name", KINDS)
@few
@given(text, text)
def test_a_text_in_two_parts_decodes_to_the_whole(name, first, second):
    tok = tokenizer(name)
    if name == "llama":
        first, second = first.replace("\u2581", " "), second.replace("\u2581", " ")
    ids, offsets = tok.encode_with_offsets(second, continues=True)
    assert tok.decode(tok.encode("x" + first) + ids) == "x" + first + second
    if second:
        assert (offsets[0][0], offsets[-1][1]) == (0, len(second))


def test_text_that_cannot_be_encoded_is_refused():
    tok = tokenizer("bytes")
    with pytest.raises(UserError, match=r"lone surrogate '\\ud800' at character 2"):
        tok.encode("ab\ud800")
    with pytest.raises(UserError, match="got bytes"):
        tok.encode(b"ab")


# --- the tokenizer we ship, and the split of the corpus ---------------------------------------------------


def test_corpus_split_is_a_paragraph_boundary_at_nine_tenths():
    whole = embedded_corpus()
    train, held_out = split_corpus(whole)
    assert train + held_out == whole and train.endswith("\n\n") and not held_out.startswith("\n")
    assert 0.89 < len(train) / len(whole) <= 0.9
    assert split_corpus("a\n\nb" + "c" * 10) == ("a\n\n", "b" + "c" * 10)
    with pytest.raises(UserError, match="no empty line"):
        split_corpus("one paragraph only")


def test_training_again_gives_the_shipped_tokenizer(tmp_path):
    outs = []
    for threads in ("1", "4"):
        out = tmp_path / threads
        env = {"RAYON_NUM_THREADS": threads, "TOKENIZERS_PARALLELISM": "true", "PATH": ""}
        run = subprocess.run([sys.executable, SCRIPT, "--out", out], env=env, capture_output=True, text=True, check=True)
        assert "held-out part: 68648 bytes, 17364 tokens, 3.953 bytes/token" in run.stdout
        outs.append({file.name: file.read_bytes() for file in out.iterdir()})
    assert outs[0] == outs[1] and set(outs[0]) == {"tokenizer.json", "tokenizer_config.json"}
    for name, content in outs[0].items():  # compared as JSON: the library may lay out the file differently in another version
        assert json.loads(content) == json.loads((ASSETS / name).read_text())


def test_shipped_tokenizer():
    tok = tokenizer("austen")
    assert (tok.vocab_size, tok.bos_id, tok.eos_ids, tok.adds_bos) == (4096, 0, (0,), False)
    assert [tok.decode([i]) for i in tok.encode("In 1813")] == ["In", " ", "1", "8", "1", "3"]


def test_importing_stays_light():
    code = "import sys, llamalab.tokenizer, llamalab.chat, llamalab.corpus; print({'torch', 'transformers', 'gguf'} & set(sys.modules))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "set()\n"


# --- files: tokenizer.model -------------------------------------------------------------------------------


def test_tokenizer_model_is_told_by_its_content(tmp_path):
    file = tmp_path / "tokenizer.model"
    file.write_bytes(spm_model())
    tok = load_tokenizer(tmp_path)
    assert (tok.bos_id, tok.eos_ids, tok.pad_id, tok.unk_id, tok.vocab_size, tok.adds_bos) == (1, (2,), None, 0, 450, True)
    file.write_bytes(b"\x00\x01 nothing")
    with pytest.raises(UserError, match="neither a sentencepiece model nor a tiktoken file"):
        load_tokenizer(file)


def test_sentencepiece_models_that_are_not_supported_are_refused_by_name():
    with pytest.raises(UserError, match="unigram"):
        parse_sentencepiece(spm_model("unigram"), "x")
    with pytest.raises(UserError, match="treat_whitespace_as_suffix"):
        parse_sentencepiece(spm(treat_whitespace_as_suffix=True), "x")
    with pytest.raises(UserError, match="normalization 'nmt_nfkc'"):
        parse_sentencepiece(spm(normalization_rule_name="nmt_nfkc"), "x")
    with pytest.raises(UserError, match="cut or damaged"):
        parse_sentencepiece(spm_model()[:-7], "x")


def test_tiktoken_file_gets_llama_3s_control_tokens():
    tokens = [bytes([b]) for b in range(256)] + [bytes([a, b]) for a in range(256) for b in range(256)]
    tokens += [b"\x00" + bytes([a, b]) for a in range(256) for b in range(256)][: 128_000 - len(tokens)]
    content = b"".join(base64.b64encode(token) + b" %d\n" % rank for rank, token in enumerate(tokens))
    tok = Tokenizer(parse_tiktoken(content, "tokenizer.model"))
    assert (tok.vocab_size, tok.bos_id, tok.eos_ids, tok.pad_id) == (128_256, 128_000, (128_001, 128_008, 128_009), 128_004)
    names = {128_000: "begin_of_text", 128_001: "end_of_text", 128_006: "start_header_id", 128_007: "end_header_id", 128_009: "eot_id"}
    assert {i: tok.decode([i], skip_special=False) for i in names} == {i: f"<|{name}|>" for i, name in names.items()}
    assert tok.encode("ab") == [128_000, tokens.index(b"ab")]
    with pytest.raises(UserError, match="holds 127999 ranks"):
        parse_tiktoken(content[: content.rindex(b"\n", 0, -1) + 1], "x")
    with pytest.raises(UserError, match="line 2: expected base64 and a rank"):
        parse_tiktoken(b"IQ== 0\nnonsense\n", "x")


# --- files: GGUF --------------------------------------------------------------------------------------------


def write_gguf(path: Path, tok: Tokenizer, model: str, pre: str | None = None, scores: list[float] | None = None, **fields) -> Path:
    """A GGUF file that holds only this tokenizer, written by the gguf package."""
    writer = gguf.GGUFWriter(path, "llama")
    vocab = tok.backend.get_vocab(with_added_tokens=True)
    tokens = sorted(vocab, key=vocab.__getitem__)
    added = tok.backend.get_added_tokens_decoder()
    byte = {f"<0x{b:02X}>" for b in range(256)} if model == "llama" else set()
    kinds = [6 if t in byte else 2 if t == "<unk>" else 3 if i in added and added[i].special else 1 for i, t in enumerate(tokens)]
    writer.add_tokenizer_model(model)
    writer.add_token_list(tokens)
    writer.add_token_types(kinds)
    if scores:
        writer.add_token_scores(scores)
    if pre:
        writer.add_tokenizer_pre(pre)
    if model == "gpt2":
        writer.add_token_merges([" ".join(pair) for pair in json.loads(tok.backend.to_str())["model"]["merges"]])
    for name, value in fields.items():
        getattr(writer, f"add_{name}")(value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return path


def test_gguf_of_both_kinds(tmp_path):
    austen = tokenizer("austen")
    ends = dict(bos_token_id=0, eos_token_id=5, eot_token_id=6, pad_token_id=7, add_bos_token=True, chat_template="{{ messages }}")
    tok = load_tokenizer(write_gguf(tmp_path / "a.gguf", austen, "gpt2", "qwen2", **ends))
    for sample in TEXTS:
        if sample != "e\u0301 combining":  # Qwen composes it
            assert tok.encode(sample, bos=False) == austen.encode(sample), sample
    assert (tok.bos_id, tok.eos_ids, tok.pad_id, tok.adds_bos, tok.chat_template) == (0, (5, 6, 0), 7, True, "{{ messages }}")

    llama, proto = tokenizer("llama"), reference()
    scores = [proto.get_score(i) for i in range(proto.get_piece_size())]
    (tmp_path / "sub").mkdir()
    write_gguf(tmp_path / "sub" / "b.gguf", llama, "llama", scores=scores, bos_token_id=1, eos_token_id=2)
    tok = load_tokenizer(tmp_path / "sub")  # the one GGUF file of a directory
    assert [tok.encode(t) for t in TEXTS] == [llama.encode(t) for t in TEXTS]
    assert (tok.bos_id, tok.eos_ids, tok.adds_bos) == (1, (2,), True)
    tok = load_tokenizer(write_gguf(tmp_path / "c.gguf", llama, "llama", scores=scores, add_space_prefix=False))
    assert tok.encode("Hello") != llama.encode("Hello", bos=False) and tok.decode(tok.encode(" Hello")) == " Hello"


def test_gguf_metadata_is_what_the_gguf_package_reads(tmp_path):
    extra = dict(context_length=2**31, rope_freq_base=1e6, layer_norm_rms_eps=1e-5, tags=["a", "é"], add_bos_token=False)
    path = write_gguf(tmp_path / "a.gguf", tokenizer("bytes"), "gpt2", "llama-bpe", scores=[0.5] * 257, **extra)
    theirs = {name: field.contents() for name, field in gguf.GGUFReader(path).fields.items() if not name.startswith("GGUF.")}
    assert gguf_metadata(path) == theirs


@pytest.mark.parametrize(
    ("model", "pre", "fields", "message"),
    [
        ("gpt2", "deepseek-v3", {}, "pre-tokenizer 'deepseek-v3' is not supported"),
        ("bert", None, {}, "tokenizer model 'bert' is not supported"),
        ("llama", None, {}, "needs tokenizer.ggml.scores"),
        ("gpt2", "gpt-2", {"add_eos_token": True}, "add_eos_token"),
    ],
)
def test_gguf_tokenizers_that_are_not_supported_are_refused_by_name(tmp_path, model, pre, fields, message):
    with pytest.raises(UserError, match=message):
        load_tokenizer(write_gguf(tmp_path / "a.gguf", tokenizer("bytes"), model, pre, **fields))


def test_damaged_gguf_files_are_refused(tmp_path):
    whole = write_gguf(tmp_path / "a.gguf", tokenizer("bytes"), "gpt2", "gpt-2").read_bytes()
    for size in (0, 10, 60, len(whole) // 2):
        (tmp_path / "a.gguf").write_bytes(whole[:size])
        with pytest.raises(UserError, match=r"cut off|not a GGUF file"):
            load_tokenizer(tmp_path / "a.gguf")
    (tmp_path / "b.gguf").write_bytes(whole)
    with pytest.raises(UserError, match=r"2 GGUF files; name one: a\.gguf, b\.gguf"):
        load_tokenizer(tmp_path)
    with pytest.raises(UserError, match="holds no tokenizer"):
        load_tokenizer(empty_gguf(tmp_path / "c.gguf"))


def empty_gguf(path: Path) -> Path:
    writer = gguf.GGUFWriter(path, "llama")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return path


# --- files: a Hugging Face directory -------------------------------------------------------------------------


def hugging_face(directory: Path, tok: Tokenizer, **files: dict) -> Path:
    """tok's tokenizer.json alone, and the small files beside it."""
    directory.mkdir(exist_ok=True)
    tok.backend.save(str(directory / "tokenizer.json"))
    for name, content in files.items():
        (directory / f"{name}.json").write_text(json.dumps(content))
    return directory


@pytest.mark.parametrize(
    ("files", "ends"),
    [
        ({}, ()),
        ({"tokenizer_config": {"eos_token": "</s>"}}, (2,)),
        ({"special_tokens_map": {"eos_token": {"content": "</s>"}}}, (2,)),
        ({"generation_config": {"eos_token_id": 7}}, (7,)),
        ({"tokenizer_config": {"eos_token": "</s>"}, "generation_config": {"eos_token_id": [7, 2, 8]}}, (2, 7, 8)),
        ({"tokenizer_config": {"eos_token": "</s>"}, "config": {"eos_token_id": 9}, "generation_config": {"eos_token_id": 7}}, (2, 7, 9)),
        ({"tokenizer_config": {"eos_token": None}, "generation_config": {"eos_token_id": None}}, ()),
    ],
)
def test_end_tokens_are_the_union_of_all_files(tmp_path, files, ends):
    """A14, the tokenizer's side."""
    assert load_tokenizer(hugging_face(tmp_path, tokenizer("llama"), **files)).eos_ids == ends


def test_an_end_id_that_is_no_number_is_refused(tmp_path):
    with pytest.raises(UserError, match="eos_token_id should be a token id"):
        load_tokenizer(hugging_face(tmp_path, tokenizer("llama"), generation_config={"eos_token_id": ["7"]}))


def test_start_token_as_the_files_say(tmp_path):
    llama, austen = tokenizer("llama"), tokenizer("austen")
    plain = load_tokenizer(hugging_face(tmp_path / "a", llama))  # tokenizer.json alone adds it
    assert (plain.bos_id, plain.adds_bos) == (1, True)
    off = load_tokenizer(hugging_face(tmp_path / "b", llama, tokenizer_config={"bos_token": "<s>", "add_bos_token": False}))
    assert (off.bos_id, off.adds_bos) == (1, False)
    on = load_tokenizer(hugging_face(tmp_path / "c", austen, tokenizer_config={"bos_token": "<|endoftext|>", "add_bos_token": True}))
    assert (on.bos_id, on.adds_bos, on.encode("a")[0]) == (0, True, 0)
    qwen = load_tokenizer(hugging_face(tmp_path / "d", austen, tokenizer_config={"bos_token": None}, config={"bos_token_id": 3}))
    assert (qwen.bos_id, qwen.adds_bos) == (None, False)
    with pytest.raises(UserError, match="add_eos_token"):
        load_tokenizer(hugging_face(tmp_path / "e", austen, tokenizer_config={"add_eos_token": True}))


def test_added_tokens(tmp_path):
    """Tokens only the small files name get the ids transformers gives them; an id that does not fit is refused."""
    added = {"450": {"content": "<|im_end|>", "special": True, "normalized": False}, "451": {"content": "<tool>", "special": False}}
    files = {"tokenizer_config": {"added_tokens_decoder": added, "pad_token": "[PAD]", "eos_token": "<|im_end|>"}}
    path = hugging_face(tmp_path / "a", tokenizer("llama"), **files)
    theirs = AutoTokenizer.from_pretrained(path)
    tok = load_tokenizer(path)
    sample = "a<|im_end|> <tool>b[PAD]"
    assert tok.encode(sample, special=True) == theirs(sample).input_ids
    assert tok.encode(sample) == theirs(sample, split_special_tokens=True).input_ids
    assert (tok.pad_id, tok.eos_ids, tok.vocab_size) == (theirs.pad_token_id, (450,), len(theirs)) and tok.pad_id == 452
    tok.save(tmp_path / "b")
    assert load_tokenizer(tmp_path / "b").encode(sample, special=True) == tok.encode(sample, special=True)
    with pytest.raises(UserError, match="should be token 460"):
        load_tokenizer(hugging_face(tmp_path / "c", tokenizer("llama"), added_tokens={"<x>": 460}))


def test_truncation_and_padding_of_a_tokenizer_json_are_not_applied(tmp_path):
    backend = tokenizers.Tokenizer.from_str(tokenizer("austen").backend.to_str())
    backend.enable_truncation(4)
    backend.enable_padding(length=100)
    backend.save(str(tmp_path / "tokenizer.json"))
    assert load_tokenizer(tmp_path).encode(TRAIN[:500]) == tokenizer("austen").encode(TRAIN[:500])


def test_tokenizer_json_that_is_not_supported_is_refused(tmp_path):
    backend = tokenizers.Tokenizer.from_str(tokenizer("bytes").backend.to_str())
    backend.decoder = tokenizers.decoders.WordPiece()
    backend.save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(UserError, match="decoder of WordPiece"):
        load_tokenizer(tmp_path)
    backend.post_processor = tokenizers.processors.TemplateProcessing(
        single="$A <|endoftext|>", special_tokens=[("<|endoftext|>", 256)]
    )
    backend.save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(UserError, match="only a start token is supported"):
        load_tokenizer(tmp_path)
    for content, message in (("{", "not a tokenizer.json"), ("[]", "not a tokenizer.json")):
        (tmp_path / "tokenizer.json").write_text(content)
        with pytest.raises(UserError, match=message):
            load_tokenizer(tmp_path)
    hugging_face(tmp_path, tokenizer("bytes"))
    (tmp_path / "tokenizer_config.json").write_text("{nonsense")
    with pytest.raises(UserError, match=r"tokenizer_config\.json is not valid JSON"):
        load_tokenizer(tmp_path)


def test_where_nothing_is_found(tmp_path, monkeypatch):
    with pytest.raises(UserError, match=r"expected tokenizer\.json, tokenizer\.model or a \.gguf file"):
        load_tokenizer(tmp_path)
    with pytest.raises(UserError, match="no such file or directory"):
        load_tokenizer(tmp_path / "absent")
    import huggingface_hub

    saved = tmp_path / "saved"
    tokenizer("bytes").save(saved)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda repo, **_: {"owner/name": str(saved)}[repo])
    assert load_tokenizer("owner/name").vocab_size == 257
    with pytest.raises(UserError, match="no file or directory owner/other, and the hub"):
        load_tokenizer("owner/other")


# --- saving ---------------------------------------------------------------------------------------------------


def assert_same_in_transformers(directory: Path, tok: Tokenizer, texts: list[str]) -> None:
    theirs, again = AutoTokenizer.from_pretrained(directory), load_tokenizer(directory)
    for sample in texts:
        assert theirs(sample).input_ids == tok.encode(sample, special=True) == again.encode(sample, special=True), sample
        assert theirs(sample, split_special_tokens=True).input_ids == tok.encode(sample) == again.encode(sample), sample
        assert theirs.decode(tok.encode(sample)) == tok.decode(tok.encode(sample), skip_special=False), sample
    assert (theirs.bos_token_id, theirs.eos_token_id, theirs.pad_token_id) == (tok.bos_id, tok.eos_ids[0], tok.pad_id)
    assert (again.bos_id, again.eos_ids, again.pad_id, again.unk_id) == (tok.bos_id, tok.eos_ids[:1], tok.pad_id, tok.unk_id)
    assert (again.adds_bos, again.templates, len(theirs)) == (tok.adds_bos, tok.templates, tok.vocab_size)


@pytest.mark.parametrize("adds_bos", [False, True])
@pytest.mark.parametrize("name", [*KINDS, "squeeze", "user-defined"])
def test_saved_tokenizers_give_equal_ids_in_transformers(tmp_path, name, adds_bos):
    source = tokenizer(name)
    backend = tokenizers.Tokenizer.from_str(source.backend.to_str())
    templates = {"default": "{{ messages }}", "tool_use": "{{ tools }}"}
    parts = Parts(backend, source.bos_id, source.eos_ids, 5, source.unk_id, adds_bos, templates)
    # A pad token must be a control token for transformers, which would make piece 5 one; so it is one here from the start.
    backend.add_special_tokens([tokenizers.AddedToken(backend.id_to_token(5), special=True, normalized=False)])
    tok = Tokenizer(parts)
    for family in (None, "llama", "mistral", "qwen3"):  # transformers 5 looks at config.json to choose its class
        if family:
            (tmp_path / "config.json").write_text(json.dumps({"model_type": family}))
        tok.save(tmp_path)
        assert_same_in_transformers(tmp_path, tok, TEXTS)


def test_saving_again_leaves_nothing_of_the_tokenizer_before(tmp_path):
    tok = tokenizer("austen")
    (tmp_path / "additional_chat_templates").mkdir()
    for name in ("special_tokens_map.json", "added_tokens.json"):
        (tmp_path / name).write_text('{"</s>": 1, "eos_token": "</s>"}')
    for name in ("chat_template.jinja", "additional_chat_templates/tool_use.jinja"):
        (tmp_path / name).write_text("of another model")
    tok.save(tmp_path)
    again = load_tokenizer(tmp_path)
    assert again.templates == {} and again.eos_ids == (0,) and again.vocab_size == tok.vocab_size
    assert not [file for file in tmp_path.iterdir() if file.suffix == ".tmp"]


@pytest.mark.parametrize("form", ["string", "list", "file", "files"])
def test_chat_templates_in_every_place(tmp_path, form):
    tok = tokenizer("austen")
    named = [{"name": "default", "template": "A"}, {"name": "rag", "template": "B"}]
    config = {"string": {"chat_template": "A"}, "list": {"chat_template": named}, "file": {"chat_template": "old"}, "files": {}}[form]
    hugging_face(tmp_path, tok, tokenizer_config=config)
    if form.startswith("file"):
        (tmp_path / "chat_template.jinja").write_text("A")
    if form == "files":
        (tmp_path / "additional_chat_templates").mkdir()
        (tmp_path / "additional_chat_templates" / "rag.jinja").write_text("B")
    tok = load_tokenizer(tmp_path)
    assert tok.chat_template == "A" and tok.templates.get("rag") == ("B" if form in ("list", "files") else None)


# --- the real vocabularies -----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def sdist(real_data) -> Path:
    return only(real_data / "wheels", "llama_cpp_python-*.tar.gz")


def reference_file(sdist: Path, name: str, directory: Path) -> Path:
    path = directory / f"{name}.gguf"
    path.write_bytes(members(sdist, r"models/ggml-vocab-llama-(spm|bpe)\.gguf(\.inp|\.out)?")[f"ggml-vocab-{name}.gguf"])
    return path


@pytest.mark.real
@pytest.mark.parametrize("name", ["llama-spm", "llama-bpe"])
def test_the_47_reference_strings_through_gguf_and_through_transformers(sdist, tmp_path, name):
    tok = load_tokenizer(reference_file(sdist, name, tmp_path))
    pairs = references(sdist, name)
    assert len(pairs) == 47
    for sample, ids in pairs:
        assert tok.encode(sample, bos=False) == ids, sample
        assert tok.decode(ids) == sample
    tok.save(tmp_path / "saved")
    assert_same_in_transformers(tmp_path / "saved", tok, [sample for sample, _ in pairs])


@pytest.mark.real
def test_the_47_reference_strings_through_metas_tiktoken_file(sdist, real_data, tmp_path):
    wheel = only(real_data / "wheels", "llama_models-*.whl")
    (tmp_path / "tokenizer.model").write_bytes(members(wheel, r"llama3/tokenizer\.model")["tokenizer.model"])
    tok = load_tokenizer(tmp_path)
    for sample, ids in references(sdist, "llama-bpe"):
        assert tok.encode(sample) == [128_000, *ids], sample
    tok.save(tmp_path / "saved")
    assert_same_in_transformers(tmp_path / "saved", tok, [sample for sample, _ in references(sdist, "llama-bpe")])
    assert tok.encode("<|eot_id|>", special=True) == [128_000, 128_009]


@pytest.mark.real
def test_mistrals_tokenizer_model_against_sentencepiece(sdist, real_data, tmp_path):
    wheel = only(real_data / "wheels", "mistral_common-*.whl")
    content = members(wheel, r"data/tokenizer\.model\.v1")["tokenizer.model.v1"]
    (tmp_path / "tokenizer.model").write_bytes(content)
    tok, theirs = load_tokenizer(tmp_path), sentencepiece.SentencePieceProcessor(model_proto=content)
    samples = [sample for sample, _ in references(sdist, "llama-spm")] + TEXTS + embedded_corpus()[:100_000].split("\n\n")
    for sample in samples:
        assert tok.encode(sample, bos=False) == theirs.encode(sample), sample
    tok.save(tmp_path / "saved")
    assert_same_in_transformers(tmp_path / "saved", tok, samples[:60])


@pytest.mark.real
def test_smollm2_from_its_gguf(real_data, tmp_path):
    tok = load_tokenizer(only(real_data / "model", "*.gguf"))
    assert (tok.vocab_size, tok.bos_id, tok.eos_ids, tok.pad_id, tok.adds_bos) == (49_152, 1, (2, 0), 2, False)
    assert [tok.decode([i]) for i in tok.encode("born in 1813")] == ["born", " in", " ", "1", "8", "1", "3"]
    assert "<|im_start|>" in tok.chat_template
    tok.save(tmp_path)
    assert_same_in_transformers(tmp_path, tok, TEXTS)
