"""Products in whole numbers: by matrix tiles with scales for rows, by the vector unit with scales for groups of 32."""

from __future__ import annotations

import gguf
import numpy as np
import pytest
import torch
from int8_rules import (
    FORMATS,
    QUANTS,
    TARGETS,
    TOP,
    by_tiles,
    error_by_rows,
    in_groups,
    library,
    library_with_tiles,
    product_by_rows,
    weights_in,
)

from kernels.cpu import build
from kernels.cpu.library import Library, Rows

pytestmark = pytest.mark.skipif(build.compiler() is None, reason="no C++ compiler")

# Of a processor without tiles, also where the native library has them: what the others run is tried here too.
VECTORS = ["native", *(pytest.param(target, marks=pytest.mark.slow) for target in TARGETS)]
SIZES = [(70, 96), (1, 64), (7, 160), (32, 64), (203, 576), (70, 1536)]


def library_without_tiles(target: str) -> Library:
    if target == "native" and by_tiles(library()):
        pytest.skip("this machine has tiles; the same test runs with libraries for others")
    return library(target)


def inputs(rows: int, k: int) -> torch.Tensor:
    """Numbers of many sizes, a row of zeros, rows of hardly anything and of very much."""
    x = torch.randn(rows, k, generator=torch.Generator().manual_seed(rows + k)) * torch.logspace(-3, 1, k)
    for row, factor in ((5, 0.0), (7, 1e-35), (8, 1e-27), (9, 1e30)):
        if row < rows:
            x[row] *= factor
    return x


@pytest.mark.parametrize(("n", "k"), SIZES)
@pytest.mark.parametrize("fmt", FORMATS)
def test_tiles_multiply_as_defined(fmt: str, n: int, k: int) -> None:
    """To the bit, in every number of rows up to three tiles and in more than a band, with any number of threads."""
    whole = library_with_tiles()
    rows, floats = weights_in(fmt, n, k)
    x = inputs(210, k)
    want = product_by_rows(x, fmt, rows, floats)
    for count in (*range(1, 19), 31, 32, 33, 48, 49, 97, 192, 193, 210):
        got = whole.linear(x[:count], rows, None, 1 + count % 3, low=True)
        assert torch.equal(got, want[:count]), count
    assert (want[:7].abs().amax(1) > 0).tolist() == [True] * 5 + [False, True]
    assert torch.equal(want[7], torch.zeros(n)) and (want[8] != 0).all() and want[9].isfinite().all()
    error = (want.double() - x.double() @ floats.double().T).abs()
    assert (error <= error_by_rows(x, floats) + 1e-33).all()


@pytest.mark.parametrize("k", [1, 33, 63, 65, 100, 129])
@pytest.mark.parametrize("fmt", ["f32", "f16", "bf16"])
def test_tiles_with_inputs_that_fill_none(fmt: str, k: int) -> None:
    whole = library_with_tiles()
    rows, floats = weights_in(fmt, 70, k)
    x = inputs(33, k)
    want = product_by_rows(x, fmt, rows, floats)
    for count in (1, 15, 16, 17, 33):
        assert torch.equal(whole.linear(x[:count], rows, None, 2, low=True), want[:count]), count


@pytest.mark.parametrize("k", [1536, 65536])
def test_sums_of_tiles_hold_the_largest_numbers(k: int) -> None:
    """65,536 inputs are the most whose sums fit; with more the groups' products are taken."""
    whole = library_with_tiles()
    x, weight = torch.full((6, k), TOP), torch.full((3, k), 127.0)
    x[1], x[2, 1:], x[3, 1::2] = -TOP, 256 * 126 - 128, -TOP  # all low digits -128 in row 2
    x[4:] = torch.randint(-int(TOP), int(TOP) + 1, (2, k), generator=torch.Generator().manual_seed(6)).float()
    x[4:, 0] = TOP
    weight[1], weight[2, 1::2] = -127, -127
    want = product_by_rows(x, "f32", Rows.of(weight), weight)
    assert want[0, 0] > 0 and torch.equal(want[:, 1], -want[:, 0])
    for count in (1, 6):
        assert torch.equal(whole.linear(x[:count], weight, None, 2, low=True), want[:count])


def test_rows_too_long_for_sums_of_tiles() -> None:
    whole, k = library_with_tiles(), 65536 + 32
    x, weight = (torch.randn(2, k, generator=torch.Generator().manual_seed(seed)) for seed in (1, 2))
    want = in_groups(x).double() @ in_groups(weight, half_scales=True).double().T
    torch.testing.assert_close(whole.linear(x, weight, None, 2, low=True).double(), want, rtol=0, atol=1e-2)


