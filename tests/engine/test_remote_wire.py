"""What crosses between the two processes is what happened, however it was cut."""

from __future__ import annotations

import pickle

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from chatsvc import errors
from chatsvc.engine.output import Generation
from chatsvc.engine.wire import Teller, hear, portable
from chatsvc.errors import ChatsvcError, EngineError
from chatsvc.scheduler.plan import SampledToken

TOKENS = st.builds(
    SampledToken,
    st.integers(0, 300),
    st.none() | st.floats(-9, 0),
    st.lists(st.tuples(st.integers(0, 300), st.floats(-9, 0)), max_size=2).map(tuple),
)
APPENDED = st.tuples(st.integers(0, 2), TOKENS, st.text(max_size=3), st.text(max_size=2))
ENDS = st.tuples(
    st.integers(0, 2),
    st.sampled_from(["stop", "length", "abort", "error"]),
    st.text(max_size=3),
    st.none() | st.text(max_size=2) | st.integers(0, 9),
)
SENT = st.just(None)


@settings(max_examples=200, deadline=None)
@given(st.lists(APPENDED | ENDS.map(list) | SENT, max_size=40))
def test_logs_are_the_same_on_both_sides(events: list[object]) -> None:
    one = Generation("r", [1, 2], 3, lambda: None, 0.0)
    other = Generation("r", [1, 2], 3, lambda: None, 0.0)
    teller = Teller(7, one)
    told = False
    for event in [*events, None]:
        if event is None:
            told = told or teller.done
            news = pickle.loads(pickle.dumps(teller.news()))
            assert news[0] == 7 and news[4] == one.finished
            hear(other, news)
            assert other.logs == one.logs and other.finished == one.finished
            continue
        log = one.logs[event[0]]  # type: ignore[index]
        if log.finish_reason is not None:
            continue
        if isinstance(event, tuple):
            _, token, piece, held = event
            if token.logprob is None:
                token.top = ()
            log.tokens.append(token)
            log.pieces.append(piece)
            log.held = held
        else:
            _, log.finish_reason, log.tail, log.stop_reason = event  # type: ignore[misc]
            log.error, log.error_status = "why", 503


def test_a_choice_that_ended_here_hears_nothing_more() -> None:
    one, other = (Generation("r", [1], 2, lambda: None, 0.0) for _ in range(2))
    teller = Teller(0, one)
    other.logs[0].finish_reason = "abort"
    for log in one.logs:
        log.tokens.append(SampledToken(5))
        log.pieces.append("x")
        log.finish_reason = "length"
    hear(other, teller.news())
    assert (other.logs[0].tokens, other.logs[0].finish_reason) == ([], "abort")
    assert (other.logs[1].token_ids, other.logs[1].text, other.logs[1].finish_reason) == ([5], "x", "length")


@pytest.mark.parametrize("kind", [k for k in vars(errors).values() if isinstance(k, type)])
def test_every_exception_of_ours_survives_the_way(kind: type[Exception]) -> None:
    error = kind("message")
    back = pickle.loads(pickle.dumps(portable(error)))
    assert type(back) is kind and vars(back) == vars(error) and str(back) == "message"


def test_a_foreign_exception_comes_as_ours_with_its_name() -> None:
    back = pickle.loads(pickle.dumps(portable(OSError(2, "gone"))))
    assert isinstance(back, EngineError) and isinstance(back, ChatsvcError) and "gone" in str(back)
