"""The linear layer, the build and its cache; every instruction set that this machine can run."""

from __future__ import annotations

import platform
import subprocess
import sys
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType

from kernels.cpu import build
from kernels.cpu.check import check
from kernels.cpu.library import Library, Rows

pytestmark = pytest.mark.skipif(build.compiler() is None, reason="no C++ compiler")


@pytest.fixture(scope="module")
def library() -> Library:
    return Library(build.ensure())


@pytest.mark.parametrize(("n", "k"), [(1, 1), (7, 33), (32, 64), (203, 100), (576, 1536)])
@pytest.mark.parametrize("bias", [True, False])
def test_linear_against_float64_and_itself(library: Library, n: int, k: int, bias: bool) -> None:
    generator = torch.Generator().manual_seed(n * k)
    x, weight = torch.randn(130, k, generator=generator), torch.randn(n, k, generator=generator)
    b = torch.randn(n, generator=generator) if bias else None
    whole = library.linear(x, weight, b, 1)
    want = x.double() @ weight.double().T + (b.double() if b is not None else 0)
    # One chain of k fused multiply-adds: k roundings at most, of sums that are no larger than this.
    bound = (x.abs().double() @ weight.abs().double().T) * (k + 1) * 2.0**-24 + 1e-6
    assert ((whole - want).abs() <= bound).all()
    for rows in (*range(1, 14), 24, 25, 64, 129):  # a tile of every size, then several
        for threads in (1, 2, 3):
            assert torch.equal(library.linear(x[:rows], weight, b, threads), whole[:rows]), (rows, threads)


QUANTS = {"q8_0": GGMLQuantizationType.Q8_0, "q4_0": GGMLQuantizationType.Q4_0, "q4_1": GGMLQuantizationType.Q4_1}
HALVES = {"f16": torch.float16, "bf16": torch.bfloat16}
FORMATS = ("f32", *HALVES, *QUANTS)


def weights_in(fmt: str, n: int, k: int) -> tuple[Rows, torch.Tensor]:
    """Random weights in a file's format, and the float32 they mean."""
    floats = torch.randn(n, k, generator=torch.Generator().manual_seed(n + k)) * 0.1
    if fmt in QUANTS:
        data = gguf.quantize(floats.numpy(), QUANTS[fmt])
        return Rows.at(fmt, k, data), torch.from_numpy(gguf.dequantize(data, QUANTS[fmt]))
    held = floats.to(HALVES.get(fmt, torch.float32))
    return Rows.of(held), held.float()


@pytest.mark.parametrize(("n", "k"), [(7, 64), (70, 96), (203, 576)])
@pytest.mark.parametrize("fmt", FORMATS)
def test_weights_as_they_lie_in_the_file_give_the_bits_of_float32(library: Library, fmt: str, n: int, k: int) -> None:
    rows, floats = weights_in(fmt, n, k)
    x = torch.randn(40, k, generator=torch.Generator().manual_seed(1))
    want = library.linear(x, floats, None, 1)
    for count in (*range(1, 14), 40):
        assert torch.equal(library.linear(x[:count], rows, None, 2), want[:count]), count


def test_odd_lengths_of_half_precisions(library: Library) -> None:
    rows, floats = weights_in("bf16", 33, 71)
    x = torch.randn(30, 71, generator=torch.Generator().manual_seed(1))
    want = library.linear(x, floats, None, 1)
    for count in (1, 2, 7, 30):
        assert torch.equal(library.linear(x[:count], rows, None, 2), want[:count]), count


@pytest.mark.parametrize("fmt", FORMATS)
def test_whole_numbers_are_multiplied_as_defined(library: Library, fmt: str) -> None:
    """Against the same quantisation in float64, and every tile against every other."""
    n, k = 70, 160
    rows, floats = weights_in(fmt, n, k)
    x = torch.randn(40, k, generator=torch.Generator().manual_seed(2)) * torch.logspace(-3, 3, k)
    x[5] = 0
    got = library.linear(x, rows, None, 1, whole=True)
    weights = floats if fmt in QUANTS else in_int8(floats, half_scales=True)
    want = in_int8(x).double() @ weights.double().T
    bound = (in_int8(x).abs().double() @ weights.abs().double().T) * 2.0**-20 + 1e-6
    # Halves that fall on another side of a rounding: one unit of one input.
    assert ((got - want).abs() <= bound).float().mean() > 0.99
    assert (got - want).norm() < 1e-4 * want.norm()
    for count in range(1, 41):
        assert torch.equal(library.linear(x[:count], rows, None, 2, whole=True), got[:count]), count


