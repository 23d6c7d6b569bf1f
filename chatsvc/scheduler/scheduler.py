"""Iteration-level scheduling: which sequences compute how many tokens in the next step.

A step is planned in three passes over one token budget:

1. *share*: running sequences that decode take one token each, the longest unserved first; what is left goes to those
   that still prefill, oldest first, each at most half of the rest while others are behind it, so that a short prompt
   is not kept waiting by a long one.
2. *place*: oldest first, blocks are found for these tokens. When the pool runs dry the newest running sequence that
   has not been placed gives all its blocks back and is recomputed later. The oldest is placed first and everybody
   else can be preempted for it, so it always advances: there is no livelock.
3. *admit*: if nobody was preempted, preempted and then waiting sequences come in while tokens, sequence slots and
   blocks (the uncached prompt plus a watermark) last.

A sequence whose next block is being filled by another one waits for that block instead of computing it twice.

Of a request with several choices the first reads the prompt; the others are forked from it when it draws its first
token, share its blocks, and copy the partial last one when they first write into it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Literal

from chatsvc.cache.manager import BlockManager
from chatsvc.scheduler.beam import Hypothesis
from chatsvc.scheduler.budget import StepBudget
from chatsvc.scheduler.plan import SampledToken, SamplingRow, ScheduledRow, SchedulerOutput, StepResult
from chatsvc.scheduler.queues import Queues
from chatsvc.scheduler.request import BeamGroup, Request, Sequence, SequenceUpdate, State

# A waiting sequence that must wait for somebody's block does not hold up those behind it, up to this many.
MAX_PASSED_OVER = 64


@dataclass(frozen=True, slots=True)
class SwapCosts:
    """Attributes:
    mode: recompute, swap, or auto: whichever is estimated to cost less.
    block_seconds: moving one block between the tiers.
    token_seconds: computing one token.
    """

    mode: Literal["auto", "swap", "recompute"] = "recompute"
    block_seconds: float = 0.0
    token_seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """Attributes:
    max_num_seqs: sequences that own blocks at a time.
    max_total_tokens: prompt and output of one sequence: min(context, pool).
    watermark_tokens: room kept for each running sequence when a new one is admitted.
    eos_token_ids: the model's end tokens.
    swap: how a preempted sequence's blocks are given up.
    """

    max_num_seqs: int
    max_total_tokens: int
    watermark_tokens: int
    eos_token_ids: frozenset[int]
    swap: SwapCosts = SwapCosts()


@dataclass(slots=True)
class SchedulerStats:
    """Running totals since the start."""

    prompt_tokens: int = 0
    cached_prompt_tokens: int = 0
    computed_tokens: int = 0
    generation_tokens: int = 0
    query_tokens: int = 0
    hit_tokens: int = 0
    recompute_hit_tokens: int = 0
    preemptions: int = 0  # by recomputation
    swaps: int = 0  # preemptions by swapping


class Scheduler:
    def __init__(self, config: SchedulerConfig, manager: BlockManager, budget: StepBudget) -> None:
        self.config = config
        self.manager = manager
        self.budget = budget
        self.stats = SchedulerStats()
        self.queues = Queues(config.eos_token_ids, private=not manager.prefix_caching)
        self._suspects: set[int] = set()
        self._step = 0
        self._turns = 0

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
    def running(self) -> list[Sequence]:
        return self.queues.running

    @property
    def preempted(self) -> list[Sequence]:
        return self.queues.preempted

    @property
    def waiting(self) -> dict[int, Sequence]:
        return self.queues.waiting

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

    def _plan(self) -> list[ScheduledRow]:
        rows: list[ScheduledRow] = []
        claimed: set[bytes] = set()
        left = self.budget.limit
        shares = self._share(left)
        for seq_id in shares:  # in the order of their claims, so that turns stay a queue
            self._take_turn(self.queues.all[seq_id])
        calm = True
        for seq in list(self.running):
            if seq.state is not State.RUNNING or seq.seq_id not in shares:
                continue
            row, quiet = self._place(seq, min(shares[seq.seq_id], left), claimed)
            calm = calm and quiet
            if row is not None:
                rows.append(row)
                left -= len(row.token_ids)
        if calm and left > 0:
            admitted = self._admit(left, claimed)
            rows += admitted
            left -= sum(len(r.token_ids) for r in admitted)
        return self._top_up(rows, left) if calm else rows

    def _take_turn(self, seq: Sequence) -> None:
        self._turns += 1
        seq.turn = self._turns

    def _share(self, budget: int) -> dict[int, int]:
        """Tokens for each running sequence. Pure."""
        running = [s for s in self.running if s.pending is None]
        decoding = [s for s in running if s.decoding]
        if len(decoding) >= budget:  # not enough for everyone: all running sequences take turns
            others = (self.waiting or self.preempted) and len(self.running) < self.config.max_num_seqs
            kept = max(1, budget // 8) if others and budget > 1 else 0  # and who waits still gets in
            turn = sorted(running, key=lambda s: s.turn)[: budget - kept]
            return {s.seq_id: 1 for s in turn}
        shares = {s.seq_id: 1 for s in decoding}
        left = budget - len(decoding)
        prefilling = [s for s in running if not s.decoding]
        behind = len(prefilling) + len(self.preempted) + len(self.waiting)
        for seq in prefilling:
            behind -= 1
            shares[seq.seq_id] = self._chunk(seq, left, alone=behind == 0)
            left -= shares[seq.seq_id]
        return shares

    def _chunk(self, seq: Sequence, left: int, *, alone: bool) -> int:
        """At most half of what is left while others are behind, but no less than a block."""
        return min(seq.num_missing, left, left if alone else max(self.manager.block_size, left // 2))

    def _top_up(self, rows: list[ScheduledRow], left: int) -> list[ScheduledRow]:
        """What nobody behind could use goes back to those that still prefill, oldest first."""
        for i, row in enumerate(rows):
            seq = self.queues.all[row.seq_id]
            end = row.start + len(row.token_ids)
            more = min(left, len(seq.tokens) - end)
            if more <= 0 or not self.manager.allocate(seq.table, end + more, computed=end):
                continue
            write_from = row.write_from if row.write_from < end else end
            rows[i] = replace(self._row(seq, end + more - row.start, set()), write_from=write_from)
            left -= more
        return rows

    def _place(self, seq: Sequence, share: int, claimed: set[bytes]) -> tuple[ScheduledRow | None, bool]:
        """Find blocks for up to ``share`` tokens; preempt newer sequences when the pool is dry.

        Returns the row (None: it computes nothing in this step) and whether it went without preemption.
        """
        if share <= 0:
            return None, True
        if not self._catch_up(seq, claimed):
            return None, True
        n = min(share, seq.num_missing)
        calm = True
        while not self.manager.allocate(seq.table, seq.num_computed + n, computed=seq.num_computed):
            calm = False
            victim = self.running[-1]
            self._preempt(victim)
            if victim is seq:
                return None, False
        return self._row(seq, n, claimed), calm

    def _catch_up(self, seq: Sequence, claimed: set[bytes]) -> bool:
        """Take blocks that others filled meanwhile; False when the next one is just being filled by another."""
        if seq.num_missing <= 1 or seq.num_computed % self.manager.block_size:
            return True
        match = self.manager.match(seq.table, seq.tokens)
        if match.blocks and self.manager.allocate(seq.table, 0, match):
            seq.num_computed = min(match.num_tokens, len(seq.tokens) - 1)
        return not self._is_claimed(seq, claimed)

    def _is_claimed(self, seq: Sequence, claimed: set[bytes]) -> bool:
        if not self.manager.prefix_caching or not claimed or seq.num_computed % self.manager.block_size:
            return False
        digest = self.manager.next_digest(seq.table, seq.tokens, seq.num_computed)
        return digest is not None and digest in claimed

    def _admit(self, budget: int, claimed: set[bytes]) -> list[ScheduledRow]:
        rows: list[ScheduledRow] = []
        passed_over = 0
        watermark = self.manager.blocks_for(self.config.watermark_tokens)
        # Room that running sequences still need for their prompts stands apart: blocks are taken chunk by chunk.
        reserved = sum(
            max(0, self.manager.blocks_for(len(s.tokens)) - len(s.table.blocks)) for s in self.running if not s.decoding
        )
        for seq in self._candidates():
            if budget <= 0 or len(self.running) >= self.config.max_num_seqs or passed_over > MAX_PASSED_OVER:
                break
            if seq.pending is not None:
                continue
            match = self.manager.match(seq.table, seq.tokens)
            need = self.manager.missing(seq.table, len(seq.tokens), match)
            room = reserved + watermark * len(self.running) if self.running else 0
            if need + room > self.manager.pool.num_available:
                break
            # A fully cached sequence recomputes its last token (with slot -1) to have something to sample from.
            seq.num_computed = min(match.num_tokens, len(seq.tokens) - 1)
            if self._is_claimed(seq, claimed):
                seq.num_computed = 0
                passed_over += 1
                continue
            n = self._chunk(seq, budget, alone=len(self.waiting) + len(self.preempted) == 1)
            placed = self.manager.allocate(seq.table, seq.num_computed + n, match)
            assert placed, "admission asked for less than allocation"
            self.manager.came_back(seq.table)
            self._book_hits(seq)
            self._take_turn(seq)
            self.queues.move(seq, State.RUNNING)
            reserved += max(0, self.manager.blocks_for(len(seq.tokens)) - len(seq.table.blocks))
            rows.append(self._row(seq, n, claimed))
            budget -= n
        return rows

    def _candidates(self) -> Iterable[Sequence]:
        """Who may be admitted, in this order. The bench's static baseline narrows it to the members of its batch."""
        return self.queues.candidates(self.config.max_num_seqs - len(self.running) + MAX_PASSED_OVER + 1)

    def _book_hits(self, seq: Sequence) -> None:
        hits = seq.num_computed
        if seq.state is State.PREEMPTED:
            self.stats.recompute_hit_tokens += hits
            return
        seq.cached_tokens = seq.request.sequences[0].cached_tokens = hits
        self.stats.query_tokens += seq.num_prompt
        self.stats.hit_tokens += hits
        self.stats.cached_prompt_tokens += hits
        self.stats.prompt_tokens += seq.num_prompt

    def _row(self, seq: Sequence, n: int, claimed: set[bytes]) -> ScheduledRow:
        """The sequence's row; what the step will have filled is findable from now on."""
        start, end = seq.num_computed, seq.num_computed + n
        settled = len(seq.table.content_ids) * self.manager.block_size
        self.manager.store_full(seq.table, seq.tokens, end)
        if end < len(seq.tokens):
            digest = self.manager.next_digest(seq.table, seq.tokens, end)
            if digest is not None:
                claimed.add(digest)
        return ScheduledRow(
            seq_id=seq.seq_id,
            token_ids=tuple(seq.tokens[start:end]),
            start=start,
            block_table=seq.table.ids[: self.manager.blocks_for(end)],
            write_from=max(start, min(settled, end)),
            sampling=self._sampling(seq) if end == len(seq.tokens) else None,
            forks=self._forks(seq) if end == len(seq.tokens) else (),
        )

    def _forks(self, seq: Sequence) -> tuple[tuple[int, SamplingRow], ...]:
        if seq.group is not None:
            return ()
        return tuple((s.seq_id, self._sampling(s)) for s in self.queues.forking.get(seq.seq_id, ()))

    def _sampling(self, seq: Sequence) -> SamplingRow:
        p = seq.request.params
        forbidden: tuple[int, ...] = ()
        if seq.num_output < p.min_tokens:
            ends = p.stop_token_ids if p.ignore_eos else p.stop_token_ids | self.config.eos_token_ids
            forbidden = tuple(sorted(ends))
        penalised = p.repetition_penalty != 1.0 or p.presence_penalty != 0.0 or p.frequency_penalty != 0.0
        return SamplingRow(
            params=p,
            choice=seq.choice,
            position=len(seq.tokens),
            forbidden_ids=forbidden,
            prompt_ids=tuple(seq.tokens[: seq.num_prompt]) if penalised else (),
            output_ids=tuple(seq.tokens[seq.num_prompt :]) if penalised else (),
            candidates=seq.group.search.num_candidates if seq.group is not None else 0,
        )

    def _schedule_alone(self, seq: Sequence) -> ScheduledRow:
        """A suspect runs by itself, so that a failure tells who caused it. Everybody else pauses."""
        if seq.state is not State.RUNNING:
            while self.running:
                self._preempt(self.running[-1], swap=False)
            self.queues.move(seq, State.RUNNING)
        n = min(self.budget.limit, seq.num_missing)
        placed = self.manager.allocate(seq.table, seq.num_computed + n, computed=seq.num_computed)
        assert placed, "one sequence alone always fits"
        return self._row(seq, n, set())

    def _preempt(self, seq: Sequence, *, swap: bool = True) -> None:
        """It gives its blocks back. Swapped: the host tier keeps them. Else its full blocks stay findable until
        somebody needs them, and what is gone is recomputed."""
        if swap and self._swap_is_cheaper(seq) and self.manager.swap_out(seq.table, seq.num_computed):
            self.stats.swaps += 1
        else:
            self.manager.free(seq.table)
            self.stats.preemptions += 1
        seq.num_computed = 0
        seq.preemptions += 1
        self.queues.move(seq, State.PREEMPTED)

    def _swap_is_cheaper(self, seq: Sequence) -> bool:
        """Out and in again, against computing all of it again."""
        costs = self.config.swap
        if costs.mode == "auto":
            return 2 * len(seq.table.blocks) * costs.block_seconds < seq.num_computed * costs.token_seconds
        return costs.mode == "swap"

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
        return self.manager.filled_slots((s.table, s.num_computed) for s in self.running)

    def check_integrity(self) -> None:
        """Every invariant of scheduler and pool, between steps. Raises: AssertionError."""
        self.manager.check_integrity(s.table for s in self.queues.all.values())
        self.queues.check_integrity()
        for seq in self.running:
            assert len(seq.table.blocks) * self.manager.block_size >= seq.num_computed
            assert seq.num_computed < len(seq.tokens) + (seq.pending is not None) <= self.config.max_total_tokens + 1
            assert seq.table.swapped is None
        assert len(self.running) <= self.config.max_num_seqs
