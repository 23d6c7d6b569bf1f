"""How readers wait: at every step, or, when there are very many, at every second; never for ever."""

from __future__ import annotations

import asyncio

from chatsvc.engine.output import Generation
from chatsvc.engine.wake import Pace, Wake
from chatsvc.scheduler.plan import SampledToken


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def paced(steps: int, longest: float = 60) -> Pace:
    pace = Pace(Clock())
    pace.steps = steps
    pace.LONGEST = longest  # type: ignore[misc]
    return pace


def append(generation: Generation, *, ends: bool = False) -> None:
    log = generation.logs[0]
    log.tokens.append(SampledToken(len(log.tokens)))
    log.pieces.append("x")
    if ends:
        log.finish_reason = "stop"
    generation.notify()


class Reading:
    """A reader of a new generation; ``sizes``: tokens of each of its looks."""

    def __init__(self, pace: Pace | None) -> None:
        self.generation = Generation("r", [1], 1, lambda error, status: None, 0.0)
        self.sizes: list[int] = []
        self.task = asyncio.create_task(self._run(pace))

    async def _run(self, pace: Pace | None) -> None:
        async for (delta,) in self.generation.read(pace=pace):
            self.sizes.append(len(delta.tokens))

    async def step(self, **fields: bool) -> None:
        append(self.generation, **fields)
        for _ in range(4):
            await asyncio.sleep(0)


async def test_without_a_pace_every_step_is_a_look() -> None:
    r = Reading(None)
    for i in range(6):
        await r.step(ends=i == 5)
    await r.task
    assert r.sizes == [1] * 6


async def test_the_first_token_and_the_end_do_not_wait() -> None:
    r = Reading(paced(3))
    await asyncio.sleep(0)
    seen = []
    for i in range(9):
        await r.step(ends=i == 8)
        seen.append(list(r.sizes))
    await r.task
    assert seen[0] == [1], "the first at once"
    assert r.sizes == [1, 3, 3, 2], "then every third, and the end at once"


async def test_text_is_never_kept_for_long() -> None:
    r = Reading(paced(4, longest=0.01))
    await asyncio.sleep(0)
    await r.step()
    await r.step()
    assert r.sizes == [1]
    async with asyncio.timeout(10):
        while r.sizes != [1, 1]:
            await asyncio.sleep(0.001)
    await r.step(ends=True)
    await r.task
    assert sum(r.sizes) == 3


async def test_what_came_while_nobody_waited_is_taken_at_once() -> None:
    wake = Wake(paced(2, longest=0.0), lambda: False)
    wake()
    await asyncio.sleep(0.01)  # its time is over before anybody waits
    await asyncio.wait_for(wake.wait(), 10)
    wake()
    wake()
    await asyncio.wait_for(wake.wait(), 10)
    waiting = asyncio.create_task(wake.wait())
    await asyncio.sleep(0)
    assert not waiting.done()
    waiting.cancel()
    await asyncio.wait([waiting])
    wake()
    await asyncio.wait_for(wake.wait(), 10)
    wake.close()


async def test_a_reader_that_leaves_leaves_nothing() -> None:
    r = Reading(paced(3))
    await asyncio.sleep(0)
    await r.step()
    await r.step()
    r.task.cancel()
    await asyncio.wait([r.task])
    assert not r.generation._watchers
    append(r.generation)


def test_the_pace_follows_the_load() -> None:
    clock, cpu = Clock(), Clock()
    pace = Pace(clock, cpu)

    def seconds(busy: float, count: float = 1) -> int:
        for _ in range(int(count * 100)):
            clock.now += 0.01
            cpu.now += 0.01 * busy
            pace.noted()
        return pace.steps

    assert seconds(0.7, 5) == 1
    more = seconds(0.95, 1.1)
    assert more > 1
    assert seconds(0.6, 5) == more, "it is what keeps the load there"
    assert seconds(0.95, 5) == Pace.MOST
    assert seconds(0.2, 5) == 1
    assert seconds(0.95, 5) > 1
    clock.now += 100
    pace.noted()
    assert pace.steps == 1, "after a rest the first one is not kept waiting"
