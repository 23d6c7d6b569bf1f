"""The adaptive budget on machines of several speeds, which are given as fixed and per-token seconds of a step."""

from __future__ import annotations

import pytest

from chatsvc.scheduler.budget import ENOUGH_TOKENS, SHORT, StepBudget, first_budget

MOST = 0.25
MACHINES = {  # fixed seconds, seconds a token
    "tiny": (0.1, 0.02),
    "slow": (0.05, 0.002),
    "such that enough tokens just fit": (0.02, 0.00085),
    "fast": (0.005, 0.0002),
    "very fast": (0.001, 0.00002),
}


def run(budget: StepBudget, fixed: float, per_token: float, steps: int = 200) -> float:
    """Full steps; the seconds of the last."""
    for _ in range(steps):
        seconds = fixed + budget.limit * per_token
        budget.observe(budget.limit, seconds)
    return fixed + budget.limit * per_token


@pytest.mark.parametrize("name", MACHINES)
def test_full_steps_stay_under_the_limit_and_are_short_where_that_costs_little(name: str) -> None:
    fixed, per_token = MACHINES[name]
    first = first_budget(fixed, per_token, MOST)
    budget = StepBudget(first, adaptive=True, max_seconds=MOST)
    last = run(budget, fixed, per_token)
    for tokens, seconds in ((first, fixed + first * per_token), (budget.limit, last)):
        assert seconds <= MOST * 1.05 or tokens == 16, "one step may try a little more"
        if tokens > ENOUGH_TOKENS * 1.1:
            assert seconds <= SHORT * MOST * 1.05
        else:
            assert tokens >= ENOUGH_TOKENS * 0.9 or seconds > 0.7 * MOST or tokens == 16  # slow: all its time
    assert first <= 8192


def test_a_machine_that_slows_down_gets_shorter_steps_at_once_and_back() -> None:
    budget = StepBudget(400, adaptive=True, max_seconds=MOST)
    budget.observe(400, 0.5)
    assert 400 * MOST / 0.5 * 0.8 < budget.limit < 400 * MOST / 0.5
    assert run(budget, 0.005, 0.0002) <= SHORT * MOST * 1.05 and budget.limit > 350


def test_steps_between_short_and_too_long_keep_enough_tokens() -> None:
    budget = StepBudget(300, adaptive=True, max_seconds=MOST)
    for _ in range(50):
        budget.observe(budget.limit, 0.2)
    assert budget.limit == ENOUGH_TOKENS


def test_a_fixed_budget_and_steps_that_were_not_full_change_nothing() -> None:
    fixed, adaptive = StepBudget(100, adaptive=False), StepBudget(100, adaptive=True)
    fixed.observe(100, 9.0)
    adaptive.observe(60, 9.0)
    adaptive.observe(100, 0.0)
    assert fixed.limit == adaptive.limit == 100
