"""One request's fault stays its own; a fault of the engine is said to everybody: SH-01, SH-02."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import replace
from typing import Any

import pytest
from engine_harness import EOS, Rig, text_of

from chatsvc.engine.output import Generation
from chatsvc.errors import EngineDead, Overloaded
from chatsvc.scheduler.plan import SampledToken, SchedulerOutput, StepResult

PROMPTS = [list(range(i, i + 7)) for i in range(0, 60, 10)]
GUILTY = 2


async def others_are_right(rig: Rig, generations: list[Generation], error: str) -> None:
    """All but the guilty one end as if it had never been there."""
    await asyncio.gather(*(g.wait() for g in generations))
    for i, (prompt, generation) in enumerate(zip(PROMPTS, generations, strict=True)):
        log = generation.logs[0]
        if i == GUILTY:
            assert log.finish_reason == "error" and error in (log.error or ""), log
        else:
            assert log.finish_reason == "length" and log.token_ids == rig.solo(prompt, 12)
    assert rig.metric("requests_finished_total", reason="error") == 1
    again = rig.generate(PROMPTS[0], max_tokens=12)
    await again.wait()
    assert again.logs[0].token_ids == rig.solo(PROMPTS[0], 12)


def has(plan: SchedulerOutput, seq_id: int) -> bool:
    return any(r.seq_id == seq_id for r in plan.rows)


@pytest.mark.parametrize("from_step", [1, 4])
@pytest.mark.parametrize("budget", [64, 5])
async def test_SH_01_a_step_that_raises_fails_the_guilty_row_alone(from_step: int, budget: int) -> None:
    async with Rig(budget=budget) as rig:

        def before(plan: SchedulerOutput) -> None:
            if plan.step >= from_step and has(plan, GUILTY):
                raise RuntimeError("device assert")

        rig.executor.before = before
        generations = [rig.generate(p, max_tokens=12) for p in PROMPTS]
        await others_are_right(rig, generations, "device assert")


async def test_SH_01_a_step_that_raises_once_costs_nobody_anything() -> None:
    async with Rig() as rig:
        failed: list[int] = []

        def before(plan: SchedulerOutput) -> None:
            if plan.step == 3 and not failed:
                failed.append(plan.step)
                raise MemoryError

        rig.executor.before = before
        generations = [rig.generate(p, max_tokens=12) for p in PROMPTS]
        await asyncio.gather(*(g.wait() for g in generations))
        assert [g.logs[0].token_ids for g in generations] == [rig.solo(p, 12) for p in PROMPTS]
        assert failed == [3]


def without(result: StepResult, seq_id: int) -> dict[int, list[SampledToken]]:
    return {k: v for k, v in result.tokens.items() if k != seq_id}


FAULTY: dict[str, tuple[Callable[[StepResult], StepResult], str]] = {
    "row error": (lambda r: replace(r, tokens=without(r, GUILTY), errors={GUILTY: "NaN logits"}), "NaN logits"),
    "error beside a token": (lambda r: replace(r, errors={GUILTY: "NaN logits"}), "NaN logits"),
    "no token": (lambda r: replace(r, tokens=without(r, GUILTY)), "no token"),
    "empty list": (lambda r: replace(r, tokens={**r.tokens, GUILTY: []}), "no token"),
    "too large": (lambda r: replace(r, tokens={**r.tokens, GUILTY: [SampledToken(2**31)]}), "outside"),
    "negative": (lambda r: replace(r, tokens={**r.tokens, GUILTY: [SampledToken(-1)]}), "outside"),
}


@pytest.mark.parametrize("name", FAULTY)
async def test_SH_01_a_faulty_result_fails_its_row_alone(name: str) -> None:
    fault, message = FAULTY[name]
    async with Rig() as rig:
        rig.executor.after = lambda plan, result: fault(result) if plan.step == 3 and has(plan, GUILTY) else result
        generations = [rig.generate(p, max_tokens=12) for p in PROMPTS]
        await others_are_right(rig, generations, message)
        assert len(generations[GUILTY].logs[0].tokens) == 2, "what it had stays readable"


@pytest.mark.parametrize("where", ["detokenizer", "stops", "both at the end"])
async def test_SH_01_a_fault_in_the_text_fails_its_request_alone(where: str) -> None:
    def boom(*_: Any) -> Any:
        raise UnicodeError("broken text")

    async with Rig() as rig:
        generations = [rig.generate(p, max_tokens=12, stop=("#",)) for p in PROMPTS]
        choice = rig.engine._running[generations[GUILTY].request_id].choices[0]
        if where != "stops":
            choice.detokenizer.push = boom  # type: ignore[method-assign]
        if where != "detokenizer":
            choice.stops.push = boom  # type: ignore[method-assign]
        if where == "both at the end":
            choice.detokenizer.flush = boom  # type: ignore[method-assign]
        await others_are_right(rig, generations, "broken text")


@pytest.mark.parametrize("victim", [0, 1, 2])
@pytest.mark.parametrize("step", [1, 3])
@pytest.mark.parametrize("fault", ["error", "no token"])
async def test_SH_01_one_choice_of_several_may_fail(victim: int, step: int, fault: str) -> None:
    async with Rig() as rig:

        def after(plan: SchedulerOutput, result: StepResult) -> StepResult:
            if plan.step != step:
                return result
            errors = {victim: "NaN"} if fault == "error" else {}
            return replace(result, tokens=without(result, victim), errors=errors)

        rig.executor.after = after
        generation = rig.generate(PROMPTS[0], n=3, max_tokens=6, temperature=1.0)
        await generation.wait()
        for choice, log in enumerate(generation.logs):
            want = rig.solo(PROMPTS[0], 6, choice=choice, temperature=1.0)
            # The first choice's row is the prompt's: what is wrong with it is wrong for all.
            hit = choice == victim or (victim == 0 and step == 1)
            assert log.finish_reason == ("error" if hit else "length")
            assert log.token_ids == (want[: step - 1] if hit else want)


async def test_SH_01_a_prompt_whose_step_raises_fails_all_its_choices() -> None:
    async with Rig() as rig:

        def before(plan: SchedulerOutput) -> None:
            if has(plan, 1):
                raise RuntimeError("boom")

        rig.executor.before = before
        good, bad = rig.generate(PROMPTS[0], max_tokens=12), rig.generate(PROMPTS[1], n=3)
        await asyncio.gather(good.wait(), bad.wait())
        assert good.logs[0].token_ids == rig.solo(PROMPTS[0], 12)
        assert [log.finish_reason for log in bad.logs] == ["error"] * 3


async def test_a_token_that_the_tokenizer_does_not_know_has_no_text() -> None:
    async with Rig() as rig:
        generation = rig.script([97, 305, 98])
        assert await text_of(generation) == ["ab"]
        assert generation.logs[0].token_ids == [97, 305, 98, EOS]


@pytest.mark.parametrize("depth", [1, 2])
async def test_a_step_that_the_executor_drops_is_a_failed_step(depth: int) -> None:
    async with Rig(steps_in_flight=depth) as rig:
        rig.executor.held = True
        generations = [rig.generate(p, max_tokens=12) for p in PROMPTS]
        await rig.until(lambda: len(rig.executor.pending) == depth)
        future: Future[StepResult] = rig.executor.pending.pop(0)[1]
        rig.executor.held = False
        assert future.cancel()
        rig.executor.release()
        await asyncio.gather(*(g.wait() for g in generations))
        assert [g.logs[0].token_ids for g in generations] == [rig.solo(p, 12) for p in PROMPTS]


async def test_a_submit_that_raises_is_a_failed_step() -> None:
    async with Rig() as rig:
        real = rig.executor.submit

        def submit(plan: SchedulerOutput) -> Future[StepResult]:
            if has(plan, GUILTY):
                raise RuntimeError("no thread")
            return real(plan)

        rig.executor.submit = submit  # type: ignore[method-assign]
        await others_are_right(rig, [rig.generate(p, max_tokens=12) for p in PROMPTS], "no thread")


async def test_an_abort_while_suspects_are_tried_one_by_one() -> None:
    async with Rig() as rig:

        def before(plan: SchedulerOutput) -> None:
            if has(plan, GUILTY):
                raise RuntimeError("boom")

        rig.executor.before = before
        rig.executor.held = True
        generations = [rig.generate(p, max_tokens=12) for p in PROMPTS]
        await rig.until(lambda: rig.executor.pending)
        generations[0].cancel()
        rig.executor.release()  # fails; all five are suspects now
        await rig.until(lambda: rig.executor.pending)
        assert len(rig.executor.pending[0][0].rows) == 1
        for generation in generations[:GUILTY]:
            generation.cancel()
        rig.executor.held = False
        rig.executor.release()
        await asyncio.gather(*(g.wait() for g in generations))
        reasons = [g.logs[0].finish_reason for g in generations]
        assert reasons == ["abort", "abort", "error", "length", "length", "length"]


async def test_SH_02_a_stuck_step_is_unhealthy_and_an_idle_engine_is_not() -> None:
    async with Rig(stuck_after=0.0) as rig:
        assert rig.engine.healthy and rig.engine.ready
        rig.executor.held = True
        running = rig.generate(4)
        await rig.until(lambda: rig.executor.pending)
        assert not rig.engine.healthy and not rig.engine.ready
        with pytest.raises(Overloaded) as refused:
            rig.generate(4)
        assert refused.value.status == 503
        rig.executor.held = False
        rig.executor.release()
        await running.wait()
        assert rig.engine.healthy and rig.engine.ready


async def test_SH_02_busy_is_not_stuck() -> None:
    async with Rig(stuck_after=3600) as rig:
        running = rig.generate(4, max_tokens=100)
        for _ in range(50):
            await asyncio.sleep(0)
            assert rig.engine.healthy
        await running.wait()


async def test_SH_02_requests_behind_a_step_that_does_not_end_get_an_error() -> None:
    async with Rig(give_up_after=0.0, max_num_seqs=1) as rig:
        rig.executor.held = True
        generations = [rig.generate(4), rig.generate(4)]
        await rig.until(lambda: rig.executor.pending)
        await asyncio.gather(*(g.wait() for g in generations))
        assert [(g.logs[0].finish_reason, g.logs[0].error_status) for g in generations] == [("error", 503)] * 2
        assert rig.engine.num_requests == 1, "its blocks are still named by the step"
        rig.engine.config = replace(rig.engine.config, give_up_after=3600)
        rig.executor.held = False
        rig.executor.release()
        await rig.until(lambda: rig.engine.num_requests == 0)
        after = rig.generate(PROMPTS[0])
        await after.wait()
        assert after.logs[0].token_ids == rig.solo(PROMPTS[0], 8)


@pytest.mark.parametrize("error", [ZeroDivisionError("scheduler"), AssertionError("block")], ids=str)
async def test_SH_02_a_dead_engine_says_so(error: Exception, caplog: pytest.LogCaptureFixture) -> None:
    async with Rig() as rig:
        rig.executor.held = True
        generations = [rig.generate(4, max_tokens=50), rig.generate(4, n=2)]
        await rig.until(lambda: rig.executor.pending)
        watched = rig.engine.kv_events()
        await anext(watched)
        drained = asyncio.create_task(rig.engine.drained(3600))

        def schedule() -> SchedulerOutput:
            raise error

        rig.engine.scheduler.schedule = schedule  # type: ignore[method-assign]
        rig.executor.held = False
        rig.executor.release()
        await asyncio.gather(*(g.wait() for g in generations))
        for log in (log for g in generations for log in g.logs):
            assert log.finish_reason == "error" and log.error_status == 503 and str(error) in (log.error or "")
        assert not rig.engine.healthy and not rig.engine.ready and rig.engine.num_requests == 0
        with pytest.raises(EngineDead, match=str(error)):
            rig.generate(4)
        assert not rig.engine.cancel("r1")
        assert await drained
        async for _ in watched:  # the block map's readers end, too
            pass
        assert "the engine died" in caplog.text


async def test_a_leak_is_said_and_survived(caplog: pytest.LogCaptureFixture) -> None:
    async with Rig() as rig:
        await rig.generate(4).wait()
        await rig.until(lambda: rig.engine.num_requests == 0)
        lost = rig.engine.scheduler.manager.pool.take()
        await rig.generate(4).wait()
        await rig.until(lambda: rig.engine.num_requests == 0)
        await rig.turn()
        assert "not whole" in caplog.text and rig.engine.healthy
        rig.engine.scheduler.manager.pool.unref(lost)
