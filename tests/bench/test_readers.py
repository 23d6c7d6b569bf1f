"""The bench of many readers finds what is missing, doubled and old; and a small run of it finds nothing."""

from __future__ import annotations

import asyncio
import itertools
from pathlib import Path

import pytest

from chatsvc.bench import readers
from chatsvc.bench.readers import Reader, Shared
from chatsvc.modelfiles import resolve
from chatsvc.runtime.clock import PERIOD, WIDTH, ClockExecutor, clock_tokens, milliseconds
from chatsvc.runtime.simulated import SimulatedConfig
from chatsvc.scheduler.params import SamplingParams
from chatsvc.scheduler.plan import SamplingRow, ScheduledRow, SchedulerOutput
from chatsvc.text.tokenizer import Tokenizer, load_tokenizer


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return load_tokenizer(resolve("smollm2-135m"))


@pytest.fixture(scope="module")
def alphabet(tokenizer: Tokenizer) -> dict[bytes, int]:
    ids = clock_tokens(tokenizer.vocab_size, tokenizer.token_bytes, tokenizer.is_special)
    return {tokenizer.token_bytes(token): i for i, token in enumerate(ids)}


def test_the_clocks_tokens_can_be_told_apart(tokenizer: Tokenizer, alphabet: dict[bytes, int]) -> None:
    assert len(alphabet) == PERIOD and {len(text) for text in alphabet} == {WIDTH}
    with pytest.raises(ValueError, match="the vocabulary has 0 tokens"):
        clock_tokens(5, lambda i: b"long", lambda i: False)


def test_a_token_says_when_its_step_ended(tokenizer: Tokenizer) -> None:
    ids = clock_tokens(tokenizer.vocab_size, tokenizer.token_bytes, tokenizer.is_special)
    executor = ClockExecutor(SimulatedConfig(4, 4, tokenizer.vocab_size, 16, step_seconds=0.02), ids)
    sampling = SamplingRow(SamplingParams(max_tokens=1), 0, 1)
    rows = (ScheduledRow(1, (5,), 0, (1,), 0, sampling, ((3, sampling),)), ScheduledRow(2, (5,), 0, (2,), 0, None))
    made = []
    for step in range(3):
        before = milliseconds()
        result = executor.run(SchedulerOutput(step, rows))
        assert set(result.tokens) == {1, 3} and result.tokens[1] == result.tokens[3]
        at = ids.index(result.tokens[1][0].token_id)
        assert (at - before) % PERIOD <= (milliseconds() - before) % PERIOD
        made.append(at)
    assert all(0 < (b - a) % PERIOD < PERIOD // 2 for a, b in itertools.pairwise(made))


class Case:
    """A reader that is handed bytes; ``tell`` writes text made at those times (ms on the clock)."""

    def __init__(self, alphabet: dict[bytes, int], tokens: int) -> None:
        self.texts = {i: text for text, i in alphabet.items()}
        self.shared = Shared(alphabet, tokens, measuring=True)
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.reader = Reader(self.shared, b"", False, self.done)

    def tell(self, *times: int) -> bytes:
        text = b"".join(self.texts[t % PERIOD] for t in times)
        event = b'data: {"id":"chatcmpl-0","choices":[{"index":0,"delta":{"content":"%s"}}],"usage":null}\n\n' % text
        return b"%x\r\n%s\r\n" % (len(event), event)

    def end(self, count: int) -> bytes:
        return b'1\r\ndata: {"choices":[],"usage":{"completion_tokens":%d}}\n\ndata: [DONE]\n\n\r\n0\r\n\r\n' % count


async def test_whatever_the_cut_all_tokens_are_seen_with_their_ages(alphabet: dict[bytes, int]) -> None:
    for size in (1, 7, 100, 10_000):
        case = Case(alphabet, 4)
        now = milliseconds()
        raw = b"HTTP/1.1 200 OK\r\n\r\n" + case.tell(now - 90) + case.tell(now - 60, now - 30) + case.tell(now)
        raw += case.end(4)
        for at in range(0, len(raw), size):
            case.reader.data_received(raw[at : at + size])
        assert case.done.done() and not case.shared.faults
        assert len(case.shared.ages) == 4 and case.shared.frames == 3
        assert case.shared.ages[0] - case.shared.ages[3] >= 60


@pytest.mark.parametrize(
    ("times", "counted", "word"),
    [
        ((0, 50, 50, 100), 4, "came twice"),
        ((0, 100, 50, 150), 4, "wrong order"),
        ((0, 50, 100), 4, "3 tokens came"),
        ((0, 50, 100), 3, "4 asked for"),
        ((0, 50, 100, 150, 200), 4, "5 tokens came"),
    ],
)
async def test_what_is_missing_or_doubled_is_found(
    alphabet: dict[bytes, int], times: tuple[int, ...], counted: int, word: str
) -> None:
    case = Case(alphabet, 4)
    case.reader.data_received(b"".join(case.tell(t) for t in times) + case.end(counted))
    assert any(word in fault for fault in case.shared.faults), case.shared.faults


async def test_an_error_and_a_lost_connection_are_faults(alphabet: dict[bytes, int]) -> None:
    case = Case(alphabet, 4)
    case.reader.data_received(b'event: error\ndata: {"error":{"message":"boom"}}\n\n')
    assert case.done.done() and "boom" in case.shared.faults[0]
    case = Case(alphabet, 4)
    case.reader.data_received(case.tell(0))
    case.reader.connection_lost(None)
    assert case.done.done() and "lost" in case.shared.faults[0]


async def test_a_small_run_of_servers_misses_and_doubles_nothing(alphabet: dict[bytes, int], tmp_path: Path) -> None:
    result = await readers.run(alphabet, readers=12, stopping=3, servers=1, engine="process", rate=50, seconds=0.5)
    assert result.faults == [] and result.stopped == 3 and result.engine_cpu > 0
    assert 0 < result.p50 <= result.p99 <= result.most < PERIOD
