"""What crosses between the two processes is what happened, however it was cut."""

from __future__ import annotations

import pickle
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from chatsvc import errors
from chatsvc.engine.output import Generation
from chatsvc.engine.wire import News, PlainTokens, Teller, Usual, hear, hear_usual, portable
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
PLAIN = st.tuples(st.integers(0, 2), st.builds(SampledToken, st.integers(0, 3)), st.text(max_size=2), st.just(""))
CACHED = st.integers(0, 2)
SENT = st.just(None)


@settings(max_examples=200, deadline=None)
@given(st.sampled_from([1, 1, 3]), st.lists(APPENDED | PLAIN | ENDS.map(list) | SENT | CACHED, max_size=40))
def test_logs_are_the_same_on_both_sides(n: int, events: list[object]) -> None:
    one = Generation("r", [1, 2], n, lambda: None, 0.0)
    other = Generation("r", [1, 2], n, lambda: None, 0.0)
    teller, tokens = Teller(7, one), PlainTokens()
    for event in [*events, None]:
        if event is None:
            sent: tuple[Usual, list[News]] = (([], [], []), [])
            teller.tell(*sent)
            usual, news = pickle.loads(pickle.dumps(sent))
            assert (usual[0] or [news[0][0]]) == [7] and len(usual[0]) + len(news) == 1
            assert one.finished == (news != [] and news[0][4]) == teller.done
            hear_usual({7: other}, usual, tokens)
            for item in news:
                hear(other, item, tokens)
            assert other.logs == one.logs and other.finished == one.finished
            assert other.num_cached_tokens == one.num_cached_tokens and other.timings == one.timings
            continue
        if isinstance(event, int):
            one.num_cached_tokens = event
            continue
        log = one.logs[event[0] % n]  # type: ignore[index]
        if log.finish_reason is not None:
            continue
        if isinstance(event, tuple):
            _, token, piece, held = event
            if token.logprob is None:
                token.top = ()
            log.tokens.append(token)
            log.pieces.append(piece)
            log.held = held
            one.timings.first_token = one.timings.first_token or 5.0
        else:
            _, log.finish_reason, log.tail, log.stop_reason = event  # type: ignore[misc]
            log.error, log.error_status = "why", 503


def _held(g: Generation) -> None:
    g.logs[0].held = "<"


def _cached(g: Generation) -> None:
    g.num_cached_tokens = 16


def _probable(g: Generation) -> None:
    g.logs[0].tokens[-1].logprob = -0.5


def _two(g: Generation) -> None:
    g.logs[0].tokens.append(SampledToken(9))
    g.logs[0].pieces.append("z")


def _end(g: Generation) -> None:
    g.logs[0].finish_reason, g.logs[0].tail = "length", "?"


@pytest.mark.parametrize("change", [None, _held, _cached, _probable, _two, _end])
def test_whatever_is_new_beside_the_usual_token_is_told(change: Callable[[Generation], None] | None) -> None:
    one, other = (Generation("r", [1], 1, lambda error, status: None, 0.0) for _ in range(2))
    one.timings.first_token = 1.0
    teller, tokens = Teller(3, one), PlainTokens()
    for step in range(5):
        one.logs[0].tokens.append(SampledToken(step))
        one.logs[0].pieces.append(f"<{step}")
        if step == 2 and change is not None:
            change(one)
        elif step == 3:
            one.logs[0].held = ""
        usual: Usual = ([], [], [])
        news: list[News] = []
        teller.tell(usual, news)
        hear_usual({3: other}, usual, tokens)
        for item in news:
            hear(other, item, tokens)
        assert other.logs == one.logs and other.num_cached_tokens == one.num_cached_tokens
        assert len(usual[0]) == (step > 0 and (change is None or step not in ((2, 3) if change is _held else (2,))))
        if one.finished:
            break


def test_news_of_several_choices_keep_them_apart() -> None:
    one, other = (Generation("r", [1], 2, lambda error, status: None, 0.0) for _ in range(2))
    one.timings.first_token = 1.0
    teller, tokens = Teller(3, one), PlainTokens()
    for step in range(4):
        for log in one.logs:
            log.tokens.append(SampledToken(step + log.index))
            log.pieces.append("x")
        usual: Usual = ([], [], [])
        news: list[News] = []
        teller.tell(usual, news)
        hear_usual({3: other}, usual, tokens)
        for item in news:
            hear(other, item, tokens)
        assert other.logs == one.logs


def test_a_choice_that_ended_here_hears_nothing_more() -> None:
    one, other = (Generation("r", [1], 2, lambda: None, 0.0) for _ in range(2))
    teller = Teller(0, one)
    other.logs[0].finish_reason = "abort"
    for log in one.logs:
        log.tokens.append(SampledToken(5))
        log.pieces.append("x")
        log.finish_reason = "length"
    hear(other, teller.news(), PlainTokens())
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
