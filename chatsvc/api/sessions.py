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
from chatsvc.api.sampling import refuse_hopeless, room_for, sampling_params
from chatsvc.api.services import Services
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
from chatsvc.errors import Conflict, InvalidRequest, NotFound
from chatsvc.sessions.base import Message, Session, SessionStore, TurnRunning
from chatsvc.sessions.codec import new_id

ROOT = "root"
LIST_LIMIT = 50
LIST_MAX = 200


class Sessions:
    """The handlers. Each is called with the request and the caller's key (tenant, session id)."""

    def __init__(self, services: Services, store: SessionStore, turns: Turns) -> None:
        self._services = services
        self._store = store
        self._turns = turns

    async def create(self, request: Request) -> Response:
        body = await read_model(request, self._services, SessionRequest)
        refuse_unsupported(body.model_extra, SESSION_SWALLOWED)
        now = time.time()
        tenant = request_info(request).tenant
        session = Session(new_id("sess"), tenant, body.title or "", body.system or "", now, now)
        await self._store.create(session)
        return JSONResponse(public(session), 201)

    async def browse(self, request: Request) -> Response:
        asked = request.query_params.get("limit", str(LIST_LIMIT))
        if not (asked.isascii() and asked.isdecimal() and 1 <= int(asked[:6]) <= LIST_MAX):
            raise InvalidRequest(f"limit: a number from 1 to {LIST_MAX}", param="limit")
        found = await self._store.list(request_info(request).tenant, int(asked))
        return JSONResponse({"object": "list", "data": [public(s, messages=False) for s in found]})

    async def read(self, request: Request) -> Response:
        return JSONResponse(self._live(await self._session(_key(request)), _key(request)))

    async def patch(self, request: Request) -> Response:
        key = _key(request)
        body = await read_model(request, self._services, SessionRequest)
        refuse_unsupported(body.model_extra, SESSION_SWALLOWED)
        session = await self._store.patch(*key, title=body.title, system=body.system)
        if session is None:
            raise no_session()
        return JSONResponse(self._live(session, key))

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
        async with self._turns.lock(key):
            session = await self._turns.make_way(key)
            parent = _parent(session, body.parent_id)
            user = _message(parent, "user", body.content)
            answer = replace(_message(user.id, "assistant", ""), status="running")
            turn = await self._start(request, session, [user, answer], [*_path(session, parent), user], body)
        return self._stream(turn, 0)

    async def regenerate(self, request: Request) -> Response:
        key = _key(request)
        require_ready(self._services)
        body = await read_model(request, self._services, RegenerateRequest)
        self._check(body)
        async with self._turns.lock(key):
            session = await self._turns.make_way(key)
            path = _path(session, request.path_params["mid"])
            answer = replace(_message(path[-1].id, "assistant", ""), status="running")
            if body.continue_final_message:
                cut = path[-1] = self._cut(path[-1])
                answer = replace(answer, parent_id=cut.parent_id, content=cut.content, token_ids=cut.token_ids)
            elif path[-1].role == "assistant":
                path = path[:-1]
                answer.parent_id = path[-1].id
            turn = await self._start(request, session, [answer], path, body, going_on=bool(body.continue_final_message))
        return self._stream(turn, 0)

    async def stream(self, request: Request) -> Response:
        key = _key(request)
        turn = await self._turns.find(key)
        if turn is None:
            return Response(status_code=204)
        return self._stream(turn, _cursor(request, turn))

    async def fork(self, request: Request) -> Response:
        key = _key(request)
        body = await read_model(request, self._services, ForkRequest)
        refuse_unsupported(body.model_extra, FORK_SWALLOWED)
        session = await self._session(key)
        path = _path(session, body.message_id, param="message_id")
        _require_answer(path[-1], "message_id")
        if path[-1].status == "running":
            raise Conflict("This message is still being written", param="message_id")
        copies: list[Message] = []
        for message in path:
            parent = copies[-1].id if copies else None
            copies.append(replace(message, id=new_id("msg"), parent_id=parent))
        now = time.time()
        title = session.title if body.title is None else body.title
        forked = Session(new_id("sess"), session.tenant, title, session.system, now, now, copies)
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

    async def _start(
        self,
        request: Request,
        session: Session,
        new: list[Message],
        path: list[Message],
        body: TurnFields,
        *,
        going_on: bool = False,
    ) -> Turn:
        services = self._services
        ids = await self._prompt(session, path, going_on)
        newer = body.max_completion_tokens is not None
        max_tokens = room_for(
            len(ids),
            body.max_completion_tokens if newer else body.max_tokens,
            services.engine.limit,
            prompt_param="content",
            max_param="max_completion_tokens" if newer else "max_tokens",
        )
        params = sampling_params(
            body,
            max_tokens=max_tokens,
            logprobs=None,
            vocab_size=services.engine.capacity.vocab_size,
            max_n=services.settings.max_n,
            seed=services.seeds.of(body.seed),
        )
        info = request_info(request)

        def begin(request_id: str) -> Generation:
            info.fields["id"] = request_id
            return services.desk.generate(
                info,
                request_id=request_id,
                prompt_token_ids=ids,
                params=params,
                cache_salt=body.cache_salt or "",
                priority=body.priority or 0,
            )

        return await self._turns.start((session.tenant, session.id), new, begin)

    def _cut(self, message: Message) -> Message:
        """An answer to go on with. Without its ids when they do not say what its text says: one that was cut inside a
        character, or that lost text, goes on from the text.

        Raises: InvalidRequest when it is none, or came to its own end.
        """
        problem = None
        if message.role != "assistant" or not message.content:
            problem = "has to be an answer that has text"
        elif message.status == "done" and message.finish_reason != "length":
            problem = "this answer has come to its own end"
        if problem:
            raise InvalidRequest(f"continue_final_message: {problem}", param="continue_final_message")
        exact = self._services.tokenizer.decode(message.token_ids, skip_special=False) == message.content
        return message if exact else replace(message, token_ids=[])

    async def _prompt(self, session: Session, path: list[Message], going_on: bool) -> list[int]:
        services = self._services
        if services.template is None:
            raise InvalidRequest("This model has no chat template, so it has no sessions", code="no_chat_template")
        messages: list[dict[str, Any]] = []
        if session.system:
            messages.append({"role": "system", "content": session.system})
        first = len(messages)
        messages += [{"role": m.role, "content": m.content} for m in path]
        stored = {first + i: m.token_ids for i, m in enumerate(path) if m.role == "assistant" and m.token_ids}
        characters = sum(len(m["content"].strip()) for m in messages)
        refuse_hopeless(characters, services.longest_token, services.engine.limit, "content")
        return await services.offload(
            characters + 100 * len(messages),
            services.template.encode,
            messages,
            services.tokenizer,
            add_generation_prompt=not going_on,
            continue_final_message=going_on,
            assistant_ids=stored,
        )

    def _stream(self, turn: Turn, cursor: int) -> Response:
        self._turns.attach(turn)
        settings = self._services.settings
        return EventStream(
            self._turns.events(turn, cursor),
            ping=settings.ping_interval,
            send_timeout=settings.send_timeout,
            on_close=lambda: self._turns.detach(turn),
        )

    def _live(self, session: Session, key: Key) -> dict[str, Any]:
        """The session as its readers see it now: a running answer with the text it has."""
        turn = self._turns.running(key)
        if turn is not None:
            session.messages = [self._turns.message(turn) if m.id == turn.id else m for m in session.messages]
        return public(session)


