from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from redisserver import NO_REDIS, MakeRedis, RedisServer, find_redis

from chatsvc.sessions.base import SessionStore
from chatsvc.sessions.memory import MemoryStore
from chatsvc.sessions.redis import RedisStore
from chatsvc.sessions.sqlite import SqliteStore


@pytest.fixture(scope="session")
def redis_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    if find_redis() is None:
        pytest.skip(NO_REDIS)
    with RedisServer(tmp_path_factory.mktemp("redis")) as server:
        yield server


@pytest.fixture
def own_redis(tmp_path: Path) -> Iterator[MakeRedis]:
    """Makes servers of the test's own, with these options; the test starts them, and they are stopped at its end."""
    if find_redis() is None:
        pytest.skip(NO_REDIS)
    made: list[RedisServer] = []

    def make(*options: str) -> RedisServer:
        made.append(RedisServer(tmp_path, *options))
        return made[-1]

    yield make
    for server in made:
        server.stop()


StoreMaker = Callable[..., SessionStore]


@pytest.fixture(params=["memory", "sqlite", "redis"])
async def make_store(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[StoreMaker]:
    """Makes stores on one and the same data (memory: each its own); closes them at the end."""
    made: list[SessionStore] = []
    if request.param == "redis":
        server = request.getfixturevalue("redis_server")
        import redis

        with redis.Redis.from_url(server.url) as client:
            client.flushall()

    def make(ttl: float = 3600.0, **kwargs: Any) -> SessionStore:
        store: SessionStore
        if request.param == "memory":
            store = MemoryStore(ttl, **kwargs)
        elif request.param == "sqlite":
            store = SqliteStore(tmp_path / "s.db", ttl, **kwargs)
        else:
            store = RedisStore(server.url, ttl, **kwargs)
        made.append(store)
        return store

    yield make
    for store in made:
        await store.close()


@pytest.fixture
async def store(make_store: StoreMaker) -> SessionStore:
    store = make_store()
    await store.open()
    return store
