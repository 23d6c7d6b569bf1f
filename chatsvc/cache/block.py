"""A physical KV block and the lists in which unowned blocks stand.

::

    used    ref_count > 0              named by ref_count block tables
    cached  ref_count = 0, content     in the `cached` list, findable, first to be evicted at the head (least recent)
    free    ref_count = 0, no content  in the `blank` list, taken before any cached block
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Content:
    """Identity of a full block: what was written into it and after what.

    Attributes:
        content_id: never reused; equal contents with equal parents and extra keys have equal ids while findable.
        parent_id: content id of the block before it, 0 for the first block of a sequence.
        tokens: token ids as packed int32.
        extra: encoded extra keys (tenant salt, adapter); only the first block of a chain carries them, the others
            inherit them through ``parent_id``.
        digest: seeded xxh3-128 of the chain up to here: the look-up key, never the proof.
    """

    content_id: int
    parent_id: int
    tokens: bytes
    extra: bytes
    digest: bytes


class Block:
    """One block of the pool. ``prev``/``next`` belong to the list in which it stands.

    ``last_use`` is the pool's clock when a table last gave it up with its content, 0 before that: then only whoever
    computed it has read it, and may yet find that it is no good. ``hits`` is how many requests found the content.
    """

    __slots__ = ("content", "hits", "id", "last_use", "next", "prev", "ref_count")

    def __init__(self, block_id: int) -> None:
        self.id = block_id
        self.ref_count = 0
        self.last_use = 0
        self.hits = 0
        self.content: Content | None = None
        self.prev: Block | None = None
        self.next: Block | None = None

    def __repr__(self) -> str:
        return f"Block({self.id}, ref={self.ref_count}, content={self.content and self.content.content_id})"


class BlockList:
    """Intrusive doubly linked list: append, pop from the head and remove from the middle in O(1)."""

    def __init__(self) -> None:
        self._root = Block(-1)
        self._root.prev = self._root.next = self._root
        self._len = 0

    def __len__(self) -> int:
        return self._len

    def __iter__(self) -> Iterator[Block]:
        block = self._root.next
        while block is not None and block is not self._root:
            yield block
            block = block.next

    def append(self, block: Block) -> None:
        assert block.prev is None and block.next is None, f"{block} stands in a list already"
        last = self._root.prev
        assert last is not None
        block.prev, block.next = last, self._root
        last.next = self._root.prev = block
        self._len += 1

    def remove(self, block: Block) -> None:
        assert block.prev is not None and block.next is not None, f"{block} stands in no list"
        block.prev.next, block.next.prev = block.next, block.prev
        block.prev = block.next = None
        self._len -= 1

    def pop(self) -> Block:
        """The head. Raises: IndexError when empty."""
        block = self._root.next
        if block is None or block is self._root:
            raise IndexError("empty block list")
        self.remove(block)
        return block
