"""Whole runs: nothing is lost, nothing is random, and the ways to keep memory differ as they must."""

from __future__ import annotations

from dataclasses import replace

import pytest

from chatsvc.cache.manager import BlockManager
from chatsvc.errors import ConfigError
from chatsvc.scheduler.scheduler import Scheduler
from chatsvc.sim import modes
from chatsvc.sim.batching import DYNAMIC_TIMEOUT
from chatsvc.sim.contiguous import reserve_max, reserve_oracle, reserve_pow2
from chatsvc.sim.driver import Run
from chatsvc.sim.eviction import ORDERS, use_order
from chatsvc.sim.fit import fit
from chatsvc.sim.modes import MODES, Mode, make_driver
from chatsvc.sim.scenarios import SCENARIOS
from chatsvc.sim.service import ServiceStudy
from chatsvc.sim.traces import Entry, multi_turn, single_turns

SEVEN = SCENARIOS["llama-2-7b"]
# A context that lets several whole reservations fit into a pool small enough to be crowded.
SMALL = replace(SEVEN, model=replace(SEVEN.model, context=2048))
ALL = (*MODES, modes.DYNAMIC, modes.SHARED)


def run(mode: Mode, trace: list[Entry], *, blocks: int = 600, scenario=SMALL) -> Run:
    return make_driver(scenario, mode, block_size=16, num_blocks=blocks).run(trace)


@pytest.mark.parametrize("mode", ALL, ids=lambda m: m.name)
def test_everything_is_produced_and_the_pool_is_whole(mode: Mode) -> None:
    trace = single_turns("alpaca", 60, 40.0, 0)
    driver = make_driver(SMALL, mode, block_size=16, num_blocks=300, check=True)
    made = driver.run(trace)
    assert made.output_tokens == sum(e.output_len for e in trace)
    assert len(made.outcomes) == len(trace)
    for outcome in made.outcomes:
        assert outcome.arrival <= outcome.started < outcome.first <= outcome.finished <= made.seconds
    scheduler = driver.scheduler
    pool = scheduler.manager.pool
    assert not scheduler.has_work and pool.num_used == 0 and pool.num_free + pool.num_cached == pool.num_blocks
    split = made.memory.total
    parts = (split.tokens, split.future, split.internal, split.external, split.free)
    assert min(parts) >= 0
    assert sum(parts) == pytest.approx(pool.num_blocks * 16 * made.memory.seconds)


def test_the_engine_is_not_modified() -> None:
    driver = make_driver(SMALL, modes.SHARED)
    assert type(driver.scheduler) is Scheduler and type(driver.scheduler.manager) is BlockManager


@pytest.mark.parametrize("mode", [modes.STATIC, modes.POW2, modes.SHARED], ids=lambda m: m.name)
def test_the_same_seed_gives_the_same_run(mode: Mode) -> None:
    a, b = (run(mode, multi_turn(8, 1.0, 5), scenario=SEVEN) for _ in range(2))
    assert a.outcomes == b.outcomes and a.samples == b.samples and a.seconds == b.seconds


def test_sections_are_the_same_for_the_same_seed() -> None:
    a, b = (ServiceStudy(seed=2, scale=0.1).tenants(SEVEN) for _ in range(2))
    assert a.rows == b.rows and a.rows
    assert ServiceStudy(seed=3, scale=0.1).tenants(SEVEN).rows != a.rows


def test_waste() -> None:
    trace = single_turns("sharegpt", 70, 50.0, 0)
    runs = {m.name: run(m, trace) for m in (modes.MAX, modes.POW2, modes.ORACLE, modes.PAGED)}
    waste = {name: r.memory.crowded.waste for name, r in runs.items()}
    assert waste[modes.PAGED.name] < 0.04
    assert runs[modes.PAGED.name].memory.long_waste < 0.04
    assert waste[modes.MAX.name] > waste[modes.POW2.name] > waste[modes.ORACLE.name] > 0.3
    assert runs[modes.ORACLE.name].memory.crowded.internal == 0  # it knows the length
    assert runs[modes.PAGED.name].memory.mean_running > 1.5 * runs[modes.ORACLE.name].memory.mean_running


def test_one_request_by_hand() -> None:
    """Reserve max: 64 blocks for a prompt of 10 and 3 answer tokens, one of which is never written."""
    small = replace(SMALL, model=replace(SMALL.model, context=1024))
    driver = make_driver(small, modes.MAX, block_size=16, num_blocks=100)
    made = driver.run([Entry(0, 1.0, "", (("p", 10),), "a", 3)])
    steps = [(s.split.tokens, s.split.future, s.split.internal, s.split.external, s.split.free) for s in made.samples]
    assert steps == [(10, 3, 1011, 0, 576), (11, 2, 1011, 0, 576), (12, 1, 1011, 0, 576)]
    assert made.outcomes[0].started == 1.0 and made.steps == 3


