"""Params of a function of positions as entries of one more table, which is looked up by head.

To a kernel a param is then one of the leaves (see split.py): s - slope * (q_idx - kv_idx) with a learned slope is a sum
of the score and leaves as it is with slopes[h], and has that code and that gradient.
"""

from __future__ import annotations

import torch

from gdpa.functions.activation import Activation, register, traced_shift
from gdpa.functions.graph import Arg, Graph, Node
from gdpa.functions.isolation import isolated
from gdpa.functions.kept import kept_with_activation
from gdpa.functions.passes.simplify import Builder
from gdpa.functions.places.names import POSITIONS, TableKind
from gdpa.functions.places.program import Program
from gdpa.functions.traced import Placed

TABLE = TableKind(2, torch.float32)  # (params, heads), behind the function's own tables


@kept_with_activation
def with_params_looked_up(act: Activation) -> Activation | None:
    """A function without params that takes their TABLE as its last one; None if ``act`` is no sum of the score and
    leaves even then, to which nothing would be gained."""
    if act.placed is None or act.n_params == 0:
        return None
    placed, n = act.placed, act.n_params
    program = Program(_with_lookups(placed.program, n), (*placed.program.tables, TABLE))
    learned = (*range(n), *(n + leaf for leaf in placed.learned))
    key = f"{act.key}-params"
    inner = Activation(f"{act.name}_scores", f"{key}-scores", act._traced, act.joint)
    with isolated():
        shift = traced_shift(inner, len(program.graph.outputs), quick=False)
    if shift is None:
        return None
    return register(Activation(act.name, key, act._traced, act.joint, placed=Placed(program, learned, inner, shift)))


def _with_lookups(program: Program, n_params: int) -> Graph:
    """The program's graph with the params before its own results."""
    b = Builder(0)
    for node in program.graph.nodes:
        b.intern(node)
    head = b.intern(Node("position", (POSITIONS.index("h"),), torch.int64))
    table = len(program.tables)
    params: list[Arg] = [b.intern(Node("lookup", (table, i, head), torch.float32)) for i in range(n_params)]
    return b.finish((*params, *program.graph.outputs))
