"""Text to ids and back: one class over the `tokenizers` library, whatever file the vocabulary came from.

    tok = load_tokenizer("runs/pretrain-1")     # directory or file: tokenizer.json, tokenizer.model, GGUF; or "bytes"
    ids = tok.encode("Once upon a time")        # control tokens written in the text stay text
    tok.decode(ids)
    stream = tok.stream()                       # the same text piece by piece, never half a character
    print("".join(stream.push(i) for i in ids) + stream.flush())

Encoding is the library's. Decoding is ours, because it must be the same at once and token by token: a token is bytes
(`token_bytes`), text is the bytes decoded as UTF-8, and an incremental decoder keeps back what is not yet a character.
"""

from __future__ import annotations

import codecs
import json
import re
import threading
from collections.abc import Iterable
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

from tokenizers import AddedToken, processors
from tokenizers import Tokenizer as Backend

from llamalab.config import end_ids
from llamalab.errors import UserError
from llamalab.files import write_atomic
from llamalab.tokenizer_formats import SPACE, Parts, byte_alphabet, bytes_tokenizer, read_gguf, read_model_file

_BYTE_PIECE = re.compile(r"<0x([0-9A-Fa-f]{2})>")  # sentencepiece's single bytes
_BYTE_OF = {letter: byte for byte, letter in byte_alphabet().items()}


def load_tokenizer(path: str | Path) -> Tokenizer:
    """Read a tokenizer.

    Args:
        path: a directory with tokenizer.json, tokenizer.model or one *.gguf (looked for in this order), or one of these
            files; a Hugging Face hub id, owner/name; "bytes" is the built-in tokenizer of plain bytes.
            Beside a tokenizer.json or tokenizer.model, the files tokenizer_config.json, special_tokens_map.json,
            added_tokens.json, generation_config.json, config.json, chat_template.jinja are read too.

    Raises:
        UserError: nothing there, not a format that is known, or a setting that would be ignored.
    """
    if str(path) == "bytes":
        return Tokenizer(bytes_tokenizer())
    path = Path(path)
    if not path.exists():
        path = _fetch(str(path))
    file = _find(path) if path.is_dir() else path
    if file.suffix == ".gguf":
        return Tokenizer(read_gguf(file))
    parts = _read_tokenizer_json(file) if file.suffix == ".json" else read_model_file(file)
    _read_side_files(parts, file.parent)
    return Tokenizer(parts)


