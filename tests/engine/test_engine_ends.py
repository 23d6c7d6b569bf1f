"""Every way in which a request can end gives everything back: BM-02, BM-04, BM-08, aborts, queue, drain, stop."""

from __future__ import annotations

import asyncio
import gc
import random
import threading
from dataclasses import replace

import pytest
from engine_harness import EOS, Rig

from chatsvc.engine.output import Generation
from chatsvc.errors import Conflict, ContextLengthExceeded, EngineDead, InvalidRequest, Overloaded
from chatsvc.scheduler.plan import SchedulerOutput, StepResult


async def reader(generation: Generation, leave_after: int, *, cancel: bool) -> None:
    seen = 0
    async for news in generation.read():
        seen += sum(len(d.tokens) for d in news)
        if seen >= leave_after:
            break
    if cancel:
        generation.cancel()


@pytest.mark.parametrize("seed", [1, 2])
async def test_BM_02_five_hundred_requests_with_random_ends(seed: int) -> None:
    rng = random.Random(seed)
    async with Rig(num_blocks=24, budget=32, max_num_seqs=12, max_queue=40, watermark_tokens=0) as rig:

        def poison(plan: SchedulerOutput, result: StepResult) -> StepResult:
            bad = [r.seq_id for r in plan.rows if rng.random() < 0.005]
            return replace(result, errors=dict.fromkeys(bad, "NaN"))

        rig.executor.after = poison
        generations: list[Generation] = []
        tasks: list[asyncio.Task[None]] = []
        refused = 0
        heads = [[rng.randrange(200) for _ in range(rng.randint(1, 40))] for _ in range(4)]
        for i in range(500):
            prompt = rng.choice(heads)[: rng.randint(1, 40)] + [rng.randrange(200) for _ in range(rng.randint(0, 9))]
            end = rng.choice(["length", "eos", "stop", "cancel", "queued", "refused", "n", "stop_id", "twice"])
            try:
                if end == "eos":
                    generation = rig.script([97] * rng.randint(0, 9), prompt=len(prompt))
                elif end == "stop":
                    generation = rig.script(b"abcdefgh", stop=("de",), prompt=len(prompt))
                elif end == "stop_id":
                    generation = rig.script(b"abcdefgh", stop_token_ids=frozenset({100}))
                elif end == "refused":
                    generation = rig.generate(prompt, max_tokens=rng.choice([0, 10_000]))
                elif end == "n":
                    generation = rig.generate(prompt, n=rng.randint(2, 5), temperature=1.0, seed=i, stop=("a", "b"))
                else:
                    generation = rig.generate(prompt, max_tokens=rng.randint(1, 30), n=rng.choice([1, 1, 3]))
            except (Overloaded, InvalidRequest, ContextLengthExceeded):
                refused += 1
                await rig.turn(rng.randint(0, 5))
                continue
            generations.append(generation)
            if end == "queued":
                generation.cancel()
            elif end in ("cancel", "twice"):
                tasks.append(asyncio.create_task(reader(generation, rng.randint(0, 5), cancel=True)))
                if end == "twice":
                    tasks.append(asyncio.create_task(reader(generation, rng.randint(0, 5), cancel=True)))
            else:
                tasks.append(asyncio.create_task(reader(generation, 1 << 30, cancel=False)))
            await rig.turn(rng.randint(0, 6))
            queued = sum(g.timings.scheduled is None and not g.finished for g in generations)
            assert rig.engine.num_queued == queued
        await asyncio.gather(*tasks)
        await rig.until(lambda: rig.engine.num_requests == 0)
        rig.assert_empty()
        assert rig.engine.scheduler.stats.preemptions > 20 and refused > 20
        reasons = [log.finish_reason for g in generations for log in g.logs]
        for reason in ("stop", "length", "abort", "error"):  # OB-01: every end is counted, under its own name
            assert rig.metric("requests_finished_total", reason=reason) == reasons.count(reason)
        assert {"stop", "length", "abort", "error"} == set(reasons)


