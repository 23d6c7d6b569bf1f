"""Sessions: the conversation as stored. The shapes are those of the public contract."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from chatsvc.errors import Conflict
from chatsvc.sessions.relay import Relay

Status = Literal["running", "done", "cancelled", "failed", "interrupted"]
Kind = Literal["chat", "response"]


@dataclass(slots=True)
class Message:
    """One node of the conversation's tree. ``token_ids`` are kept so that a turn always re-encodes to the same prefix.

    Attributes:
        id: unguessable.
        parent_id: the message it follows, None for the first.
        token_ids: the ids this message's turn added to the prompt (assistant: generated ids). Never shown to clients.
        usage: OpenAI's usage object of an assistant message, else None.
        finish_reason: of an answer that came to its own end.
        extra: what the route that made it wants to have with it (JSON); the store does not look into it.
        error: of an answer that failed, where it is known why: ``message``, and ``status``, the HTTP status that fits.
        timing: of an answer: ``first_token_seconds`` since the request, ``tokens_per_second`` after it.
        owner: of a running answer in a store that processes share: the process that writes it (``Relay.name``). Set by
            the store; no part of what is compared.
    """

    id: str
    parent_id: str | None
    role: Literal["user", "assistant"]
    content: str
    status: Status = "done"
    usage: dict[str, Any] | None = None
    token_ids: list[int] = field(default_factory=list)
    created_at: float = 0.0
    finish_reason: Literal["stop", "length"] | None = None
    timing: dict[str, float | None] | None = None
    extra: dict[str, Any] | None = None
    error: dict[str, Any] | None = None
    owner: str = field(default="", compare=False)


class TurnRunning(Conflict):
    """The session has a running answer already. ``turn_id`` names it."""

    def __init__(self, turn_id: str) -> None:
        super().__init__("A turn of this session is running; wait for its end or cancel it", code="turn_running")
        self.turn_id = turn_id


class TurnOver(Conflict):
    """The answer has ended, or another process has ended it: what it holds is not written over."""

    def __init__(self) -> None:
        super().__init__("This answer has already ended", code="turn_over")


@dataclass(slots=True)
class Session:
    """Attributes:
    tenant: whose it is; another tenant gets 404.
    created_at, updated_at: Unix time, seconds.
    """

    id: str
    tenant: str
    title: str = ""
    system: str = ""
    created_at: float = 0.0
    updated_at: float = 0.0
    messages: list[Message] = field(default_factory=list)


class SessionStore(Protocol):
    """Async; SQLite, Redis and memory pass the same contract tests.

    Every read or write of a session extends its life by the store's TTL. A session of another tenant does not exist.
    A session has at most one running answer, also when several processes write to it. It is its turn's lock: the
    process that appended it owns it until it ends; the id of the answer (with its owner's name) is the fencing token.

    Raises (every method): StoreError when the store cannot answer in time.
    """

    @property
    def relay(self) -> Relay | None:
        """How the processes that share this store talk to each other; None when there is only one."""
        ...

    async def open(self) -> None: ...

    async def close(self) -> None: ...

    async def ping(self) -> None: ...

    async def create(self, session: Session) -> None: ...

    async def get(self, tenant: str, session_id: str) -> Session | None: ...

    async def list(self, tenant: str, limit: int = 50, kind: Kind | None = None) -> list[Session]:
        """Newest first, without messages. ``kind``: of that kind only (``codec.kind_of`` its id)."""
        ...

    async def patch(self, tenant: str, session_id: str, *, title: str | None, system: str | None) -> Session | None: ...

    async def delete(self, tenant: str, session_id: str) -> bool: ...

    async def append(self, tenant: str, session_id: str, messages: Sequence[Message]) -> None:
        """Append atomically: all of them or none; two at once never interleave or lose a message. A message whose id
        is already there is skipped, so a retry adds nothing twice.

        Raises: NotFound; TurnRunning when a running answer is appended to a session that has one; InvalidRequest when
        the session is full (see ``codec.MAX_SESSION_BYTES``).
        """
        ...

    async def update_message(self, tenant: str, session_id: str, message: Message) -> None:
        """Write down what a running answer has by now, or its end. Writing again what is stored is no error.

        Raises: NotFound; TurnOver when the stored answer is not running any more, or has another owner.
        """
        ...

    async def rewrite(self, tenant: str, session_id: str, messages: Sequence[Message]) -> None:
        """Write over messages that have ended, all of them or none.

        Raises: NotFound, also when one of the messages is not there.
        """
        ...

    async def interrupt_running(self) -> int:
        """At start: every message still marked running becomes interrupted; returns how many."""
        ...
