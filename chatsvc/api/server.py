"""uvicorn, set up for this app."""

from __future__ import annotations

import asyncio
from functools import partial
from typing import cast

import uvicorn
from starlette.types import ASGIApp

from chatsvc.api.protocol import HEAD_TIMEOUT, BoundedProtocol

KEEP_ALIVE = 75  # seconds; longer than the idle time of common proxies and pools (60), so that they close, not we


def server_config(
    app: ASGIApp, *, host: str, port: int, grace: int | None = None, head_timeout: float = HEAD_TIMEOUT
) -> uvicorn.Config:
    """The configuration of the HTTP server.

    An idle connection that the server closes while a pooling client writes its next request is a lost request: hence
    the long keep-alive. No WebSockets. Requests are logged by our own middleware.

    Args:
        grace: seconds that running responses get once the server was told to exit; None: no limit.
        head_timeout: seconds for the request line and the headers of one request.
    """
    protocol = cast(type[asyncio.Protocol], partial(BoundedProtocol, head_timeout=head_timeout))
    return uvicorn.Config(
        app,
        host=host,
        port=port,
        http=protocol,
        ws="none",
        lifespan="off",
        access_log=False,
        log_config=None,
        server_header=False,
        timeout_keep_alive=KEEP_ALIVE,
        timeout_graceful_shutdown=grace,
    )
