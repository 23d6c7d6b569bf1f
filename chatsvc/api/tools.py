"""``tools`` and ``tool_choice``: what the model is shown, how its answer has to begin, and how it is read."""

from __future__ import annotations

import json
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from chatsvc.api.schema import Tool, ToolChoice
from chatsvc.errors import InvalidRequest
from chatsvc.text.toolparser import CLOSE, ToolCallParser
from chatsvc.text.toolprompt import forced_start

Mode = Literal["none", "auto", "required"]


def new_call_id() -> str:
    """``call_...``, unique."""
    return f"call_{uuid.uuid4().hex[:24]}"


@dataclass(frozen=True, slots=True)
class CallReading:
    """How an answer to a request with tools is read.

    Attributes:
        start: what the answer began with before the first generated token.
        names: of the functions. A call of another one is text.
        max_calls: None without a limit.
    """

    start: str
    names: frozenset[str]
    max_calls: int | None

    def parser(self, *, eager: bool, new_id: Callable[[], str] = new_call_id) -> ToolCallParser:
        """For one choice, with ``start`` in it."""
        parser = ToolCallParser(new_id, eager=eager, names=self.names, max_calls=self.max_calls)
        parser.push(self.start)
        return parser


@dataclass(frozen=True, slots=True)
class ToolUse:
    """The tools of one request, checked. An answer that is forced to be a call ends with the tag it begins with.

    Attributes:
        shown: as chat templates expect them.
        forced: the answer has to begin with a call.
        name: of the function it has to call, None for any.
        max_calls: None without a limit.
    """

    shown: list[dict[str, Any]]
    forced: bool = False
    name: str | None = None
    max_calls: int | None = None

    def start(self, *, native: bool) -> str:
        """What the answer is made to begin with; empty when the model decides."""
        return forced_start(self.name, native=native) if self.forced else ""

    @property
    def size(self) -> int:
        """Characters of their description."""
        return len(json.dumps(self.shown, ensure_ascii=False, separators=(",", ":")))

    @property
    def stop(self) -> tuple[str, ...]:
        """Stop strings of the answer: after a forced call nothing is asked for."""
        return (CLOSE,) if self.forced else ()

    def reading(self, *, native: bool) -> CallReading:
        """How the answer is read."""
        names = frozenset(tool["function"]["name"] for tool in self.shown)
        return CallReading(self.start(native=native), names, self.max_calls)


def tool_use(tools: Sequence[Tool] | None, choice: ToolChoice | None, parallel: bool | None) -> ToolUse | None:
    """The tools of a request; None when the model is shown none.

    Raises:
        InvalidRequest: a choice without tools or of a tool that is not there, two tools of one name, or ``strict``.
    """
    mode, name = _choice(choice)
    if not tools:
        if mode == "required":
            raise InvalidRequest("tool_choice: there are no tools to choose from", param="tool_choice")
        return None
    names: set[str] = set()
    for i, tool in enumerate(tools):
        path = f"tools.{i}.function"
        if tool.function.strict:
            raise InvalidRequest(
                f"{path}.strict: true is not supported: the arguments are not forced to follow the schema",
                param=f"{path}.strict",
                code="unsupported_parameter",
            )
        if tool.function.name in names:
            raise InvalidRequest(f"{path}.name: {tool.function.name} is there twice", param=f"{path}.name")
        names.add(tool.function.name)
    if name is not None and name not in names:
        raise InvalidRequest(f"tool_choice: there is no tool {name[:64]!r}", param="tool_choice")
    if mode == "none":
        return None
    if mode == "required" and len(names) == 1:
        (name,) = names
    one = parallel is False or (name is not None and choice != "required")
    return ToolUse([_shown(t) for t in tools], mode == "required", name, 1 if one else None)


def _choice(choice: ToolChoice | None) -> tuple[Mode, str | None]:
    if choice is None:
        return "auto", None
    return (choice, None) if isinstance(choice, str) else ("required", choice.function.name)


def _shown(tool: Tool) -> dict[str, Any]:
    function: dict[str, Any] = {"name": tool.function.name}
    if tool.function.description is not None:
        function["description"] = tool.function.description
    function["parameters"] = tool.function.parameters or {"type": "object", "properties": {}}
    return {"type": "function", "function": function}
