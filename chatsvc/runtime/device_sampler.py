"""The sampler of :mod:`chatsvc.runtime.sampler` with Triton kernels: logits stay on the device, tokens come back.

Importing it needs triton. The random numbers are the same, made on the host: each is a pure function of (seed, choice,
position), and 8 bytes per row cost nothing. The token is the one the host's sampler draws, unless the two disagree on
the last place of a sum.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np
import torch

from chatsvc.runtime.sampler import GREEDY_BELOW, uniform
from chatsvc.runtime.sampler import sample as sample_on_host
from chatsvc.scheduler.plan import SampledToken, SamplingRow
from kernels.triton import sampling
from kernels.triton.sampling import NOT_FINITE, NOTHING_LEFT, Choice, Drawn, Edit


def sample(logits: torch.Tensor, rows: Sequence[SamplingRow]) -> list[SampledToken | str]:
    """See :func:`chatsvc.runtime.sampler.sample`; one transfer there, one back."""
    if logits.dtype not in (torch.float32, torch.float16, torch.bfloat16):
        return sample_on_host(logits, rows)
    choices: list[Choice] = []
    errors: dict[int, str] = {}
    for i, row in enumerate(rows):
        try:
            choices.append(choice_of(row, logits.shape[1]))
        except Exception as e:  # one row's fault stays its own
            errors[i] = f"sampling failed: {type(e).__name__}: {e}"
            choices.append(Choice())
    drawn = sampling.read(sampling.sample(logits.float(), choices), choices)
    return [errors.get(i) or _outcome(row, found) for i, (row, found) in enumerate(zip(rows, drawn, strict=True))]


def choice_of(row: SamplingRow, size: int) -> Choice:
    """What the kernels need to know of a row, of a vocabulary of ``size`` tokens.

    Raises: IndexError when a token to be changed is not in the vocabulary.
    """
    p = row.params
    edits = edits_of(row)
    for edit in edits:
        if not 0 <= edit.token < size:
            raise IndexError(f"token {edit.token} is not in a vocabulary of {size}")
    if row.candidates:
        return Choice(ranks=min(row.candidates, size), beam=True, edits=edits)
    greedy = p.temperature < GREEDY_BELOW
    return Choice(
        temperature=1.0 if greedy else p.temperature,
        top_k=1 if greedy else p.top_k,
        top_p=p.top_p,
        min_p=p.min_p,
        u=0.0 if greedy else uniform(p.seed, row.choice, row.position),
        ranks=min(p.logprobs or 0, size),
        edits=edits,
    )


def edits_of(row: SamplingRow) -> list[Edit]:
    """Penalties, bias and forbidden tokens, in float32 as :func:`chatsvc.runtime.sampler.adjust` computes them."""
    p = row.params
    seen = {*row.prompt_ids, *row.output_ids} if p.repetition_penalty != 1.0 else set()
    counts = Counter(row.output_ids) if p.presence_penalty or p.frequency_penalty else Counter()
    forbidden = set(row.forbidden_ids)
    presence, frequency = np.float32(p.presence_penalty), np.float32(p.frequency_penalty)
    return [
        Edit(
            token=token,
            factor=p.repetition_penalty if token in seen else 1.0,
            minus=float(presence + frequency * np.float32(counts[token])) if token in counts else 0.0,
            plus=-float("inf") if token in forbidden else p.logit_bias.get(token, 0.0),
        )
        for token in sorted(seen | counts.keys() | p.logit_bias.keys() | forbidden)
    ]


def _outcome(row: SamplingRow, drawn: Drawn) -> SampledToken | str:
    if drawn.token == NOT_FINITE:
        return "the model's logits are not finite"
    if drawn.token == NOTHING_LEFT:
        return "sampling failed: ValueError: no token is left to choose from"
    if row.candidates:
        top = tuple((token, value) for token, value in drawn.ranks if value > -torch.inf)
        return SampledToken(top[0][0], top[0][1], top)
    if row.params.logprobs is None:
        return SampledToken(drawn.token)
    return SampledToken(drawn.token, drawn.logprob, tuple(drawn.ranks))
