"""The ways to keep memory and to batch that are compared, each as a scheduler over a block manager."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from chatsvc.bench.baselines import ContiguousManager, StaticScheduler
from chatsvc.cache.manager import BlockManager
from chatsvc.scheduler.budget import StepBudget
from chatsvc.scheduler.scheduler import Scheduler
from chatsvc.scheduler.settings import PolicyName, SchedulerConfig, SwapCosts
from chatsvc.sim import scenarios
from chatsvc.sim.batching import DYNAMIC_TIMEOUT, BatchGate
from chatsvc.sim.contiguous import (
    Reservation,
    ReservingManager,
    reserve_2048,
    reserve_max,
    reserve_oracle,
    reserve_pow2,
)
from chatsvc.sim.cost import CostModel, Scenario
from chatsvc.sim.driver import Driver

Batching = Literal["static", "dynamic", "continuous"]


@dataclass(frozen=True, slots=True)
class Mode:
    """Attributes:
    reservation: None: paged.
    """

    name: str
    batching: Batching
    reservation: Reservation | None = None
    prefix_caching: bool = False

    @property
    def paged(self) -> bool:
        return self.reservation is None


STATIC = Mode("static, contiguous", "static", reserve_max)
DYNAMIC = Mode("dynamic, contiguous", "dynamic", reserve_max)
STATIC_PAGED = Mode("static, paged", "static")
MAX_2048 = Mode("continuous, reserve 2,048", "continuous", reserve_2048)
MAX = Mode("continuous, reserve max", "continuous", reserve_max)
POW2 = Mode("continuous, reserve pow2", "continuous", reserve_pow2)
ORACLE = Mode("continuous, oracle", "continuous", reserve_oracle)
PAGED = Mode("continuous, paged", "continuous")
SHARED = Mode("continuous, paged, shared", "continuous", prefix_caching=True)
MODES = (STATIC, STATIC_PAGED, MAX, MAX_2048, POW2, ORACLE, PAGED)
BRIEF = (STATIC, MAX, ORACLE, PAGED)
PAPER = (STATIC, MAX_2048, POW2, ORACLE, PAGED)
# Extents are counted in blocks; those of the longest sequence need no finer unit, and fewer blocks are faster to list.
COARSE = 256


def make_driver(
    scenario: Scenario,
    mode: Mode,
    *,
    block_size: int | None = None,
    num_blocks: int | None = None,
    max_num_seqs: int = scenarios.MAX_NUM_SEQS,
    preemption: Literal["auto", "swap", "recompute"] = "recompute",
    policy: PolicyName = "fcfs",
    prefill_share: float = 1.0,
    check: bool = False,
) -> Driver:
    """A fresh engine of that mode.

    Args:
        block_size, num_blocks: where others than the scenario's are wanted.
        preemption: how a sequence is pushed out of a full pool; with anything but ``recompute`` the host tier is as
            large as the pool.
        policy, prefill_share: the scheduler's settings of these names.

    Contiguous modes count in blocks too (rounding a reservation up to a block is part of their external waste), but
    their attention reads a sequence in one run.
    """
    if block_size is None:
        block_size = COARSE if mode.reservation in (reserve_max, reserve_2048) else scenarios.BLOCK_SIZE
    blocks = num_blocks or scenario.num_blocks(block_size)
    limit = min(scenario.model.context, blocks * block_size)
    manager: BlockManager
    if mode.paged:
        host = 0 if preemption == "recompute" else blocks
        manager = BlockManager(blocks, block_size, prefix_caching=mode.prefix_caching, num_host_blocks=host)
    elif mode.batching == "continuous":
        manager = ReservingManager(blocks, block_size)
    else:
        manager = ContiguousManager(blocks, block_size, max_model_len=limit)
    cost = CostModel(scenario, block_size if mode.paged else None)
    swap = SwapCosts(preemption, cost.block_seconds, cost.token_seconds)
    # Room for growth is only needed where memory is taken as it is used.
    config = SchedulerConfig(
        max_num_seqs, limit, block_size if mode.paged else 0, frozenset(), swap, policy, prefill_share
    )
    budget = StepBudget(scenarios.TOKENS_PER_STEP, adaptive=False)
    if mode.batching == "continuous":
        scheduler = Scheduler(config, manager, budget)
        return Driver(scheduler, cost, reservation=mode.reservation, check=check)
    static = StaticScheduler(config, manager, budget)
    size = max_num_seqs
    if isinstance(manager, ContiguousManager):
        size = min(size, blocks // manager.extent)
    gate = BatchGate(size, None if mode.batching == "static" else DYNAMIC_TIMEOUT)
    return Driver(static, cost, gate=gate, check=check)
