"""A real engine over the token-remembering executor, stepped when the test says so; and the truth about its tokens."""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from typing import Any

from chatsvc.engine.async_engine import AsyncEngine, EngineConfig
from chatsvc.engine.output import Generation
from chatsvc.runtime.simulated import SimulatedConfig, SimulatedExecutor, hashed_token
from chatsvc.scheduler.params import SamplingParams
from chatsvc.scheduler.plan import SamplingRow, ScheduledRow, SchedulerOutput, StepResult

EOS = 256
VOCAB = 310  # more rows than the tokenizer has tokens
FIRST, LAST = 97, 123  # answers are letters: no end token unless a script has one


class ByteTokenizer:
    """Ids 0..255 are bytes, 256 ends, up to 299 are bytes modulo 256; above there is nothing."""

    vocab_size = 300
    eos_token_ids = frozenset({EOS})
    strips_leading_space = False

    def token_bytes(self, token_id: int) -> bytes:
        if not 0 <= token_id < self.vocab_size:
            raise ValueError(token_id)
        return b"<|end|>" if token_id == EOS else bytes([token_id % 256])

    def is_special(self, token_id: int) -> bool:
        return token_id == EOS

    def decode(self, ids: Iterable[int]) -> str:
        return b"".join(self.token_bytes(i) for i in ids if i != EOS).decode("utf-8", "replace")


class HeldExecutor(SimulatedExecutor):
    """Steps end when the test lets them: at once, or, while ``held``, at :meth:`release`.

    ``before`` may raise instead of the step; ``after`` may change its result; what ``watch`` raises (its assertions)
    is kept for the end of the test: here it would only be one more failed step.
    """

    def __init__(self, config: SimulatedConfig, token_fn: Callable[[array[int], ScheduledRow], int]) -> None:
        super().__init__(config, token_fn)
        self.held = False
        self.pending: list[tuple[SchedulerOutput, Future[StepResult]]] = []
        self.plans: list[SchedulerOutput] = []
        self.watch: Callable[[SchedulerOutput], None] = lambda plan: None
        self.faults: list[Exception] = []
        self.before: Callable[[SchedulerOutput], None] = lambda plan: None
        self.after: Callable[[SchedulerOutput, StepResult], StepResult] = lambda plan, result: result

    def submit(self, plan: SchedulerOutput) -> Future[StepResult]:
        future: Future[StepResult] = Future()
        self.plans.append(plan)
        try:
            self.watch(plan)
        except Exception as e:
            self.faults.append(e)
        if self.held:
            self.pending.append((plan, future))
        else:
            self._finish(plan, future)
        return future

    def _finish(self, plan: SchedulerOutput, future: Future[StepResult]) -> None:
        if not future.set_running_or_notify_cancel():
            return
        try:
            self.before(plan)
            future.set_result(self.after(plan, self.run(plan)))
        except BaseException as e:
            future.set_exception(e)

    def release(self) -> None:
        pending, self.pending = self.pending, []
        for plan, future in pending:
            self._finish(plan, future)


class Rig:
    """``async with Rig(...)``: a started engine; afterwards nothing may be left in it."""

    def __init__(self, *, num_blocks: int = 64, block_size: int = 4, budget: int = 64, **engine: Any) -> None:
        self.scripts: dict[int, tuple[int, list[int]]] = {}
        self.hashed = hashed_token(FIRST, LAST)
        limit = num_blocks * block_size
        config = SimulatedConfig(num_blocks, block_size, VOCAB, limit, tokens_per_step=budget)
        self.executor = HeldExecutor(config, self._token)
        settings = {"block_size": block_size, "max_num_batched_tokens": budget, "queue_timeout": 3600, **engine}
        self.engine = AsyncEngine(EngineConfig(**settings), self.executor, ByteTokenizer())  # type: ignore[arg-type]
        self._n = 0

    def _token(self, context: array[int], row: ScheduledRow) -> int:
        assert row.sampling is not None
        script = self.scripts.get(row.sampling.params.seed)
        if script is None:
            return self.hashed(context, row)
        prompt, tokens = script
        at = row.sampling.position - prompt
        return tokens[at] if at < len(tokens) else EOS

    async def __aenter__(self) -> Rig:
        await self.engine.start()
        return self

    async def __aexit__(self, kind: object, *exc: object) -> None:
        if kind is None and self.engine._dead is None and not self.engine._stopped:
            await self.until(lambda: not self.engine.scheduler.has_work)
            self.assert_empty()
        await self.engine.stop()
        if self.executor.faults:
            raise self.executor.faults[0]

    def assert_empty(self) -> None:
        engine = self.engine
        engine.scheduler.check_integrity()
        pool = engine.scheduler.manager.pool
        assert pool.num_used == 0 and pool.num_free + pool.num_cached == pool.num_blocks
        assert not engine._running and not engine._by_seq and not engine._leaving and not engine._views
        assert self.metric("requests_running") == self.metric("requests_waiting") == 0

    def generate(self, prompt: list[int] | int, *, name: str = "", tenant: str = "", **fields: Any) -> Generation:
        """``prompt``: token ids, or their number."""
        self._n += 1
        ids = [(self._n * 31 + i) % 200 for i in range(prompt)] if isinstance(prompt, int) else prompt
        params = SamplingParams(**{"max_tokens": 8, "temperature": 0.0, **fields})
        return self.engine.generate(
            request_id=name or f"r{self._n}", prompt_token_ids=ids, params=params, tenant=tenant
        )

    def script(self, tokens: Iterable[int], *, prompt: int = 3, **fields: Any) -> Generation:
        """A request whose answer is ``tokens`` and then the end token."""
        out = list(tokens)
        seed = 1_000_000 + len(self.scripts)
        self.scripts[seed] = (prompt, out)
        return self.generate(prompt, **{"seed": seed, "max_tokens": len(out) + 1, **fields})

    def solo(self, prompt: list[int], count: int, *, choice: int = 0, **fields: Any) -> list[int]:
        """The truth: what a request alone, without any cache, would get."""
        params = SamplingParams(**{"max_tokens": count, "temperature": 0.0, **fields})
        context = array("i", prompt)
        for _ in range(count):
            sampling = SamplingRow(params, choice, len(context))
            context.append(self.hashed(context, ScheduledRow(0, (), 0, (), 0, sampling)))
        return context[len(prompt) :].tolist()

    async def until(self, condition: Callable[[], Any], turns: int = 200_000) -> None:
        """Let the loop turn until ``condition()``; a number of turns, not a time, is the limit."""
        for _ in range(turns):
            if condition():
                return
            await asyncio.sleep(0)
        raise AssertionError("it never happened")

    async def turn(self, count: int = 20) -> None:
        for _ in range(count):
            await asyncio.sleep(0)

    def metric(self, name: str, **labels: str) -> float:
        value = self.engine.metrics.registry.get_sample_value("chatsvc_" + name, labels)
        assert value is not None, name
        return value


async def text_of(generation: Generation) -> list[str]:
    """The text of each choice, as a reader from the start joins it."""
    out = [""] * len(generation.logs)
    async for news in generation.read():
        for delta in news:
            out[delta.index] += delta.text
    return out
