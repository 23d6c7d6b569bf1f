"""How many sequences of a trace fit into the KV memory at one moment, by each way of keeping it.

A snapshot of a server in its steady state (:func:`chatsvc.sim.traces.under_way`): sequences come in until the first one
does not fit. Block managers are the real ones; no step is run, so limits other than memory play no part.
"""

from __future__ import annotations

from random import Random

from chatsvc.cache.manager import BlockManager, BlockTable
from chatsvc.sim.contiguous import Reservation, ReservingManager
from chatsvc.sim.cost import Scenario
from chatsvc.sim.scenarios import BLOCK_SIZE
from chatsvc.sim.traces import Entry


def fit(
    scenario: Scenario, trace: list[Entry], reservation: Reservation | None, seed: int, block_size: int = BLOCK_SIZE
) -> int:
    """Sequences that fit. ``reservation`` None: paged."""
    rng = Random(f"{seed}/fit")
    blocks = scenario.num_blocks(block_size)
    manager = BlockManager(blocks, block_size) if reservation is None else ReservingManager(blocks, block_size)
    limit = scenario.model.context
    weights = [e.output_len for e in trace]
    tables: list[BlockTable] = []
    while True:
        entry = rng.choices(trace, weights)[0]
        table = BlockTable()
        if reservation is not None and isinstance(manager, ReservingManager):
            manager.expect(table, reservation(entry.prompt_len, entry.output_len, limit))
        if not manager.allocate(table, entry.prompt_len + rng.randrange(entry.output_len)):
            return len(tables)
        tables.append(table)
