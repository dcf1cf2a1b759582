"""Chat templates: text and ids of transformers, one start token, prompts that are prefixes, the assistant's tokens."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import tokenizers
from archives import members, only
from test_tokenizer import spm_model
from transformers import AutoTokenizer

from llamalab import chat
from llamalab.corpus import ASSETS
from llamalab.errors import UserError
from llamalab.tokenizer import Tokenizer, load_tokenizer
from llamalab.tokenizer_formats import Parts, parse_sentencepiece

CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>' + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
LLAMA3 = (
    "{{ bos_token }}{% for m in messages %}<|im_start|>{{ m.role }}\n\n{{ m.content | trim }}<|im_end|>{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n\n{% endif %}"
)
MARKED = (
    "{%- for m in messages %}{{ m.role }}: {% if m.role == 'assistant' %}{% generation %}{{ m.content }}</s>{% endgeneration %}"
    "{% else %}{{ m.content }}{% endif %}\n{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}"
)
LLAMA2 = (
    "{% for m in messages %}{% if m.role == 'user' %}{{ bos_token + '[INST] ' + m.content + ' [/INST]' }}"
    "{% else %}{{ ' ' + m.content + ' ' + eos_token }}{% endif %}{% endfor %}"
)
SYSTEM = {"role": "system", "content": "Be brief."}
USER = {"role": "user", "content": "Hi there\n <b>é 漢</b>"}
ANSWER = {"role": "assistant", "content": "Hello! How are you?"}
DIALOGUE = [SYSTEM, USER, ANSWER, {"role": "user", "content": "Fine"}, {"role": "assistant", "content": "Good."}]
TOOL = {"type": "function", "function": {"name": "add", "description": "adds & more", "parameters": {
    "type": "object", "properties": {"a": {"type": "integer", "description": "x"}}, "required": ["a"]}}}
CALL = {"role": "assistant", "content": None, "tool_calls": [
    {"id": "abcdef123", "type": "function", "function": {"name": "add", "arguments": {"a": 1}}}]}
RESULT = {"role": "tool", "name": "add", "tool_call_id": "abcdef123", "content": "2"}


def make(kind: str = "bytes", template: str | None = CHATML, adds_bos: bool = True) -> Tokenizer:
    """A tokenizer with <s>, <|im_start|> and <|im_end|>, of bytes or of sentencepiece."""
    named = {"bytes": "bytes", "austen": ASSETS}
    base = Tokenizer(parse_sentencepiece(spm_model(), "llama")) if kind == "llama" else load_tokenizer(named[kind])
    backend = tokenizers.Tokenizer.from_str(base.backend.to_str())
    names = ["<s>", "</s>", "<|im_start|>", "<|im_end|>"]
    backend.add_special_tokens([tokenizers.AddedToken(name, special=True, normalized=False) for name in names])
    bos, eos = (backend.token_to_id(name) for name in names[:2])
    return Tokenizer(Parts(backend, bos, (eos,), adds_bos=adds_bos, templates={} if template is None else {"default": template}))


@pytest.fixture(params=["bytes", "austen", "llama"])
def kind(request) -> str:
    return request.param


# --- ids --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("adds_bos", [True, False])
@pytest.mark.parametrize("template", [CHATML, LLAMA3, LLAMA2], ids=["chatml", "llama3", "llama2"])
def test_one_start_token_in_every_path(kind, template, adds_bos):
    """A15: template with and without the start token, tokenizer that adds it or not; training, generation, multi-turn."""
    tok = make(kind, template, adds_bos)
    due = 1 if adds_bos or "bos_token" in template else 0
    turns = DIALOGUE[1:]  # Llama 2's template has no place for the system message
    paths = [chat.encode(tok, turns[:1]), chat.encode(tok, turns, add_generation_prompt=False), chat.encode(tok, turns[:3]),
             chat.encode_training(tok, turns)[0]]
    for ids in paths:
        front = next(i for i, id in enumerate(ids) if id != tok.bos_id)
        assert front == due
        # Llama 2 begins each exchange anew; the others have no further one.
        assert ids.count(tok.bos_id) == due + (len(paths[0]) < len(ids) if template == LLAMA2 else 0)


@pytest.mark.parametrize("template", [CHATML, LLAMA3, LLAMA2, MARKED], ids=["chatml", "llama3", "llama2", "marked"])
@pytest.mark.parametrize("answer", ["Hello!", "\n\nafter newlines", " after a space", ""])
def test_generation_prompts_are_prefixes_of_the_dialogue(kind, template, answer):
    """A15, also where a token could run from the prompt's last newline or space into the answer."""
    tok = make(kind, template)
    turns = [USER, {"role": "assistant", "content": answer}, USER, ANSWER]
    whole = chat.encode(tok, turns, add_generation_prompt=False)
    assert chat.encode_training(tok, turns)[0] == whole
    for n in (1, 3):
        prompt = chat.encode(tok, turns[:n])
        assert whole[: len(prompt)] == prompt


