"""How many tokens a step may compute."""

from __future__ import annotations


class StepBudget:
    """Fixed, or adaptive: steps stay under ``max_seconds`` as contexts grow and the machine slows down.

    The adaptive budget shrinks at once when a full step was too long and grows slowly while steps are short, between
    ``floor`` and ``ceiling`` (what the start-up measurement allowed, doubled: the start may have been a bad moment).
    """

    def __init__(self, tokens: int, *, adaptive: bool, max_seconds: float = 0.25, floor: int = 16) -> None:
        self._limit = float(tokens)
        self._adaptive = adaptive
        self._max_seconds = max_seconds
        self._floor = min(floor, tokens)
        self._ceiling = tokens * 2

    @property
    def limit(self) -> int:
        return int(self._limit)

    def observe(self, tokens: int, seconds: float) -> None:
        """Report a finished step. Only steps that used most of the budget say something about it."""
        if not self._adaptive or tokens < 0.7 * self._limit or seconds <= 0:
            return
        if seconds > self._max_seconds:
            self._limit = max(self._floor, min(self._limit, 0.9 * tokens * self._max_seconds / seconds))
        elif seconds < 0.8 * self._max_seconds:
            self._limit = min(self._ceiling, self._limit * 1.05 + 1)
