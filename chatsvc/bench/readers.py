"""Many readers of streams: is every token there once, and how old is text when its reader has it.

The servers run the simulated executor with a clock for text (:mod:`chatsvc.runtime.clock`): each token is the
millisecond at which its step ended, so the age of text is the reader's time less what the text says, on one clock for
all processes of the machine. Tokens of one answer differ by a step's time; so strictly growing times, and as many
tokens as were asked for, mean that none is missing or doubled.

The client is raw sockets in a process of its own, and its CPU time is counted apart.
"""

from __future__ import annotations

import asyncio
import gc
import json
import os
import re
import resource
import signal
import socket
import subprocess
import sys
import tempfile
import time
from array import array
from dataclasses import dataclass, field
from pathlib import Path

from chatsvc.errors import ChatsvcError
from chatsvc.runtime.clock import PERIOD, WIDTH, milliseconds

CONTENT = re.compile(rb'"content":"([^"\\]*)"')
COUNT = re.compile(rb'"completion_tokens":(\d+)')
SETTLE = 2.0  # seconds after the last reader's first token, before ages count
CONNECTS = 50  # at a time


class ReadersFailed(ChatsvcError):
    """A server did not start, refused, or broke a stream; the message says which."""


@dataclass(slots=True)
class Shared:
    """What all readers write to. ``measuring``: ages count now. ``ages``: milliseconds, one for each token."""

    alphabet: dict[bytes, int]
    tokens: int
    measuring: bool = False
    ages: array[int] = field(default_factory=lambda: array("i"))
    frames: int = 0
    begun: int = 0
    ended: int = 0
    faults: list[str] = field(default_factory=list)


class Reader(asyncio.Protocol):
    """One stream. ``stops``: stops reading when ages begin to count, and reads on at the end."""

    def __init__(self, shared: Shared, request: bytes, stops: bool, done: asyncio.Future[None]) -> None:
        self.shared = shared
        self.stops = stops
        self.transport: asyncio.Transport | None = None
        self._request = request
        self._done = done
        self._rest = b""
        self._tokens = self._counted = 0
        self._last: int | None = None
        self._finished = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport
        transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        now = milliseconds()
        data = self._rest + data
        cut = data.rfind(b"\n\n") + 2
        if cut < 2:
            self._rest = data
            return
        events, self._rest = data[:cut], data[cut:]
        shared = self.shared
        for text in CONTENT.findall(events):
            if text:
                shared.frames += shared.measuring and not self.stops
                for i in range(0, len(text), WIDTH):
                    self._token(text[i : i + WIDTH], now)
        if b'"choices":[]' in events and (found := COUNT.search(events)):
            self._counted = int(found[1])
        if b"data: [DONE]" in events:
            if not self._tokens == self._counted == shared.tokens:
                self._fault(f"{self._tokens} tokens came, {self._counted} were made, {shared.tokens} asked for")
            self._end()
        elif b"HTTP/1.1 2" not in events and b'"error"' in events:
            self._fault(events[-300:].decode(errors="replace"))
            self._end()

    def _token(self, text: bytes, now: int) -> None:
        shared = self.shared
        made = shared.alphabet.get(text)
        if made is None:
            self._fault(f"no token is {text!r}")
            return
        age = (now - made) % PERIOD
        if self._last is not None and not 0 < (made - self._last) % PERIOD < PERIOD // 2:
            self._fault("a token came twice, or in the wrong order")
        self._last = made
        if not self._tokens:
            shared.begun += 1
        self._tokens += 1
        if shared.measuring and not self.stops:
            shared.ages.append(age)

    def _fault(self, what: str) -> None:
        self.shared.faults.append(what)

    def _end(self) -> None:
        if not self._finished:
            self._finished = True
            self.shared.ended += 1
            self._done.set_result(None)
            if self.transport is not None:
                self.transport.close()

    def connection_lost(self, exc: Exception | None) -> None:
        if not self._finished:
            self._fault(f"the connection was lost: {exc}; {self._rest[-200:]!r}")
            self._end()


@dataclass(slots=True)
class Server:
    """``chatsvc serve`` in a process of its own, with what it costs. Start it, :meth:`ready`, at last :meth:`close`."""

    process: subprocess.Popen[bytes]
    log: Path
    port: int = 0

    @classmethod
    def start(cls, folder: Path, flags: list[str]) -> Server:
        log = folder / f"serve-{len(list(folder.iterdir()))}.log"
        env = {k: v for k, v in os.environ.items() if not k.startswith("CHATSVC_")}
        command = [sys.executable, "-c", "from chatsvc.cli.main import main; main()", "serve", "--port", "0", *flags]
        with log.open("wb") as out:
            return cls(subprocess.Popen(command, env=env, cwd=folder, stdout=out, stderr=out), log)

    async def ready(self, seconds: float = 120) -> None:
        end = time.monotonic() + seconds
        while time.monotonic() < end and self.process.poll() is None:
            if found := re.search(r"Chat page:\s+http://127\.0\.0\.1:(\d+)/", self.log.read_text(errors="replace")):
                self.port = int(found[1])
                return
            await asyncio.sleep(0.1)
        raise ReadersFailed(f"the server did not start:\n{self.log.read_text(errors='replace')[-2000:]}")

    def pids(self) -> list[int]:
        """The API's process and, with ``--engine process``, the engine's."""
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text()
        return [self.process.pid, *map(int, children.split())]

    def close(self) -> None:
        self.process.send_signal(signal.SIGTERM)
        try:
            self.process.wait(20)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


