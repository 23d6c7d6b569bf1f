"""The memory behind the block ids."""

from __future__ import annotations

import torch

from chatsvc.errors import ConfigError
from chatsvc.models.attention.base import KVCache
from chatsvc.models.base import ModelShape


def block_bytes(shape: ModelShape, block_size: int, dtype: torch.dtype) -> int:
    """Bytes of one block, all layers, K and V."""
    return shape.num_layers * 2 * block_size * shape.num_kv_heads * shape.head_dim * dtype.itemsize


def allocate(shape: ModelShape, num_blocks: int, block_size: int, dtype: torch.dtype, device: torch.device) -> KVCache:
    """Allocate the pool once, uninitialised: pages that no token has touched cost no memory.

    Raises: ConfigError when the machine refuses that much.
    """
    size = (num_blocks + 1, shape.num_layers, 2, block_size, shape.num_kv_heads, shape.head_dim)
    try:
        return KVCache(torch.empty(size, dtype=dtype, device=device))
    except (RuntimeError, MemoryError) as e:
        gib = (num_blocks + 1) * block_bytes(shape, block_size, dtype) / 2**30
        raise ConfigError(
            f"cannot allocate the KV pool: {num_blocks} blocks are {gib:.2f} GiB; lower "
            "--kv-cache-memory or --num-kv-blocks"
        ) from e
