"""The relay over Redis Streams: one capped, expiring log per running answer, one inbox per server process.

Keys: ``chatsvc:{live}:log-<turn>`` and ``chatsvc:{live}:inbox-<process>``. All have one hash tag, so one blocking read
(``XREAD BLOCK``) covers everything that a process follows, also in a cluster, where a command must stay in one slot.
What lives there is small and short-lived: a log has at most about ``LOG_LENGTH`` batches and ``LOG_LIFE`` seconds.

A reader knows the last entry it has seen of every log, so a lost connection costs it nothing: it asks again from there.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict
from typing import Any

from redis.exceptions import RedisError

from chatsvc.errors import StoreError
from chatsvc.sessions.guard import Guard
from chatsvc.sessions.relay import Note
from chatsvc.tasks import end

log = logging.getLogger(__name__)

LOG_LENGTH = 1000
LOG_LIFE = 120.0  # seconds since its last batch
INBOX_LENGTH = 1000
INBOX_LIFE = 60.0
BLOCK = 2.0  # seconds; the reading connection's socket time-out has to be longer
PAGE = 200  # entries of one log taken at a time: the event loop runs in between
PIPELINE = 50  # batches written, or logs handed over, at a time, for the same reason
GATHER = 0.01  # seconds between two reads, so that one brings the news of many logs
RETRY_CAP = 1.0

ERRORS = (RedisError, OSError, asyncio.TimeoutError)


class _Followed:
    def __init__(self, take: Callable[[str], None]) -> None:
        self.take = take
        self.at = "0"


class RedisRelay:
    """See :class:`chatsvc.sessions.relay.Relay`.

    Args:
        client: for everything that answers at once.
        blocking: a client of its own for the blocking read; closed here.
        guard: runs what has to end whoever waits for it.
    """

    def __init__(self, name: str, client: Any, blocking: Any, guard: Guard, log_length: int = LOG_LENGTH) -> None:
        self.name = name
        self.on_note: Callable[[Note], None] = lambda note: None
        self._client = client
        self._blocking = blocking
        self._guard = guard
        self._log_length = log_length
        self._followed: dict[str, _Followed] = {}
        self._inbox = _inbox_key(name)
        self._inbox_at = "0"
        self._reader: asyncio.Task[None] | None = None

    def open(self) -> None:
        """Start the one blocking read of this process."""
        self._reader = asyncio.create_task(self._read_for_ever())

    async def close(self) -> None:
        if self._reader is not None:
            await end(self._reader)
            self._reader = None
        await self._blocking.aclose(close_connection_pool=True)

    async def add(self, batches: Sequence[tuple[str, str]]) -> None:
        for start in range(0, len(batches), PIPELINE):
            await self._guard.run(self._add(batches[start : start + PIPELINE]))

    async def follow(self, turn: str, take: Callable[[str], None]) -> None:
        followed = _Followed(take)
        while True:
            entries = await self._guard.run(self._page(turn, followed.at))
            self._hand_over(followed, entries)
            if len(entries) < PAGE:
                break
        self._followed[turn] = followed
        with suppress(
            StoreError
        ):  # wakes the blocking read, which then asks for this log too; else it does so in BLOCK
            await self.tell(self.name, Note("reply", turn, self.name))

    def unfollow(self, turn: str) -> None:
        self._followed.pop(turn, None)

    async def tell(self, to: str, note: Note) -> None:
        await self._guard.run(self._tell(_inbox_key(to), note))

    # -- inside the guard --------------------------------------------------------------------------------------

    async def _add(self, batches: Sequence[tuple[str, str]]) -> None:
        async with self._client.pipeline(transaction=False) as pipe:
            for turn, text in batches:
                key = _log_key(turn)
                pipe.xadd(key, {"b": text}, maxlen=self._log_length, approximate=True)
                pipe.pexpire(key, int(LOG_LIFE * 1000))  # every time: Redis may have lost the key since the last
            await pipe.execute()

    async def _page(self, turn: str, after: str) -> list[Any]:
        entries: list[Any] = await self._client.xrange(_log_key(turn), min=f"({after}", count=PAGE)
        return entries

    async def _tell(self, key: str, note: Note) -> None:
        async with self._client.pipeline(transaction=False) as pipe:
            pipe.xadd(key, asdict(note), maxlen=INBOX_LENGTH, approximate=True)
            pipe.pexpire(key, int(INBOX_LIFE * 1000))
            await pipe.execute()

    # -- the one blocking read ---------------------------------------------------------------------------------

    async def _read_for_ever(self) -> None:
        failures = 0
        while True:
            logs = {_log_key(turn): followed for turn, followed in self._followed.items()}
            at = {self._inbox: self._inbox_at, **{key: followed.at for key, followed in logs.items()}}
            try:
                reply = await self._blocking.xread(at, count=PAGE, block=int(BLOCK * 1000))
            except ERRORS as error:
                if not failures:
                    log.warning("Redis: the logs of other processes cannot be read: %s", type(error).__name__)
                failures += 1
                await asyncio.sleep(random.uniform(0.5, 1.0) * min(RETRY_CAP, 0.05 * 2 ** min(failures, 10)))
                continue
            if failures:
                log.info("Redis: reading the logs of other processes again")
                failures = 0
            for number, (key, entries) in enumerate(reply or ()):
                if number % PIPELINE == PIPELINE - 1:
                    await asyncio.sleep(0)
                if key == self._inbox:
                    self._read_notes(entries)
                elif key in logs:
                    self._hand_over(logs[key], entries)
            if reply:
                await asyncio.sleep(GATHER)

    def _read_notes(self, entries: Sequence[Any]) -> None:
        for entry_id, fields in entries:
            self._inbox_at = entry_id
            try:
                self.on_note(Note(**fields))
            except Exception:
                log.exception("a note of another process was not understood")

    @staticmethod
    def _hand_over(followed: _Followed, entries: Sequence[Any]) -> None:
        for entry_id, fields in entries:
            followed.at = entry_id
            try:
                followed.take(fields["b"])
            except Exception:
                log.exception("a batch of another process was not understood")


def _log_key(turn: str) -> str:
    return f"chatsvc:{{live}}:log-{turn}"


def _inbox_key(name: str) -> str:
    return f"chatsvc:{{live}}:inbox-{name}"
