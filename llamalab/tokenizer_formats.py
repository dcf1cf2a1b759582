"""Every tokenizer format, read into one form: a `tokenizers.Tokenizer` and a few ids (`Parts`).

    sentencepiece   tokenizer.model, a protobuf (Llama 1 and 2, Mistral): BPE over characters, bytes for the rest
    tiktoken        tokenizer.model, lines of base64 and a rank (Meta's Llama 3): BPE over bytes
    GGUF            tokenizer.ggml.*: either of the two
    bytes           each byte is its own token

Both kinds of BPE give a piece a rank and always join the pair whose union ranks best, the leftmost first. `tokenizers`
wants a list of merges instead; `merges_of` writes down every pair whose union is a piece, best rank first. Files are
parsed here, by their published layouts (sentencepiece_model.proto, ggml's gguf.md), so none of them needs a package,
and a vocabulary of 128,000 loads in about a second.
"""

from __future__ import annotations

import base64
import mmap
import re
import struct
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

from llamalab.errors import UserError

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)  # types of a piece, in sentencepiece and in GGUF
SPACE = "\u2581"  # sentencepiece's visible space
END_OF_TEXT = "<|endoftext|>"

_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_TEKKEN = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)

#: How text is cut before byte-level BPE: each pattern cuts the pieces the one before it left.
PATTERNS: dict[str, tuple[str, ...]] = {
    "gpt-2": (_GPT2,),
    "smollm": (r"\p{N}", _GPT2),  # digits one by one
    "llama-bpe": (_LLAMA3,),
    "qwen2": (_LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}"),),
    "tekken": (_TEKKEN,),
    "deepseek-coder": (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", "[一-龥ࠀ-一가-퟿]+", r"\p{N}"),
    "default": (r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", r"[0-9][0-9][0-9]"),  # what llama.cpp does where a file names none
}
#: Other names under which GGUF files ask for one of these (llama.cpp, llama-vocab.cpp)
_ALIASES = {
    **dict.fromkeys(("phi-2", "mpt", "olmo", "jais"), "gpt-2"),
    **dict.fromkeys(("starcoder", "refact", "command-r", "codeshell", "minerva-7b"), "smollm"),
    **dict.fromkeys(("llama3", "llama-v3", "falcon3", "smaug-bpe", "dbrx"), "llama-bpe"),
    **dict.fromkeys(("deepseek-r1-qwen", "stablelm2", "megrez"), "qwen2"),
}
#: GGUF pre-tokenizers that take a whole word found in the vocabulary as it is, and add BOS unless the file says otherwise
_WHOLE_WORDS = ("llama-bpe", "llama3", "llama-v3", "falcon3", "tekken")
#: GGUF has room for one end id, so files converted from chat models lose the others: these names end a turn or a text
_END_NAMES = ("<|eot_id|>", "<|eom_id|>", "<|im_end|>", "<|end_of_text|>", END_OF_TEXT)


@dataclass
class Parts:
    """What a tokenizer is, whatever file it came from. Ids are None where the files name none."""

    backend: Tokenizer
    bos_id: int | None = None
    eos_ids: tuple[int, ...] = ()  # the tokenizer's own end token first
    pad_id: int | None = None
    unk_id: int | None = None
    adds_bos: bool = False
    templates: dict[str, str] = field(default_factory=dict)  # chat templates by name; "default" is the usual one


# --- BPE ----------------------------------------------------------------------------------------------


def merges_of(ranked: Iterable[str], pieces: dict[str, int]) -> list[tuple[str, str]]:
    """Every pair of pieces whose union is a piece, in the order of `ranked` (the unions, best first)."""
    merges = []
    for union in ranked:
        pairs = [(union[:cut], union[cut:]) for cut in range(1, len(union))]
        pairs = [pair for pair in pairs if pair[0] in pieces and pair[1] in pieces]
        merges += sorted(pairs, key=lambda pair: (pieces[pair[0]], pieces[pair[1]]))
    return merges


def byte_alphabet() -> dict[int, str]:
    """Byte-level BPE's printable stand-in for each byte (GPT-2): itself where printable, else a letter from U+0100 on."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [b for b in range(256) if b not in printable]
    return {b: chr(b) for b in printable} | {b: chr(256 + i) for i, b in enumerate(others)}


def byte_level_bpe(vocab: dict[str, int], merges: list[tuple[str, str]], patterns: Iterable[str], whole_words: bool = False) -> Tokenizer:
    """BPE over bytes. `vocab` and `merges` are in the letters of `byte_alphabet`; `patterns` cut the text, see PATTERNS."""
    backend = Tokenizer(models.BPE(vocab, merges, ignore_merges=whole_words))
    splits = [pre_tokenizers.Split(Regex(pattern), behavior="isolated") for pattern in patterns]
    backend.pre_tokenizer = pre_tokenizers.Sequence([*splits, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    backend.decoder = decoders.ByteLevel()
    return backend


def bytes_tokenizer() -> Parts:
    """Id = byte for the 256 bytes, and one control token, <|endoftext|> = 256, that begins and ends a document."""
    vocab = {letter: byte for byte, letter in byte_alphabet().items()}
    backend = byte_level_bpe(vocab, [], ())
    backend.add_special_tokens([AddedToken(END_OF_TEXT, normalized=False, special=True)])
    return Parts(backend, bos_id=256, eos_ids=(256,))


# --- tokenizer.model: sentencepiece or tiktoken ---------------------------------------------------------


def read_model_file(path: Path) -> Parts:
    """A file named tokenizer.model, whichever of the two kinds its first bytes show.

    Raises:
        UserError: neither kind, or a model of the kind that is not supported.
    """
    content = path.read_bytes()
    if re.match(rb"[A-Za-z0-9+/]+=* \d+\r?\n", content):
        return parse_tiktoken(content, str(path))
    if content[:1] == b"\x0a":  # field 1, length-delimited: the first piece
        return parse_sentencepiece(content, str(path))
    raise UserError(f"{path} is neither a sentencepiece model nor a tiktoken file (it begins with {content[:12]!r})")


def parse_tiktoken(content: bytes, name: str) -> Parts:
    """Meta's Llama 3 file: 128,000 byte strings with their ranks. The 256 control tokens are not in it; their names
    and order are those of Meta's `llama_models`. All that end a turn or a text are end tokens, as there.

    Raises:
        UserError: a malformed line, or a number of ranks other than Llama 3's.
    """
    ranks: dict[bytes, int] = {}
    for number, line in enumerate(content.splitlines(), start=1):
        try:
            token, rank = line.split()
            ranks[base64.b64decode(token, validate=True)] = int(rank)
        except ValueError:
            raise UserError(f"{name}, line {number}: expected base64 and a rank, got {line[:60]!r}") from None
    if sorted(ranks.values()) != list(range(128_000)):
        raise UserError(f"{name} holds {len(ranks)} ranks; of tiktoken files only Llama 3's 128000 are supported (use tokenizer.json)")
    parts = Parts(byte_bpe_of_ranks(ranks, PATTERNS["llama-bpe"]), adds_bos=True)
    named = ["begin_of_text", "end_of_text", "reserved_special_token_0", "reserved_special_token_1", "finetune_right_pad_id", "step_id",
             "start_header_id", "end_header_id", "eom_id", "eot_id", "python_tag", "image"]
    named += [f"reserved_special_token_{2 + i}" for i in range(256 - len(named))]
    parts.backend.add_special_tokens([AddedToken(f"<|{text}|>", normalized=False, special=True) for text in named])
    ids = {text: len(ranks) + i for i, text in enumerate(named)}
    parts.bos_id, parts.pad_id = ids["begin_of_text"], ids["finetune_right_pad_id"]
    parts.eos_ids = (ids["end_of_text"], ids["eom_id"], ids["eot_id"])
    return parts


def byte_bpe_of_ranks(ranks: dict[bytes, int], patterns: Iterable[str]) -> Tokenizer:
    """tiktoken's encoding of byte strings by rank, which are also their ids; a whole word in the vocabulary is taken as it is."""
    letters = byte_alphabet()
    vocab = {"".join(letters[b] for b in token): rank for token, rank in ranks.items()}
    return byte_level_bpe(vocab, merges_of(sorted(vocab, key=vocab.__getitem__), vocab), patterns, whole_words=True)


def parse_sentencepiece(content: bytes, name: str) -> Parts:
    """A sentencepiece BPE model. BOS is added, as Llama 1, 2 and Mistral expect.

    Raises:
        UserError: another model type (unigram, word, char), or a setting this reading would ignore.
    """
    pieces, trainer, normalizer = [], {}, {}
    try:
        for number, value in protobuf_fields(content):
            if number == 1:
                entry = dict(protobuf_fields(value))
                score = struct.unpack("<f", entry[2])[0] if 2 in entry else 0.0
                pieces.append((entry.get(1, b"").decode(), score, entry.get(3, NORMAL)))
            elif number == 2:
                trainer = dict(protobuf_fields(value))
            elif number == 3:
                normalizer = dict(protobuf_fields(value))
    except (ValueError, IndexError, struct.error, AttributeError, TypeError):
        raise UserError(f"{name} looks like a sentencepiece model but is cut or damaged") from None
    kinds = {1: "unigram", 2: "BPE", 3: "word", 4: "char"}
    kind = kinds.get(trainer.get(3, 1), "unknown")
    if kind != "BPE":
        raise UserError(f"{name} is a sentencepiece {kind} model; only BPE is supported (Llama's kind)")
    unsupported = {
        "treat_whitespace_as_suffix=true": trainer.get(24, 0),
        "escape_whitespaces=false": not normalizer.get(5, 1),
        "unused pieces": any(kind == UNUSED for *_, kind in pieces),
        # `tokenizers` applies such a map to whole graphemes and loses characters ("a" with two accents).
        f"normalization {normalizer.get(1, b'').decode()!r}": normalizer.get(2, b""),
    }
    if any(unsupported.values()):
        raise UserError(f"{name}: a sentencepiece model with {', '.join(k for k, v in unsupported.items() if v)} is not supported")
    backend = sentencepiece_bpe(pieces, dummy_prefix=bool(normalizer.get(3, 1)), squeeze_spaces=bool(normalizer.get(4, 1)))
    # Ids are int32: -1, "none", is stored as an unsigned 64-bit number.
    unk, bos, eos, pad = (trainer.get(number, default) for number, default in ((40, 0), (41, 1), (42, 2), (43, 2**64 - 1)))
    unk, bos, eos, pad = (i if i < len(pieces) else None for i in (unk, bos, eos, pad))
    return Parts(backend, bos, () if eos is None else (eos,), pad, unk, adds_bos=bos is not None)


def sentencepiece_bpe(
    pieces: list[tuple[str, float, int]], dummy_prefix: bool = True, squeeze_spaces: bool = False, isolate: bool = True
) -> Tokenizer:
    """sentencepiece's BPE.

    Args:
        pieces: (text, score, type) by id.
        dummy_prefix: a space is put before the text, and before what follows a control token (`add_dummy_prefix`).
        squeeze_spaces: spaces at both ends go, runs become one (`remove_extra_whitespaces`).
        isolate: user-defined pieces are cut out of the prefixed text, as sentencepiece does; else before it, as llama.cpp does.

    Raises:
        UserError: two pieces with the same text.
    """
    vocab = {text: i for i, (text, _, _) in enumerate(pieces)}
    if len(vocab) != len(pieces):
        doubled = sorted(text for i, (text, _, _) in enumerate(pieces) if vocab[text] != i)
        raise UserError(f"the vocabulary holds {doubled[0]!r} more than once")
    of_type = {kind: [text for text, _, of in pieces if of == kind] for kind in range(1, 7)}
    normal = {text: vocab[text] for text in of_type[NORMAL]}
    ranked = sorted(normal, key=lambda text: (-pieces[vocab[text]][1], vocab[text]))
    unknown = of_type[UNKNOWN][0] if of_type[UNKNOWN] else None
    isolated = of_type[USER_DEFINED] if isolate else []
    backend = Tokenizer(
        models.BPE(
            vocab, merges_of(ranked, normal), unk_token=unknown, fuse_unk=True, byte_fallback=bool(of_type[BYTE]),
            ignore_merges=bool(isolated),  # an isolated piece has no merges that lead to it
        )
    )
    steps: list[normalizers.Normalizer] = []
    if squeeze_spaces:
        steps += [normalizers.Replace(Regex(rf"\A +|[ {SPACE}]+\z"), ""), normalizers.Replace(Regex(" {2,}"), " ")]
    if dummy_prefix:
        steps.append(normalizers.Prepend(SPACE))
    backend.normalizer = normalizers.Sequence([*steps, normalizers.Replace(" ", SPACE)])
    if isolated:
        longest_first = sorted(isolated, key=len, reverse=True)
        backend.pre_tokenizer = pre_tokenizers.Split(Regex("|".join(map(re.escape, longest_first))), behavior="isolated")
    strip = [decoders.Strip(" ", 1, 0)] if dummy_prefix or squeeze_spaces else []
    backend.decoder = decoders.Sequence([decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse(), *strip])
    special = of_type[CONTROL] + of_type[UNKNOWN]
    backend.add_special_tokens([AddedToken(text, normalized=False, special=True) for text in special])
    if not isolate:
        backend.add_tokens([AddedToken(text, normalized=False, special=False) for text in of_type[USER_DEFINED]])
    return backend


def protobuf_fields(content: bytes) -> Iterator[tuple[int, int | bytes]]:
    """(field number, value) of one protobuf message: an int for varints, bytes for the rest."""
    at = 0

    def varint() -> int:
        nonlocal at
        value = shift = 0
        while True:
            byte = content[at]
            at, value, shift = at + 1, value | (byte & 0x7F) << shift, shift + 7
            if byte < 0x80:
                return value

    while at < len(content):
        number, wire = divmod(varint(), 8)
        if wire == 0:
            yield number, varint()
            continue
        if wire not in (1, 2, 5):
            raise ValueError(f"protobuf wire type {wire}")
        size = varint() if wire == 2 else 8 if wire == 1 else 4
        if at + size > len(content):
            raise ValueError("the message is cut")
        yield number, content[at : at + size]
        at += size


# --- GGUF -----------------------------------------------------------------------------------------------


def read_gguf(path: Path) -> Parts:
    """The tokenizer inside a GGUF file.

    Raises:
        UserError: no tokenizer, or a model or pre-tokenizer that is not supported, by name.
    """
    fields = {k.removeprefix("tokenizer."): v for k, v in gguf_metadata(path).items() if k.startswith("tokenizer.")}
    ggml = {k.removeprefix("ggml."): v for k, v in fields.items() if k.startswith("ggml.")}
    if "tokens" not in ggml:
        raise UserError(f"{path} holds no tokenizer (no tokenizer.ggml.tokens)")
    tokens, types = ggml["tokens"], ggml.get("token_type") or [NORMAL] * len(ggml["tokens"])
    kind, pre = ggml.get("model"), ggml.get("pre", "default")
    if kind == "llama":
        if "scores" not in ggml:
            raise UserError(f"{path}: a tokenizer of model 'llama' needs tokenizer.ggml.scores")
        if ggml.get("precompiled_charsmap"):
            raise UserError(f"{path}: a tokenizer with a precompiled_charsmap is not supported")
        backend = sentencepiece_bpe(
            list(zip(tokens, ggml["scores"], types, strict=True)), ggml.get("add_space_prefix", True),
            ggml.get("remove_extra_whitespaces", False), isolate=False,
        )
    elif kind == "gpt2":
        known = PATTERNS.keys() | _ALIASES.keys()
        if pre not in known:
            raise UserError(f"{path}: pre-tokenizer {pre!r} is not supported; known: {', '.join(sorted(known))}")
        merges = [tuple(merge.split(" ", 1)) for merge in ggml.get("merges", ())]
        patterns = PATTERNS[_ALIASES.get(pre, pre)]
        vocab = {token: i for i, token in enumerate(tokens)}
        if len(vocab) != len(tokens):
            raise UserError(f"{path}: the vocabulary holds {len(tokens) - len(vocab)} tokens more than once")
        backend = byte_level_bpe(vocab, merges, patterns, whole_words=pre in _WHOLE_WORDS)
        # Qwen's own tokenizer normalizes, others with its pattern don't. GGUF has no field for that; files we write have this one.
        if fields.get("llamalab.normalizer", "NFC" if patterns is PATTERNS["qwen2"] else "none") == "NFC":
            backend.normalizer = normalizers.NFC()
        special = [token for token, type_ in zip(tokens, types) if type_ in (CONTROL, UNKNOWN)]
        backend.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in special])
        user = [token for token, type_ in zip(tokens, types) if type_ == USER_DEFINED]
        backend.add_tokens([AddedToken(token, normalized=False, special=False) for token in user])
    else:
        raise UserError(f"{path}: tokenizer model {kind!r} is not supported; known: gpt2 (byte-level BPE), llama (sentencepiece BPE)")
    if ggml.get("add_eos_token"):
        raise UserError(f"{path}: add_eos_token is set, so an end token would follow every prompt; this is not supported")

    ends = [ggml.get(f"{name}_token_id") for name in ("eos", "eot", "eom")]
    ends += [i for i, (token, type_) in enumerate(zip(tokens, types)) if token in _END_NAMES and type_ == CONTROL]
    bos = ggml.get("bos_token_id")
    adds_bos = ggml.get("add_bos_token", kind == "llama" or pre in _WHOLE_WORDS)
    templates = {k.removeprefix("chat_template."): v for k, v in fields.items() if k.startswith("chat_template.")}
    if "chat_template" in fields:
        templates["default"] = fields["chat_template"]
    eos_ids = tuple(dict.fromkeys(i for i in ends if i is not None))
    return Parts(backend, bos, eos_ids, ggml.get("padding_token_id"), ggml.get("unknown_token_id"), adds_bos and bos is not None, templates)


