"""Many small integer arrays in one transfer to the device."""

from __future__ import annotations

from array import array
from collections.abc import Iterable

import torch

# Parts start at multiples of 16 bytes: Triton compiles a kernel once more for pointers that do not.
_ALIGN = 4


class Upload:
    """Collects int32 arrays; :meth:`send` brings them to the device in one copy that the host does not wait for."""

    def __init__(self) -> None:
        self._flat = array("i")
        self._spans: list[tuple[int, int]] = []

    def add(self, numbers: Iterable[int]) -> int:
        """The number under which :meth:`send` returns the part."""
        start = len(self._flat)
        self._flat.extend(numbers)
        self._spans.append((start, len(self._flat)))
        self._flat.extend([0] * (-len(self._flat) % _ALIGN))
        return len(self._spans) - 1

    def send(self, device: torch.device) -> list[torch.Tensor]:
        """The parts, int32 views of one tensor on ``device``."""
        packed = torch.frombuffer(self._flat, dtype=torch.int32) if self._flat else torch.empty(0, dtype=torch.int32)
        if device.type == "cuda":
            # From pinned memory, which torch keeps until the copy is done. From other memory the host would wait.
            packed = packed.pin_memory().to(device, non_blocking=True)
        return [packed[start:end] for start, end in self._spans]
