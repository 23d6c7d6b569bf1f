"""Bytes, FLOPs and seconds of the roofline, against numbers worked out by hand."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from chatsvc.scheduler.params import SamplingParams
from chatsvc.scheduler.plan import SamplingRow, ScheduledRow, SchedulerOutput
from chatsvc.sim import crossover, hardware
from chatsvc.sim.cost import CostModel, Scenario, Work, copy_seconds, read_efficiency, work_of
from chatsvc.sim.hardware import A100_80GB, H100_80GB
from chatsvc.sim.models import LLAMA_2_7B, LLAMA_3_8B, LLAMA_3_70B, OPT_13B
from chatsvc.sim.scenarios import SCENARIOS


def test_kv_bytes_per_token() -> None:
    assert LLAMA_3_70B.kv_bytes_per_token == 320 * 1024
    assert LLAMA_2_7B.kv_bytes_per_token == 512 * 1024
    assert LLAMA_3_8B.kv_bytes_per_token == 128 * 1024
    assert OPT_13B.kv_bytes_per_token == 800 * 1024  # the PagedAttention paper, section 3: 800 KB


@pytest.mark.parametrize(
    ("model", "billions"), [(LLAMA_2_7B, 6.74), (LLAMA_3_8B, 8.03), (LLAMA_3_70B, 70.6), (OPT_13B, 12.85)]
)
def test_parameters_are_the_published_ones(model, billions) -> None:
    # OPT shares embedding and output projection; the shape counts both.
    assert model.weight_bytes / model.bytes_per_element / 1e9 == pytest.approx(billions, rel=0.03)


def test_pool_of_a_scenario() -> None:
    s = Scenario("x", LLAMA_2_7B, A100_80GB)
    assert s.kv_bytes == 72_000_000_000 - LLAMA_2_7B.weight_bytes
    assert s.num_blocks(16) * 16 * 512 * 1024 <= s.kv_bytes < (s.num_blocks(16) + 1) * 16 * 512 * 1024
    with pytest.raises(ValueError, match="do not fit"):
        _ = Scenario("y", LLAMA_3_70B, A100_80GB).kv_bytes


def test_step_time_by_hand() -> None:
    cost = CostModel(Scenario("x", LLAMA_2_7B, A100_80GB), None)
    # One token at a context of 1,000: bytes rule. Weights without the embedding, K/V read and written.
    moved = LLAMA_2_7B.read_bytes + 1001 * 512 * 1024
    want = moved / (2.039e12 * 0.8) + 1e-3
    assert cost.seconds(Work(1, 1, 1000, 1000)) == pytest.approx(want)
    # 2,048 tokens of a prompt: FLOPs rule.
    pairs = 2048 * 2049 // 2
    flops = 2 * LLAMA_2_7B.layer_params * 2048 + 4 * 128 * 32 * 32 * pairs
    assert cost.seconds(Work(2048, 0, 2048, pairs)) == pytest.approx(flops / (312e12 * 0.5) + 1e-3)
    assert cost.seconds(Work(0, 0, 0, 0)) == 0.0


def test_tensor_parallel_step() -> None:
    alone, four = (CostModel(Scenario("x", LLAMA_3_8B, H100_80GB, tp=n), None) for n in (1, 4))
    big = Work(2048, 0, 2048, 2048 * 2049 // 2)
    assert alone.seconds(big) / 4 < four.seconds(big) < alone.seconds(big)
    # The smallest step is no faster than its all-reduces.
    assert four.seconds(Work(1, 1, 1, 1)) > 2 * 32 * hardware.ALL_REDUCE_LATENCY


works = st.builds(Work, *(st.integers(1, 10**6) for _ in range(4)), st.integers(0, 1000))


@given(works, works, st.sampled_from(sorted(SCENARIOS)), st.sampled_from([None, 4, 16, 128]))
def test_more_work_never_takes_less_time(a: Work, more: Work, name: str, block_size: int | None) -> None:
    cost = CostModel(SCENARIOS[name], block_size)
    fields = ("tokens", "sampled", "read", "pairs", "moved")
    both = Work(*(getattr(a, f) + getattr(more, f) for f in fields))
    assert 0 < cost.seconds(a) <= cost.seconds(both)
    assert cost.compute_seconds(a) < cost.seconds(a)


def test_smaller_blocks_read_slower() -> None:
    for scenario in SCENARIOS.values():
        efficiencies = [read_efficiency(scenario, n) for n in (4, 8, 16, 32, 64, 128)]
        assert efficiencies == sorted(efficiencies) and 0.5 < efficiencies[0] < efficiencies[-1] < 1


def test_work_of_a_plan() -> None:
    sampling = SamplingRow(SamplingParams(max_tokens=1), 0, 0)
    rows = (
        ScheduledRow(0, (5,), 9, (1, 2), 9, sampling),  # one token at position 9: reads 10, 10 pairs
        ScheduledRow(1, (1, 2, 3), 4, (3, 4), 4, None),  # positions 4, 5, 6: reads 7, 5 + 6 + 7 pairs
    )
    plan = SchedulerOutput(1, rows, swap_out=((1, 2),), swap_in=((3, 4), (5, 6)))
    assert work_of(plan) == Work(tokens=4, sampled=1, read=17, pairs=28, moved=3)


def test_swap_costs_both_ways_and_every_copy() -> None:
    s = SCENARIOS["llama-3-70b"]
    one_way = 1024 * 320 * 1024 / 4 / (64e9 * 0.8)
    assert crossover.swap_seconds(s, 1024) == pytest.approx(2 * (one_way + 64 * 10e-6))
    assert crossover.swap_seconds(s, 1024, 160) == pytest.approx(2 * (one_way + 160 * 64 * 10e-6))
    assert CostModel(s, 16).block_seconds == pytest.approx(copy_seconds(s, 16))


def test_crossover_rows_grow_and_name_the_cheaper() -> None:
    for s in SCENARIOS.values():
        rows = crossover.table(s)
        assert rows[-1].tokens <= s.model.context
        for a, b in itertools.pairwise(rows):
            assert a.swap < b.swap and a.alone < b.alone and a.beside < b.beside
        assert all((r.cheaper == "swap") == (r.swap < min(r.alone, r.beside)) for r in rows)
