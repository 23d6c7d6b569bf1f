"""A request's logits have the same bits whatever runs beside it and however its tokens were cut into steps."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from int8_rules import by_tiles, library, weights_in

from chatsvc.models.attention.base import KVCache
from chatsvc.models.attention.cpu_backend import CpuBackend
from chatsvc.models.config import ModelConfig
from chatsvc.models.cpu_step import CpuModel
from chatsvc.models.cpu_weights import MemoryWeights
from chatsvc.models.llama import LayerWeights, Linear, LlamaModel, ModelWeights
from chatsvc.runtime import kv
from chatsvc.runtime.runner import ModelRunner
from chatsvc.scheduler.params import SamplingParams
from chatsvc.scheduler.plan import SamplingRow, ScheduledRow
from kernels.cpu.build import compiler
from kernels.cpu.library import Rows

pytestmark = pytest.mark.skipif(compiler() is None, reason="no C++ compiler")

# Odd on purpose: no size is a multiple of a tile, a vector or a segment.
PLAIN = ModelConfig(
    architecture="llama",
    vocab_size=203,
    hidden_size=72,
    num_layers=2,
    num_heads=6,
    num_kv_heads=2,
    head_dim=24,
    intermediate_size=100,
    rms_norm_eps=1e-5,
    rope_theta=10000.0,
    max_position_embeddings=512,
)
# Heads that fill matrix tiles, where there are such, and more rows of a KV head than one piece has.
WIDE = replace(PLAIN, head_dim=64, num_kv_heads=1)
# Whole groups of 32, an odd number of them.
BLOCKS = replace(PLAIN, hidden_size=96, head_dim=16, intermediate_size=160)
BIASED = replace(PLAIN, architecture="qwen3", num_kv_heads=3, qkv_bias=True, o_bias=True, mlp_bias=True, qk_norm=True)


@dataclass(frozen=True)
class Kind:
    config: ModelConfig
    int8: bool = False
    kept: torch.dtype = torch.float32  # by the pool
    target: str = "native"  # what the library is made for
    fmt: str = "f32"  # of the weights, as files have them


PLAIN_KIND = Kind(PLAIN)


class Packed(MemoryWeights):
    """What ``model`` made of a file's rows comes as those rows."""

    def __init__(self, model: LlamaModel, rows: dict[int, Rows]) -> None:
        super().__init__(model)
        self._rows = rows

    def linear(self, layer: int, kind: str) -> tuple[Rows, torch.Tensor | None]:
        _, bias = super().linear(layer, kind)
        return self._rows[getattr(self._weights.layers[layer], kind).weight.data_ptr()], bias

    def last(self) -> tuple[torch.Tensor, Rows, Rows]:
        norm, _, _ = super().last()
        return norm, self._rows[self._weights.lm_head.data_ptr()], self._rows[self._weights.embed.data_ptr()]


@cache
def model(config: ModelConfig, fmt: str = "f32") -> tuple[LlamaModel, dict[int, Rows]]:
    """With weights that ``fmt`` can say, and each matrix in it, by its address."""
    generator = torch.Generator().manual_seed(5)
    rows: dict[int, Rows] = {}

    def random(*size: int) -> torch.Tensor:
        return torch.randn(size, generator=generator) * size[-1] ** -0.5

    def said(floats: torch.Tensor) -> torch.Tensor:
        in_file, floats = weights_in(fmt, *floats.shape, floats)
        rows[floats.data_ptr()] = in_file
        return floats

    def linear(n: int, k: int, bias: bool) -> Linear:
        return Linear(said(random(n, k)), random(n) if bias else None)

    c = config
    q, key, inner = c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim, c.intermediate_size
    layers = tuple(
        LayerWeights(
            input_norm=1 + random(c.hidden_size),
            qkv=linear(q + 2 * key, c.hidden_size, c.qkv_bias),
            q_norm=1 + random(c.head_dim) if c.qk_norm else None,
            k_norm=1 + random(c.head_dim) if c.qk_norm else None,
            o=linear(c.hidden_size, q, c.o_bias),
            post_norm=1 + random(c.hidden_size),
            gate_up=linear(2 * inner, c.hidden_size, c.mlp_bias),
            down=linear(c.hidden_size, inner, c.mlp_bias),
        )
        for _ in range(c.num_layers)
    )
    embed = said(torch.randn(c.vocab_size, c.hidden_size, generator=generator))
    head = embed if c.architecture == "llama" else said(random(c.vocab_size, c.hidden_size))
    return LlamaModel(config, ModelWeights(embed, layers, 1 + random(c.hidden_size), head)), rows


