"""The items that a response was made from: its whole past, and what was new."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from chatsvc.api.responses_object import Settings, path_of
from chatsvc.errors import InvalidRequest
from chatsvc.sessions.base import Message, Session

Item = dict[str, Any]

ITEMS_LIMIT = 20  # of a page, when nothing is said
ITEMS_MAX = 100


def input_items(session: Session, answer: Message) -> list[Item]:
    """Oldest first: of every response before this one its input and output, and then the input of this one."""
    items: list[Item] = []
    for message in path_of(session, answer.id)[:-1]:
        if message.role == "user":
            chat = (message.extra or {}).get("items") or [{"role": "user", "content": message.content}]
            items += _said(message.id.removeprefix("msg_"), chat)
        elif Settings.known(message):
            items += Settings.of(session.id, message).output([message.content], "stop")
        else:
            items.append(_message(f"{message.id}_0", "assistant", message.content))
    return items


def page(items: Sequence[Item], limit: int, after: str | None) -> dict[str, Any]:
    """OpenAI's list of at most ``limit`` items, from the one that follows the item ``after``.

    Raises: InvalidRequest when no item has that id.
    """
    begin = 0
    if after is not None:
        begin = next((i + 1 for i, item in enumerate(items) if item["id"] == after), 0)
        if not begin:
            raise InvalidRequest("after: there is no such item", param="after")
    data = list(items[begin : begin + limit])
    return {
        "object": "list",
        "data": data,
        "first_id": data[0]["id"] if data else None,
        "last_id": data[-1]["id"] if data else None,
        "has_more": begin + limit < len(items),
    }


def _said(hexid: str, chat: Sequence[dict[str, Any]]) -> Iterator[Item]:
    """The items of an input; the inverse of :func:`chatsvc.api.responses_input.input_messages`. Their ids say where
    they stand, so they are the same at every look."""
    number = 0
    for message in chat:
        calls = message.get("tool_calls", ())
        if message["role"] == "tool":
            yield {
                "id": f"fco_{hexid}_{number}",
                "type": "function_call_output",
                "status": "completed",
                "call_id": message["tool_call_id"],
                "output": message["content"],
            }
            number += 1
        elif message["content"] or not calls:
            yield _message(f"msg_{hexid}_{number}", message["role"], message["content"])
            number += 1
        for call in calls:
            yield {
                "id": f"fc_{hexid}_{number}",
                "type": "function_call",
                "status": "completed",
                "call_id": call["id"],
                **call["function"],
            }
            number += 1


def _message(item_id: str, role: str, text: str) -> Item:
    part: dict[str, Any] = {"type": "input_text", "text": text}
    if role == "assistant":
        part = {"type": "output_text", "text": text, "annotations": [], "logprobs": []}
    return {"id": item_id, "type": "message", "status": "completed", "role": role, "content": [part]}
