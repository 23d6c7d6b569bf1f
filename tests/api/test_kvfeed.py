"""Many readers of the block map: one look at the engine and one encoding for all, a bounded number of places."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import AsyncIterator, Iterator
from typing import Any

import httpx
import pytest
from scripted import ScriptedEngine, Server
from wire import Connection, events

from chatsvc.api import kvfeed
from chatsvc.api.kvfeed import KVFeed
from chatsvc.errors import EngineDead, Overloaded

PATH = "/debug/kv/stream"


def change(number: int) -> dict[str, Any]:
    block = {"id": 1, "state": "used", "ref_count": 1, "hits": number, "hash": None, "owners": ["a:0"]}
    return {"type": "change", "blocks": [block], "sequences": [], "gone": []}


@pytest.fixture
def encodings(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """The type of each view that is encoded."""
    seen: list[str] = []
    real = kvfeed.encode

    async def counted(view: dict[str, Any]) -> bytes:
        seen.append(view.get("type", "map"))
        return await real(view)

    monkeypatch.setattr(kvfeed, "encode", counted)
    yield seen


@pytest.mark.parametrize("readers", [1, 100])
def test_a_hundred_readers_who_do_not_read_cost_as_much_as_one(
    readers: int, server: Server, engine: ScriptedEngine, encodings: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kvfeed, "MAX_READERS", readers)
    engine.capacity = type(engine.capacity)(5000, 1000, 512, 300)
    engine.kv_changes = [{"type": "snapshot", **engine.kv_snapshot()}]
    connections = [Connection(server.port) for _ in range(readers)]
    for c in connections:
        c.send("GET", PATH)
        assert c.head()[0] == 200
    for number in range(20):
        server.call(lambda n=number: engine.kv_changes.append(change(n)))
        server.until(lambda e, n=number: len(encodings) >= n + 2)
    assert engine.kv_watches == 1
    assert encodings == ["snapshot"] + 20 * ["change"]
    for c in connections:
        c.reset()
    server.until(lambda e: e.kv_open == 0)


@pytest.mark.parametrize("how", ["reset", "close"])
def test_no_place_beyond_the_limit_until_a_reader_has_left(
    how: str, server: Server, http: httpx.Client, engine: ScriptedEngine
) -> None:
    connections = [Connection(server.port) for _ in range(kvfeed.MAX_READERS)]
    for c in connections:
        c.send("GET", PATH)
        assert c.head()[0] == 200
    refused = http.get(PATH)
    error = refused.json()["error"]
    assert refused.status_code == 429 and refused.headers["retry-after"] == "5"
    assert error["code"] == "rate_limit_exceeded" and "16 readers" in error["message"]
    assert http.get("/debug/kv").status_code == 200
    for c in connections:
        getattr(c, how)()
    server.until(lambda e: e.kv_open == 0)
    with Connection(server.port) as c:
        c.send("GET", PATH)
        assert c.head()[0] == 200
        body, pieces = b"", 0
        while not body.endswith(b"\n\n"):
            piece = c.piece()
            assert len(piece) <= kvfeed.PIECE
            body, pieces = body + piece, pieces + 1
        assert events(body) == [{"type": "snapshot", **engine.kv_snapshot()}] and pieces > 1


class Fake:
    """An engine whose map changes when told to."""

    def __init__(self, blocks: int = 8) -> None:
        self.blocks = dict.fromkeys(range(1, blocks + 1), 0)
        self.sequences: dict[str, int] = {}
        self.watches = 0
        self.queue: asyncio.Queue[dict[str, Any] | None] = asyncio.Queue()

    @staticmethod
    def rows(items: dict[Any, int]) -> list[dict[str, Any]]:
        return [{"id": i, "n": n, "owners": []} for i, n in items.items()]

    def tell(self, rng: random.Random) -> None:
        gone = [name for name in self.sequences if rng.random() < 0.3]
        for name in gone:
            del self.sequences[name]
        blocks = {i: rng.randrange(100) for i in rng.sample(list(self.blocks), 3)}
        sequences = {str(rng.randrange(50)): rng.randrange(100) for _ in range(2)}
        self.blocks |= blocks
        self.sequences |= sequences
        gone = [name for name in gone if name not in sequences]
        self.queue.put_nowait(
            {"type": "change", "blocks": self.rows(blocks), "sequences": self.rows(sequences), "gone": gone}
        )

    async def kv_events(self) -> AsyncIterator[dict[str, Any]]:
        self.watches += 1
        yield {
            "type": "snapshot",
            "block_size": 4,
            "blocks": self.rows(self.blocks),
            "sequences": self.rows(self.sequences),
        }
        while (event := await self.queue.get()) is not None:
            yield event


class Copy:
    """What a reader makes of its frames."""

    def __init__(self) -> None:
        self.blocks: dict[int, int] = {}
        self.sequences: dict[str, int] = {}
        self.types: list[str] = []

    def take(self, frame: bytes) -> None:
        event = json.loads(frame.removeprefix(b"data: "))
        self.types.append(event["type"])
        if event["type"] == "snapshot":
            self.blocks, self.sequences = {}, {}
        self.blocks |= {b["id"]: b["n"] for b in event["blocks"]}
        self.sequences |= {s["id"]: s["n"] for s in event["sequences"]}
        for name in event.get("gone", ()):
            del self.sequences[name]


async def test_readers_of_any_speed_end_with_the_same_map(encodings: list[str]) -> None:
    rng, engine = random.Random(5), Fake()
    feed = KVFeed(engine)  # type: ignore[arg-type]
    copies = [Copy() for _ in range(6)]

    async def read(copy: Copy, turns: int) -> None:
        reader = await feed.join("")
        async for frame in reader.frames():
            copy.take(frame)
            for _ in range(turns):
                await asyncio.sleep(0)
        reader.leave()

    tasks = [asyncio.create_task(read(copy, 40**i // 20)) for i, copy in enumerate(copies[:4])]
    for i in range(400):
        if i in (100, 300):
            tasks.append(asyncio.create_task(read(copies[len(tasks)], 0)))
        engine.tell(rng)
        for _ in range(rng.randrange(40)):
            await asyncio.sleep(0)
    engine.queue.put_nowait(None)
    await asyncio.gather(*tasks)
    for copy in copies:
        assert (copy.blocks, copy.sequences) == (engine.blocks, engine.sequences)
    assert engine.watches == 1 and feed._readers == 0 and feed._watch is None
    assert encodings.count("change") <= 400, "each change once"
    assert copies[0].types.count("snapshot") == 1, "who keeps up gets changes"
    assert copies[3].types.count("snapshot") > 1 and len(copies[3].types) < 200, "who does not skips to the newest"


async def test_what_is_kept_for_late_readers_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kvfeed, "KEPT_BYTES", 2000)
    engine = Fake(300)
    feed = KVFeed(engine)  # type: ignore[arg-type]
    reader = await feed.join("")
    frames = reader.frames()
    copy = Copy()
    copy.take(await anext(frames))
    assert feed._watch is not None
    channel = feed._watch.channels[""]
    for _ in range(200):
        engine.tell(random.Random(1))
    while channel.last < 200:
        await asyncio.sleep(0)
    assert len(channel._kept) < 40 and sum(map(len, channel._kept)) <= 2000
    copy.take(await anext(frames))
    assert copy.types == ["snapshot", "snapshot"] and copy.blocks == engine.blocks
    await frames.aclose()  # type: ignore[attr-defined]
    reader.leave()


async def test_tenants_are_told_apart_and_each_is_filtered_once() -> None:
    engine, calls = Fake(), {"a": 0, "b": 0}

    def only(tenant: str) -> kvfeed.Only:
        def see(view: dict[str, Any]) -> dict[str, Any]:
            calls[tenant] += 1
            return {**view, "for": tenant}

        return see

    feed = KVFeed(engine, only)  # type: ignore[arg-type]
    readers = [await feed.join(tenant) for tenant in "aaab"]
    streams = [r.frames() for r in readers]
    for _ in range(3):
        seen = [json.loads((await anext(s)).removeprefix(b"data: "))["for"] for s in streams]
        assert seen == ["a", "a", "a", "b"]
        engine.tell(random.Random(1))
    assert calls == {"a": 3, "b": 3} and engine.watches == 1
    for stream, reader in zip(streams, readers, strict=True):
        await stream.aclose()  # type: ignore[attr-defined]
        reader.leave()


async def test_who_asks_for_the_map_at_the_same_time_shares_one(encodings: list[str]) -> None:
    engine = Fake()
    feed = KVFeed(engine)  # type: ignore[arg-type]
    bodies = await asyncio.gather(*(feed.snapshot("") for _ in range(50)))
    assert engine.watches == 1 and encodings == ["map"] and len(set(bodies)) == 1
    engine.blocks[1] = 77
    assert json.loads(await feed.snapshot(""))["blocks"][0]["n"] == 77, "never one from before the question"


async def test_a_silent_engine_and_a_dead_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kvfeed, "PATIENCE", 0.05)

    class Silent(Fake):
        async def kv_events(self) -> AsyncIterator[dict[str, Any]]:
            await asyncio.Event().wait()
            yield {}

    class Dead(Fake):
        async def kv_events(self) -> AsyncIterator[dict[str, Any]]:
            return
            yield {}

    for ask in (KVFeed.snapshot, KVFeed.join):
        silent = KVFeed(Silent())  # type: ignore[arg-type]
        with pytest.raises(Overloaded) as late:
            await ask(silent, "")
        assert (late.value.status, late.value.retry_after) == (503, 2)
        assert silent._readers == 0 and silent._watch is None
        with pytest.raises(EngineDead):
            await ask(KVFeed(Dead()), "")  # type: ignore[arg-type]
