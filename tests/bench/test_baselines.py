"""The baselines' memory and batches, step by step, on the token-remembering executor."""

from __future__ import annotations

import random

import pytest

from chatsvc.bench.baselines import ContiguousManager, StaticScheduler
from chatsvc.cache.manager import BlockManager, BlockTable
from chatsvc.runtime.simulated import SimulatedConfig, SimulatedExecutor
from chatsvc.scheduler.budget import StepBudget
from chatsvc.scheduler.params import SamplingParams
from chatsvc.scheduler.request import Request
from chatsvc.scheduler.scheduler import SchedulerConfig

SIZE, BLOCKS, LIMIT, VOCAB = 4, 26, 32, 997  # an extent is 8 blocks: three fit, two blocks are left over


class Loop:
    def __init__(self, *, contiguous: bool, budget: int = 16, max_num_seqs: int = 8) -> None:
        self.manager: BlockManager = (
            ContiguousManager(BLOCKS, SIZE, max_model_len=LIMIT)
            if contiguous
            else BlockManager(BLOCKS, SIZE, prefix_caching=False)
        )
        config = SchedulerConfig(max_num_seqs, LIMIT, 0, frozenset({3}))
        self.scheduler = StaticScheduler(config, self.manager, StepBudget(budget, adaptive=False))
        self.executor = SimulatedExecutor(SimulatedConfig(BLOCKS, SIZE, VOCAB, LIMIT))
        self.n = 0

    def add(self, prompt: int, answer: int) -> Request:
        self.n += 1
        params = SamplingParams(max_tokens=answer, temperature=0.0, ignore_eos=True)
        request = Request(f"r{self.n}", [self.n + i for i in range(prompt)], params, float(self.n))
        self.scheduler.add(request)
        return request

    def step(self) -> set[int]:
        """The sequences that computed."""
        plan = self.scheduler.schedule()
        self.scheduler.update(plan, self.executor.run(plan))
        self.scheduler.check_integrity()
        return {r.seq_id for r in plan.rows}


@pytest.mark.parametrize("contiguous", [True, False])
def test_nobody_joins_a_running_batch(contiguous: bool) -> None:
    loop = Loop(contiguous=contiguous)
    first = [loop.add(3, 2), loop.add(5, 9)]
    members = {r.sequences[0].seq_id for r in first}
    loop.step()
    late = loop.add(2, 2)
    assert loop.scheduler.batch == members
    while not first[1].finished:
        assert loop.step() <= members
        assert not loop.scheduler.batch or late.sequences[0].seq_id in loop.scheduler.waiting
    assert first[0].finished and not late.finished
    assert loop.step() == {late.sequences[0].seq_id} and loop.scheduler.batches == 2


def test_contiguous_holds_everything_until_the_batch_ends() -> None:
    loop = Loop(contiguous=True)
    short, long, queued = loop.add(3, 1), loop.add(3, 6), [loop.add(3, 1) for _ in range(2)]
    loop.step()
    # Three extents fit; each is whole from the start, whatever the prompt needs.
    assert loop.manager.pool.num_used == 24 and loop.scheduler.batch == {long.sequences[0].seq_id}
    assert short.finished and queued[0].finished and not queued[1].finished
    filled, allocated = loop.scheduler.filled_slots()
    assert (filled, allocated) == (3, 24 * SIZE)
    while not long.finished:
        assert loop.manager.pool.num_used == 24
        loop.step()
    assert loop.manager.pool.num_used == 0
    loop.step()
    assert queued[1].finished and loop.manager.pool.num_used == 0


def test_paged_static_gives_blocks_back_at_each_end_and_never_preempts() -> None:
    loop = Loop(contiguous=False)
    # Full lengths of 8 + 8 + 8 blocks fit into 26, a fourth does not, though its prompt would.
    requests = [loop.add(2, 30) for _ in range(4)]
    loop.step()
    assert len(loop.scheduler.batch) == 3
    while loop.scheduler.has_work:
        loop.step()
    assert all(r.finished for r in requests) and loop.scheduler.stats.preemptions == 0
    early, late = loop.add(4, 2), loop.add(4, 12)
    while not early.finished:
        loop.step()
    assert loop.manager.pool.num_used == len(late.sequences[0].table.blocks)


@pytest.mark.parametrize("contiguous", [True, False])
def test_random_loads_end_whole(contiguous: bool) -> None:
    for seed in range(30):
        rng = random.Random(seed)
        loop = Loop(contiguous=contiguous, budget=rng.choice([1, 3, 16]), max_num_seqs=rng.choice([1, 2, 8]))
        live: list[Request] = []
        batch: set[int] = set()
        for _ in range(120):
            p = rng.random()
            if p < 0.2:
                prompt = rng.randint(1, LIMIT - 1)
                live.append(loop.add(prompt, rng.randint(1, LIMIT - prompt)))
            elif p < 0.25 and live:
                loop.scheduler.finish(rng.choice(live).sequences[0], "abort")
            elif loop.scheduler.has_work:
                before = set(loop.scheduler.batch)
                ran = loop.step()
                batch = before or ran | loop.scheduler.batch
                assert ran <= batch and loop.scheduler.batch <= batch
        while loop.scheduler.has_work:
            loop.step()
        assert loop.manager.pool.num_used == 0 and loop.scheduler.stats.preemptions == 0
        assert all(r.finished for r in live)


def test_an_extent_that_cannot_fit_is_refused() -> None:
    with pytest.raises(ValueError, match="does not fit"):
        ContiguousManager(4, 16, max_model_len=65)
    with pytest.raises(NotImplementedError):
        ContiguousManager(4, 16, max_model_len=64).fork(BlockTable(), BlockTable())
