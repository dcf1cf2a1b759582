"""The command: `llamalab VERB ...`. Each verb is a recipe, loaded when it is asked for; nothing here imports torch.

Exit codes: 0 done; 2 a mistake of the user's, said in one line; 130 Ctrl-C; 141 the reader of our output went away.
"""

from __future__ import annotations

import difflib
import importlib
import os
import shutil
import sys
import textwrap

import tyro

from llamalab import __version__
from llamalab.errors import UserError

VERBS: dict[str, tuple[str, str]] = {
    "pretrain": ("llamalab.recipes.pretrain", "train a Llama on text, from scratch or on from a checkpoint"),
    "generate": ("llamalab.recipes.generate", "continue a prompt"),
    "chat": ("llamalab.recipes.chat", "hold a conversation"),
    "evaluate": ("llamalab.recipes.evaluate", "perplexity, bits per byte, multiple choice"),
    "bench": ("llamalab.recipes.bench", "measure training and generation beside transformers"),
    "convert": ("llamalab.recipes.convert", "turn one checkpoint format into another"),
    "download": ("llamalab.recipes.download", "fetch a model from the Hugging Face hub"),
}


def run() -> None:
    """The `llamalab` console script."""
    sys.exit(main(sys.argv[1:]))


def main(argv: list[str]) -> int:
    """Run one command line; returns the exit code."""
    try:
        code = dispatch(argv)
        sys.stdout.flush()  # a closed pipe shows here and not in the interpreter's exit
        return code
    except UserError as error:
        return complain(str(error))
    except BrokenPipeError:  # `llamalab ... | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # what is still buffered goes nowhere, without a traceback
        return 141
    except OSError as error:
        if error.filename is None:
            raise
        return complain(f"{error.strerror}: {error.filename}")  # a path the user named is missing, unreadable, a directory, full
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130


def dispatch(argv: list[str]) -> int:
    """Find the verb, parse its options, run it."""
    if not argv or argv[0] in ("-h", "--help", "help"):
        print(usage())
        return 0
    verb, *rest = argv
    if verb == "--version":
        print(f"llamalab {__version__}")
        return 0
    if verb not in VERBS:
        near = difflib.get_close_matches(verb, VERBS, n=1)
        hint = f" (did you mean {near[0]!r}?)" if near else ""
        raise UserError(f"unknown verb {verb!r}{hint}; verbs: {', '.join(VERBS)}")
    recipe = importlib.import_module(VERBS[verb][0])
    if {"-h", "--help"} & {*rest}:
        print(describe(recipe.__doc__), end="\n\n")
    recipe.main(tyro.cli(recipe.Config, prog=f"llamalab {verb}", description="", args=rest))
    return 0


def describe(doc: str) -> str:
    """A recipe's docstring for the terminal it is shown in: paragraphs wrapped anew, command lines as they are."""
    width = min(shutil.get_terminal_size().columns, 100)
    paragraphs = doc.strip().split("\n\n")
    return "\n\n".join(p if p.startswith("    ") else textwrap.fill(p, width, break_on_hyphens=False) for p in paragraphs)


def usage() -> str:
    """What `llamalab --help` prints."""
    width = max(map(len, VERBS))
    lines = [f"  {verb:<{width}}  {help_text}" for verb, (_, help_text) in VERBS.items()]
    return "\n".join(
        ["usage: llamalab VERB ...", "", "One small Llama in PyTorch that trains and generates.", "", "verbs:", *lines, "",
         "llamalab VERB --help   a verb's options", "llamalab --version"]
    )


def complain(message: str) -> int:
    """One line on stderr; returns the exit code of a user's mistake."""
    print(f"error: {message}", file=sys.stderr)
    return 2
