"""Opens the leaves of a shift: their last operations become part of the sum.

A number without a gradient is one leaf, however it is computed (see split.py): exp2(-h) * (i - j) is one, and its
product cannot be seen. Opened, that product is part of the graph of the sum, and the leaves are 2^-h and i - j.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from gdpa.functions.graph import Arg, Graph, Ref
from gdpa.functions.passes.simplify import Builder
from gdpa.functions.places.program import Program

OPENED = ("add", "sub", "mul", "neg")


def opened(program: Program, sums: Graph) -> tuple[Program, Graph]:
    """``program`` and ``sums``, the graph of the score and the program's outputs, with those last operations of the
    program that are computed for every pair moved to ``sums``."""
    opener = _Opener(program)
    values: list[Arg] = []
    for node in sums.nodes:
        if node.op == "input":
            number = int(node.args[0])  # type: ignore[arg-type]
            values.append(opener.open(program.graph.outputs[number - 1]) if number else opener.b.input(0))
        else:
            values.append(opener.b(node.op, *(values[a.index] if isinstance(a, Ref) else a for a in node.args)))
    total = sums.outputs[0]
    opener.b.n_inputs = 1 + len(opener.leaves)
    graph = opener.b.finish((values[total.index] if isinstance(total, Ref) else total,))
    return replace(program, graph=replace(program.graph, outputs=tuple(opener.leaves))), graph


class _Opener:
    def __init__(self, program: Program) -> None:
        self.program, self.b, self.leaves = program, Builder(1), list[Arg]()
        self._made: dict[Arg, Arg] = {}

    def open(self, a: Arg) -> Arg:
        if not isinstance(a, Ref):
            return float(a)
        if a not in self._made:
            node = self.program.graph.nodes[a.index]
            if node.op in OPENED and node.dtype == torch.float32 and len(self.program.sides[a.index]) == 2:
                self._made[a] = self.b(node.op, *map(self.open, node.args))
            else:
                self.leaves.append(a)
                self._made[a] = self.b.input(len(self.leaves))
        return self._made[a]
