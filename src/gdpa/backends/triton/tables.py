"""Host side of functions and masks of positions: their kernel arguments, Tables and Numbers (device/places.py)."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from gdpa.backends.triton.launching import NARROW
from gdpa.device.places import Numbers, Tables, odd
from gdpa.functions.places.program import SMALL_ROWS
from gdpa.problem import Operands, Problem, kept

MOST_COPIES = 1024
ENTRIES_OF_COPIES = 2**20  # 4 MiB of them stay in the cache that does the additions


def learned_lookups(problem: Problem) -> int:
    """For how many lookups in tables the function has derivatives."""
    placed = problem.activation.placed
    return 0 if placed is None else len(placed.learned)


@dataclass(frozen=True)
class LearnedTables:
    """Buffers in which a backward adds up the gradients of tables: several copies of a small table, so that programs
    and lanes do not wait for each other at its entries."""

    gradients: tuple[Tensor | None, ...] = ()  # (copies, *shape) for each table; empty if they are not wanted
    copies: int = 1
    lookups: int = 0

    @classmethod
    def of(cls, problem: Problem, dtables: Sequence[Tensor | None]) -> LearnedTables:
        lookups = learned_lookups(problem)
        if not lookups or not dtables:
            return cls(lookups=lookups)
        largest = max(t.numel() for t in dtables if t is not None)
        copies = max(1, min(MOST_COPIES, ENTRIES_OF_COPIES // max(largest, 1)))
        copies = 1 << (copies.bit_length() - 1)  # a power of two
        made = (
            None if t is None else torch.zeros(copies, *t.shape, dtype=torch.float32, device=t.device) for t in dtables
        )
        return cls(tuple(made), copies, lookups)

    def add_to(self, dtables: Sequence[Tensor | None], factor: float = 1.0) -> None:
        """Add what the copies have to ``dtables``, times ``factor``."""
        for into, made in zip(dtables, self.gradients, strict=False):
            if into is not None and made is not None:
                into.add_(made.sum(0), alpha=factor)


NOTHING_LEARNED = LearnedTables()


def places(problem: Problem, x: Operands, learn: LearnedTables = NOTHING_LEARNED) -> tuple[Any, Any]:
    """(Tables, Numbers), as kernels of placed functions and of masks take them; (None, None) for others."""
    if not problem.placed:
        return None, None
    return _places(problem, x, learn) if x.tables else fixed_places(problem)


def _places(problem: Problem, x: Operands, learn: LearnedTables) -> tuple[Any, Any]:
    own, of_mask = x.tables[: problem.n_tables], x.tables[problem.n_tables :]
    sizes, mask_sizes = (tuple(tuple(map(odd, t.shape)) for t in tables) or None for tables in (own, of_mask))
    tables = Tables(tuple(own) or None, tuple(of_mask) or None, learn.gradients or None)
    slots = odd(0 if problem.packed_q else problem.rows_q), odd(0 if problem.packed_k else problem.rows_k)
    small = odd(0) if largest_position(problem) <= SMALL_ROWS else None
    heads = odd(problem.first_head), odd(problem.head_step)
    return tables, Numbers(*slots, *heads, sizes, mask_sizes, small, odd(learn.copies))


@kept
def fixed_places(problem: Problem) -> tuple[Any, Any]:
    """``places`` where there are no tables."""
    nothing = torch.empty(0)
    return _places(problem, Operands(nothing, nothing, nothing), NOTHING_LEARNED)


# ---- launches that repeat (see launching.Repeated) -------------------------------------------------------------------
def names_in_places(problem: Problem, tables: str, numbers: str, learned: bool = False) -> tuple[list[str], list[str]]:
    """Names of what changes from one launch to the next in two arguments made by ``places``: tensors, then integers, in
    the order of ``values_in_places``. ``learned``: gradients of tables are among them."""
    own, of_mask = problem.activations[0].tables, () if problem.mask is None else problem.mask.tables
    tensors, integers = [], []
    for to, of_sizes, kinds in (("own", "sizes", own), ("mask", "mask_sizes", of_mask)):
        for i, kind in enumerate(kinds):
            tensors.append(f"{tables}.{Tables._fields.index(to)}.{i}")
            integers += [f"{numbers}.{Numbers._fields.index(of_sizes)}.{i}.{j}" for j in range(kind.ndim)]
    if learned:
        to_gradients = Tables._fields.index("gradients")
        tensors += [f"{tables}.{to_gradients}.{i}" for i, kind in enumerate(own) if kind.differentiable]
        integers.append(f"{numbers}.{Numbers._fields.index('copies')}")
    return tensors, integers


def values_in_places(
    tables: Sequence[Tensor], learn: LearnedTables = NOTHING_LEARNED
) -> tuple[list[Tensor], list[int], Hashable]:
    """The tensors and integers that ``names_in_places`` names, and what code depends on in them."""
    tensors = [*tables, *(t for t in learn.gradients if t is not None)]
    sizes = [2 * n + 3 for t in tables for n in t.shape]  # odd(n), without a call for each
    wide = max(sizes, default=0) >= NARROW
    layout = (tuple([t.data_ptr() & 15 == 0 for t in tensors]), tuple(sizes) if wide else None)
    return tensors, [*sizes, odd(learn.copies)] if learn.gradients else sizes, layout


def largest_position(problem: Problem) -> int:
    """The largest position that may occur: a packed sequence may be as long as all of them together."""
    placed = problem.activation.placed
    asks_for_rows = placed is not None and {"q_row", "kv_row"} & set(placed.program.positions)
    rows = problem.most_rows if asks_for_rows else max(problem.rows_q, problem.rows_k)
    return max(rows, problem.n_seqs, problem.first_head + problem.head_step * problem.heads_q)
