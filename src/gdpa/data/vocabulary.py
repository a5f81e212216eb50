"""From the values of a table to ids, counted on the training rows alone.

0          MISSING: an empty field
1          UNSEEN: a value that occurs less than min_count times in the training rows, or not at all
2, 3, ...  the others, the most frequent first
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gdpa.data.schema import Schema

MISSING = 0
"""The id of an empty field, and of a gap in a history."""
UNSEEN = 1
"""The id of a value that is rare in the training file, or not in it."""
FIRST = 2


@dataclass(frozen=True)
class Vocabularies:
    """One mapping from value to id per name. Memory grows with the number of distinct values, not of rows."""

    ids: Mapping[str, Mapping[str, int]]

    @classmethod
    def build(cls, source: Any, schema: Schema) -> Vocabularies:
        """Reads the whole training data once, ``source`` being whatever TableLog takes. Columns that share a vocabulary
        are counted together."""
        from gdpa.data.sources import open_source
        from gdpa.data.tables.counting import count_values

        return cls.number(count_values(open_source(source), schema), schema.min_count)

    @classmethod
    def number(cls, counts: Mapping[str, Counter[str]], min_count: int) -> Vocabularies:
        return cls({name: _number(count, min_count) for name, count in counts.items()})

    def sizes(self) -> dict[str, int]:
        """How many ids there are of each name, MISSING and UNSEEN included, for the embedding tables."""
        return {name: FIRST + len(ids) for name, ids in self.ids.items()}

    def id(self, name: str, value: str) -> int:
        ids = self.ids[name]
        if not value:
            return MISSING
        return ids.get(value, ids.get(known_as(value), other_flags(ids).get(value, UNSEEN)))

    def save(self, path: str | Path) -> None:
        """As JSON, the values in the order of their ids."""
        Path(path).write_text(json.dumps({name: list(ids) for name, ids in self.ids.items()}), encoding="utf-8")

    @classmethod
    def load(cls, path: str | Path) -> Vocabularies:
        """What ``save`` has written; a ValueError names a file that contains something else."""
        try:
            saved = json.loads(Path(path).read_text(encoding="utf-8"))
        except ValueError as error:  # also: not UTF-8
            raise ValueError(f"{str(path)!r} does not contain vocabularies: it is not JSON ({error})") from error
        lists = list(saved.values()) if isinstance(saved, dict) else [None]
        if not all(isinstance(values, list) and all(isinstance(v, str) for v in values) for values in lists):
            raise ValueError(f"{str(path)!r} does not contain vocabularies: a list of strings for each name")
        return cls({name: {value: i for i, value in enumerate(values, FIRST)} for name, values in saved.items()})


def check_names(vocabularies: Vocabularies, schema: Schema) -> None:
    """Refuses vocabularies that lack one which the columns of ``schema`` need."""
    if not isinstance(vocabularies, Vocabularies):
        raise TypeError(f"vocabularies must be gdpa.data.Vocabularies, not {vocabularies!r}")
    if missing := sorted(set(schema.vocabularies) - set(vocabularies.ids)):
        raise ValueError(f"vocabularies lacks {', '.join(missing)}; it has {', '.join(vocabularies.ids) or 'none'}")


def _number(count: Counter[str], min_count: int) -> dict[str, int]:
    """By falling count, then by value, so that the ids do not depend on the order of the rows."""
    known: Counter[str] = Counter()
    for value, n in count.items():
        known[known_as(value)] += n
    kept = sorted((-n, value) for value, n in known.items() if n >= min_count and value)
    return {value: i for i, (_, value) in enumerate(kept, FIRST)}


LARGE = re.compile(r"-?[1-9](\.[0-9]*[1-9])?e\+[0-9]{2}")
"""How pandas and Arrow write large floats: 1e+16. Without the sign it might as well be the hash of something."""


def known_as(text: str) -> str:
    """7.0 is known as 7: so pandas writes whole numbers of a column with gaps, and so does Parquet hold them. -0.0 is
    0, and 1e+16 the number that it stands for, if int64 has it."""
    if text.endswith(".0"):
        return text[:-2] if is_whole(text[:-2]) else "0" if text == "-0.0" else text
    if "e+" in text and LARGE.fullmatch(text) and (number := float(text)).is_integer():
        return whole if is_whole(whole := str(int(number))) else text
    return text


WORDS = (("False", "True"), ("false", "true"), ("FALSE", "TRUE"))
"""Booleans as they are written: by pandas; by Arrow, polars and databases; by R and spreadsheets."""
FLAGS = (*WORDS, ("0", "1"), ("0.0", "1.0"))
"""Also as numbers, of which the last are those of a column with gaps."""


def other_flags(ids: Mapping[str, int]) -> dict[str, int]:
    """Ids by the other texts of booleans, if ``ids`` has nothing else: a word or a number of its own stays what it
    is."""
    if not ids or len(ids) > 2:
        return {}
    for own in FLAGS:
        if set(ids) <= set(own):
            pairs = [pair for other in FLAGS if other is not own for pair in zip(own, other, strict=True)]
            return {text: ids[known] for known, text in pairs if known in ids}
    return {}


def is_whole(text: str) -> bool:
    """Whether it is how a number of int64 is usually written: 7 and -7, but neither 07 nor +7."""
    digits = text.removeprefix("-")
    if not (digits.isascii() and digits.isdecimal() and len(digits) <= 19):
        return False
    return (digits[0] != "0" or text == "0") and -(2**63) <= int(text) < 2**63
