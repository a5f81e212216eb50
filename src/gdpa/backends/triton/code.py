"""The compile-time code of a problem, which a kernel takes as one argument: functions, and what else chooses code."""

from dataclasses import dataclass, fields
from hashlib import sha256
from typing import Any


@dataclass(frozen=True, repr=False)
class Code:
    """Names are capitals, as constexprs are: kernels write CODE.FORWARD. A function is a JIT function, or None.

    Triton's caches know a constant by its ``cache_key``, or by its repr. Functions of different source may have the
    same name, so that both are made of the functions' own keys: of their source, and of all that it calls.
    """

    @property
    def cache_key(self) -> str:
        values = (getattr(self, f.name) for f in fields(self))
        return sha256(repr([getattr(x, "cache_key", x) for x in values]).encode()).hexdigest()

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.cache_key})"


@dataclass(frozen=True, repr=False)
class ProblemCode(Code):
    """Of the Triton backend's kernels."""

    LOAD_PARAMS: Any
    FORWARD: Any = None  # f(s, params); where Tile.PLACED f(s, given), see device/places.positions
    BACKWARD: Any = None  # (f, f', derivatives by params and by entries of tables) of the same
    KEEP: Any = None  # the mask: which pairs are visible,
    CLASSIFY: Any = None  # and which blocks have any visible pair, or only such (see device/places.block_kinds)
    NORM: str = "none"  # what outputs are divided by: PLAIN, SUM, ABS or EXP of gdpa.problem (see row_sums.py)
    GAIN: float = 1.0  # the factor of f (or of the exponent) that row sums need and FORWARD leaves out
    LEARN: Any = None  # adds to the gradients of tables,
    COPIES: int = 1  # in so many copies of each,
    N_LEARNED: int = 0  # of so many lookups
    N_PARAMS: int = 0
    BLOCK_P: int = 1  # N_PARAMS, padded to a power of two
    DQ: str = "none"  # how backward_kernel makes dq: see there
