"""The compiled library as Python objects. Calls release the interpreter lock; one thread uses an object at a time.

Arguments are tensors in and tensors out: float32 (a KV pool may keep 16 bits), on the CPU, innermost dimension
contiguous. Nothing here is checked twice: shapes are the caller's business once a model or a backend has been made.
"""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import torch

_P, _L, _I, _F, _D = ctypes.c_void_p, ctypes.c_long, ctypes.c_int, ctypes.c_float, ctypes.c_double
_SIGNATURES: dict[str, tuple[type | None, list[type]]] = {
    "ck_simd": (ctypes.c_char_p, []),
    "ck_low_simd": (ctypes.c_char_p, []),
    "ck_bf16_simd": (ctypes.c_char_p, []),
    "ck_trim": (None, []),
    "ck_model_new": (_P, [_P, _F, _I]),
    "ck_model_free": (None, [_P]),
    "ck_model_linear": (_I, [_P, _L, _I, _L, _L, _I, _P, _P, _I]),
    "ck_model_bytes": (_L, [_P]),
    "ck_model_norms": (None, [_P, _L, _P, _P, _P, _P]),
    "ck_model_finish": (None, [_P, _P, _I]),
    "ck_model_settle": (_I, [_P, _I]),
    "ck_model_forward": (_I, [_P, _P, _L, _L, _L, _P, _P, _I, _L, _L, _P]),
    "ck_attention_new": (_P, [_I]),
    "ck_attention_free": (None, [_P]),
    "ck_attention": (_I, [_P, _P, _L, _L, _P, _L, _P, _L, _P, _L, _P, _I, _P, _L, _F, _P]),
    "ck_linear": (_D, [_I, _P, _L, _I, _P, _P, _L, _L, _I, _P, _I]),
}
# As in matrix.h; and the bytes of a row of k numbers.
SOURCES = ("f32", "f16", "bf16", "q8_0", "q4_0", "q4_1")
_BLOCK_BYTES = {"q8_0": 34, "q4_0": 18, "q4_1": 20}  # of 32 numbers
_NUMBER_BYTES = {"f32": 4, "f16": 2, "bf16": 2}
# What a pool may keep, as in attention.h.
KEPT = (torch.float32, torch.float16, torch.bfloat16)
Array: TypeAlias = "np.ndarray[Any, np.dtype[Any]]"
_KINDS = ("qkv", "o", "gate_up", "down", "head", "embed")


class Rows:
    """Weights [out, in] as they lie in memory, or in a mapped file: where each output's row is.

    Attributes:
        format: f32, f16, bf16, or llama.cpp's q8_0, q4_0, q4_1; all rows have the same.
        k: numbers of a row.
        pointers: [out] addresses.
    """

    def __init__(self, fmt: str, k: int, pointers: Array, keep: Sequence[object]) -> None:
        self.format = fmt
        self.k = k
        self.pointers = np.ascontiguousarray(pointers, dtype=np.int64)
        self._keep = keep  # whatever the addresses point into

    @classmethod
    def at(cls, fmt: str, k: int, data: Array) -> Rows:
        """Rows of ``data`` [out, bytes], uint8.

        Raises: ValueError: a format or a length that the kernels do not know.
        """
        if fmt not in SOURCES or data.shape[1] != row_bytes(fmt, k):
            raise ValueError(f"{data.shape[1]} bytes are no row of {k} numbers in {fmt}")
        assert data.dtype == np.uint8 and data.strides[1] == 1
        starts = data.ctypes.data + np.arange(data.shape[0], dtype=np.int64) * data.strides[0]
        return cls(fmt, k, starts, [data])

    @classmethod
    def of(cls, weight: torch.Tensor) -> Rows:
        """Of a contiguous tensor on the CPU: float32, float16 or bfloat16."""
        names = {torch.float32: "f32", torch.float16: "f16", torch.bfloat16: "bf16"}
        assert weight.is_contiguous() and weight.device.type == "cpu"
        n, k = weight.shape
        starts = weight.data_ptr() + np.arange(n, dtype=np.int64) * k * weight.itemsize
        return cls(names[weight.dtype], k, starts, [weight])

    @classmethod
    def stacked(cls, parts: Sequence[Rows]) -> Rows:
        """All rows of all parts, which have one format and one length."""
        first = parts[0]
        assert all((part.format, part.k) == (first.format, first.k) for part in parts)
        return cls(first.format, first.k, np.concatenate([part.pointers for part in parts]), parts)

    def reordered(self, order: Array) -> Rows:
        """The same rows: output i is now row ``order[i]``."""
        return Rows(self.format, self.k, self.pointers[order], self._keep)

    def __len__(self) -> int:
        return len(self.pointers)

    @property
    def source(self) -> int:
        return SOURCES.index(self.format)


def row_bytes(fmt: str, k: int) -> int:
    """Bytes of a row of k numbers."""
    return _NUMBER_BYTES[fmt] * k if fmt in _NUMBER_BYTES else k // 32 * _BLOCK_BYTES[fmt]


