"""What is refused before it reaches the scheduler, and what of a step's result is not believed.

Both keep one request's fault from becoming everybody's: the scheduler may rely on what passes here.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import replace
from typing import Protocol

from chatsvc.errors import Conflict, ContextLengthExceeded, EngineDead, InvalidRequest, Overloaded
from chatsvc.runtime.executor import KVCapacity
from chatsvc.scheduler.params import SamplingParams
from chatsvc.scheduler.plan import SchedulerOutput, StepResult


class Bounds(Protocol):
    """See :class:`chatsvc.engine.config.EngineConfig`."""

    @property
    def block_size(self) -> int: ...

    @property
    def max_queue(self) -> int: ...


def token_limit(capacity: KVCapacity, block_size: int) -> int:
    """Prompt and answer together: min(context, pool)."""
    return min(capacity.max_model_len, capacity.num_blocks * block_size)


class Admission(ABC):
    """An engine's entrance, wherever the engine runs: whether it takes requests, and in which order it refuses them.

    Who inherits it sets ``_capacity`` once it can take requests, ``_draining`` when it takes no more, and ``_dead``
    (why) when it never will again.
    """

    def __init__(self) -> None:
        self._capacity: KVCapacity | None = None
        self._draining = False
        self._dead: str | None = None

    @property
    @abstractmethod
    def healthy(self) -> bool: ...

    @property
    @abstractmethod
    def num_queued(self) -> int:
        """Requests of which nothing has been scheduled yet. Asked for each new one: it must not count them."""

    @property
    @abstractmethod
    def _bounds(self) -> Bounds: ...

    @abstractmethod
    def _knows(self, request_id: str) -> bool: ...

    @property
    def capacity(self) -> KVCapacity:
        """Raises: Overloaded (503) while the model loads."""
        if self._capacity is None:
            raise Overloaded("the model is still loading", status=503, retry_after=2)
        return self._capacity

    @property
    def limit(self) -> int:
        """Prompt and answer together, in tokens. Raises: Overloaded (503) while the model loads."""
        return token_limit(self.capacity, self._bounds.block_size)

    @property
    def draining(self) -> bool:
        return self._draining

    @property
    def ready(self) -> bool:
        return self._capacity is not None and not self._draining and self.healthy

    @property
    def dead(self) -> str | None:
        """Why it never goes on, whatever happens; None: it may, also when it is not healthy now."""
        return self._dead

    def begin_drain(self) -> None:
        """Take no new requests; those that are here go on."""
        self._draining = True

    def _check(self, request_id: str, prompt: list[int], params: SamplingParams) -> None:
        """Raises: InvalidRequest, ContextLengthExceeded, Conflict (the id is in use), Overloaded, EngineDead."""
        if self._dead is not None:
            raise EngineDead(self._dead)
        if self._draining:
            raise Overloaded("the server is shutting down", status=503, retry_after=5)
        if self._knows(request_id):
            raise Conflict(f"a request with the id {request_id} is running")
        check_request(prompt, params, limit=self.limit, vocab_size=self.capacity.vocab_size)
        if not self.healthy:
            raise Overloaded("the engine is stuck", status=503, retry_after=5)
        queued = self.num_queued
        if queued >= self._bounds.max_queue:
            raise Overloaded(f"the queue is full ({queued} requests wait)", status=429, retry_after=2)


def check_request(prompt: list[int], params: SamplingParams, *, limit: int, vocab_size: int) -> None:
    """Args:
        limit: prompt and answer together.

    Raises:
        InvalidRequest: an empty prompt, an id outside the vocabulary, no choice, no token to make.
        ContextLengthExceeded: with the numbers that do not fit.
    """
    if not prompt:
        raise InvalidRequest("the prompt is empty", param="prompt")
    low, high = min(prompt), max(prompt)
    if low < 0 or high >= vocab_size:
        wrong = low if low < 0 else high
        raise InvalidRequest(f"the prompt has the token id {wrong}, outside 0..{vocab_size - 1}", param="prompt")
    if params.n < 1:
        raise InvalidRequest("n must be at least 1", param="n")
    if params.max_tokens < 1:
        raise InvalidRequest("max_tokens must be at least 1", param="max_tokens")
    if len(prompt) >= limit:
        raise ContextLengthExceeded(f"the prompt has {len(prompt)} tokens; prompt and answer together may have {limit}")
    if len(prompt) + params.max_tokens > limit:
        raise ContextLengthExceeded(
            f"the prompt has {len(prompt)} tokens and max_tokens is {params.max_tokens}; together they may have "
            f"{limit}",
            param="max_tokens",
        )


def checked_result(plan: SchedulerOutput, result: StepResult, vocab_size: int) -> StepResult:
    """The result with an error for every row that should have tokens and has none, or has ids that do not exist."""
    errors = dict(result.errors)
    for row in plan.rows:
        if row.sampling is None:
            continue
        for seq_id in (row.seq_id, *(fork for fork, _ in row.forks)):
            tokens = result.tokens.get(seq_id)
            if seq_id in errors:
                continue
            if not tokens:
                errors[seq_id] = "the step made no token for this sequence"
            elif not all(0 <= t.token_id < vocab_size for t in tokens):
                errors[seq_id] = f"the step made token ids outside 0..{vocab_size - 1}"
    return result if len(errors) == len(result.errors) else replace(result, errors=errors)
