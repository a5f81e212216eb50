"""A fast inspect.getsourcelines for device code, used while its modules are imported.

Triton reads the source of every JIT function when its module is imported, and Python's inspect tokenizes it to see
where the function ends: 1.5 ms for each of 180 functions, a quarter of a second before the first call. The files of
this package are formatted, so that the indentation of lines says where a function ends.
"""

from __future__ import annotations

import inspect
import linecache
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

_lock = threading.RLock()


@contextmanager
def read_quickly() -> Iterator[None]:
    """Around imports of modules with device code."""
    with _lock:
        ordinary = inspect.getsourcelines

        def getsourcelines(thing: Any) -> tuple[list[str], int]:
            return lines_of(thing) or ordinary(thing)

        inspect.getsourcelines = getsourcelines
        try:
            yield
        finally:
            inspect.getsourcelines = ordinary


def lines_of(function: Any) -> tuple[list[str], int] | None:
    """What ``inspect.getsourcelines`` returns for a function of this package; None for anything else."""
    code = getattr(inspect.unwrap(function), "__code__", None)
    if code is None or not code.co_filename.startswith(sys.modules["gdpa"].__path__[0]):
        return None
    first = code.co_firstlineno - 1
    lines = linecache.getlines(code.co_filename)[first:]
    if not lines:
        return None
    return lines[: _end(lines)], first + 1


def _end(lines: list[str]) -> int:
    """How many lines belong to the function that begins with the first one, or with its decorator."""
    indent = _indent(lines[0])
    end, header = 0, True  # decorators and the line of ``def`` are indented as what follows the function
    for number, line in enumerate(lines, 1):
        if line.isspace():
            continue
        outside = _indent(line) <= indent
        if not header and outside and not line.lstrip().startswith(")"):  # of a signature on several lines
            break
        if outside and line.lstrip().startswith("def "):
            header = False
        if not line.lstrip().startswith("#") or not outside:
            end = number
    return end


def _indent(line: str) -> int:
    return len(line) - len(line.lstrip())
