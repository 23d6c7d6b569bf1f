"""Who goes first. A policy gives every request a rank when it arrives; lower ranks go first, and stay where they are.

Ranks never change, although requests age: with ageing, request a overtakes b when priority_a - waited_a / patience is
less than the same of b. Both waits grow alike, so that the comparison is one of priority + arrival / patience.
"""

from __future__ import annotations

from chatsvc.scheduler.request import Request
from chatsvc.scheduler.settings import PolicyName

# Seconds of waiting that make up for one step of priority.
PATIENCE = 10.0
# "shortest": tokens of work that weigh as much as a second of waiting, so that long requests are served too.
TOKENS_PER_SECOND = 100.0


class Policy:
    """Attributes:
    in_order: ranks grow with arrival, so that the queue needs no sorting.
    preemptive: a running sequence steps back for a waiting one of lower rank.
    """

    in_order = False
    preemptive = False

    def rank(self, request: Request) -> float:
        """Called once for each request, in the order of arrival."""
        raise NotImplementedError

    def served(self, rank: float) -> None:
        """A request of this rank was admitted."""


class FirstComeFirstServed(Policy):
    in_order = True

    def rank(self, request: Request) -> float:
        return request.arrival


class Priority(Policy):
    """``request.priority``: larger is less urgent. Waiting makes up for it, so nobody starves."""

    preemptive = True

    def rank(self, request: Request) -> float:
        return request.priority * PATIENCE + request.arrival


class Shortest(Policy):
    """The least work first (prompt and answer at its longest), long requests after a wait in proportion."""

    def rank(self, request: Request) -> float:
        work = len(request.prompt_token_ids) + request.params.max_tokens * request.params.n
        return request.arrival + work / TOKENS_PER_SECOND


class Fair(Policy):
    """Every tenant gets an equal share of the tokens: start-time fair queueing (Goyal et al., SIGCOMM 1996).

    A request starts, in virtual time, when the one before it of the same tenant has ended; virtual time stands where
    the request that was ranked last among those served began. An idle tenant saves nothing up.
    """

    def __init__(self) -> None:
        self._ends: dict[str, float] = {}
        self._now = 0.0

    def rank(self, request: Request) -> float:
        start = max(self._now, self._ends.get(request.tenant, 0.0))
        work = len(request.prompt_token_ids) + request.params.max_tokens * request.params.n
        self._ends[request.tenant] = start + work
        return start

    def served(self, rank: float) -> None:
        """Virtual time is at least there."""
        self._now = max(self._now, rank)
        if len(self._ends) > 1024:  # tenants that are idle need no memory
            self._ends = {t: end for t, end in self._ends.items() if end > self._now}


def make_policy(name: PolicyName) -> Policy:
    kinds: dict[PolicyName, type[Policy]] = {
        "fcfs": FirstComeFirstServed,
        "priority": Priority,
        "shortest": Shortest,
        "fair": Fair,
    }
    return kinds[name]()
