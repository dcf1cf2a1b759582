"""The command line: verbs, help, exit codes; and the two recipes that talk, `generate` and `chat`."""

from __future__ import annotations

import ast
import dataclasses
import importlib
import io
import itertools
import json
import re
import subprocess
import sys
import types
from pathlib import Path

import pytest
import torch

from llamalab import __version__, chat
from llamalab.checkpoint import load_model, save_model
from llamalab.cli import VERBS, describe, main
from llamalab.errors import UserError
from llamalab.generate import generate
from llamalab.model import Transformer
from llamalab.tokenizer import load_tokenizer

TEMPLATE = "{% for m in messages %}<{{ m.role }}>{{ m.content }}\n{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
PARIS = "The capital of France is Paris."
GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"


# --- verbs ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("verb", VERBS)
def test_every_verb_is_a_recipe(verb):
    """It imports, has `Config` and `main`, and each field says what it is for, in its own words."""
    name, _ = VERBS[verb]
    recipe = importlib.import_module(name)
    assert callable(recipe.main) and dataclasses.is_dataclass(recipe.Config)
    assert f"llamalab {verb}" in recipe.__doc__
    tree = ast.parse(Path(recipe.__file__).read_text())
    body = next(node.body for node in tree.body if isinstance(node, ast.ClassDef) and node.name == "Config")
    documented = {
        field.target.id
        for field, text in itertools.pairwise(body)
        if isinstance(field, ast.AnnAssign) and isinstance(text, ast.Expr) and ast.literal_eval(text.value).strip()
    }
    assert documented == {field.name for field in dataclasses.fields(recipe.Config)}


