"""A response as an object: from its settings and its answer, running or stored, and as the past of the next one."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from chatsvc.api.responses_delete import is_blank, is_deleted
from chatsvc.api.responses_output import finished_fields, response_usage, whole_output
from chatsvc.api.tools import CallReading
from chatsvc.engine.output import FinishReason
from chatsvc.sessions.base import Message, Session

KEY = "response"  # in Message.extra
_ID = re.compile(r"resp_(r?[0-9a-f]{31,32})([0-9a-f]{32})")


def kept_in(response_id: str) -> tuple[str, str] | None:
    """(session, message) whose ids that of a response is made of; None when it is none."""
    ids = _ID.fullmatch(response_id)
    return None if ids is None else (f"sess_{ids[1]}", f"msg_{ids[2]}")


@dataclass(frozen=True, slots=True)
class Settings:
    """What a response was asked for.

    Attributes:
        id: ``resp_...``.
        hexid: makes the ids of its items.
        created: Unix time, seconds.
        fields: what the object repeats of the request.
        calls: how function calls are read.
    """

    id: str
    hexid: str
    created: int
    fields: dict[str, Any]
    calls: CallReading | None

    def named(self, session_id: str, message_id: str) -> Settings:
        """With the id of the session and the answer that keep it."""
        session, message = session_id.removeprefix("sess_"), message_id.removeprefix("msg_")
        return replace(self, id=f"resp_{session}{message}", hexid=message)

    def extra(self) -> dict[str, Any]:
        """For ``Message.extra`` of the answer."""
        calls = None
        if self.calls is not None:
            calls = {"start": self.calls.start, "names": sorted(self.calls.names), "max": self.calls.max_calls}
        return {KEY: self.fields, "calls": calls}

    @staticmethod
    def known(message: Message) -> bool:
        """Whether the message is the answer of a response."""
        return message.role == "assistant" and KEY in (message.extra or {})

    @classmethod
    def of(cls, session_id: str, message: Message) -> Settings:
        """The settings that :meth:`extra` kept."""
        extra = message.extra or {}
        calls = extra.get("calls")
        reading = calls and CallReading(calls["start"], frozenset(calls["names"]), calls["max"])
        return cls("", "", int(message.created_at), extra[KEY], reading or None).named(session_id, message.id)

    def output(self, pieces: Sequence[str], finish: FinishReason | None) -> list[dict[str, Any]]:
        """The items of an answer; ``finish`` is None while it runs."""
        return whole_output(self.hexid, self.calls, pieces, complete=None if finish is None else finish == "stop")

    def response(
        self, output: list[dict[str, Any]], finished: dict[str, Any], usage: dict[str, Any] | None
    ) -> dict[str, Any]:
        """The object; ``usage`` is chat's."""
        return {
            "id": self.id,
            "object": "response",
            "created_at": self.created,
            **finished,
            **self.fields,
            "output": output,
            "reasoning": {"effort": None, "summary": None},
            "text": {"format": {"type": "text"}},
            "truncation": "disabled",
            "usage": response_usage(usage),
        }


def response_of(session_id: str, message: Message) -> dict[str, Any]:
    """The response whose answer ``message`` is."""
    settings = Settings.of(session_id, message)
    finish: FinishReason | None = None
    if message.status == "done":
        finish = message.finish_reason or "stop"
    elif message.status != "running":
        finish = "abort" if message.status == "cancelled" else "error"
    error = (message.error or {}).get("message")
    fields = finished_fields(finish, interrupted=message.status == "interrupted", error=error)
    return settings.response(settings.output([message.content], finish), fields, message.usage)


@dataclass(frozen=True, slots=True)
class History:
    """A branch as a chat.

    Attributes:
        path: its messages, from the root.
        chat: with the calls of its answers, for :func:`chatsvc.api.responses_input.check_outputs`.
        ids: index into :attr:`shown` -> the ids that the answer was generated as.
    """

    path: list[Message]
    chat: list[dict[str, Any]]
    ids: dict[int, list[int]]

    @property
    def shown(self) -> list[dict[str, Any]]:
        """As the template gets it: the calls of an answer whose ids are known are in the ids."""
        return [
            {k: v for k, v in m.items() if k != "tool_calls"} if i in self.ids else m for i, m in enumerate(self.chat)
        ]


def path_of(session: Session, leaf: str) -> list[Message]:
    """The branch that ends with the message ``leaf``, from its root; empty when there is none."""
    by_id = {m.id: m for m in session.messages}
    path: list[Message] = []
    at: str | None = leaf if leaf in by_id else None
    while at is not None:
        path.append(by_id[at])
        at = path[-1].parent_id
    return path[::-1]


def history(session: Session, leaf: str) -> History | None:
    """The branch that ends with the answer ``leaf``; None when there is no response of that name (any more), or a text
    of its past is gone."""
    path = path_of(session, leaf)
    if not path or not Settings.known(path[-1]) or is_deleted(path[-1]) or any(map(is_blank, path)):
        return None
    chat: list[dict[str, Any]] = []
    ids: dict[int, list[int]] = {}
    for message in path:
        if message.role == "user":
            chat += (message.extra or {}).get("items") or [{"role": "user", "content": message.content}]
            continue
        said = _said(session.id, message)
        if message.token_ids and not _start(message):
            ids[len(chat)] = message.token_ids
            said["content"] = message.content
        chat.append(said)
    return History(path, chat, ids)


def _start(message: Message) -> str:
    """What the answer was made to begin with, which is not in its ids."""
    calls = (message.extra or {}).get("calls") or {}
    return str(calls.get("start", ""))


def _said(session_id: str, message: Message) -> dict[str, Any]:
    """An answer as a chat message."""
    if not Settings.known(message):
        return {"role": "assistant", "content": message.content}
    output = Settings.of(session_id, message).output([message.content], "stop")
    if any(item["status"] == "incomplete" for item in output):  # a broken call is told as it was written
        return {"role": "assistant", "content": message.content}
    texts = [item["content"][0]["text"] for item in output if item["type"] == "message"]
    said: dict[str, Any] = {"role": "assistant", "content": "\n".join(texts)}
    calls = [item for item in output if item["type"] == "function_call"]
    if calls:
        said["tool_calls"] = [
            {"id": c["call_id"], "type": "function", "function": {"name": c["name"], "arguments": c["arguments"]}}
            for c in calls
        ]
    return said