class Library:
    """The functions of one compiled library.

    Raises:
        OSError: it cannot be loaded, or was built from other sources than this file belongs to.
    """

    def __init__(self, path: Path) -> None:
        self._lib = ctypes.CDLL(str(path))
        for name, (result, arguments) in _SIGNATURES.items():
            function = getattr(self._lib, name, None)
            if function is None:
                raise OSError(f"{path} has no function {name}")
            function.restype, function.argtypes = result, arguments

    def __getattr__(self, name: str) -> Any:  # ck_...
        return getattr(self._lib, name)

    @property
    def simd(self) -> str:
        """The instruction set that was compiled for: avx512, avx2 or generic."""
        return str(self.ck_simd().decode())

    @property
    def low_simd(self) -> str:
        """What multiplies whole numbers: amx-int8 (matrix tiles, with scales for rows), or with scales for groups:
        avx512-vnni, avx-vnni, plain (the vector unit, without an own instruction for it)."""
        return str(self.ck_low_simd().decode())

    @property
    def tiles(self) -> bool:
        """Whether the processor's matrix tiles (AMX) are used: for products in 8 bits, for those of float32 inputs with
        weights in bfloat16, 8 or 4 bits, and for attention over bfloat16."""
        return self.low_simd == "amx-int8"

    @property
    def bf16_simd(self) -> str:
        """What multiplies bfloat16 in attention over a pool of it: amx-bf16 (matrix tiles), avx512-bf16, or "": nothing
        does, those products are float32 too."""
        return str(self.ck_bf16_simd().decode())

    def linear(
        self,
        x: torch.Tensor,
        weight: torch.Tensor | Rows,
        bias: torch.Tensor | None,
        threads: int,
        repeat: int = 1,
        low: bool = False,
    ) -> torch.Tensor:
        """x [T, in] times weight [out, in], plus bias [out]; for tests and benches."""
        return self.timed_linear(x, weight, bias, threads, repeat, low)[0]

    def timed_linear(
        self,
        x: torch.Tensor,
        weight: torch.Tensor | Rows,
        bias: torch.Tensor | None,
        threads: int,
        repeat: int,
        low: bool,
    ) -> tuple[torch.Tensor, float]:
        """The product, and the seconds of the fastest of ``repeat``."""
        rows = weight if isinstance(weight, Rows) else Rows.of(weight)
        y = torch.full((x.shape[0], len(rows)), float("nan"))
        seconds = self.ck_linear(
            threads, _at(x), x.shape[0], rows.source, rows.pointers.ctypes.data, _at(bias),
            len(rows), x.shape[1], int(low), _at(y), repeat,
        )  # fmt: skip
        if seconds < 0:
            raise MemoryError("no memory for packed weights")
        return y, seconds


@dataclass(frozen=True, slots=True)
class Shape:
    """What the kernels need to know of a model."""

    vocab: int
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    dim: int
    intermediate: int
    eps: float


@dataclass(frozen=True, slots=True)
class Sequences:
    """A step's sequences in the kernels' layout: see ``chatsvc``'s StepLayout, or :class:`Attention`'s tests.

    Attributes:
        query_lens, seq_lens: [S].
        block_tables: [S] block ids that cover ``seq_lens`` tokens.
        slot_mapping: [T] ``block * block_size + offset``, or -1.
    """

    query_lens: Sequence[int]
    seq_lens: Sequence[int]
    block_tables: Sequence[Sequence[int]]
    slot_mapping: Sequence[int]

    def pack(self) -> array[int]:
        """One array of int64, as ``api.cpp`` reads it."""
        starts = [0]
        for table in self.block_tables:
            starts.append(starts[-1] + len(table))
        packed = array("q", self.query_lens)
        packed.extend(self.seq_lens)
        packed.extend(starts)
        packed.extend(self.slot_mapping)
        for table in self.block_tables:
            packed.extend(table)
        return packed


class Attention:
    """Paged attention of one layer, with threads of its own (asleep between calls)."""

    def __init__(self, library: Library, threads: int) -> None:
        self._lib = library
        self._handle = library.ck_attention_new(threads)
        if not self._handle:
            raise MemoryError("no memory or no threads for the CPU attention kernels")

    def __del__(self) -> None:
        if getattr(self, "_handle", None):
            self._lib.ck_attention_free(self._handle)

    def __call__(
        self,
        packed: array[int],
        sequences: int,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        pool: torch.Tensor,
        layer: int,
        scale: float,
        out: torch.Tensor,
    ) -> None:
        """Write k, v [T, KV, D] to ``pool`` [N, layers, 2, block_size, KV, D], one of :data:`KEPT`; then fill out
        [T, H, D]. What a pool of 16 bits keeps is rounded once, to nearest; everything else is float32, but for q and
        the weights of keys where :attr:`Library.bf16_simd` multiplies them (a pool of bfloat16, D a multiple of 32)."""
        assert q.dim() == k.dim() == v.dim() == 3 and out.is_contiguous()
        shape = array("q", (pool.shape[1], pool.shape[3], pool.shape[4], pool.shape[5], q.shape[1]))
        failed = self._lib.ck_attention(
            self._handle,
            packed.buffer_info()[0],
            q.shape[0],
            sequences,
            q.data_ptr(),
            q.stride(0),
            k.data_ptr(),
            k.stride(0),
            v.data_ptr(),
            v.stride(0),
            pool.data_ptr(),
            KEPT.index(pool.dtype),
            shape.buffer_info()[0],
            layer,
            scale,
            out.data_ptr(),
        )
        if failed:
            raise MemoryError("no memory for the CPU attention kernels")