def test_ids_are_those_of_transformers(kind, tmp_path):
    for number, template in enumerate((CHATML, LLAMA3, LLAMA2, MARKED)):
        tok = make(kind, template)
        tok.save(tmp_path / str(number))
        theirs = AutoTokenizer.from_pretrained(tmp_path / str(number))
        for turns, prompt in ((DIALOGUE[1:2], True), (DIALOGUE[1:4], True), (DIALOGUE[1:], False)):
            if template == MARKED and kind != "bytes" and len(turns) > 1:
                continue  # "assistant: Hello": a token would run from the prompt's last space into the answer, so ours is cut there
            ids = theirs.apply_chat_template(turns, add_generation_prompt=prompt, return_dict=False)
            if "bos_token" not in template:
                ids = [tok.bos_id, *ids]  # transformers leaves a tokenizer's own start token out
            assert chat.encode(tok, turns, prompt) == ids


# --- the assistant's tokens ---------------------------------------------------------------------------------


@pytest.mark.parametrize("template", [CHATML, LLAMA3, LLAMA2, MARKED], ids=["chatml", "llama3", "llama2", "marked"])
def test_the_mask_covers_the_answers_and_their_ends(kind, template):
    tok = make(kind, template)
    ids, mask = chat.encode_training(tok, DIALOGUE[1:])
    assert len(ids) == len(mask) and not mask[0]
    runs, texts = [], []
    for id, on, before in zip(ids, mask, [False, *mask]):
        if on and not before:
            runs.append([])
        if on:
            runs[-1].append(id)
    for run in runs:
        texts.append(tok.decode(run, skip_special=False).strip())
    end = "<|im_end|>" if "im_end" in template else "</s>"
    assert texts in ([f"Hello! How are you?{end}", f"Good.{end}"], [f"Hello! How are you? {end}", f"Good. {end}"])


def test_marked_spans_are_those_of_transformers(tmp_path):
    tok = make("bytes", MARKED, adds_bos=False)
    tok.save(tmp_path)
    theirs = AutoTokenizer.from_pretrained(tmp_path).apply_chat_template(DIALOGUE, return_assistant_tokens_mask=True, return_dict=True)
    ids, mask = chat.encode_training(tok, DIALOGUE)
    assert ids == theirs["input_ids"] and mask == [bool(m) for m in theirs["assistant_masks"]]


def test_dialogues_that_cannot_be_marked_are_refused():
    with pytest.raises(UserError, match="no message has the role 'assistant'"):
        chat.encode_training(make(), [USER])
    rewrites = "{% for m in messages %}{{ m.content if loop.last or m.role == 'user' else '...' }}|{% endfor %}"
    with pytest.raises(UserError, match="writes an answer differently in the whole dialogue"):
        chat.encode_training(make(template=rewrites), DIALOGUE)
    ids, mask = chat.encode_training(make(template=rewrites), [USER, ANSWER])  # its only answer is last: that can be marked
    assert bytes(i for i, on in zip(ids, mask) if on) == b"Hello! How are you?|"
    edits = "{% set x %}{% generation %}{{ messages[-1].content }}{% endgeneration %}{% endset %}{{ x | length }}"
    with pytest.raises(UserError, match="edits the text of its"):
        chat.encode_training(make(template=edits), [USER, ANSWER])
    with pytest.raises(UserError, match="put none of this dialogue inside"):
        chat.encode_training(make(template="{% if false %}{% generation %}{% endgeneration %}{% endif %}x"), [USER, ANSWER])


# --- what is refused, and what a template may do ----------------------------------------------------------------


def test_no_template_is_a_users_mistake():
    with pytest.raises(UserError, match="no chat template"):
        chat.render(make(template=None), [USER])
    tok = make(template=None)
    tok.templates = {"rag": "x"}
    with pytest.raises(UserError, match="it has only rag"):
        chat.encode(tok, [USER])


