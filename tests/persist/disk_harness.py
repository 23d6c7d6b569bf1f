"""Engines with a disk cache over the token-remembering executor: the KV bytes of a block are its tokens, so both a file
and an answer say by themselves whether they are right."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from chatsvc import __version__
from chatsvc.cache.diskfile import DiskReader, Identity, Record
from chatsvc.engine.async_engine import AsyncEngine, EngineConfig
from chatsvc.engine.output import Generation
from chatsvc.engine.persistence import DiskCache, Persistence
from chatsvc.runtime.simulated import SimulatedConfig, SimulatedExecutor, hashed_token
from chatsvc.scheduler.params import SamplingParams
from chatsvc.scheduler.plan import SamplingRow, ScheduledRow, SchedulerOutput, StepResult

BLOCK, VOCAB = 4, 250
IDENTITY = Identity("model", __version__, "simulated", BLOCK, BLOCK * 4)
TOKEN = hashed_token(0, VOCAB)


class Letters:
    vocab_size = VOCAB
    eos_token_ids: frozenset[int] = frozenset()
    strips_leading_space = False

    def token_bytes(self, token_id: int) -> bytes:
        return b"x"

    def is_special(self, token_id: int) -> bool:
        return False

    def decode(self, ids: Iterable[int]) -> str:
        return "x" * len(list(ids))


class Faulty(SimulatedExecutor):
    """``fault`` may raise instead of a step or change its result."""

    fault: Callable[[SchedulerOutput, StepResult], StepResult] = staticmethod(lambda plan, result: result)

    def run(self, plan: SchedulerOutput) -> StepResult:
        return self.fault(plan, super().run(plan))


@dataclass(frozen=True)
class Answer:
    tokens: list[int]
    cached: int
    reason: str | None


class Home:
    """``async with Home(folder)``: an engine that has restored what it believes of ``folder``, saves at the end."""

    def __init__(
        self,
        folder: Path,
        *,
        num_blocks: int = 64,
        host_blocks: int = 0,
        max_bytes: int = 2**20,
        secret: bytes = b"",
        model: str = "model",
        interval: float = 3600,
        save: bool = True,
        **sim: Any,
    ) -> None:
        simulated = SimulatedConfig(num_blocks, BLOCK, VOCAB, num_blocks * BLOCK, num_host_blocks=host_blocks, **sim)
        self.executor = Faulty(simulated)
        self.disk = DiskCache(folder, max_bytes, lambda: model, interval=interval)
        self.disk.prepare()
        config = EngineConfig(
            BLOCK, cache_secret=secret, max_num_batched_tokens=32, disk_cache=self.disk, queue_timeout=3600
        )
        self.engine = AsyncEngine(config, self.executor, Letters())  # type: ignore[arg-type]
        self._save = save
        self._n = 0

    @property
    def persistence(self) -> Persistence:
        assert self.engine._persistence is not None
        return self.engine._persistence

    @property
    def restored(self) -> int:
        return len(self.persistence._saved)

    async def __aenter__(self) -> Home:
        await self.engine.start()
        self.engine.scheduler.check_integrity()
        return self

    async def __aexit__(self, kind: object, *exc: object) -> None:
        if kind is None:
            assert await self.engine.drained(60)
            self.engine.scheduler.check_integrity()
        if not self._save:
            self.persistence._stopped = True  # as if it were killed
        await self.engine.stop()

    def begin(
        self, prompt: list[int], count: int = 6, *, tenant: str = "", salt: str = "", **fields: Any
    ) -> Generation:
        self._n += 1
        params = SamplingParams(**{"max_tokens": count, "temperature": 0.0, **fields})
        return self.engine.generate(
            request_id=f"r{self._n}", prompt_token_ids=prompt, params=params, tenant=tenant, cache_salt=salt
        )

    async def ask(self, prompt: list[int], count: int = 6, **fields: Any) -> Answer:
        return await answer_of(self.begin(prompt, count, **fields))


async def answer_of(generation: Generation) -> Answer:
    async for _ in generation.read():
        pass
    log = generation.logs[0]
    return Answer(log.token_ids, generation.num_cached_tokens, log.finish_reason)


def truth(prompt: list[int], count: int = 6) -> list[int]:
    """What a model without any cache answers."""
    context = array("i", prompt)
    for _ in range(count):
        sampling = SamplingRow(SamplingParams(max_tokens=count, temperature=0.0), 0, len(context))
        context.append(TOKEN(context, ScheduledRow(0, (), 0, (), 0, sampling)))
    return context[len(prompt) :].tolist()


def prompt(seed: int, length: int) -> list[int]:
    return [(seed * 37 + i * i + 3) % VOCAB for i in range(length)]


def records(folder: Path, identity: Identity = IDENTITY) -> list[Record]:
    """Everything in the file; that it is whole, and each KV the one of its tokens, is asserted."""
    reader = DiskReader(folder, identity)
    try:
        out = reader.read(2**40, 2**40)
        assert not reader.damaged and not reader.stopped, (reader.damaged, reader.stopped)
    finally:
        reader.close()
    for i, r in enumerate(out):
        assert r.index == i and r.parent < i
        assert bytes(r.kv) == r.tokens
    return out


def other(**fields: Any) -> Identity:
    return replace(IDENTITY, **fields)