class Model:
    """All weights, packed for the kernels (a copy: the tensors may be dropped), and one call that runs a step.

    Use: construct, ``linear`` and ``norms`` for every layer, ``finish``, then ``forward``.
    """

    def __init__(self, library: Library, shape: Shape, threads: int) -> None:
        self._lib = library
        self.shape = shape
        numbers = array("q", (getattr(shape, name) for name in Shape.__slots__ if name != "eps"))
        self._handle = library.ck_model_new(numbers.buffer_info()[0], shape.eps, threads)
        if not self._handle:
            raise MemoryError("no memory or no threads for the CPU kernels")
        self._pool: torch.Tensor | None = None  # a thread of the model touches it

    def __del__(self) -> None:
        if getattr(self, "_handle", None):
            self._lib.ck_model_free(self._handle)

    def linear(
        self, layer: int, kind: str, weight: torch.Tensor | Rows, bias: torch.Tensor | None, low: bool = False
    ) -> None:
        """``kind``: qkv, o, gate_up (weight [2 * intermediate, hidden]), down; head, embed (layer unused).

        ``low``: products in whole numbers, weights of 8 bits (what comes in 4 stays in 4 in memory). Otherwise they
        are as accurate as float32, from weights that are kept as they come.

        Raises: MemoryError; ValueError: a block's scale is too large.
        """
        rows = weight if isinstance(weight, Rows) else Rows.of(weight)
        n = len(rows) // 2 if kind == "gate_up" else len(rows)
        failed = self._lib.ck_model_linear(
            self._handle,
            layer,
            _KINDS.index(kind),
            n,
            rows.k,
            rows.source,
            rows.pointers.ctypes.data,
            _at(bias),
            int(low),
        )
        if failed == 2:
            raise ValueError(
                f"{kind}, layer {layer}: a block of Q4_0 has a scale above 8188, too large for these kernels"
            )
        if failed:
            raise MemoryError(f"no memory for the packed weights of {kind}, layer {layer}")

    @property
    def weight_bytes(self) -> int:
        """Of all packed matrices."""
        return int(self._lib.ck_model_bytes(self._handle))

    def norms(
        self, layer: int, before: torch.Tensor, after: torch.Tensor, q: torch.Tensor | None, k: torch.Tensor | None
    ) -> None:
        """RMSNorm weights of a layer: before attention, before the MLP, of each query and key head."""
        self._lib.ck_model_norms(self._handle, layer, _at(before), _at(after), _at(q), _at(k))

    def finish(self, norm: torch.Tensor, tied: bool) -> None:
        """The last norm; ``tied``: the embedding is the head."""
        self._lib.ck_model_finish(self._handle, _at(norm), int(tied))

    def settle(self, wait: bool = False) -> None:
        """Weights go to huge pages, on a thread of its own: steps are up to a tenth faster then. Not at the start: it
        takes a third of a second for 100 MB, and longer where memory is in pieces."""
        self._lib.ck_model_settle(self._handle, int(wait))  # without a thread they stay where they are

    def forward(
        self,
        sequences: Sequences,
        ids: Sequence[int],
        positions: Sequence[int],
        wanted: Sequence[int],
        angles: torch.Tensor,
        pool: torch.Tensor,
    ) -> torch.Tensor:
        """One step.

        Args:
            ids, positions: [T].
            wanted: [R] ascending indices into T.
            angles: [P, D], P > every position: cos [D / 2], then sin [D / 2] of each position.
            pool: [N, layers, 2, block_size, KV, D], one of :data:`KEPT`.

        Returns:
            [R, vocab] float32 logits.
        """
        packed = sequences.pack()
        packed.extend(ids)
        packed.extend(positions)
        packed.extend(wanted)
        logits = torch.empty(len(wanted), self.shape.vocab)
        failed = self._lib.ck_model_forward(
            self._handle,
            packed.buffer_info()[0],
            len(ids),
            len(sequences.query_lens),
            len(wanted),
            angles.data_ptr(),
            pool.data_ptr(),
            KEPT.index(pool.dtype),
            pool.shape[0],
            pool.shape[3],
            logits.data_ptr(),
        )
        self._pool = pool  # not before: the one before it may be touched until this step begins
        if failed:
            raise MemoryError("no memory for the CPU kernels' step")
        return logits


def _at(tensor: torch.Tensor | None) -> int | None:
    """Its address; a tensor that the kernels cannot read as it lies is a mistake of the caller."""
    if tensor is None:
        return None
    assert tensor.dtype == torch.float32 and tensor.is_contiguous() and tensor.device.type == "cpu"
    return tensor.data_ptr()
