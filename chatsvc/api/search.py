"""More answers than asked for, and the best of them: ``best_of`` and beam search."""

from __future__ import annotations

import math
from dataclasses import replace

from chatsvc.api.schema import GenerateFields
from chatsvc.engine.output import OutputLog
from chatsvc.errors import InvalidRequest
from chatsvc.scheduler.beam import BeamParams
from chatsvc.scheduler.params import SamplingParams


def with_search(params: SamplingParams, fields: GenerateFields, max_n: int) -> SamplingParams:
    """``params`` with the fields that ask for a search.

    ``best_of`` samples that many choices and keeps the n best by mean log-probability per token. ``use_beam_search``
    keeps best_of (else n) beams and returns the n best; with one beam it is greedy.

    Raises:
        InvalidRequest: naming the field.
    """
    width = fields.best_of if fields.best_of is not None else params.n
    if width > max_n:
        raise InvalidRequest(f"best_of: at most {max_n} are allowed, not {width}", param="best_of")
    if width < params.n:
        raise InvalidRequest(f"best_of: {width} is less than n, which is {params.n}", param="best_of")
    if not fields.use_beam_search:
        if fields.length_penalty not in (None, 1.0):
            raise InvalidRequest("length_penalty: only together with use_beam_search", param="length_penalty")
        if fields.early_stopping:
            raise InvalidRequest("early_stopping: only together with use_beam_search", param="early_stopping")
        if width == params.n:
            return params
        if fields.stream:
            raise InvalidRequest("best_of: more than n cannot be streamed", param="best_of")
        # The ranking needs the log-probabilities, whether they are reported or not.
        return replace(params, n=width, logprobs=params.logprobs if params.logprobs is not None else 0)
    if params.logprobs is not None:
        raise InvalidRequest("logprobs: not together with use_beam_search", param="logprobs")
    if fields.temperature:
        raise InvalidRequest("temperature: beam search does not sample; leave it out or 0", param="temperature")
    if width == 1:
        return replace(params, temperature=0.0)
    penalty = 1.0 if fields.length_penalty is None else fields.length_penalty
    return replace(params, temperature=0.0, beam=BeamParams(width, penalty, fields.early_stopping or False))


def best(logs: list[OutputLog], n: int) -> list[OutputLog]:
    """The ``n`` logs with the highest mean log-probability per token, best first (all of them: as they are)."""
    return logs if len(logs) <= n else sorted(logs, key=_mean_logprob, reverse=True)[:n]


def _mean_logprob(log: OutputLog) -> float:
    values = [t.logprob for t in log.tokens if t.logprob is not None]
    return sum(values) / len(values) if values else -math.inf
