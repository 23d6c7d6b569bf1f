"""Iteration-level scheduling: which sequences compute how many tokens in the next step.

A step is planned in three passes over one token budget:

1. *share*: running sequences that decode take one token each, the longest unserved first; what is left goes to those
   that still prefill, oldest first. Each leaves half of the rest to those behind it that need at most half as many
   tokens, so that a short prompt is not kept waiting by a long one. Prompts of like length go one after the other:
   side by side, everybody's first token would come when the last one's does.
2. *place*: oldest first, blocks are found for these tokens. When the pool runs dry the newest running sequence that
   has not been placed gives all its blocks back and is recomputed later. The oldest is placed first and everybody
   else can be preempted for it, so it always advances: there is no livelock.
3. *admit*: if nobody was preempted, preempted and then waiting sequences come in while tokens, sequence slots and
   blocks (the uncached prompt plus a watermark) last.

A sequence whose next block is being filled by another one waits for that block instead of computing it twice.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import replace

from chatsvc.cache.manager import BlockManager
from chatsvc.scheduler.budget import StepBudget
from chatsvc.scheduler.plan import SamplingRow, ScheduledRow
from chatsvc.scheduler.policy import make_policy
from chatsvc.scheduler.queues import Queues
from chatsvc.scheduler.request import Sequence, State
from chatsvc.scheduler.settings import SchedulerConfig, SchedulerStats

# A waiting sequence that must wait for somebody's block does not hold up those behind it, up to this many.
MAX_PASSED_OVER = 64


class Planner:
    def __init__(self, config: SchedulerConfig, manager: BlockManager, budget: StepBudget) -> None:
        self.config = config
        self.manager = manager
        self.budget = budget
        self.stats = SchedulerStats()
        self.policy = make_policy(config.policy)
        self.queues = Queues(self.policy, config.eos_token_ids, private=not manager.prefix_caching)
        self._suspects: set[int] = set()
        self._step = 0
        self._turns = 0

    @property
    def running(self) -> list[Sequence]:
        return self.queues.running

    @property
    def preempted(self) -> list[Sequence]:
        return self.queues.preempted

    @property
    def waiting(self) -> dict[int, Sequence]:
        return self.queues.waiting

    def _plan(self) -> list[ScheduledRow]:
        rows: list[ScheduledRow] = []
        claimed: set[bytes] = set()
        if self.policy.preemptive:
            self._make_way()
        left = self.budget.limit
        shares, bar = self._share(left)
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
        left = min(left, self._prompt_tokens() - sum(len(r.token_ids) for r in rows if r.sampling is None))
        if calm and left > 0:
            admitted = self._admit(left, bar, claimed)
            rows += admitted
            left -= sum(len(r.token_ids) for r in admitted)
        return self._top_up(rows, left) if calm else rows

    def _take_turn(self, seq: Sequence) -> None:
        self._turns += 1
        seq.turn = self._turns

    def _share(self, budget: int) -> tuple[dict[int, int], float]:
        """Tokens for each running sequence, and how many a newcomer may lack to get any of the rest. Pure."""
        running = [s for s in self.running if not s.pausing]
        decoding = [s for s in running if s.decoding]
        if len(decoding) >= budget:  # not enough for everyone: all running sequences take turns
            others = (self.waiting or self.preempted) and len(self.running) < self.config.max_num_seqs
            kept = max(1, budget // 8) if others and budget > 1 else 0  # and who waits still gets in
            turn = sorted(running, key=lambda s: s.turn)[: budget - kept]
            return {s.seq_id: 1 for s in turn}, math.inf
        shares = {s.seq_id: 1 for s in decoding}
        left = min(budget - len(decoding), self._prompt_tokens())
        prefilling = [s for s in running if not s.decoding]
        waiting = bool(self.preempted or self.waiting)
        # Those behind each one: the fewest tokens that one of them lacks; who waits may lack few (cached, perhaps).
        fewest = [0.0 if waiting else math.inf]
        for seq in reversed(prefilling):
            fewest.append(min(fewest[-1], seq.num_missing))
        fewest.pop()
        bar = math.inf
        for seq in prefilling:
            shorter_behind = 2 * fewest.pop() <= seq.num_missing
            if self._yields(seq, bar):
                continue
            share = self._chunk(seq, left, alone=not shorter_behind)
            if share < seq.num_missing:
                bar = min(bar, seq.num_missing / 2)
            shares[seq.seq_id] = share
            left -= share
        return shares, bar

    def _prompt_tokens(self) -> int:
        """Tokens of a step that prompts may take."""
        if not any(s.decoding for s in self.running):
            return self.budget.limit
        return max(1, int(self.budget.limit * self.config.prefill_share))

    def _make_way(self) -> None:
        """Running sequences of higher rank step back for the first candidate, if it lacks a slot or blocks."""
        first = next(iter(self._candidates()), None)
        while first is not None and not first.pausing and self.running and self.running[-1].order > first.order:
            match = self.manager.match(first.table, first.tokens)
            need = self.manager.missing(first.table, len(first.tokens), match)
            room = self.manager.blocks_for(self.config.watermark_tokens) * len(self.running)
            if len(self.running) < self.config.max_num_seqs and need + room <= self.manager.pool.num_available:
                return
            self._preempt(self.running[-1])

    def _chunk(self, seq: Sequence, left: int, *, alone: bool) -> int:
        """All of it if there is room; else half of what is left while others are behind, but a block at least."""
        if alone or seq.num_missing <= left:
            return min(seq.num_missing, left)
        return min(left, max(self.manager.block_size, left // 2))

    def _top_up(self, rows: list[ScheduledRow], left: int) -> list[ScheduledRow]:
        """What nobody behind could use goes back to those that left it, the last of them first."""
        for i, row in reversed(list(enumerate(rows))):
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
        if seq.num_missing > 1 and not self._catch_up(seq, claimed):
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
        if seq.num_computed % self.manager.block_size:
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

    def _admit(self, budget: int, bar: float, claimed: set[bytes]) -> list[ScheduledRow]:
        """``bar``: who lacks more tokens than this waits for the prompts that are being read."""
        rows: list[ScheduledRow] = []
        if len(self.running) >= self.config.max_num_seqs or not (self.preempted or self.waiting):
            return rows
        passed_over = 0
        watermark = self.manager.blocks_for(self.config.watermark_tokens)
        # Room that running sequences still need for their prompts stands apart: blocks are taken chunk by chunk.
        reserved = sum(
            max(0, self.manager.blocks_for(len(s.tokens)) - len(s.table.blocks)) for s in self.running if not s.decoding
        )
        for seq in self._candidates():
            if budget <= 0 or len(self.running) >= self.config.max_num_seqs or passed_over > MAX_PASSED_OVER:
                break
            if seq.pausing:
                continue
            match = self.manager.match(seq.table, seq.tokens)
            need = self.manager.missing(seq.table, len(seq.tokens), match)
            room = reserved + watermark * len(self.running) if self.running else 0
            if need + room > self.manager.pool.num_available:
                break
            # A fully cached sequence recomputes its last token (with slot -1) to have something to sample from.
            seq.num_computed = min(match.num_tokens, len(seq.tokens) - 1)
            if self._yields(seq, bar) or self._is_claimed(seq, claimed):
                seq.num_computed = 0
                passed_over += 1
                continue
            n = self._chunk(seq, budget, alone=len(self.waiting) + len(self.preempted) == 1)
            placed = self.manager.allocate(seq.table, seq.num_computed + n, match)
            assert placed, "admission asked for less than allocation"
            self.manager.came_back(seq.table)
            self._book_hits(seq)
            self._take_turn(seq)
            self.policy.served(seq.request.rank)
            self.queues.move(seq, State.RUNNING)
            reserved += max(0, self.manager.blocks_for(len(seq.tokens)) - len(seq.table.blocks))
            if n < seq.num_missing:
                bar = min(bar, seq.num_missing / 2)
            rows.append(self._row(seq, n, claimed))
            budget -= n
        return rows

    @staticmethod
    def _yields(seq: Sequence, bar: float) -> bool:
        """It waits for a prompt before it. One whose text somebody reads already (it was preempted) does not."""
        return seq.num_missing > bar and seq.num_output == 0

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
        seq.num_scheduled = end
        seq.last_step = self._step
        settled = len(seq.table.content_ids) * self.manager.block_size
        size = self.manager.block_size
        if end >= settled + size:
            self.manager.store_full(seq.table, seq.tokens, min(end, seq.num_known))
        done = end == len(seq.tokens)
        if not done:
            digest = self.manager.next_digest(seq.table, seq.tokens, end)
            if digest is not None:
                claimed.add(digest)
        return ScheduledRow(
            seq_id=seq.seq_id,
            token_ids=(seq.tokens[start],) if n == 1 else tuple(seq.tokens[start:end]),
            start=start,
            block_table=seq.table.first_ids(-(-end // size)),
            write_from=start if settled <= start else min(settled, end),
            sampling=self._sampling(seq) if done else None,
            forks=self._forks(seq) if done else (),
        )

    def _forks(self, seq: Sequence) -> tuple[tuple[int, SamplingRow], ...]:
        if seq.group is not None or not self.queues.forking:
            return ()
        return tuple((s.seq_id, self._sampling(s)) for s in self.queues.forking.get(seq.seq_id, ()))

    def _sampling(self, seq: Sequence) -> SamplingRow:
        p = seq.request.params
        forbidden: tuple[int, ...] = ()
        if p.min_tokens and seq.num_output < p.min_tokens:
            ends = p.stop_token_ids if p.ignore_eos else p.stop_token_ids | self.config.eos_token_ids
            forbidden = tuple(sorted(ends))
        return SamplingRow(
            params=p,
            choice=seq.choice,
            position=len(seq.tokens),
            forbidden_ids=forbidden,
            prompt_ids=tuple(seq.tokens[: seq.num_prompt]) if p.penalised else (),
            output_ids=tuple(seq.tokens[seq.num_prompt :]) if p.penalised else (),
            candidates=seq.group.search.num_candidates if seq.group is not None else 0,
        )

    def _schedule_alone(self, seq: Sequence) -> ScheduledRow:
        """A suspect runs by itself, so that a failure tells who caused it. Everybody else pauses."""
        if seq.state is not State.RUNNING:
            while self.running:
                self._preempt(self.running[-1], swap=False)
            self.manager.came_back(seq.table)
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
        seq.num_computed = seq.num_scheduled = 0
        seq.held = seq.held or seq.ahead  # what to recompute is known when that step is done
        seq.preemptions += 1
        self.queues.move(seq, State.PREEMPTED)

    def _swap_is_cheaper(self, seq: Sequence) -> bool:
        """Out and in again, against computing all of it again."""
        costs = self.config.swap
        if costs.mode == "auto":
            return 2 * len(seq.table.blocks) * costs.block_seconds < seq.num_computed * costs.token_seconds
        return costs.mode == "swap"
