# mypy: disallow-incomplete-defs=False
"""What stands between the projection and attention, in one pass: norms of q and k, rotary embedding, cache write.

A program takes BLOCK_H heads of one token out of the row [q heads | k heads | v heads]. Rotated q goes back to its
place; k and v go to the token's slot only, because attention reads them there.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels.triton.fp8 import to_e4m3


@triton.jit
def rotary_and_cache_kernel(
    qkv_ptr,
    angles_ptr,
    positions_ptr,
    slots_ptr,
    q_norm_ptr,
    k_norm_ptr,
    k_cache_ptr,
    v_cache_ptr,
    fp8_scales_ptr,
    eps,
    qkv_stride,
    k_stride_block,
    k_stride_slot,
    k_stride_head,
    v_stride_block,
    v_stride_slot,
    v_stride_head,
    BLOCK_SIZE: tl.constexpr,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HALF: tl.constexpr,
    HALF_PADDED: tl.constexpr,
    BLOCK_H: tl.constexpr,
    NORMED: tl.constexpr,
    FP8: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    dim = tl.arange(0, HALF_PADDED)
    in_half = (dim < HALF)[None, :]
    inside = (head < HEADS + 2 * KV_HEADS)[:, None] & in_half
    at = qkv_ptr + token * qkv_stride + head[:, None] * (2 * HALF) + dim[None, :]
    a = tl.load(at, mask=inside, other=0.0).to(tl.float32)
    b = tl.load(at + HALF, mask=inside, other=0.0).to(tl.float32)
    is_q = head < HEADS
    is_k = (head >= HEADS) & (head < HEADS + KV_HEADS)
    is_v = (head >= HEADS + KV_HEADS) & (head < HEADS + 2 * KV_HEADS)
    x, y = a, b
    if NORMED:
        dtype = qkv_ptr.dtype.element_ty
        mean = (tl.sum(x * x, 1) + tl.sum(y * y, 1)) / (2 * HALF)
        rate = 1.0 / tl.sqrt(mean + eps)
        q_low = tl.load(q_norm_ptr + dim, mask=dim < HALF, other=0.0).to(tl.float32)[None, :]
        q_high = tl.load(q_norm_ptr + HALF + dim, mask=dim < HALF, other=0.0).to(tl.float32)[None, :]
        k_low = tl.load(k_norm_ptr + dim, mask=dim < HALF, other=0.0).to(tl.float32)[None, :]
        k_high = tl.load(k_norm_ptr + HALF + dim, mask=dim < HALF, other=0.0).to(tl.float32)[None, :]
        # Rounded before the weight and after it, as transformers does.
        x = (x * rate[:, None]).to(dtype).to(tl.float32) * tl.where(is_q[:, None], q_low, k_low)
        y = (y * rate[:, None]).to(dtype).to(tl.float32) * tl.where(is_q[:, None], q_high, k_high)
        x = x.to(dtype).to(tl.float32)
        y = y.to(dtype).to(tl.float32)
    position = tl.load(positions_ptr + token).to(tl.int64)
    angle = angles_ptr + position * (2 * HALF) + dim
    cos = tl.load(angle, mask=dim < HALF, other=0.0)[None, :]
    sin = tl.load(angle + HALF, mask=dim < HALF, other=0.0)[None, :]
    low = x * cos - y * sin
    high = y * cos + x * sin
    write_q = is_q[:, None] & in_half
    tl.store(at, low.to(qkv_ptr.dtype.element_ty), mask=write_q)
    tl.store(at + HALF, high.to(qkv_ptr.dtype.element_ty), mask=write_q)

    slot = tl.load(slots_ptr + token).to(tl.int64)
    if slot < 0:
        return
    # 64 bits: a pool has more than 2**31 elements long before a GPU is full.
    block = slot // BLOCK_SIZE
    offset = slot % BLOCK_SIZE
    k_at = k_cache_ptr + block * k_stride_block + offset * k_stride_slot
    k_at = k_at + (head - HEADS)[:, None] * k_stride_head + dim[None, :]
    v_at = v_cache_ptr + block * v_stride_block + offset * v_stride_slot
    v_at = v_at + (head - HEADS - KV_HEADS)[:, None] * v_stride_head + dim[None, :]
    write_k = is_k[:, None] & in_half
    write_v = is_v[:, None] & in_half
    if FP8:
        k_scale = tl.load(fp8_scales_ptr + head - HEADS, mask=is_k, other=1.0)[:, None]
        v_scale = tl.load(fp8_scales_ptr + head - HEADS, mask=is_v, other=1.0)[:, None]
        tl.store(k_at, to_e4m3(low / k_scale), mask=write_k)
        tl.store(k_at + HALF, to_e4m3(high / k_scale), mask=write_k)
        tl.store(v_at, to_e4m3(a / v_scale), mask=write_v)
        tl.store(v_at + HALF, to_e4m3(b / v_scale), mask=write_v)
    else:
        dtype = k_cache_ptr.dtype.element_ty
        tl.store(k_at, low.to(dtype), mask=write_k)
        tl.store(k_at + HALF, high.to(dtype), mask=write_k)
        tl.store(v_at, a.to(dtype), mask=write_v)
        tl.store(v_at + HALF, b.to(dtype), mask=write_v)


def tile_shape(heads: int, kv_heads: int, head_dim: int, *, normed: bool = False, fp8: bool = False) -> dict[str, int]:
    """The kernel's compile-time numbers for a shape."""
    half = head_dim // 2
    padded = triton.next_power_of_2(half)
    return {
        "HEADS": heads,
        "KV_HEADS": kv_heads,
        "HALF": half,
        "HALF_PADDED": padded,
        "BLOCK_H": min(triton.next_power_of_2(heads + 2 * kv_heads), max(1, 1024 // padded)),
        "NORMED": normed,
        "FP8": fp8,
    }


def rotary_and_cache(
    qkv: torch.Tensor,
    angles: torch.Tensor,
    positions: torch.Tensor,
    slots: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    q_norm: torch.Tensor | None = None,
    k_norm: torch.Tensor | None = None,
    eps: float = 0.0,
    fp8_scales: torch.Tensor | None = None,
) -> None:
    """Norm and rotate q in place; norm and rotate k, and write it and v to their slots.

    Args:
        qkv: [T, num_heads + 2 * num_kv_heads, head_dim], float32, float16 or bfloat16: heads of q, of k, of v; any
            stride between tokens. The parts of k and v are left as they were.
        angles: [positions, head_dim] float32: cos of the pairs (i, i + head_dim / 2), then sin.
        positions, slots: [T] int32; slot -1: nothing is written for this token.
        k_cache, v_cache: [num_blocks, block_size, num_kv_heads, head_dim], any strides but the last, which is 1.
            uint8: bytes of e4m3 of K / scale.
        q_norm, k_norm, eps: weights [head_dim] of an RMSNorm before the rotation, or None.
        fp8_scales: [2, num_kv_heads] float32 for a uint8 cache.

    Raises:
        ValueError: a tensor is not contiguous where it must be, or a uint8 cache comes without scales.
    """
    tokens, all_heads, dim = qkv.shape
    kv_heads = k_cache.shape[2]
    if qkv.stride(-1) != 1 or qkv.stride(1) != dim or k_cache.stride(-1) != 1 or v_cache.stride(-1) != 1:
        raise ValueError("the heads of qkv and the last dimension of the caches must be contiguous")
    fp8 = k_cache.dtype == torch.uint8
    if fp8 and fp8_scales is None:
        raise ValueError("a cache of bytes needs fp8_scales")
    if tokens == 0:
        return
    shape = tile_shape(all_heads - 2 * kv_heads, kv_heads, dim, normed=q_norm is not None, fp8=fp8)
    rotary_and_cache_kernel[(tokens, triton.cdiv(all_heads, shape["BLOCK_H"]))](
        qkv,
        angles,
        positions,
        slots,
        q_norm,
        k_norm,
        k_cache,
        v_cache,
        fp8_scales,
        eps,
        qkv.stride(0),
        *k_cache.stride()[:3],
        *v_cache.stride()[:3],
        BLOCK_SIZE=k_cache.shape[1],
        **shape,
    )
