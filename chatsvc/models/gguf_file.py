"""Tensors of a GGUF file (llama.cpp's format), read and dequantised a few rows at a time."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

from chatsvc.errors import ModelError
from chatsvc.ggufmeta import read_gguf_head
from chatsvc.models.dequant import SUPPORTED, dequantize

# Elements dequantised at a time: the temporary arrays stay in the megabytes and partly in the cache.
_CHUNK_ELEMENTS = 1 << 20


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
            ModelError: the file is shorter than its header says.
        """
        rows = out.view(-1, self.shape[-1])
        for start, block in self._blocks():
            rows[start : start + block.shape[0]] = block

    def _blocks(self) -> Iterator[tuple[int, torch.Tensor]]:
        num_rows = self.num_bytes // self.row_bytes
        step = max(1, _CHUNK_ELEMENTS // self.shape[-1])
        with self.path.open("rb", buffering=0) as file:
            file.seek(self.offset)
            for start in range(0, num_rows, step):
                count = min(step, num_rows - start)
                raw = np.fromfile(file, dtype=np.uint8, count=count * self.row_bytes)
                if raw.size != count * self.row_bytes:
                    raise ModelError(f"{self.path.name}: the file ends inside tensor {self.name}")
                yield start, dequantize(raw, self.type).view(count, self.shape[-1])


@dataclass(frozen=True, slots=True)
class GGUFFile:
    """The head of a file: its metadata, and where the tensors lie."""

    metadata: dict[str, Any]
    tensors: dict[str, GGUFTensor]


def read_header(path: Path) -> GGUFFile:
    """Parse the head of a file; its tensors are not touched.

    Raises:
        ModelError: not a GGUF file, or damaged or cut, or a tensor's type is not supported.
    """
    head = read_gguf_head(path)
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
