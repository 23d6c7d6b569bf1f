"""The linear layer in float32, the build and its cache; every instruction set that this machine can run."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from int8_rules import FORMATS, QUANTS, weights_in
from int8_rules import library as other_library

from kernels.cpu import build
from kernels.cpu.check import check
from kernels.cpu.library import Library, Model, Rows, Shape

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


@pytest.mark.parametrize(("n", "k"), [(7, 64), (70, 96), (203, 576)])
@pytest.mark.parametrize("fmt", FORMATS)
def test_weights_as_they_lie_in_the_file_give_the_bits_of_float32(library: Library, fmt: str, n: int, k: int) -> None:
    if library.tiles and fmt in (*QUANTS, "bf16"):  # test_cpu_parts.py; here what processors without tiles do
        library = other_library("cascadelake")
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


def test_nan_stays_in_its_row(library: Library) -> None:
    x, weight = torch.ones(30, 40), torch.ones(50, 40)
    x[13, 7] = float("nan")
    out = library.linear(x, weight, None, 2)
    assert out[13].isnan().all()
    assert torch.equal(out[[i for i in range(30) if i != 13]], torch.full((29, 50), 40.0))


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


@pytest.mark.parametrize("damage", ["empty", "short", "other"])
def test_a_damaged_library_is_made_again(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, damage: str) -> None:
    """It would end the process that loads it, or compute anything."""
    whole = build.ensure().read_bytes()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    made = 0

    def compile_again(cxx: str, target: str, out: Path) -> None:
        nonlocal made
        made += 1
        out.write_bytes(whole[:-32])

    monkeypatch.setattr(build, "_compile", compile_again)
    path = build.ensure()
    assert path.read_bytes() == whole
    half = len(whole) // 2
    path.write_bytes(
        {"empty": b"", "short": whole[:half], "other": whole[:half] + b"?" * 9 + whole[half + 9 :]}[damage]
    )
    assert build.built() is None
    assert build.ensure() == path == build.built()
    assert path.read_bytes() == whole
    assert made == 2


def test_what_compiles_nothing_is_no_compiler() -> None:
    cxx = build.compiler()
    assert cxx is not None and build.works(cxx)
    assert not any(build.works(name) for name in ("/bin/false", "/bin/true", "/nonexistent"))


@pytest.mark.parametrize("low", [False, True])
def test_a_scale_that_the_kernels_cannot_keep_is_refused(library: Library, low: bool) -> None:
    shape = Shape(vocab=8, hidden=32, layers=1, heads=1, kv_heads=1, dim=32, intermediate=32, eps=1e-5)
    block = np.zeros((8, 18), np.uint8)
    block[3, :2] = np.float16(8192).reshape(1).view(np.uint8)
    with pytest.raises(ValueError, match="head, layer 0: a block of Q4_0 has a scale above 8188"):
        Model(library, shape, 2).linear(0, "head", Rows.at("q4_0", 32, block), None, low)


def test_one_openmp_runtime_in_the_process() -> None:
    program = """
import torch
from kernels.cpu.build import ensure
from kernels.cpu.library import Library, Model, Rows, Shape
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
    ("target", "simd", "low_simd", "bf16_simd"),
    [
        ("x86-64", "generic", "plain", ""),
        ("haswell", "avx2", "plain", ""),
        ("alderlake", "avx2", "avx-vnni", ""),
        ("skylake-avx512", "avx512", "plain", ""),
        ("cascadelake", "avx512", "avx512-vnni", ""),
        ("cooperlake", "avx512", "avx512-vnni", "avx512-bf16"),
    ],
)
def test_other_instruction_sets(target: str, simd: str, low_simd: str, bf16_simd: str) -> None:
    """What other machines will run; their whole numbers are in ``test_cpu_int8.py``."""
    other = other_library(target)
    assert (other.simd, other.low_simd, other.bf16_simd) == (simd, low_simd, bf16_simd)
    check(build.ensure(target))
    x = torch.randn(13, 96, generator=torch.Generator().manual_seed(4))
    for fmt in FORMATS:
        rows, floats = weights_in(fmt, 70, 96)
        assert torch.equal(other.linear(x, rows, None, 1), other.linear(x, floats, None, 1)), fmt
