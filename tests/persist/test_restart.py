"""Prefixes that survive a restart, at the end of an orderly one and in the middle of everything."""

from __future__ import annotations

import asyncio
import errno
import os
import random
import signal
import subprocess
import sys
from array import array
from dataclasses import replace
from itertools import chain
from pathlib import Path

import pytest
from disk_harness import BLOCK, IDENTITY, Home, answer_of, prompt, records, truth
from hypothesis import given, settings
from hypothesis import strategies as st

from chatsvc.cache.block import Content
from chatsvc.cache.manager import BlockManager, BlockTable
from chatsvc.cache.persist import Adoption, Candidate, Saved, candidates, choose, places
from chatsvc.config import ServeConfig
from chatsvc.engine.build import build
from chatsvc.errors import ConfigError
from chatsvc.scheduler.plan import SchedulerOutput, StepResult


async def test_the_same_prompt_is_found_after_a_restart(tmp_path: Path) -> None:
    folder = tmp_path / "made" / "here"
    one = prompt(1, 41)
    async with Home(folder, secret=b"first") as home:
        first = await home.ask(one)
    assert first.tokens == truth(one) and first.cached == 0
    assert os.stat(folder).st_mode & 0o777 == 0o700
    async with Home(folder, secret=b"second") as home:
        again = await home.ask(one)
        longer = await home.ask(one + first.tokens + [7, 8, 9])
    assert again.tokens == first.tokens
    assert again.cached == 40
    # The last token of the answer was never computed.
    assert longer.cached == (41 + 5) // BLOCK * BLOCK
    assert longer.tokens == truth(one + first.tokens + [7, 8, 9])
    async with Home(folder) as home:
        third = await home.ask(one + first.tokens + [7, 8, 9])
    assert third.cached >= longer.cached and third.tokens == longer.tokens


async def test_tenants_and_salts_stay_isolated(tmp_path: Path) -> None:
    one = prompt(1, 24)
    async with Home(tmp_path) as home:
        await home.ask(one, tenant="a", salt="s")
    for who in ({}, {"tenant": "a"}, {"salt": "s"}, {"tenant": "s", "salt": "a"}, {"tenant": "as"}):
        async with Home(tmp_path, save=False) as home:
            other = await home.ask(one, **who)
        assert other.cached == 0 and other.tokens == truth(one), who
    async with Home(tmp_path, save=False) as home:
        same = await home.ask(one, tenant="a", salt="s")
    assert same.cached == 23 and same.tokens == truth(one)  # the last prompt token is always recomputed


async def test_another_model_finds_nothing_and_leaves_the_file_alone(tmp_path: Path) -> None:
    async with Home(tmp_path) as home:
        await home.ask(prompt(1, 24))
    before = records(tmp_path)
    async with Home(tmp_path, model="another") as home:
        assert home.restored == 0
        assert (await home.ask(prompt(1, 24))).cached == 0
    assert records(tmp_path) == before
    assert len(list(tmp_path.iterdir())) == 2


async def test_the_size_limit_keeps_the_hottest_beginnings(tmp_path: Path) -> None:
    limit = 4096 + 8 * IDENTITY.record_bytes(b"") + 100
    async with Home(tmp_path, max_bytes=limit) as home:
        for i in range(4):
            await home.ask(prompt(i, 20))
        await home.ask(prompt(1, 20))
    assert (tmp_path / IDENTITY.file_name).stat().st_size <= limit
    assert 6 <= len(records(tmp_path)) <= 8
    async with Home(tmp_path, save=False) as home:
        assert (await home.ask(prompt(1, 20))).cached == 19
        assert (await home.ask(prompt(0, 20))).cached == 0


async def test_a_smaller_pool_takes_the_hottest(tmp_path: Path) -> None:
    async with Home(tmp_path) as home:
        for i in range(5):
            await home.ask(prompt(i, 24))
    async with Home(tmp_path, num_blocks=9, save=False) as home:
        pool = home.engine.scheduler.manager.pool
        assert home.restored == 9 and pool.num_cached == 9
        hot = await home.ask(prompt(4, 24))
        assert hot.cached == 23 and hot.tokens == truth(prompt(4, 24))


