"""The head of a GGUF file, read quickly.

``gguf.GGUFReader`` makes several numpy arrays for each vocabulary entry and needs about two and a half seconds for a
vocabulary of 50 thousand tokens; plain ``struct`` over a memory map needs a few hundredths. Format: the GGUF
specification of the ggml project, versions 2 and 3, little endian.
"""

from __future__ import annotations

import mmap
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from chatsvc.errors import ModelError

_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
_MAX_DIMS = 8


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """Where one tensor lies.

    Attributes:
        shape: GGUF's order, fastest dimension first (numpy's order is the reverse).
        ggml_type: number of the ggml quantisation type.
        offset: bytes from the start of the tensor data, not of the file.
    """

    shape: tuple[int, ...]
    ggml_type: int
    offset: int


@dataclass(frozen=True, slots=True)
class GgufHead:
    """Attributes:
    metadata: every key with its value as plain Python data (see :func:`read_gguf_head` for what may be left out).
    tensors: name -> place.
    data_offset: bytes from the start of the file to the tensor data.
    """

    metadata: dict[str, Any]
    tensors: dict[str, GgufTensor]
    data_offset: int


class _Cursor:
    """Reads one value after the other; any read past the end raises ``struct.error``.

    ``longest``: a list of more values is skipped and becomes None.
    """

    def __init__(self, data: mmap.mmap, longest: int | None) -> None:
        self.data = data
        self.at = 0
        self._longest = longest

    def scalar(self, code: str) -> Any:
        value = struct.unpack_from("<" + code, self.data, self.at)[0]
        self.at += struct.calcsize("<" + code)
        return value

    def string(self) -> str:
        return self._strings(1)[0]

    def value(self, kind: int) -> Any:
        if kind in _SCALARS:
            return self.scalar(_SCALARS[kind])
        if kind == _STRING:
            return self.string()
        if kind == _ARRAY:
            return self._array()
        raise ValueError(f"value type {kind}")

    def _array(self) -> list[Any] | None:
        kind, count = self.scalar("I"), self.scalar("Q")
        wanted = self._longest is None or count <= self._longest
        if kind in _SCALARS:
            code = f"<{count}{_SCALARS[kind]}"
            if self.at + struct.calcsize(code) > len(self.data):
                raise struct.error("array past the end")
            values = list(struct.unpack_from(code, self.data, self.at)) if wanted else None
            self.at += struct.calcsize(code)
            return values
        if kind == _STRING:
            if wanted:
                return self._strings(count)
            self._skip_strings(count)
            return None
        nested = [self.value(kind) for _ in range(count)]
        return nested if wanted else None

    # A vocabulary and its merges are a hundred thousand strings: these two loops are most of a head's time.

    def _strings(self, count: int) -> list[str]:
        data, at, size, length_at = self.data, self.at, len(self.data), _U64.unpack_from
        found: list[str] = []
        for _ in range(count):
            start = at + 8
            at = start + length_at(data, at)[0]
            if at > size:
                raise struct.error("string past the end")
            # llama.cpp's own writers cut some descriptions inside a character; names and tokens are valid.
            found.append(data[start:at].decode("utf-8", "replace"))
        self.at = at
        return found

    def _skip_strings(self, count: int) -> None:
        data, at, length_at = self.data, self.at, _U64.unpack_from
        for _ in range(count):
            at += 8 + length_at(data, at)[0]
        if at > len(data):
            raise struct.error("string past the end")
        self.at = at


_U64 = struct.Struct("<Q")


def read_gguf_head(path: Path, *, longest_list: int | None = None) -> GgufHead:
    """Read metadata and the table of tensors; the tensor data is not touched.

    Args:
        longest_list: lists of more values (a vocabulary, in effect) are None in the metadata, which is several times
            faster. None: everything is read.

    Raises: ModelError when the file is missing, cut off or not a GGUF file that can be read.
    """
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return _read(_Cursor(data, longest_list))
    except (OSError, ValueError, struct.error, OverflowError, MemoryError) as error:
        raise ModelError(f"{path} is not a readable GGUF file: {error}") from error


def _read(cursor: _Cursor) -> GgufHead:
    if cursor.data[:4] != b"GGUF":
        raise ValueError("it does not begin with GGUF")
    cursor.at = 4
    version = cursor.scalar("I")
    if version not in (2, 3):
        raise ValueError(f"version {version} (2 and 3 are supported, little endian)")
    num_tensors, num_keys = cursor.scalar("Q"), cursor.scalar("Q")
    metadata: dict[str, Any] = {}
    for _ in range(num_keys):
        key = cursor.string()
        if key in metadata:
            raise ValueError(f"metadata key {key} twice")
        metadata[key] = cursor.value(cursor.scalar("I"))
    tensors: dict[str, GgufTensor] = {}
    for _ in range(num_tensors):
        name = cursor.string()
        num_dims = cursor.scalar("I")
        if num_dims > _MAX_DIMS:
            raise ValueError(f"tensor {name} has {num_dims} dimensions")
        shape = tuple(cursor.scalar("Q") for _ in range(num_dims))
        if name in tensors:
            raise ValueError(f"tensor {name} twice")
        tensors[name] = GgufTensor(shape, cursor.scalar("I"), cursor.scalar("Q"))
    alignment = metadata.get("general.alignment", 32)
    if not isinstance(alignment, int) or alignment <= 0:
        raise ValueError(f"general.alignment is {alignment!r}")
    return GgufHead(metadata, tensors, -(-cursor.at // alignment) * alignment)
