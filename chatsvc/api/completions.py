"""``/v1/completions``: one or several prompts, text or token ids."""

from __future__ import annotations

import uuid

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from chatsvc.api.answers import Answer
from chatsvc.api.body import read_model
from chatsvc.api.chat import check_common, include_usage, require_ready
from chatsvc.api.frames import CompletionShape
from chatsvc.api.logprobs import TokenNames
from chatsvc.api.middleware import request_info
from chatsvc.api.prompt import prompt_size, prompts
from chatsvc.api.sampling import refuse_hopeless, room_for, sampling_params
from chatsvc.api.schema import CompletionRequest
from chatsvc.api.search import with_search
from chatsvc.api.services import Services
from chatsvc.engine.output import Generation
from chatsvc.errors import InvalidRequest


async def create(services: Services, request: Request) -> Response:
    """``POST /v1/completions``."""
    require_ready(services)
    body = await read_model(request, services, CompletionRequest)
    n = check_common(body, services)
    engine, settings = services.engine, services.settings
    vocab_size = engine.capacity.vocab_size
    for text in [body.prompt] if isinstance(body.prompt, str) else body.prompt if isinstance(body.prompt, list) else []:
        if isinstance(text, str):
            refuse_hopeless(len(text), services.longest_token, engine.limit, "prompt")
    encoded = await services.offload(
        prompt_size(body.prompt), prompts, body.prompt, services.tokenizer, vocab_size, settings.max_prompts
    )
    if len(encoded) * max(n, body.best_of or 1) > max(settings.max_prompts, settings.max_n):
        name = "best_of" if (body.best_of or 1) > n else "n"
        raise InvalidRequest(f"{name}: too many choices for {len(encoded)} prompts", param=name)
    params = [
        sampling_params(
            body,
            max_tokens=room_for(len(ids), body.max_tokens, engine.limit, prompt_param="prompt", max_param="max_tokens"),
            logprobs=body.logprobs,
            vocab_size=vocab_size,
            max_n=settings.max_n,
            seed=services.seeds.of(body.seed, i),
        )
        for i, ids in enumerate(encoded)
    ]
    info = request_info(request)
    completion_id = f"cmpl-{uuid.uuid4().hex}"
    info.fields["id"] = completion_id
    generations: list[Generation] = []
    try:
        for i, ids in enumerate(encoded):
            generations.append(
                await services.desk.generate(
                    info,
                    request_id=completion_id if len(encoded) == 1 else f"{completion_id}-{i}",
                    prompt_token_ids=ids,
                    params=with_search(params[i], body, settings.max_n),
                    cache_salt=body.cache_salt or "",
                    priority=body.priority or 0,
                )
            )
    except BaseException:
        for generation in generations:
            generation.cancel()
        raise
    shape = CompletionShape(
        completion_id,
        services.model_name,
        TokenNames(services.tokenizer),
        services.tokenizer.eos_token_ids,
        logprobs=body.logprobs,
        usage_in_stream=include_usage(body),
    )
    answer = Answer(generations, shape, info, services, n)
    return answer.stream(include_usage=include_usage(body)) if body.stream else await answer.whole(request)


def routes(services: Services) -> list[Route]:
    """The routes of this module."""

    async def create_endpoint(request: Request) -> Response:
        return await create(services, request)

    return [Route("/v1/completions", create_endpoint, methods=["POST"])]
