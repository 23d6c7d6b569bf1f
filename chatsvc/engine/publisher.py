"""From sampled tokens to text in the output logs: detokenising, stop strings, the end of a choice; and its times."""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass

from chatsvc.engine.metrics import Metrics
from chatsvc.engine.output import FinishReason, Generation, OutputLog
from chatsvc.scheduler.plan import SampledToken
from chatsvc.scheduler.request import Request, Sequence
from chatsvc.text.detokenizer import IncrementalDetokenizer
from chatsvc.text.stop import StopMatcher
from chatsvc.text.tokenizer import Tokenizer

log = logging.getLogger(__name__)


@dataclass(slots=True)
class Choice:
    """The text side of one sequence."""

    sequence: Sequence
    log: OutputLog
    detokenizer: IncrementalDetokenizer
    stops: StopMatcher
    last_token_at: float | None = None

    @property
    def held(self) -> str:
        """What would be released if the choice were cut off now."""
        return self.stops.held + self.detokenizer.pending


class Running:
    """One request in the engine: its scheduler side, its readers' side, and the text state between the two."""

    def __init__(self, request: Request, generation: Generation, tokenizer: Tokenizer, metrics: Metrics) -> None:
        self.request = request
        self.generation = generation
        self._vocab_size = tokenizer.vocab_size
        self._metrics = metrics
        stops = StopMatcher(request.params.stop)
        self.choices = [
            Choice(s, log, IncrementalDetokenizer(tokenizer), stops.fresh())
            for s, log in zip(request.sequences, generation.logs, strict=True)
        ]

    def scheduled(self, now: float) -> None:
        """One of its sequences has a row in the step that begins now."""
        generation = self.generation
        if generation.timings.scheduled is None:
            generation.timings.scheduled = now
            self._metrics.queue.observe(now - generation.timings.arrival)
            generation.notify()
        cached = self.request.sequences[0].cached_tokens
        if cached is not None:
            generation.num_cached_tokens = cached

    def append(self, choice: Choice, tokens: list[SampledToken], ended: str | None, now: float) -> str | None:
        """Append tokens to the log; returns the stop string that was found, if one was.

        The token that ended the choice (an end token or a stop token id) is logged without text. Stop strings are not
        looked for in the text of the first ``min_tokens`` tokens.
        """
        self._observe(choice, len(tokens), now)
        last = len(tokens) - 1
        for i, token in enumerate(tokens):
            # A model may have more rows than its tokenizer has tokens: those have no text either.
            silent = (ended == "stop" and i == last) or token.token_id >= self._vocab_size
            piece = "" if silent else choice.detokenizer.push(token.token_id)
            released, stop = piece, None
            if piece and len(choice.log.tokens) >= self.request.params.min_tokens:
                released, stop = choice.stops.push(piece)
            choice.log.tokens.append(token)
            choice.log.pieces.append(released)
            if stop is not None:
                return stop
        choice.log.held = choice.held
        return None

    def _observe(self, choice: Choice, count: int, now: float) -> None:
        if not count:
            return
        timings = self.generation.timings
        if timings.first_token is None:
            timings.first_token = now
            self._metrics.ttft.observe(now - timings.arrival)
        if choice.last_token_at is not None:
            self._metrics.inter_token.observe((now - choice.last_token_at) / count)
        choice.last_token_at = now

    def end(
        self,
        choice: Choice,
        reason: FinishReason,
        *,
        stop: str | int | None = None,
        error: str | None = None,
        status: int = 500,
    ) -> None:
        """Release what was held back (unless a stop string was found) and close the log. Idempotent."""
        out = choice.log
        if out.finish_reason is not None:
            return
        if not isinstance(stop, str):
            try:
                released, late = choice.stops.push(choice.detokenizer.flush())
                out.tail = released if late is not None else released + choice.stops.flush()
                stop = late if late is not None else stop
            except Exception:  # a choice must be able to end whatever state its text is in
                log.exception("the held-back text of a choice could not be released")
        out.stop_reason = stop
        out.error = error
        out.error_status = status
        out.finish_reason = reason
        self._metrics.finished.labels(reason).inc()
        if self.generation.finished:
            timings = self.generation.timings
            timings.finished = time.perf_counter()
            self._metrics.request.observe(timings.finished - timings.arrival)
