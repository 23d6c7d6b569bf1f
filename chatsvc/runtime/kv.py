"""The memory behind the block ids."""

from __future__ import annotations

import math
import mmap

import torch

from chatsvc.errors import ConfigError
from chatsvc.models.attention.base import KVCache
from chatsvc.models.base import ModelShape


def block_bytes(shape: ModelShape, block_size: int, dtype: torch.dtype) -> int:
    """Bytes of one block, all layers, K and V."""
    return shape.num_layers * 2 * block_size * shape.num_kv_heads * shape.head_dim * dtype.itemsize


def allocate(shape: ModelShape, num_blocks: int, block_size: int, dtype: torch.dtype, device: torch.device) -> KVCache:
    """Allocate the pool once, uninitialised: pages that nobody has touched cost no memory.

    Raises: ConfigError when the machine refuses that much.
    """
    size = (num_blocks + 1, shape.num_layers, 2, block_size, shape.num_kv_heads, shape.head_dim)
    try:
        if device.type == "cpu":
            return KVCache(_pages(math.prod(size) * dtype.itemsize).view(dtype).view(size))
        return KVCache(torch.empty(size, dtype=dtype, device=device))
    except (RuntimeError, MemoryError, OSError, OverflowError) as e:
        gib = (num_blocks + 1) * block_bytes(shape, block_size, dtype) / 2**30
        raise ConfigError(
            f"cannot allocate the KV pool: {num_blocks} blocks are {gib:.2f} GiB; lower "
            "--kv-cache-memory or --num-kv-blocks"
        ) from e


def _pages(size: int) -> torch.Tensor:
    """``size`` bytes of zeros that take memory where they are touched, in huge pages where the system has them.

    A sequence's blocks lie anywhere, and a layer's part of a block is some KiB: with pages of 4 KiB nearly each of them
    has to be looked up in the page tables, and attention reads at about half of the speed.
    """
    if not hasattr(mmap, "MADV_HUGEPAGE"):
        return torch.frombuffer(mmap.mmap(-1, size), dtype=torch.uint8)
    # Private: memory that processes share follows another setting of the system's, which is off nearly everywhere.
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    try:
        memory.madvise(mmap.MADV_HUGEPAGE)
    except OSError:
        pass  # a kernel without them
    return torch.frombuffer(memory, dtype=torch.uint8)
