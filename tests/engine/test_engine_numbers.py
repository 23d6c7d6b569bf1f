"""What is reported adds up: cached tokens, metrics, the block map; and pressure changes no text."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import pytest
from engine_harness import Rig

from chatsvc.engine.output import Generation

SIZE = 4


async def done(generation: Generation) -> Generation:
    await generation.wait()
    return generation


async def test_PC_09_PC_03_cached_tokens_are_whole_blocks_or_all_but_one() -> None:
    async with Rig() as rig:
        prompt = list(range(3 * SIZE))
        cold = await done(rig.generate(prompt, max_tokens=5))
        again = await done(rig.generate(prompt, max_tokens=5))
        third = await done(rig.generate(prompt, max_tokens=5))
        assert [g.num_cached_tokens for g in (cold, again, third)] == [0, 11, 11]
        for generation in (cold, again, third):
            assert generation.logs[0].token_ids == rig.solo(prompt, 5)
        longer = await done(rig.generate([*prompt, 50, 51], max_tokens=2))
        assert longer.num_cached_tokens == 12
        turn = [*prompt, *cold.logs[0].token_ids, 9]  # the answer's full blocks are found as well
        assert (await done(rig.generate(turn, max_tokens=1))).num_cached_tokens == 16
        several = await done(rig.generate(prompt, n=3, max_tokens=3))
        assert several.num_cached_tokens == 11, "once per prompt, not once per choice"
        fresh = await done(rig.generate(list(range(60, 69)), n=4, max_tokens=3))
        assert fresh.num_cached_tokens == 0, "the other choices' hits are not the caller's"


@pytest.mark.parametrize(("first", "second", "cached"), [("a", "b", 0), ("a", "a", 11)])
async def test_PC_12_tenants_do_not_see_each_others_prompts(first: str, second: str, cached: int) -> None:
    async with Rig() as rig:
        prompt = list(range(12))
        await done(rig.generate(prompt, tenant=first))
        assert (await done(rig.generate(prompt, tenant=second))).num_cached_tokens == cached


async def test_PC_10_PR_02_pressure_changes_no_text_and_is_no_cache_hit() -> None:
    rng = random.Random(5)
    prompts = [[rng.randrange(200) for _ in range(rng.randint(10, 25))] for _ in range(16)]
    async with Rig(num_blocks=30, budget=24, watermark_tokens=0) as rig:
        generations = [rig.generate(p, max_tokens=30) for p in prompts]
        texts: list[list[int]] = [[] for _ in prompts]

        async def read(i: int) -> None:
            async for news in generations[i].read():
                for delta in news:
                    assert delta.cursor == len(texts[i]) + len(delta.tokens), "each token once, in order"
                    texts[i] += [t.token_id for t in delta.tokens]

        await asyncio.gather(*(read(i) for i in range(16)))
        assert texts == [rig.solo(p, 30) for p in prompts]
        stats = rig.engine.scheduler.stats
        assert stats.preemptions > 10 and stats.recompute_hit_tokens > 0
        assert [g.num_cached_tokens for g in generations] == [0] * 16
        assert stats.hit_tokens == rig.metric("prefix_cache_hit_tokens_total") == 0
        assert rig.metric("preemptions_total", kind="recompute") == stats.preemptions


async def test_PR_08_a_sampled_request_is_the_same_under_pressure() -> None:
    prompt = list(range(9))
    fields: dict[str, Any] = {"temperature": 1.0, "seed": 7, "n": 2, "stop": ("q", "zz")}
    alone, crowd = [], []
    async with Rig(num_blocks=200) as rig:
        alone = [(log.text, log.token_ids) for log in (await done(rig.generate(prompt, max_tokens=40, **fields))).logs]
    async with Rig(num_blocks=24, budget=12, watermark_tokens=0) as rig:
        others = [rig.generate(12, max_tokens=40) for _ in range(8)]
        mine = rig.generate(prompt, max_tokens=40, **fields)
        others += [rig.generate(12, max_tokens=40) for _ in range(7)]
        await asyncio.gather(*(g.wait() for g in [mine, *others]))
        crowd = [(log.text, log.token_ids) for log in mine.logs]
        assert rig.engine.scheduler.stats.preemptions > 0
    assert crowd == alone and alone[0] != alone[1]


@pytest.mark.parametrize("depth", [1, 2])
async def test_PR_05_preempted_sequences_come_back_before_anybody_new(depth: int) -> None:
    limits = {"num_blocks": 16, "budget": 16, "watermark_tokens": 0, "max_queue": 1000}
    async with Rig(**limits, steps_in_flight=depth) as rig:
        scheduler = rig.engine.scheduler
        here = [rig.generate(8, n=2, max_tokens=24) for _ in range(3)]
        seen = 0

        def watch(plan: object) -> None:
            nonlocal seen
            if scheduler.preempted:
                seen += 1
                oldest_waiting = min((s.order for s in scheduler.waiting.values()), default=(float("inf"), 0))
                assert max(s.order for s in scheduler.preempted) < oldest_waiting, "admitted before its turn"
                rows = {r.seq_id for flying in scheduler.in_flight for r in flying.rows}
                assert scheduler.running[0].seq_id in rows, "the oldest always advances"

        rig.executor.watch = watch
        for _ in range(30):
            here.append(rig.generate(8, n=2, max_tokens=4))
            await rig.turn(3)
        await asyncio.gather(*(g.wait() for g in here))
        assert seen > 5
        assert all(log.finish_reason == "length" for g in here for log in g.logs)


async def test_OB_01_OB_03_metrics_are_the_sums_of_the_requests() -> None:
    rng = random.Random(3)
    async with Rig(num_blocks=30, watermark_tokens=0) as rig:
        generations, samples = [], 0
        usable = 30

        def watch(plan: object) -> None:
            nonlocal samples
            samples += 1
            states = [rig.metric("kv_blocks", state=s) for s in ("free", "cached", "used")]
            assert sum(states) == usable and min(states) >= 0
            assert 0 <= rig.metric("kv_waste_ratio") <= 1
            assert rig.metric("requests_running") <= 64

        rig.executor.watch = watch
        head = [rng.randrange(200) for _ in range(12)]
        for i in range(40):
            prompt = head[: rng.randint(1, 12)] + [rng.randrange(200) for _ in range(rng.randint(1, 6))]
            generations.append(rig.generate(prompt, max_tokens=rng.randint(1, 20), n=1 + i % 2))
            await rig.turn(rng.randint(0, 9))
            if i % 5 == 0:
                generations[-1].cancel()
        await asyncio.gather(*(g.wait() for g in generations))
        await rig.until(lambda: rig.engine.num_requests == 0)
        logs = [log for g in generations for log in g.logs]
        total = sum(rig.metric("requests_finished_total", reason=r) for r in ("stop", "length", "abort", "error"))
        assert total == len(logs)
        assert rig.metric("requests_finished_total", reason="abort") == sum(x.finish_reason == "abort" for x in logs)
        assert rig.metric("request_seconds_count") == len(generations)
        begun = [g for g in generations if g.timings.scheduled is not None]
        assert rig.metric("queue_seconds_count") == len(begun)
        spoken = [g for g in generations if g.num_output_tokens]
        assert rig.metric("time_to_first_token_seconds_count") == len(spoken)
        delivered = sum(len(log.tokens) for log in logs)
        late = rig.metric("generation_tokens_total") - delivered
        assert 0 <= late <= 2 * 8, "only a cancelled choice's last token may be computed and not delivered"
        assert rig.metric("inter_token_seconds_count") == delivered - sum(bool(log.tokens) for log in logs)
        plans = rig.executor.plans
        assert rig.metric("computed_tokens_total") == rig.metric("batch_tokens_sum") == sum(p.num_tokens for p in plans)
        assert rig.metric("step_seconds_count") == len(plans) == samples
        for g in begun:
            t = g.timings
            assert t.scheduled is not None and t.finished is not None
            assert t.arrival <= t.scheduled <= (t.first_token or t.finished) <= t.finished


def check_snapshot(snapshot: dict[str, Any], usable: int) -> None:
    assert snapshot["block_size"] == SIZE
    blocks = {b["id"]: b for b in snapshot["blocks"]}
    assert sorted(blocks) == list(range(1, usable + 1))
    owners: dict[int, list[str]] = {i: [] for i in blocks}
    for seq in snapshot["sequences"]:
        assert set(seq) == {"id", "block_table", "computed", "total"}
        assert seq["computed"] <= seq["total"] and len(seq["block_table"]) * SIZE >= seq["computed"]
        for block in seq["block_table"]:
            owners[block].append(seq["id"])
    for i, block in blocks.items():
        assert set(block) == {"id", "state", "ref_count", "hits", "hash", "owners"}
        assert block["ref_count"] == len(block["owners"]) and sorted(block["owners"]) == sorted(owners[i])
        want = "used" if block["owners"] else "cached" if block["hash"] else "free"
        assert block["state"] == want


async def test_the_block_map_and_its_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("chatsvc.engine.kvview.MIN_INTERVAL", 0)
    monkeypatch.setattr("chatsvc.engine.kvview.REST", 0)
    async with Rig(num_blocks=24, budget=16, watermark_tokens=0) as rig:
        rng = random.Random(11)
        events = rig.engine.kv_events()
        first = await anext(events)
        assert first["type"] == "snapshot"
        state = {"blocks": {b["id"]: b for b in first["blocks"]}, "sequences": {}}
        changes = 0

        async def follow() -> None:
            nonlocal changes
            async for event in events:
                assert event["type"] == "change"
                changes += 1
                state["blocks"] |= {b["id"]: b for b in event["blocks"]}
                state["sequences"] |= {s["id"]: s for s in event["sequences"]}
                for gone in event["gone"]:
                    del state["sequences"][gone]

        task = asyncio.create_task(follow())
        generations = []
        for _ in range(25):
            prompt = list(range(rng.randint(1, 20)))
            generations.append(rig.generate(prompt, max_tokens=rng.randint(1, 20), n=rng.randint(1, 2)))
            if rng.random() < 0.2:
                generations[-1].cancel()
            await rig.turn(rng.randint(0, 8))
            check_snapshot(rig.engine.kv_snapshot(), 24)
        await asyncio.gather(*(g.wait() for g in generations))
        await rig.until(lambda: rig.engine.num_requests == 0)
        await rig.turn(50)
        last = rig.engine.kv_snapshot()
        check_snapshot(last, 24)
        assert list(state["blocks"].values()) == last["blocks"] and not state["sequences"] and changes > 20
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        assert not rig.engine._views, "who stopped watching is forgotten"
        other = rig.engine.kv_events()
        await anext(other)
        await other.aclose()  # type: ignore[attr-defined]
        assert not rig.engine._views


async def test_SF_waiting_sequences_are_in_the_map_without_blocks() -> None:
    async with Rig(max_num_seqs=1) as rig:
        rig.executor.held = True
        here = [rig.generate(6), rig.generate(6)]
        await rig.until(lambda: rig.executor.pending)
        tables = {s["id"]: len(s["block_table"]) for s in rig.engine.kv_snapshot()["sequences"]}
        assert tables == {"r1:0": 2, "r2:0": 0}
        rig.executor.held = False
        rig.executor.release()
        await asyncio.gather(*(g.wait() for g in here))
