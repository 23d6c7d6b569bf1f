"""What users are promised of the batcher, on the executor that remembers tokens."""

from __future__ import annotations

import pytest
from sched_harness import EOS, VOCAB, Bench

from chatsvc.scheduler.plan import StepResult
from chatsvc.scheduler.request import State


def prompt(n: int, start: int = 0) -> list[int]:
    return [(start + i * 7) % VOCAB for i in range(n)]


def test_a_short_request_admitted_beside_a_long_one_finishes_first_and_frees_at_once() -> None:
    bench = Bench(num_blocks=200, block_size=16, budget=64)
    long = bench.add(prompt(10), max_tokens=1000, ignore_eos=True)
    bench.step()
    short = bench.add(prompt(10, 5), max_tokens=20, ignore_eos=True)
    used_alone = None
    for _ in range(100):
        used_alone = len(long.sequences[0].table.blocks)
        bench.step()
        if short.finished:
            break
    assert short.finished and not long.finished
    assert bench.manager.pool.num_used <= used_alone + 1, "the short one's blocks are back one step later"
    bench.run()


def test_sixteen_equal_prefixes_in_the_same_instant_are_computed_once() -> None:
    bench = Bench(num_blocks=400, block_size=16, budget=64, max_num_seqs=16)
    head = prompt(1000)
    for i in range(16):
        bench.add([*head, *prompt(20, 100 + i)], max_tokens=2)
    bench.run()
    shared = 1000 // 16 * 16
    # once the head; for each its own tail (the head's last partial block and 20 tokens) and one decode step
    assert bench.scheduler.stats.computed_tokens <= shared + 16 * (1020 - shared + 1)


def test_the_whole_budget_serves_the_prefix_that_others_wait_for() -> None:
    bench = Bench(num_blocks=400, block_size=16, budget=64, max_num_seqs=16)
    for i in range(8):
        bench.add([*prompt(640), *prompt(10, 100 + i)], max_tokens=1)
    assert bench.step().num_tokens == 64, "nobody else can use the rest of the step"


