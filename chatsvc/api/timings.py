"""How long the parts of a request took."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from chatsvc.engine.output import Generation


def timings(generations: Sequence[Generation]) -> dict[str, float | None]:
    """Seconds, from the engine's clock; null for what has not happened. Several prompts of one request count together.

    ``queue_seconds`` until the first step, ``prefill_seconds`` from there to the first token, ``first_token_seconds``
    both together, ``decode_seconds`` from the first token to the end, ``total_seconds`` all. ``tokens_per_second``: the
    tokens after the first of each choice, by ``decode_seconds``.
    """
    arrival = min(g.timings.arrival for g in generations)
    scheduled = _first(g.timings.scheduled for g in generations)
    first = _first(g.timings.first_token for g in generations)
    ends = [g.timings.finished for g in generations]
    end = max((e for e in ends if e is not None), default=None) if None not in ends else None
    decode = _between(first, end)
    more = sum(max(0, len(choice.tokens) - 1) for g in generations for choice in g.logs)
    return {
        "queue_seconds": _between(arrival, scheduled),
        "prefill_seconds": _between(scheduled, first),
        "first_token_seconds": _between(arrival, first),
        "decode_seconds": decode,
        "total_seconds": _between(arrival, end),
        "tokens_per_second": round(more / decode, 2) if decode and more else None,
    }


def told(generations: Sequence[Generation]) -> dict[str, float]:
    """What has happened of them, for a log line."""
    return {name: value for name, value in timings(generations).items() if value is not None}


def _first(times: Iterable[float | None]) -> float | None:
    return min((t for t in times if t is not None), default=None)


def _between(start: float | None, end: float | None) -> float | None:
    return None if start is None or end is None else round(max(0.0, end - start), 6)