def cpu_seconds(pid: int) -> float:
    """User and system time of all threads of a process."""
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def memory(pid: int) -> int:
    """Resident bytes."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@dataclass(frozen=True, slots=True)
class Result:
    """Ages in milliseconds; CPU in cores (1.0: one core all the time); memory in bytes over all server processes.

    Attributes:
        stopped: readers that stopped reading while ages were counted; they are in no age.
        rate: tokens a second that each of the others got.
        frames: pieces of text of one reader a second.
        api_cpu, engine_cpu: the busiest server's processes; with a thread as engine all is in the first.
        memory_before, memory_after: at the beginning and the end of the time that ages were counted.
        faults: what was missing, doubled or broken, the first few.
    """

    readers: int
    stopped: int
    servers: int
    engine: str
    seconds: float
    rate: float
    frames: float
    p50: float
    p99: float
    most: float
    api_cpu: float
    engine_cpu: float
    client_cpu: float
    memory_before: int
    memory_after: int
    faults: list[str]


def request(port: int, number: int, tokens: int) -> bytes:
    body = json.dumps(
        {
            "messages": [{"role": "user", "content": f"reader {number}"}],
            "max_tokens": tokens,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
    ).encode()
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\nContent-Type: application/json\r\n"
    return f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body


async def run(
    alphabet: dict[bytes, int], *, readers: int, stopping: int, servers: int, engine: str, rate: float, seconds: float
) -> Result:
    """``stopping`` of the ``readers`` stop reading. Raises: ReadersFailed."""
    share = -(-readers // servers)
    tokens = int((seconds + SETTLE + 2 + readers / 40) * rate)
    flags = ["--executor", "simulated", "--simulated-text", "clock", "--simulated-step-ms", f"{1000 / rate:g}"]
    flags += ["--simulated-token-ms", "0", "--session-store", "memory://", "--engine", engine]
    flags += ["--steps-in-flight", "2"]  # as on a device whose next step waits for it: the rate is the readers' then
    flags += [
        "--max-num-seqs",
        str(share),
        "--max-queue",
        str(share),
        "--num-kv-blocks",
        str(share * (tokens // 16 + 8)),
    ]
    flags += ["--max-num-batched-tokens", str(share + 256)]
    with tempfile.TemporaryDirectory() as folder:
        started = [Server.start(Path(folder), flags) for _ in range(servers)]
        try:
            for server in started:
                await server.ready()
            gc.collect()
            gc.disable()  # a pause of this process would be age
            return await _measure(alphabet, started, readers, stopping, tokens, seconds, engine)
        finally:
            gc.enable()
            for server in started:
                server.close()


async def _measure(
    alphabet: dict[bytes, int],
    servers: list[Server],
    readers: int,
    stopping: int,
    tokens: int,
    seconds: float,
    engine: str,
) -> Result:
    loop = asyncio.get_running_loop()
    shared = Shared(alphabet, tokens)
    slots = asyncio.Semaphore(CONNECTS)

    async def connect(number: int) -> tuple[Reader, asyncio.Future[None]]:
        server = servers[number % len(servers)]
        done: asyncio.Future[None] = loop.create_future()
        stops = number < stopping
        async with slots:
            sock = socket.socket()
            if stops:  # or the kernel would hold everything for it
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            sock.setblocking(False)
            await loop.sock_connect(sock, ("127.0.0.1", server.port))
            _, reader = await loop.create_connection(
                lambda: Reader(shared, request(server.port, number, tokens), stops, done), sock=sock
            )
            await asyncio.sleep(0.02)
        return reader, done

    joined = await asyncio.gather(*(connect(i) for i in range(readers)))
    while shared.begun < readers and not shared.faults:  # noqa: ASYNC110
        await asyncio.sleep(0.05)
    if shared.faults:
        raise ReadersFailed(f"a stream did not begin: {shared.faults[0]}")
    await asyncio.sleep(SETTLE)
    if shared.ended:
        raise ReadersFailed("answers ended before all readers had begun: the machine is too busy for this many")
    stopped = [reader.transport for reader, _ in joined if reader.stops and reader.transport is not None]
    for transport in stopped:
        transport.pause_reading()
    pids = [server.pids() for server in servers]
    before = [[cpu_seconds(p) for p in group] for group in pids]
    client = resource.getrusage(resource.RUSAGE_SELF)
    memory_before = sum(memory(p) for group in pids for p in group)
    began = time.monotonic()
    shared.measuring = True
    while shared.ended == 0 and time.monotonic() - began < seconds:  # noqa: ASYNC110
        await asyncio.sleep(0.05)
    shared.measuring = False
    took = time.monotonic() - began
    usage = resource.getrusage(resource.RUSAGE_SELF)
    memory_after = sum(memory(p) for group in pids for p in group)
    cost = [[(cpu_seconds(p) - b) / took for p, b in zip(group, old)] for group, old in zip(pids, before)]
    for transport in stopped:
        transport.resume_reading()
    await asyncio.gather(*(done for _, done in joined))
    ages = sorted(shared.ages)
    reading = max(1, readers - stopping)
    return Result(
        readers=readers,
        stopped=stopping,
        servers=len(servers),
        engine=engine,
        seconds=round(took, 1),
        rate=round(len(ages) / took / reading, 2),
        frames=round(shared.frames / took / reading, 2),
        p50=_percentile(ages, 0.5),
        p99=_percentile(ages, 0.99),
        most=_percentile(ages, 1.0),
        api_cpu=round(max(c[0] for c in cost), 2),
        engine_cpu=round(max(sum(c[1:]) for c in cost), 2),
        client_cpu=round((usage.ru_utime + usage.ru_stime - client.ru_utime - client.ru_stime) / took, 2),
        memory_before=memory_before,
        memory_after=memory_after,
        faults=shared.faults[:5],
    )


def _percentile(ordered: list[int], share: float) -> float:
    return float(ordered[min(len(ordered) - 1, int(len(ordered) * share))]) if ordered else 0.0
