"""GGUF in and out: against the gguf package, against ourselves, and against llama.cpp where it is installed."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from llamalab import chat
from llamalab.checkpoint import load_model, save_model
from llamalab.config import RopeScaling
from llamalab.corpus import ASSETS
from llamalab.errors import UserError
from llamalab.gguf_file import KINDS, write_gguf
from llamalab.gguf_tokenizer import PROBE
from llamalab.tokenizer import load_tokenizer

gguf = pytest.importorskip("gguf")

IDX = torch.randint(0, 97, (1, 60), generator=torch.Generator().manual_seed(3))

#: name -> (preset, changes): everything that has a GGUF form
MODELS = {
    "llama": ("tiny", {}),
    "tied-head_dim": ("tiny-tied", {}),
    "biases": ("tiny", dict(qkv_bias=True, out_bias=True, mlp_bias=True)),
    "llama3": ("tiny", dict(rope_scaling=RopeScaling("llama3", 8.0, 16, 1.0, 4.0))),
    "linear": ("tiny", dict(rope_scaling=RopeScaling("linear", 3.0))),
    "yarn": ("tiny", dict(rope_scaling=RopeScaling("yarn", 4.0, 16))),
    "yarn-factor": ("tiny", dict(rope_scaling=RopeScaling("yarn", 4.0, 16, attention_factor=1.3))),
    "mistral": ("tiny", dict(family="mistral", rope_base=1e6, norm_eps=1e-6)),
    "qwen2": ("tiny", dict(family="qwen2", qkv_bias=True)),
    "qwen3": ("tiny", dict(family="qwen3", qk_norm=True, head_dim=24)),
    "qwen3-tied-yarn": ("tiny-tied", dict(family="qwen3", qk_norm=True, rope_scaling=RopeScaling("yarn", 4.0, 16))),
}


def rename(path: Path, old: bytes, new: bytes) -> None:
    """Replace bytes of a file by as many others."""
    assert len(old) == len(new) and old in path.read_bytes()
    path.write_bytes(path.read_bytes().replace(old, new))


def rewrite(path: Path, metadata: dict | None = None, tensors: dict | None = None) -> None:
    """The file again through gguf's own reader and writer, with other or more metadata {key: value} or tensors {name: (raw, type)}."""
    reader, metadata, tensors = gguf.GGUFReader(path), dict(metadata or {}), dict(tensors or {})
    writer = gguf.GGUFWriter(path.with_suffix(".new"), reader.fields["general.architecture"].contents())
    for key, field in reader.fields.items():
        if key.startswith(("GGUF.", "general.architecture")):
            continue
        value = metadata.pop(key, field.contents())
        kind = gguf.GGUFValueType.get_type(value) if isinstance(value, list) else field.types[0]
        if value is not None:
            writer.add_key_value(key, value, kind)
    for key, value in metadata.items():
        writer.add_key_value(key, value, gguf.GGUFValueType.get_type(value))
    for tensor in reader.tensors:
        raw, kind = tensors.pop(tensor.name, (tensor.data, tensor.tensor_type))
        writer.add_tensor(tensor.name, raw, raw_dtype=kind)
    for name, (raw, kind) in tensors.items():
        writer.add_tensor(name, raw, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    path.with_suffix(".new").replace(path)


# --- out and in -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", MODELS)
def test_f32_round_trip_is_bit_equal(name: str, tiny, tmp_path: Path) -> None:
    preset, changes = MODELS[name]
    model = tiny(preset, **changes)
    write_gguf(tmp_path / "m.gguf", model, "f32")
    found = load_model(tmp_path / "m.gguf")
    assert torch.equal(found(IDX), model(IDX))
    assert all(torch.equal(a, b) for a, b in zip(found.parameters(), model.parameters(), strict=True))
    expected = model.config
    expected.family = "llama" if name == "mistral" else expected.family  # llama.cpp has no architecture of that name
    assert found.config == expected
    assert load_model(tmp_path).config == expected  # a directory with one GGUF


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("preset", ["tiny", "tiny-tied"])
def test_kinds_as_the_gguf_package_reads_them(kind: str, preset: str, tiny, tmp_path: Path) -> None:
    """Each number against the one it was made from, within what the type promises; vectors exact."""
    model = tiny(preset)
    written = write_gguf(tmp_path / "m.gguf", model, kind)
    state = model.state_dict()
    plain = {"token_embd.weight": "tok_embeddings.weight", "output.weight": "output.weight", "output_norm.weight": "norm.weight",
             "blk.1.ffn_down.weight": "layers.1.feed_forward.w2.weight", "blk.0.attn_output.weight": "layers.0.attention.wo.weight",
             "blk.1.attn_norm.weight": "layers.1.attention_norm.weight"}
    reader = gguf.GGUFReader(tmp_path / "m.gguf")
    assert [t.name for t in reader.tensors] == [name for name, *_ in written.tensors]
    assert ("output.weight" in {t.name for t in reader.tensors}) == (preset == "tiny")
    checked = 0
    for tensor in reader.tensors:
        if tensor.name not in plain:
            continue
        found = torch.from_numpy(gguf.quants.dequantize(tensor.data, tensor.tensor_type).copy()).reshape(state[plain[tensor.name]].shape)
        expected, of = state[plain[tensor.name]], tensor.tensor_type.name
        checked += 1
        if expected.dim() == 1:
            assert of == "F32" and torch.equal(found, expected)
        elif of in ("F32", "F16", "BF16"):
            dtype = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}[of]
            assert torch.equal(found, expected.to(dtype).float())
        else:
            largest = expected.unflatten(-1, (-1, 32)).abs().amax(-1, keepdim=True)
            error = (found - expected).unflatten(-1, (-1, 32)).abs()
            # Q8_0: half a step of largest/127. Q4_0: a step of largest/8, as -8 has no +8 opposite; its scale is a float16 (2^-11).
            assert (error <= largest * {"Q8_0": 0.5 / 127 + 2**-11, "Q4_0": 1 / 8 + 2**-11}[of]).all()
    assert checked == len(plain) - (preset == "tiny-tied")
    types = {name: of for name, of, *_ in written.tensors}
    if preset == "tiny-tied" and kind in ("q8_0", "q4_0"):  # dim 48
        assert types["token_embd.weight"] == types["blk.0.ffn_up.weight"] == "F16"
        assert any("token_embd.weight" in note for note in written.notes) and "multiple of 32" in written.table()
    elif kind == "q4_0":
        assert types["token_embd.weight"] == types["output.weight"] == "Q8_0" and types["blk.0.ffn_up.weight"] == "Q4_0"


