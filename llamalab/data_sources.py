"""Where text comes from: a file, a folder, JSON lines, parquet, or a data set of the Hugging Face hub.

`open_source` names what there is and fingerprints its content; `Source.pieces()` streams it. A document (a text file,
a row) comes in one or more pieces, so that a file of any size is read in little memory.
"""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import re
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from llamalab.errors import UserError

CHARACTERS = 1 << 20  # of a text file, read at once
_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+(:[\w.\[\]%:+-]+)?")
_FILE_NAME = re.compile(r".*\.(txt|text|md|json|jsonl|parquet|gz|tokens)", re.IGNORECASE)


class Piece(NamedTuple):
    """Some text of a document."""

    text: str
    ends: bool  # the document's last piece
    done: float  # share of the whole source read so far, 0 .. 1


@dataclass(frozen=True)
class Source:
    """Text to read.

    Attributes:
        name: short, for file names and messages.
        identity: changes when the content does; JSON-serialisable.
        size: bytes on disk (0 where unknown).
        pieces: starts reading from the beginning.
    """

    name: str
    identity: list[Any]
    size: int
    pieces: Callable[[], Iterator[Piece]]


def open_source(source: str | Path, field: str = "text") -> Source:
    """Find a source of text.

    Args:
        source: a text file (UTF-8; one document), `.jsonl` (one document a row), either also as `.gz`; `.parquet`; a
            folder, of which every file that is not hidden is read, by its suffix as above and otherwise as text, in
            order of the paths; or `org/name` or `org/name:split` of the hub (split: train).
        field: the column that holds the text, in JSON lines, parquet and hub data sets.

    Raises:
        UserError: nothing there, or a format that is not read.
    """
    path = Path(source)
    if path.is_dir():
        files = [(file.relative_to(path).as_posix(), file) for file in path.rglob("*") if file.is_file()]
        files = sorted((name, file) for name, file in files if not any(part.startswith(".") for part in Path(name).parts))
        if not files:
            raise UserError(f"{path} holds no files to read text from")
        return _from_files(path.resolve().name, files, field)
    if path.exists():
        return _from_files(path.name, [(path.name, path)], field)
    if _HUB_ID.fullmatch(str(source)) and not _FILE_NAME.fullmatch(str(source)):
        return _from_hub(str(source), field)
    raise UserError(f"no data at {source}: no such file or folder (a hub data set is written org/name or org/name:split)")


# --- files ------------------------------------------------------------------------------------------------


def _from_files(name: str, files: list[tuple[str, Path]], field: str) -> Source:
    readers = [(_reader(file), file) for _, file in files]  # refuses suffixes before anything is hashed
    sizes = [file.stat().st_size for _, file in files]
    rows = any(reader is not _text_file for reader, _ in readers)
    identity = [[relative, size, _digest(file)] for (relative, file), size in zip(files, sizes)]

    def pieces() -> Iterator[Piece]:
        total, before = max(sum(sizes), 1), 0
        for (reader, file), size in zip(readers, sizes):
            for piece in reader(file, field):
                yield piece._replace(done=(before + piece.done * size) / total)
            before += size

    return Source(name, [*identity, field] if rows else identity, sum(sizes), pieces)


def _reader(file: Path) -> Callable[[Path, str], Iterator[Piece]]:
    suffix = file.name.lower().removesuffix(".gz").rpartition(".")[2]
    if suffix == "parquet":
        return _parquet
    if suffix == "jsonl":
        return _json_lines
    if suffix == "json":
        raise UserError(f"{file}: .json is not read, because a whole JSON document has no rows to stream; write it as JSON lines (.jsonl)")
    return _text_file


def _text_file(file: Path, field: str) -> Iterator[Piece]:
    with _opened(file) as (text, done):
        while chunk := text.read(CHARACTERS):
            yield Piece(chunk, False, done())
    yield Piece("", True, 1.0)


def _json_lines(file: Path, field: str) -> Iterator[Piece]:
    for where, row, done in json_rows(file):
        yield Piece(_field(row, field, where), True, done)


def json_rows(file: str | Path) -> Iterator[tuple[str, Any, float]]:
    """Rows of a JSON-lines file, each with where it stands ("FILE, line N") and the share read; blank lines are passed over.

    Raises:
        UserError: no such file, or a line that is not JSON.
    """
    with _opened(Path(file)) as (text, done):
        for number, line in enumerate(text, start=1):
            where = f"{file}, line {number}"
            try:
                if line.strip():
                    yield where, json.loads(line), done()
            except json.JSONDecodeError as error:
                raise UserError(f"{where} is not JSON: {error}") from None


