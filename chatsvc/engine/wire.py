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
from collections.abc import Mapping
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
# The usual news: of generations with an only choice that has one more token, and nothing else is new. Their keys, the
# token ids, the texts. In this form they cost a third.
Usual = tuple[list[int], list[int], list[str]]


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
    usual, news: a generation is in one of them.
    replies: number of the call, its result, or the exception it raised.
    healthy: the engine's own verdict.
    """

    usual: Usual
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
    """The engine's side of one generation: a cursor on its logs.

    Attributes:
        done: the end of every choice was told.
    """

    def __init__(self, key: int, generation: Generation) -> None:
        self.key = key
        self.generation = generation
        self.done = False
        self._at = [0] * len(generation.logs)
        self._ended = [False] * len(generation.logs)
        self._cached = 0  # as it was told
        self._steady = False  # an only choice that has begun and holds nothing back, as it was told

    def tell(self, usual: Usual, news: list[News]) -> None:
        """Append what is new to one of them."""
        if not self._steady or not self._usual(usual):
            news.append(self.news())

    def _usual(self, usual: Usual) -> bool:
        generation, at = self.generation, self._at[0]
        log = generation.logs[0]
        if log.finish_reason is not None or log.held or len(log.tokens) != at + 1:
            return False
        token = log.tokens[at]
        if token.logprob is not None or generation.num_cached_tokens != self._cached:
            return False
        self._at[0] = at + 1
        keys, ids, texts = usual
        keys.append(self.key)
        ids.append(token.token_id)
        texts.append(log.pieces[at])
        return True

    def news(self) -> News:
        """All that is new."""
        generation = self.generation
        times = generation.timings
        choices = [self._choice(log) for log in generation.logs if not self._ended[log.index]]
        self.done = all(self._ended)
        self._cached = generation.num_cached_tokens
        self._steady = len(generation.logs) == 1 and times.first_token is not None and not generation.logs[0].held
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


class PlainTokens(dict[int, SampledToken]):
    """Tokens without log-probabilities: one object for each id, whoever has it. Nobody changes them."""

    def __missing__(self, token_id: int) -> SampledToken:
        token = self[token_id] = SampledToken(token_id)
        return token


def hear_usual(known: Mapping[int, Generation], usual: Usual, tokens: PlainTokens) -> None:
    """As :func:`hear`, for the usual news; ``known`` by key."""
    for key, token_id, text in zip(*usual, strict=True):
        generation = known.get(key)
        if generation is None:
            continue
        log = generation.logs[0]
        if log.finish_reason is None:
            log.tokens.append(tokens[token_id])
            log.pieces.append(text)
            generation.notify()


def hear(generation: Generation, news: News, tokens: PlainTokens) -> None:
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
            log.tokens += map(tokens.__getitem__, ids)
        else:
            log.tokens += [SampledToken(i, logprob, top) for i, (logprob, top) in zip(ids, details, strict=True)]
        log.pieces += pieces
        log.held = held
        if end is not None:
            log.finish_reason, log.tail, log.stop_reason, log.error, log.error_status = end
    generation.notify()