def test_metadata(tiny, tmp_path: Path) -> None:
    model = tiny("tiny-tied", rope_scaling=RopeScaling("yarn", 4.0, 16))
    write_gguf(tmp_path / "m.gguf", model, "q8_0")
    fields = gguf.GGUFReader(tmp_path / "m.gguf").fields
    values = {key: field.contents() for key, field in fields.items()}
    expected = {"general.architecture": "llama", "general.file_type": 7, "llama.context_length": 64, "llama.block_count": 2,
                "llama.embedding_length": 48, "llama.feed_forward_length": 80, "llama.attention.head_count": 8,
                "llama.attention.head_count_kv": 2, "llama.attention.key_length": 10, "llama.attention.value_length": 10,
                "llama.rope.dimension_count": 10, "llama.vocab_size": 97, "llama.rope.scaling.type": "yarn",
                "llama.rope.scaling.factor": 4.0, "llama.rope.scaling.original_context_length": 16}
    assert {key: values[key] for key in expected} == expected


def test_norms_in_float32_do_not_widen_a_bf16_file(tiny, tmp_path: Path) -> None:
    """Stored dtype: matrices bf16, norms float32 that bf16 holds -> bf16; with a norm that needs more digits -> float32."""
    model = tiny(dtype=torch.bfloat16)
    write_gguf(tmp_path / "m.gguf", model, "bf16")
    found = load_model(tmp_path / "m.gguf")
    assert next(found.parameters()).dtype == torch.bfloat16 and torch.equal(found(IDX), model(IDX))
    write_gguf(tmp_path / "m.gguf", tiny(), "bf16")
    assert next(load_model(tmp_path / "m.gguf").parameters()).dtype == torch.float32
    assert next(load_model(tmp_path / "m.gguf", dtype="float16").parameters()).dtype == torch.float16


READABLE = []
for _kind in gguf.GGML_QUANT_SIZES:
    try:
        gguf.quants.dequantize(np.zeros((1, gguf.GGML_QUANT_SIZES[_kind][1]), np.uint8), _kind)
    except NotImplementedError:
        continue
    READABLE.append(_kind)


@pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning")
@pytest.mark.parametrize("kind", READABLE, ids=lambda kind: kind.name)
def test_every_type_that_gguf_dequantizes_is_read(kind, tiny, tmp_path: Path) -> None:
    """Random blocks of each type, read piece by piece into the model, equal `gguf`'s values of the whole tensor."""
    model = tiny(dim=256, n_head=4, intermediate_size=512, n_layer=1)
    block, size = gguf.GGML_QUANT_SIZES[kind]
    raw = np.random.default_rng(0).integers(0, 256, (512, 256 // block * size), dtype=np.uint8)
    write_gguf(tmp_path / "m.gguf", model, "f32")
    rewrite(tmp_path / "m.gguf", tensors={"blk.0.ffn_up.weight": (raw, kind)})
    found = load_model(tmp_path / "m.gguf", dtype=torch.float32).layers[0].feed_forward.w3.weight.detach().numpy()
    expected = gguf.quants.dequantize(raw, kind).reshape(512, 256).astype(np.float32)
    assert np.array_equal(found, expected, equal_nan=True)  # random scales include infinities and NaN


def test_sliding_window_shortens_the_context(tiny, tmp_path: Path) -> None:
    """llama.cpp has no window for this architecture; up to its length all agree."""
    model = tiny(family="mistral", sliding_window=32)
    assert any("sliding window" in note for note in write_gguf(tmp_path / "m.gguf", model, "f32").notes)
    found = load_model(tmp_path / "m.gguf")
    assert (found.config.block_size, found.config.sliding_window) == (32, None)
    assert torch.equal(found(IDX[:, :32]), model(IDX[:, :32]))


def test_llama3_scaling_of_other_peoples_files(tiny, tmp_path: Path) -> None:
    """They hold only the divisors: Meta's parameters with the factor seen there, or a refusal, never a guess."""
    scaling = RopeScaling("llama3", 32.0, 8192, 1.0, 4.0)
    model = tiny(head_dim=32, rope_base=500000.0, rope_scaling=scaling)
    write_gguf(tmp_path / "m.gguf", model, "f32")
    rename(tmp_path / "m.gguf", b"llamalab.rope.llama3", b"ignored0.rope.llama3")
    assert load_model(tmp_path / "m.gguf").config.rope_scaling == scaling
    write_gguf(tmp_path / "m.gguf", tiny(rope_scaling=RopeScaling("llama3", 8.0, 16, 1.0, 4.0)), "f32")
    rename(tmp_path / "m.gguf", b"llamalab.rope.llama3", b"ignored0.rope.llama3")
    with pytest.raises(UserError, match=r"divisors in rope_freqs\.weight"):
        load_model(tmp_path / "m.gguf")


# --- refused ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("changes", "word"), [
    (dict(rope_scaling=RopeScaling("dynamic", 2.0)), "dynamic"),
    (dict(rope_scaling=RopeScaling("yarn", 2.0, 32, beta_fast=16.0)), "beta_fast"),
    (dict(rope_scaling=RopeScaling("yarn", 2.0, 32, truncate=False)), "truncate"),
    (dict(family="qwen3", qk_norm=True, rope_scaling=RopeScaling("llama3", 8.0, 16, 1.0, 4.0)), "llama3 rope scaling in a Qwen"),
    (dict(family="qwen2", qkv_bias=True, head_dim=24), "head_dim is not"),
    (dict(family="qwen3", qk_norm=True, qkv_bias=True, out_bias=True), "attention_bias"),
    (dict(qk_norm=True), "no Hugging Face model"),
])
def test_what_llama_cpp_does_not_compute(changes: dict, word: str, tiny, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=word):
        write_gguf(tmp_path / "m.gguf", tiny(**changes), "f32")
    assert not list(tmp_path.iterdir())


