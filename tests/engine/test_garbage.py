"""Full collections happen when nobody waits for text, or seldom; and what was loaded is not looked at again."""

from __future__ import annotations

import asyncio
import subprocess
import sys

import pytest

from chatsvc.engine.garbage import Collector


class Place:
    """A program: whether it is busy, what a collection takes, when they happened."""

    def __init__(self, cost: float) -> None:
        self.now, self.busy, self.cost = 0.0, False, cost
        self.made: list[float] = []
        self.collector = Collector(lambda: self.busy, self.collect, lambda: self.now)

    def collect(self) -> None:
        self.made.append(self.now)
        self.now += self.cost

    def seconds(self, count: int) -> list[float]:
        self.made.clear()
        for _ in range(count):
            self.now += 1
            self.collector.look()
        return self.made


def test_while_text_flows_they_take_a_small_part_of_the_time() -> None:
    for cost in (0.001, 0.04, 0.4):
        place = Place(cost)
        place.busy = True
        made = place.seconds(4000)
        assert made, "but they happen: cycles would fill the memory"
        assert cost * (len(made) - 1) <= place.now / Collector.SHARE
    place = Place(10.0)
    place.busy = True
    assert len(place.seconds(4000)) >= 4000 / (Collector.MOST + 2), "however long they take"


def test_when_nothing_runs_there_is_one_and_no_more() -> None:
    place = Place(0.4)
    assert place.seconds(100) == [], "nothing has happened yet"
    place.busy = True
    place.seconds(2)
    place.busy = False
    assert len(place.seconds(100)) == 1
    place.busy = True
    place.seconds(1)
    place.busy = False
    assert len(place.seconds(1)) == 1, "at once, not when its time would come"


def test_what_was_loaded_is_set_apart_and_garbage_made_later_is_found() -> None:
    code = """
import gc, weakref
gc.disable()
from chatsvc.engine.garbage import settle
settle()
assert gc.get_freeze_count() > 1000
class Loop: pass
def made():
    one = Loop(); one.self = one
    return weakref.ref(one)
kept = [[] for _ in range(400_000)]
before = gc.get_stats()[2]["collections"]
ref = made()
kept += [[] for _ in range(400_000)]
assert ref() is None, "a small collection finds it"
assert gc.get_stats()[2]["collections"] == before, "none of all objects by itself"
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr


async def test_the_collector_runs_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Collector, "LEAST", 0.001)
    found = asyncio.Event()
    task = asyncio.create_task(Collector(lambda: True, found.set).run())
    async with asyncio.timeout(60):
        await found.wait()
    task.cancel()
