"""From model files to a model that can run."""

from __future__ import annotations

import torch

from chatsvc.errors import ModelError
from chatsvc.modelfiles import ModelFiles
from chatsvc.models.config import ModelConfig
from chatsvc.models.gguf_file import read_header
from chatsvc.models.gguf_model import gguf_config, open_gguf
from chatsvc.models.hf_model import hf_config, open_hf
from chatsvc.models.llama import LlamaModel
from chatsvc.models.weights import OpenModel

_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def load_config(files: ModelFiles) -> ModelConfig:
    """The model's configuration, without reading weights.

    Raises:
        ModelError: naming the field that is missing, wrong, or asks for something that is not implemented.
    """
    return hf_config(files.path) if files.format == "hf" else gguf_config(read_header(files.path))


def open_model(files: ModelFiles) -> OpenModel:
    """Look at everything, read nothing that is large.

    Raises:
        ModelError: see :func:`load_config`; or tensors are missing, left over, doubled, or have wrong shapes.
    """
    return open_hf(files.path) if files.format == "hf" else open_gguf(read_header(files.path))


def load_model(files: ModelFiles, *, dtype: torch.dtype, device: torch.device | str = "cpu") -> LlamaModel:
    """Read the weights, tensor by tensor, into memory of ``dtype``; no file stays open or mapped.

    Raises:
        ModelError: see :func:`open_model`.
    """
    if dtype not in _DTYPES:
        raise ModelError(f"dtype {dtype} is not supported for weights")
    return open_model(files).read(dtype, torch.device(device))
