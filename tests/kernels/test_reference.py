"""The reference itself, against torch's own attention on contiguous tensors: an independent truth."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from kernels.reference import paged_attention, reshape_and_cache


@pytest.mark.parametrize("group", [1, 3])
@pytest.mark.parametrize(("query_len", "seq_len"), [(1, 1), (5, 5), (1, 9), (4, 11)])
def test_equals_contiguous_attention(group: int, query_len: int, seq_len: int) -> None:
    torch.manual_seed(0)
    kv_heads, dim, size = 2, 8, 4
    k, v = torch.randn(2, seq_len, kv_heads, dim, dtype=torch.float64)
    q = torch.randn(query_len, kv_heads * group, dim, dtype=torch.float64)
    caches = torch.full((2, 6, size, kv_heads, dim), float("nan"), dtype=torch.float64)
    table = [5, 1, 3]
    reshape_and_cache(k, v, caches[0], caches[1], [table[p // size] * size + p % size for p in range(seq_len)])

    got = paged_attention(q, caches[0], caches[1], [table], [query_len], [seq_len], 0.3)

    causal = torch.ones(query_len, seq_len, dtype=torch.bool).tril(seq_len - query_len)
    want = F.scaled_dot_product_attention(
        q.transpose(0, 1),
        k.repeat_interleave(group, 1).transpose(0, 1),
        v.repeat_interleave(group, 1).transpose(0, 1),
        attn_mask=causal,
        scale=0.3,
    ).transpose(0, 1)
    torch.testing.assert_close(got, want)


def test_slot_minus_one_writes_nothing() -> None:
    caches = torch.zeros(2, 2, 4, 1, 2)
    k, v = torch.ones(2, 2, 1, 2)
    reshape_and_cache(k, v, caches[0], caches[1], [-1, 6])
    assert caches[0, 1, 2].eq(1).all() and caches[1, 1, 2].eq(1).all()
    assert caches.sum() == 4