async def test_eviction_goes_on_in_the_order_of_use(tmp_path: Path) -> None:
    async with Home(tmp_path, num_blocks=32) as home:
        for i in range(4):
            await home.ask(prompt(i, 24))
        order = [b.content.tokens for b in home.engine.scheduler.manager.pool._cached if b.content]
    async with Home(tmp_path, num_blocks=32, save=False) as home:
        assert [b.content.tokens for b in home.engine.scheduler.manager.pool._cached if b.content] == order


async def test_the_host_tier_is_saved_and_restored_too(tmp_path: Path) -> None:
    async with Home(tmp_path, num_blocks=16, host_blocks=64) as home:
        for i in range(6):
            await home.ask(prompt(i, 30))
        host = home.engine.scheduler.manager.host
        assert host is not None and host.pool.num_cached > 10
    assert len(records(tmp_path)) > 30
    async with Home(tmp_path, num_blocks=16, host_blocks=64, save=False) as home:
        assert home.restored > 30
        answers = [await home.ask(prompt(i, 30)) for i in range(6)]
    assert [a.tokens for a in answers] == [truth(prompt(i, 30)) for i in range(6)]
    assert [a.cached for a in answers] == [28] * 6


async def test_nothing_is_written_when_nothing_has_changed(tmp_path: Path) -> None:
    async with Home(tmp_path) as home:
        await home.ask(prompt(1, 24))
        assert await home.persistence.save() > 0
        assert await home.persistence.save() == 0
    before = (tmp_path / IDENTITY.file_name).stat().st_ino
    async with Home(tmp_path) as home:
        await home.ask(prompt(1, 8), 1)
    assert (tmp_path / IDENTITY.file_name).stat().st_ino == before


async def test_an_unused_server_does_not_forget_what_it_could_not_read(tmp_path: Path) -> None:
    (tmp_path / IDENTITY.file_name).write_bytes(b"not a cache")
    async with Home(tmp_path) as home:
        assert home.restored == 0
    assert (tmp_path / IDENTITY.file_name).read_bytes() == b"not a cache"


async def test_saves_happen_by_themselves_while_requests_run(tmp_path: Path) -> None:
    async with Home(tmp_path, interval=0.001, save=False) as home:
        while not (tmp_path / IDENTITY.file_name).exists():
            await home.ask(prompt(1, 24))
    assert records(tmp_path)


async def test_a_full_disk_keeps_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with Home(tmp_path) as home:
        await home.ask(prompt(1, 24))
        assert await home.persistence.save() > 0
        before = records(tmp_path)
        await home.ask(prompt(2, 24))

        def full(descriptor: int) -> None:
            raise OSError(errno.ENOSPC, "No space left on device")

        with monkeypatch.context() as m:
            m.setattr(os, "fsync", full)
            assert await home.persistence.save() == 0
        assert records(tmp_path) == before
        assert (await home.ask(prompt(2, 24))).cached == 23
    assert len(records(tmp_path)) > len(before)
    assert [p.name for p in tmp_path.iterdir()] == [IDENTITY.file_name]


async def test_an_executor_that_is_stopped_meanwhile_costs_the_save_only(tmp_path: Path) -> None:
    async with Home(tmp_path) as home:
        await home.ask(prompt(1, 24))
        home.executor.stop()
        assert await home.persistence.save() == 0
        assert not list(tmp_path.iterdir())
    assert not list(tmp_path.iterdir())


