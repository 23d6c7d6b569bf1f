"""The two definitions of int8 products, in numpy; weights in files' formats; libraries for other processors."""

from __future__ import annotations

import platform
from functools import cache
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType

from kernels.cpu import build
from kernels.cpu.library import Array, Library, Rows

QUANTS = {"q8_0": GGMLQuantizationType.Q8_0, "q4_0": GGMLQuantizationType.Q4_0, "q4_1": GGMLQuantizationType.Q4_1}
HALVES = {"f16": torch.float16, "bf16": torch.bfloat16}
FORMATS = ("f32", *HALVES, *QUANTS)
TOP = 127.0 * 256 + 127  # the largest number of two signed digits
# Processors that the library is compiled for too, where this one can do what they can: the flag that says so.
FLAGS = {
    "x86-64": "sse2",
    "haswell": "avx2",
    "alderlake": "avx_vnni",
    "skylake-avx512": "avx512bw",
    "cascadelake": "avx512_vnni",
    "cooperlake": "avx512_bf16",
}
TARGETS = ("haswell", "alderlake", "skylake-avx512", "cascadelake")  # each fuses and multiplies by other instructions


def can_run(flag: str) -> bool:
    return platform.machine() == "x86_64" and flag in Path("/proc/cpuinfo").read_text().split()


@cache
def library(target: str = "native") -> Library:
    """Compiled for ``target``, a processor; skips the test where that cannot run."""
    if target != "native" and not can_run(FLAGS[target]):
        pytest.skip(f"this machine cannot run what is made for {target}")
    return Library(build.ensure(target))


def by_tiles(library: Library) -> bool:
    """Which of the definitions it follows."""
    return library.tiles


def library_with_tiles() -> Library:
    if not by_tiles(library()):
        pytest.skip(f"matrix tiles (AMX) are not on this machine, or not known to its compiler: {library().low_simd}")
    return library()


def weights_in(fmt: str, n: int, k: int, floats: torch.Tensor | None = None) -> tuple[Rows, torch.Tensor]:
    """Weights in a file's format (random ones unless given), and the float32 they mean."""
    if floats is None:
        floats = torch.randn(n, k, generator=torch.Generator().manual_seed(n + k)) * 0.1
    if fmt in QUANTS:
        data = gguf.quantize(floats.numpy(), QUANTS[fmt])
        return Rows.at(fmt, k, data), torch.from_numpy(gguf.dequantize(data, QUANTS[fmt]))
    held = floats.to(HALVES.get(fmt, torch.float32))
    return Rows.of(held), held.float()


def in_groups(x: torch.Tensor, half_scales: bool = False) -> torch.Tensor:
    """x rounded to 127 steps of the largest of each 32 of a row: inputs, and weights that are not in 4 or 8 bits."""
    padded = torch.nn.functional.pad(x.double(), (0, -x.shape[1] % 32))
    groups = padded.view(len(x), -1, 32)
    scales = groups.abs().amax(2, keepdim=True) / 127
    if half_scales:
        scales = scales.half().double()
    numbers = torch.nan_to_num(groups / scales).round().clamp(-127, 127)
    return (numbers * scales).view_as(padded)[:, : x.shape[1]].float()


def weights_by_rows(fmt: str, rows: Rows, floats: torch.Tensor) -> tuple[Array, Array]:
    """Numbers [n, k] and scales [n]: a row's largest is 127, to nearest. 4 bits become 8 by a step and a least value of
    each 32, in 128ths."""
    w = floats.numpy()
    scales = abs(w).max(1) / np.float32(127)
    inverse = np.divide(np.float32(1), scales, out=np.zeros_like(scales), where=scales > 0)[:, None]
    if not fmt.startswith("q4"):
        return np.rint(np.clip(w * inverse, -127, 127)).astype(np.int64), scales
    (data,) = rows._keep
    assert isinstance(data, np.ndarray)
    blocks = data.reshape(len(w), w.shape[1] // 32, -1)
    about = np.ascontiguousarray(blocks[:, :, :-16]).view(np.float16).astype(np.float32)
    step = about[:, :, 0]
    least = about[:, :, 1] if fmt == "q4_1" else np.float32(-8) * step
    nibbles = np.concatenate([blocks[:, :, -16:] & 15, blocks[:, :, -16:] >> 4], axis=2).astype(np.int64)
    steps, leasts = (np.rint(x * inverse * np.float32(128)).astype(np.int64)[:, :, None] for x in (step, least))
    return ((steps * nibbles + leasts + 64) // 128).reshape(w.shape), scales


def as_multiplied(library: Library, fmt: str, rows: Rows, floats: torch.Tensor) -> torch.Tensor:
    """The weights that products in whole numbers are made with, in float64."""
    if by_tiles(library):
        numbers, scales = weights_by_rows(fmt, rows, floats)
        return torch.from_numpy(numbers * scales.astype(np.float64)[:, None])
    return (floats if fmt in QUANTS else in_groups(floats, half_scales=True)).double()


def inputs_by_rows(x: torch.Tensor) -> tuple[Array, Array]:
    """Numbers of 16 bits [rows, k] and scales [rows]."""
    numbers = x.numpy()
    most = abs(numbers).max(1)
    inverse = np.divide(np.float32(TOP), most, out=np.zeros_like(most), where=most > np.float32(1e-30))[:, None]
    return np.rint(np.clip(numbers * inverse, -TOP, TOP)).astype(np.int64), most / np.float32(TOP)


def product_by_rows(x: torch.Tensor, fmt: str, rows: Rows, floats: torch.Tensor) -> torch.Tensor:
    """What tiles make of it, to the bit: exact sums of both digits, joined with one rounding, scaled with one more."""
    (w, w_scales), (numbers, x_scales) = weights_by_rows(fmt, rows, floats), inputs_by_rows(x)
    high = (numbers + 128) // 256
    low = numbers - 256 * high
    assert all(abs(digit).max() <= 128 for digit in (high, low)) and abs(w).max() <= 127
    # float64 products of such numbers are whole numbers below 2^53: exact, and faster than int64.
    sums = [(digit.astype(np.float64) @ w.T.astype(np.float64)).astype(np.float32) for digit in (high, low)]
    joined = (sums[0].astype(np.float64) * 256 + sums[1].astype(np.float64)).astype(np.float32)
    return torch.from_numpy(joined * (w_scales[None, :] * x_scales[:, None]))


def error_by_rows(x: torch.Tensor, floats: torch.Tensor) -> torch.Tensor:
    """How far that may be from the product of what ``x`` and ``floats`` mean: half a unit of each factor, and an eighth
    more of a weight's for the steps and least values of 4 bits."""
    x64, w64 = x.double().abs(), floats.double().abs()
    x_unit, w_unit = x64.amax(1, keepdim=True) / TOP, w64.amax(1, keepdim=True) / 127
    k = x.shape[1]
    of_x, of_w = 0.51 * x_unit, 0.57 * w_unit
    error = of_x * w64.sum(1)[None] + x64.sum(1)[:, None] * of_w.T + k * of_x * of_w.T
    return error + 2.0**-22 * (x64 @ w64.T)
