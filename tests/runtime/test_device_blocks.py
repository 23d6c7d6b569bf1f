"""Moves of blocks with kernels are those of plain torch: out, copies, in, each list read before it is written."""

from __future__ import annotations

import os

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("triton")

from chatsvc.models.attention.base import KVCache
from chatsvc.runtime.device_blocks import DeviceMoves
from chatsvc.runtime.runner import PlainMoves
from chatsvc.scheduler.plan import SchedulerOutput

DEVICE = "cuda" if torch.cuda.is_available() and os.environ.get("TRITON_INTERPRET") != "1" else "cpu"
Pairs = tuple[tuple[int, int], ...]


def tiers() -> tuple[KVCache, KVCache]:
    """(device, host): every block has bytes of its own."""
    shape = (2, 2, 4, 1, 8)
    data = torch.arange(6 * 128, dtype=torch.float32).view(6, *shape)
    return KVCache(data.to(DEVICE, torch.bfloat16)), KVCache((1000 - data[:5]).to(torch.bfloat16))


def pairs(sources: int, targets: int) -> st.SearchStrategy[Pairs]:
    """Blocks are written once at most."""
    pair = st.tuples(st.integers(0, sources - 1), st.integers(0, targets - 1))
    return st.lists(pair, max_size=4, unique_by=lambda p: p[1]).map(tuple)


@given(pairs(6, 5), pairs(6, 6), pairs(5, 6))
@settings(max_examples=25, deadline=None)
def test_they_do_what_plain_torch_does(out: Pairs, copies: Pairs, into: Pairs) -> None:
    plan = SchedulerOutput(0, (), copies=copies, swap_out=out, swap_in=into)
    found = []
    for kind in (PlainMoves, DeviceMoves):
        cache, host = tiers()
        moves = kind(cache, host)
        moves.begin(plan)
        moves.end()
        found.append((cache.data.cpu(), host.data))
    for plain, ours in zip(*found, strict=True):
        assert torch.equal(plain, ours)


def test_without_a_host_tier() -> None:
    cache, _ = tiers()
    before = cache.data.clone()
    moves = DeviceMoves(cache, None)
    moves.begin(SchedulerOutput(0, (), copies=((1, 2),)))
    moves.end()
    assert torch.equal(cache.data[2], before[1])
