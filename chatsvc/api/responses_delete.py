"""What is left of a session when one of its responses is deleted.

A response may be the past of later ones, which go on to be told with it. So a deleted response is gone for everybody at
once, but its texts stay where a living one follows, and go with the last of those. A message whose text is gone keeps
its place in the tree: nothing else in the session has to move.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from chatsvc.sessions.base import Message, Session

_DELETED = "deleted"  # in Message.extra
_BLANK = {_DELETED: True}


@dataclass(frozen=True, slots=True)
class Rest:
    """``changed``: messages to write over what is stored. ``nothing_left``: no message of the session is needed."""

    changed: list[Message]
    nothing_left: bool


def is_deleted(message: Message) -> bool:
    """Whether it is the answer of a response that was deleted, or a message whose text is gone."""
    return _DELETED in (message.extra or {})


def is_blank(message: Message) -> bool:
    """Whether its text is gone."""
    return message.extra == _BLANK


def visible(session: Session) -> Session:
    """The session without the messages whose text is gone."""
    if not any(map(is_blank, session.messages)):
        return session
    return replace(session, messages=[m for m in session.messages if not is_blank(m)])


def without(session: Session, answer_id: str) -> Rest:
    """The session without the response whose answer that is. What runs has to have ended before."""
    marked = {
        m.id: replace(m, extra={**(m.extra or {}), **_BLANK}) if m.id == answer_id and not is_deleted(m) else m
        for m in session.messages
    }
    answered = {m.parent_id for m in session.messages}
    needed: set[str] = set()
    for message in marked.values():
        # A user's message counts by itself only when nothing answers it.
        if is_deleted(message) or (message.role == "user" and message.id in answered):
            continue
        at: str | None = message.id
        while at is not None and at not in needed and at in marked:
            needed.add(at)
            at = marked[at].parent_id
    after = [m if m.id in needed or is_blank(m) else _blanked(m) for m in marked.values()]
    changed = [new for old, new in zip(session.messages, after, strict=True) if new != old]
    return Rest(changed, not needed)


def _blanked(message: Message) -> Message:
    return replace(
        message, content="", token_ids=[], usage=None, timing=None, error=None, extra=dict(_BLANK), finish_reason=None
    )
