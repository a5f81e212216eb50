"""Positions on several ranks: functions and masks that know where this rank's heads and keys stand among all of them.

On a rank that computes heads 4 to 7 kernels count h from 0, and on one that takes the second half of the keys they
count kv_idx from 0. So the function is replaced by one that corrects its positions first, and is otherwise the same.
What a rank adds is data (three numbers per sequence) or a constant (its first head), and a position that a function
does not ask for costs nothing.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from gdpa.distributed.collectives import all_gather, shared
from gdpa.functions.activation import Activation, from_function, resolve_one
from gdpa.functions.mask import mask_from_key, mask_function
from gdpa.functions.places.names import PART_TABLES, PLAIN, TableKind, signature_of
from gdpa.functions.places.program import Places
from gdpa.masks.mask import Mask, as_mask, kinds_of

INDICES = TableKind(1, torch.int64)
# Which positions of the part those of the whole are made of.
MADE_OF = {"kv_idx": ("kv_idx", "b"), "kv_len": ("b",), "kv_row": ("kv_idx", "b")}


class Move(NamedTuple):
    """What to add to heads and to the numbers of sequences; and whether keys are parts, of which tables tell more."""

    h: int = 0
    b: int = 0
    keys: bool = False

    @property
    def kinds(self) -> tuple[TableKind, ...]:
        return (INDICES,) * PART_TABLES if self.keys else ()

    def asks(self, positions: Sequence[str]) -> tuple[str, ...]:
        """The positions of the part that those of the whole need."""
        names = [MADE_OF.get(name, (name,)) if self.keys else (name,) for name in positions]
        return tuple(dict.fromkeys(name for several in names for name in several))

    def whole(self, at: Mapping[str, Tensor], more: Sequence[Any]) -> dict[str, Tensor]:
        """Positions in the whole; ``more`` are the tables of :class:`Keys`."""
        found = dict(at)
        if self.h and "h" in found:
            found["h"] = at["h"] + self.h
        if self.b and "b" in found:
            found["b"] = at["b"] + self.b
        if self.keys and "b" in at:
            first, total, row = more
            found["kv_len"] = total[at["b"]]
            if "kv_idx" in at:
                found["kv_idx"] = at["kv_idx"] + first[at["b"]]
                found["kv_row"] = found["kv_idx"] + row[at["b"]]
        return found


@dataclass(frozen=True)
class Keys:
    """Where this rank's keys stand, (B,) int64 each: the place of the first one in its sequence, how many there are in
    all, and the row of the sequence's first key in the whole."""

    first: Tensor
    total: Tensor
    row: Tensor

    @property
    def tables(self) -> tuple[Tensor, ...]:
        return self.first, self.total, self.row

    @classmethod
    def dense(cls, start: int, total: int, sequences: int, device: torch.device) -> Keys:
        b = torch.arange(sequences, device=device)
        return cls(torch.full_like(b, start), torch.full_like(b, total), b * total)

    @classmethod
    def of_lengths(cls, lengths: Tensor, group: ProcessGroup) -> Keys:
        """Of this rank's numbers of keys (B,): the ranks tell each other theirs, which stay on the device."""
        each = all_gather(lengths.long()[None], 0, group)  # (ranks, B)
        total = each.sum(0)
        return cls(each[: dist.get_rank(group)].sum(0), total, total.cumsum(0) - total)


def is_placed(activation: Any, tables: Sequence[Tensor] = ()) -> bool:
    """Whether any of the functions depends on where a score stands. ``activation`` is what attention() takes."""

    def one(f: Any) -> bool:
        return f.placed is not None if isinstance(f, Activation) else signature_of(f) != PLAIN

    return bool(tables) or any(map(one, activation if isinstance(activation, tuple | list) else [activation]))


def moved(activation: Any, move: Move, n_params: int, tables: Sequence[Tensor] = ()) -> Any:
    """The functions of attention() with their positions moved; names that are no functions stay."""
    if isinstance(activation, tuple | list):
        return [moved(one, move, n_params, tables) for one in activation]
    if isinstance(activation, str) and not move.kinds and not tables:
        return activation
    act = resolve_one("exp" if activation == "softmax" else activation, n_params, kinds_of(tables, "tables"))
    return moved_function(act, move)


