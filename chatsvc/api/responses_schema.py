"""The body of ``POST /v1/responses``, and what OpenAI's has and this server has not."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import Field

from chatsvc.api.schema import Body, FunctionName, SamplingFields, described, either
from chatsvc.api.unsupported import NEUTRAL

# Field -> values that ask for nothing, as in chatsvc.api.unsupported.
RESPONSES_NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    **{name: values for name, values in NEUTRAL.items() if name not in ("tools", "tool_choice", "store")},
    "include": ([],),
    "reasoning": ({}, {"effort": "none"}, {"effort": None}, {"effort": None, "summary": None}),
    "truncation": ("disabled",),
    "conversation": (),
    "context_management": ([],),
    "max_tool_calls": (),
    "prompt": (),
    "top_logprobs": (0,),
    "logprobs": (False, 0),
    "messages": (),
    "max_completion_tokens": (),
    "best_of": (1,),
    "use_beam_search": (False,),
    "continue_final_message": (False,),
    "add_generation_prompt": (True,),
}


class InputItem(Body):
    """A message (``role`` and ``content``), a ``function_call`` or a ``function_call_output``."""

    model_config = described(
        anyOf=either(
            {"type": {"enum": ["message", None]}, "role": ..., "content": ...},
            {"type": {"const": "function_call"}, "call_id": ..., "name": ..., "arguments": ...},
            {"type": {"const": "function_call_output"}, "call_id": ..., "output": ...},
        )
    )

    type: str | None = Field(None, description="message (default), function_call or function_call_output")
    role: Literal["system", "developer", "user", "assistant"] | None = None
    content: str | list[InputPart] | None = None
    call_id: str | None = None
    name: str | None = None
    arguments: str | None = None
    output: str | list[InputPart] | None = None


class InputPart(Body):
    """A part of a content or an output: ``input_text``, or ``output_text`` and ``refusal`` of an answer."""

    model_config = described(
        anyOf=either(
            {"type": {"enum": ["input_text", "output_text"]}, "text": ...},
            {"type": {"const": "refusal"}, "refusal": ...},
        )
    )

    type: str
    text: str | None = None
    refusal: str | None = None


class ResponseTool(Body):
    """A function that the model may call."""

    type: Literal["function"]
    name: FunctionName
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = Field(None, description="true is refused")


class ResponseNamedTool(Body):
    """The answer has to call this function."""

    type: Literal["function"]
    name: str


class TextFormat(Body):
    """Plain text only."""

    type: Literal["text"]


class TextOptions(Body):
    """``verbosity`` other than medium is refused."""

    format: TextFormat | None = None
    verbosity: Literal["medium"] | None = None


class ResponseRequest(SamplingFields):
    """``POST /v1/responses``. The sampling fields are those of chat; ``max_tokens`` is ``max_output_tokens`` here."""

    input: str | Annotated[list[InputItem], Field(min_length=1)]
    model: str | None = Field(None, description="the served model's name; without it: the one that is served")
    instructions: str | None = Field(None, description="system prompt of this answer; later ones do not inherit it")
    previous_response_id: str | None = Field(None, description="the answer that the input follows")
    max_output_tokens: Annotated[int, Field(ge=1)] | None = None
    tools: Annotated[list[ResponseTool], Field(max_length=128)] | None = None
    tool_choice: Literal["none", "auto", "required"] | ResponseNamedTool | None = None
    parallel_tool_calls: bool | None = None
    stream: bool | None = None
    store: bool | None = Field(None, description="default: true where the server keeps sessions")
    background: bool | None = Field(None, description="answer at once; the generation goes on without a reader")
    metadata: Annotated[dict[str, Annotated[str, Field(max_length=512)]], Field(max_length=16)] | None = None
    text: TextOptions | None = None
