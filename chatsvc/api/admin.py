"""Models, probes, metrics and the block map."""

from __future__ import annotations

from typing import Any

from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from chatsvc.api.chat import check_model
from chatsvc.api.kvfeed import KVFeed
from chatsvc.api.middleware import request_info
from chatsvc.api.services import Services
from chatsvc.api.sse import EventStream


def model_card(services: Services) -> dict[str, Any]:
    """OpenAI's model object, with the context length once it is known."""
    card: dict[str, Any] = {
        "id": services.model_name,
        "object": "model",
        "created": services.created,
        "owned_by": "chatsvc",
    }
    if services.engine.ready:
        card["max_model_len"] = services.engine.limit
    return card


def routes(services: Services) -> list[Route]:
    """The routes of this module."""
    engine, settings = services.engine, services.settings
    feed = KVFeed(engine, None if services.keys is None else services.desk.own_only)

    async def models(request: Request) -> Response:
        return JSONResponse({"object": "list", "data": [model_card(services)]})

    async def model(request: Request) -> Response:
        check_model(request.path_params["id"], services)
        return JSONResponse(model_card(services))

    async def health(request: Request) -> Response:
        """Live: the process answers and its engine is neither dead nor stuck."""
        return JSONResponse({"status": "ok"}) if engine.healthy else JSONResponse({"status": "failed"}, 503)

    async def ready(request: Request) -> Response:
        """Ready: false while loading, draining or stuck. A session store that is away is only told: chats go on."""
        store = {} if services.store is None else {"store": "ok" if services.store_answers() else "away"}
        if engine.ready and engine.healthy:
            return JSONResponse({"status": "ready", **store})
        return JSONResponse({"status": "not ready", **store}, 503, headers={"Retry-After": "2"})

    async def metrics(request: Request) -> Response:
        await engine.metrics.refresh()
        return Response(generate_latest(engine.metrics.registry), headers={"Content-Type": CONTENT_TYPE_LATEST})

    async def kv(request: Request) -> Response:
        return Response(await feed.snapshot(request_info(request).tenant), media_type="application/json")

    async def kv_stream(request: Request) -> Response:
        reader = await feed.join(request_info(request).tenant)
        ping, patience = settings.ping_interval, settings.send_timeout
        return EventStream(reader.frames(), ping=ping, send_timeout=patience, on_close=reader.leave)

    return [
        Route("/v1/models", models, methods=["GET"]),
        Route("/v1/models/{id:path}", model, methods=["GET"]),
        Route("/health", health, methods=["GET"]),
        Route("/ready", ready, methods=["GET"]),
        Route("/metrics", metrics, methods=["GET"]),
        Route("/debug/kv", kv, methods=["GET"]),
        Route("/debug/kv/stream", kv_stream, methods=["GET"]),
    ]
