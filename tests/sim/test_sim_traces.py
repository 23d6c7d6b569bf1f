"""Traces: lengths, shared prefixes, files."""

from __future__ import annotations

import json
from itertools import pairwise

import pytest

from chatsvc.errors import ConfigError
from chatsvc.sim import tracefile
from chatsvc.sim.traces import (
    MAX_PART,
    MEANS,
    VOCAB,
    Lengths,
    mean_lengths,
    multi_turn,
    prompt_tokens,
    segment_base,
    single_turns,
    token_at,
    under_way,
)


@pytest.mark.parametrize("name", sorted(MEANS))
def test_means_are_the_papers(name: str) -> None:
    trace = single_turns(name, 20_000, 10.0, 0)
    prompt, answer = mean_lengths(trace)
    assert prompt == pytest.approx(MEANS[name][0], rel=0.04)
    assert answer == pytest.approx(MEANS[name][1], rel=0.04)
    assert all(1 <= e.prompt_len <= MAX_PART and 1 <= e.output_len <= MAX_PART for e in trace)
    assert trace[-1].arrival == pytest.approx(2000, rel=0.05)  # 20,000 at 10 per second
    assert all(a.arrival <= b.arrival for a, b in pairwise(trace))
    assert len({e.tenant for e in trace}) == 4


def test_a_mean_that_cannot_be() -> None:
    with pytest.raises(ValueError, match="limit"):
        Lengths(600.0)


def test_the_same_seed_is_the_same_trace() -> None:
    assert single_turns("alpaca", 50, 1.0, 3) == single_turns("alpaca", 50, 1.0, 3)
    assert single_turns("alpaca", 50, 1.0, 3) != single_turns("alpaca", 50, 1.0, 4)
    assert multi_turn(20, 1.0, 3) == multi_turn(20, 1.0, 3)


def test_prompts_share_exactly_what_their_segments_share() -> None:
    trace = single_turns("sharegpt", 40, 1.0, 0, system=33)
    for a in trace:
        for b in trace:
            x, y = prompt_tokens(a), prompt_tokens(b)
            if a is not b:
                assert (x[:33] == y[:33]) == (a.tenant == b.tenant)
                assert x[33:43] != y[33:43] or min(len(x), len(y)) < 38
    assert all(0 <= t < VOCAB for t in prompt_tokens(trace[0]))


def test_a_turn_holds_the_answer_before_it() -> None:
    trace = multi_turn(30, 1.0, 0)
    later = [e for e in trace if e.after is not None]
    assert later and len({e.after for e in later}) == len(later)
    for e in later:
        before = trace[e.after]
        base = segment_base(before.answer)
        answer = [token_at(base, i) for i in range(before.output_len)]
        history = prompt_tokens(before) + answer
        assert prompt_tokens(e)[: len(history)] == history
        assert e.prompt_len + e.output_len <= 4000


def test_under_way_is_in_the_midst_of_answers() -> None:
    trace = single_turns("sharegpt", 3000, 1.0, 0)
    aged = under_way(trace, 400, 0)
    front = aged[:400]
    assert [e.entry_id for e in aged] == list(range(3400)) and aged[400].prompt == trace[0].prompt
    assert all(e.arrival == 0 and e.output_len >= 1 for e in front)
    # Length-biased: the mean rest is E[n^2] / (2 E[n]), more than half the mean answer.
    n = [e.output_len for e in trace]
    want = sum(x * x for x in n) / (2 * sum(n))
    assert sum(e.output_len for e in front) / 400 == pytest.approx(want, rel=0.15)
    assert len({tuple(prompt_tokens(e)[:8]) for e in front}) > 395


def test_file_round_trip(tmp_path) -> None:
    for trace in (multi_turn(20, 1.0, 1), single_turns("alpaca", 30, 2.0, 1, system=20)):
        path = tmp_path / "t.jsonl"
        tracefile.write(path, trace)
        assert tracefile.read(path) == trace


def test_lengths_are_enough_and_ids_may_be_any(tmp_path) -> None:
    path = tmp_path / "t.jsonl"
    lines = [
        {"id": "x", "arrival": 1, "prompt_len": 7, "output_len": 3},
        {"arrival": 2.5, "tenant": "a", "prompt_len": 7, "output_len": 1, "after": "x", "think": 1.5},
    ]
    path.write_text("\n".join(json.dumps(x) for x in lines) + "\n\n")
    first, second = tracefile.read(path)
    assert (first.prompt_len, first.output_len, first.arrival, first.tenant) == (7, 3, 1.0, "")
    assert (second.after, second.think, second.tenant) == (0, 1.5, "a")
    assert prompt_tokens(first) != prompt_tokens(second)


@pytest.mark.parametrize(
    "bad",
    [
        "{",
        "[]",
        "7",
        '{"arrival": 0, "output_len": 3}',
        '{"arrival": 0, "prompt_len": 0, "output_len": 3}',
        '{"arrival": 0, "prompt_len": 3, "output_len": 0}',
        '{"arrival": -1, "prompt_len": 3, "output_len": 1}',
        '{"arrival": NaN, "prompt_len": 3, "output_len": 1}',
        '{"arrival": 0, "prompt": [["a", -1], ["b", 5]], "output_len": 1}',
        '{"arrival": 0, "prompt": [["a"]], "output_len": 1}',
        '{"arrival": 0, "prompt_len": 3, "output_len": 1, "after": 99}',
    ],
)
def test_a_bad_line_is_named(tmp_path, bad: str) -> None:
    path = tmp_path / "t.jsonl"
    path.write_text('{"arrival": 0, "prompt_len": 3, "output_len": 1}\n' + bad + "\n")
    with pytest.raises(ConfigError, match="line 2"):
        tracefile.read(path)


def test_no_trace(tmp_path) -> None:
    with pytest.raises(ConfigError, match="nowhere"):
        tracefile.read(tmp_path / "nowhere")
    (tmp_path / "empty").write_text("\n")
    with pytest.raises(ConfigError, match="empty"):
        tracefile.read(tmp_path / "empty")