class Tokenizer:
    """Encodes and decodes; made by `load_tokenizer`.

    Attributes:
        backend: the `tokenizers.Tokenizer` underneath.
        bos_id, pad_id, unk_id: ids, or None.
        eos_ids: all ids that end a text or a turn; the tokenizer's own end token first.
        adds_bos: whether `encode` puts bos_id in front by default.
        byte_level: whether the vocabulary is of bytes (GPT-2, Llama 3), not of characters (sentencepiece).
        templates: chat templates by name; `chat_template` is the usual one.
    """

    def __init__(self, parts: Parts) -> None:
        self.backend = parts.backend
        self.bos_id, self.eos_ids, self.pad_id, self.unk_id = parts.bos_id, parts.eos_ids, parts.pad_id, parts.unk_id
        self.adds_bos, self.templates = parts.adds_bos, parts.templates
        self.backend.no_truncation()
        self.backend.no_padding()
        bos = self.backend.id_to_token(self.bos_id) if self.adds_bos else None
        self.backend.post_processor = processors.TemplateProcessing(
            single=[bos, "$A"] if bos else "$A", pair=[bos, "$A", "$B"] if bos else "$A $B",
            special_tokens=[(bos, self.bos_id)] if bos else [],
        )
        self._decoding = _decoding(self.backend)
        self.byte_level = self._decoding.byte_level
        self._special = {i for i, token in self.backend.get_added_tokens_decoder().items() if token.special}
        self._bytes: dict[int, bytes] = {}
        self._lock = threading.Lock()  # encode_special_tokens is a switch on the shared backend

    @cached_property
    def vocab_size(self) -> int:
        """The largest id + 1: the least number of rows an embedding needs."""
        return max(self.backend.get_vocab(with_added_tokens=True).values()) + 1

    @property
    def chat_template(self) -> str | None:
        """The chat template (Jinja), or None."""
        return self.templates.get("default")

    @property
    def special_tokens(self) -> dict[str, str]:
        """Text of the named control tokens: bos_token, eos_token, pad_token, unk_token, those there are."""
        ids = {"bos_token": self.bos_id, "eos_token": self.eos_ids[0] if self.eos_ids else None, "pad_token": self.pad_id,
               "unk_token": self.unk_id}
        return {name: text for name, i in ids.items() if i is not None and (text := self.backend.id_to_token(i))}

    # --- encode -------------------------------------------------------------------------------------------

    def encode(self, text: str, bos: bool | None = None, special: bool = False) -> list[int]:
        """Ids of a text.

        Args:
            bos: put bos_id in front; None: as the tokenizer's files say (`adds_bos`).
            special: read control tokens written in the text ("<|im_end|>") as such. Off, they are ordinary characters,
                so that a text cannot give itself an end or another role. (Added tokens that the files do not mark as
                special are part of the vocabulary and always read.)

        Raises:
            UserError: text that is not a str of valid Unicode, or bos=True without a bos_id.
        """
        return self._front(bos) + self._encode(text, special).ids

    def encode_batch(self, texts: list[str], bos: bool | None = None) -> list[list[int]]:
        """`encode` for many texts, in parallel."""
        front = self._front(bos)
        with self._lock:
            self.backend.encode_special_tokens = True
            found = self.backend.encode_batch_fast([_checked(text) for text in texts], add_special_tokens=False)
        return [front + one.ids for one in found]

    def encode_with_offsets(self, text: str, special: bool = False, continues: bool = False) -> tuple[list[int], list[tuple[int, int]]]:
        """Ids without BOS, and where each begins and ends in the text, in characters.

        continues: the text goes on from one already encoded, so sentencepiece's space in front is left out.
        """
        if not (continues and self._decoding.strips_space):
            found = self._encode(text, special)
            return found.ids, found.offsets
        # After a character that joins no other, nothing is put in front of the text; the character's own ids are dropped.
        front, found = self._encode("\x01", special).ids, self._encode("\x01" + text, special)
        if found.ids[: len(front)] != front:
            raise UserError(f"this vocabulary joins U+0001 to {text[:20]!r}, so a text cannot be continued with it")
        return found.ids[len(front) :], [(begin - 1, end - 1) for begin, end in found.offsets[len(front) :]]

    def _encode(self, text: str, special: bool):
        with self._lock:
            self.backend.encode_special_tokens = not special
            return self.backend.encode(_checked(text), add_special_tokens=False)

    def _front(self, bos: bool | None) -> list[int]:
        if bos and self.bos_id is None:
            raise UserError("bos=True, but this tokenizer has no start token")
        return [self.bos_id] if (self.adds_bos if bos is None else bos) else []

    # --- decode -------------------------------------------------------------------------------------------

    def token_bytes(self, token_id: int) -> bytes:
        """What one token stands for; of sentencepiece's first token, before the space in front is dropped.

        Ids without a token (a model may have more rows than its tokenizer has tokens) stand for nothing.
        """
        if token_id not in self._bytes:
            token = self.backend.id_to_token(token_id) or ""
            if self.byte_level:
                letters = [_BYTE_OF.get(letter) for letter in token]
                value = token.encode() if None in letters else bytes(letters)
            else:
                byte = _BYTE_PIECE.fullmatch(token) if self._decoding.byte_pieces else None
                value = bytes([int(byte[1], 16)]) if byte else token.replace(SPACE, " ").encode()
            self._bytes[token_id] = value
        return self._bytes[token_id]

    def decode(self, ids: Iterable[int], skip_special: bool = True) -> str:
        """The text of ids, all at once.

        Bytes that are no UTF-8 become U+FFFD: one for each maximal part of a character in byte-level vocabularies (as
        `tokenizers` does), one for each byte in sentencepiece's (as sentencepiece does).
        """
        stream = self.stream(skip_special)
        wanted = (i for i in ids if not (skip_special and i in self._special))
        return stream._text(b"".join(map(self.token_bytes, wanted)), final=True)

    def stream(self, skip_special: bool = True) -> TextPieces:
        """A decoder that takes one id at a time; the pieces it returns, joined, are what `decode` gives for all ids."""
        return TextPieces(self, skip_special)

    # --- save ---------------------------------------------------------------------------------------------

    def save(self, directory: str | Path) -> None:
        """Write tokenizer.json and tokenizer_config.json (with chat templates), as `transformers.AutoTokenizer` reads them.

        Only the first of eos_ids has a place there; the full list belongs in generation_config.json, which `save_model` writes.
        (For a config.json of model_type qwen2, transformers 5 puts Qwen's own word splitting in place of what tokenizer.json
        says: give that family Qwen's vocabularies only.)
        Files of an earlier tokenizer that would overrule these two are removed.
        """
        directory = Path(directory)
        config: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast", **self.special_tokens}
        config |= {"add_bos_token": self.adds_bos, "clean_up_tokenization_spaces": False}
        if set(self.templates) == {"default"}:
            config["chat_template"] = self.templates["default"]
        elif self.templates:
            config["chat_template"] = [{"name": name, "template": text} for name, text in self.templates.items()]
        write_atomic(directory / "tokenizer.json", self.backend.to_str(pretty=True))
        write_atomic(directory / "tokenizer_config.json", json.dumps(config, indent=2, ensure_ascii=False) + "\n")
        for stale in ("special_tokens_map.json", "added_tokens.json", "chat_template.jinja"):
            (directory / stale).unlink(missing_ok=True)
        for stale in (directory / "additional_chat_templates").glob("*.jinja"):
            stale.unlink()


