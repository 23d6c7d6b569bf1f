"""One loaded model, and an engine around it for each mode."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass

from chatsvc.bench.baselines import ContiguousManager, Mode
from chatsvc.bench.recorder import Clock, RecordedScheduler, RecordedStaticScheduler, Recorder
from chatsvc.cache.manager import BlockManager
from chatsvc.config import ServeConfig
from chatsvc.engine.async_engine import AsyncEngine, EngineConfig
from chatsvc.engine.build import build
from chatsvc.errors import ConfigError
from chatsvc.runtime.executor import Executor, KVCapacity
from chatsvc.runtime.local import LocalExecutor
from chatsvc.runtime.simulated import SimulatedExecutor
from chatsvc.scheduler.budget import StepBudget
from chatsvc.scheduler.plan import SchedulerOutput, StepResult
from chatsvc.scheduler.scheduler import SchedulerConfig
from chatsvc.text.template import ChatTemplate

FOREVER = 1e9


class Lent:
    """A started executor, lent to one engine after the other. The simulated one runs in the caller's thread, so that
    the order of events is always the same."""

    def __init__(self, executor: Executor, capacity: KVCapacity) -> None:
        self._executor = executor
        self._capacity = capacity

    def start(self) -> KVCapacity:
        return self._capacity

    def submit(self, plan: SchedulerOutput) -> Future[StepResult]:
        if not isinstance(self._executor, SimulatedExecutor):
            return self._executor.submit(plan)
        future: Future[StepResult] = Future()
        future.set_result(self._executor.run(plan))
        return future

    def read_blocks(self, ids: Sequence[int], *, host: bool = False) -> Future[memoryview]:
        return self._executor.read_blocks(ids, host=host)

    def write_blocks(self, ids: Sequence[int], data: bytes, *, host: bool = False) -> Future[None]:
        return self._executor.write_blocks(ids, data, host=host)

    def stop(self) -> None:
        """The rig stops it."""


@dataclass(frozen=True, slots=True)
class ModelledTime:
    """Seconds of a simulated step: a fixed part and a part for each token."""

    step: float
    token: float

    def __call__(self, tokens: int) -> float:
        return self.step + self.token * tokens


class Rig:
    """Close it when done. The step budget is measured once and is the same, and fixed, in every mode.

    Raises: ConfigError, ModelError when the model cannot be served like this.
    """

    def __init__(self, config: ServeConfig) -> None:
        self.config = config
        self.simulated = config.executor == "simulated"
        self.cost = ModelledTime(config.simulated_step_ms / 1000, config.simulated_token_ms / 1000)
        budget = config.max_num_batched_tokens
        if self.simulated:
            budget = budget or max(16, int((config.max_step_ms / 1000 - self.cost.step) / max(self.cost.token, 1e-5)))
            config = config.model_copy(update={"simulated_step_ms": 0.0, "simulated_token_ms": 0.0})
        built = build(config)
        if built.template is None:
            raise ConfigError(f"{built.files.name} has no chat template; give one with --chat-template")
        self.files, self.tokenizer = built.files, built.tokenizer
        self.template: ChatTemplate = built.template
        self.executor = built.engine.executor
        self.capacity = self.executor.start()
        self.budget = budget or self.capacity.tokens_per_step

    def close(self) -> None:
        self.executor.stop()

    @property
    def local(self) -> LocalExecutor | None:
        return self.executor if isinstance(self.executor, LocalExecutor) else None

    @property
    def limit(self) -> int:
        """Prompt and answer of one sequence, tokens."""
        return min(self.capacity.max_model_len, self.capacity.num_blocks * self.config.block_size)

    def recorder(self, *, by_length: bool = False, check: bool = False) -> Recorder:
        return Recorder(Clock(self.cost if self.simulated else None), by_length=by_length, check=check)

    def engine(self, mode: Mode, recorder: Recorder) -> AsyncEngine:
        """A new engine with an empty pool, not started; whoever starts it stops it."""
        make_manager = (
            functools.partial(ContiguousManager, max_model_len=self.limit) if mode.contiguous else BlockManager
        )

        def make_scheduler(config: SchedulerConfig, manager: BlockManager, budget: StepBudget) -> RecordedScheduler:
            kind = RecordedStaticScheduler if mode.static else RecordedScheduler
            scheduler = kind(config, manager, budget)
            scheduler.recorder = recorder
            return scheduler

        config = EngineConfig(
            block_size=self.config.block_size,
            prefix_caching=mode.prefix_caching,
            cache_secret=b"bench",
            max_num_seqs=self.config.max_num_seqs,
            max_num_batched_tokens=self.budget,
            # A static batch was formed so that it fits: no room needs to be kept.
            watermark_tokens=0 if mode.static else None,
            max_queue=1_000_000,
            queue_timeout=FOREVER,
            stuck_after=FOREVER,
            steps_in_flight=1,  # slots are counted and time is modelled between two steps
        )
        return AsyncEngine(
            config,
            Lent(self.executor, self.capacity),
            self.tokenizer,
            make_manager=make_manager,
            make_scheduler=make_scheduler,
        )
