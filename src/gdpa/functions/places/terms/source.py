"""Triton code of the shift for guarded code."""

from __future__ import annotations

from collections.abc import Callable

import torch

from gdpa.functions.graph import Graph, Ref
from gdpa.functions.passes.simplify import value_of
from gdpa.functions.places.emit import Write, Writer, either, function, leaf
from gdpa.functions.places.program import Program
from gdpa.functions.places.terms.distances import COUNTED, by_sides
from gdpa.functions.places.terms.opening import opened
from gdpa.functions.places.terms.units import best_units, in_units
from gdpa.functions.traced import Shift

Body = Callable[[Graph, str, tuple[str, ...]], list[str]]  # emission.source.body_lines


def voted_source(
    name: str, shift: Shift, program: Program, dtype: torch.dtype, blocks: Write | None, body: Body
) -> tuple[str, float]:
    """The function {name}_shifted_for_vote, of unscaled scores and (params, at, spot, ends, columns, scale), and the
    units of its result u: the caller divides ``scale`` by them. ``blocks``: see pairs.py."""
    head = f"{name}_shifted_for_vote(s, given)"
    if blocks is not None:
        lines = either(program, lambda writer: _scaled(blocks(writer)), ["u"], sums=False, columns=program)
        return function(head, [*lines, "return u"]), 1.0
    whole = program
    program, sums = opened(program, value_of(shift.joint))
    sides = tuple(len(program.sides[o.index]) if isinstance(o, Ref) else 0 for o in program.graph.outputs)
    sums, sides = by_sides(program, sums, sides) or (sums, sides)
    units = best_units(shift.outer, dtype, "sm90")
    divided = in_units(sums, sides, units)
    units, total = (units, divided) if divided is not None else (1.0, sums)

    def write(writer: Writer) -> list[str]:
        return _scaled(_sum(total, program, writer, body))

    lines = either(program, write, ["u"], by_sides=True, columns=whole)
    return function(head, [*lines, "return u"]), units


def _sum(sums: Graph, program: Program, writer: Writer, body: Body) -> list[str]:
    """Lines that compute ``u`` by the graph ``sums``, and before it the leaves that it needs."""
    outputs = program.graph.outputs
    needed = sorted({int(n.args[0]) - 1 for n in sums.nodes if n.op == "input"} - {-1})  # type: ignore[arg-type]
    code = [leaf(writer, outputs[i]) if i < len(outputs) else COUNTED[i - len(outputs)] for i in needed]
    leaves = [f"param{i} = {text}" for i, text in zip(needed, code, strict=True)]  # inputs after s are called so
    return [*writer.lines, *leaves, *body(sums, "accurate", ("u",))]


def _scaled(lines: list[str]) -> list[str]:
    """``lines`` of scaled scores. (The product becomes one instruction with the sum behind it.)"""
    return ["s = s * given[5]", *lines]
