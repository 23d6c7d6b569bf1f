"""One workload through one mode."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Any

from chatsvc.bench.baselines import Mode
from chatsvc.bench.recorder import Recorder
from chatsvc.bench.rig import Rig
from chatsvc.bench.trace import Session, Workload
from chatsvc.engine.async_engine import AsyncEngine
from chatsvc.errors import EngineError
from chatsvc.scheduler.params import SamplingParams
from chatsvc.scheduler.scheduler import SchedulerStats


@dataclass(frozen=True, slots=True)
class Answer:
    """Prompt and answer of one turn, token ids."""

    prompt: tuple[int, ...]
    tokens: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Run:
    """What came out. ``answers`` by (session, turn)."""

    workload: Workload
    mode: Mode
    answers: dict[tuple[int, int], Answer]
    recorder: Recorder
    stats: SchedulerStats
    evictions: int


def messages_of(session: Session, turn: int, replies: list[list[int]]) -> tuple[list[dict[str, Any]], dict[int, Any]]:
    """(messages up to the turn's question, message index -> token ids of the answers so far)."""
    messages: list[dict[str, Any]] = []
    ids: dict[int, Any] = {}
    if session.system is not None:
        messages.append({"role": "system", "content": session.system})
    for t in range(turn + 1):
        messages.append({"role": "user", "content": session.turns[t].text})
        if t < turn:
            ids[len(messages)] = replies[t]
            messages.append({"role": "assistant", "content": "."})
    return messages, ids


class _Users:
    """Users who take one session after the other, and wait for each answer."""

    def __init__(self, rig: Rig, engine: AsyncEngine, workload: Workload) -> None:
        self._rig = rig
        self._engine = engine
        self._workload = workload
        self._queue = list(enumerate(workload.sessions))[::-1]
        # Encoding is not what is measured: what can be encoded before the clock starts is.
        self._first = [self._encode(s, 0, []) for s in workload.sessions]
        self.answers: dict[tuple[int, int], Answer] = {}

    def _encode(self, session: Session, turn: int, replies: list[list[int]]) -> list[int]:
        messages, ids = messages_of(session, turn, replies)
        return self._rig.template.encode(messages, self._rig.tokenizer, assistant_ids=ids)

    async def run(self) -> None:
        async with asyncio.TaskGroup() as group:
            for _ in range(self._workload.users):
                group.create_task(self._user())

    async def _user(self) -> None:
        while self._queue:
            index, session = self._queue.pop()
            replies: list[list[int]] = []
            for turn, asked in enumerate(session.turns):
                prompt = self._encode(session, turn, replies) if turn else self._first[index]
                params = SamplingParams(max_tokens=asked.answer, temperature=0.0, ignore_eos=True)
                name = f"{self._workload.name}-{index}-{turn}"
                generation = self._engine.generate(request_id=name, prompt_token_ids=prompt, params=params)
                await generation.wait()
                log = generation.logs[0]
                if log.finish_reason != "length":
                    raise EngineError(f"{name} ended with {log.finish_reason}: {log.error}")
                replies.append(log.token_ids)
                self.answers[index, turn] = Answer(tuple(prompt), tuple(log.token_ids))


async def drive(rig: Rig, workload: Workload, mode: Mode, *, by_length: bool = False, check: bool = False) -> Run:
    """Run the whole workload on a new engine; prove afterwards that nothing leaked.

    Raises: ContextLengthExceeded when a chat grows over the limit; EngineError.
    """
    recorder = rig.recorder(by_length=by_length, check=check)
    engine = rig.engine(mode, recorder)
    await engine.start()
    try:
        users = _Users(rig, engine, workload)
        try:
            await users.run()
        except* Exception as group:
            raise group.exceptions[0] from None
        scheduler = engine.scheduler
        scheduler.check_integrity()
        assert scheduler.manager.pool.num_used == 0, "blocks in use after the last answer"
        return Run(workload, mode, users.answers, recorder, scheduler.stats, scheduler.manager.pool.evictions)
    finally:
        await engine.stop()
