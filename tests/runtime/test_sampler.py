"""The sampler against transformers' logits processors, OpenAI's formula, torch's log_softmax and counting."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from chatsvc.runtime import sampler
from chatsvc.runtime.sampler import adjust, draw, report, sample, uniform
from chatsvc.scheduler.params import SamplingParams
from chatsvc.scheduler.plan import SampledToken, SamplingRow


def row(*, position: int = 5, choice: int = 0, **fields: Any) -> SamplingRow:
    own = {k: fields.pop(k) for k in ("forbidden_ids", "prompt_ids", "output_ids") if k in fields}
    return SamplingRow(SamplingParams(max_tokens=9, **fields), choice, position, **own)


def logits_of(size: int, seed: int, scale: float = 3.0) -> torch.Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(seed)) * scale


class Inverse:
    """Reads the whole distribution of ``draw`` off its random number: the token at u is known for every u."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.u = 0.0
        monkeypatch.setattr(sampler, "uniform", lambda *_: self.u)

    def distribution(self, logits: torch.Tensor, fields: dict[str, Any]) -> dict[int, float]:
        """token -> probability, by bisecting for each border between two tokens."""
        found: dict[int, float] = {}
        at, last = 0.0, math.nextafter(1.0, 0.0)
        while True:
            token = self.at(logits, fields, at)
            low, high = at, last
            if self.at(logits, fields, last) == token:
                found[token] = found.get(token, 0.0) + 1.0 - at
                return found
            for _ in range(55):
                middle = (low + high) / 2
                if self.at(logits, fields, middle) == token:
                    low = middle
                else:
                    high = middle
            assert token not in found, "one token owns two stretches"
            found[token] = low - at
            at = high

    def at(self, logits: torch.Tensor, fields: dict[str, Any], u: float) -> int:
        self.u = u
        return draw(logits, row(**fields))


@pytest.fixture
def inverse(monkeypatch: pytest.MonkeyPatch) -> Inverse:
    return Inverse(monkeypatch)


def reference(logits: torch.Tensor, fields: dict[str, Any]) -> dict[int, float]:
    """transformers' processors in transformers' order, in float64."""
    chain: list[Any] = []
    if fields.get("temperature", 1.0) != 1.0:
        chain.append(TemperatureLogitsWarper(fields["temperature"]))
    if fields.get("top_k"):
        chain.append(TopKLogitsWarper(fields["top_k"]))
    if fields.get("top_p", 1.0) < 1.0:
        chain.append(TopPLogitsWarper(fields["top_p"]))
    if fields.get("min_p"):
        chain.append(MinPLogitsWarper(fields["min_p"]))
    scores = LogitsProcessorList(chain)(torch.zeros(1, 1, dtype=torch.int64), logits[None].double())[0]
    return {i: p for i, p in enumerate(scores.softmax(0).tolist()) if p > 0}


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"temperature": 0.3},
        {"temperature": 2.0},
        {"top_k": 7},
        {"top_k": 1000},
        {"top_p": 0.9},
        {"top_p": 0.1},
        {"top_p": 0.9999},
        {"min_p": 0.05},
        {"min_p": 0.5},
        {"top_k": 9, "top_p": 0.8, "temperature": 1.7},
        {"top_k": 9, "min_p": 0.2},
        {"top_p": 0.95, "min_p": 0.1, "temperature": 1.3},
        {"top_k": 30, "top_p": 0.7, "min_p": 0.02, "temperature": 0.8},
    ],
    ids=str,
)
@pytest.mark.parametrize("candidates", [4, 256])
def test_distributions_are_those_of_transformers(
    inverse: Inverse, monkeypatch: pytest.MonkeyPatch, fields: dict[str, Any], candidates: int
) -> None:
    monkeypatch.setattr(sampler, "TOP_P_CANDIDATES", candidates)  # both ways to find the head
    logits = logits_of(61, seed=3)
    ours, theirs = inverse.distribution(logits, fields), reference(logits, fields)
    assert set(ours) <= set(theirs)
    for token, p in theirs.items():  # what is missing is too rare for 53 random bits
        assert ours.get(token, 0.0) == pytest.approx(p, abs=1e-12)


