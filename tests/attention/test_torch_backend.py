"""The plain-torch backend against the float64 reference."""

from __future__ import annotations

import pytest
import torch
from paged_case import Shape, build, check

from chatsvc.models.attention import torch_backend
from chatsvc.models.attention.torch_backend import TorchBackend


def mixed(size: int) -> list[Shape]:
    """Decode at the borders of a block, prefill with and without a prefix, shared blocks, a fully cached prompt."""
    return [
        Shape(1, 2 * size + 1),
        Shape(1, 1),
        Shape(3, 3),
        Shape(1, max(1, size - 1)),
        Shape(1, size),
        Shape(1, size + 1),
        Shape(size + 2, 3 * size),
        Shape(5, 2 * size + 5, shared=2),
        Shape(1, 2 * size, shared=2, cached=1),
        Shape(1, 2 * size, shared=1),
    ]


@pytest.mark.parametrize("block_size", [1, 4, 8, 16, 32, 64, 128])
def test_block_sizes(block_size: int) -> None:
    check(TorchBackend(), build(mixed(block_size), block_size=block_size, dim=16, group=2))


@pytest.mark.parametrize("dim", [40, 64, 80, 96, 112, 128, 256])
@pytest.mark.parametrize("group", [1, 3, 7, 8])
def test_head_shapes(dim: int, group: int) -> None:
    check(TorchBackend(), build(mixed(8), block_size=8, dim=dim, group=group, kv_heads=1 + dim % 3))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_dtypes(dtype: torch.dtype) -> None:
    check(TorchBackend(), build(mixed(16), dtype=dtype))


@pytest.mark.parametrize("poison", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("shapes", [[Shape(1, 19)], [Shape(7, 19)], [Shape(1, 1), Shape(1, 70)]], ids=str)
def test_slots_of_nobody_never_contribute(poison: float, shapes: list[Shape]) -> None:
    check(TorchBackend(), build(shapes, poison=poison))


@pytest.mark.parametrize("shapes", [[Shape(1, 32)], [Shape(1, 32), Shape(1, 32)], [Shape(16, 16)]], ids=str)
def test_nothing_to_mask(shapes: list[Shape]) -> None:
    check(TorchBackend(), build(shapes))


def test_many_units(monkeypatch: pytest.MonkeyPatch) -> None:
    """Long contexts and chunks are cut into units; small limits make that visible on small steps."""
    monkeypatch.setattr(torch_backend, "MAX_UNIT_TOKENS", 64)
    monkeypatch.setattr(torch_backend, "MAX_QUERIES", 5)
    check(TorchBackend(), build([*mixed(8), Shape(23, 40), Shape(1, 200), Shape(10, 10)], block_size=8, dim=16))


def test_neighbours_nan_stays_with_the_neighbour() -> None:
    case = build([Shape(1, 20), Shape(1, 21), Shape(4, 30)], dim=16)
    backend = TorchBackend()
    clean = backend.forward(
        case.q, case.k, case.v, case.layer, case.cache, backend.prepare(case.layout, case.cache), case.scale
    )
    case.cache.k(case.layer)[case.layout.block_tables[1][0]] = float("nan")
    case.cache.v(case.layer)[case.layout.block_tables[1][0]] = float("nan")
    sick = backend.forward(
        case.q, case.k, case.v, case.layer, case.cache, backend.prepare(case.layout, case.cache), case.scale
    )
    assert sick[1].isnan().all()
    others = [0, 2, 3, 4, 5]
    assert torch.equal(sick[others], clean[others])
