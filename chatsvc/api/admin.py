"""Models, probes, metrics and the block map."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from chatsvc.api.chat import check_model
from chatsvc.api.frames import dumps, event
from chatsvc.api.middleware import request_info
from chatsvc.api.services import Services
from chatsvc.api.sse import EventStream, closing

KV_SLICE = 500  # entries of the block map encoded without a pause


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


async def encode_snapshot(snapshot: dict[str, Any]) -> bytes:
    """The block map as JSON, with a pause every few hundred entries: a large pool has tens of thousands of blocks."""
    parts = [f'{{"block_size":{dumps(snapshot["block_size"])}']
    for name in ("blocks", "sequences"):
        rows = snapshot[name]
        slices = []
        for start in range(0, len(rows), KV_SLICE):
            slices.append(dumps(rows[start : start + KV_SLICE])[1:-1])
            await asyncio.sleep(0)
        parts.append(f',"{name}":[{",".join(slices)}]')
    return ("".join(parts) + "}").encode()


def routes(services: Services) -> list[Route]:
    """The routes of this module."""
    engine, settings = services.engine, services.settings

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
        async with closing(services.desk.kv_events(request_info(request).tenant)) as events:
            return Response(await encode_snapshot(await anext(events)), media_type="application/json")

    async def kv_stream(request: Request) -> Response:
        async def events() -> AsyncIterator[bytes]:
            async with closing(services.desk.kv_events(request_info(request).tenant)) as changes:
                async for change in changes:
                    yield event(change)

        return EventStream(events(), ping=settings.ping_interval, send_timeout=settings.send_timeout)

    return [
        Route("/v1/models", models, methods=["GET"]),
        Route("/v1/models/{id:path}", model, methods=["GET"]),
        Route("/health", health, methods=["GET"]),
        Route("/ready", ready, methods=["GET"]),
        Route("/metrics", metrics, methods=["GET"]),
        Route("/debug/kv", kv, methods=["GET"]),
        Route("/debug/kv/stream", kv_stream, methods=["GET"]),
    ]