def test_the_top_of_tiles_in_whole_numbers() -> None:
    """Scales are 1: what comes out is the whole number that int64 says, without a rounding of anything."""
    whole = library_with_tiles()
    generator = torch.Generator().manual_seed(3)
    x = torch.randint(-int(TOP), int(TOP) + 1, (40, 96), generator=generator).float()
    weight = torch.randint(-3, 4, (70, 96), generator=generator).float()
    x[:, 0], weight[:, 0], weight[:, 64] = TOP, 127, -127
    want = x.numpy().astype(np.int64) @ weight.numpy().astype(np.int64).T
    assert abs(want).max() < 2**24  # what float32 holds
    assert np.array_equal(whole.linear(x, weight, None, 2, low=True).numpy().astype(np.int64), want)


@pytest.mark.parametrize("fmt", ["q4_0", "q4_1"])
def test_blocks_of_four_bits_that_no_quantiser_fills(fmt: str) -> None:
    """Random half bytes and scales: the least value of a block may be far below all of its weights."""
    whole, n, k = library_with_tiles(), 40, 128
    random = np.random.default_rng(4)
    blocks = random.integers(6, 10, (n, k // 32, 18 if fmt == "q4_0" else 20), dtype=np.uint8)
    blocks[:, :, -16:] |= random.integers(6, 10, (n, k // 32, 16), dtype=np.uint8) << 4
    about = random.uniform(-0.1, 0.1, (n, k // 32, 1 if fmt == "q4_0" else 2)).astype(np.float16)
    blocks[:, :, :-16] = about.view(np.uint8)
    data = blocks.reshape(n, -1)
    rows, floats = Rows.at(fmt, k, data), torch.from_numpy(gguf.dequantize(data, QUANTS[fmt]))
    x = inputs(40, k)
    want = product_by_rows(x, fmt, rows, floats)
    for count in (1, 40):
        assert torch.equal(whole.linear(x[:count], rows, None, 2, low=True), want[:count])


@pytest.mark.parametrize("target", VECTORS)
@pytest.mark.parametrize("fmt", FORMATS)
def test_groups_are_multiplied_as_defined(target: str, fmt: str) -> None:
    """Against the same quantisation in float64, and every tile of rows against every other."""
    whole = library_without_tiles(target)
    n, k = 70, 160
    rows, floats = weights_in(fmt, n, k)
    x = torch.randn(40, k, generator=torch.Generator().manual_seed(2)) * torch.logspace(-3, 3, k)
    x[5] = 0
    got = whole.linear(x, rows, None, 1, low=True)
    weights = floats if fmt in QUANTS else in_groups(floats, half_scales=True)
    want = in_groups(x).double() @ weights.double().T
    bound = (in_groups(x).abs().double() @ weights.abs().double().T) * 2.0**-20 + 1e-6
    # Halves that fall on another side of a rounding: one unit of one input.
    assert ((got - want).abs() <= bound).float().mean() > 0.99
    assert (got - want).norm() < 1e-4 * want.norm()
    for count in range(1, 41):
        assert torch.equal(whole.linear(x[:count], rows, None, 2, low=True), got[:count]), count


@pytest.mark.parametrize("target", VECTORS)
def test_sums_of_groups_are_exact(target: str) -> None:
    """Scales are 1, so outputs are the whole numbers' sums: against int64, with the largest numbers there are."""
    whole = library_without_tiles(target)
    generator = torch.Generator().manual_seed(3)
    n, k = 70, 928
    x, weight = (torch.randint(-127, 128, (rows, k), generator=generator).float() for rows in (30, n))
    x[:, ::32] = weight[:, ::32] = 127
    x[0], weight[0], x[1], weight[1] = 127, 127, -127, -127
    want = x.numpy().astype(np.int64) @ weight.numpy().astype(np.int64).T
    assert abs(want).max() < 2**24  # what float32 holds
    assert np.array_equal(whole.linear(x, weight, None, 2, low=True).numpy().astype(np.int64), want)


@pytest.mark.slow
@pytest.mark.parametrize("target", ["native", *(target for target in TARGETS if target != "haswell")])
def test_groups_have_the_same_bits_on_every_processor(target: str) -> None:
    libraries = library("haswell"), library_without_tiles(target)
    x = torch.randn(13, 96, generator=torch.Generator().manual_seed(4))
    for fmt in FORMATS:
        rows, _ = weights_in(fmt, 70, 96)
        here, there = (one.linear(x, rows, None, 1, low=True) for one in libraries)
        assert torch.equal(here, there), fmt


@pytest.mark.parametrize("target", ["native", pytest.param("cascadelake", marks=pytest.mark.slow)])
@pytest.mark.parametrize("ill", [float("nan"), float("inf"), float("-inf")])
def test_what_is_no_number_stays_in_its_row(target: str, ill: float) -> None:
    x, weight = torch.ones(40, 40), torch.ones(50, 40)
    x[13, 7] = x[16, 39] = ill
    out = library(target).linear(x, weight, None, 2, low=True)
    assert out[[13, 16]].isnan().all()
    assert ((out[[i for i in range(40) if i not in (13, 16)]] - 40).abs() <= 0.01).all()
