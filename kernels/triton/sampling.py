# mypy: disallow-incomplete-defs=False
"""From logits to tokens without bringing the logits to the host: what crosses is one small tensor per step.

A program owns a row of logits [V] and passes over it several times; the row lies in the L2 cache after the first.

    look    best and log-sum-exp of the model's own logits, and whether they are finite
    edit    penalties, bias and forbidden tokens, on a copy, one lane for each token concerned
    draw    temperature, top_k, top_p, min_p, then the cumulative distribution inverted at the row's random number
    rank    the most likely tokens, for log-probabilities and beam search

top_k and top_p are a border in the order of the logits: what lies above it stays, and of the tokens on it the lowest
ids. The border is found by bisection over the 32 bits of a float, each step one pass that counts, or weighs, what is
above; nothing is sorted. Weights and their sums are float64, as in the sampler on the host.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from kernels.triton.upload import Upload

BLOCK = 2048
EDITS = 256
# In place of a token.
NOT_FINITE, NOTHING_LEFT = -1, -2


@triton.jit
def _order(x):
    """float32 to int32 in the same order; -0.0 is 0.0."""
    bits = tl.where(x == 0.0, 0.0, x).to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def _row(row, start, size, BLOCK: tl.constexpr):
    at = start + tl.arange(0, BLOCK)
    return tl.load(row + at, mask=at < size, other=float("-inf"))


@triton.jit
def _weight(x, best, rate):
    return tl.exp((x.to(tl.float64) - best) * rate)


@triton.jit
def _above(row, size, least, best, rate, by_weight, BLOCK: tl.constexpr):
    """How many logits are at least ``least`` (in :func:`_order`), or their weight."""
    found = tl.full((), 0.0, tl.float64)
    for start in range(0, size, BLOCK):
        x = _row(row, start, size, BLOCK)
        within = (_order(x) >= least) & (start + tl.arange(0, BLOCK) < size)
        if by_weight:
            found += tl.sum(tl.where(within, _weight(x, best, rate), 0.0))
        else:
            found += tl.sum(within.to(tl.int32)).to(tl.float64)
    return found


@triton.jit
def _kept(row, start, size, border, ties, tied, best, rate, min_p, BLOCK: tl.constexpr):
    """(weights of what stays in this stretch, 0 elsewhere; how many tokens on the border came so far)."""
    x = _row(row, start, size, BLOCK)
    order = _order(x)
    on = (order == border).to(tl.int32)
    rank = tied + tl.cumsum(on, 0) - on
    stays = (order > border) | ((on == 1) & (rank < ties))
    weight = _weight(x, best, rate)
    return tl.where(stays & (weight >= min_p), weight, 0.0), tied + tl.sum(on)


@triton.jit
def look_kernel(logits_ptr, best_ptr, sums_ptr, stride, size, BLOCK: tl.constexpr):
    """best [R] float32, NaN when the row has a NaN or +inf; sums [R] float64 log-sum-exp."""
    index = tl.program_id(0)
    row = logits_ptr + index.to(tl.int64) * stride
    best = tl.full((), float("-inf"), tl.float32)
    total = tl.full((), 0.0, tl.float64)
    bad = tl.full((), 0, tl.int32)
    for start in range(0, size, BLOCK):
        x = _row(row, start, size, BLOCK)
        broken = (x != x) | (x == float("inf"))
        bad += tl.sum(broken.to(tl.int32))
        x = tl.where(broken, float("-inf"), x)
        larger = tl.maximum(best, tl.max(x, 0))
        base = tl.where(larger == float("-inf"), 0.0, larger).to(tl.float64)
        total = total * tl.exp(best.to(tl.float64) - base) + tl.sum(tl.exp(x.to(tl.float64) - base))
        best = larger
    tl.store(best_ptr + index, tl.where(bad > 0, float("nan"), best))
    base = tl.where(best == float("-inf"), 0.0, best).to(tl.float64)
    tl.store(sums_ptr + index, base + tl.log(tl.where(total > 0.0, total, 1.0)))


@triton.jit(do_not_specialize=["count"])
def edit_kernel(logits_ptr, sums_ptr, edits_ptr, values_ptr, count, stride, EDITS: tl.constexpr):
    """edits [E, 3] row, token, whether the row counts in log-probabilities; values [E, 3] factor, minus, plus."""
    i = tl.program_id(0) * EDITS + tl.arange(0, EDITS)
    inside = i < count
    row = tl.load(edits_ptr + i * 3, mask=inside, other=0)
    token = tl.load(edits_ptr + i * 3 + 1, mask=inside, other=0)
    in_logprobs = tl.load(edits_ptr + i * 3 + 2, mask=inside, other=0)
    factor = tl.load(values_ptr + i * 3, mask=inside, other=1.0)
    minus = tl.load(values_ptr + i * 3 + 1, mask=inside, other=0.0)
    plus = tl.load(values_ptr + i * 3 + 2, mask=inside, other=0.0)
    at = logits_ptr + row.to(tl.int64) * stride + token
    shift = tl.where(in_logprobs == 1, tl.load(sums_ptr + row, mask=inside, other=0.0), 0.0).to(tl.float32)
    x = tl.load(at, mask=inside, other=0.0) - shift
    x = tl.where(x > 0, x / factor, x * factor) - minus + plus
    tl.store(at, x + shift, mask=inside)


@triton.jit(do_not_specialize=["out_stride"])
def draw_kernel(
    logits_ptr,
    edited_ptr,
    best_ptr,
    sums_ptr,
    top_k_ptr,
    reals_ptr,
    out_ptr,
    out_reals_ptr,
    stride,
    size,
    out_stride,
    BLOCK: tl.constexpr,
):
    """reals [R, 4] float64: 1 / temperature, top_p, min_p, random number. out [R, ...]: token, its log-probability."""
    index = tl.program_id(0)
    row = edited_ptr + index.to(tl.int64) * stride
    token = tl.full((), -1, tl.int32)
    own_best = tl.load(best_ptr + index)
    if tl.abs(own_best) < float("inf"):
        top = tl.full((), float("-inf"), tl.float32)
        for start in range(0, size, BLOCK):
            x = _row(row, start, size, BLOCK)
            most = tl.max(x, 0)
            first = tl.min(tl.where(x == most, start + tl.arange(0, BLOCK), 0x7FFFFFFF), 0)
            token = tl.where(most > top, first, token)
            top = tl.maximum(top, most)
        top_k = tl.load(top_k_ptr + index)
        if top == float("-inf"):
            token = tl.full((), -2, tl.int32)
        elif top_k != 1:
            rate = tl.load(reals_ptr + index * 4)
            top_p = tl.load(reals_ptr + index * 4 + 1)
            min_p = tl.load(reals_ptr + index * 4 + 2)
            u = tl.load(reals_ptr + index * 4 + 3)
            best = top.to(tl.float64)
            border = tl.full((), -0x80000000, tl.int64)
            ties = size
            # First top_k, which counts tokens, then top_p, which weighs those that top_k left.
            for by_weight in range(2):
                if (by_weight == 0) & (top_k > 0) & (top_k < size) | (by_weight == 1) & (top_p < 1.0):
                    wanted = top_k.to(tl.float64)
                    if by_weight == 1:
                        wanted = tl.full((), 0.0, tl.float64)
                        tied = tl.full((), 0, tl.int32)
                        for start in range(0, size, BLOCK):
                            weight, tied = _kept(
                                row, start, size, border.to(tl.int32), ties, tied, best, rate, 0.0, BLOCK
                            )
                            wanted += tl.sum(weight)
                        wanted = wanted * top_p
                    least = border
                    high = _order(top).to(tl.int64)
                    while border < high:
                        middle = (border + high + 1) >> 1
                        above = _above(row, size, middle.to(tl.int32), best, rate, by_weight, BLOCK)
                        border = tl.where(above >= wanted, middle, border)
                        high = tl.where(above >= wanted, high, middle - 1)
                    above = _above(row, size, (border + 1).to(tl.int32), best, rate, by_weight, BLOCK)
                    bits = border.to(tl.int32)
                    value = (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)
                    each = tl.where(by_weight == 1, _weight(value, best, rate), 1.0)
                    missing = tl.ceil((wanted - above) / each)
                    enough = tl.maximum(tl.minimum(missing, size.to(tl.float64)), 1.0).to(tl.int32)
                    ties = tl.where(border == least, tl.minimum(ties, enough), enough)

            cut = border.to(tl.int32)
            total = tl.full((), 0.0, tl.float64)
            tied = tl.full((), 0, tl.int32)
            for start in range(0, size, BLOCK):
                weight, tied = _kept(row, start, size, cut, ties, tied, best, rate, min_p, BLOCK)
                total += tl.sum(weight)
            target = u * total
            mass = tl.full((), 0.0, tl.float64)
            tied = tl.full((), 0, tl.int32)
            found = tl.full((), 0x7FFFFFFF, tl.int32)
            last = tl.full((), 0, tl.int32)
            start = tl.full((), 0, tl.int32)
            while (start < size) & (found == 0x7FFFFFFF):
                at = start + tl.arange(0, BLOCK)
                weight, tied = _kept(row, start, size, cut, ties, tied, best, rate, min_p, BLOCK)
                # Only tokens that stay: the sums of a parallel scan may creep up where nothing was added.
                beyond = (mass + tl.cumsum(weight, 0) > target) & (weight > 0)
                found = tl.min(tl.where(beyond, at, 0x7FFFFFFF), 0)
                last = tl.maximum(last, tl.max(tl.where(weight > 0, at, 0), 0))
                mass += tl.sum(weight)
                start += BLOCK
            token = tl.where(found == 0x7FFFFFFF, last, found)
    chosen = tl.load(logits_ptr + index.to(tl.int64) * stride + tl.maximum(token, 0)).to(tl.float64)
    tl.store(out_ptr + index * out_stride, token.to(tl.int64))
    tl.store(out_reals_ptr + index * out_stride + 1, chosen - tl.load(sums_ptr + index))


@triton.jit(do_not_specialize=["out_stride", "most"])
def rank_kernel(
    logits_ptr,
    edited_ptr,
    sums_ptr,
    ranks_ptr,
    out_ptr,
    out_reals_ptr,
    stride,
    size,
    out_stride,
    most,
    BLOCK: tl.constexpr,
):
    """ranks [R, 2]: how many tokens, whether of the edited logits. out [R, 2 + 2 * most]: from 2 ids, then values."""
    index = tl.program_id(0)
    count = tl.minimum(tl.load(ranks_ptr + index * 2), size)
    row = logits_ptr + index.to(tl.int64) * stride
    if tl.load(ranks_ptr + index * 2 + 1) == 1:
        row = edited_ptr + index.to(tl.int64) * stride
    total = tl.load(sums_ptr + index)
    value = tl.full((), float("inf"), tl.float32)
    token = tl.full((), -1, tl.int32)
    for i in range(count):
        next_value = tl.full((), float("-inf"), tl.float32)
        next_token = tl.full((), 0x7FFFFFFF, tl.int32)
        for start in range(0, size, BLOCK):
            at = start + tl.arange(0, BLOCK)
            x = _row(row, start, size, BLOCK)
            # What comes after the one before: of equal ones the lower id first.
            after = ((x < value) | ((x == value) & (at > token))) & (at < size)
            best = tl.max(tl.where(after, x, float("-inf")), 0)
            first = tl.min(tl.where(after & (x == best), at, 0x7FFFFFFF), 0)
            better = (best > next_value) | (next_token == 0x7FFFFFFF)
            next_token = tl.where(better, first, next_token)
            next_value = tl.where(better, best, next_value)
        value = next_value
        token = next_token
        tl.store(out_ptr + index * out_stride + 2 + i, token.to(tl.int64))
        tl.store(out_reals_ptr + index * out_stride + 2 + most + i, value.to(tl.float64) - total)


@dataclass(frozen=True, slots=True)
class Edit:
    """A token's logit x becomes (x / factor when x > 0 else x * factor) - minus + plus."""

    token: int
    factor: float = 1.0
    minus: float = 0.0
    plus: float = 0.0


