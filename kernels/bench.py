"""How near the Triton attention kernels come to a GPU's limits: ``python -m kernels.bench``.

First the kernels must be right. Then two rates are measured, of a copy and of a bfloat16 matrix product, and every
figure stands beside them: decode as a share of the copy's bandwidth, prefill as a share of the product's rate. torch's
own attention over contiguous K and V is timed beside ours. Without a GPU it says so and exits with status 2.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from kernels import reference

BLOCK_SIZE = 16
DECODE_CONTEXTS = (512, 1024, 4096, 16384, 65536)
DECODE_BATCHES = (1, 4, 16, 64, 256)
PREFILLS = ((512, 512), (2048, 2048), (8192, 8192), (512, 8192), (2048, 32768))
CASCADES = ((16, 1000, 64), (64, 1000, 64), (64, 4000, 64), (256, 1000, 200))
MOST_KEYS = 2**21  # of one case, all sequences together: bounds its memory


@dataclass(frozen=True)
class Heads:
    """The shape of attention in a model: by default that of Llama 3 8B."""

    heads: int = 32
    kv_heads: int = 8
    dim: int = 128

    @property
    def scale(self) -> float:
        return float(self.dim**-0.5)


@dataclass(frozen=True)
class Machine:
    """Bytes per second of a copy, read and written; floating-point operations per second of a bfloat16 product."""

    name: str
    bandwidth: float
    rate: float


@dataclass(frozen=True)
class Batch:
    """What attention works on: ``lens`` tokens in the cache, of which the last ``queries`` are asked about."""

    queries: list[int]
    lens: list[int]
    tables: list[list[int]]

    @property
    def blocks(self) -> int:
        """Ids in use, and the null block."""
        return 1 + max((b for table in self.tables for b in table), default=0)


def batch_of(sequences: int, query: int, length: int, shared: int = 0) -> Batch:
    """Equal sequences whose blocks lie scattered; the first ``shared`` tokens, in whole blocks, are common to all."""
    common, each = shared // BLOCK_SIZE, -(-length // BLOCK_SIZE)
    total = common + sequences * (each - common)
    scattered = (torch.randperm(total, generator=torch.Generator().manual_seed(1)) + 1).tolist()
    tables = []
    for i in range(sequences):
        first = common + i * (each - common)
        tables.append(scattered[:common] + scattered[first : first + each - common])
    return Batch([query] * sequences, [length] * sequences, tables)


def read_bytes(batch: Batch, heads: Heads, size: int = 2) -> int:
    """Bytes that attention must move at least, if every sequence reads its own keys: K, V, q and the output."""
    keys = 2 * heads.kv_heads * heads.dim * sum(batch.lens)
    return size * (keys + 2 * heads.heads * heads.dim * sum(batch.queries))


def operations(batch: Batch, heads: Heads) -> int:
    """Multiplications and additions of q @ k and of the weighted values, for the keys that causal attention sees."""
    seen = sum(q * (n - q) + q * (q + 1) // 2 for q, n in zip(batch.queries, batch.lens, strict=True))
    return 4 * heads.heads * heads.dim * seen


def table(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Markdown with a title."""
    lines = [f"\n{title}\n", "| " + " | ".join(columns) + " |", "|" + " --- |" * len(columns)]
    return "\n".join(lines + ["| " + " | ".join(row) + " |" for row in rows])


def decode_row(batch: Batch, heads: Heads, machine: Machine, ours: float, torchs: float | None) -> list[str]:
    """Batch, context, milliseconds, share of the copy's bandwidth, torch's milliseconds."""
    share = read_bytes(batch, heads) / ours / machine.bandwidth
    cells = [str(len(batch.lens)), str(batch.lens[0]), f"{ours * 1e3:.3f}", f"{share:.0%}"]
    return [*cells, "-" if torchs is None else f"{torchs * 1e3:.3f}"]


