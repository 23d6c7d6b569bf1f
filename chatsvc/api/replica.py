"""A turn's log as another process sees it: batches made of an output log, and the log put together from them again.

A batch is a JSON object with any of: ``from`` and ``pieces`` (the texts that tokens ``from``, ``from + 1`` ...
released; the text that the answer goes on with stands before the first), ``at`` and ``text`` (a snapshot: the whole
text of the first ``at`` tokens), ``end`` (``finish``, ``tail``, ``error``, ``status``, ``usage``, or another ``code``)
and ``saved`` (the store has the final text). Batches may come twice and may be missing: what is known is skipped, and
a gap is bridged by the next snapshot.
"""

from __future__ import annotations

import json
import time
from typing import Any

from chatsvc.api.frames import dumps, usage
from chatsvc.api.sse import closing
from chatsvc.api.turn import Turn
from chatsvc.engine.output import Generation
from chatsvc.scheduler.plan import SampledToken
from chatsvc.sessions.base import Message

SNAPSHOT_EVERY = 256  # batches: the log of a turn keeps about four times as many, so it always has a snapshot
SNAPSHOT_AFTER = 60.0  # seconds of silence: after some more the log itself may be gone


class Sent:
    """How much of a turn is in its log."""

    def __init__(self) -> None:
        self.tokens = 0
        self.ended = False
        self.saved = False
        self.since_snapshot = 0
        self.at = time.monotonic()

    def next(self, turn: Turn, wanted: bool = False) -> tuple[str, Sent] | None:
        """The batch of what is new, and the state once it is in the log; None: nothing is.

        Args:
            wanted: with a snapshot, whether due or not.
        """
        log, now = turn.generation.logs[0], time.monotonic()
        tokens, ended, saved = len(log.pieces), log.finish_reason is not None, turn.saved.is_set()
        if (tokens, ended, saved) == (self.tokens, self.ended, self.saved) and not wanted:
            return None
        batch: dict[str, Any] = {}
        after = Sent()
        after.tokens, after.ended, after.saved = tokens, ended, saved
        after.since_snapshot, after.at = self.since_snapshot + 1, now
        if wanted or self.since_snapshot >= SNAPSHOT_EVERY or now - self.at > SNAPSHOT_AFTER:
            after.since_snapshot = 0
            batch |= {"at": self.tokens, "text": turn.prefix * (self.tokens > 0) + "".join(log.pieces[: self.tokens])}
        if tokens > self.tokens:
            batch |= {"from": self.tokens, "pieces": log.pieces[self.tokens : tokens]}
            if not self.tokens:
                batch["pieces"][0] = turn.prefix + batch["pieces"][0]
        if ended and (wanted or not self.ended):
            error = LOST if turn.lost else log.error
            finish = "error" if turn.lost else log.finish_reason
            tail = log.tail if tokens else turn.prefix + log.tail
            batch["end"] = {
                "finish": finish,
                "tail": tail,
                "error": error,
                "status": log.error_status,
                "usage": usage([turn.generation]),
            }
            if turn.lost:
                batch["end"]["code"] = "turn_over"
        if saved:
            batch["saved"] = True
        return dumps(batch), after


LOST = "Another server process ended this turn, for it thought this one dead"


class Replica(Generation):
    """A generation that another process runs, as far as its batches say. Readers do not see the difference.

    Attributes:
        usage: OpenAI's usage object, once the turn has ended.
        gap: whether batches are missing, so that nothing is believed until a snapshot comes.
        code: in the error object, when it is not the one that belongs to the log's ``error_status``.
        heard_at: monotonic seconds of the last batch.
        holes: ranges (after k tokens, n tokens) whose text came in one piece: no place inside is known.
    """

    def __init__(self, turn_id: str) -> None:
        super().__init__(f"chatcmpl-{turn_id}", [], 1, lambda error, status: None, time.perf_counter())
        self.usage: dict[str, Any] = usage([self])
        self.gap = False
        self.code: str | None = None
        self.heard_at = time.monotonic()
        self.holes: list[tuple[int, int]] = []

    def take(self, text: str) -> bool:
        """Add a batch. Returns whether it says that the final text is stored."""
        batch = json.loads(text)
        self.heard_at = time.monotonic()
        if self.finished:
            return bool(batch.get("saved"))
        log = self.logs[0]
        if "at" in batch:
            self._fill(batch["text"], batch["at"])
            self.gap = False
        if "from" in batch and not self.gap:
            have, start = len(log.tokens), batch["from"]
            if start > have:
                self.gap = True
            else:
                new = batch["pieces"][have - start :]
                log.pieces += new
                log.tokens += [_UNKNOWN] * len(new)
        if "end" in batch and not self.gap:
            end = batch["end"]
            self.usage, self.code = end["usage"], end.get("code")
            log.error_status = end.get("status", 500)
            log.tail, log.error, log.finish_reason = end["tail"], end["error"], end["finish"]
        self.notify()
        return bool(batch.get("saved")) and not self.gap

    def settle(self, message: Message | None) -> None:
        """The turn has ended without its log saying so: by what the store has of it, None when it has nothing."""
        if self.finished:
            return
        log = self.logs[0]
        if message is None:
            log.error, log.finish_reason = "The session of this turn is gone", "error"
        elif message.status in ("interrupted", "failed") or not message.content.startswith(log.text):
            why = message.error or {}
            log.error = why.get("message") or "The answer was cut off; the session has its text so far"
            log.error_status = why.get("status") or (503 if message.status == "interrupted" else 500)
            log.finish_reason = "error"
        else:
            completion = (message.usage or {}).get("completion_tokens", 0)
            self._fill(message.content, max(completion, len(log.tokens) + 1))
            self.usage = message.usage or self.usage
            log.finish_reason = message.finish_reason or "abort"
        self.notify()

    def fail(self, error: str, code: str) -> None:
        """End it for our readers, whatever becomes of it."""
        if not self.finished:
            self.code = code
            self.logs[0].error, self.logs[0].finish_reason = error, "error"
            self.notify()

    def _fill(self, text: str, at: int) -> None:
        """Bring the log to ``at`` tokens, the text of which is ``text``."""
        log, have = self.logs[0], len(self.logs[0].tokens)
        known = log.text
        if at <= have:
            return
        if not text.startswith(known):
            raise ValueError("a snapshot does not begin with the text that is known")
        log.pieces += [text[len(known) :]] + [""] * (at - have - 1)
        log.tokens += [_UNKNOWN] * (at - have)
        self.holes.append((have, at))

    async def reached(self, cursor: int) -> None:
        """Until that many tokens are here, or the turn has ended: its reader has seen them, we may be a little late."""
        log = self.logs[0]
        if cursor <= len(log.tokens):
            return
        async with closing(self.read([len(log.tokens)])) as news:
            async for _ in news:
                if cursor <= len(log.tokens):
                    return

    def snapshot_for(self, cursor: int) -> int:
        """Where a reader who has seen ``cursor`` tokens can go on; another number than ``cursor``: after a snapshot."""
        for start, end in self.holes:
            if start < cursor < end or start == cursor == 0 < end:
                return end
        return cursor


_UNKNOWN = SampledToken(-1)
