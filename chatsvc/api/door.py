"""The door: without a good API key there is nothing but the probes and the page (whose files hold no data).

What is not named as open is closed: a new route, a path nobody serves, any method. The path compared is the decoded
one that the router compares, so a second spelling of an open path is either that path or closed.

Pure ASGI, and it stands inside the request middleware: a refusal has its id and its log line, too.
"""

from __future__ import annotations

from collections.abc import Callable

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from chatsvc.api.errors import Forbidden, Unauthorized, error_response
from chatsvc.api.keys import Area, Key, KeySet
from chatsvc.api.middleware import info_of
from chatsvc.api.quota import Quotas

OPEN = frozenset({"/", "/health", "/ready"})
OPEN_BELOW = "/static/"
ANY_KEY = frozenset({"/openapi.json"})
_CHAT = ("/v1/", "/tokenize", "/detokenize")


def area_of(path: str) -> Area | None:
    """What a path belongs to; None: only a key that may do everything learns what is there."""
    if path.startswith(_CHAT):
        return "chat"
    if path == "/metrics":
        return "metrics"
    return "debug" if path.startswith("/debug/") else None


class Door:
    """See the module. ``keys`` gives those that count now."""

    def __init__(self, app: ASGIApp, keys: Callable[[], KeySet], quotas: Quotas) -> None:
        self.app = app
        self._keys = keys
        self._quotas = quotas

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        path = scope["path"]
        if path in OPEN or path.startswith(OPEN_BELOW):
            await self.app(scope, receive, send)
            return
        try:
            self._admit(scope, path)
        except (Unauthorized, Forbidden) as refusal:
            await error_response(refusal)(scope, receive, send)
            return
        await self.app(scope, receive, send)

    def _admit(self, scope: Scope, path: str) -> None:
        """Raises: Unauthorized, Forbidden."""
        presented = bearer(Headers(scope=scope))
        key = None if presented is None else self._keys().find(presented)
        if key is None:
            raise Unauthorized(presented=presented is not None)
        info = info_of(scope)
        info.fields["key"] = key.name
        info.tenant = key.tenant
        if path not in ANY_KEY and not _may(key, area_of(path)):
            raise Forbidden(path)
        if key.limits:
            info.ticket = self._quotas.ticket(key.id, key.limits)


def _may(key: Key, area: Area | None) -> bool:
    return key.unlimited if area is None else area in key.allow


def bearer(headers: Headers) -> bytes | None:
    """The key of the one ``Authorization: Bearer`` header, as its bytes; None when there is none.

    Two such headers are none: whoever stands between might have looked at the other one.
    """
    found = headers.getlist("authorization")
    if len(found) != 1:
        return None
    scheme, _, rest = found[0].partition(" ")
    key = rest.strip(" \t")
    return key.encode("latin-1") if scheme.lower() == "bearer" and key else None
