"""The part of ``/openapi.json`` about Responses."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from chatsvc.api.answers_schema import Shape, Timings
from chatsvc.api.openapi import GENERATING, PLAIN, Operation
from chatsvc.api.responses_items import ITEMS_LIMIT, ITEMS_MAX
from chatsvc.api.responses_schema import ResponseRequest

STORE = {503: "The session store cannot answer; Retry-After says when to come back"}
MISSING = {404: "There is no such response, or it is not the caller's"}
ItemStatus = Literal["in_progress", "completed", "incomplete"]


class OutputText(Shape):
    """A text of the answer."""

    type: Literal["output_text"]
    text: str
    annotations: list[Any] = Field(max_length=0)
    logprobs: list[Any] = Field(max_length=0)


class OutputMessage(Shape):
    """Text; empty while it begins."""

    id: str
    type: Literal["message"]
    status: ItemStatus
    role: Literal["assistant"]
    content: list[OutputText]


class OutputCall(Shape):
    """A function call. ``arguments``: a JSON object as text."""

    id: str
    type: Literal["function_call"]
    status: ItemStatus
    call_id: str
    name: str
    arguments: str


class InputText(Shape):
    """A text of the input."""

    type: Literal["input_text"]
    text: str


class InputMessage(Shape):
    """A message that the caller gave."""

    id: str
    type: Literal["message"]
    status: Literal["completed"]
    role: Literal["user", "system"]
    content: list[InputText]


class CallOutput(Shape):
    """What a function gave."""

    id: str
    type: Literal["function_call_output"]
    status: Literal["completed"]
    call_id: str
    output: str


class ItemList(Shape):
    """A page of items; ``last_id`` is the next page's ``after``."""

    object: Literal["list"]
    data: list[InputMessage | OutputMessage | OutputCall | CallOutput]
    first_id: str | None
    last_id: str | None
    has_more: bool


class ResponseDeleted(Shape):
    """What DELETE answers."""

    id: str
    object: Literal["response"]
    deleted: Literal[True]


class ResponseFunction(Shape):
    """A function as it was given."""

    type: Literal["function"]
    name: str
    description: str | None
    parameters: dict[str, Any] | None
    strict: Literal[False]


class ChosenFunction(Shape):
    """``tool_choice`` of one function."""

    type: Literal["function"]
    name: str


class ResponseError(Shape):
    """Why it failed."""

    code: str
    message: str


class IncompleteDetails(Shape):
    """Why it is incomplete."""

    reason: Literal["max_output_tokens"]


class InputDetails(Shape):
    """``cached_tokens``: input tokens found in the prefix cache."""

    cached_tokens: int
    cache_write_tokens: Literal[0]


class OutputDetails(Shape):
    """There is no reasoning apart."""

    reasoning_tokens: Literal[0]


class ResponseUsage(Shape):
    """As chat's usage, in other words."""

    input_tokens: int
    input_tokens_details: InputDetails
    output_tokens: int
    output_tokens_details: OutputDetails
    total_tokens: int
    timings: Timings | None


class NoReasoning(Shape):
    """There is none."""

    effort: None
    summary: None


class PlainText(Shape):
    """The only format."""

    type: Literal["text"]


class TextShape(Shape):
    """How text comes."""

    format: PlainText


class ResponseObject(Shape):
    """A response. ``usage`` is null until it has ended."""

    id: str
    object: Literal["response"]
    created_at: int
    status: Literal["in_progress", "completed", "incomplete", "failed", "cancelled"]
    error: ResponseError | None
    incomplete_details: IncompleteDetails | None
    instructions: str | None
    model: str
    max_output_tokens: int | None
    parallel_tool_calls: bool
    previous_response_id: str | None
    temperature: float
    top_p: float
    tool_choice: Literal["none", "auto", "required"] | ChosenFunction
    tools: list[ResponseFunction]
    store: bool
    background: bool
    metadata: dict[str, str]
    output: list[OutputMessage | OutputCall]
    reasoning: NoReasoning
    text: TextShape
    truncation: Literal["disabled"]
    usage: ResponseUsage | None


class ResponseEvent(Shape):
    """OpenAI's events, named by ``type``; each also has the fields of its type, and a number."""

    model_config = Shape.model_config | {"extra": "allow"}

    type: Literal[
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
        "response.output_text.delta",
        "response.output_text.done",
        "response.content_part.done",
        "response.function_call_arguments.delta",
        "response.function_call_arguments.done",
        "response.output_item.done",
        "response.completed",
        "response.incomplete",
        "response.failed",
        "error",
    ]
    sequence_number: int
    response: ResponseObject | None = None


ONE = "/v1/responses/{id}"

RESPONSE_OPERATIONS = (
    Operation(
        "post",
        "/v1/responses",
        "Answer, and remember it as a turn of a session",
        ResponseRequest,
        ResponseObject,
        ResponseEvent,
        errors=GENERATING | {409: "The previous response is still being made"},
    ),
    Operation(
        "get",
        ONE,
        "A stored response; stream=true joins one that is being made, after the event starting_after",
        answer=ResponseObject,
        events=ResponseEvent,
        errors=MISSING | STORE | {400: PLAIN[400]},
        query={
            "stream": {"type": "string", "enum": ["true", "false"]},
            "starting_after": {"type": "integer", "minimum": 0, "maximum": 999_999_999},
        },
    ),
    Operation(
        "post",
        f"{ONE}/cancel",
        "End a response that is being made in the background",
        answer=ResponseObject,
        errors=MISSING | STORE | {400: "It is not one in the background"},
    ),
    Operation(
        "delete",
        ONE,
        "Forget a response; one that is being made ends",
        answer=ResponseDeleted,
        errors=MISSING | STORE,
    ),
    Operation(
        "get",
        f"{ONE}/input_items",
        "The items that it was made from, those of the responses before it among them",
        answer=ItemList,
        errors=MISSING | STORE | {400: PLAIN[400]},
        query={
            "limit": {"type": "integer", "minimum": 1, "maximum": ITEMS_MAX, "default": ITEMS_LIMIT},
            "order": {"type": "string", "enum": ["asc", "desc"], "default": "desc"},
            "after": {"type": "string"},
        },
    ),
)
