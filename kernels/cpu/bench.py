"""How near the machine's limits the CPU kernels come: ``python -m kernels.cpu.bench [--threads N] [--weights FORMAT]``.

Every figure stands beside its limit, max(bytes / read bandwidth, float32 operations / float32 rate, int8 operations /
twice that rate), both rates measured in the same run with torch on the same threads. Bytes are what a step cannot avoid
reading: the weights as they are packed, and keys and values as the pool keeps them. Weights are random: what is
measured does not depend on them.
"""

from __future__ import annotations

import argparse
import contextlib
import math
import mmap
import os
import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from kernels.cpu.build import ensure
from kernels.cpu.library import SOURCES, Library, Model, Rows, Sequences, Shape, row_bytes

# SmolLM2-135M.
SHAPE = Shape(vocab=49152, hidden=576, layers=30, heads=9, kv_heads=3, dim=64, intermediate=1536, eps=1e-5)
BLOCK = 16


Clock = Callable[[], float]


def best(f: Callable[[], object], tries: int, clock: Clock = time.perf_counter) -> float:
    """Seconds of the fastest call, after one that does not count."""
    f()
    fastest = float("inf")
    for _ in range(tries):
        began = clock()
        f()
        fastest = min(fastest, clock() - began)
    return fastest


def machine(clock: Clock = time.perf_counter) -> tuple[float, float]:
    """(bytes/s read, float32 operations/s of a matrix product) with torch's threads."""
    big, square = torch.ones(2**26), torch.randn(2048, 2048)
    read = best(big.sum, 15, clock)
    return big.numel() * 4 / read, 2 * 2048**3 / best(lambda: square @ square, 15, clock)


