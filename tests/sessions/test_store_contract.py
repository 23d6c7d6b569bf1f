"""One contract, three stores."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace

import pytest

from chatsvc.errors import ConfigError, Conflict, InvalidRequest, NotFound
from chatsvc.sessions import codec
from chatsvc.sessions import redis as redis_store
from chatsvc.sessions.base import Message, Session, SessionStore, TurnOver, TurnRunning
from chatsvc.sessions.codec import new_id
from chatsvc.sessions.redis import RedisStore
from chatsvc.sessions.select import open_store

AWKWARD = 'a "b" \\ \n\r\t \x00 é 漢字 👩‍👩‍👧 {hash} :1: </script> \u2028'


def session(tenant: str = "t", at: float = 1.0, **kwargs: object) -> Session:
    return Session(id=new_id("sess"), tenant=tenant, created_at=at, updated_at=at, **kwargs)  # type: ignore[arg-type]


def message(text: str, parent: str | None = None, role: str = "user", status: str = "done", **kw: object) -> Message:
    return Message(new_id("msg"), parent, role, text, status, **kw)  # type: ignore[arg-type]


async def test_everything_comes_back_as_it_was(store: SessionStore) -> None:
    s = session(title=AWKWARD, system=AWKWARD)
    await store.create(s)
    turn = [
        message(AWKWARD, created_at=1.5),
        message("", role="assistant", status="failed", usage={"total_tokens": 3, "d": {"x": []}}, token_ids=[0, 49151]),
    ]
    await store.append("t", s.id, turn)
    got = await store.get("t", s.id)
    assert got is not None
    assert got.messages == turn
    assert (got.id, got.tenant, got.title, got.system, got.created_at) == (s.id, "t", AWKWARD, AWKWARD, 1.0)


async def test_create_keeps_the_messages_it_is_given(store: SessionStore) -> None:
    s = session()
    s.messages = [message("a"), message("b", role="assistant")]
    await store.create(s)
    got = await store.get("t", s.id)
    assert got is not None and got.messages == s.messages
    with pytest.raises(Conflict):
        await store.create(s)


async def test_another_tenant_sees_nothing(store: SessionStore) -> None:
    s = session("a")
    m = message("hidden")
    await store.create(s)
    await store.append("a", s.id, [m])
    assert await store.get("b", s.id) is None
    assert await store.patch("b", s.id, title="mine", system=None) is None
    assert not await store.delete("b", s.id)
    with pytest.raises(NotFound):
        await store.append("b", s.id, [message("x")])
    with pytest.raises(NotFound):
        await store.update_message("b", s.id, m)
    assert await store.list("b") == []
    got = await store.get("a", s.id)
    assert got is not None and got.messages == [m] and got.title == ""


@pytest.mark.parametrize("bad", ["", "nope", "a}b{c", "../x", "x" * 5000, "\x00", "sess_*", "é"])
async def test_an_id_that_is_none_finds_nothing(store: SessionStore, bad: str) -> None:
    assert await store.get("t", bad) is None
    assert await store.patch("t", bad, title="x", system=None) is None
    assert not await store.delete("t", bad)
    with pytest.raises(NotFound):
        await store.append("t", bad, [message("x", role="assistant", status="running")])
    assert await store.interrupt_running() == 0


async def test_update_overwrites_one_message_and_only_one_that_is_there(store: SessionStore) -> None:
    s = session()
    await store.create(s)
    a, b = message("q"), message("", role="assistant", status="running")
    await store.append("t", s.id, [a, b])
    b.content, b.status, b.token_ids = "answer", "done", [1, 2, 3]
    await store.update_message("t", s.id, b)
    got = await store.get("t", s.id)
    assert got is not None and got.messages == [a, b]
    with pytest.raises(NotFound):
        await store.update_message("t", s.id, message("stranger"))


async def test_rd_01_a_session_has_one_running_answer(store: SessionStore) -> None:
    s = session()
    await store.create(s)
    turns = [[message(f"q{i}"), message("", role="assistant", status="running")] for i in range(10)]
    results = await asyncio.gather(*(store.append("t", s.id, turn) for turn in turns), return_exceptions=True)
    taken = [turn for turn, result in zip(turns, results, strict=True) if result is None]
    assert len(taken) == 1
    running = taken[0][1]
    assert {r.turn_id for r in results if isinstance(r, TurnRunning)} == {running.id}
    await store.append("t", s.id, taken[0])  # a retry of the one that was taken
    with pytest.raises(TurnRunning):
        await store.append("t", s.id, turns[0] if taken[0] is not turns[0] else turns[1])
    got = await store.get("t", s.id)
    assert got is not None and got.messages == taken[0]
    running.status = "done"
    await store.update_message("t", s.id, running)
    await store.append("t", s.id, next(t for t in turns if t is not taken[0]))


async def test_an_ended_answer_is_not_written_over(store: SessionStore) -> None:
    s = session()
    await store.create(s)
    m = message("half", role="assistant", status="running")
    await store.append("t", s.id, [m])
    m.status, m.content = "done", "whole"
    await store.update_message("t", s.id, m)
    await store.update_message("t", s.id, m)  # a retry
    for status, content in (("running", "hal"), ("cancelled", "whole"), ("done", "another")):
        with pytest.raises(TurnOver):
            await store.update_message("t", s.id, replace(m, status=status, content=content))
    got = await store.get("t", s.id)
    assert got is not None and got.messages == [m]


async def test_what_has_ended_is_written_over_all_of_it_or_nothing(store: SessionStore) -> None:
    s = session()
    s.messages = [message("a"), message("b", role="assistant"), message("c")]
    await store.create(s)
    a, b, c = s.messages
    new = [replace(a, content=""), replace(c, content=AWKWARD, extra={"deleted": True})]
    await store.rewrite("t", s.id, new)
    await store.rewrite("t", s.id, new)  # a retry
    got = await store.get("t", s.id)
    assert got is not None and got.messages == [new[0], b, new[1]]
    with pytest.raises(NotFound):
        await store.rewrite("t", s.id, [replace(b, content="lost"), message("stranger")])
    for tenant, session_id in (("other", s.id), ("t", new_id("sess")), ("t", "a}b")):
        with pytest.raises(NotFound):
            await store.rewrite(tenant, session_id, [b])
    got = await store.get("t", s.id)
    assert got is not None and got.messages == [new[0], b, new[1]]


async def test_what_was_written_over_makes_room(store: SessionStore, monkeypatch: pytest.MonkeyPatch) -> None:
    s = session()
    s.messages = [message("x" * 5000)]
    await store.create(s)
    for module in (codec, redis_store):
        monkeypatch.setattr(module, "MAX_SESSION_BYTES", 8000)
    with pytest.raises(InvalidRequest):
        await store.append("t", s.id, [message("y" * 5000)])
    await store.rewrite("t", s.id, [replace(s.messages[0], content="")])
    await store.append("t", s.id, [message("y" * 5000)])
    with pytest.raises(InvalidRequest):
        await store.append("t", s.id, [message("z" * 5000)])


async def test_a_kind_is_listed_by_itself(store: SessionStore) -> None:
    made = []
    for i in range(6):
        s = session(at=float(i))
        s.id = codec.new_session_id("response" if i % 3 == 0 else "chat")
        made.append(s)
        await store.create(s)
    newest = [s.id for s in made[::-1]]
    assert [s.id for s in await store.list("t")] == newest
    assert [s.id for s in await store.list("t", 3)] == newest[:3]
    chats = [i for i in newest if codec.kind_of(i) == "chat"]
    assert len(chats) == 4 and [s.id for s in await store.list("t", kind="chat")] == chats
    assert [s.id for s in await store.list("t", 1, "response")] == [made[3].id]
    assert await store.delete("t", made[3].id) and [s.id for s in await store.list("t", 5, "response")] == [made[0].id]


async def test_an_append_sent_again_adds_nothing_twice(store: SessionStore) -> None:
    s = session()
    await store.create(s)
    turn = [message("q"), message("", role="assistant")]
    await store.append("t", s.id, turn)
    await store.append("t", s.id, [*turn, third := message("z")])
    got = await store.get("t", s.id)
    assert got is not None and got.messages == [*turn, third]


async def test_list_is_newest_first_bounded_and_without_messages(make_store: Callable[..., SessionStore]) -> None:
    now = [100.0]
    store = make_store(clock=lambda: now[0])
    await store.open()
    made = [session(at=float(i), title=str(i)) for i in range(6)]
    for s in made:
        await store.create(s)
    await store.append("t", made[1].id, [message("wakes it up")])
    now[0] += 1
    await store.patch("t", made[3].id, title="renamed", system=None)
    titles = [s.title for s in await store.list("t")]
    assert titles == ["renamed", "1", "5", "4", "2", "0"]
    assert [s.title for s in await store.list("t", limit=2)] == titles[:2]
    assert all(s.messages == [] for s in await store.list("t"))


async def test_patch_changes_what_is_given(store: SessionStore) -> None:
    s = session(title="old", system="sys")
    await store.create(s)
    got = await store.patch("t", s.id, title="", system=None)
    assert got is not None and (got.title, got.system) == ("", "sys")
    got = await store.patch("t", s.id, title=None, system="new")
    assert got is not None and (got.title, got.system) == ("", "new")


async def test_rd_01_twenty_turns_at_once_lose_and_mix_nothing(store: SessionStore) -> None:
    s = session()
    await store.create(s)
    turns = [[message(f"q{i}"), message(f"a{i}", role="assistant")] for i in range(20)]
    await asyncio.gather(*(store.append("t", s.id, turn) for turn in turns))
    got = await store.get("t", s.id)
    assert got is not None
    texts = [m.content for m in got.messages]
    assert sorted(texts[::2]) == sorted(f"q{i}" for i in range(20))
    assert [t.replace("q", "a") for t in texts[::2]] == texts[1::2]


async def test_running_messages_become_interrupted(store: SessionStore) -> None:
    s, other = session(), session("u")
    await store.create(s)
    await store.create(other)
    running = message("half", role="assistant", status="running", token_ids=[5])
    done = message("whole", role="assistant")
    await store.append("t", s.id, [running, done])
    await store.append("u", other.id, [message("x", role="assistant", status="running")])
    assert await store.interrupt_running() == 2
    assert await store.interrupt_running() == 0
    got = await store.get("t", s.id)
    assert got is not None
    seen = [(m.status, m.content, m.token_ids) for m in got.messages]
    assert seen == [("interrupted", "half", [5]), ("done", "whole", [])]


async def test_a_session_is_bounded(store: SessionStore, monkeypatch: pytest.MonkeyPatch) -> None:
    import chatsvc.sessions.redis as redis_store

    for module in (codec, redis_store):
        monkeypatch.setattr(module, "MAX_SESSION_MESSAGES", 3)
        monkeypatch.setattr(module, "MAX_SESSION_BYTES", 2000)
    s = session()
    await store.create(s)
    await store.append("t", s.id, [message("a"), message("b")])
    with pytest.raises(InvalidRequest) as full:
        await store.append("t", s.id, [message("c"), message("d")])
    assert full.value.code == "session_full"
    got = await store.get("t", s.id)
    assert got is not None and [m.content for m in got.messages] == ["a", "b"]  # all or none
    with pytest.raises(InvalidRequest):
        await store.append("t", s.id, [message("é" * 1000)])
    last = message("c", role="assistant", status="running")
    await store.append("t", s.id, [last])
    last.content = "x" * 5000  # an answer under way is kept whole
    await store.update_message("t", s.id, last)
    got = await store.get("t", s.id)
    assert got is not None and got.messages[2].content == last.content


class Aging:
    """Lets time pass for a store: its own clock, or the lives of the keys in Redis."""

    def __init__(self, make_store: Callable[..., SessionStore], ttl: float) -> None:
        self.now = 1000.0
        self.store = make_store(ttl=ttl, clock=lambda: self.now)

    async def pass_(self, seconds: float) -> None:
        self.now += seconds
        if isinstance(self.store, RedisStore):
            client = self.store._client
            for key in await client.keys("*sess*"):
                await client.pexpire(key, max(1, await client.pttl(key) - int(seconds * 1000)))
            await asyncio.sleep(0.005)


async def test_rd_04_reads_and_writes_extend_the_life_and_idleness_ends_it(
    make_store: Callable[..., SessionStore],
) -> None:
    aging = Aging(make_store, ttl=100)
    store = aging.store
    await store.open()
    s, m = session(), message("x")
    await store.create(s)
    await aging.pass_(60)
    await store.append("t", s.id, [m])
    await aging.pass_(60)
    assert await store.get("t", s.id) is not None
    await aging.pass_(60)
    await store.update_message("t", s.id, m)
    await aging.pass_(60)
    assert await store.patch("t", s.id, title="still here", system=None) is not None
    await aging.pass_(60)
    assert [x.title for x in await store.list("t")] == ["still here"]
    got = await store.get("t", s.id)
    assert got is not None and got.messages == [m]
    await aging.pass_(101)
    assert await store.get("t", s.id) is None
    assert await store.list("t") == []
    assert await store.patch("t", s.id, title="x", system=None) is None
    with pytest.raises(NotFound):
        await store.append("t", s.id, [message("late")])


async def test_stored_data_is_the_stores_own(store: SessionStore) -> None:
    s = session()
    m = message("kept")
    await store.create(s)
    await store.append("t", s.id, [m])
    m.content, s.title = "changed by the caller", "changed"
    got = await store.get("t", s.id)
    assert got is not None and got.title == "" and got.messages[0].content == "kept"
    got.messages.clear()
    again = await store.get("t", s.id)
    assert again is not None and len(again.messages) == 1


async def test_ping(store: SessionStore) -> None:
    await store.ping()


@pytest.mark.parametrize(
    "url",
    [
        "",
        "sqlite",
        "sqlite://",
        "sqlite:///",
        "sqlite://host/x",
        "sqlite:///:memory:",
        "mysql://x",
        "redis://:secret@h:x/0",
    ],
)
def test_a_wrong_url_is_refused_without_repeating_it(url: str) -> None:
    with pytest.raises(ConfigError) as refused:
        open_store(url, 1.0)
    assert "secret" not in str(refused.value)
    with pytest.raises(ConfigError):
        open_store("memory://", 0)
