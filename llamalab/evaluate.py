"""How well a model predicts: perplexity and bits per byte of a text, and multiple choice.

    found = score_text(model, tokenizer, text, seq_len=1024, stride=512)
    found.perplexity, found.bits_per_byte
    multiple_choice(model, tokenizer, read_questions("piqa.jsonl")).per_byte

Everything is summed, in float64, over tokens, and divided once: no result is a mean of means, and the batch size changes
nothing but the last digits. Nothing here touches random state, gradients, or the model's own caches, and all logits of a
batch are never held at once.

Shapes: B rows, T tokens, V vocabulary.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor, nn

from llamalab.data import IGNORE, TokenFile, encode_text
from llamalab.data_sources import json_rows
from llamalab.errors import UserError
from llamalab.generate import common_prefix, ensure_table, inference
from llamalab.tokenizer import Tokenizer

LOGITS = 1 << 24  # entries of the block of logits that is held: 64 MB of float32
_SLOT = re.compile(r"\{(question|context)\}")
Item = TypeVar("Item")


def perplexity(nll: float, tokens: int) -> float:
    """exp of the mean negative log-likelihood. nll in nats."""
    mean = nll / tokens
    return math.exp(mean) if mean < 709 else math.inf  # float64 ends at e^709.8


def bits_per_byte(nll: float, n_bytes: int) -> float:
    """Negative log-likelihood per byte of the text, in bits: comparable between tokenizers. nll in nats."""
    return nll / math.log(2) / n_bytes


@dataclass(frozen=True)
class Score:
    """Summed negative log-likelihood of a text."""

    nll: float  # nats, summed in float64
    tokens: int  # scored
    bytes: int | None = None  # of UTF-8 text that the scored tokens stand for

    @property
    def nats_per_token(self) -> float:
        return self.nll / self.tokens

    @property
    def perplexity(self) -> float:
        return perplexity(self.nll, self.tokens)

    @property
    def bits_per_byte(self) -> float | None:
        return None if self.bytes is None else bits_per_byte(self.nll, self.bytes)


# --- text -------------------------------------------------------------------------------------------------


def score(
    model: nn.Module,
    tokens: TokenFile | np.ndarray | Tensor | Sequence[int],
    seq_len: int,
    stride: int | None = None,
    batch: int = 8,
    progress: bool = False,
) -> Score:
    """Negative log-likelihood of every token but the first, each scored once.

    A window of seq_len inputs moves on by `stride`. The first scores all its tokens, every other one its last `stride`,
    so that each token is predicted from at least seq_len - stride tokens before it (or all there are). The last window,
    which may be shorter, is scored too.

    Args:
        tokens: [N] ids. The first is given and not predicted: put a BOS in front to score a whole text (`score_text`).
        stride: at most seq_len, the default, which is the fastest; a smaller one gives more context.
        batch: windows computed at once.
        progress: a bar on standard error.

    Raises:
        UserError: no token to score, one outside the vocabulary, or seq_len or stride out of range.
    """
    ids = tokens.tokens if isinstance(tokens, TokenFile) else np.asanyarray(tokens)
    stride = seq_len if stride is None else stride
    limit = model.config.max_length
    if seq_len < 1 or (limit is not None and seq_len > limit):
        raise UserError(f"seq_len must be from 1 to {limit or 'any length'} (the model's limit), got {seq_len}")
    if not 1 <= stride <= seq_len:
        raise UserError(f"stride must be from 1 to seq_len ({seq_len}), or tokens would be left out; got {stride}")
    if batch < 1:
        raise UserError(f"batch must be at least 1, got {batch}")
    if len(ids) < 2:
        raise UserError(f"no tokens to score: {len(ids)} given, and the first is never predicted")
    if not 0 <= ids.min() <= ids.max() < model.config.vocab_size:
        raise UserError(f"token ids from {ids.min()} to {ids.max()}, but the model's vocabulary has {model.config.vocab_size} ids")

    labels = len(ids) - 1
    windows = 1 + -(-max(0, labels - seq_len) // stride)
    width = min(seq_len, labels)  # of every batch: padded rows give what they would give alone
    ensure_table(model, width)
    nll = 0.0
    for first in _shown(range(0, windows, batch), "scoring", progress):
        rows = range(first, min(first + batch, windows))
        inputs = torch.zeros(len(rows), width, dtype=torch.int64)
        targets = torch.full((len(rows), width), IGNORE)
        for r, window in enumerate(rows):
            start = window * stride
            ids_here = torch.from_numpy(np.asarray(ids[start : start + width + 1], np.int64))
            n = len(ids_here) - 1
            seen = 0 if window == 0 else seq_len - stride
            inputs[r, :n], targets[r, seen:n] = ids_here[:-1], ids_here[seen + 1 :]
        with inference(model):
            nll -= token_scores(model, inputs, targets)[0].sum(dtype=torch.float64).item()
    return Score(nll, labels)


def score_text(
    model: nn.Module, tokenizer: Tokenizer, text: str, seq_len: int, stride: int | None = None, batch: int = 8, progress: bool = False
) -> Score:
    """`score` of a text, with its bytes.

    If the tokenizer adds a BOS, it stands in front and every token of the text is scored. If not, the first token is not
    scored (nothing precedes it), and its bytes are not counted. No end token is scored.

    Raises:
        UserError: as `score`; also an empty text.
    """
    ids, n_bytes = encode_text(tokenizer, text), len(text.encode())
    if tokenizer.adds_bos:
        ids = np.concatenate([[tokenizer.bos_id], ids])
    elif len(ids):
        first = tokenizer.token_bytes(int(ids[0]))
        # a sentencepiece token begins with a space that the text need not have
        n_bytes -= len(first if text.encode().startswith(first) else first.removeprefix(b" "))
    found = score(model, ids, seq_len, stride, batch, progress)
    return Score(found.nll, found.tokens, n_bytes)


def token_scores(model: nn.Module, inputs: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Log-probability of each label, and whether it is the likeliest token.

    Args:
        inputs: [B, T] ids.
        labels: [B, T] ids, or IGNORE.

    Returns:
        [B, T] float32 in nats, 0 where IGNORE, and [B, T] bool, True where IGNORE; on the CPU.
    """
    device = model.tok_embeddings.weight.device
    kept = labels.flatten() != IGNORE
    hidden = model.hidden(inputs.to(device)).flatten(0, 1)[kept.to(device)]  # [n, dim]
    wanted = labels.flatten()[kept].to(device)
    scores, best = torch.zeros(labels.numel()), torch.ones(labels.numel(), dtype=torch.bool)
    rows = max(1, LOGITS // model.config.vocab_size)
    found = [_label_scores(model.output(h).float(), label) for h, label in zip(hidden.split(rows), wanted.split(rows))]
    scores[kept] = torch.cat([s for s, _ in found]).cpu()
    best[kept] = torch.cat([b for _, b in found]).cpu()
    return scores.view(labels.shape), best.view(labels.shape)


def _label_scores(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """[n, V] float32, [n] -> log-probability [n], whether the label has the largest logit [n]."""
    at_label = logits.gather(1, labels[:, None]).squeeze(1)
    return at_label - logits.logsumexp(-1), at_label >= logits.amax(-1)


# --- continuations ----------------------------------------------------------------------------------------


def continuation_scores(
    model: nn.Module, requests: Sequence[tuple[list[int], list[int]]], batch: int = 8, progress: bool = False
) -> list[tuple[float, bool]]:
    """Log-probability of each continuation after its context, and whether greedy decoding would give it.

    Rows are padded at their end, which causal attention never looks at, and long ones are grouped with long ones.

    Args:
        requests: (context ids, continuation ids), neither empty.
        batch: rows computed at once.

    Returns:
        (sum over the continuation's tokens in nats, all of them the likeliest), in the order of requests.

    Raises:
        UserError: an empty part, or more tokens than the model's limit.
    """
    limit = model.config.max_length or math.inf
    for number, (context, continuation) in enumerate(requests):
        if not context or not continuation:
            raise UserError(f"request {number} has {len(context)} context and {len(continuation)} continuation tokens; both need one")
        if len(context) + len(continuation) - 1 > limit:
            raise UserError(f"request {number} needs {len(context) + len(continuation) - 1} input tokens; the model's limit is {limit}")
    order = sorted(range(len(requests)), key=lambda i: -sum(map(len, requests[i])))
    if order:
        ensure_table(model, sum(map(len, requests[order[0]])) - 1)
    found: list[Any] = [None] * len(requests)
    for first in _shown(range(0, len(order), batch), "scoring", progress):
        rows = order[first : first + batch]
        width = sum(map(len, requests[rows[0]])) - 1
        inputs = torch.zeros(len(rows), width, dtype=torch.int64)
        labels = torch.full((len(rows), width), IGNORE)
        for r, number in enumerate(rows):
            context, continuation = requests[number]
            whole = torch.tensor(context + continuation)
            inputs[r, : len(whole) - 1] = whole[:-1]
            labels[r, len(context) - 1 : len(whole) - 1] = whole[len(context) :]
        with inference(model):
            scores, best = token_scores(model, inputs, labels)
        sums = scores.sum(-1, dtype=torch.float64).tolist()
        for r, number in enumerate(rows):
            found[number] = (sums[r], bool(best[r].all()))
    return found


def split_encoding(tokenizer: Tokenizer, context: str, continuation: str) -> tuple[list[int], list[int]]:
    """Ids of context + continuation, encoded as one text and cut where they stop being those of the context alone.

    A token that straddles the border so belongs to the continuation, and no id is one the whole text would not have.
    """
    whole = tokenizer.encode(context + continuation)
    cut = min(common_prefix(whole, tokenizer.encode(context)), len(whole) - 1)
    return whole[:cut], whole[cut:]


# --- multiple choice --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Question:
    """A text to continue, and the ways to; `where` names the row it came from."""

    context: str
    choices: tuple[str, ...]
    answer: int  # index into choices
    where: str = "a question"


@dataclass(frozen=True)
class Accuracy:
    """Share of questions whose right choice scores best (the first of equals), under three scores of a choice."""

    questions: int
    per_byte: float  # log-probability / bytes of the choice: the one to quote ("acc_norm" in lm-eval)
    raw: float  # log-probability ("acc"), which favours short choices
    per_token: float  # log-probability / tokens
    chance: float  # of guessing

    @property
    def standard_error(self) -> float:
        """Of per_byte, from the number of questions."""
        return math.sqrt(self.per_byte * (1 - self.per_byte) / self.questions)


def read_questions(path: str | Path, limit: int | None = None, prompt: str | None = None) -> list[Question]:
    """Questions from JSON lines: {"question" and/or "context": text, "choices": [text, ...], "answer": ...}.

    answer is the index of the right choice (from 0), its text, or its letter (A is the first); a text that is one of the
    choices goes before a letter. Other fields are not looked at. A question alone, or a context alone, is a text that the
    choices continue. A row with both is asked: "Q: {context} {question}\\nA:".

    Args:
        limit: read only the first rows.
        prompt: what the choices continue instead, with {question} and {context} for the row's fields.

    Raises:
        UserError: no such file, no rows, or a bad row: file, line and field are named.
    """
    if prompt is not None and not _SLOT.search(prompt):
        raise UserError(f"the prompt must contain {{question}} or {{context}}, got {prompt!r}")
    if limit is not None and limit < 1:
        raise UserError(f"limit must be at least 1, got {limit}")
    questions = []
    for where, row, _ in json_rows(path):
        if limit is not None and len(questions) == limit:
            break
        if not isinstance(row, dict):
            raise UserError(f"{where}: expected an object, got {type(row).__name__}")
        choices = row.get("choices")
        if not isinstance(choices, list) or len(choices) < 2 or not all(isinstance(c, str) and c.strip() for c in choices):
            raise UserError(f"{where}: field 'choices' must be a list of two or more texts, got {choices!r}")
        answer = _answer_index(row, choices, where)
        questions.append(Question(_context(row, prompt, where), tuple(c.strip() for c in choices), answer, where))
    if not questions:
        raise UserError(f"{path} holds no questions")
    return questions


def _context(row: dict[str, Any], prompt: str | None, where: str) -> str:
    given = {name: row[name] for name in ("question", "context") if name in row}
    for name, text in given.items():
        if not isinstance(text, str) or not text.strip():
            raise UserError(f"{where}: field {name!r} must be a text, got {text!r}")
    if not given:
        raise UserError(f"{where} has neither a field 'question' nor 'context'; it has: {', '.join(row)}")
    if prompt is None:
        prompt = "Q: {context} {question}\nA:" if len(given) == 2 else "{" + next(iter(given)) + "}"
    asked = set(_SLOT.findall(prompt))
    if asked - given.keys():
        raise UserError(f"{where} has no field {(asked - given.keys()).pop()!r}, which the prompt {prompt!r} asks for")
    return _SLOT.sub(lambda slot: given[slot[1]].strip(), prompt).rstrip()


def _answer_index(row: dict[str, Any], choices: list[str], where: str) -> int:
    answer, stripped = row.get("answer"), [choice.strip() for choice in choices]
    if isinstance(answer, int) and not isinstance(answer, bool) and 0 <= answer < len(choices):
        return answer
    if isinstance(answer, str):
        if stripped.count(answer.strip()) == 1:
            return stripped.index(answer.strip())
        letter = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"[: len(choices)].find(answer.strip())
        if len(answer.strip()) == 1 and letter >= 0:
            return letter
    last = chr(ord("A") + len(choices) - 1)
    raise UserError(
        f"{where}: field 'answer' must be an index from 0 to {len(choices) - 1}, a letter from A to {last}, "
        f"or the text of one choice, got {answer!r}"
    )


def multiple_choice(
    model: nn.Module, tokenizer: Tokenizer, questions: Sequence[Question], batch: int = 8, progress: bool = False
) -> Accuracy:
    """Zero-shot: the answer is the choice whose text is likeliest after the context and a space.

    Raises:
        UserError: a question longer than the model's limit; named before any compute.
    """
    if not questions:
        raise UserError("no questions to answer")
    limit = model.config.max_length or math.inf
    requests = []
    for question in questions:
        for choice in question.choices:
            context, continuation = split_encoding(tokenizer, question.context, " " + choice)
            if not context:
                raise UserError(f"{question.where}: the context is one token with its choice, so nothing precedes what is to be scored")
            if len(context) + len(continuation) - 1 > limit:
                raise UserError(f"{question.where}: {len(context) + len(continuation)} tokens, but the model's limit is {limit}")
            requests.append((context, continuation))
    results = iter(zip(continuation_scores(model, requests, batch, progress), requests))
    right = dict.fromkeys(("per_byte", "raw", "per_token"), 0)
    for question in questions:
        found = [(choice, *next(results)) for choice in question.choices]
        values = {
            "per_byte": [logprob / len(choice.encode()) for choice, (logprob, _), _ in found],
            "raw": [logprob for _, (logprob, _), _ in found],
            "per_token": [logprob / len(continuation) for _, (logprob, _), (_, continuation) in found],
        }
        for name, scores in values.items():
            right[name] += scores.index(max(scores)) == question.answer
    n = len(questions)
    chance = sum(1 / len(question.choices) for question in questions) / n
    return Accuracy(n, **{name: count / n for name, count in right.items()}, chance=chance)


def _shown(items: Iterable[Item], what: str, progress: bool) -> Iterable[Item]:
    """The items, with a progress bar on standard error."""
    if not progress:
        return items
    from rich.console import Console
    from rich.progress import track

    return track(items, what, console=Console(stderr=True), transient=True)
