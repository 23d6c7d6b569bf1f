"""uvicorn, set up for this app."""

from __future__ import annotations

import uvicorn
from starlette.types import ASGIApp

KEEP_ALIVE = 75  # seconds; longer than the idle time of common proxies and pools (60), so that they close, not we


def server_config(app: ASGIApp, *, host: str, port: int, grace: int | None = None) -> uvicorn.Config:
    """The configuration of the HTTP server.

    An idle connection that the server closes while a pooling client writes its next request is a lost request: hence
    the long keep-alive. No WebSockets. Requests are logged by our own middleware.

    Args:
        grace: seconds that running responses get once the server was told to exit; None: no limit.
    """
    return uvicorn.Config(
        app,
        host=host,
        port=port,
        http="httptools",
        ws="none",
        lifespan="off",
        access_log=False,
        log_config=None,
        server_header=False,
        timeout_keep_alive=KEEP_ALIVE,
        timeout_graceful_shutdown=grace,
    )
