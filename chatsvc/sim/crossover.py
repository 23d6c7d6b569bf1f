"""Swapping against recomputing a preempted sequence: what each costs, from the data sheet.

::

    swap        its K/V over PCIe twice (out and in), each GPU its share over its own link, and a launch for each copy
    recompute   its tokens prefilled again: alone in its steps, which then read all weights for it; or beside running
                sequences, whose steps read the weights anyway, so that only its FLOPs count

A swap's copies can overlap with steps, a recompute's FLOPs cannot; neither number says how long the user waits.
"""

from __future__ import annotations

from dataclasses import dataclass

from chatsvc.sim.cost import CostModel, Scenario, Work, copy_seconds
from chatsvc.sim.scenarios import BLOCK_SIZE, TOKENS_PER_STEP

LENGTHS = (128, 256, 512, 1024, 2048, 4096, 8192)


@dataclass(frozen=True, slots=True)
class Crossover:
    """Seconds for a sequence of ``tokens``.

    Attributes:
        swap: a block is one run of bytes for all layers: one copy.
        swap_by_layer: a cache that keeps each layer's K and V apart copies a block in 2 x layers pieces.
    """

    tokens: int
    swap: float
    swap_by_layer: float
    alone: float
    beside: float

    @property
    def cheaper(self) -> str:
        """By the smaller of the two costs of recomputing."""
        return "swap" if self.swap < min(self.alone, self.beside) else "recompute"


def swap_seconds(scenario: Scenario, tokens: int, copies_per_block: int = 1) -> float:
    """Out and in."""
    return 2 * copy_seconds(scenario, tokens, -(-tokens // BLOCK_SIZE) * copies_per_block)


def _chunks(tokens: int) -> list[Work]:
    """Prefill in chunks of a step's token budget."""
    ends = [*range(TOKENS_PER_STEP, tokens, TOKENS_PER_STEP), tokens]
    works, done = [], 0
    for end in ends:
        n = end - done
        works.append(Work(n, 0, end, n * done + n * (n + 1) // 2))
        done = end
    return works


def table(scenario: Scenario) -> list[Crossover]:
    cost = CostModel(scenario, None)
    return [
        Crossover(
            n,
            swap_seconds(scenario, n),
            swap_seconds(scenario, n, 2 * scenario.model.layers),
            sum(cost.seconds(w) for w in _chunks(n)),
            sum(cost.compute_seconds(w) for w in _chunks(n)),
        )
        for n in LENGTHS
        if n <= scenario.model.context
    ]
