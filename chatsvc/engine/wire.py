"""What crosses between the API's process and the engine's: frames of plain data on a socket pair that only they have.

A frame is its length (8 bytes, big endian) and a pickle. Pickle, because both ends are the same program, started by one
user, and nobody else can write to the socket.

From the API: :class:`Ask` (start a generation), :class:`Drop` (cancel it) and :class:`Call` (a question with a reply).
From the engine: :class:`Batch`, at most one for each step, with the news of all generations, and at least one for each
:data:`TICK`, so that silence has a meaning.
"""

from __future__ import annotations

import asyncio
import pickle
import socket
from dataclasses import dataclass
from typing import Any

from chatsvc.engine.output import Generation, OutputLog
from chatsvc.errors import ChatsvcError, EngineError
from chatsvc.scheduler.params import SamplingParams
from chatsvc.scheduler.plan import SampledToken

TICK = 0.25  # seconds
_LENGTH = 8

Connection = tuple[asyncio.StreamReader, asyncio.StreamWriter]

# One choice's news: index, token ids, their text, (log-probability, alternatives) of each or None, text that is held
# back, the end or None. The end: finish reason, tail, stop reason, error, error status.
End = tuple[Any, str, Any, Any, int]
ChoiceNews = tuple[int, list[int], list[str], list[tuple[Any, Any]] | None, str, End | None]
# One generation's: key, cached prompt tokens, times (scheduled, first token, finished), choices, whether that was all.
News = tuple[int, int, tuple[float | None, float | None, float | None], list[ChoiceNews], bool]


@dataclass(slots=True)
class Ask:
    """``key``: the generation's name on the wire, never used twice."""

    key: int
    request_id: str
    prompt_token_ids: list[int]
    params: SamplingParams
    tenant: str
    cache_salt: str
    priority: int


@dataclass(slots=True)
class Drop:
    """``error``, ``status``: as in :meth:`Generation.cancel`."""

    key: int
    error: str | None
    status: int


@dataclass(slots=True)
class Call:
    """A method of the engine's process; answered by the reply of the same number."""

    number: int
    method: str
    args: tuple[Any, ...]


@dataclass(slots=True)
class Batch:
    """Attributes:
    news: in the order of their happening.
    replies: number of the call, its result, or the exception it raised.
    healthy: the engine's own verdict.
    """

    news: list[News]
    replies: list[tuple[int, Any, ChatsvcError | None]]
    healthy: bool


@dataclass(frozen=True, slots=True)
class Limits:
    """What the API's side has to know to refuse at once. See :class:`chatsvc.engine.config.EngineConfig`."""

    block_size: int
    max_queue: int
    stuck_after: float
    give_up_after: float


def frame(message: object) -> bytes:
    data = pickle.dumps(message, pickle.HIGHEST_PROTOCOL)
    return len(data).to_bytes(_LENGTH, "big") + data


async def receive(reader: asyncio.StreamReader) -> Any:
    """The next message. Raises: EOFError when the other side has ended, however it did."""
    try:
        size = int.from_bytes(await reader.readexactly(_LENGTH), "big")
        return pickle.loads(await reader.readexactly(size))
    except (asyncio.IncompleteReadError, ConnectionError) as e:
        raise EOFError("the other process has ended") from e


async def connect(sock: socket.socket) -> Connection:
    return await asyncio.open_unix_connection(sock=sock)


def portable(e: Exception) -> ChatsvcError:
    """An exception that the other side can raise: ours as it is, a foreign one by name."""
    return e if isinstance(e, ChatsvcError) else EngineError(f"{type(e).__name__}: {e}")


class Teller:
    """The engine's side of one generation: a cursor on its logs."""

    def __init__(self, key: int, generation: Generation) -> None:
        self.key = key
        self.generation = generation
        self._at = [0] * len(generation.logs)
        self._ended = [False] * len(generation.logs)

    @property
    def done(self) -> bool:
        """The end of every choice was told."""
        return all(self._ended)

    def news(self) -> News:
        generation = self.generation
        times = generation.timings
        choices = [self._choice(log) for log in generation.logs if not self._ended[log.index]]
        return (
            self.key,
            generation.num_cached_tokens,
            (times.scheduled, times.first_token, times.finished),
            [c for c in choices if c is not None],
            self.done,
        )

    def _choice(self, log: OutputLog) -> ChoiceNews | None:
        index, at = log.index, self._at[log.index]
        tokens, pieces = log.tokens[at:], log.pieces[at:]
        end: End | None = None
        if log.finish_reason is not None:
            end = (log.finish_reason, log.tail, log.stop_reason, log.error, log.error_status)
            self._ended[index] = True
        elif not tokens:
            return None
        self._at[index] = at + len(tokens)
        detailed = any(t.logprob is not None for t in tokens)
        details = [(t.logprob, t.top) for t in tokens] if detailed else None
        return index, [t.token_id for t in tokens], pieces, details, log.held, end


def hear(generation: Generation, news: News) -> None:
    """The API's side: append the news to its own logs. A choice that has ended here hears nothing more."""
    _, generation.num_cached_tokens, (scheduled, first, finished), choices, _ = news
    times = generation.timings
    if times.finished is None:
        times.scheduled, times.first_token, times.finished = scheduled, first, finished
    for index, ids, pieces, details, held, end in choices:
        log = generation.logs[index]
        if log.finish_reason is not None:
            continue
        if details is None:
            log.tokens += map(SampledToken, ids)
        else:
            log.tokens += [SampledToken(i, logprob, top) for i, (logprob, top) in zip(ids, details, strict=True)]
        log.pieces += pieces
        log.held = held
        if end is not None:
            log.finish_reason, log.tail, log.stop_reason, log.error, log.error_status = end
    generation.notify()
