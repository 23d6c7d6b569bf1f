"""Random steps over a poisoned pool, and what the reference says about them."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch

from chatsvc.models.attention.base import AttentionBackend, KVCache, StepLayout
from kernels import reference


@dataclass(frozen=True)
class Shape:
    """One sequence of a step: ``query`` of its ``length`` tokens are computed; the first ``shared`` blocks are those
    of the step's first sequence; the last ``cached`` of the query tokens are in the cache already (slot -1)."""

    query: int
    length: int
    shared: int = 0
    cached: int = 0


def mixed(size: int) -> list[Shape]:
    """Decode at the borders of a block, prefill with and without a prefix, shared blocks, fully cached prompts."""
    return [
        Shape(1, 2 * size + 1),
        Shape(1, 1),
        Shape(3, 3),
        Shape(1, max(1, size - 1)),
        Shape(1, size),
        Shape(1, size + 1),
        Shape(min(size, 32) + 2, 3 * size),
        Shape(5, 2 * size + 5, shared=2),
        Shape(1, 2 * size, shared=2, cached=1),
        Shape(1, 2 * size, shared=1),
    ]


@dataclass(frozen=True)
class Case:
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    cache: KVCache
    layout: StepLayout
    layer: int
    scale: float


def build(
    shapes: list[Shape],
    *,
    block_size: int = 16,
    kv_heads: int = 2,
    group: int = 3,
    dim: int = 64,
    dtype: torch.dtype = torch.float32,
    layers: int = 2,
    seed: int = 0,
    poison: float = float("nan"),
    device: str = "cpu",
) -> Case:
    """Every slot that no sequence owns holds ``poison``, in all layers; ids are shuffled, the highest is in use."""
    gen = torch.Generator().manual_seed(seed)
    needed = [-(-s.length // block_size) for s in shapes]
    total = sum(needed) + 3
    ids = (torch.randperm(total - 1, generator=gen) + 1).tolist()
    ids.insert(0, ids.pop(ids.index(total - 1)))
    ids.insert(0, total)  # the highest id of the pool
    tables: list[list[int]] = []
    for shape, count in zip(shapes, needed, strict=True):
        prefix = tables[0][: shape.shared] if tables else []
        tables.append(prefix + [ids.pop(0) for _ in range(count - len(prefix))])

    data = torch.full((total + 1, layers, 2, block_size, kv_heads, dim), poison, dtype=torch.float64)
    layer = layers - 1
    slot_mapping: list[int] = []
    owned: set[int] = set()
    for shape, table in zip(shapes, tables, strict=True):
        start = shape.length - shape.query
        for position in range(shape.length):
            block, offset = table[position // block_size], position % block_size
            is_cached = position < start or position >= shape.length - shape.cached
            if is_cached and block * block_size + offset not in owned:
                owned.add(block * block_size + offset)
                data[block, layer, :, offset] = torch.randn(2, kv_heads, dim, generator=gen, dtype=torch.float64)
            if position >= start:
                slot_mapping.append(-1 if is_cached else block * block_size + offset)
    tokens = sum(s.query for s in shapes)
    k, v = torch.randn(2, tokens, kv_heads, dim, generator=gen, dtype=torch.float64)
    q = torch.randn(tokens, kv_heads * group, dim, generator=gen, dtype=torch.float64)
    return Case(
        q=q.to(device, dtype),
        k=k.to(device, dtype),
        v=v.to(device, dtype),
        cache=KVCache(data.to(device, dtype)),
        layout=StepLayout([s.query for s in shapes], [s.length for s in shapes], tables, slot_mapping),
        layer=layer,
        scale=dim**-0.5,
    )


def _poisoned_empty_like(like: torch.Tensor, **options: object) -> torch.Tensor:
    return torch.full_like(like, float("nan"), **options)


def check(backend: AttentionBackend, case: Case) -> None:
    """``backend`` equals the float64 reference, writes exactly the named slots, and touches no other layer.

    Its output buffer is full of NaN before, so a row that it forgets is seen.
    """
    before = case.cache.data.clone()
    want_data = before.cpu().double()
    want_cache = KVCache(want_data)
    reference.reshape_and_cache(
        case.k.cpu().double(),
        case.v.cpu().double(),
        want_cache.k(case.layer),
        want_cache.v(case.layer),
        case.layout.slot_mapping,
    )
    want = reference.paged_attention(
        case.q.cpu().double(),
        want_cache.k(case.layer),
        want_cache.v(case.layer),
        case.layout.block_tables,
        case.layout.query_lens,
        case.layout.seq_lens,
        case.scale,
    )

    meta = backend.prepare(case.layout, case.cache)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "empty_like", _poisoned_empty_like)
        got = backend.forward(case.q, case.k, case.v, case.layer, case.cache, meta, case.scale)

    assert got.shape == case.q.shape
    assert got.dtype == case.q.dtype
    assert got.is_contiguous()
    torch.testing.assert_close(case.cache.data.cpu().double(), want_data, rtol=0, atol=0, equal_nan=True)
    atol = {torch.float64: 1e-9, torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}[case.q.dtype]
    torch.testing.assert_close(got.cpu().double(), want, rtol=0, atol=atol)
