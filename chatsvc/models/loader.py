"""From model files to a model that can run."""

from __future__ import annotations

import torch

from chatsvc.modelfiles import ModelFiles
from chatsvc.models.config import ModelConfig
from chatsvc.models.gguf_file import read_header
from chatsvc.models.gguf_model import gguf_config, load_gguf
from chatsvc.models.llama import LlamaModel


def load_config(files: ModelFiles) -> ModelConfig:
    """The model's configuration, without reading weights.

    Raises:
        ModelError: naming the field that is missing, wrong, or asks for something that is not implemented.
    """
    return gguf_config(read_header(files.path))


def load_model(files: ModelFiles, *, dtype: torch.dtype, device: torch.device | str = "cpu") -> LlamaModel:
    """Read the weights, tensor by tensor, into memory of ``dtype``; no file stays open or mapped.

    Raises:
        ModelError: see :func:`load_config`; or tensors are missing, left over, doubled, or have wrong shapes.
    """
    return load_gguf(read_header(files.path), dtype, torch.device(device))
