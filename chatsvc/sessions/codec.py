"""What the stores share: the bytes of a message, the limits of a session, and the form of an id."""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Iterable
from dataclasses import asdict
from typing import get_args

from chatsvc.errors import InvalidRequest
from chatsvc.sessions.base import Kind, Message, TurnRunning

MAX_SESSION_MESSAGES = 4096
"""Most messages of one session (both sides counted)."""

MAX_SESSION_BYTES = 16 * 1024 * 1024
"""Most bytes of one session's messages as stored. Checked when messages are appended: an answer that is being written
when the limit is reached is still kept whole, so a session holds at most this plus the answers then running."""

KINDS: tuple[Kind, ...] = get_args(Kind)

_RESPONSE = "sess_r"  # the letter is no hexadecimal digit
_ID = re.compile(r"[A-Za-z0-9_-]{1,64}\Z")


def new_id(prefix: str) -> str:
    """An unguessable id, 128 random bits: ``sess_...``, ``msg_...``."""
    return f"{prefix}_{secrets.token_hex(16)}"


def new_session_id(kind: Kind) -> str:
    """As unguessable as :func:`new_id` makes them, but for four bits; says what the session is, see :func:`kind_of`."""
    return new_id("sess") if kind == "chat" else f"{_RESPONSE}{secrets.token_hex(16)[1:]}"


def kind_of(session_id: str) -> Kind:
    """Which API made a session. That never changes, and so its id tells it: whoever lists ids need not look further."""
    return "response" if session_id.startswith(_RESPONSE) else "chat"


def is_id(text: str) -> bool:
    """Could this be an id? Anything else is not looked up at all (it never becomes part of a key)."""
    return _ID.match(text) is not None


def encode(message: Message) -> str:
    """A message as one line of JSON."""
    return json.dumps(asdict(message), ensure_ascii=False, separators=(",", ":"))


def decode(text: str) -> Message:
    """The inverse of :func:`encode`. Unknown fields (of a later version) are dropped."""
    raw = json.loads(text)
    return Message(**{k: raw[k] for k in Message.__slots__ if k in raw})


def stored_size(encoded: str) -> int:
    """Bytes that a message counts for."""
    return len(encoded.encode())


def check_one_running(running: str | None, fresh: Iterable[Message]) -> None:
    """Raises TurnRunning when ``fresh`` would give a session a second running answer; ``running`` is the id of the one
    that it has."""
    for message in fresh:
        if message.status == "running":
            if running is not None and running != message.id:
                raise TurnRunning(running)
            running = message.id


def check_room(messages: int, size: int) -> None:
    """Raises InvalidRequest when a session of that many messages and bytes would be over its limits."""
    if messages > MAX_SESSION_MESSAGES or size > MAX_SESSION_BYTES:
        raise session_full()


def check_fits(messages: Iterable[Message], fresh: Iterable[Message]) -> None:
    """Raises InvalidRequest when a session of these messages has no room for the fresh ones; a store says the same."""
    sizes = [stored_size(encode(m)) for m in (*messages, *fresh)]
    check_room(len(sizes), sum(sizes))


def session_full() -> InvalidRequest:
    """The session has no room for another message."""
    return InvalidRequest(
        f"This session is full: it may hold {MAX_SESSION_MESSAGES} messages and {MAX_SESSION_BYTES} bytes. "
        "Start a new session, or fork this one from an earlier message.",
        code="session_full",
    )
