"""Tensors of a directory with safetensors files, one file or several with an index.

The format is a length, a JSON table and the bytes (see the ``safetensors`` project's README). The table is read here
and not through that package, because that maps the whole file: while weights are converted, the mapping counts as a
second copy in memory.
"""

from __future__ import annotations

import json
import math
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from chatsvc.errors import ModelError
from chatsvc.models.rawfile import map_rows, read_rows
from kernels.cpu.library import Rows

_SINGLE, _INDEX = "model.safetensors", "model.safetensors.index.json"
_DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_PLAIN = {torch.float32: "f32", torch.float16: "f16", torch.bfloat16: "bf16"}  # what the CPU kernels read as it lies
_MAX_TABLE = 100_000_000


@dataclass(frozen=True, slots=True)
class SafeTensor:
    """A tensor as it lies in a file; ``offset`` counts bytes from the start of the file."""

    path: Path
    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    offset: int

    def read_into(self, out: torch.Tensor) -> None:
        """Copy and convert into ``out`` (same shape, any float dtype and device).

        Raises:
            ModelError: the file is shorter than its table says.
        """
        width = self.shape[-1] if self.shape else 1
        rows = out.view(-1, width)
        pieces = read_rows(
            self.path,
            self.name,
            offset=self.offset,
            rows=rows.shape[0],
            row_bytes=width * self.dtype.itemsize,
            row_elements=width,
        )
        for start, count, raw in pieces:
            rows[start : start + count] = torch.from_numpy(raw).view(self.dtype).view(count, width)

    def rows(self) -> Rows:
        """See :class:`chatsvc.models.weights.FileTensor`."""
        count, width = self.shape
        if (name := _PLAIN.get(self.dtype)) is None or self.offset % self.dtype.itemsize:
            out = torch.empty(self.shape)
            self.read_into(out)
            return Rows.of(out)
        row_bytes = width * self.dtype.itemsize
        return Rows.at(name, width, map_rows(self.path, self.name, offset=self.offset, rows=count, row_bytes=row_bytes))


def read_tables(directory: Path) -> dict[str, SafeTensor]:
    """Where every tensor of the directory lies; like transformers, a single file goes before an index.

    Raises:
        ModelError: naming the file that is missing or damaged, the tensor that lies in two files, or in none.
    """
    if (directory / _SINGLE).is_file():
        return _read_table(directory / _SINGLE)
    if not (directory / _INDEX).is_file():
        raise ModelError(f"{directory.name}: neither {_SINGLE} nor {_INDEX} is there")
    weight_map = read_json(directory / _INDEX).get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(f, str) for f in weight_map.values()):
        raise ModelError(f"{_INDEX}: weight_map is missing or is not a table of file names")
    tensors: dict[str, SafeTensor] = {}
    for file in sorted(set(weight_map.values())):
        if Path(file).name != file:
            raise ModelError(f"{_INDEX}: {file!r} is not a file name")
        if not (directory / file).is_file():
            raise ModelError(f"{_INDEX}: the file {file} is missing")
        for name, tensor in _read_table(directory / file).items():
            if name in tensors:
                raise ModelError(f"tensor {name} is in both {tensors[name].path.name} and {file}")
            tensors[name] = tensor
    for name, file in weight_map.items():
        if name not in tensors or tensors[name].path.name != file:
            raise ModelError(f"{_INDEX}: tensor {name} is not in {file}")
    return tensors


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object.

    Raises:
        ModelError: the file is missing, or is not a JSON object.
    """
    try:
        value = json.loads(path.read_bytes())
    except OSError as error:
        raise ModelError(f"{path.name} cannot be read: {error}") from error
    except ValueError as error:
        raise ModelError(f"{path.name} is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise ModelError(f"{path.name} is not a JSON object")
    return value


def _read_table(path: Path) -> dict[str, SafeTensor]:
    size = path.stat().st_size
    with path.open("rb") as file:
        head = file.read(8)
        length = struct.unpack("<Q", head)[0] if len(head) == 8 else 0
        if not 0 < length <= min(size - 8, _MAX_TABLE):
            raise ModelError(f"{path.name} is not a safetensors file")
        try:
            table = json.loads(file.read(length), object_pairs_hook=_no_doubles)
        except ValueError as error:
            raise ModelError(f"{path.name}: its table cannot be read: {error}") from error
    if not isinstance(table, dict):
        raise ModelError(f"{path.name}: its table is not a JSON object")
    return {
        name: _tensor(path, name, entry, 8 + length, size) for name, entry in table.items() if name != "__metadata__"
    }


def _no_doubles(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    table = dict(pairs)
    if len(table) != len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"twice in one file: {sorted({n for n in names if names.count(n) > 1})}")
    return table


def _tensor(path: Path, name: str, entry: Any, base: int, size: int) -> SafeTensor:
    try:
        kind, shape = entry["dtype"], tuple(int(n) for n in entry["shape"])
        begin, end = (int(n) for n in entry["data_offsets"])
    except (TypeError, KeyError, ValueError) as error:
        raise ModelError(f"{path.name}: the table's entry for {name} is damaged") from error
    if kind not in _DTYPES:
        raise ModelError(f"{path.name}: tensor {name} has dtype {kind}; supported are {', '.join(_DTYPES)}")
    dtype = _DTYPES[kind]
    if begin < 0 or end - begin != math.prod(shape) * dtype.itemsize or base + end > size:
        raise ModelError(f"{path.name}: the bytes of tensor {name} do not fit its shape or the file")
    return SafeTensor(path, name, shape, dtype, base + begin)
