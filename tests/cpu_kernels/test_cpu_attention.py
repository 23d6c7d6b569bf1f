"""Attention over a pool of bfloat16, in bfloat16 where processors multiply it: by float64 with the same roundings."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from int8_rules import library

from kernels import reference
from kernels.cpu import build
from kernels.cpu.library import Attention, Library, Sequences

pytestmark = pytest.mark.skipif(build.compiler() is None, reason="no C++ compiler")
NAN = float("nan")


@dataclass
class Batch:
    """Sequences of (tokens, of them new); each has its first ``shared`` blocks in common with the one before."""

    lens: list[tuple[int, int]]
    block: int
    dim: int
    heads: int
    kv_heads: int
    shared: int = 0

    def __post_init__(self) -> None:
        generator = torch.Generator().manual_seed(self.dim * self.block + self.heads)
        self.tables: list[list[int]] = []
        ids = iter((torch.randperm(2000, generator=generator) + 1).tolist())
        for total, new in self.lens:
            head = self.tables[-1][: self.shared] if self.tables else []
            assert not head or total - new >= len(head) * self.block
            self.tables.append([*head, *(next(ids) for _ in range(-(-total // self.block) - len(head)))])
        count = sum(new for _, new in self.lens)
        self.q = torch.randn(count, self.heads, self.dim, generator=generator)
        self.k, self.v = (torch.randn(count, self.kv_heads, self.dim, generator=generator) for _ in range(2))
        self.pool = torch.full((2001, 1, 2, self.block, self.kv_heads, self.dim), NAN, dtype=torch.bfloat16)
        for (total, new), table in zip(self.lens, self.tables, strict=True):
            for p in range(total - new):
                slot = self.pool[table[p // self.block], 0, :, p % self.block]
                if slot.isnan().any():
                    slot.copy_(torch.randn(slot.shape, generator=generator))
        self.scale = torch.tensor(self.dim**-0.5)

    def short(self, library: Library) -> bool:
        return library.bf16_simd != "" and self.dim % 32 == 0

    def run(self, library: Library, threads: int, chosen: list[int] | None = None) -> list[torch.Tensor]:
        """Of each chosen sequence [new, heads, dim], in that order, all in one step."""
        chosen = list(range(len(self.lens))) if chosen is None else chosen
        starts = [sum(new for _, new in self.lens[:i]) for i in range(len(self.lens))]
        news = [self.lens[i][1] for i in chosen]
        rows = [starts[i] + t for i, new in zip(chosen, news, strict=True) for t in range(new)]
        slots = [
            self.tables[i][p // self.block] * self.block + p % self.block
            for i, new in zip(chosen, news, strict=True)
            for p in range(self.lens[i][0] - new, self.lens[i][0])
        ]
        step = Sequences(news, [self.lens[i][0] for i in chosen], [self.tables[i] for i in chosen], slots)
        q, k, v = (x[rows] for x in (self.q, self.k, self.v))
        out = torch.full_like(q, NAN)
        Attention(library, threads)(step.pack(), len(chosen), q, k, v, self.pool, 0, float(self.scale), out)
        return list(out.split(news))

    def truth(self, q: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        """float64, of a q that is scaled already."""
        tables, (totals, news) = self.tables, zip(*self.lens, strict=True)
        return reference.paged_attention(q.double(), self.pool[:, 0, 0].double(), values, tables, news, totals, 1.0)

    def check(self, library: Library, threads: int) -> list[torch.Tensor]:
        got = self.run(library, threads)
        q, values = self.q * self.scale, self.pool[:, 0, 1].double()
        if self.short(library):
            q = q.to(torch.bfloat16)
        want = self.truth(q, values)
        # A weight's rounding to 8 bits moves the result by 2^-8 of what it brings in; that of sums in float32, and of
        # e^x where 16 bits come of it, by less than 1e-4 of that.
        bound = 2e-6 + (self.truth(q, values.abs()) * (2.0**-8 + 1e-4) if self.short(library) else 0)
        error = (torch.cat(got).double() - want).abs()
        assert (error <= bound).all(), (error / bound).max()
        return got


MIXED = [(1, 1), (70, 6), (64, 64), (300, 1), (33, 33), (129, 2), (65, 1), (200, 135)]


@pytest.mark.parametrize(
    "target", ["native", *(pytest.param(name, marks=pytest.mark.slow) for name in ("haswell", "cooperlake"))]
)
@pytest.mark.parametrize("block", [8, 16, 32, 64])
@pytest.mark.parametrize(("dim", "heads", "kv_heads"), [(32, 4, 4), (64, 9, 3), (96, 2, 1), (128, 8, 2), (80, 6, 2)])
def test_against_float64(target: str, dim: int, heads: int, kv_heads: int, block: int) -> None:
    """All kinds of work in one step, over slots of NaN; then each sequence alone, which has the same bits."""
    batch = Batch(MIXED, block, dim, heads, kv_heads)
    together = batch.check(library(target), 2)
    for i, there in enumerate(together):
        (alone,) = batch.run(library(target), 1 + i % 3, [i])
        assert torch.equal(alone, there), batch.lens[i]
    assert all(torch.equal(a, b) for a, b in zip(batch.run(library(target), 3), together, strict=True))


@pytest.mark.parametrize("dim", [64, 80])
def test_every_number_of_rows(dim: int) -> None:
    """1 to 35 queries, and about the 192 rows of a piece: a row's bits are those that it has in the longest chunk."""
    whole = Batch([(230, 230)], 16, dim, 1, 1)
    (want,) = whole.check(library(), 2)
    for new in (*range(1, 36), 191, 192, 193):
        part = Batch([(230, new)], 16, dim, 1, 1)
        part.tables, part.pool = whole.tables, whole.pool
        part.q, part.k, part.v = (x[230 - new :] for x in (whole.q, whole.k, whole.v))
        (got,) = part.run(library(), 2)
        assert torch.equal(got, want[230 - new :]), new


