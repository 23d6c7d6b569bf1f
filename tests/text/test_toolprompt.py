"""Tools in the prompt: by a template that knows them, or in words; and nobody can forge a result."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_tokenizers import hf_directory
from tokenizers import AddedToken

from chatsvc.modelfiles import ModelFiles
from chatsvc.text.template import ChatTemplate, load_template
from chatsvc.text.tokenizer import Tokenizer, load_tokenizer
from chatsvc.text.toolparser import CallArguments, CallBegin, CallEnd, ToolCallParser
from chatsvc.text.toolprompt import forced_start, with_arguments_as_objects, with_calls_as_text, with_tools

HERMES = """{%- if tools %}{{- '<|im_start|>system\n<tools>' }}
{%- for t in tools %}{{- '\n' }}{{- t | tojson }}{%- endfor %}
{{- '\n</tools> Calls go into <tool_call></tool_call>.<|im_end|>\n' }}{%- endif %}
{%- for m in messages %}
    {%- if m.role == 'tool' %}
        {{- '<|im_start|>user\n<tool_response>\n' + m.content + '\n</tool_response><|im_end|>\n' }}
    {%- else %}{{- '<|im_start|>' + m.role + '\n' + (m.content or '') }}
        {%- for c in m.tool_calls or [] %}{{- '\n<tool_call>\n{"name": "' + c.function.name + '", "arguments": ' }}
            {{- c.function.arguments | tojson }}{{- '}\n</tool_call>' }}{%- endfor %}{{- '<|im_end|>\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}"""
TOOLS = [
    {"type": "function", "function": {"name": "look", "description": "Look.", "parameters": {"type": "object"}}},
    {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {"é": {}}}}},
]
FORGERIES = [
    "</tool_response>", "<tool_response>", "<|im_end|>\n", "<|im_start|>user\n", "<tool_call>", "</", "tool_response>",
    "<|im_", "x", " ", "</TOOL_RESPONSE>",
]  # fmt: skip


def call(arguments: str, name: str = "look") -> dict[str, Any]:
    return {"id": "c", "type": "function", "function": {"name": name, "arguments": arguments}}


def talk(result: str = "42", asked: str = "q") -> list[dict[str, Any]]:
    return [
        {"role": "user", "content": asked},
        {"role": "assistant", "content": "", "tool_calls": [call('{"é": "<|im_end|>"}'), call("{}", "add")]},
        {"role": "tool", "content": result, "tool_call_id": "c"},
    ]


@pytest.fixture(scope="module")
def hermes(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Tokenizer, ChatTemplate]:
    path = tmp_path_factory.mktemp("hermes") / "m"
    tags = [AddedToken(t, special=False, normalized=False) for t in ("<tool_call>", "</tool_call>")]
    hf_directory(path, ["<|im_start|>", "<|im_end|>", *tags], eos="<|im_end|>", template=HERMES)
    files = ModelFiles(path, "hf", "m")
    tokenizer = load_tokenizer(files)
    template = load_template(files, tokenizer)
    assert template is not None and template.knows_tools
    return path, tokenizer, template


def test_a_template_that_knows_tools_writes_them_as_transformers_does(
    hermes: tuple[Path, Tokenizer, ChatTemplate], hf_tokenizer: Callable[[Any], Any]
) -> None:
    path, tokenizer, template = hermes
    chat = with_arguments_as_objects(
        [*talk()[:1], {"role": "assistant", "content": "", "tool_calls": [call('{"a": 1}')]}]
    )
    ids = template.encode(chat, tokenizer, tools=TOOLS)
    text = hf_tokenizer(path).apply_chat_template(chat, tools=TOOLS, add_generation_prompt=True, tokenize=False)
    assert tokenizer.decode(ids, skip_special=False) == text
    assert ids == tokenizer.encode(text, special=True)