@pytest.mark.parametrize("blocks", [1, 2, 5])
@pytest.mark.parametrize("budget", [3, 7, 64])
def test_pc03_a_prompt_of_exactly_k_blocks_computes_one_token_when_known(blocks: int, budget: int) -> None:
    bench = Bench(num_blocks=40, block_size=8, budget=budget)
    p = prompt(8 * blocks)
    outputs = []
    for round_ in range(3):
        before = bench.scheduler.stats.computed_tokens
        r = bench.add(p, max_tokens=4, ignore_eos=True)
        bench.run()
        outputs.append(list(r.sequences[0].tokens))
        computed = bench.scheduler.stats.computed_tokens - before
        assert r.sequences[0].cached_tokens == (0 if round_ == 0 else len(p) - 1)
        assert computed == (len(p) if round_ == 0 else 1) + 3
    assert outputs[0] == outputs[1] == outputs[2]
    longer = bench.add([*p, *prompt(8, 3)], max_tokens=1)
    bench.run()
    assert longer.sequences[0].cached_tokens == len(p), "the recomputed last token did not break the chain"
    for edge in (len(p) - 1, len(p) + 1):
        r = bench.add(prompt(edge), max_tokens=1)
        bench.run()
        assert r.sequences[0].cached_tokens == min(edge - 1, edge // 8 * 8)


def test_sf01_running_streams_get_a_token_at_every_step_while_a_long_prompt_is_read() -> None:
    bench = Bench(num_blocks=600, block_size=16, budget=32, max_num_seqs=16)
    streams = [bench.add(prompt(8, i), max_tokens=300, ignore_eos=True) for i in range(4)]
    bench.step()
    long = bench.add(prompt(4000, 500), max_tokens=1)
    steps = 0
    while not long.finished:
        before = [s.sequences[0].num_output for s in streams]
        bench.step()
        steps += 1
        assert [s.sequences[0].num_output for s in streams] == [b + 1 for b in before]
    assert steps <= 4000 // (32 - 4) + 3, "the long prompt uses all that the streams leave"


def test_sf02_a_short_question_does_not_wait_for_a_long_prompt() -> None:
    bench = Bench(num_blocks=600, block_size=16, budget=64)
    bench.add(prompt(4000), max_tokens=1)
    bench.step()
    short = bench.add(prompt(10, 77), max_tokens=1)
    bench.step()
    assert short.finished


@pytest.mark.parametrize("later", [0, 1])
@pytest.mark.parametrize("lengths", [(640, 640, 640), (640, 600, 620), (600, 640, 900)])
def test_prompts_of_like_length_are_read_one_after_the_other(lengths: tuple[int, ...], later: int) -> None:
    """Side by side, everybody's first token would come when the last one's does."""
    bench = Bench(num_blocks=600, block_size=16, budget=64)
    requests = []
    for i, n in enumerate(lengths):
        requests.append(bench.add(prompt(n, 1000 * i), max_tokens=1))
        if later:
            bench.step()
    ends, steps = [0, 0, 0], later * len(lengths)
    while not all(ends):
        bench.step()
        steps += 1
        ends = [end or (steps if r.finished else 0) for end, r in zip(ends, requests, strict=True)]
    work = [sum(lengths[: i + 1]) / 64 for i in range(3)]
    assert all(work[i] <= ends[i] <= work[i] + 3 for i in range(3)), (ends, work)


def test_a_prompt_of_half_the_length_goes_beside_a_long_one_and_longer_ones_wait_behind_both() -> None:
    bench = Bench(num_blocks=600, block_size=16, budget=64)
    first, like, half = (bench.add(prompt(n, i * 5000), max_tokens=1) for i, n in enumerate((1280, 1100, 640)))
    steps = 0
    while not half.finished:
        bench.step()
        steps += 1
    assert not first.finished and first.sequences[0].num_computed >= 640 - 64
    assert like.sequences[0].num_computed == 0
    assert steps <= 2 * 640 // 64 + 2
    bench.run()


def test_more_running_sequences_than_budget_take_turns() -> None:
    bench = Bench(num_blocks=100, block_size=4, budget=3, max_num_seqs=8)
    requests = [bench.add(prompt(2, i * 13), max_tokens=40, ignore_eos=True) for i in range(8)]
    while not all(r.sequences[0].decoding or r.finished for r in requests):
        bench.step()
    counts = [r.sequences[0].num_output for r in requests]
    for _ in range(16):
        bench.step()
    gained = [r.sequences[0].num_output - c for r, c in zip(requests, counts, strict=True)]
    assert max(gained) - min(gained) <= 1, f"3 tokens a step over 8 sequences: {gained}"
    bench.run()


def test_the_oldest_is_never_preempted_and_preempted_ones_come_back_first() -> None:
    bench = Bench(num_blocks=10, block_size=4, budget=32)
    requests = [bench.add(prompt(6, i * 31), max_tokens=24, ignore_eos=True) for i in range(6)]
    preempted = 0
    while bench.scheduler.has_work:
        oldest = min((r for r in requests if not r.finished), key=lambda r: r.arrival)
        had = oldest.sequences[0].preemptions
        waiting = set(bench.scheduler.waiting)
        paused = bool(bench.scheduler.preempted)
        bench.step()
        assert oldest.sequences[0].preemptions == had
        if paused and bench.scheduler.preempted:
            assert set(bench.scheduler.waiting) == waiting, "nobody new while a preempted one waits"
        preempted = bench.scheduler.stats.preemptions
    assert preempted > 0
    assert all(r.sequences[0].num_output == 24 for r in requests)


def test_pc10_unique_prompts_report_no_hits_however_often_they_are_preempted() -> None:
    bench = Bench(num_blocks=8, block_size=4, budget=32)
    requests = [bench.add(prompt(7, i * 97), max_tokens=20, ignore_eos=True) for i in range(5)]
    bench.run()
    assert bench.scheduler.stats.preemptions > 0 and bench.scheduler.stats.recompute_hit_tokens > 0
    assert [r.sequences[0].cached_tokens for r in requests] == [0] * 5
    assert bench.scheduler.stats.hit_tokens == 0


def test_pc08_short_lived_partial_blocks_do_not_push_out_a_hot_prompt() -> None:
    bench = Bench(num_blocks=12, block_size=8, budget=64)
    hot = prompt(64)
    bench.add(hot, max_tokens=1)
    bench.run()
    for i in range(200):
        bench.add(prompt(5, i), max_tokens=2)
        bench.run()
    r = bench.add(hot, max_tokens=1)
    bench.run()
    assert r.sequences[0].cached_tokens == len(hot) - 1


@pytest.mark.parametrize("constant_digest", [False, True])
def test_pc12_salts_isolate_even_when_digests_collide(constant_digest: bool) -> None:
    bench = Bench(num_blocks=40, block_size=4, budget=64)
    if constant_digest:
        bench.manager.pool.index.digest = lambda parent, tokens: b"x"  # type: ignore[method-assign]
    p = prompt(4)  # one block, so that even a constant digest can find it again
    for salt, want in (("a", 0), ("a", 3), ("b", 0)):
        r = bench.add(p, max_tokens=1, salt=salt)
        bench.run()
        assert r.sequences[0].cached_tokens == want, salt


def test_digests_differ_between_processes_with_different_secrets() -> None:
    one, two = Bench(secret=b"one"), Bench(secret=b"two")
    assert one.manager.pool.index.digest(b"", b"abcd") != two.manager.pool.index.digest(b"", b"abcd")
    assert Bench(secret=b"one").manager.pool.index.digest(b"", b"abcd") == one.manager.pool.index.digest(b"", b"abcd")


def test_end_tokens_min_tokens_and_stop_ids() -> None:
    bench = Bench()
    bench.token_fn = bench.executor._token_fn = lambda context, row: EOS  # type: ignore[assignment]
    now = bench.add(prompt(3), max_tokens=5)
    later = bench.add(prompt(3, 9), max_tokens=5, min_tokens=3)
    never = bench.add(prompt(3, 18), max_tokens=5, ignore_eos=True)
    stop = bench.add(prompt(3, 27), max_tokens=5, ignore_eos=True, stop_token_ids=frozenset({EOS}))
    at_cap = bench.add(prompt(3, 36), max_tokens=1)
    bench.run()
    got = {u.sequence.request.request_id: (u.sequence.num_output, u.finish_reason) for u in bench.finished}
    assert got == {
        now.request_id: (1, "stop"),
        later.request_id: (4, "stop"),
        never.request_id: (5, "length"),
        stop.request_id: (1, "stop"),
        at_cap.request_id: (1, "stop"),
    }


def test_sh01_a_failing_step_is_pinned_on_the_guilty_row() -> None:
    bench = Bench(num_blocks=60, block_size=4, budget=32)
    good = [bench.add(prompt(9, i * 41), max_tokens=6, ignore_eos=True) for i in range(3)]
    bad = bench.add(prompt(9, 500), max_tokens=6, ignore_eos=True)
    bad_id = bad.sequences[0].seq_id
    for _ in range(200):
        if not bench.scheduler.has_work:
            break
        plan = bench.scheduler.schedule()
        if any(r.seq_id == bad_id for r in plan.rows):
            bench.finished += bench.scheduler.step_failed(plan, "boom")
            bench.scheduler.check_integrity()
        else:
            bench.apply(plan, bench.executor.run(plan))
    assert bad.sequences[0].finish_reason == "error" and bad.sequences[0].num_output == 0
    assert all(r.sequences[0].finish_reason == "length" and r.sequences[0].num_output == 6 for r in good)
    bench.idle_is_clean()


def test_aborting_leaves_nothing_behind_in_any_state() -> None:
    bench = Bench(num_blocks=8, block_size=4, budget=16, max_num_seqs=3)
    requests = [bench.add(prompt(9, i * 41), max_tokens=12, ignore_eos=True) for i in range(6)]
    seen = set()
    for _ in range(12):
        bench.step()
        for r in requests:
            if r.sequences[0].state not in seen and not r.finished:
                seen.add(r.sequences[0].state)
                bench.abort(r)
                bench.abort(r)  # idempotent
                break
    bench.run()
    assert {State.WAITING, State.RUNNING} <= seen
    bench.idle_is_clean()


def test_pool_events_describe_the_cache() -> None:
    bench = Bench(num_blocks=6, block_size=4, budget=64)
    known: set[int] = set()
    for i in range(30):
        bench.add(prompt(13, i * 5), max_tokens=3)
        bench.run()
        for event in bench.manager.take_events():
            if event.kind == "stored":
                known.add(event.content_id)
            else:
                known.remove(event.content_id)
        assert known == {b.content.content_id for b in bench.manager.pool.index if b.content}
    assert bench.manager.pool.evictions > 0


def test_events_that_nobody_reads_are_bounded_and_the_loss_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("chatsvc.cache.pool.MAX_EVENTS", 10)
    bench = Bench(num_blocks=6, block_size=4, budget=64)
    for i in range(30):
        bench.add(prompt(13, i * 5), max_tokens=3)
        bench.run()
    events = bench.manager.take_events()
    assert events[0].kind == "lost" and len(events) <= 11
    assert bench.manager.take_events() == []


def test_waste_of_long_sequences_is_under_four_percent() -> None:
    bench = Bench(num_blocks=2000, block_size=16, budget=512, max_num_seqs=32)
    for i in range(24):
        bench.add(prompt(500 + 17 * i, i * 31), max_tokens=60, ignore_eos=True)
    filled = allocated = 0
    while bench.scheduler.has_work:
        bench.step()
        f, a = bench.scheduler.filled_slots()
        filled, allocated = filled + f, allocated + a
    assert 1 - filled / allocated < 0.04


@pytest.mark.parametrize("prefix_caching", [True, False])
def test_n_choices_share_the_prompt_and_copy_at_most_one_block_each(prefix_caching: bool) -> None:
    bench = Bench(num_blocks=200, block_size=16, budget=64, max_num_seqs=16, prefix_caching=prefix_caching)
    r = bench.add(prompt(1000), max_tokens=6, n=8, temperature=1.0, seed=5, ignore_eos=True)
    most = 0
    while bench.scheduler.has_work:
        bench.step()
        most = max(most, bench.manager.pool.num_used)
    assert bench.scheduler.stats.computed_tokens == 1000 + 8 * 5, "the prompt is computed once"
    # 1000 tokens are 62 full blocks and 8 tokens; each choice but one copies that partial block
    assert most == 62 + 8 and bench.manager.cow_copies == 7
    assert bench.scheduler.stats.prompt_tokens == 1000
    assert len({tuple(s.tokens) for s in r.sequences}) == 8 and all(s.num_output == 6 for s in r.sequences)


def test_a_prompt_of_whole_blocks_needs_no_copy() -> None:
    bench = Bench(num_blocks=60, block_size=16, budget=64)
    bench.add(prompt(64), max_tokens=6, n=4, temperature=1.0, ignore_eos=True)
    bench.run()
    assert bench.manager.cow_copies == 0


def test_bm06_more_choices_than_slots_and_blocks() -> None:
    bench = Bench(num_blocks=14, block_size=4, budget=32, max_num_seqs=4)
    requests = [
        bench.add(prompt(9, i * 50), max_tokens=20, n=n, temperature=1.0, ignore_eos=True)
        for i, n in enumerate((3, 5, 10))
    ]
    bench.run()
    assert bench.scheduler.stats.preemptions > 0
    assert all(s.num_output == 20 for r in requests for s in r.sequences)
    bench.idle_is_clean()


def test_choices_that_wait_to_be_forked_end_with_their_request() -> None:
    bench = Bench(num_blocks=60, block_size=4, budget=4)
    aborted = bench.add(prompt(40), max_tokens=4, n=4)
    failing = bench.add(prompt(40, 99), max_tokens=4, n=3)
    bench.step()
    bench.abort(aborted)
    while not failing.finished:
        plan = bench.scheduler.schedule()
        errors = {r.seq_id: "NaN" for r in plan.rows if r.sampling}
        bench.apply(plan, StepResult(plan.step, {}, errors))
    assert {s.finish_reason for s in failing.sequences} == {"error"}
    bench.idle_is_clean()
