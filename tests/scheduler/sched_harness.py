"""Scheduler, block manager and the token-remembering executor in one synchronous loop, checked after every step."""

from __future__ import annotations

import random
from array import array
from collections.abc import Callable
from dataclasses import replace

from chatsvc.cache.manager import BlockManager
from chatsvc.runtime.simulated import SimulatedConfig, SimulatedExecutor, candidates, hashed_token
from chatsvc.scheduler.beam import BeamParams, BeamSearch
from chatsvc.scheduler.budget import StepBudget
from chatsvc.scheduler.params import SamplingParams
from chatsvc.scheduler.plan import UNKNOWN, SampledToken, SamplingRow, SchedulerOutput, StepResult
from chatsvc.scheduler.request import Request, SequenceUpdate
from chatsvc.scheduler.scheduler import Scheduler, SchedulerConfig, SwapCosts
from chatsvc.scheduler.settings import PolicyName

VOCAB = 997
EOS = 3


class Bench:
    def __init__(
        self,
        *,
        num_blocks: int = 20,
        block_size: int = 4,
        budget: int = 16,
        max_num_seqs: int = 8,
        prefix_caching: bool = True,
        secret: bytes = b"s",
        num_host_blocks: int = 0,
        swap: SwapCosts | None = None,
        policy: PolicyName = "fcfs",
        prefill_share: float = 1.0,
        depth: int = 1,
    ) -> None:
        self.depth = depth
        self.flying: list[tuple[SchedulerOutput, StepResult | None]] = []  # None: not begun
        self.eager = True
        self.manager = BlockManager(
            num_blocks, block_size, prefix_caching=prefix_caching, secret=secret, num_host_blocks=num_host_blocks
        )
        self.limit = num_blocks * block_size
        swap = swap or SwapCosts("swap" if num_host_blocks else "recompute")
        config = SchedulerConfig(max_num_seqs, self.limit, block_size, frozenset({EOS}), swap, policy, prefill_share)
        self.scheduler = Scheduler(config, self.manager, StepBudget(budget, adaptive=False))
        sim = SimulatedConfig(num_blocks, block_size, VOCAB, self.limit, num_host_blocks=num_host_blocks)
        self.executor = SimulatedExecutor(sim)
        self.token_fn = hashed_token(0, VOCAB)
        self.requests: dict[str, Request] = {}
        self.finished: list[SequenceUpdate] = []
        self._n = 0

    def add(
        self,
        prompt: list[int],
        *,
        max_tokens: int = 8,
        n: int = 1,
        salt: str = "",
        tenant: str = "",
        priority: int = 0,
        arrival: float | None = None,
        **kw: object,
    ) -> Request:
        self._n += 1
        params = SamplingParams(max_tokens=max_tokens, temperature=0.0, n=n)
        if kw:
            params = replace(params, **kw)  # type: ignore[arg-type]
        request = Request(f"r{self._n}", prompt, params, arrival or float(self._n), tenant, salt, priority)
        self.scheduler.add(request)
        self.requests[request.request_id] = request
        self.scheduler.check_integrity()
        return request

    def abort(self, request: Request) -> None:
        for seq in request.sequences:
            self.scheduler.retire(seq, "abort")
        self.scheduler.check_integrity()

    def submit(self) -> None:
        """Plan and run steps until ``depth`` of them are in flight. While ``eager`` the executor runs them at once: it
        is later than that that the scheduler hears of it. If not, a step begins when the one before it is over."""
        while len(self.flying) < self.depth and (not self.flying or self.scheduler.may_run_ahead):
            plan = self.scheduler.schedule()
            self.scheduler.check_integrity()
            if not plan.rows:
                assert self.flying or not self.scheduler.has_work
                return
            assert plan.num_tokens <= self.scheduler.budget.limit
            self._check_rows(plan)
            begins = self.eager or not self.flying
            self.flying.append((plan, self.executor.run(plan) if begins else None))

    def land(self) -> tuple[SchedulerOutput, StepResult]:
        """The oldest step is over, and the next one begins before the scheduler hears of it."""
        plan, result = self.flying.pop(0)
        assert result is not None
        if self.flying and self.flying[0][1] is None:
            self.flying[0] = (self.flying[0][0], self.executor.run(self.flying[0][0]))
        return plan, result

    def step(self) -> SchedulerOutput | None:
        self.submit()
        if not self.flying:
            return None
        plan, result = self.land()
        self.apply(plan, result)
        return plan

    def take_back(self) -> bool:
        """As the engine does when a request comes."""
        if len(self.flying) < 2 or self.flying[1][1] is not None or not self.scheduler.may_take_back:
            return False
        self.scheduler.take_back()
        self.flying.pop()
        self.scheduler.check_integrity()
        return True

    def fail_step(self) -> None:
        self.submit()
        if self.flying:
            self.finished += self.scheduler.step_failed(self.flying[0][0], "boom")
            self.flying.clear()
            self.scheduler.check_integrity()

    def fail_row(self, choose: Callable[[SchedulerOutput], int]) -> None:
        """A row of the oldest step fails."""
        self.submit()
        if self.flying:
            plan, result = self.land()
            bad = choose(plan)
            tokens = {k: v for k, v in result.tokens.items() if k != bad}
            self.apply(plan, StepResult(plan.step, tokens, {bad: "NaN"}))

    def apply(self, plan: SchedulerOutput, result: StepResult) -> None:
        rows = {r.seq_id: r for r in plan.rows}
        rows |= {i: replace(r, seq_id=i, sampling=how) for r in plan.rows for i, how in r.forks}
        every = self.scheduler.queues.all
        before = {i: every[i].tokens[: every[i].num_known] for i in rows if i in every}
        for update in self.scheduler.update(plan, result):
            if update.sequence.request.beams is not None and update.finish_reason != "error":
                self._check_hypothesis(update)
                self.finished.append(update)
                continue
            for token in update.tokens:  # the truth: a pure function of the sequence's own tokens
                row = rows[update.sequence.seq_id]
                want = self.token_fn(before[row.seq_id], row)
                while row.sampling is not None and want in row.sampling.forbidden_ids:
                    want = (want + 1) % VOCAB
                assert token.token_id == want, "the cache gave this sequence somebody else's tokens"
            if update.finish_reason:
                self.finished.append(update)
        self.scheduler.check_integrity()

    def _check_hypothesis(self, update: SequenceUpdate) -> None:
        """The whole search again, on nothing but the prompt."""
        request = update.sequence.request
        p = request.params
        assert p.beam is not None
        search = BeamSearch(p.beam, frozenset({EOS}), p.max_tokens)
        while not search.done:
            forbidden = (EOS,) if len(search.outputs[0]) < p.min_tokens else ()
            how = SamplingRow(p, 0, 0, forbidden, candidates=search.num_candidates)
            contexts = [array("i", [*request.prompt_token_ids, *out]) for out in search.outputs]
            search.advance([candidates(context, how, VOCAB) for context in contexts])
        best = search.finished[update.sequence.choice]
        assert tuple(t.token_id for t in update.tokens) == best.tokens

    def _check_rows(self, plan: SchedulerOutput) -> None:
        written: set[int] = set()
        owners: dict[int, list[int]] = {}
        for seq in self.scheduler.running:
            for block in seq.table.blocks:
                owners.setdefault(block.id, []).append(seq.seq_id)
        size = self.manager.block_size
        for row in plan.rows:
            seq = self.scheduler.queues.all[row.seq_id]
            end = row.start + len(row.token_ids)
            assert row.token_ids == tuple(seq.tokens[row.start : end])
            assert len(row.block_table) == -(-end // size)
            assert (row.sampling is not None) == (end == len(seq.tokens))
            assert row.sampling is None or UNKNOWN not in row.sampling.output_ids
            for i, block in enumerate(seq.table.blocks[: len(seq.table.content_ids)]):
                told = block.content is None or block.content.tokens  # None: a twin of the findable one, or withdrawn
                assert told in (True, seq.tokens[i * size : (i + 1) * size].tobytes())
            for p in range(row.write_from, end):
                slot = row.block_table[p // size] * size + p % size
                assert slot not in written, "two rows write one slot"
                assert slot >= size, "the null block is never written"
                if (p // size + 1) * size > end:  # a block that this step completes may already have readers
                    assert owners[slot // size] == [row.seq_id], "a shared partial block is never written"
                written.add(slot)

    def run(self, max_steps: int = 10_000) -> int:
        for steps in range(max_steps):
            if not self.scheduler.has_work and not self.flying:
                return steps
            self.step()
        raise AssertionError("the scheduler did not finish: livelock or starvation")

    def idle_is_clean(self) -> None:
        pool = self.manager.pool
        assert pool.num_used == 0 and pool.num_free + pool.num_cached == pool.num_blocks
        host = self.manager.host
        assert host is None or host.pool.num_used == 0
        assert not self.flying and not self.scheduler.in_flight
        assert not self.scheduler.running and not self.scheduler.waiting and not self.scheduler.preempted


def walk(seed: int, operations: int, *, digest_bits: int | None = None) -> dict[str, int]:
    """A seeded random walk: adds (shared prefixes, salts, n > 1), steps, aborts, failing steps and failing rows."""
    rng = random.Random(f"walk {seed}")  # small integers alone give correlated first draws
    bench = Bench(
        num_blocks=rng.randint(5, 60),
        block_size=rng.choice([1, 2, 4, 8]),
        budget=rng.choice([1, 3, 7, 16, 64]),
        max_num_seqs=rng.choice([1, 3, 8, 32]),
        prefix_caching=rng.random() < 0.85,
        num_host_blocks=rng.choice([0, 1, 5, 20, 80, 200]),
        policy=rng.choice(["fcfs", "fcfs", "priority", "shortest", "fair"]),
        prefill_share=rng.choice([1.0, 1.0, 0.5, 0.1]),
        depth=rng.choice([1, 2]),
        swap=SwapCosts(rng.choice(["auto", "swap", "recompute"]), block_seconds=1.0, token_seconds=0.3),
    )
    if digest_bits is not None:
        index, full = bench.manager.pool.index, bench.manager.pool.index.digest
        index.digest = lambda p, t: bytes([full(p, t)[0] & ((1 << digest_bits) - 1)])  # type: ignore[method-assign]
    heads = [[rng.randrange(VOCAB) for _ in range(rng.randint(1, bench.limit // 2))] for _ in range(3)]
    live: list[Request] = []
    taken_back = 0
    bench.eager = rng.random() < 0.3
    for _ in range(operations):
        live = [r for r in live if not r.finished]
        p = rng.random()
        if p < 0.25 and len(live) < 24:
            if rng.random() < 0.7:
                bench.submit()
            head = rng.choice(heads)
            tail = [rng.randrange(VOCAB) for _ in range(rng.randint(0, 6))]
            prompt = (head[: rng.randint(1, len(head))] + tail)[: bench.limit - 1]
            room = bench.limit - len(prompt)
            n = rng.choice([1, 1, 1, 2, 4])
            beam = BeamParams(max(2, n), rng.choice([0.0, 1.0, 2.0]), rng.choice([True, False, "never"]))
            live.append(
                bench.add(
                    prompt,
                    max_tokens=rng.randint(1, min(room, 12)),
                    n=n,
                    beam=beam if rng.random() < 0.2 else None,
                    salt=rng.choice(["", "", "a"]),
                    tenant=rng.choice(["", "b"]),
                    priority=rng.choice([0, 0, -3, 5]),
                    temperature=rng.choice([0.0, 1.0]),
                    seed=rng.randrange(5),
                    min_tokens=rng.choice([0, 0, 2]),
                    presence_penalty=rng.choice([0.0, 0.0, 1.0]),  # changes nothing here but who may run ahead
                )
            )
            taken_back += bench.take_back()
        elif p < 0.30 and live:
            bench.abort(rng.choice(live))
        elif p < 0.32:
            bench.fail_step()
        elif p < 0.34:
            bench.fail_row(lambda plan: rng.choice(plan.rows).seq_id)
        elif p < 0.36:
            bench.submit()
        else:
            bench.step()
    bench.run()
    bench.idle_is_clean()
    stats = bench.scheduler.stats
    return {
        "preemptions": stats.preemptions,
        "hits": stats.hit_tokens,
        "finished": len(bench.finished),
        "copies": bench.manager.cow_copies,
        "swaps": stats.swaps,
        "taken_back": taken_back,
        "swapped_in": bench.manager.host.blocks_in if bench.manager.host else 0,
    }


__all__ = ["EOS", "VOCAB", "Bench", "SampledToken", "walk"]