async def test_what_its_first_user_found_bad_is_not_saved(tmp_path: Path) -> None:
    """A row with numbers that are not finite: its earlier blocks, findable since earlier steps, are bad as well."""
    async with Home(tmp_path) as home:
        seen: list[int] = []

        def fail_late(plan: SchedulerOutput, result: StepResult) -> StepResult:
            bad = {r.seq_id: "not finite" for r in plan.rows if r.sampling is not None and len(r.token_ids) > 1}
            seen.append(len(bad))
            return StepResult(result.step, {k: v for k, v in result.tokens.items() if k not in bad}, bad, 0.0)

        home.executor.fault = fail_late
        generation = home.begin(prompt(1, 100))
        while not seen:
            await asyncio.sleep(0)
        saves = [await home.persistence.save() for _ in range(3)]
        assert (await answer_of(generation)).reason == "error"
        assert len(seen) > 3 and seen[-2:] == [1, 0], "it took several steps, the last failed, one was ahead"
        assert saves == [0, 0, 0]
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("host_blocks", [0, 24])
@pytest.mark.parametrize("seed", range(4))
async def test_every_file_written_under_load_is_right(tmp_path: Path, seed: int, host_blocks: int) -> None:
    """A small pool that evicts all the time, steps that fail, clients that leave: and saves in between."""
    rng = random.Random(seed)
    size = {"num_blocks": 24, "host_blocks": host_blocks, "interval": 3600.0}
    saves = steps = 0
    async with Home(tmp_path, secret=b"1", **size) as home:  # type: ignore[arg-type]

        def sometimes(plan: SchedulerOutput, result: StepResult) -> StepResult:
            nonlocal steps
            steps += 1
            if rng.random() < 0.05:
                raise RuntimeError("a step that fails")
            return result

        home.executor.fault = sometimes
        running = []
        for _ in range(60):
            one = prompt(rng.randrange(3), rng.choice([12, 16, 28])) + prompt(rng.randrange(50), rng.randrange(9))
            running.append((one, home.begin(one, rng.randrange(1, 12), salt=rng.choice(["", "x"]))))
            due = steps + rng.randrange(4)
            while steps < due and home.engine.num_requests:
                await asyncio.sleep(0)
            if rng.random() < 0.1:
                rng.choice(running)[1].cancel()
            if rng.random() < 0.4 and await home.persistence.save():
                saves += 1
                records(tmp_path)  # asserts that every KV is the one of its tokens
        for one, generation in running:
            answer = await answer_of(generation)
            if answer.reason == "length":
                assert answer.tokens == truth(one, len(answer.tokens))
    assert saves > 5
    async with Home(tmp_path, secret=b"2", save=False, **size) as home:  # type: ignore[arg-type]
        # Both tiers may hold the same content, under two ids, when it was computed again: one of them is enough.
        chains: list[tuple[bytes, ...]] = []
        for r in records(tmp_path):
            chains.append((*(chains[r.parent] if r.parent >= 0 else (r.extra,)), r.tokens))
        assert home.restored == len(set(chains)) > 10
        assert host_blocks or len(chains) == len(set(chains))
        found = 0
        for one in [prompt(i, 28) for i in range(3)] * 2:
            answer = await home.ask(one)
            assert answer.tokens == truth(one)
            found += answer.cached
        assert found > 0


async def test_two_servers_on_one_directory(tmp_path: Path) -> None:
    async with Home(tmp_path) as a, Home(tmp_path) as b:
        for i in range(6):
            await asyncio.gather(a.ask(prompt(i, 20)), b.ask(prompt(10 + i, 20)))
            await asyncio.gather(a.persistence.save(), b.persistence.save())
            records(tmp_path)
    assert [p.name for p in tmp_path.iterdir()] == [IDENTITY.file_name]
    async with Home(tmp_path, save=False) as home:
        assert (await home.ask(prompt(5, 20))).cached == 19 or (await home.ask(prompt(15, 20))).cached == 19


SAVER = """
import asyncio, sys
sys.path.insert(0, {here!r})
from pathlib import Path
from disk_harness import Home, prompt

async def main():
    async with Home(Path({folder!r}), num_blocks=4000) as home:
        for i in range(10**6):
            await home.ask(prompt(i, 200), 1)
            await home.persistence.save()
            print(i, flush=True)

asyncio.run(main())
"""


def test_kill_in_the_middle_of_saving(tmp_path: Path) -> None:
    script = SAVER.format(here=str(Path(__file__).parent), folder=str(tmp_path))
    rng = random.Random(5)
    left = 0
    for _ in range(4):
        process = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
        assert process.stdout is not None
        for _ in range(rng.randrange(3, 40)):
            assert process.stdout.readline()
        process.send_signal(signal.SIGKILL)
        process.wait()
        process.stdout.close()
        assert records(tmp_path)
        left += len(list(tmp_path.glob("*.tmp")))

    async def restart() -> None:
        async with Home(tmp_path, num_blocks=4000, save=False) as home:
            assert home.restored == len(records(tmp_path))
            answer = await home.ask(prompt(0, 200))
            assert answer.tokens == truth(prompt(0, 200)) and answer.cached == 199

    asyncio.run(restart())
    assert not list(tmp_path.glob("*.tmp")), f"{left} were there"