_GGUF_NUMBERS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_GGUF_STRING, _GGUF_ARRAY = 8, 9


def gguf_metadata(path: str | Path) -> dict[str, Any]:
    """Key/value metadata at the head of a GGUF file; see `gguf_head`."""
    return gguf_head(path)[0]


def gguf_head(path: str | Path) -> tuple[dict[str, Any], dict[str, tuple[tuple[int, ...], int, int]]]:
    """Metadata and tensor directory of a GGUF file (versions 2 and 3). The tensors are not touched.

    Same values as `gguf.GGUFReader`, which takes seconds for a large vocabulary because it makes a numpy view of each string.

    Returns:
        metadata by key, arrays as lists; (shape, ggml type, first byte in the file) by tensor name, shape in torch's order.

    Raises:
        UserError: not GGUF, another version or byte order, cut off before the tensors, or a tensor named twice.
    """
    with open(path, "rb") as file:
        head = file.read(24)
        if head[:4] != b"GGUF":
            raise UserError(f"{path} is not a GGUF file (it begins with {head[:4]!r})")
        if len(head) < 24:
            raise UserError(f"{path} is cut off: {len(head)} bytes")
        version, tensors, count = struct.unpack("<IQQ", head[4:])
        if version not in (2, 3):
            raise UserError(f"{path}: GGUF version {version} is not supported (2 and 3 are, in little-endian order)")
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return _read_head(data, count, tensors, str(path))


