"""Does a compiled library compute? ``python -m kernels.cpu.check LIBRARY``: run once after it is built.

A minute part of what the tests do: that every tile gives one row the same bits, that whole numbers are multiplied
exactly, and that linear layers (of floats and of blocks) and attention agree with float64.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
import torch

from kernels import reference
from kernels.cpu.library import Attention, Library, Rows, Sequences, row_bytes


def check(path: Path) -> None:
    """Raises: AssertionError, OSError."""
    library = Library(path)
    generator = torch.Generator().manual_seed(0)
    x, weight, bias = (torch.randn(size, generator=generator) for size in ((40, 100), (70, 100), (70,)))
    whole = library.linear(x, weight, bias, 2)
    torch.testing.assert_close(whole.double(), x.double() @ weight.double().T + bias.double(), rtol=0, atol=1e-4)
    for rows in range(1, 26):
        assert torch.equal(library.linear(x[:rows], weight, bias, 1), whole[:rows]), f"tile of {rows} rows"

    # Blocks: a scale, in q4_1 a least value, 32 numbers.
    inputs = torch.randn(40, 96, generator=generator)
    scale, least = np.float16(0.01), np.float16(-0.05)
    for fmt, head in (("q8_0", [scale]), ("q4_1", [scale, least])):
        blocks = np.random.default_rng(0).integers(0, 256, (70, 3, row_bytes(fmt, 32)), dtype=np.uint8)
        blocks[:, :, : 2 * len(head)] = np.array(head).view(np.uint8)
        tail = blocks[:, :, 2 * len(head) :]
        stored = tail.view(np.int8) if fmt == "q8_0" else np.concatenate([tail & 15, tail >> 4], axis=2)
        floats = stored.reshape(70, 96) * float(scale) + (float(least) if fmt == "q4_1" else 0.0)
        packed = Rows.at(fmt, 96, blocks.reshape(70, -1))
        products = library.linear(inputs, packed, None, 2)
        exact = inputs.double() @ torch.from_numpy(floats).T
        torch.testing.assert_close(products.double(), exact, rtol=0, atol=1e-4)
        for count in range(1, 40):
            assert torch.equal(library.linear(inputs[:count], packed, None, 1), products[:count]), (
                f"{fmt}, {count} rows"
            )

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
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("library", type=Path, help="what kernels.cpu.build made")
    check(parser.parse_args().library)