class TextPieces:
    """Ids in, text out, as soon as it is certain; see `Tokenizer.stream`. No piece ends inside a character."""

    def __init__(self, tokenizer: Tokenizer, skip_special: bool = True) -> None:
        self._tokenizer, self._skip = tokenizer, tokenizer._special if skip_special else ()
        errors = "replace" if tokenizer.byte_level else "llamalab-each-byte"
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors)
        self._strip = tokenizer._decoding.strips_space  # until the first text has come

    def push(self, token_id: int) -> str:
        """The text that this id completes, often empty."""
        return "" if token_id in self._skip else self._text(self._tokenizer.token_bytes(token_id))

    def flush(self) -> str:
        """What is left at the end: U+FFFD for a character that was never completed, else nothing."""
        return self._text(b"", final=True)

    def _text(self, more: bytes, final: bool = False) -> str:
        text = self._decoder.decode(more, final)
        if text and self._strip:
            self._strip = False
            text = text.removeprefix(" ")
        return text


def _each_byte(error: UnicodeDecodeError) -> tuple[str, int]:
    return "\ufffd" * (error.end - error.start), error.end


codecs.register_error("llamalab-each-byte", _each_byte)


def _checked(text: str) -> str:
    if not isinstance(text, str):
        raise UserError(f"expected text (str) to encode, got {type(text).__name__}")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise UserError(f"the text is not valid Unicode: a lone surrogate {text[error.start]!r} at character {error.start}") from None
    return text


class _Decoding(NamedTuple):
    """How the backend's decoder turns tokens into text."""

    byte_level: bool = False  # a token's letters stand for bytes
    byte_pieces: bool = False  # "<0x41>" is one byte
    strips_space: bool = False  # one space at the very front goes


_DECODINGS = {
    "ByteLevel": _Decoding(byte_level=True),
    "Metaspace": _Decoding(strips_space=True),
    "Replace": _Decoding(),
    "Replace Fuse": _Decoding(),
    "Replace Fuse Strip": _Decoding(strips_space=True),
    "Replace ByteFallback": _Decoding(byte_pieces=True),
    "Replace ByteFallback Fuse": _Decoding(byte_pieces=True),
    "Replace ByteFallback Fuse Strip": _Decoding(byte_pieces=True, strips_space=True),
}


def _decoding(backend: Backend) -> _Decoding:
    described = json.loads(backend.decoder.__getstate__()) if backend.decoder else {"type": "none"}
    steps = described["decoders"] if described["type"] == "Sequence" else [described]
    names = " ".join(step["type"] for step in steps)
    as_expected = {
        "Metaspace": lambda step: step["replacement"] == SPACE,
        "Replace": lambda step: (step["pattern"], step["content"]) == ({"String": SPACE}, " "),
        "Strip": lambda step: (step["content"], step["start"], step["stop"]) == (" ", 1, 0),
    }
    if names not in _DECODINGS or not all(as_expected[step["type"]](step) for step in steps if step["type"] in as_expected):
        raise UserError(f"tokenizer.json: a decoder of {names} ({described}) is not supported; byte-level and sentencepiece's are")
    if names == "Metaspace" and steps[0].get("prepend_scheme") == "never":
        return _Decoding()
    return _DECODINGS[names]


# --- reading a directory ----------------------------------------------------------------------------------


def _fetch(name: str) -> Path:
    """Directory of a hub model's tokenizer files, from the cache or the network."""
    if not re.fullmatch(r"[\w.-]+/[\w.-]+", name):
        raise UserError(f"no tokenizer at {name}: no such file or directory")
    import huggingface_hub

    try:
        return Path(huggingface_hub.snapshot_download(name, allow_patterns=["*.json", "*.jinja", "tokenizer.model"]))
    except Exception as error:  # network, permission, cache, spelling: each has its own exception
        first = str(error).strip().splitlines() or [type(error).__name__]
        raise UserError(f"no file or directory {name}, and the hub gives no model of that name: {first[0]}") from None


