"""Output logs: append-only, one per choice. Every reader is a cursor on them.

Streaming, not streaming, n > 1, a second tab and resumption all read the same log. The engine never waits for a
reader; a slow one takes everything since its cursor as one delta.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import Literal

from chatsvc.engine.wake import Pace, Wake
from chatsvc.scheduler.plan import SampledToken

FinishReason = Literal["stop", "length", "abort", "error"]

FAILED = "The generation failed"  # where nothing more is known


@dataclass(slots=True)
class OutputLog:
    """What one choice has produced so far.

    Attributes:
        tokens: every generated token, in order (the end token that finished the choice included).
        pieces: text released when token i was appended ("" while bytes or a possible stop string are held back);
            same length as ``tokens``.
        held: text that is held back at the moment, and would be the tail if the choice were cut off now.
        tail: text that was still held back when the choice ended.
        finish_reason: None while it runs. ``error`` says why in ``error``, and which HTTP status
            fits in ``error_status``.
        stop_reason: the stop string or token id that ended it, if one did.
    """

    index: int
    tokens: list[SampledToken] = field(default_factory=list)
    pieces: list[str] = field(default_factory=list)
    held: str = ""
    tail: str = ""
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    error: str | None = None
    error_status: int = 500

    @property
    def text(self) -> str:
        return "".join(self.pieces) + self.tail

    @property
    def token_ids(self) -> list[int]:
        return [t.token_id for t in self.tokens]


@dataclass(slots=True)
class Delta:
    """News of one choice since a cursor. ``cursor`` is the number of tokens seen after this delta.

    Nobody changes one. It is not declared frozen all the same: that would cost three times as much to make, and every
    step makes one for each reader.
    """

    index: int
    text: str
    tokens: tuple[SampledToken, ...]
    cursor: int
    finish_reason: FinishReason | None = None
    error: str | None = None


@dataclass(slots=True)
class Timings:
    """Monotonic seconds (``time.perf_counter``); None until it happened."""

    arrival: float
    scheduled: float | None = None
    first_token: float | None = None
    finished: float | None = None


class Generation:
    """A running (or finished) request as its readers see it. Lives in the event loop; no locks."""

    def __init__(
        self,
        request_id: str,
        prompt_token_ids: list[int],
        n: int,
        cancel: Callable[[str | None, int], None],
        now: float,
    ) -> None:
        self.request_id = request_id
        self.prompt_token_ids = prompt_token_ids
        self.num_cached_tokens = 0
        self.logs = [OutputLog(i) for i in range(n)]
        self.timings = Timings(arrival=now)
        self._cancel = cancel
        self._watchers: set[Callable[[], None]] = set()

    @property
    def finished(self) -> bool:
        for log in self.logs:  # noqa: SIM110  asked for every token: the generator of all() would cost four times this
            if log.finish_reason is None:
                return False
        return True

    @property
    def num_output_tokens(self) -> int:
        return sum(len(log.tokens) for log in self.logs)

    def cancel(self, error: str | None = None, status: int = 500) -> None:
        """Stop all choices; their blocks are free within one step. Idempotent; text so far stays readable.

        With an ``error`` they end with that (and the HTTP ``status`` that fits), not as cancelled.
        """
        self._cancel(error, status)

    def notify(self) -> None:
        """Called by the engine after it appended, and when the request is first scheduled."""
        for wake in tuple(self._watchers):
            wake()

    def watch(self, wake: Callable[[], None]) -> None:
        """``wake`` is called whenever there may be news, inside the engine's turn: it must be quick and not raise."""
        self._watchers.add(wake)

    def unwatch(self, wake: Callable[[], None]) -> None:
        self._watchers.discard(wake)

    async def read(self, cursors: list[int] | None = None, pace: Pace | None = None) -> AsyncIterator[list[Delta]]:
        """News as it comes, from the given cursors (tokens already seen, one per choice; default: the start).

        Each item is a non-empty list with at most one :class:`Delta` per choice. Ends when every choice has ended and
        was reported. Leaving the iterator does not cancel the generation. With a ``pace`` the first news and the end
        come at once, and what is between as it says.
        """
        at = list(cursors) if cursors is not None else [0] * len(self.logs)
        going = list(self.logs)
        begun = False
        wake = Wake(pace, lambda: not begun or self.finished)
        self.watch(wake)
        try:
            while True:
                news: list[Delta] = []
                ended = False
                for log in going:
                    start, end, reason = at[log.index], len(log.tokens), log.finish_reason
                    if start >= end and reason is None:
                        continue
                    text = log.pieces[start] if start + 1 == end else "".join(log.pieces[start:end])
                    if reason is not None:
                        text += log.tail
                        ended = True
                    at[log.index] = end
                    news.append(Delta(log.index, text, tuple(log.tokens[start:end]), end, reason, log.error))
                if ended:
                    told = {delta.index for delta in news if delta.finish_reason is not None}
                    going = [log for log in going if log.index not in told]
                if news:
                    yield news
                    begun = True
                if not going:
                    return
                await wake.wait()
        finally:
            self.unwatch(wake)
            wake.close()

    async def wait(self) -> None:
        """Until every choice has ended."""
        wake = Wake()
        self.watch(wake)
        try:
            while not self.finished:
                await wake.wait()
        finally:
            self.unwatch(wake)
