"""Conversations to ids through the model's own chat template (Jinja, as `transformers.apply_chat_template` renders it).

    messages = [{"role": "user", "content": "What is the capital of France?"}]
    ids = encode(tok, messages)                     # ends where the answer begins
    ids, mask = encode_training(tok, messages)      # a whole dialogue; mask: what the assistant said

Templates come with models, from anyone: they run in Jinja's sandbox and see plain data only. The start token stands
once in front, whether the template writes it, the tokenizer adds it, or both. As in transformers, a control token
spelled out inside a message is read as one: a template's own marks and a message's cannot be told apart in its output.
"""

from __future__ import annotations

import json
import re
from datetime import datetime
from functools import lru_cache
from typing import Any

import jinja2
import jinja2.ext
from jinja2.sandbox import ImmutableSandboxedEnvironment

from llamalab.errors import UserError
from llamalab.tokenizer import Tokenizer

Message = dict[str, Any]  # {"role": ..., "content": ...} and whatever else the template reads

# Unicode noncharacters, reserved for a program's own use: they bracket what {% generation %} blocks wrote.
_OPEN, _CLOSE = "\ufdd0", "\ufdd1"


def render(
    tok: Tokenizer, messages: list[Message], add_generation_prompt: bool = True, tools: list[dict] | None = None,
    documents: list[dict] | None = None, **variables: Any,
) -> str:
    """The text of a conversation.

    Args:
        messages: oldest first. Keys whose value is None are left out.
        add_generation_prompt: end with what precedes an answer.
        tools, documents, variables: handed to the template (tools as JSON schemas). A template named "tool_use" is
            taken, where the model has one, when tools are given.

    Raises:
        UserError: no chat template, messages that are not plain data, or a conversation the template refuses.
    """
    return _render(tok, messages, add_generation_prompt, False, tools=tools, documents=documents, **variables)


def encode(tok: Tokenizer, messages: list[Message], add_generation_prompt: bool = True, **options: Any) -> list[int]:
    """Ids of a conversation, with exactly one start token in front if the template or the tokenizer puts one there.

    Takes the options of `render` and raises what it raises.
    """
    text = render(tok, messages, add_generation_prompt, **options)
    return _encode(tok, text, _answers(tok, messages, text, options))[0]


def encode_training(tok: Tokenizer, messages: list[Message], **options: Any) -> tuple[list[int], list[bool]]:
    """Ids of a whole dialogue, and which of them are the assistant's to produce: its text and the end of its turn.

    The ids are those of `encode(..., add_generation_prompt=False)`. The assistant's part is what the template marks with
    {% generation %}; in a template without these marks, all that the template adds after the prompt of each answer.

    Raises:
        UserError: as `render`; no answer in the messages; or a template without marks that writes an earlier turn
            differently once later ones follow, so that no part of the text is that of the answer.
    """
    text = render(tok, messages, False, **options)
    answers = _answers(tok, messages, text, options)
    if not answers:
        raise UserError("nothing to train on: no message has the role 'assistant'")
    spans = answers
    if re.search(r"\{%-?\s*generation\s*-?%\}", _template(tok, options.get("tools"))):
        spans = _marked_spans(_render(tok, messages, False, True, **options), text)
        if not spans:
            raise UserError("the chat template put none of this dialogue inside {% generation %}, so there is nothing to train on")
    elif any(start is None or stop is None for start, stop in spans):
        raise UserError(
            "the chat template writes an answer differently in the whole dialogue than when it is the last turn, so the assistant's "
            "tokens cannot be marked; train on dialogues that end with their only answer, or use a template with {% generation %}"
        )
    ids, offsets = _encode(tok, text, answers)
    return ids, [any(begin < stop and end > start for start, stop in spans) for begin, end in offsets]


def _answers(tok: Tokenizer, messages: list[Message], text: str, options: dict[str, Any]) -> list[tuple[int | None, int | None]]:
    """Where each of the assistant's messages begins and ends in the text, None where the template does not just append."""

    def length(turns: list[Message], prompt: bool) -> int | None:
        try:
            part = render(tok, turns, prompt, **options)
        except UserError:  # the template takes no conversation that ends here, so there was no prompt to continue
            return None
        return len(part) if text.startswith(part) else None

    return [
        (length(messages[:i], True), length(messages[: i + 1], False))
        for i, message in enumerate(messages) if message["role"] == "assistant"
    ]


