"""Index arithmetic of the kernels, run in plain Python on ints."""

from __future__ import annotations

from dataclasses import dataclass
from types import FunctionType, SimpleNamespace
from typing import Any

from triton.language import constexpr
from triton.runtime.jit import JITFunction

from gdpa.backends.hopper import config

BLOCK_N = 128


@dataclass(frozen=True)
class Tile:
    """The fields of a BackwardTile that matter for the order in which tiles of keys go over blocks of queries."""

    DQ: str
    GROUP: int = 1
    BLOCK_M: int = 64
    BLOCK_N: int = BLOCK_N
    ROOM: int = config.ROOM
    ORDERED: bool = False
    FINITE_AT_ZERO: bool = True
    IN_TURN: bool = True
    TAKES: bool = False
    SOME_HEADS: bool = False


class Language:
    """What the index arithmetic uses of Triton's language, for ints, in program ``program`` of ``programs``."""

    program = 0
    programs = 1
    constexpr = object
    minimum = staticmethod(min)
    maximum = staticmethod(max)

    @staticmethod
    def where(condition: bool, a: int, b: int) -> int:
        return a if condition else b

    @staticmethod
    def cdiv(a: int, b: int) -> int:
        return -(-a // b)

    @staticmethod
    def program_id(axis: int) -> int:
        return Language.program

    @staticmethod
    def num_programs(axis: int) -> int:
        return Language.programs


def in_python(*modules: Any, gl: Any = Language, tl: Any = Language) -> SimpleNamespace:
    """The kernels' functions as Python functions, which call each other, in these languages."""
    names: dict[str, Any] = {"gl": gl, "tl": tl}
    for module in modules:
        for name, found in vars(module).items():
            if isinstance(found, JITFunction):
                names[name] = FunctionType(found.fn.__code__, names, name, found.fn.__defaults__)
            elif isinstance(found, type) and issubclass(found, tuple):
                names[name] = found
            elif isinstance(found, constexpr):
                names[name] = found.value
    return SimpleNamespace(**names)