# -- the parts -------------------------------------------------------------------------------------------------


@settings(max_examples=200, deadline=None)
@given(
    rows=st.lists(st.tuples(st.integers(-4, 30), st.integers(0, 5), st.integers(1, 20)), max_size=40),
    room=st.integers(0, 200),
)
def test_chosen_blocks_fit_and_come_after_their_parents(rows: list[tuple[int, int, int]], room: int) -> None:
    """``rows``: parent (before it in the list; negative: a root; others: gone), use, size."""
    sizes = {i + 1: size for i, (_, _, size) in enumerate(rows)}
    found = []
    for i, (parent, use, _) in enumerate(rows, 1):
        parent_id = 0 if parent < 0 else parent + 1 if parent + 1 < i else 1000
        found.append(Candidate((0, 0, use), Content(i, parent_id, b"", b"", b"%d" % i)))
    chosen = [c.content_id for c in choose(found, room, lambda c: sizes[c.content_id])]
    assert len(set(chosen)) == len(chosen) and sum(sizes[c] for c in chosen) <= room
    parents = {c.content.content_id: c.content.parent_id for c in found}
    for n, c in enumerate(chosen):
        assert parents[c] == 0 or parents[c] in chosen[:n]
    if room >= sum(sizes.values()):
        whole = {0}
        for c in sorted(parents):
            if parents[c] in whole:
                whole.add(c)
        assert set(chosen) == whole - {0}


def test_a_block_is_a_candidate_only_after_its_first_user_has_left() -> None:
    manager = BlockManager(8, 4)
    tokens = array("i", range(8))
    table = BlockTable()
    assert manager.allocate(table, 8)
    manager.store_full(table, tokens, 8)
    manager.step_over()
    assert not list(chain.from_iterable(candidates(manager)))
    manager.free(table)
    heat = sorted((c.heat for c in chain.from_iterable(candidates(manager))), reverse=True)
    assert len(heat) == 2 and heat[0] > heat[1]


def test_adopted_twins_and_orphans_leave_the_pool_whole() -> None:
    manager = BlockManager(8, 4)
    adoption = Adoption(manager)
    part = [bytes([i]) * 16 for i in range(4)]
    saved = [
        Saved(0, -1, part[0], b"e"),
        Saved(1, -1, part[0], b"e"),
        Saved(2, 0, part[1], b""),
        Saved(3, 1, part[2], b""),
        Saved(4, 9, part[3], b""),
    ]
    adoption.settle(saved, adoption.reserve(5))
    adoption.close()
    manager.check_integrity([])
    assert manager.pool.num_cached == 3 and manager.pool.num_free == 5
    for last in (part[1], part[2]):
        tokens = array("i", part[0] + last)
        assert len(manager.match(BlockTable(b"e"), tokens).blocks) == 2
        assert not manager.match(BlockTable(b"f"), tokens).blocks


def test_only_what_surely_is_there_is_read() -> None:
    manager = BlockManager(2, 4)
    table = BlockTable()
    assert manager.allocate(table, 8)
    manager.store_full(table, array("i", range(8)), 8)
    contents = [b.content for b in table.blocks if b.content]
    ids = {c.content_id: (0, b.id) for c, b in zip(contents, table.blocks, strict=True)}
    manager.free(table)  # preempted by the very plan that was to fill it
    assert places(manager, contents) == {}
    manager.step_over()
    assert places(manager, contents) == ids
    forged = [replace(c, content_id=c.content_id + 100) for c in contents]  # a colliding digest
    assert places(manager, forged) == {}
    other = BlockTable()
    assert manager.allocate(other, 4)  # evicts the last one
    assert places(manager, contents) == {contents[0].content_id: ids[contents[0].content_id]}


def test_the_flag_is_refused_with_a_reason(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--no-prefix-caching"):
        ServeConfig.of(disk_cache_dir=tmp_path, prefix_caching=False)
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(ConfigError, match=r"^--disk-cache-dir .*/x cannot be made: Not a directory$"):
        build(ServeConfig.of(executor="simulated", disk_cache_dir=tmp_path / "file" / "x"))
    assert ServeConfig.of(disk_cache_dir=tmp_path).disk_cache_size == 2**30
