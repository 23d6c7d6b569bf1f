"""What goes wrong around a store: processes killed, servers gone, callers leaving."""

from __future__ import annotations

import asyncio
import os
import signal
import sqlite3
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest
import redis.asyncio as aioredis
from redisserver import DelayProxy, MakeRedis, RedisServer
from test_store_contract import message, session

import chatsvc.sessions.redis as redis_store
from chatsvc.errors import ConfigError, StoreError
from chatsvc.sessions import redis_index
from chatsvc.sessions.base import TurnOver, TurnRunning
from chatsvc.sessions.redis import RedisStore
from chatsvc.sessions.sqlite import SqliteStore

WRITER = """
import asyncio, sys
from pathlib import Path
from chatsvc.sessions.base import Message, Session
from chatsvc.sessions.sqlite import SqliteStore

async def main():
    store = SqliteStore(Path(sys.argv[1]), 3600)
    await store.open()
    for i in range(100000):
        await store.create(Session(f"s{i}", "t", "title", "", 1.0, 1.0))
        answer = Message(f"a{i}", None, "assistant", "", "running")
        await store.append("t", f"s{i}", [Message(f"u{i}", None, "user", str(i)), answer])
        print(i, flush=True)

asyncio.run(main())
"""


async def test_sqlite_survives_kill_9(tmp_path: Path) -> None:
    path = tmp_path / "s.db"
    child = subprocess.Popen([sys.executable, "-c", WRITER, str(path)], stdout=subprocess.PIPE, text=True)
    assert child.stdout is not None
    told = 0
    for line in child.stdout:
        told = int(line)
        if told >= 30:
            os.kill(child.pid, signal.SIGKILL)
            break
    told = max([told, *(int(line) for line in child.stdout.read().split())])
    child.wait()
    child.stdout.close()
    store = SqliteStore(path, 3600)
    await store.open()
    try:
        turns = 0
        while (got := await store.get("t", f"s{turns}")) is not None and got.messages:
            assert [(m.id, m.status) for m in got.messages] == [(f"u{turns}", "done"), (f"a{turns}", "running")]
            turns += 1
        assert turns >= told + 1  # what was confirmed is there; no half
        assert await store.interrupt_running() == turns
    finally:
        await store.close()


async def test_sqlite_file_belongs_to_one_process(tmp_path: Path) -> None:
    path = tmp_path / "s.db"
    first, second = SqliteStore(path, 60), SqliteStore(path, 60)
    await first.open()
    with pytest.raises(ConfigError, match=r"redis://"):
        await second.open()
    await first.close()
    await second.open()
    await second.ping()
    await second.close()
    with pytest.raises(StoreError):
        await second.ping()


async def test_sqlite_file_that_is_none(tmp_path: Path) -> None:
    path = tmp_path / "s.db"
    path.write_bytes(b"this is not a database" * 100)
    for _ in range(2):  # the lock was given back
        with pytest.raises(ConfigError, match="cannot be opened"):
            await SqliteStore(path, 60).open()


@pytest.mark.parametrize("torn", ["sessions", "messages", "sessions_by_tenant"])
async def test_sqlite_file_that_is_torn(tmp_path: Path, torn: str) -> None:
    """One page is empty, as after a disk that lied: the file opens, and nothing can be read from it."""
    path = tmp_path / "s.db"
    store = SqliteStore(path, 60)
    await store.open()
    for i in range(20):
        s = session(title=str(i))
        s.messages = [message("x" * 500) for _ in range(10)]
        await store.create(s)
    await store.close()
    with closing(sqlite3.connect(path)) as db:
        size = db.execute("PRAGMA page_size").fetchone()[0]
        page = db.execute("SELECT rootpage FROM sqlite_master WHERE name=?", (torn,)).fetchone()[0]
    with path.open("r+b") as file:
        file.seek((page - 1) * size)
        file.write(bytes(size))
    for _ in range(2):  # the lock was given back
        with pytest.raises(ConfigError, match=r"s\.db is damaged"):
            await SqliteStore(path, 60).open()


async def test_sqlite_drops_expired_sessions_from_the_file(tmp_path: Path) -> None:
    now = [0.0]
    store = SqliteStore(tmp_path / "s.db", 10, lambda: now[0])
    await store.open()
    for _ in range(5):
        s = session()
        s.messages = [message("x")]
        await store.create(s)
    now[0] = 11.0
    await store.create(session())
    counts = await store._run(
        lambda db: [db.execute(f"SELECT count(*) FROM {t}").fetchone()[0] for t in ("sessions", "messages")]
    )
    assert counts == [1, 0]
    await store.close()


@pytest.fixture
async def proxied(redis_server: RedisServer) -> AsyncIterator[tuple[RedisStore, DelayProxy]]:
    async with DelayProxy(redis_server.port) as proxy:
        store = RedisStore(f"redis://127.0.0.1:{proxy.port}/0", 3600)
        await store.open()
        yield store, proxy
        proxy.hang = False
        await store.close()