def _field(row: Any, field: str, where: str) -> str:
    """The text of a row, or a UserError that says what the row has."""
    if not isinstance(row, dict):
        raise UserError(f"{where}: expected an object with a field {field!r}, got {type(row).__name__}")
    if field not in row:
        raise UserError(f"{where} has no field {field!r}; it has: {', '.join(map(str, row)) or 'nothing'}")
    if not isinstance(row[field], str):
        raise UserError(f"{where}: field {field!r} must be text, got {type(row[field]).__name__}")
    try:
        row[field].encode()
    except UnicodeEncodeError:
        raise UserError(f"{where}: field {field!r} is not valid Unicode (half of a surrogate pair)") from None
    return row[field]


def _parquet(file: Path, field: str) -> Iterator[Piece]:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError:
        raise UserError("reading parquet needs pyarrow: pip install 'llamalab[data]'") from None
    try:
        table = pyarrow.parquet.ParquetFile(file)
    except pyarrow.ArrowInvalid as error:
        raise UserError(f"{file} is not a parquet file: {error}") from None
    with table:
        if field not in table.schema_arrow.names:
            raise UserError(f"{file} has no column {field!r}; it has: {', '.join(table.schema_arrow.names)}")
        number, total = 0, max(table.metadata.num_rows, 1)
        try:
            for batch in table.iter_batches(batch_size=256, columns=[field]):
                for value in batch.column(0).to_pylist():
                    number += 1
                    yield Piece(_field({field: value}, field, f"{file}, row {number}"), True, number / total)
        except (pyarrow.ArrowException, OSError) as error:
            raise UserError(f"{file} is damaged after row {number}: {str(error).splitlines()[0]}") from None


@contextmanager
def _opened(file: Path) -> Iterator[tuple[io.TextIOWrapper, Callable[[], float]]]:
    """The text of a file, line ends as they are, and a function that says how much of it is read."""
    if not file.is_file():
        raise UserError(f"no file at {file}")
    size = max(file.stat().st_size, 1)
    try:
        with open(file, "rb") as raw:
            inner = gzip.GzipFile(fileobj=raw) if file.suffix.lower() == ".gz" else raw
            yield io.TextIOWrapper(inner, encoding="utf-8-sig", newline=""), lambda: raw.tell() / size
    except UnicodeDecodeError as error:
        raise UserError(f"{file} is not UTF-8 text ({error.reason}); convert it, or take it out of the folder") from None
    except (gzip.BadGzipFile, zlib.error, EOFError) as error:
        raise UserError(f"{file} is not a whole gzip file: {error}") from None


def read_text(file: str | Path) -> str:
    """A whole text file (UTF-8, also .gz), line ends as they are.

    Raises:
        UserError: no such file, or not UTF-8.
    """
    with _opened(Path(file)) as (text, _):
        return text.read()


def _digest(file: Path) -> str:
    digest = hashlib.blake2b(digest_size=16)
    with open(file, "rb") as raw:
        while block := raw.read(1 << 22):
            digest.update(block)
    return digest.hexdigest()


# --- the hub ----------------------------------------------------------------------------------------------


def _from_hub(source: str, field: str) -> Source:
    """A data set of the hub through `datasets`, which downloads it once and maps it from disk."""
    try:
        import datasets
    except ImportError:
        raise UserError(f"reading {source} from the hub needs datasets: pip install 'llamalab[data]'") from None
    name, _, split = source.partition(":")
    try:
        rows = datasets.load_dataset(name, split=split or "train")
    except (OSError, ValueError, datasets.exceptions.DatasetsError) as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise UserError(f"no file or folder {source} here, and as a data set of the hub it cannot be read: {reason}") from None
    if field not in rows.column_names:
        raise UserError(f"{source} has no column {field!r}; it has: {', '.join(rows.column_names)}")
    rows = rows.select_columns([field])

    def pieces() -> Iterator[Piece]:
        for number, row in enumerate(rows, start=1):
            yield Piece(_field(row, field, f"{source}, row {number}"), True, number / len(rows))

    # `_fingerprint` is how `datasets` itself names a version of a data set in its cache
    return Source(name.replace("/", "--"), [name, split or "train", rows._fingerprint, field], rows.size_in_bytes or 0, pieces)
