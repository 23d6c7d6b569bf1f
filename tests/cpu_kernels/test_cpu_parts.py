"""Products of float32 inputs, in three bfloat16 parts, with bfloat16 or weights of 4 or 8 bits by matrix tiles."""

from __future__ import annotations

import gguf
import numpy as np
import pytest
import torch
from int8_rules import QUANTS, library_with_tiles, weights_in

from kernels.cpu import build
from kernels.cpu.library import Array, Library, Rows

pytestmark = pytest.mark.skipif(build.compiler() is None, reason="no C++ compiler")
FORMATS = ("bf16", *QUANTS)
SIZES = [(7, 32), (70, 96), (33, 160), (203, 576), (576, 1536)]


@pytest.fixture(scope="module")
def library() -> Library:
    return library_with_tiles()


def randn(*size: int, seed: int = 1) -> torch.Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize(("n", "k"), SIZES)
@pytest.mark.parametrize("fmt", FORMATS)
def test_one_row_has_the_same_bits_among_any_others(library: Library, fmt: str, n: int, k: int) -> None:
    rows, _ = weights_in(fmt, n, k)
    x, bias = randn(130, k), randn(n)
    whole = library.linear(x, rows, bias, 1)
    # One tile of all parts (5 rows), of one part (16), two tiles, several of them, and what is left over.
    for count in (*range(1, 40), 48, 64, 97, 129):
        for threads in (1, 2, 3):
            assert torch.equal(library.linear(x[:count], rows, bias, threads), whole[:count]), (count, threads)
    for first in (1, 5, 16, 31, 33):
        assert torch.equal(library.linear(x[first : first + 20].contiguous(), rows, bias, 2), whole[first : first + 20])


@pytest.mark.parametrize(("n", "k"), SIZES)
@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("size", [1.0, 1e-20, 1e15], ids=["ordinary", "small", "large"])
def test_the_error_is_no_larger_than_that_of_float32(library: Library, fmt: str, n: int, k: int, size: float) -> None:
    rows, floats = weights_in(fmt, n, k)
    x = randn(64, k) * size
    x[:, 5] *= 300  # as models' inputs have it: one that is far larger
    want = x.double() @ floats.double().T
    ours, theirs = ((y.double() - want).norm() for y in (library.linear(x, rows, None, 2), x @ floats.T))
    assert ours < theirs, (ours / want.norm(), theirs / want.norm())


def q4_1(scales: Array, leasts: Array, numbers: Array) -> tuple[Rows, torch.Tensor]:
    """Blocks of scales and least values [n, groups] and numbers [n, groups, 32]."""
    blocks = np.zeros((*numbers.shape[:2], 20), np.uint8)
    blocks[:, :, :4] = np.stack([scales, leasts], axis=2).astype(np.float16).view(np.uint8)
    blocks[:, :, 4:] = numbers[:, :, :16] | numbers[:, :, 16:] << 4
    data = blocks.reshape(len(numbers), -1)
    return Rows.at("q4_1", numbers.shape[1] * 32, data), torch.from_numpy(gguf.dequantize(data, QUANTS["q4_1"]))


@pytest.mark.parametrize("size", [1.0, 1e4, 1e8])
@pytest.mark.parametrize("kind", ["zeros", "anywhere", "below", "above", "flat", "negative"])
def test_a_large_input_with_a_small_weight_disturbs_nothing(library: Library, kind: str, size: float) -> None:
    """Scale and least value of 4 bits may cancel; what they leave has float32's accuracy, element by element."""
    random = np.random.default_rng(5)
    numbers = random.integers(0, 16, (80, 3, 32), dtype=np.uint8)
    scales = random.uniform(0.01, 0.02, (80, 3)).astype(np.float16).astype(np.float64)
    zeros = random.integers(0, 16, (80, 3))
    leasts = {
        "zeros": -scales * zeros,  # weights of exactly 0, mostly
        "anywhere": -scales * random.uniform(0, 15, (80, 3)),
        "below": -scales * random.uniform(15, 40, (80, 3)),
        "above": scales * random.uniform(0, 40, (80, 3)),
        "flat": random.uniform(-1, 1, (80, 3)),
        "negative": scales * zeros,
    }[kind]
    scales = scales * {"flat": 0.0, "negative": -1.0}.get(kind, 1.0)
    numbers[:, :, 5] = zeros  # the smallest weight
    rows, floats = q4_1(scales, leasts, numbers)
    x = randn(20, 96)
    x[:, 5::32] *= size
    got, want = library.linear(x, rows, None, 2).double(), x.double() @ floats.double().T
    unit = (x.double().abs() @ floats.double().abs().T) * 2.0**-24
    # Leasts far below all weights leave up to 7 times the sum: they are no halves less the scale's multiple.
    assert ((got - want).abs() <= unit * (60 if kind == "below" else 20)).all(), ((got - want).abs() / unit).max()


@pytest.mark.parametrize("fmt", QUANTS)
def test_nothing_of_an_input_is_lost(library: Library, fmt: str) -> None:
    """Rows of one odd number of 20 bits, scales of 1: every product is exact in float32, and so every part is there."""
    numbers = np.random.default_rng(3).integers(0, 16, (40, 96), dtype=np.int64)
    blocks = np.zeros((40, 3, {"q8_0": 34, "q4_0": 18, "q4_1": 20}[fmt]), np.uint8)
    blocks[:, :, :2] = np.float16(1).reshape(1).view(np.uint8)
    if fmt == "q4_1":
        blocks[:, :, 2:4] = np.float16(-3).reshape(1).view(np.uint8)
    grouped = numbers.reshape(40, 3, 32)
    if fmt == "q8_0":
        weights = 17 * numbers - 128
        blocks[:, :, 2:] = (17 * grouped - 128).astype(np.int8).view(np.uint8)
    else:
        weights = numbers - (8 if fmt == "q4_0" else 3)
        blocks[:, :, -16:] = grouped[:, :, :16] | grouped[:, :, 16:] << 4
    odd = 2 ** (16 if fmt == "q8_0" else 20) - 1 - 2 * torch.arange(96)
    x = torch.diag(odd.float())
    got = library.linear(x, Rows.at(fmt, 96, blocks.reshape(40, -1)), None, 2)
    assert np.array_equal(got.numpy().astype(np.int64), odd.numpy()[:, None] * weights.T)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("count", [4, 30])
@pytest.mark.parametrize("fmt", FORMATS)
def test_a_number_that_is_none_stays_in_its_row(library: Library, fmt: str, bad: float, count: int) -> None:
    rows, _ = weights_in(fmt, 50, 64)
    x = randn(count, 64)
    whole = library.linear(x, rows, None, 2)
    x[2, 7] = bad
    out = library.linear(x, rows, None, 2)
    assert not out[2].isfinite().any()
    others = [i for i in range(count) if i != 2]
    assert torch.equal(out[others], whole[others])
