"""The one middleware: request ids, the last net for exceptions, one log line per request.

Pure ASGI. A middleware that wraps ``receive`` or runs the app in another task (Starlette's BaseHTTPMiddleware) hides
the client's disconnect, and then nothing stops a generation nobody reads.
"""

from __future__ import annotations

import asyncio
import json
import logging
import re
import time
import uuid
from dataclasses import dataclass, field
from typing import Any

from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from chatsvc.api.errors import Ending, error_response
from chatsvc.api.quota import Ticket

log = logging.getLogger("chatsvc.api")
access = logging.getLogger("chatsvc.access")

_REQUEST_ID = re.compile(r"[A-Za-z0-9._:\-]{1,128}")
_TRACEPARENT = re.compile(r"[0-9a-f]{2}-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}")
_KEY = "chatsvc.request"
_SEND = "chatsvc.send"
QUIET = frozenset({"/health", "/ready", "/metrics"})  # probes: logged only when they fail
# On every answer that does not say otherwise itself (the page has its own policy).
SECURITY_HEADERS = {
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "content-security-policy": "default-src 'none'; frame-ancestors 'none'",
    "cache-control": "no-store",
}


@dataclass(slots=True)
class RequestInfo:
    """What a request's log line says. Handlers add to ``fields``; never prompt text, never keys.

    Attributes:
        id: the caller's X-Request-Id when it is sane, else a new one.
        tenant: whose request it is ("" while there are no API keys).
        started: when it arrived, by the loop's clock.
        timeout: what its header X-Request-Timeout says.
        ticket: what it takes from its key's quotas; None: there are none.
        headers: further headers of the answer.
        trace: its header traceparent, if that is sane.
    """

    id: str
    tenant: str = ""
    started: float = 0.0
    timeout: str | None = None
    ticket: Ticket | None = None
    headers: dict[str, str] = field(default_factory=dict)
    trace: str = ""
    fields: dict[str, Any] = field(default_factory=dict)


def request_info(request: Request) -> RequestInfo:
    """The request's info, as the middleware made it."""
    return info_of(request.scope)


def info_of(scope: Scope) -> RequestInfo:
    """As :func:`request_info`, for those who have no request."""
    info: RequestInfo = scope[_KEY]
    return info


def body_send(scope: Scope) -> Send | None:
    """The middleware's own ``send``, for parts of a body once the response has begun: nobody inside looks at those."""
    return scope.get(_SEND)


class RequestMiddleware:
    """See the module."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        asked = headers.get("x-request-id", "")
        info = RequestInfo(asked if _REQUEST_ID.fullmatch(asked) else f"req_{uuid.uuid4().hex}")
        info.started = asyncio.get_running_loop().time()
        info.timeout = headers.get("x-request-timeout")
        trace = headers.get("traceparent", "")
        if _TRACEPARENT.fullmatch(trace):
            info.trace = trace
            info.fields["trace_id"] = trace.split("-")[1]
        scope[_KEY], scope[_SEND] = info, send
        started = time.perf_counter()
        status = 0

        async def send_with_id(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                sent = MutableHeaders(raw=message["headers"])
                sent["x-request-id"] = info.id
                sent.update(info.headers)
                for name, value in SECURITY_HEADERS.items():
                    sent.setdefault(name, value)
            await send(message)

        try:
            await self.app(scope, receive, send_with_id)
        except Exception as exc:
            info.fields["outcome"] = "error"
            log.exception("request %s failed", info.id)
            if status:
                raise  # too late for a body; the server closes the connection
            await error_response(exc)(scope, receive, send_with_id)
        except asyncio.CancelledError:  # the server ends, and this is its last task for the request
            info.fields["outcome"] = "cancelled"
            if not status:
                await error_response(Ending())(scope, receive, send_with_id)
        finally:
            self._log(scope, info, status, time.perf_counter() - started)

    @staticmethod
    def _log(scope: Scope, info: RequestInfo, status: int, seconds: float) -> None:
        if scope["path"] in QUIET and status == 200:
            return
        line = {
            "event": "request",
            "request_id": info.id,
            "method": scope["method"],
            "path": scope["path"],
            "status": status,
            "outcome": "ok" if status < 400 else "refused" if status < 500 else "error",
            "seconds": round(seconds, 4),
            **info.fields,
        }
        access.info("%s", json.dumps(line))
