"""The shapes of answers, for ``/openapi.json`` and for the tests that hold real answers against it.

Answers are written by :mod:`chatsvc.api.frames` without these models: validating what we made ourselves would cost more
than making it.
"""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

Finish = Literal["stop", "length"]


class Shape(BaseModel):
    """Base: what is not described is not sent."""

    model_config = ConfigDict(extra="forbid", strict=True)


class ErrorDetail(Shape):
    """OpenAI's error object."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorAnswer(Shape):
    """Every status from 400 on."""

    error: ErrorDetail


class PromptDetails(Shape):
    """``cached_tokens``: prompt tokens found in the prefix cache."""

    cached_tokens: int = Field(ge=0)


class Timings(Shape):
    """Seconds; null for what did not happen. ``first_token_seconds`` is queue and prefill; ``tokens_per_second`` counts
    the tokens after the first of each choice."""

    queue_seconds: float | None
    prefill_seconds: float | None
    first_token_seconds: float | None
    decode_seconds: float | None
    total_seconds: float | None
    tokens_per_second: float | None


class Usage(Shape):
    """``completion_tokens`` counts every generated token, the one that ended the answer too."""

    prompt_tokens: int = Field(ge=0)
    completion_tokens: int = Field(ge=0)
    total_tokens: int = Field(ge=0)
    prompt_tokens_details: PromptDetails
    timings: Timings | None = None


class Alternative(Shape):
    """A likely token. A log-probability of minus infinity is -9999.0."""

    token: str
    logprob: float
    bytes: list[int]


class TokenLogprob(Alternative):
    """The chosen token; ``bytes`` joined over all tokens are the text."""

    top_logprobs: list[Alternative]


class ChatLogprobs(Shape):
    """Log-probabilities of a chat's answer."""

    content: list[TokenLogprob]
    refusal: None


class CalledFunction(Shape):
    """``arguments``: a JSON object as text."""

    name: str
    arguments: str


class ToolCall(Shape):
    """A call that the model makes."""

    id: str
    type: Literal["function"]
    function: CalledFunction


class AssistantMessage(Shape):
    """The answer. ``content`` is null when there is nothing but calls; ``tool_calls`` is there when there are any."""

    role: Literal["assistant"]
    content: str | None
    refusal: None
    tool_calls: list[ToolCall] = Field(default_factory=list)


class ChatChoice(Shape):
    """``cancelled`` is there, and true, when the answer was cancelled; its finish_reason is then "stop"."""

    index: int
    message: AssistantMessage
    logprobs: ChatLogprobs | None
    finish_reason: Finish | Literal["tool_calls"]
    cancelled: Literal[True] = True


class ChatCompletion(Shape):
    """The whole answer."""

    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage


class FunctionNews(Shape):
    """The name comes first, with empty arguments; then the arguments, piece by piece."""

    name: str = ""
    arguments: str


class CallNews(Shape):
    """``id`` and ``type`` come with the first piece of the call ``index``."""

    index: int
    id: str = ""
    type: Literal["function"] = "function"
    function: FunctionNews


class ChatDelta(Shape):
    """News: the role first, then text and calls; empty together with the finish_reason."""

    role: Literal["assistant"] = "assistant"
    content: str = ""
    tool_calls: list[CallNews] = Field(default_factory=list)


class ChatChunkChoice(Shape):
    """As :class:`ChatChoice`."""

    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None
    finish_reason: Finish | Literal["tool_calls"] | None
    cancelled: Literal[True] = True


class ChatChunk(Shape):
    """An event of a stream. ``usage`` only with ``stream_options.include_usage``: null but in the last one."""

    id: str
    object: Literal["chat.completion.chunk"]
    created: int
    model: str
    choices: list[ChatChunkChoice]
    usage: Usage | None = None


class PlainLogprobs(Shape):
    """Log-probabilities of a plain completion, one entry per token."""

    tokens: list[str]
    token_logprobs: list[float]
    top_logprobs: list[dict[str, float]]
    text_offset: list[int]


class PlainChoice(Shape):
    """Choice c of prompt p has the index ``p * n + c``."""

    index: int
    text: str
    logprobs: PlainLogprobs | None
    finish_reason: Finish | None
    cancelled: Literal[True] = True


class PlainCompletion(Shape):
    """The whole answer, and the events of a stream (where finish_reason is null until the end)."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[PlainChoice]
    usage: Usage | None = None


class ModelCard(Shape):
    """``max_model_len``: prompt and answer together; absent while the model loads."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    max_model_len: int = 0


class ModelList(Shape):
    """All served models."""

    object: Literal["list"]
    data: list[ModelCard]


class Tokens(Shape):
    """Answer of ``/tokenize``."""

    tokens: list[int]
    count: int
    max_model_len: int


class Text(Shape):
    """Answer of ``/detokenize``."""

    prompt: str


class Cancelled(Shape):
    """Answer of the cancel route."""

    id: str
    object: Literal["chat.completion.cancelled"]
    cancelled: bool


class Status(Shape):
    """Answer of the probes. ``store``: whether the session store answered last time; only ``/ready`` says it."""

    status: str
    store: Literal["ok", "away"] = "ok"


class Block(Shape):
    """A block of the KV pool."""

    id: int
    state: str
    ref_count: int
    hits: int
    hash: str | None
    owners: list[str]


class KVSequence(Shape):
    """A sequence that owns blocks; ``computed`` of its ``total`` tokens have their K/V in them."""

    id: str
    block_table: list[int]
    computed: int
    total: int


class KVSnapshot(Shape):
    """``/debug/kv``."""

    block_size: int
    blocks: list[Block]
    sequences: list[KVSequence]
