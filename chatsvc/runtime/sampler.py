"""From logits to tokens. Each row depends on nothing but its own logits and its own parameters.

The random number of choice c at position p is a pure function of (seed, c, p): no generator state exists that a
preemption would have to save or a neighbour could disturb. A token is drawn by inverting the cumulative distribution
at that number.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterator, Sequence

import numpy as np
import torch
import xxhash

from chatsvc.scheduler.plan import SampledToken, SamplingRow

# Below it a distribution has collapsed onto its mode for every float32 logit gap that matters; dividing by it would
# only make infinities.
GREEDY_BELOW = 1e-5
# Candidates that top_p looks at first: those at least so likely as the best times this.
SLIGHT = 1e-3
# Candidates that top_p looks at before it sorts the whole vocabulary.
TOP_P_CANDIDATES = 256


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
    """The token of one adjusted row [V]: temperature, top_k, top_p, min_p, then the position's own random number.

    top_k keeps the k most likely tokens, top_p the fewest of them whose mass (renormalised) reaches top_p, min_p those
    at least min_p times as likely as the best; the best one always stays. Of equally likely tokens the lower id comes
    first, everywhere.

    Raises: ValueError when no token is left to choose from, or the adjusted logits have no largest finite one.
    """
    p = row.params
    best, at = logits.max(0)
    if not math.isfinite(best):
        raise ValueError("no token is left to choose from")
    if p.temperature < GREEDY_BELOW or p.top_k == 1:
        return int(at)
    # In float64, and in memory of its own: the bits must not depend on where the row stood in the batch.
    weights = ((logits.double() - float(best)) / p.temperature).exp_()
    u = uniform(p.seed, row.choice, row.position)
    if not p.top_k and p.top_p >= 1.0:
        if p.min_p > 0.0:
            weights[weights < p.min_p] = 0.0
        return _invert(weights, u)
    head = _head(weights, p.top_k, p.top_p)
    if p.min_p > 0.0:
        head = head[head >= p.min_p]
    ids = _heaviest(weights, head)
    return int(ids[_invert(weights[ids], u)])


def _head(weights: torch.Tensor, top_k: int, top_p: float) -> torch.Tensor:
    """The weights that top_k and top_p keep, heaviest first."""
    if top_k:
        head = weights.topk(min(top_k, weights.shape[0])).values
        return head if top_p >= 1.0 else _nucleus(head, top_p * float(head.sum()))
    least = top_p * float(weights.sum())
    for head in _heads(weights):
        if float(head.sum()) > least * (1 + 1e-9):  # the running sums below may round otherwise
            return _nucleus(head, least)
    return _nucleus(_sorted(weights), least)


def _heads(weights: torch.Tensor) -> Iterator[torch.Tensor]:
    """More and more of the heaviest weights, heaviest first. The largest one is 1."""
    yield _sorted(weights[weights >= SLIGHT])  # a few, as a rule, and found faster than the next
    yield weights.topk(min(TOP_P_CANDIDATES, weights.shape[0])).values


def _nucleus(head: torch.Tensor, least: float) -> torch.Tensor:
    """The fewest of ``head`` whose sum reaches ``least``."""
    mass = head.cumsum(0)
    return head[: max(1, int((mass - head < least).sum()))]


def _sorted(weights: torch.Tensor) -> torch.Tensor:
    """Heaviest first."""
    if weights.device.type == "cpu":  # numpy's vectorised sort takes a twentieth of the time of torch's
        return torch.from_numpy(np.sort(weights.numpy())[::-1].copy())
    return weights.sort(descending=True).values


def _heaviest(weights: torch.Tensor, head: torch.Tensor) -> torch.Tensor:
    """Ids, ascending, of as many of the heaviest tokens as ``head`` (their sorted weights) has."""
    least = head[-1]
    ids = (weights >= least).nonzero()[:, 0]
    surplus = ids.shape[0] - head.shape[0]
    if surplus > 0:  # ties at the border: the lower ids stay
        border = (weights[ids] == least).nonzero()[:, 0][-surplus:]
        keep = torch.ones_like(ids, dtype=torch.bool)
        keep[border] = False
        ids = ids[keep]
    return ids


def _invert(weights: torch.Tensor, u: float) -> int:
    """Index of the first weight at which the running sum exceeds u times the total. A zero weight is never chosen."""
    mass = weights.cumsum(0)
    i = int(torch.searchsorted(mass, u * float(mass[-1]), right=True))
    return min(i, int(torch.searchsorted(mass, float(mass[-1]))))


def report(logits: torch.Tensor, token: int, alternatives: int) -> SampledToken:
    """The token with its log-probability under the model's own distribution (before penalties, bias, temperature)."""
    total = float(logits.double().logsumexp(0))
    values = logits.topk(min(alternatives, logits.shape[0])).values
    if alternatives:
        ids = _heaviest(logits, values)
        # Stable: equally likely ones stay in the order of their ids.
        values, order = logits[ids].sort(descending=True, stable=True)
        top = tuple((i, v - total) for i, v in zip(ids[order].tolist(), values.tolist(), strict=True))
    else:
        top = ()
    return SampledToken(token, float(logits[token]) - total, top)


def sample(logits: torch.Tensor, rows: Sequence[SamplingRow]) -> list[SampledToken | str]:
    """One token per row of ``logits`` [R, V], or the reason why this row alone has none.

    A NaN or +inf says that the model's numbers overflowed: that row has no token. -inf is a token that cannot be.
    """
    if logits.dtype in (torch.float16, torch.bfloat16):
        logits = logits.float()
    best, greedy = _best(logits)
    out: list[SampledToken | str] = []
    # The one loop over the batch: rows that only want the best token cost nothing here.
    for i, row in enumerate(rows):
        try:
            ok = math.isfinite(best[i])
            out.append(_sample_row(logits[i], row, greedy[i]) if ok else "the model's logits are not finite")
        except Exception as e:  # one row's fault stays its own
            out.append(f"sampling failed: {type(e).__name__}: {e}")
    return out


def _best(logits: torch.Tensor) -> tuple[list[float], list[int]]:
    """Each row's largest logit (NaN if it has one) and the first place where it stands."""
    if logits.device.type == "cpu":  # numpy's argmax takes a fifth of the time of torch's
        values = logits.numpy()
        at = values.argmax(axis=1)
        return values[np.arange(len(at)), at].tolist(), at.tolist()
    best, at = logits.max(dim=1)
    return best.tolist(), at.tolist()


def continuations(logits: torch.Tensor, row: SamplingRow) -> SampledToken:
    """For beam search: the most likely next tokens, after penalties and forbidden tokens.

    As transformers has it, penalties act on the log-probabilities, not on the logits.
    """
    values, ids = adjust(logits.double().log_softmax(0), row).topk(min(row.candidates, logits.shape[0]))
    top = tuple((i, v) for i, v in zip(ids.tolist(), values.tolist(), strict=True) if v > -torch.inf)
    return SampledToken(top[0][0], top[0][1], top)


def _sample_row(logits: torch.Tensor, row: SamplingRow, best: int) -> SampledToken:
    if row.candidates:
        return continuations(logits, row)
    p = row.params
    plain = not (row.prompt_ids or row.output_ids or p.logit_bias or row.forbidden_ids)
    token = best if plain and p.temperature < GREEDY_BELOW else draw(adjust(logits, row), row)
    return SampledToken(token) if p.logprobs is None else report(logits, token, p.logprobs)
