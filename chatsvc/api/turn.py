"""One turn: an answer of a session and who is with it."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field

from chatsvc.engine.output import Generation
from chatsvc.sessions.base import Message, Status

Key = tuple[str, str]  # tenant, session id


@dataclass(eq=False)
class Turn:
    """One running (or just ended) answer.

    Attributes:
        answer: the message as it was accepted; its id is the turn's. The text it has then is the beginning of the
            answer that this turn goes on with.
        generation: what is read. Of a turn that another process runs it is a :class:`chatsvc.api.replica.Replica`.
        owner: the name of that other process; "" when the turn is this process's own.
        readers: streams attached now, of this process.
        elsewhere: other processes with readers -> monotonic seconds until when that counts.
        ended_as: what the end counts as when somebody cancels the generation; None: nobody did.
        lost: another process ended it, thinking this one dead: nothing more is stored of it.
        behind: the store did not take the last write, which was logged.
        saved: set when the final text is in the store (or its session is gone).
    """

    key: Key
    answer: Message
    generation: Generation
    owner: str = ""
    readers: int = 0
    elsewhere: dict[str, float] = field(default_factory=dict)
    ended_as: Status | None = None
    lost: bool = False
    behind: bool = False
    saved: asyncio.Event = field(default_factory=asyncio.Event)
    task: asyncio.Task[None] | None = None
    grace: asyncio.TimerHandle | None = None

    @property
    def id(self) -> str:
        return self.answer.id

    @property
    def prefix(self) -> str:
        """The text before what the generation makes. A replica has it in its log."""
        return "" if self.owner else self.answer.content

    @property
    def running(self) -> bool:
        return not self.saved.is_set()

    @property
    def read(self) -> bool:
        """Whether anybody reads it, in whatever process."""
        return self.readers > 0 or any(until > time.monotonic() for until in self.elsewhere.values())

    def end(self, status: Status) -> None:
        """Cancel the generation, for the given reason. The first reason counts."""
        if not self.generation.finished:
            self.ended_as = self.ended_as or status
            self.generation.cancel()


def timing(generation: Generation) -> dict[str, float | None]:
    """When the first token came, in seconds since the request, and how many a second came after it."""
    at, tokens = generation.timings, generation.num_output_tokens
    first = None if at.first_token is None else at.first_token - at.arrival
    span = 0.0 if at.first_token is None or at.finished is None else at.finished - at.first_token
    return {
        "first_token_seconds": None if first is None else round(first, 4),
        "tokens_per_second": round((tokens - 1) / span, 2) if span > 0 and tokens > 1 else None,
    }
