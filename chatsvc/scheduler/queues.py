"""Where every sequence stands. A sequence is in exactly one of these places, and moves only through here."""

from __future__ import annotations

from array import array
from bisect import bisect_left, insort
from collections.abc import Collection
from heapq import merge, nsmallest
from itertools import islice

from chatsvc.cache.manager import BlockTable
from chatsvc.scheduler.beam import BeamSearch
from chatsvc.scheduler.policy import Policy
from chatsvc.scheduler.request import BeamGroup, Request, Sequence, State


def _key(seq: Sequence) -> tuple[float, int]:
    return seq.order


class Queues:
    """Args:
        policy: ranks requests.
        eos_token_ids: the model's end tokens.
        private: no request may find another one's blocks.

    Attributes:
    running: own blocks; by order.
    preempted: gave their blocks back, resume before anything new; by order.
    waiting: never scheduled; a dict by arrival, so that aborting one is O(1).
    forking: further choices of a request, by the seq_id of the first one, which is still reading the prompt.
    """

    def __init__(self, policy: Policy, eos_token_ids: frozenset[int], *, private: bool = False) -> None:
        self._policy = policy
        self._eos = eos_token_ids
        self._private = private
        self.running: list[Sequence] = []
        self.preempted: list[Sequence] = []
        self.waiting: dict[int, Sequence] = {}
        self.forking: dict[int, list[Sequence]] = {}
        self.all: dict[int, Sequence] = {}
        self._next_id = 0

    def add(self, request: Request) -> None:
        request.rank = self._policy.rank(request)
        request.make_sequences(self._next_id, private=self._private)
        self._next_id += len(request.sequences)
        first, *others = request.sequences
        if request.params.beam is not None:
            others = list(request.sequences)
            first = self.spawn(others[0])
            request.beams = first.group = BeamGroup(self._search(request), [first])
        self.waiting[first.seq_id] = first
        for seq in others:
            seq.state = State.FORKING
            seq.forked_from = first.seq_id
        if others:
            self.forking[first.seq_id] = others
        self.all.update((s.seq_id, s) for s in (first, *others))

    def _search(self, request: Request) -> BeamSearch:
        p = request.params
        assert p.beam is not None
        ends = p.stop_token_ids if p.ignore_eos else p.stop_token_ids | self._eos
        return BeamSearch(p.beam, ends, p.max_tokens)

    def spawn(self, parent: Sequence) -> Sequence:
        """A further sequence of the same request and tokens, standing nowhere yet."""
        tokens = array("i", parent.tokens)
        table = BlockTable(parent.table.extra)
        seq = Sequence(self._next_id, parent.request, 0, tokens, table, parent.num_prompt, group=parent.group)
        self._next_id += 1
        return seq

    def enter(self, seq: Sequence, state: State) -> None:
        """A spawned sequence takes its first place."""
        seq.state = state
        self.all[seq.seq_id] = seq
        insort(self.running if state is State.RUNNING else self.preempted, seq, key=_key)

    def move(self, seq: Sequence, state: State) -> None:
        """Out of where it stands, into running, preempted or (for good) finished."""
        self._leave(seq)
        seq.state = state
        if state is State.RUNNING:
            insort(self.running, seq, key=_key)
        elif state is State.PREEMPTED:
            insort(self.preempted, seq, key=_key)
        else:
            assert state is State.FINISHED
            del self.all[seq.seq_id]

    def _leave(self, seq: Sequence) -> None:
        if seq.state is State.WAITING:
            del self.waiting[seq.seq_id]
        elif seq.state is State.FORKING:
            first = seq.forked_from
            self.forking[first].remove(seq)
            if not self.forking[first]:
                del self.forking[first]
        else:
            place = self.running if seq.state is State.RUNNING else self.preempted
            i = bisect_left(place, seq.order, key=_key)
            assert place[i] is seq
            del place[i]

    def candidates(self, most: int) -> list[Sequence]:
        """Who may be admitted next, best rank first: all preempted ones and the ``most`` best waiting ones."""
        if self._policy.in_order:
            waiting = list(islice(self.waiting.values(), most))
        else:
            waiting = nsmallest(most, self.waiting.values(), key=_key)
        return list(merge(self.preempted, waiting, key=_key))

    def check_integrity(self) -> None:
        """Raises: AssertionError."""
        places: dict[State, Collection[Sequence]] = {
            State.RUNNING: self.running,
            State.PREEMPTED: self.preempted,
            State.WAITING: self.waiting.values(),
            State.FORKING: [s for forks in self.forking.values() for s in forks],
        }
        assert sum(len(p) for p in places.values()) == len(self.all)
        for state, seqs in places.items():
            for seq in seqs:
                assert seq.state is state and self.all[seq.seq_id] is seq
                if state is not State.RUNNING:
                    assert not seq.table.blocks and seq.num_computed == 0
        assert self.running == sorted(self.running, key=_key)
        assert self.preempted == sorted(self.preempted, key=_key)
