"""A tokenizer as GGUF metadata, such that llama.cpp makes the same ids of a text as we do.

llama.cpp has its own tokenizers: two models (gpt2, byte-level BPE; llama, sentencepiece BPE) and a list of named ways to
cut text before byte-level BPE. `add_tokenizer` finds the ones that match; `check_tokenizer` reads the written metadata back
the way llama.cpp does (`tokenizer_formats.read_gguf`) and compares ids on texts chosen to differ, so that what this file
does not know of is refused too.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from llamalab.errors import UserError
from llamalab.tokenizer import Tokenizer
from llamalab.tokenizer_formats import BYTE, CONTROL, NORMAL, PATTERNS, SPACE, UNKNOWN, UNUSED, USER_DEFINED, read_gguf

#: (key of PATTERNS, whole words taken as they are) -> llama.cpp's name
_PRE_NAMES = {
    ("gpt-2", False): "gpt-2",
    ("smollm", False): "smollm",
    ("qwen2", False): "qwen2",
    ("llama-bpe", True): "llama-bpe",
    ("llama-bpe", False): "smaug-bpe",  # the same pattern, merges only
    ("tekken", True): "tekken",
}

#: Texts on which tokenizers differ: contractions, digits, runs of spaces and line ends, scripts, marks, emoji, code, long words.
PROBE = (
    "Hello, World! It's I'LL we'Re they'd DON'T O'Neil 'tis",
    "1 12 123 1234 12345 3.14159 1,000,000 0x1F 2024-12-31 ½ ² ٣٤٥ Ⅷ",
    " leading", "trailing ", "a  b   c    d", "\ttab\t\ttabs", "line\nline\n\nline\r\nline \n \n  x", "\n", " ", "   ",
    "Ünïcödé naïve Straße ÅNGSTRÖM ﬁ ligature İstanbul",
    "日本語のテキスト 中文字符 한국어 텍스트", "Привет мир Ελληνικά עברית العربية हिन्दी ไทย",
    "🙂🚀👩‍👩‍👧‍👦🏳️‍🌈 e\u0301 \u00a0nbsp\u2003em\u3000wide \u200bzero",
    "def f(x):\n    return {'a': [x**2, -1]}  # comment\n\n\nclass A_b2:",
    "https://example.org/a?b=c&d=%20#e user@mail.com C:\\dir\\file.txt $5.00 100% #tag @me ~/.x",
    "!!! ??? ... --- ___ === <<>> (((", "camelCaseWordsAndXMLHttpRequest",
    "antidisestablishmentarianism supercalifragilistic Donaudampfschifffahrt",
    "<|notatoken|> </s> <s> [INST] x [/INST]", "\u2581under\u2581score",
)


def add_tokenizer(writer: Any, tokenizer: Tokenizer | None, vocab_size: int, notes: list[str]) -> list[list[int]]:
    """Put tokenizer and chat templates into a `gguf.GGUFWriter`; ids the tokenizer lacks become unused tokens.

    Returns:
        The ids of each text of PROBE, for `check_tokenizer`.

    Raises:
        UserError: llama.cpp has no such tokenizer.
    """
    if tokenizer is None:
        writer.add_tokenizer_model("no_vocab")
        notes.append("no tokenizer: llama.cpp will take and give token ids only")
        return []
    described = json.loads(tokenizer.backend.to_str())
    if described["model"]["type"] != "BPE":
        raise UserError(_refusal(f"its model is {described['model']['type']}, not BPE"))
    byte_level = (described["decoder"] or {}).get("type") == "ByteLevel"
    tokens, types = _vocabulary(tokenizer, described, vocab_size, byte_level)
    merges = [merge.split(" ", 1) if isinstance(merge, str) else merge for merge in described["model"]["merges"]]
    if byte_level:
        if not merges:
            raise UserError(_refusal("it has no merges (plain bytes)"))
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre(_pre_name(described))
        writer.add_token_list(tokens)
        writer.add_token_types(types)
        writer.add_token_merges([" ".join(merge) for merge in merges])
        normalizes = described["normalizer"] is not None  # to NFC: _pre_name refuses the others
        writer.add_string("tokenizer.llamalab.normalizer", "NFC" if normalizes else "none")
        if normalizes:
            notes.append("the tokenizer normalizes text to NFC, llama.cpp does not: text in decomposed form gets other ids there")
    else:
        writer.add_tokenizer_model("llama")
        writer.add_tokenizer_pre("default")
        writer.add_token_list(tokens)
        writer.add_token_scores(_scores(tokens, types, merges))
        writer.add_token_types(types)
        writer.add_add_space_prefix(_prepends_space(described))
    ids = {"bos": tokenizer.bos_id, "pad": tokenizer.pad_id, "unk": tokenizer.unk_id}
    ids |= dict(zip(("eos", "eot", "eom"), tokenizer.eos_ids))
    for name, token_id in ids.items():
        if token_id is not None:
            getattr(writer, f"add_{name}_token_id")(token_id)
    if len(tokenizer.eos_ids) > 3:
        notes.append(f"GGUF names three end tokens; {list(tokenizer.eos_ids[3:])} are left to llama.cpp's own list of names")
    writer.add_add_bos_token(tokenizer.adds_bos)
    writer.add_add_eos_token(False)
    if tokenizer.templates:
        writer.add_chat_template([{"name": name, "template": text} for name, text in tokenizer.templates.items()])
    return [tokenizer.encode(text) for text in PROBE]


def check_tokenizer(path: Path, tokenizer: Tokenizer, expected: list[list[int]]) -> None:
    """Compare the tokenizer in a GGUF file, read as llama.cpp reads it, with the one it was made from.

    Args:
        expected: ids of PROBE's texts.

    Raises:
        UserError: a text gets other ids, or control tokens are not recognized.
    """
    written = Tokenizer(read_gguf(path))
    for text, ids in zip(PROBE, expected, strict=True):
        if written.encode(text) != ids:
            raise UserError(_refusal(f"{text!r} would become {written.encode(text)}, not {ids}"))
    control = [i for i, token in sorted(tokenizer.backend.get_added_tokens_decoder().items()) if token.special][:64]
    text = " x".join(tokenizer.backend.id_to_token(i) for i in control)
    if written.encode(text, special=True) != tokenizer.encode(text, special=True):
        raise UserError(_refusal("text that follows a control token would get other ids"))


def _vocabulary(tokenizer: Tokenizer, described: dict[str, Any], vocab_size: int, byte_level: bool) -> tuple[list[str], list[int]]:
    added = {entry["id"]: entry for entry in described["added_tokens"]}
    odd = [entry["content"] for entry in added.values() if entry["single_word"] or entry["lstrip"] or entry["rstrip"]]
    if odd:
        raise UserError(_refusal(f"its added token {odd[0]!r} takes spaces or word borders into account"))
    tokens, types = [], []
    for i in range(vocab_size):
        token = tokenizer.backend.id_to_token(i)
        if token is None:
            kind, token = UNUSED, f"[PAD{i}]"
        elif i in added:
            kind = UNKNOWN if i == tokenizer.unk_id and not byte_level else CONTROL if added[i]["special"] else USER_DEFINED
        else:
            kind = BYTE if not byte_level and len(token) == 6 and token.startswith("<0x") else NORMAL
        tokens.append(token)
        types.append(kind)
    return tokens, types


def _pre_name(described: dict[str, Any]) -> str:
    """llama.cpp's name for the way a byte-level tokenizer cuts its text."""
    patterns, whole_words = _patterns(described["pre_tokenizer"]), bool(described["model"].get("ignore_merges"))
    known = next((name for name, known in PATTERNS.items() if known == patterns), None)
    pre = _PRE_NAMES.get((known, whole_words))
    if pre is None:
        how = ", whole words first" if whole_words else ""
        raise UserError(_refusal(f"it cuts text by {list(patterns)}{how}, a way that llama.cpp has no name for"))
    normalizer = described["normalizer"]
    if normalizer is not None and not (normalizer["type"] == "NFC" and pre == "qwen2"):
        raise UserError(_refusal(f"it normalizes text ({normalizer['type']})"))
    return pre


