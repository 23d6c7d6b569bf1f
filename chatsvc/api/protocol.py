"""uvicorn's HTTP/1.1 connection, bounded in what a client may send before its request begins.

What it adds: a head (request line and headers) has at most ``HEAD_BYTES`` and at most ``head_timeout`` seconds; a
connection that says nothing at all is closed after the keep-alive time, and so is one whose body nobody waits for any
more; what is refused here is refused in the API's error shape. Bodies are bounded where they are read, in
:mod:`chatsvc.api.body`.
"""

from __future__ import annotations

import asyncio
from http import HTTPStatus
from typing import Any

from starlette.responses import Response
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from chatsvc.api.errors import HeadTooLarge, RequestTimeout, error_response, seconds
from chatsvc.errors import InvalidRequest, RequestError

HEAD_BYTES = 64 * 1024
HEAD_TIMEOUT = 30.0  # seconds
LINGER = 2.0  # closing with unread bytes in the socket would make the kernel send a reset that eats the answer


class BoundedProtocol(HttpToolsProtocol):
    """See the module. ``head_timeout``: seconds from a head's first byte to its end."""

    def __init__(self, *args: Any, head_timeout: float = HEAD_TIMEOUT, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._head_timeout = head_timeout
        self._head_timer: asyncio.TimerHandle | None = None
        self._head_bytes = 0
        self._in_head = True
        self._refused = False

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._wait_for_more()

    def connection_lost(self, exc: Exception | None) -> None:
        self._head_done()
        self._unset_keepalive_if_required()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._refused:
            return
        if self._in_head:
            self._head_bytes += len(data)
        super().data_received(data)
        if self._refused or self.transport.is_closing():
            return
        if self._in_head and self._head_bytes > HEAD_BYTES:
            self._refuse(HeadTooLarge(HEAD_BYTES))
        elif not self._in_head and self.cycle.response_complete and self.timeout_keep_alive_task is None:
            self._wait_for_more()

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._head_timer = self._head_timer or self.loop.call_later(self._head_timeout, self._head_late)

    def on_headers_complete(self) -> None:
        self._head_done()
        self._in_head = False
        if self.url.startswith(b"//"):  # a path, though it looks like an authority without a scheme
            self.url = b"http://path" + self.url
        size = len(self.url) + sum(len(name) + len(value) + 4 for name, value in self.headers)
        wrong: RequestError | None = None
        if size > HEAD_BYTES:
            wrong = HeadTooLarge(HEAD_BYTES)
            self.url = b"/"  # the parser of paths has limits of its own
        elif self.parser.get_http_version() == "1.1" and all(name != b"host" for name, _ in self.headers):
            wrong = InvalidRequest("A request of HTTP/1.1 needs the header Host", code="invalid_http")
        if wrong is None:
            super().on_headers_complete()
            return
        app, self.app = self.app, error_response(wrong)  # type: ignore[assignment]
        try:
            super().on_headers_complete()  # in its turn, should answers to earlier requests still be under way
        finally:
            self.app = app

    def on_message_complete(self) -> None:
        self._in_head, self._head_bytes = True, 0
        super().on_message_complete()

    def send_400_response(self, msg: str) -> None:
        self._refuse(InvalidRequest("This is not a valid HTTP request", code="invalid_http"))

    def _wait_for_more(self) -> None:
        self._unset_keepalive_if_required()
        self.timeout_keep_alive_task = self.loop.call_later(self.timeout_keep_alive, self.timeout_keep_alive_handler)

    def _head_late(self) -> None:
        self._head_timer = None
        if not self.transport.is_closing():
            self._refuse(RequestTimeout(f"The headers did not arrive within {seconds(self._head_timeout)}"))

    def _head_done(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _refuse(self, error: RequestError) -> None:
        """Say why and close; without a word while an answer is under way that this would run into."""
        self._refused = True
        self._head_done()
        cycle = self.cycle
        if cycle is not None and not cycle.response_complete:
            if cycle.response_started or not cycle.more_body or self.pipeline:
                self.transport.close()
                return
            # It is this request's own body that is broken, and nobody has answered it yet: its handler is told that the
            # client has gone, and what it still says is not written.
            cycle.disconnected = True
            cycle.message_event.set()
        response: Response = error_response(error)
        response.headers["connection"] = "close"
        lines = [f"HTTP/1.1 {response.status_code} {HTTPStatus(response.status_code).phrase}".encode()]
        lines += [name + b": " + value for name, value in (*self.server_state.default_headers, *response.raw_headers)]
        self.transport.write(b"\r\n".join([*lines, b"", bytes(response.body)]))
        self.transport.write_eof()
        self.loop.call_later(LINGER, self.transport.close)