def _encode(tok: Tokenizer, text: str, answers: list[tuple[int | None, int | None]]) -> tuple[list[int], list[tuple[int, int]]]:
    """Ids and their (begin, end) in the text, one start token in front.

    Where a token of the text would run from a prompt into its answer ("\\n" and an answer that begins with "\\n"), the text
    is cut there: when the answer was generated, the prompt's ids were fixed, and they must be a prefix of the dialogue's.
    """
    ids, offsets = tok.encode_with_offsets(text, special=True)
    starts = {start for start, _ in answers if start is not None}
    cuts = sorted(start for start in starts if any(begin < start < end for begin, end in offsets))
    if cuts:
        ids, offsets = [], []
        for start, stop in zip([0, *cuts], [*cuts, len(text)]):
            some, places = tok.encode_with_offsets(text[start:stop], special=True, continues=start > 0)
            ids += some
            offsets += [(start + begin, start + end) for begin, end in places]
    if tok.adds_bos and ids[:1] != [tok.bos_id]:
        return [tok.bos_id, *ids], [(0, 0), *offsets]
    return ids, offsets


def _marked_spans(marked: str, text: str) -> list[tuple[int, int]]:
    spans, plain, opened = [], 0, None
    for part in re.split(f"([{_OPEN}{_CLOSE}])", marked):
        if part == _OPEN:
            opened = plain
        elif part == _CLOSE:
            spans.append((opened, plain))
        else:
            plain += len(part)
    if re.sub(f"[{_OPEN}{_CLOSE}]", "", marked) != text or any(start is None for start, _ in spans):
        raise UserError("the chat template edits the text of its {% generation %} blocks, so the assistant's tokens cannot be marked")
    return [(start, stop) for start, stop in spans if start < stop]


# --- Jinja --------------------------------------------------------------------------------------------


def _render(tok: Tokenizer, messages: list[Message], add_generation_prompt: bool, mark: bool, **variables: Any) -> str:
    template = _template(tok, variables.get("tools"))
    if not isinstance(messages, list) or not messages:
        raise UserError(f"expected a non-empty list of messages, got {messages!r:.80}")
    for i, message in enumerate(messages):
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise UserError(f"message {i} should be a dict with a 'role', got {message!r:.80}")
    messages = [{k: v for k, v in message.items() if v is not None} for message in messages]
    try:
        # A round trip through JSON: the template meets no object that has methods of its own.
        data = json.loads(json.dumps({"messages": messages, "tools": None, "documents": None, **tok.special_tokens, **variables}))
    except (TypeError, ValueError) as error:
        raise UserError(f"messages, tools and documents must be plain JSON data: {error}") from None
    try:
        return _compile(template, mark).render(**data, add_generation_prompt=add_generation_prompt)
    except Exception as error:  # a template can fail in any way a program can
        raise UserError(f"the chat template refused this conversation: {error or type(error).__name__}") from error


def _template(tok: Tokenizer, tools: list[dict] | None) -> str:
    if tools and "tool_use" in tok.templates:
        return tok.templates["tool_use"]
    if tok.chat_template is None:
        have = f" (it has only {', '.join(sorted(tok.templates))})" if tok.templates else ""
        raise UserError(f"this model has no chat template{have}: use a chat-tuned model, or give it plain text to continue")
    return tok.chat_template


@lru_cache(maxsize=32)
def _compile(template: str, mark: bool) -> jinja2.Template:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_MarkedGeneration if mark else _Generation, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    environment.globals |= {"raise_exception": _raise_exception, "strftime_now": _strftime_now}
    return environment.from_string(template)


class _Generation(jinja2.ext.Extension):
    """{% generation %} ... {% endgeneration %} around what the assistant says; here it only renders its body."""

    tags = {"generation"}  # noqa: RUF012 (Jinja reads this name from the class)

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.CallBlock(self.call_method("body"), [], [], body).set_lineno(line)

    def body(self, caller: Any) -> str:
        return caller()


class _MarkedGeneration(_Generation):
    def body(self, caller: Any) -> str:
        return _OPEN + caller() + _CLOSE


def _tojson(value: Any, ensure_ascii: bool = False, indent: int | None = None, separators: tuple[str, str] | None = None,
            sort_keys: bool = False) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)
