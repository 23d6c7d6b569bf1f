"""Tools for models whose chat template does not know them in the form that :mod:`chatsvc.text.toolparser` reads.

The functions are described in the system message, and calls in the history are written as the model is asked to write
them. The form is that of Hermes and SmolLM: a JSON list inside ``<tool_call>``.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from chatsvc.text.toolparser import CLOSE, OPEN

_BEFORE = "You can call functions. Inside <tools> each line describes one, as JSON:\n<tools>\n"
_AFTER = (
    f"\n</tools>\nTo call functions, answer with a JSON list of the calls inside {OPEN}, and with nothing else:\n"
    f'{OPEN}[{{"name": "name of the function", "arguments": {{"parameter": "value"}}}}]{CLOSE}\n'
    "The results come in the next message. When no function helps, answer in words."
)


def with_tools(messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The conversation with the description of ``tools`` at the end of its system message, or in a new one in front."""
    text = _BEFORE + "\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools) + _AFTER
    chat = [dict(message) for message in messages]
    if chat and chat[0].get("role") == "system":
        chat[0]["content"] = f"{chat[0]['content']}\n\n{text}" if chat[0]["content"] else text
    else:
        chat.insert(0, {"role": "system", "content": text})
    return chat


def with_calls_as_text(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The conversation with the calls of the assistant's turns written into their contents."""
    chat = []
    for message in messages:
        plain = {key: value for key, value in message.items() if key != "tool_calls"}
        if calls := message.get("tool_calls"):
            text = f"{OPEN}[{', '.join(_call(c['function']) for c in calls)}]{CLOSE}"
            plain["content"] = f"{plain['content']}\n{text}" if plain.get("content") else text
        chat.append(plain)
    return chat


def with_arguments_as_objects(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The conversation as templates that know tools expect it: arguments are objects. What is no object stays text."""
    chat = []
    for message in messages:
        plain = dict(message)
        if calls := message.get("tool_calls"):
            plain["tool_calls"] = [
                {**c, "function": {**c["function"], "arguments": arguments(c["function"]["arguments"])}} for c in calls
            ]
        chat.append(plain)
    return chat


def arguments(text: str) -> Any:
    """The object that ``text`` holds as JSON, or ``text`` itself."""
    if not text.strip():
        return {}
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return text
    return value if isinstance(value, dict) else text


def forced_start(name: str | None, *, native: bool) -> str:
    """How an answer begins that has to be a call; of the function ``name``, or of whichever the model picks.

    Args:
        native: the model's template knows tools, and one call stands in each tag.
    """
    start = f"{OPEN}\n{{" if native else f"{OPEN}[{{"
    return f'{start}"name":' if name is None else f'{start}"name": {json.dumps(name)}, "arguments":'


def _call(function: Mapping[str, Any]) -> str:
    text = str(function["arguments"]).strip() or "{}"
    shown = text if isinstance(arguments(text), dict) else json.dumps(text, ensure_ascii=False)
    return f'{{"name": {json.dumps(function["name"], ensure_ascii=False)}, "arguments": {shown}}}'
