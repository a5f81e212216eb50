"""The number by which a group is known: the same in every process and for every kind of source."""

from __future__ import annotations

import hashlib


def group_of(text: str) -> int:
    """A whole number is itself; any other text is a hash of 63 bits."""
    if text.isascii() and text.isdecimal() and len(text) < 19 and (text[0] != "0" or text == "0"):
        return int(text)  # nearly always
    plain = len(text) <= 20 and text.isascii() and text.removeprefix("-").isdecimal()  # int() limits the length
    if plain and str(number := int(text)) == text and -(2**63) <= number < 2**63:
        return number
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> 1
