"""Random walks over scheduler and block manager; all invariants after each operation, each token against the truth."""

from __future__ import annotations

import os
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from sched_harness import VOCAB, Bench, walk

from chatsvc.scheduler.beam import BeamParams
from chatsvc.scheduler.request import Request
from chatsvc.scheduler.scheduler import SwapCosts

# 700 walks of 300 operations; for hours of it: CHATSVC_WALKS=50000 CHATSVC_EXAMPLES=50000 pytest tests/scheduler
SEEDS = range(int(os.environ.get("CHATSVC_WALKS", "700")))
pytestmark = pytest.mark.slow


@pytest.mark.parametrize("block", range(4))
def test_seeded_walks(block: int) -> None:
    totals: dict[str, int] = {}
    for seed in SEEDS:
        if seed % 4 == block:
            for k, v in walk(seed, 300).items():
                totals[k] = totals.get(k, 0) + v
    # The walks must have been where it hurts.
    assert totals["preemptions"] > 50 and totals["hits"] > 500 and totals["finished"] > 200, totals
    assert totals["copies"] > 30 and totals["swaps"] > 20 and totals["swapped_in"] > 50, totals
    assert totals["taken_back"] > 50, totals


class SchedulerMachine(RuleBasedStateMachine):
    """The same operations, chosen and shrunk by hypothesis."""

    @initialize(
        blocks=st.integers(5, 200),
        size=st.sampled_from([1, 2, 4, 8]),
        budget=st.sampled_from([1, 3, 7, 16, 64]),
        slots=st.sampled_from([1, 3, 8, 32]),
        caching=st.booleans(),
        host=st.sampled_from([0, 1, 5, 40]),
        mode=st.sampled_from(["auto", "swap", "recompute"]),
        policy=st.sampled_from(["fcfs", "priority", "shortest", "fair"]),
        depth=st.sampled_from([1, 2]),
        eager=st.booleans(),
    )
    def begin(
        self,
        blocks: int,
        size: int,
        budget: int,
        slots: int,
        caching: bool,
        host: int,
        mode: Any,
        policy: Any,
        depth: int,
        eager: bool,
    ) -> None:
        self.bench = Bench(
            num_blocks=blocks,
            block_size=size,
            budget=budget,
            max_num_seqs=slots,
            prefix_caching=caching,
            num_host_blocks=host,
            swap=SwapCosts(mode, block_seconds=1.0, token_seconds=0.3),
            policy=policy,
            depth=depth,
        )
        self.bench.eager = eager
        self.live: list[Request] = []

    @rule(
        head=st.integers(0, 2),
        length=st.integers(1, 40),
        tail=st.integers(0, 3),
        tokens=st.integers(1, 10),
        n=st.sampled_from([1, 1, 2, 4]),
        beam=st.booleans(),
        salt=st.sampled_from(["", "a"]),
        priority=st.integers(-3, 3),
    )
    def add(self, head: int, length: int, tail: int, tokens: int, n: int, beam: bool, salt: str, priority: int) -> None:
        prompt = [(head * 100 + i) % VOCAB for i in range(length)] + [tail] * tail
        prompt = prompt[: self.bench.limit - 1]
        room = self.bench.limit - len(prompt)
        search = BeamParams(max(2, n)) if beam else None
        request = self.bench.add(
            prompt, max_tokens=min(tokens, room), n=n, salt=salt, tenant=salt, priority=priority, beam=search
        )
        self.live.append(request)

    @precondition(lambda self: self.live)
    @rule(which=st.integers(0, 100))
    def abort(self, which: int) -> None:
        self.bench.abort(self.live.pop(which % len(self.live)))

    @rule(steps=st.integers(1, 4))
    def step(self, steps: int) -> None:
        for _ in range(steps):
            self.bench.step()

    @rule()
    def submit_only(self) -> None:
        self.bench.submit()

    @rule()
    def take_back(self) -> None:
        self.bench.take_back()

    @rule()
    def a_step_fails(self) -> None:
        self.bench.fail_step()

    @rule(which=st.integers(0, 100))
    def a_row_fails(self, which: int) -> None:
        self.bench.fail_row(lambda plan: plan.rows[which % len(plan.rows)].seq_id)

    @invariant()
    def whole(self) -> None:
        if hasattr(self, "bench"):
            self.bench.scheduler.check_integrity()

    def teardown(self) -> None:
        if hasattr(self, "bench"):
            self.bench.run()
            self.bench.idle_is_clean()


SchedulerMachine.TestCase.settings = settings(
    max_examples=int(os.environ.get("CHATSVC_EXAMPLES", "420")),
    stateful_step_count=50,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)
TestStateMachine = SchedulerMachine.TestCase


@pytest.mark.parametrize("bits", [0, 1, 4])
def test_pc02_digest_collisions_are_misses_never_wrong_answers(bits: int) -> None:
    for seed in range(12):
        walk(1000 + seed, 200, digest_bits=bits)
