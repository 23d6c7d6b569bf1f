"""The engine: one asyncio task that plans, publishes what the step before made, and waits for the step.

The event loop owns everything that changes: requests, sequences, blocks. No locks. Only the forward pass leaves it, as
plain rows, and while a step is in flight nothing that the step names is freed (``Scheduler.retire``). Tokens become
text while the next step runs. One request's fault stays its own: whatever happens while its tokens are computed or
published, the others go on; only a fault of the scheduler itself ends the engine.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable
from functools import partial
from itertools import takewhile
from typing import Any

from chatsvc.cache.manager import BlockManager
from chatsvc.engine.checks import Admission, checked_result, token_limit
from chatsvc.engine.config import EngineConfig
from chatsvc.engine.flight import Flight
from chatsvc.engine.kvview import KVViews, snapshot
from chatsvc.engine.metrics import Metrics
from chatsvc.engine.output import FinishReason, Generation
from chatsvc.engine.persistence import Persistence
from chatsvc.engine.publisher import Choice, Running
from chatsvc.engine.setup import make_manager, scheduler_config, step_budget
from chatsvc.errors import EngineDead, Overloaded
from chatsvc.runtime.executor import Executor
from chatsvc.scheduler.budget import StepBudget
from chatsvc.scheduler.params import SamplingParams
from chatsvc.scheduler.request import Request, SequenceUpdate
from chatsvc.scheduler.scheduler import Scheduler, SchedulerConfig
from chatsvc.tasks import end
from chatsvc.text.tokenizer import Tokenizer

__all__ = ["AsyncEngine", "EngineConfig"]

log = logging.getLogger(__name__)

TICK = 0.1
IDLE_CHECK_BLOCKS = 5_000  # a pool up to this size (1.5 ms) is proven whole whenever the engine falls idle


class AsyncEngine(Admission):
    """``make_manager`` and ``make_scheduler`` are there for the bench, whose baselines are other ones of each."""

    def __init__(
        self,
        config: EngineConfig,
        executor: Executor,
        tokenizer: Tokenizer,
        *,
        make_manager: Callable[..., BlockManager] = BlockManager,
        make_scheduler: Callable[[SchedulerConfig, BlockManager, StepBudget], Scheduler] = Scheduler,
    ) -> None:
        super().__init__()
        self.config = config
        self.executor = executor
        self.tokenizer = tokenizer
        self._make_manager = make_manager
        self._make_scheduler = make_scheduler
        self.metrics = Metrics(lambda: self._scheduler)
        self._scheduler: Scheduler | None = None
        self._running: dict[str, Running] = {}
        self._by_seq: dict[int, tuple[Running, Choice]] = {}
        self._flight = Flight(executor)
        self._news: list[SequenceUpdate] = []  # of the step before, still to be published
        self._leaving: dict[str, Running] = {}  # ended, but a step in flight names their blocks
        self._wake = asyncio.Event()
        self._idle = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []
        self._stopped = False
        self._views = KVViews()
        self._persistence: Persistence | None = None

    # -- life --------------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Load the model off the loop, then begin to step.

        Raises:
            ConfigError, ModelError: cannot start.
            EngineDead: ``stop`` was called meanwhile.
        """
        capacity = await asyncio.to_thread(self.executor.start)
        c = self.config
        manager = make_manager(c, capacity, self._make_manager)
        if c.disk_cache is not None:
            self._persistence = Persistence(c.disk_cache, self.executor, manager, capacity)
            await self._persistence.restore()
        if self._stopped:
            raise EngineDead("the engine was stopped while it loaded")
        limit = token_limit(capacity, c.block_size)
        settings = scheduler_config(c, capacity, limit=limit, eos_token_ids=self.tokenizer.eos_token_ids)
        self._scheduler = self._make_scheduler(settings, manager, step_budget(c, capacity))
        self._capacity = capacity
        self._tasks = [asyncio.create_task(self._loop()), asyncio.create_task(self._tick())]
        if self._persistence is not None:
            self._tasks.append(asyncio.create_task(self._persistence.run()))

    async def stop(self) -> None:
        """End everything that still runs (with an error, so that no cut answer looks whole) and stop. Idempotent.

        A step that is in flight is waited for, but no longer than ``stuck_after``.
        """
        self._draining = self._stopped = True
        sound = self.healthy
        for running in list(self._running.values()):
            self._abort(running, "error", "the server was shut down before the answer was complete", 503)
        await end(*self._tasks)
        self._tasks = []
        if self._persistence is not None:
            await self._persistence.stop(save=sound)
        try:
            await asyncio.wait_for(asyncio.to_thread(self.executor.stop), self.config.stuck_after)
        except TimeoutError:
            log.error("the executor did not stop within %g s", self.config.stuck_after)
        for running in list(self._leaving.values()):  # no step will end any more
            for seq in running.request.sequences:
                self.scheduler.finish(seq, "abort")
            self._forget_if_done(running)
        self._views.close()

    async def drained(self, timeout: float) -> bool:  # noqa: ASYNC109  the answer is a bool, not an exception
        """Until nothing runs, or ``timeout`` seconds. Returns whether nothing runs."""
        try:
            async with asyncio.timeout(timeout):
                while self._running:
                    self._idle.clear()
                    await self._idle.wait()
        except TimeoutError:
            return False
        return True

    # -- what callers see --------------------------------------------------------------------------------------

    @property
    def block_size(self) -> int:
        return self.config.block_size

    @property
    def scheduler(self) -> Scheduler:
        if self._scheduler is None:
            raise Overloaded("the model is still loading", status=503, retry_after=2)
        return self._scheduler

    @property
    def healthy(self) -> bool:
        """False when the engine died, or has had a step in flight for longer than ``stuck_after``."""
        began = self._flight.since
        return self._dead is None and (began is None or time.perf_counter() - began < self.config.stuck_after)

    @property
    def num_requests(self) -> int:
        return len(self._running)

    @property
    def num_queued(self) -> int:
        return len(self.scheduler.waiting)  # the first sequence of each request that has not been scheduled

    @property
    def _bounds(self) -> EngineConfig:
        return self.config

    def _knows(self, request_id: str) -> bool:
        return request_id in self._running

    def generate(
        self,
        *,
        request_id: str,
        prompt_token_ids: list[int],
        params: SamplingParams,
        tenant: str = "",
        cache_salt: str = "",
        priority: int = 0,
    ) -> Generation:
        """Queue a request and return its readers' side. Everything that can be refused is refused here, at once.

        Raises: InvalidRequest, ContextLengthExceeded, Conflict (the id is in use), Overloaded, EngineDead.
        """
        self._check(request_id, prompt_token_ids, params)
        now = time.perf_counter()
        request = Request(request_id, prompt_token_ids, params, now, tenant, cache_salt, priority)
        self.scheduler.add(request)
        generation = Generation(request_id, prompt_token_ids, params.n, partial(self._cancel, request), now)
        try:
            running = Running(request, generation, self.tokenizer, self.metrics)
        except Exception:
            for seq in request.sequences:
                self.scheduler.retire(seq, "error")
            raise
        self._running[request_id] = running
        for choice in running.choices:
            self._by_seq[choice.sequence.seq_id] = (running, choice)
        if self.scheduler.may_take_back and self._flight.withdraw():  # or it would wait for one step more
            self.scheduler.take_back()
        self._wake.set()
        return generation

    def cancel(self, request_id: str) -> bool:
        """Stop a request; False when nothing of that name runs."""
        running = self._running.get(request_id)
        if running is None:
            return False
        self._abort(running)
        return True

    def _cancel(self, request: Request, error: str | None, status: int) -> None:
        running = self._running.get(request.request_id)
        if running is not None and running.request is request:  # the id may have gone to another one since
            self._abort(running, "abort" if error is None else "error", error, status)

    # -- the loop ----------------------------------------------------------------------------------------------

    async def _loop(self) -> None:
        try:
            while True:
                if not self.scheduler.has_work and not self._news and not self._leaving:
                    self._fell_idle()
                    self._wake.clear()
                    await self._wake.wait()
                    continue
                await self._step()
        except asyncio.CancelledError:
            raise
        except BaseException as e:
            log.exception("the engine died")
            self._die(f"the engine died: {type(e).__name__}: {e}")
            if not isinstance(e, Exception):
                raise

    async def _step(self) -> None:
        """Keep the executor busy, turn the last step's tokens into text, then wait for the oldest step."""
        if self._flight:  # the executor has something to do: readers first
            self._publish_news()
            self._submit()
        else:
            self._submit()
            self._publish_news()
        if not self._flight:
            return
        plan = self._flight.oldest
        try:
            result = checked_result(plan, await self._flight.result(), self.capacity.vocab_size)
        except Exception as e:  # the step, not the engine: whose fault it was is found out by trying one by one
            log.exception("step %d with %d rows failed", plan.step, len(plan.rows))
            self._news = self.scheduler.step_failed(plan, f"{type(e).__name__}: {e}")
            await self._flight.crashed()
        else:
            self._flight.landed()
            self.metrics.step.observe(result.seconds)
            self.metrics.batch_tokens.observe(plan.num_tokens)
            self._news = self.scheduler.update(plan, result)

    def _submit(self) -> None:
        while not self._flight or (len(self._flight) < self.config.steps_in_flight and self.scheduler.may_run_ahead):
            plan = self.scheduler.schedule()
            if not plan.rows:
                return
            now = time.perf_counter()
            for row in plan.rows:
                self._running[self.scheduler.queues.all[row.seq_id].request.request_id].scheduled(now)
            self._flight.submit(plan, now)

    def _publish_news(self) -> None:
        updates, self._news = self._news, []
        now = time.perf_counter()
        touched = [self._by_seq[update.sequence.seq_id] for update in updates]
        for update, (running, choice) in zip(updates, touched, strict=True):
            try:
                self._publish(update, running, choice, now)
            except Exception as e:
                log.exception("publishing a token failed")
                self.scheduler.retire(update.sequence, "error")
                running.end(choice, "error", error=f"the text could not be made: {type(e).__name__}: {e}")
            running.generation.notify()
        for running, _ in touched:  # only now: a request may have several updates in one step
            self._forget_if_done(running)
        for running in list(self._leaving.values()):
            self._forget_if_done(running)
        self._views.changed()

    def _publish(self, update: SequenceUpdate, running: Running, choice: Choice, now: float) -> None:
        """The one place where tokens become text."""
        if choice.log.finish_reason is not None:
            return
        stop = running.append(choice, update.tokens, update.finish_reason, now)
        if stop is not None:
            self.scheduler.retire(update.sequence, "stop")
            running.end(choice, "stop", stop=stop)
        elif update.finish_reason == "error":
            running.end(choice, "error", error=update.error)
        elif update.finish_reason is not None:
            reason: FinishReason = "stop" if update.finish_reason == "stop" else "length"
            running.end(choice, reason, stop=update.stop_reason)

    def _forget_if_done(self, running: Running) -> None:
        request = running.request
        if not running.generation.finished:
            return
        if not request.finished:
            self._leaving[request.request_id] = running
        elif self._running.pop(request.request_id, None) is not None:
            self._leaving.pop(request.request_id, None)
            for seq in request.sequences:
                del self._by_seq[seq.seq_id]
            if not self._running:
                self._idle.set()

    # -- ends that do not come from a token --------------------------------------------------------------------

    def _abort(
        self, running: Running, reason: FinishReason = "abort", error: str | None = None, status: int = 500
    ) -> None:
        """Readers see the end at once; blocks named by a step in flight are freed when it is done."""
        for choice in running.choices:
            running.end(choice, reason, error=error, status=status)
        running.generation.notify()
        for seq in running.request.sequences:
            self.scheduler.retire(seq, "abort")
        self._forget_if_done(running)
        self._views.changed()
        self._wake.set()

    def _expire(self) -> None:
        """Fail who has waited too long in the queue, or for a step that does not end."""
        now = time.perf_counter()
        began, limit = self._flight.since, self.config.give_up_after
        if began is not None and now - began > limit:
            for running in list(self._running.values()):
                self._abort(running, "error", f"the engine has been stuck in a step for {limit:g} s", 503)
        since = now - self.config.queue_timeout
        oldest_first = (s.request for s in self.scheduler.waiting.values())
        for request in list(takewhile(lambda r: r.arrival <= since, oldest_first)):
            waited = f"the request waited {self.config.queue_timeout:g} s in the queue without being started"
            self._abort(self._running[request.request_id], "error", waited, 503)

    def _die(self, why: str) -> None:
        self._dead = why
        for running in list(self._running.values()):
            for choice in running.choices:
                running.end(choice, "error", error=why, status=503)
            running.generation.notify()
        self._running.clear()
        self._by_seq.clear()
        self._leaving.clear()
        self._news.clear()
        self._idle.set()
        self._views.close()

    def _fell_idle(self) -> None:
        """With nothing to do there is time to prove that nothing leaked; what is found is said and survived."""
        if self.scheduler.manager.pool.num_blocks > IDLE_CHECK_BLOCKS:
            return
        try:
            self.scheduler.check_integrity()
            assert self.scheduler.manager.pool.num_used == 0, "blocks in use while nothing runs"
        except Exception:
            log.exception("the KV pool is not whole although the engine is idle; please report this")

    async def _tick(self) -> None:
        """What must happen while a step does not end: the queue's time limit, and how late the loop is."""
        while True:
            due = time.perf_counter() + TICK
            await asyncio.sleep(TICK)
            self.metrics.loop_lag.observe(max(0.0, time.perf_counter() - due))
            if self._dead is None:
                self._expire()

    # -- looking in --------------------------------------------------------------------------------------------

    def kv_snapshot(self) -> dict[str, Any]:
        """The body of ``GET /debug/kv``."""
        return snapshot(self.scheduler)

    def kv_events(self) -> AsyncIterator[dict[str, Any]]:
        """First the whole state, then what changed, at most ten times a second."""
        return self._views.events(self.scheduler)
