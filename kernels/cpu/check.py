"""Does a compiled library compute? ``python -m kernels.cpu.check LIBRARY``: run once after it is built.

A minute part of what the tests do: that every tile gives one row the same bits, that whole numbers are multiplied
exactly, and that linear layers (of floats and of blocks) and attention agree with float64.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import torch

from kernels import reference
from kernels.cpu.library import Attention, Library, Rows, Sequences


def check(path: Path) -> None:
    """Raises: AssertionError, OSError."""
    library = Library(path)
    generator = torch.Generator().manual_seed(0)
    x, weight, bias = (torch.randn(size, generator=generator) for size in ((40, 100), (70, 100), (70,)))
    whole = library.linear(x, weight, bias, 2)
    torch.testing.assert_close(whole.double(), x.double() @ weight.double().T + bias.double(), rtol=0, atol=1e-4)
    for rows in range(1, 26):
        assert torch.equal(library.linear(x[:rows], weight, bias, 1), whole[:rows]), f"tile of {rows} rows"

    blocks = np.random.default_rng(0).integers(0, 256, (70, 3, 34), dtype=np.uint8)  # q8_0: scale, 32 numbers
    blocks[:, :, :2] = np.float16(0.01).reshape(1).view(np.uint8)
    inputs = torch.randn(40, 96, generator=generator)
    numbers = torch.from_numpy(blocks[:, :, 2:].view(np.int8).astype(np.float64).reshape(70, 96))
    products = library.linear(inputs, Rows.at("q8_0", 96, blocks.reshape(70, -1)), None, 2)
    want = inputs.double() @ numbers.T * float(np.float16(0.01))
    torch.testing.assert_close(products.double(), want, rtol=0, atol=1e-4)
    for count in range(1, 40):
        part = library.linear(inputs[:count], Rows.at("q8_0", 96, blocks.reshape(70, -1)), None, 1)
        assert torch.equal(part, products[:count]), f"blocks, {count} rows"

    # Numbers whose scales are 1: every sum is a whole number, and no rounding can hide a wrong one.
    numbers, weights = (torch.randint(-127, 128, (n, 96), generator=generator).float() for n in (20, 70))
    numbers[:, ::32] = weights[:, ::32] = 127
    if library.tiles:  # inputs have 16 bits, and a scale for a row; the sums stay below 2^24
        numbers[:, :30] = torch.randint(-32639, 32640, (20, 30), generator=generator)
        weights[:, :30] = torch.randint(-10, 11, (70, 30), generator=generator)
        numbers[:, 0] = 32639
    want = numbers.long() @ weights.long().T
    for rows in range(1, 21):
        got = library.linear(numbers[:rows], weights, None, 2, low=True)
        assert torch.equal(got.long(), want[:rows]), f"whole numbers, {rows} rows"

    tables = [list(range(1, 18)), [18, 19]]
    q, k, v = (torch.randn(131, heads, 32, generator=generator) for heads in (6, 2, 2))
    slots = [table[p // 8] * 8 + p % 8 for table, n in zip(tables, (130, 1), strict=True) for p in range(n)]
    step = Sequences([130, 1], [130, 1], tables, slots)
    for kept, error in ((torch.float32, 1e-5), (torch.bfloat16, 0.02)):  # q and weights are bfloat16 by tiles
        pool = torch.full((20, 1, 2, 8, 2, 32), float("nan"), dtype=kept)
        out = torch.full_like(q, float("nan"))
        Attention(library, 2)(step.pack(), 2, q, k, v, pool, 0, 0.2, out)
        exact = reference.paged_attention(
            q.double(), pool[:, 0, 0].double(), pool[:, 0, 1].double(), tables, [130, 1], [130, 1], 0.2
        )
        torch.testing.assert_close(out.double(), exact, rtol=0, atol=error)


if __name__ == "__main__":
    check(Path(sys.argv[1]))
