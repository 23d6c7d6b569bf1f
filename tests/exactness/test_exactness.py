"""Greedy output equals transformers', token for token, in every arrangement; log-probabilities within 1e-3."""

from __future__ import annotations

from typing import Literal

import pytest
from exact_harness import CHATS, Rig, Setup

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]


def test_there_are_enough_chats() -> None:
    assert len(CHATS) >= 24 and all(len(c["tokens"]) == 64 for c in CHATS)
    assert max(len(c["prompt"]) for c in CHATS) > 1000


async def test_alone() -> None:
    async with Rig(Setup(block_size=16, budget=512)) as rig:
        await rig.alone()


async def test_sixteen_at_once_budget_64_blocks_of_8_then_again_from_the_prefix_cache() -> None:
    async with Rig(Setup(num_blocks=4096, block_size=8, budget=64, max_num_seqs=16)) as rig:
        await rig.at_once()
        for chat, generation in zip(CHATS, await rig.at_once(), strict=True):
            known = len(chat["prompt"]) // 8 * 8
            assert generation.num_cached_tokens == min(known, len(chat["prompt"]) - 1), chat["name"]


async def test_budget_7_blocks_of_32() -> None:
    # 7 tokens a step: every kind of chat, but not the longest of each kind, which would take minutes.
    chats = [c for c in CHATS if len(c["prompt"]) < 400 or c["name"] in ("shared-0", "shared-1")]
    async with Rig(Setup(num_blocks=1024, block_size=32, budget=7, max_num_seqs=16, chats=chats)) as rig:
        await rig.at_once()


async def test_a_pool_so_small_that_preemption_never_ends() -> None:
    chats = [c for c in CHATS if len(c["prompt"]) < 100]
    async with Rig(Setup(num_blocks=19, block_size=8, budget=64, max_num_seqs=16, watermark=0, chats=chats)) as rig:
        await rig.at_once()
        assert rig.engine.scheduler.stats.preemptions > 25


@pytest.mark.parametrize(("preemption", "host_blocks", "steps"), [("swap", 200, 1), ("auto", 12, 2)])
async def test_swapping_changes_nothing(preemption: Literal["swap", "auto"], host_blocks: int, steps: int) -> None:
    chats = [c for c in CHATS if c["name"].startswith(("short", "multi-2", "unicode"))]
    setup = Setup(
        num_blocks=19,
        block_size=8,
        budget=64,
        watermark=0,
        chats=chats,
        preemption=preemption,
        host_blocks=host_blocks,
        steps_in_flight=steps,
    )
    async with Rig(setup) as rig:
        await rig.at_once()
        host = rig.engine.scheduler.manager.host
        assert host is not None and host.blocks_in > 10 and host.blocks_out > 10
        assert rig.engine.scheduler.stats.swaps > 10 or preemption == "auto"
        assert host.pool.num_used == 0


async def test_a_pool_that_holds_one_long_chat() -> None:
    chats = [c for c in CHATS if c["name"] in ("long-1500", "long-700", "shared-0", "shared-1", "long-repeat")]
    async with Rig(Setup(num_blocks=85, block_size=16, budget=128, max_num_seqs=16, chats=chats)) as rig:
        await rig.at_once()


@pytest.mark.parametrize("backend", ["auto", "torch"])
async def test_without_prefix_cache(backend: str) -> None:
    chats = [c for c in CHATS if c["name"].startswith(("short", "multi", "unicode"))]
    async with Rig(Setup(prefix_caching=False, budget=64, chats=chats, backend=backend)) as rig:
        for generation in await rig.at_once():
            assert generation.num_cached_tokens == 0
