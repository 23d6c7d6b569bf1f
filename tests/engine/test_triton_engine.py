"""``--attention-backend triton`` is real: the whole engine on Triton's interpreter says what it says with torch."""

from __future__ import annotations

import random
from concurrent.futures import Future

import pytest
from tiny_llama import Tiny, TinyEngine

from chatsvc.scheduler.plan import SchedulerOutput, StepResult

pytest.importorskip("triton")


def spied(it: TinyEngine) -> list[SchedulerOutput]:
    """The plans that ``it`` submits from now on."""
    plans: list[SchedulerOutput] = []
    submit = it.executor.submit

    def spy(plan: SchedulerOutput) -> Future[StepResult]:
        plans.append(plan)
        return submit(plan)

    it.executor.submit = spy  # type: ignore[method-assign]
    return plans


async def test_the_engine_on_triton_equals_the_engine_on_torch(tiny: Tiny) -> None:
    answers = {}
    for backend in ("torch", "triton"):
        async with TinyEngine(tiny, backend=backend, num_blocks=5, block_size=8, budget=12) as it:
            plans = spied(it)
            generations = await it.crowd(random.Random(2), count=5, longest=20, answers=12)
            for generation in generations:
                tiny.check(generation)
            stats = it.engine.scheduler.stats
            assert stats.preemptions > 0 and stats.hit_tokens > 0
            lengths = [{len(row.token_ids) for row in plan.rows} for plan in plans]
            assert any(1 in some and max(some) > 1 for some in lengths), "prefill beside decode in one step"
            answers[backend] = [log.token_ids for g in generations for log in g.logs]
    assert answers["triton"] == answers["torch"]