@pytest.mark.parametrize(("depth", "blocks"), [(1, 4), (2, 5)])
async def test_BM_04_blocks_of_an_aborted_request_wait_for_the_step_that_writes_them(depth: int, blocks: int) -> None:
    async with Rig(num_blocks=6, block_size=4, budget=64, steps_in_flight=depth) as rig:
        a_prompt, b_prompt = list(range(16)), list(range(100, 116))
        rig.executor.held = True
        a = rig.generate(a_prompt, max_tokens=4)
        await rig.until(lambda: rig.executor.pending)
        a.cancel()
        assert a.finished, "readers see the end at once"
        b = rig.generate(b_prompt, max_tokens=4)
        await rig.turn()
        assert rig.engine.scheduler.manager.pool.num_used == blocks, "the step in flight still owns its blocks"
        rig.executor.held = False
        rig.executor.release()
        await b.wait()
        assert b.logs[0].token_ids == rig.solo(b_prompt, 4)
        again = rig.generate(a_prompt, max_tokens=4)
        await again.wait()
        assert again.logs[0].token_ids == rig.solo(a_prompt, 4)


async def test_BM_04_what_a_failed_step_should_have_written_is_never_found() -> None:
    async with Rig() as rig:
        prompt = list(range(16))
        rig.executor.held = True
        a = rig.generate(prompt)
        await rig.until(lambda: rig.executor.pending)
        a.cancel()

        def fail(_: object) -> None:
            raise RuntimeError("boom")

        rig.executor.before = fail
        rig.executor.release()
        rig.executor.before = lambda plan: None
        rig.executor.held = False
        await rig.until(lambda: rig.engine.num_requests == 0)
        again = rig.generate(prompt)
        await again.wait()
        assert again.num_cached_tokens == 0
        assert again.logs[0].token_ids == rig.solo(prompt, 8)


async def test_a_cancel_is_seen_at_once_wherever_the_request_stands() -> None:
    async with Rig(max_num_seqs=1) as rig:
        rig.executor.held = True
        running, waiting = rig.generate(5), rig.generate(5)
        await rig.until(lambda: rig.executor.pending)
        waiting.cancel()
        assert waiting.finished and rig.engine.num_requests == 1, "who waits owns nothing: gone at once"
        running.cancel()
        running.cancel()
        assert running.finished and rig.engine.num_requests == 1
        assert not rig.engine.cancel("unknown")
        rig.executor.held = False
        rig.executor.release()
        await rig.until(lambda: rig.engine.num_requests == 0)
        assert [g.logs[0].finish_reason for g in (running, waiting)] == ["abort", "abort"]
        assert running.logs[0].tokens == [], "the token of the step in flight came too late"
        running.cancel()
        assert rig.metric("requests_finished_total", reason="abort") == 2


@pytest.mark.parametrize("choices", [1, 2, 3])
async def test_a_request_may_end_for_two_reasons_in_one_step(choices: int) -> None:
    async with Rig() as rig:
        other = rig.generate(5, max_tokens=30)
        rig.executor.held = True
        generation = rig.generate(5, n=choices, max_tokens=1)
        await rig.until(lambda: rig.executor.pending and len(rig.executor.pending[0][0].rows) > 1)
        generation.cancel()  # and the step in flight brings the last token of every choice
        rig.executor.held = False
        rig.executor.release()
        await other.wait()
        assert [log.finish_reason for log in generation.logs] == ["abort"] * choices
        assert other.logs[0].finish_reason == "length"


async def test_an_old_generation_does_not_cancel_a_new_one_of_the_same_id() -> None:
    async with Rig() as rig:
        first = rig.generate(4, name="same")
        with pytest.raises(Conflict):
            rig.generate(4, name="same")
        await first.wait()
        await rig.until(lambda: rig.engine.num_requests == 0)
        second = rig.generate(4, name="same")
        first.cancel()
        await second.wait()
        assert second.logs[0].finish_reason == "length"


async def test_a_reader_may_cancel_inside_its_own_loop() -> None:
    async with Rig() as rig:
        generation = rig.generate(4, max_tokens=100)
        seen = []
        async for news in generation.read():
            seen += news
            generation.cancel()
        assert seen[-1].finish_reason == "abort" and 1 <= sum(len(d.tokens) for d in seen) < 100


