"""Splits a function of scores, params, positions and tables in two: a program of the places, and a function of the
scores and the program's results.

These results are the *leaves* of the second function, which takes them as it takes params. The cut is made where
integers become floats, and behind every lookup in a table of floats: so the rest of the function is differentiated as
any function is, and its derivative by a looked-up leaf is the gradient of the table's entry.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from gdpa.errors import UnsupportedActivationError

aten = torch.ops.aten


@dataclass(frozen=True)
class Split:
    places: fx.GraphModule  # (positions..., tables...) -> leaves
    scores: fx.GraphModule  # (s, params..., leaves...) -> p
    learned: tuple[int, ...]  # the leaves that are entries of differentiable tables


class _Cut:
    def __init__(self, raw: fx.GraphModule, n_scores: int, n_positions: int) -> None:
        self.raw = raw
        self.nodes = list(raw.graph.nodes)
        given = [n for n in self.nodes if n.op == "placeholder"]
        self.given_scores, self.given_places = given[:n_scores], given[n_scores:]
        self.tables = set(given[n_scores + n_positions :])
        self.scored, self.placed, self.learned = set(self.given_scores), set(self.given_places), set[fx.Node]()
        for node in self.nodes:
            if node.op == "call_function":
                self._classify(node)

    def _classify(self, node: fx.Node) -> None:
        inputs = node.all_input_nodes
        if self.is_lookup(node):
            indices = [a for a in node.args[1] if isinstance(a, fx.Node)]  # type: ignore[union-attr]
            if any(i in self.scored for i in indices):
                raise UnsupportedActivationError(
                    "the activation indexes a table with something that depends on the score or a param; an index is "
                    "made of positions and of tables"
                )
        if any(a in self.scored for a in inputs):
            self.scored.add(node)
        elif any(a in self.placed for a in inputs):
            self.placed.add(node)
            stops = node.target in (aten.detach.default, aten.alias.default)
            flows = self.is_lookup(node) or (not stops and any(a in self.learned for a in inputs))
            if flows and node.meta["val"].is_floating_point():
                self.learned.add(node)

    def is_lookup(self, node: fx.Node) -> bool:
        return node.target is aten.index.Tensor and node.args[0] in self.tables

    def of_scores(self, node: fx.Node) -> bool:
        """Whether a node belongs to the second function: it is computed from scores, or from entries of learned
        tables."""
        return node in self.scored or (node in self.learned and not self.is_lookup(node))

    def leaves(self) -> list[fx.Node]:
        return [
            n
            for n in self.nodes
            if n in self.placed
            and not self.of_scores(n)
            and any(user.op == "output" or self.of_scores(user) for user in n.users)
        ]


def split(raw: fx.GraphModule, n_scores: int, n_positions: int) -> Split:
    """``raw`` takes the score and params, ``n_scores`` of them, then positions, then tables."""
    cut = _Cut(raw, n_scores, n_positions)
    leaves = cut.leaves()
    learned = tuple(i for i, n in enumerate(leaves) if n in cut.learned)
    return Split(_places(cut, leaves), _scores(cut, leaves), learned)


def _places(cut: _Cut, leaves: list[fx.Node]) -> fx.GraphModule:
    graph = fx.Graph()
    env: dict[fx.Node, fx.Node] = {}
    for node in cut.nodes:
        constant = node.op != "output" and node not in cut.scored
        if node in cut.placed or constant:
            env[node] = graph.node_copy(node, lambda n: env[n])
    graph.output(tuple(env[n] for n in leaves))
    graph.eliminate_dead_code()
    return fx.GraphModule(cut.raw, graph)


def _scores(cut: _Cut, leaves: list[fx.Node]) -> fx.GraphModule:
    graph = fx.Graph()
    env: dict[fx.Node, fx.Node] = {}
    for node in cut.given_scores:
        env[node] = graph.node_copy(node)
    given = {n: graph.placeholder(f"leaf_{i}") for i, n in enumerate(leaves)}
    for leaf in given.values():
        leaf.meta["val"] = cut.given_scores[0].meta["val"]
    for node in cut.nodes:
        if node.op == "placeholder" or node.op == "output":
            continue
        if cut.of_scores(node) or node not in cut.placed:
            env[node] = graph.node_copy(node, lambda n, user=node: _leaf(graph, given, n, user, env))  # type: ignore[misc]
    (result,) = next(n for n in cut.nodes if n.op == "output").args
    graph.output(env[result] if result in env else given[result])
    graph.eliminate_dead_code()
    return fx.GraphModule(cut.raw, graph)


def _leaf(graph: fx.Graph, given: dict[fx.Node, fx.Node], n: fx.Node, user: fx.Node, env: Any) -> fx.Node:
    """``n`` as an argument of ``user``. Leaves arrive as numbers of the scores' dtype, and integers and truth values
    are made of them again where an operation would give another result."""
    if n not in given:
        return env[n]
    dtype = n.meta["val"].dtype
    if dtype == torch.float32 or (dtype != torch.bool and not dtype.is_floating_point and _promotes(user, n)):
        return given[n]
    if dtype == torch.bool:
        made = graph.call_function(aten.ne.Scalar, (given[n], 0))
    else:
        made = graph.call_function(aten._to_copy.default, (given[n],), {"dtype": dtype})
    made.meta["val"] = n.meta["val"]
    return made


def _promotes(user: fx.Node, n: fx.Node) -> bool:
    """Whether ``user`` takes the integer ``n`` as a floating point number."""
    if user.meta["val"].is_floating_point():
        return True
    others = [a.meta.get("val") for a in user.all_input_nodes if a is not n]
    return any(isinstance(v, Tensor) and v.is_floating_point() for v in others)
