"""Ids of values by the thousand: whole numbers, as ids often are, without a Python object each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from itertools import repeat

import numpy as np

from gdpa.data.vocabulary import MISSING, UNSEEN, is_whole, other_flags

DIGITS = 18  # of the longest number that fits int64 for certain, and so can be parsed without a look at its value
LONG = 15  # more digits than this, and a float may be written with an exponent
DENSE = 1 << 20  # entries of a table that may be mostly empty


class Lookup:
    """From values to ids, both for text and for whole numbers, which stand for their usual text."""

    def __init__(self, ids: Mapping[str, int]) -> None:
        self.ids = ids
        self.get = ids.get

    def __reduce__(self) -> tuple[type[Lookup], tuple[Mapping[str, int]]]:
        return Lookup, (self.ids,)

    def texts(self, texts: Sequence[str]) -> np.ndarray:
        """The ids of texts (N,); those that are not found as they are may be known by another text."""
        found = np.fromiter(map(self.get, texts, repeat(UNSEEN)), np.int64, len(texts))
        if "" in texts:
            found[[i for i, text in enumerate(texts) if not text]] = MISSING
        unseen = found == UNSEEN
        if unseen.any() and (others := self._others(texts)):
            at = unseen.nonzero()[0].tolist()
            found[at] = list(map(others.get, map(texts.__getitem__, at), repeat(UNSEEN)))
        return found

    def _others(self, texts: Sequence[str]) -> Mapping[str, int]:
        """Ids by other texts of the same values, where ``texts`` look like having such: one look at all of them takes
        next to no time."""
        joined = "\n".join(texts) + "\n"
        return self._floats if ".0\n" in joined or "e+" in joined else self._flags

    @cached_property
    def _floats(self) -> dict[str, int]:
        """Ids by the other texts of whole numbers, 7.0 for 7, and of booleans. A call for each entry would take longer
        than all else."""
        whole = [(text, i) for text, i in self.ids.items() if is_whole(text)]
        large = {name: i for text, i in whole if len(text) > LONG and (name := _exponential(text))}
        signed = {"-0.0": self.ids["0"]} if "0" in self.ids else {}
        return {f"{text}.0": i for text, i in whole} | large | signed | self._flags

    @cached_property
    def _flags(self) -> dict[str, int]:
        return other_flags(self.ids)

    @cached_property
    def _numbers(self) -> tuple[np.ndarray, np.ndarray, np.ndarray | None]:
        """The values that are whole numbers, sorted, their ids, and a table by value unless that would be too large."""
        pairs = [(int(text), i) for text, i in {**self._flags, **self.ids}.items() if is_whole(text)]
        keys, ids = (np.array(column, dtype=np.int64) for column in (zip(*pairs, strict=True) if pairs else ((), ())))
        order = np.argsort(keys)
        keys, ids = keys[order], ids[order]
        if not len(keys) or keys[0] < 0 or keys[-1] >= DENSE + 4 * len(keys):
            return keys, ids, None
        table = np.full(int(keys[-1]) + 2, UNSEEN, dtype=np.int64)  # one more, for what is beyond
        table[keys] = ids
        return keys, ids, table

    def numbers(self, values: np.ndarray) -> np.ndarray:
        """The ids of whole numbers (N,)."""
        keys, ids, table = self._numbers
        if table is not None:
            last = len(table) - 1
            return table[np.where((values < 0) | (values > last), last, values)]
        if not len(keys):
            return np.full(len(values), UNSEEN, dtype=np.int64)
        at = np.minimum(np.searchsorted(keys, values), len(keys) - 1)
        return np.where(keys[at] == values, ids[at], UNSEEN)


def _exponential(text: str) -> str:
    """1e+16 for 10000000000000000, "" for a number that no float has."""
    number = float(text)
    return np.format_float_scientific(number, trim="-", exp_digits=2) if int(number) == int(text) else ""


def parse_whole(texts: Sequence[str], separator: str) -> tuple[np.ndarray, np.ndarray] | None:
    """(how many entries each text has, all of them as int64) of lists of whole numbers that are not negative; None if
    an entry is anything else."""
    first = next(filter(None, texts), "")
    if first and not first[0].isdecimal():  # text, as one look tells
        return None
    lengths = np.fromiter(map(len, texts), np.int64, len(texts))
    joined = separator.join([text for text in texts if text] if (filled := lengths > 0).sum() < len(texts) else texts)
    if not joined or len(separator) > 1 or not joined.isascii():
        return None if joined else (np.zeros(len(texts), np.int64), np.zeros(0, np.int64))
    raw = np.frombuffer(joined.encode("ascii"), dtype=np.uint8)
    digits = raw - np.uint8(ord("0"))  # wraps, so that what is none is above 9
    ends = (raw == ord(separator)).nonzero()[0]
    if int((digits > 9).sum()) != len(ends) or separator.isdecimal():
        return None
    starts = np.concatenate([[0], ends + 1])
    widths = np.concatenate([ends, [len(raw)]]) - starts
    most = int(widths.max())
    if not int(widths.min()) or most > DIGITS or (widths[raw.take(starts) == ord("0")] > 1).any():
        return None
    counts = np.zeros(len(texts), dtype=np.int64)
    counts[filled] = np.diff(np.searchsorted(starts, np.cumsum(lengths[filled] + 1)), prepend=0)
    return counts, _values(digits, starts, widths, most)


def _values(digits: np.ndarray, starts: np.ndarray, widths: np.ndarray, most: int) -> np.ndarray:
    """Digit by digit, all numbers at once; those that have ended are left alone."""
    found = digits.take(starts).astype(np.int64)
    for place in range(1, most):
        going = (widths > place).nonzero()[0]
        found[going] = found[going] * 10 + digits.take(starts[going] + place)
    return found
