"""Turns: generations that belong to a session and not to a connection.

A turn is one answer to one user message. It is accepted when the engine has taken it and the store holds both messages
(the answer as ``running``): only then does the caller get a stream. What the engine or the store refuses leaves no
trace. From then on the turn goes on by itself: readers come and go, each a cursor on the output log. With no reader for
``resume_grace`` seconds it is cancelled. While it runs, its text so far is written down once a second, so a killed
process loses no more than that; the final text is written once, and tried again until the store takes it. Whether the
store is there or not, the generation goes on.

When processes share the store, a session's turn may run in another one: :mod:`chatsvc.api.neighbours`.

One object per app, in the event loop; no locks but one per session while a turn is being accepted.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import replace
from functools import partial
from weakref import WeakValueDictionary

from chatsvc.api.neighbours import Neighbours
from chatsvc.api.services import Services
from chatsvc.api.turn import Key, Turn
from chatsvc.api.turnmessage import message_of
from chatsvc.api.turnstream import turn_events
from chatsvc.engine.output import Generation
from chatsvc.errors import NotFound, RequestError, StoreError
from chatsvc.sessions.base import Message, Session, SessionStore, TurnOver, TurnRunning

log = logging.getLogger("chatsvc.api")

CHECKPOINT = 0.8  # seconds between writes of a running answer
KEEP_ALIVE = 2.0  # without news it is written as often, so that a long wait does not outlive its session
SAVE_WAIT = 6.0  # seconds that a request waits for the end of a turn to be stored
READER_WAIT = 15.0  # the same, of a stream that has told its text; the turn itself waits as long as it takes
RETRY_CAP = 5.0
CLOSE_WAIT = 1.0
BURIAL_DELAYS = (1.0, 5.0, 15.0)


def no_session() -> NotFound:
    """There is none with this id, or it is another tenant's."""
    return NotFound("There is no such session", param="id", code="session_not_found")