def test_bad_requests(tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UserError, match="q5_k"):
        write_gguf(tmp_path / "m.gguf", tiny(), "q5_k")
    with pytest.raises(UserError, match="is a directory"):
        write_gguf(tmp_path, tiny())
    model = tiny()
    with torch.no_grad():
        model.layers[1].feed_forward.w2.weight[3, 5] = 1e5
    with pytest.raises(UserError, match=r"blk\.1\.ffn_down\.weight holds numbers that F16 cannot"):
        write_gguf(tmp_path / "m.gguf", model, "f16")
    assert not list(tmp_path.iterdir())
    write_gguf(tmp_path / "m.gguf", model, "bf16")
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(UserError, match=r"pip install 'llamalab\[gguf\]'"):
        load_model(tmp_path / "m.gguf")
    with pytest.raises(UserError, match=r"pip install 'llamalab\[gguf\]'"):
        write_gguf(tmp_path / "n.gguf", model)


@pytest.mark.parametrize(("old", "new", "word"), [
    (b"\x05\x00\x00\x00\x00\x00\x00\x00llama", b"\x05\x00\x00\x00\x00\x00\x00\x00mamba", "architecture 'mamba'"),
    (b"llama.block_count", b"llama.block_c0unt", "lacks llama.block_count"),
    (b"blk.1.ffn_down.weight", b"blk.1.ffn_dowm.weight", r"missing: blk\.1\.ffn_down\.weight; not part of the model: blk\.1\.ffn_dowm"),
    (b"blk.1.ffn_norm.weight", b"blk.0.ffn_norm.weight", "names a tensor more than once"),
    (b"token_embd.weight", b"token_embx.weight", r"no tensor token_embd\.weight"),
    (b"GGUF", b"GGML", "not a GGUF file"),
])
def test_damaged_files(old: bytes, new: bytes, word: str, tiny, tmp_path: Path) -> None:
    write_gguf(tmp_path / "m.gguf", tiny(), "f32")
    rename(tmp_path / "m.gguf", old, new)
    with pytest.raises(UserError, match=word):
        load_model(tmp_path / "m.gguf")


@pytest.mark.parametrize(("metadata", "word"), [
    ({"llama.expert_count": 8}, "expert_count = 8"),
    ({"llama.attention.sliding_window": 32}, "sliding_window = 32"),
    ({"llama.attention.head_count_kv": [2, 1]}, "differs from layer to layer"),
    ({"llama.attention.value_length": 8}, "value_length is 8"),
    ({"llama.rope.dimension_count": 8}, "dimension_count is 8"),
    ({"llama.rope.scaling.type": "longrope", "llama.rope.scaling.factor": 2.0}, "'longrope' is not supported"),
    ({"split.count": 2}, "one of 2 parts"),
    ({"llama.block_count": 3}, r"missing: blk\.2\."),
    ({"llama.feed_forward_length": 80}, r"blk\.0\.ffn_gate\.weight is \[96, 64\], not \[80, 64\]"),
])
def test_models_this_code_does_not_compute(metadata: dict, word: str, tiny, tmp_path: Path) -> None:
    write_gguf(tmp_path / "m.gguf", tiny(), "f32")
    rewrite(tmp_path / "m.gguf", {"general.name": "unchanged"})
    assert torch.equal(load_model(tmp_path / "m.gguf")(IDX), tiny()(IDX))
    rewrite(tmp_path / "m.gguf", metadata)
    with pytest.raises(UserError, match=word):
        load_model(tmp_path / "m.gguf")


def test_types_that_cannot_be_read(tiny, tmp_path: Path) -> None:
    write_gguf(tmp_path / "m.gguf", tiny(), "f32")
    rewrite(tmp_path / "m.gguf", tensors={"blk.0.ffn_up.weight": (np.zeros((96, 64), np.int8), gguf.GGMLQuantizationType.I8)})
    with pytest.raises(UserError, match=r"not floating point: blk\.0\.ffn_up\.weight is I8"):
        load_model(tmp_path / "m.gguf")


def test_rope_divisors_and_another_scaling(tiny, tmp_path: Path) -> None:
    write_gguf(tmp_path / "m.gguf", tiny(rope_scaling=RopeScaling("linear", 2.0)), "f32")
    divisors = {"rope_freqs.weight": (np.full(8, 2, np.float32), gguf.GGMLQuantizationType.F32)}
    rewrite(tmp_path / "m.gguf", tensors=divisors)
    with pytest.raises(UserError, match=r"both rope_freqs\.weight and rope scaling 'linear'"):
        load_model(tmp_path / "m.gguf")


