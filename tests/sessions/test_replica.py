"""A turn's log put together from its batches, some of which come twice, late or never."""

from __future__ import annotations

import asyncio
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import chatsvc.api.replica as replica_module
from chatsvc.api.replica import Replica, Sent
from chatsvc.api.turn import Turn
from chatsvc.api.turnstream import turn_events
from chatsvc.engine.output import Generation
from chatsvc.engine.wake import Pace
from chatsvc.scheduler.plan import SampledToken
from chatsvc.sessions.base import Message

PIECES = ["", "a", "bc", "é", "👩‍👩‍👧", "\u2028", '"\\', "\n\n"]


def own_turn() -> Turn:
    generation = Generation("chatcmpl-m", [1, 2, 3], 1, lambda: None, 0.0)
    return Turn(("t", "s"), Message("m", None, "assistant", "", "running"), generation)


def grow(turn: Turn, pieces: list[str]) -> None:
    log = turn.generation.logs[0]
    log.pieces += pieces
    log.tokens += [SampledToken(7)] * len(pieces)
    turn.generation.notify()


@settings(max_examples=300, deadline=None)
@given(seed=st.integers(0, 10**9))
def test_any_mix_of_lost_and_doubled_batches_ends_in_the_owners_text(seed: int) -> None:
    rng = random.Random(seed)
    turn, sent, replica = own_turn(), Sent(), Replica("m")
    log = turn.generation.logs[0]
    saved = False
    for step in range(rng.randrange(1, 25)):
        grow(turn, rng.choices(PIECES, k=rng.randrange(4)))
        made = sent.next(turn, wanted=replica.gap and rng.random() < 0.5)
        if made is None:
            continue
        batch, after = made
        if rng.random() < 0.8:  # else: written, but the reply was lost, so that it is sent again as part of the next
            sent = after
        if rng.random() < 0.75:  # else: lost with the memory of Redis
            for _ in range(rng.choice((1, 1, 2))):
                replica.take(batch)
        assert log.text.startswith(replica.logs[0].text), step
        assert len(replica.logs[0].tokens) == len(replica.logs[0].pieces) <= len(log.tokens)
        for i in range(len(replica.logs[0].tokens) + 1):  # every place that counts as known is right
            if replica.snapshot_for(i) == i:
                assert "".join(replica.logs[0].pieces[:i]) == "".join(log.pieces[:i])
    log.tail, log.finish_reason = rng.choice(["", "tail"]), rng.choice(["stop", "length", "abort"])  # type: ignore
    turn.saved.set()
    while not saved:
        made = sent.next(turn, wanted=True)
        assert made is not None
        saved = replica.take(made[0])
    assert replica.logs[0].text == log.text and replica.logs[0].finish_reason == log.finish_reason
    assert replica.usage["prompt_tokens"] == 3 and replica.usage["completion_tokens"] == len(log.tokens)


async def read(turn: Turn, cursor: int) -> bytes:
    async def at_once(turn: Turn) -> None:
        return None

    return b"".join([event async for event in turn_events(turn, cursor, "tiny", at_once, Pace())])


async def test_a_reader_who_is_ahead_of_the_replica_gets_nothing_twice() -> None:
    owner, replica = own_turn(), Replica("m")
    joined = Turn(owner.key, owner.answer, replica, "another")
    grow(owner, ["a", "b", "c"])
    sent = Sent()
    batch, sent = sent.next(owner)  # type: ignore[misc]
    replica.take(batch)
    reading = asyncio.create_task(read(joined, 5))  # it has seen five tokens at the owner's
    await asyncio.sleep(0)
    for more in (["d"], ["e"], ["f"]):
        grow(owner, more)
        batch, sent = sent.next(owner)  # type: ignore[misc]
        replica.take(batch)
        await asyncio.sleep(0.001)
    owner.generation.logs[0].finish_reason = "stop"
    batch, sent = sent.next(owner)  # type: ignore[misc]
    replica.take(batch)
    text = (await reading).decode()
    assert '"content":"f"' in text and "snapshot" not in text
    assert not any(f'"content":"{c}' in text for c in "abcde")


async def test_a_hole_is_left_with_a_snapshot_and_its_edges_are_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replica_module, "SNAPSHOT_EVERY", 1)
    owner, replica, sent = own_turn(), Replica("m"), Sent()
    for i in range(12):
        grow(owner, [str(i)])
        batch, sent = sent.next(owner)  # type: ignore[misc]
        if i not in (4, 5, 6):
            replica.take(batch)
    assert replica.holes == [(4, 7)] and not replica.gap
    assert [replica.snapshot_for(i) for i in range(13)] == [0, 1, 2, 3, 4, 7, 7, 7, 8, 9, 10, 11, 12]
    late = Replica("m")  # came when the log had lost its beginning
    late.take(Sent().next(owner, wanted=True)[0].replace('"from":0', '"from":99'))  # type: ignore[index]
    assert late.gap
    sent.tokens = 9
    late.take(sent.next(owner, wanted=True)[0])  # type: ignore[index]
    assert late.holes == [(0, 9)] and late.snapshot_for(0) == late.snapshot_for(8) == 9
    joined = Turn(owner.key, owner.answer, late, "another")
    late.fail("enough", "rejoin")
    event = (await read(joined, 3)).decode()
    assert event.startswith("event: snapshot\nid: m:0:9\n") and '"content":"012345678"' in event


async def test_a_turn_whose_log_is_gone_ends_as_the_store_says() -> None:
    ended = {
        "done": ("the whole", "length", None),
        "cancelled": ("the who", "abort", None),
        "interrupted": ("the w", "error", "cut off"),
        "failed": ("the w", "error", "cut off"),
    }
    for status, (text, finish, error) in ended.items():
        replica = Replica("m")
        replica.take('{"from":0,"pieces":["the"," w"]}')
        reason = "length" if status == "done" else None
        usage = {"completion_tokens": 4}
        stored = Message("m", None, "assistant", text, status, usage, finish_reason=reason)  # type: ignore[arg-type]
        replica.settle(stored)
        log = replica.logs[0]
        assert log.finish_reason == finish and (error is None) == (log.error is None)
        assert log.text == ("the w" if error else text)
    replica = Replica("m")
    replica.settle(None)
    assert replica.finished and "gone" in str(replica.logs[0].error)