def moved_function(act: Activation, move: Move) -> Activation:
    """``act`` with positions of the whole, and the tables of ``move`` after its own."""
    key = ("moved", move)
    with act.lock:
        if key not in act.derived:
            plain = act.placed is None and not move.kinds
            made = act if plain else from_function(_Moved(act, move), act.n_params, tables=act.tables + move.kinds)
            act.derived[key] = made
        found: Activation = act.derived[key]
        return found


class _Looked:
    """A table while a function is traced, as a program looks it up."""

    def __init__(self, table: Any) -> None:
        self.table = table

    def look_up(self, indices: Sequence[Any]) -> Tensor:
        found: Tensor = self.table[tuple(indices)]
        return found


class _Moved:
    def __init__(self, act: Activation, move: Move) -> None:
        self.act, self.move = act, move
        self.__name__ = f"{act.name}_of_part"
        asked = () if act.placed is None else move.asks(act.placed.program.positions)
        kind = inspect.Parameter
        self.__signature__ = inspect.Signature(
            [kind("s", kind.POSITIONAL_ONLY), kind("rest", kind.VAR_POSITIONAL)]
            + [kind(name, kind.KEYWORD_ONLY) for name in asked]
        )

    def __call__(self, s: Tensor, *rest: Any, **at: Tensor) -> Tensor:
        act, n, own = self.act, self.act.n_params, self.act.n_params + len(self.act.tables)
        leaves: list[Tensor] = []
        if act.placed is not None:
            places = Places(self.move.whole(at, rest[own:]), [_Looked(t) for t in rest[n:own]])  # type: ignore[misc]
            leaves = [leaf.to(s.dtype).expand_as(s) for leaf in act.placed.program.evaluate(places, s)]
        found: Tensor = act._traced.forward(s, *rest[:n], *leaves)
        return found


def moved_mask(mask: Any, move: Move, keys: Keys | None) -> Mask | None:
    """``mask`` with positions of the whole."""
    if mask is None:
        return None
    mask = as_mask(mask)
    more = () if keys is None else keys.tables
    other = object.__new__(Mask)
    other._set(_moved_key(mask.key, move.h, move.b, move.keys), (*mask.tables, *more))
    return other


def _moved_key(key: str, h: int, b: int, keys: bool) -> str:
    """Of the moved mask, which is kept as long as the one that it is made of."""
    mask, move = mask_from_key(key), Move(h, b, keys)
    with mask.lock:
        if ("moved", move) not in mask.derived:
            mask.derived["moved", move] = mask_function(_moved_program(mask.program, move), mask.tables + move.kinds)
        return str(mask.derived["moved", move].key)


_moved_key._dynamo_marked_constant = True  # type: ignore[attr-defined]  # as the keys of masks are (see masks/mask.py)


def _moved_program(program: Any, move: Move) -> Callable[..., Tensor]:
    names, own = move.asks(program.positions), len(program.tables)

    def visible(*given: Any) -> Tensor:
        at, tables = dict(zip(names, given, strict=False)), given[len(names) :]
        places = Places(move.whole(at, tables[own:]), [_Looked(t) for t in tables[:own]])  # type: ignore[misc]
        like = torch.zeros((), dtype=torch.float32)
        found: Tensor = program.evaluate(places, like)[0]
        return found.to(torch.bool)

    kind = inspect.Parameter
    tables = [f"table{i}" for i in range(own + len(move.kinds))]
    visible.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
        [kind(name, kind.POSITIONAL_OR_KEYWORD) for name in (*names, *tables)]
    )
    return visible


def shared_tables(tables: Sequence[Tensor], group: ProcessGroup) -> list[Tensor]:
    """The tables with gradients summed over ranks: each uses them for its part."""
    return [shared(t, group) if isinstance(t, Tensor) and t.is_floating_point() else t for t in tables]
