"""What crosses between the loop and the engine thread: plain, picklable data, never live objects.

Nobody changes a row once it is made. The rows are not declared frozen all the same: a frozen dataclass costs three
times as much to make, and a step makes hundreds.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from chatsvc.scheduler.params import SamplingParams

UNKNOWN = -1  # an input token: what the step before samples for the same sequence


@dataclass(slots=True)
class SamplingRow:
    """How the token behind a row is drawn.

    Attributes:
        params: the request's parameters.
        choice: index of the choice, part of the random number's key.
        position: position of the token to be drawn, counted from the start of the prompt.
        forbidden_ids: tokens that must not be drawn (end tokens while ``min_tokens`` is not reached).
        prompt_ids, output_ids: filled only when a penalty needs them.
        candidates: for beam search: ``SampledToken.top`` gets that many continuations, best first, after
            ``forbidden_ids``.
    """

    params: SamplingParams
    choice: int
    position: int
    forbidden_ids: tuple[int, ...] = ()
    prompt_ids: tuple[int, ...] = ()
    output_ids: tuple[int, ...] = ()
    candidates: int = 0


@dataclass(slots=True)
class ScheduledRow:
    """One sequence's share of a step: compute ``token_ids`` at positions ``start .. start + len(token_ids) - 1``.

    Attributes:
        seq_id: the sequence.
        token_ids: input tokens of this step; the last may be ``UNKNOWN`` when the step before is still in flight.
        start: position of the first of them = tokens already computed.
        block_table: block ids (int64) that cover positions ``0 .. start + len(token_ids) - 1``.
        write_from: positions below it are already in the cache: their slot is -1 and nothing is written.
        sampling: None while the prompt is unfinished.
        forks: (seq_id, sampling) of the other choices, drawn from the same logits when the prompt is done.
    """

    seq_id: int
    token_ids: tuple[int, ...]
    start: int
    block_table: Sequence[int]
    write_from: int
    sampling: SamplingRow | None
    forks: tuple[tuple[int, SamplingRow], ...] = ()


@dataclass(frozen=True, slots=True)
class SchedulerOutput:
    """One step. ``rows`` are in scheduling order.

    Done before the forward pass, in this order, each list reading all its sources before it writes any target:
    ``swap_out`` (device block, host block), ``copies`` (device block, device block), ``swap_in`` (host, device).
    """

    step: int
    rows: tuple[ScheduledRow, ...]
    copies: tuple[tuple[int, int], ...] = ()
    swap_out: tuple[tuple[int, int], ...] = ()
    swap_in: tuple[tuple[int, int], ...] = ()

    @property
    def num_tokens(self) -> int:
        return sum(len(r.token_ids) for r in self.rows)

    def filled(self, before: StepResult | None) -> SchedulerOutput:
        """With every ``UNKNOWN`` replaced by what the step before told. If it told nothing, that sequence or that step
        has failed, and nobody will look at what this row makes."""
        if not any(row.token_ids[-1] == UNKNOWN for row in self.rows):
            return self
        told = before.tokens if before is not None else {}
        rows = list(self.rows)
        for i, row in enumerate(rows):
            if row.token_ids[-1] == UNKNOWN:
                token = told[row.seq_id][-1].token_id if told.get(row.seq_id) else 0
                rows[i] = replace(row, token_ids=(*row.token_ids[:-1], token))
        return replace(self, rows=tuple(rows))


@dataclass(slots=True)
class SampledToken:
    """A token with its log-probability (natural logarithm, of the model's own distribution before any change).

    ``top`` holds (token id, log-probability) of the most likely tokens, best first, as many as asked for.
    """

    token_id: int
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class StepResult:
    """What a step made. A sequence with an unfinished prompt is absent from ``tokens``.

    Attributes:
        step: the plan's number.
        tokens: seq_id -> the new tokens (a list: one, or several with drafts).
        errors: seq_id -> why this sequence alone failed (for example NaN logits).
        seconds: time of the forward pass and sampling.
    """

    step: int
    tokens: dict[int, list[SampledToken]] = field(default_factory=dict)
    errors: dict[int, str] = field(default_factory=dict)
    seconds: float = 0.0
