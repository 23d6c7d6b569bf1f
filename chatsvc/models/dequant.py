"""llama.cpp's block formats to float32.

Bit for bit what ``gguf.quants.dequantize`` computes; the formats that are common get a torch version, which is several
times faster because a product is written once and by several threads.
"""

from __future__ import annotations

import torch
from gguf import quants
from gguf.constants import GGMLQuantizationType

from chatsvc.models.rawfile import Bytes

_T = GGMLQuantizationType

SUPPORTED = frozenset({_T.F32, _T.F16, _T.BF16, _T.Q8_0, _T.Q4_0, _T.Q4_1, _T.Q5_0, _T.Q5_1, _T.Q4_K, _T.Q5_K, _T.Q6_K})


def dequantize(raw: Bytes, kind: GGMLQuantizationType) -> torch.Tensor:
    """Bytes of whole blocks -> [elements] float32 (F16 and BF16 keep their dtype: copying converts them exactly)."""
    data = torch.from_numpy(raw)
    match kind:
        case _T.F32:
            return data.view(torch.float32)
        case _T.F16:
            return data.view(torch.float16)
        case _T.BF16:
            return data.view(torch.bfloat16)
        case _T.Q8_0:
            blocks = data.view(-1, 34)
            return (blocks[:, 2:].view(torch.int8) * _half(blocks, 0)).flatten()
        case _T.Q4_0:
            blocks = data.view(-1, 18)
            return (_nibbles(blocks[:, 2:]).sub_(8) * _half(blocks, 0)).flatten()
        case _T.Q4_1:
            blocks = data.view(-1, 20)
            return (_nibbles(blocks[:, 4:]) * _half(blocks, 0)).add_(_half(blocks, 2)).flatten()
        case _:
            return torch.from_numpy(quants.dequantize(raw, kind)).flatten()


def _half(blocks: torch.Tensor, at: int) -> torch.Tensor:
    """[blocks, 1] float32: the float16 at a byte of each block."""
    return blocks[:, at : at + 2].view(torch.float16).float()


def _nibbles(packed: torch.Tensor) -> torch.Tensor:
    """[blocks, 16] uint8 -> [blocks, 32] int8: all low halves, then all high halves."""
    return torch.cat((packed & 15, packed >> 4), dim=1).view(torch.int8)
