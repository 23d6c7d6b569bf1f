"""Requests that a browser sends for somebody else's page.

A server on one's own machine often has no keys, and a browser sends any page's simple requests anywhere, without a
preflight: a POST that names no content type would start an answer, or end one. The page could not read what comes
back, but it would be done. Browsers say for whom they ask (Sec-Fetch-Site), so such requests are refused unless
``--cors-origins`` names the page. Whoever is no browser does not send the header and is not concerned.
"""

from __future__ import annotations

from collections.abc import Sequence

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from chatsvc.api.errors import ForeignPage, error_response

SAFE = frozenset({"GET", "HEAD", "OPTIONS"})
FOREIGN = frozenset({"cross-site", "same-site"})  # same-site: another port of the same machine, say


class ForeignPages:
    """Pure ASGI. ``origins``: whose pages may call; ``*`` is all."""

    def __init__(self, app: ASGIApp, origins: Sequence[str]) -> None:
        self.app = app
        self._origins = frozenset(origins)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["method"] not in SAFE and self._foreign(Headers(scope=scope)):
            await error_response(ForeignPage())(scope, receive, send)
            return
        await self.app(scope, receive, send)

    def _foreign(self, headers: Headers) -> bool:
        if headers.get("sec-fetch-site") not in FOREIGN or "*" in self._origins:
            return False
        return headers.get("origin") not in self._origins
