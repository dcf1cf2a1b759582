"""Imports point one way (docs/design.md, section 3), and a recipe's --help imports no torch. Read from the syntax trees."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import llamalab

PACKAGE = Path(llamalab.__file__).parent
DESIGN = PACKAGE.parent / "docs" / "design.md"
#: What takes long to import, and so may not be imported by a recipe before its main() runs.
HEAVY = {"torch", "torchao", "transformers", "tokenizers", "safetensors", "huggingface_hub", "numpy", "matplotlib", "datasets", "pyarrow"}


def design_rows() -> dict[str, int]:
    """Module -> row, from the sentence of docs/design.md that begins "Rows, top may not import bottom: 0 `errors ...` · 1"."""
    sentence = DESIGN.read_text().partition("Rows, top may not import bottom:")[2].partition("A short test")[0]
    rows = {name: int(row) for row, names in re.findall(r"(\d) `([^`]+)`", sentence) for name in names.split()}
    assert {"errors", "model", "train", "recipes", "cli"} <= rows.keys(), f"no rows found in {DESIGN}"
    return rows


def row_of(module: str) -> int | None:
    """The row of a module or of the part of the package it belongs to; None if the design has no place for it.

    A file that only helps another (`tokenizer_formats` for `tokenizer`) stands in that one's row.
    """
    rows = design_rows()
    owners = {"__main__": "cli"}
    parts = module.split(".")
    for name in (owners.get(module, module), module.partition("_")[0], parts[0] if parts[0] == "recipes" else ""):
        if name in rows:
            return rows[name]
    return None


def modules() -> dict[str, str]:
    """Dotted name below the package -> source, without the __init__ files (which hold names, not imports)."""
    files = [path for path in PACKAGE.rglob("*.py") if path.name != "__init__.py"]
    return {".".join(path.relative_to(PACKAGE).with_suffix("").parts): path.read_text() for path in files}


def imports(source: str, known: set[str], at_import: bool = False) -> Iterator[str]:
    """Every module a source imports: ours without the package's name, others as they are called.

    at_import: only what runs when the module is imported, not what stands in functions or under TYPE_CHECKING.
    """
    todo = [ast.parse(source)]
    while todo:
        node = todo.pop()
        if at_import and isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            continue
        if at_import and isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            continue
        todo.extend(ast.iter_child_nodes(node))
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "relative import: write the whole name"
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        else:
            continue
        for name in names:
            top, _, rest = name.partition(".")
            if top != "llamalab":
                yield name
                continue
            public = llamalab._PUBLIC.get(rest)  # from llamalab import load_model
            while rest and rest not in known:  # llamalab.model.Transformer -> model
                rest = rest.rpartition(".")[0]
            if rest or public:
                yield "llamalab." + (rest or public)


def wrong_arrows(sources: dict[str, str]) -> list[str]:
    """Imports from a lower row, and recipes that import each other. (A module without a row is another test's matter.)"""
    wrong = []
    for name, source in sources.items():
        for target in imports(source, set(sources)):
            if not target.startswith("llamalab."):
                continue
            target = target.removeprefix("llamalab.")
            between_recipes = name.startswith("recipes.") and target.startswith("recipes.")
            rows = row_of(name), row_of(target)
            if (None not in rows and rows[1] > rows[0]) or between_recipes:
                wrong.append(f"{name} -> {target}")
    return wrong


def test_every_module_has_a_row():
    assert [name for name in modules() if row_of(name) is None] == [], f"add it to the rows in {DESIGN}"


def test_no_arrow_points_down():
    assert wrong_arrows(modules()) == []


def test_no_cycles():
    sources = modules()
    arrows = {name: {target.removeprefix("llamalab.") for target in imports(text, set(sources))} for name, text in sources.items()}
    while leaves := [name for name, targets in arrows.items() if not targets & arrows.keys()]:
        for name in leaves:
            del arrows[name]
    assert arrows == {}


def heavy_imports(name: str, sources: dict[str, str]) -> list[str]:
    """Chains by which importing a module imports something slow."""
    chains, todo, met = [], [(name,)], set()
    while todo:
        chain = todo.pop()
        for target in imports(sources[chain[-1]], set(sources), at_import=True):
            ours = target.removeprefix("llamalab.")
            if target.partition(".")[0] in HEAVY:
                chains.append(" -> ".join([*chain, target]))
            elif ours in sources and ours not in met:
                met.add(ours)
                todo.append((*chain, ours))
    return chains


@pytest.mark.parametrize("name", ["cli", "config", *sorted(n for n in modules() if n.startswith("recipes."))])
def test_help_needs_nothing_slow(name):
    assert heavy_imports(name, modules()) == []


def test_the_checks_see_what_they_are_for():
    """Each check, on a package with the fault in it."""
    good = modules()
    down = {**good, "rope": good["rope"] + "\ndef f():\n    from llamalab.train import train_steps\n", "train": ""}
    assert "rope -> train" in wrong_arrows(down)
    public = {**good, "config": "from llamalab import generate\n"}
    assert "config -> generate" in wrong_arrows(public)
    each_other = {**good, "recipes.chat": "import llamalab.recipes.generate\n"}
    assert "recipes.chat -> recipes.generate" in wrong_arrows(each_other)
    assert row_of("frobnicate") is None
    slow = {**good, "recipes.chat": "import torch\n", "recipes.generate": "from llamalab.generate import generate\n"}
    assert heavy_imports("recipes.chat", slow) == ["recipes.chat -> torch"]
    assert any(chain.startswith("recipes.generate -> generate -> torch") for chain in heavy_imports("recipes.generate", slow))
    assert heavy_imports("recipes.chat", {**good, "recipes.chat": "def main():\n    import torch\n"}) == []
