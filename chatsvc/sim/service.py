"""What users see: waiting, by way of batching, tenant and policy."""

from __future__ import annotations

from dataclasses import dataclass

from chatsvc.scheduler.settings import PolicyName
from chatsvc.sim import modes, scenarios
from chatsvc.sim.cost import Scenario
from chatsvc.sim.driver import Outcome
from chatsvc.sim.modes import Mode, make_driver
from chatsvc.sim.section import Section, Value, percentile
from chatsvc.sim.traces import TENANTS, Entry, mean_lengths, single_turns

# Requests per second.
RATE_RUSH = 1000.0
RATE_ONLINE = 8.0
RATE_QUIET = 1.0
POLICIES: tuple[PolicyName, ...] = ("fcfs", "fair", "shortest")
PREFILL_SHARES = (1.0, 0.5, 0.25, 0.12)


def service(outcomes: list[Outcome]) -> dict[str, Value]:
    """What users saw: counts, shares, seconds."""
    return {
        "requests": len(outcomes),
        "output": sum(o.output_len for o in outcomes),
        "cached": sum(o.cached for o in outcomes) / sum(o.prompt_len for o in outcomes),
        "queued": percentile((o.queued for o in outcomes), 0.5),
        "queued_p95": percentile((o.queued for o in outcomes), 0.95),
        "ttft_p50": percentile((o.ttft for o in outcomes), 0.5),
        "ttft_p95": percentile((o.ttft for o in outcomes), 0.95),
        "per_token": sum(o.per_token for o in outcomes) / len(outcomes),
        "preemptions": sum(o.preemptions for o in outcomes),
    }


