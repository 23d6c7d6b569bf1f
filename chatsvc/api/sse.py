"""Server-sent events: sse-starlette's response with our policy on pings, shutdown and leaving clients.

Where it differs from :class:`sse_starlette.EventSourceResponse`, and why:

- Shutdown. sse-starlette cuts every stream as soon as SIGTERM arrives (process-wide ``AppStatus.should_exit``, a
  polling task per thread that introspects the signal handler). Here answers are drained: the engine stops admitting,
  running streams go on, and what is left when the grace time ends is aborted by the engine, which ends the streams in
  order. So ``_listen_for_exit_signal`` waits for ever: nothing of that global state is read, no polling task is
  started, and any number of servers and event loops in one process (tests) do not touch each other.
- Pings. A comment is sent only when nothing else was sent for ``ping`` seconds, by the clock.
- LF line ends, ``Cache-Control: no-cache``.
- A client that does not read for ``send_timeout`` seconds counts as gone.
- ``on_close`` runs exactly once, however the response ends, also when it never began.
"""

from __future__ import annotations

import logging
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, aclosing
from typing import TypeVar, cast

import anyio
from sse_starlette import EventSourceResponse
from sse_starlette.sse import SendTimeoutError
from starlette.types import Message, Receive, Scope, Send

log = logging.getLogger("chatsvc.api")

T = TypeVar("T")

PING = b": ping\n\n"


def closing(iterator: AsyncIterator[T]) -> AbstractAsyncContextManager[AsyncIterator[T]]:
    """Close an async generator at the end of the block, not when the garbage collector finds it."""
    return aclosing(cast(AsyncGenerator[T, None], iterator))


class EventStream(EventSourceResponse):
    """Streams whole, ready-made events (bytes).

    Args:
        events: each item is one or several complete events.
        ping: seconds of silence after which a comment is sent.
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
        super().__init__(events, headers={"Cache-Control": "no-cache"}, ping=ping, sep="\n", send_timeout=send_timeout)
        self._on_close = on_close
        self._last_sent = 0.0

    @staticmethod
    async def _listen_for_exit_signal() -> None:
        await anyio.sleep_forever()

    async def _send_with_timeout(self, send: Send, message: Message) -> None:
        await super()._send_with_timeout(send, message)
        self._last_sent = time.monotonic()

    async def _ping(self, send: Send) -> None:
        self._last_sent = time.monotonic()
        while self.active:
            wait = self._last_sent + self.ping_interval - time.monotonic()
            if wait > 0:
                await anyio.sleep(wait)
                continue
            async with self._send_lock:  # the end of the stream takes it too: no ping after the end
                if self.active:
                    await self._send_with_timeout(send, {"type": "http.response.body", "body": PING, "more_body": True})

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the stream; see the class."""
        try:
            await super().__call__(scope, receive, send)
        except SendTimeoutError:
            log.warning("a client did not read for %s seconds: stream given up", self.send_timeout)
        finally:
            self._on_close()
