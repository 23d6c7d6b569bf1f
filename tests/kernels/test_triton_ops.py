"""The small kernels against kernels/reference.py in float64, in the interpreter or on a GPU."""

from __future__ import annotations

import os

import pytest
import torch

from kernels import reference

pytest.importorskip("triton")

import triton
import triton.language as tl

from kernels.triton.copy_blocks import copy_blocks, gather_blocks, scatter_blocks
from kernels.triton.fp8 import from_e4m3, to_e4m3
from kernels.triton.rms_norm import rms_norm
from kernels.triton.rotary_and_cache import rotary_and_cache
from kernels.triton.swiglu import swiglu

DEVICE = "cuda" if torch.cuda.is_available() and os.environ.get("TRITON_INTERPRET") != "1" else "cpu"
F32, F16, BF16 = torch.float32, torch.float16, torch.bfloat16
ROUNDING = {F32: 2e-6, F16: 3e-3, BF16: 2e-2}
NAN = float("nan")


def random(*shape: int, dtype: torch.dtype = F32, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype)


def close(got: torch.Tensor, want: torch.Tensor, dtype: torch.dtype) -> None:
    torch.testing.assert_close(got.cpu().double(), want, rtol=ROUNDING[dtype], atol=ROUNDING[dtype])


@triton.jit
def _bytes_of(x_ptr, byte_ptr, N: tl.constexpr):
    at = tl.arange(0, N)
    tl.store(byte_ptr + at, to_e4m3(tl.load(x_ptr + at)))


@triton.jit
def _halves_of(byte_ptr, half_ptr, N: tl.constexpr):
    at = tl.arange(0, N)
    tl.store(half_ptr + at, from_e4m3(tl.load(byte_ptr + at)))


def test_fp8_bytes_are_those_of_torch() -> None:
    """Every byte there and back; every border between two values, and what lies close to it."""
    every = torch.arange(256, dtype=torch.uint8, device=DEVICE)
    halves = torch.empty(256, dtype=F16, device=DEVICE)
    _halves_of[(1,)](every, halves, 256)
    values = every.view(torch.float8_e4m3fn).float()
    torch.testing.assert_close(halves.float() * 256, values, rtol=0, atol=0, equal_nan=True)

    finite = values[~values.isnan()].unique()
    middles = (finite[1:] + finite[:-1]) / 2
    up, down = torch.full_like(middles, 1e9), torch.full_like(middles, -1e9)
    x = torch.cat((finite, middles, middles.nextafter(up), middles.nextafter(down), random(100), random(100) * 1e-3))
    x = torch.cat((x, torch.zeros(2048 - len(x), device=DEVICE)))
    got = torch.empty(2048, dtype=torch.uint8, device=DEVICE)
    _bytes_of[(1,)](x, got, 2048)
    torch.testing.assert_close(got.view(torch.float8_e4m3fn).float(), x.to(torch.float8_e4m3fn).float(), rtol=0, atol=0)

    beyond = torch.tensor([500.0, -1e9, float("inf"), NAN], device=DEVICE)
    _bytes_of[(1,)](beyond, got, 4)
    assert got[:4].view(torch.float8_e4m3fn).float().tolist()[:3] == [448.0, -448.0, 448.0]
    assert got[3] & 0x7F == 0x7F


