# mypy: disallow-incomplete-defs=False
"""float8 e4m3 (Micikevicius et al., arXiv:2209.05433) by integer arithmetic on its bytes.

sm_80 has no such type and gfx942 has another one under a similar name; bytes are the same everywhere::

    e4m3     s eeee mmm          bias 7, NaN = s 1111 111, no infinity, largest 448
    float16  s 0eeee mmm0000000  bias 15: the value times 2**-8, subnormals included
"""

from __future__ import annotations

import triton
import triton.language as tl

# What `from_e4m3` leaves out.
FACTOR = 256.0


@triton.jit
def from_e4m3(byte):
    """uint8 to float16: the value / 256, exactly; NaN stays NaN."""
    bits = byte.to(tl.uint16)
    half = ((bits & 0x80) << 8) | ((bits & 0x7F) << 7)
    return tl.where((bits & 0x7F) == 0x7F, 0x7FFF, half).to(tl.uint16).to(tl.float16, bitcast=True)


@triton.jit
def to_e4m3(x):
    """float32 to uint8: the nearest, ties to even; beyond 448 it is 448, NaN stays NaN."""
    sign = (x.to(tl.uint32, bitcast=True) >> 24) & 0x80
    size = tl.minimum(tl.abs(x), 448.0)
    bits = size.to(tl.uint32, bitcast=True)
    # Rounds off 20 bits of the mantissa; a carry runs on into the exponent, as it should.
    normal = ((bits + 0x7FFFF + ((bits >> 20) & 1)) >> 20) - (120 << 3)
    # Below 2**-6 the step is 2**-9, which is the last place of a float32 in [2**14, 2**15).
    small = (size + 16384.0).to(tl.uint32, bitcast=True) - 0x46800000
    byte = tl.where(x != x, 0x7F, tl.where(size < 0.015625, small, normal))
    return (byte | sign).to(tl.uint8)
