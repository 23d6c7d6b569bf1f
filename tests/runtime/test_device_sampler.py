"""The sampler on the device draws what the host's sampler draws from the same seeds, in the interpreter or on a GPU."""

from __future__ import annotations

import math
import os
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from chatsvc.runtime import device_sampler, sampler
from chatsvc.scheduler.params import SamplingParams
from chatsvc.scheduler.plan import SampledToken, SamplingRow
from kernels.triton import sampling

DEVICE = "cuda" if torch.cuda.is_available() and os.environ.get("TRITON_INTERPRET") != "1" else "cpu"
SIZE = 100  # two stretches of the kernel, the second not full
INF, NAN = float("inf"), float("nan")


@pytest.fixture(autouse=True)
def small_stretches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sampling, "BLOCK", 64)


def row(*, position: int = 5, choice: int = 0, candidates: int = 0, **fields: Any) -> SamplingRow:
    own = {k: fields.pop(k) for k in ("forbidden_ids", "prompt_ids", "output_ids") if k in fields}
    return SamplingRow(SamplingParams(max_tokens=9, **fields), choice, position, **own, candidates=candidates)


def logits_of(rows: int, size: int = SIZE, *, seed: int = 0, scale: float = 3.0) -> torch.Tensor:
    return torch.randn(rows, size, generator=torch.Generator().manual_seed(seed)) * scale


def both(logits: torch.Tensor, rows: list[SamplingRow]) -> list[SampledToken | str]:
    """What the device draws; it is what the host draws, and it leaves the logits alone."""
    there = logits.to(DEVICE)
    got = device_sampler.sample(there, rows)
    want = sampler.sample(logits, rows)
    torch.testing.assert_close(there.cpu(), logits, rtol=0, atol=0, equal_nan=True)
    assert len(got) == len(want)
    for ours, theirs in zip(got, want, strict=True):
        if isinstance(theirs, str):
            assert ours == theirs
            continue
        assert isinstance(ours, SampledToken)
        assert ours.token_id == theirs.token_id
        assert (ours.logprob is None) == (theirs.logprob is None)
        if theirs.logprob is not None:
            assert ours.logprob == pytest.approx(theirs.logprob, abs=1e-5)
        assert [t for t, _ in ours.top] == [t for t, _ in theirs.top]
        assert [v for _, v in ours.top] == pytest.approx([v for _, v in theirs.top], abs=1e-5)
    return got


WAYS: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 1.0},
    {"temperature": 0.3},
    {"temperature": 1.7, "min_p": 0.02},
    {"top_k": 1},
    {"top_k": 7},
    {"top_k": 10**6, "temperature": 0.8},
    {"top_p": 0.9},
    {"top_p": 0.05},
    {"top_p": 1e-9},
    {"top_k": 40, "top_p": 0.7, "temperature": 1.3},
    {"top_k": 40, "top_p": 0.95, "min_p": 0.1},
    {"top_p": 0.999999, "temperature": 2.0},
]


def test_every_way_of_drawing() -> None:
    rows = [row(position=p, seed=11, **way) for p, way in enumerate(WAYS)]
    both(logits_of(len(rows)), rows)


def test_stretches_of_the_real_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    both(logits_of(3, 2500), [row(), row(top_k=300, top_p=0.9), row(temperature=0.0, logprobs=2)])


def test_ties_on_the_border_keep_the_lower_ids() -> None:
    """Logits of few values: whole plateaus of equal tokens, which top_k and top_p cut through."""
    ways = [
        {"top_k": 7},
        {"top_p": 0.5},
        {"top_k": 60, "top_p": 0.3},
        {"top_k": 3, "top_p": 0.99},
        {"temperature": 0.0},
    ]
    ways += [{"top_k": 30, "temperature": 100.0}] * 4  # cuts through the zeros
    rows = [row(position=p, seed=3, **way) for p, way in enumerate(ways)]
    logits = logits_of(len(rows), 60, scale=1.0).round()
    logits[logits == 0] = -0.0  # equal to 0.0, other bits
    logits[:, ::2][logits[:, ::2] == 0] = 0.0
    both(logits, rows)


