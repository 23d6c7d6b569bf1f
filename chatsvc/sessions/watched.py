"""A session store that counts its failures, knows whether the store behind it answers, and does not ask one in vain."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from typing import ParamSpec, TypeVar

from chatsvc.errors import StoreError
from chatsvc.sessions.base import Kind, Message, Session, SessionStore
from chatsvc.sessions.relay import Note, Relay
from chatsvc.tasks import end

P = ParamSpec("P")
T = TypeVar("T")
Sessions = list[Session]

PING_EVERY = 10.0  # seconds, so that ``answers`` is true again when the store is, also when nobody asks for a session
PING_AWAY = 1.0  # the same while the store is away: until then every operation is refused at once


class WatchedStore:
    """Passes everything on to ``store``. When that does not answer at all, operations fail at once until it answers a
    ping: nobody waits for a store that is known to be away, and it is not asked by everybody at its return.

    Args:
        failed: called for every operation that ends with StoreError.

    Attributes:
        answers: whether the last operation was answered (a refusal is an answer).
    """

    def __init__(
        self,
        store: SessionStore,
        failed: Callable[[], None],
        ping_every: float = PING_EVERY,
        ping_away: float = PING_AWAY,
    ) -> None:
        self._store = store
        self._failed = failed
        self._ping_every = ping_every
        self._ping_away = ping_away
        self._pinging: asyncio.Task[None] | None = None
        self._away = asyncio.Event()
        self._relay = None if store.relay is None else _WatchedRelay(store.relay, self._watch)
        self.answers = True

    @property
    def relay(self) -> Relay | None:
        return self._relay

    async def open(self) -> None:
        await self._watch(self._store.open)
        self._pinging = asyncio.create_task(self._ping_for_ever())

    async def close(self) -> None:
        if self._pinging is not None:
            await end(self._pinging)
            self._pinging = None
        await self._store.close()

    async def ping(self) -> None:
        await self._ask(self._store.ping)

    async def create(self, session: Session) -> None:
        await self._watch(self._store.create, session)

    async def get(self, tenant: str, session_id: str) -> Session | None:
        return await self._watch(self._store.get, tenant, session_id)

    async def list(self, tenant: str, limit: int = 50, kind: Kind | None = None) -> Sessions:
        return await self._watch(self._store.list, tenant, limit, kind)

    async def patch(self, tenant: str, session_id: str, *, title: str | None, system: str | None) -> Session | None:
        return await self._watch(self._store.patch, tenant, session_id, title=title, system=system)

    async def delete(self, tenant: str, session_id: str) -> bool:
        return await self._watch(self._store.delete, tenant, session_id)

    async def append(self, tenant: str, session_id: str, messages: Sequence[Message]) -> None:
        await self._watch(self._store.append, tenant, session_id, messages)

    async def update_message(self, tenant: str, session_id: str, message: Message) -> None:
        await self._watch(self._store.update_message, tenant, session_id, message)

    async def rewrite(self, tenant: str, session_id: str, messages: Sequence[Message]) -> None:
        await self._watch(self._store.rewrite, tenant, session_id, messages)

    async def interrupt_running(self) -> int:
        return await self._watch(self._store.interrupt_running)

    async def _watch(self, operation: Callable[P, Awaitable[T]], *args: P.args, **kwargs: P.kwargs) -> T:
        if self._away.is_set():
            self._failed()
            raise StoreError("The session store is away.", away=True)
        return await self._ask(operation, *args, **kwargs)

    async def _ask(self, operation: Callable[P, Awaitable[T]], *args: P.args, **kwargs: P.kwargs) -> T:
        try:
            result = await operation(*args, **kwargs)
        except StoreError as error:
            self.answers = False
            self._failed()
            if error.away:
                self._away.set()
            raise
        except Exception:
            self._answered()
            raise
        self._answered()
        return result

    def _answered(self) -> None:
        self.answers = True
        self._away.clear()

    async def _ping_for_ever(self) -> None:
        while True:
            if self._away.is_set():
                await asyncio.sleep(self._ping_away * random.uniform(0.8, 1.2))
            else:
                with suppress(TimeoutError):
                    await asyncio.wait_for(self._away.wait(), self._ping_every)
                    continue
            with suppress(StoreError):
                await self.ping()


class _WatchedRelay:
    """The relay of the store, watched as the store is."""

    def __init__(self, relay: Relay, watch: Callable[..., Awaitable[None]]) -> None:
        self._relay = relay
        self._watch = watch

    @property
    def name(self) -> str:
        return self._relay.name

    @property
    def on_note(self) -> Callable[[Note], None]:
        return self._relay.on_note

    @on_note.setter
    def on_note(self, call: Callable[[Note], None]) -> None:
        self._relay.on_note = call

    async def add(self, batches: Sequence[tuple[str, str]]) -> None:
        await self._watch(self._relay.add, batches)

    async def follow(self, turn: str, take: Callable[[str], None]) -> None:
        await self._watch(self._relay.follow, turn, take)

    def unfollow(self, turn: str) -> None:
        self._relay.unfollow(turn)

    async def tell(self, to: str, note: Note) -> None:
        await self._watch(self._relay.tell, to, note)
