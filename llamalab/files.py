"""Writing files so that a reader, or a crash, never meets half of one: temporary name, flush, rename."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


def write_atomic(path: str | Path, content: str | bytes) -> None:
    """Write a whole file, or nothing."""
    path = Path(path)
    with temporary_beside(path) as tmp:
        tmp.write_bytes(content.encode() if isinstance(content, str) else content)


@contextmanager
def temporary_beside(path: str | Path) -> Iterator[Path]:
    """A temporary name in path's directory for the caller to write; on success flushed and renamed to path."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(prefix=f".{path.name}.", suffix=".tmp", dir=path.parent)
    os.close(handle)
    tmp = Path(name)
    try:
        yield tmp
        flush(tmp)
        os.chmod(tmp, 0o666 & ~_umask())  # mkstemp makes files private
        os.replace(tmp, path)
        flush(path.parent)
    finally:
        tmp.unlink(missing_ok=True)


@contextmanager
def new_directory(path: str | Path) -> Iterator[Path]:
    """A temporary directory for the caller to fill; on success it becomes `path`, replacing what was there."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    tmp = Path(tempfile.mkdtemp(prefix=f".{path.name}.", suffix=".tmp", dir=path.parent))
    try:
        yield tmp
        for file in tmp.rglob("*"):
            os.chmod(file, (0o777 if file.is_dir() else 0o666) & ~_umask())  # some writers make files private
            flush(file)
        os.chmod(tmp, 0o777 & ~_umask())
        if path.exists():
            old = path.with_name(f".{path.name}.{os.getpid()}.old.tmp")
            os.replace(path, old)
            os.replace(tmp, path)
            shutil.rmtree(old)
        else:
            os.replace(tmp, path)
        flush(path.parent)
    finally:
        shutil.rmtree(tmp, ignore_errors=True)


def flush(path: Path) -> None:
    """fsync a file or a directory."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
