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


class Gone(MemoryStore):
    """Does not answer at all."""

    asked = 0
    away = True

    async def ping(self) -> None:
        self.asked += 1
        if self.away:
            raise StoreError("away", away=True)

    async def get(self, tenant: str, session_id: str) -> Session | None:
        await self.ping()
        return await super().get(tenant, session_id)


async def test_rd_03_a_store_that_is_away_is_not_asked_in_vain() -> None:
    """Session routes answer at once then, however long the store would let them wait, and again when it is back."""
    failures: list[None] = []
    behind = Gone(60)
    store = WatchedStore(behind, lambda: failures.append(None), ping_away=3600)
    await store.open()
    for _ in range(20):
        with pytest.raises(StoreError) as refused:
            await store.get("", "s")
        assert refused.value.away
    assert behind.asked == 1 and len(failures) == 20
    behind.away = False
    await store.ping()  # as it does by itself
    assert await store.get("", "s") is None and store.answers
    await store.close()


async def test_rd_03_a_refusal_does_not_count_as_away() -> None:
    """A Redis that is full refuses writes and still reads."""
    behind = Flaky(60)
    store = WatchedStore(behind, lambda: None, ping_away=3600)
    await store.open()
    behind.away = True
    with pytest.raises(StoreError):
        await store.get("", "s")
    behind.away = False
    assert await store.get("", "s") is None
    await store.close()


async def test_every_operation_goes_through() -> None:
    store = WatchedStore(MemoryStore(60), lambda: None)
    await store.open()
    now = asyncio.get_running_loop().time()
    await store.create(Session("s", "t", "a", "", now, now))
    await store.append("t", "s", [Message("m", None, "assistant", "x", status="running")])
    await store.update_message("t", "s", Message("m", None, "assistant", "y", status="running"))
    assert await store.interrupt_running() == 1
    assert (await store.patch("t", "s", title="b", system=None)) is not None
    session = await store.get("t", "s")
    assert session is not None and session.title == "b" and session.messages[0].content == "y"
    assert [s.id for s in await store.list("t", 5)] == ["s"]
    await store.ping()
    assert await store.delete("t", "s") and await store.get("t", "s") is None
    await store.close()
