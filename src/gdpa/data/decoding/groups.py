"""The number by which a group is known: the same in every process and for every kind of source."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np

from gdpa.data.decoding.lookup import parse_whole
from gdpa.data.decoding.rules import Mark


def groups_of(texts: Sequence[str], mark: Mark) -> np.ndarray:
    """(N,) int64; an empty text is marked."""
    whole = parse_whole(texts, ",")
    if whole is not None and (whole[0] == 1).all():
        return whole[1]
    for row, text in enumerate(texts):
        if not text:
            mark(row, "the group is empty")
    return np.fromiter(map(group_of, texts), np.int64, len(texts))


def group_of(text: str) -> int:
    """A whole number is itself; any other text is a hash of 63 bits."""
    plain = len(text) <= 20 and text.isascii() and text.removeprefix("-").isdecimal()  # int() limits the length
    if plain and str(number := int(text)) == text and -(2**63) <= number < 2**63:
        return number
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> 1
