"""``POST /v1/responses``: OpenAI's Responses, on top of sessions.

A response is a turn: its input is a user's message of a session, its output the answer. Both remember what a session's
messages do not know (the items, the settings) in ``Message.extra``. The id of a response names its session and its
answer, so nothing else is kept. ``previous_response_id`` goes on with that session at that answer; while another answer
of the session is being written, on a copy of the branch. With ``store: false``, or without sessions, nothing is kept.
"""

from __future__ import annotations

import time
import uuid
from contextlib import suppress
from dataclasses import replace
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from chatsvc.api.answers import CLIENT_GONE, failure, until_ended
from chatsvc.api.body import read_model
from chatsvc.api.chat import check_model, least_characters, require_ready
from chatsvc.api.middleware import RequestInfo, request_info
from chatsvc.api.prompt import render, work
from chatsvc.api.responses_input import (
    check_outputs,
    input_messages,
    longer_field,
    response_tools,
    shown_text,
    with_instructions,
)
from chatsvc.api.responses_object import History, Settings, history, kept_in
from chatsvc.api.responses_run import Readers, Run
from chatsvc.api.responses_schema import RESPONSES_NEUTRAL, ResponseRequest
from chatsvc.api.sampling import refuse_hopeless, room_for, sampling_params
from chatsvc.api.services import Services
from chatsvc.api.tools import ToolUse
from chatsvc.api.turn import Key
from chatsvc.api.turns import Turns
from chatsvc.api.unsupported import refuse_unsupported
from chatsvc.engine.output import Generation
from chatsvc.errors import Conflict, InvalidRequest, NotFound, StoreError
from chatsvc.scheduler.params import SamplingParams
from chatsvc.sessions.base import Message, Session, SessionStore, TurnRunning
from chatsvc.sessions.codec import new_id, new_session_id

TITLE = 60  # characters


