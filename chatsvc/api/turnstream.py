"""A turn as server-sent events."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import suppress
from dataclasses import replace

from chatsvc.api.answers import failure
from chatsvc.api.frames import DONE, FINISH, dumps, error_event, exception_event, usage
from chatsvc.api.replica import LOST, Replica
from chatsvc.api.sse import closing
from chatsvc.api.turn import Turn
from chatsvc.engine.output import FAILED, Delta
from chatsvc.engine.wake import Pace
from chatsvc.errors import StoreError


async def turn_events(
    turn: Turn, cursor: int, model: str, saved: Callable[[Turn], Awaitable[None]], pace: Pace
) -> AsyncIterator[bytes]:
    """The turn's events from ``cursor`` (tokens already seen) to its end.

    Each event is a chat.completion.chunk with the id ``turn:choice:tokens``; text and finish reason share an event, so
    an id always says exactly what its reader has. When text was held back to the very end, the last event's count is
    one more than there are tokens. When the log does not reach back to ``cursor``, the first event is a ``snapshot``: a
    chunk with the whole text so far, in place of all that the reader has.

    Args:
        saved: waits until the turn is stored. Raises StoreError when that takes too long.
    """
    generation, log = turn.generation, turn.generation.logs[0]
    head = dumps(
        {
            "id": generation.request_id,
            "object": "chat.completion.chunk",
            "created": int(turn.answer.created_at),
            "model": model,
        }
    )[:-1]
    if isinstance(generation, Replica):
        await generation.reached(cursor)
        start = generation.snapshot_for(cursor)
        if start != cursor:
            cursor = start
            text = "".join(log.pieces[:start])
            yield b"event: snapshot\n" + _chunk(turn, head, Delta(0, text, (), start), text, True, False).encode()
    has_tail = cursor > len(log.tokens)
    begun = cursor > 0
    async with closing(generation.read([min(cursor, len(log.tokens))], pace)) as reads:
        async for (delta,) in reads:
            text = delta.text if begun else turn.prefix + delta.text
            if has_tail and log.tail and text.endswith(log.tail):
                text = text[: -len(log.tail)]
            if delta.finish_reason == "error":
                if text:
                    yield _chunk(turn, head, replace(delta, finish_reason=None), text, not begun, False).encode()
                with suppress(StoreError):
                    await saved(turn)
                if isinstance(generation, Replica) and generation.code is not None:
                    yield error_event(delta.error or FAILED, generation.code)
                else:
                    yield exception_event(failure(log))
                return
            if text or delta.finish_reason is not None:
                yield _chunk(turn, head, delta, text, not begun, bool(log.tail)).encode()
                begun = True
    try:
        await saved(turn)
    except StoreError:
        yield error_event("The answer is complete, but the session store has not taken it yet", "store_unavailable")
        return
    if turn.lost:
        yield error_event(LOST, "turn_over")
        return
    counts = dumps(generation.usage if isinstance(generation, Replica) else usage([generation]))
    yield f'data: {head},"choices":[],"usage":{counts}}}\n\n'.encode() + DONE


def _chunk(turn: Turn, head: str, delta: Delta, text: str, first: bool, tail: bool) -> str:
    seen = delta.cursor + (1 if delta.finish_reason is not None and tail else 0)
    role = '"role":"assistant",' if first else ""
    reason = "null" if delta.finish_reason is None else f'"{FINISH[delta.finish_reason]}"'
    cancelled = ',"cancelled":true' if delta.finish_reason == "abort" else ""
    content = f'"delta":{{{role}"content":{dumps(text)}}}'
    choice = f'{{"index":0,{content},"logprobs":null,"finish_reason":{reason}{cancelled}}}'
    return f'id: {turn.id}:0:{seen}\ndata: {head},"choices":[{choice}],"usage":null}}\n\n'
