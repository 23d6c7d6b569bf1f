"""``/openapi.json``: made from the models that validate the requests and describe the answers."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from pydantic import BaseModel
from pydantic.json_schema import models_json_schema
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from chatsvc import __version__
from chatsvc.api import answers_schema as answers
from chatsvc.api import schema
from chatsvc.api.openapi_keys import with_keys

REF = "#/components/schemas/{model}"
PLAIN = {400: "What is wrong, and in which field", 404: "No such model or path", 413: "The body is too large"}
GENERATING = PLAIN | {
    408: "The request came too slowly, or the answer was not complete in time",
    415: "The body is not JSON",
    429: "The queue is full; Retry-After says when to come back",
    500: "The generation failed",
    503: "Loading, draining or stuck; Retry-After says when to come back",
}
SILENT = "Still loading, or the engine does not answer; Retry-After says when to come back"

DEADLINE = {
    "name": "X-Request-Timeout",
    "in": "header",
    "required": False,
    "description": "Seconds (fractions are allowed) after which an answer that is not complete is ended",
    "schema": {"type": "integer", "minimum": 1, "maximum": 9999999},
}


@dataclass(frozen=True, slots=True)
class Operation:
    """One method of one path.

    Attributes:
        answer: model of the 200 body; None: not JSON, see ``media``.
        events: model of a stream's events.
        errors: status -> words; bodies are always :class:`~chatsvc.api.answers_schema.ErrorAnswer`.
        status: status -> words, for answers that are no errors in OpenAI's shape.
        success: the status of success.
        empty: when 204 is the answer, in words.
        query: optional query parameters -> their schema.
    """

    method: str
    path: str
    summary: str
    body: type[BaseModel] | None = None
    answer: type[BaseModel] | None = None
    events: type[BaseModel] | None = None
    media: str = "application/json"
    errors: Mapping[int, str] | None = None
    status: Mapping[int, str] | None = None
    success: int = 200
    empty: str | None = None
    query: Mapping[str, Any] = field(default_factory=dict)


OPERATIONS = (
    Operation(
        "post",
        "/v1/chat/completions",
        "Answer a conversation",
        schema.ChatRequest,
        answers.ChatCompletion,
        answers.ChatChunk,
        errors=GENERATING,
    ),
    Operation(
        "post",
        "/v1/chat/completions/{id}/cancel",
        "End a running answer; its reader gets what there is",
        answer=answers.Cancelled,
        errors={404: "Nothing with this id runs"},
    ),
    Operation(
        "post",
        "/v1/completions",
        "Go on with one or several prompts",
        schema.CompletionRequest,
        answers.PlainCompletion,
        answers.PlainCompletion,
        errors=GENERATING,
    ),
    Operation("get", "/v1/models", "The served models", answer=answers.ModelList),
    Operation("get", "/v1/models/{id}", "One model", answer=answers.ModelCard, errors={404: "No such model"}),
    Operation(
        "post", "/tokenize", "Token ids of a prompt or a chat", schema.TokenizeRequest, answers.Tokens, errors=PLAIN
    ),
    Operation("post", "/detokenize", "Text of token ids", schema.DetokenizeRequest, answers.Text, errors=PLAIN),
    Operation("get", "/health", "Live", answer=answers.Status, status={503: "The engine is dead or stuck"}),
    Operation("get", "/ready", "Ready", answer=answers.Status, status={503: "Loading, draining or stuck"}),
    Operation("get", "/metrics", "Prometheus metrics", media="text/plain"),
    Operation("get", "/debug/kv", "The block map", answer=answers.KVSnapshot, errors={503: SILENT}),
    Operation(
        "get",
        "/debug/kv/stream",
        "Changes of the block map, as server-sent events",
        media="text/event-stream",
        errors={429: "Sixteen read it already", 503: SILENT},
    ),
    Operation("get", "/openapi.json", "This document"),
)


def document(operations: Sequence[Operation] = OPERATIONS) -> dict[str, Any]:
    """The OpenAPI 3.2 description."""
    models: dict[type[BaseModel], None] = {answers.ErrorAnswer: None}
    for operation in operations:
        models |= {m: None for m in (operation.body, operation.answer, operation.events) if m is not None}
    _, components = models_json_schema([(m, "validation") for m in models], ref_template=REF)
    paths: dict[str, dict[str, Any]] = {}
    for operation in operations:
        paths.setdefault(operation.path, {})[operation.method] = _operation(operation)
    return {
        "openapi": "3.2.0",
        "info": {"title": "chatsvc", "version": __version__},
        "paths": paths,
        "components": {"schemas": components["$defs"]},
    }


def _operation(operation: Operation) -> dict[str, Any]:
    content: dict[str, Any] = {}
    if operation.answer is not None or operation.events is None:
        content[operation.media] = {"schema": _ref(operation.answer) if operation.answer else {}}
    if operation.events is not None:
        content["text/event-stream"] = {"itemSchema": _events(operation.events)}
    responses: dict[str, Any] = {str(operation.success): {"description": "Done", "content": content}}
    if operation.empty is not None:
        responses["204"] = {"description": operation.empty}
    for status, words in (operation.status or {}).items():
        responses[str(status)] = {"description": words, "content": content}
    error = {"application/json": {"schema": _ref(answers.ErrorAnswer)}}
    for status, words in (operation.errors or {}).items():
        responses[str(status)] = {"description": words, "content": error}
    out: dict[str, Any] = {"summary": operation.summary, "responses": responses}
    if operation.body is not None:
        out["requestBody"] = {"required": True, "content": {"application/json": {"schema": _ref(operation.body)}}}
    names = re.findall(r"{(\w+)}", operation.path)
    parameters: list[dict[str, Any]] = [
        {"name": n, "in": "path", "required": True, "schema": {"type": "string", "pattern": "^[A-Za-z0-9._:-]+$"}}
        for n in names
    ]
    parameters += [{"name": n, "in": "query", "required": False, "schema": s} for n, s in operation.query.items()]
    if 408 in (operation.errors or {}):
        parameters.append(DEADLINE)
    if parameters:
        out["parameters"] = parameters
    return out


def _events(model: type[BaseModel]) -> dict[str, Any]:
    """A server-sent event, as OpenAPI 3.2 describes it."""
    message = {"contentMediaType": "application/json", "contentSchema": _ref(model)}
    failure = {"contentMediaType": "application/json", "contentSchema": _ref(answers.ErrorAnswer)}
    return {
        "type": "object",
        "required": ["data"],
        "properties": {
            "event": {"type": "string", "description": "error, when the data is an error object; then the stream ends"},
            "id": {"type": "string"},
            "data": {"type": "string", "anyOf": [message, failure, {"const": "[DONE]"}]},
        },
    }


def _ref(model: type[BaseModel]) -> dict[str, str]:
    return {"$ref": REF.format(model=model.__name__)}


def route(operations: Sequence[Operation] = OPERATIONS, *, keys: bool = False) -> Route:
    """``GET /openapi.json``. ``keys``: of a server that has API keys."""
    body = with_keys(document(operations)) if keys else document(operations)

    async def openapi(request: Request) -> Response:
        return JSONResponse(body)

    return Route("/openapi.json", openapi, methods=["GET"])
