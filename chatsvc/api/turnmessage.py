"""A turn as the session keeps it: what of its generation is written down."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from chatsvc.api.frames import usage
from chatsvc.api.turn import Turn, timing
from chatsvc.engine.output import FAILED
from chatsvc.sessions.base import Message, Status


def message_of(turn: Turn, eos: Collection[int], *, final: bool, ready: bool) -> Message:
    """The answer as it is now: text and ids so far, and at the end its status and usage.

    Args:
        eos: the model's end tokens.
        final: the generation has ended.
        ready: whether the engine still takes requests.
    """
    choice = turn.generation.logs[0]
    reason = choice.finish_reason
    failed = final and reason == "error"
    return replace(
        turn.answer,
        content=turn.prefix + choice.text,
        status=_status(turn, ready) if final else "running",
        token_ids=_prompt_ids(turn, eos),
        usage=usage([turn.generation]) if final else None,
        finish_reason=("length" if reason == "length" else "stop") if final and reason in ("stop", "length") else None,
        timing=timing(turn.generation) if final else None,
        error={"message": choice.error or FAILED, "status": choice.error_status} if failed else None,
    )


def _status(turn: Turn, ready: bool) -> Status:
    reason = turn.generation.logs[0].finish_reason
    if reason in ("stop", "length"):
        return "done"
    if not ready:  # the server stops, or its engine died
        return turn.ended_as or "interrupted"
    return "failed" if reason == "error" else turn.ended_as or "cancelled"


def _prompt_ids(turn: Turn, eos: Collection[int]) -> list[int]:
    """The ids that stand for this answer in the prompts of later turns.

    Not the end token, which the template writes itself. None at all when a stop string cut text off, or when it goes on
    with an answer that has none: the ids say something else than the text then, and the text counts.
    """
    choice, before = turn.generation.logs[0], turn.answer.token_ids
    ids = before + choice.token_ids
    if isinstance(choice.stop_reason, str) or (turn.prefix and not before):
        return []
    if choice.finish_reason == "stop" and ids:
        last = ids[-1]
        if last in eos or last == choice.stop_reason:
            ids.pop()
    return ids