def prefill_row(batch: Batch, heads: Heads, machine: Machine, ours: float, torchs: float | None) -> list[str]:
    """Query, context, milliseconds, share of the matrix product's rate, torch's milliseconds."""
    share = operations(batch, heads) / ours / machine.rate
    cells = [str(batch.queries[0]), str(batch.lens[0]), f"{ours * 1e3:.3f}", f"{share:.0%}"]
    return [*cells, "-" if torchs is None else f"{torchs * 1e3:.3f}"]


class Runner:
    """Launches the kernels over a random pool of one layer, on a GPU or in the interpreter. Needs triton."""

    def __init__(self, batch: Batch, heads: Heads, device: str, dtype: torch.dtype = torch.bfloat16) -> None:
        self.batch, self.heads, self.dtype = batch, heads, dtype
        gen = torch.Generator(device=device).manual_seed(0)
        shape = (batch.blocks, 2, BLOCK_SIZE, heads.kv_heads, heads.dim)
        self.pool = torch.randn(shape, generator=gen, device=device, dtype=dtype)
        tokens = sum(batch.queries)
        self.q = torch.randn(tokens, heads.heads, heads.dim, generator=gen, device=device, dtype=dtype)
        self.out = torch.empty_like(self.q)

    def launch(self, *, cascade: bool, programs: int) -> Callable[[], None]:
        """A call that runs attention once; the plan is made and sent here."""
        from kernels.triton.paged_attention import DevicePlan, paged_attention, wide_rows  # noqa: PLC0415  optional
        from kernels.triton.plan import plan_attention  # noqa: PLC0415
        from kernels.triton.upload import Upload  # noqa: PLC0415

        heads, batch = self.heads, self.batch
        plan = plan_attention(
            batch.queries,
            batch.lens,
            batch.tables,
            BLOCK_SIZE,
            group=heads.heads // heads.kv_heads,
            kv_heads=heads.kv_heads,
            programs=programs,
            wide=wide_rows(heads.dim, self.dtype),
            cascade=cascade,
        )
        upload = Upload()
        places = DevicePlan.add(plan, upload)
        sent = DevicePlan.take(plan, places, upload.send(self.q.device))
        return lambda: paged_attention(self.q, self.pool[:, 0], self.pool[:, 1], sent, heads.scale, self.out)

    def torchs(self) -> Callable[[], torch.Tensor]:
        """torch's attention over contiguous keys of the same shape (random: what it costs does not depend on them)."""
        batch, heads = self.batch, self.heads
        count, query, length = len(batch.lens), batch.queries[0], batch.lens[0]
        q = self.q.view(count, query, heads.heads, heads.dim).transpose(1, 2)
        k, v = self.pool.new_ones(2, count, heads.kv_heads, length, heads.dim)
        mask = None
        if 1 < query < length:
            mask = torch.ones(query, length, dtype=torch.bool, device=q.device).tril(length - query)
        causal = query == length and query > 1
        return lambda: F.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, is_causal=causal, scale=heads.scale, enable_gqa=True
        )

    def error(self) -> float:
        """Largest difference between what :meth:`launch` left and the float64 reference."""
        batch = self.batch
        pool, q = self.pool.cpu().double(), self.q.cpu().double()
        want = reference.paged_attention(
            q, pool[:, 0], pool[:, 1], batch.tables, batch.queries, batch.lens, self.heads.scale
        )
        return float((self.out.cpu().double() - want).abs().max())


def right(device: str, heads: Heads, programs: int) -> Iterator[tuple[str, float]]:
    """(case, largest error) of small cases of everything that is timed later."""
    cases = (
        ("decode", batch_of(3, 1, 70), False, 1),
        ("split decode", batch_of(1, 1, 530), False, programs),
        ("prefill", batch_of(1, 40, 100), False, 1),
        ("cascade", batch_of(3, 1, 200, shared=160), True, 1),
    )
    for name, batch, cascade, wanted in cases:
        runner = Runner(batch, heads, device)
        runner.launch(cascade=cascade, programs=wanted)()
        yield name, runner.error()


