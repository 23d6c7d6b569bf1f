"""From bytes to a validated model: size, content type, JSON, fields. Every refusal names what is wrong."""

from __future__ import annotations

import asyncio
from typing import TypeVar, get_args

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails, from_json
from starlette.requests import ClientDisconnect, Request

from chatsvc.api.errors import Ending, PayloadTooLarge, RequestTimeout, UnsupportedMediaType, seconds
from chatsvc.api.services import ApiSettings, Services
from chatsvc.errors import ContextLengthExceeded, InvalidRequest

M = TypeVar("M", bound=BaseModel)

VALUES = 20_000
BEGINNING = 32 * 1024  # bytes
VALUES_PER_TOKEN = 8  # of a text that is all punctuation
LONG_FIELDS = ("messages", "prompt", "tokens", "input", "content")  # one of them holds nearly all of a long body
DRAIN_BYTES = 64 * 1024 * 1024
DRAIN_SECONDS = 5.0


async def read_model(request: Request, services: Services, model: type[M]) -> M:
    """Read the body and validate it as ``model``; long bodies are parsed in a thread.

    Raises:
        InvalidRequest: bad JSON, or a field is wrong (``param`` names it).
        PayloadTooLarge, UnsupportedMediaType, RequestTimeout, Ending: as they say.
        ClientDisconnect: the client left before it had sent everything.
    """
    check_content_type(request)
    raw = await read_body(request, services)
    check_values(raw, services.engine.limit, next((f for f in LONG_FIELDS if f in model.model_fields), None))
    return await services.offload(len(raw), parse, raw, model)


def check_content_type(request: Request) -> None:
    """JSON only. A missing content type counts as JSON."""
    kind = request.headers.get("content-type")
    if kind is not None:
        media = kind.partition(";")[0].strip().lower()
        if media != "application/json" and not (media.startswith("application/") and media.endswith("+json")):
            raise UnsupportedMediaType(f"The content type has to be application/json, not {media or 'empty'}")
    coding = request.headers.get("content-encoding", "identity").strip().lower()
    if coding != "identity":
        raise UnsupportedMediaType(f"The content encoding {coding} is not supported")


def check_values(raw: bytes, limit: int, field: str | None) -> None:
    """Bound the number of JSON values: the parser makes an object of each while nothing else in the process runs.

    Counts commas and opening brackets, also those inside strings (telling them apart takes longer than parsing). The
    bound is far above what any request needs whose prompt fits into ``limit`` tokens. ``field``: what is named as too
    long.

    Raises: ContextLengthExceeded; InvalidRequest when the beginning shows that it is no JSON at all.
    """
    most = VALUES + VALUES_PER_TOKEN * limit
    if len(raw) > most and raw.count(b",") + raw.count(b"{") + raw.count(b"[") > most:
        check_beginning(raw)
        raise ContextLengthExceeded(
            f"This model's maximum context length is {limit} tokens; a body with more than {most} commas and brackets"
            " holds more than that. Please shorten the prompt.",
            param=field,
        )


def check_beginning(raw: bytes) -> None:
    """Raises: InvalidRequest when the first part of a long body cannot be the beginning of valid JSON."""
    start = raw[:BEGINNING]
    while start and start[-1] >= 0x80:  # not in the middle of a character
        start = start[:-1]
    try:
        from_json(start, allow_partial=True)
    except ValueError as exc:
        if not str(exc).startswith("EOF"):  # a long string at the top
            raise InvalidRequest(f"The body is not valid JSON: {exc}") from None


