# mypy: disallow-incomplete-defs=False
"""Copy whole blocks: within a pool (copy on write), and between a pool and a contiguous buffer (swap)."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels.triton.upload import Upload

BLOCK = 2048  # words of 8 bytes


@triton.jit
def copy_blocks_kernel(source_ptr, target_ptr, source_ids_ptr, target_ids_ptr, words, BLOCK: tl.constexpr):
    """A program copies BLOCK words of one block. No ids: the blocks lie one after the other."""
    i = tl.program_id(0)
    source = i.to(tl.int64)
    if source_ids_ptr is not None:
        source = tl.load(source_ids_ptr + i).to(tl.int64)
    target = i.to(tl.int64)
    if target_ids_ptr is not None:
        target = tl.load(target_ids_ptr + i).to(tl.int64)
    # Both offsets in 64 bits: a block of a large model alone has millions of bytes.
    word = tl.program_id(1).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = word < words
    tl.store(target_ptr + target * words + word, tl.load(source_ptr + source * words + word, mask=inside), mask=inside)


def copy_blocks(pool: torch.Tensor, pairs: tuple[tuple[int, int], ...]) -> None:
    """pool[target] = pool[source] for every (source, target); every source is read before any target is written.

    Args:
        pool: [num_blocks, ...] contiguous; a block's bytes are a multiple of 8.
    """
    if not pairs:
        return
    sources, targets = zip(*pairs, strict=True)
    if set(sources) & set(targets):  # a block that is read and written: through a buffer
        scatter_blocks(gather_blocks(pool, sources), pool, targets)
        return
    upload = Upload()
    places = upload.add(sources), upload.add(targets)
    sent = upload.send(pool.device)
    _copy(pool, pool, sent[places[0]], sent[places[1]], len(pairs))


def gather_blocks(pool: torch.Tensor, ids: tuple[int, ...]) -> torch.Tensor:
    """[len(ids), ...]: copies of those blocks, one after the other, to be sent to the host in one piece."""
    out = torch.empty((len(ids), *pool.shape[1:]), dtype=pool.dtype, device=pool.device)
    if ids:
        upload = Upload()
        place = upload.add(ids)
        _copy(pool, out, upload.send(pool.device)[place], None, len(ids))
    return out


def scatter_blocks(blocks: torch.Tensor, pool: torch.Tensor, ids: tuple[int, ...]) -> None:
    """pool[ids[i]] = blocks[i]; blocks [len(ids), ...] contiguous, on the pool's device."""
    if ids:
        upload = Upload()
        place = upload.add(ids)
        _copy(blocks, pool, None, upload.send(pool.device)[place], len(ids))


def _copy(
    source: torch.Tensor,
    target: torch.Tensor,
    source_ids: torch.Tensor | None,
    target_ids: torch.Tensor | None,
    count: int,
) -> None:
    words = _words(source), _words(target)
    size = words[0].shape[1]
    copy_blocks_kernel[(count, triton.cdiv(size, BLOCK))](*words, source_ids, target_ids, size, BLOCK=BLOCK)


def _words(blocks: torch.Tensor) -> torch.Tensor:
    """[N, words] int64 view of [N, ...]."""
    if not blocks.is_contiguous():
        raise ValueError("blocks must be contiguous")
    flat = blocks.view(blocks.shape[0], -1)
    if flat.shape[1] * flat.element_size() % 8:
        raise ValueError(f"a block of {flat.shape[1] * flat.element_size()} bytes is not a multiple of 8")
    return flat.view(torch.int64)
