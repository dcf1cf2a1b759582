"""Named tensors in files, not read yet: safetensors, torch pickles, several files as one.

`Stored` says what a tensor is and reads some of its rows when asked. Every read maps the file anew and lets it go again:
pages of a mapping count as this process's memory for as long as it is open, and a model of 140 GB must not be held twice.

Only weights are read. torch files go through `weights_only=True`, whatever the file wants; a file that needs more is refused.
"""

from __future__ import annotations

import json
import pickle
import re
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from llamalab.errors import UserError

_DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


@dataclass(frozen=True)
class Stored:
    """A tensor in a file."""

    shape: tuple[int, ...]
    dtype: torch.dtype | str  # the file's own word where it is not a float type of ours
    where: Path
    rows: Callable[[int, int], Tensor]  # (start, stop) -> [stop - start, ...], perhaps a view of a mapping of the file


def read_safetensors(path: Path) -> dict[str, Stored]:
    """The tensors of a .safetensors file.

    Raises:
        UserError: cut, damaged, or not such a file.
    """
    found = {}
    with _open_safetensors(path) as file:
        for name in file.keys():  # noqa: SIM118 (not a dict)
            piece = file.get_slice(name)
            kind = piece.get_dtype()
            found[name] = Stored(tuple(piece.get_shape()), _DTYPES.get(kind, kind), path, _safetensors_rows(path, name))
    return found


def _safetensors_rows(path: Path, name: str) -> Callable[[int, int], Tensor]:
    def rows(start: int, stop: int) -> Tensor:
        with _open_safetensors(path) as file:
            return file.get_slice(name)[start:stop]

    return rows


def _open_safetensors(path: Path) -> Any:
    try:
        return safe_open(path, framework="pt")
    except (SafetensorError, OSError) as error:
        raise UserError(f"{path} is missing, cut or damaged: {error}{_pointer_hint(path)}") from None


def read_torch(path: Path) -> dict[str, Stored]:
    """The tensors of a torch.save file (.pth, .bin, .pt) that holds a state dict.

    Raises:
        UserError: cut, damaged, not a dict of tensors, or reading it would run code.
    """
    state = _open_torch(path)
    if not isinstance(state, dict) or not state or not all(isinstance(name, str) for name in state):
        raise UserError(f"{path} should hold a dict of tensors by name, got {type(state).__name__}")
    others = [name for name, value in state.items() if not isinstance(value, Tensor)]
    if others:
        raise UserError(f"{path} should hold a dict of tensors by name, but {', '.join(others[:5])} {'is' if len(others) == 1 else 'are'} "
                        "something else; save model.state_dict() alone")
    mapped = zipfile.is_zipfile(path)  # torch's format before 1.6 can't be mapped, so it is held once
    return {
        name: Stored(tuple(value.shape), value.dtype if value.dtype in _DTYPES.values() else str(value.dtype), path,
                     _torch_rows(path, name, None if mapped else value))
        for name, value in state.items()
    }


def _torch_rows(path: Path, name: str, held: Tensor | None) -> Callable[[int, int], Tensor]:
    return lambda start, stop: (_open_torch(path)[name] if held is None else held)[start:stop]


def _open_torch(path: Path) -> Any:
    try:
        return torch.load(path, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(path))
    except pickle.UnpicklingError as error:
        reason = re.search(r"unsupported [^\n]*", str(error), re.IGNORECASE)
        raise UserError(f"{path} is refused: it is not a plain file of weights, and reading anything else could run code from it "
                        f"({reason[0].rstrip('.') if reason else 'damaged'}){_pointer_hint(path)}") from None
    except Exception as error:  # damaged pickles raise anything, KeyError and IndexError included
        raise UserError(f"{path} is missing, cut or damaged: {type(error).__name__}: {_first_line(error)}{_pointer_hint(path)}") from None


def read_file(path: Path) -> dict[str, Stored]:
    """One file of either kind, by its name."""
    return read_safetensors(path) if path.suffix == ".safetensors" else read_torch(path)


