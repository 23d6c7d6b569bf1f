"""What a key may use: requests and tokens a minute, answers at a time.

Two token buckets per key, each kept as one number: the moment at which it is full again (the generic cell rate
algorithm). A bucket holds one minute's worth and refills evenly. Times are whole nanoseconds, so a wait is exact:
after it the same request passes, a nanosecond before it does not.

Tokens of an answer are not known when it begins. Its prompt is taken then; what it generated is taken when it has
ended, whether or not the bucket still holds that much, and whoever comes next waits until the debt is paid. A prompt
larger than the bucket needs a full one.

Processes that share a store count there, all together (:class:`~chatsvc.sessions.quotas.SharedQuotas`). Each of them
counts for itself what it took as well, and goes by that when the store does not answer.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable

from chatsvc.errors import Overloaded
from chatsvc.sessions.quotas import Limits, SharedQuotas, Verdict

SECOND = 10**9
MINUTE = 60 * SECOND

Clock = Callable[[], int]


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
        return remaining(self.limit or 0, self.reset())

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

    def __init__(self, limits: Limits, clock: Clock, key_id: str = "") -> None:
        self.key_id = key_id
        self.limits = limits
        self.requests = Bucket(limits.requests_per_minute, clock)
        self.tokens = Bucket(limits.tokens_per_minute, clock)
        self.running = 0

    def change(self, limits: Limits) -> None:
        """Other limits from now on; what was used stays used."""
        self.limits = limits
        self.requests.limit, self.tokens.limit = limits.requests_per_minute, limits.tokens_per_minute

    def headers(self, shared: Verdict | None = None) -> dict[str, str]:
        """``x-ratelimit-*`` as OpenAI writes them; of all processes when it is given what they have taken."""
        requests, tokens = self.requests, self.tokens
        resets = (requests.reset(), tokens.reset()) if shared is None else (shared.request_reset, shared.token_reset)
        out = {}
        for name, limit, reset in (("requests", requests.limit, resets[0]), ("tokens", tokens.limit, resets[1])):
            if limit is not None:
                out[f"x-ratelimit-limit-{name}"] = str(limit)
                out[f"x-ratelimit-remaining-{name}"] = str(remaining(limit, reset))
                out[f"x-ratelimit-reset-{name}"] = duration(reset)
        return out


class Ticket:
    """What one HTTP request takes from its key: one request, one place among those that run, tokens of each generation.

    For every generation :meth:`open` is called, and then either :meth:`refused` or :meth:`close`, once.
    """

    def __init__(self, account: Account, shared: SharedQuotas | None = None) -> None:
        self._account = account
        self._shared = shared
        self._seen: Verdict | None = None  # of the processes together; None: this one judged
        self._place = "" if shared is None else secrets.token_hex(8)
        self._open = 0
        self._counted = False

    async def enter(self, prompt_tokens: int) -> None:
        """As :meth:`open`, among all processes, if they share a count and it can be had."""
        shared, account = self._shared, self._account
        if shared is None:
            self.open(prompt_tokens)
            return
        place, requests = "" if self._open else self._place, 0 if self._counted else 1
        self._seen = seen = await shared.take(account.key_id, account.limits, place, requests, prompt_tokens)
        if seen is None:
            self.open(prompt_tokens)
            shared.hold(account.key_id, self._place)
            return
        if not seen.taken:
            self._refuse(prompt_tokens, busy=seen.busy, requests=seen.request_wait, tokens=seen.token_wait)
        self._take(prompt_tokens)

    def open(self, prompt_tokens: int) -> None:
        """A generation is about to begin. Raises: QuotaExceeded; nothing was taken then."""
        account, most = self._account, self._account.limits.max_concurrent
        self._refuse(
            prompt_tokens,
            busy=not self._open and most is not None and account.running >= most,
            requests=0 if self._counted or self._open else account.requests.wait(1),
            tokens=account.tokens.wait(prompt_tokens),
        )
        self._take(prompt_tokens)

    def _refuse(self, prompt_tokens: int, *, busy: bool, requests: int, tokens: int) -> None:
        """Raises: QuotaExceeded, unless all waits (in nanoseconds) are 0. The longest one is told."""
        limits = self._account.limits
        if busy:
            raise QuotaExceeded(f"This key may have {limits.max_concurrent} requests running at a time", SECOND)
        if requests > tokens:
            raise QuotaExceeded(f"This key may send {limits.requests_per_minute} requests a minute", requests)
        if tokens:
            raise QuotaExceeded(
                f"This key may use {limits.tokens_per_minute} tokens a minute and this prompt has {prompt_tokens}",
                tokens,
            )

    def _take(self, prompt_tokens: int) -> None:
        account = self._account
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
        requests = 0
        if not self._open:
            self._account.requests.give(1)
            self._counted, requests = False, 1
        if self._seen is None:  # judged here: the others have not counted it
            requests = prompt_tokens = 0
        self._settle(-requests, -prompt_tokens)

    def close(self, prompt_tokens: int, generated: int, *, begun: bool) -> None:
        """It has ended. A prompt that was never ``begun`` (its client left the queue) costs no tokens."""
        self._leave()
        if begun:
            self._account.tokens.take(generated)
        else:
            self._account.tokens.give(prompt_tokens)
        self._settle(0, generated if begun else -prompt_tokens if self._seen is not None else 0)

    def headers(self) -> dict[str, str]:
        """See :meth:`Account.headers`."""
        return self._account.headers(self._seen)

    def _settle(self, requests: int, tokens: int) -> None:
        """Tell the others, and leave the place when nothing runs on it."""
        if self._shared is not None:
            place = "" if self._open else self._place
            self._shared.settle(self._account.key_id, self._account.limits, place, requests, tokens)

    def _leave(self) -> None:
        self._open -= 1
        if not self._open:
            self._account.running -= 1


class Quotas:
    """The accounts of all keys, by the id of the key. They outlive a change of the key file."""

    def __init__(self, clock: Clock = time.monotonic_ns, shared: SharedQuotas | None = None) -> None:
        self._clock = clock
        self._shared = shared
        self._accounts: dict[str, Account] = {}

    def ticket(self, key_id: str, limits: Limits) -> Ticket:
        """For one request of this key."""
        account = self._accounts.get(key_id)
        if account is None:
            account = self._accounts[key_id] = Account(limits, self._clock, key_id)
        elif account.limits is not limits:
            account.change(limits)
        return Ticket(account, self._shared)


def remaining(limit: int, reset: int) -> int:
    """What a bucket of that limit holds that is full again in so many nanoseconds; 0 when it is in debt."""
    return max(0, (MINUTE - reset) * limit // MINUTE)


def duration(nanoseconds: int) -> str:
    """As Go and OpenAI write it, rounded up to milliseconds: ``120ms``, ``1.5s``, ``6m0s``."""
    ms = -(-nanoseconds // 10**6)
    if ms < 1000:
        return f"{ms}ms"
    minutes, ms = divmod(ms, 60_000)
    return f"{f'{minutes}m' if minutes else ''}{ms / 1000:g}s"
