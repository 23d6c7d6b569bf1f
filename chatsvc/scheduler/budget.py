"""How many tokens a step may compute."""

from __future__ import annotations

ENOUGH_TOKENS = 256
SHORT = 0.4


class StepBudget:
    """Fixed, or adaptive: steps stay under ``max_seconds`` as contexts grow and the machine slows down.

    A machine that is fast enough takes shorter ones: with :data:`ENOUGH_TOKENS` a step's fixed cost (reading the
    weights) is spread over many, and what comes meanwhile waits less, so from there on steps only grow up to
    :data:`SHORT` of ``max_seconds``.

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
        floor, aim = self._floor, self._max_seconds
        if tokens >= ENOUGH_TOKENS and seconds <= aim:
            floor, aim = ENOUGH_TOKENS, SHORT * aim
        if seconds > aim:
            self._limit = max(floor, min(self._limit, 0.9 * tokens * aim / seconds))
        elif seconds < 0.8 * aim:
            self._limit = min(self._ceiling, self._limit * 1.05 + 1)


def first_budget(fixed: float, per_token: float, max_seconds: float) -> int:
    """The budget to begin with, of a machine that needs ``fixed`` + tokens x ``per_token`` seconds for a step."""
    within = (max_seconds - fixed) / per_token
    short = (SHORT * max_seconds - fixed) / per_token
    return max(16, min(8192, int(max(short, min(within, ENOUGH_TOKENS)))))
