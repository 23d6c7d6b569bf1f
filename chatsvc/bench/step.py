"""Where the time of a decode step goes: what the engine's thread does, and what the event loop does beside it.

A whole server stands in this process, and some streams are read from it by another one. Every part is counted in the
processor time of its own thread: other programs of the machine interrupt it and do not count. Only of the native call,
which has threads of its own, this is one thread's share: about its duration.
"""

from __future__ import annotations

import asyncio
import gc
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import uvicorn

from chatsvc.api.app import create_app
from chatsvc.api.server import server_config
from chatsvc.api.services import Services
from chatsvc.config import ServeConfig
from chatsvc.engine.async_engine import AsyncEngine
from chatsvc.engine.build import build
from chatsvc.engine.garbage import settle
from chatsvc.errors import ChatsvcError
from chatsvc.models.attention.base import FusedModel
from chatsvc.runtime.local import LocalExecutor

BEGIN = 60.0  # seconds until all streams decode
SETTLE = 0.5


class StepBenchFailed(ChatsvcError):
    """The streams did not begin, or ended while they were measured."""


@dataclass(frozen=True, slots=True)
class StepParts:
    """Milliseconds of processor time for each step.

    Attributes:
        step_ms: duration of a step on the engine's thread, by the clock on the wall.
        native, inputs, sample: parts of it: the model's one call, what is laid out for it (block moves included),
            drawing tokens. With the simulated executor 0.
        schedule, update: planning a step, applying what it made.
        publish: tokens to text, and waking the streams.
        serve: what else the event loop does: frames, sockets, HTTP.
    """

    streams: int
    steps: int
    step_ms: float
    native: float
    inputs: float
    sample: float
    schedule: float
    update: float
    publish: float
    serve: float


class Stopwatch:
    """Processor time of the calling thread, by name; one thread at a time uses a name."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self.calls: dict[str, int] = {}

    def on(self, owner: object, method: str, name: str) -> None:
        """From now on calls of this object's method are counted."""
        call: Callable[..., Any] = getattr(owner, method)
        self.seconds[name], self.calls[name] = 0.0, 0

        def timed(*args: Any, **named: Any) -> Any:
            began = time.thread_time()
            try:
                return call(*args, **named)
            finally:
                self.seconds[name] += time.thread_time() - began
                self.calls[name] += 1

        setattr(owner, method, timed)


def watch(engine: AsyncEngine) -> Stopwatch:
    """Count the parts of a started engine's steps."""
    clock = Stopwatch()
    clock.on(engine.scheduler, "schedule", "schedule")
    clock.on(engine.scheduler, "update", "update")
    clock.on(engine, "_publish_news", "publish")
    executor = engine.executor
    if isinstance(executor, LocalExecutor):
        runner = executor.runner
        assert runner is not None
        if not isinstance(runner.model, FusedModel):
            raise StepBenchFailed(f"{runner.backend.name} does not run a step in one call: there are no parts to tell")
        clock.on(runner.model, "step", "native")
        clock.on(runner, "_sample", "sample")
        clock.on(runner, "run", "run")
    return clock


async def measure(config: ServeConfig, streams: int, seconds: float) -> StepParts:
    """All of ``streams`` decode for ``seconds``. Raises: StepBenchFailed, ConfigError, ModelError."""
    built = build(config)
    engine = built.engine
    await engine.start()
    clock = watch(engine)
    thresholds = gc.get_threshold()
    settle()  # as the server does when it is ready
    app = create_app(Services(engine, built.tokenizer, built.template, built.files.name))
    sock = socket.create_server(("127.0.0.1", 0))
    port = sock.getsockname()[1]
    server = uvicorn.Server(server_config(app, host="127.0.0.1", port=port, grace=1))
    serving = asyncio.create_task(server.serve(sockets=[sock]))
    client = subprocess.Popen([sys.executable, "-m", "chatsvc.bench.streams", str(port), str(streams)])  # noqa: ASYNC220
    try:
        await _all_decode(engine, streams, client)
        await asyncio.sleep(SETTLE)
        counted = engine.metrics.step
        before, steps = dict(clock.seconds), clock.calls["update"]
        walls, loop = _sum(counted), time.thread_time()
        await asyncio.sleep(seconds)
        loop, walls = time.thread_time() - loop, _sum(counted) - walls
        steps = clock.calls["update"] - steps
        parts = {name: clock.seconds[name] - before[name] for name in before}
        if not steps or sum(s.decoding for s in engine.scheduler.running) != streams:
            raise StepBenchFailed("streams ended while they were measured: fewer --seconds, or more --num-kv-blocks")
    finally:
        client.kill()
        client.wait()
        server.should_exit = True
        await serving
        await engine.stop()
        gc.unfreeze()
        gc.set_threshold(*thresholds)
    ms = {name: 1e3 * part / steps for name, part in parts.items()}
    native, sample = ms.get("native", 0.0), ms.get("sample", 0.0)
    schedule, update, publish = ms["schedule"], ms["update"], ms["publish"]
    return StepParts(
        streams=streams,
        steps=steps,
        step_ms=1e3 * walls / steps,
        native=native,
        inputs=max(0.0, ms.get("run", 0.0) - native - sample),
        sample=sample,
        schedule=schedule,
        update=update,
        publish=publish,
        serve=max(0.0, 1e3 * loop / steps - schedule - update - publish),
    )


async def _all_decode(engine: AsyncEngine, streams: int, client: subprocess.Popen[bytes]) -> None:
    end = time.monotonic() + BEGIN
    while sum(s.decoding for s in engine.scheduler.running) < streams:
        if client.poll() is not None:
            raise StepBenchFailed("streams ended before all had begun: raise --num-kv-blocks")
        if time.monotonic() > end:
            raise StepBenchFailed(f"{streams} streams did not begin within {BEGIN:g} s: see --max-num-seqs")
        await asyncio.sleep(0.05)


def _sum(histogram: Any) -> float:
    """Of all that a Prometheus histogram has seen."""
    return next(float(s.value) for m in histogram.collect() for s in m.samples if s.name.endswith("_sum"))
