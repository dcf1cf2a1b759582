"""The README's commands and snippets are run, not only read."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from llamalab.checkpoint import save_model
from llamalab.corpus import ASSETS
from llamalab.data import Batch
from llamalab.model import ModelArgs, Transformer
from llamalab.tokenizer import load_tokenizer

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", README, re.MULTILINE | re.DOTALL)


def test_the_first_two_commands_are_the_main_job_and_the_tests():
    """.ci/run runs what it finds there; this is what it must find."""
    assert [b.strip() for b in blocks("bash")[:2]] == [
        "bash scripts/setup && .venv/bin/llamalab pretrain",
        "bash scripts/setup test && .venv/bin/python -m pytest",
    ]


def test_every_verb_is_in_the_table():
    from llamalab.cli import VERBS

    assert set(re.findall(r"`llamalab (\w+)", README)) >= set(VERBS)


def test_files_named_in_the_readme_exist():
    for name in [*re.findall(r"\]\((\S+?\.md)\)", README), "llamalab/model.py", "scripts/setup"]:
        assert (ROOT / name).is_file(), name


@pytest.fixture
def run_directory(tmp_path, monkeypatch):
    """A model directory where the snippets look for one."""
    monkeypatch.chdir(tmp_path)
    tokenizer = load_tokenizer(ASSETS)
    model = Transformer(ModelArgs(block_size=64, vocab_size=tokenizer.vocab_size, n_layer=1, n_head=2, dim=16, intermediate_size=16))
    save_model("runs/pretrain-1", model.init_weights(0), tokenizer)
    return tmp_path


def test_every_python_snippet_runs(run_directory):
    """In order, in one namespace, with the tiny preset in place of SmolLM2 and a batch of random tokens."""
    idx = torch.randint(97, (2, 16))
    names = {"idx": idx, "input_pos": torch.arange(16), "windows": lambda _: Batch(idx[:, :-1], idx[:, 1:])}
    snippets = blocks("python")
    assert len(snippets) == 4
    for code in snippets:
        code = code.replace('"SmolLM2-135M"', '"tiny"').replace("setup_caches(4, 512", "setup_caches(4, 64").replace("2048", "64")
        if "caches)" in code:
            code = code.replace("input_pos, caches)", "input_pos, model.make_caches(2, 64))").replace("setup_caches(1,", "setup_caches(2,")
        exec(compile(code.replace("steps=100", "steps=2"), "README.md", "exec"), names)
    assert names["logits"].shape == (2, 16, 97)