class Responses:
    """The handlers."""

    def __init__(self, services: Services, store: SessionStore | None, turns: Turns | None) -> None:
        self._services = services
        self._store = store
        self._turns = turns
        self._readers = Readers(services, turns)

    async def create(self, request: Request) -> Response:
        require_ready(self._services)
        body = await read_model(request, self._services, ResponseRequest)
        self._check(body)
        tools = response_tools(body)
        new = input_messages(body.input)
        info = request_info(request)
        before = await self._before(info.tenant, body.previous_response_id)
        run = await self._start(body, info, tools, new, before)
        if body.background and run.turn is not None:
            self._readers.hold(run.turn)
        if body.stream:
            return self._readers.stream(run, -1, leaves_running=bool(body.background))
        if body.background:
            return JSONResponse(run.now())
        return await self._whole(request, run)

    # -- a new response ----------------------------------------------------------------------------------------

    def _check(self, body: ResponseRequest) -> None:
        check_model(body.model, self._services)
        refuse_unsupported(body.model_extra, RESPONSES_NEUTRAL)
        if body.n not in (None, 1):
            raise InvalidRequest("n: a response has one answer", param="n")
        if body.max_tokens is not None:
            raise InvalidRequest("max_tokens: the name is max_output_tokens here", param="max_tokens")
        if self._store is None and (body.store or body.background or body.previous_response_id):
            name = "store" if body.store else "background" if body.background else "previous_response_id"
            raise InvalidRequest(f"{name}: this server keeps no sessions", param=name, code="unsupported_parameter")
        if body.background and body.store is False:
            raise InvalidRequest("background: needs store=true", param="background")
        if self._services.template is None:
            raise InvalidRequest(
                "This model has no chat template; use /v1/completions", param="input", code="no_chat_template"
            )

    async def _before(self, tenant: str, previous: str | None) -> tuple[Session, History] | None:
        """The session that is gone on with, and the branch."""
        if previous is None or self._store is None:
            return None
        ids = kept_in(previous)
        session = await self._store.get(tenant, ids[0]) if ids else None
        told = history(session, ids[1]) if session is not None and ids is not None else None
        if session is None or told is None:
            raise InvalidRequest(
                f"previous_response_id: there is no response {previous[:80]!r}",
                param="previous_response_id",
                code="previous_response_not_found",
            )
        if told.path[-1].status == "running":
            raise Conflict("previous_response_id: this response is still being made", param="previous_response_id")
        return session, told

    async def _start(
        self,
        body: ResponseRequest,
        info: RequestInfo,
        tools: ToolUse | None,
        new: list[dict[str, Any]],
        before: tuple[Session, History] | None,
    ) -> Run:
        services = self._services
        told = before[1] if before else History([], [], {})
        check_outputs([*told.chat, *new])
        ids = await self._prompt(body.instructions, told, new, tools)
        params = sampling_params(
            body,
            max_tokens=room_for(
                len(ids),
                body.max_output_tokens,
                services.engine.limit,
                prompt_param=longer_field(body.instructions, [*told.shown, *new]),
                max_param="max_output_tokens",
            ),
            logprobs=None,
            vocab_size=services.engine.capacity.vocab_size,
            max_n=services.settings.max_n,
            seed=services.seeds.of(body.seed),
            more_stops=tools.stop if tools else (),
        )

        async def begin(request_id: str) -> Generation:
            info.fields["id"] = request_id
            return await services.desk.generate(
                info,
                request_id=request_id,
                prompt_token_ids=ids,
                params=params,
                cache_salt=body.cache_salt or "",
                priority=body.priority or 0,
            )

        keep = self._store is not None and body.store is not False
        settings = self._settings(body, params, tools, keep)
        if not keep or self._turns is None:
            hexid = uuid.uuid4().hex
            settings = replace(settings, id=f"resp_{uuid.uuid4().hex}{hexid}", hexid=hexid)
            return Run(settings, await begin(settings.id), info)
        return await self._stored(settings, info, new, before, begin)

    async def _stored(
        self,
        settings: Settings,
        info: RequestInfo,
        new: list[dict[str, Any]],
        before: tuple[Session, History] | None,
        begin: Any,
    ) -> Run:
        assert self._turns is not None
        if before is not None:
            session, told = before
            key = (session.tenant, session.id)
            with suppress(TurnRunning):  # another branch is being answered: go on below with a copy
                async with self._turns.lock(key):
                    if not any(m.status == "running" for m in session.messages) and not self._turns.running(key):
                        return await self._accept(settings, info, key, told.path[-1].id, new, begin)
        session = self._new_session(settings, info.tenant, new, before)
        key = (session.tenant, session.id)
        assert self._store is not None
        await self._store.create(session)
        parent = session.messages[-1].id if session.messages else None
        try:
            async with self._turns.lock(key):
                return await self._accept(settings, info, key, parent, new, begin)
        except BaseException:
            with suppress(NotFound, StoreError):
                await self._store.delete(*key)
            raise

    async def _accept(
        self, settings: Settings, info: RequestInfo, key: Key, parent: str | None, new: list[dict[str, Any]], begin: Any
    ) -> Run:
        assert self._turns is not None
        now = time.time()
        user = Message(new_id("msg"), parent, "user", shown_text(new), created_at=now, extra={"items": new})
        answer = Message(new_id("msg"), user.id, "assistant", "", "running", created_at=now)
        settings = settings.named(key[1], answer.id)
        answer.extra = settings.extra()
        turn = await self._turns.start(key, [user, answer], begin)
        return Run(settings, turn.generation, info, turn)

    def _new_session(
        self, settings: Settings, tenant: str, new: list[dict[str, Any]], before: tuple[Session, History] | None
    ) -> Session:
        now = time.time()
        system = settings.fields["instructions"] or ""
        title = " ".join(shown_text(new).split())[:TITLE]
        copies: list[Message] = []
        if before is not None:
            title, system = before[0].title, before[0].system
            for message in before[1].path:
                copies.append(replace(message, id=new_id("msg"), parent_id=copies[-1].id if copies else None))
        return Session(new_session_id("response"), tenant, title, system, now, now, copies)

    def _settings(self, body: ResponseRequest, params: SamplingParams, tools: ToolUse | None, keep: bool) -> Settings:
        template = self._services.template
        fields = {
            "instructions": body.instructions,
            "model": self._services.model_name,
            "max_output_tokens": body.max_output_tokens,
            "parallel_tool_calls": body.parallel_tool_calls is not False,
            "previous_response_id": body.previous_response_id,
            "temperature": params.temperature,
            "top_p": 1.0 if body.top_p is None else body.top_p,
            "tool_choice": body.tool_choice if isinstance(body.tool_choice, str) else _dumped(body.tool_choice, "auto"),
            "tools": [
                {
                    "type": "function",
                    "name": t.name,
                    "description": t.description,
                    "parameters": t.parameters,
                    "strict": False,
                }
                for t in body.tools or ()
            ],
            "store": keep,
            "background": bool(body.background),
            "metadata": body.metadata or {},
        }
        calls = None if tools is None or template is None else tools.reading(native=template.knows_tools)
        return Settings("", "", int(time.time()), fields, calls)

    async def _prompt(
        self, instructions: str | None, told: History, new: list[dict[str, Any]], tools: ToolUse | None
    ) -> list[int]:
        services = self._services
        assert services.template is not None
        chat = with_instructions(instructions, [*told.shown, *new])
        shift = len(chat) - len(told.shown) - len(new)
        param = longer_field(instructions, [*told.shown, *new])
        refuse_hopeless(least_characters(chat, tools, services), services.longest_token, services.engine.limit, param)
        try:
            return await services.offload(
                work(chat, tools),
                render,
                services.template,
                chat,
                services.tokenizer,
                add_generation_prompt=True,
                continue_final_message=False,
                tools=tools,
                assistant_ids={i + shift: ids for i, ids in told.ids.items()},
            )
        except InvalidRequest as error:
            raise InvalidRequest(error.message, param="input", code=error.code) from None

    # -- its answer --------------------------------------------------------------------------------------------

    async def _whole(self, request: Request, run: Run) -> Response:
        self._readers.come(run)
        try:
            if not await until_ended(request, [run.generation]):
                run.info.fields["outcome"] = "client_gone"
                return Response(status_code=CLIENT_GONE)
            log = run.generation.logs[0]
            if log.finish_reason == "error":
                raise failure(log)
            await self._readers.stored(run)
            return JSONResponse(run.now())
        finally:
            self._readers.left(run, leaves_running=False)


def _dumped(choice: Any, default: str) -> Any:
    return default if choice is None else choice.model_dump(include={"type", "name"})


def routes(services: Services, turns: Turns | None) -> list[Route]:
    """The route that makes one; what is done with it later: :mod:`chatsvc.api.responses_stored`."""
    return [Route("/v1/responses", Responses(services, services.store, turns).create, methods=["POST"])]
