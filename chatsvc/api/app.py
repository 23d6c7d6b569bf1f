"""The HTTP application. Built from :class:`Services`; starting and stopping the engine is its builder's business."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import FileResponse, Response
from starlette.routing import BaseRoute, Mount, Route
from starlette.staticfiles import StaticFiles

from chatsvc.api import admin, chat, completions, openapi, responses, responses_stored, sessions, tokens
from chatsvc.api.door import Door
from chatsvc.api.errors import on_exception, on_http_exception
from chatsvc.api.foreign import ForeignPages
from chatsvc.api.middleware import RequestMiddleware, request_info
from chatsvc.api.openapi_responses import RESPONSE_OPERATIONS
from chatsvc.api.openapi_sessions import SESSION_OPERATIONS
from chatsvc.api.services import ApiSettings, Services
from chatsvc.api.turns import Turns
from chatsvc.errors import ChatsvcError

STATIC = Path(__file__).parent / "static"

PAGE_HEADERS = {
    "Cache-Control": "no-cache",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    # The page has no inline script or style and talks to nobody but us.
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
}


# What a page of another origin may read of an answer.
EXPOSED_HEADERS = (
    "x-request-id",
    "retry-after",
    *(f"x-ratelimit-{what}-{of}" for of in ("requests", "tokens") for what in ("limit", "remaining", "reset")),
)


class _PageFiles(StaticFiles):
    """Static files with the page's headers."""

    def file_response(self, *args: Any, **kwargs: Any) -> Response:
        response = super().file_response(*args, **kwargs)
        response.headers.update(PAGE_HEADERS)
        return response


def create_app(services: Services, *, turns: Turns | None = None, extra_routes: Sequence[BaseRoute] = ()) -> Starlette:
    """The ASGI app. All its state is in the arguments: several apps in one process do not share anything.

    Args:
        turns: the running turns of sessions. Who builds the app closes them before the store; without a store there
            are neither sessions nor turns.
        extra_routes: matched before the chat page.
    """
    _ = services.longest_token  # looks at the whole vocabulary: now, and not inside the first request
    operations = [*openapi.OPERATIONS, *RESPONSE_OPERATIONS, *(SESSION_OPERATIONS if services.store else ())]
    if turns is None and services.store is not None:
        turns = Turns(services, services.store)
    routes: list[BaseRoute] = [
        *chat.routes(services),
        *completions.routes(services),
        *tokens.routes(services),
        *admin.routes(services),
        openapi.route(operations, keys=services.keys is not None),
        *sessions.routes(services, turns),
        *responses.routes(services, turns),
        *responses_stored.routes(services, turns),
        *extra_routes,
        *page_routes(),
    ]
    app = Starlette(
        routes=routes,
        middleware=middleware(services),
        exception_handlers={
            ChatsvcError: on_exception,
            HTTPException: on_http_exception,
            ClientDisconnect: on_client_disconnect,
        },
    )
    app.router.redirect_slashes = False  # a path is right or it is 404; no second spelling to guard
    return app


def middleware(services: Services) -> list[Middleware]:
    """From the outside in. All are pure ASGI, so that a client's disconnect is seen through them."""
    out: list[Middleware] = []
    origins = services.settings.cors_origins
    if origins:
        # Before the door: a browser asks without a key whether it may send one. And before everything else, so that a
        # page may read every refusal.
        out.append(
            Middleware(
                CORSMiddleware,
                allow_origins=origins,
                allow_methods=["GET", "POST", "PATCH", "DELETE"],
                allow_headers=["*"],
                expose_headers=EXPOSED_HEADERS,
                max_age=3600,
            )
        )
    out += [Middleware(RequestMiddleware), Middleware(ForeignPages, origins=origins)]
    if services.keys is not None:
        out.append(Middleware(Door, keys=services.keys, quotas=services.quotas))
    return out


def page_routes() -> list[BaseRoute]:
    """The chat page and its files, where they are installed."""
    index = STATIC / "index.html"
    if not index.is_file():
        return []

    async def page(request: Request) -> Response:
        return FileResponse(index, headers=PAGE_HEADERS)

    return [Route("/", page, methods=["GET"]), Mount("/static", _PageFiles(directory=STATIC))]


async def on_client_disconnect(request: Request, exc: Exception) -> Response:
    """The client left while it was still sending: nobody reads this answer."""
    request_info(request).fields["outcome"] = "client_gone"
    return Response(status_code=499)


__all__ = ["ApiSettings", "Services", "create_app"]
