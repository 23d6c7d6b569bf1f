"""Memory and throughput: what ``docs/paging.md`` asks, answered by the engine's own scheduler and block manager."""

from __future__ import annotations

from dataclasses import dataclass

from chatsvc.sim import modes, scenarios
from chatsvc.sim.contiguous import Reservation, reserve_2048, reserve_max, reserve_oracle, reserve_pow2
from chatsvc.sim.cost import Scenario, read_efficiency
from chatsvc.sim.crossover import table as crossover_table
from chatsvc.sim.driver import Run
from chatsvc.sim.eviction import ORDERS, use_order
from chatsvc.sim.fit import fit
from chatsvc.sim.modes import Mode, make_driver
from chatsvc.sim.section import Section, Value
from chatsvc.sim.service import service
from chatsvc.sim.traces import MEANS, multi_turn, single_turns, under_way

RATE_CROWD = 1000.0  # requests per second: more than any of the modes can serve
BLOCK_SIZES = (4, 8, 16, 32, 64, 128)


@dataclass(frozen=True, slots=True)
class Study:
    """Attributes:
    scale: multiplies how much is simulated; more only makes the numbers steadier.
    """

    seed: int = 0
    scale: float = 1.0

    def tokens(self, n: float) -> int:
        return round(n * self.scale)

    # -- arithmetic --------------------------------------------------------------------------------------------

    def kv(self) -> Section:
        columns = (
            ("scenario", "scenario", ""),
            ("gpus", "GPUs", ""),
            ("per_token", "KV bytes/token", ",d"),
            ("weights", "weights GB", ".1f"),
            ("kv", "KV memory GB", ".1f"),
            ("tokens", "KV tokens", ",d"),
            ("blocks", f"blocks of {scenarios.BLOCK_SIZE}", ",d"),
        )
        section = Section("kv", "KV memory", columns)
        for s in scenarios.SCENARIOS.values():
            blocks = s.num_blocks(scenarios.BLOCK_SIZE)
            section.rows.append(
                {
                    "scenario": s.name,
                    "gpus": f"{s.tp} x {s.gpu.name}",
                    "per_token": s.model.kv_bytes_per_token,
                    "weights": s.model.weight_bytes / 1e9,
                    "kv": s.kv_bytes / 1e9,
                    "tokens": blocks * scenarios.BLOCK_SIZE,
                    "blocks": blocks,
                }
            )
        return section

    def swap(self) -> Section:
        columns = (
            ("scenario", "scenario", ""),
            ("tokens", "tokens", ",d"),
            ("swap", "swap ms", ".1f"),
            ("swap_by_layer", "layer by layer ms", ".1f"),
            ("alone", "recompute alone ms", ".1f"),
            ("beside", "recompute beside others ms", ".1f"),
            ("cheaper", "cheaper", ""),
        )
        section = Section("swap", "Swap against recompute, one sequence (no run: bytes and FLOPs)", columns)
        for s in scenarios.SCENARIOS.values():
            for c in crossover_table(s):
                section.rows.append(
                    {
                        "scenario": s.name,
                        "tokens": c.tokens,
                        "swap": c.swap * 1e3,
                        "swap_by_layer": c.swap_by_layer * 1e3,
                        "alone": c.alone * 1e3,
                        "beside": c.beside * 1e3,
                        "cheaper": c.cheaper,
                    }
                )
        return section

    def fits(self) -> Section:
        ways: tuple[tuple[str, Reservation | None], ...] = (
            ("reserve_max", reserve_max),
            ("reserve_2048", reserve_2048),
            ("pow2", reserve_pow2),
            ("oracle", reserve_oracle),
            ("paged", None),
        )
        columns = (
            ("scenario", "scenario", ""),
            ("trace", "trace", ""),
            ("reserve_max", "reserve context", "d"),
            ("reserve_2048", "reserve 2,048", "d"),
            ("pow2", "pow2", "d"),
            ("oracle", "oracle", "d"),
            ("paged", "paged", "d"),
        )
        section = Section("fit", "Concurrent requests that fit (by memory alone)", columns)
        for name in MEANS:
            trace = single_turns(name, 4000, RATE_CROWD, self.seed)
            for s in scenarios.SCENARIOS.values():
                row: dict[str, Value] = {"scenario": s.name, "trace": name}
                row |= {key: fit(s, trace, way, self.seed) for key, way in ways}
                section.rows.append(row)
        return section

    # -- memory and throughput ---------------------------------------------------------------------------------

    def saturated(self, scenario: Scenario, name: str, which: tuple[Mode, ...]) -> Section:
        """All modes under a crowd: how much of the memory is tokens, and how fast answers are made."""
        columns = (
            ("mode", "mode", ""),
            ("tokens", "tokens", ".1%"),
            ("future", "reserved", ".1%"),
            ("internal", "internal", ".1%"),
            ("external", "external", ".1%"),
            ("free", "free", ".1%"),
            ("waste", "waste of held", ".1%"),
            ("running", "running", ".0f"),
            ("throughput", "tokens/s", ",.0f"),
            ("speedup", "x static", ".2f"),
        )
        title = (
            f"{scenario.model.name} on {scenario.tp} x {scenario.gpu.name}, {name}, more requests than can be served"
        )
        section = Section(f"saturated/{scenario.name}/{name}", title, columns)
        for mode in which:
            run = self.crowded_run(scenario, mode, name)
            m = run.memory.crowded if run.memory.crowded_seconds else run.memory.total
            section.rows.append(
                {
                    "mode": mode.name,
                    "tokens": m.tokens / m.pool,
                    "future": m.future / m.pool,
                    "internal": m.internal / m.pool,
                    "external": m.external / m.pool,
                    "free": m.free / m.pool,
                    "waste": m.waste,
                    "long_waste": run.memory.long_waste,
                    "running": run.memory.mean_running,
                    "memory_bound": run.memory.crowded_seconds > 0.5 * run.memory.seconds,
                    "preemptions": run.preemptions,
                    "throughput": run.throughput,
                }
            )
        first = section.rows[0]["throughput"]
        for row in section.rows:
            row["speedup"] = float(row["throughput"] or 0) / float(first or 1)
        section.notes.append(
            "shares of the whole pool, by time, while memory was what was short; x static is against the first row"
        )
        return section

    def crowded_run(
        self, scenario: Scenario, mode: Mode, name: str, block_size: int | None = None, share: float = 1.0
    ) -> Run:
        """Arrivals faster than anything can serve them, so that the queue is never empty.

        A continuous batch is found in its steady state, a static one begins empty, as each of its batches does. What is
        measured: about half a life of each of the ``many`` that run together, or at least some 20,000 tokens.
        """
        trace = single_turns(name, 4000, RATE_CROWD, self.seed)
        fits = fit(scenario, trace, mode.reservation, self.seed, block_size or scenarios.BLOCK_SIZE)
        many = min(fits, scenarios.MAX_NUM_SEQS)
        floor = 40_000 if mode.batching == "continuous" else 60_000
        measured = self.tokens(share * min(max(20_000, 2_000 * many), max(floor, 0.5 * many * MEANS[name][1])))
        # Until the steady state's contexts are computed, and then some.
        warm_up = measured // 4 + round(many * many * sum(MEANS[name]) / (2 * scenarios.TOKENS_PER_STEP))
        if mode.batching == "continuous":
            trace = under_way(trace, many, self.seed)
        driver = make_driver(scenario, mode, block_size=block_size)
        return driver.run(trace, warm_up=warm_up, enough=warm_up + measured)

    def preemption(self, scenario: Scenario) -> Section:
        """A fifth of the memory, overrun: pushed-out sequences recomputed, swapped, or whichever is cheaper."""
        columns = (
            ("preemption", "preemption", ""),
            ("recomputed", "recomputed", "d"),
            ("swapped", "swapped", "d"),
            ("tokens", "tokens computed", ",d"),
            ("throughput", "tokens/s", ",.0f"),
            ("ttft_p95", "TTFT s p95", ".2f"),
            ("per_token", "s/token mean", ".3f"),
        )
        title = f"Preemption, {scenario.model.name}, ShareGPT, a fifth of the KV memory"
        section = Section(f"preemption/{scenario.name}", title, columns)
        trace = single_turns("sharegpt", self.tokens(150), RATE_CROWD, self.seed)
        blocks = scenario.num_blocks(scenarios.BLOCK_SIZE) // 5
        for how in ("recompute", "swap", "auto"):
            run = make_driver(scenario, modes.PAGED, num_blocks=blocks, preemption=how).run(trace)
            section.rows.append(
                {
                    "preemption": how,
                    **service(run.outcomes),
                    "recomputed": run.preemptions,
                    "swapped": run.swaps,
                    "tokens": run.computed_tokens,
                    "throughput": run.throughput,
                }
            )
        return section

    def block_sizes(self, scenario: Scenario) -> Section:
        columns = (
            ("block_size", "block size", "d"),
            ("sharegpt_waste", "waste, ShareGPT", ".2%"),
            ("long_waste", "of these >= 500 tokens", ".2%"),
            ("alpaca_waste", "waste, Alpaca", ".2%"),
            ("table_entries", "table entries", "d"),
            ("efficiency", "read efficiency", ".1%"),
            ("efficiency_70b", "of a 70B rank", ".1%"),
            ("throughput", "tokens/s, ShareGPT", ",.0f"),
            ("throughput_alpaca", "tokens/s, Alpaca", ",.0f"),
        )
        section = Section("block_sizes", f"Block sizes, {scenario.model.name}, continuous, paged", columns)
        for size in BLOCK_SIZES:
            chat = self.crowded_run(scenario, modes.PAGED, "sharegpt", size, 0.8)
            short = self.crowded_run(scenario, modes.PAGED, "alpaca", size, 0.15)
            section.rows.append(
                {
                    "block_size": size,
                    "sharegpt_waste": chat.memory.total.waste,
                    "long_waste": chat.memory.long_waste,
                    "alpaca_waste": short.memory.total.waste,
                    "table_entries": -(-scenario.model.context // size),
                    "efficiency": read_efficiency(scenario, size),
                    "efficiency_70b": read_efficiency(scenarios.SCENARIOS["llama-3-70b"], size),
                    "throughput": chat.throughput,
                    "throughput_alpaca": short.throughput,
                }
            )
        section.notes.append("table entries: block ids (4 bytes each) of one sequence of the model's full context")
        section.notes.append("read efficiency is an assumption (1 KiB lost for each run of bytes), not a measurement")
        return section

    def eviction(self, scenario: Scenario) -> Section:
        """Orders of eviction on chats of several turns, in a pool too small for all of them."""
        columns = (
            ("pool", "pool of the GPU's", ".0%"),
            ("order", "order", ""),
            ("hit", "prompt tokens hit", ".1%"),
            ("computed", "computed tokens", ",d"),
            ("evictions", "evictions", ",d"),
            ("ttft_p50", "TTFT s p50", ".3f"),
            ("ttft_p95", "p95", ".3f"),
        )
        section = Section(
            f"eviction/{scenario.name}", f"Orders of eviction, {scenario.model.name}, multi-turn", columns
        )
        trace = multi_turn(self.tokens(45), 1.0, self.seed)
        for share in (0.2, 0.4):
            blocks = int(scenario.num_blocks(scenarios.BLOCK_SIZE) * share)
            for order in ORDERS:
                driver = make_driver(scenario, modes.SHARED, num_blocks=blocks)
                use_order(driver.scheduler.manager.pool, order)
                run = driver.run(trace)
                section.rows.append(
                    {
                        "pool": share,
                        "order": order,
                        "hit": run.hit_tokens / run.query_tokens,
                        "computed": run.computed_tokens,
                        "evictions": run.evictions,
                        **{k: v for k, v in service(run.outcomes).items() if k.startswith("ttft")},
                    }
                )
        return section