def _find(directory: Path) -> Path:
    for name in ("tokenizer.json", "tokenizer.model"):
        if (directory / name).is_file():
            return directory / name
    files = sorted(directory.glob("*.gguf"))
    if len(files) == 1:
        return files[0]
    if files:
        raise UserError(f"{directory} holds {len(files)} GGUF files; name one: {', '.join(f.name for f in files)}")
    raise UserError(f"no tokenizer in {directory}: expected tokenizer.json, tokenizer.model or a .gguf file")


def _read_tokenizer_json(file: Path) -> Parts:
    try:
        backend = Backend.from_file(str(file))
    except Exception as error:  # the library raises bare Exception
        raise UserError(f"{file} is not a tokenizer.json that `tokenizers` can read: {error}") from None
    plain, framed = (backend.encode("a", add_special_tokens=flag).ids for flag in (False, True))
    if framed == plain:
        return Parts(backend)
    if framed[1:] != plain:
        tokens = [backend.id_to_token(i) for i in framed]
        raise UserError(f"{file} puts more than a start token around a text ({tokens}); only a start token is supported")
    return Parts(backend, bos_id=framed[0], adds_bos=True)


def _read_side_files(parts: Parts, directory: Path) -> None:
    """Names of control tokens, added tokens, end ids and chat templates, from the small files beside a vocabulary."""
    config = _json(directory / "tokenizer_config.json")
    named = _json(directory / "special_tokens_map.json") | config
    if config.get("add_eos_token"):
        raise UserError(f"{directory}/tokenizer_config.json has add_eos_token=true, so an end token would follow every prompt; "
                        "set it to false")
    backend = parts.backend
    added = {int(i): token for i, token in config.get("added_tokens_decoder", {}).items()}
    added |= {i: token for token, i in _json(directory / "added_tokens.json").items() if i not in added}
    for i, token in sorted(added.items()):
        have = _add(backend, token, special=False)
        if have != i:
            raise UserError(f"{directory}: {token!r} should be token {i}, but in the vocabulary it is {have}")

    ids = {name: _add(backend, named[f"{name}_token"], special=True) for name in ("bos", "eos", "pad", "unk") if named.get(f"{name}_token")}
    settings = [_json(directory / name) for name in ("generation_config.json", "config.json")]
    ends = [ids["eos"]] if "eos" in ids else list(parts.eos_ids)
    for setting in settings:
        ends += end_ids(setting.get("eos_token_id"))
    parts.eos_ids = tuple(dict.fromkeys(ends))
    for name in ("bos", "pad"):
        stated = [setting.get(f"{name}_token_id") for setting in settings]
        given = [i for i in (ids.get(name), getattr(parts, f"{name}_id"), *stated) if i is not None]
        # A tokenizer_config.json that says null (Qwen) means it: there is none.
        silent = f"{name}_token" in named and not named[f"{name}_token"]
        setattr(parts, f"{name}_id", None if silent or not given else given[0])
    parts.unk_id = ids.get("unk", parts.unk_id)
    parts.adds_bos = bool(config.get("add_bos_token", parts.adds_bos)) and parts.bos_id is not None

    template = config.get("chat_template")
    if isinstance(template, list):  # [{"name": "default", "template": ...}, {"name": "tool_use", ...}]
        parts.templates = {entry["name"]: entry["template"] for entry in template}
    elif template:
        parts.templates = {"default": template}
    files = {file.stem: file for file in sorted((directory / "additional_chat_templates").glob("*.jinja"))}
    if (directory / "chat_template.jinja").is_file():
        files["default"] = directory / "chat_template.jinja"
    parts.templates |= {name: file.read_text(encoding="utf-8") for name, file in files.items()}


def _add(backend: Backend, token: str | dict[str, Any], special: bool) -> int:
    """Make a token known to the backend as an added token and return its id; one it has keeps its id."""
    if isinstance(token, dict):
        fields = {k: v for k, v in token.items() if k in ("content", "single_word", "lstrip", "rstrip", "normalized", "special")}
        token = AddedToken(**fields)
    else:
        token = AddedToken(token, normalized=False, special=special)
    have = backend.get_added_tokens_decoder().get(backend.token_to_id(token.content))
    if special:
        token.special = True
        if have is not None and have.special:
            return backend.token_to_id(token.content)
    (backend.add_special_tokens if token.special else backend.add_tokens)([token])
    return backend.token_to_id(token.content)


def _json(file: Path) -> dict[str, Any]:
    """Content of a JSON file, {} where there is none."""
    if not file.is_file():
        return {}
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise UserError(f"{file} is not valid JSON: {error}") from None
    if not isinstance(content, dict):
        raise UserError(f"{file} should hold a JSON object, got {type(content).__name__}")
    return content