@pytest.mark.parametrize("verb", VERBS)
def test_help_is_quick(verb):
    """It lists every option and has not imported torch, which is most of what a start costs."""
    code = (
        "import sys; from llamalab.cli import main\n"
        f"try: main([{verb!r}, '--help'])\n"
        "except SystemExit as stop: assert stop.code == 0, stop.code\n"
        "assert not {'torch', 'transformers', 'matplotlib', 'tokenizers'} & sys.modules.keys()"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    recipe = importlib.import_module(VERBS[verb][0])
    for field in dataclasses.fields(recipe.Config):
        nested = dataclasses.is_dataclass(field.default)  # settings that recipes share, as flags like any other
        for name in [inner.name for inner in dataclasses.fields(field.default)] if nested else [field.name]:
            if "Positional" not in field.type:
                assert re.search(rf"--{name.replace('_', '-')}\b", done.stdout)


@pytest.mark.parametrize("verb", VERBS)
def test_help_fits_the_terminal(verb, monkeypatch):
    """Paragraphs have no line beyond the terminal's width, and say all that the docstring says; command lines stay whole."""
    monkeypatch.setenv("COLUMNS", "70")
    doc = importlib.import_module(VERBS[verb][0]).__doc__
    shown = describe(doc)
    assert all(len(line) <= 70 for line in shown.splitlines() if not line.startswith("    "))
    assert shown.split() == doc.split()
    assert [line for line in shown.splitlines() if line.startswith("    ")] == [x for x in doc.splitlines() if x.startswith("    ")]


@pytest.mark.parametrize(("argv", "message"), [
    (["train", "--batch", "0"], "--batch must be at least 1"),
    (["train", "--seq-len", "0"], "--seq-len must be at least 1"),
    (["train", "--threads", "0"], "--threads must be at least 1"),
    (["train", "--rounds", "0"], "--rounds must be at least 1"),
    (["generate", "--max-new-tokens", "0"], "--max-new-tokens must be at least 1"),
    (["generate", "--model", "tiny", "--seq-len", "100000"], "but tiny takes"),
    (["train", "--contenders", "jax"], "unknown contender jax"),
])
def test_bench_refuses_before_it_starts(argv, message, capsys):
    assert main(["bench", *argv]) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1


def test_help_lists_the_verbs(capsys):
    for argv in (["--help"], ["-h"], []):
        assert main(argv) == 0
        out = capsys.readouterr().out
        assert all(f"  {verb} " in out and text in out for verb, (_, text) in VERBS.items())


def test_version(capsys):
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"llamalab {__version__}\n"


def test_unknown_verb(capsys):
    assert main(["evalute", "x"]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err == f"error: unknown verb 'evalute' (did you mean 'evaluate'?); verbs: {', '.join(VERBS)}\n"


@dataclasses.dataclass
class FakeConfig:
    n: int = 1
    """A number."""


@pytest.fixture
def fake_verb(monkeypatch):
    """Install a verb `fake` whose main is given."""

    def install(run) -> None:
        module = types.ModuleType("fake_recipe", "llamalab fake")
        module.Config, module.main = FakeConfig, run
        monkeypatch.setitem(sys.modules, "fake_recipe", module)
        monkeypatch.setitem(VERBS, "fake", ("fake_recipe", "for tests"))

    return install


def raiser(error: BaseException):
    def run(cfg) -> None:
        raise error

    return run


@pytest.mark.parametrize(
    ("error", "code", "line"),
    [
        (UserError("no such thing: look elsewhere"), 2, "error: no such thing: look elsewhere\n"),
        (FileNotFoundError(2, "No such file or directory", "some/path"), 2, "error: No such file or directory: some/path\n"),
        (IsADirectoryError(21, "Is a directory", "runs"), 2, "error: Is a directory: runs\n"),
        (KeyboardInterrupt(), 130, "interrupted\n"),
    ],
)
def test_exit_codes(fake_verb, capsys, error, code, line):
    fake_verb(raiser(error))
    assert main(["fake"]) == code
    assert capsys.readouterr().err == line


@pytest.mark.parametrize("error", [ValueError("a bug"), KeyError("a bug"), OSError("a bug")])
def test_a_bug_keeps_its_traceback(fake_verb, error):
    fake_verb(raiser(error))
    with pytest.raises(type(error)):
        main(["fake"])


def test_options_reach_the_recipe(fake_verb, capsys):
    seen = []
    fake_verb(seen.append)
    assert main(["fake", "--n", "7"]) == 0
    assert seen == [FakeConfig(7)]
    with pytest.raises(SystemExit, match="2"):
        main(["fake", "--n", "seven"])
    assert "--n" in capsys.readouterr().err


def test_a_reader_that_goes_away():
    """`llamalab ... | head` ends quietly."""
    process = subprocess.Popen([sys.executable, "-m", "llamalab", "--help"], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    process.stdout.close()  # long before Python is up and writes
    assert process.wait() == 141
    assert process.stderr.read() == b""
    process.stderr.close()


# --- a model directory for the recipes --------------------------------------------------------------------


@pytest.fixture
def model_dir(tiny, tmp_path) -> str:
    """A tiny byte-level chat model that writes ASCII only (so that its answers encode to the tokens they came from)."""
    tokenizer = load_tokenizer("bytes")
    tokenizer.templates = {"default": TEMPLATE}
    model = tiny(vocab_size=tokenizer.vocab_size, block_size=256)
    with torch.no_grad():
        model.output.weight[127:] = 0  # logit 0: never the largest of 127 that scatter around 0
        model.output.weight[:32] = 0  # no control characters
    save_model(tmp_path / "model", model, tokenizer)
    return str(tmp_path / "model")


@pytest.fixture
def fresh(model_dir):
    """What generate() itself gives for a prompt or a conversation, in a model loaded for it."""

    def answer(prompt: str | list[dict], new: int, **how) -> str:
        tokenizer, model = load_tokenizer(model_dir), load_model(model_dir)
        ids = tokenizer.encode(prompt) if isinstance(prompt, str) else chat.encode(tokenizer, prompt, add_generation_prompt=True)
        return tokenizer.decode(list(generate(model, ids, new, **how)))

    return answer


def user(text: str) -> dict:
    return {"role": "user", "content": text}


def assistant(text: str) -> dict:
    return {"role": "assistant", "content": text}


# --- llamalab generate ------------------------------------------------------------------------------------


def test_generate_streams_the_text(model_dir, fresh, capsys):
    assert main(["generate", model_dir, "Once", "--max-new-tokens", "20"]) == 0
    captured = capsys.readouterr()
    assert captured.out == fresh("Once", 20) + "\n"
    assert captured.err.startswith("4 prompt tokens in ") and " 20 new in " in captured.err and "tok/s (length)" in captured.err


def test_generate_options(model_dir, fresh, capsys, monkeypatch):
    def out(*options: str) -> str:
        assert main(["generate", model_dir, *options, "--max-new-tokens", "20"]) == 0
        return capsys.readouterr().out.removesuffix("\n")

    sampled = ["Once", "--temperature", "1.5", "--seed", "3"]
    assert out(*sampled) == out(*sampled) == fresh("Once", 20, temperature=1.5, seed=3)
    for option, value in {"top-k": 5, "top-p": 0.6, "min-p": 0.3, "repetition-penalty": 1.4}.items():
        right = fresh("Once", 20, temperature=1.5, seed=3, **{option.replace("-", "_"): value})
        assert out(*sampled, f"--{option}", str(value)) == right != fresh("Once", 20, temperature=1.5, seed=3)
    whole = fresh("Once", 20)
    assert out("Once", "--stop", whole[8:10], "--stop", "never this") == whole[: whole.index(whole[8:10])]
    assert out("Hi", "--chat", "--system", "Be kind.") == fresh([{"role": "system", "content": "Be kind."}, user("Hi")], 20)
    monkeypatch.setattr(sys, "stdin", io.StringIO("Once"))
    assert out("-") == whole


def test_generate_empty_prompt_starts_from_bos(model_dir, capsys):
    assert main(["generate", model_dir, "", "--max-new-tokens", "5"]) == 0
    tokenizer, model = load_tokenizer(model_dir), load_model(model_dir)
    assert capsys.readouterr().out == tokenizer.decode(list(generate(model, [tokenizer.bos_id], 5))) + "\n"


def test_generate_json(model_dir, fresh, capsys):
    assert main(["generate", model_dir, "Once", "--max-new-tokens", "20", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found.pop("seconds") > 0
    assert found == {"prompt": "Once", "text": fresh("Once", 20), "prompt_tokens": 4, "tokens": 20, "finish": "length"}


def test_generate_never_prints_half_a_character(model_dir, monkeypatch, capsys):
    """A16: what reaches the terminal are whole characters, also when each token is one byte."""
    writes = []
    monkeypatch.setattr(sys.modules["llamalab.generate"], "generate", lambda *_, **__: iter("é😀é".encode()))
    monkeypatch.setattr(sys.stdout, "write", writes.append)
    main(["generate", model_dir, "Once", "--max-new-tokens", "20"])
    assert [piece for piece in writes if piece] == ["é", "😀", "é", "\n"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["Once", "--max-new-tokens", "300"], "4 tokens .* 300 new .*limit is 256"),
        (["Once", "--system", "x"], "--chat"),
        (["Once", "--dtype", "int3"], "int3"),
        (["Once", "--device", "abacus"], "abacus"),
    ],
)
def test_generate_mistakes(model_dir, capsys, options, message):
    assert main(["generate", model_dir, *options]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("error: ") and captured.err.count("\n") == 1
    assert re.search(message, captured.err)


@pytest.mark.parametrize("verb", [["generate", "nowhere", "Once"], ["chat", "nowhere"]])
def test_bad_sampling_is_refused_before_the_model_is_looked_for(verb, capsys):
    with pytest.raises(SystemExit, match="2"):
        main([*verb, "--temperature", "-1"])
    assert "temperature must be a number >= 0, got -1.0" in capsys.readouterr().err


def test_missing_model(tmp_path, capsys):
    for verb in (["generate", str(tmp_path / "nowhere"), "x"], ["chat", str(tmp_path / "nowhere")]):
        assert main(verb) == 2
        captured = capsys.readouterr()
        assert "nowhere" in captured.err and captured.err.count("\n") == 1 and captured.out == ""


def test_filters_without_effect_are_reported(model_dir, capsys):
    main(["generate", model_dir, "Once", "--top-k", "5", "--max-new-tokens", "1"])
    assert "--top-k has no effect at temperature 0" in capsys.readouterr().err


# --- llamalab chat ----------------------------------------------------------------------------------------


@pytest.fixture
def talk(model_dir, monkeypatch, capsys):
    """Pipe lines into `llamalab chat`; (standard output, standard error)."""

    def run(lines: list[str], *options: str) -> tuple[str, str]:
        monkeypatch.setattr(sys, "stdin", io.StringIO("".join(line + "\n" for line in lines)))
        assert main(["chat", model_dir, *options]) == 0
        captured = capsys.readouterr()
        return captured.out, captured.err

    return run


def conversation(fresh, questions: list[str], new: int, opening: tuple[dict, ...] = (), **how) -> list[str]:
    """The answers of a conversation in which every turn computes everything anew."""
    messages, answers = list(opening), []
    for question in questions:
        messages.append(user(question))
        answers.append(fresh(messages, new, **how))
        messages.append(assistant(answers[-1]))
    return answers


def test_chat_on_the_kept_cache_answers_as_if_fresh(talk, fresh, monkeypatch):
    widths = []
    hidden = Transformer.hidden
    monkeypatch.setattr(Transformer, "hidden", lambda self, idx, *rest: widths.append(idx.shape[1]) or hidden(self, idx, *rest))
    questions = ["Hello there", "And then?", "Why?"]
    out, _ = talk(questions, "--max-new-tokens", "10")
    kept = [width for width in widths if width > 1]
    answers = conversation(fresh, questions, 10)
    assert out == "".join(answer + "\n" for answer in answers)
    # Anew are: the last token of the answer before, its end of line, the new message, and what opens an answer.
    assert kept == [len("<user>Hello there\n<assistant>"), len(".\n<user>And then?\n<assistant>"), len(".\n<user>Why?\n<assistant>")]


def test_chat_system_and_seed(talk, fresh):
    opening = ({"role": "system", "content": "Be kind."},)
    out, _ = talk(["Hello"], "--system", "Be kind.", "--max-new-tokens", "10")
    assert out == conversation(fresh, ["Hello"], 10, opening)[0] + "\n"
    how = ["--temperature", "1.5", "--max-new-tokens", "10", "--seed"]
    assert talk(["a", "b"], *how, "1") == talk(["a", "b"], *how, "1") != talk(["a", "b"], *how, "2")


def test_chat_reset_and_exit(talk, fresh):
    out, err = talk(["Hello", "", "/reset", "Hello", "/exit", "Hello"], "--max-new-tokens", "10")
    assert out == (fresh([user("Hello")], 10) + "\n") * 2
    assert "a new conversation" in err


def test_chat_context_limit(talk, fresh):
    """A message that does not fit is refused and forgotten; an answer that does not fit is cut, and said to be."""
    out, err = talk(["Hello", "x" * 60, "Hi"], "--max-new-tokens", "10", "--context", "80")
    assert out == "".join(answer + "\n" for answer in conversation(fresh, ["Hello", "Hi"], 10))
    n = len("<user>Hello\n<assistant>.\n<user>x\n<assistant>") - 2 + 10 + 60
    assert f"has {n} tokens and the context holds 80" in err and "limit: 256" in err
    out, err = talk(["Hello"], "--context", "30")
    room = 30 - len("<user>Hello\n<assistant>")
    assert out == fresh([user("Hello")], room) + "\n"
    assert f"cut after {room} tokens: the context is full" in err
    out, err = talk(["Hello"], "--max-new-tokens", "5")
    assert "cut after 5 tokens: --max-new-tokens" in err


def test_chat_refuses_a_context_beyond_the_model(model_dir, capsys):
    assert main(["chat", model_dir, "--context", "257"]) == 2
    assert "from 2 to 256" in capsys.readouterr().err


def test_ctrl_c_stops_the_answer_only(talk, fresh, monkeypatch):
    calls = []

    def interrupted(*args, **how):
        calls.append(how)
        for i, token in enumerate(generate(*args, **how)):
            if len(calls) == 1 and i == 3:
                raise KeyboardInterrupt
            yield token

    monkeypatch.setattr(sys.modules["llamalab.generate"], "generate", interrupted)
    out, err = talk(["Hello", "And?"], "--max-new-tokens", "10")
    first = fresh([user("Hello")], 3)
    second = fresh([user("Hello"), assistant(first), user("And?")], 10)
    assert out == f"{first}\n{second}\n"
    assert "cut after 3 tokens: Ctrl-C" in err
    assert calls[1]["cached"] == len("<user>Hello\n<assistant>") + 2


def test_chat_needs_a_template(tiny, tmp_path, capsys):
    tokenizer = load_tokenizer("bytes")
    save_model(tmp_path / "m", tiny(vocab_size=tokenizer.vocab_size), tokenizer)
    assert main(["chat", str(tmp_path / "m")]) == 2
    assert "no chat template" in capsys.readouterr().err


# --- the real checkpoint ----------------------------------------------------------------------------------


@pytest.mark.real
def test_real_generate(real_data, capsys):
    assert main(["generate", str(real_data / "model" / GGUF), "What is the capital of France?", "--chat"]) == 0
    captured = capsys.readouterr()
    assert captured.out == PARIS + "\n"
    assert captured.err.rstrip().endswith("(stop)")  # <|im_end|>, not the length


@pytest.mark.real
def test_real_chat(real_data, monkeypatch, capsys):
    """Two turns: the second must find the first in the cache and know what "there" is."""
    monkeypatch.setattr(sys, "stdin", io.StringIO("What is the capital of France?\nWhich river flows there?\n"))
    assert main(["chat", str(real_data / "model" / GGUF)]) == 0
    first, second = capsys.readouterr().out.split("\n", 1)
    assert first == PARIS
    assert "Seine" in second
