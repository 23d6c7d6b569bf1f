"""How near the machine's limits the CPU kernels come: ``python -m kernels.cpu.bench [--threads N]``.

Every figure stands beside its limit, max(bytes / read bandwidth, operations / float32 rate), both rates measured in the
same run with torch on the same threads. Weights are random: what is measured does not depend on them.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable

import torch

from kernels.cpu.build import ensure
from kernels.cpu.library import Library, Model, Sequences, Shape

# SmolLM2-135M.
SHAPE = Shape(vocab=49152, hidden=576, layers=30, heads=9, kv_heads=3, dim=64, intermediate=1536, eps=1e-5)
BLOCK = 16


def best(f: Callable[[], object], tries: int) -> float:
    """Seconds of the fastest call, after one that does not count."""
    f()
    fastest = float("inf")
    for _ in range(tries):
        began = time.perf_counter()
        f()
        fastest = min(fastest, time.perf_counter() - began)
    return fastest


def machine() -> tuple[float, float]:
    """(bytes/s read, float32 operations/s of a matrix product) with torch's threads."""
    big, square = torch.ones(2**26), torch.randn(2048, 2048)
    read = best(big.sum, 15)
    return big.numel() * 4 / read, 2 * 2048**3 / best(lambda: square @ square, 15)


def random_model(library: Library, shape: Shape, threads: int) -> Model:
    """A model of that shape, head and embedding tied."""
    model = Model(library, shape, threads)
    width = (shape.heads + 2 * shape.kv_heads) * shape.dim
    sizes = {
        "qkv": (width, shape.hidden),
        "o": (shape.hidden, shape.heads * shape.dim),
        "gate_up": (2 * shape.intermediate, shape.hidden),
        "down": (shape.hidden, shape.intermediate),
    }
    ones = torch.ones(shape.hidden)
    for layer in range(shape.layers):
        for kind, (n, k) in sizes.items():
            model.linear(layer, kind, torch.randn(n, k) * k**-0.5, None)
        model.norms(layer, ones, ones, None, None)
    model.linear(0, "head", torch.randn(shape.vocab, shape.hidden), None)
    model.finish(ones, tied=True)
    return model


def work(shape: Shape, tokens: int, rows: int, keys: int, read: int) -> tuple[float, float]:
    """(bytes, operations) of a step: ``keys`` summed over its queries, ``read`` summed over its sequences."""
    layer = shape.hidden * ((2 * shape.heads + 2 * shape.kv_heads) * shape.dim + 3 * shape.intermediate)
    head = shape.vocab * shape.hidden
    size = 4.0 * (shape.layers * layer + head + read * shape.layers * 2 * shape.kv_heads * shape.dim)
    attention = 4.0 * keys * shape.layers * shape.heads * shape.dim
    return size, 2.0 * (tokens * shape.layers * layer + rows * head) + attention


class Steps:
    """Calls of one model on one pool."""

    def __init__(self, model: Model, tokens: int) -> None:
        shape = model.shape
        self.model = model
        self.pool = torch.zeros(tokens // BLOCK + 2, shape.layers, 2, BLOCK, shape.kv_heads, shape.dim)
        angles = torch.arange(8192)[:, None] * 10000.0 ** -(torch.arange(0, shape.dim, 2) / shape.dim)
        self.angles = torch.cat((angles.cos(), angles.sin()), dim=1)

    def __call__(self, queries: int, sequences: int, length: int) -> tuple[Callable[[], torch.Tensor], float, float]:
        """(a step in which each sequence computes its last ``queries`` tokens, its bytes, its operations)."""
        each = -(-length // BLOCK)
        tables = [list(range(1 + i * each, 1 + (i + 1) * each)) for i in range(sequences)]
        positions = list(range(length - queries, length)) * sequences
        slots = [t[p // BLOCK] * BLOCK + p % BLOCK for t in tables for p in range(length - queries, length)]
        step = Sequences([queries] * sequences, [length] * sequences, tables, slots)
        ids = [(7 * i) % self.model.shape.vocab for i in range(queries * sequences)]
        wanted = [queries * (i + 1) - 1 for i in range(sequences)]
        size, operations = work(
            self.model.shape, len(ids), sequences, sum(p + 1 for p in positions), sequences * length
        )
        return lambda: self.model.forward(step, ids, positions, wanted, self.angles, self.pool), size, operations


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--tries", type=int, default=8)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    library = Library(ensure())
    bandwidth, rate = machine()
    print(
        f"{library.simd}, {options.threads} threads: reads {bandwidth / 1e9:.1f} GB/s, float32 {rate / 1e9:.0f} GFLOP/s"
    )
    print(f"load average {os.getloadavg()[0]:.1f}")
    steps = Steps(random_model(library, SHAPE, options.threads), 64 * 512)
    print(f"{'step':<34} {'ms':>8} {'limit ms':>9} {'share':>6} {'tokens/s':>9}")
    for name, queries, sequences, length in (
        ("decode, batch 1, context 256", 1, 1, 256),
        ("decode, batch 4, context 256", 1, 4, 256),
        ("decode, batch 16, context 256", 1, 16, 256),
        ("decode, batch 64, context 256", 1, 64, 256),
        ("decode, batch 1, context 4096", 1, 1, 4096),
        ("decode, batch 64, context 512", 1, 64, 512),
        ("prefill, 512 tokens", 512, 1, 512),
        ("prefill, last 64 of 2048", 64, 1, 2048),
    ):
        step, size, operations = steps(queries, sequences, length)
        seconds = best(step, options.tries)
        limit = max(size / bandwidth, operations / rate)
        tokens = queries * sequences / seconds
        print(f"{name:<34} {seconds * 1e3:8.1f} {limit * 1e3:9.1f} {limit / seconds:6.0%} {tokens:9.0f}", flush=True)


if __name__ == "__main__":
    main()
