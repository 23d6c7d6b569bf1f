"""A session store that counts its failures and knows whether the store behind it answers."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from typing import TypeVar

from chatsvc.errors import StoreError
from chatsvc.sessions.base import Message, Session, SessionStore

T = TypeVar("T")
Sessions = list[Session]

PING_EVERY = 10.0  # seconds, so that ``answers`` is true again when the store is, also when nobody asks for a session


class WatchedStore:
    """Passes everything on to ``store``.

    Args:
        failed: called for every operation that ends with StoreError.

    Attributes:
        answers: whether the last operation was answered (a refusal is an answer).
    """

    def __init__(self, store: SessionStore, failed: Callable[[], None], ping_every: float = PING_EVERY) -> None:
        self._store = store
        self._failed = failed
        self._ping_every = ping_every
        self._pinging: asyncio.Task[None] | None = None
        self.answers = True

    async def open(self) -> None:
        await self._watch(self._store.open())
        self._pinging = asyncio.create_task(self._ping_for_ever())

    async def close(self) -> None:
        if self._pinging is not None:
            self._pinging.cancel()
            await asyncio.gather(self._pinging, return_exceptions=True)
            self._pinging = None
        await self._store.close()

    async def ping(self) -> None:
        await self._watch(self._store.ping())

    async def create(self, session: Session) -> None:
        await self._watch(self._store.create(session))

    async def get(self, tenant: str, session_id: str) -> Session | None:
        return await self._watch(self._store.get(tenant, session_id))

    async def list(self, tenant: str, limit: int = 50) -> Sessions:
        return await self._watch(self._store.list(tenant, limit))

    async def patch(self, tenant: str, session_id: str, *, title: str | None, system: str | None) -> Session | None:
        return await self._watch(self._store.patch(tenant, session_id, title=title, system=system))

    async def delete(self, tenant: str, session_id: str) -> bool:
        return await self._watch(self._store.delete(tenant, session_id))

    async def append(self, tenant: str, session_id: str, messages: Sequence[Message]) -> None:
        await self._watch(self._store.append(tenant, session_id, messages))

    async def update_message(self, tenant: str, session_id: str, message: Message) -> None:
        await self._watch(self._store.update_message(tenant, session_id, message))

    async def interrupt_running(self) -> int:
        return await self._watch(self._store.interrupt_running())

    async def _watch(self, operation: Awaitable[T]) -> T:
        try:
            result = await operation
        except StoreError:
            self.answers = False
            self._failed()
            raise
        except Exception:
            self.answers = True
            raise
        self.answers = True
        return result

    async def _ping_for_ever(self) -> None:
        while True:
            await asyncio.sleep(self._ping_every)
            with suppress(StoreError):
                await self.ping()
