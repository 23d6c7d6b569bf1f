"""The simulated executor remembers what a plain model of its pool remembers, and takes the time of a device with a
queue."""

from __future__ import annotations

import random
from array import array
from collections.abc import Callable

import pytest

from chatsvc.runtime import simulated
from chatsvc.runtime.simulated import UNWRITTEN, SimulatedConfig, SimulatedExecutor
from chatsvc.scheduler.params import SamplingParams
from chatsvc.scheduler.plan import SamplingRow, ScheduledRow, SchedulerOutput, StepResult

BLOCKS, SIZE, VOCAB = 12, 4, 1000
SAMPLING = SamplingRow(SamplingParams(max_tokens=1), 0, 1)


class Model:
    """The pool as a dictionary: (block, offset) -> token, one position at a time."""

    def __init__(self) -> None:
        self.slots: dict[tuple[int, int], int] = {}

    def contexts(self, plan: SchedulerOutput) -> dict[int, list[int]]:
        moved = [[self.slots.get((a, i)) for i in range(SIZE)] for a, _ in plan.copies]
        for (_, b), tokens in zip(plan.copies, moved, strict=True):
            for i, token in enumerate(tokens):
                self.slots[b, i] = UNWRITTEN if token is None else token
        for row in plan.rows:
            for p, token in enumerate(row.token_ids, row.start):
                if p >= row.write_from:
                    self.slots[row.block_table[p // SIZE], p % SIZE] = token
        return {
            row.seq_id: [
                self.slots.get((row.block_table[p // SIZE], p % SIZE), UNWRITTEN)
                for p in range(row.start + len(row.token_ids))
            ]
            for row in plan.rows
            if row.sampling is not None
        }


def rows(rng: random.Random) -> tuple[ScheduledRow, ...]:
    """Of any shape: shared, stale and unwritten blocks among them."""
    made = []
    for seq_id in range(rng.randint(1, 4)):
        start, count = rng.randint(0, 20), rng.choice((1, 1, rng.randint(1, 15)))
        table = tuple(rng.randint(1, BLOCKS) for _ in range(-(-(start + count) // SIZE)))
        tokens = tuple(rng.randrange(VOCAB) for _ in range(count))
        write_from = start + rng.choice((0, 0, rng.randint(0, count)))
        made.append(ScheduledRow(seq_id, tokens, start, table, write_from, rng.choice((SAMPLING, SAMPLING, None))))
    return tuple(made)


def test_what_is_read_is_what_was_written_there() -> None:
    for seed in range(300):
        rng = random.Random(seed)
        seen: dict[int, list[int]] = {}

        def token(context: array[int], row: ScheduledRow, seen: dict[int, list[int]] = seen) -> int:
            seen[row.seq_id] = context.tolist()
            return 0

        executor, model = SimulatedExecutor(SimulatedConfig(BLOCKS, SIZE, VOCAB, 100), token), Model()
        for step in range(8):
            pairs = [(rng.randint(1, BLOCKS), rng.randint(1, BLOCKS)) for _ in range(rng.choice((0, 0, 1)))]
            plan = SchedulerOutput(step, rows(rng), copies=tuple(pairs))
            seen.clear()
            executor.run(plan)
            assert seen == model.contexts(plan), f"seed {seed}, step {step}"


@pytest.mark.parametrize(
    "row",
    [
        ScheduledRow(0, (1,) * 6, 0, (1, BLOCKS + 1), 0, SAMPLING),
        ScheduledRow(0, (1,), 9, (1, 2), 10, SAMPLING),
        ScheduledRow(0, (1,), 9, (1, 2), 9, None),
    ],
)
def test_a_plan_that_names_no_such_block_fails(row: ScheduledRow) -> None:
    executor = SimulatedExecutor(SimulatedConfig(BLOCKS, SIZE, VOCAB, 100))
    before = executor._pool.tobytes()
    with pytest.raises((AssertionError, IndexError)):
        executor.run(SchedulerOutput(1, (row,)))
    assert len(executor._pool.tobytes()) == len(before), "the pool does not grow"


class Time:
    """A clock that only moves when somebody waits, in place of the module ``time`` and of the stop event."""

    now = 100.0

    def monotonic(self) -> float:
        return self.now

    def wait(self, seconds: float) -> bool:
        self.now += seconds + 0.003  # woken late
        return False


class Thread:
    """Does what it was given when it is told to."""

    def __init__(self) -> None:
        self.given: list[tuple[Callable[..., StepResult], SchedulerOutput]] = []

    def submit(self, fn: Callable[..., StepResult], plan: SchedulerOutput) -> None:
        self.given.append((fn, plan))

    def next(self) -> StepResult:
        fn, plan = self.given.pop(0)
        return fn(plan)


def test_steps_of_a_queue_follow_each_other_without_a_gap(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, thread = Time(), Thread()
    monkeypatch.setattr(simulated, "time", clock)
    executor = SimulatedExecutor(SimulatedConfig(BLOCKS, SIZE, VOCAB, 100, step_seconds=0.05, token_seconds=0.01))
    executor._stop, executor._thread = clock, thread  # type: ignore[assignment]
    plan = SchedulerOutput(1, (ScheduledRow(0, (1,), 0, (1,), 0, SAMPLING),))
    executor.submit(plan)
    executor.submit(plan)
    ends = []
    for _ in range(4):  # always one more in the queue
        assert thread.next().seconds == pytest.approx(0.06)
        ends.append(executor._free)
        executor.submit(plan)
    assert ends == pytest.approx([100.06, 100.12, 100.18, 100.24]), "what is slept too long is not lost"
    thread.next()
    assert thread.next().seconds == pytest.approx(0.06)
    assert executor._free == pytest.approx(100.36)
    clock.now = 200.0
    executor.submit(plan)
    clock.now = 200.02  # the thread is late, the device is not
    assert thread.next().seconds == pytest.approx(0.06)
    assert executor._free == pytest.approx(200.06), "after a rest a step begins when it is submitted"
