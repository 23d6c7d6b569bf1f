"""Beam search over forks: which continuations live on, which have ended, when nothing can improve any more.

The rules are those of transformers' ``generate(num_beams=...)`` (generation/utils.py, 5.x), so that results can be
compared hypothesis by hypothesis. This class decides; the scheduler forks, frees and appends.
"""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field
from typing import Literal

NEVER = -1.0e9


@dataclass(frozen=True, slots=True)
class BeamParams:
    """Attributes:
    width: beams that run at a time.
    length_penalty: exponent of the length by which a hypothesis' log-probability is divided.
    early_stopping: True: end when ``width`` hypotheses are complete; False: when the best running beam looks
        unable to improve on the worst of them; "never": when it certainly is.
    """

    width: int
    length_penalty: float = 1.0
    early_stopping: bool | Literal["never"] = False


@dataclass(frozen=True, slots=True)
class Continuation:
    """A running beam after this step: ``parent`` (index of a running beam before it) plus ``token``."""

    parent: int
    token: int
    score: float


@dataclass(frozen=True, slots=True)
class Hypothesis:
    """A complete answer. ``score`` is its log-probability divided by length ** length_penalty."""

    tokens: tuple[int, ...]
    score: float
    ended: bool  # by an end token, not by the length


@dataclass(slots=True)
class BeamSearch:
    """The state of one search.

    Attributes:
        end_ids: tokens that end a hypothesis.
        max_tokens: length at which every hypothesis ends.
        outputs: tokens of the running beams, in order of score.
        scores: their summed log-probabilities.
        finished: the best ``width`` complete hypotheses, best first.
    """

    params: BeamParams
    end_ids: frozenset[int]
    max_tokens: int
    outputs: list[tuple[int, ...]] = field(default_factory=lambda: [()])
    scores: list[float] = field(default_factory=lambda: [0.0])
    finished: list[Hypothesis] = field(default_factory=list)
    done: bool = False
    _improvable: bool = True

    @property
    def num_candidates(self) -> int:
        """Continuations that must be known of each beam, so that ``width`` unfinished ones always remain."""
        return max(2, 1 + len(self.end_ids)) * self.params.width

    def advance(self, candidates: SequenceOf[SequenceOf[tuple[int, float]]]) -> list[Continuation]:
        """One token further.

        Args:
            candidates: for each running beam its best ``num_candidates`` (token, log-probability), best first.

        Returns:
            The beams that run on, best first; none when the search is ``done``.
        """
        width, length = self.params.width, len(self.outputs[0]) + 1
        best = sorted(
            (Continuation(i, t, self.scores[i] + lp) for i, beam in enumerate(candidates) for t, lp in beam),
            key=lambda c: -c.score,
        )[: self.num_candidates]
        full = length >= self.max_tokens
        ends = [full or c.token in self.end_ids for c in best]
        self._finish([c for c, end in zip(best[:width], ends, strict=False) if end], length)
        running = [c for c, end in zip(best, ends, strict=True) if not end][:width]
        self.outputs, self.scores = (
            [(*self.outputs[c.parent], c.token) for c in running],
            [c.score for c in running],
        )
        self.done = not running or not self._can_improve(length) or self._complete
        return [] if self.done else running

    @property
    def _complete(self) -> bool:
        return self.params.early_stopping is True and len(self.finished) == self.params.width

    def _finish(self, ended: list[Continuation], length: int) -> None:
        if self._complete or not self._improvable:
            return
        scale = length**self.params.length_penalty
        new = [Hypothesis((*self.outputs[c.parent], c.token), c.score / scale, c.token in self.end_ids) for c in ended]
        self.finished = sorted(self.finished + new, key=lambda h: -h.score)[: self.params.width]

    def _can_improve(self, length: int) -> bool:
        longest = self.params.early_stopping == "never" and self.params.length_penalty > 0
        best = self.scores[0] / (self.max_tokens if longest else length) ** self.params.length_penalty
        worst = self.finished[-1].score if len(self.finished) == self.params.width else NEVER
        self._improvable = self._improvable and best > worst
        return self._improvable