async def test_SH_06_a_full_queue_refuses_and_recovers() -> None:
    async with Rig(max_num_seqs=1, max_queue=3) as rig:
        rig.executor.held = True
        here = [rig.generate(4)]
        await rig.until(lambda: rig.executor.pending)
        here += [rig.generate(4) for _ in range(3)]
        with pytest.raises(Overloaded) as refused:
            rig.generate(4)
        assert refused.value.status == 429 and refused.value.retry_after >= 1
        here[1].cancel()
        here.append(rig.generate(4))  # who left the queue has left it
        rig.executor.held = False
        rig.executor.release()
        await asyncio.gather(*(g.wait() for g in here))
        assert [g.logs[0].finish_reason for g in here] == ["length", "abort", "length", "length", "length"]


async def test_SH_08_who_waits_too_long_gets_503_and_the_others_go_on() -> None:
    async with Rig(max_num_seqs=1) as rig:
        rig.executor.held = True
        running, waiting, young = rig.generate(4), rig.generate(4, n=2), rig.generate(4)
        await rig.until(lambda: rig.executor.pending)
        for request in (rig.engine._running["r1"].request, rig.engine._running["r2"].request):
            request.arrival -= 3601
        await waiting.wait()  # the queue's time limit does not wait for the step
        assert [(log.finish_reason, log.error_status) for log in waiting.logs] == [("error", 503)] * 2
        assert "3600 s" in (waiting.logs[0].error or "")
        assert not running.finished and not young.finished
        rig.executor.held = False
        rig.executor.release()
        await asyncio.gather(running.wait(), young.wait())
        assert running.logs[0].finish_reason == young.logs[0].finish_reason == "length"


async def test_SH_04_a_drain_takes_nothing_new_and_waits_for_the_rest() -> None:
    async with Rig() as rig:
        rig.executor.held = True
        running = rig.generate(4)
        await rig.until(lambda: rig.executor.pending)
        rig.engine.begin_drain()
        assert rig.engine.draining and not rig.engine.ready and rig.engine.healthy
        with pytest.raises(Overloaded) as refused:
            rig.generate(4)
        assert refused.value.status == 503
        assert await rig.engine.drained(0) is False
        drained = asyncio.create_task(rig.engine.drained(3600))
        await rig.turn()
        assert not drained.done()
        rig.executor.held = False
        rig.executor.release()
        assert await drained is True
        assert running.logs[0].finish_reason == "length"


async def test_stop_ends_readers_and_may_come_twice() -> None:
    async with Rig(max_num_seqs=1) as rig:
        rig.executor.held = True
        generations = [rig.generate(4), rig.generate(4, n=3)]
        await rig.until(lambda: rig.executor.pending)
        readers = [asyncio.create_task(g.wait()) for g in generations]
        watcher = asyncio.create_task(anext(rig.engine.kv_events()))
        await watcher
        await rig.turn()
        await rig.engine.stop()
        await asyncio.gather(*readers)
        logs = [log for g in generations for log in g.logs]
        assert all(log.finish_reason == "error" and log.error_status == 503 for log in logs)
        await rig.engine.stop()
        rig.assert_empty()
        with pytest.raises(Overloaded):
            rig.generate(4)


async def test_stop_does_not_wait_for_ever_for_a_stuck_executor(caplog: pytest.LogCaptureFixture) -> None:
    rig = Rig(stuck_after=0.01)
    await rig.engine.start()
    end = threading.Event()
    rig.executor.stop = lambda: end.wait(60) and None  # type: ignore[method-assign]
    await rig.engine.stop()
    end.set()
    assert "did not stop" in caplog.text


async def test_stop_while_it_loads_leaves_no_task() -> None:
    rig, loaded = Rig(), threading.Event()
    real = rig.executor.start

    def start() -> object:
        loaded.wait(60)
        return real()

    rig.executor.start = start  # type: ignore[method-assign,assignment]
    starting = asyncio.create_task(rig.engine.start())
    await rig.turn()
    with pytest.raises(Overloaded, match="loading"):
        rig.generate(4)
    await rig.engine.stop()
    loaded.set()
    with pytest.raises(EngineDead):
        await starting
    assert rig.engine._tasks == [] and not rig.engine.ready