def public(session: Session, *, messages: bool = True) -> dict[str, Any]:
    """A session on the wire."""
    out: dict[str, Any] = {
        "id": session.id,
        "object": "session",
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
            for m in session.messages
        ]
    return out


def _key(request: Request) -> Key:
    return request_info(request).tenant, request.path_params["id"]


def _message(parent_id: str | None, role: str, content: str) -> Message:
    return Message(new_id("msg"), parent_id, "user" if role == "user" else "assistant", content, created_at=time.time())


def _parent(session: Session, asked: str | None) -> str | None:
    """The answer that a new user message follows; None: it is a root."""
    if asked == ROOT or (asked is None and not session.messages):
        return None
    if asked is None:
        parent = session.messages[-1]
    else:
        found = next((m for m in session.messages if m.id == asked), None)
        if found is None:
            raise InvalidRequest("parent_id: there is no such message in this session", param="parent_id")
        parent = found
    _require_answer(parent, "parent_id")
    return parent.id


def _require_answer(message: Message, param: str) -> None:
    """Users and answers take turns: nothing but an answer is followed by a user's message."""
    if message.role != "assistant":
        raise InvalidRequest(
            f"{param}: has to be an answer, not a user's message (which POST .../regenerate would answer)", param=param
        )


def _path(session: Session, leaf: str | None, param: str | None = None) -> list[Message]:
    """The messages from the root to ``leaf``. Raises: NotFound."""
    by_id = {m.id: m for m in session.messages}
    path: list[Message] = []
    while leaf is not None:
        message = by_id.pop(leaf, None)
        if message is None:
            raise NotFound("There is no such message in this session", param=param, code="message_not_found")
        path.append(message)
        leaf = message.parent_id
    return path[::-1]


def _cursor(request: Request, turn: Turn) -> int:
    """Tokens that ``Last-Event-ID`` says its reader has seen of this turn; 0 when it names another or none."""
    turn_id, _, rest = request.headers.get("last-event-id", "").partition(":")
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
