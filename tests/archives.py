"""Files straight out of the real packages in LLAMALAB_DATA/wheels, without unpacking them."""

from __future__ import annotations

import re
import tarfile
import zipfile
from functools import lru_cache
from pathlib import Path

SEPARATOR = "\n__ggml_vocab_test__\n"


@lru_cache(maxsize=8)
def members(archive: Path, pattern: str) -> dict[str, bytes]:
    """Last part of the name -> content, of all members of a wheel or sdist whose name the pattern matches at its end."""
    wanted = re.compile(f"(?:{pattern})$")
    if archive.suffix == ".whl":
        with zipfile.ZipFile(archive) as z:
            return {name.rpartition("/")[2]: z.read(name) for name in z.namelist() if wanted.search(name)}
    with tarfile.open(archive) as t:
        return {m.name.rpartition("/")[2]: t.extractfile(m).read() for m in t if m.isfile() and wanted.search(m.name)}


def only(folder: Path, pattern: str) -> Path:
    """The one file of that name pattern."""
    (found,) = folder.glob(pattern)
    return found


def references(sdist: Path, name: str) -> list[tuple[str, list[int]]]:
    """llama.cpp's reference strings of one vocabulary, with the ids of its original tokenizer."""
    files = members(sdist, r"models/ggml-vocab-llama-(spm|bpe)\.gguf(\.inp|\.out)?")
    texts = files[f"ggml-vocab-{name}.gguf.inp"].decode().split(SEPARATOR)
    ids = [[int(i) for i in line.split()] for line in files[f"ggml-vocab-{name}.gguf.out"].decode().split("\n")]
    return list(zip(texts, ids))
