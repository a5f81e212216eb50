"""Device code written by hand: gdpa.TritonSource."""

from __future__ import annotations

import ast
from dataclasses import dataclass
from textwrap import dedent
from typing import Any


@dataclass(frozen=True)
class TritonSource:
    """Hand-tuned device code for ``gdpa.activation(fn, triton=...)``: the bodies of two JIT functions.

    ``forward`` computes ``p`` and ``backward`` computes ``p``, ``ds`` and ``dparam0``... from ``s`` and ``param0``...;
    both may use ``tl`` and ``maths`` (gdpa.device.maths).

    >>> cube = gdpa.TritonSource(forward="p = s * s * s", backward="p = s * s * s; ds = 3.0 * s * s")
    """

    forward: str
    backward: str

    def __post_init__(self) -> None:
        for name, results in (("forward", {"p"}), ("backward", {"p", "ds"})):
            _check_assigns(name, getattr(self, name), results)


def _check_assigns(name: str, code: Any, results: set[str]) -> None:
    """Refuse what is no Python source that gives ``results`` a value."""
    if not isinstance(code, str):
        raise TypeError(f"{name} must be a string of Triton code, got {type(code).__name__}")
    try:
        nodes = ast.walk(ast.parse(dedent(code).strip()))
    except SyntaxError as e:
        raise ValueError(f"{name} is not Python source: {e}") from e
    assigned = {node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
    if not results <= assigned:
        raise ValueError(f"{name} never assigns {' and '.join(sorted(results - assigned))}")
