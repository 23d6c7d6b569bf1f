"""The part of ``/openapi.json`` about sessions."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from chatsvc.api.answers_schema import ChatChunk, Shape, Usage
from chatsvc.api.openapi import GENERATING, PLAIN, Operation
from chatsvc.api.sessions_schema import ForkRequest, MessageRequest, RegenerateRequest, SessionRequest

MISSING = {404: "There is no such session or message, or it is not the caller's"}
STORE = {503: "The session store cannot answer; Retry-After says when to come back"}
READING = MISSING | STORE
TURN = GENERATING | MISSING | {409: "A turn is running and being read; error.turn_id names it"}
STREAM_NOTE = "Events have the id turn:choice:tokens; the last one is [DONE]"
SNAPSHOT_NOTE = "An event named snapshot has the whole text so far, in place of all before it"


class Timing(Shape):
    """How fast an answer was; null when there was no first or no second token."""

    first_token_seconds: float | None
    tokens_per_second: float | None


class MessageCard(Shape):
    """A message of a session."""

    id: str
    parent_id: str | None
    role: Literal["user", "assistant"]
    content: str
    status: Literal["running", "done", "cancelled", "failed", "interrupted"]
    finish_reason: Literal["stop", "length"] | None
    usage: Usage | None
    timing: Timing | None
    created_at: int


class SessionCard(Shape):
    """A session; without ``messages`` in lists. ``kind``: which API made it."""

    id: str
    object: Literal["session"]
    kind: Literal["chat", "response"]
    title: str
    system: str
    created_at: int
    updated_at: int
    messages: list[MessageCard] = Field(default_factory=list)


class SessionList(Shape):
    """The caller's sessions, newest first."""

    object: Literal["list"]
    data: list[SessionCard]


class SessionDeleted(Shape):
    """What DELETE answers."""

    id: str
    object: Literal["session.deleted"]
    deleted: bool


class TurnCancelled(Shape):
    """``turn_id`` is null and ``cancelled`` false when nothing was running."""

    id: str
    turn_id: str | None
    cancelled: bool


ONE = "/v1/sessions/{id}"
LIMIT = {"type": "integer", "minimum": 1, "maximum": 200, "default": 50}
KIND = {"type": "string", "enum": ["chat", "response"]}

SESSION_OPERATIONS = (
    Operation(
        "post", "/v1/sessions", "Begin a session", SessionRequest, SessionCard, errors=PLAIN | STORE, success=201
    ),
    Operation(
        "get",
        "/v1/sessions",
        "The newest sessions",
        answer=SessionList,
        errors=PLAIN | STORE,
        query={"limit": LIMIT, "kind": KIND},
    ),
    Operation("get", ONE, "One session with its messages", answer=SessionCard, errors=READING),
    Operation("patch", ONE, "Another title or system prompt", SessionRequest, SessionCard, errors=PLAIN | READING),
    Operation("delete", ONE, "Delete it; a running answer ends", answer=SessionDeleted, errors=READING),
    Operation(
        "post",
        f"{ONE}/messages",
        f"Say something and stream the answer. {STREAM_NOTE}",
        MessageRequest,
        events=ChatChunk,
        errors=TURN,
    ),
    Operation(
        "post",
        f"{ONE}/messages/{{mid}}/regenerate",
        f"Answer again, or go on with an answer that was cut short, as a branch. {STREAM_NOTE}",
        RegenerateRequest,
        events=ChatChunk,
        errors=TURN,
    ),
    Operation(
        "post",
        f"{ONE}/fork",
        "A branch as a new session",
        ForkRequest,
        SessionCard,
        errors=PLAIN | READING | {409: "The message is still being written"},
        success=201,
    ),
    Operation("post", f"{ONE}/cancel", "End the running answer", answer=TurnCancelled, errors=READING),
    Operation(
        "get",
        f"{ONE}/stream",
        f"Rejoin the running answer, from Last-Event-ID or from its start. {STREAM_NOTE}. {SNAPSHOT_NOTE}",
        events=ChatChunk,
        errors=READING,
        empty="Nothing is running",
    ),
)
