"""A store's failures are counted, and whether it answers is known without asking it."""

from __future__ import annotations

import asyncio

import pytest

from chatsvc.errors import NotFound, StoreError
from chatsvc.sessions.base import Message, Session
from chatsvc.sessions.memory import MemoryStore
from chatsvc.sessions.watched import WatchedStore


class Flaky(MemoryStore):
    away = False

    async def ping(self) -> None:
        if self.away:
            raise StoreError("away")

    async def get(self, tenant: str, session_id: str) -> Session | None:
        await self.ping()
        return await super().get(tenant, session_id)

    async def update_message(self, tenant: str, session_id: str, message: Message) -> None:
        await self.ping()
        await super().update_message(tenant, session_id, message)


async def test_failures_are_counted_and_refusals_are_answers() -> None:
    failures: list[None] = []
    behind = Flaky(60)
    store = WatchedStore(behind, lambda: failures.append(None))
    await store.open()
    behind.away = True
    for count in (1, 2):
        with pytest.raises(StoreError):
            await store.get("", "s")
        assert not store.answers and len(failures) == count
    behind.away = False
    with pytest.raises(NotFound):
        await store.update_message("", "s", Message("m", None, "user", "x"))
    assert store.answers and len(failures) == 2
    await store.close()


async def test_it_is_known_that_the_store_is_back_though_nobody_asks() -> None:
    behind = Flaky(60)
    store = WatchedStore(behind, lambda: None, ping_every=0.01)
    await store.open()
    async with asyncio.timeout(10):
        for away in (True, False):
            behind.away = away
            while store.answers is away:
                await asyncio.sleep(0.005)
    await store.close()


async def test_every_operation_goes_through() -> None:
    store = WatchedStore(MemoryStore(60), lambda: None)
    await store.open()
    now = asyncio.get_running_loop().time()
    await store.create(Session("s", "t", "a", "", now, now))
    await store.append("t", "s", [Message("m", None, "assistant", "x", status="running")])
    assert await store.interrupt_running() == 1
    await store.update_message("t", "s", Message("m", None, "assistant", "y"))
    assert (await store.patch("t", "s", title="b", system=None)) is not None
    session = await store.get("t", "s")
    assert session is not None and session.title == "b" and session.messages[0].content == "y"
    assert [s.id for s in await store.list("t", 5)] == ["s"]
    await store.ping()
    assert await store.delete("t", "s") and await store.get("t", "s") is None
    await store.close()
