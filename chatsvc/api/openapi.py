"""``/openapi.json``: made from the models that validate the requests."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel
from pydantic.json_schema import models_json_schema
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from chatsvc import __version__
from chatsvc.api.schema import ChatRequest, CompletionRequest, DetokenizeRequest, TokenizeRequest

REF = "#/components/schemas/{model}"


def document() -> dict[str, Any]:
    """The OpenAPI 3.1 description."""
    models: list[type[BaseModel]] = [ChatRequest, CompletionRequest, TokenizeRequest, DetokenizeRequest]
    _, schema = models_json_schema([(m, "validation") for m in models], ref_template=REF)
    return {
        "openapi": "3.1.0",
        "info": {"title": "chatsvc", "version": __version__},
        "paths": {},
        "components": {"schemas": schema["$defs"]},
    }


def route() -> Route:
    """``GET /openapi.json``."""
    body = document()

    async def openapi(request: Request) -> Response:
        return JSONResponse(body)

    return Route("/openapi.json", openapi, methods=["GET"])
