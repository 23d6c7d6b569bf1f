"""What a busy API does to the steps of the engine, and the steps to the API: engine in a thread against a process.

One interpreter has one lock. A step gives it up for its native call and needs it back for what comes before and after;
the event loop beside it gives it up when it has nothing to do. So each engine is measured three ways: only steps, only
an API that is kept busy with small requests, and both.

The client's time is on the same cores, and the same in all cases.
"""

from __future__ import annotations

import asyncio
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from chatsvc.bench.readers import ReadersFailed, Server

ASK = b"GET /v1/models HTTP/1.1\r\nHost: x\r\n\r\n"
METRICS = b"GET /metrics HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"
SETTLE = 1.0  # seconds from the first steps to the first that counts
BEGIN = 60.0


@dataclass(frozen=True, slots=True)
class Case:
    """Attributes:
    streams: that decode all the time.
    asking: connections that ask for ``/v1/models`` again and again.
    step_ms: mean duration of a step; 0 without streams.
    tokens: a second, of all streams.
    requests: answered a second.
    p50, p99: milliseconds until such an answer was there.
    lag_ms: how late the engine's event loop woke up, mean.
    """

    engine: str
    streams: int
    asking: int
    step_ms: float
    tokens: float
    requests: float
    p50: float
    p99: float
    lag_ms: float


class Asking:
    """One connection that asks, and asks again when the answer is there."""

    def __init__(self, took: list[float]) -> None:
        self.took = took

    async def run(self, port: int) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        try:
            while True:
                began = time.perf_counter()
                writer.write(ASK)
                head = await reader.readuntil(b"\r\n\r\n")
                found = re.search(rb"content-length: (\d+)", head)
                assert found is not None and b" 200 " in head, head
                await reader.readexactly(int(found[1]))
                self.took.append(time.perf_counter() - began)
        finally:
            writer.close()


async def numbers(port: int) -> dict[str, float]:
    """The server's counters, by name; those with labels added up."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(METRICS)
    text = (await reader.read()).decode()
    writer.close()
    found: dict[str, float] = {}
    for name, value in re.findall(r"^chatsvc_(\w+)(?:\{[^}]*\})? ([0-9.e+-]+)\r?$", text, re.M):
        found[name] = found.get(name, 0.0) + float(value)
    return found


async def measure(engine: str, flags: Sequence[str], *, streams: int, asking: int, seconds: float) -> list[Case]:
    """The three cases of one engine, in one server. Raises: ReadersFailed."""
    with tempfile.TemporaryDirectory() as folder:
        server = Server.start(
            Path(folder), ["--engine", engine, "--session-store", "memory://", "--max-num-seqs", str(streams), *flags]
        )
        try:
            await server.ready()
            args = (server.port, engine)
            return [
                await _case(*args, streams, 0, seconds),
                await _case(*args, 0, asking, seconds),
                await _case(*args, streams, asking, seconds),
            ]
        finally:
            server.close()


async def _case(port: int, engine: str, streams: int, asking: int, seconds: float) -> Case:
    took: list[float] = []
    client = None
    asks: list[asyncio.Task[None]] = []
    try:
        if streams:
            command = [sys.executable, "-m", "chatsvc.bench.streams", str(port), str(streams)]
            client = subprocess.Popen(command)  # noqa: ASYNC220
            await _until_running(port, streams)
        asks = [asyncio.create_task(Asking(took).run(port)) for _ in range(asking)]
        await asyncio.sleep(SETTLE)
        before, began, first = await numbers(port), time.perf_counter(), len(took)
        await asyncio.sleep(seconds)
        last, after = len(took), await numbers(port)
        spent = time.perf_counter() - began
    finally:
        for ask in asks:
            ask.cancel()
        await asyncio.gather(*asks, return_exceptions=True)
        if client is not None:
            client.kill()
            client.wait()
    await _until_running(port, 0)
    new = {name: after[name] - before.get(name, 0.0) for name in after}
    answers = sorted(took[first:last]) or [0.0]
    return Case(
        engine=engine,
        streams=streams,
        asking=asking,
        step_ms=_mean(new, "step_seconds") if streams else 0.0,
        tokens=new["generation_tokens_total"] / spent,
        requests=(last - first) / spent,
        p50=1e3 * answers[len(answers) // 2],
        p99=1e3 * answers[int(len(answers) * 0.99)],
        lag_ms=_mean(new, "loop_lag_seconds"),
    )


async def _until_running(port: int, streams: int) -> None:
    end = time.monotonic() + BEGIN
    while time.monotonic() < end:
        if (await numbers(port))["requests_running"] == streams:
            return
        await asyncio.sleep(0.1)
    raise ReadersFailed(f"there were not {streams} running streams within {BEGIN:g} s")


def _mean(new: dict[str, float], name: str) -> float:
    """Milliseconds."""
    return 1e3 * new[f"{name}_sum"] / max(1.0, new[f"{name}_count"])