@pytest.mark.parametrize("count", [2, 15, 40])
@pytest.mark.parametrize(("dim", "heads", "kv_heads"), [(64, 6, 1), (32, 6, 2), (80, 4, 2)])
def test_shared_prefixes(dim: int, heads: int, kv_heads: int, count: int) -> None:
    """Decodes whose first 320 tokens are the same blocks: up to 240 rows of a KV head read them together."""
    batch = Batch([(321 + 13 * i % 130, 1) for i in range(count)], 16, dim, heads, kv_heads, shared=20)
    together = batch.check(library(), 2)
    for i in range(0, count, 7):
        (alone,) = batch.run(library(), 1, [i])
        assert torch.equal(alone, together[i]), i


@pytest.mark.parametrize("dim", [64, 80])
def test_split_decodes(dim: int) -> None:
    """Few long sequences are cut into pieces of segments for the threads; the pieces leave no trace."""
    batch = Batch([(900, 1), (500, 1)], 32, dim, 4, 2)
    want = batch.check(library(), 1)
    for threads in (2, 3, 4):
        for chosen in ([0], [1], [0, 1]):
            got = batch.run(library(), threads, chosen)
            assert all(torch.equal(a, want[i]) for a, i in zip(got, chosen, strict=True)), (threads, chosen)


def test_weights_are_rounded_to_nearest() -> None:
    """Cut off instead, they would be 2^-9 too small on average, and so would sums of values of one sign."""
    batch = Batch([(300, 300)], 16, 64, 3, 1)
    batch.v = batch.v.abs() + 1
    (got,) = batch.check(library(), 2)
    q = batch.q * batch.scale
    want = batch.truth(q.to(torch.bfloat16) if batch.short(library()) else q, batch.pool[:, 0, 1].double())
    assert ((got - want) / want)[100:].mean().abs() < 2.0**-13


def prefill(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, kept: torch.dtype) -> torch.Tensor:
    """Causal attention of one new sequence, unscaled."""
    pool = torch.full((2, 1, 2, len(q), k.shape[1], k.shape[2]), NAN, dtype=kept)
    out = torch.full_like(q, NAN)
    step = Sequences([len(q)], [len(q)], [[1]], [len(q) + i for i in range(len(q))])
    Attention(library(), 2)(step.pack(), 1, q, k, v, pool, 0, 1.0, out)
    return out


@pytest.mark.parametrize("kept", [torch.float32, torch.bfloat16], ids=str)
def test_sums_of_weights(kept: torch.dtype) -> None:
    """All scores alike: a row's sum is how many keys it sees, and its result the mean of whole numbers."""
    values = torch.randint(-60, 61, (190, 1, 64), generator=torch.Generator().manual_seed(1)).float()
    out = prefill(torch.zeros(190, 3, 64), torch.randn(190, 1, 64), values, kept)
    want = values.cumsum(0) / torch.arange(1.0, 191)[:, None, None]
    assert torch.equal(out, want.expand(190, 3, 64))


@pytest.mark.parametrize("kept", [torch.float32, torch.bfloat16], ids=str)
def test_largest_scores(kept: torch.dtype) -> None:
    """A key that outweighs all others, at another place for each row: the row's result is that key's value."""
    chosen = torch.tensor([(29 * t + 11) % (t + 1) for t in range(190)])
    values = torch.randn(190, 1, 64, generator=torch.Generator().manual_seed(2)).to(kept).float()
    keys = torch.randn(190, 1, 64, generator=torch.Generator().manual_seed(3)).sign()
    # Two random keys of signs have a product of 64 with themselves and, here, of at most 40 with each other.
    products = keys[:, 0] @ keys[:, 0].T
    assert products.fill_diagonal_(0).max() <= 40
    out = prefill(32 * keys[chosen], keys, values, kept)
    assert torch.equal(out, values[chosen])
