"""What the block pool's and the scheduler's operations cost, by the size of what they work on. No model, no kernels.

CPU time, not wall time: other programs of the machine do not make an operation slower, they only interrupt it. Of
single operations the fastest of some rounds counts, of steps the median.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from statistics import median

from chatsvc.cache.block import Block
from chatsvc.cache.index import PrefixIndex
from chatsvc.cache.manager import BlockManager
from chatsvc.cache.pool import BlockPool
from chatsvc.runtime.runner import layout_of
from chatsvc.scheduler.budget import StepBudget
from chatsvc.scheduler.params import SamplingParams
from chatsvc.scheduler.plan import SampledToken, StepResult
from chatsvc.scheduler.request import Request
from chatsvc.scheduler.scheduler import Scheduler, SchedulerConfig

POOL_SIZES = (1_000, 100_000, 1_000_000)
QUEUE_SIZES = (1_000, 10_000, 100_000)
RUNNING = (1, 16, 64, 256, 1024)
WAITING = 10_000
CONTEXT = 500  # tokens of each running sequence
BLOCK_SIZE = 16
ROUNDS = 5
MOST_CACHED = 100_000  # contents that are kept while blocks are touched


@dataclass(frozen=True, slots=True)
class PoolCosts:
    """Microseconds for each operation on a pool of ``blocks``.

    Attributes:
        take, give: a block with no content.
        evict: take a cached block, and forget its content.
        touch: a cached block, from anywhere in its list, gets an owner and loses it again.
    """

    blocks: int
    take: float
    give: float
    evict: float
    touch: float


@dataclass(frozen=True, slots=True)
class QueueCosts:
    """Microseconds for each request, with ``waiting`` in the queue: to add it, to abort it in random order."""

    waiting: int
    add: float
    abort: float


@dataclass(frozen=True, slots=True)
class StepCosts:
    """Milliseconds of one step in which all of ``running`` decode: plan it, lay out its inputs, apply its result."""

    running: int
    schedule: float
    inputs: float
    update: float

    @property
    def total(self) -> float:
        return self.schedule + self.inputs + self.update


def _seconds(work: Callable[[], object]) -> float:
    began = time.process_time()
    work()
    return time.process_time() - began


def pool_costs(blocks: int, seed: int = 0) -> PoolCosts:
    rng = Random(seed)
    pool = BlockPool(blocks, PrefixIndex(b""))
    cached = min(blocks // 2, MOST_CACHED)
    for i in range(cached):
        key = i.to_bytes(16, "little")
        pool.store(pool.take(), key, 0, key, b"")
    for block in pool.blocks[1 : cached + 1]:
        pool.unref(block)
    pool.take_events()
    n = min(pool.num_free, 2_000)
    hot = [pool.blocks[i] for i in rng.sample(range(1, cached + 1), min(cached, 2_000))]
    taken: list[Block] = []

    def take() -> None:
        for _ in range(n):
            taken.append(pool.take())

    def give() -> None:
        while taken:
            pool.unref(taken.pop())

    def touch() -> None:
        for block in hot:
            pool.ref(block)
            pool.unref(block)

    rounds = [(_seconds(take), _seconds(give), _seconds(touch)) for _ in range(ROUNDS)]
    while pool.num_free:
        pool.take()
    m = min(cached, n) // ROUNDS

    def evict() -> None:
        for _ in range(m):
            pool.take()

    evicting = min(_seconds(evict) for _ in range(ROUNDS))
    takes, gives, touches = (min(r[i] for r in rounds) for i in range(3))
    return PoolCosts(blocks, takes / n * 1e6, gives / n * 1e6, evicting / m * 1e6, touches / len(hot) * 1e6)


def _scheduler(blocks: int, running: int) -> Scheduler:
    manager = BlockManager(blocks, BLOCK_SIZE)
    config = SchedulerConfig(running, 4096, BLOCK_SIZE, frozenset())
    return Scheduler(config, manager, StepBudget(max(2048, 2 * running), adaptive=False))


def _request(i: int, tokens: list[int], answer: int = 1000) -> Request:
    return Request(str(i), tokens, SamplingParams(max_tokens=answer, temperature=0.0, ignore_eos=True), float(i))


def queue_costs(waiting: int, seed: int = 0) -> QueueCosts:
    scheduler = _scheduler(1000, 1)
    requests = [_request(i, [1, 2, 3]) for i in range(waiting)]
    gc.freeze()  # a collection now and then looks at all of them; that is not the queue's doing

    def add() -> None:
        for request in requests:
            scheduler.add(request)

    adding = _seconds(add)
    some = Random(seed).sample(requests, min(waiting, 1_000))

    def abort() -> None:
        for request in some:
            for seq in request.sequences:
                scheduler.finish(seq, "abort")

    aborting = _seconds(abort)
    gc.unfreeze()
    return QueueCosts(waiting, adding / waiting * 1e6, aborting / len(some) * 1e6)


def step_costs(running: int, waiting: int = WAITING, steps: int = 33) -> StepCosts:
    """All of ``running`` decode at a context of about :data:`CONTEXT` tokens; the queue waits for a sequence slot."""
    rng = Random(running)
    per_sequence = -(-CONTEXT // BLOCK_SIZE) + 5
    scheduler = _scheduler(running * per_sequence, running)
    for i in range(running):
        scheduler.add(_request(i, [rng.randrange(30_000) for _ in range(CONTEXT + i % BLOCK_SIZE)]))
    for i in range(waiting):
        scheduler.add(_request(running + i, [rng.randrange(30_000) for _ in range(20)]))
    times: list[tuple[float, float, float]] = []
    while len(times) < steps:
        began = time.process_time()
        plan = scheduler.schedule()
        planned = time.process_time()
        layout_of(plan.rows, BLOCK_SIZE)
        ids = [t for r in plan.rows for t in r.token_ids]
        positions = [p for r in plan.rows for p in range(r.start, r.start + len(r.token_ids))]
        laid = time.process_time()
        result = StepResult(plan.step, {r.seq_id: [SampledToken(7)] for r in plan.rows if r.sampling is not None})
        sampled = time.process_time()
        scheduler.update(plan, result)
        done = time.process_time()
        assert len(ids) == len(positions) == plan.num_tokens
        if plan.num_tokens == running == len(result.tokens):  # everybody decodes
            times.append((planned - began, laid - planned, done - sampled))
    schedule, inputs, update = (1e3 * median(part) for part in zip(*times, strict=True))
    return StepCosts(running, schedule, inputs, update)
