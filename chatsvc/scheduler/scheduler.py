"""The scheduler: plans steps (see :mod:`chatsvc.scheduler.planner`) and applies what they made.

Of a request with several choices the first reads the prompt; the others are forked from it when it draws its first
token, share its blocks, and copy the partial last one when they first write into it. Beam search forks at every token.
"""

from __future__ import annotations

from collections.abc import Iterator

from chatsvc.scheduler.beam import Hypothesis
from chatsvc.scheduler.plan import SampledToken, ScheduledRow, SchedulerOutput, StepResult
from chatsvc.scheduler.planner import Planner
from chatsvc.scheduler.request import BeamGroup, Request, Sequence, SequenceUpdate, State
from chatsvc.scheduler.settings import SchedulerConfig, SchedulerStats, SwapCosts

__all__ = ["Scheduler", "SchedulerConfig", "SchedulerStats", "SwapCosts"]


class Scheduler(Planner):
    # -- requests ----------------------------------------------------------------------------------------------

    def add(self, request: Request) -> None:
        """Queue all sequences of a request. Whether it can ever fit was checked before (``max_total_tokens``)."""
        assert len(request.prompt_token_ids) < self.config.max_total_tokens
        self.queues.add(request)

    def finish(self, seq: Sequence, reason: str) -> None:
        """The one way out for a sequence, whatever its state. Idempotent. Never called while its step is in flight."""
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
        """Plan the next step. Empty only when there is no work."""
        self._step += 1
        if self._suspects:
            rows = [self._schedule_alone(self.queues.all[min(self._suspects)])]
        else:
            rows = self._plan()
            # An empty pass has preempted at least one running sequence; with none left, admission succeeds.
            while not rows and self.queues.all:
                if self.running and self.running[-1].pending is not None:
                    self._preempt(self.running[-1])  # beams that pause make room for those they wait for
                rows = self._plan()
        self.stats.computed_tokens += sum(len(r.token_ids) for r in rows)
        out, into = self.manager.take_moves()
        return SchedulerOutput(self._step, tuple(rows), self.manager.take_copies(), out, into)

    # -- results -----------------------------------------------------------------------------------------------

    def update(self, plan: SchedulerOutput, result: StepResult) -> list[SequenceUpdate]:
        """Apply a finished step: append tokens, finish and free."""
        updates: list[SequenceUpdate] = []
        groups: dict[int, BeamGroup] = {}
        for row in plan.rows:
            if row.seq_id not in self.queues.all:
                continue  # a beam of a request that failed in this very step
            seq = self.queues.all[row.seq_id]
            error = result.errors.get(row.seq_id)
            if error is not None:
                # Whatever it alone wrote is not to be believed.
                self.manager.withdraw(b for b in seq.table.blocks if b.ref_count == 1)
                updates += self._fail(seq, error)
                continue
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
        self.budget.observe(plan.num_tokens, result.seconds)
        return updates

    def _fork(self, parent: Sequence, row: ScheduledRow, result: StepResult) -> list[SequenceUpdate]:
        """The other choices begin: with the parent's blocks while sequence slots last, else as preempted ones."""
        updates: list[SequenceUpdate] = []
        for seq_id, _ in row.forks:
            seq = self.queues.all[seq_id]
            if len(self.running) < self.config.max_num_seqs:
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
            self.finish(seq, reason)
        return SequenceUpdate(seq, taken, reason, stop)

    def step_failed(self, plan: SchedulerOutput, error: str) -> list[SequenceUpdate]:
        """The step as a whole raised. A row that was alone is guilty; otherwise each is tried alone from now on."""
        self.manager.step_over(failed=True)
        if len(plan.rows) == 1:
            return self._fail(self.queues.all[plan.rows[0].seq_id], error)
        for row in plan.rows:
            seq = self.queues.all[row.seq_id]
            self._suspects.add(seq.seq_id)
            self._preempt(seq, swap=False)
        return []

    def _fail(self, seq: Sequence, error: str) -> list[SequenceUpdate]:
        """The sequence fails, and with it the choices that wait to be forked from it (or for its beam search)."""
        waiting = self.queues.forking.get(seq.seq_id, ())
        failed = list(seq.request.sequences) if seq.group is not None else [seq, *waiting]
        for one in failed:
            self.finish(one, "error")
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
            assert seq.num_computed < len(seq.tokens) + (seq.pending is not None) <= self.config.max_total_tokens + 1
            assert seq.table.swapped is None
        assert len(self.running) <= self.config.max_num_seqs
