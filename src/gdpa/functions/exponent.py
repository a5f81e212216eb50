"""Functions of the form f = exp(g): finds g, from which row sums are computed so that they do not overflow."""

from __future__ import annotations

import copy
from functools import partial

import torch
from torch import fx

from gdpa.functions.graph import Graph
from gdpa.functions.isolation import run_alone
from gdpa.functions.traced import TracedFunction

aten = torch.ops.aten
SAME = (aten.clone.default, aten.alias.default)


def exponent_of(act: TracedFunction) -> tuple[fx.GraphModule, Graph] | None:
    """g as recorded, and its graph with derivatives, if the last operation of f is exp: f(s) = exp(g(s))."""
    last = _result(act._traced.graph)
    if not isinstance(last, fx.Node) or last.target is not aten.exp.default:
        return None
    return run_alone(partial(_exponent, act))


def _exponent(act: TracedFunction) -> tuple[fx.GraphModule, Graph]:
    from gdpa.functions.tracing.trace import trace_joint

    traced = _without_exp(act._traced)
    return traced, trace_joint(traced, act.joint.n_inputs - 1)


def _result(graph: fx.Graph) -> object:
    (found,) = graph.output_node().args
    while isinstance(found, fx.Node) and found.target in SAME:
        found = found.args[0]
    return found


def _without_exp(traced: fx.GraphModule) -> fx.GraphModule:
    graph = copy.deepcopy(traced.graph)
    last = _result(graph)
    assert isinstance(last, fx.Node)
    output = graph.output_node()
    with graph.inserting_before(output):
        result = graph.call_function(aten.clone.default, (last.args[0],))  # f may be exp itself, its argument an input
        result.meta = dict(last.meta)
    output.args = (result,)
    graph.eliminate_dead_code()
    return fx.GraphModule(traced, graph)
