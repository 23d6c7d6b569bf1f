"""How server processes that share a session store talk about running answers.

The process that runs an answer is its owner, and its output log is the truth. It puts what is new into the relay in
batches; other processes follow that log to serve readers of their own, and send the owner notes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

Op = Literal[
    "reading",  # the sender has readers of the turn; said again every few seconds
    "left",  # it has none any more
    "snapshot",  # it cannot follow the log, for a part of it is gone: the whole text, please
    "cancel",  # end the turn as cancelled; answered when that is stored
    "yield",  # end it as interrupted unless somebody reads it; answered at once when somebody does
    "reply",  # the answer to one of these two: ``number`` is theirs
]


@dataclass(frozen=True, slots=True)
class Note:
    """Attributes:
    turn: the turn's id.
    sender: the name of the process that wrote it.
    number: of a question: what its answer repeats.
    answer: of a reply: "ended", "busy" (somebody reads it) or "unknown" (no such turn runs there).
    """

    op: Op
    turn: str
    sender: str
    number: str = ""
    answer: str = ""


class Relay(Protocol):
    """Attributes:
    name: this process's; it is the owner of the answers that it runs.
    on_note: called with every note to this process, in the event loop. Set before ``open()`` of the store.
    """

    @property
    def name(self) -> str: ...

    on_note: Callable[[Note], None]

    async def add(self, batches: Sequence[tuple[str, str]]) -> None:
        """Put batches (turn id, JSON text) at the end of their turns' logs. Raises StoreError; some may be there then,
        and may come twice when they are added again."""
        ...

    async def follow(self, turn: str, take: Callable[[str], None]) -> None:
        """Call ``take`` with every batch of a turn: with those that are kept before this returns, then as they come.

        A log keeps only its newest batches, and may lose more when the server behind it restarts. Raises StoreError.
        """
        ...

    def unfollow(self, turn: str) -> None: ...

    async def tell(self, to: str, note: Note) -> None:
        """Send a note. Raises StoreError; whether anybody reads it is another question."""
        ...
