"""Two steps in flight: a step is planned while the one before it runs, and nobody can tell from the answers."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import pytest
from engine_harness import EOS, Rig

from chatsvc.scheduler.beam import BeamParams
from chatsvc.scheduler.plan import UNKNOWN, SchedulerOutput, StepResult

PROMPTS = [list(range(i, i + 5 + i % 7)) for i in range(0, 96, 8)]


@pytest.mark.parametrize("seed", range(8))
async def test_a_crowd_in_a_small_pool_gets_what_each_would_get_alone(seed: int) -> None:
    rng = random.Random(seed)
    async with Rig(num_blocks=rng.choice([14, 30, 80]), budget=rng.choice([5, 24, 64]), steps_in_flight=2) as rig:
        kept, gone = [], []
        for prompt in PROMPTS:
            n = rng.choice([1, 1, 3])
            how = {"temperature": rng.choice([0.0, 1.0]), "presence_penalty": rng.choice([0.0, 0.5])}
            generation = rig.generate(prompt, n=n, max_tokens=rng.randint(1, 12), **how)
            (gone if rng.random() < 0.25 else kept).append((prompt, n, how, generation))
            await rig.turn(rng.randint(0, 30))
            rig.executor.held = rng.random() < 0.5
            if rng.random() < 0.7:
                rig.executor.release()
        rig.executor.held = False
        rig.executor.release()
        for _, _, _, generation in gone:
            await rig.turn(rng.randint(0, 9))
            generation.cancel()
        for prompt, n, how, generation in kept:
            await generation.wait()
            for choice in range(n):
                log = generation.logs[choice]
                assert log.finish_reason == "length"
                assert log.token_ids == rig.solo(prompt, len(log.tokens), choice=choice, **how)
                assert len(log.tokens) == len(generation.logs[0].tokens)
        assert any(r.token_ids[-1] == UNKNOWN for plan in rig.executor.plans for r in plan.rows)


async def test_a_step_is_planned_while_the_one_before_it_runs_but_never_two() -> None:
    async with Rig(steps_in_flight=2) as rig:
        rig.executor.held = True
        generation = rig.generate(PROMPTS[0], max_tokens=9)
        await rig.until(lambda: len(rig.executor.pending) == 2)
        await rig.turn(50)
        assert len(rig.executor.pending) == 2
        assert rig.executor.pending[1][0].rows[0].token_ids == (UNKNOWN,)
        assert not generation.logs[0].tokens
        rig.executor.held = False
        rig.executor.release()
        await generation.wait()
        assert generation.logs[0].token_ids == rig.solo(PROMPTS[0], 9)


async def test_a_planned_step_is_taken_back_for_somebody_who_comes() -> None:
    async with Rig(steps_in_flight=2) as rig:
        rig.executor.held = True
        first = rig.generate(PROMPTS[0], max_tokens=9)
        await rig.until(lambda: len(rig.executor.pending) == 2)
        second = rig.generate(PROMPTS[1], max_tokens=9)
        assert rig.executor.pending[1][1].cancelled()
        rig.engine.scheduler.check_integrity()
        seq = rig.engine.scheduler.running[0]
        assert (seq.num_scheduled, seq.last_step) == (len(PROMPTS[0]), 1), "as after the first step"
        third = rig.generate(PROMPTS[2], max_tokens=9)
        rig.executor.held = False
        rig.executor.release()
        await asyncio.gather(first.wait(), second.wait(), third.wait())
        assert [len(plan.rows) for plan in rig.executor.plans[:3]] == [1, 1, 3], (
            "all three are in the step after the first"
        )
        for prompt, generation in zip(PROMPTS, (first, second, third), strict=False):
            assert generation.logs[0].token_ids == rig.solo(prompt, 9)
        assert rig.metric("computed_tokens_total") == sum(len(p) + 8 for p in PROMPTS[:3])


async def test_a_step_that_has_begun_is_not_taken_back() -> None:
    async with Rig(steps_in_flight=2) as rig:
        rig.executor.held = True
        first = rig.generate(PROMPTS[0], max_tokens=9)
        await rig.until(lambda: len(rig.executor.pending) == 2)
        plan, begun = rig.executor.pending[1]
        begun.set_running_or_notify_cancel()
        second = rig.generate(PROMPTS[1], max_tokens=9)
        rig.executor.held = False
        del rig.executor.pending[1]
        rig.executor.release()
        begun.set_result(rig.executor.run(plan))
        await asyncio.gather(first.wait(), second.wait())
        for prompt, generation in zip(PROMPTS, (first, second), strict=False):
            assert generation.logs[0].token_ids == rig.solo(prompt, 9)


@pytest.mark.parametrize("how", [{"frequency_penalty": 0.5}, {"beam": BeamParams(2)}])
async def test_who_must_wait_for_the_result_misses_no_step(how: dict[str, Any]) -> None:
    """Beside somebody who could run ahead."""
    async with Rig(steps_in_flight=2) as rig:
        other, slow = rig.generate(PROMPTS[0], max_tokens=40), rig.generate(PROMPTS[1], max_tokens=8, **how)
        await slow.wait()
        assert len([plan for plan in rig.executor.plans if len(plan.rows) > 1]) == 8
        assert len(other.logs[0].tokens) <= 9
        await other.wait()


async def test_readers_come_before_the_next_plan_while_a_step_runs() -> None:
    async with Rig(steps_in_flight=2) as rig:
        readable: list[int] = []
        generation = rig.generate(PROMPTS[0], max_tokens=6)
        rig.executor.watch = lambda plan: readable.append(len(generation.logs[0].tokens))
        await generation.wait()
        assert readable == [0, 0, 1, 2, 3, 4], "at the submission of each step"


@pytest.mark.parametrize("ends", ["eos", "stop", "length"])
async def test_an_end_found_while_the_next_step_runs_is_the_end(ends: str) -> None:
    """The step that was planned too much makes a token that nobody sees, and its block is not given away before."""
    async with Rig(num_blocks=8, steps_in_flight=2) as rig:
        script = [*b"abcdefg", EOS] if ends == "eos" else list(b"abcdefghijkl")
        fields = {"eos": {}, "stop": {"stop": ("fg",)}, "length": {"max_tokens": 7}}[ends]
        first = rig.script(script, max_tokens=fields.pop("max_tokens", 12), **fields)
        others = [rig.generate(p, max_tokens=6) for p in PROMPTS[:4]]
        await first.wait()
        assert first.logs[0].text == ("abcde" if ends == "stop" else "abcdefg")
        assert first.logs[0].finish_reason == ("length" if ends == "length" else "stop")
        for prompt, other in zip(PROMPTS, others, strict=False):
            await other.wait()
            assert other.logs[0].token_ids == rig.solo(prompt, 6)


@pytest.mark.parametrize("step", range(1, 7))
async def test_a_failing_step_takes_the_planned_one_with_it(step: int) -> None:
    async with Rig(num_blocks=40, budget=32, steps_in_flight=2) as rig:
        failed: list[int] = []

        def before(plan: SchedulerOutput) -> None:
            if plan.step == step and not failed:
                failed.append(step)
                raise RuntimeError("boom")

        rig.executor.before = before
        generations = [rig.generate(p, max_tokens=9) for p in PROMPTS[:5]]
        await asyncio.gather(*(g.wait() for g in generations))
        assert failed
        for prompt, generation in zip(PROMPTS, generations, strict=False):
            assert generation.logs[0].token_ids == rig.solo(prompt, 9), generation.logs[0].error


@pytest.mark.parametrize("step", range(2, 7))
async def test_a_failing_row_takes_its_planned_row_with_it(step: int) -> None:
    async with Rig(steps_in_flight=2) as rig:
        guilty: list[int] = []

        def after(plan: SchedulerOutput, result: StepResult) -> StepResult:
            if plan.step != step:
                return result
            guilty.append(plan.rows[0].seq_id)
            tokens = {k: v for k, v in result.tokens.items() if k != guilty[0]}
            return StepResult(plan.step, tokens, {guilty[0]: "NaN"}, result.seconds)

        rig.executor.after = after
        generations = [rig.generate(p, max_tokens=9) for p in PROMPTS[:3]]
        await asyncio.gather(*(g.wait() for g in generations))
        for i, (prompt, generation) in enumerate(zip(PROMPTS, generations, strict=False)):
            log = generation.logs[0]
            assert (log.finish_reason == "error") == (i in guilty)
            assert log.token_ids == rig.solo(prompt, len(log.tokens))


async def test_what_is_cached_afterwards_does_not_depend_on_it() -> None:
    """A block whose last token was unknown when its step was submitted is findable all the same."""
    hits: dict[int, list[int]] = {}
    for depth in (1, 2):
        async with Rig(num_blocks=200, steps_in_flight=depth) as rig:
            for i, prompt in enumerate(PROMPTS):
                first = rig.generate(prompt, max_tokens=3 + i)
                await first.wait()
                again = rig.generate([*prompt, *first.logs[0].token_ids, 1, 2], max_tokens=2)
                await again.wait()
                hits.setdefault(depth, []).append(again.num_cached_tokens)
    assert hits[1] == hits[2] and sum(hits[1]) > 50
