"""Server-sent events: a response for events that are ready-made bytes.

Our own, and not sse-starlette's or Starlette's, because this runs for every step of every stream. What it does for an
event is one ``send``; no lock, no timeout object, no task switch beside that of whoever waits for the event. And:

- Shutdown: streams are not cut when SIGTERM arrives. The engine stops admitting, running streams go on, and what is
  left when the grace time ends is ended by the engine, in order.
- Pings: a comment is sent only when nothing else was sent for ``ping`` seconds, by the clock.
- LF line ends, ``Cache-Control: no-cache``, and no buffering in common proxies.
- A client that does not read for ``send_timeout`` seconds counts as gone, and so does one that has closed.
- ``on_close`` runs exactly once, however the response ends, also when it never began.
- HEAD gets the headers, and no stream is started for it.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, aclosing
from typing import TypeVar, cast

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

log = logging.getLogger("chatsvc.api")

T = TypeVar("T")

PING = b": ping\n\n"
HEADERS = {"Cache-Control": "no-cache", "Connection": "keep-alive", "X-Accel-Buffering": "no"}


def closing(iterator: AsyncIterator[T]) -> AbstractAsyncContextManager[AsyncIterator[T]]:
    """Close an async generator at the end of the block, not when the garbage collector finds it."""
    return aclosing(cast(AsyncGenerator[T, None], iterator))


class EventStream(Response):
    """Streams whole events.

    Args:
        events: each item is one or several complete events.
        ping: seconds of silence after which a comment is sent.
        send_timeout: seconds that one write may wait for the client.
        on_close: called once when the response is over, for whatever reason.
    """

    media_type = "text/event-stream"

    def __init__(
        self,
        events: AsyncIterator[bytes],
        *,
        ping: float,
        send_timeout: float,
        on_close: Callable[[], None] = lambda: None,
    ) -> None:
        self.status_code = 200
        self.background = None
        self.init_headers(HEADERS)
        self._events = events
        self._ping = ping
        self._send_timeout = send_timeout
        self._on_close = on_close
        self._sending = False  # a write is under way, since ``_since``; else that is the end of the last one
        self._since = 0.0
        self._last_word = asyncio.Lock()  # held by a ping and by the end of the stream: no ping after the end

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the stream; see the class."""
        try:
            start = {"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers}
            await send(start)
            if scope["method"] == "HEAD":
                await send({"type": "http.response.body", "body": b"", "more_body": False})
                return
            tasks = [asyncio.create_task(work) for work in (self._stream(send), self._look_after(send), _gone(receive))]
            try:
                await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            finally:
                for task in tasks:
                    task.cancel()
                results = await asyncio.gather(*tasks, return_exceptions=True)
            for result in results:
                if isinstance(result, Exception):
                    raise result
        finally:
            async with closing(self._events):
                self._on_close()

    async def _stream(self, send: Send) -> None:
        clock = asyncio.get_running_loop().time
        async for events in self._events:
            self._sending, self._since = True, clock()
            await send({"type": "http.response.body", "body": events, "more_body": True})
            self._sending, self._since = False, clock()
        self._sending, self._since = True, clock()
        async with self._last_word:
            await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _look_after(self, send: Send) -> None:
        """Pings, and the end of a stream that its client does not read."""
        clock = asyncio.get_running_loop().time
        self._since = clock()
        while True:
            quiet = clock() - self._since
            if self._sending and quiet >= self._send_timeout:
                break
            if not self._sending and quiet >= self._ping:
                try:
                    async with asyncio.timeout(self._send_timeout), self._last_word:
                        await send({"type": "http.response.body", "body": PING, "more_body": True})
                except TimeoutError:
                    break
                self._since = clock()
                continue
            limit = self._send_timeout if self._sending else self._ping
            await asyncio.sleep(min(limit - quiet, self._send_timeout))
        log.warning("a client did not read for %g seconds: stream given up", self._send_timeout)


async def _gone(receive: Receive) -> None:
    """Until the client has left. The body has been read: the next message can only be the disconnect."""
    while (await receive())["type"] != "http.disconnect":
        pass
