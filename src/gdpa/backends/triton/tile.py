"""The compile-time shape of a tile, which every kernel and helper of the Triton backend takes as one argument."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Tile:
    """Names are capitals, as constexprs are: kernels write T.BLOCK_M. Only plain values: Triton's cache knows a
    compiled kernel by their repr."""

    GROUP: int  # query heads per key head
    D: int
    DV: int
    BLOCK_D: int  # D and DV, padded to powers of two
    BLOCK_DV: int
    BLOCK_M: int  # queries
    BLOCK_N: int  # keys
    ALIGN: int  # rows start at multiples of this many elements (see device/rows.py)
    WIDE: bool  # the last row of a tile may be 2^31 elements or further from its first
    TMA: bool
    PRECISION: str  # of float32 products: see config.Config
    PART: int  # columns that products of rows take at a time (see device/products.py); 0: all
    BANDED: bool
    PLACED: bool  # the function takes positions and tables
    LEAST_FACTOR: float  # of ds before it is rounded, 0 if it has none there (see device/rounding.py)
