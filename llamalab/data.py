"""From text to batches: a source is tokenized once into a token file, windows are cut from it by number.

    tokens = prepare("corpus/", tokenizer, "tokens")         # the second time, the file that is there is opened
    windows = Windows(tokens, seq_len=512, batch=8, seed=0)
    windows(17)                                              # batch 17: always the same one

A token file is a line of JSON padded to HEADER bytes, then the ids, little-endian, 16 bits where the vocabulary has at
most 65536 ids and 32 where it has more. It is mapped, never loaded. Documents follow each other: the tokenizer's BOS in
front of each if it adds one to texts, its (first) end token after each if it has one. Documents without text are left out.

Shapes: B batch, T seq_len, N tokens in the file.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from llamalab.data_sources import Piece, Source, open_source
from llamalab.errors import UserError
from llamalab.files import temporary_beside
from llamalab.tokenizer import Tokenizer

IGNORE = -100  # a label that is not trained on
HEADER = 4096  # bytes before the first id
FORMAT = "llamalab-tokens-1"
PIECE = 1 << 17  # characters encoded as one string
TOGETHER = 1 << 21  # characters encoded at a time, in parallel
SHOW_PROGRESS = 4 << 20  # bytes of a source from which a progress bar is shown


@dataclass
class Batch:
    """Rows to train or score."""

    inputs: Tensor  # [B, T] int64
    labels: Tensor  # [B, T] int64: the token after each input, or IGNORE
    documents: Tensor | None = None  # [B, T] int64: packed rows; tokens see their own document only

    def to(self, device: torch.device | str) -> Batch:
        """The same batch on a device."""
        documents = None if self.documents is None else self.documents.to(device)
        return Batch(self.inputs.to(device), self.labels.to(device), documents)


# --- token files ------------------------------------------------------------------------------------------


class TokenFile:
    """Token ids on disk.

    Attributes:
        tokens: [N] uint16 or uint32, memory-mapped, read-only.
        vocab_size: ids are below it.
        fingerprint: of source, tokenizer and options.
        documents, text_bytes: how many documents, and bytes of UTF-8 text, the ids stand for.

    Raises:
        UserError: not a token file, another version or width, cut, or an id outside its vocabulary.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        if not self.path.is_file():
            raise UserError(f"no token file at {path}")
        with open(self.path, "rb") as file:
            start = file.read(HEADER)
        try:
            head = json.loads(start)
            written = head["format"]
        except (ValueError, KeyError, TypeError):
            raise UserError(f"{path} is not a token file; make one from text with prepare()") from None
        if written != FORMAT:
            raise UserError(f"{path} is a token file of format {written!r}; this version reads {FORMAT!r}: prepare the text again")
        self.vocab_size, self.fingerprint, self.tokenizer = head["vocab_size"], head["fingerprint"], head["tokenizer"]
        self.documents, self.text_bytes = head["documents"], head["text_bytes"]
        self._max_id, width = head["max_id"], id_type(self.vocab_size)
        if head["dtype"] != width.name:
            raise UserError(f"{path} says its ids are {head['dtype']}, but a vocabulary of {self.vocab_size} is written as {width.name}")
        expected = HEADER + head["count"] * width.itemsize
        if self.path.stat().st_size != expected:
            raise UserError(f"{path} has {self.path.stat().st_size} bytes, {head['count']} {width.name} ids need {expected}: it was cut")
        if self._max_id >= self.vocab_size:
            raise UserError(f"{path} holds token id {self._max_id}, but its vocabulary has {self.vocab_size} ids")
        self.tokens = np.memmap(self.path, width, "r", HEADER, (head["count"],))

    def __len__(self) -> int:
        return len(self.tokens)

    def require_vocabulary(self, vocab_size: int) -> None:
        """Refuse ids that a model of this vocabulary has no embedding for."""
        if self._max_id >= vocab_size:
            raise UserError(
                f"{self.path} holds token id {self._max_id}, but the model's vocabulary has {vocab_size} ids: "
                "prepare the text with the model's own tokenizer"
            )


def id_type(vocab_size: int) -> np.dtype:
    """The narrowest of uint16 and uint32 that holds every id of a vocabulary."""
    return np.dtype("<u2" if vocab_size <= 1 << 16 else "<u4")


