"""Functions of the form g(s + leaves), which is how places are used most: as a bias of the score.

The sum u = s + leaves is the *shift*, g the *outer* function. All that is known of functions of one number then holds
of g: it has a form in PTX, and its derivative by u is that by s. Only its accuracy must be that of the
whole function, since u may lie anywhere (see emit.py).
"""

from __future__ import annotations

import torch
from torch import fx

aten = torch.ops.aten


def split_shift(scores: fx.GraphModule) -> tuple[fx.GraphModule, fx.GraphModule] | None:
    """(s, leaves...) -> u, where u is s plus something of the leaves, and u -> p; None if ``scores``, (s, leaves...) ->
    p, is not of that form."""
    graph = scores.graph
    inputs = [n for n in graph.nodes if n.op == "placeholder"]
    shifted = _last_sum(inputs[0])
    (result,) = graph.output_node().args
    if shifted is None or not isinstance(result, fx.Node) or shifted is result:
        return None
    behind = _behind(shifted)
    constants = _constants(graph)
    if any(a not in behind | constants | {shifted} for n in behind for a in n.all_input_nodes):
        return None
    return _shift(scores, inputs, shifted), _outer(scores, inputs[0], shifted, behind | constants)


def _last_sum(s: fx.Node) -> fx.Node | None:
    """The last one of the sums that s goes through before any other operation; None if there is none."""
    last = None
    while len(s.users) == 1:
        (user,) = s.users
        same = user.target in (aten.clone.default, aten.alias.default)
        sums = user.target is aten.add.Tensor or (user.target is aten.sub.Tensor and user.args[0] is s)
        if not same and (not sums or user.kwargs or user.args[0] is user.args[1]):
            break
        s = user
        last = s if sums else last
    return last


def _behind(start: fx.Node) -> set[fx.Node]:
    found: set[fx.Node] = set()
    waiting = [start]
    while waiting:
        for user in waiting.pop().users:
            if user.op != "output" and user not in found:
                found.add(user)
                waiting.append(user)
    return found


def _constants(graph: fx.Graph) -> set[fx.Node]:
    found: set[fx.Node] = set()
    for node in graph.nodes:
        if node.op not in ("placeholder", "output") and all(a in found for a in node.all_input_nodes):
            found.add(node)
    return found


def _shift(scores: fx.GraphModule, inputs: list[fx.Node], shifted: fx.Node) -> fx.GraphModule:
    graph = fx.Graph()
    env: dict[fx.Node, fx.Node] = {}
    for node in scores.graph.nodes:
        if node.op != "output":
            env[node] = graph.node_copy(node, lambda n: env[n])
        if node is shifted:
            break
    assert all(n in env for n in inputs)
    graph.output(env[shifted])
    graph.eliminate_dead_code()
    return fx.GraphModule(scores, graph)


def _outer(scores: fx.GraphModule, s: fx.Node, shifted: fx.Node, kept: set[fx.Node]) -> fx.GraphModule:
    graph = fx.Graph()
    env = {shifted: graph.node_copy(s)}
    for node in scores.graph.nodes:
        if node in kept:
            env[node] = graph.node_copy(node, lambda n: env[n])
    (result,) = scores.graph.output_node().args
    graph.output(env[result])  # type: ignore[index]
    graph.eliminate_dead_code()
    return fx.GraphModule(scores, graph)
