"""The request bodies. ``null`` means absent for every optional field; unknown fields are kept aside and ignored, but
see :mod:`chatsvc.api.unsupported` for those that OpenAI or others define and that would change the answer.

Types are strict: ``"3"`` is not 3, ``true`` is not 1, ``1.5`` is no integer, NaN and Infinity are no numbers.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field
from pydantic.config import JsonDict

INT64 = 2**63
TOKEN: JsonDict = {"type": "integer", "minimum": 0, "description": "below the size of the vocabulary"}

Int64 = Annotated[int, Field(ge=-INT64, le=INT64 - 1)]
Int32 = Annotated[int, Field(ge=-(2**31), le=2**31 - 1)]
Penalty = Annotated[float, Field(ge=-2, le=2)]
Unit = Annotated[float, Field(ge=0, le=1)]
FunctionName = Annotated[str, Field(pattern=r"^[A-Za-z0-9_.:-]{1,64}$")]
StopString = Annotated[str, Field(min_length=1, max_length=1024)]


def described(**schema: Any) -> ConfigDict:
    """The configuration of a body whose JSON schema says more than its fields can: what is checked elsewhere."""
    return ConfigDict(json_schema_extra=schema)


def either(*forms: Mapping[str, Any]) -> list[dict[str, Any]]:
    """One of several forms: each names the fields it needs (which are not null then) and what they have to be."""
    return [
        {
            "required": list(form),
            "properties": {name: {"not": {"type": "null"}} if kind is ... else kind for name, kind in form.items()},
        }
        for form in forms
    ]


class Body(BaseModel):
    """Base of all request bodies."""

    model_config = ConfigDict(strict=True, extra="allow", allow_inf_nan=False)


class SamplingFields(Body):
    """What every generating route understands."""

    temperature: Annotated[float, Field(ge=0, le=2)] | None = Field(None, description="0 is greedy; default 1")
    top_p: Unit | None = Field(None, description="default 1 (off); 0 keeps the most likely token only")
    top_k: Annotated[int, Field(ge=-1)] | None = Field(None, description="0 or -1 (default): off")
    min_p: Unit | None = Field(None, description="default 0 (off)")
    repetition_penalty: Annotated[float, Field(ge=0.01, le=100)] | None = Field(
        None, description="multiplicative, over prompt and answer; default 1 (off)"
    )
    presence_penalty: Penalty | None = Field(None, description="additive, over the answer; default 0")
    frequency_penalty: Penalty | None = Field(None, description="additive, over the answer; default 0")
    logit_bias: dict[str, Annotated[float, Field(ge=-100, le=100)]] | None = Field(None, description="token id -> bias")
    seed: Int64 | None = Field(None, description="same seed, same answer; default: a random one")
    stop: StopString | Annotated[list[StopString], Field(max_length=4)] | None = Field(
        None, description="up to four strings that end the text and are not part of it"
    )
    stop_token_ids: Annotated[list[int], Field(max_length=1024)] | None = None
    min_tokens: Annotated[int, Field(ge=0)] | None = Field(None, description="default 0")
    max_tokens: Annotated[int, Field(ge=1)] | None = Field(
        None, description="default: the room left in the context. One that does not fit is refused"
    )
    ignore_eos: bool | None = Field(None, description="the model's end tokens do not end the answer")
    n: Annotated[int, Field(ge=1)] | None = Field(None, description="number of choices, default 1")
    priority: Int32 | None = Field(None, description="larger is less urgent; used by the policy 'priority'")
    cache_salt: Annotated[str, Field(max_length=256)] | None = Field(
        None, description="prefixes are shared only between requests with the same salt"
    )
    user: str | None = Field(None, description="accepted and ignored")


class StreamOptions(Body):
    """OpenAI's stream_options."""

    include_usage: bool | None = Field(None, description="one more chunk at the end, with the usage and no choices")


class GenerateFields(SamplingFields):
    """Common to chat and plain completions."""

    model: str | None = Field(None, description="the served model's name; without it: the one that is served")
    stream: bool | None = None
    stream_options: StreamOptions | None = Field(None, description="only together with stream")
    best_of: Annotated[int, Field(ge=1)] | None = Field(
        None,
        description="sample that many, return the n best by mean log-probability; beam search: its width",
    )
    use_beam_search: bool | None = Field(None, description="the n best hypotheses; streamed text comes at the end")
    length_penalty: Annotated[float, Field(ge=-10, le=10)] | None = Field(None, description="beam search; default 1")
    early_stopping: bool | Literal["never"] | None = Field(None, description="beam search; default false")


