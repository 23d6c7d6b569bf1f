"""Responses that were made: read, joined while they are made, cancelled, deleted, and what they were made from."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from chatsvc.api.middleware import request_info
from chatsvc.api.responses_delete import is_deleted, without
from chatsvc.api.responses_items import ITEMS_LIMIT, ITEMS_MAX, input_items, page
from chatsvc.api.responses_object import Settings, kept_in, response_of
from chatsvc.api.responses_run import Readers, Run
from chatsvc.api.services import Services
from chatsvc.api.turn import Key
from chatsvc.api.turns import Turns
from chatsvc.errors import InvalidRequest, NotFound
from chatsvc.sessions.base import Message, Session, SessionStore


class StoredResponses:
    """The handlers. Each raises NotFound for what is not there, was deleted, or is another tenant's."""

    def __init__(self, services: Services, store: SessionStore | None, turns: Turns | None) -> None:
        self._store = store
        self._turns = turns
        self._readers = Readers(services, turns)

    async def read(self, request: Request) -> Response:
        key, message, _ = await self._find(request)
        streamed = _flag(request, "stream")
        after = request.query_params.get("starting_after")
        _no_include(request)
        if after is not None and not (after.isascii() and after.isdecimal() and len(after) < 10 and streamed):
            raise InvalidRequest("starting_after: a number, only together with stream=true", param="starting_after")
        turn = None if self._turns is None else self._turns.running(key)
        if turn is None or turn.id != message.id or self._turns is None:
            if streamed:
                raise InvalidRequest("stream: this response is not being made by this process now", param="stream")
            return JSONResponse(response_of(key[1], message))
        message = self._turns.message(turn)
        if not streamed:
            return JSONResponse(response_of(key[1], message))
        run = Run(Settings.of(key[1], message), turn.generation, request_info(request), turn)
        return self._readers.stream(run, -1 if after is None else int(after), leaves_running=True)

    async def cancel(self, request: Request) -> Response:
        key, message, _ = await self._find(request)
        if not Settings.of(key[1], message).fields["background"]:
            raise InvalidRequest(
                "Only responses with background=true can be cancelled; of another one, leave the stream"
            )
        if message.status == "running" and self._turns is not None:
            async with self._turns.lock(key):
                await self._end(request, key)
            _, message, _ = await self._find(request)
        return JSONResponse(response_of(key[1], message))

    async def delete(self, request: Request) -> Response:
        """One that is being made ends. Its texts go when no other response needs them as its past any more."""
        key, message, _ = await self._find(request)
        assert self._store is not None and self._turns is not None
        async with self._turns.lock(key):
            session: Session | None = await self._end(request, key)
            # Again until nothing changes: another process may delete another response of the session at this moment.
            while session is not None:
                rest = without(session, message.id)
                if rest.nothing_left:
                    await self._store.delete(*key)
                    break
                if not rest.changed:
                    break
                await self._store.rewrite(*key, rest.changed)
                session = await self._store.get(*key)
        return JSONResponse({"id": request.path_params["id"], "object": "response", "deleted": True})

    async def items(self, request: Request) -> Response:
        _, message, session = await self._find(request)
        _no_include(request)
        query = request.query_params
        if "before" in query:
            raise InvalidRequest("before: use after and order", param="before", code="unsupported_parameter")
        limit = query.get("limit", str(ITEMS_LIMIT))
        if not (limit.isascii() and limit.isdecimal() and 1 <= int(limit[:6]) <= ITEMS_MAX):
            raise InvalidRequest(f"limit: a number from 1 to {ITEMS_MAX}", param="limit")
        order = query.get("order", "desc")
        if order not in ("asc", "desc"):
            raise InvalidRequest("order: asc or desc", param="order")
        found = input_items(session, message)
        return JSONResponse(page(found if order == "asc" else found[::-1], int(limit), query.get("after")))

    async def _end(self, request: Request, key: Key) -> Session:
        """The session, in which this response is not being made any more. The session's lock is held."""
        _, message, session = await self._find(request)
        if message.status == "running" and self._turns is not None:
            await self._turns.cancel(key)
            _, _, session = await self._find(request)
        return session

    async def _find(self, request: Request) -> tuple[Key, Message, Session]:
        """Raises: NotFound."""
        asked = request.path_params["id"]
        ids = kept_in(asked)
        tenant = request_info(request).tenant
        if ids is not None and self._store is not None:
            session = await self._store.get(tenant, ids[0])
            for message in session.messages if session is not None else ():
                if message.id == ids[1] and Settings.known(message) and not is_deleted(message):
                    assert session is not None
                    return (tenant, session.id), message, session
        raise NotFound(f"There is no response {asked[:80]!r}", param="id", code="response_not_found")


def _flag(request: Request, name: str) -> bool:
    value = request.query_params.get(name, "false")
    if value not in ("true", "false"):
        raise InvalidRequest(f"{name}: true or false", param=name)
    return value == "true"


def _no_include(request: Request) -> None:
    if "include" in request.query_params or "include[]" in request.query_params:
        raise InvalidRequest("include: this is not supported here", param="include", code="unsupported_parameter")


def routes(services: Services, turns: Turns | None) -> list[Route]:
    """The routes of this module."""
    api = StoredResponses(services, services.store, turns)
    one = "/v1/responses/{id}"
    return [
        Route(one, api.read, methods=["GET"]),
        Route(one, api.delete, methods=["DELETE"]),
        Route(f"{one}/cancel", api.cancel, methods=["POST"]),
        Route(f"{one}/input_items", api.items, methods=["GET"]),
    ]
