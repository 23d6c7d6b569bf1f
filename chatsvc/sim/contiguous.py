"""Contiguous reservation with iteration-level batching: the PagedAttention paper's three models of Orca.

Every sequence gets one extent at its admission and keeps it to its end. How long it is (paper, section 6.1):

    max     the model's longest sequence
    pow2    prompt + answer rounded up to a power of two (the answer's length is guessed within a factor of two)
    oracle  prompt + answer (the length is known beforehand: no real system can do this)

Extents come from a buddy allocator (Knuth, TAOCP 1, 2.5), as the paper assumes for Orca.
"""

from __future__ import annotations

from collections.abc import Callable

from chatsvc.cache.manager import BlockManager, BlockTable, Match

Reservation = Callable[[int, int, int], int]


def reserve_max(prompt: int, answer: int, limit: int) -> int:
    return limit


def reserve_2048(prompt: int, answer: int, limit: int) -> int:
    """The longest sequence of the paper's models; enough for its traces."""
    return 2048


def reserve_pow2(prompt: int, answer: int, limit: int) -> int:
    return min(limit, prompt + (1 << (answer - 1).bit_length()))


def reserve_oracle(prompt: int, answer: int, limit: int) -> int:
    return prompt + answer


class Buddy:
    """Extents of 2**k units out of ``size`` units. Each operation is O(log size)."""

    def __init__(self, size: int) -> None:
        self._free: list[dict[int, None]] = [{} for _ in range(size.bit_length())]
        start = 0
        for order in reversed(range(size.bit_length())):
            if size >> order & 1:
                self._free[order][start] = None
                start += 1 << order
        self._roots = {s: order for order, free in enumerate(self._free) for s in free}

    @staticmethod
    def order(units: int) -> int:
        return (units - 1).bit_length()

    def fits(self, units: int) -> bool:
        return any(self._free[self.order(units) :])

    def take(self, units: int) -> int:
        """Start of an extent of ``2**order(units)`` units. Raises: IndexError when none is free."""
        want = self.order(units)
        order = next((k for k in range(want, len(self._free)) if self._free[k]), None)
        if order is None:
            raise IndexError(f"no extent of {units} units")
        start, _ = self._free[order].popitem()
        while order > want:
            order -= 1
            self._free[order][start + (1 << order)] = None
        return start

    def give(self, start: int, units: int) -> None:
        """Give an extent back; free neighbours of equal size are joined, but never across the pool's root extents."""
        order = self.order(units)
        root = max(s for s in self._roots if s <= start)
        while order < self._roots[root]:
            buddy = root + ((start - root) ^ (1 << order))
            if buddy not in self._free[order]:
                break
            del self._free[order][buddy]
            start, order = min(start, buddy), order + 1
        self._free[order][start] = None


class ReservingManager(BlockManager):
    """A block manager that hands out one extent for each sequence. Nothing is shared or found again."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        super().__init__(num_blocks, block_size, prefix_caching=False)
        self._buddy = Buddy(num_blocks)
        self._wanted: dict[int, int] = {}
        self._extents: dict[int, tuple[int, int]] = {}
        self.reserved_tokens = 0
        """Tokens asked for by those who hold an extent; the extents are larger by the allocator's rounding."""

    def expect(self, table: BlockTable, tokens: int) -> None:
        """To be called for each sequence before it is scheduled: how much it reserves."""
        self._wanted[id(table)] = tokens

    def forget(self, table: BlockTable) -> None:
        """The sequence is over."""
        del self._wanted[id(table)]

    def reservation(self, table: BlockTable) -> int:
        return self._wanted[id(table)]

    def missing(self, table: BlockTable, num_tokens: int, match: Match | None = None, computed: int = 0) -> int:
        if table.blocks:
            return 0
        units = self.blocks_for(self._wanted[id(table)])
        return 1 << Buddy.order(units) if self._buddy.fits(units) else self.pool.num_available + 1

    def allocate(self, table: BlockTable, num_tokens: int, match: Match | None = None, computed: int = 0) -> bool:
        assert num_tokens <= self._wanted[id(table)], "a sequence outgrows its reservation"
        if table.blocks:
            return True
        if self.missing(table, num_tokens) > self.pool.num_available:
            return False
        units = self.blocks_for(self._wanted[id(table)])
        start = self._buddy.take(units)
        self._extents[id(table)] = (start, units)
        self.reserved_tokens += self._wanted[id(table)]
        for block in self.pool.blocks[start + 1 : start + 1 + (1 << Buddy.order(units))]:
            self.pool.ref(block)
            table.blocks.append(block)
        return True

    def free(self, table: BlockTable, *, ended: bool = False) -> None:
        if table.blocks:
            self._buddy.give(*self._extents.pop(id(table)))
            self.reserved_tokens -= self._wanted[id(table)]
        super().free(table)
