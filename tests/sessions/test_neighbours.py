"""A reader who comes for another process's turn, at the moment when turns without readers are let go."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

import pytest

from chatsvc.api.neighbours import Neighbours
from chatsvc.sessions.base import Message
from chatsvc.sessions.memory import MemoryStore
from chatsvc.sessions.relay import Note

ANSWER = Message("msg_1", None, "assistant", "", "running", owner="other")
KEY = ("t", "chat_1")


class OneLog:
    """A relay that knows who follows what."""

    name = "here"
    on_note: Callable[[Note], None]

    def __init__(self) -> None:
        self.followed: set[str] = set()

    async def add(self, batches: Sequence[tuple[str, str]]) -> None: ...

    async def tell(self, to: str, note: Note) -> None: ...

    async def follow(self, turn: str, take: Callable[[str], None]) -> None:
        await asyncio.sleep(0)
        self.followed.add(turn)

    def unfollow(self, turn: str) -> None:
        self.followed.discard(turn)


@pytest.fixture
async def neighbours() -> Neighbours:
    return Neighbours(OneLog(), MemoryStore(60), lambda turn: None)


async def look(neighbours: Neighbours) -> None:
    for turn in list(neighbours._joined.values()):
        await neighbours._care(turn)


async def test_a_turn_is_followed_until_its_first_reader_has_come(neighbours: Neighbours) -> None:
    """Between the end of joining and the reader the event loop goes round: a look in each of its rounds."""
    coming = asyncio.create_task(neighbours.join(KEY, ANSWER))
    rounds = 0
    while not coming.done():
        rounds += "msg_1" in neighbours._joined
        await look(neighbours)
        await asyncio.sleep(0)
    assert rounds > 0
    turn = coming.result()
    turn.readers += 1
    neighbours.attached(turn)
    await look(neighbours)
    assert isinstance(neighbours._relay, OneLog)
    assert neighbours._relay.followed == {"msg_1"} and neighbours._joined == {"msg_1": turn}
    turn.readers -= 1
    neighbours.detached(turn)
    assert neighbours._relay.followed == set() and not neighbours._joined
    await neighbours.close(1)


async def test_a_turn_whose_readers_did_not_wait_is_let_go(neighbours: Neighbours) -> None:
    coming = asyncio.create_task(neighbours.join(KEY, ANSWER))
    await asyncio.sleep(0)
    coming.cancel()
    while neighbours._joining or not coming.done():
        await asyncio.sleep(0)
    await look(neighbours)
    assert isinstance(neighbours._relay, OneLog)
    assert neighbours._relay.followed == set() and not neighbours._joined
    await neighbours.close(1)