async def read_body(request: Request, services: Services) -> bytes:
    """The whole body: its size, the silence between its parts and the time for all of it are bounded.

    A body that is too large is read on for a while and thrown away, so that the client sees the answer and can keep
    the connection; closing with unread bytes in the socket would make the kernel send a reset that eats the answer.

    Raises: PayloadTooLarge, RequestTimeout, ClientDisconnect; Ending when the server stops meanwhile.
    """
    settings = services.settings
    limit = settings.max_body_bytes
    message = f"The body is larger than the limit of {limit} bytes"
    length = request.headers.get("content-length", "")
    if length.isdecimal() and int(length) > limit:
        if "100-continue" in request.headers.get("expect", "").lower() or int(length) > DRAIN_BYTES:
            raise PayloadTooLarge(message, close=True)
        raise PayloadTooLarge(message, close=not await _drain(request))
    parts: list[bytes] = []
    size = 0
    more = True
    loop = asyncio.get_running_loop()
    end = loop.time() + settings.body_timeout
    while more:
        left = end - loop.time()
        try:
            event = await services.uploads.part(request.receive, min(settings.body_idle_timeout, left))
        except TimeoutError:
            if services.uploads.closing:
                raise Ending from None
            raise _late(settings, total=left < settings.body_idle_timeout) from None
        if event["type"] == "http.disconnect":
            raise ClientDisconnect
        part, more = event.get("body", b""), event.get("more_body", False)
        size += len(part)
        if size > limit:
            raise PayloadTooLarge(message, close=more and not await _drain(request))
        parts.append(part)
    return b"".join(parts)


def _late(settings: ApiSettings, *, total: bool) -> RequestTimeout:
    if total:
        return RequestTimeout(f"The body did not arrive within {seconds(settings.body_timeout)}")
    return RequestTimeout(f"Nothing of the body arrived for {seconds(settings.body_idle_timeout)}")


async def _drain(request: Request) -> bool:
    """Read and forget the rest of the body; True when it came to its end within the bounds."""
    size = 0
    try:
        async with asyncio.timeout(DRAIN_SECONDS):
            while True:
                message = await request.receive()
                size += len(message.get("body", b""))
                if message["type"] == "http.disconnect" or size > DRAIN_BYTES:
                    return False
                if not message.get("more_body", False):
                    return True
    except TimeoutError:
        return False


def parse(raw: bytes, model: type[M]) -> M:
    """Validate JSON as ``model``.

    The parser (jiter, inside pydantic) bounds the depth, refuses lone surrogates and numbers of thousands of digits.
    NaN and Infinity pass it, so that the field they stand in can be named; no field allows them.
    """
    try:
        return model.model_validate_json(raw)
    except ValidationError as exc:
        raise invalid(exc, model) from None


def invalid(exc: ValidationError, model: type[BaseModel]) -> InvalidRequest:
    """The first error, in words, with the field's path (``messages.0.content``)."""
    errors = exc.errors(include_url=False, include_input=False)
    first = errors[0]
    if first["type"] == "json_invalid":
        return InvalidRequest(f"The body is not valid JSON: {first.get('ctx', {}).get('error', 'unknown error')}")
    names = _field_names(model)
    paths = [_path(e, names) for e in errors]
    if not paths[0]:
        return InvalidRequest("The body has to be a JSON object")
    # A union reports errors for each of its members: the one that got deepest is the one that was meant.
    path = max((p for p in paths if p.startswith(paths[0])), key=len)
    words = dict.fromkeys(
        "This field is required" if e["type"] == "missing" else e["msg"]
        for e, p in zip(errors, paths, strict=True)
        if p == path
    )
    return InvalidRequest(f"{path}: {' or '.join(words)}", param=path.rstrip(".0123456789"))


def _path(error: ErrorDetails, names: frozenset[str]) -> str:
    """The location without pydantic's own marks (names of union members, ``[key]``) and without caller's keys, but for
    those of ``metadata``, cut to the length that a key may have."""
    parts: list[str] = []
    for part in error["loc"]:
        if isinstance(part, int) or part in names:
            parts.append(str(part))
        elif parts == ["metadata"]:
            parts.append(part[:64])
    return ".".join(parts)


def _field_names(model: type[BaseModel]) -> frozenset[str]:
    names: set[str] = set()
    todo: list[object] = [model]
    seen: set[int] = set()
    while todo:
        item = todo.pop()
        if id(item) in seen:
            continue
        seen.add(id(item))
        if isinstance(item, type) and issubclass(item, BaseModel):
            names.update(item.model_fields)
            todo += [f.annotation for f in item.model_fields.values()]
        else:
            todo += [arg for arg in get_args(item) if not isinstance(arg, str)]
    return frozenset(names)