def test_static_waits_for_a_full_batch_and_dynamic_for_its_timeout() -> None:
    trace = [Entry(i, float(i), "", ((f"p{i}", 20),), f"a{i}", 5) for i in range(6)]  # three fit: 400 / 128
    static = run(modes.STATIC, trace, blocks=400)
    assert [o.started for o in static.outcomes] == [2.0, 2.0, 2.0, 5.0, 5.0, 5.0]
    dynamic = run(modes.DYNAMIC, trace, blocks=400)
    # Nobody else comes after the last one, so that it need not wait.
    assert [o.started for o in dynamic.outcomes] == pytest.approx([i + DYNAMIC_TIMEOUT for i in range(5)] + [5.0])
    assert all(o.queued == 0 for o in run(modes.MAX, trace, blocks=400).outcomes)


def test_a_turn_waits_for_the_one_before_it_and_finds_its_blocks() -> None:
    trace = multi_turn(10, 1.0, 0)
    made = run(modes.SHARED, trace, blocks=6000, scenario=SEVEN)
    assert len(made.outcomes) == len(trace)
    late = [e for e in trace if e.after is not None]
    by_length = {(o.prompt_len, o.output_len): o for o in made.outcomes}
    for e in late:
        before, this = trace[e.after], by_length[(e.prompt_len, e.output_len)]
        history = before.prompt_len + before.output_len - 1  # the last token's K/V was never computed
        assert this.arrival >= by_length[(before.prompt_len, before.output_len)].finished + e.think - 1e-9
        assert history // 16 * 16 <= this.cached <= (history + 1) // 16 * 16
    assert run(modes.PAGED, trace, blocks=6000, scenario=SEVEN).hit_tokens == 0


@pytest.mark.parametrize("how", ["recompute", "swap", "auto"])
def test_preempted_sequences_finish(how) -> None:
    trace = single_turns("sharegpt", 40, 1000.0, 0)
    driver = make_driver(SMALL, modes.PAGED, block_size=16, num_blocks=200, preemption=how, check=True)
    made = driver.run(trace)
    assert made.output_tokens == sum(e.output_len for e in trace)
    assert (made.preemptions > 0) == (how == "recompute")
    assert (made.swaps > 0) == (how != "recompute")  # at these bandwidths a swap is the cheaper one
    assert driver.scheduler.manager.pool.num_used == 0


@pytest.mark.parametrize("order", ORDERS)
def test_orders_of_eviction_keep_the_pool_whole(order) -> None:
    trace = multi_turn(12, 2.0, 0)
    driver = make_driver(SEVEN, modes.SHARED, num_blocks=400, check=True)
    use_order(driver.scheduler.manager.pool, order)
    made = driver.run(trace)
    assert made.output_tokens == sum(e.output_len for e in trace)
    assert made.evictions > 0 and made.hit_tokens > 0
    assert driver.scheduler.manager.pool.num_used == 0


def test_policies_change_who_waits_and_lose_nobody() -> None:
    section = ServiceStudy(scale=0.4).policies(SEVEN)
    rows = {(r["policy"], r["tenant"]): r for r in section.rows}
    requests = {t: rows["fcfs", t]["requests"] for t in ("acme", "birch", "cedar", "delta", "all")}
    assert requests["all"] == 48 == sum(n for t, n in requests.items() if t != "all")
    assert all(rows[p, t]["requests"] == n for p in ("fair", "shortest") for t, n in requests.items())
    assert rows["fair", "delta"]["ttft_p95"] < rows["fcfs", "delta"]["ttft_p95"]  # the flood is acme's
    assert rows["shortest", "all"]["per_token"] < rows["fcfs", "all"]["per_token"]


def test_less_prefill_in_a_step_steadies_the_streams() -> None:
    rows = ServiceStudy(scale=0.3).prefill_share(SEVEN).rows
    gaps = [r["gap_p50"] for r in rows]
    assert gaps == sorted(gaps, reverse=True) and gaps[-1] < gaps[0] / 2
    assert rows[-1]["tpot_p95"] < rows[0]["tpot_p95"]


def test_a_request_longer_than_the_model_is_refused() -> None:
    trace = [Entry(0, 0.0, "", (("p", 2000),), "a", 48), Entry(1, 0.0, "", (("p", 2000),), "a", 49)]
    assert run(modes.PAGED, trace[:1]).output_tokens == 48
    with pytest.raises(ConfigError, match="request 1 of the trace has 2049 tokens, more than 2048"):
        run(modes.PAGED, trace)


def test_fit() -> None:
    trace = single_turns("sharegpt", 500, 1.0, 0)
    fits = [fit(SEVEN, trace, way, 0) for way in (reserve_max, reserve_pow2, reserve_oracle, None)]
    assert fits[0] == SEVEN.num_blocks(16) // 256  # whole contexts of 4,096
    assert fits == sorted(fits) and fits[-1] > 2 * fits[-2]
