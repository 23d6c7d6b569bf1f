"""Blocks of a real pool, as bytes and back."""

from __future__ import annotations

import pytest
import torch

from chatsvc.models.attention.base import KVCache
from chatsvc.runtime.runner import read_blocks, write_blocks


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_every_bit_survives(dtype: torch.dtype) -> None:
    shape = (7, 3, 2, 4, 2, 8)
    bits = torch.randint(0, 256, (*shape[:-1], shape[-1] * dtype.itemsize), dtype=torch.uint8)  # NaNs of all kinds too
    source, target = KVCache(bits.clone().view(dtype)), KVCache(torch.zeros(shape, dtype=dtype))
    data = read_blocks(source, [5, 2, 6])
    per_block = bits[0].numel()
    assert len(data) == 3 * per_block and data.format == "B"
    assert bytes(data[per_block : 2 * per_block]) == bits[2].numpy().tobytes()
    write_blocks(target, [1, 4, 3], bytes(data))
    raw = target.data.view(torch.uint8)
    for there, here in ((1, 5), (4, 2), (3, 6)):
        assert torch.equal(raw[there], bits[here])
    for untouched in (0, 2, 5, 6):
        assert not raw[untouched].any()