@given(
    seed=st.integers(0, 10_000),
    k=st.integers(0, 40),
    p=st.sampled_from([1.0, 0.999, 0.7, 0.3, 0.02]),
    m=st.sampled_from([0.0, 0.01, 0.3, 1.0]),
    u=st.floats(0, 1, exclude_max=True),
)
@settings(max_examples=150, deadline=None)
def test_a_drawn_token_is_one_that_transformers_keeps(seed: int, k: int, p: float, m: float, u: float) -> None:
    logits = logits_of(40, seed)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sampler, "uniform", lambda *_: u)
        token = draw(logits, row(top_k=k, top_p=p, min_p=m, seed=1))
    assert token in reference(logits, {"top_k": k, "top_p": p, "min_p": m})


def test_top_p_keeps_the_shortest_head_that_reaches_it(inverse: Inverse) -> None:
    # Halves, quarters, eighths: every mass is exact in binary, so the borders can be hit exactly.
    logits = torch.tensor([0.125, 0.5, 0.0625, 0.25, 0.0625]).log2() * math.log(2)
    for top_p, kept in [(0.5, {1}), (0.51, {1, 3}), (0.75, {1, 3}), (0.875, {1, 3, 0}), (0.9, {1, 3, 0, 2})]:
        exact = {1: 0.5, 3: 0.25, 0: 0.125, 2: 0.0625}
        ours = inverse.distribution(logits, {"top_p": top_p - 1e-6 if top_p in (0.5, 0.75, 0.875) else top_p})
        assert set(ours) == kept
        for token in kept:
            assert ours[token] == pytest.approx(exact[token] / sum(exact[t] for t in kept), rel=1e-6)


def test_ties_go_to_the_lower_ids(inverse: Inverse, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sampler, "TOP_P_CANDIDATES", 8)
    flat = torch.zeros(40)
    assert set(inverse.distribution(flat[:8], {"top_k": 3})) == {0, 1, 2}
    assert set(inverse.distribution(flat[:8], {"top_p": 0.25})) == {0, 1}
    assert set(inverse.distribution(flat[:8], {"min_p": 1.0})) == set(range(8))
    assert inverse.at(flat, {"top_k": 1}, 0.9) == inverse.at(flat, {"temperature": 0.0}, 0.9) == 0
    two = torch.tensor([1.0, 3.0, 2.0, 2.0, 3.0, 2.0])
    assert set(inverse.distribution(two, {"top_k": 3})) == {1, 4, 2}
    assert [i for i, _ in report(two, 0, 5).top] == [1, 4, 2, 3, 5]
    assert set(inverse.distribution(flat, {"top_p": 0.5})) == set(range(20))  # beyond the candidates


@pytest.mark.parametrize("penalty", [0.5, 1.3, 2.0, 1e6])
def test_repetition_is_transformers_over_prompt_and_output(penalty: float) -> None:
    logits = logits_of(50, seed=8)
    prompt, output = (3, 3, 4, 9), (9, 17, 0)
    theirs = RepetitionPenaltyLogitsProcessor(penalty)(torch.tensor([prompt + output]), logits[None].clone())[0]
    ours = adjust(logits, row(repetition_penalty=penalty, prompt_ids=prompt, output_ids=output))
    torch.testing.assert_close(ours, theirs, rtol=0, atol=0)


def test_presence_and_frequency_are_openais_over_the_output_only() -> None:
    logits = logits_of(30, seed=9)
    output = (4, 4, 4, 7)
    ours = adjust(logits, row(presence_penalty=0.6, frequency_penalty=0.25, prompt_ids=(1, 2, 4), output_ids=output))
    want = logits.clone()
    for token, count in Counter(output).items():  # mu[j] - c[j] * alpha_frequency - (c[j] > 0) * alpha_presence
        want[token] = logits[token] - count * 0.25 - 0.6
    torch.testing.assert_close(ours, want)


