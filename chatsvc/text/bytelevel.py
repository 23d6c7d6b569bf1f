"""GPT-2's byte-level alphabet: every byte is written as one printable character (Radford et al., 2019)."""

from __future__ import annotations


def _table() -> dict[str, int]:
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    table = {chr(byte): byte for byte in printable}
    others = (byte for byte in range(256) if byte not in set(printable))
    table.update({chr(0x100 + i): byte for i, byte in enumerate(others)})
    return table


#: character -> byte; 256 entries.
CHAR_TO_BYTE = _table()
#: byte -> character, index is the byte.
BYTE_TO_CHAR = "".join(sorted(CHAR_TO_BYTE, key=CHAR_TO_BYTE.__getitem__))


def to_bytes(token: str) -> bytes | None:
    """The bytes a vocabulary entry stands for; None when it is not written in the alphabet."""
    try:
        return bytes(map(CHAR_TO_BYTE.__getitem__, token))
    except KeyError:
        return None