def prepare(
    source: str | Path, tokenizer: Tokenizer, directory: str | Path, field: str = "text", progress: bool = True
) -> TokenFile:
    """Tokenize a source into a token file in `directory`, or open the one made before from the same.

    "The same" is decided by content: of the source, of the tokenizer, and the field. The ids are those of encoding every
    document whole, whatever its size; memory in use does not depend on it.

    Args:
        source: see `data_sources.open_source`; or a token file (`.tokens`), which is opened as it is.
        field: column of the text in JSON lines, parquet and hub data sets.
        progress: show a progress bar on standard error where the source is large.

    Raises:
        UserError: no such source, a bad row (named), no text in it, a token file of another tokenizer.
    """
    mine = tokenizer_fingerprint(tokenizer)
    if Path(source).suffix == ".tokens":
        found = TokenFile(source)
        if found.tokenizer != mine:
            raise UserError(f"{source} was made with another tokenizer; prepare its text again with this one")
        return found
    opened = open_source(source, field)
    fingerprint = _digest([FORMAT, mine, opened.identity])
    path = Path(directory) / f"{opened.name}-{fingerprint[:12]}.tokens"
    if path.exists():
        return TokenFile(path)
    width, head = id_type(tokenizer.vocab_size), dict(vocab_size=tokenizer.vocab_size, fingerprint=fingerprint, tokenizer=mine)
    with temporary_beside(path) as tmp, open(tmp, "wb") as file:
        file.write(b" " * HEADER)
        counts = dict(count=0, documents=0, text_bytes=0, max_id=-1)
        for ids in _encoded(_shown(opened, progress), tokenizer, counts):
            counts["count"] += len(ids)
            counts["max_id"] = max(counts["max_id"], int(ids.max(initial=-1)))
            if counts["max_id"] >= tokenizer.vocab_size:  # before narrowing, which would wrap it
                raise UserError(f"the tokenizer gave token id {counts['max_id']}, outside its vocabulary of {tokenizer.vocab_size} ids")
            file.write(ids.astype(width).tobytes())
        if not counts["documents"] or not counts["count"]:
            raise UserError(f"{source} holds no text: nothing to make tokens of")
        file.seek(0)
        file.write(json.dumps({"format": FORMAT, "dtype": width.name, "source": opened.name, **head, **counts}).ljust(HEADER).encode())
    return TokenFile(path)


def tokenizer_fingerprint(tokenizer: Tokenizer) -> str:
    """Changes when a text might get other ids."""
    return _digest([tokenizer.backend.to_str(), tokenizer.bos_id, list(tokenizer.eos_ids), tokenizer.adds_bos])


def _digest(what: Any) -> str:
    return hashlib.sha256(json.dumps(what).encode()).hexdigest()


def _shown(source: Source, progress: bool) -> Iterator[Piece]:
    """The source's pieces, with a progress bar where it takes long enough to wonder."""
    if not progress or source.size < SHOW_PROGRESS:
        yield from source.pieces()
        return
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(f"tokenizing {source.name}", total=1.0)
        for piece in source.pieces():
            bar.update(task, completed=piece.done)
            yield piece


# --- encoding in pieces -----------------------------------------------------------------------------------


def encode_text(tokenizer: Tokenizer, text: str) -> np.ndarray:
    """`tokenizer.encode(text, bos=False)` as [N] int64, in bounded memory and in parallel for long texts."""
    jobs = [part for part, _, _ in _parts([Piece(text, True, 1.0)], tokenizer)]
    ids = [np.asarray(row, np.int64) for group in _groups(jobs, len) for row in tokenizer.encode_batch(group, bos=False)]
    return np.concatenate(ids) if ids else np.zeros(0, np.int64)


def _encoded(pieces: Iterable[Piece], tokenizer: Tokenizer, counts: dict[str, int]) -> Iterator[np.ndarray]:
    """Ids of every document with the tokens around it, some at a time; counts documents and bytes."""
    front = [tokenizer.bos_id] if tokenizer.adds_bos else []
    back = list(tokenizer.eos_ids[:1])
    for group in _groups(_parts(pieces, tokenizer), lambda job: len(job[0])):
        for (text, begins, ends), ids in zip(group, tokenizer.encode_batch([job[0] for job in group], bos=False)):
            counts["documents"] += ends
            counts["text_bytes"] += len(text.encode())
            yield np.asarray((front if begins else []) + ids + (back if ends else []), np.int64)