def test_bias_and_forbidden_tokens() -> None:
    logits = logits_of(200, seed=10)
    before = logits.clone()
    bias = {i: (-100.0 if i % 2 else 100.0) for i in range(150)}
    ours = adjust(logits, row(logit_bias=bias, forbidden_ids=(0, 199)))
    assert torch.equal(logits, before), "the batch's logits are not to be changed"
    for i in range(1, 150):
        assert ours[i] == before[i] + bias[i]
    assert ours[0] == ours[199] == -math.inf
    token = sample(logits[None], [row(forbidden_ids=tuple(i for i in range(200) if i != 77), temperature=2.0)])[0]
    assert isinstance(token, SampledToken) and token.token_id == 77
    none = sample(logits[None], [row(forbidden_ids=tuple(range(200)), temperature=0.0)])[0]
    assert isinstance(none, str) and "no token is left" in none


@pytest.mark.parametrize("temperature", [0.0, 1e-38, 1e-8, 1e-6, 1e-4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_SA_01_tiny_temperatures_are_greedy(temperature: float, dtype: torch.dtype) -> None:
    logits = (torch.stack([logits_of(500, seed) for seed in range(8)]) * 4).to(dtype)
    fields = [{}, {"top_p": 0.5}, {"top_k": 5}, {"min_p": 0.3}, {"top_p": 1e-9}, {"top_k": 1}, {}, {}]
    rows = [row(temperature=temperature, seed=i, **f) for i, f in enumerate(fields)]
    for i, token in enumerate(sample(logits, rows)):  # half precision has ties: any of the best will do
        assert isinstance(token, SampledToken) and logits[i, token.token_id] == logits[i].max()


@pytest.mark.parametrize("fields", [{"top_p": 0.0}, {"top_p": 1e-30}, {"top_k": 1}, {"min_p": 1.0}], ids=str)
def test_SA_01_the_narrowest_filters_are_greedy(fields: dict[str, Any]) -> None:
    for seed in range(20):
        logits = logits_of(300, seed)
        assert draw(logits, row(seed=seed, **fields)) == int(logits.argmax())


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_SH_01_NU_01_rows_that_are_not_numbers_fail_alone(bad: float) -> None:
    logits = torch.stack([logits_of(100, seed) for seed in range(5)])
    rows = [row(temperature=0.0), row(seed=1), row(top_p=0.5, seed=2), row(temperature=0.0), row(seed=4, logprobs=3)]
    want = sample(logits, rows)
    for victim in range(5):
        broken = logits.clone()
        broken[victim, 50] = bad
        got = sample(broken, rows)
        assert isinstance(got[victim], str) and "not finite" in got[victim]
        assert got[:victim] + got[victim + 1 :] == want[:victim] + want[victim + 1 :]


def test_a_fault_in_one_row_stays_there() -> None:
    logits = torch.stack([logits_of(100, seed) for seed in range(3)])
    rows = [row(seed=1), row(logit_bias={100: 1.0}), row(seed=3)]
    got = sample(logits, rows)
    assert isinstance(got[1], str) and "IndexError" in got[1]
    assert [got[0], got[2]] == sample(logits[[0, 2]], [rows[0], rows[2]])


def test_minus_infinity_is_a_token_that_cannot_be(inverse: Inverse) -> None:
    logits = torch.tensor([0.0, -math.inf, 1.0, -math.inf])
    for fields in ({}, {"top_k": 4}, {"top_p": 0.9999999}, {"min_p": 1e-9}):
        assert set(inverse.distribution(logits, fields)) == {0, 2}
    got = report(logits, 2, 4)
    assert got.top[:2] == ((2, got.logprob), (0, pytest.approx(-1.3132616875)))
    assert [v for _, v in got.top[2:]] == [-math.inf, -math.inf]
    assert isinstance(sample(torch.full((1, 5), -math.inf), [row()])[0], str)


def test_huge_penalties_stay_in_their_row() -> None:
    logits = torch.stack([logits_of(50, seed) for seed in range(3)])
    everything = tuple(range(50))
    rows = [
        row(repetition_penalty=1e38, output_ids=everything, seed=1),
        row(presence_penalty=2.0, frequency_penalty=2.0, output_ids=everything * 1000, seed=2),
        row(seed=3),
    ]
    got = sample(logits, rows)
    assert got[2] == sample(logits[2:], rows[2:])[0]
    assert all(isinstance(t, SampledToken) and 0 <= t.token_id < 50 for t in got[:2])
    overflow = sample(logits[:1], [row(repetition_penalty=1e-38, output_ids=everything)])[0]
    assert isinstance(overflow, str)


some_rows = st.lists(
    st.builds(
        row,
        temperature=st.sampled_from([0.0, 0.5, 1.0, 2.0]),
        top_k=st.sampled_from([0, 0, 1, 5]),
        top_p=st.sampled_from([1.0, 0.9, 0.2]),
        min_p=st.sampled_from([0.0, 0.1]),
        repetition_penalty=st.sampled_from([1.0, 1.5]),
        frequency_penalty=st.sampled_from([0.0, 1.0]),
        seed=st.integers(-(2**63), 2**64 - 1),
        choice=st.integers(0, 15),
        position=st.integers(0, 100_000),
        output_ids=st.sampled_from([(), (1, 2, 2)]),
        logprobs=st.sampled_from([None, 0, 2]),
    ),
    min_size=1,
    max_size=8,
)


@given(rows=some_rows, salt=st.integers(0, 1000), order=st.randoms(use_true_random=False))
@settings(max_examples=60, deadline=None)
def test_SA_03_a_row_depends_on_itself_alone(rows: list[SamplingRow], salt: int, order: Any) -> None:
    # An odd vocabulary: rows of a batch lie at every alignment.
    logits = torch.stack([logits_of(97, salt + i) for i in range(len(rows))])
    alone = [sample(logits[i : i + 1].clone(), [r])[0] for i, r in enumerate(rows)]
    at = list(range(len(rows)))
    order.shuffle(at)
    assert sample(logits[at], [rows[i] for i in at]) == [alone[i] for i in at]


@pytest.mark.parametrize("fields", [{}, {"top_k": 5}, {"top_p": 0.8}, {"min_p": 0.1}], ids=str)
def test_frequencies_are_the_distribution(fields: dict[str, Any]) -> None:
    logits, count = logits_of(12, seed=5, scale=1.0), 4000
    seen = Counter(draw(logits, row(seed=i % 50, position=i // 50, **fields)) for i in range(count))
    want = reference(logits, fields)
    assert set(seen) <= set(want)
    chi2 = sum((seen[t] - count * p) ** 2 / (count * p) for t, p in want.items())
    free = len(want) - 1
    # Six standard deviations above the mean of chi-square; the numbers are fixed, so this never flickers.
    assert chi2 < free + 6 * math.sqrt(2 * free), chi2


@given(st.integers(-(2**63), 2**64 - 1), st.integers(0, 2**32 - 1), st.integers(0, 2**63))
@example(0, 0, 0)
@settings(deadline=None)
def test_uniform_is_pure_and_below_one(seed: int, choice: int, position: int) -> None:
    u = uniform(seed, choice, position)
    assert 0.0 <= u < 1.0
    assert uniform(seed, choice, position) == u


def test_SA_04_seeds_choices_and_positions_are_different_numbers() -> None:
    keys = [(s, c, p) for s in range(10) for c in range(10) for p in range(10)]
    numbers = [uniform(*key) for key in keys]
    assert len(set(numbers)) == len(keys)
    assert sum(numbers) / len(numbers) == pytest.approx(0.5, abs=0.04)


def test_logprobs_are_the_models_own_distribution() -> None:
    logits = torch.stack([logits_of(300, seed) for seed in range(4)])
    truth = logits.double().log_softmax(1)
    fields: list[dict[str, Any]] = [
        {"temperature": 0.0},
        {"temperature": 0.2, "top_k": 3},
        {"logit_bias": {7: 100.0}, "temperature": 0.0},
        {"temperature": 2.0, "frequency_penalty": 2.0, "output_ids": (1, 2)},
    ]
    for n in (0, 1, 5, 20, 10_000):
        for i, token in enumerate(sample(logits, [row(logprobs=n, **f) for f in fields])):
            assert isinstance(token, SampledToken)
            assert token.logprob == pytest.approx(float(truth[i, token.token_id]), abs=1e-12)
            values, ids = truth[i].sort(descending=True, stable=True)
            top = min(n, 300)
            assert [t for t, _ in token.top] == ids[:top].tolist()
            assert [v for _, v in token.top] == pytest.approx(values[:top].tolist(), abs=1e-12)
    assert sample(logits[:1], [row(temperature=0.0)]) == [SampledToken(int(logits[0].argmax()))]
