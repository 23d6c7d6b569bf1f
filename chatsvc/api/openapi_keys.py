"""What API keys add to ``/openapi.json``: true of this server only when it has a key file."""

from __future__ import annotations

from typing import Any

from chatsvc.api.door import OPEN, area_of

SCHEME = "key"
ERROR = {"application/json": {"schema": {"$ref": "#/components/schemas/ErrorAnswer"}}}
UNAUTHORIZED = {
    "description": "No API key, or one that is not accepted",
    "headers": {"WWW-Authenticate": {"schema": {"type": "string"}}},
    "content": ERROR,
}
FORBIDDEN = {"description": "A good API key that may not do this", "content": ERROR}
LIMITS = ("limit", "remaining", "reset")


def with_keys(document: dict[str, Any]) -> dict[str, Any]:
    """The description of a server behind keys, made from that of one without."""
    paths = {
        path: {method: _behind(path, operation) for method, operation in item.items()}
        for path, item in document["paths"].items()
    }
    bearer = {"type": "http", "scheme": "bearer", "description": "An API key of this server"}
    components = {**document["components"], "securitySchemes": {SCHEME: bearer}}
    return {**document, "security": [{SCHEME: []}], "paths": paths, "components": components}


def _behind(path: str, operation: dict[str, Any]) -> dict[str, Any]:
    if path in OPEN:
        return {**operation, "security": []}
    responses = {**operation["responses"], "401": UNAUTHORIZED}
    if area_of(path) is not None:
        responses["403"] = FORBIDDEN
    if "429" in responses:
        description = "The queue is full, or the key's quota is used; Retry-After says when to come back"
        responses["429"] = {**responses["429"], "description": description, "headers": _quota_headers()}
    return {**operation, "responses": responses}


def _quota_headers() -> dict[str, Any]:
    names = ["retry-after", *(f"x-ratelimit-{what}-{of}" for of in ("requests", "tokens") for what in LIMITS)]
    return {name: {"required": False, "schema": {"type": "string"}} for name in names}
