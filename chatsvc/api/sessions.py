"""``/v1/sessions``: conversations that the server keeps. The running answers are in :mod:`chatsvc.api.turns`.

A session is a tree of messages; a turn adds a user message and its answer. The prompt of a turn is the path from the
root, and the answers on it are spliced in as the token ids that were generated, so a turn always re-encodes to the
prefix that the cache holds.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from chatsvc.api.body import read_model
from chatsvc.api.chat import check_model, require_ready
from chatsvc.api.errors import describe
from chatsvc.api.middleware import request_info
from chatsvc.api.responses_delete import visible
from chatsvc.api.services import Services
from chatsvc.api.sessions_plan import Plan, Planner, path_to, require_answer
from chatsvc.api.sessions_schema import (
    FORK_SWALLOWED,
    SESSION_SWALLOWED,
    TURN_SWALLOWED,
    ForkRequest,
    MessageRequest,
    RegenerateRequest,
    SessionRequest,
    TurnFields,
)
from chatsvc.api.sse import EventStream
from chatsvc.api.turn import Key, Turn
from chatsvc.api.turns import Turns, no_session
from chatsvc.api.unsupported import refuse_unsupported
from chatsvc.engine.output import Generation
from chatsvc.errors import Conflict, InvalidRequest
from chatsvc.sessions.base import Message, Session, SessionStore, TurnRunning
from chatsvc.sessions.codec import KINDS, check_fits, kind_of, new_id, new_session_id

LIST_LIMIT = 50
LIST_MAX = 200
ENCODING = 1000  # what it costs to measure a message, in characters of text


class Sessions:
    """The handlers. Each is called with the request and the caller's key (tenant, session id)."""

    def __init__(self, services: Services, store: SessionStore, turns: Turns) -> None:
        self._services = services
        self._store = store
        self._turns = turns
        self._planner = Planner(services)

    async def create(self, request: Request) -> Response:
        body = await read_model(request, self._services, SessionRequest)
        refuse_unsupported(body.model_extra, SESSION_SWALLOWED)
        now = time.time()
        tenant = request_info(request).tenant
        session = Session(new_session_id("chat"), tenant, body.title or "", body.system or "", now, now)
        await self._store.create(session)
        return JSONResponse(public(session), 201)

    async def browse(self, request: Request) -> Response:
        asked = request.query_params.get("limit", str(LIST_LIMIT))
        if not (asked.isascii() and asked.isdecimal() and 1 <= int(asked[:6]) <= LIST_MAX):
            raise InvalidRequest(f"limit: a number from 1 to {LIST_MAX}", param="limit")
        kind = request.query_params.get("kind")
        if kind not in (None, *KINDS):
            raise InvalidRequest(f"kind: one of {', '.join(KINDS)}", param="kind")
        found = await self._store.list(request_info(request).tenant, int(asked), kind)
        return JSONResponse({"object": "list", "data": [public(s, messages=False) for s in found]})

    async def read(self, request: Request) -> Response:
        return JSONResponse(public(self._turns.live(await self._session(_key(request)), _key(request))))

    async def patch(self, request: Request) -> Response:
        key = _key(request)
        body = await read_model(request, self._services, SessionRequest)
        refuse_unsupported(body.model_extra, SESSION_SWALLOWED)
        session = await self._store.patch(*key, title=body.title, system=body.system)
        if session is None:
            raise no_session()
        return JSONResponse(public(self._turns.live(session, key)))

    async def delete(self, request: Request) -> Response:
        key = _key(request)
        async with self._turns.lock(key):
            session = await self._store.get(*key)
            there = session is not None and await self._store.delete(*key)
            if there:
                self._turns.discard(key, session)
        if not there:
            raise no_session()
        return JSONResponse({"id": key[1], "object": "session.deleted", "deleted": True})

    async def cancel(self, request: Request) -> Response:
        key = _key(request)
        async with self._turns.lock(key):  # a turn that is just being accepted is waited for, then ended
            turn_id = await self._turns.cancel(key, await self._session(key))
        return JSONResponse({"id": key[1], "turn_id": turn_id, "cancelled": turn_id is not None})

    async def message(self, request: Request) -> Response:
        key = _key(request)
        require_ready(self._services)
        body = await read_model(request, self._services, MessageRequest)
        self._check(body)
        return await self._begin(request, key, body, lambda session: self._planner.message(session, body))

    async def regenerate(self, request: Request) -> Response:
        key, mid = _key(request), request.path_params["mid"]
        require_ready(self._services)
        body = await read_model(request, self._services, RegenerateRequest)
        self._check(body)
        return await self._begin(request, key, body, lambda session: self._planner.regenerate(session, mid, body))

    async def stream(self, request: Request) -> Response:
        key = _key(request)
        turn = await self._turns.find(key, _last_event_id(request)[0])
        if turn is None:
            return Response(status_code=204)
        return self._stream(turn, _cursor(request, turn))

    async def fork(self, request: Request) -> Response:
        key = _key(request)
        body = await read_model(request, self._services, ForkRequest)
        refuse_unsupported(body.model_extra, FORK_SWALLOWED)
        session = await self._session(key)
        path = path_to(visible(session), body.message_id, param="message_id")
        require_answer(path[-1], "message_id")
        if path[-1].status == "running":
            raise Conflict("This message is still being written", param="message_id")
        copies: list[Message] = []
        for message in path:
            parent = copies[-1].id if copies else None
            copies.append(replace(message, id=new_id("msg"), parent_id=parent))
        now = time.time()
        title = session.title if body.title is None else body.title
        forked = Session(new_session_id("chat"), session.tenant, title, session.system, now, now, copies)
        await self._store.create(forked)
        return JSONResponse(public(forked), 201)

    # -- parts -------------------------------------------------------------------------------------------------

    async def _session(self, key: Key) -> Session:
        session = await self._store.get(*key)
        if session is None:
            raise no_session()
        return session

    def _check(self, body: TurnFields) -> None:
        """Before anything is touched: a request that is wrong must not end a running turn.

        Raises: NotFound (another model), InvalidRequest.
        """
        check_model(body.model, self._services)
        if body.n not in (None, 1):
            raise InvalidRequest("n: a turn of a session has one answer", param="n")
        extra = body.model_extra or {}
        if extra.get("stream") is False:
            raise InvalidRequest("stream: a turn is always streamed; the session has the whole text", param="stream")
        refuse_unsupported(extra)
        refuse_unsupported(extra, TURN_SWALLOWED)

    async def _begin(
        self, request: Request, key: Key, body: TurnFields, plan: Callable[[Session], Awaitable[Plan]]
    ) -> Response:
        """A new turn, and its stream. What is refused for what it says is refused before anything is ended.

        Raises: TurnRunning; RequestError; what the engine and the store raise.
        """
        services, info = self._services, request_info(request)
        async with self._turns.lock(key):
            session = await self._turns.look(key)
            planned = await plan(session)
            services.desk.check(info, planned.ids, planned.params)
            if self._turns.running(key) is not None or any(m.status == "running" for m in session.messages):
                await services.offload(ENCODING * len(session.messages), check_fits, session.messages, planned.new)
                # The history gets the text that the old answer has at its end, which is known only after that. So one
                # window stays: a prompt (or session) that had just room can be too long by what the answer wrote since
                # we looked (another process's: since it was last stored, about a second), and is refused then.
                session = await self._turns.make_way(key)
                planned = await plan(session)
            params = replace(planned.params, seed=services.seeds.of(body.seed))

            async def begin(request_id: str) -> Generation:
                info.fields["id"] = request_id
                return await services.desk.generate(
                    info,
                    request_id=request_id,
                    prompt_token_ids=planned.ids,
                    params=params,
                    cache_salt=body.cache_salt or "",
                    priority=body.priority or 0,
                )

            turn = await self._turns.start(key, planned.new, begin)
        return self._stream(turn, 0)

    def _stream(self, turn: Turn, cursor: int) -> Response:
        self._turns.attach(turn)
        settings = self._services.settings
        return EventStream(
            self._turns.events(turn, cursor),
            ping=settings.ping_interval,
            send_timeout=settings.send_timeout,
            on_close=lambda: self._turns.detach(turn),
        )


