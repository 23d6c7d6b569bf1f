"""Requests and sequences: what the scheduler moves about. They live in the event loop and never leave it."""

from __future__ import annotations

import enum
from array import array
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field

from chatsvc.cache.index import encode_extra
from chatsvc.cache.manager import BlockTable
from chatsvc.scheduler.beam import BeamSearch
from chatsvc.scheduler.params import SamplingParams
from chatsvc.scheduler.plan import SampledToken


class State(enum.Enum):
    WAITING = "waiting"  # never scheduled
    FORKING = "forking"  # a further choice: shares the first one's blocks as soon as that has read the prompt
    RUNNING = "running"  # owns blocks
    PREEMPTED = "preempted"  # was running, owns nothing, resumes before anything new is admitted
    FINISHED = "finished"


@dataclass(slots=True, eq=False)
class Sequence:
    """One choice of a request. ``num_computed`` chases ``len(tokens)``: prefill, decode, recompute are this one idea.

    Attributes:
        tokens: prompt and output, int32.
        num_computed: positions below it have their K/V in the blocks of ``table``.
        num_scheduled: the same once the steps in flight are over.
        last_step: number of the last step that names it.
        ahead: the last of ``tokens`` stands for one that a step in flight is to tell.
        held: what comes next depends on what a step in flight tells.
        leaving: it has ended, but a step in flight names its blocks.
        turn: serial number of its last turn; whose is lowest has waited longest.
        cached_tokens: prompt tokens found in the cache at the first admission; recomputing is no hit.
        group: the beam search that it is a running beam of.
        pending: what may follow it; it pauses until this is known of every beam of its group.
    """

    seq_id: int
    request: Request
    choice: int
    tokens: array[int]
    table: BlockTable
    num_prompt: int
    state: State = State.WAITING
    num_computed: int = 0
    num_scheduled: int = 0
    last_step: int = 0
    ahead: bool = False
    held: bool = False
    leaving: bool = False
    turn: int = 0
    cached_tokens: int | None = None
    preemptions: int = 0
    finish_reason: str | None = None
    forked_from: int = -1
    group: BeamGroup | None = None
    pending: tuple[tuple[int, float], ...] | None = None

    @property
    def num_output(self) -> int:
        return len(self.tokens) - self.num_prompt

    @property
    def num_missing(self) -> int:
        """Tokens still to be computed before the next one can be drawn."""
        return len(self.tokens) - self.num_computed

    @property
    def decoding(self) -> bool:
        """The prompt is behind it. Explicit: a preempted sequence with output prefills again."""
        return self.num_computed >= self.num_prompt and self.num_missing == 1 and self.state is State.RUNNING

    @property
    def pausing(self) -> bool:
        """It cannot be part of the next step."""
        return self.held or self.leaving or self.pending is not None

    @property
    def num_known(self) -> int:
        """Tokens whose value is known."""
        return len(self.tokens) - self.ahead

    @property
    def order(self) -> tuple[float, int]:
        """By the policy's rank; lower goes first."""
        return (self.request.rank, self.seq_id)


@dataclass(slots=True, eq=False)
class BeamGroup:
    """A beam search and the sequences that run for it, in the order of ``search.scores``. The request's own sequences
    wait (forking) until it is done and then take the best hypotheses."""

    search: BeamSearch
    beams: list[Sequence]


@dataclass(slots=True, eq=False)
class Request:
    """What a caller asked for: one prompt, ``params.n`` sequences.

    Attributes:
        arrival: monotonic seconds.
        tenant, cache_salt: prefix hits never cross them.
    """

    request_id: str
    prompt_token_ids: SequenceOf[int]
    params: SamplingParams
    arrival: float
    tenant: str = ""
    cache_salt: str = ""
    priority: int = 0
    sequences: list[Sequence] = field(default_factory=list)
    beams: BeamGroup | None = None
    rank: float = 0.0

    def make_sequences(self, first_id: int, *, private: bool = False) -> None:
        """``private``: no other request finds this one's blocks."""
        keys = [("tenant", self.tenant), ("salt", self.cache_salt)]
        extra = encode_extra([*keys, ("request", str(first_id))] if private else keys)
        for choice in range(self.params.n):
            tokens = array("i", self.prompt_token_ids)
            self.sequences.append(
                Sequence(first_id + choice, self, choice, tokens, BlockTable(extra), num_prompt=len(tokens))
            )

    @property
    def finished(self) -> bool:
        return all(s.state is State.FINISHED for s in self.sequences)


@dataclass(slots=True)
class SequenceUpdate:
    """News of a sequence after a step."""

    sequence: Sequence
    tokens: list[SampledToken]
    finish_reason: str | None = None
    stop_reason: int | None = None
    error: str | None = None
