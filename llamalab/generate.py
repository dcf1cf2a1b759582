"""Tokens from a model, one at a time.

    for token in generate(model, tokenizer.encode("Once upon"), 50, temperature=0.8, top_k=50, seed=0):
        ...

Three small steps, as in gpt-fast: `prefill` reads the prompt into the caches, `decode_one` adds one token,
`sample` turns logits into a token. Everything a run needs is an argument or a local: the model's own caches,
its mode (train or eval) and the process's random state are as before, also between two tokens.

A batch is ragged: rows are padded at their end, and since the slot of a token in the cache is its position,
a row's padding is overwritten by its own new tokens before it could be seen. So each row gets the tokens it
would get alone, whatever the others do.

Shapes: B rows, T tokens in this call, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from numbers import Integral

import torch
from torch import Tensor, nn

from llamalab.errors import UserError
from llamalab.sampling import Sampling
from llamalab.tokenizer import Tokenizer

CHUNK = 512  # prompt tokens per forward: bounds the mask [CHUNK, cache length] and the activations


# --- the iterator -----------------------------------------------------------------------------------------


def generate(
    model: nn.Module,
    prompt: Sequence[int] | Sequence[Sequence[int]] | Tensor,
    max_new_tokens: int,
    *,
    temperature: float = 0.0,
    top_k: int | None = None,
    top_p: float | None = None,
    min_p: float | None = None,
    repetition_penalty: float = 1.0,
    seed: int | Sequence[int] | None = None,
    stop_ids: Iterable[int] = (),
    stop_strings: Sequence[str] = (),
    tokenizer: Tokenizer | None = None,
    caches: Sequence[nn.Module] | None = None,
    cached: int = 0,
    chunk: int = CHUNK,
) -> Iterator[int] | Iterator[list[int | None]]:
    """Continue a prompt, or several.

    All arguments are checked here, before any compute; the work happens as the iterator is advanced.
    Generation ends at the first of: `max_new_tokens`; an end id, that is one of `model.config.eos_token_ids`,
    `tokenizer.eos_ids` and `stop_ids`; a stop string. The token that ends it is not yielded. (A stop string may
    begin inside an earlier token: `stream_text` cuts the text exactly.)

    Args:
        model: a Transformer; its weights decide device and dtype. Logits are sampled in float32.
        prompt: token ids: a list or a 1-D tensor; or a batch: a list of such, of any lengths, or a 2-D tensor.
        max_new_tokens: most tokens to yield for a row; 0 yields nothing.
        temperature, top_k, top_p, min_p, repetition_penalty: see `llamalab.sampling`.
        seed: row b draws from a generator of its own, seeded with seed + b, or with seed[b]; it therefore draws
            what it would draw alone with that seed, on any device. None: a fresh seed.
        stop_strings: needs `tokenizer`.
        caches: the caller's, from `model.make_caches`, at least (B, longest prompt + max_new_tokens) in size;
            default: made here in exactly that size.
        cached: the first `cached` tokens of every row are in `caches` already and are not computed again.
            At least one token must be left.
        chunk: prompt tokens per forward. It bounds memory and does not change the result.

    Returns:
        An iterator over token ids for one prompt. For a batch, over lists of B, where a finished row has None.

    Raises:
        UserError: an empty prompt, an id outside the vocabulary, more tokens than the model or the caches hold,
            a setting outside its range; while running, logits that are not numbers.
    """
    rows, single = _as_rows(prompt, model.config.vocab_size)
    sampling = Sampling(temperature, top_k, top_p, min_p, repetition_penalty)
    longest = max(len(row) for row in rows)
    _check_lengths(model, rows, max_new_tokens, caches, cached)
    if chunk < 1:
        raise UserError(f"chunk must be at least 1, got {chunk}")
    if stop_strings and tokenizer is None:
        raise UserError("stop_strings need the tokenizer: pass tokenizer=...")
    texts = [TextStream(tokenizer, stop_strings) for _ in rows] if stop_strings else None
    ends = {*model.config.eos_token_ids, *stop_ids, *(tokenizer.eos_ids if tokenizer is not None else ())}
    generators = _generators(seed, len(rows))

    def steps() -> Iterator[list[int | None]]:
        if max_new_tokens == 0:
            return
        held = model.make_caches(len(rows), longest + max_new_tokens) if caches is None else caches
        ensure_table(model, longest + max_new_tokens)
        device = model.tok_embeddings.weight.device
        seen = _tokens_seen(rows, model.config.vocab_size, device) if repetition_penalty != 1 else None
        lengths = torch.tensor([len(row) for row in rows], device=device)
        done, drawn = [False] * len(rows), None
        for step in range(max_new_tokens):
            with inference(model):
                if drawn is None:
                    logits = prefill(model, rows, held, cached, chunk)
                else:
                    logits = decode_one(model, drawn.to(device), lengths + step - 1, held)
                drawn = sample(logits, sampling, generators, seen)
            tokens = drawn.tolist()
            for b, token in enumerate(tokens):
                if not done[b]:  # a finished row runs on in its own slots, unheard
                    done[b] = token in ends or (texts is not None and texts[b].ends_with(token))
                if seen is not None:
                    seen[b, token] = True
            if all(done):
                return
            yield [None if finished else token for token, finished in zip(tokens, done)]

    return (row_tokens[0] for row_tokens in steps()) if single else steps()


def prefill(model: nn.Module, rows: Sequence[Sequence[int]], caches: Sequence[nn.Module], cached: int = 0, chunk: int = CHUNK) -> Tensor:
    """Read prompts into the caches; logits [B, V] after the last token of each row.

    The rows' first `cached` tokens are there already. Only the last tokens meet the head.
    """
    device = model.tok_embeddings.weight.device
    lengths = [len(row) for row in rows]
    padded = torch.tensor([[*row, *[0] * (max(lengths) - len(row))] for row in rows], device=device)  # [B, T]
    last: list[Tensor] = [None] * len(rows)
    for start in range(cached, max(lengths), chunk):
        positions = torch.arange(start, min(start + chunk, max(lengths)), device=device)
        hidden = model.hidden(padded[:, start : start + chunk], positions, caches)  # [B, t, dim]
        for b, n in enumerate(lengths):
            if start < n <= start + chunk:
                last[b] = hidden[b, n - 1 - start]
    return model.output(torch.stack(last))


def decode_one(model: nn.Module, tokens: Tensor, positions: Tensor, caches: Sequence[nn.Module]) -> Tensor:
    """Read one token per row into the caches; logits [B, V] of the next. tokens, positions [B] int64."""
    return model.output(model.hidden(tokens[:, None], positions[:, None], caches)[:, 0])


def sample(logits: Tensor, sampling: Sampling, generators: Sequence[torch.Generator], seen: Tensor | None = None) -> Tensor:
    """Draw one token per row.

    One uniform number per row, from the row's own CPU generator, is looked up in the row's cumulative
    probabilities: no row's draw depends on another row, and a seed means the same on every device.

    Args:
        logits: [B, V], any float dtype.
        generators: B of them; not read when `sampling.greedy`.
        seen: [B, V] bool, tokens the repetition penalty falls on.

    Returns:
        [B] int64.
    """
    if logits.device.type == "mps":
        logits = logits.cpu()  # MPS has no float64
    scores = warp(logits, sampling, seen)
    if sampling.greedy:
        return scores.argmax(-1)  # documented to be the first of equal maxima
    mass = scores.softmax(-1).cumsum(-1, dtype=torch.float64)  # [B, V]
    uniform = torch.stack([torch.rand(1, dtype=torch.float64, generator=g) for g in generators]).to(mass.device)  # [B, 1] in [0, 1)
    # torch.rand is at most 1 - 2^-53, and any number times that rounds to a smaller one: some entry is above the product,
    # and the first such has probability > 0.
    return torch.searchsorted(mass, uniform * mass[:, -1:], right=True).squeeze(-1)


def warp(logits: Tensor, sampling: Sampling, seen: Tensor | None = None) -> Tensor:
    """Penalty, temperature and filters: [B, V] logits of any float dtype -> float32 scores, -inf where filtered out.

    With temperature 0 only the penalty is applied. Otherwise each row's largest score is 0.

    Raises:
        UserError: a row has NaN or +inf, or nothing above -inf.
    """
    scores = logits.float()
    if sampling.repetition_penalty != 1 and seen is not None:
        penalty = sampling.repetition_penalty
        scores = torch.where(seen, torch.where(scores < 0, scores * penalty, scores / penalty), scores)
    best = scores.amax(-1, keepdim=True)  # NaN if there is one
    if not best.isfinite().all():
        raise UserError("the model's logits are not numbers (NaN or infinite): broken weights, or overflow in float16; try float32")
    if sampling.temperature == 0:
        return scores
    # The largest becomes 0 before the division, so that no temperature, however small, makes inf - inf.
    scores = (scores - best) / max(sampling.temperature, torch.finfo(torch.float32).tiny)
    if sampling.top_k is not None and sampling.top_k < scores.shape[-1]:
        scores = scores.masked_fill(scores < scores.topk(sampling.top_k).values[..., -1:], -torch.inf)
    if sampling.top_p is not None and sampling.top_p < 1:
        ordered, order = scores.sort(descending=True, stable=True)
        share = ordered.softmax(-1)
        likelier = share.cumsum(-1) - share  # probability of all tokens before this one; 0 for the first, which always stays
        beyond = likelier >= sampling.top_p
        scores = scores.masked_fill(beyond.scatter(-1, order, beyond), -torch.inf)
    if sampling.min_p:
        scores = scores.masked_fill(scores < math.log(sampling.min_p), -torch.inf)  # the likeliest has score 0
    return scores


# --- text -------------------------------------------------------------------------------------------------


class TextStream:
    """Token ids in, text out, never past a stop string.

    Text that might be the beginning of a stop string is held back until it is known not to be. The stop that
    is complete first wins (of two that end together, the longer), however the text is cut into tokens.

    Args:
        after: tokens the text continues, so that it is decoded as their continuation. Sentencepiece drops the
            space before a text's first word; without `after`, it would drop the one between prompt and answer.
    """

    def __init__(self, tokenizer: Tokenizer, stop_strings: Sequence[str] = (), after: Sequence[int] = ()) -> None:
        stop_strings = (stop_strings,) if isinstance(stop_strings, str) else stop_strings
        if "" in stop_strings:
            raise UserError("a stop string must not be empty")
        self.stopped = False
        self._stops = tuple(stop_strings)
        self._tokens = tokenizer.stream()
        self._held = ""
        for token in after:
            self._tokens.push(token)

    def push(self, token: int) -> str:
        """Text that is now certain; "" while a character or a stop string is incomplete, and after a stop."""
        return self._release(self._tokens.push(token))

    def flush(self) -> str:
        """The end of the text, with what was held back."""
        text = self._release(self._tokens.flush())
        if not self.stopped:
            text, self._held = text + self._held, ""
        return text

    def ends_with(self, token: int) -> bool:
        """Push a token, keep no text; whether a stop string is complete."""
        self.push(token)
        return self.stopped

    def _release(self, text: str) -> str:
        if self.stopped:
            return ""
        self._held += text
        found = [(at + len(stop), at) for stop in self._stops if (at := self._held.find(stop)) >= 0]
        if found:
            self.stopped = True
            return self._held[: min(found)[1]]
        longest = max((len(stop) for stop in self._stops), default=1) - 1
        keep = next((n for n in range(min(longest, len(self._held)), 0, -1) if self._may_begin(self._held[-n:])), 0)
        cut = len(self._held) - keep
        text, self._held = self._held[:cut], self._held[cut:]
        return text

    def _may_begin(self, tail: str) -> bool:
        return any(stop.startswith(tail) for stop in self._stops)


def stream_text(
    tokenizer: Tokenizer, tokens: Iterable[int], stop_strings: Sequence[str] = (), after: Sequence[int] = ()
) -> Iterator[str]:
    """The text of `generate(...)`, piece by piece, up to the first stop string; joined, it is the whole text. See `TextStream`."""
    text = TextStream(tokenizer, stop_strings, after)
    for token in tokens:
        if piece := text.push(token):
            yield piece
        if text.stopped:
            return
    if piece := text.flush():
        yield piece


def common_prefix(a: Sequence[int], b: Sequence[int]) -> int:
    """How many tokens a and b begin with in common: what of a conversation a kept cache holds already."""
    return next((i for i, (x, y) in enumerate(zip(a, b)) if x != y), min(len(a), len(b)))


# --- checks and set-up ------------------------------------------------------------------------------------


@contextmanager
def inference(model: nn.Module) -> Iterator[None]:
    """No gradients, eval mode; both as before afterwards, module by module. Not to be held across a yield: it would leak to the caller."""
    training = [module for module in model.modules() if module.training]
    for module in training:
        module.training = False
    try:
        with torch.no_grad():
            yield
    finally:
        for module in training:
            module.training = True


def _as_rows(prompt: Sequence[int] | Sequence[Sequence[int]] | Tensor, vocab_size: int) -> tuple[list[list[int]], bool]:
    """The prompt as rows of ids, and whether it was a single one."""
    if isinstance(prompt, str):
        raise UserError("the prompt must be token ids, got text: encode it with the tokenizer")
    if not isinstance(prompt, Iterable):
        raise UserError(f"the prompt must be a list of token ids, got {type(prompt).__name__}")
    items = [item.tolist() if hasattr(item, "tolist") else item for item in prompt]  # tensors and numpy arrays become lists
    single = not items or not isinstance(items[0], Sequence)
    rows = [items] if single else [list(row) for row in items]
    for b, row in enumerate(rows):
        where = "the prompt" if single else f"row {b} of the prompts"
        if not row:
            raise UserError(f"{where} is empty: give at least one token, for instance the tokenizer's bos_id")
        for token in row:
            if not isinstance(token, Integral) or not 0 <= token < vocab_size:
                raise UserError(f"{where} has token id {token!r}; ids of this model are integers from 0 to {vocab_size - 1}")
    return rows, single


def _check_lengths(model: nn.Module, rows: list[list[int]], new: int, caches: Sequence[nn.Module] | None, cached: int) -> None:
    lengths, limit = [len(row) for row in rows], model.config.max_length
    longest = max(lengths)
    if not isinstance(new, Integral) or new < 0:
        raise UserError(f"max_new_tokens must be a whole number, at least 0, got {new}")
    if limit is not None and longest + new > limit:
        raise UserError(f"prompt of {longest} tokens + {new} new ones = {longest + new}, but this model's limit is {limit} tokens")
    if caches is not None:
        room, capacity = caches[0].max_batch_size, caches[0].max_seq_length
        if len(rows) > room or longest + new > capacity:
            raise UserError(f"{len(rows)} rows of up to {longest} + {new} tokens, but the caches hold {room} rows of {capacity} tokens")
    if cached and caches is None:
        raise UserError(f"cached={cached} tokens, but no caches were given")
    if not 0 <= cached < min(lengths):
        raise UserError(f"cached={cached} must leave at least one token of each prompt; the shortest has {min(lengths)}")
    if limit is None and longest + new > model.config.block_size and len(set(lengths)) > 1:
        raise UserError(
            f"dynamic RoPE scaling depends on a row's length past {model.config.block_size} tokens, so rows of different "
            f"lengths (up to {longest} + {new} tokens) cannot share a batch; generate them one by one"
        )


def ensure_table(model: nn.Module, length: int) -> None:
    """Make the RoPE table, or make it longer; the model's own caches stay what they are.

    With dynamic scaling the table in use follows the caches' length, so any table will do.
    """
    if model.freqs_cis is None or (model.config.max_length is not None and model.max_seq_length < length):
        own = model.caches
        model.setup_caches(1, length, training=True)
        model.caches = own


def _generators(seed: int | Sequence[int] | None, n: int) -> list[torch.Generator]:
    generators = [torch.Generator() for _ in range(n)]
    seeds = [None if seed is None else seed + b for b in range(n)] if seed is None or isinstance(seed, int) else list(seed)
    if len(seeds) != n:
        raise UserError(f"{len(seeds)} seeds for {n} prompts")
    for generator, number in zip(generators, seeds):
        if number is None:
            generator.seed()
        else:
            generator.manual_seed(number)
    return generators


def _tokens_seen(rows: list[list[int]], vocab_size: int, device: torch.device) -> Tensor:
    """[B, V] bool: which tokens stand in each row."""
    seen = torch.zeros(len(rows), vocab_size, dtype=torch.bool, device=device)
    for b, row in enumerate(rows):
        seen[b, torch.tensor(row, device=device)] = True
    return seen
