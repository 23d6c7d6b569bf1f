"""All modes on the same chats: the same tokens, and what each does with the memory."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import replace

import pytest

from chatsvc.bench.baselines import MODES, Mode
from chatsvc.bench.compare import compare
from chatsvc.bench.drive import Answer, Run, drive, messages_of
from chatsvc.bench.recorder import LONG, RecordedScheduler
from chatsvc.bench.rig import Rig
from chatsvc.bench.trace import NAMES, build
from chatsvc.bench.waste import waste
from chatsvc.errors import ContextLengthExceeded
from chatsvc.scheduler.plan import SchedulerOutput

CONTIGUOUS, PAGED_STATIC, PAGED, OURS = MODES
RECORDED = "744e54c7b212dbb9"  # numbers in docs/benchmarks.md belong to these texts


async def runs_of(rig: Rig, name: str, scale: float, answers: float) -> dict[str, Run]:
    workload = build(name, 1, scale, answers)
    return {m.name: await drive(rig, workload, m, check=True) for m in MODES}


async def test_every_mode_gives_the_same_tokens(make_rig: Callable[..., Rig]) -> None:
    rig = make_rig()
    runs = await runs_of(rig, "mixed", 0.25, 0.3)
    ours = runs["chatsvc"]
    for name, run in runs.items():
        assert {k: a.tokens for k, a in run.answers.items()} == {k: a.tokens for k, a in ours.answers.items()}, name
        result = await compare(rig, run, ours)
        assert result.equal == len(ours.answers) and not result.ties and not result.mismatches
    # A later turn's prompt holds the model's own answer, as its tokens.
    first, second = ours.answers[0, 0], ours.answers[0, 1]
    assert second.prompt[: len(first.prompt) + len(first.tokens)] == first.prompt + first.tokens
    waste = {name: run.recorder.slots.waste for name, run in runs.items()}
    assert waste["contiguous-static"] > 0.5 > 0.1 > max(waste["paged-static"], waste["paged-continuous"])
    peak = {name: run.recorder.peak_running for name, run in runs.items()}
    assert peak["contiguous-static"] == 2  # 4,096 slots, 2,048 each
    assert peak["contiguous-static"] < peak["paged-static"] <= peak["paged-continuous"] <= peak["chatsvc"]
    stats = {name: run.stats for name, run in runs.items()}
    assert all(stats[m.name].cached_prompt_tokens == 0 for m in MODES[:-1])
    assert stats["chatsvc"].cached_prompt_tokens > 0
    assert stats["chatsvc"].computed_tokens < stats["paged-continuous"].computed_tokens


@pytest.mark.parametrize("name", [n for n in NAMES if n != "mixed"])
async def test_the_other_workloads(make_rig: Callable[..., Rig], name: str) -> None:
    rig = make_rig()
    runs = await runs_of(rig, name, 0.2, 0.1)
    tokens = {n: {k: a.tokens for k, a in r.answers.items()} for n, r in runs.items()}
    assert all(t == tokens["chatsvc"] for t in tokens.values())
    expected = sum(len(s.turns) for s in build(name, 1, 0.2, 0.1).sessions)
    assert len(tokens["chatsvc"]) == expected


async def test_a_pool_too_small_preempts_and_changes_no_token(make_rig: Callable[..., Rig]) -> None:
    rig = make_rig(pool=1280, max_model_len=1280)
    runs = await runs_of(rig, "decode-heavy", 1.0, 0.8)
    assert runs["paged-continuous"].stats.preemptions > 0
    assert runs["paged-static"].stats.preemptions == runs["contiguous-static"].stats.preemptions == 0
    tokens = [{k: a.tokens for k, a in r.answers.items()} for r in runs.values()]
    assert all(t == tokens[-1] for t in tokens)


async def test_a_modelled_run_repeats_itself(make_rig: Callable[..., Rig]) -> None:
    rig = make_rig()
    once, again = [await drive(rig, build("mixed", 1, 0.2, 0.3), OURS) for _ in range(2)]
    assert once.recorder.timings == again.recorder.timings and once.recorder.slots == again.recorder.slots


async def test_modelled_time_is_the_cost_of_every_step(make_rig: Callable[..., Rig]) -> None:
    rig = make_rig()
    run = await drive(rig, build("single", 1, 0.4, 0.1), PAGED)
    r, stats = run.recorder, run.stats
    assert r.busy == pytest.approx(r.steps * 0.025 + stats.computed_tokens * 0.0025)
    first = r.timings[0]
    prompt = len(run.answers[0, 0].prompt)
    assert prompt <= rig.budget
    assert first.ttft == pytest.approx(0.025 + prompt * 0.0025)
    assert first.tpot == pytest.approx(0.0275)


async def test_waste_under_four_percent_for_long_sequences(make_rig: Callable[..., Rig]) -> None:
    """The whole recorded trace, nothing left out."""
    rig = make_rig()
    rows = {w.block_size: w for w in await waste(rig.config, 32768, 1)}
    assert set(rows) == {8, 16, 32, 64, 128}
    workload = build("mixed", 1)
    assert rows[16].sequences == sum(len(s.turns) for s in workload.sessions)
    assert rows[16].long_sequences >= 20
    assert 0 < rows[16].long < 0.04 and 0 < rows[16].long_own < 0.04 and 0 < rows[16].all < 0.04
    long = [rows[size].long for size in sorted(rows)]
    assert long == sorted(long)
    # A block size's share of waste is about half a block for each sequence.
    assert 0.5 < rows[32].all_own / rows[16].all_own / 2 < 1.5


async def test_slots_are_counted_like_a_map_of_the_pool(
    make_rig: Callable[..., Rig], monkeypatch: pytest.MonkeyPatch
) -> None:
    """An independent count: a set of (block, offset) for what sequences hold after each step."""
    counted: list[tuple[int, int]] = []
    stepped = RecordedScheduler.update

    def update(self: RecordedScheduler, plan: SchedulerOutput, result: object) -> object:
        ends = {r.seq_id: r.start + len(r.token_ids) for r in plan.rows}
        used: set[tuple[int, int]] = set()
        reserved: set[int] = set()
        for seq in self.running:
            ids = seq.table.ids
            reserved |= set(ids)
            used |= {(ids[p // 16], p % 16) for p in range(ends.get(seq.seq_id, seq.num_computed))}
        counted.append((len(used), 16 * len(reserved)))
        return stepped(self, plan, result)  # type: ignore[arg-type]

    monkeypatch.setattr(RecordedScheduler, "update", update)
    rig = make_rig(simulated_token_ms=0.0, max_num_batched_tokens=64)
    run = await drive(rig, build("shared-prefix", 1, 0.2, 0.2), OURS)
    step = 0.025  # every step takes the same time, so the integrals are plain sums
    assert run.recorder.slots.used == pytest.approx(step * sum(u for u, _ in counted))
    assert run.recorder.slots.reserved == pytest.approx(step * sum(r for _, r in counted))


async def test_a_difference_without_a_tie_is_a_mismatch(make_rig: Callable[..., Rig]) -> None:
    rig = make_rig()
    run = await drive(rig, build("multi-turn", 1, 0.125, 0.1), PAGED)
    right = run.answers[0, 1]
    wrong = Answer(right.prompt, (*right.tokens[:2], right.tokens[2] + 1, *right.tokens[3:]))
    later = {k: Answer((1, *a.prompt), a.tokens) for k, a in run.answers.items() if k[1] > 1}
    result = await compare(rig, replace(run, answers={**run.answers, (0, 1): wrong, **later}), run)
    assert (result.equal, result.ties, result.follow_ups) == (1, 0, 3)
    assert result.mismatches == [f"0/1 token 2: {right.tokens[2] + 1} or {right.tokens[2]}"]


async def test_a_chat_that_outgrows_the_limit_is_said(make_rig: Callable[..., Rig]) -> None:
    rig = make_rig(pool=512, max_model_len=512)
    with pytest.raises(ContextLengthExceeded):
        await drive(rig, build("long-prefill", 1, 0.2), OURS)


def test_the_recorded_trace_stays_what_it_is() -> None:
    texts = repr([build(name, 1) for name in NAMES])
    assert hashlib.sha256(texts.encode()).hexdigest()[:16] == RECORDED
    assert build("mixed", 2) != build("mixed", 1)
    assert build("mixed", 1, 0.25).sessions == build("mixed", 1).sessions[:16]
    with pytest.raises(KeyError):
        build("nothing")


def test_history_holds_answers_by_their_tokens() -> None:
    session = build("shared-prefix", 1).sessions[0]
    messages, ids = messages_of(session, 0, [])
    assert [m["role"] for m in messages] == ["system", "user"] and ids == {}
    chat = build("multi-turn", 1).sessions[0]
    messages, ids = messages_of(chat, 2, [[1], [2]])
    assert [m["role"] for m in messages] == ["system", "user", "assistant", "user", "assistant", "user"]
    assert ids == {2: [1], 4: [2]}


def test_the_modes_are_what_they_are_called() -> None:
    assert Mode("chatsvc", OURS.text, prefix_caching=True) == OURS
    assert CONTIGUOUS.contiguous and CONTIGUOUS.static and PAGED_STATIC.static and not PAGED_STATIC.contiguous
    assert not any(m.prefix_caching for m in (CONTIGUOUS, PAGED_STATIC, PAGED))
    assert LONG == 500
