"""`import llamalab`: quick, and its names are what they say whatever was imported before."""

from __future__ import annotations

import subprocess
import sys

import pytest


def run(code: str) -> str:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip()


def test_importing_the_package_imports_no_torch():
    assert run("import sys, llamalab; print('torch' in sys.modules, llamalab.__version__)") == "False 0.1.0"


@pytest.mark.parametrize("before", ["", "import llamalab.generate, llamalab.train; "])
def test_public_names_are_functions_and_classes(before):
    code = "import llamalab; from llamalab import *; print([n for n in llamalab.__all__ if not callable(globals()[n])])"
    assert run(before + code) == "[]"


def test_an_unknown_name_is_an_attribute_error():
    import llamalab

    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = llamalab.nothing