@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim", "size", "normed", "dtype", "cache"),
    [
        (9, 3, 64, 16, False, F32, F32),
        (4, 2, 80, 8, True, F16, F16),
        (2, 1, 256, 128, True, BF16, BF16),
        (32, 8, 128, 32, False, BF16, torch.uint8),
        (3, 3, 96, 16, False, F32, BF16),
    ],
    ids=str,
)
def test_rotary_and_cache(
    heads: int, kv_heads: int, dim: int, size: int, normed: bool, dtype: torch.dtype, cache: torch.dtype
) -> None:
    slots = [3 * size + 1, -1, 0, 4 * size + size - 1, size]
    positions = [5, 0, 63, 17, 1]
    wide = random(5, (heads + 2 * kv_heads) * dim + 8, dtype=dtype)
    qkv = wide[:, 8:].view(5, -1, dim)
    angles = torch.arange(64)[:, None] * 100.0 ** -(torch.arange(dim // 2) / dim)
    angles = torch.cat((angles.cos(), angles.sin()), dim=1).to(DEVICE)
    poison = 0x7F if cache == torch.uint8 else NAN
    caches = torch.full((2, 5, size, kv_heads, dim), poison, dtype=cache, device=DEVICE)
    scales = torch.tensor([[0.05], [2.0]], device=DEVICE).expand(2, kv_heads).contiguous()
    norms = (random(dim, dtype=dtype, seed=1), random(dim, dtype=dtype, seed=2)) if normed else (None, None)

    q, k, v = qkv.cpu().double().split([heads, kv_heads, kv_heads], dim=1)
    if normed:
        q, k = (
            reference.rms_norm(x, w.cpu().double(), 1e-5) for x, w in zip((q, k), norms, strict=True) if w is not None
        )
    turns = angles.cpu().double()[positions]
    q, k = reference.rotate(q, turns), reference.rotate(k, turns)
    if cache == torch.uint8:
        k, v = k / 0.05, v / 2.0
    before = qkv.clone()

    ints = (torch.tensor(x, dtype=torch.int32, device=DEVICE) for x in (positions, slots))
    rotary_and_cache(qkv, angles, *ints, caches[0], caches[1], *norms, 1e-5, scales if cache == torch.uint8 else None)

    close(qkv[:, :heads], q, dtype)
    assert torch.equal(qkv[:, heads:], before[:, heads:])
    flat = caches.view(2, -1, kv_heads, dim)
    written = flat.view(torch.float8_e4m3fn).cpu().double() if cache == torch.uint8 else flat.cpu().double()
    for part, new in enumerate((k, v)):
        for row, slot in enumerate(slots):
            if slot >= 0 and cache == torch.uint8:
                torch.testing.assert_close(written[part, slot], new[row].clamp(-448, 448), rtol=0.07, atol=0.01)
            elif slot >= 0:
                close(written[part, slot], new[row], BF16 if cache == BF16 else dtype)
    others = [s for s in range(5 * size) if s not in slots]
    assert written[:, others].isnan().all()


@pytest.mark.parametrize(("width", "dtype"), [(576, F32), (896, BF16), (64, F16), (5120, BF16)])
@pytest.mark.parametrize("add", [False, True])
def test_rms_norm(width: int, dtype: torch.dtype, add: bool) -> None:
    x = random(3, width + 4, dtype=dtype)[:, 4:]
    residual = random(3, width, dtype=dtype, seed=1)
    weight = random(width, dtype=dtype, seed=2)
    total = x + residual if add else x
    want = reference.rms_norm(total.cpu().double(), weight.cpu().double(), 1e-5)
    out = torch.full((3, width), NAN, dtype=dtype, device=DEVICE)
    rms_norm(x, weight, 1e-5, out, residual if add else None)
    close(out, want, dtype)
    if add:
        close(residual, total.cpu().double(), dtype)  # the interpreter cuts bfloat16 instead of rounding it


@pytest.mark.parametrize(("width", "dtype"), [(1536, F32), (1000, F16), (2048, BF16)])
def test_swiglu(width: int, dtype: torch.dtype) -> None:
    gate_up = random(3, 2 * width, dtype=dtype) * 4
    gate_up[0, 0] = -200.0  # its exponential overflows
    out = torch.full((3, width), NAN, dtype=dtype, device=DEVICE)
    swiglu(gate_up, out)
    torch.testing.assert_close(
        out.cpu().double(), reference.swiglu(gate_up.cpu().double()), rtol=2 * ROUNDING[dtype], atol=ROUNDING[dtype]
    )


@pytest.mark.parametrize("shape", [(7, 2, 3, 8), (7, 5000)], ids=str)
def test_copy_blocks(shape: tuple[int, ...]) -> None:
    pool = random(*shape, dtype=BF16 if len(shape) > 2 else F32)
    before = pool.clone()
    copy_blocks(pool, ((1, 5), (2, 6)))
    assert torch.equal(pool[[5, 6]], before[[1, 2]])
    assert torch.equal(pool[:5], before[:5])


def test_copy_blocks_reads_everything_before_it_writes() -> None:
    pool = random(4, 64)
    before = pool.clone()
    copy_blocks(pool, ((0, 1), (1, 2), (2, 0)))
    assert torch.equal(pool, before[[2, 0, 1, 3]])


def test_gather_and_scatter_are_swap() -> None:
    pool = random(6, 3, 8)
    before = pool.clone()
    out = gather_blocks(pool, (4, 0, 4))
    assert torch.equal(out, before[[4, 0, 4]])
    scatter_blocks(out[:2] + 1, pool, (5, 2))
    assert torch.equal(pool[[5, 2]], before[[4, 0]] + 1)
    assert torch.equal(pool[[0, 1, 3, 4]], before[[0, 1, 3, 4]])
    copy_blocks(pool, ())
    scatter_blocks(gather_blocks(pool, ()), pool, ())


def test_what_does_not_fit_is_refused() -> None:
    with pytest.raises(ValueError, match="a block of 6 bytes is not a multiple of 8"):
        copy_blocks(random(4, 3, dtype=F16), ((0, 1),))
    with pytest.raises(ValueError, match="contiguous"):
        rms_norm(random(4, 4).t(), random(4), 1e-5, random(4, 4))
    with pytest.raises(ValueError, match="contiguous"):
        swiglu(random(2, 8).t(), random(8, 1))