def _parts(pieces: Iterable[Piece], tokenizer: Tokenizer) -> Iterator[tuple[str, bool, bool]]:
    """Parts of documents that can be encoded on their own: (text, begins a document, ends one)."""
    held, begins = "", True
    for piece in pieces:
        held += piece.text
        at = 0
        while len(held) - at > 2 * PIECE and (cut := _safe_cut(tokenizer, held, at + PIECE)):
            yield held[at : cut[0]], begins, False
            at, begins = cut[1], False
        held = held[at:]
        if piece.ends:
            if held:  # never empty after a cut
                yield held, begins, True
            held, begins = "", True


def _safe_cut(tokenizer: Tokenizer, text: str, limit: int, context: int = 200, tries: int = 2000) -> tuple[int, int] | None:
    """Where to end a part and begin the next so that the ids of the two are those of the whole; None if not found.

    Tokens depend on the text around them: a space belongs to the word that follows, sentencepiece puts a space in front
    of every text it encodes (so that the cut must swallow one). Rather than know every tokenizer's rules, look backwards
    from `limit` for a place where encoding the surroundings in two gives what encoding them at once does.
    """
    for end in range(limit, limit - tries, -1):
        left, right = text[end - context : end], text[end : end + context]
        begins = (0, 1) if right[0] == " " else (0,)
        whole, *halves = tokenizer.encode_batch([left + right, left, *(right[skip:] for skip in begins)], bos=False)
        for skip, half in zip(begins, halves[1:]):
            if halves[0] + half == whole:
                return end, end + skip
    return None


def _groups(items: Iterable[Any], size_of) -> Iterator[list[Any]]:
    """Lists of items of about TOGETHER characters."""
    group, size = [], 0
    for item in items:
        group.append(item)
        size += size_of(item)
        if size >= TOGETHER:
            yield group
            group, size = [], 0
    if group:
        yield group


# --- windows ----------------------------------------------------------------------------------------------


