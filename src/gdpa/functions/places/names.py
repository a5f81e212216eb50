"""Which arguments of a Python function are positions, which are params, and which are tables."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import FunctionType
from typing import Any, NamedTuple

import torch
from torch import nn

# Of sequence b and query head h: the query's and the key's place in their sequence, the lengths of both sides, and the
# rows of the packed tensors (b * L + idx, where a side is dense).
POSITIONS = ("b", "h", "q_idx", "kv_idx", "q_len", "kv_len", "q_row", "kv_row")
FLEX = ("b", "h", "q_idx", "kv_idx")  # what a score mod of FlexAttention takes after the score
MAX_TABLES = 8  # of a function or a mask, as callers give it
PART_TABLES = 3  # and those that gdpa.distributed adds, which say where the keys of a rank stand
INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool)


class TableKind(NamedTuple):
    """What of a table is part of a function's identity; its sizes are data."""

    ndim: int
    dtype: torch.dtype  # float32 for every floating point one

    @property
    def differentiable(self) -> bool:
        return self.dtype.is_floating_point


def in_words(tables: Sequence[TableKind]) -> str:
    """As messages say it."""
    return f"({', '.join(f'{t.ndim}-d {str(t.dtype)[6:]}' for t in tables)})" if tables else "none"


def few_tables(name: str, count: int) -> None:
    """Refuse more tables than a function or a mask may be given."""
    if count > MAX_TABLES:
        raise ValueError(f"{name} has {count} entries, but at most {MAX_TABLES} are allowed")


@dataclass(frozen=True)
class Signature:
    """The positions that a function asks for, by keyword or, as one of FlexAttention's score mods, by place."""

    positions: tuple[str, ...] = ()
    flex: bool = False

    def call(self, fn: Callable[..., Any], arguments: Sequence[Any], at: Mapping[str, Any]) -> Any:
        """``fn`` on the score, params and tables in ``arguments`` and its positions."""
        if self.flex:
            return fn(*arguments, *(at[name] for name in FLEX))
        return fn(*arguments, **{name: at[name] for name in self.positions})


PLAIN = Signature()


def signature_of(fn: Any) -> Signature:
    """Of an activation: positions are its keyword-only arguments without a default."""
    if isinstance(fn, FunctionType) and not hasattr(fn, "__wrapped__"):  # at every call, so without inspect
        code = fn.__code__
        positional, named = code.co_varnames[: code.co_argcount], code.co_varnames[code.co_argcount :]
        defaults = fn.__kwdefaults__ or {}
        required = tuple(name for name in named[: code.co_kwonlyargcount] if name not in defaults)
        positional = () if fn.__defaults__ else positional
    elif isinstance(fn, str) or not callable(fn):
        return PLAIN
    else:
        positional, required = _inspected(fn)
    unknown = [name for name in required if name not in POSITIONS]
    if unknown:
        raise TypeError(
            f"activation {_name(fn)!r} has the keyword-only argument {unknown[0]!r}; those are positions, one of "
            f"{', '.join(POSITIONS)}. Params and tables are positional arguments, after the score"
        )
    if positional[1:] == FLEX and not required:
        return Signature(FLEX, flex=True)
    return Signature(required) if required else PLAIN


def _inspected(fn: Any) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Names of the positional arguments, and of the keyword-only ones without a default."""
    try:
        arguments = inspect.signature(fn.forward if isinstance(fn, nn.Module) else fn).parameters.values()
    except (TypeError, ValueError):  # builtins without a signature
        return (), ()
    ordered = [a for a in arguments if a.kind in (a.POSITIONAL_ONLY, a.POSITIONAL_OR_KEYWORD)]
    required = tuple(a.name for a in arguments if a.kind == a.KEYWORD_ONLY and a.default is a.empty)
    return tuple(a.name for a in ordered) if all(a.default is a.empty for a in ordered) else (), required


class Argument(NamedTuple):
    """Of a mask. Those with a name of POSITIONS are positions, the others its tables."""

    name: str
    keyword_only: bool

    @property
    def is_position(self) -> bool:
        return self.name in POSITIONS


def mask_arguments(fn: Any) -> tuple[Argument, ...]:
    """The arguments of a mask, in order; those with a default that are no positions keep it."""
    if not callable(fn):
        raise TypeError(f"a mask must be a function of positions or a gdpa.Mask, got {type(fn).__name__}")
    try:
        arguments = inspect.signature(fn).parameters.values()
    except (TypeError, ValueError) as e:
        raise TypeError(f"the arguments of the mask {_name(fn)!r} cannot be determined: {e}") from e
    found = []
    for a in arguments:
        if a.kind in (a.VAR_POSITIONAL, a.VAR_KEYWORD):
            raise TypeError(f"mask {_name(fn)!r} takes *{a.name}; a mask names its positions and tables one by one")
        if a.default is a.empty:
            found.append(Argument(a.name, a.kind == a.KEYWORD_ONLY))
        elif a.name in POSITIONS and a.kind != a.POSITIONAL_ONLY:  # by name: an argument before it may keep its default
            found.append(Argument(a.name, True))
    return tuple(found)


def call_mask(
    fn: Callable[..., Any], arguments: Sequence[Argument], at: Mapping[str, Any], tables: Sequence[Any]
) -> Any:
    """``fn`` on its positions and tables."""
    left = iter(tables)
    values = [(a, at[a.name] if a.is_position else next(left)) for a in arguments]
    named = {a.name: value for a, value in values if a.keyword_only}
    return fn(*(value for a, value in values if not a.keyword_only), **named)


def _name(fn: Any) -> str:
    return getattr(fn, "__name__", None) or type(fn).__name__
