"""Server processes that share a store: what one tells the others of its turns, and what it learns of theirs.

Of its own turns a process puts the news into the relay every 50 ms; the output log is the queue, so when the relay is
away nothing is lost and nothing waits. A turn of another process is followed while somebody here reads it: its owner is
told so every few seconds, and counts those readers as its own. Cancelling a turn, or making way for a new one, is asked
of its owner.
"""

from __future__ import annotations

import asyncio
import logging
import random
import secrets
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from contextlib import suppress
from functools import partial
from typing import ParamSpec

from chatsvc.api.replica import Replica, Sent
from chatsvc.api.turn import Key, Turn
from chatsvc.errors import Overloaded, StoreError
from chatsvc.sessions.base import Message, SessionStore
from chatsvc.sessions.relay import Note, Op, Relay
from chatsvc.tasks import end

P = ParamSpec("P")
log = logging.getLogger("chatsvc.api")

PUBLISH_EVERY = 0.05
PRESENCE_EVERY = 3.0
PRESENCE_LIFE = 10.0
QUIET = 3.0  # seconds without a batch, after which the store is asked whether the turn still runs
RETRY_CAP = 2.0
ANSWER_WAIT = 6.0  # seconds for the end of a turn and its storing
SLICE = 100  # turns looked at without letting the event loop run


