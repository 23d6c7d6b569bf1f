"""The block map as one tenant may see it: which blocks are used and how often, but nobody else's requests by name."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

OTHER = "other"


class OwnOnly:
    """Called with each event of one watch of the block map, in order, and with snapshots of what they add up to.

    Sequences of others are left out; as owners of blocks they are ``other``, each once, so that the counts still add
    up. Hashes stay: they are digests under the server's secret, and no two tenants have one in common.
    """

    def __init__(self, mine: Callable[[str], bool]) -> None:
        """``mine``: whether the request with this id is the tenant's."""
        self._mine = mine
        self._shown: set[str] = set()  # a sequence that is gone is nobody's any more

    def __call__(self, view: dict[str, Any]) -> dict[str, Any]:
        out = dict(view)
        out["blocks"] = [self._block(b) for b in view["blocks"]]
        out["sequences"] = [s for s in view["sequences"] if self._name(s["id"]) != OTHER]
        if "gone" in view:
            out["gone"] = self._gone(view["gone"])
        return out

    def _block(self, block: dict[str, Any]) -> dict[str, Any]:
        owners = block["owners"]
        return {**block, "owners": [self._name(o) for o in owners]} if owners else block

    def _name(self, sequence: str) -> str:
        if sequence in self._shown:
            return sequence
        if not self._mine(sequence.rpartition(":")[0]):
            return OTHER
        self._shown.add(sequence)
        return sequence

    def _gone(self, names: Iterable[str]) -> list[str]:
        gone = [name for name in names if name in self._shown]
        self._shown.difference_update(gone)
        return gone
