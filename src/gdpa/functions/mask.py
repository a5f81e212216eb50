"""MaskFunction: a function of positions and tables that says which pairs are visible, traced once and identified by its
graph, as an Activation is."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Hashable, Sequence
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor

from gdpa.errors import UnsupportedActivationError
from gdpa.functions.fingerprint import fingerprint
from gdpa.functions.isolation import isolated, run_alone
from gdpa.functions.kept import Recent, kept_with_activation
from gdpa.functions.keys import MARK, mask_key
from gdpa.functions.places.bands import Bands, bands_of
from gdpa.functions.places.names import POSITIONS, Argument, TableKind, mask_arguments
from gdpa.functions.places.program import Places, Program, joined


class MaskFunction:
    """The program of a mask, whose only output is a truth value."""

    def __init__(self, name: str, program: Program) -> None:
        self.name = name
        self.program = program
        self.key = mask_key(program)
        self.derived: dict[Hashable, Any] = {}  # what was made of it (see kept.kept_with_activation)
        self.lock = threading.RLock()  # held while something is made of it

    @property
    def tables(self) -> tuple[TableKind, ...]:
        return self.program.tables

    @cached_property
    def bands(self) -> Bands | None:
        """The bounds of the band that this mask is, if it is nothing but a band."""
        return bands_of(self.program)

    def eager(self, places: Places, like: Tensor) -> Tensor:
        """Where pairs are visible (bool), as small as broadcasting allows."""
        return self.program.evaluate(places, like)[0].to(torch.bool)

    def __repr__(self) -> str:
        return f"MaskFunction({self.name!r}, key={self.key!r})"

    def __deepcopy__(self, memo: Any) -> MaskFunction:
        return self  # one graph, one function; what it tells never changes

    def __reduce__(self) -> Any:
        return _restore, (self.name, self.program)


# Kept alive are those of live gdpa.Masks, those used last, those of plans (a bounded number, see gdpa.calling.plans),
# and those that compiled programs name.
_by_key: weakref.WeakValueDictionary[str, MaskFunction] = weakref.WeakValueDictionary()
_recent: Recent[MaskFunction] = Recent()
_in_programs: dict[str, MaskFunction] = {}
_lock = threading.RLock()


def _restore(name: str, program: Program) -> MaskFunction:
    """A mask from its pickled parts: the one of this process, if it has it."""
    made = MaskFunction(name, program)
    return _by_key.setdefault(made.key, made)


def mask_from_key(key: str) -> MaskFunction:
    """The mask that an operator's string argument names."""
    found = _by_key.get(key) or _carried(key)
    if found is None:
        raise RuntimeError(f"there is no mask with the key {key!r} in this process: keep its gdpa.Mask alive")
    return found


def _carried(key: str) -> MaskFunction | None:
    """The mask that an exported program carries in its key, made once, and found by either key from then on."""
    short, mark, text = key.partition(MARK)
    if not mark:
        return None
    with _lock:
        found = _by_key.get(short) or run_alone(partial(_read, short, text))
        _by_key[short] = _by_key[key] = found
        _recent.put(key, found)
        return found


def _read(key: str, text: str) -> MaskFunction:
    from gdpa.functions.documents.carried import read_mask

    found = read_mask(key, text)
    return MaskFunction(found.name, found.program)


@kept_with_activation
def _carrying(mask: MaskFunction) -> str:
    from gdpa.functions.documents.carried import with_mask

    return run_alone(partial(with_mask, mask.key, mask.name, mask.program))


def mask_key_in_program(key: str) -> str:
    """The key by which an exported program names a mask, which it carries."""
    return _carrying(mask_from_key(key))


def keep_mask_for_programs(key: str | None) -> None:
    """Keep it for good: a compiled program holds nothing but its key."""
    if key is not None:
        _in_programs[key] = mask_from_key(key)


def _kept(mark: Hashable, made: MaskFunction) -> MaskFunction:
    found = _by_key.setdefault(made.key, made)
    _recent.put(mark, found)
    return found


def mask_function(fn: Callable[..., Any], tables: tuple[TableKind, ...]) -> MaskFunction:
    """The MaskFunction of ``fn``; traced only if nothing with the same fingerprint has been."""
    with _lock:
        mark = fingerprint(fn)
        known = _recent.find((mark, tables)) if mark is not None else None
        if known is not None:
            return known
        arguments = mask_arguments(fn)
        expected = [a.name for a in arguments if not a.is_position]
        if len(expected) != len(tables):
            raise ValueError(
                f"mask {_name(fn)!r} takes {len(expected)} table{'s' * (len(expected) != 1)} "
                f"({', '.join(expected) or 'none'}), got {len(tables)}; positions are called "
                f"{', '.join(POSITIONS)}, and every other argument is a table"
            )
        with isolated():
            made = MaskFunction(_name(fn), _trace(fn, arguments, tables))
        return _kept((mark, tables) if mark is not None else made.key, made)


def join_masks(op: str, keys: Sequence[str]) -> MaskFunction:
    """``op`` ("and", "or", "not") of masks; the tables are theirs, in order."""
    with _lock:
        mark = (op, *keys)
        known = _recent.find(mark)
        if known is not None:
            return known
        parts = [mask_from_key(key) for key in keys]
        names = [part.name for part in parts]
        name = f"not_{names[0]}" if op == "not" else f"_{op}_".join(names)
        return _kept(mark, MaskFunction(name, joined(op, [part.program for part in parts])))


def _name(fn: Any) -> str:
    return str(getattr(fn, "__name__", None) or type(fn).__name__).replace("<lambda>", "mask").strip("_")


def _trace(fn: Callable[..., Any], arguments: tuple[Argument, ...], tables: tuple[TableKind, ...]) -> Program:
    from gdpa.functions.places.trace import check_mask_faithful, trace_mask

    try:
        program = trace_mask(fn, arguments, tables)
        check_mask_faithful(fn, arguments, program)
    except UnsupportedActivationError as e:  # the tracer speaks of what it usually traces
        text = str(e).replace("the activation", f"the mask {_name(fn)!r}").replace("params, or through ", "")
        raise UnsupportedActivationError(text) from e
    return program
