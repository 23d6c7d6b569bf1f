"""What a key may use: requests and tokens a minute, answers at a time.

Two token buckets per key, each kept as one number: the moment at which it is full again (the generic cell rate
algorithm). A bucket holds one minute's worth and refills evenly. Times are whole nanoseconds, so a wait is exact:
after it the same request passes, a nanosecond before it does not.

Tokens of an answer are not known when it begins. Its prompt is taken then; what it generated is taken when it has
ended, whether or not the bucket still holds that much, and whoever comes next waits until the debt is paid. A prompt
larger than the bucket needs a full one.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from chatsvc.errors import Overloaded

SECOND = 10**9
MINUTE = 60 * SECOND

Clock = Callable[[], int]


@dataclass(frozen=True, slots=True)
class Limits:
    """None: no such limit."""

    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    max_concurrent: int | None = None

    def __bool__(self) -> bool:
        return (self.requests_per_minute, self.tokens_per_minute, self.max_concurrent) != (None, None, None)


class QuotaExceeded(Overloaded):
    """429, code ``rate_limit_exceeded``."""

    def __init__(self, message: str, wait: int) -> None:
        """``wait`` in nanoseconds."""
        seconds = max(1, -(-wait // SECOND))
        super().__init__(f"{message}. Try again in {seconds} s", retry_after=seconds)


class Bucket:
    """``limit`` a minute; None: as many as one likes. ``clock`` in nanoseconds, never going back."""

    def __init__(self, limit: int | None, clock: Clock) -> None:
        self.limit = limit
        self._clock = clock
        self._full_at = clock()

    def _cost(self, amount: int) -> int:
        return 0 if self.limit is None else amount * MINUTE // self.limit

    def reset(self) -> int:
        """Nanoseconds until it is full."""
        return max(0, self._full_at - self._clock())

    def remaining(self) -> int:
        """How many it holds now; 0 when it is in debt."""
        return max(0, (MINUTE - self.reset()) * (self.limit or 0) // MINUTE)

    def wait(self, amount: int) -> int:
        """Nanoseconds until ``amount`` (but no more than a full bucket) can be taken."""
        if self.limit is None:
            return 0
        return max(0, self.reset() + self._cost(min(amount, self.limit)) - MINUTE)

    def take(self, amount: int) -> None:
        """Also when it holds less."""
        self._full_at = max(self._full_at, self._clock()) + self._cost(amount)

    def give(self, amount: int) -> None:
        """Back what was taken for nothing."""
        self._full_at -= self._cost(amount)


class Account:
    """The use of one key."""

    def __init__(self, limits: Limits, clock: Clock) -> None:
        self.limits = limits
        self.requests = Bucket(limits.requests_per_minute, clock)
        self.tokens = Bucket(limits.tokens_per_minute, clock)
        self.running = 0

    def change(self, limits: Limits) -> None:
        """Other limits from now on; what was used stays used."""
        self.limits = limits
        self.requests.limit, self.tokens.limit = limits.requests_per_minute, limits.tokens_per_minute

    def headers(self) -> dict[str, str]:
        """``x-ratelimit-*`` as OpenAI writes them."""
        out = {}
        for name, bucket in (("requests", self.requests), ("tokens", self.tokens)):
            if bucket.limit is not None:
                out[f"x-ratelimit-limit-{name}"] = str(bucket.limit)
                out[f"x-ratelimit-remaining-{name}"] = str(bucket.remaining())
                out[f"x-ratelimit-reset-{name}"] = duration(bucket.reset())
        return out


class Ticket:
    """What one HTTP request takes from its key: one request, one place among those that run, tokens of each generation.

    For every generation :meth:`open` is called, and then either :meth:`refused` or :meth:`close`, once.
    """

    def __init__(self, account: Account) -> None:
        self._account = account
        self._open = 0
        self._counted = False

    def open(self, prompt_tokens: int) -> None:
        """A generation is about to begin. Raises: QuotaExceeded; nothing was taken then."""
        account, limits = self._account, self._account.limits
        if not self._open:
            if limits.max_concurrent is not None and account.running >= limits.max_concurrent:
                raise QuotaExceeded(f"This key may have {limits.max_concurrent} requests running at a time", SECOND)
            wait = 0 if self._counted else account.requests.wait(1)
            if wait > account.tokens.wait(prompt_tokens):
                raise QuotaExceeded(f"This key may send {limits.requests_per_minute} requests a minute", wait)
        if wait := account.tokens.wait(prompt_tokens):
            raise QuotaExceeded(
                f"This key may use {limits.tokens_per_minute} tokens a minute and this prompt has {prompt_tokens}", wait
            )
        if not self._counted:
            account.requests.take(1)
            self._counted = True
        if not self._open:
            account.running += 1
        account.tokens.take(prompt_tokens)
        self._open += 1

    def refused(self, prompt_tokens: int) -> None:
        """The engine did not take it: as if nothing had been asked."""
        self._leave()
        self._account.tokens.give(prompt_tokens)
        if not self._open:
            self._account.requests.give(1)
            self._counted = False

    def close(self, prompt_tokens: int, generated: int, *, begun: bool) -> None:
        """It has ended. A prompt that was never ``begun`` (its client left the queue) costs no tokens."""
        self._leave()
        if begun:
            self._account.tokens.take(generated)
        else:
            self._account.tokens.give(prompt_tokens)

    def headers(self) -> dict[str, str]:
        """See :meth:`Account.headers`."""
        return self._account.headers()

    def _leave(self) -> None:
        self._open -= 1
        if not self._open:
            self._account.running -= 1


class Quotas:
    """The accounts of all keys, by the id of the key. They outlive a change of the key file."""

    def __init__(self, clock: Clock = time.monotonic_ns) -> None:
        self._clock = clock
        self._accounts: dict[str, Account] = {}

    def ticket(self, key_id: str, limits: Limits) -> Ticket:
        """For one request of this key."""
        account = self._accounts.get(key_id)
        if account is None:
            account = self._accounts[key_id] = Account(limits, self._clock)
        elif account.limits is not limits:
            account.change(limits)
        return Ticket(account)


def duration(nanoseconds: int) -> str:
    """As Go and OpenAI write it, rounded up to milliseconds: ``120ms``, ``1.5s``, ``6m0s``."""
    ms = -(-nanoseconds // 10**6)
    if ms < 1000:
        return f"{ms}ms"
    minutes, ms = divmod(ms, 60_000)
    return f"{f'{minutes}m' if minutes else ''}{ms / 1000:g}s"