@pytest.mark.parametrize("keep", [3, 30, 200, 1500, 100_000, -1])
def test_cut_files(keep: int, tiny, tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    write_gguf(path, tiny(), "f32")
    path.write_bytes(path.read_bytes()[:keep] if keep > 0 else path.read_bytes()[: -4 * 64])
    with pytest.raises(UserError, match=r"m\.gguf is (cut off|not a GGUF file)"):
        load_model(path)


# --- tokenizer ----------------------------------------------------------------------------------------------------


def test_tokenizer_and_template_come_back(tiny, tmp_path: Path) -> None:
    tokenizer = load_tokenizer(ASSETS)
    tokenizer.templates = {"default": "{{ messages }}", "tools": "{{ tools }}"}
    size = tokenizer.vocab_size + 3  # more rows than tokens
    write_gguf(tmp_path / "m.gguf", tiny(vocab_size=size), "f16", tokenizer)
    found = load_tokenizer(tmp_path / "m.gguf")
    assert all(found.encode(text) == tokenizer.encode(text) for text in PROBE)
    assert (found.bos_id, found.eos_ids, found.pad_id, found.adds_bos, found.templates) == (
        tokenizer.bos_id, tokenizer.eos_ids, tokenizer.pad_id, tokenizer.adds_bos, tokenizer.templates)
    config = load_model(tmp_path / "m.gguf").config
    assert (config.vocab_size, config.eos_token_ids) == (size, tokenizer.eos_ids)


def test_tokenizers_llama_cpp_would_read_otherwise(tiny, tmp_path: Path) -> None:
    """Refused before tensors are written; the model alone can be written."""
    from tokenizers import AddedToken, Regex, normalizers, pre_tokenizers

    with pytest.raises(UserError, match="no merges"):
        write_gguf(tmp_path / "m.gguf", tiny(vocab_size=257), "f16", load_tokenizer("bytes"))
    changes = {
        "has no name": lambda b: setattr(b, "pre_tokenizer", pre_tokenizers.Sequence(
            [pre_tokenizers.Split(Regex(r"\w+|."), "isolated"), pre_tokenizers.ByteLevel(False, use_regex=False)])),
        "normalizes text": lambda b: setattr(b, "normalizer", normalizers.Lowercase()),
        "takes spaces": lambda b: b.add_tokens([AddedToken("<mask>", lstrip=True)]),
    }
    for words, change in changes.items():
        tokenizer = load_tokenizer(ASSETS)
        change(tokenizer.backend)
        model = tiny(vocab_size=tokenizer.vocab_size + 1)
        with pytest.raises(UserError, match=words):
            write_gguf(tmp_path / "m.gguf", model, "f16", tokenizer)
    with pytest.raises(UserError, match="the model only 97"):
        write_gguf(tmp_path / "m.gguf", tiny(), "f16", load_tokenizer(ASSETS))
    assert not list(tmp_path.iterdir())


# --- llama.cpp ------------------------------------------------------------------------------------------------------


def llama_cpp_logits(path: Path, ids: list[int]) -> torch.Tensor:
    """[T, V] of llama.cpp, its key/value cache in float32."""
    llama_cpp = pytest.importorskip("llama_cpp")
    model = llama_cpp.Llama(str(path), n_ctx=len(ids), n_batch=len(ids), n_ubatch=len(ids), logits_all=True, verbose=False,
                            n_threads=1, n_threads_batch=1, type_k=0, type_v=0, flash_attn=False)
    model.eval(ids)
    logits = torch.from_numpy(model.scores[: len(ids)].copy())
    model.close()
    return logits


@pytest.mark.parametrize("name", MODELS)
def test_llama_cpp_computes_the_same(name: str, tiny, tmp_path: Path) -> None:
    preset, changes = MODELS[name]
    model = tiny(preset, **changes)
    write_gguf(tmp_path / "m.gguf", model, "f32")
    found = llama_cpp_logits(tmp_path / "m.gguf", IDX[0].tolist())
    torch.testing.assert_close(found, model(IDX)[0].detach(), rtol=0, atol=5e-5)  # float32 in another order; measured 5e-6


@pytest.mark.parametrize(("kind", "tolerance"), [("f16", 0.02), ("bf16", 0.15), ("q8_0", 0.5), ("q4_0", 0.5)])
def test_llama_cpp_reads_the_same_numbers(kind: str, tolerance: float, tiny, tmp_path: Path) -> None:
    """llama.cpp rounds activations too, to float16, bfloat16, or 8 bits in blocks of 32; a wrongly read tensor gives errors of
    the logits' own size, here about 4 at most. Measured: 0.003, 0.03, 0.14, 0.14."""
    write_gguf(tmp_path / "m.gguf", tiny(), kind)
    ours = load_model(tmp_path / "m.gguf", dtype=torch.float32)(IDX)[0].detach()
    torch.testing.assert_close(llama_cpp_logits(tmp_path / "m.gguf", IDX[0].tolist()), ours, rtol=0, atol=tolerance)


def test_llama_cpp_makes_the_same_ids(tiny, tmp_path: Path) -> None:
    llama_cpp = pytest.importorskip("llama_cpp")
    tokenizer = load_tokenizer(ASSETS)
    write_gguf(tmp_path / "m.gguf", tiny(vocab_size=tokenizer.vocab_size), "f16", tokenizer)
    model = llama_cpp.Llama(str(tmp_path / "m.gguf"), vocab_only=True, verbose=False)
    for text in PROBE:
        assert model.tokenize(text.encode(), add_bos=False, special=False) == tokenizer.encode(text, bos=False), text
    model.close()


# --- the real checkpoint ----------------------------------------------------------------------------------------------

QUESTION = [{"role": "user", "content": "What is the capital of France?"}]


@pytest.fixture(scope="module")
def smollm2(real_data: Path) -> Path:
    return real_data / "model" / "SmolLM2-135M-Instruct.Q4_1.gguf"


@pytest.mark.real
def test_smollm2_answers(smollm2: Path) -> None:
    """Weights, row order, template and tokenizer at once."""
    model, tokenizer = load_model(smollm2), load_tokenizer(smollm2)
    c = model.config
    assert (c.n_layer, c.dim, c.n_head, c.n_local_heads, c.head_dim, c.rope_base, c.norm_eps) == (30, 576, 9, 3, 64, 100000.0, 1e-5)
    assert c.tie_word_embeddings and next(model.parameters()).dtype == torch.float32
    ids = chat.encode(tokenizer, QUESTION, add_generation_prompt=True)
    answer: list[int] = []
    with torch.inference_mode():
        while not answer or (answer[-1] not in tokenizer.eos_ids and len(answer) < 20):
            answer.append(model(torch.tensor([ids + answer]))[0, -1].argmax().item())
    assert tokenizer.decode(answer) == "The capital of France is Paris."


@pytest.mark.real
def test_smollm2_in_transformers(smollm2: Path, tmp_path: Path) -> None:
    """GGUF -> Hugging Face -> transformers: the same logits and ids."""
    transformers = pytest.importorskip("transformers")
    model, tokenizer = load_model(smollm2), load_tokenizer(smollm2)
    save_model(tmp_path / "hf", model, tokenizer)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "hf", dtype=torch.float32)
    their_tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "hf")
    text = tokenizer.decode(chat.encode(tokenizer, QUESTION, add_generation_prompt=True), skip_special=False)
    ids = tokenizer.encode(text, special=True)
    assert their_tokenizer(text)["input_ids"] == ids
    assert their_tokenizer.apply_chat_template(QUESTION, add_generation_prompt=True)["input_ids"] == ids
    with torch.inference_mode():
        found, expected = model(torch.tensor([ids])), theirs(torch.tensor([ids])).logits
    # float32 through 30 layers, logits up to about 30: relative 1e-5 of that
    assert expected.abs().max() > 10
    torch.testing.assert_close(found, expected, rtol=0, atol=5e-4)


@pytest.mark.real
def test_smollm2_in_llama_cpp(smollm2: Path, tmp_path: Path) -> None:
    """Out again as F32: llama.cpp computes what we do."""
    pytest.importorskip("llama_cpp")
    model, tokenizer = load_model(smollm2), load_tokenizer(smollm2)
    write_gguf(tmp_path / "m.gguf", model, "f32", tokenizer)
    ids = chat.encode(tokenizer, QUESTION, add_generation_prompt=True)
    with torch.inference_mode():
        ours = model(torch.tensor([ids]))[0]
    torch.testing.assert_close(llama_cpp_logits(tmp_path / "m.gguf", ids), ours, rtol=0, atol=5e-3)  # as above, its exp is an approximation