def _read_head(data: mmap.mmap, count: int, tensors: int, name: str) -> tuple[dict[str, Any], dict[str, tuple[tuple[int, ...], int, int]]]:
    at = 24

    def numbers(letter: str, n: int = 1) -> tuple:
        nonlocal at
        values = struct.unpack_from(f"<{n}{letter}", data, at)
        at += struct.calcsize(f"<{n}{letter}")
        return values

    def string() -> str:
        nonlocal at
        (size,) = numbers("Q")
        at += size
        if at > len(data):
            raise struct.error
        return data[at - size : at].decode("utf-8", "replace")

    def value(kind: int) -> Any:
        if kind == _GGUF_STRING:
            return string()
        if kind == _GGUF_ARRAY:
            item, n = numbers("I")[0], numbers("Q")[0]
            return list(numbers(_GGUF_NUMBERS[item], n)) if item in _GGUF_NUMBERS else [value(item) for _ in range(n)]
        return numbers(_GGUF_NUMBERS[kind])[0]

    try:
        metadata = {string(): value(numbers("I")[0]) for _ in range(count)}
        infos = [(string(), numbers("Q", numbers("I")[0])[::-1], *numbers("I"), *numbers("Q")) for _ in range(tensors)]
    except (struct.error, OverflowError, MemoryError, RecursionError):
        raise UserError(f"{name} is cut off or damaged inside its metadata (at byte {at})") from None
    except KeyError as error:
        raise UserError(f"{name} holds metadata of unknown type {error}") from None
    alignment = metadata.get("general.alignment", 32)
    data_begin = -(-at // alignment) * alignment
    directory = {tensor: (shape, kind, data_begin + offset) for tensor, shape, kind, offset in infos}
    if len(directory) != len(infos):
        raise UserError(f"{name} names a tensor more than once")
    return metadata, directory
