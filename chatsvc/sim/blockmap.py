"""Watching single blocks of a small pool fill, stay cached and change hands: the picture of paging."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from chatsvc.scheduler.plan import SchedulerOutput
from chatsvc.sim import modes
from chatsvc.sim.cost import Scenario
from chatsvc.sim.modes import Mode, make_driver
from chatsvc.sim.scenarios import SCENARIOS
from chatsvc.sim.traces import single_turns

FREE, CACHED, EMPTY, QUARTER, HALF, MOST, FULL = range(7)
LEVELS = {
    FREE: ("free", "#f6f8fa"),
    CACHED: ("cached", "#c8b6e2"),
    EMPTY: ("reserved, empty", "#f4a582"),
    QUARTER: ("up to 1/4", "#c6dbef"),
    HALF: ("1/2", "#9ecae1"),
    MOST: ("3/4", "#4292c6"),
    FULL: ("full", "#08519c"),
}
BLOCKS = 64
BLOCK_SIZE = 16
CONTEXT = 256


@dataclass(slots=True)
class BlockMap:
    """``columns[step][block]`` is a level of :data:`LEVELS`."""

    columns: list[list[int]] = field(default_factory=list)
    running: list[int] = field(default_factory=list)


def watch(mode: Mode, steps: int, seed: int) -> BlockMap:
    """The first steps of a crowd of short chats with a system prompt on a pool of 64 blocks."""
    base = SCENARIOS["llama-2-7b"]
    small = Scenario("small", replace(base.model, context=CONTEXT), base.gpu)
    driver = make_driver(small, mode, block_size=BLOCK_SIZE, num_blocks=BLOCKS)
    trace = [e for e in single_turns("alpaca", 400, 20.0, seed, system=40) if e.prompt_len + e.output_len < CONTEXT]
    made = BlockMap()

    def observe(plan: SchedulerOutput) -> None:
        if len(made.columns) >= steps:
            return
        scheduler = driver.scheduler
        pool = scheduler.manager.pool
        size = scheduler.manager.block_size
        levels = [FREE if b.content is None else CACHED for b in pool.blocks[1:]]
        ends = {row.seq_id: row.start + len(row.token_ids) for row in plan.rows}
        for seq in scheduler.running:
            end = ends.get(seq.seq_id, seq.num_computed)
            for i, block in enumerate(seq.table.blocks):
                filled = max(0, min(size, end - i * size))
                level = EMPTY + -(-4 * filled // size)
                levels[block.id - 1] = max(levels[block.id - 1], level)
        made.columns.append(levels)
        made.running.append(len(scheduler.running))

    driver.run(trace, observe=observe, enough=steps * 64)
    return made


PAIR = (modes.MAX, modes.SHARED)
