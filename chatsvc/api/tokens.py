"""``/tokenize`` and ``/detokenize``, in vLLM's shape."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from chatsvc.api.body import read_model
from chatsvc.api.chat import chat_prompt, check_model, require_ready
from chatsvc.api.frames import dumps, dumps_in_slices
from chatsvc.api.sampling import refuse_hopeless
from chatsvc.api.schema import DetokenizeRequest, TokenizeRequest
from chatsvc.api.services import Services
from chatsvc.api.tools import tool_use
from chatsvc.errors import InvalidRequest


async def tokenize(services: Services, request: Request) -> Response:
    """``POST /tokenize``: the very ids that a completion (``prompt``) or a chat (``messages``) would use."""
    require_ready(services)
    body = await read_model(request, services, TokenizeRequest)
    check_model(body.model, services)
    if (body.prompt is None) == (body.messages is None):
        raise InvalidRequest("prompt: exactly one of prompt and messages is needed", param="prompt")
    if body.tools and body.messages is None:
        raise InvalidRequest("tools: only together with messages", param="tools")
    if body.messages is not None:
        ids = await chat_prompt(
            services,
            body.messages,
            add_generation_prompt=body.add_generation_prompt,
            continue_final_message=body.continue_final_message,
            tools=tool_use(body.tools, None, None),
        )
    else:
        # One that cannot fit is not counted to its end: that takes seconds, and the answer would change nothing.
        text = body.prompt or ""
        bos = body.add_special_tokens is not False
        refuse_hopeless(len(text), services.longest_token, services.engine.limit, "prompt")
        ids = await services.offload(len(text), services.tokenizer.encode, text, special=True, bos=bos)
    answer = {"tokens": ids, "count": len(ids), "max_model_len": services.engine.limit}
    return Response(await services.offload(4 * len(ids), dumps_in_slices, answer), media_type="application/json")


async def detokenize(services: Services, request: Request) -> Response:
    """``POST /detokenize``: text of token ids, special tokens written out."""
    require_ready(services)
    body = await read_model(request, services, DetokenizeRequest)
    check_model(body.model, services)
    vocab_size = services.tokenizer.vocab_size

    def decode() -> str:
        for token in body.tokens:
            if not 0 <= token < vocab_size:
                raise InvalidRequest(f"tokens: {token} is outside 0..{vocab_size - 1}", param="tokens")
        return services.tokenizer.decode(body.tokens, skip_special=False)

    text = await services.offload(len(body.tokens), decode)
    return Response(dumps({"prompt": text}), media_type="application/json")


def routes(services: Services) -> list[Route]:
    """The routes of this module."""

    async def tokenize_endpoint(request: Request) -> Response:
        return await tokenize(services, request)

    async def detokenize_endpoint(request: Request) -> Response:
        return await detokenize(services, request)

    return [
        Route("/tokenize", tokenize_endpoint, methods=["POST"]),
        Route("/detokenize", detokenize_endpoint, methods=["POST"]),
    ]