class Neighbours:
    """Args:
    left: called with a turn of ours when readers elsewhere have left it.
    """

    def __init__(self, relay: Relay, store: SessionStore, left: Callable[[Turn], None]) -> None:
        self._relay = relay
        self._store = store
        self._left = left
        self._own: dict[str, tuple[Turn, Sent]] = {}
        self._wanted: set[str] = set()  # turns of which somebody wants a snapshot
        self._joined: dict[str, Turn] = {}
        self._joining: dict[str, asyncio.Task[Turn]] = {}
        self._coming: Counter[str] = Counter()  # readers that wait for a turn: it has none yet, and must not be dropped
        self._questions: dict[str, asyncio.Future[str]] = {}
        self._errands: set[asyncio.Task[None]] = set()
        self._tasks: list[asyncio.Task[None]] = []
        self._some = asyncio.Event()
        self._stopping = False
        relay.on_note = self._note

    @property
    def name(self) -> str:
        """This process's."""
        return self._relay.name

    # -- our turns, for others ---------------------------------------------------------------------------------

    def publish(self, turn: Turn) -> None:
        """A turn of ours has begun: what it makes is put into its log until it has ended and is stored."""
        self._own[turn.id] = (turn, Sent())
        self._start()
        self._some.set()

    async def _publish_for_ever(self) -> None:
        failures = 0
        while True:
            await self._some.wait()
            await asyncio.sleep(PUBLISH_EVERY)
            try:
                await self._flush()
            except StoreError as error:
                if not failures:
                    log.warning("what turns make does not reach other processes, it is kept and tried again: %s", error)
                failures += 1
                await asyncio.sleep(random.uniform(0.5, 1.0) * min(RETRY_CAP, 0.1 * 2 ** min(failures, 10)))
                continue
            except Exception:  # a fault of ours in one turn must not cut off the others for ever
                log.exception("what turns make cannot be put into their logs")
                await asyncio.sleep(RETRY_CAP)
                continue
            if failures:
                log.info("what turns make reaches other processes again")
                failures = 0

    async def _flush(self) -> None:
        wanted, self._wanted = self._wanted, set()
        batches, after = [], []
        for number, (turn_id, (turn, sent)) in enumerate(list(self._own.items())):
            if number % SLICE == SLICE - 1:
                await asyncio.sleep(0)
            made = sent.next(turn, turn_id in wanted)
            if made is not None:
                batches.append((turn_id, made[0]))
                after.append((turn, made[1]))
        try:
            if batches:
                await self._relay.add(batches)
        except StoreError:
            self._wanted |= wanted
            raise
        for turn, sent in after:
            if sent.saved:
                self._own.pop(turn.id, None)
            elif turn.id in self._own:
                self._own[turn.id] = (turn, sent)
        if not self._own:
            self._some.clear()

    # -- turns of others ---------------------------------------------------------------------------------------

    async def join(self, key: Key, answer: Message) -> Turn:
        """The turn of another process that ``answer`` (as stored, running) is of. Whoever reads it attaches at once.

        Raises: StoreError; Overloaded when this process stops.
        """
        if self._stopping:
            raise Overloaded("The server is shutting down", status=503, retry_after=1)
        turn = self._joined.get(answer.id)
        if turn is not None and turn.running:
            return turn
        joining = self._joining.get(answer.id)
        if joining is None:
            joining = self._joining[answer.id] = asyncio.create_task(self._join(key, answer))
            joining.add_done_callback(partial(self._has_joined, answer.id))
        self._coming[answer.id] += 1
        try:
            return await asyncio.shield(joining)
        finally:
            self._coming[answer.id] -= 1
            if not self._coming[answer.id]:
                del self._coming[answer.id]

    def _has_joined(self, turn_id: str, joining: asyncio.Task[Turn]) -> None:
        del self._joining[turn_id]
        if not joining.cancelled():
            joining.exception()  # whoever waited may be gone; mark it as seen

    async def _join(self, key: Key, answer: Message) -> Turn:
        replica = Replica(answer.id)
        turn = Turn(key, answer, replica, answer.owner)
        await self._relay.follow(answer.id, partial(self._take, turn, replica))
        self._joined[answer.id] = turn
        if replica.gap:
            self._tell(turn, "snapshot")
        self._start()
        return turn

    def attached(self, turn: Turn) -> None:
        """The first reader of a joined turn has come."""
        self._tell(turn, "reading")

    def detached(self, turn: Turn) -> None:
        """The last one has left."""
        self._drop(turn)
        if turn.running:
            self._tell(turn, "left")

    def _drop(self, turn: Turn) -> None:
        """Unless a reader is on its way to it."""
        if self._joined.get(turn.id) is turn and not self._coming[turn.id]:
            del self._joined[turn.id]
            self._relay.unfollow(turn.id)

    def _take(self, turn: Turn, replica: Replica, text: str) -> None:
        before = replica.gap
        if replica.take(text):
            turn.saved.set()
        if replica.gap and not before and turn.id in self._joined:
            self._tell(turn, "snapshot")

    async def _care_for_ever(self) -> None:
        while True:
            await asyncio.sleep(PRESENCE_EVERY * random.uniform(0.9, 1.1))
            for turn in list(self._joined.values()):
                try:
                    await self._care(turn)
                except StoreError:
                    pass  # counted; next time
                except Exception:
                    log.exception("turn %s of another process", turn.id)

    async def _care(self, turn: Turn) -> None:
        """Say that a turn is still read here, and look whether its owner still writes."""
        assert isinstance(turn.generation, Replica)
        if not turn.readers:
            self._drop(turn)
            return
        await self._relay.tell(turn.owner, Note("reading", turn.id, self.name))
        if turn.generation.gap:
            await self._relay.tell(turn.owner, Note("snapshot", turn.id, self.name))
        if turn.running and time.monotonic() - turn.generation.heard_at > QUIET:
            session = await self._store.get(*turn.key)
            messages = [] if session is None else session.messages
            stored = next((m for m in messages if m.id == turn.id), None)
            if stored is None or stored.status != "running":
                turn.generation.settle(stored)
                turn.saved.set()

    # -- notes -------------------------------------------------------------------------------------------------

    async def ask(self, answer: Message, op: Op, wait: float = ANSWER_WAIT) -> str:
        """Ask the owner of a running answer to end it.

        Returns: what :class:`chatsvc.sessions.relay.Note` answers; "silent" when nothing comes within ``wait`` seconds.
        Raises: StoreError.
        """
        number = secrets.token_hex(8)
        reply: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._questions[number] = reply
        try:
            await self._relay.tell(answer.owner, Note(op, answer.id, self.name, number))
            async with asyncio.timeout(wait):
                return await reply
        except TimeoutError:
            return "silent"
        finally:
            del self._questions[number]

    def cancel(self, answer: Message) -> None:
        """Have a turn of another process ended, without waiting for it."""
        self._errand(self._relay.tell, answer.owner, Note("cancel", answer.id, self.name))

    def _tell(self, turn: Turn, op: Op) -> None:
        self._errand(self._relay.tell, turn.owner, Note(op, turn.id, self.name))

    def _errand(self, work: Callable[P, Awaitable[None]], *args: P.args, **kwargs: P.kwargs) -> None:
        async def run() -> None:
            with suppress(StoreError):  # counted there
                await work(*args, **kwargs)

        task = asyncio.create_task(run())
        self._errands.add(task)
        task.add_done_callback(self._errands.discard)

    def _note(self, note: Note) -> None:
        if note.op == "reply":
            question = self._questions.get(note.number)
            if question is not None and not question.done():
                question.set_result(note.answer)
            return
        turn = self._own[note.turn][0] if note.turn in self._own else None
        if turn is None:
            if note.number:
                self._errand(self._reply, note, "unknown")
        elif note.op == "reading":
            turn.elsewhere[note.sender] = time.monotonic() + PRESENCE_LIFE
        elif note.op == "left":
            turn.elsewhere.pop(note.sender, None)
            self._left(turn)
        elif note.op == "snapshot":
            self._wanted.add(turn.id)
        elif note.op == "yield" and turn.read and not turn.generation.finished:
            self._errand(self._reply, note, "busy")
        elif note.op in ("cancel", "yield"):
            turn.end("cancelled" if note.op == "cancel" else "interrupted")
            self._errand(self._ended, note, turn)

    async def _ended(self, note: Note, turn: Turn) -> None:
        await turn.saved.wait()
        if note.number:
            await self._reply(note, "ended")

    async def _reply(self, note: Note, answer: str) -> None:
        await self._relay.tell(note.sender, Note("reply", note.turn, self.name, note.number, answer))

    # -- the end -----------------------------------------------------------------------------------------------

    def let_go(self) -> None:
        """End the streams of other processes' turns: the turns go on, their readers can come back elsewhere."""
        self._stopping = True
        for turn in list(self._joined.values()):
            assert isinstance(turn.generation, Replica)
            turn.generation.fail("This server process stops; the answer goes on: join it again", "rejoin")
            turn.saved.set()

    async def close(self, wait: float) -> None:
        """Publish what is left, for at most ``wait`` seconds, and stop."""
        self.let_go()
        with suppress(StoreError, TimeoutError):
            async with asyncio.timeout(wait):
                await self._flush()
                await asyncio.gather(*self._errands)
        await end(*self._tasks, *self._errands, *self._joining.values())

    def _start(self) -> None:
        if not self._tasks:
            self._tasks = [
                asyncio.create_task(self._publish_for_ever()),
                asyncio.create_task(self._care_for_ever()),
            ]