async def test_rd_02_a_cancelled_command_never_hands_its_reply_to_another(
    proxied: tuple[RedisStore, DelayProxy],
) -> None:
    """More than 500 cancellations in the middle of reads, behind a proxy that delays every reply."""
    store, proxy = proxied
    made = [session(title=str(i)) for i in range(8)]
    for s in made:
        await store.create(s)
    proxy.delay = 0.004
    wrong = []

    async def reader(i: int) -> None:
        got = await store.get("t", made[i].id)
        if got is None or got.title != str(i):
            wrong.append((i, got))

    tasks: list[asyncio.Task[None]] = []
    for n in range(1200):
        tasks.append(asyncio.create_task(reader(n % 8)))
        if n % 5 == 0:
            await asyncio.sleep(0.001)
        if n % 2:
            for task in tasks[-6:-1]:
                task.cancel()
    results = await asyncio.gather(*tasks, return_exceptions=True)
    assert sum(isinstance(r, asyncio.CancelledError) for r in results) > 500
    assert not [r for r in results if r is not None and not isinstance(r, asyncio.CancelledError)]
    proxy.delay = 0.0
    await asyncio.gather(*(reader(i % 8) for i in range(64)))
    assert wrong == []
    await store._guard.drain()  # what was cancelled runs to its end all the same
    assert len(store._pool._in_use_connections) == 0  # the pool is whole
    assert proxy.connections <= redis_store.MAX_CONNECTIONS + 1  # and the blocking read's: none was thrown away


async def test_a_cancelled_append_happens_whole_or_not_at_all(proxied: tuple[RedisStore, DelayProxy]) -> None:
    store, proxy = proxied
    s = session()
    await store.create(s)
    proxy.delay = 0.003
    for i in range(20):
        task = asyncio.create_task(store.append("t", s.id, [message(f"q{i}"), message(f"a{i}")]))
        await asyncio.sleep(0.0005 * i)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
    proxy.delay = 0.0
    await store._guard.drain()
    got = await store.get("t", s.id)
    assert got is not None
    texts = [m.content for m in got.messages]
    assert len(texts) % 2 == 0 and [t.replace("q", "a") for t in texts[::2]] == texts[1::2]


async def test_a_redis_that_hangs_is_an_error_soon(
    proxied: tuple[RedisStore, DelayProxy], monkeypatch: pytest.MonkeyPatch
) -> None:
    store, proxy = proxied
    s = session()
    await store.create(s)
    store._guard._deadline = 0.3
    proxy.hang = True
    with pytest.raises(StoreError, match=r"did not answer within 0\.3 s"):
        await asyncio.wait_for(store.get("t", s.id), 5)
    with pytest.raises(StoreError):
        await asyncio.wait_for(store.ping(), 5)


async def test_rd_03_redis_goes_and_comes_back(own_redis: MakeRedis) -> None:
    """Also away at the start."""
    server = own_redis()
    store = RedisStore(server.url, 3600)
    await store.open()  # nobody there: no error
    s = session()
    with pytest.raises(StoreError):
        await asyncio.wait_for(store.create(s), 5)
    server.start()
    await store.create(s)
    server.stop()
    for _ in range(3):
        with pytest.raises(StoreError):
            await asyncio.wait_for(store.get("t", s.id), 5)
    server.start()
    assert await store.get("t", s.id) is None  # this server keeps nothing; scripts are loaded again
    await store.create(s)
    assert await store.get("t", s.id) is not None
    await store.close()


async def test_rd_03_redis_that_refuses_writes_is_an_error(own_redis: MakeRedis) -> None:
    server = own_redis("--maxmemory", "1", "--maxmemory-policy", "noeviction")
    server.start()
    store = RedisStore(server.url, 3600)
    await store.open()
    with pytest.raises(StoreError):
        await store.create(session())
    await store.ping()
    await store.close()


async def test_rd_05_every_key_has_a_life_and_nothing_is_left_by_probes(redis_server: RedisServer) -> None:
    import redis

    with redis.Redis.from_url(redis_server.url, decode_responses=True) as client:
        client.flushall()
        store = RedisStore(redis_server.url, 3600)
        await store.open()
        for _ in range(50):
            await store.ping()
            await store.get("t", "sess_0")
            await store.delete("t", "nothing")
            await store.list("t")
        before = client.keys("*")
        assert before == [store._alive_key]
        s = session()
        await store.create(s)
        running = message("", role="assistant", status="running")
        await store.append("t", s.id, [message("q"), running])
        keys = client.keys("*")
        assert len(keys) == 5
        assert all(0 < client.pttl(k) <= 3600_000 for k in keys)
        assert all("{" in k and "}" in k for k in keys)
        running.status = "done"
        await store.update_message("t", s.id, running)
        await store.delete("t", s.id)
        assert client.keys("*") == [store._alive_key]
        await store.close()
        assert client.keys("*") == []


