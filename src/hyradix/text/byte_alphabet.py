"""The alphabet in which byte-level tokenizers write bytes, and bytes of other kinds of tokens.

Owns: the map from a token's written form to the bytes it stands for.
Read next: ``detokenizer.py``.
"""

from __future__ import annotations

import re

_BYTE_TOKEN = re.compile(r"<0x([0-9A-F]{2})>")


def _alphabet() -> dict[str, int]:
    """GPT-2's: printable Latin-1 bytes stand for themselves, the others from U+0100 on."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in printable]
    alphabet = {chr(byte): byte for byte in printable}
    return alphabet | {chr(0x100 + i): byte for i, byte in enumerate(others)}


_BYTE_OF = _alphabet()


def token_to_bytes(token: str, *, is_byte_level: bool) -> bytes:
    """Bytes of a token's written form.

    A byte-level token with a character outside the alphabet (an added token) is plain text, as
    in the library's decoder. Otherwise ``<0x0A>`` is a byte and U+2581 a space.
    """
    if is_byte_level:
        try:
            return bytes([_BYTE_OF[char] for char in token])
        except KeyError:
            return token.encode()
    if match := _BYTE_TOKEN.fullmatch(token):
        return bytes([int(match.group(1), 16)])
    return token.replace("\u2581", " ").encode()
