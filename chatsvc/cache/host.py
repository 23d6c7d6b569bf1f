"""The host tier: blocks in host memory, evicted from the device pool or pinned there for a preempted sequence.

The same :class:`BlockPool` serves both tiers, and a content has the same id in both, so a chain of blocks may be found
partly here and partly there. Moves are recorded and done by the executor at the begin of the step, in this order:
out (device to host), copies on write, in (host to device), then the forward pass. A host block that a step reads is
pinned until the step is over.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from chatsvc.cache.block import Block, Content
from chatsvc.cache.index import PrefixIndex
from chatsvc.cache.pool import BlockPool


@dataclass(slots=True)
class Swapped:
    """What a preempted sequence keeps in the host tier.

    Attributes:
        pinned: host blocks of its full blocks (those that nobody else has on the device).
        tail: host block with its partial last block, or None.
        computed: tokens that were computed when it left.
    """

    pinned: list[Block]
    tail: Block | None
    computed: int

    @property
    def blocks(self) -> list[Block]:
        return self.pinned if self.tail is None else [*self.pinned, self.tail]


@dataclass(slots=True)
class _Step:
    out: dict[int, int] = field(default_factory=dict)  # host id -> device id
    into: dict[int, int] = field(default_factory=dict)  # device id -> host id
    pins: list[Block] = field(default_factory=list)
    stored: list[Block] = field(default_factory=list)
    swapped: list[Swapped] = field(default_factory=list)


class HostTier:
    def __init__(self, num_blocks: int, index: PrefixIndex) -> None:
        self.pool = BlockPool(num_blocks, index)
        self.blocks_out = 0
        self.blocks_in = 0
        self._step = _Step()  # being planned
        self._in_flight: deque[_Step] = deque()  # submitted, oldest first

    def find(self, digest: bytes, parent_id: int, tokens: bytes, extra: bytes) -> Block | None:
        return self.pool.index.find(digest, parent_id, tokens, extra)

    def holds(self, content: Content) -> Block | None:
        block = self.pool.index.holder(content.digest)
        same = block is not None and block.content is not None and block.content.content_id == content.content_id
        return block if same else None

    def keep(self, device: Block) -> None:
        """A device block is about to be evicted: its content moves here, if there is room that nobody pinned."""
        content = device.content
        assert content is not None
        held = self.holds(content)
        if held is not None:
            self.pool.ref(held)  # most recently used
            self.pool.unref(held)
        elif self.pool.num_available:
            self.pool.unref(self._bring(device, content))

    def _bring(self, device: Block, content: Content | None) -> Block:
        """Record the move of a device block to a fresh host block, which is returned with one reference."""
        block = self.pool.take()
        if content is not None:
            self.pool.store(block, content.digest, content.parent_id, content.tokens, content.extra, content.content_id)
            self._step.stored.append(block)
        self._step.out[block.id] = device.id
        return block

    def swap_out(self, full: list[Block], tail: Block | None, computed: int) -> Swapped | None:
        """Pin a sequence's blocks here: all or nothing.

        A full block that others share on the device is not moved: it is found there, or here once its last owner left.
        """
        held = {b.id: self.holds(b.content) for b in full if b.content is not None}
        moving = [b for b in full if b.content is not None and held[b.id] is None and b.ref_count == 1]
        pinned = [h for h in held.values() if h is not None]
        for block in pinned:
            self.pool.ref(block)
        if len(moving) + (tail is not None) > self.pool.num_available:
            for block in pinned:
                self.pool.unref(block)
            return None
        pinned += [self._bring(b, b.content) for b in moving]
        swapped = Swapped(pinned, self._bring(tail, None) if tail is not None else None, computed)
        self._step.swapped.append(swapped)
        return swapped

    def fetch(self, host: Block, device: Block) -> None:
        """Record the move of a host block into a device block; the host block stays until the step is over."""
        self.pool.ref(host)
        self._step.pins.append(host)
        self._step.into[device.id] = host.id

    def device_taken(self, device_id: int) -> None:
        """The device block has a new owner: what was to be fetched into it is not wanted any more."""
        self._step.into.pop(device_id, None)

    @property
    def arriving(self) -> list[Block]:
        """Host blocks whose content is moved here by the step that is planned or by one in flight."""
        return [b for step in (*self._in_flight, self._step) for b in step.stored]

    def release(self, swapped: Swapped) -> None:
        """The sequence has come back, or ended: its pins go; full blocks stay findable."""
        for block in swapped.blocks:
            self.pool.unref(block)
        swapped.pinned, swapped.tail = [], None

    def seal(self) -> tuple[tuple[tuple[int, int], ...], tuple[tuple[int, int], ...]]:
        """(out as (device, host), in as (host, device)) of the planned step, which is in flight from here on."""
        step, self._step = self._step, _Step()
        self._in_flight.append(step)
        out = tuple((device, host) for host, device in step.out.items())
        into = tuple((host, device) for device, host in step.into.items())
        self.blocks_out += len(out)
        self.blocks_in += len(into)
        return out, into

    def step_over(self, *, failed: bool) -> None:
        """The oldest step's moves are done; or nobody knows whether they are, and what they brought is not to be
        believed."""
        step = self._in_flight.popleft()
        for block in step.pins:
            self.pool.unref(block)
        if failed:
            for block in step.stored:
                self.pool.withdraw(block)
            for swapped in step.swapped:
                if swapped.tail is not None:
                    self.pool.unref(swapped.tail)
                    swapped.tail = None

    def take_back(self) -> None:
        """The newest step in flight does not happen; it moves nothing."""
        step = self._in_flight.pop()
        assert not (step.out or step.into)

    def check_integrity(self, swapped: list[Swapped]) -> None:
        """The pool is whole and every reference is somebody's pin. Raises: AssertionError."""
        self.pool.check_integrity()
        counts: dict[int, int] = {}
        pins = [b for step in (*self._in_flight, self._step) for b in step.pins]
        for block in pins + [b for s in swapped for b in s.blocks]:
            counts[block.id] = counts.get(block.id, 0) + 1
        for block in self.pool.blocks[1:]:
            assert block.ref_count == counts.get(block.id, 0), (block, counts.get(block.id, 0))