class ContentPart(Body):
    """A part of a message's content. Only text is understood; a refusal in an answer."""

    model_config = described(
        anyOf=either({"type": {"const": "text"}, "text": ...}, {"type": {"const": "refusal"}, "refusal": ...})
    )

    type: str
    text: str | None = None
    refusal: str | None = None


class FunctionCall(Body):
    """The function an assistant turn called."""

    name: str
    arguments: str


class ToolCall(Body):
    """A call in an assistant turn of the history."""

    id: str
    type: Literal["function"] | None = None
    function: FunctionCall


class ChatMessage(Body):
    """One message. ``developer`` counts as ``system``. Only the assistant's may have no content."""

    model_config = described(anyOf=either({"role": {"const": "assistant"}}, {"content": ...}))

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[ContentPart] | None = None
    name: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None


class FunctionSpec(Body):
    """A function that the model may call."""

    name: FunctionName
    description: str | None = None
    parameters: dict[str, Any] | None = Field(None, description="a JSON schema; the model is shown it, not bound by it")
    strict: bool | None = Field(None, description="true is refused")


class Tool(Body):
    """A tool. Only functions."""

    type: Literal["function"]
    function: FunctionSpec


class FunctionChoice(Body):
    """The name of one of the functions."""

    name: str


class NamedTool(Body):
    """The answer has to call this function."""

    type: Literal["function"]
    function: FunctionChoice


ToolChoice = Literal["none", "auto", "required"] | NamedTool


class ChatRequest(GenerateFields):
    """``POST /v1/chat/completions``. ``max_completion_tokens`` wins over the older ``max_tokens``."""

    messages: Annotated[list[ChatMessage], Field(min_length=1)]
    tools: Annotated[list[Tool], Field(max_length=128)] | None = None
    tool_choice: ToolChoice | None = Field(None, description="default auto; none: the model is shown no tools")
    parallel_tool_calls: bool | None = Field(None, description="false: one call at most; default true")
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    add_generation_prompt: bool | None = Field(None, description="default: true unless continue_final_message")
    continue_final_message: bool | None = Field(None, description="go on with the last message, an assistant's")


class CompletionRequest(GenerateFields):
    """``POST /v1/completions``. ``prompt`` is a string, a list of strings, of token ids, or of lists of token ids.

    Unlike OpenAI's, the default of ``max_tokens`` is the room left, not 16.
    """

    prompt: Any = Field(
        json_schema_extra={
            "oneOf": [
                {"type": "string"},
                {"type": "array", "items": {"type": "string"}, "minItems": 1},
                {"type": "array", "items": TOKEN, "minItems": 1},
                {"type": "array", "items": {"type": "array", "items": TOKEN, "minItems": 1}, "minItems": 1},
            ]
        }
    )
    logprobs: Annotated[int, Field(ge=0, le=20)] | None = Field(
        None, description="how many alternatives to report (up to 20; OpenAI: 5)"
    )


class TokenizeRequest(Body):
    """``POST /tokenize``: either ``prompt`` or ``messages``."""

    model_config = described(oneOf=either({"prompt": ...}, {"messages": ...}))

    model: str | None = None
    prompt: str | None = None
    messages: Annotated[list[ChatMessage], Field(min_length=1)] | None = None
    tools: Annotated[list[Tool], Field(max_length=128)] | None = Field(None, description="only with messages")
    add_special_tokens: bool | None = Field(None, description="a prompt gets the begin token, default true")
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None


class DetokenizeRequest(Body):
    """``POST /detokenize``."""

    model: str | None = None
    tokens: list[Annotated[int, Field(json_schema_extra={"minimum": 0})]]


__all__ = [
    "ChatMessage",
    "ChatRequest",
    "CompletionRequest",
    "ContentPart",
    "DetokenizeRequest",
    "GenerateFields",
    "NamedTool",
    "SamplingFields",
    "TokenizeRequest",
    "Tool",
    "ToolChoice",
]
