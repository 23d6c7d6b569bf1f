"""The plain-torch backend against the float64 reference."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from paged_case import Shape, build, check, mixed

from chatsvc.models.attention import torch_backend
from chatsvc.models.attention.torch_backend import TorchBackend


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


@st.composite
def shapes(draw: st.DrawFn, block_size: int) -> list[Shape]:
    found: list[Shape] = []
    for _ in range(draw(st.integers(1, 6))):
        length = draw(st.integers(1, 4 * block_size))
        query = draw(st.one_of(st.just(1), st.integers(1, length)))
        # Blocks below the first query token may be shared with the first sequence, as far as that one fills them.
        most = min(length - query, found[0].length if found else 0) // block_size
        found.append(Shape(query, length, draw(st.integers(0, most)), draw(st.sampled_from([0, 0, query]))))
    return found


@given(data=st.data(), seed=st.integers(0, 2**16), block_size=st.sampled_from([1, 3, 8, 16]))
@settings(max_examples=40, deadline=None)
def test_random_batches(data: st.DataObject, seed: int, block_size: int) -> None:
    case = build(data.draw(shapes(block_size)), block_size=block_size, kv_heads=2, group=2, dim=8, seed=seed)
    check(TorchBackend(), case)
