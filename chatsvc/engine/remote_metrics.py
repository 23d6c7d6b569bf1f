"""Prometheus metrics of an engine in another process: one set, as if it were here."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterator

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import Metric
from prometheus_client.registry import Collector
from prometheus_client.samples import Sample

from chatsvc.engine.metrics import QUOTA_FALLBACKS, SHORT, P
from chatsvc.errors import ChatsvcError

log = logging.getLogger(__name__)

SCRAPE_SECONDS = 1.0
LOOP_LAG = P + "loop_lag_seconds"
ENGINE_LOOP_LAG = P + "engine_loop_lag_seconds"
STORE_ERRORS = P + "session_store_errors"
FALLBACKS = P + "quota_fallbacks"
OURS = (STORE_ERRORS, FALLBACKS)


class _Fetched(Collector):
    """What the engine's process counted, as it was when it last said so."""

    def __init__(self) -> None:
        self.families: list[Metric] = []

    def describe(self) -> list[Metric]:
        return []

    def collect(self) -> Iterator[Metric]:
        yield from self.families


class RemoteMetrics:
    """What this process counts itself, and what it fetches.

    Attributes:
        loop_lag: of the loop that serves the sockets; the engine's own is ``chatsvc_engine_loop_lag_seconds``.
    """

    def __init__(self, fetch: Callable[[], Awaitable[list[Metric]]]) -> None:
        self._fetch = fetch
        self._fetched = _Fetched()
        r = self.registry = CollectorRegistry()
        r.register(self._fetched)
        self.loop_lag = Histogram(LOOP_LAG, "How late the event loop wakes up", buckets=SHORT, registry=r)
        self.store_errors = Counter(STORE_ERRORS, "Session store operations that failed", registry=r)
        self.quota_fallbacks = Counter(FALLBACKS, QUOTA_FALLBACKS, registry=r)

    async def refresh(self) -> None:
        """Ask the engine's process. When it does not answer within a second, the last numbers stay."""
        try:
            async with asyncio.timeout(SCRAPE_SECONDS):
                families = await self._fetch()
        except (TimeoutError, ChatsvcError) as e:
            log.warning("the engine's process did not tell its metrics: %s", e or "no answer")
            return
        self._fetched.families = [_renamed(f) if f.name == LOOP_LAG else f for f in families if f.name not in OURS]


def _renamed(family: Metric) -> Metric:
    out = Metric(ENGINE_LOOP_LAG, "How late the engine's event loop wakes up", family.type)
    out.samples = [Sample(s.name.replace(LOOP_LAG, ENGINE_LOOP_LAG), *s[1:]) for s in family.samples]
    return out
