"""Tensors of a GGUF file (llama.cpp's format), read and dequantised a few rows at a time."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

from chatsvc.errors import ModelError
from chatsvc.ggufmeta import read_gguf_head
from chatsvc.models.dequant import SUPPORTED, dequantize
from chatsvc.models.rawfile import map_rows, read_rows
from kernels.cpu.library import Rows

# No list of a model's own settings is longer; the tokenizer's are, and are read by it alone.
_LONGEST_LIST = 4096

# What the CPU kernels read as it lies.
_PLAIN = {
    GGMLQuantizationType.F32: "f32",
    GGMLQuantizationType.F16: "f16",
    GGMLQuantizationType.BF16: "bf16",
    GGMLQuantizationType.Q8_0: "q8_0",
    GGMLQuantizationType.Q4_0: "q4_0",
    GGMLQuantizationType.Q4_1: "q4_1",
}


@dataclass(frozen=True, slots=True)
class GGUFTensor:
    """A tensor as it lies in the file.

    Attributes:
        shape: rows first, as torch has it (GGUF writes the fastest dimension first).
        offset: of its first byte in the file.
    """

    path: Path
    name: str
    shape: tuple[int, ...]
    type: GGMLQuantizationType
    offset: int

    @property
    def row_bytes(self) -> int:
        block, size = GGML_QUANT_SIZES[self.type]
        return self.shape[-1] // block * size

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape[:-1]) * self.row_bytes

    def read_into(self, out: torch.Tensor) -> None:
        """Dequantise into ``out`` (same shape, any float dtype and device), a few rows at a time.

        Raises:
            ModelError: the file is shorter than its head says.
        """
        width = self.shape[-1]
        rows = out.view(-1, width)
        pieces = read_rows(
            self.path,
            self.name,
            offset=self.offset,
            rows=rows.shape[0],
            row_bytes=self.row_bytes,
            row_elements=width,
        )
        for start, count, raw in pieces:
            rows[start : start + count] = dequantize(raw, self.type).view(count, width)

    def rows(self) -> Rows:
        """See :class:`chatsvc.models.weights.FileTensor`."""
        count, width = self.shape
        if (name := _PLAIN.get(self.type)) is None:
            out = torch.empty(self.shape)
            self.read_into(out)
            return Rows.of(out)
        data = map_rows(self.path, self.name, offset=self.offset, rows=count, row_bytes=self.row_bytes)
        return Rows.at(name, width, data)


@dataclass(frozen=True, slots=True)
class GGUFFile:
    """The head of a file: its metadata (None for the tokenizer's long lists), and where the tensors lie."""

    metadata: dict[str, Any]
    tensors: dict[str, GGUFTensor]


def read_header(path: Path) -> GGUFFile:
    """Parse the head of a file; its tensors are not touched.

    Raises:
        ModelError: not a GGUF file, or damaged or cut, or a tensor's type is not supported.
    """
    head = read_gguf_head(path, longest_list=_LONGEST_LIST)
    size = path.stat().st_size
    tensors = {
        name: _tensor(path, name, info.shape[::-1], info.ggml_type, head.data_offset + info.offset, size)
        for name, info in head.tensors.items()
    }
    return GGUFFile(head.metadata, tensors)


def _tensor(path: Path, name: str, shape: tuple[int, ...], type_id: int, offset: int, file_size: int) -> GGUFTensor:
    try:
        kind = GGMLQuantizationType(type_id)
    except ValueError:
        raise ModelError(f"{path.name}: tensor {name} has the unknown type {type_id}") from None
    if kind not in SUPPORTED:
        raise ModelError(f"{path.name}: tensor {name} has type {kind.name}, which is not supported")
    if not shape or 0 in shape or shape[-1] % GGML_QUANT_SIZES[kind][0]:
        raise ModelError(f"{path.name}: tensor {name} has shape {list(shape)}, impossible for {kind.name}")
    tensor = GGUFTensor(path, name, shape, kind, offset)
    if offset + tensor.num_bytes > file_size:
        raise ModelError(f"{path.name}: the file ends before the end of tensor {name}")
    return tensor
