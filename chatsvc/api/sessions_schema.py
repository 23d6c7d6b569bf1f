"""The request bodies of ``/v1/sessions``, and the fields that would be swallowed there and are refused instead."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import Field

from chatsvc.api.schema import Body, SamplingFields

Title = Annotated[str, Field(max_length=200)]
System = Annotated[str, Field(max_length=256 * 1024)]

# Field -> values that ask for nothing, as in chatsvc.api.unsupported: what chat knows and a turn does not.
TURN_SWALLOWED: Mapping[str, tuple[Any, ...]] = {
    "role": ("user",),
    "messages": (),
    "prompt": (),
    "system": (),
    "title": (),
    "name": (),
    "stream": (True,),
    "stream_options": ({"include_usage": True},),
    "logprobs": (False,),
    "top_logprobs": (0,),
    "best_of": (1,),
    "use_beam_search": (False,),
    "length_penalty": (1, 1.0),
    "early_stopping": (False,),
    "continue_final_message": (False,),
    "add_generation_prompt": (True,),
    "content": (),  # of regenerate; a message has the field
    "parent_id": (),
    "message_id": (),
}
SESSION_SWALLOWED: Mapping[str, tuple[Any, ...]] = dict.fromkeys(("messages", "content", "role", "id", "parent_id"), ())
FORK_SWALLOWED: Mapping[str, tuple[Any, ...]] = dict.fromkeys(("messages", "content", "parent_id", "system"), ())


class SessionRequest(Body):
    """``POST /v1/sessions`` and ``PATCH /v1/sessions/{id}``. A field that is absent or null stays as it is."""

    title: Title | None = None
    system: System | None = Field(None, description="the system prompt of every turn")


class TurnFields(SamplingFields):
    """What a turn may say about sampling. A turn has one answer: ``n`` is 1."""

    model: str | None = Field(None, description="the served model's name; without it: the one that is served")
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None


class MessageRequest(TurnFields):
    """``POST /v1/sessions/{id}/messages``."""

    content: Annotated[str, Field(min_length=1)]
    parent_id: str | None = Field(
        None,
        description="the answer that this message follows; default: the newest message. Another one makes a branch "
        "(to edit a message, give its own parent_id); 'root' starts the conversation anew",
    )


class RegenerateRequest(TurnFields):
    """``POST /v1/sessions/{id}/messages/{mid}/regenerate``."""

    continue_final_message: bool | None = Field(
        None, description="go on with the answer, which was cut short: the new one begins with its text"
    )


class ForkRequest(Body):
    """``POST /v1/sessions/{id}/fork``."""

    message_id: str = Field(description="the last message that the new session has")
    title: Title | None = Field(None, description="default: this session's")
