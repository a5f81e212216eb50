"""The compile-time code of a problem, which each Hopper kernel takes as one argument (see Code)."""

from dataclasses import dataclass
from typing import Any

from gdpa.backends.triton.code import Code


@dataclass(frozen=True, repr=False)
class ForwardCode(Code):
    FORWARD: Any  # f of scores and params; where T.PLACED, of what device/places.positions says instead of params
    LOAD_PARAMS: Any
    SHIFT: Any  # the sum that f is a function of, of the score and something of its place, if T.SHIFTED
    KEEP: Any  # whether the mask holds for pairs, if there is one
    COLUMNS: Any  # looks up what belongs to a block's columns and rows (forward/columns.py), if anything does


@dataclass(frozen=True, repr=False)
class BackwardCode(Code):
    BACKWARD: Any  # (f, its derivative) of what f takes; with params what ``products`` of functions/emit.py returns
    GAINS: Any  # of the sums of what that returns for params
    LOAD_PARAMS: Any
    SHIFT: Any
    LEARN: Any  # adds to the gradients of tables that SHIFT looks up, if anybody wants them
    KEEP: Any
    COLUMNS: Any  # to columns alone
