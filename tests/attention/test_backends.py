"""One grid for every backend: each pair of block size, head dim, GQA ratio and dtype that matters occurs in it."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from paged_case import Case, Shape, build, check, mixed

from chatsvc.models.attention.base import AttentionBackend, KVCache, StepLayout
from chatsvc.models.attention.select import make_backend
from kernels.cpu.build import compiler

# With TRITON_INTERPRET=0 on a machine with a GPU the same tests run the compiled kernels.
ON_GPU = torch.cuda.is_available() and os.environ.get("TRITON_INTERPRET") != "1"

F32, F16, BF16 = torch.float32, torch.float16, torch.bfloat16
GRID = [
    (1, 96, 1, F16),
    (4, 64, 7, F32),
    (8, 40, 3, F32),
    (8, 256, 1, F32),
    (8, 64, 8, F16),
    (16, 64, 3, F32),
    (16, 80, 1, F32),
    (16, 128, 8, F32),
    (16, 256, 7, F16),
    (32, 40, 8, BF16),
    (32, 96, 7, F32),
    (32, 112, 3, F16),
    (64, 128, 7, BF16),
    (64, 80, 3, F32),
    (64, 64, 1, F16),
    (128, 64, 7, BF16),
    (128, 256, 3, BF16),
    (128, 112, 1, F16),
]


@pytest.fixture(params=["torch", "triton", "cpu"])
def backend(request: pytest.FixtureRequest) -> AttentionBackend:
    if request.param == "cpu":
        if compiler() is None:
            pytest.skip("no C++ compiler")
        return make_backend("cpu", "cpu", threads=2)
    if request.param == "triton":
        pytest.importorskip("triton")
    return make_backend(request.param, "cuda" if ON_GPU else "cpu")


@pytest.mark.parametrize(("block_size", "dim", "group", "dtype"), GRID, ids=str)
def test_mixed_batch(backend: AttentionBackend, block_size: int, dim: int, group: int, dtype: torch.dtype) -> None:
    check(backend, _build(mixed(block_size), block_size=block_size, dim=dim, group=group, dtype=dtype, kv_heads=2))


@pytest.mark.parametrize("poison", [float("nan"), float("inf")])
@pytest.mark.parametrize(
    "shapes",
    [
        [Shape(1, 19)],
        [Shape(1, 32), Shape(1, 16)],
        [Shape(1, 1), Shape(1, 70), Shape(1, 17), Shape(1, 33, shared=1)],
        [Shape(1, 32, cached=1)],
        [Shape(1, 150), Shape(1, 170), Shape(1, 161)],
    ],
    ids=str,
)
def test_decode_only(backend: AttentionBackend, shapes: list[Shape], poison: float) -> None:
    check(backend, _build(shapes, poison=poison))


@pytest.mark.parametrize(
    "shapes",
    [[Shape(16, 16)], [Shape(19, 19)], [Shape(70, 70), Shape(33, 50, shared=1)], [Shape(2, 40), Shape(40, 41)]],
    ids=str,
)
def test_prefill_only(backend: AttentionBackend, shapes: list[Shape]) -> None:
    check(backend, _build(shapes, kv_heads=1))


def test_chunks_equal_one_piece(backend: AttentionBackend) -> None:
    """The same prompt in chunks that end inside blocks, each chunk against the cache the one before left."""
    whole = _build([Shape(50, 50)], dim=16)
    want = backend.forward(
        whole.q, whole.k, whole.v, whole.layer, whole.cache, backend.prepare(whole.layout, whole.cache), whole.scale
    )
    pieces = _build([Shape(50, 50)], dim=16)
    got = []
    for start, end in [(0, 7), (7, 8), (8, 33), (33, 50)]:
        layout = StepLayout([end - start], [end], pieces.layout.block_tables, pieces.layout.slot_mapping[start:end])
        meta = backend.prepare(layout, pieces.cache)
        q, k, v = (t[start:end] for t in (pieces.q, pieces.k, pieces.v))
        got.append(backend.forward(q, k, v, pieces.layer, pieces.cache, meta, pieces.scale))
    torch.testing.assert_close(torch.cat(got), want)


def test_many_kv_heads_and_strided_inputs(backend: AttentionBackend) -> None:
    """q, k and v are often views of one projection."""
    case = _build([Shape(1, 9), Shape(6, 20)], kv_heads=5, group=2, dim=16)
    tokens = case.q.shape[0]
    joined = torch.cat([case.q, case.k, case.v], dim=1).view(tokens, -1)
    q, k, v = (part.view(tokens, -1, 16) for part in joined.split([160, 80, 80], dim=1))
    assert not q.is_contiguous()
    check(backend, dataclasses.replace(case, q=q, k=k, v=v))


def test_cache_narrower_than_the_model(backend: AttentionBackend) -> None:
    """float32 queries over a bfloat16 pool (K and V are representable in it, so the truth needs no rounding)."""
    case = _build([Shape(1, 40), Shape(4, 20)], dim=16, dtype=BF16)
    check(backend, dataclasses.replace(case, q=case.q.float(), k=case.k.float(), v=case.v.float()))


def test_neighbours_nan_stays_with_the_neighbour(backend: AttentionBackend) -> None:
    case = _build([Shape(1, 20), Shape(1, 21), Shape(4, 30)], dim=16)

    def run() -> torch.Tensor:
        meta = backend.prepare(case.layout, case.cache)
        return backend.forward(case.q, case.k, case.v, case.layer, case.cache, meta, case.scale)

    clean = run()
    case.cache.k(case.layer)[case.layout.block_tables[1][0]] = float("nan")
    case.cache.v(case.layer)[case.layout.block_tables[1][0]] = float("nan")
    sick = run()
    assert sick[1].isnan().all()
    others = [0, 2, 3, 4, 5]
    assert torch.equal(sick[others], clean[others])


def test_empty_step(backend: AttentionBackend) -> None:
    case = _build([Shape(1, 5)])
    meta = backend.prepare(StepLayout([], [], [], []), case.cache)
    got = backend.forward(case.q[:0], case.k[:0], case.v[:0], 0, case.cache, meta, case.scale)
    assert got.shape == (0, *case.q.shape[1:])


@pytest.mark.parametrize("query", [1, 3])
def test_offsets_beyond_32_bits(backend: AttentionBackend, tmp_path: Path, query: int) -> None:
    """The highest blocks of a pool of more than 2**31 elements. It is a sparse file: only touched pages exist."""
    layers, size, kv_heads, dim = 4, 16, 2, 16
    per_block = layers * 2 * size * kv_heads * dim
    blocks = 2**31 // per_block + 100
    if ON_GPU:
        pool = torch.empty(blocks * per_block, dtype=BF16, device="cuda")
    else:
        pool = torch.from_file(str(tmp_path / "pool"), shared=True, size=blocks * per_block, dtype=BF16)
    big = KVCache(pool.view(blocks, layers, 2, size, kv_heads, dim))
    case = _build(
        [Shape(query, 37), Shape(1, 20)], dim=dim, kv_heads=kv_heads, dtype=BF16, layers=layers, block_size=size
    )
    shift = blocks - case.cache.data.shape[0]
    big.data[shift:] = case.cache.data
    layout = StepLayout(
        case.layout.query_lens,
        case.layout.seq_lens,
        [[block + shift for block in table] for table in case.layout.block_tables],
        [slot + shift * size for slot in case.layout.slot_mapping],
    )
    assert max(map(max, layout.block_tables)) * per_block > 2**31

    def run(cache: KVCache, layout: StepLayout) -> torch.Tensor:
        meta = backend.prepare(layout, cache)
        return backend.forward(case.q, case.k, case.v, case.layer, cache, meta, case.scale)

    assert torch.equal(run(big, layout), run(case.cache, case.layout))
    assert torch.equal(big.data[shift:].isnan(), case.cache.data.isnan())


def _build(shapes: list[Shape], **options: Any) -> Case:
    return build(shapes, device="cuda" if ON_GPU else "cpu", **options)