@dataclass(frozen=True, slots=True)
class ServiceStudy:
    """Attributes:
    scale: multiplies how many requests are simulated.
    """

    seed: int = 0
    scale: float = 1.0

    def count(self, n: int) -> int:
        return max(1, round(n * self.scale))

    def latency(self, scenario: Scenario) -> Section:
        """A quiet hour: what waiting for a batch costs when there is no crowd."""
        columns = (
            ("mode", "mode", ""),
            ("queued", "queued s p50", ".2f"),
            ("ttft_p50", "TTFT s p50", ".2f"),
            ("ttft_p95", "p95", ".2f"),
            ("per_token", "s/token mean", ".3f"),
        )
        title = f"{scenario.model.name}, ShareGPT, {RATE_QUIET:g} request(s) per second"
        section = Section(f"latency/{scenario.name}", title, columns)
        trace = single_turns("sharegpt", self.count(120), RATE_QUIET, self.seed)
        for mode in (modes.STATIC, modes.DYNAMIC, modes.MAX, modes.PAGED):
            run = make_driver(scenario, mode).run(trace)
            section.rows.append({"mode": mode.name, **service(run.outcomes)})
        section.notes.append("s/token: from a request's arrival to its end, over the tokens of its answer")
        return section

    def tenants(self, scenario: Scenario) -> Section:
        """A busy hour, several tenants with a system prompt each; without and with sharing of prefixes."""
        columns = (
            ("mode", "mode", ""),
            ("tenant", "tenant", ""),
            ("requests", "requests", "d"),
            ("output", "tokens", ",d"),
            ("cached", "prompt cached", ".1%"),
            ("queued", "queued s p50", ".2f"),
            ("ttft_p50", "TTFT s p50", ".2f"),
            ("ttft_p95", "p95", ".2f"),
            ("per_token", "s/token mean", ".3f"),
        )
        title = f"{scenario.model.name}, ShareGPT + 500 tokens of system prompt, {RATE_ONLINE:g} requests/s, by tenant"
        section = Section(f"tenants/{scenario.name}", title, columns)
        trace = single_turns("sharegpt", self.count(300), RATE_ONLINE, self.seed, system=500)
        for mode in (modes.PAGED, modes.SHARED):
            run = make_driver(scenario, mode).run(trace)
            for tenant in (*(t for t, _ in TENANTS), "all"):
                mine = [o for o in run.outcomes if tenant in ("all", o.tenant)]
                if mine:
                    section.rows.append({"mode": mode.name, "tenant": tenant, **service(mine)})
        section.notes.append("prefix hits never cross tenants")
        return section

    def policies(self, scenario: Scenario) -> Section:
        """A rush on a tenth of the memory, half of it one tenant's: who waits, by policy."""
        columns = (
            ("policy", "policy", ""),
            ("tenant", "tenant", ""),
            ("requests", "requests", "d"),
            ("ttft_p50", "TTFT s p50", ".2f"),
            ("ttft_p95", "p95", ".2f"),
            ("per_token", "s/token mean", ".3f"),
        )
        section = Section(f"policies/{scenario.name}", f"Policies, {scenario.model.name}, a rush of ShareGPT", columns)
        trace = single_turns("sharegpt", self.count(120), RATE_RUSH, self.seed)
        blocks = scenario.num_blocks(scenarios.BLOCK_SIZE) // 10
        for policy in POLICIES:
            run = make_driver(scenario, modes.PAGED, num_blocks=blocks, policy=policy).run(trace)
            for tenant in (*(t for t, _ in TENANTS), "all"):
                mine = [o for o in run.outcomes if tenant in ("all", o.tenant)]
                if mine:
                    section.rows.append({"policy": policy, "tenant": tenant, **service(mine)})
        return section

    def prefill_share(self, scenario: Scenario) -> Section:
        """Long prompts beside running answers: how much of a step prompts may take."""
        columns = (
            ("share", "prefill share", ".2f"),
            ("ttft_p50", "TTFT s p50", ".2f"),
            ("ttft_p95", "p95", ".2f"),
            ("tpot_p50", "TPOT ms p50", ".1f"),
            ("tpot_p95", "p95", ".1f"),
            ("gap_p50", "longest gap ms p50", ".0f"),
        )
        title = f"TTFT against TPOT, {scenario.model.name}, ShareGPT after 1,500 tokens of context, 3 requests/s"
        section = Section(f"prefill_share/{scenario.name}", title, columns)
        trace = single_turns("sharegpt", self.count(100), 3.0, self.seed, system=1500)
        for share in PREFILL_SHARES:
            run = make_driver(scenario, modes.PAGED, prefill_share=share).run(trace)
            section.rows.append(
                {
                    "share": share,
                    **service(run.outcomes),
                    "tpot_p50": 1e3 * percentile((o.tpot for o in run.outcomes), 0.5),
                    "tpot_p95": 1e3 * percentile((o.tpot for o in run.outcomes), 0.95),
                    "gap_p50": 1e3 * percentile((o.longest_gap for o in run.outcomes), 0.5),
                }
            )
        return section

    def replay(self, scenario: Scenario, trace: list[Entry], which: tuple[Mode, ...]) -> Section:
        """A given trace as it is, by mode and tenant."""
        columns = (
            ("mode", "mode", ""),
            ("tenant", "tenant", ""),
            ("requests", "requests", "d"),
            ("output", "tokens", ",d"),
            ("throughput", "tokens/s", ",.0f"),
            ("waste", "waste of held", ".1%"),
            ("cached", "prompt cached", ".1%"),
            ("queued", "queued s p50", ".2f"),
            ("ttft_p50", "TTFT s p50", ".2f"),
            ("ttft_p95", "p95", ".2f"),
            ("per_token", "s/token mean", ".3f"),
        )
        prompt, answer = mean_lengths(trace)
        title = f"{scenario.model.name}, {len(trace)} requests of a trace (mean {prompt:.0f} in, {answer:.0f} out)"
        section = Section("replay", title, columns)
        for mode in which:
            run = make_driver(scenario, mode).run(trace)
            names = sorted({o.tenant for o in run.outcomes})
            for tenant in (*(names if len(names) > 1 else ()), None):
                mine = [o for o in run.outcomes if tenant is None or o.tenant == tenant]
                row = {"mode": mode.name, "tenant": tenant if tenant is not None else "all", **service(mine)}
                if tenant is None:
                    row |= {"throughput": run.output_tokens / run.seconds, "waste": run.memory.total.waste}
                section.rows.append(row)
        return section