def prompt(seed: int, length: int) -> tuple[int, ...]:
    ids = torch.randint(0, PLAIN.vocab_size, (length,), generator=torch.Generator().manual_seed(seed))
    return tuple(ids.tolist())


SAMPLING = SamplingRow(SamplingParams(max_tokens=1, temperature=0.0), 0, 0)


@dataclass
class Sequence:
    """``ids`` at ``table``; ``done`` of them are in the pool."""

    ids: tuple[int, ...]
    table: tuple[int, ...]
    done: int = 0


class Rig:
    """A pool of NaN, and steps over it. Blocks are handed out in a shuffled order."""

    def __init__(self, kind: Kind, block_size: int, threads: int, blocks: int = 400) -> None:
        torch_model, in_file = model(kind.config, kind.fmt)
        self.block_size = block_size
        data = kv.allocate(torch_model.shape, blocks, block_size, kind.kept, torch.device("cpu")).data
        data.fill_(float("nan"))
        backend = CpuBackend(library(kind.target), threads, kind.int8)
        runs: LlamaModel | CpuModel = torch_model  # which the backend packs
        if kind.fmt != "f32":
            weights = Packed(torch_model, in_file)
            runs = CpuModel(backend.library, weights, torch_model.rotary, threads, kind.int8)
        self.runner = ModelRunner(runs, backend, KVCache(data))
        order = torch.randperm(blocks, generator=torch.Generator().manual_seed(blocks)) + 1
        self._free: Iterator[int] = iter(order.tolist())

    def sequence(self, ids: tuple[int, ...], like: Sequence | None = None, shared: int = 0) -> Sequence:
        """``shared`` whole blocks are those of ``like``, computed already."""
        count = -(-len(ids) // self.block_size)
        head = like.table[:shared] if like else ()
        return Sequence(ids, (*head, *(next(self._free) for _ in range(count - len(head)))), shared * self.block_size)

    def step(self, *chunks: tuple[Sequence, int]) -> list[torch.Tensor]:
        """Compute the next n tokens of each sequence; the logits after the last of them."""
        rows = []
        for i, (s, n) in enumerate(chunks):
            # A fully cached prompt recomputes its last token and writes nothing.
            write_from = s.done
            start = min(s.done, len(s.ids) - 1)
            end = max(start + 1, min(len(s.ids), s.done + n))
            rows.append(ScheduledRow(i, s.ids[start:end], start, s.table, write_from, SAMPLING))
            s.done = end
        logits, _ = self.runner.logits(tuple(rows))
        return list(logits)

    def whole(self, ids: tuple[int, ...], budget: int = 10_000) -> torch.Tensor:
        """The last token's logits, computed ``budget`` tokens a step."""
        s = self.sequence(ids)
        while True:
            (logits,) = self.step((s, budget))
            if s.done == len(ids):
                return logits


LENGTHS = (1, 2, 63, 64, 65, 128, 130, 200, 321)


KINDS = {
    "plain": PLAIN_KIND,
    "biases-and-norms": Kind(BIASED),
    "4-bit-blocks": Kind(BLOCKS, fmt="q4_1"),
    "8-bit-blocks-biases-and-norms": Kind(
        replace(BIASED, hidden_size=96, head_dim=16, intermediate_size=160), fmt="q8_0"
    ),
    "bfloat16-weights": Kind(BLOCKS, fmt="bf16"),
    # What processors without tiles, or without products in bfloat16, do on one that has them.
    "4-bit-blocks-without-tiles": Kind(BLOCKS, fmt="q4_1", target="cascadelake"),
    "int8": Kind(PLAIN, int8=True),
    "int8-biases-and-norms": Kind(BIASED, int8=True),
    "kv-bfloat16": Kind(PLAIN, kept=torch.bfloat16),
    "int8-kv-float16": Kind(BIASED, int8=True, kept=torch.float16),
    "wide-kv-bfloat16": Kind(WIDE, kept=torch.bfloat16),
    "int8-wide-kv-bfloat16": Kind(WIDE, int8=True, kept=torch.bfloat16),
    "int8-wide-kv-bfloat16-vnni": Kind(WIDE, int8=True, kept=torch.bfloat16, target="cascadelake"),
}


@pytest.fixture(scope="module", params=KINDS.values(), ids=KINDS)
def kind(request: pytest.FixtureRequest) -> Kind:
    value = request.param
    assert isinstance(value, Kind)
    short = value.kept == torch.bfloat16 and library().bf16_simd
    if value.target != "native" and not (by_tiles(library()) or short):
        pytest.skip("the native library does the same: this machine has no matrix tiles")
    return value


@cache
def expected(kind: Kind, length: int) -> torch.Tensor:
    """Alone, in one piece, one thread, blocks of 16."""
    return Rig(kind, 16, 1).whole(prompt(length, length))


def test_the_packed_model_is_used_and_right(kind: Kind) -> None:
    rig = Rig(kind, 16, 2)
    assert not isinstance(rig.runner.model, LlamaModel)
    ids = prompt(3, 150)

    def attend(layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        q, k, v = (x.transpose(0, 1)[None] for x in (q, k.to(kind.kept).to(k.dtype), v.to(kind.kept).to(v.dtype)))
        out = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return out[0].transpose(0, 1)

    single, _ = model(kind.config, kind.fmt)
    exact = LlamaModel(kind.config, _double(single.weights))
    with torch.inference_mode():
        want = exact.forward(torch.tensor(ids), torch.arange(150), attend, torch.tensor([149]))[0]
        plain = single.forward(torch.tensor(ids), torch.arange(150), attend, torch.tensor([149]))[0]
    got = rig.whole(ids).double()
    assert want.std() > 0.1
    if kind.int8:  # weights and inputs within 1 / 254 of the largest of each group, or row
        assert 1e-4 < (got - want).norm() / want.norm() < 0.03
        return
    if kind.kept != torch.float32 and library(kind.target).bf16_simd and kind.config.head_dim % 32 == 0:
        assert (got - want).norm() / want.norm() < 5e-3  # q and weights of 8 bits
        return
    if kind.kept != torch.float32:  # a key that differs in the last place may be rounded to the other side
        assert (got - want).norm() / want.norm() < 1e-3
        return
    ours, theirs = (got - want).abs().max().item(), (plain.double() - want).abs().max().item()
    assert ours < max(4 * theirs, 2e-6), (ours, theirs)


def _double(weights: ModelWeights) -> ModelWeights:
    def convert(x: torch.Tensor | None) -> torch.Tensor | None:
        return None if x is None else x.double()

    def linear(x: Linear) -> Linear:
        return Linear(x.weight.double(), convert(x.bias))

    layers = tuple(
        LayerWeights(
            w.input_norm.double(), linear(w.qkv), convert(w.q_norm), convert(w.k_norm), linear(w.o),
            w.post_norm.double(), linear(w.gate_up), linear(w.down),
        )
        for w in weights.layers
    )  # fmt: skip
    head = weights.lm_head.double()
    embed = head if weights.lm_head is weights.embed else weights.embed.double()
    return ModelWeights(embed, layers, weights.norm.double(), head)


@pytest.mark.parametrize("threads", [1, 2, 3])
@pytest.mark.parametrize("block_size", [8, 16, 64, 128])
@pytest.mark.parametrize("budget", [7, 64, 10_000])
def test_chunks_blocks_threads(kind: Kind, block_size: int, budget: int, threads: int) -> None:
    rig = Rig(kind, block_size, threads)
    for length in LENGTHS:
        assert torch.equal(rig.whole(prompt(length, length), budget), expected(kind, length)), length


@pytest.mark.parametrize("chunk", [1, 100])
def test_a_step_that_samples_nothing(kind: Kind, chunk: int) -> None:
    rig = Rig(kind, 16, 2)
    s = rig.sequence(prompt(130, 130))
    logits, _ = rig.runner.logits((ScheduledRow(0, s.ids[:chunk], 0, s.table, 0, None),))
    assert not len(logits)
    s.done = chunk
    assert torch.equal(rig.step((s, 1000))[0], expected(kind, 130))


def test_one_token_at_a_time(kind: Kind) -> None:
    rig = Rig(kind, 16, 2)
    for length in (65, 130):
        assert torch.equal(rig.whole(prompt(length, length), 1), expected(kind, length)), length


@pytest.mark.parametrize("threads", [1, 3])
def test_neighbours(kind: Kind, threads: int) -> None:
    """All lengths in one step; then each as a decode among prefills; then decodes only, in batches of every size."""
    rig = Rig(kind, 16, threads)
    for length, logits in zip(LENGTHS, rig.step(*((rig.sequence(prompt(n, n)), n) for n in LENGTHS)), strict=True):
        assert torch.equal(logits, expected(kind, length)), length
    for count in (1, 2, 3, 7, 12, 13, 25):
        lengths = [LENGTHS[i % len(LENGTHS)] for i in range(count)]
        rig = Rig(kind, 16, threads, blocks=600)
        sequences = [rig.sequence(prompt(n, n)) for n in lengths]
        for s in sequences:
            if len(s.ids) > 1:
                rig.step((s, len(s.ids) - 1))
        others = [(rig.sequence(prompt(77 + count, 90)), 90)] if count % 2 else []
        got = rig.step(*others, *((s, 1) for s in sequences))[len(others) :]
        for length, logits in zip(lengths, got, strict=True):
            assert torch.equal(logits, expected(kind, length)), (count, length)


@pytest.mark.parametrize("block_size", [8, 16, 64])
def test_prefix_hits_and_recomputation(kind: Kind, block_size: int) -> None:
    rig = Rig(kind, block_size, 2, blocks=800)
    ids = prompt(321, 321)
    first = rig.sequence(ids)
    (want,) = rig.step((first, 321))
    assert torch.equal(want, expected(kind, 321))
    for shared in range(0, 321 // block_size + 1, max(1, 64 // block_size)):
        again = rig.sequence(ids, first, shared)
        (got,) = rig.step((again, 321))
        assert torch.equal(got, want), shared
    full = rig.sequence(ids[:256], first, 256 // block_size)
    (got,) = rig.step((full, 1))
    assert torch.equal(got, rig.whole(ids[:256]))


def test_many_share_a_prefix(kind: Kind) -> None:
    """Decodes over common blocks, which are read once for all of them, have the bits of decodes alone."""
    rig = Rig(kind, 16, 2, blocks=800)
    base = prompt(9, 208)
    first = rig.sequence(base)
    rig.step((first, 208))
    tails = [prompt(1000 + i, 1 + 17 * i % 90) for i in range(40)]
    sequences = [rig.sequence(base + tail, first, 208 // 16) for tail in tails]
    for s in sequences:
        if len(s.ids) - s.done > 1:
            rig.step((s, len(s.ids) - s.done - 1))
    lone = Rig(kind, 16, 1, blocks=40 * 19)
    for tail, logits in zip(tails, rig.step(*((s, 1) for s in sequences)), strict=True):
        assert torch.equal(logits, lone.whole(base + tail)), len(tail)


def test_forks_ask_for_one_row_twice() -> None:
    rig = Rig(PLAIN_KIND, 16, 2)
    s = rig.sequence(prompt(1, 30))
    row = ScheduledRow(0, s.ids, 0, s.table, 0, SAMPLING, forks=((5, SAMPLING), (6, SAMPLING)))
    other = rig.sequence(prompt(2, 63))
    logits, sampled = rig.runner.logits((row, ScheduledRow(1, other.ids, 0, other.table, 0, SAMPLING)))
    assert [seq for seq, _ in sampled] == [0, 5, 6, 1]
    assert torch.equal(logits[0], logits[1]) and torch.equal(logits[0], logits[2])
    assert torch.equal(logits[0], Rig(PLAIN_KIND, 8, 1).whole(prompt(1, 30)))
    assert torch.equal(logits[3], Rig(PLAIN_KIND, 8, 1).whole(prompt(2, 63)))


@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_random_histories(data: st.DataObject) -> None:
    """Sequences of random lengths advance by random chunks in random company, on random blocks and threads."""
    block_size = data.draw(st.sampled_from([8, 16, 32, 64]))
    names = ("plain", "4-bit-blocks", "int8", "int8-wide-kv-bfloat16")
    kind = KINDS[data.draw(st.sampled_from(names))]
    rig = Rig(kind, block_size, data.draw(st.sampled_from([1, 2, 3])))
    seeds = data.draw(st.lists(st.sampled_from(LENGTHS), min_size=1, max_size=6))
    waiting = [rig.sequence(prompt(n, n)) for n in seeds]
    while waiting:
        chosen = [s for s in waiting if data.draw(st.booleans())] or waiting[:1]
        chunks = [(s, data.draw(st.sampled_from([1, 2, 5, 31, 64, 100, 400]))) for s in chosen]
        for (s, _), logits in zip(chunks, rig.step(*chunks), strict=True):
            if s.done == len(s.ids):
                assert torch.equal(logits, expected(kind, len(s.ids))), len(s.ids)
                waiting.remove(s)


def test_a_neighbour_full_of_nan_stays_alone(kind: Kind) -> None:
    rig = Rig(kind, 16, 2)
    good, bad = rig.sequence(prompt(65, 65)), rig.sequence(prompt(130, 130))
    rig.step((good, 64), (bad, 129))
    rig.runner.cache.data[bad.table[1]] = float("nan")
    sick, well = rig.step((bad, 1), (good, 1))
    assert sick.isnan().all()
    assert torch.equal(well, expected(kind, 65))
