"""Seeds of requests: 64-bit, signed as OpenAI's."""

from __future__ import annotations

import hashlib
import itertools
import secrets


class Seeds:
    """Args:
    base: of the seeds of prompts that bring none: the k-th of them (from 0) gets ``derived(base, k)``; None: random.
    """

    def __init__(self, base: int | None = None) -> None:
        self._base = base
        self._served = itertools.count()

    def of(self, seed: int | None, position: int = 0) -> int:
        """The seed of a request's prompt number ``position``; equal prompts of one request are independent samples."""
        if seed is not None:
            return derived(seed, position)
        if self._base is not None:
            return derived(self._base, next(self._served))
        return secrets.randbits(63)  # valid both as an int64 and as an unsigned number


def derived(seed: int, i: int) -> int:
    """``seed`` itself for 0; else the first eight bytes of BLAKE2b over (seed, i), all three as little-endian int64."""
    if i == 0:
        return seed
    both = seed.to_bytes(8, "little", signed=True) + i.to_bytes(8, "little", signed=True)
    return int.from_bytes(hashlib.blake2b(both, digest_size=8).digest(), "little", signed=True)
