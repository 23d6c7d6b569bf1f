"""A Llama-family model in a directory with config.json and safetensors."""

from __future__ import annotations

import dataclasses
import logging
from pathlib import Path

import torch

from chatsvc.models.config import ModelConfig
from chatsvc.models.hf_config import parse_hf_config
from chatsvc.models.safetensors_dir import read_json, read_tables
from chatsvc.models.weights import FileTensor, OpenModel, opened

_LOG = logging.getLogger(__name__)
_EMBED, _LM_HEAD = "model.embed_tokens.weight", "lm_head.weight"


def hf_config(directory: Path) -> ModelConfig:
    """The configuration in a directory.

    Raises:
        ModelError: see :func:`chatsvc.models.hf_config.parse_hf_config`; or config.json is missing or damaged.
    """
    return parse_hf_config(read_json(directory / "config.json"))


def open_hf(directory: Path) -> OpenModel:
    """Look at all tensors.

    The output layer is chosen as transformers 5 does: ``tie_word_embeddings`` ties it to the embedding unless the file
    has both with different values; with only one of the two in the file, that one is both.

    Raises:
        ModelError: see :func:`hf_config`; or tensors are missing, left over, doubled, or have wrong shapes.
    """
    config = hf_config(directory)
    # Old files carry the rotary frequencies, which follow from the configuration.
    tensors: dict[str, FileTensor] = {
        name: tensor for name, tensor in read_tables(directory).items() if not name.endswith("rotary_emb.inv_freq")
    }
    if config.tie_word_embeddings and _LM_HEAD in tensors:
        if _EMBED not in tensors:
            tensors[_EMBED] = tensors.pop(_LM_HEAD)
        elif _equal(tensors[_EMBED], tensors[_LM_HEAD]):
            del tensors[_LM_HEAD]
        else:
            _LOG.warning("tie_word_embeddings is true, but the file has another %s: that one is used", _LM_HEAD)
            config = dataclasses.replace(config, tie_word_embeddings=False)
    return opened(config, tensors)


def _equal(a: FileTensor, b: FileTensor) -> bool:
    if a.shape != b.shape:
        return False
    values = torch.empty(2, *a.shape)
    a.read_into(values[0])
    b.read_into(values[1])
    return torch.equal(values[0], values[1])
