"""One simulated run: the engine's scheduler and block manager, stepped on a virtual clock.

Nothing sleeps and nothing is random: a step takes as long as the cost model says, an answer is as long as the trace
says, and its tokens are those of the trace's segment.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from dataclasses import dataclass, field

from chatsvc.bench.baselines import StaticScheduler
from chatsvc.errors import ConfigError
from chatsvc.scheduler.params import SamplingParams
from chatsvc.scheduler.plan import SampledToken, SchedulerOutput, StepResult
from chatsvc.scheduler.request import Request, Sequence
from chatsvc.scheduler.scheduler import Scheduler
from chatsvc.sim.batching import BatchGate
from chatsvc.sim.contiguous import Reservation, ReservingManager
from chatsvc.sim.cost import CostModel, work_of
from chatsvc.sim.memory import MemoryMeter, Sample
from chatsvc.sim.traces import Entry, prompt_tokens, segment_base, token_at


@dataclass(slots=True)
class Outcome:
    """What became of one request. Seconds of the virtual clock.

    Attributes:
        longest_gap: between two tokens of the answer.
    """

    tenant: str
    arrival: float
    prompt_len: int
    output_len: int
    started: float = -1.0
    first: float = -1.0
    finished: float = -1.0
    longest_gap: float = 0.0
    cached: int = 0
    preemptions: int = 0

    @property
    def queued(self) -> float:
        return self.started - self.arrival

    @property
    def ttft(self) -> float:
        return self.first - self.arrival

    @property
    def tpot(self) -> float:
        return (self.finished - self.first) / max(1, self.output_len - 1)

    @property
    def per_token(self) -> float:
        """The paper's normalized latency: end-to-end seconds for each token of the answer."""
        return (self.finished - self.arrival) / self.output_len


@dataclass(slots=True)
class Run:
    """A finished run.

    Attributes:
        preemptions, swaps: sequences that were pushed out, to be recomputed or swapped.
        memory, measured: from the end of the warm-up on; ``measured`` is its (time, tokens made).
        samples: the memory after each step from the start.
        seconds, output_tokens: at the end.
    """

    outcomes: list[Outcome]
    memory: MemoryMeter
    samples: list[Sample] = field(default_factory=list)
    measured: tuple[float, int] = (0.0, 0)
    seconds: float = 0.0
    output_tokens: int = 0
    steps: int = 0
    preemptions: int = 0
    swaps: int = 0
    computed_tokens: int = 0
    hit_tokens: int = 0
    query_tokens: int = 0
    evictions: int = 0

    @property
    def throughput(self) -> float:
        """Answer tokens per second since the warm-up."""
        began, before = self.measured
        return (self.output_tokens - before) / (self.seconds - began) if self.seconds > began else 0.0


