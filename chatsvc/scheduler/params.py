"""What a caller asks of the sampler and of the end of a generation."""

from __future__ import annotations

from dataclasses import dataclass, field

from chatsvc.scheduler.beam import BeamParams


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Plain, picklable, validated by the API before it comes here.

    Attributes:
        max_tokens: upper bound of generated tokens (always set; the API resolves the default).
        temperature: 0 is greedy.
        top_k: 0 switches it off.
        top_p, min_p: 1.0 and 0.0 switch them off.
        repetition_penalty: multiplicative, over prompt and output (1.0 = off).
        presence_penalty, frequency_penalty: additive, over output only.
        logit_bias: added to the logits, token id -> bias.
        seed: 64-bit; the random number of choice c at position p is a pure function of (seed, c, p).
        stop: strings that end the text; never part of it.
        stop_token_ids: token ids that end the generation (the model's own end tokens stand apart, see ``ignore_eos``).
        min_tokens: end tokens and stop token ids cannot be sampled before that many tokens, and stop strings are
            not looked for in their text.
        ignore_eos: the model's end tokens do not end the generation.
        logprobs: None, or how many alternatives (0..20) are reported beside the chosen token.
        n: number of choices.
        beam: beam search instead of sampling; the n best hypotheses are the choices.
    """

    max_tokens: int
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: dict[int, float] = field(default_factory=dict)
    seed: int = 0
    stop: tuple[str, ...] = ()
    stop_token_ids: frozenset[int] = frozenset()
    min_tokens: int = 0
    ignore_eos: bool = False
    logprobs: int | None = None
    n: int = 1
    beam: BeamParams | None = None

    @property
    def penalised(self) -> bool:
        """What was generated changes the logits."""
        return self.repetition_penalty != 1.0 or self.presence_penalty != 0.0 or self.frequency_penalty != 0.0
