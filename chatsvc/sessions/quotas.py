"""What server processes that share a store may take together for an API key: the shapes, and how they are asked for."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class Limits:
    """None: no such limit."""

    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    max_concurrent: int | None = None

    def __bool__(self) -> bool:
        return (self.requests_per_minute, self.tokens_per_minute, self.max_concurrent) != (None, None, None)


@dataclass(frozen=True, slots=True)
class Verdict:
    """Whether it was taken: all of it or nothing. Times in nanoseconds.

    Attributes:
        busy: no place was free.
        request_wait, token_wait: until there are enough of them; 0: now.
        request_reset, token_reset: until the bucket is full again, after this.
    """

    busy: bool
    request_wait: int
    token_wait: int
    request_reset: int
    token_reset: int

    @property
    def taken(self) -> bool:
        return not (self.busy or self.request_wait or self.token_wait)


class SharedQuotas(Protocol):
    """One count for all processes. Nothing here raises, and nothing but :meth:`take` waits."""

    async def open(self) -> None: ...

    async def close(self) -> None: ...

    async def take(self, key: str, limits: Limits, place: str, requests: int, tokens: int) -> Verdict | None:
        """Requests, tokens and a place of the account ``key``.

        Args:
            place: an unguessable name of the place that is wanted among those that run; "": none is.

        Returns: None when the store does not answer soon. What it takes late is given back when it says so; when its
            answer is lost, the place is free after its lease, and the rest stays taken.
        """
        ...

    def hold(self, key: str, place: str) -> None:
        """A place that was taken without asking, while the store did not answer. It counts from its return on."""
        ...

    def settle(self, key: str, limits: Limits, place: str, requests: int, tokens: int) -> None:
        """Take more, or with negative numbers give back, and leave the place, if one is named. It happens soon, or not
        at all when the store does not answer; then the place is free when its lease has ended."""
        ...
