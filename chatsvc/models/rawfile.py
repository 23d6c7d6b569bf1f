"""Rows of a tensor as bytes of a file: read in small pieces, so that no second copy is made, or mapped for a moment."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np

from chatsvc.errors import ModelError

Bytes = np.ndarray[tuple[int], np.dtype[np.uint8]]
Bytes2 = np.ndarray[tuple[int, int], np.dtype[np.uint8]]

# Elements in one piece. The temporary arrays stay in the cache, and torch works on so few in the calling thread: waking
# its pool for each small step costs more than it saves, and on a busy machine twenty times as much.
CHUNK_ELEMENTS = 1 << 15


def read_rows(
    path: Path, name: str, *, offset: int, rows: int, row_bytes: int, row_elements: int
) -> Iterator[tuple[int, int, Bytes]]:
    """Yield (first row, number of rows, their bytes) until all rows are read.

    Args:
        name: the tensor's, for the error.
        offset: bytes from the start of the file.

    Raises:
        ModelError: the file ends too early or cannot be read.
    """
    step = max(1, CHUNK_ELEMENTS // row_elements)
    try:
        with path.open("rb", buffering=0) as file:
            file.seek(offset)
            for start in range(0, rows, step):
                count = min(step, rows - start)
                raw: Bytes = np.fromfile(file, dtype=np.uint8, count=count * row_bytes)
                if raw.size != count * row_bytes:
                    raise ModelError(f"{path.name}: the file ends inside tensor {name}")
                yield start, count, raw
    except OSError as error:
        raise ModelError(f"{path.name}: tensor {name} cannot be read: {error}") from error


def map_rows(path: Path, name: str, *, offset: int, rows: int, row_bytes: int) -> Bytes2:
    """[rows, row_bytes] of the file, mapped: it takes memory while it is looked at, and goes with its last user.

    Raises:
        ModelError: the file ends too early or cannot be read.
    """
    try:
        if path.stat().st_size < offset + rows * row_bytes:
            raise ModelError(f"{path.name}: the file ends inside tensor {name}")
        return np.memmap(path, dtype=np.uint8, mode="r", offset=offset, shape=(rows, row_bytes))
    except OSError as error:
        raise ModelError(f"{path.name}: tensor {name} cannot be read: {error}") from error
