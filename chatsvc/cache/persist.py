"""Which blocks to save, where they are, and how saved ones become cached blocks again. No files, no tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from chatsvc.cache.block import Block, Content
from chatsvc.cache.index import ROOT_ID
from chatsvc.cache.manager import BlockManager
from chatsvc.cache.pool import BlockPool

SLICE = 1000  # blocks looked at in one go: a fraction of a millisecond


@dataclass(frozen=True, slots=True)
class Candidate:
    """A content worth saving, and how hot it is: higher is hotter."""

    heat: tuple[int, int, int]
    content: Content


def candidates(manager: BlockManager) -> Iterator[list[Candidate]]:
    """Every content that somebody has used to the end, in slices between which the loop may turn.

    Hottest are blocks in use on the device, by the number of their users; then cached blocks, the most recently used
    first; then the host tier's. A block that only its first user has read so far is no candidate: a sequence whose
    numbers turn out not to be finite takes it back.
    """
    for depth, pool in enumerate(manager.tiers):
        for at in range(1, len(pool.blocks), SLICE):
            yield [
                Candidate((-depth, b.ref_count, b.last_use), b.content)
                for b in pool.blocks[at : at + SLICE]
                if b.content is not None and b.last_use
            ]


def choose(found: Iterable[Candidate], room: int, size: Callable[[Content], int]) -> list[Content]:
    """The hottest contents that ``room`` bytes hold; each after its parent, without which it could not be found."""
    ranked = sorted(found, key=lambda c: c.heat, reverse=True)
    by_id = {c.content.content_id: c.content for c in ranked}
    chosen: dict[int, Content] = {}
    lost: set[int] = set()
    for candidate in ranked:
        chain: list[Content] = []
        at = candidate.content.content_id
        while at != ROOT_ID and at not in chosen:
            content = by_id.get(at)
            if content is None or at in lost:
                lost.update(c.content_id for c in chain)
                chain = []
                break
            chain.append(content)
            at = content.parent_id
        for content in reversed(chain):
            room -= size(content)
            if room < 0:
                return list(chosen.values())
            chosen[content.content_id] = content
    return list(chosen.values())


def places(manager: BlockManager, contents: Iterable[Content]) -> dict[int, tuple[int, int]]:
    """Content id to (tier, block id), where the bytes are once the steps submitted so far are done.

    Those that are nowhere any more are missing, and those of which the step in flight has still to show that it could
    bring them.
    """
    out: dict[int, tuple[int, int]] = {}
    unsettled = manager.unsettled()
    for content in contents:
        for tier, pool in enumerate(manager.tiers):
            block = pool.index.holder(content.digest)
            same = block is not None and block.content is not None and block.content.content_id == content.content_id
            if block is not None and same and block.last_use and content.content_id not in unsettled:
                out[content.content_id] = (tier, block.id)
                break
    return out


@dataclass(frozen=True, slots=True)
class Saved:
    """A block from a file: ``key`` names it for its children, ``parent`` is its parent's key (-1: none)."""

    key: int
    parent: int
    tokens: bytes
    extra: bytes


class Adoption:
    """Makes saved blocks cached ones: reserve, write their bytes, then ``settle``. ``close`` it in any case.

    They are given in hot-to-cold order, and the pools end up with that order of eviction. Blank blocks only: nothing is
    evicted. Identities are made anew, by the same digests as everybody's.
    """

    def __init__(self, manager: BlockManager) -> None:
        self._manager = manager
        self._known: dict[int, Content] = {}
        self._held: list[tuple[BlockPool, Block]] = []

    @property
    def contents(self) -> frozenset[int]:
        return frozenset(c.content_id for c in self._known.values())

    @property
    def room(self) -> int:
        return sum(pool.num_free for pool in self._manager.tiers)

    def reserve(self, count: int) -> list[tuple[int, Block]]:
        """(tier, block) of up to ``count`` blank blocks, the device's first."""
        out: list[tuple[int, Block]] = []
        for tier, pool in enumerate(self._manager.tiers):
            for _ in range(min(count - len(out), pool.num_free)):
                block = pool.take()
                self._held.append((pool, block))
                out.append((tier, block))
        return out

    def settle(self, saved: Sequence[Saved], blocks: Sequence[tuple[int, Block]]) -> None:
        """The bytes of ``saved`` are in ``blocks``: they may be found from now on."""
        for one, (tier, block) in zip(saved, blocks, strict=True):
            before = self._known.get(one.parent)
            if before is None and one.parent >= 0:
                continue
            pool = self._manager.tiers[tier]
            parent_id = before.content_id if before is not None else ROOT_ID
            digest = pool.index.digest(before.digest if before is not None else one.extra, one.tokens)
            twins = (p.index.find(digest, parent_id, one.tokens, one.extra) for p in self._manager.tiers)
            twin = next((t for t in twins if t is not None), None)
            content = twin.content if twin is not None else None
            self._known[one.key] = content or pool.store(block, digest, parent_id, one.tokens, one.extra)

    def close(self) -> None:
        """Give everything up, the coldest first; what was not settled becomes blank again."""
        while self._held:
            pool, block = self._held.pop()
            pool.unref(block)
