"""The number by which a group is known: the same in every process and for every kind of source."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np

from gdpa.data.decoding.lookup import parse_whole
from gdpa.data.decoding.rules import Mark
from gdpa.data.vocabulary import is_whole, known_as


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
    """A whole number is itself, also where it is written 7.0, as for ids; any other text is a hash of 63 bits."""
    text = known_as(text)
    if is_whole(text):
        return int(text)
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> 1