def test_the_whole_distribution_by_its_random_number(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every token in its turn as u goes from 0 to 1: the borders between tokens are the host's."""
    us = [i / 10 for i in range(10)] + [math.nextafter(1.0, 0.0)]

    def u_of(seed: int, choice: int, position: int) -> float:
        return us[position]

    monkeypatch.setattr(sampler, "uniform", u_of)
    monkeypatch.setattr(device_sampler, "uniform", u_of)
    logits = logits_of(1, 60, seed=2, scale=1.5).expand(len(us), 60).contiguous()
    for way in ({}, {"top_k": 9, "min_p": 0.3}, {"top_p": 0.8}, {"min_p": 0.3}):
        got = both(logits, [row(position=i, **way) for i in range(len(us))])
        assert len({t.token_id for t in got if isinstance(t, SampledToken)}) > 2


def test_penalties_bias_and_forbidden_tokens() -> None:
    best = logits_of(1)[0].topk(5).indices.tolist()
    outputs, prompt = (best[0], best[0], best[1], 9), (best[2], best[0], 17)
    rows = [
        row(temperature=0.0, output_ids=outputs, prompt_ids=prompt, repetition_penalty=1.8),
        row(temperature=0.0, output_ids=outputs, presence_penalty=1.5, frequency_penalty=0.7, logprobs=3),
        row(temperature=0.9, logit_bias={best[3]: 3.25, best[0]: -100.0, 4: 1.0}, logprobs=0),
        row(temperature=0.0, forbidden_ids=tuple(best[:3]), logprobs=5),
        row(
            temperature=0.8,
            top_k=20,
            output_ids=outputs,
            prompt_ids=prompt,
            repetition_penalty=0.7,
            presence_penalty=-0.5,
            logit_bias={best[0]: -3.0},
            forbidden_ids=(best[1],),
        ),
        row(temperature=0.0),
    ]
    both(logits_of(1).expand(len(rows), SIZE).contiguous(), rows)


def test_log_probabilities_of_the_models_own_distribution() -> None:
    rows = [row(temperature=t, logprobs=n, position=n) for t in (0.0, 1.0) for n in (0, 1, 9)]
    logits = logits_of(len(rows), 60, scale=1.0)
    logits[:3] = logits[:3].round()  # ties: the lower id first
    both(logits, rows)


def test_more_is_asked_for_than_there_is() -> None:
    both(logits_of(2, 5), [row(logprobs=20), row(candidates=12)])


def test_beams() -> None:
    rows = [
        row(candidates=4),
        row(candidates=8, output_ids=(3, 3, 7), repetition_penalty=1.4, forbidden_ids=(2,), presence_penalty=0.4),
        row(temperature=0.0),
    ]
    both(logits_of(3, 200), rows)


def test_rows_without_a_token_say_why_and_leave_the_others_alone() -> None:
    logits = logits_of(7, 50)
    logits[0, 7] = NAN
    logits[1, 3] = INF
    logits[2] = -INF
    logits[3, 10:] = -INF  # tokens that cannot be are none of the row's problems
    rows = [row() for _ in range(7)]
    rows[4] = row(forbidden_ids=tuple(range(50)))
    rows[5] = row(temperature=0.0, forbidden_ids=tuple(range(50)))
    got = both(logits, rows)
    assert [isinstance(outcome, str) for outcome in got] == [True, True, True, False, True, True, False]


def test_a_token_outside_the_vocabulary_is_an_error_of_its_row() -> None:
    got = device_sampler.sample(logits_of(2, 50).to(DEVICE), [row(logit_bias={50: 1.0}), row(temperature=0.0)])
    assert got[0] == "sampling failed: IndexError: token 50 is not in a vocabulary of 50"
    assert got[1] == SampledToken(int(logits_of(2, 50)[1].argmax()))


def test_no_rows() -> None:
    assert device_sampler.sample(logits_of(0, 50).to(DEVICE), []) == []


def test_only_tokens_cross(monkeypatch: pytest.MonkeyPatch) -> None:
    """The one tensor that comes back has two numbers a row, and two for each alternative asked for."""
    crossed: list[torch.Size] = []
    read = sampling.read

    def spy(out: torch.Tensor, choices: Any) -> Any:
        crossed.append(out.shape)
        return read(out, choices)

    monkeypatch.setattr(sampling, "read", spy)
    rows = [row(), row(top_p=0.5), row(logprobs=3)]
    device_sampler.sample(logits_of(2).to(DEVICE), rows[:2])
    device_sampler.sample(logits_of(3).to(DEVICE), rows)
    assert crossed == [(2, 2), (3, 8)]