def in_int8(x: torch.Tensor, half_scales: bool = False) -> torch.Tensor:
    """x rounded to 127 steps of the largest of each 32."""
    groups = x.double().view(len(x), -1, 32)
    scales = groups.abs().amax(2, keepdim=True) / 127
    if half_scales:
        scales = scales.half().double()
    return (torch.nan_to_num(groups / scales).round().clamp(-127, 127) * scales).view_as(x).float()


def exact_sums(library: Library) -> None:
    """Scales are 1, so outputs are the whole numbers' sums: against int64, with the largest numbers there are."""
    generator = torch.Generator().manual_seed(3)
    n, k = 70, 928
    x, weight = (torch.randint(-127, 128, (rows, k), generator=generator).float() for rows in (30, n))
    x[:, ::32] = weight[:, ::32] = 127
    x[0], weight[0], x[1], weight[1] = 127, 127, -127, -127
    want = x.numpy().astype(np.int64) @ weight.numpy().astype(np.int64).T
    assert abs(want).max() < 2**24  # what float32 holds
    got = library.linear(x, weight, None, 2, whole=True)
    assert np.array_equal(got.numpy().astype(np.int64), want)


def test_whole_sums_are_exact(library: Library) -> None:
    exact_sums(library)


@pytest.mark.parametrize("whole", [False, True], ids=["float32", "int8"])
def test_nan_stays_in_its_row(library: Library, whole: bool) -> None:
    x, weight = torch.ones(30, 40), torch.ones(50, 40)
    x[13, 7] = float("nan")
    out = library.linear(x, weight, None, 2, whole=whole)
    assert out[13].isnan().all()
    assert ((out[[i for i in range(30) if i != 13]] - 40).abs() <= (0.01 if whole else 0)).all()


def test_the_check_refuses_wrong_results(monkeypatch: pytest.MonkeyPatch) -> None:
    path = build.ensure()
    check(path)
    real = Library.linear

    def wrong(self: Library, x: torch.Tensor, *rest: object, **more: object) -> torch.Tensor:
        out = real(self, x, *rest, **more)  # type: ignore[arg-type]
        return out + 1e-6 * (len(x) == 5)

    monkeypatch.setattr(Library, "linear", wrong)
    with pytest.raises(AssertionError, match="tile of 5 rows"):
        check(path)


def test_nothing_is_compiled_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    path = build.ensure()
    assert build.built() == path

    def never(*_: object) -> None:
        raise AssertionError("compiled again")

    monkeypatch.setattr(build, "_compile", never)
    assert build.ensure() == path
    monkeypatch.setattr(build, "FLAGS", (*build.FLAGS, "-DOTHER"))
    with pytest.raises(AssertionError, match="compiled again"):
        build.ensure()


def test_one_openmp_runtime_in_the_process() -> None:
    program = """
import torch
from kernels.cpu.build import ensure
from kernels.cpu.library import Library
torch.randn(300, 300) @ torch.randn(300, 300)
Library(ensure()).linear(torch.ones(4, 8), torch.ones(8, 8), None, 2)
names = {line.split()[-1] for line in open("/proc/self/maps") if "/" in line}
print([n for n in names if "gomp" in n or "iomp" in n or "libomp" in n])
"""
    if not Path("/proc/self/maps").exists():
        pytest.skip("no /proc")
    root = Path(__file__).parents[2]
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, cwd=root)
    assert len(eval(done.stdout)) <= 1, done.stdout


@pytest.mark.slow
@pytest.mark.parametrize(
    ("target", "needs", "simd", "whole_simd"),
    [
        ("x86-64", "sse2", "generic", "plain"),
        ("haswell", "avx2", "avx2", "plain"),
        ("alderlake", "avx_vnni", "avx2", "avx-vnni"),
        ("skylake-avx512", "avx512bw", "avx512", "plain"),
    ],
)
def test_other_instruction_sets_compute_the_same(target: str, needs: str, simd: str, whole_simd: str) -> None:
    """What other machines will run; whole numbers are the same in all of them, to the last bit."""
    if platform.machine() != "x86_64" or needs not in Path("/proc/cpuinfo").read_text().split():
        pytest.skip("this machine cannot run it")
    path = build.ensure(target)
    library = Library(path)
    assert (library.simd, library.whole_simd) == (simd, whole_simd)
    check(path)
    exact_sums(library)
    x = torch.randn(13, 96, generator=torch.Generator().manual_seed(4))
    for fmt in FORMATS:
        rows, floats = weights_in(fmt, 70, 96)
        assert torch.equal(library.linear(x, rows, None, 1), library.linear(x, floats, None, 1)), fmt
        if simd != "generic":  # no fused multiply-add there
            here = Library(build.ensure()).linear(x, rows, None, 1, whole=True)
            assert torch.equal(library.linear(x, rows, None, 1, whole=True), here), fmt
