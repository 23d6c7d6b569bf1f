"""Split keys, shared prefixes, fp8 and long tables, each against the float64 reference, in the interpreter or on a GPU.

The plain paths have the grid of tests/attention/test_backends.py.
"""

from __future__ import annotations

import os
import random
from dataclasses import dataclass

import pytest
import torch

from kernels import reference

pytest.importorskip("triton")

from kernels.triton.paged_attention import DevicePlan, paged_attention, wide_rows
from kernels.triton.plan import plan_attention
from kernels.triton.reshape_and_cache import reshape_and_cache
from kernels.triton.upload import Upload

DEVICE = "cuda" if torch.cuda.is_available() and os.environ.get("TRITON_INTERPRET") != "1" else "cpu"
NAN = float("nan")


@dataclass
class Pool:
    """K and V of one layer, as strided views of a pool of two; slots that nobody owns hold NaN."""

    data: torch.Tensor  # [blocks, 2 layers, 2, size, kv_heads, dim]
    tables: list[list[int]]
    lens: list[int]

    @property
    def k(self) -> torch.Tensor:
        return self.data[:, 1, 0]

    @property
    def v(self) -> torch.Tensor:
        return self.data[:, 1, 1]


def pool(
    lens: list[int], size: int, kv_heads: int, dim: int, *, shared: int = 0, dtype: torch.dtype = torch.float32
) -> Pool:
    """Shuffled blocks; the first ``shared`` blocks of every sequence are those of the first."""
    gen = torch.Generator().manual_seed(7)
    needed = [-(-n // size) for n in lens]
    ids = list(range(1, sum(needed) + 2))
    random.Random(7).shuffle(ids)
    tables: list[list[int]] = []
    for count in needed:
        prefix = tables[0][: min(shared, count)] if tables else []
        tables.append(prefix + [ids.pop() for _ in range(count - len(prefix))])
    data = torch.full((sum(needed) + 2, 2, 2, size, kv_heads, dim), NAN)
    for table, n in zip(tables, lens, strict=True):
        for at, block in enumerate(table):
            used = min(size, n - at * size)
            values = torch.randn(2, used, kv_heads, dim, generator=gen)
            fresh = data[block, 1, :, :used].isnan()
            data[block, 1, :, :used] = torch.where(fresh, values, data[block, 1, :, :used])
    return Pool(data.to(DEVICE, dtype), tables, lens)


def attend(
    q: torch.Tensor, p: Pool, queries: list[int], *, programs: int, cascade: bool = True, merges: bool = True
) -> torch.Tensor:
    """The kernels' output; the buffers that they fill are poisoned."""
    heads, kv_heads = q.shape[1], p.data.shape[4]
    plan = plan_attention(
        queries,
        p.lens,
        p.tables,
        p.data.shape[3],
        group=heads // kv_heads,
        kv_heads=kv_heads,
        programs=programs,
        wide=wide_rows(q.shape[2], q.dtype),
        cascade=cascade,
    )
    assert bool(plan.num_partials) == merges
    upload = Upload()
    places = DevicePlan.add(plan, upload)
    out = torch.full_like(q, NAN)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "empty", lambda *size, **options: torch.full(size, NAN, **options))
        paged_attention(q, p.k, p.v, DevicePlan.take(plan, places, upload.send(q.device)), 0.2, out)
    return out


def check(
    lens: list[int],
    queries: list[int],
    *,
    size: int = 16,
    kv_heads: int = 2,
    group: int = 3,
    dim: int = 64,
    shared: int = 0,
    dtype: torch.dtype = torch.float32,
    programs: int = 8,
    cascade: bool = True,
    merges: bool = True,
) -> None:
    p = pool(lens, size, kv_heads, dim, shared=shared, dtype=dtype)
    q = torch.randn(sum(queries), kv_heads * group, dim, generator=torch.Generator().manual_seed(3)).to(DEVICE, dtype)
    got = attend(q, p, queries, programs=programs, cascade=cascade, merges=merges)
    want = reference.paged_attention(
        q.cpu().double(), p.k.cpu().double(), p.v.cpu().double(), p.tables, queries, lens, 0.2
    )
    atol = {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}[dtype]
    torch.testing.assert_close(got.cpu().double(), want, rtol=0, atol=atol)


@pytest.mark.parametrize(
    ("lens", "queries", "size", "dim", "group", "dtype"),
    [
        ([700], [1], 16, 64, 3, torch.float32),
        ([513, 1, 512, 300], [1, 1, 1, 1], 8, 80, 1, torch.float16),
        ([640], [3], 128, 96, 4, torch.bfloat16),
        ([530, 257, 20], [30, 1, 20], 32, 64, 2, torch.float16),
        ([515], [5], 64, 256, 1, torch.float16),
    ],
    ids=str,
)
def test_split_keys(lens: list[int], queries: list[int], size: int, dim: int, group: int, dtype: torch.dtype) -> None:
    """A mixed batch whose long sequences are cut."""
    check(lens, queries, size=size, kv_heads=1, dim=dim, group=group, dtype=dtype, programs=10**4)


@pytest.mark.parametrize(
    ("lens", "shared", "size", "dim", "group", "dtype"),
    [
        ([200, 145, 131, 260], 8, 16, 64, 3, torch.float32),
        ([128, 128, 129], 16, 8, 128, 8, torch.bfloat16),
        ([300] * 9, 2, 128, 80, 4, torch.float16),
    ],
    ids=str,
)
def test_shared_prefix(lens: list[int], shared: int, size: int, dim: int, group: int, dtype: torch.dtype) -> None:
    """Read once for all; in the second, two sequences have nothing of their own."""
    options = {"size": size, "kv_heads": 1, "dim": dim, "group": group, "shared": shared}
    check(lens, [1] * len(lens), programs=1, dtype=dtype, **options)  # type: ignore[arg-type]


def test_shared_prefix_beside_a_prefill_and_cut_as_well() -> None:
    check([700, 690, 40, 820], [1, 1, 40, 1], shared=40, kv_heads=1, programs=10**4)


def test_shared_prefix_is_read_from_one_table_only() -> None:
    """All sequences but the first have other blocks there: the shared part comes from the leader's table."""
    p = pool([200] * 3, 16, 1, 64, shared=12)
    q = torch.randn(3, 2, 64, generator=torch.Generator().manual_seed(1)).to(DEVICE)
    one = attend(q, p, [1] * 3, programs=1)
    plain = attend(q, p, [1] * 3, programs=1, cascade=False, merges=False)
    torch.testing.assert_close(one, plain, rtol=0, atol=2e-6)


@pytest.mark.parametrize("programs", [1, 10**4])
def test_a_thousand_blocks(programs: int) -> None:
    check([8003], [1], size=8, kv_heads=1, group=2, programs=programs, merges=programs > 1, dtype=torch.float16)


@pytest.mark.parametrize("cascade", [False, True])
def test_fp8_cache_with_scales(cascade: bool) -> None:
    """Written and read as bytes; the truth decodes them with torch's own float8."""
    lens, queries, kv_heads, dim = [150, 140, 7], [1, 1, 7], 2, 80
    p = pool(lens, 16, kv_heads, dim, shared=8, dtype=torch.bfloat16)
    scales = torch.tensor([[0.5, 0.02], [0.1, 3.0]], device=DEVICE)
    data = torch.full(p.data.shape, 0x7F, dtype=torch.uint8, device=DEVICE)  # NaN
    stored = Pool(data, p.tables, lens)
    slots = sorted({t[at // 16] * 16 + at % 16 for t, n in zip(p.tables, lens, strict=True) for at in range(n)})
    k, v = (part.flatten(0, 1)[slots].contiguous() for part in (p.k, p.v))
    reshape_and_cache(k, v, stored.k, stored.v, torch.tensor(slots, dtype=torch.int32, device=DEVICE), scales)
    truth = data.view(torch.float8_e4m3fn).cpu().double() * scales.cpu().double()[:, None, :, None]
    kept = truth[:, 1].transpose(1, 2).flatten(0, 1)[slots]
    torch.testing.assert_close(kept[:, 0], k.cpu().double(), rtol=0.07, atol=0.002)
    torch.testing.assert_close(kept[:, 1], v.cpu().double(), rtol=0.07, atol=0.02)

    q = torch.randn(9, 6, dim, generator=torch.Generator().manual_seed(5)).to(DEVICE, torch.bfloat16)
    plan = plan_attention(queries, lens, p.tables, 16, group=3, kv_heads=2, programs=1, wide=32, cascade=cascade)
    upload = Upload()
    places = DevicePlan.add(plan, upload)
    out = torch.full_like(q, NAN)
    paged_attention(q, stored.k, stored.v, DevicePlan.take(plan, places, upload.send(q.device)), 0.2, out, scales)
    want = reference.paged_attention(q.cpu().double(), truth[:, 1, 0], truth[:, 1, 1], p.tables, queries, lens, 0.2)
    torch.testing.assert_close(out.cpu().double(), want, rtol=0.01, atol=0.03)


def test_what_the_kernels_cannot_take_is_refused() -> None:
    p = pool([5], 8, 2, 16)
    q = torch.zeros(1, 3, 16, device=DEVICE)
    empty = DevicePlan(*(torch.zeros(0, dtype=torch.int32, device=DEVICE) for _ in range(4)), 0, 16)
    with pytest.raises(ValueError, match="3 query heads cannot share 2 KV heads"):
        paged_attention(q, p.k, p.v, empty, 1.0, torch.empty_like(q))
    with pytest.raises(ValueError, match="contiguous"):
        paged_attention(q, p.k.transpose(-1, -2), p.v, empty, 1.0, torch.empty_like(q))
    with pytest.raises(ValueError, match="fp8_scales"):
        paged_attention(q[:, :2], p.k.to(torch.uint8), p.v.to(torch.uint8), empty, 1.0, torch.empty_like(q[:, :2]))
