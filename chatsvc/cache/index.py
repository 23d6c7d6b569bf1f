"""Prefix index: finds the block that holds a given run of tokens after a given history.

Look-up goes by a chain of seeded xxh3-128 digests; whatever is found is then compared (parent content, tokens, extra
keys). A digest collision is therefore a miss, never a wrong answer. The seed is a secret, so that nobody outside can
construct collisions or predict digests.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterator, Sequence
from itertools import count

import xxhash

from chatsvc.cache.block import Block, Content

ROOT_ID = 0


def encode_extra(keys: Sequence[tuple[str, str]]) -> bytes:
    """Tagged, length-prefixed: no two different lists of keys encode alike."""
    out = bytearray()
    for tag, value in keys:
        for part in (tag.encode(), value.encode()):
            out += struct.pack("<I", len(part)) + part
    return bytes(out)


class PrefixIndex:
    """``ids`` is shared between tiers, so that a content id means the same everywhere and is never reused."""

    def __init__(self, secret: bytes, ids: Iterator[int] | None = None) -> None:
        self._seed = int.from_bytes(hashlib.blake2b(secret, digest_size=8, person=b"chatsvc-kv").digest(), "little")
        self._blocks: dict[bytes, Block] = {}
        self._ids = ids if ids is not None else count(ROOT_ID + 1)

    def __len__(self) -> int:
        return len(self._blocks)

    def __iter__(self) -> Iterator[Block]:
        return iter(self._blocks.values())

    def digest(self, parent: bytes, tokens: bytes) -> bytes:
        """Digest of a block from its parent's digest (or, for the first block, the encoded extra keys)."""
        return xxhash.xxh3_128_digest(struct.pack("<I", len(parent)) + parent + tokens, seed=self._seed)

    def find(self, digest: bytes, parent_id: int, tokens: bytes, extra: bytes) -> Block | None:
        block = self._blocks.get(digest)
        if block is None or block.content is None:
            return None
        c = block.content
        same = c.parent_id == parent_id and c.tokens == tokens and c.extra == extra
        return block if same else None

    def holder(self, digest: bytes) -> Block | None:
        """Whoever stands under this digest, compared or not."""
        return self._blocks.get(digest)

    def add(
        self, block: Block, digest: bytes, parent_id: int, tokens: bytes, extra: bytes, content_id: int | None = None
    ) -> Content:
        """Make ``block`` findable, under a new content id unless it has one from another tier.

        The caller has made sure that nothing stands under ``digest``.
        """
        assert digest not in self._blocks and block.content is None
        number = content_id if content_id is not None else next(self._ids)
        block.content = Content(number, parent_id, tokens, extra, digest)
        self._blocks[digest] = block
        return block.content

    def remove(self, block: Block) -> Content:
        content = block.content
        assert content is not None and self._blocks.get(content.digest) is block
        del self._blocks[content.digest]
        block.content = None
        return content