def test_the_tool_template_is_taken_for_tools():
    tok = make(template="plain")
    tok.templates["tool_use"] = "{{ tools | tojson }}"
    assert chat.render(tok, [USER]) == "plain" and json.loads(chat.render(tok, [USER], tools=[TOOL])) == [TOOL]


@pytest.mark.parametrize("messages", [[], "text", [["user", "x"]], [{"content": "x"}], [{"role": "user", "content": object()}]])
def test_malformed_messages_are_refused(messages):
    with pytest.raises(UserError, match=r"message|plain JSON"):
        chat.render(make(), messages)


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{% for m in messages %}", "Unexpected end of template"),
        ("{{ messages[0].content.missing.deeper }}", "has no attribute 'missing'"),
        ("{{ messages[0].content + 1 }}", "refused this conversation"),
        ("{{ ''.__class__.__mro__[1].__subclasses__() }}", "unsafe"),
        ("{% set _ = messages.append(1) %}", "unsafe"),
        ("{% include '/etc/passwd' %}", "refused this conversation"),
        ("{% for i in range(10 ** 9) %}x{% endfor %}", "too big"),
    ],
)
def test_templates_run_in_a_sandbox_and_their_refusals_are_clear(template, message):
    with pytest.raises(UserError, match=message):
        chat.render(make(template=template), [USER])


def test_template_features():
    tok = make(template="{{ bos_token }}{{ eos_token }}[{{ pad_token }}]{{ strftime_now('%Y') | length }}{{ messages[0].keys() | list }}"
                        "{{ extra }}{{ documents }}{% for i in range(9) %}{% if i == 2 %}{% break %}{% endif %}{{ i }}{% endfor %}")
    text = chat.render(tok, [{"role": "user", "content": "x", "name": None}], documents=[{"text": "é"}], extra="E")
    assert text == "<s></s>[]4['role', 'content']E[{'text': 'é'}]01"


# --- real templates -------------------------------------------------------------------------------------------

CASES = {
    "user": ([USER], {}),
    "system": ([SYSTEM, USER], {}),
    "turns": (DIALOGUE[:4], {}),
    "whole": (DIALOGUE, {"add_generation_prompt": False}),
    "tools offered": ([USER], {"tools": [TOOL]}),
    "tools used": ([SYSTEM, USER, CALL, RESULT], {"tools": [TOOL]}),
    "documents": ([USER], {"documents": [{"title": "T", "text": "body", "doc_id": "0"}]}),
    "out of order": ([ANSWER, USER, USER], {}),
    "parts": ([{"role": "user", "content": [{"type": "text", "text": "hey"}]}], {}),
    "variable": ([USER], {"enable_thinking": False}),
}


@pytest.mark.real
def test_seventy_templates_render_as_in_transformers(real_data, tmp_path):
    """The templates of llama.cpp's collection: the same text, or both refuse. Templates that print the time print the date only."""
    templates = members(only(real_data / "wheels", "llama_cpp_python-*.tar.gz"), r"models/templates/[^/]*\.jinja")
    assert len(templates) == 70
    tok = load_tokenizer(only(real_data / "model", "*.gguf"))
    tok.save(tmp_path)
    theirs, rendered, refused = AutoTokenizer.from_pretrained(tmp_path), 0, 0
    for name, content in templates.items():
        template = content.decode()
        tok.templates = {"default": template}
        for case, (messages, options) in CASES.items():
            options = {"add_generation_prompt": True} | options
            try:
                expected = theirs.apply_chat_template(messages, chat_template=template, tokenize=False, **options)
            except Exception:
                with pytest.raises(UserError):
                    chat.render(tok, messages, **options)
                refused += 1
                continue
            assert chat.render(tok, messages, **options) == expected, (name, case)
            rendered += 1
    assert rendered > 500 and refused > 10, (rendered, refused)  # both sides of the comparison were exercised


@pytest.mark.real
def test_smollm2s_own_template(real_data: Path):
    tok = load_tokenizer(only(real_data / "model", "*.gguf"))
    ids = chat.encode(tok, [{"role": "user", "content": "What is the capital of France?"}])
    end = "<|im_start|>user\nWhat is the capital of France?<|im_end|>\n<|im_start|>assistant\n"
    assert tok.decode(ids, skip_special=False).endswith(end)
    assert ids[:2] == [1, 9690]  # <|im_start|>system; its bos_id, once
    whole, mask = chat.encode_training(tok, DIALOGUE)
    assert tok.decode([i for i, on in zip(whole, mask) if on], skip_special=False) == "Hello! How are you?<|im_end|>\nGood.<|im_end|>\n"