@dataclass(frozen=True, slots=True)
class Choice:
    """How the token of one row is drawn.

    Attributes:
        temperature: above 0; greedy is ``top_k`` 1.
        top_k: 0 switches it off.
        top_p, min_p: 1.0 and 0.0 switch them off.
        u: random number in [0, 1).
        ranks: how many of the most likely tokens are reported.
        beam: ranks are of the edited logits, and edits act on log-probabilities.
        edits: at most one for each token.
    """

    temperature: float = 1.0
    top_k: int = 1
    top_p: float = 1.0
    min_p: float = 0.0
    u: float = 0.0
    ranks: int = 0
    beam: bool = False
    edits: Sequence[Edit] = ()


@dataclass(frozen=True, slots=True)
class Drawn:
    """Attributes:
    token: or :data:`NOT_FINITE` (the row's logits have a NaN or no largest finite one), or :data:`NOTHING_LEFT`.
    logprob: of the token, before edits and temperature.
    ranks: (token, log-probability), best first, of equal ones the lower id first.
    """

    token: int
    logprob: float
    ranks: list[tuple[int, float]]


def sample(logits: torch.Tensor, choices: Sequence[Choice]) -> torch.Tensor:
    """Draw one token per row. Nothing here waits for the device; :func:`read` does.

    Args:
        logits: [R, V] float32, rows contiguous.

    Returns:
        [R, 2 + 2 * N] int64 on the device, where N is the largest ``ranks``: the token, its log-probability, N ids,
        N log-probabilities; the log-probabilities are the bits of float64.

    Raises:
        ValueError: not float32, or the rows are not contiguous.
    """
    if logits.dtype != torch.float32 or logits.stride(-1) != 1:
        raise ValueError("logits must be float32 with contiguous rows")
    rows, size = logits.shape
    most = max((c.ranks for c in choices), default=0)
    out = torch.zeros(rows, 2 + 2 * most, dtype=torch.int64, device=logits.device)
    if not rows:
        return out
    upload = Upload()
    places = [
        upload.add(c.top_k for c in choices),
        upload.add(n for c in choices for n in (c.ranks, int(c.beam))),
        upload.add(_bits("d", [x for c in choices for x in (1.0 / c.temperature, c.top_p, c.min_p, c.u)])),
        upload.add(n for i, c in enumerate(choices) for e in c.edits for n in (i, e.token, int(c.beam))),
        upload.add(_bits("f", [x for c in choices for e in c.edits for x in (e.factor, e.minus, e.plus)])),
    ]
    sent = upload.send(logits.device)
    top_k, ranks, reals, edits, values = (sent[place] for place in places)
    best = torch.empty(rows, dtype=torch.float32, device=logits.device)
    sums = torch.empty(rows, dtype=torch.float64, device=logits.device)
    look_kernel[(rows,)](logits, best, sums, logits.stride(0), size, BLOCK=BLOCK, num_warps=8)
    edited = logits
    if count := len(edits) // 3:
        edited = torch.empty_strided(logits.shape, logits.stride(), dtype=logits.dtype, device=logits.device)
        edited.copy_(logits)
        edit_kernel[(triton.cdiv(count, EDITS),)](
            edited, sums, edits, values.view(torch.float32), count, logits.stride(0), EDITS=EDITS
        )
    draw_kernel[(rows,)](
        logits,
        edited,
        best,
        sums,
        top_k,
        reals.view(torch.float64),
        out,
        out.view(torch.float64),
        logits.stride(0),
        size,
        out.stride(0),
        BLOCK=BLOCK,
        num_warps=8,
    )
    if most:
        rank_kernel[(rows,)](
            logits,
            edited,
            sums,
            ranks,
            out,
            out.view(torch.float64),
            logits.stride(0),
            size,
            out.stride(0),
            most,
            BLOCK=BLOCK,
            num_warps=8,
        )
    return out


def read(out: torch.Tensor, choices: Sequence[Choice]) -> list[Drawn]:
    """Wait for :func:`sample` and bring its result to the host: the step's one copy."""
    whole = out.cpu()
    most = (whole.shape[1] - 2) // 2
    numbers, reals = whole.tolist(), whole.view(torch.float64).tolist()
    size = [min(c.ranks, most) for c in choices]
    return [
        Drawn(ids[0], values[1], list(zip(ids[2 : 2 + n], values[2 + most : 2 + most + n], strict=True)))
        for ids, values, n in zip(numbers, reals, size, strict=True)
    ]


def _bits(kind: str, numbers: list[float]) -> array[int]:
    """Floats of 4 ("f") or 8 ("d") bytes as int32."""
    return array("i", array(kind, numbers).tobytes())
