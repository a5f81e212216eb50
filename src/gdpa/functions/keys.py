"""Keys of functions: digests of their graphs. Exported programs rely on them (see documents/carried.py, VERSION)."""

from __future__ import annotations

import hashlib
from typing import Any

from torch import fx

from gdpa.functions.places.program import Program

MARK = "="  # between a key and what an exported program carries of the function


def recorded_key(traced: fx.GraphModule, triton: Any = None) -> str:
    """Of what torch has recorded: nodes are numbered, so that variable names do not matter."""
    number: dict[fx.Node, int] = {}
    lines = []
    for node in traced.graph.nodes:
        number[node] = len(number)
        args = fx.map_arg((node.args, node.kwargs), lambda n: f"%{number[n]}")
        constant = getattr(traced, node.target) if node.op == "get_attr" else None  # its repr() would be rounded
        constant = "" if constant is None else f"{constant.dtype} {constant.tolist()}"
        lines.append(f"{node.op} {'' if node.op in ('placeholder', 'get_attr') else node.target} {args!r} {constant}")
    if triton is not None:
        lines.append(f"triton {triton.forward} {triton.backward}")
    return digest("\n".join(lines))


def placed_key(traced: fx.GraphModule, program: Program, learned: tuple[int, ...], n_params: int) -> str:
    """Of a function of scores and of places (see places/split.py)."""
    return digest(f"{recorded_key(traced)} {program.key} {learned} {n_params}")


def mask_key(program: Program) -> str:
    return digest(f"mask {program.key}")


def digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]
