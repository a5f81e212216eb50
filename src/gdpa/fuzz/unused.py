"""Rows that no sequence uses: the ends of slots that are longer than their sequence, and rows after the last slot."""

from __future__ import annotations

from dataclasses import replace
from random import Random

from gdpa.fuzz import lengths
from gdpa.testing.cases import Case

MOST_SPARE = 40  # rows after the last sequence: some tiles of the smallest size, some of none


def draw_used(rng: Random, layout: str, same_lengths: bool) -> tuple[bool, bool]:
    """Whether seqused_q, and seqused_k, are given. The API takes them with packed queries, and with keys wherever one
    of the sides is packed."""
    q, k = rng.random() < 0.2, rng.random() < 0.2
    used_q = q and layout.startswith("packed")
    return used_q, used_q if same_lengths else k and "packed" in layout


def draw(
    rng: Random, case: Case, used: tuple[bool, bool], rounded: tuple[bool, bool], same_lengths: bool,
    tiles: tuple[int, ...],
) -> Case:  # fmt: skip
    """``case`` with the lengths that it has as slots, of which sequences use a part, and with spare rows."""
    len_q, len_k = (_part(rng, n, tiles) for n in (case.len_q, case.len_k))
    spare_q, spare_k = (_spare(rng, n, r) for n, r in zip((case.len_q, case.len_k), rounded, strict=True))
    if same_lengths:
        len_k, spare_k = len_q, spare_q
    if used[0]:
        case = replace(case, len_q=len_q, slots_q=case.len_q)
    if used[1]:
        case = replace(case, len_k=len_k, slots_k=case.len_k)
    return replace(case, spare=(spare_q if case.packed_q else 0, spare_k if case.packed_k else 0))


def _part(rng: Random, slots: tuple[int, ...], tiles: tuple[int, ...]) -> tuple[int, ...]:
    """Of each slot all, none, all but a row, as many as a tile has, or any number."""
    return tuple(
        rng.choice([n, 0, max(n - 1, 0), lengths.edge(rng, tiles, n), rng.randint(0, n), rng.randint(0, n)])
        for n in slots
    )


def _spare(rng: Random, some: tuple[int, ...], rounded: bool) -> int:
    """Mostly none; the total stays a multiple of 16, or none."""
    n = rng.choice([1, rng.randint(1, MOST_SPARE)])
    return lengths.settle([*some, n], rounded)[-1] if rng.random() < 0.15 else 0
