"""``/v1/chat/completions``: parse and refuse early, start the generation, hand it to the answer."""

from __future__ import annotations

import uuid
from collections.abc import Awaitable, Callable
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from chatsvc.api.answers import Answer
from chatsvc.api.body import read_model
from chatsvc.api.frames import ChatShape
from chatsvc.api.logprobs import TokenNames
from chatsvc.api.middleware import request_info
from chatsvc.api.prompt import render, template_messages, work
from chatsvc.api.sampling import choices, refuse_hopeless, room_for, sampling_params
from chatsvc.api.schema import ChatMessage, ChatRequest, GenerateFields
from chatsvc.api.search import with_search
from chatsvc.api.services import Services
from chatsvc.api.tools import CallReading, ToolUse, tool_use
from chatsvc.api.unsupported import refuse_unsupported
from chatsvc.errors import InvalidRequest, NotFound, Overloaded

Endpoint = Callable[[Request], Awaitable[Response]]


def require_ready(services: Services) -> None:
    """Raises: Overloaded (503) while the engine loads, drains or is stuck, and when it has failed."""
    if not services.engine.healthy:
        raise Overloaded("The engine has failed, or is stuck in a step: see /health", retry_after=10, status=503)
    if not services.engine.ready:
        raise Overloaded("The server is not ready: it is loading or draining", retry_after=2, status=503)


def check_common(fields: GenerateFields, services: Services) -> int:
    """The checks that chat and plain completions share; returns the number of choices.

    Raises:
        NotFound: another model.
        InvalidRequest: n too large, a field that is not offered, stream_options without stream.
    """
    check_model(fields.model, services)
    n = choices(fields, services.settings.max_n)
    refuse_unsupported(fields.model_extra)
    if fields.stream_options is not None and not fields.stream:
        raise InvalidRequest("stream_options: only allowed together with stream=true", param="stream_options")
    return n


def check_model(name: str | None, services: Services) -> None:
    """Raises: NotFound when ``name`` is not the served model's; the message has the served name."""
    if name is not None and name != services.model_name:
        raise NotFound(
            f"The model {name[:200]!r} does not exist; this server has {services.model_name!r}",
            param="model",
            code="model_not_found",
        )


def include_usage(fields: GenerateFields) -> bool:
    """Whether a stream ends with a usage chunk."""
    return bool(fields.stream_options and fields.stream_options.include_usage)


async def chat_prompt(
    services: Services,
    messages: list[ChatMessage],
    *,
    add_generation_prompt: bool | None = None,
    continue_final_message: bool | None = None,
    tools: ToolUse | None = None,
) -> list[int]:
    """Prompt token ids of a conversation; long ones are rendered and encoded in a thread.

    Raises:
        InvalidRequest: the model has no template, the template refuses, or the flags contradict.
    """
    if services.template is None:
        raise InvalidRequest(
            "This model has no chat template; use /v1/completions, or start the server with a model that has one",
            param="messages",
            code="no_chat_template",
        )
    going_on = bool(continue_final_message)
    if going_on and add_generation_prompt:
        raise InvalidRequest(
            "continue_final_message: cannot be combined with add_generation_prompt", param="continue_final_message"
        )
    if going_on and tools and tools.forced:
        raise InvalidRequest(
            "continue_final_message: the message that is continued cannot begin with a call; use tool_choice auto",
            param="continue_final_message",
        )
    if going_on and messages[-1].role != "assistant":
        raise InvalidRequest(
            "continue_final_message: the last message has to be an assistant's", param="continue_final_message"
        )
    plain = template_messages(messages)
    refuse_hopeless(least_characters(plain, tools, services), services.longest_token, services.engine.limit, "messages")
    return await services.offload(
        work(plain, tools),
        render,
        services.template,
        plain,
        services.tokenizer,
        add_generation_prompt=not going_on if add_generation_prompt is None else add_generation_prompt,
        continue_final_message=going_on,
        tools=tools,
    )


def least_characters(messages: list[dict[str, Any]], tools: ToolUse | None, services: Services) -> int:
    """A prompt of these messages is at least that long: every template shows their contents and the tools.

    A message has at least one token more than its content: the mark between it and the next.
    """
    contents = sum(len(m["content"].strip()) for m in messages)
    return contents + (tools.size if tools else 0) + services.longest_token * len(messages)


def call_reading(services: Services, tools: ToolUse | None) -> CallReading | None:
    """How the answer to a prompt with these tools is read."""
    if tools is None or services.template is None:
        return None
    return tools.reading(native=services.template.knows_tools)


async def create(services: Services, request: Request) -> Response:
    """``POST /v1/chat/completions``."""
    require_ready(services)
    body = await read_model(request, services, ChatRequest)
    check_common(body, services)
    if body.top_logprobs and not body.logprobs:
        raise InvalidRequest("top_logprobs: needs logprobs=true", param="top_logprobs")
    logprobs = (body.top_logprobs or 0) if body.logprobs else None
    tools = tool_use(body.tools, body.tool_choice, body.parallel_tool_calls)
    ids = await chat_prompt(
        services,
        body.messages,
        add_generation_prompt=body.add_generation_prompt,
        continue_final_message=body.continue_final_message,
        tools=tools,
    )
    engine = services.engine
    newer = body.max_completion_tokens is not None
    max_tokens = room_for(
        len(ids),
        body.max_completion_tokens if newer else body.max_tokens,
        engine.limit,
        prompt_param="messages",
        max_param="max_completion_tokens" if newer else "max_tokens",
    )
    params = sampling_params(
        body,
        max_tokens=max_tokens,
        logprobs=logprobs,
        vocab_size=engine.capacity.vocab_size,
        max_n=services.settings.max_n,
        seed=services.seeds.of(body.seed),
        more_stops=tools.stop if tools else (),
    )
    info = request_info(request)
    completion_id = f"chatcmpl-{uuid.uuid4().hex}"
    info.fields["id"] = completion_id
    generation = await services.desk.generate(
        info,
        request_id=completion_id,
        prompt_token_ids=ids,
        params=with_search(params, body, services.settings.max_n),
        cache_salt=body.cache_salt or "",
        priority=body.priority or 0,
    )
    shape = ChatShape(
        completion_id,
        services.model_name,
        TokenNames(services.tokenizer),
        services.tokenizer.eos_token_ids,
        logprobs=logprobs,
        usage_in_stream=include_usage(body),
        calls=call_reading(services, tools),
    )
    answer = Answer([generation], shape, info, services, params.n)
    return answer.stream(include_usage=include_usage(body)) if body.stream else await answer.whole(request)


async def cancel(services: Services, request: Request) -> Response:
    """``POST /v1/chat/completions/{id}/cancel``: the answer ends with what it has, its reader sees the end."""
    completion_id = request.path_params["id"]
    if not services.desk.cancel(request_info(request).tenant, completion_id):
        raise NotFound(f"No running completion has the id {completion_id[:100]!r}", param="id")
    return JSONResponse({"id": completion_id, "object": "chat.completion.cancelled", "cancelled": True})


def routes(services: Services) -> list[Route]:
    """The routes of this module."""

    async def create_endpoint(request: Request) -> Response:
        return await create(services, request)

    async def cancel_endpoint(request: Request) -> Response:
        return await cancel(services, request)

    return [
        Route("/v1/chat/completions", create_endpoint, methods=["POST"]),
        Route("/v1/chat/completions/{id}/cancel", cancel_endpoint, methods=["POST"]),
    ]
