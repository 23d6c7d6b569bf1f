"""From messages, text or ids to prompt token ids. Pure and blocking: callers put long ones into a thread."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from chatsvc.api.schema import ChatMessage, ContentPart
from chatsvc.api.services import Template, TextCodec
from chatsvc.api.tools import ToolUse
from chatsvc.errors import InvalidRequest
from chatsvc.text.toolprompt import with_arguments_as_objects, with_calls_as_text, with_tools


def template_messages(messages: list[ChatMessage]) -> list[dict[str, Any]]:
    """Messages as chat templates expect them: content is one string, ``developer`` is ``system``.

    Raises:
        InvalidRequest: a part that is not text, content missing where it is needed, or a tool's result without a call
            before it that it belongs to; ``param`` is its path.
    """
    out: list[dict[str, Any]] = []
    known: set[str] = set()
    for i, message in enumerate(messages):
        text = _text(message, f"messages.{i}")
        known.update(c.id for c in message.tool_calls or ())
        if message.role == "tool":
            _check_call_id(message.tool_call_id, known, f"messages.{i}.tool_call_id")
        item: dict[str, Any] = {"role": "system" if message.role == "developer" else message.role, "content": text}
        if message.name is not None:
            item["name"] = message.name
        if message.tool_call_id is not None:
            item["tool_call_id"] = message.tool_call_id
        if message.tool_calls:
            item["tool_calls"] = [
                {
                    "id": c.id,
                    "type": "function",
                    "function": {"name": c.function.name, "arguments": c.function.arguments},
                }
                for c in message.tool_calls
            ]
        out.append(item)
    return out


def work(messages: list[dict[str, Any]], tools: ToolUse | None) -> int:
    """About how many characters :func:`render` has to go through."""
    calls = sum(len(c["function"]["arguments"]) for m in messages for c in m.get("tool_calls", ()))
    return sum(len(m["content"]) + 100 for m in messages) + calls + (tools.size if tools else 0)


def render(
    template: Template,
    messages: list[dict[str, Any]],
    tokenizer: TextCodec,
    *,
    add_generation_prompt: bool,
    continue_final_message: bool,
    tools: ToolUse | None = None,
    assistant_ids: Mapping[int, Sequence[int]] | None = None,
) -> list[int]:
    """Prompt token ids of a conversation, and proof that the template did not drop a part of it without a word.

    Tools and calls are written by the template when it knows them, else by :mod:`chatsvc.text.toolprompt`. Many
    templates print no names. So what carries them is rendered once more without: equal ids mean they were dropped, and
    the model would answer to a conversation it never saw.

    Args:
        assistant_ids: index of an answer -> the ids it was generated as, to be taken over as they are.

    Raises:
        InvalidRequest: the template refuses the messages, or does not show a field of theirs (``param`` names it).
    """

    def encode(chat: list[dict[str, Any]]) -> list[int]:
        return template.encode(
            chat,
            tokenizer,
            tools=shown,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            assistant_ids=ids_at,
        )

    shown = None
    ids_at = dict(assistant_ids or {})
    if template.knows_tools:
        messages = with_arguments_as_objects(messages)
        shown = tools.shown if tools else None
    else:
        messages = with_calls_as_text(messages)
        if tools:
            told = with_tools(messages, tools.shown)
            ids_at = {i + len(told) - len(messages): ids for i, ids in ids_at.items()}
            messages = told
    ids = encode(messages)
    for key in ("tool_calls", "name"):
        # A tool's result may repeat the tool's name; the call before it has said it already.
        having = [i for i, m in enumerate(messages) if key in m and m["role"] != "tool"]
        if having and encode([{k: v for k, v in m.items() if k != key} for m in messages]) == ids:
            path = f"messages.{having[0]}.{key}"
            raise InvalidRequest(
                f"{path}: the model's chat template does not show this field, the model would not see it", param=path
            )
    if tools and (start := tools.start(native=template.knows_tools)):
        ids += tokenizer.encode(start, special=True, continuing=True)
    return ids


def _check_call_id(call_id: str | None, known: set[str], path: str) -> None:
    if call_id is None:
        raise InvalidRequest(f"{path}: This field is required", param=path)
    if call_id not in known:
        raise InvalidRequest(
            f"{path}: there is no tool call with the id {call_id[:64]!r} before its result", param=path
        )


def _text(message: ChatMessage, path: str) -> str:
    content = message.content
    if isinstance(content, str):
        return content
    if content is None:
        if message.role == "assistant":  # a turn that only called tools, or said nothing
            return ""
        raise InvalidRequest(f"{path}.content: This field is required", param=f"{path}.content")
    return "".join(_part(part, message.role, f"{path}.content.{j}") for j, part in enumerate(content))


def _part(part: ContentPart, role: str, path: str) -> str:
    if part.type == "text" and part.text is not None:
        return part.text
    if part.type == "refusal" and role == "assistant" and part.refusal is not None:
        return part.refusal
    if part.type in ("text", "refusal"):
        raise InvalidRequest(f"{path}.{part.type}: This field is required", param=f"{path}.{part.type}")
    raise InvalidRequest(
        f"{path}.type: parts of type {part.type[:40]!r} are not supported, only text", param=f"{path}.type"
    )


def prompt_size(prompt: Any) -> int:
    """A cheap measure of the work: characters or ids."""
    if isinstance(prompt, str):
        return len(prompt)
    if isinstance(prompt, list):
        return sum(len(p) if isinstance(p, (str, list)) else 1 for p in prompt)
    return 0


def prompts(prompt: Any, tokenizer: TextCodec, vocab_size: int, max_prompts: int) -> list[list[int]]:
    """The prompts of a plain completion, encoded. Text gets the begin token if the model has one; ids stay as they are.

    Here the caller writes the whole prompt, control tokens included, as with other servers. User text that has to be
    kept apart from control tokens belongs into chat messages.

    Raises:
        InvalidRequest: wrong shape, nothing in it, an id outside the vocabulary, or too many prompts.
    """
    if isinstance(prompt, str):
        return [_encode(prompt, tokenizer)]
    if not isinstance(prompt, list):
        raise _wrong("has to be a string, a list of strings, of token ids, or of lists of token ids")
    if not prompt:
        raise _wrong("is empty")
    if type(prompt[0]) is int or type(prompt[0]) is float:
        return [_ids(prompt, vocab_size)]
    if len(prompt) > max_prompts:
        raise _wrong(f"holds {len(prompt)} prompts, at most {max_prompts} are allowed")
    if all(isinstance(p, str) for p in prompt):
        return [_encode(p, tokenizer) for p in prompt]
    if all(isinstance(p, list) for p in prompt):
        return [_ids(p, vocab_size) for p in prompt]
    raise _wrong("has to be a string, a list of strings, of token ids, or of lists of token ids")


def _encode(text: str, tokenizer: TextCodec) -> list[int]:
    ids = tokenizer.encode(text, special=True, bos=True)
    if not ids:
        raise _wrong("is empty")
    return ids


def _ids(ids: list[Any], vocab_size: int) -> list[int]:
    if not ids:
        raise _wrong("is empty")
    for token in ids:
        if type(token) is not int:
            raise _wrong("mixes token ids with something that is no integer")
        if not 0 <= token < vocab_size:
            raise _wrong(f"holds the token id {token}, outside 0..{vocab_size - 1}")
    return ids


def _wrong(what: str) -> InvalidRequest:
    return InvalidRequest(f"prompt: {what}", param="prompt")
