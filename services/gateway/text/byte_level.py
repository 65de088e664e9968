"""The byte behind each character of a byte-level vocabulary. Pure.

Byte-level BPE writes its vocabulary in 256 printable characters, one a byte; GPT-2's `bytes_to_unicode` is where
the mapping comes from.
"""

from __future__ import annotations


def byte_of_char() -> dict[str, int]:
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    table = {chr(byte): byte for byte in printable}
    others = (byte for byte in range(256) if byte not in set(printable))
    return table | {chr(256 + offset): byte for offset, byte in enumerate(others)}


_BYTE_OF_CHAR = byte_of_char()


def token_bytes(token: str) -> bytes:
    """The bytes a vocabulary entry stands for. One with a character outside the alphabet stands for itself, as in
    the `tokenizers` decoder."""
    try:
        return bytes([_BYTE_OF_CHAR[char] for char in token])
    except KeyError:
        return token.encode()
