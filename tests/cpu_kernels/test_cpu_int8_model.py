"""A whole model in int8, from weights as files have them, against float64."""

from __future__ import annotations

from dataclasses import dataclass, field

import gguf
import numpy as np
import pytest
import torch
from int8_rules import FORMATS, QUANTS, as_multiplied, by_tiles, library, weights_in

from kernels import reference
from kernels.cpu import build
from kernels.cpu.library import Library, Model, Rows, Sequences, Shape

pytestmark = pytest.mark.skipif(build.compiler() is None, reason="no C++ compiler")
SHAPE = Shape(vocab=203, hidden=96, layers=2, heads=4, kv_heads=2, dim=32, intermediate=160, eps=1e-5)
EPS, SCALE = SHAPE.eps, SHAPE.dim**-0.5
QUERIES, KEYS = SHAPE.heads * SHAPE.dim, SHAPE.kv_heads * SHAPE.dim
SIZES = {
    "qkv": (QUERIES + 2 * KEYS, SHAPE.hidden),
    "o": (SHAPE.hidden, QUERIES),
    "gate_up": (2 * SHAPE.intermediate, SHAPE.hidden),
    "down": (SHAPE.hidden, SHAPE.intermediate),
}
IDS = torch.randint(0, SHAPE.vocab, (45,), generator=torch.Generator().manual_seed(7))
# Of a vector's norm: half units of inputs alone, and those of weights and inputs. Two layers make more of each.
NEAR_DEFINITION = {True: 1e-4, False: 0.02}
NEAR_FILE = 0.02


@dataclass
class Tiny:
    """SHAPE in one format, its head tied to the embedding; ``layered``: otherwise the layers add nothing."""

    library: Library
    fmt: str
    layered: bool
    matrices: dict[str, tuple[Rows, torch.Tensor, torch.Tensor | None]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        random = torch.Generator().manual_seed(11)
        self.matrices["head"] = (*self._matrix(torch.randn(SHAPE.vocab, SHAPE.hidden, generator=random)), None)
        for layer in range(SHAPE.layers):
            for kind, size in SIZES.items():
                floats = torch.randn(size, generator=random) * size[1] ** -0.5 * self.layered
                bias = torch.randn(size[0], generator=random) * 0.1 * self.layered
                self.matrices[f"{layer}.{kind}"] = (*self._matrix(floats), bias)
        self.norms = [0.5 + torch.rand(SHAPE.hidden, generator=random) for _ in range(2 * SHAPE.layers + 1)]
        turns = torch.outer(torch.arange(len(IDS)), 1000 ** -(torch.arange(SHAPE.dim // 2) / (SHAPE.dim // 2)))
        self.angles = torch.cat([turns.cos(), turns.sin()], dim=1).float().contiguous()

    def _matrix(self, floats: torch.Tensor) -> tuple[Rows, torch.Tensor]:
        return weights_in(self.fmt, *floats.shape, floats)

    def logits(self) -> torch.Tensor:
        model = Model(self.library, SHAPE, 2)
        for name, (rows, _, bias) in self.matrices.items():
            layer, _, kind = name.rpartition(".")
            model.linear(int(layer or 0), kind, rows, bias, low=True)
        for layer in range(SHAPE.layers):
            model.norms(layer, self.norms[2 * layer], self.norms[2 * layer + 1], None, None)
        model.finish(self.norms[-1], tied=True)
        count = len(IDS)
        pool = torch.full((4, SHAPE.layers, 2, 16, SHAPE.kv_heads, SHAPE.dim), float("nan"))
        step = Sequences([count], [count], [[1, 2, 3]], [16 + i for i in range(count)])
        return model.forward(step, IDS.tolist(), list(range(count)), list(range(count)), self.angles, pool)

    def truth(self, defined: bool) -> torch.Tensor:
        """float64, with the weights as ``defined`` or as the file has them; inputs are not rounded."""

        def linear(x: torch.Tensor, name: str) -> torch.Tensor:
            bias = self.matrices[name][2]
            return x @ weights[name].T + (0 if bias is None else bias.double())

        weights = {
            name: as_multiplied(self.library, self.fmt, rows, floats) if defined else floats.double()
            for name, (rows, floats, _) in self.matrices.items()
        }
        norms, angles = [x.double() for x in self.norms], self.angles.double()
        x = weights["head"][IDS]
        for layer in range(SHAPE.layers):
            qkv = linear(reference.rms_norm(x, norms[2 * layer], EPS), f"{layer}.qkv")
            q, k, v = (part.view(len(IDS), -1, SHAPE.dim) for part in qkv.split((QUERIES, KEYS, KEYS), dim=1))
            q, k = reference.rotate(q, angles), reference.rotate(k, angles)
            tables, lens = [[0]], [len(IDS)]
            attended = reference.paged_attention(q, k[None], v[None], tables, lens, lens, SCALE)
            x = x + linear(attended.reshape(len(IDS), -1), f"{layer}.o")
            inner = reference.swiglu(linear(reference.rms_norm(x, norms[2 * layer + 1], EPS), f"{layer}.gate_up"))
            x = x + linear(inner, f"{layer}.down")
        return linear(reference.rms_norm(x, norms[-1], EPS), "head")


@pytest.mark.parametrize("target", ["native", pytest.param("cascadelake", marks=pytest.mark.slow)])
@pytest.mark.parametrize("layered", [False, True], ids=["embedding", "layers"])
@pytest.mark.parametrize("fmt", FORMATS)
def test_logits_are_near_float64(target: str, layered: bool, fmt: str) -> None:
    tiny = Tiny(library(target), fmt, layered)
    got = tiny.logits().double()
    far = [(got - want).norm(dim=1) / want.norm(dim=1) for want in (tiny.truth(True), tiny.truth(False))]
    assert far[0].max() < NEAR_DEFINITION[by_tiles(tiny.library)] * (1 + layered)
    assert far[1].max() < NEAR_FILE * (1 + layered)


@pytest.mark.parametrize("fmt", ["q4_0", "q4_1"])
def test_embeddings_of_blocks_that_no_quantiser_fills(fmt: str) -> None:
    """Half bytes of 6 to 9, negative scales too: a block's least value is far below all of its weights."""
    random, groups = np.random.default_rng(4), SHAPE.hidden // 32
    blocks = random.integers(6, 10, (SHAPE.vocab, groups, 18 if fmt == "q4_0" else 20), dtype=np.uint8)
    blocks[:, :, -16:] |= random.integers(6, 10, (SHAPE.vocab, groups, 16), dtype=np.uint8) << 4
    about = random.uniform(-0.1, 0.1, (SHAPE.vocab, groups, 1 if fmt == "q4_0" else 2)).astype(np.float16)
    blocks[:, :, :-16] = about.view(np.uint8)
    data = blocks.reshape(SHAPE.vocab, -1)
    tiny = Tiny(library(), fmt, layered=False)
    tiny.matrices["head"] = Rows.at(fmt, SHAPE.hidden, data), torch.from_numpy(gguf.dequantize(data, QUANTS[fmt])), None
    got, want = tiny.logits().double(), tiny.truth(True)
    assert ((got - want).norm(dim=1) < NEAR_DEFINITION[by_tiles(tiny.library)] * want.norm(dim=1)).all()
