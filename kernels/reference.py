"""The readable truth about attention over a paged KV cache: plain torch, loops, any dtype (float64 for tests).

A cache is a pair of tensors [num_blocks, block_size, num_kv_heads, head_dim]. Token ``p`` of a sequence lives in block
``block_table[p // block_size]`` at offset ``p % block_size`` (Kwon et al., PagedAttention, arXiv:2309.06180)::

    block_table = [7, 2, 9], block_size = 4, seq_len = 10, query_len = 3

    position   0 1 2 3 | 4 5 6 7 | 8 9 . .        . = slot of nobody: never read, whatever it holds
    block         7    |    2    |    9
    query                      q   q q            the query's last token stands at seq_len - 1
"""

from __future__ import annotations

from collections.abc import Sequence

import torch


def reshape_and_cache(
    k: torch.Tensor,
    v: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    slot_mapping: Sequence[int],
) -> None:
    """Write each token's K and V to its slot, in place.

    Args:
        k, v: [T, num_kv_heads, head_dim].
        k_cache, v_cache: [num_blocks, block_size, num_kv_heads, head_dim], any strides.
        slot_mapping: [T] ``block_id * block_size + offset``, or -1: nothing is written for this token.
    """
    block_size = k_cache.shape[1]
    for token, slot in enumerate(slot_mapping):
        if slot < 0:
            continue
        block, offset = divmod(int(slot), block_size)
        k_cache[block, offset] = k[token].to(k_cache.dtype)
        v_cache[block, offset] = v[token].to(v_cache.dtype)


def paged_attention(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_tables: Sequence[Sequence[int]],
    query_lens: Sequence[int],
    seq_lens: Sequence[int],
    scale: float,
) -> torch.Tensor:
    """Causal grouped-query attention of a ragged batch over the cache.

    Query head ``h`` reads KV head ``h // (num_heads // num_kv_heads)`` (Ainslie et al., GQA, arXiv:2305.13245).

    Args:
        q: [T, num_heads, head_dim]; the tokens of a sequence are adjacent, T = sum(query_lens).
        k_cache, v_cache: [num_blocks, block_size, num_kv_heads, head_dim], any strides.
        block_tables: [S] block ids that cover ``seq_len`` tokens; more ids are ignored.
        query_lens: [S] tokens of each sequence in q.
        seq_lens: [S] tokens of each sequence in the cache, those of q among them.
        scale: multiplies q @ k.

    Returns:
        [T, num_heads, head_dim] in q's dtype, computed in q's dtype.
    """
    block_size = k_cache.shape[1]
    group = q.shape[1] // k_cache.shape[2]
    out = torch.empty_like(q)
    row = 0
    for table, query_len, seq_len in zip(block_tables, query_lens, seq_lens, strict=True):
        # [seq_len, num_heads, head_dim]
        keys = torch.stack([k_cache[table[p // block_size], p % block_size] for p in range(seq_len)]).to(q.dtype)
        values = torch.stack([v_cache[table[p // block_size], p % block_size] for p in range(seq_len)]).to(q.dtype)
        keys, values = keys.repeat_interleave(group, dim=1), values.repeat_interleave(group, dim=1)
        for i in range(query_len):
            visible = seq_len - query_len + i + 1
            scores = (keys[:visible] * q[row]).sum(dim=2) * scale
            weights = torch.softmax(scores, dim=0)
            out[row] = (weights[:, :, None] * values[:visible]).sum(dim=0)
            row += 1
    return out


def rotate(x: torch.Tensor, angles: torch.Tensor) -> torch.Tensor:
    """Rotary embedding of the pairs (i, i + head_dim / 2) (Su et al., RoFormer, arXiv:2104.09864).

    Args:
        x: [T, heads, head_dim].
        angles: [T, head_dim]: cos of each pair, then sin.
    """
    half = x.shape[-1] // 2
    cos, sin = angles[:, None, :half], angles[:, None, half:]
    low, high = x[..., :half], x[..., half:]
    return torch.cat((low * cos - high * sin, high * cos + low * sin), dim=-1)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """x / sqrt(mean(x**2) + eps) * weight over the last dimension (Zhang and Sennrich, arXiv:1910.07467)."""
    return x / torch.sqrt((x * x).mean(dim=-1, keepdim=True) + eps) * weight


def swiglu(gate_up: torch.Tensor) -> torch.Tensor:
    """silu(gate) * up of [T, 2 * width], gate first (Shazeer, arXiv:2002.05202)."""
    gate, up = gate_up.chunk(2, dim=-1)
    return gate / (1 + torch.exp(-gate)) * up
