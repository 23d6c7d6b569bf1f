"""Random walks over scheduler and block manager; all invariants after each operation, each token against the truth."""

from __future__ import annotations

import os

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from sched_harness import walk

SEEDS = range(int(os.environ.get("CHATSVC_WALKS", "60")))


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


@given(seed=st.integers(0, 2**32), operations=st.integers(1, 150))
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_hypothesis_walks(seed: int, operations: int) -> None:
    walk(seed, operations)


@pytest.mark.parametrize("bits", [0, 1, 4])
def test_pc02_digest_collisions_are_misses_never_wrong_answers(bits: int) -> None:
    for seed in range(12):
        walk(1000 + seed, 200, digest_bits=bits)