class Turns:
    """The turns of this process, at most one running per session."""

    def __init__(self, services: Services, store: SessionStore) -> None:
        self._services = services
        self._store = store
        self._turns: dict[Key, Turn] = {}
        self._locks: WeakValueDictionary[Key, asyncio.Lock] = WeakValueDictionary()
        self._burials: set[asyncio.Task[None]] = set()
        self._closing = False
        relay = store.relay
        self._neighbours = None if relay is None else Neighbours(relay, store, self._watch)

    def lock(self, key: Key) -> asyncio.Lock:
        """Held while a turn of the session is being accepted or ended by a request."""
        lock = self._locks.get(key)
        if lock is None:
            lock = self._locks[key] = asyncio.Lock()
        return lock

    def running(self, key: Key) -> Turn | None:
        """The session's running turn, when it is this process's own."""
        turn = self._turns.get(key)
        return turn if turn is not None and turn.running else None

    async def find(self, key: Key, seen: str = "") -> Turn | None:
        """The session's running turn, in whatever process it runs; read it with :meth:`attach` and :meth:`events`.

        A turn of this process may be over without its knowing: the store took its end and only the reply was lost, or
        its lease ran out; another process may have begun the next one. So the store says which one runs; only a
        reader who comes from the turn that is here goes on with it, whatever the store says.

        Args:
            seen: the turn that the reader comes from; "" when it comes from none.

        Raises: NotFound (no such session), StoreError.
        """
        turn = self.running(key)
        if turn is not None and (self._neighbours is None or seen == turn.id):
            return turn
        try:
            session = await self._session(key)
        except StoreError:
            if turn is None or seen:
                raise
            return turn
        answer = self._elsewhere(session)
        if answer is not None and self._neighbours is not None:
            return await self._neighbours.join(key, answer)
        turn = self.running(key)
        over = turn is not None and any(m.id == turn.id and m.status != "running" for m in session.messages)
        return None if over else turn

    async def look(self, key: Key) -> Session:
        """The session as a new turn would find it, running answer and all; nothing is ended.

        Raises: TurnRunning when somebody here reads the running turn; NotFound; StoreError.
        """
        turn = self.running(key)
        if turn is not None and turn.read:
            raise TurnRunning(turn.id)
        return self.live(await self._session(key), key)

    def live(self, session: Session, key: Key) -> Session:
        """The session as its readers see it now: a running answer of this process with the text it has. One that is
        over in the store is over, also when this process does not know it yet."""
        turn = self.running(key)
        if turn is not None:
            now = self.message(turn)
            session.messages = [now if m.id == now.id and m.status == "running" else m for m in session.messages]
        return session

    async def make_way(self, key: Key) -> Session:
        """Before a new turn: one that somebody reads stays (409), one that nobody reads is interrupted. The same for a
        turn that another process runs.

        Returns: the session, in which nothing runs.
        Raises: TurnRunning; NotFound; StoreError when the old turn's text cannot be stored.
        """
        turn = self.running(key)
        if turn is not None:
            if turn.read:
                raise TurnRunning(turn.id)
            turn.end("interrupted")
            await self._await_saved(turn)
        session = await self._session(key)
        answer = self._elsewhere(session)
        if answer is not None and self._neighbours is not None:
            if await self._neighbours.ask(answer, "yield") == "busy":
                raise TurnRunning(answer.id)
            session = await self._session(key)  # silent: it may be dead, and known to be by now
        answer = self._elsewhere(session)
        if answer is not None:
            raise TurnRunning(answer.id)
        for message in session.messages:
            if message.status == "running":  # ours, and nothing runs: the store took it after we had given it up
                message.status = "interrupted"
                await self._store.update_message(*key, message)
        return session

    async def start(self, key: Key, new: list[Message], begin: Callable[[str], Awaitable[Generation]]) -> Turn:
        """Accept a turn.

        Args:
            new: the messages to append; the last is the answer, still empty, or with the text and ids of the answer
                that it goes on with (the prompt ends in them then).
            begin: starts the generation under the given request id.

        Raises: whatever ``begin`` and the store raise (TurnRunning when another process was faster); nothing is left of
        the turn then.
        """
        answer = new[-1]
        generation = await begin(f"chatcmpl-{answer.id}")
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
        if self._neighbours is not None:
            self._neighbours.publish(turn)
        return turn

    async def cancel(self, key: Key, session: Session | None = None) -> str | None:
        """End the session's running turn, as ``cancelled``, in whatever process it runs, and wait until that is stored.

        Args:
            session: when the caller has just read it.

        Returns: the turn's id; None when nothing was running.
        Raises: NotFound; StoreError.
        """
        turn = self.running(key)
        if turn is not None:
            turn.end("cancelled")
        answer = self._elsewhere(session or await self._session(key))
        if answer is None or self._neighbours is None:
            if turn is None:
                return None
            await self._await_saved(turn)
            return turn.id
        said = await self._neighbours.ask(answer, "cancel")
        if said == "silent":
            raise StoreError("The process that runs this turn does not answer.")
        return answer.id if said == "ended" else None

    async def stored(self, turn: Turn) -> None:
        """Until the turn's end is in the store. Raises: StoreError when that takes too long."""
        await self._await_saved(turn)

    def discard(self, key: Key, session: Session | None) -> None:
        """The session (as it was just before) has been deleted: its running turn ends."""
        turn = self.running(key)
        if turn is not None:
            turn.end("cancelled")
        if self._neighbours is not None and session is not None and (answer := self._elsewhere(session)) is not None:
            self._neighbours.cancel(answer)

    def attach(self, turn: Turn) -> None:
        """A reader has come. Each call needs one :meth:`detach`."""
        turn.readers += 1
        if turn.owner and turn.readers == 1 and self._neighbours is not None:
            self._neighbours.attached(turn)
        if turn.grace is not None:
            turn.grace.cancel()
            turn.grace = None

    def detach(self, turn: Turn) -> None:
        """A reader has left; with none the clock runs."""
        turn.readers -= 1
        if not turn.owner:
            self._watch(turn)
        elif not turn.readers and self._neighbours is not None:
            self._neighbours.detached(turn)

    def let_go(self) -> None:
        """The server is about to stop: streams of other processes' turns end, so that their readers go there."""
        if self._neighbours is not None:
            self._neighbours.let_go()

    async def close(self, timeout: float = SAVE_WAIT) -> None:  # noqa: ASYNC109  it is a patience, not a deadline
        """Interrupt what still runs and store it. Call before the store is closed.

        Args:
            timeout: seconds to try while the store is away; what could not be stored then is logged.
        """
        self._closing = True
        turns = list(self._turns.values())
        for turn in turns:
            turn.end("interrupted")
        tasks = [t.task for t in turns if t.task is not None]
        if tasks:
            _, late = await asyncio.wait(tasks, timeout=timeout)
            for task in late:
                task.cancel()
            await asyncio.gather(*late, return_exceptions=True)
        lost = [turn.id for turn in turns if turn.running]
        if lost:
            log.error("the session store did not take the end of %d answers: %s", len(lost), ", ".join(lost))
        if self._neighbours is not None:
            await self._neighbours.close(CLOSE_WAIT)
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
        if turn.readers or self._closing:  # readers elsewhere come and go without a word: the clock runs, and asks then
            return
        if turn.grace is not None:
            turn.grace.cancel()
        turn.grace = asyncio.get_running_loop().call_later(self._services.settings.resume_grace, self._grace_over, turn)

    def _grace_over(self, turn: Turn) -> None:
        turn.grace = None
        if turn.read:
            self._watch(turn)
        else:
            turn.end("cancelled")

    def _forget(self, turn: Turn) -> None:
        if turn.grace is not None:
            turn.grace.cancel()
            turn.grace = None
        if self._turns.get(turn.key) is turn:
            del self._turns[turn.key]

    async def _await_saved(self, turn: Turn, wait: float = SAVE_WAIT) -> None:
        try:
            async with asyncio.timeout(wait):
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
            await asyncio.sleep(delay * random.uniform(0.5, 1.0))
            delay = min(delay * 2, RETRY_CAP)
        turn.saved.set()

    async def _try(self, turn: Turn, message: Message) -> bool:
        """Write the answer down; False: not now."""
        if turn.lost:
            return True
        try:
            await self._store.update_message(*turn.key, message)
        except NotFound:  # deleted (whoever did it ends the turn), or lost with the store's memory: the answer goes on
            log.warning("turn %s is not stored: its session is gone", turn.id)
        except TurnOver:
            log.error("turn %s: another process ended it, as this one had not been heard of for too long", turn.id)
            turn.lost = True
            turn.end("interrupted")
        except StoreError as error:
            if not turn.behind:  # once: it is tried every second, and there may be many turns
                log.warning("turn %s is not stored yet: %s", turn.id, error)
            turn.behind = True
            return False
        if turn.behind:
            log.info("turn %s is stored again", turn.id)
            turn.behind = False
        return True

    async def _bury(self, key: Key, answer: Message) -> None:
        """A turn that was refused because the store was slow must not show up later as running for ever."""
        for delay in BURIAL_DELAYS:
            await asyncio.sleep(delay)
            try:
                await self._store.update_message(*key, replace(answer, status="failed"))
            except TurnOver:
                return
            except (NotFound, StoreError):
                continue
            return

    def message(self, turn: Turn, *, final: bool = False) -> Message:
        """The answer as it is now; see :func:`chatsvc.api.turnmessage.message_of`."""
        services = self._services
        return message_of(turn, services.tokenizer.eos_token_ids, final=final, ready=services.engine.ready)

    # -- reading -----------------------------------------------------------------------------------------------

    def events(self, turn: Turn, cursor: int) -> AsyncIterator[bytes]:
        """The turn as server-sent events from ``cursor`` (tokens already seen) to its end; see
        :func:`chatsvc.api.turnstream.turn_events`. The reader is :meth:`attach`-ed meanwhile."""
        services, saved = self._services, partial(self._await_saved, wait=READER_WAIT)
        return turn_events(turn, cursor, services.model_name, saved, services.pace)

    async def _session(self, key: Key) -> Session:
        session = await self._store.get(*key)
        if session is None:
            raise no_session()
        return session

    def _elsewhere(self, session: Session) -> Message | None:
        """The answer that another process is writing."""
        if self._neighbours is None:
            return None
        mine = ("", self._neighbours.name)
        return next((m for m in session.messages if m.status == "running" and m.owner not in mine), None)
