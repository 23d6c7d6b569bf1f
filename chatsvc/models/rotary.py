"""Rotary position embedding (Su et al. 2021, RoFormer) and the ways its frequencies are stretched.

Every formula is written in the float32 arithmetic, and in the order, that Hugging Face transformers uses: at position
100,000 one unit in the last place of a frequency is an angle error of 0.01.
"""

from __future__ import annotations

import math

import torch

from chatsvc.models.config import ModelConfig

# Rows of the table are always computed in the same groups, small enough for one thread and one code path: the bits of
# a row never depend on how far the table has grown or on how many threads there are.
CHUNK = 256


class Rotary:
    """cos and sin of every position, in float32, grown on demand.

    With "dynamic" scaling the base depends on the length of the sequence. Transformers recomputes it from the longest
    position of the call and leaves cached keys as they are: a prompt is rotated with the base of the prompt's length,
    each later token with the base of its own position + 1. A KV cache that is shared between prompts of different
    lengths cannot do the first, so here a token's base comes from ``lens``, and by default from its own position + 1:
    a pure function of the position, equal to transformers' ``generate`` for every prompt within the original length.
    For longer prompts pass ``lens`` = the prompt's length for the prompt's tokens. ``ModelConfig.max_model_len`` stays
    at the original length, so the service never meets the difference.

    Args:
        config: gives theta, head_dim and scaling.
        device: where positions come from.
        freq_factors: [head_dim // 2] divisors of the frequencies, or None (llama.cpp's ``rope_freqs.weight``).
    """

    def __init__(self, config: ModelConfig, device: torch.device, freq_factors: torch.Tensor | None = None) -> None:
        self._config = config
        self._device = device
        self._inv_freq = _inv_freq(config)
        if freq_factors is not None:
            self._inv_freq = self._inv_freq / freq_factors.to(torch.float32).cpu()
        self._factor = config.rope_scaling.attention_factor
        self._table = torch.empty(0, config.head_dim, dtype=torch.float32, device=device)
        if device.type != "cpu":
            # Asking a GPU for the largest position would wait for it at every step.
            self._grow(config.max_model_len)

    def cos_sin(
        self, positions: torch.Tensor, dtype: torch.dtype, lens: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """cos and sin of positions, ready for :func:`rotate`.

        Args:
            positions: [T] int64.
            dtype: of the result.
            lens: [T] int64, the length that sets each token's base under "dynamic" scaling; otherwise unused.

        Returns:
            cos [T, 1, head_dim], and sin [T, 1, head_dim] with its first half negated.
        """
        if lens is not None and self._config.rope_scaling.type == "dynamic":
            rows = self._rows(positions.cpu(), lens.cpu()).to(self._device)
        else:
            if self._device.type == "cpu" and positions.numel():
                self._grow(int(positions.max()) + 1)
            rows = self._table.index_select(0, positions)
        cos, sin = rows.to(dtype).unsqueeze(1).chunk(2, dim=-1)
        return torch.cat((cos, cos), dim=-1), torch.cat((-sin, sin), dim=-1)

    def table(self, length: int) -> torch.Tensor:
        """[at least length, head_dim] float32 of the positions from 0: cos in the first half, sin in the second."""
        self._grow(length)
        return self._table

    def _grow(self, length: int) -> None:
        have = self._table.shape[0]
        if length <= have:
            return
        # At least doubled: a growing sequence copies the table a logarithmic number of times.
        end = -(-max(length, 2 * have) // CHUNK) * CHUNK
        chunks = [self._table]
        for start in range(have, end, CHUNK):
            positions = torch.arange(start, start + CHUNK)
            chunks.append(self._rows(positions, positions + 1).to(self._device))
        self._table = torch.cat(chunks)

    def _rows(self, positions: torch.Tensor, lens: torch.Tensor) -> torch.Tensor:
        """[T, head_dim] float32 on the CPU: cos in the first half, sin in the second."""
        inv_freq = self._inv_freq
        scaling = self._config.rope_scaling
        if scaling.type == "dynamic":
            inv_freq = _dynamic_inv_freq(self._config, lens, inv_freq)
        angles = positions[:, None].to(torch.float32) * inv_freq
        return torch.cat((angles.cos(), angles.sin()), dim=-1) * self._factor


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotate pairs (i, i + D / 2) of x [T, heads, D]; cos and sin as :meth:`Rotary.cos_sin` gives them."""
    return torch.addcmul(x * cos, x.roll(x.shape[-1] // 2, dims=-1), sin)


def _exponents(head_dim: int) -> torch.Tensor:
    return torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim


def _inv_freq(config: ModelConfig) -> torch.Tensor:
    """[head_dim // 2] float32: angle per position."""
    scaling = config.rope_scaling
    pos_freqs = config.rope_theta ** _exponents(config.head_dim)
    inv_freq: torch.Tensor = 1.0 / pos_freqs
    match scaling.type:
        case "default" | "dynamic":
            return inv_freq
        case "linear":
            return inv_freq / scaling.factor
        case "llama3":
            return _llama3(config, inv_freq)
        case "yarn":
            return _yarn(config, pos_freqs)


def _llama3(config: ModelConfig, inv_freq: torch.Tensor) -> torch.Tensor:
    """Long waves are stretched by the factor, short ones are not, those between in proportion (Llama 3.1)."""
    s = config.rope_scaling
    length = s.original_max_position_embeddings
    low_wavelen, high_wavelen = length / s.low_freq_factor, length / s.high_freq_factor
    wavelen = 2 * math.pi / inv_freq
    stretched = torch.where(wavelen > low_wavelen, inv_freq / s.factor, inv_freq)
    smooth = (length / wavelen - s.low_freq_factor) / (s.high_freq_factor - s.low_freq_factor)
    between = (1 - smooth) * stretched / s.factor + smooth * stretched
    return torch.where((wavelen < high_wavelen) | (wavelen > low_wavelen), stretched, between)


def _yarn(config: ModelConfig, pos_freqs: torch.Tensor) -> torch.Tensor:
    """NTK-by-parts (Peng et al. 2023, YaRN, section 3.2): a ramp between extrapolated and interpolated frequencies."""
    s = config.rope_scaling
    dim = config.head_dim

    def correction_dim(rotations: float) -> float:
        length = s.original_max_position_embeddings
        return dim * math.log(length / (rotations * 2 * math.pi)) / (2 * math.log(config.rope_theta))

    low, high = correction_dim(s.beta_fast), correction_dim(s.beta_slow)
    if s.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    if low == high:
        high += 0.001
    ramp = ((torch.arange(dim // 2, dtype=torch.float32) - low) / (high - low)).clamp(0, 1)
    keep = 1 - ramp
    return 1.0 / (s.factor * pos_freqs) * (1 - keep) + 1.0 / pos_freqs * keep


def _dynamic_inv_freq(config: ModelConfig, lens: torch.Tensor, inv_freq: torch.Tensor) -> torch.Tensor:
    """[T, head_dim // 2]: up to the original length the plain frequencies, past it those of a larger base.

    One length at a time: transformers has one length, and a power of many numbers rounds differently from one power.
    """
    dim, factor, original = config.head_dim, config.rope_scaling.factor, config.max_position_embeddings
    rows = {}
    for length in set(lens.tolist()):
        # A tensor and not a number: transformers computes the base in float32.
        stretch = factor * torch.tensor(length) / original - (factor - 1)
        grown = 1.0 / ((config.rope_theta * stretch ** (dim / (dim - 2))) ** _exponents(dim))
        rows[length] = grown if length > original else inv_freq
    return torch.stack([rows[length] for length in lens.tolist()])