class Driver:
    """Attributes:
    reservation: how much a sequence reserves; only with a :class:`ReservingManager`.
    gate: only with a static scheduler.
    check: prove every invariant after every step (tests).
    """

    def __init__(
        self,
        scheduler: Scheduler,
        cost: CostModel,
        *,
        gate: BatchGate | None = None,
        reservation: Reservation | None = None,
        check: bool = False,
    ) -> None:
        self.scheduler = scheduler
        self.cost = cost
        self.gate = gate
        self.reservation = reservation
        self.check = check
        self._answers: dict[int, tuple[int, int]] = {}  # seq_id -> base and prompt length
        self._outcomes: dict[int, Outcome] = {}  # by seq_id, unfinished ones
        self._entries: dict[int, int] = {}  # seq_id -> entry_id

    def run(
        self,
        trace: list[Entry],
        *,
        warm_up: int = 0,
        enough: int | None = None,
        observe: Callable[[SchedulerOutput], None] | None = None,
    ) -> Run:
        """Run the trace to its end, or until ``enough`` answer tokens are made.

        Args:
            warm_up: answer tokens after which measuring begins.
            observe: called between planning a step and applying it.

        Raises: ConfigError when a request is longer than the model's context or the pool.
        """
        scheduler = self.scheduler
        later: dict[int, list[Entry]] = {}
        due: list[tuple[float, int, Entry]] = []
        limit = scheduler.config.max_total_tokens
        for e in trace:
            if e.prompt_len + e.output_len > limit:
                raise ConfigError(
                    f"request {e.entry_id} of the trace has {e.prompt_len + e.output_len} tokens, more than {limit}"
                )
            if e.after is None:
                due.append((e.arrival, e.entry_id, e))
            else:
                later.setdefault(e.after, []).append(e)
        heapq.heapify(due)
        run = Run([], MemoryMeter(scheduler))
        now, made = 0.0, 0
        while due or scheduler.has_work:
            while due and due[0][0] <= now:
                arrival, _, entry = heapq.heappop(due)
                run.outcomes.append(self._add(entry, arrival))
            if not scheduler.has_work:
                now = due[0][0]
                continue
            start = self._starts_at(now, bool(due))
            if start > now:
                now = min(start, due[0][0]) if due else start
                continue
            plan = scheduler.schedule()
            for row in plan.rows:
                outcome = self._outcomes[row.seq_id]
                if outcome.started < 0:
                    outcome.started = now
            seconds = self.cost.seconds(work_of(plan))
            if observe is not None:
                observe(plan)
            run.samples.append(run.memory.observe(plan, now, seconds))
            now += seconds
            for update in scheduler.update(plan, self._result(plan, seconds)):
                made += len(update.tokens)
                outcome = self._outcomes[update.sequence.seq_id]
                if outcome.first < 0:
                    outcome.first = outcome.finished = now
                outcome.longest_gap = max(outcome.longest_gap, now - outcome.finished)
                outcome.finished = now
                if update.finish_reason is not None:
                    for entry in later.pop(self._end(update.sequence), ()):
                        heapq.heappush(due, (max(entry.arrival, now + entry.think), entry.entry_id, entry))
            run.steps += 1
            run.seconds, run.output_tokens = now, made
            if not run.measured[0] and made <= warm_up:
                run.memory = MemoryMeter(scheduler)
            elif warm_up and not run.measured[0]:
                run.measured = (now, made)
            scheduler.manager.take_events()
            if self.check:
                scheduler.check_integrity()
            if enough is not None and made >= enough:
                break
        stats = scheduler.stats
        run.preemptions, run.swaps = stats.preemptions, stats.swaps
        run.computed_tokens = stats.computed_tokens
        run.hit_tokens, run.query_tokens = stats.hit_tokens, stats.query_tokens
        run.evictions = scheduler.manager.pool.evictions
        return run

    def _starts_at(self, now: float, more_to_come: bool) -> float:
        if self.gate is None:
            return now
        assert isinstance(self.scheduler, StaticScheduler)
        return self.gate.opens_at(self.scheduler, now, more_to_come)

    def _add(self, entry: Entry, arrival: float) -> Outcome:
        params = SamplingParams(max_tokens=entry.output_len, temperature=0.0, ignore_eos=True)
        request = Request(str(entry.entry_id), prompt_tokens(entry), params, arrival, tenant=entry.tenant)
        self.scheduler.add(request)
        seq = request.sequences[0]
        manager = self.scheduler.manager
        if isinstance(manager, ReservingManager):
            assert self.reservation is not None
            limit = self.scheduler.config.max_total_tokens
            manager.expect(seq.table, self.reservation(seq.num_prompt, entry.output_len, limit))
        self._answers[seq.seq_id] = (segment_base(entry.answer), seq.num_prompt)
        self._entries[seq.seq_id] = entry.entry_id
        outcome = Outcome(entry.tenant, arrival, seq.num_prompt, entry.output_len)
        self._outcomes[seq.seq_id] = outcome
        return outcome

    def _end(self, seq: Sequence) -> int:
        outcome = self._outcomes.pop(seq.seq_id)
        outcome.cached = seq.cached_tokens or 0
        outcome.preemptions = seq.preemptions
        del self._answers[seq.seq_id]
        if isinstance(self.scheduler.manager, ReservingManager):
            self.scheduler.manager.forget(seq.table)
        return self._entries.pop(seq.seq_id)

    def _result(self, plan: SchedulerOutput, seconds: float) -> StepResult:
        tokens: dict[int, list[SampledToken]] = {}
        for row in plan.rows:
            if row.sampling is not None:
                base, prompt = self._answers[row.seq_id]
                tokens[row.seq_id] = [SampledToken(token_at(base, row.sampling.position - prompt))]
        return StepResult(plan.step, tokens, {}, seconds)
