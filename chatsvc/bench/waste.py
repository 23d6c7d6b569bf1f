"""Waste of KV slots over the whole recorded trace, for every block size.

Scheduler and block manager are the real ones; the executor is simulated, because a slot's use does not depend on what
is written into it.
"""

from __future__ import annotations

from dataclasses import dataclass

from chatsvc.bench.baselines import MODES
from chatsvc.bench.drive import drive
from chatsvc.bench.recorder import LONG
from chatsvc.bench.rig import Rig
from chatsvc.bench.trace import build
from chatsvc.config import BLOCK_SIZES, ServeConfig


@dataclass(frozen=True, slots=True)
class Waste:
    """1 - used / reserved slots, over every step of the trace, weighted by its time.

    Attributes:
        all, long: all sequences, and those that end with 500 tokens and more; a shared block counts once.
        all_own, long_own: each sequence's own table, as if nothing were shared.
        sequences, long_sequences: how many there were.
    """

    block_size: int
    sequences: int
    long_sequences: int
    all: float
    long: float
    all_own: float
    long_own: float


async def waste(config: ServeConfig, pool_tokens: int, seed: int, scale: float = 1.0) -> list[Waste]:
    """The mixed trace once for each block size. Raises: ConfigError, ModelError."""
    rows = []
    for size in BLOCK_SIZES:
        update = {"executor": "simulated", "block_size": size, "num_kv_blocks": pool_tokens // size}
        rig = Rig(config.model_copy(update=update))
        try:
            run = await drive(rig, build("mixed", seed, scale), MODES[-1], by_length=True)
        finally:
            rig.close()
        lengths = [len(a.prompt) + len(a.tokens) for a in run.answers.values()]
        r = run.recorder
        rows.append(
            Waste(
                block_size=size,
                sequences=len(lengths),
                long_sequences=sum(n >= LONG for n in lengths),
                all=r.slots.waste,
                long=r.long_slots.waste,
                all_own=r.own_slots.waste,
                long_own=r.long_own_slots.waste,
            )
        )
    return rows
