"""Weights that move to huge pages while they are read."""

from __future__ import annotations

import pytest
import torch

from kernels.cpu import build
from kernels.cpu.library import Library, Model, Sequences, Shape

pytestmark = pytest.mark.skipif(build.compiler() is None, reason="no C++ compiler")
SHAPE = Shape(vocab=40_000, hidden=512, layers=1, heads=8, kv_heads=8, dim=64, intermediate=512, eps=1e-5)


def large_model() -> Model:
    """More than one chunk of memory, and one that is larger than chunks are: 90 MB."""
    model = Model(Library(build.ensure()), SHAPE, 2)
    random = torch.Generator().manual_seed(3)
    for kind, n in (("qkv", 1536), ("o", 512), ("gate_up", 1024), ("down", 512)):
        model.linear(0, kind, torch.randn(n, 512, generator=random) / 16, None)
    model.linear(0, "head", torch.randn(SHAPE.vocab, 512, generator=random), None)
    model.norms(0, torch.ones(512), torch.ones(512), None, None)
    model.finish(torch.ones(512), tied=True)
    return model


def logits(model: Model) -> torch.Tensor:
    pool = torch.zeros(2, 1, 2, 16, 8, 64)
    angles = torch.cat([torch.ones(4, 32), torch.zeros(4, 32)], dim=1)
    return model.forward(
        Sequences([4], [4], [[1]], [16, 17, 18, 19]), [5, 9, 39_999, 0], [0, 1, 2, 3], [0, 3], angles, pool
    )


def test_no_bit_changes_while_weights_move() -> None:
    model = large_model()
    want = logits(model)
    model.settle()
    for _ in range(20):
        assert torch.equal(logits(model), want)
    model.settle(wait=True)
    assert torch.equal(logits(model), want)


def test_a_model_goes_while_its_weights_move() -> None:
    for _ in range(3):
        model = large_model()
        model.settle()
        del model
