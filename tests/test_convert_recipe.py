"""`llamalab convert`: what it writes is the model it read; what it cannot do is said before anything is written."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from llamalab import cli
from llamalab.checkpoint import load_model, save_model
from llamalab.corpus import ASSETS
from llamalab.tokenizer import load_tokenizer

IDX = torch.randint(0, 97, (1, 24), generator=torch.Generator().manual_seed(3))


@pytest.fixture
def source(tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A saved model with the tokenizer we ship; the current directory is beside it."""
    tokenizer = load_tokenizer(ASSETS)
    save_model(tmp_path / "src", tiny(vocab_size=tokenizer.vocab_size, dtype=torch.bfloat16), tokenizer)
    monkeypatch.chdir(tmp_path)
    return tmp_path / "src"


def test_there_and_back(source: Path, capsys: pytest.CaptureFixture) -> None:
    """Hugging Face -> GGUF -> Hugging Face: weights bit-equal, tokenizer alike, and everything is reported."""
    pytest.importorskip("gguf")
    assert cli.main(["convert", "src", "out/a.gguf"]) == 0
    printed = capsys.readouterr().out
    assert "read src: hf layout, 21 tensors, llama, 2 layers" in printed and "bfloat16" in printed
    assert "out/a.gguf" in printed and "BF16     16 tensors" in printed
    assert cli.main(["convert", "out/a.gguf", "back"]) == 0
    printed = capsys.readouterr().out
    assert "gguf layout" in printed and "model.safetensors" in printed
    assert torch.equal(load_model("back")(IDX), load_model(source)(IDX))
    assert load_model("back").config == load_model(source).config
    text = "It is a truth universally acknowledged, 1813."
    assert load_tokenizer("back").encode(text) == load_tokenizer(source).encode(text)


def test_kinds_and_dtypes(source: Path) -> None:
    pytest.importorskip("gguf")
    assert cli.main(["convert", "src", "a.gguf", "--format", "q8_0"]) == 0
    assert Path("a.gguf").stat().st_size < Path("src/model.safetensors").stat().st_size
    assert cli.main(["convert", "src", "wide", "--dtype", "float32", "--tokenizer", "none"]) == 0
    assert next(load_model("wide").parameters()).dtype == torch.float32
    assert torch.equal(load_model("wide", dtype="bf16")(IDX), load_model(source)(IDX))
    assert not Path("wide/tokenizer.json").exists()
    assert cli.main(["convert", "wide", "again", "--tokenizer", "src"]) == 0
    assert Path("again/tokenizer.json").exists()


@pytest.mark.parametrize(("arguments", "word"), [
    (["src", "a.gguf", "--format", "hf"], "does not go with"),
    (["src", "a", "--format", "q8_0"], "does not go with"),
    (["src", "a.gguf", "--dtype", "bf16"], "--format"),
    (["src", "a", "--dtype", "int3"], "int3"),
    (["src", "src"], "is the source itself"),
    (["src", "notes"], "exists; choose another name"),
    (["src", "bare"], "exists; choose another name"),
    (["src", "old.gguf"], "exists; choose another name"),
    (["nowhere", "a"], "no such file"),
    (["bare", "a"], "--tokenizer none"),
])
def test_mistakes(arguments: list[str], word: str, source: Path, tiny, capsys: pytest.CaptureFixture) -> None:
    """One line, exit code 2, and nothing is written or removed."""
    save_model("bare", tiny())
    Path("notes").mkdir()
    Path("notes/diary.txt").write_text("dear")
    Path("old.gguf").write_bytes(b"GGUF")
    before = sorted(Path().rglob("*"))
    assert cli.main(["convert", *arguments]) == 2
    error = capsys.readouterr().err
    assert word in error and error.count("\n") == 1
    assert sorted(Path().rglob("*")) == before
