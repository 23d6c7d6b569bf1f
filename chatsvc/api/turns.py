"""Turns: generations that belong to a session and not to a connection.

A turn is one answer to one user message. It is accepted when the engine has taken it and the store holds both messages
(the answer as ``running``): only then does the caller get a stream. What the engine or the store refuses leaves no
trace. From then on the turn goes on by itself: readers come and go, each a cursor on the output log. With no reader for
``resume_grace`` seconds it is cancelled. While it runs, its text so far is written down once a second, so a killed
process loses no more than that; the final text is written once, and tried again until the store takes it.

One object per app, in the event loop; no locks but one per session while a turn is being accepted.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from weakref import WeakValueDictionary

from chatsvc.api.frames import DONE, FINISH, dumps, error_event, usage
from chatsvc.api.services import Services
from chatsvc.api.sse import closing
from chatsvc.engine.output import Delta, Generation
from chatsvc.errors import Conflict, NotFound, RequestError, StoreError
from chatsvc.sessions.base import Message, SessionStore, Status

log = logging.getLogger("chatsvc.api")

CHECKPOINT = 0.8  # seconds between writes of a running answer
KEEP_ALIVE = 2.0  # without news it is written as often, so that a long wait does not outlive its session
SAVE_WAIT = 6.0  # seconds a reader waits at the end for the store; the turn itself waits as long as it takes
RETRY_CAP = 5.0
BURIAL_DELAYS = (1.0, 5.0, 15.0)

Key = tuple[str, str]  # tenant, session id


class TurnRunning(Conflict):
    """A turn of this session is running and is being read. ``turn_id`` names it."""

    def __init__(self, turn_id: str) -> None:
        super().__init__("A turn of this session is running; wait for its end or cancel it", code="turn_running")
        self.turn_id = turn_id


@dataclass(eq=False)
class Turn:
    """One running (or just ended) answer.

    Attributes:
        answer: the message as it was accepted; its id is the turn's.
        readers: streams attached now.
        ended_as: what the end counts as when somebody cancels the generation; None: nobody did.
        saved: set when the final text is in the store (or its session is gone).
    """

    key: Key
    answer: Message
    generation: Generation
    readers: int = 0
    ended_as: Status | None = None
    saved: asyncio.Event = field(default_factory=asyncio.Event)
    task: asyncio.Task[None] | None = None
    grace: asyncio.TimerHandle | None = None

    @property
    def id(self) -> str:
        return self.answer.id

    @property
    def running(self) -> bool:
        return not self.saved.is_set()

    def end(self, status: Status) -> None:
        """Cancel the generation, for the given reason. The first reason counts."""
        if not self.generation.finished:
            self.ended_as = self.ended_as or status
            self.generation.cancel()


class Turns:
    """The turns of this process, at most one running per session."""

    def __init__(self, services: Services, store: SessionStore) -> None:
        self._services = services
        self._store = store
        self._turns: dict[Key, Turn] = {}
        self._locks: WeakValueDictionary[Key, asyncio.Lock] = WeakValueDictionary()
        self._burials: set[asyncio.Task[None]] = set()
        self._closing = False

    def lock(self, key: Key) -> asyncio.Lock:
        """Held while a turn of the session is being accepted or ended by a request."""
        lock = self._locks.get(key)
        if lock is None:
            lock = self._locks[key] = asyncio.Lock()
        return lock

    def running(self, key: Key) -> Turn | None:
        """The session's running turn."""
        turn = self._turns.get(key)
        return turn if turn is not None and turn.running else None

    async def make_way(self, key: Key) -> None:
        """Before a new turn: one that somebody reads stays (409), one that nobody reads is interrupted.

        Raises: TurnRunning; StoreError when the old turn's text cannot be stored.
        """
        turn = self.running(key)
        if turn is None:
            return
        if turn.readers:
            raise TurnRunning(turn.id)
        turn.end("interrupted")
        await self._await_saved(turn)

    async def start(self, key: Key, new: list[Message], begin: Callable[[str], Generation]) -> Turn:
        """Accept a turn.

        Args:
            new: the messages to append; the last is the answer, still empty.
            begin: starts the generation under the given request id.

        Raises: whatever ``begin`` and the store raise; nothing is left of the turn then.
        """
        answer = new[-1]
        generation = begin(f"chatcmpl-{answer.id}")
        try:
            await self._store.append(*key, new)
        except BaseException as error:
            generation.cancel()
            if not isinstance(error, RequestError):  # the store may still take it, after we gave up waiting
                task = asyncio.create_task(self._bury(key, answer))
                self._burials.add(task)
                task.add_done_callback(self._burials.discard)
            raise
        turn = Turn(key, answer, generation)
        self._turns[key] = turn
        turn.task = asyncio.create_task(self._run(turn))
        self._watch(turn)
        return turn

    async def cancel(self, key: Key) -> Turn | None:
        """End the session's running turn, as ``cancelled``, and wait until that is stored."""
        turn = self.running(key)
        if turn is not None:
            turn.end("cancelled")
            await self._await_saved(turn)
        return turn

    def attach(self, turn: Turn) -> None:
        """A reader has come. Each call needs one :meth:`detach`."""
        turn.readers += 1
        if turn.grace is not None:
            turn.grace.cancel()
            turn.grace = None

    def detach(self, turn: Turn) -> None:
        """A reader has left; with none the clock runs."""
        turn.readers -= 1
        self._watch(turn)

    async def close(self) -> None:
        """Interrupt what still runs and store it. Call before the store is closed; takes at most ``SAVE_WAIT``."""
        self._closing = True
        turns = list(self._turns.values())
        for turn in turns:
            turn.end("interrupted")
        tasks = [t.task for t in turns if t.task is not None]
        if tasks:
            _, late = await asyncio.wait(tasks, timeout=SAVE_WAIT)
            for task in late:
                task.cancel()
            await asyncio.gather(*late, return_exceptions=True)
        for turn in turns:
            self._forget(turn)
        for burial in list(self._burials):
            burial.cancel()
        await asyncio.gather(*self._burials, return_exceptions=True)

    # -- the end of a turn -------------------------------------------------------------------------------------

    def _watch(self, turn: Turn) -> None:
        """With no reader: cancel after the grace time. A turn that is over is forgotten: the store has it."""
        if not turn.running:
            self._forget(turn)
            return
        if turn.readers or self._closing:
            return
        if turn.grace is not None:
            turn.grace.cancel()
        turn.grace = asyncio.get_running_loop().call_later(self._services.settings.resume_grace, self._grace_over, turn)

    def _grace_over(self, turn: Turn) -> None:
        turn.grace = None
        if not turn.readers:
            turn.end("cancelled")

    def _forget(self, turn: Turn) -> None:
        if turn.grace is not None:
            turn.grace.cancel()
            turn.grace = None
        if self._turns.get(turn.key) is turn:
            del self._turns[turn.key]

    async def _await_saved(self, turn: Turn) -> None:
        try:
            async with asyncio.timeout(SAVE_WAIT):
                await turn.saved.wait()
        except TimeoutError:
            raise StoreError("The session store does not take the running turn's text.") from None

    async def _run(self, turn: Turn) -> None:
        ended = asyncio.create_task(turn.generation.wait())
        written, at = 0, time.monotonic()
        try:
            while True:
                done, _ = await asyncio.wait({ended}, timeout=CHECKPOINT)
                if done:
                    break
                tokens, now = turn.generation.num_output_tokens, time.monotonic()
                if tokens > written or now - at > KEEP_ALIVE:
                    written, at = tokens, now
                    await self._try(turn, self.message(turn))
            await self._save(turn)
        finally:
            ended.cancel()
        self._watch(turn)

    async def _save(self, turn: Turn) -> None:
        final, delay = self.message(turn, final=True), 0.2
        while not await self._try(turn, final):
            await asyncio.sleep(delay)
            delay = min(delay * 2, RETRY_CAP)
        turn.saved.set()

    async def _try(self, turn: Turn, message: Message) -> bool:
        try:
            await self._store.update_message(*turn.key, message)
        except NotFound:  # the session was deleted: nothing left to say to it
            turn.end("cancelled")
        except StoreError as error:
            log.warning("turn %s is not stored yet: %s", turn.id, error)
            return False
        return True

    async def _bury(self, key: Key, answer: Message) -> None:
        """A turn that was refused because the store was slow must not show up later as running for ever."""
        for delay in BURIAL_DELAYS:
            await asyncio.sleep(delay)
            try:
                await self._store.update_message(*key, replace(answer, status="failed"))
            except (NotFound, StoreError):
                continue
            return

    def message(self, turn: Turn, *, final: bool = False) -> Message:
        """The answer as it is now: text and ids so far, and at the end its status and usage."""
        choice = turn.generation.logs[0]
        reason = choice.finish_reason
        return replace(
            turn.answer,
            content=choice.text,
            status=self._status(turn) if final else "running",
            token_ids=self._prompt_ids(turn),
            usage=usage([turn.generation]) if final else None,
            finish_reason=("length" if reason == "length" else "stop")
            if final and reason in ("stop", "length")
            else None,
            timing=timing(turn.generation) if final else None,
        )

    def _status(self, turn: Turn) -> Status:
        reason = turn.generation.logs[0].finish_reason
        if reason in ("stop", "length"):
            return "done"
        if not self._services.engine.ready:  # the server stops, or its engine died
            return turn.ended_as or "interrupted"
        return "failed" if reason == "error" else turn.ended_as or "cancelled"

    def _prompt_ids(self, turn: Turn) -> list[int]:
        """The ids that stand for this answer in the prompts of later turns.

        Not the end token, which the template writes itself. None at all when a stop string cut text off: the ids say
        more than the text then, and the text counts.
        """
        choice = turn.generation.logs[0]
        ids = choice.token_ids
        if isinstance(choice.stop_reason, str):
            return []
        if choice.finish_reason == "stop" and ids:
            last = ids[-1]
            if last in self._services.tokenizer.eos_token_ids or last == choice.stop_reason:
                ids.pop()
        return ids

    # -- reading -----------------------------------------------------------------------------------------------

    async def events(self, turn: Turn, cursor: int) -> AsyncIterator[bytes]:
        """The turn as server-sent events from ``cursor`` (tokens already seen) to its end.

        Each event is a chat.completion.chunk with the id ``turn:choice:tokens``; text and finish reason share an event,
        so an id always says exactly what its reader has. When text was held back to the very end, the last event's
        count is one more than there are tokens.
        """
        choice = turn.generation.logs[0]
        has_tail = cursor > len(choice.tokens)
        head = dumps(
            {
                "id": turn.generation.request_id,
                "object": "chat.completion.chunk",
                "created": int(turn.answer.created_at),
                "model": self._services.model_name,
            }
        )[:-1]
        begun = cursor > 0
        async with closing(turn.generation.read([min(cursor, len(choice.tokens))])) as reads:
            async for (delta,) in reads:
                text = delta.text
                if has_tail and choice.tail and text.endswith(choice.tail):
                    text = text[: -len(choice.tail)]
                if delta.finish_reason == "error":
                    if text:
                        yield _chunk(turn, head, replace(delta, finish_reason=None), text, not begun, False).encode()
                    with suppress(StoreError):
                        await self._await_saved(turn)
                    yield error_event(delta.error or "The generation failed")
                    return
                if text or delta.finish_reason is not None:
                    yield _chunk(turn, head, delta, text, not begun, bool(choice.tail)).encode()
                    begun = True
        try:
            await self._await_saved(turn)
        except StoreError:
            yield error_event("The answer is complete, but the session store has not taken it yet", "store_unavailable")
            return
        counts = dumps(usage([turn.generation]))
        yield f'data: {head},"choices":[],"usage":{counts}}}\n\n'.encode() + DONE


def timing(generation: Generation) -> dict[str, float | None]:
    """When the first token came, in seconds since the request, and how many a second came after it."""
    at, tokens = generation.timings, generation.num_output_tokens
    first = None if at.first_token is None else at.first_token - at.arrival
    span = 0.0 if at.first_token is None or at.finished is None else at.finished - at.first_token
    return {
        "first_token_seconds": None if first is None else round(first, 4),
        "tokens_per_second": round((tokens - 1) / span, 2) if span > 0 and tokens > 1 else None,
    }


def _chunk(turn: Turn, head: str, delta: Delta, text: str, first: bool, tail: bool) -> str:
    seen = delta.cursor + (1 if delta.finish_reason is not None and tail else 0)
    role = '"role":"assistant",' if first else ""
    reason = "null" if delta.finish_reason is None else f'"{FINISH[delta.finish_reason]}"'
    cancelled = ',"cancelled":true' if delta.finish_reason == "abort" else ""
    content = f'"delta":{{{role}"content":{dumps(text)}}}'
    choice = f'{{"index":0,{content},"logprobs":null,"finish_reason":{reason}{cancelled}}}'
    return f'id: {turn.id}:0:{seen}\ndata: {head},"choices":[{choice}],"usage":null}}\n\n'
