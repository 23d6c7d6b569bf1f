"""Whether every mode gave the same greedy tokens.

A float32 forward pass rounds differently when its batch has another shape, so two tokens with (nearly) equal logits may
change places. That is a tie, and it is proven: the model is asked for the two best log-probabilities at the first
token that differs. Anything else is a mismatch, which is a fault.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from chatsvc.bench.baselines import MODES
from chatsvc.bench.drive import Run
from chatsvc.bench.rig import Rig
from chatsvc.scheduler.params import SamplingParams

TIE = 5e-4  # natural logarithm; the project's exactness tests use the same border


@dataclass(slots=True)
class Comparison:
    """One mode against the reference on one workload; counted in answers.

    Attributes:
        equal: the same tokens, all of them.
        ties: they part at a proven tie.
        follow_ups: later turns of such a chat: their prompts differ, so they are not compared.
        mismatches: where they part without a tie: "session/turn token n: a or b".
    """

    workload: str
    mode: str
    reference: str
    equal: int = 0
    ties: int = 0
    follow_ups: int = 0
    mismatches: list[str] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class _Parting:
    """The first token that differs: the ids before it, and the two tokens."""

    where: str
    context: list[int]
    tokens: frozenset[int]


async def compare(rig: Rig, run: Run, reference: Run) -> Comparison:
    result = Comparison(run.workload.name, run.mode.name, reference.mode.name)
    partings: list[_Parting] = []
    for key, ours in sorted(run.answers.items()):
        theirs = reference.answers[key]
        if ours.prompt != theirs.prompt:
            result.follow_ups += 1
        elif ours.tokens == theirs.tokens:
            result.equal += 1
        else:
            pairs = enumerate(zip(ours.tokens, theirs.tokens, strict=True))
            at = next(i for i, (a, b) in pairs if a != b)
            where = f"{key[0]}/{key[1]} token {at}: {ours.tokens[at]} or {theirs.tokens[at]}"
            context = [*ours.prompt, *ours.tokens[:at]]
            partings.append(_Parting(where, context, frozenset((ours.tokens[at], theirs.tokens[at]))))
    if partings:
        await _judge(rig, partings, result)
    return result


async def _judge(rig: Rig, partings: list[_Parting], result: Comparison) -> None:
    engine = rig.engine(MODES[-1], rig.recorder())
    await engine.start()
    try:
        for i, parting in enumerate(partings):
            params = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True, logprobs=2)
            generation = engine.generate(request_id=f"tie-{i}", prompt_token_ids=parting.context, params=params)
            await generation.wait()
            top = generation.logs[0].tokens[0].top
            tie = len(top) >= 2 and {t for t, _ in top[:2]} == parting.tokens and top[0][1] - top[1][1] < TIE
            if tie:
                result.ties += 1
            else:
                result.mismatches.append(parting.where)
    finally:
        await engine.stop()
