"""Joins a function and the biases of its scores into one function, which the operator takes with the biases' tables."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from gdpa.functions.activation import Activation, from_name, resolve_one
from gdpa.functions.builtin import BUILTINS
from gdpa.functions.places.names import Signature, TableKind, few_tables, signature_of
from gdpa.masks.mask import kinds_of
from gdpa.nn.biases import ScoreBias, Times

BIAS = "bias"  # the keyword by which a function may ask for the bias, to put it where it wants


def as_biases(given: Any, num_heads: int) -> list[ScoreBias]:
    """A bias, several, or None, checked."""
    found = [] if given is None else list(given) if isinstance(given, tuple | list) else [given]
    for i, one in enumerate(found):
        if not isinstance(one, ScoreBias):
            raise TypeError(f"score_bias must be a gdpa.nn.ScoreBias or a list of those, got {type(one).__name__}")
        if one.num_heads not in (None, num_heads):
            raise ValueError(f"score_bias[{i}] is for {one.num_heads} heads, the layer has num_heads={num_heads}")
    return found


def tables_of(biases: Sequence[ScoreBias], times: Times | None) -> tuple[Tensor, ...]:
    """The tables of all of them, in order."""
    return tuple(t for one in biases for t in one.tables(times if one.takes_times else None))


def resolve(spec: Any, n_params: int, biases: Sequence[ScoreBias]) -> Activation:
    """``spec``, traced, with the biases inside.

    >>> resolve("silu", 0, [gdpa.nn.ALiBi(4)]).n_params
    0
    """
    if not biases:
        return resolve_one(spec, n_params)
    nothing = torch.empty(0, dtype=torch.int64)
    counts = [len(tables_of([one], (nothing, nothing))) for one in biases]
    kinds: tuple[TableKind, ...] = kinds_of(tables_of(biases, (nothing, nothing)), "the tables of score_bias")
    few_tables("the tables of score_bias", len(kinds))
    return resolve_one(_Biased(spec, n_params, biases, counts), n_params, kinds)


class _Biased:
    """f(s + bias, *params), or f(s, *params, bias=bias) if f asks for it; positions are whatever these ask for."""

    def __init__(self, spec: Any, n_params: int, biases: Sequence[ScoreBias], counts: Sequence[int]) -> None:
        self.f, self.own, self.placed_by_f = _function(spec, n_params)
        self.n_params, self.counts = n_params, counts
        self.biases = [(one.bias, signature_of(one.bias).positions) for one in biases]
        self.__name__ = f"biased_{getattr(self.f, '__name__', 'function')}".replace("<lambda>", "function")
        wanted = dict.fromkeys((*self.own, *(name for _, names in self.biases for name in names)))
        kinds = inspect.Parameter
        self.__signature__ = inspect.Signature(
            [kinds("s", kinds.POSITIONAL_ONLY), kinds("rest", kinds.VAR_POSITIONAL)]
            + [kinds(name, kinds.KEYWORD_ONLY) for name in wanted]
        )

    def __call__(self, s: Tensor, *rest: Any, **at: Tensor) -> Tensor:
        params, tables = rest[: self.n_params], iter(rest[self.n_params :])
        found = [
            bias(*(next(tables) for _ in range(count)), **{name: at[name] for name in names})
            for (bias, names), count in zip(self.biases, self.counts, strict=True)
        ]
        total: Tensor = sum(found[1:], found[0])
        own = {name: at[name] for name in self.own}
        if self.placed_by_f:
            return self.f(s, *params, **{BIAS: total}, **own)
        return self.f(s + total, *params, **own)


def _function(spec: Any, n_params: int) -> tuple[Callable[..., Tensor], tuple[str, ...], bool]:
    """What ``spec`` names, the positions that it asks for, and whether it asks for the bias too."""
    if isinstance(spec, str):
        from_name(spec)  # which refuses unknown ones
        return next(fn for fn in BUILTINS if fn.__name__ == spec), (), False
    if isinstance(spec, Activation):
        if spec.placed is not None:
            raise ValueError(
                f"{spec!r} already has positions or tables; pass the layer the function that it was made from"
            )
        return _named(spec), (), False
    asks = BIAS in _keywords(spec)
    signature = signature_of(partial(spec, bias=None) if asks else spec)  # it is no position
    _check_arguments(spec, n_params, signature, [BIAS] if asks else [])
    if signature.flex:
        return _by_keyword(spec, signature), signature.positions, False
    return spec, signature.positions, asks


def _check_arguments(fn: Any, n_params: int, signature: Signature, keywords: Sequence[str]) -> None:
    """Inside _Biased, which takes whatever there is, tracing would only meet Python's own error."""
    try:
        bind = partial(inspect.signature(fn).bind, **dict.fromkeys(keywords))
    except (TypeError, ValueError):  # no function, or a builtin without a signature
        return
    try:
        signature.call(bind, range(1 + n_params), dict.fromkeys(signature.positions))
    except TypeError as e:
        name = getattr(fn, "__name__", fn)
        raise TypeError(
            f"activation {name!r} cannot be called with a score and {n_params} params: {e}. With score_bias a layer "
            "gives its function no tables: a gdpa.nn.ScoreBias has tables of its own, and the function takes what it "
            "makes of them as the keyword-only argument bias"
        ) from e


def _named(act: Activation) -> Callable[..., Tensor]:
    def traced(*args: Tensor) -> Tensor:
        found: Tensor = act._traced.forward(*args)
        return found

    traced.__name__ = act.name
    return traced


def _by_keyword(fn: Callable[..., Any], signature: Signature) -> Callable[..., Tensor]:
    """A score mod of FlexAttention, which takes its positions by place."""

    def called(s: Tensor, **at: Tensor) -> Tensor:
        found: Tensor = signature.call(fn, [s], at)
        return found

    return called


def _keywords(fn: Any) -> set[str]:
    try:
        arguments = inspect.signature(fn).parameters.values()
    except (TypeError, ValueError):  # no function, or a builtin without a signature
        return set()
    return {a.name for a in arguments if a.kind == a.KEYWORD_ONLY}