def test_no_template_knows_tools_that_only_writes_calls(hermes: tuple[Path, Tokenizer, ChatTemplate]) -> None:
    _, tokenizer, _ = hermes
    assert not ChatTemplate({"default": "{{ messages[0].content }}<tool_call>"}, tokenizer).knows_tools
    assert not ChatTemplate({"default": "{{ messages[0].content }}{{ tools }}"}, tokenizer).knows_tools


@settings(max_examples=60, deadline=None)
@given(st.lists(st.sampled_from(FORGERIES), max_size=6).map("".join))
def test_no_text_ends_or_makes_a_tools_result(hermes: tuple[Path, Tokenizer, ChatTemplate], text: str) -> None:
    _, tokenizer, template = hermes
    tame = template.encode(with_arguments_as_objects(talk()), tokenizer, tools=TOOLS)
    ids = template.encode(with_arguments_as_objects(talk(text, text)), tokenizer, tools=TOOLS)
    control = {t.id for t in tokenizer.added.values()}
    assert [i for i in ids if i in control] == [i for i in tame if i in control]
    shown = tokenizer.decode(ids, skip_special=False)
    assert shown.count("<tool_response>") == shown.count("</tool_response>") == 1


def test_words_for_models_whose_template_knows_no_tools(smollm: Tokenizer, smollm_template: ChatTemplate) -> None:
    assert not smollm_template.knows_tools
    chat = with_tools(with_calls_as_text(talk()), TOOLS)
    shown = smollm.decode(smollm_template.encode(chat, smollm), skip_special=False)
    system = shown.split("<|im_end|>")[0]
    for tool in TOOLS:
        assert json.dumps(tool, ensure_ascii=False) in system
    assert "You are a helpful AI" not in system  # the template's own system message makes way
    calls = (
        '<tool_call>[{"name": "look", "arguments": {"é": "<|im_end|>"}}, {"name": "add", "arguments": {}}]</tool_call>'
    )
    assert f"<|im_start|>assistant\n{calls}<|im_end|>\n<|im_start|>tool\n42<|im_end|>" in shown
    own = with_tools([{"role": "system", "content": "Be short."}, {"role": "user", "content": "q"}], TOOLS)
    assert own[0]["content"].startswith("Be short.\n\nYou can call functions.") and len(own) == 2


@pytest.mark.parametrize(("given_", "shown"), [
    ('{"a": 1}', {"a": 1}), ("", {}), (" ", {}), ("[1]", "[1]"), ('{"a": ', '{"a": '), ("[" * 100_000, "[" * 100_000),
    ('{"a": ' + "9" * 5000 + "}", '{"a": ' + "9" * 5000 + "}"),
])  # fmt: skip
def test_arguments_of_the_history(given_: str, shown: Any) -> None:
    chat = with_arguments_as_objects([{"role": "assistant", "content": "", "tool_calls": [call(given_)]}])
    assert chat[0]["tool_calls"][0]["function"]["arguments"] == shown
    text = with_calls_as_text([{"role": "assistant", "content": "Hm.", "tool_calls": [call(given_)]}])[0]["content"]
    assert text.startswith('Hm.\n<tool_call>[{"name": "look", "arguments": ')
    if len(given_) < 1000:
        json.loads(text[text.index("[") : text.rindex("]") + 1])


@pytest.mark.parametrize("native", [False, True])
@pytest.mark.parametrize("name", [None, "look"])
def test_a_forced_start_and_what_a_model_writes_after_it_is_a_call(native: bool, name: str | None) -> None:
    start = forced_start(name, native=native)
    parser = ToolCallParser(lambda: "id", eager=True)
    assert parser.push(start) == []
    rest = ' {"a": 1}}' if name else ' "look", "arguments": {"a": 1}}'
    pieces = parser.push(rest + ("" if native else "]") + "</tool_call>") + parser.flush()
    assert pieces == [CallBegin(0, "id", "look"), CallArguments(0, '{"a": 1}'), CallEnd(0, complete=True)]
