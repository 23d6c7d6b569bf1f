"""From the items of ``/v1/responses`` to a chat: what is new, and what was said before."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from chatsvc.api.responses_schema import InputItem, InputPart, ResponseRequest
from chatsvc.api.schema import FunctionChoice, FunctionSpec, NamedTool, Tool
from chatsvc.api.tools import ToolUse, tool_use
from chatsvc.errors import InvalidRequest

_TEXT = {"input_text": "text", "output_text": "text", "text": "text", "refusal": "refusal"}


def input_messages(asked: str | Sequence[InputItem]) -> list[dict[str, Any]]:
    """The input as chat messages. Calls that follow each other, or an answer, are one turn of the assistant.

    Raises:
        InvalidRequest: an item or part that is not offered, or that lacks a field; ``param`` is its path.
    """
    if isinstance(asked, str):
        return [{"role": "user", "content": asked}]
    chat: list[dict[str, Any]] = []
    for i, item in enumerate(asked):
        path = f"input.{i}"
        kind = item.type or "message"
        if kind == "message":
            role = _required(item.role, f"{path}.role")
            content = _text(_required(item.content, f"{path}.content"), f"{path}.content")
            chat.append({"role": "system" if role == "developer" else role, "content": content})
        elif kind == "function_call":
            call = {
                "id": _required(item.call_id, f"{path}.call_id"),
                "type": "function",
                "function": {
                    "name": _required(item.name, f"{path}.name"),
                    "arguments": _required(item.arguments, f"{path}.arguments"),
                },
            }
            if not chat or chat[-1]["role"] != "assistant":
                chat.append({"role": "assistant", "content": ""})
            chat[-1].setdefault("tool_calls", []).append(call)
        elif kind == "function_call_output":
            output = _text(_required(item.output, f"{path}.output"), f"{path}.output")
            call_id = _required(item.call_id, f"{path}.call_id")
            chat.append({"role": "tool", "content": output, "tool_call_id": call_id})
        else:
            raise InvalidRequest(
                f"{path}.type: items of type {kind[:40]!r} are not supported, only message, function_call and"
                " function_call_output",
                param=f"{path}.type",
            )
    return chat


def check_outputs(chat: Sequence[dict[str, Any]]) -> None:
    """Every result has to belong to a call before it. Raises: InvalidRequest."""
    known: set[str] = set()
    for message in chat:
        known |= {call["id"] for call in message.get("tool_calls", ())}
        if message["role"] == "tool" and message["tool_call_id"] not in known:
            raise InvalidRequest(
                f"input: there is no function call with the call_id {message['tool_call_id'][:64]!r} before its output",
                param="input",
            )


def with_instructions(instructions: str | None, chat: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The chat with the instructions as its system message; in front of one that is there, for many models know one."""
    if not instructions:
        return list(chat)
    if chat and chat[0]["role"] == "system":
        return [{"role": "system", "content": f"{instructions}\n\n{chat[0]['content']}"}, *chat[1:]]
    return [{"role": "system", "content": instructions}, *chat]


def longer_field(instructions: str | None, chat: Sequence[dict[str, Any]]) -> str:
    """The field to shorten when both do not fit. ``chat``: without the instructions."""
    return "instructions" if len(instructions or "") > sum(len(m["content"]) for m in chat) else "input"


def shown_text(chat: Sequence[dict[str, Any]]) -> str:
    """What a reader of the session sees of the input: the words of the user, else the results of tools."""
    texts = [m["content"] for m in chat if m["role"] == "user"] or [m["content"] for m in chat if m["role"] == "tool"]
    return "\n\n".join(texts)


def response_tools(body: ResponseRequest) -> ToolUse | None:
    """The tools as chat has them. Raises: as :func:`chatsvc.api.tools.tool_use`."""
    tools = []
    for i, tool in enumerate(body.tools or ()):
        if tool.strict:
            raise InvalidRequest(
                f"tools.{i}.strict: true is not supported: the arguments are not forced to follow the schema",
                param=f"tools.{i}.strict",
                code="unsupported_parameter",
            )
        spec = FunctionSpec(name=tool.name, description=tool.description, parameters=tool.parameters, strict=None)
        tools.append(Tool(type="function", function=spec))
    choice = body.tool_choice
    if choice is not None and not isinstance(choice, str):
        return tool_use(
            tools, NamedTool(type="function", function=FunctionChoice(name=choice.name)), body.parallel_tool_calls
        )
    return tool_use(tools, choice, body.parallel_tool_calls)


def _required(value: Any, path: str) -> Any:
    if value is None:
        raise InvalidRequest(f"{path}: This field is required", param=path)
    return value


def _text(content: str | list[InputPart], path: str) -> str:
    if isinstance(content, str):
        return content
    texts = []
    for j, part in enumerate(content):
        name = _TEXT.get(part.type)
        if name is None:
            raise InvalidRequest(
                f"{path}.{j}.type: parts of type {part.type[:40]!r} are not supported, only text",
                param=f"{path}.{j}.type",
            )
        texts.append(_required(getattr(part, name), f"{path}.{j}.{name}"))
    return "".join(texts)