def read_shards(index: Path) -> dict[str, Stored]:
    """The tensors of a sharded checkpoint, from its *.index.json (Hugging Face's).

    Raises:
        UserError: a shard is missing, index and shards disagree, or two shards hold the same name.
    """
    entry = read_json(index).get("weight_map")
    if not isinstance(entry, dict) or not entry:
        raise UserError(f"{index} has no weight_map")
    odd = [name for name, file in entry.items() if not isinstance(file, str)]
    if odd:
        raise UserError(f"{index} should name a file for each tensor, and does not for {few(odd)}")
    files = sorted(set(entry.values()))
    missing = [file for file in files if not (index.parent / file).is_file()]
    if missing:
        raise UserError(f"{index.parent} lacks {few(missing)}, which {index.name} names; fetch the checkpoint again")
    found: dict[str, Stored] = {}
    for file in files:
        for name, tensor in read_file(index.parent / file).items():
            if name in found:
                raise UserError(f"{index.parent}: tensor {name} is in two files, {found[name].where.name} and {file}")
            found[name] = tensor
    moved = [f"{name} (index: {file})" for name, file in entry.items() if name not in found or found[name].where.name != file]
    if moved:
        raise UserError(f"{index.parent}: not in the files {index.name} names: {few(moved)}")
    unlisted = [f"{name} ({found[name].where.name})" for name in found if name not in entry]
    if unlisted:
        raise UserError(f"{index.parent}: in the files, but not in {index.name}: {few(unlisted)}")
    return found


def merge_parallel(files: list[Path], whole: Callable[[str, list[tuple[int, ...]]], int | None]) -> dict[str, Stored]:
    """Meta's tensor-parallel files as whole tensors.

    Args:
        files: in order of rank.
        whole: (name, shapes by rank) -> the dimension along which the parts are joined; None where each file holds a copy.

    Raises:
        UserError: the files hold different names, or copies that differ.
    """
    ranks = [read_torch(file) for file in files]
    for file, rank in zip(files, ranks, strict=True):
        odd = sorted(set(rank) ^ set(ranks[0]))
        if odd:
            raise UserError(f"{files[0]} and {file.name} hold different tensors: {few(odd)}")
    found = {}
    for name, first in ranks[0].items():
        pieces = [rank[name] for rank in ranks]
        dim = whole(name, [piece.shape for piece in pieces])
        if dim is None:
            values = [piece.rows(0, piece.shape[0]) for piece in pieces]
            if not all(torch.equal(value, values[0]) for value in values):
                raise UserError(f"{files[0].parent}: the files hold different copies of {name}")
            found[name] = first
            continue
        shape = list(first.shape)
        shape[dim] = sum(piece.shape[dim] for piece in pieces)
        found[name] = Stored(tuple(shape), first.dtype, first.where, _joined_rows(pieces, dim))
    return found


def _joined_rows(pieces: list[Stored], dim: int) -> Callable[[int, int], Tensor]:
    def rows(start: int, stop: int) -> Tensor:
        if dim:
            return torch.cat([piece.rows(start, stop) for piece in pieces], dim=dim)
        out, begin = [], 0
        for piece in pieces:
            end = begin + piece.shape[0]
            if begin < stop and start < end:
                out.append(piece.rows(max(start - begin, 0), min(stop, end) - begin))
            begin = end
        return torch.cat(out)

    return rows


def read_json(path: Path) -> dict[str, Any]:
    """A file that holds a JSON object.

    Raises:
        UserError: missing, or anything else.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(f"{path} cannot be read: {error}") from None
    if not isinstance(content, dict):
        raise UserError(f"{path} should hold a JSON object, got {type(content).__name__}")
    return content


def _pointer_hint(path: Path) -> str:
    """A clone without git-lfs leaves a short text in place of a large file."""
    if not path.is_file():
        return ""
    with open(path, "rb") as file:
        is_pointer = file.read(40).startswith(b"version https://git-lfs")
    return " (it is a git-lfs pointer, not the file; fetch it with git lfs pull)" if is_pointer else ""


def _first_line(error: BaseException) -> str:
    return str(error).split("\n")[0].split(". ")[0]


def few(names: list[str], limit: int = 8) -> str:
    """The first names of a list, and how many more there are."""
    more = f" and {len(names) - limit} more" if len(names) > limit else ""
    return ", ".join(names[:limit]) + more
