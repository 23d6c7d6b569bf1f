"""Traces: who asks what when, and how long the answer will be.

Contents are never stored. A prompt is a list of segments ``(key, length)`` and token *i* of a segment is a pure
function of (key, i), so that two prompts share a prefix exactly when their segments say so, and the answer of one turn
is part of the next turn's prompt.

Length means are those of the PagedAttention paper (Kwon et al. 2023, figure 11): ShareGPT 161.31 in and 337.99 out,
Alpaca 19.31 and 58.45. The paper gives no variance; lengths here are log-normal with sigma 1, cut at 1,024 tokens for
prompt and answer each (so that a chat fits the paper's 2,048), and the location is set so that the mean after the cut
is the paper's.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from random import Random
from statistics import NormalDist

import xxhash

VOCAB = 32_000
MAX_PART = 1024
SIGMA = 1.0
# Tenants and their shares of the requests.
TENANTS = (("acme", 0.5), ("birch", 0.25), ("cedar", 0.15), ("delta", 0.1))

Segment = tuple[str, int]


@dataclass(frozen=True, slots=True)
class Entry:
    """One request of a trace.

    Attributes:
        arrival: seconds from the start; of a later turn, no earlier than ``think`` seconds after turn ``after`` ended.
        prompt: segments (key, length in tokens).
        answer: key of the answer's tokens.
        output_len: tokens of the answer.
    """

    entry_id: int
    arrival: float
    tenant: str
    prompt: tuple[Segment, ...]
    answer: str
    output_len: int
    after: int | None = None
    think: float = 0.0

    @property
    def prompt_len(self) -> int:
        return sum(n for _, n in self.prompt)


def segment_base(key: str) -> int:
    return xxhash.xxh3_64_intdigest(key.encode())


def token_at(base: int, i: int) -> int:
    return ((base + i * 0x9E3779B97F4A7C15) & 0xFFFFFFFFFFFFFFFF) * VOCAB >> 64


def prompt_tokens(entry: Entry) -> list[int]:
    return [token_at(base, i) for base, n in ((segment_base(k), n) for k, n in entry.prompt) for i in range(n)]


class Lengths:
    """Log-normal lengths between 1 and ``limit`` with the given mean after the cut."""

    def __init__(self, mean: float, *, sigma: float = SIGMA, limit: int = MAX_PART) -> None:
        if not 1 < mean < limit / 2:
            raise ValueError(f"a mean of {mean} needs a limit above {2 * mean}, not {limit}")
        self._sigma, self._limit = sigma, limit
        low, high = math.log(mean) - 3 * sigma, math.log(limit) + 3 * sigma
        for _ in range(60):
            mu = (low + high) / 2
            low, high = (mu, high) if self._mean(mu) < mean else (low, mu)
        self._mu = (low + high) / 2

    def _mean(self, mu: float) -> float:
        """Of a log-normal that is cut above the limit."""
        s, top = self._sigma, (math.log(self._limit) - mu) / self._sigma
        phi = NormalDist().cdf
        return math.exp(mu + s * s / 2) * phi(top - s) / phi(top)

    def draw(self, rng: Random) -> int:
        while True:
            x = rng.lognormvariate(self._mu, self._sigma)
            if x <= self._limit:
                return max(1, round(x))


MEANS = {"sharegpt": (161.31, 337.99), "alpaca": (19.31, 58.45)}


def single_turns(name: str, requests: int, rate: float, seed: int, *, system: int = 0) -> list[Entry]:
    """Independent requests with Poisson arrivals; ``system`` tokens of each tenant's prompts are the tenant's own
    system prompt.

    Args:
        name: ``sharegpt`` or ``alpaca``.
        rate: requests per second.
    """
    rng = Random(f"{seed}/{name}")
    prompts, answers = (Lengths(m) for m in MEANS[name])
    now = 0.0
    made: list[Entry] = []
    for i in range(requests):
        now += rng.expovariate(rate)
        tenant = rng.choices([t for t, _ in TENANTS], [w for _, w in TENANTS])[0]
        head: tuple[Segment, ...] = ((f"system/{tenant}", system),) if system else ()
        prompt = (*head, (f"{seed}/user/{i}", prompts.draw(rng)))
        made.append(Entry(i, now, tenant, prompt, f"{seed}/answer/{i}", answers.draw(rng)))
    return made


def multi_turn(
    sessions: int, rate: float, seed: int, *, system: int = 500, turns: float = 4.0, think: float = 20.0
) -> list[Entry]:
    """Chats: a system prompt per tenant, then turns that each carry the whole history.

    ShareGPT lengths per turn, a geometric number of turns with mean ``turns``, an exponential time of mean ``think``
    seconds between an answer and the next question; histories end at 4,000 tokens.
    """
    rng = Random(f"{seed}/multi-turn")
    prompts, answers = (Lengths(m) for m in MEANS["sharegpt"])
    now = 0.0
    made: list[Entry] = []
    for s in range(sessions):
        now += rng.expovariate(rate)
        tenant = rng.choices([t for t, _ in TENANTS], [w for _, w in TENANTS])[0]
        history: tuple[Segment, ...] = ((f"system/{tenant}", system),)
        after: int | None = None
        for turn in range(50):
            i = len(made)
            prompt = (*history, (f"{seed}/user/{s}/{turn}", prompts.draw(rng)))
            output = answers.draw(rng)
            if sum(n for _, n in prompt) + output > 4000:
                break
            pause = rng.expovariate(1 / think) if turn else 0.0
            made.append(Entry(i, now, tenant, prompt, f"{seed}/answer/{s}/{turn}", output, after, pause))
            history, after = (*prompt, (f"{seed}/answer/{s}/{turn}", output)), i
            if rng.random() < 1 / turns:
                break
    return made


def under_way(trace: list[Entry], count: int, seed: int) -> list[Entry]:
    """``count`` more entries in front that are in the midst of their answers, so that a run begins in its steady state.

    A request is the likelier to be found running the longer its answer is, and has got a uniformly random part of it,
    which here is part of its prompt.
    """
    rng = Random(f"{seed}/under way")
    made: list[Entry] = []
    for i, e in enumerate(rng.choices(trace, [e.output_len for e in trace], k=count)):
        done = rng.randrange(e.output_len)
        prompt = (*((f"{key}/{i}", n) for key, n in e.prompt), *(((f"{e.answer}/{i}", done),) if done else ()))
        made.append(Entry(i, 0.0, e.tenant, prompt, f"{e.answer}/{i}/on", e.output_len - done))
    return made + [replace(e, entry_id=e.entry_id + count) for e in trace]


def mean_lengths(trace: list[Entry]) -> tuple[float, float]:
    """(prompt, answer) in tokens."""
    return sum(e.prompt_len for e in trace) / len(trace), sum(e.output_len for e in trace) / len(trace)
