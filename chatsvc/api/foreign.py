"""Requests that a browser sends for somebody else's page.

A server on one's own machine often has no keys, and a browser sends any page's simple requests anywhere, without a
preflight: a POST that names no content type would start an answer, or end one. The page could not read what comes
back, but it would be done. Such requests are refused unless ``--cors-origins`` names the page.

Browsers say for whom they ask: Sec-Fetch-Site, which no page can forge, and which is believed where it is sent,
whatever a proxy did to Host. It is left out over plain http to another machine than the browser's own; there Origin has
to be the host that was asked. Whoever is no browser sends neither and is not concerned.

Not told apart: a page whose name was made to point at us (DNS rebinding) looks like one that a proxy hands on with its
own name. Keys protect from that.
"""

from __future__ import annotations

from collections.abc import Sequence
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from chatsvc.api.errors import ForeignPage, error_response

SAFE = frozenset({"GET", "HEAD", "OPTIONS"})
OWN = frozenset({"same-origin", "none"})  # none: the user's own doing. same-site may be another port: foreign
PORTS = {"http": 80, "https": 443}


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
        origin, site = headers.get("origin"), headers.get("sec-fetch-site")
        if "*" in self._origins or origin in self._origins:
            return False
        if site:
            return site not in OWN
        return origin is not None and not same_host(origin, headers.get("host", ""))


def same_host(origin: str, host: str) -> bool:
    """Whether an Origin is the host, and the port, of a Host header. The origin's scheme says the port that is left
    out; Host may have it without that scheme, as behind a proxy that ends TLS."""
    try:
        own, asked = urlsplit(origin), urlsplit(f"//{host}")
        usual = PORTS.get(own.scheme)
        return bool(own.hostname) and (own.hostname, own.port or usual) == (asked.hostname, asked.port or usual)
    except ValueError:  # no port, no address
        return False