async def test_a_starting_process_leaves_the_turns_of_its_neighbours_alone(redis_server: RedisServer) -> None:
    first, second = (RedisStore(redis_server.url, 3600, lease=0.9) for _ in range(2))
    await first.open()
    s = session()
    await first.create(s)
    await first.append("t", s.id, [message("half", role="assistant", status="running")])
    await second.open()
    assert await second.interrupt_running() == 0
    got = await second.get("t", s.id)
    assert got is not None and got.messages[0].status == "running"
    first._heart.cancel()  # type: ignore[union-attr]  # killed: its lease ends
    async with asyncio.timeout(20):
        while (got := await second.get("t", s.id)) is not None and got.messages[0].status == "running":
            await asyncio.sleep(0.05)
    assert got is not None and (got.messages[0].status, got.messages[0].content) == ("interrupted", "half")
    assert await second.interrupt_running() == 0
    await second.close()
    await first.close()


async def test_an_owner_that_comes_back_from_the_dead_changes_nothing(redis_server: RedisServer) -> None:
    """Fencing: its lease had ended, another process ended its turn and began one of its own."""
    first, second = (RedisStore(redis_server.url, 3600, lease=0.9) for _ in range(2))
    await first.open()
    await second.open()
    s = session()
    await first.create(s)
    m = message("half", role="assistant", status="running")
    await first.append("t", s.id, [m])
    first._heart.cancel()  # type: ignore[union-attr]  # stands still for a while
    async with asyncio.timeout(20):
        while (got := await second.get("t", s.id)) is not None and got.messages[0].status == "running":
            await asyncio.sleep(0.05)
    await second.append("t", s.id, [message("", role="assistant", status="running")])
    await first._beat()
    for status in ("running", "done"):
        with pytest.raises(TurnOver):
            await first.update_message("t", s.id, replace(m, status=status, content="whole"))
    with pytest.raises(TurnRunning):
        await first.append("t", s.id, [message("", role="assistant", status="running")])
    got = await second.get("t", s.id)
    assert got is not None
    assert [(m.content, m.status) for m in got.messages] == [("half", "interrupted"), ("", "running")]
    await second.close()
    await first.close()


@pytest.mark.parametrize("trouble", ["restarted", "hung"])
async def test_nobody_is_dead_because_redis_was_away(own_redis: MakeRedis, trouble: str) -> None:
    """Redis is away for longer than a lease. When it is back the owner's lease is over, but the owner is there."""
    server = own_redis("--appendonly", "yes", "--appendfsync", "always")
    server.start()
    async with DelayProxy(server.port) as proxy:
        url = f"redis://127.0.0.1:{proxy.port}/0"
        first, second, third = (RedisStore(url, 3600, lease=1.5) for _ in range(3))
        await first.open()
        await second.open()
        s = session()
        await first.create(s)
        m = message("", role="assistant", status="running")
        await first.append("t", s.id, [m])
        readers = [second]
        if trouble == "restarted":
            server.stop()
            await asyncio.sleep(1.6)
            server.start()
            await third.open()  # starts just now, and has noticed nothing
            readers.append(third)
        else:
            await asyncio.sleep(1.6)  # Redis itself has been there for long
            proxy.hang = True
            with pytest.raises(StoreError):
                await second.ping()
            proxy.hang = False
            first._heart.cancel()  # type: ignore[union-attr]  # it has not come round to it yet
            async with aioredis.Redis.from_url(server.url) as client:
                await client.delete(first._alive_key)
        for store in readers:
            got = await store.get("t", s.id)
            assert got is not None and got.messages[0].status == "running"
        await first.update_message("t", s.id, replace(m, status="done"))
        for store in (first, second, third):
            await store.close()


async def test_rd_01_two_processes_append_to_one_session(redis_server: RedisServer) -> None:
    """Two connection pools in two threads and loops."""
    s = session()
    store = RedisStore(redis_server.url, 3600)
    await store.open()
    await store.create(s)

    async def work(name: str) -> None:
        mine = RedisStore(redis_server.url, 3600)
        await mine.open()
        await asyncio.gather(
            *(mine.append("t", s.id, [message(f"q{name}{i}"), message(f"a{name}{i}")]) for i in range(10))
        )
        await mine.close()

    threads = [threading.Thread(target=lambda n=n: asyncio.run(work(n))) for n in "xy"]
    for t in threads:
        t.start()
    while any(t.is_alive() for t in threads):
        await asyncio.sleep(0.01)
    got = await store.get("t", s.id)
    assert got is not None and len(got.messages) == 40
    texts = [m.content for m in got.messages]
    assert [t.replace("q", "a") for t in texts[::2]] == texts[1::2]
    await store.close()


def test_the_index_of_a_tenant_is_pruned(redis_server: RedisServer) -> None:
    """A tenant who only creates sessions does not grow an index of expired ones without end."""

    async def main() -> int:
        store = RedisStore(redis_server.url, 0.05)
        await store.open()
        for _ in range(60):
            await store.create(session("busy"))
            time.sleep(0.01)
        size = await store._client.zcard(redis_index._key("busy", "chat"))
        await store.close()
        return int(size)

    assert asyncio.run(main()) < 40
