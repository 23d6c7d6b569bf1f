"""From logits to tokens. Each row depends on nothing but its own logits and its own parameters.

The random number of choice c at position p is a pure function of (seed, c, p): no generator state exists that a
preemption would have to save or a neighbour could disturb. A token is drawn by inverting the cumulative distribution
at that number.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence

import torch
import xxhash

from chatsvc.scheduler.plan import SampledToken, SamplingRow

# Below it a distribution has collapsed onto its mode for every float32 logit gap that matters; dividing by it would
# only make infinities.
GREEDY_BELOW = 1e-5
# Candidates that top_p looks at before it sorts the whole vocabulary.
TOP_P_CANDIDATES = 1024


def uniform(seed: int, choice: int, position: int) -> float:
    """In [0, 1): 53 bits of xxh3-64 over the three numbers."""
    digest = xxhash.xxh3_64_intdigest(struct.pack("<QIQ", seed & (2**64 - 1), choice, position))
    return (digest >> 11) / 2.0**53


def adjust(logits: torch.Tensor, row: SamplingRow) -> torch.Tensor:
    """Penalties, bias and forbidden tokens applied to one row of logits [V]; returns a new tensor if anything changes.

    Repetition counts prompt and output and is multiplicative (Keskar et al. 2019, as transformers has it); presence
    and frequency count output only and are additive (OpenAI).
    """
    p = row.params
    if row.prompt_ids or row.output_ids or p.logit_bias or row.forbidden_ids:
        logits = logits.clone()
    if p.repetition_penalty != 1.0 and (row.prompt_ids or row.output_ids):
        seen = torch.tensor(sorted({*row.prompt_ids, *row.output_ids}), device=logits.device)
        values = logits[seen]
        logits[seen] = torch.where(values > 0, values / p.repetition_penalty, values * p.repetition_penalty)
    if (p.presence_penalty or p.frequency_penalty) and row.output_ids:
        ids, counts = torch.unique(torch.tensor(row.output_ids, device=logits.device), return_counts=True)
        logits[ids] -= p.presence_penalty + p.frequency_penalty * counts.to(logits.dtype)
    if p.logit_bias:
        ids = torch.tensor(list(p.logit_bias), device=logits.device)
        logits[ids] += torch.tensor(list(p.logit_bias.values()), dtype=logits.dtype, device=logits.device)
    if row.forbidden_ids:
        logits[torch.tensor(row.forbidden_ids, device=logits.device)] = -torch.inf
    return logits


def draw(logits: torch.Tensor, row: SamplingRow) -> int:
    """The token of one adjusted row [V]: temperature, top_k, top_p, min_p, then the position's own random number."""
    p = row.params
    if p.temperature < GREEDY_BELOW or p.top_k == 1:
        return int(logits.argmax())
    u = uniform(p.seed, row.choice, row.position)
    scores = (logits.double() - logits.max().double()) / p.temperature
    if not p.top_k and p.top_p >= 1.0 and p.min_p <= 0.0:
        return int(_invert(scores.exp(), u))
    probs, ids = _candidates(scores, p.top_k, p.top_p)
    if p.top_p < 1.0:
        # Keep the shortest head whose mass reaches top_p; the first token always stays.
        mass = probs.cumsum(0)
        keep = int((mass - probs < p.top_p * mass[-1]).sum()) if p.top_k else int((mass - probs < p.top_p).sum())
        probs, ids = probs[: max(1, keep)], ids[: max(1, keep)]
    if p.min_p > 0.0:
        probs = probs[probs >= p.min_p * probs[0]]
    return int(ids[_invert(probs, u)])


def _candidates(scores: torch.Tensor, top_k: int, top_p: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Probabilities (of the whole vocabulary's softmax) and ids, best first, as many as the filters can keep."""
    size = scores.shape[0]
    total = scores.exp().sum()
    k = min(top_k, size) if top_k else min(TOP_P_CANDIDATES, size)
    best, ids = scores.topk(k)
    probs = best.exp() / total
    if not top_k and k < size and (top_p >= 1.0 or float(probs.sum()) < top_p):
        best, ids = scores.sort(descending=True, stable=True)
        probs = best.exp() / total
    return probs, ids


def _invert(weights: torch.Tensor, u: float) -> int:
    """Index of the first weight at which the running sum exceeds u times the total. A zero weight is never chosen."""
    mass = weights.cumsum(0)
    i = int(torch.searchsorted(mass, u * float(mass[-1]), right=True))
    return min(i, int(torch.searchsorted(mass, float(mass[-1]))))


def report(logits: torch.Tensor, token: int, alternatives: int) -> SampledToken:
    """The token with its log-probability under the model's own distribution (before penalties, bias, temperature)."""
    logprobs = logits.double().log_softmax(0)
    values, ids = logprobs.topk(min(alternatives, logits.shape[0]))
    top = tuple(zip(ids.tolist(), values.tolist(), strict=True))
    return SampledToken(token, float(logprobs[token]), top)


def sample(logits: torch.Tensor, rows: Sequence[SamplingRow]) -> list[SampledToken | str]:
    """One token per row of ``logits`` [R, V], or the reason why this row alone has none."""
    finite = torch.isfinite(logits).all(dim=1).tolist()
    greedy = logits.argmax(dim=1).tolist()
    out: list[SampledToken | str] = []
    # The one loop over the batch: rows that only want the best token cost nothing here.
    for i, row in enumerate(rows):
        try:
            out.append(_sample_row(logits[i], row, greedy[i]) if finite[i] else "the model's logits are not finite")
        except Exception as e:  # one row's fault stays its own
            out.append(f"sampling failed: {type(e).__name__}: {e}")
    return out


def _sample_row(logits: torch.Tensor, row: SamplingRow, best: int) -> SampledToken:
    p = row.params
    plain = not (row.prompt_ids or row.output_ids or p.logit_bias or row.forbidden_ids)
    token = best if plain and p.temperature < GREEDY_BELOW else draw(adjust(logits, row), row)
    return SampledToken(token) if p.logprobs is None else report(logits, token, p.logprobs)
