# mypy: disallow-incomplete-defs=False
"""SwiGLU's product (Shazeer, arXiv:2002.05202): out = silu(gate) * up, read from one row [gate | up]."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

BLOCK = 1024


@triton.jit
def swiglu_kernel(gate_up_ptr, out_ptr, width, gate_up_stride, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    at = gate_up_ptr + row * gate_up_stride + column
    gate = tl.load(at, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(at + width, mask=inside, other=0.0).to(tl.float32)
    dtype = out_ptr.dtype.element_ty
    # The sigmoid by an exponential that cannot overflow; rounded before up, as transformers does.
    small = tl.exp(-tl.abs(gate))
    activated = (gate * tl.where(gate >= 0, 1.0, small) / (1.0 + small)).to(dtype).to(tl.float32)
    tl.store(out_ptr + row * width + column, (activated * up).to(dtype), mask=inside)


def swiglu(gate_up: torch.Tensor, out: torch.Tensor) -> None:
    """out = silu(gate) * up.

    Args:
        gate_up: [T, 2 * width], float32, float16 or bfloat16, any stride between rows; gate first.
        out: [T, width], contiguous.

    Raises:
        ValueError: a row is not contiguous.
    """
    if gate_up.stride(-1) != 1 or not out.is_contiguous():
        raise ValueError("out and the rows of gate_up must be contiguous")
    tokens, width = out.shape
    if tokens == 0:
        return
    swiglu_kernel[(tokens, triton.cdiv(width, BLOCK))](gate_up, out, width, gate_up.stride(0), BLOCK=BLOCK)
