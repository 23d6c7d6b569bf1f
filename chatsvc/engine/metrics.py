"""Prometheus metrics. One registry per app; totals that the scheduler keeps anyway are read at scrape time."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from chatsvc.scheduler.scheduler import Scheduler

P = "chatsvc_"
QUOTA_FALLBACKS = "Requests judged by this process alone, as the store that shares quotas did not answer"
LATENCY = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120)
SHORT = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5)
TOKENS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192)


class SchedulerCollector(Collector):
    """Gauges and totals as they are at the moment of the scrape (which happens in the event loop)."""

    def __init__(self, scheduler: Callable[[], Scheduler | None]) -> None:
        self._scheduler = scheduler

    def describe(self) -> list[Metric]:
        return []

    def collect(self) -> Iterator[Metric]:
        s = self._scheduler()
        if s is None:
            return
        pool, stats, host = s.manager.pool, s.stats, s.manager.host
        filled, allocated = s.filled_slots()
        yield GaugeMetricFamily(P + "requests_running", "Sequences that own KV blocks", len(s.running))
        yield GaugeMetricFamily(
            P + "requests_waiting", "Sequences queued, preempted ones included", len(s.waiting) + len(s.preempted)
        )
        yield GaugeMetricFamily(P + "requests_swapped", "Sequences whose KV is in host memory", s.num_swapped)
        yield self._states(
            "kv_blocks",
            "KV blocks of the pool; the states sum to the usable blocks",
            {"free": pool.num_free, "cached": pool.num_cached, "used": pool.num_used},
        )
        tier = host.pool if host else None
        states = {
            "free": tier.num_free if tier else 0,
            "cached": tier.num_cached if tier else 0,
            "used": tier.num_used if tier else 0,
        }
        yield self._states("host_kv_blocks", "KV blocks of the host tier", states)
        waste = 1 - filled / allocated if allocated else 0.0
        yield GaugeMetricFamily(P + "kv_waste_ratio", "1 - filled / allocated slots over the used blocks", waste)
        totals = {
            "prompt_tokens": ("Prompt tokens of admitted sequences", stats.prompt_tokens),
            "cached_prompt_tokens": ("Prompt tokens found in the prefix cache", stats.cached_prompt_tokens),
            "computed_tokens": ("Tokens that went through the model", stats.computed_tokens),
            "generation_tokens": ("Tokens generated", stats.generation_tokens),
            "prefix_cache_query_tokens": ("Tokens looked up in the prefix cache", stats.query_tokens),
            "prefix_cache_hit_tokens": ("Tokens found in the prefix cache", stats.hit_tokens),
            "recompute_hit_tokens": (
                "Tokens found again after a preemption (not counted as hits)",
                stats.recompute_hit_tokens,
            ),
            "cow_copies": ("Blocks copied on write", s.manager.cow_copies),
            "evictions": ("Cached blocks given to a new owner", pool.evictions),
            "draft_tokens": ("Tokens proposed by speculation", 0),
            "accepted_tokens": ("Proposed tokens that were right", 0),
        }
        for name, (text, value) in totals.items():
            yield CounterMetricFamily(P + name, text, value)
        kinds = CounterMetricFamily(P + "preemptions", "Preemptions", labels=["kind"])
        kinds.add_metric(["recompute"], stats.preemptions)
        kinds.add_metric(["swap"], stats.swaps)
        yield kinds
        swapped = CounterMetricFamily(P + "swapped_blocks", "Blocks moved to or from the host", labels=["direction"])
        swapped.add_metric(["in"], host.blocks_in if host else 0)
        swapped.add_metric(["out"], host.blocks_out if host else 0)
        yield swapped

    def _states(self, name: str, text: str, values: dict[str, int]) -> Metric:
        family = GaugeMetricFamily(P + name, text, labels=["state"])
        for state, value in values.items():
            family.add_metric([state], value)
        return family


class Metrics:
    def __init__(self, scheduler: Callable[[], Scheduler | None]) -> None:
        r = self.registry = CollectorRegistry()
        r.register(SchedulerCollector(scheduler))
        self.finished = Counter(P + "requests_finished", "Choices ended, by reason", ["reason"], registry=r)
        for reason in ("stop", "length", "abort", "error"):
            self.finished.labels(reason)
        self.queue = Histogram(P + "queue_seconds", "From arrival to the first step", buckets=LATENCY, registry=r)
        self.ttft = Histogram(P + "time_to_first_token_seconds", "Arrival to first token", buckets=LATENCY, registry=r)
        self.inter_token = Histogram(
            P + "inter_token_seconds", "Between tokens of a sequence", buckets=SHORT, registry=r
        )
        self.request = Histogram(P + "request_seconds", "From arrival to the end", buckets=LATENCY, registry=r)
        self.step = Histogram(P + "step_seconds", "Forward pass and sampling of a step", buckets=SHORT, registry=r)
        self.batch_tokens = Histogram(P + "batch_tokens", "Tokens computed in a step", buckets=TOKENS, registry=r)
        self.loop_lag = Histogram(P + "loop_lag_seconds", "How late the event loop wakes up", buckets=SHORT, registry=r)
        self.store_errors = Counter(P + "session_store_errors", "Session store operations that failed", registry=r)
        self.quota_fallbacks = Counter(P + "quota_fallbacks", QUOTA_FALLBACKS, registry=r)

    async def refresh(self) -> None:
        """Before a scrape: everything is here already."""