def public(session: Session, *, messages: bool = True) -> dict[str, Any]:
    """A session on the wire."""
    out: dict[str, Any] = {
        "id": session.id,
        "object": "session",
        "kind": kind_of(session.id),
        "title": session.title,
        "system": session.system,
        "created_at": int(session.created_at),
        "updated_at": int(session.updated_at),
    }
    if messages:
        out["messages"] = [
            {
                "id": m.id,
                "parent_id": m.parent_id,
                "role": m.role,
                "content": m.content,
                "status": m.status,
                "finish_reason": m.finish_reason,
                "usage": m.usage,
                "timing": m.timing,
                "created_at": int(m.created_at),
            }
            for m in visible(session).messages
        ]
    return out


def _key(request: Request) -> Key:
    return request_info(request).tenant, request.path_params["id"]


def _last_event_id(request: Request) -> tuple[str, str]:
    """The turn that ``Last-Event-ID`` names, and what it says of it."""
    turn_id, _, rest = request.headers.get("last-event-id", "").partition(":")
    return turn_id, rest


def _cursor(request: Request, turn: Turn) -> int:
    """Tokens that ``Last-Event-ID`` says its reader has seen of this turn; 0 when it names another or none."""
    turn_id, rest = _last_event_id(request)
    choice, _, tokens = rest.partition(":")
    if turn_id != turn.id or choice != "0" or not (tokens.isascii() and tokens.isdecimal() and len(tokens) < 10):
        return 0
    return int(tokens)


Handler = Callable[[Request], Awaitable[Response]]


def _with_turn_id(handler: Handler) -> Handler:
    """The 409 of a running turn names it in the error object."""

    async def endpoint(request: Request) -> Response:
        try:
            return await handler(request)
        except TurnRunning as running:
            status, headers, body = describe(running)
            body["error"]["turn_id"] = running.turn_id
            return JSONResponse(body, status, headers)

    return endpoint


def routes(services: Services, turns: Turns | None = None) -> list[Route]:
    """The routes of this module; none without a store.

    Args:
        turns: the app's running turns. Whoever ends the app calls its ``close()`` before the store's.
    """
    if services.store is None:
        return []
    api = Sessions(services, services.store, turns or Turns(services, services.store))
    one, message = "/v1/sessions/{id}", "/v1/sessions/{id}/messages"
    table: list[tuple[str, str, Handler]] = [
        ("POST", "/v1/sessions", api.create),
        ("GET", "/v1/sessions", api.browse),
        ("GET", one, api.read),
        ("PATCH", one, api.patch),
        ("DELETE", one, api.delete),
        ("POST", message, api.message),
        ("POST", f"{message}/{{mid}}/regenerate", api.regenerate),
        ("GET", f"{one}/stream", api.stream),
        ("POST", f"{one}/cancel", api.cancel),
        ("POST", f"{one}/fork", api.fork),
    ]
    return [Route(path, _with_turn_id(handler), methods=[method]) for method, path, handler in table]
