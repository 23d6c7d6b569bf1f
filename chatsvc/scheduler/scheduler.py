"""The scheduler: plans steps (see :mod:`chatsvc.scheduler.planner`) and applies what they made.

Of a request with several choices the first reads the prompt; the others are forked from it when it draws its first
token, share its blocks, and copy the partial last one when they first write into it. Beam search forks at every token.

A step may be planned while the one before it runs. Its sequences are then taken to be where that step leaves them: a
token that it is to sample is ``UNKNOWN`` (the executor, which runs steps in order, fills it in), and a sequence that
ends with it is held. Where more than that would be unknown (forks, beams, penalties) nothing is planned ahead: who must
wait for the result would miss every second step. A sequence that ends meanwhile keeps its blocks until no step in
flight names them. When somebody comes, a planned step that has not begun is taken back, so that he is in the next one.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

from chatsvc.cache.manager import BlockManager
from chatsvc.scheduler.beam import Hypothesis
from chatsvc.scheduler.budget import StepBudget
from chatsvc.scheduler.plan import UNKNOWN, SampledToken, ScheduledRow, SchedulerOutput, StepResult
from chatsvc.scheduler.planner import Planner
from chatsvc.scheduler.request import BeamGroup, Request, Sequence, SequenceUpdate, State
from chatsvc.scheduler.settings import SchedulerConfig, SchedulerStats, SwapCosts

__all__ = ["Scheduler", "SchedulerConfig", "SchedulerStats", "SwapCosts"]


class Scheduler(Planner):
    def __init__(self, config: SchedulerConfig, manager: BlockManager, budget: StepBudget) -> None:
        super().__init__(config, manager, budget)
        self.in_flight: deque[SchedulerOutput] = deque()  # oldest first
        self._leaving: dict[int, tuple[Sequence, str]] = {}
        self._ran_ahead = 0  # the last step whose end was taken for granted by the plan after it

    # -- requests ----------------------------------------------------------------------------------------------

    def add(self, request: Request) -> None:
        """Queue all sequences of a request. Whether it can ever fit was checked before (``max_total_tokens``)."""
        assert len(request.prompt_token_ids) < self.config.max_total_tokens
        self.queues.add(request)

    def finish(self, seq: Sequence, reason: str) -> None:
        """The one way out for a sequence, whatever its state. Idempotent. For callers: see :meth:`retire`."""
        if seq.state is State.FINISHED:
            return
        self.queues.move(seq, State.FINISHED)
        self.manager.free(seq.table, ended=True)
        self.manager.came_back(seq.table)
        seq.finish_reason = reason
        self._suspects.discard(seq.seq_id)
        beams = seq.request.beams
        if beams is not None and seq.group is None and seq.request.finished:
            for beam in beams.beams:
                self.finish(beam, reason)

    def retire(self, seq: Sequence, reason: str) -> None:
        """Finish it as soon as no step in flight names it (or a beam that runs for it); no further one will."""
        beams = seq.request.beams
        named = [seq] if beams is None or seq.group is not None else beams.beams
        if self.in_flight and any(s.last_step >= self.in_flight[0].step for s in named):
            self._leaving.setdefault(seq.seq_id, (seq, reason))
            seq.leaving = True
            for beam in named if beams is not None and all(s.leaving for s in seq.request.sequences) else ():
                beam.leaving = True
        else:
            self.finish(seq, reason)

    def _let_go(self) -> None:
        leaving, self._leaving = self._leaving, {}
        for seq, reason in leaving.values():
            self.retire(seq, reason)

    @property
    def num_swapped(self) -> int:
        return sum(s.table.swapped is not None for s in self.preempted)

    @property
    def has_work(self) -> bool:
        return bool(self.queues.all)

    def sequences(self) -> Iterator[Sequence]:
        return iter(self.queues.all.values())

    # -- planning ----------------------------------------------------------------------------------------------

    def schedule(self) -> SchedulerOutput:
        """Plan the next step. Empty only when there is no work, or none until the step in flight is done."""
        assert len(self.in_flight) <= 1, "at most two steps in flight"
        self._step += 1
        if self.in_flight:
            assert not self._suspects, "suspects run alone"
            self._run_ahead(self.in_flight[0])
            rows = self._plan()
        elif self._suspects:
            rows = [self._schedule_alone(self.queues.all[min(self._suspects)])]
        else:
            rows = self._plan()
            # An empty pass has preempted at least one running sequence; with none left, admission succeeds.
            while not rows and self.queues.all:
                if self.running and self.running[-1].pending is not None:
                    self._preempt(self.running[-1])  # beams that pause make room for those they wait for
                rows = self._plan()
        if not rows:
            self._step -= 1
            return SchedulerOutput(0, ())
        moves = self.manager.seal()
        plan = SchedulerOutput(self._step, tuple(rows), moves.copies, moves.out, moves.into)
        self.in_flight.append(plan)
        return plan

    @property
    def may_run_ahead(self) -> bool:
        """Whether a step may be planned although one is in flight."""
        if len(self.in_flight) != 1 or self._suspects or not self.has_work:
            return False
        for row in self.in_flight[0].rows:
            how = row.sampling
            if how is not None and (row.forks or how.candidates or how.params.penalised):
                return False
        return True

    @property
    def may_take_back(self) -> bool:
        """Whether the newest step in flight could be undone, were it not begun: it computes one token for each of its
        sequences, moves nothing, and no block counts as full because of it."""
        if len(self.in_flight) < 2 or not self.manager.newest_is_bare:
            return False
        plan = self.in_flight[-1]
        return not (plan.copies or plan.swap_out or plan.swap_in) and plan.num_tokens == len(plan.rows)

    def take_back(self) -> None:
        """The newest step in flight was never begun, and will not be: see :attr:`may_take_back`.

        Blocks that it was given stay with their sequences, which will need them.
        """
        plan = self.in_flight.pop()
        before = {row.seq_id for row in self.in_flight[-1].rows}
        for row in plan.rows:
            seq = self.queues.all[row.seq_id]
            seq.num_scheduled = row.start
            seq.last_step = self.in_flight[-1].step if row.seq_id in before else 0
        self.manager.take_back()

    def _run_ahead(self, plan: SchedulerOutput) -> None:
        """Take for granted that the step in flight ends well."""
        if self._ran_ahead == plan.step:
            return
        self._ran_ahead = plan.step
        for row in plan.rows:
            seq = self.queues.all[row.seq_id]
            if seq.leaving:
                continue
            seq.num_computed = row.start + len(row.token_ids)
            if row.sampling is None:
                continue
            seq.tokens.append(UNKNOWN)
            seq.ahead = True
            most = seq.request.params.max_tokens
            seq.held = seq.num_output >= most or len(seq.tokens) >= self.config.max_total_tokens

    # -- results -----------------------------------------------------------------------------------------------

    def update(self, plan: SchedulerOutput, result: StepResult) -> list[SequenceUpdate]:
        """Apply the oldest step in flight: append tokens, finish and free."""
        assert self.in_flight.popleft() is plan, "steps end in order"
        updates: list[SequenceUpdate] = []
        groups: dict[int, BeamGroup] = {}
        for row in plan.rows:
            seq = self.queues.all.get(row.seq_id)
            if seq is None:
                continue  # a beam of a request that failed in this very step
            error = result.errors.get(row.seq_id)
            if error is not None:
                # Whatever it alone wrote is not to be believed.
                self.manager.withdraw(b for b in seq.table.blocks if b.ref_count == 1)
            if seq.leaving:
                continue
            if error is not None:
                updates += self._fail(seq, error)
                continue
            seq.held = False
            if plan.step != self._ran_ahead:
                seq.num_computed = row.start + len(row.token_ids)
            if row.sampling is None:
                continue
            self._suspects.discard(seq.seq_id)
            if seq.group is not None:
                seq.pending = result.tokens[row.seq_id][0].top
                groups[id(seq.group)] = seq.group
                continue
            updates += self._fork(seq, row, result)
            updates.append(self._append(seq, result.tokens[row.seq_id]))
        for group in groups.values():
            if all(beam.pending is not None for beam in group.beams):
                updates += self._advance(group)
        self.manager.step_over()
        self._let_go()
        self.stats.computed_tokens += plan.num_tokens
        self.budget.observe(plan.num_tokens, result.seconds)
        return updates

    def _fork(self, parent: Sequence, row: ScheduledRow, result: StepResult) -> list[SequenceUpdate]:
        """The other choices begin: with the parent's blocks while sequence slots last, else as preempted ones."""
        updates: list[SequenceUpdate] = []
        for seq_id, _ in row.forks:
            seq = self.queues.all.get(seq_id)
            if seq is None:
                continue  # aborted meanwhile
            if parent.state is State.RUNNING and len(self.running) < self.config.max_num_seqs:
                self.queues.move(seq, State.RUNNING)
                self.manager.fork(parent.table, seq.table)
                seq.num_computed = parent.num_computed
            else:
                self.queues.move(seq, State.PREEMPTED)
            error = result.errors.get(seq_id)
            updates += self._fail(seq, error) if error is not None else [self._append(seq, result.tokens[seq_id])]
        return updates

    def _advance(self, group: BeamGroup) -> list[SequenceUpdate]:
        """Every running beam knows what may follow: the best continuations go on, the others' blocks are free now."""
        old = group.beams
        kept = group.search.advance([beam.pending or () for beam in old])
        if group.search.done:
            return self._finish_beams(old[0].request, group)
        group.beams = []
        for c in kept:
            # The first continuation of a beam is the beam itself, a further one a fork of it.
            beam = old[c.parent] if old[c.parent] not in group.beams else self._fork_beam(old[c.parent])
            group.beams.append(beam)
        for beam in old:
            if beam not in group.beams:
                self.finish(beam, "pruned")
        for beam, c in zip(group.beams, kept, strict=True):
            beam.tokens.append(c.token)
            beam.pending = None
        return []

    def _fork_beam(self, parent: Sequence) -> Sequence:
        beam = self.queues.spawn(parent)
        if parent.state is State.RUNNING and len(self.running) < self.config.max_num_seqs:
            self.queues.enter(beam, State.RUNNING)
            self.manager.fork(parent.table, beam.table)
            beam.num_computed = parent.num_computed
        else:
            self.queues.enter(beam, State.PREEMPTED)
        return beam

    def _finish_beams(self, request: Request, group: BeamGroup) -> list[SequenceUpdate]:
        updates: list[SequenceUpdate] = []
        nothing = Hypothesis((), 0.0, False)  # only if fewer than n continuations exist at all
        hypotheses = [*group.search.finished, *[nothing] * len(request.sequences)]
        for seq, best in zip(request.sequences, hypotheses, strict=False):
            seq.tokens.extend(best.tokens)
            self.stats.generation_tokens += len(best.tokens)
            reason = "stop" if best.ended else "length"
            self.finish(seq, reason)
            updates.append(SequenceUpdate(seq, [SampledToken(t) for t in best.tokens], reason))
        return updates

    def _append(self, seq: Sequence, sampled: list[SampledToken]) -> SequenceUpdate:
        p = seq.request.params
        taken: list[SampledToken] = []
        reason: str | None = None
        stop: int | None = None
        for token in sampled:
            if seq.ahead:
                seq.tokens[-1], seq.ahead = token.token_id, False
            else:
                seq.tokens.append(token.token_id)
            taken.append(token)
            self.stats.generation_tokens += 1
            if token.token_id in p.stop_token_ids:
                reason, stop = "stop", token.token_id
            elif token.token_id in self.config.eos_token_ids and not p.ignore_eos:
                reason = "stop"
            elif seq.num_output >= p.max_tokens or len(seq.tokens) >= self.config.max_total_tokens:
                reason = "length"
            if reason is not None:
                break
        if reason is not None:
            self.retire(seq, reason)
        elif self.in_flight and seq.last_step == self.in_flight[-1].step:  # what that one fills can now be named
            self.manager.store_full(seq.table, seq.tokens, min(seq.num_scheduled, seq.num_known), submitted=True)
        return SequenceUpdate(seq, taken, reason, stop)

    def step_failed(self, plan: SchedulerOutput, error: str) -> list[SequenceUpdate]:
        """The oldest step in flight raised. A row that was alone is guilty; otherwise each is tried alone from now on.

        What was planned after it never happened: the caller waits for it and drops what it made.
        """
        assert self.in_flight[0] is plan, "steps end in order"
        void, self.in_flight = list(self.in_flight), deque()
        for _ in void:
            self.manager.step_over(failed=True)
        for one in self.queues.all.values():  # whoever ran ahead comes back
            if one.ahead:
                one.tokens.pop()
            one.ahead = one.held = False
        for seq_id in dict.fromkeys(row.seq_id for step in void for row in step.rows):
            named = self.queues.all.get(seq_id)
            if named is not None and named.state is State.RUNNING:
                self._preempt(named, swap=False)
        self._let_go()
        here = [seq for row in plan.rows if (seq := self.queues.all.get(row.seq_id)) is not None]
        if len(plan.rows) == 1:
            return self._fail(here[0], error) if here else []
        self._suspects.update(seq.seq_id for seq in here)
        return []

    def _fail(self, seq: Sequence, error: str) -> list[SequenceUpdate]:
        """The sequence fails, and with it the choices that wait to be forked from it (or for its beam search)."""
        waiting = self.queues.forking.get(seq.seq_id, ())
        failed = list(seq.request.sequences) if seq.group is not None else [seq, *waiting]
        for one in failed:
            self.retire(one, "error")
        return [SequenceUpdate(one, [], "error", error=error) for one in failed]

    # -- looking in --------------------------------------------------------------------------------------------

    def filled_slots(self) -> tuple[int, int]:
        """(filled, allocated) slots of the used blocks, what the step in flight fills included; shared ones once."""
        return self.manager.filled_slots((s.table, max(s.num_computed, s.num_scheduled)) for s in self.running)

    def check_integrity(self) -> None:
        """Every invariant of scheduler and pool, between steps. Raises: AssertionError."""
        self.manager.check_integrity(s.table for s in self.queues.all.values())
        self.queues.check_integrity()
        for seq in self.running:
            assert len(seq.table.blocks) * self.manager.block_size >= seq.num_computed
            more = seq.pending is not None or seq.held or seq.leaving  # the next token is not drawn yet, or never
            assert seq.num_computed < len(seq.tokens) + more <= self.config.max_total_tokens + 1
            assert seq.table.swapped is None
        assert len(self.running) <= self.config.max_num_seqs
