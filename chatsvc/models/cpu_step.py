"""A Llama-family model as one native call per step."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from chatsvc.errors import ModelError
from chatsvc.models.attention.base import KVCache, StepLayout
from chatsvc.models.cpu_weights import KINDS, Weights
from chatsvc.models.rotary import Rotary
from kernels.cpu.library import KEPT, Library, Model, Sequences, Shape


class CpuModel:
    """A :class:`chatsvc.models.attention.base.FusedModel`: a packed copy of the weights, with threads of its own.

    Few large calls are the point: every torch operation gives the interpreter lock up and must win it back from the
    loop beside it, hundreds of times a step. Here that happens once.

    Args:
        weights: may be dropped afterwards.
        threads: of the step; they sleep between steps.
        int8: linear layers multiply whole numbers: faster, and no longer exact.

    Raises:
        MemoryError: there is no room for the packed weights.
        ModelError: a file ends too early; a block's scale is too large for the kernels.
    """

    def __init__(self, library: Library, weights: Weights, rotary: Rotary, threads: int, int8: bool = False) -> None:
        config = weights.config
        self.shape, self.dtype, self.device = config.shape, torch.float32, torch.device("cpu")
        self.int8 = int8
        self._rotary = rotary
        self._library = library
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
        try:
            self._pack(weights)
        except ValueError as error:
            raise ModelError(f"{error}; --attention-backend torch takes it") from error

    def _pack(self, weights: Weights) -> None:
        for layer in range(weights.config.num_layers):
            for kind in KINDS:
                self._packed.linear(layer, kind, *weights.linear(layer, kind), low=self.int8)
            norms = weights.norms(layer)
            self._packed.norms(layer, norms.input, norms.post, norms.q, norms.k)
        norm, head, embed = weights.last()
        self._packed.linear(0, "head", head, None, low=self.int8)
        if not weights.tied:
            self._packed.linear(0, "embed", embed, None)
        self._packed.finish(norm, weights.tied)

    @property
    def weight_bytes(self) -> int:
        """Bytes of the packed matrices."""
        return self._packed.weight_bytes

    def settle(self) -> None:
        """See :class:`chatsvc.models.attention.base.FusedModel`."""
        self._library.ck_trim()  # whoever loaded the weights has dropped them by now
        self._packed.settle()

    def step(
        self, ids: Sequence[int], positions: Sequence[int], layout: StepLayout, wanted: list[int], cache: KVCache
    ) -> torch.Tensor:
        """See :class:`chatsvc.models.attention.base.FusedModel`. The pool is one of the kernels' kinds, contiguous, on
        the CPU."""
        data = cache.data
        assert data.dtype in KEPT and data.is_contiguous() and data.device.type == "cpu"
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
