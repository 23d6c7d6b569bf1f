"""Server-sent events: sse-starlette's response, with our policy and a shorter way for each event.

Where it differs from :class:`sse_starlette.EventSourceResponse`, and why:

- Events are ready-made bytes, and one costs one ``send``: no lock, no timeout object, no task switch beside that of
  whoever waits for it, and not the way through the middlewares, which only look at the beginning. This runs for every
  step of every stream; the library's way costs about half as much again.
- Shutdown. The library cuts every stream as soon as SIGTERM arrives (process-wide ``AppStatus.should_exit``, polled by
  a task per thread). Here answers are drained: the engine stops admitting, running streams go on, and what is left when
  the grace time ends is ended by the engine, in order. So nothing of that global state is read and no task polls it.
- Pings: a comment is sent only when nothing else was sent for ``ping`` seconds, by the clock.
- A client that does not read for ``send_timeout`` seconds counts as gone.
- LF line ends, ``Cache-Control: no-cache``.
- ``on_close`` runs exactly once, however the response ends, also when it never began.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, aclosing
from typing import TypeVar, cast

import anyio
from sse_starlette import EventSourceResponse
from starlette.types import Receive, Scope, Send

from chatsvc.api.middleware import body_send

log = logging.getLogger("chatsvc.api")

T = TypeVar("T")

PING = b": ping\n\n"


def closing(iterator: AsyncIterator[T]) -> AbstractAsyncContextManager[AsyncIterator[T]]:
    """Close an async generator at the end of the block, not when the garbage collector finds it."""
    return aclosing(cast(AsyncGenerator[T, None], iterator))


class EventStream(EventSourceResponse):
    """Streams whole events.

    Args:
        events: each item is one or several complete events, or a piece of one that its rest follows without a pause.
        ping: seconds of silence after which a comment is sent; 0: never.
        send_timeout: seconds that one write may wait for the client.
        on_close: called once when the response is over, for whatever reason.
    """

    def __init__(
        self,
        events: AsyncIterator[bytes],
        *,
        ping: float,
        send_timeout: float,
        on_close: Callable[[], None] = lambda: None,
    ) -> None:
        super().__init__(events, headers={"Cache-Control": "no-cache"}, ping=ping or 1e9, sep="\n")
        self._events = events
        self._patience = send_timeout
        self._on_close = on_close
        self._pass_on: Send | None = None
        self._sending = False  # a write is under way, since ``_since``; else that is the end of the last one
        self._since = 0.0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the stream; see the class."""
        self._pass_on = body_send(scope)
        try:
            await super().__call__(scope, receive, send)
        finally:
            async with closing(self._events):
                self._on_close()

    @staticmethod
    async def _listen_for_exit_signal() -> None:
        await anyio.sleep_forever()

    async def _stream_response(self, send: Send) -> None:
        clock = asyncio.get_running_loop().time
        self._since = clock()
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        pass_on = self._pass_on or send
        async for events in self._events:
            self._sending, self._since = True, clock()
            await pass_on({"type": "http.response.body", "body": events, "more_body": True})
            self._sending, self._since = False, clock()
        self._sending, self._since = True, clock()
        async with self._send_lock:  # a ping takes it too: none comes after the end
            self.active = False
            await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _ping(self, send: Send) -> None:
        """Pings, and the end of a stream that its client does not read: when this returns, the response is over."""
        clock = asyncio.get_running_loop().time
        self._since = clock()
        while True:
            quiet = clock() - self._since
            if self._sending and quiet >= self._patience:
                break
            if not self._sending and quiet >= self.ping_interval:
                with anyio.move_on_after(self._patience) as scope:
                    async with self._send_lock:
                        if self.active:
                            await send({"type": "http.response.body", "body": PING, "more_body": True})
                if scope.cancelled_caught:
                    break
                self._since = clock()
                continue
            limit = self._patience if self._sending else self.ping_interval
            await asyncio.sleep(min(limit - quiet, self._patience))
        log.warning("a client did not read for %g seconds: stream given up", self._patience)
