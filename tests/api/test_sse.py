"""The event stream by itself: pings, silence, clients that do not read, and the end. Written against bare ASGI."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from typing import Any

import pytest

from chatsvc.api.middleware import RequestMiddleware
from chatsvc.api.sse import PING, EventStream

SCOPE = {"type": "http", "method": "POST"}


class Wire:
    """What was sent; ``blocked`` while the client does not read; ``leave`` is the disconnect."""

    def __init__(self) -> None:
        self.sent: list[Any] = []
        self.open = asyncio.Event()
        self.open.set()
        self.left = asyncio.Event()

    async def send(self, message: Any) -> None:
        await self.open.wait()
        assert not self.ended, "nothing is sent after the end"
        self.sent.append(message)

    async def receive(self) -> Any:
        await self.left.wait()
        return {"type": "http.disconnect"}

    @property
    def bodies(self) -> list[bytes]:
        return [m["body"] for m in self.sent if m["type"] == "http.response.body"]

    @property
    def ended(self) -> bool:
        return any(m.get("more_body") is False for m in self.sent)


class Source:
    """Events when the test says so."""

    def __init__(self) -> None:
        self.queue: asyncio.Queue[bytes | Exception | None] = asyncio.Queue()
        self.closed = 0

    async def events(self) -> AsyncIterator[bytes]:
        try:
            while (item := await self.queue.get()) is not None:
                if isinstance(item, Exception):
                    raise item
                yield item
        finally:
            self.closed += 1


class Case:
    def __init__(self, ping: float = 60, send_timeout: float = 60) -> None:
        self.wire, self.source, self.closes = Wire(), Source(), 0
        self.stream = EventStream(self.source.events(), ping=ping, send_timeout=send_timeout, on_close=self.close)

    def close(self) -> None:
        self.closes += 1

    def run(self, method: str = "POST") -> asyncio.Task[None]:
        return asyncio.create_task(self.stream({**SCOPE, "method": method}, self.wire.receive, self.wire.send))

    async def until(self, condition: Any) -> None:
        async with asyncio.timeout(10):
            while not condition():
                await asyncio.sleep(0.001)


async def test_events_pass_as_they_are_and_the_end_is_one() -> None:
    case = Case()
    for item in (b"a", b"b", None):
        case.source.queue.put_nowait(item)
    await case.run()
    assert case.wire.bodies == [b"a", b"b", b""] and case.wire.ended
    assert (case.closes, case.source.closed) == (1, 1)
    headers = dict(case.wire.sent[0]["headers"])
    assert headers[b"content-type"].startswith(b"text/event-stream") and headers[b"cache-control"] == b"no-cache"
    assert b"content-length" not in headers and headers[b"x-accel-buffering"] == b"no"


async def test_a_ping_comes_after_silence_only() -> None:
    case = Case(ping=0.2)
    task = case.run()
    for _ in range(20):
        case.source.queue.put_nowait(b"x")
        await asyncio.sleep(0.02)
    busy = case.wire.bodies.count(PING)
    await case.until(lambda: case.wire.bodies.count(PING) >= busy + 2)
    assert busy <= 1, "while events came there was no need (one, should this machine have paused)"
    case.source.queue.put_nowait(None)
    await task
    assert case.wire.bodies[-1] == b""


@pytest.mark.parametrize("what", ["event", "ping", "end"])
async def test_a_client_that_does_not_read_is_given_up(what: str, caplog: pytest.LogCaptureFixture) -> None:
    case = Case(ping=0.02 if what == "ping" else 60, send_timeout=0.1)
    task = case.run()
    await case.until(lambda: case.wire.sent)
    case.wire.open.clear()
    if what != "ping":
        case.source.queue.put_nowait(b"x" if what == "event" else None)
    await asyncio.wait_for(task, 10)
    assert "did not read" in caplog.text and not case.wire.ended
    assert (case.closes, case.source.closed) == (1, 1)


async def test_a_blocked_ping_does_not_come_after_the_end() -> None:
    case = Case(ping=0.02)
    task = case.run()
    await case.until(lambda: PING in case.wire.bodies)
    case.wire.open.clear()
    await asyncio.sleep(0.1)  # a ping waits for the client now
    for item in (b"a", None):
        case.source.queue.put_nowait(item)
    await asyncio.sleep(0.05)
    case.wire.open.set()
    await task
    assert case.wire.bodies[-1] == b"" and b"a" in case.wire.bodies


async def test_the_end_waits_for_a_ping_that_is_under_way() -> None:
    case = Case(ping=0.02)
    begun, plain = asyncio.Event(), case.wire.send

    async def send(message: Any) -> None:
        if message.get("body") == PING:
            begun.set()
            await asyncio.sleep(0.05)
        await plain(message)

    case.wire.send = send  # type: ignore[method-assign]
    task = case.run()
    await begun.wait()
    case.source.queue.put_nowait(None)
    await task
    assert case.wire.bodies == [PING, b""]


async def test_a_client_that_leaves_ends_it(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    case = Case()
    task = case.run()
    case.source.queue.put_nowait(b"x")
    await case.until(lambda: case.wire.bodies)
    case.wire.left.set()
    await task
    assert (case.closes, case.source.closed) == (1, 1) and not case.wire.ended and not caplog.text


async def test_what_the_events_raise_is_raised() -> None:
    case = Case()
    case.source.queue.put_nowait(ZeroDivisionError())
    with pytest.raises(ZeroDivisionError):
        await case.run()
    assert case.closes == 1


@pytest.mark.parametrize("begun", [False, True])
async def test_a_server_that_ends_cancels_it(begun: bool) -> None:
    case = Case()
    if not begun:
        case.wire.open.clear()
    task = case.run()
    await asyncio.sleep(0.01)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert case.closes == 1
    assert len(asyncio.all_tasks()) == 1


async def test_head_starts_no_stream() -> None:
    case = Case()
    await case.run("HEAD")
    assert case.wire.bodies == [b""] and case.wire.ended and (case.closes, case.source.closed) == (1, 0)


async def test_events_do_not_pass_the_middlewares_but_the_beginning_and_the_end_do() -> None:
    case, seen = Case(), []

    async def inner(scope: Any, receive: Any, send: Any) -> None:
        async def noted(message: Any) -> None:
            seen.append(message.get("body"))
            await send(message)

        await case.stream(scope, receive, noted)

    scope = {**SCOPE, "path": "/", "headers": []}
    task = asyncio.create_task(RequestMiddleware(inner)(scope, case.wire.receive, case.wire.send))
    for item in (b"a", b"b", None):
        case.source.queue.put_nowait(item)
    await task
    assert case.wire.bodies == [b"a", b"b", b""] and case.wire.ended
    assert seen == [None, b""]
    assert any(name == b"x-request-id" for name, _ in case.wire.sent[0]["headers"])
