"""Kernels compiled for one function, filled with another one.

Hopper's kernels take most functions as blocks of PTX (see functions/emission/ptx.py). The compiler passes the text of
such a block through as it is, with names of registers for $0, $1, ... in it, and depends on nothing but the number of
these operands. So if the sources of two functions differ in the text of their blocks alone (what they share is their
*outline*), their kernels' PTX differs in these blocks alone: in the PTX compiled for one, the blocks are replaced by
those of the other, and only the assembler has to run. Of the four seconds that a function's first forward and backward
take, that leaves one.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable
from typing import Any

from gdpa.backends.triton import compat

ASSEMBLY = "inline_asm_elementwise"
BLOCK = re.compile(r"(?<=// begin inline asm\n)(\s*)(.*?)(?=\s*// end inline asm)", re.DOTALL)
LINE = re.compile(r"^\s*\.loc\b.*\n", re.MULTILINE)  # of the source: newer releases say it between instructions, too
OPERAND = re.compile(r"\$(\d+)")
REGISTER = re.compile(r"%\w+")


# ---- source ----------------------------------------------------------------------------------------------------------
def is_emitted(function: Any) -> bool:
    """Whether its module was emitted (see gdpa.functions.emit.compiled)."""
    return "__source__" in function.__globals__


def whole(function: Any) -> str:
    """What an emitted function may depend on: all of its module."""
    source: str = function.__globals__["__source__"]
    return source


def outline(function: Any) -> str:
    """The same but for its blocks of PTX."""
    cut = _cut(function)
    return whole(function) if cut is None else cut[0]


def texts(functions: Iterable[Any]) -> list[str]:
    """What was cut out of those that were emitted, one after the other; nothing if some of them keep theirs, one of
    which might be taken for another's."""
    found = [_cut(function) for function in functions if is_emitted(function)]
    return [] if None in found else [text for cut in found if cut is not None for text in cut[1]]


def _cut(function: Any) -> tuple[str, list[str]] | None:
    """Its source without the texts of blocks, and these; None if it calls others, and there are blocks, or if one's
    text is no literal, first among the arguments, as in code that a user has written."""
    source, found, scope = function.src, [], function.__globals__
    if any(isinstance(scope.get(name), compat.JITCallable) for name in function.fn.__code__.co_names):
        source = whole(function)
        return None if ASSEMBLY in source else (source, [])
    tree = ast.parse(source)
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and getattr(node.func, "attr", None) == ASSEMBLY:
            text = node.args[0] if node.args else None
            if not isinstance(text, ast.Constant):
                return None
            found.append(str(text.value))
            text.value = ""
    return ast.unparse(tree), found


# ---- PTX -------------------------------------------------------------------------------------------------------------
def filled(ptx: str, old: list[str], new: list[str]) -> str | None:
    """``ptx`` with the blocks ``new`` where it has the blocks ``old``; None if some of these are not found, or alike,
    or may both be meant by a block, or do not say which registers are those that ``new`` asks for."""
    instead, found = dict(zip(old, new, strict=True)), set()

    def fill(match: re.Match[str]) -> str:
        block = LINE.sub("", match[2])
        fitting = [(text, registers) for text in instead if (registers := _registers(text, block)) is not None]
        if not fitting:
            return match[0]
        ((text, registers),) = fitting
        found.add(text)
        return match[1] + _written(instead[text], registers)

    try:
        made = BLOCK.sub(fill, ptx)
    except (KeyError, ValueError):  # a register that nobody knows, or several texts that fit
        return None
    return made if len(found) == len(old) else None


def _written(text: str, registers: dict[str, str]) -> str:
    return OPERAND.sub(lambda operand: registers[operand[1]], text)


def _registers(text: str, block: str) -> dict[str, str] | None:
    """Which register stands for which operand, if ``block`` is ``text`` with registers in it."""
    first, *rest = OPERAND.split(text)
    found: dict[str, str] = {}
    at = len(first)
    if not block.startswith(first):
        return None
    for operand, between in zip(rest[::2], rest[1::2], strict=True):
        register = REGISTER.match(block, at)
        if register is None or found.setdefault(operand, register[0]) != register[0]:
            return None
        at = register.end() + len(between)
        if not block.startswith(between, register.end()):
            return None
    return found if at == len(block) else None
