"""Pools of 16 bits: what is written is rounded as torch rounds it, what is read is exactly that."""

from __future__ import annotations

import pytest
import torch
from int8_rules import library as other_library

from kernels import reference
from kernels.cpu import build
from kernels.cpu.library import Attention, Library, Sequences

pytestmark = pytest.mark.skipif(build.compiler() is None, reason="no C++ compiler")
KEPT = (torch.bfloat16, torch.float16)


def attended(library: Library, kept: torch.dtype, dim: int, group: int, lengths: list[int], block: int) -> None:
    """Attention in one step, over a pool of NaN, against float64 on the rounded keys and values."""
    generator = torch.Generator().manual_seed(dim * block)
    tokens, kv_heads = sum(lengths), 2
    blocks = [-(-n // block) for n in lengths]
    order = (torch.randperm(sum(blocks), generator=generator) + 1).tolist()
    tables = [[order.pop() for _ in range(n)] for n in blocks]
    slots = [table[p // block] * block + p % block for table, n in zip(tables, lengths, strict=True) for p in range(n)]
    pool = torch.full((sum(blocks) + 1, 3, 2, block, kv_heads, dim), float("nan"), dtype=kept)
    q = torch.randn(tokens, kv_heads * group, dim, generator=generator)
    k, v = (torch.randn(tokens, kv_heads, dim, generator=generator) for _ in range(2))
    out = torch.full_like(q, float("nan"))
    step = Sequences(lengths, lengths, tables, slots)
    Attention(library, 2)(step.pack(), len(lengths), q, k, v, pool, 1, dim**-0.5, out)
    for value, given in enumerate((k, v)):
        written = pool[:, 1, value].reshape(-1, kv_heads, dim)[slots]
        assert torch.equal(written, given.to(kept))
    assert pool[:, ::2].isnan().all(), "another layer was written"
    exact = reference.paged_attention(
        q.double(), pool[:, 1, 0].double(), pool[:, 1, 1].double(), tables, lengths, lengths, dim**-0.5
    )
    # In bfloat16 q and the weights are rounded too: see ``test_cpu_attention.py``.
    short = library.bf16_simd and kept == torch.bfloat16 and dim % 32 == 0
    torch.testing.assert_close(out.double(), exact, rtol=0, atol=0.02 if short else 2e-6)


@pytest.mark.parametrize("kept", KEPT, ids=str)
@pytest.mark.parametrize(
    ("dim", "group", "block"), [(64, 3, 16), (24, 1, 8), (40, 7, 64), (80, 8, 16), (128, 4, 32), (8, 2, 1)]
)
def test_attention_reads_what_is_kept(kept: torch.dtype, dim: int, group: int, block: int) -> None:
    attended(Library(build.ensure()), kept, dim, group, [1, 63, 64, 65, 200], block)


SPECIAL = [
    *(0.0, -0.0, 1.0, -1.0, float("inf"), float("-inf"), float("nan")),
    *(65504.0, 65519.9, 65520.0, 1e5, -7e4, 3.4e38),  # the largest half, and beyond
    *(2.0**-14, 2.0**-15, 2.0**-24, 2.0**-25, 1.5 * 2.0**-25, 2.0**-26, 1e-40, 2.0**-149),  # the small ones
    *(1 + 2.0**-9, 1 + 3 * 2.0**-9, 1 + 2.0**-8, 1 + 3 * 2.0**-8, 1 + 2.0**-11, 1 + 3 * 2.0**-11, 1 + 2.0**-11 + 2e-7),
]


def written(library: Library, kept: torch.dtype, numbers: torch.Tensor) -> torch.Tensor:
    """What a pool holds of [T, 1, D]."""
    tokens, _, dim = numbers.shape
    pool = torch.zeros(2, 1, 2, tokens, 1, dim, dtype=kept)
    step = Sequences([tokens], [tokens], [[1]], [tokens + i for i in range(tokens)])
    out = torch.empty(tokens, 1, dim)
    Attention(library, 1)(step.pack(), 1, torch.zeros(tokens, 1, dim), numbers, numbers, pool, 0, 1.0, out)
    assert torch.equal(pool[1, 0, 0].view(torch.int16), pool[1, 0, 1].view(torch.int16))
    return pool[1, 0, 0]


def assert_rounded(library: Library, kept: torch.dtype) -> None:
    """Special numbers in a vector's lanes and in what is left over; then numbers of every exponent."""
    generator = torch.Generator().manual_seed(1)
    rows = [torch.tensor(SPECIAL).roll(shift) for shift in range(len(SPECIAL))]
    bits = torch.randint(-(2**31), 2**31 - 1, (64, len(SPECIAL)), generator=generator, dtype=torch.int64)
    numbers = torch.cat([torch.stack(rows), bits.to(torch.int32).view(torch.float32)])[:, None]
    got, want = written(library, kept, numbers), numbers.to(kept)
    nan = want.isnan()
    assert torch.equal(got.isnan(), nan)
    assert torch.equal(got.view(torch.int16)[~nan], want.view(torch.int16)[~nan])


@pytest.mark.parametrize("kept", KEPT, ids=str)
def test_rounding_is_torchs(kept: torch.dtype) -> None:
    assert_rounded(Library(build.ensure()), kept)


@pytest.mark.slow
@pytest.mark.parametrize("target", ["x86-64", "haswell", "cascadelake"])
def test_other_instruction_sets(target: str) -> None:
    library = other_library(target)
    for kept in KEPT:
        assert_rounded(library, kept)
        for dim, group, block in ((64, 3, 16), (40, 7, 8), (24, 1, 32)):
            attended(library, kept, dim, group, [1, 65, 130], block)
