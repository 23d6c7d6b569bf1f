"""A Llama-family model in float32 as one native call per step."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from chatsvc.models.attention.base import KVCache, StepLayout
from chatsvc.models.llama import LlamaModel
from kernels.cpu.library import Library, Model, Sequences, Shape


class CpuModel:
    """A :class:`chatsvc.models.attention.base.FusedModel`: a packed copy of the weights, with threads of its own.

    Few large calls are the point: every torch operation gives the interpreter lock up and must win it back from the
    loop beside it, hundreds of times a step. Here that happens once.

    Args:
        model: float32 on a CPU; may be dropped afterwards.
        threads: of the step; they sleep between steps.

    Raises:
        MemoryError: there is no room for the packed weights.
    """

    def __init__(self, library: Library, model: LlamaModel, threads: int) -> None:
        config, weights = model.config, model.weights
        self.shape, self.dtype, self.device = model.shape, model.dtype, model.device
        self._rotary = model.rotary
        self._library = library
        self._stepped = False
        self._packed = Model(
            library,
            Shape(
                vocab=config.vocab_size,
                hidden=config.hidden_size,
                layers=config.num_layers,
                heads=config.num_heads,
                kv_heads=config.num_kv_heads,
                dim=config.head_dim,
                intermediate=config.intermediate_size,
                eps=config.rms_norm_eps,
            ),
            threads,
        )
        for index, layer in enumerate(weights.layers):
            for kind, linear in (("qkv", layer.qkv), ("o", layer.o), ("gate_up", layer.gate_up), ("down", layer.down)):
                self._packed.linear(index, kind, _plain(linear.weight), _plain_or_none(linear.bias))
            self._packed.norms(
                index,
                _plain(layer.input_norm),
                _plain(layer.post_norm),
                _plain_or_none(layer.q_norm),
                _plain_or_none(layer.k_norm),
            )
        tied = weights.lm_head is weights.embed
        self._packed.linear(0, "head", _plain(weights.lm_head), None)
        if not tied:
            self._packed.linear(0, "embed", _plain(weights.embed), None)
        self._packed.finish(_plain(weights.norm), tied)

    def step(
        self, ids: Sequence[int], positions: Sequence[int], layout: StepLayout, wanted: list[int], cache: KVCache
    ) -> torch.Tensor:
        """See :class:`chatsvc.models.attention.base.FusedModel`. The pool is float32, contiguous, on the CPU."""
        data = cache.data
        assert data.dtype == torch.float32 and data.is_contiguous() and data.device.type == "cpu"
        if not self._stepped:  # whoever loaded the weights has dropped them by now
            self._library.ck_trim()
            self._stepped = True
        angles = self._rotary.table(max(positions, default=0) + 1)
        rows = sorted(set(wanted))  # forks of one sequence ask for the same row
        logits = self._packed.forward(sequences_of(layout), ids, positions, rows, angles, data)
        if rows == wanted:
            return logits
        places = {row: i for i, row in enumerate(rows)}
        return logits.index_select(0, torch.tensor([places[row] for row in wanted], dtype=torch.int64))


def sequences_of(layout: StepLayout) -> Sequences:
    """The same four lists under the kernels' own name."""
    return Sequences(layout.query_lens, layout.seq_lens, layout.block_tables, layout.slot_mapping)


def _plain(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().contiguous()


def _plain_or_none(tensor: torch.Tensor | None) -> torch.Tensor | None:
    return None if tensor is None else _plain(tensor)