def seconds(f: Callable[[], object], tries: int = 20) -> float:
    """Median time of a call on the GPU, by events, the caches of the chip flushed in between."""
    flush = torch.empty(2**28, dtype=torch.int8, device="cuda")
    for _ in range(3):
        f()
    found: list[float] = []
    for _ in range(tries):
        flush.zero_()
        begin = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        end = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        begin.record()
        f()
        end.record()
        torch.cuda.synchronize()
        found.append(begin.elapsed_time(end) / 1e3)
    return sorted(found)[len(found) // 2]


def measure_machine() -> Machine:
    """The rates that everything is compared with."""
    source = torch.empty(2**31, dtype=torch.int8, device="cuda")
    target = torch.empty_like(source)
    copy = seconds(lambda: target.copy_(source))
    side = 8192
    a, b = torch.randn(2, side, side, device="cuda", dtype=torch.bfloat16)
    product = seconds(lambda: a @ b)
    return Machine(torch.cuda.get_device_name(), 2 * source.numel() / copy, 2 * side**3 / product)


def measure(machine: Machine, heads: Heads, programs: int, device: str = "cuda") -> Iterator[str]:
    """The tables."""
    rows = []
    for context in DECODE_CONTEXTS:
        for size in DECODE_BATCHES:
            if size * context > MOST_KEYS:
                continue
            batch = batch_of(size, 1, context)
            runner = Runner(batch, heads, device)
            ours = seconds(runner.launch(cascade=False, programs=programs))
            rows.append(decode_row(batch, heads, machine, ours, seconds(runner.torchs())))
    yield table("Decode", ("batch", "context", "ms", "of copy bandwidth", "torch SDPA ms"), rows)
    rows = []
    for query, context in PREFILLS:
        batch = batch_of(1, query, context)
        runner = Runner(batch, heads, device)
        ours = seconds(runner.launch(cascade=False, programs=programs))
        rows.append(prefill_row(batch, heads, machine, ours, seconds(runner.torchs())))
    yield table("Prefill", ("query", "context", "ms", "of bf16 matmul rate", "torch SDPA ms"), rows)
    rows = []
    for size, shared, own in CASCADES:
        runner = Runner(batch_of(size, 1, shared + own, shared), heads, device)
        plain, cascade = (seconds(runner.launch(cascade=on, programs=programs)) for on in (False, True))
        rows.append([str(size), str(shared), str(own), f"{plain * 1e3:.3f}", f"{cascade * 1e3:.3f}"])
        rows[-1].append(f"{plain / cascade:.1f}x")
    yield table("Shared prefix", ("batch", "shared", "own", "plain ms", "cascade ms", "gain"), rows)


def main(arguments: list[str] | None = None) -> int:
    """The command; see the module's docstring."""
    parser = argparse.ArgumentParser(prog="python -m kernels.bench", description=__doc__)
    parser.add_argument("--heads", type=int, default=Heads.heads)
    parser.add_argument("--kv-heads", type=int, default=Heads.kv_heads)
    parser.add_argument("--head-dim", type=int, default=Heads.dim)
    parser.add_argument("--programs-per-processor", type=int, default=4, help="fewer than these, and keys are split")
    options = parser.parse_args(arguments)
    if not torch.cuda.is_available():
        print("there is no GPU that torch can use: nothing was measured", file=sys.stderr)
        return 2
    if importlib.util.find_spec("triton") is None:
        print("triton is not installed: nothing was measured", file=sys.stderr)
        return 2
    os.environ.pop("TRITON_INTERPRET", None)
    heads = Heads(options.heads, options.kv_heads, options.head_dim)
    programs = options.programs_per_processor * torch.cuda.get_device_properties(0).multi_processor_count
    wrong = False
    for name, error in right("cuda", heads, programs):
        print(f"{name}: largest error {error:.4f}", flush=True)
        wrong |= not error < 0.05
    if wrong:
        print("the kernels compute wrongly: nothing was measured", file=sys.stderr)
        return 1
    machine = measure_machine()
    print(f"{machine.name}: copies {machine.bandwidth / 1e9:.0f} GB/s, bf16 product {machine.rate / 1e12:.0f} TFLOP/s")
    for text in measure(machine, heads, programs):
        print(text, flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