class Windows:
    """Batches of windows, by number: a pure function of (seed, index), so resuming needs the number alone.

    Batch m holds samples m * batch .. (m + 1) * batch - 1 of one endless stream, so two batches of 2 are one of 4, and a
    batch larger than the data simply reads on. A window is T inputs and the T tokens one later: N tokens have N - T starts.

    - random: each epoch cuts the tokens at a random offset into windows that do not overlap, and visits all of them in
      random order. So tokens are met evenly, at most once an epoch, and no cut is favoured (one window's worth of offset
      is kept free for that, if there are at least two windows).
    - sequential: in order, then from the beginning. Every token but the first is a label exactly once a round: the
      last window is moved back to end with the text, and labels it repeats are IGNORE.

    Args:
        tokens: a TokenFile, or ids in an array, tensor or list.
        document_ends: ids that end a document. If given, batches have `documents`, and the label that would lead from
            one document into the next is IGNORE.

    Raises:
        UserError: too few tokens for one window, or a setting that makes no sense.
    """

    def __init__(
        self,
        tokens: TokenFile | np.ndarray | Tensor | Sequence[int],
        seq_len: int,
        batch: int,
        seed: int = 0,
        order: str = "random",
        document_ends: Sequence[int] = (),
    ) -> None:
        self.tokens = tokens.tokens if isinstance(tokens, TokenFile) else np.asanyarray(tokens)
        self.vocab_size = tokens.vocab_size if isinstance(tokens, TokenFile) else None
        self.seq_len, self.batch, self.seed, self.order, self.document_ends = seq_len, batch, seed, order, tuple(document_ends)
        for name in ("seq_len", "batch"):
            if getattr(self, name) < 1:
                raise UserError(f"{name} must be at least 1, got {getattr(self, name)}")
        if order not in ("random", "sequential"):
            raise UserError(f"unknown order {order!r}; known: random, sequential")
        self.starts = len(self.tokens) - seq_len
        if self.starts < 1:
            raise UserError(
                f"{len(self.tokens)} tokens are too few for a window of seq_len {seq_len}, which needs {seq_len + 1}: "
                "give more text or a smaller seq_len"
            )

    def __len__(self) -> int:
        """Windows (not batches) in one epoch, or one round in order."""
        labels = len(self.tokens) - 1
        if self.order == "sequential":
            return -(-labels // self.seq_len)
        return max(1, labels // self.seq_len - 1)

    def __call__(self, index: int) -> Batch:
        """Batch `index`, from 0."""
        if index < 0:
            raise UserError(f"batches are numbered from 0, got {index}")
        rows, labels = [], []
        for sample in range(index * self.batch, (index + 1) * self.batch):
            start, repeated = self._place(sample)
            row = np.asarray(self.tokens[start : start + self.seq_len + 1], np.int64)
            if self.vocab_size is not None and row.max() >= self.vocab_size:
                where = f"token id {row.max()} at position {start + row.argmax()}"
                raise UserError(f"{where} is outside the vocabulary of {self.vocab_size} ids: the token file is damaged")
            rows.append(row[:-1])
            labels.append(np.where(np.arange(self.seq_len) < repeated, IGNORE, row[1:]))
        batch = Batch(torch.from_numpy(np.stack(rows)), torch.from_numpy(np.stack(labels)))
        if self.document_ends:
            ends = torch.isin(batch.inputs, torch.tensor(self.document_ends))
            batch.documents = ends.cumsum(1) - ends.long()  # the end token is its document's last
            batch.labels[ends] = IGNORE
        return batch

    def _place(self, sample: int) -> tuple[int, int]:
        """Start of a sample's window, and how many of its labels an earlier window had."""
        round_, k = divmod(sample, len(self))
        if self.order == "sequential":
            start = min(k * self.seq_len, self.starts - 1)
            return start, k * self.seq_len - start
        spare = self.starts - 1 - (len(self) - 1) * self.seq_len
        offset = mixed(self.seed, round_) % (spare + 1)
        return offset + self.seq_len * shuffled(k, len(self), mixed(self.seed, round_, 1)), 0


def mixed(*numbers: int) -> int:
    """A 64-bit number that looks random, from some integers (the finalizer of SplitMix64, Steele et al. 2014)."""
    x = 0
    for number in numbers:
        x = (x + number + 0x9E3779B97F4A7C15) % 2**64
        x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 % 2**64
        x = (x ^ x >> 27) * 0x94D049BB133111EB % 2**64
        x ^= x >> 31
    return x


def shuffled(k: int, n: int, key: int) -> int:
    """Entry k of a random permutation of 0 .. n - 1 that is nowhere stored.

    A Feistel network permutes the numbers of 2h bits: each round mixes one half into the other, which can be undone
    whatever the mixing is. Numbers from n on are sent through again until they fall below (cycle walking; Black and
    Rogaway 2002), which happens at once for at least one in four.
    """
    half = max(1, ((n - 1).bit_length() + 1) // 2)
    mask = (1 << half) - 1
    while True:
        left, right = k >> half, k & mask
        for turn in range(6):
            left, right = right, left ^ mixed(key, turn, right) & mask
        k = left << half | right
        if k < n:
            return k


# --- packing ----------------------------------------------------------------------------------------------


def pack(samples: Sequence[Sequence[int]], seq_len: int, trained: Sequence[Sequence[bool]] | None = None, pad_id: int = 0) -> Batch:
    """Several samples to a row, none cut, each one a document that sees nothing of the others.

    Each sample goes into the first row that has room. Labels follow lengths and never ids: the last token of a sample has
    no label, and neither has padding, which is a document of its own.

    Args:
        samples: token ids, at least 1 and at most seq_len each.
        trained: per sample, which of its tokens are to be learnt (as labels); default all.
        pad_id: what fills the rows' ends; any id will do.

    Returns:
        A Batch of as many rows [B, seq_len] as it takes, with documents.

    Raises:
        UserError: no sample, an empty one, or one longer than a row.
    """
    if not samples:
        raise UserError("no samples to pack")
    rows: list[list[int]] = []  # which samples are in each row
    free: list[int] = []
    for number, ids in enumerate(samples):
        if not 1 <= len(ids) <= seq_len:
            raise UserError(f"sample {number} has {len(ids)} tokens; a row holds 1 to {seq_len} (seq_len)")
        row = next((r for r, room in enumerate(free) if room >= len(ids)), len(rows))
        if row == len(rows):
            rows.append([])
            free.append(seq_len)
        rows[row].append(number)
        free[row] -= len(ids)
    inputs = torch.full((len(rows), seq_len), pad_id, dtype=torch.int64)
    labels = torch.full_like(inputs, IGNORE)
    documents = torch.full_like(inputs, -1)
    for r, numbers in enumerate(rows):
        at = 0
        for number in numbers:
            ids = torch.as_tensor(samples[number], dtype=torch.int64)
            stop = at + len(ids)
            inputs[r, at:stop], documents[r, at:stop] = ids, number
            kept = torch.ones(len(ids), dtype=torch.bool) if trained is None else torch.as_tensor(trained[number], dtype=torch.bool)
            labels[r, at : stop - 1] = torch.where(kept[1:], ids[1:], IGNORE)
            at = stop
    return Batch(inputs, labels, documents)
