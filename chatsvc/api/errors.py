"""Every error leaves the service in OpenAI's shape: ``{"error": {"message", "type", "param", "code"}}``."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from typing import Any

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Match, Route

from chatsvc.errors import ChatsvcError, EngineDead, Overloaded, RequestError, StoreError

log = logging.getLogger("chatsvc.api")

RETRY_AFTER_UNAVAILABLE = 5  # seconds

_HTTP_MESSAGES = {
    404: "There is nothing at this path: {method} {path}",
    405: "The method {method} is not allowed for {path}",
}
_CODES = {
    404: "not_found",
    405: "method_not_allowed",
    408: "request_timeout",
    409: "conflict",
    415: "unsupported_media_type",
}


class Unauthorized(RequestError):
    """401. ``presented``: there was a key, but it is none of ours."""

    status = 401

    def __init__(self, *, presented: bool) -> None:
        message = (
            "This API key is not accepted"
            if presented
            else "An API key is needed: send the header Authorization: Bearer KEY"
        )
        super().__init__(message, code="invalid_api_key")
        self.headers = {"WWW-Authenticate": 'Bearer realm="chatsvc"' + (', error="invalid_token"' * presented)}


class Forbidden(RequestError):
    """403: a good key, but not for this."""

    status = 403

    def __init__(self, path: str) -> None:
        super().__init__(f"This API key may not use {path}", code="permission_denied")


class ForeignPage(RequestError):
    """403: a browser asks for a page of another origin."""

    status = 403

    def __init__(self) -> None:
        super().__init__(
            "This comes from a page of another origin; --cors-origins has to name it", code="permission_denied"
        )


class PayloadTooLarge(RequestError):
    """413. ``close`` asks for the connection to be closed: the rest of the body was not read."""

    status = 413

    def __init__(self, message: str, *, close: bool = False) -> None:
        super().__init__(message, code="request_too_large")
        self.close = close


def seconds(number: float) -> str:
    """``1 second``, ``2.5 seconds``."""
    return f"{number:g} second" + "s" * (number != 1)


class RequestTimeout(RequestError):
    """408: the request did not arrive in time. The rest of it is not read."""

    status = 408
    close = True


class DeadlineExceeded(RequestError):
    """408: the answer was not complete in the time that the caller or the server gave it."""

    status = 408
    headers: Mapping[str, str] = {"x-should-retry": "false"}  # OpenAI's clients would ask again, and wait as long again

    def __init__(self, message: str) -> None:
        super().__init__(message, code="request_timeout")


class HeadTooLarge(RequestError):
    """431."""

    status = 431
    close = True

    def __init__(self, limit: int) -> None:
        super().__init__(f"The request line and the headers are larger than {limit} bytes", code="headers_too_large")


class Ending(Overloaded):
    """503: the server is being stopped, and this request was not complete."""

    close = True

    def __init__(self) -> None:
        super().__init__("The server is shutting down", retry_after=RETRY_AFTER_UNAVAILABLE, status=503)


class UnsupportedMediaType(RequestError):
    """415."""

    status = 415


def error_body(message: str, kind: str, param: str | None = None, code: str | None = None) -> dict[str, Any]:
    """OpenAI's error object."""
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def describe(exc: Exception) -> tuple[int, dict[str, str], dict[str, Any]]:
    """HTTP status, extra headers and body of an exception. What is not ours says nothing about the inside."""
    status, headers, body = _describe(exc)
    headers.update(getattr(exc, "headers", {}))
    if getattr(exc, "close", False):
        headers["Connection"] = "close"
    return status, headers, body


def _describe(exc: Exception) -> tuple[int, dict[str, str], dict[str, Any]]:
    if isinstance(exc, RequestError):
        code = exc.code or _CODES.get(exc.status)
        return exc.status, {}, error_body(exc.message, "invalid_request_error", exc.param, code)
    if isinstance(exc, Overloaded):
        kind = "rate_limit_error" if exc.status == 429 else "server_error"
        code = "rate_limit_exceeded" if exc.status == 429 else "unavailable"
        return exc.status, {"Retry-After": str(exc.retry_after)}, error_body(exc.message, kind, None, code)
    if isinstance(exc, (EngineDead, StoreError)):
        message = str(exc) or "The service cannot answer at the moment"
        headers = {"Retry-After": str(RETRY_AFTER_UNAVAILABLE)}
        return 503, headers, error_body(message, "server_error", None, "unavailable")
    if isinstance(exc, ChatsvcError):
        return 500, {}, error_body(str(exc) or "The generation failed", "server_error", None, "engine_error")
    return 500, {}, error_body("The server had an internal error", "server_error", None, "internal_error")


def error_response(exc: Exception) -> Response:
    """The response for an exception."""
    status, headers, body = describe(exc)
    return Response(json.dumps(body), status, headers, media_type="application/json")


async def on_exception(request: Request, exc: Exception) -> Response:
    """Starlette's exception handler for :class:`ChatsvcError`."""
    return error_response(exc)


async def on_http_exception(request: Request, exc: Exception) -> Response:
    """Starlette's own 404 and 405 (and those of its static files) in our shape."""
    assert isinstance(exc, HTTPException)
    template = _HTTP_MESSAGES.get(exc.status_code)
    message = template.format(method=request.method, path=request.scope["path"]) if template else exc.detail
    body = error_body(message, "invalid_request_error", None, _CODES.get(exc.status_code))
    headers = dict(exc.headers or {})
    if exc.status_code == 405:
        headers["Allow"] = ", ".join(sorted(_methods(request))) or headers.get("Allow", "")
    return Response(json.dumps(body), exc.status_code, headers, media_type="application/json")


def _methods(request: Request) -> set[str]:
    """The methods of a path: each has a route of its own, and Starlette names those of the first one only."""
    found: set[str] = set()
    for route in request.app.routes:
        if isinstance(route, Route) and route.matches(request.scope)[0] is not Match.NONE:
            found |= route.methods or set()
    return found