async def test_BM_08_nothing_grows_with_the_number_of_requests() -> None:
    async with Rig(num_blocks=32, max_queue=10_000) as rig:

        async def wave(count: int) -> int:
            for i in range(count):
                generation = rig.generate([i % 7, i % 5, 3], max_tokens=2, n=1 + i % 2)
                if i % 2:
                    generation.cancel()
                else:
                    await generation.wait()
            await rig.until(lambda: rig.engine.num_requests == 0)
            rig.executor.plans.clear()
            gc.collect()
            rig.assert_empty()
            return len(gc.get_objects())

        await wave(50)
        tasks = len(asyncio.all_tasks())
        first, second = await wave(50), await wave(700)
        # A request left behind would be at least a dozen objects.
        assert second - first < 700, (first, second)
        assert len(asyncio.all_tasks()) == tasks
        scheduler = rig.engine.scheduler
        assert list(scheduler.sequences()) == [] and not scheduler.waiting and len(scheduler.manager.pool.index) <= 32


async def test_PR_01_what_can_never_fit_is_refused_with_both_numbers() -> None:
    async with Rig(num_blocks=10, block_size=4) as rig:
        with pytest.raises(ContextLengthExceeded, match=r"48 tokens.* 40"):
            rig.generate(48)
        with pytest.raises(ContextLengthExceeded, match=r"30 tokens and max_tokens is 11.* 40"):
            rig.generate(30, max_tokens=11)
        with pytest.raises(ContextLengthExceeded):
            rig.generate(40, max_tokens=1)
        whole = rig.generate(30, max_tokens=10)
        many = rig.generate(30, max_tokens=10, n=3)  # n times the prompt does not fit at once: one after the other
        short = rig.generate(3)
        await asyncio.gather(whole.wait(), many.wait(), short.wait())
        assert [len(log.tokens) for log in [*whole.logs, *many.logs, *short.logs]] == [10, 10, 10, 10, 8]


@pytest.mark.parametrize(
    ("prompt", "fields", "param"),
    [
        ([], {}, "prompt"),
        ([-1], {}, "prompt"),
        ([310], {}, "prompt"),
        ([2**40], {}, "prompt"),
        ([1], {"max_tokens": 0}, "max_tokens"),
        ([1], {"max_tokens": -5}, "max_tokens"),
        ([1], {"n": 0}, "n"),
    ],
)
async def test_OA_14_SA_07_senseless_requests_are_refused_and_leave_nothing(
    prompt: list[int], fields: dict[str, int], param: str
) -> None:
    async with Rig() as rig:
        with pytest.raises(InvalidRequest) as refused:
            rig.generate(prompt, **fields)
        assert refused.value.param == param
        rig.assert_empty()
        ok = rig.generate([309], max_tokens=1)
        await ok.wait()
        assert ok.logs[0].finish_reason == "length"


async def test_SE_06_a_long_answer_ends_at_the_limit() -> None:
    async with Rig(num_blocks=5, block_size=4) as rig:
        generation = rig.generate(19, max_tokens=1, n=3)
        await generation.wait()
        assert [(len(log.tokens), log.finish_reason) for log in generation.logs] == [(1, "length")] * 3


async def test_an_end_token_frees_its_blocks_while_the_other_choice_goes_on() -> None:
    async with Rig() as rig:
        generation = rig.generate(5, n=2, max_tokens=60, temperature=1.0, seed=4)
        choices = rig.engine._running["r1"].request.sequences
        real = rig.executor._token_fn
        rig.executor._token_fn = lambda c, r: EOS if r.sampling and r.sampling.choice == 0 else real(c, r)
        await rig.until(lambda: generation.logs[0].finish_reason)
        assert not choices[0].table.blocks and choices[1].table.blocks and not generation.finished
        await generation.wait()
        assert [log.finish_reason for log in generation.logs] == ["stop", "length"]
