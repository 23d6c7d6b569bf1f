"""Who goes first under each policy, and that nobody waits for ever."""

from __future__ import annotations

import pytest
from sched_harness import VOCAB, Bench

from chatsvc.scheduler.request import Request


def prompt(n: int, start: int = 0) -> list[int]:
    return [(start + i * 7) % VOCAB for i in range(n)]


def finish_order(bench: Bench, requests: list[Request]) -> list[int]:
    order: list[int] = []
    while bench.scheduler.has_work:
        bench.step()
        order += [i for i, r in enumerate(requests) if r.finished and i not in order]
    return order


@pytest.mark.parametrize(("slots", "blocks"), [(4, 200), (40, 24)])
def test_pr07_an_urgent_request_overtakes_running_ones(slots: int, blocks: int) -> None:
    """Whether sequence slots or blocks are what is missing."""
    bench = Bench(num_blocks=blocks, block_size=4, budget=32, max_num_seqs=slots, policy="priority")
    low = [bench.add(prompt(8, i * 31), max_tokens=60, priority=100, ignore_eos=True) for i in range(30)]
    for _ in range(6):
        bench.step()
    urgent = bench.add(prompt(8, 5000), max_tokens=4, priority=0, ignore_eos=True)
    steps = 0
    while not urgent.finished:
        bench.step()
        steps += 1
    assert steps <= 5, "it was served at once"
    assert not any(r.finished for r in low)
    bench.run()
    assert all(r.sequences[0].num_output == 60 for r in low)


def test_pr07_low_priority_ages_and_finishes_under_a_stream_of_urgent_ones() -> None:
    bench = Bench(num_blocks=40, block_size=4, budget=16, max_num_seqs=1, policy="priority")
    low = bench.add(prompt(8), max_tokens=4, priority=3, ignore_eos=True)
    served = 0
    for i in range(100):  # one arrives every second, which is faster than they are served
        bench.add(prompt(8, i + 1), max_tokens=4, priority=0, ignore_eos=True)
        served += 1
        for _ in range(4):
            bench.step()
        if low.finished:
            break
    assert low.finished and served > 25, "three steps of priority are thirty seconds of waiting"


def test_shortest_first_and_long_ones_are_not_starved() -> None:
    bench = Bench(num_blocks=200, block_size=4, budget=64, max_num_seqs=1, policy="shortest")
    blocker = bench.add(prompt(4, 9), max_tokens=10, ignore_eos=True)
    bench.step()
    sizes = [200, 20, 120, 60]
    requests = [bench.add(prompt(8, i * 50), max_tokens=n, arrival=2.0, ignore_eos=True) for i, n in enumerate(sizes)]
    order = finish_order(bench, [blocker, *requests])
    assert [sizes[i - 1] for i in order if i] == sorted(sizes)

    bench = Bench(num_blocks=200, block_size=4, budget=64, max_num_seqs=1, policy="shortest")
    long = bench.add(prompt(8, 1), max_tokens=400, ignore_eos=True)
    blocked = 0
    for i in range(60):
        bench.add(prompt(8, 100 + i), max_tokens=2, ignore_eos=True)
        if long.sequences[0].num_computed:
            break
        blocked += 1
        bench.step()
    assert blocked < 30, "its wait makes up for its length"


def test_fair_shares_between_tenants() -> None:
    """SF-05: a batch of 60 of one tenant does not keep another one waiting."""
    bench = Bench(num_blocks=400, block_size=4, budget=64, max_num_seqs=2, policy="fair")
    batch = [bench.add(prompt(8, i * 11), max_tokens=8, tenant="batch", ignore_eos=True) for i in range(60)]
    for _ in range(20):
        bench.step()
    done = sum(r.finished for r in batch)
    person = [bench.add(prompt(8, 7000 + i), max_tokens=8, tenant="person", ignore_eos=True) for i in range(3)]
    while not all(r.finished for r in person):
        bench.step()
    assert sum(r.finished for r in batch) - done <= 8, "about as many of one as of the other"
    bench.run()


def test_fcfs_is_in_order_of_arrival() -> None:
    bench = Bench(num_blocks=200, block_size=4, budget=64, max_num_seqs=1)
    requests = [bench.add(prompt(8, i * 50), max_tokens=n, priority=-i) for i, n in enumerate((9, 3, 6))]
    assert finish_order(bench, requests) == [0, 1, 2]


@pytest.mark.parametrize("share", [0.25, 1.0])
def test_the_share_of_prompts_in_a_step_is_kept_while_answers_stream(share: float) -> None:
    bench = Bench(num_blocks=400, block_size=4, budget=40, max_num_seqs=8, prefill_share=share)
    bench.add(prompt(4, 5), max_tokens=30, ignore_eos=True)
    bench.step()
    long = bench.add(prompt(1500), max_tokens=1)
    most = max(bench.step().num_tokens for _ in range(10))
    assert most == 1 + (10 if share == 0.25 else 39)
    while bench.scheduler.running[0].request is not long:
        bench.step()
    assert bench.step().num_tokens == 40, "alone it takes the whole step"
    bench.run()
