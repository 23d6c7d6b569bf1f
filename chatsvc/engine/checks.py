"""What is refused before it reaches the scheduler, and what of a step's result is not believed.

Both keep one request's fault from becoming everybody's: the scheduler may rely on what passes here.
"""

from __future__ import annotations

from dataclasses import replace

from chatsvc.errors import ContextLengthExceeded, InvalidRequest
from chatsvc.scheduler.params import SamplingParams
from chatsvc.scheduler.plan import SchedulerOutput, StepResult


def check_request(prompt: list[int], params: SamplingParams, *, limit: int, vocab_size: int) -> None:
    """Args:
        limit: prompt and answer together.

    Raises:
        InvalidRequest: an empty prompt, an id outside the vocabulary, no choice, no token to make.
        ContextLengthExceeded: with the numbers that do not fit.
    """
    if not prompt:
        raise InvalidRequest("the prompt is empty", param="prompt")
    low, high = min(prompt), max(prompt)
    if low < 0 or high >= vocab_size:
        wrong = low if low < 0 else high
        raise InvalidRequest(f"the prompt has the token id {wrong}, outside 0..{vocab_size - 1}", param="prompt")
    if params.n < 1:
        raise InvalidRequest("n must be at least 1", param="n")
    if params.max_tokens < 1:
        raise InvalidRequest("max_tokens must be at least 1", param="max_tokens")
    if len(prompt) >= limit:
        raise ContextLengthExceeded(f"the prompt has {len(prompt)} tokens; prompt and answer together may have {limit}")
    if len(prompt) + params.max_tokens > limit:
        raise ContextLengthExceeded(
            f"the prompt has {len(prompt)} tokens and max_tokens is {params.max_tokens}; together they may have "
            f"{limit}",
            param="max_tokens",
        )


def checked_result(plan: SchedulerOutput, result: StepResult, vocab_size: int) -> StepResult:
    """The result with an error for every row that should have tokens and has none, or has ids that do not exist."""
    errors = dict(result.errors)
    for row in plan.rows:
        if row.sampling is None:
            continue
        for seq_id in (row.seq_id, *(fork for fork, _ in row.forks)):
            tokens = result.tokens.get(seq_id)
            if seq_id in errors:
                continue
            if not tokens:
                errors[seq_id] = "the step made no token for this sequence"
            elif not all(0 <= t.token_id < vocab_size for t in tokens):
                errors[seq_id] = f"the step made token ids outside 0..{vocab_size - 1}"
    return result if len(errors) == len(result.errors) else replace(result, errors=errors)