def random_rows(fmt: str, n: int, k: int) -> Rows:
    """Weights [n, k] in one of the kernels' formats."""
    if fmt in ("f32", "f16", "bf16"):
        dtype = {"f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16}[fmt]
        return Rows.of((torch.randn(n, k) * k**-0.5).to(dtype))
    blocks = np.random.default_rng(n).integers(0, 256, (n, k // 32, row_bytes(fmt, 32)), dtype=np.uint8)
    # Scales and least values that make ordinary weights.
    blocks[:, :, 0:2] = np.frombuffer(np.float16(0.01).tobytes(), np.uint8)
    if fmt == "q4_1":
        blocks[:, :, 2:4] = np.frombuffer(np.float16(-0.075).tobytes(), np.uint8)
    return Rows.at(fmt, k, blocks.reshape(n, -1))


def random_model(library: Library, shape: Shape, threads: int, fmt: str, low: bool) -> Model:
    """A model of that shape, its layers in ``fmt``; head and embedding tied, and in q8_0 where layers have 4 bits."""
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
            model.linear(layer, kind, random_rows(fmt, n, k), None, low)
        model.norms(layer, ones, ones, None, None)
    head = "q8_0" if fmt.startswith("q4") else fmt
    model.linear(0, "head", random_rows(head, shape.vocab, shape.hidden), None, low)
    model.finish(ones, tied=True)
    model.settle(wait=True)
    return model


@dataclass(frozen=True)
class Work:
    """What a step cannot avoid; ``linear`` operations are int8 where the model's products are."""

    kv_bytes: float
    linear: float
    attention: float

    @classmethod
    def of(cls, shape: Shape, tokens: int, rows: int, keys: int, read: int, kept: torch.dtype) -> Work:
        """``keys``: summed over the step's queries; ``read``: over its sequences. ``kept``: what the pool keeps."""
        layer = shape.hidden * ((2 * shape.heads + 2 * shape.kv_heads) * shape.dim + 3 * shape.intermediate)
        return cls(
            float(kept.itemsize) * read * shape.layers * 2 * shape.kv_heads * shape.dim,
            2.0 * (tokens * shape.layers * layer + rows * shape.vocab * shape.hidden),
            4.0 * keys * shape.layers * shape.heads * shape.dim,
        )

    def limit(self, weight_bytes: float, bandwidth: float, rate: float, low: bool) -> float:
        """Seconds."""
        floats = self.attention + (0 if low else self.linear)
        return max((weight_bytes + self.kv_bytes) / bandwidth, floats / rate, self.linear / (2 * rate) if low else 0.0)


def huge_pages(size: int) -> torch.Tensor:
    """Bytes that lie as the service's KV pool does."""
    if not hasattr(mmap, "MADV_HUGEPAGE"):
        return torch.empty(size, dtype=torch.uint8)
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError):  # a system without them
        memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=torch.uint8)


class Steps:
    """Calls of one model on one pool."""

    def __init__(self, model: Model, tokens: int, kept: torch.dtype = torch.float32) -> None:
        shape = model.shape
        self.model = model
        size = (tokens // BLOCK + 2, shape.layers, 2, BLOCK, shape.kv_heads, shape.dim)
        self.pool = huge_pages(math.prod(size) * kept.itemsize).view(kept).view(size).zero_()
        angles = torch.arange(8192)[:, None] * 10000.0 ** -(torch.arange(0, shape.dim, 2) / shape.dim)
        self.angles = torch.cat((angles.cos(), angles.sin()), dim=1)

    def __call__(self, queries: int, sequences: int, length: int) -> tuple[Callable[[], torch.Tensor], Work]:
        """(a step in which each sequence computes its last ``queries`` tokens, what that takes)."""
        each = -(-length // BLOCK)
        tables = [list(range(1 + i * each, 1 + (i + 1) * each)) for i in range(sequences)]
        positions = list(range(length - queries, length)) * sequences
        slots = [t[p // BLOCK] * BLOCK + p % BLOCK for t in tables for p in range(length - queries, length)]
        step = Sequences([queries] * sequences, [length] * sequences, tables, slots)
        ids = [(7 * i) % self.model.shape.vocab for i in range(queries * sequences)]
        wanted = [queries * (i + 1) - 1 for i in range(sequences)]
        keys, read = sum(p + 1 for p in positions), sequences * length
        work = Work.of(self.model.shape, len(ids), sequences, keys, read, self.pool.dtype)
        return lambda: self.model.forward(step, ids, positions, wanted, self.angles, self.pool), work


STEPS = (
    ("decode, batch 1, context 256", 1, 1, 256),
    ("decode, batch 4, context 256", 1, 4, 256),
    ("decode, batch 16, context 256", 1, 16, 256),
    ("decode, batch 64, context 256", 1, 64, 256),
    ("decode, batch 1, context 4096", 1, 1, 4096),
    ("decode, batch 64, context 512", 1, 64, 512),
    ("prefill, 512 tokens", 512, 1, 512),
    ("prefill, last 64 of 2048", 64, 1, 2048),
)
LONG = [step for step in STEPS if step[3] >= 512]  # where the pool's numbers decide
POOLS = ((torch.float32, STEPS), (torch.bfloat16, STEPS), (torch.float16, LONG))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--tries", type=int, default=8)
    parser.add_argument("--weights", choices=SOURCES, default="q4_1", help="what the layers' weights come in [q4_1]")
    parser.add_argument(
        "--processor-time", action="store_true", help="one thread, and the time it had a core: for a busy machine"
    )
    options = parser.parse_args()
    clock: Clock = time.perf_counter
    if options.processor_time:
        options.threads, clock = 1, time.process_time
    torch.set_num_threads(options.threads)
    library = Library(ensure())
    bandwidth, rate = machine(clock)
    print(
        f"{library.simd}, int8 by {library.low_simd}, {options.threads} threads, weights in {options.weights}: reads "
        f"{bandwidth / 1e9:.1f} GB/s, float32 {rate / 1e9:.0f} GFLOP/s, load average {os.getloadavg()[0]:.1f}"
    )
    print(f"{'products':<9} {'KV':<9} {'step':<30} {'ms':>8} {'limit ms':>9} {'share':>6} {'tokens/s':>9}")
    for low in (False, True):
        model = random_model(library, SHAPE, options.threads, options.weights, low)
        for kept, wanted in POOLS:
            steps = Steps(model, 64 * 512, kept)
            for name, queries, sequences, length in wanted:
                step, work = steps(queries, sequences, length)
                seconds = best(step, options.tries, clock)
                limit = work.limit(model.weight_bytes, bandwidth, rate, low)
                print(
                    f"{'int8' if low else 'float32':<9} {str(kept).removeprefix('torch.'):<9} {name:<30} "
                    f"{seconds * 1e3:8.1f} {limit * 1e3:9.1f} {limit / seconds:6.0%} "
                    f"{queries * sequences / seconds:9.0f}",
                    flush=True,
                )


if __name__ == "__main__":
    main()
