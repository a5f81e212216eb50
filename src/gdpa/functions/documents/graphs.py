"""Graphs as documents: those of the compiler and those that torch has recorded."""

from __future__ import annotations

from collections.abc import Callable
from operator import getitem
from typing import Any

import torch
from torch import fx, nn

from gdpa.compat import OpOverload
from gdpa.functions.graph import Arg, Graph, Node, Ref

OF_TORCH = (torch.dtype, torch.layout, torch.memory_format)  # which are called as torch has them


class UndocumentedError(Exception):
    """Something that these documents have no words for."""


def of_graph(graph: Graph) -> dict[str, Any]:
    nodes = [[n.op, list(map(_of_arg, n.args)), _name(n.dtype)] for n in graph.nodes]
    return {"n_inputs": graph.n_inputs, "nodes": nodes, "outputs": list(map(_of_arg, graph.outputs))}


def graph_of(document: dict[str, Any]) -> Graph:
    nodes = (Node(op, tuple(map(_arg, args)), getattr(torch, dtype)) for op, args, dtype in document["nodes"])
    return Graph(document["n_inputs"], tuple(nodes), tuple(map(_arg, document["outputs"])))


def _of_arg(a: Arg) -> Any:
    return {"ref": a.index} if isinstance(a, Ref) else a  # JSON tells true, 1 and 1.0 apart, and keeps every digit


def _arg(a: Any) -> Arg:
    return Ref(a["ref"]) if isinstance(a, dict) else a


def _name(x: Any) -> str:
    return str(x).removeprefix("torch.")


# ---- what torch has recorded -----------------------------------------------------------------------------------------
def of_recorded(traced: fx.GraphModule) -> list[Any]:
    """Its nodes: what each does, its arguments, and the number that it is, if it is a constant."""
    number = {node: i for i, node in enumerate(traced.graph.nodes)}

    def value(x: Any) -> Any:
        if isinstance(x, fx.Node):
            return {"node": number[x]}
        if isinstance(x, OF_TORCH):
            return {"torch": _name(x)}
        if isinstance(x, torch.device):
            return {"device": str(x)}
        if isinstance(x, list | tuple):
            return [value(item) for item in x] if isinstance(x, list) else {"tuple": [value(item) for item in x]}
        if x is None or type(x) in (bool, int, float, str):
            return x
        raise UndocumentedError

    def constant(node: fx.Node) -> Any:
        held = getattr(traced, str(node.target)) if node.op == "get_attr" else None
        return None if held is None else [_name(held.dtype), held.tolist()]

    return [
        [n.op, _of_target(n), [value(a) for a in n.args], {k: value(a) for k, a in n.kwargs.items()}, constant(n)]
        for n in traced.graph.nodes
    ]


def _of_target(node: fx.Node) -> str:
    if node.op != "call_function":
        return str(node.target)
    if node.target is getitem:
        return "getitem"
    if isinstance(node.target, OpOverload):
        return str(node.target)
    raise UndocumentedError


def recorded_of(document: list[Any]) -> fx.GraphModule:
    root, graph = nn.Module(), fx.Graph()
    nodes: list[fx.Node] = []

    def value(x: Any) -> Any:
        if isinstance(x, list):
            return [value(item) for item in x]
        if not isinstance(x, dict):
            return x
        ((kind, named),) = x.items()
        return read[kind](named)

    read: dict[str, Callable[[Any], Any]] = {
        "node": nodes.__getitem__,
        "torch": lambda name: getattr(torch, name),
        "device": torch.device,
        "tuple": lambda items: tuple(map(value, items)),
    }
    for op, target, args, kwargs, constant in document:
        if constant is not None:
            dtype, numbers = constant
            setattr(root, target, torch.tensor(numbers, dtype=getattr(torch, dtype)))
        given, named = tuple(map(value, args)), {key: value(a) for key, a in kwargs.items()}
        nodes.append(graph.create_node(op, operator_of(target) if op == "call_function" else target, given, named))
    return fx.GraphModule(root, graph)


def operator_of(name: str) -> Callable[..., Any]:
    if name == "getitem":
        return getitem
    found: Any = torch.ops
    for part in name.split("."):
        found = getattr(found, part)
    return found
