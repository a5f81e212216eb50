"""The compile-time code of a problem, which each Hopper kernel takes as one argument (see Code)."""

from dataclasses import dataclass
from typing import Any

from gdpa.backends.triton.code import Code


@dataclass(frozen=True, repr=False)
class ForwardCode(Code):
    FORWARD: Any  # f(s, params); where T.PLACED f(s, given), see device/places.positions
    LOAD_PARAMS: Any
    SHIFT: Any  # the shift of (s, given) that FORWARD is then a function of, if T.SHIFTED
    KEEP: Any  # the mask: which pairs are visible; None without one
    COLUMNS: Any  # looks up the values of a block's columns and rows (forward/columns.py); None if there are none
    BIAS_OF_QUERIES: Any  # the terms that the tensor cores add to the scores, if T.BIAS_FACTOR (forward/bias.py)
    BIAS_OF_KEYS: Any


@dataclass(frozen=True, repr=False)
class BackwardCode(Code):
    BACKWARD: Any  # (f, f') of what FORWARD takes; with params, ``products`` of functions/emit.py
    GAINS: Any  # with params: the factors of the summed terms that BACKWARD returns
    LOAD_PARAMS: Any
    SHIFT: Any
    LEARN: Any  # adds to the gradients of the tables that SHIFT looks up; None if they are not wanted
    KEEP: Any
    COLUMNS: Any  # of columns alone, which are queries here
