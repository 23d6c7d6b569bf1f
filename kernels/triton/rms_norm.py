# mypy: disallow-incomplete-defs=False
"""RMSNorm (Zhang and Sennrich, arXiv:1910.07467) with the residual's addition in the same pass: one program per row."""

from __future__ import annotations

import torch
import triton
import triton.language as tl


@triton.jit
def rms_norm_kernel(
    x_ptr,
    residual_ptr,
    weight_ptr,
    out_ptr,
    eps,
    x_stride,
    residual_stride,
    WIDTH: tl.constexpr,
    WIDTH_PADDED: tl.constexpr,
    ADD: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, WIDTH_PADDED)
    inside = column < WIDTH
    dtype = out_ptr.dtype.element_ty
    x = tl.load(x_ptr + row * x_stride + column, mask=inside, other=0.0).to(tl.float32)
    if ADD:
        residual = residual_ptr + row * residual_stride + column
        x = (x + tl.load(residual, mask=inside, other=0.0).to(tl.float32)).to(dtype)
        tl.store(residual, x, mask=inside)
        x = x.to(tl.float32)
    rate = 1.0 / tl.sqrt(tl.sum(x * x) / WIDTH + eps)
    weight = tl.load(weight_ptr + column, mask=inside, other=0.0).to(tl.float32)
    # Rounded before the weight is applied, as transformers does.
    normed = (x * rate).to(dtype).to(tl.float32) * weight
    tl.store(out_ptr + row * WIDTH + column, normed.to(dtype), mask=inside)


def tile_shape(width: int) -> dict[str, int]:
    """The kernel's compile-time numbers for a row of that many elements."""
    return {"WIDTH": width, "WIDTH_PADDED": triton.next_power_of_2(width)}


def num_warps(width: int) -> int:
    """So that a thread holds at most 16 elements; more spill."""
    return int(min(16, max(1, triton.next_power_of_2(width) // 512)))


def rms_norm(
    x: torch.Tensor, weight: torch.Tensor, eps: float, out: torch.Tensor, residual: torch.Tensor | None = None
) -> None:
    """out = norm(x) * weight; with a residual: residual += x, then out = norm(residual) * weight.

    Args:
        x: [T, width], float32, float16 or bfloat16, any stride between rows.
        weight: [width].
        out: [T, width], contiguous.
        residual: [T, width], changed in place.

    Raises:
        ValueError: a row is not contiguous.
    """
    if x.stride(-1) != 1 or not out.is_contiguous() or (residual is not None and residual.stride(-1) != 1):
        raise ValueError("out, and the rows of x and residual, must be contiguous")
    if x.shape[0] == 0:
        return
    rms_norm_kernel[(x.shape[0],)](
        x,
        residual,
        weight,
        out,
        eps,
        x.stride(0),
        residual.stride(0) if residual is not None else 0,
        ADD=residual is not None,
        num_warps=num_warps(x.shape[1]),
        **tile_shape(x.shape[1]),
    )