def _patterns(pre_tokenizer: dict[str, Any] | None) -> tuple[str, ...]:
    """The regular expressions that a byte-level pre-tokenizer amounts to, in order."""
    steps = (pre_tokenizer or {}).get("pretokenizers") or [pre_tokenizer]
    found = []
    for step in steps:
        kind = (step or {}).get("type")
        if kind == "Split" and step["behavior"] == "Isolated" and not step["invert"] and "Regex" in step["pattern"]:
            found.append(step["pattern"]["Regex"])
        elif kind == "Digits" and step["individual_digits"]:
            found.append(r"\p{N}")
        elif kind == "ByteLevel" and not step["add_prefix_space"]:
            found += PATTERNS["gpt-2"] if step["use_regex"] else ()
        else:
            raise UserError(_refusal(f"its pre-tokenizer has a step {step} that llama.cpp has no name for"))
    return tuple(found)


def _scores(tokens: list[str], types: list[int], merges: list[list[str]]) -> list[float]:
    """sentencepiece's scores, -rank: a piece ranks by the first merge that makes it, pieces no merge makes come last."""
    order = dict.fromkeys("".join(merge) for merge in merges)
    normal = [token for token, kind in zip(tokens, types, strict=True) if kind == NORMAL]
    ranks = {token: rank for rank, token in enumerate([*order, *(token for token in normal if token not in order)])}
    return [float(-ranks[token]) if kind == NORMAL else 0.0 for token, kind in zip(tokens, types, strict=True)]


def _prepends_space(described: dict[str, Any]) -> bool:
    """Whether a sentencepiece tokenizer puts a space before the text."""
    normalizer, metaspace = described["normalizer"], described["pre_tokenizer"]
    steps = (normalizer or {}).get("normalizers") or [normalizer]
    if any(step and step["type"] == "Prepend" and step["prepend"] == SPACE for step in steps):
        return True
    return (metaspace or {}).get("type") == "Metaspace" and metaspace["prepend_scheme"] != "never"


def _refusal(why: str) -> str:
    return (f"llama.cpp would not tokenize as this tokenizer does: {why}. Take a tokenizer.model of the same vocabulary if there is one, "
            "or write the GGUF without a tokenizer")
