"""Random operations against each store, compared with a dictionary."""

from __future__ import annotations

import asyncio
import copy
import itertools
import shutil
import tempfile
from collections.abc import Coroutine
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test
from redisserver import NO_REDIS, RedisServer, find_redis

from chatsvc.errors import NotFound
from chatsvc.sessions.base import Message, Session, SessionStore, TurnOver, TurnRunning
from chatsvc.sessions.memory import MemoryStore
from chatsvc.sessions.redis import RedisStore
from chatsvc.sessions.sqlite import SqliteStore

TENANTS = st.sampled_from(["a", "b"])
TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)
STATUSES = st.sampled_from(["running", "done", "cancelled", "failed"])
PICK = st.integers(0, 30)


class StoreMachine(RuleBasedStateMachine):
    kind: ClassVar[str]
    server: ClassVar[RedisServer | None]

    def __init__(self) -> None:
        super().__init__()
        self.runner = asyncio.Runner()
        self.folder = Path(tempfile.mkdtemp())
        ticks = itertools.count(1)
        self.clock = lambda: float(next(ticks))
        self.model: dict[str, Session] = {}
        self.order: dict[str, int] = {}
        self.ids = itertools.count()
        self.step = itertools.count()
        self.store = self.make()
        self.do(self.store.open())
        if self.server is not None:
            import redis

            with redis.Redis.from_url(self.server.url) as client:
                client.flushall()

    def make(self) -> SessionStore:
        if self.kind == "memory":
            return MemoryStore(1e9, self.clock)
        if self.kind == "sqlite":
            return SqliteStore(self.folder / "s.db", 1e9, self.clock)
        assert self.server is not None
        return RedisStore(self.server.url, 1e6, self.clock, lease=0.5)

    def do(self, operation: Coroutine[Any, Any, Any]) -> Any:
        return self.runner.run(operation)

    def touched(self, sid: str) -> None:
        self.order[sid] = next(self.step)

    def pick(self, n: int) -> str:
        known = [*self.order, "unknown"]
        return known[n % len(known)]

    def mine(self, tenant: str, sid: str) -> Session | None:
        s = self.model.get(sid)
        return s if s is not None and s.tenant == tenant else None

    def new_message(self, text: str, status: Any) -> Message:
        return Message(f"m{next(self.ids)}", None, "assistant", text, status, token_ids=[len(text)])

    @rule(tenant=TENANTS, title=TEXTS)
    def create(self, tenant: str, title: str) -> None:
        now = self.clock()
        s = Session(f"s{next(self.ids)}", tenant, title, "", now, now)
        self.do(self.store.create(s))
        self.model[s.id] = copy.deepcopy(s)
        self.touched(s.id)

    @rule(tenant=TENANTS, n=PICK, texts=st.lists(st.tuples(TEXTS, STATUSES), max_size=3))
    def append(self, tenant: str, n: int, texts: list[tuple[str, str]]) -> None:
        sid = self.pick(n)
        fresh = [self.new_message(*t) for t in texts]
        s = self.mine(tenant, sid)
        if s is None:
            with pytest.raises(NotFound):
                self.do(self.store.append(tenant, sid, fresh))
            return
        again = s.messages[:1]  # one that is already there is skipped
        if sum(m.status == "running" for m in [*s.messages, *fresh]) > 1 and any(m.status == "running" for m in fresh):
            with pytest.raises(TurnRunning):
                self.do(self.store.append(tenant, sid, [*again, *fresh]))
            return
        self.do(self.store.append(tenant, sid, [*again, *fresh]))
        s.messages += copy.deepcopy(fresh)
        self.touched(sid)

    @rule(tenant=TENANTS, n=PICK, k=PICK, text=TEXTS, status=STATUSES)
    def update(self, tenant: str, n: int, k: int, text: str, status: Any) -> None:
        sid = self.pick(n)
        s = self.mine(tenant, sid)
        if s is None or not s.messages:
            with pytest.raises(NotFound):
                self.do(self.store.update_message(tenant, sid, self.new_message(text, status)))
            return
        m = s.messages[k % len(s.messages)]
        new = replace(m, content=text, status=status)
        if m.status != "running" and new != m:
            with pytest.raises(TurnOver):
                self.do(self.store.update_message(tenant, sid, new))
            return
        m.content, m.status = text, status
        self.do(self.store.update_message(tenant, sid, copy.deepcopy(m)))
        self.touched(sid)

    @rule(tenant=TENANTS, n=PICK, title=st.none() | TEXTS, system=st.none() | TEXTS)
    def patch(self, tenant: str, n: int, title: str | None, system: str | None) -> None:
        sid = self.pick(n)
        s = self.mine(tenant, sid)
        got = self.do(self.store.patch(tenant, sid, title=title, system=system))
        if s is None:
            assert got is None
            return
        if title is not None or system is not None:
            s.title = s.title if title is None else title
            s.system = s.system if system is None else system
            self.touched(sid)
        self.same(s, got)

    @rule(tenant=TENANTS, n=PICK)
    def delete(self, tenant: str, n: int) -> None:
        sid = self.pick(n)
        there = self.mine(tenant, sid) is not None
        assert self.do(self.store.delete(tenant, sid)) is there
        if there:
            del self.model[sid], self.order[sid]

    @rule()
    def interrupt(self) -> None:
        running = [m for s in self.model.values() for m in s.messages if m.status == "running"]
        assert self.do(self.store.interrupt_running()) == len(running)
        for m in running:
            m.status = "interrupted"

    @precondition(lambda self: self.kind != "memory")
    @rule()
    def restart(self) -> None:
        self.do(self.store.close())
        self.store = self.make()
        self.do(self.store.open())
        self.interrupt()  # what a server does at its start

    @invariant()
    def everything_is_as_in_the_model(self) -> None:
        for tenant in ("a", "b"):
            expected = [s for s in self.order if self.model[s].tenant == tenant]
            expected.sort(key=lambda s: self.order[s], reverse=True)
            assert [s.id for s in self.do(self.store.list(tenant))] == expected
            for sid, s in self.model.items():
                got = self.do(self.store.get(tenant, sid))
                if s.tenant == tenant:
                    self.same(s, got)
                else:
                    assert got is None

    def same(self, expected: Session, got: Session) -> None:
        assert (got.title, got.system, got.created_at) == (expected.title, expected.system, expected.created_at)
        assert got.messages == expected.messages

    def teardown(self) -> None:
        self.do(self.store.close())
        self.runner.close()
        shutil.rmtree(self.folder)


@pytest.mark.parametrize("kind", ["memory", "sqlite", "redis"])
def test_store_machine(kind: str, request: pytest.FixtureRequest) -> None:
    if kind == "redis" and find_redis() is None:
        pytest.skip(NO_REDIS)
    server = request.getfixturevalue("redis_server") if kind == "redis" else None
    machine = type("Machine", (StoreMachine,), {"kind": kind, "server": server})
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=40 if kind == "memory" else 15,
            stateful_step_count=25,
            deadline=None,
            suppress_health_check=list(HealthCheck),
        ),
    )
