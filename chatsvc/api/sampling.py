"""From request fields to :class:`SamplingParams`, and the one rule about lengths."""

from __future__ import annotations

from chatsvc.api.schema import SamplingFields
from chatsvc.errors import ContextLengthExceeded, InvalidRequest
from chatsvc.scheduler.params import SamplingParams


def room_for(prompt_tokens: int, asked: int | None, limit: int, *, prompt_param: str, max_param: str) -> int:
    """How many tokens may be generated: what was asked, or the room left.

    Args:
        limit: prompt and answer together.

    Raises:
        ContextLengthExceeded: the prompt alone fills the context, or what was asked does not fit; with both numbers.
    """
    if prompt_tokens >= limit:
        raise ContextLengthExceeded(
            f"This model's maximum context length is {limit} tokens, but the prompt has {prompt_tokens}"
            f" and the answer needs at least one. Please shorten the prompt.",
            param=prompt_param,
        )
    if asked is None:
        return limit - prompt_tokens
    if prompt_tokens + asked > limit:
        raise ContextLengthExceeded(
            f"This model's maximum context length is {limit} tokens, but you asked for {prompt_tokens + asked}:"
            f" {prompt_tokens} in the prompt and {max_param}={asked} for the answer.",
            param=max_param,
        )
    return asked


def refuse_hopeless(characters: int, longest_token: int, limit: int, param: str) -> None:
    """Refuse a text that is too long for the context however it is encoded, before anybody spends seconds on it.

    Args:
        characters: of the text; ``longest_token`` in bytes.

    Raises:
        ContextLengthExceeded: with the limit and the least number of tokens the text can have.
    """
    least = -(-characters // longest_token)
    if least >= limit:
        raise ContextLengthExceeded(
            f"This model's maximum context length is {limit} tokens, but the prompt has at least {least}."
            " Please shorten the prompt.",
            param=param,
        )


def sampling_params(
    fields: SamplingFields,
    *,
    max_tokens: int,
    logprobs: int | None,
    vocab_size: int,
    max_n: int,
    seed: int,
    more_stops: tuple[str, ...] = (),
) -> SamplingParams:
    """Everything resolved and checked against the model.

    Args:
        max_tokens: as :func:`room_for` resolved it.
        logprobs: number of alternatives, None for no log-probabilities at all.
        seed: as :class:`~chatsvc.api.seeds.Seeds` gave it.
        more_stops: stop strings besides the caller's.

    Raises:
        InvalidRequest: naming the field.
    """
    n = choices(fields, max_n)
    min_tokens = fields.min_tokens or 0
    if min_tokens > max_tokens:
        raise InvalidRequest(
            f"min_tokens: {min_tokens} is more than the {max_tokens} tokens allowed", param="min_tokens"
        )
    for token in fields.stop_token_ids or ():
        if not 0 <= token < vocab_size:
            raise InvalidRequest(f"stop_token_ids: {token} is outside 0..{vocab_size - 1}", param="stop_token_ids")
    top_p = 1.0 if fields.top_p is None else fields.top_p
    top_k = max(fields.top_k or 0, 0)
    if top_p == 0.0:  # "the smallest set that holds nothing": the most likely token
        top_p, top_k = 1.0, 1
    stop = () if fields.stop is None else (fields.stop,) if isinstance(fields.stop, str) else tuple(fields.stop)
    return SamplingParams(
        max_tokens=max_tokens,
        temperature=1.0 if fields.temperature is None else fields.temperature,
        top_k=min(top_k, vocab_size),
        top_p=top_p,
        min_p=fields.min_p or 0.0,
        repetition_penalty=1.0 if fields.repetition_penalty is None else fields.repetition_penalty,
        presence_penalty=fields.presence_penalty or 0.0,
        frequency_penalty=fields.frequency_penalty or 0.0,
        logit_bias=_logit_bias(fields.logit_bias, vocab_size),
        seed=seed,
        stop=stop + more_stops,
        stop_token_ids=frozenset(fields.stop_token_ids or ()),
        min_tokens=min_tokens,
        ignore_eos=bool(fields.ignore_eos),
        logprobs=logprobs,
        n=n,
    )


def choices(fields: SamplingFields, max_n: int) -> int:
    """``n``, checked before anything is copied n times."""
    n = 1 if fields.n is None else fields.n
    if n > max_n:
        raise InvalidRequest(f"n: at most {max_n} choices are allowed, not {n}", param="n")
    return n


def _logit_bias(bias: dict[str, float] | None, vocab_size: int) -> dict[int, float]:
    out: dict[int, float] = {}
    for key, value in (bias or {}).items():
        if not (key.isascii() and key.isdecimal() and len(key) < 20 and int(key) < vocab_size):
            raise InvalidRequest(
                f"logit_bias: {key[:40]!r} is not a token id of this model (0..{vocab_size - 1})", param="logit_bias"
            )
        out[int(key)] = value
    return out
