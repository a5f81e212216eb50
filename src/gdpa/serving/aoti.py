"""The attention operators as AOTInductor can call them.

Its caller of operators that it has no kernel for leaves an empty list of tensors out, so that it arrives as None
(torch 2.13, OSSProxyExecutor::call_function). Most calls have no tables: these operators take None for them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.export import ExportedProgram
from torch.fx import GraphModule, Node

import gdpa.api  # noqa: F401 - defines the operators

SUFFIX = "_served"


def _define(name: str) -> tuple[Any, Any]:
    """gdpa::name, and the same with ``Tensor[]? tables``."""
    op = getattr(torch.ops.gdpa, name).default
    _, _, signature = str(op._schema).partition("(")
    place = [argument.name for argument in op._schema.arguments].index("tables")

    def call(*args: Any) -> Any:
        return op(*args[:place], args[place] or [], *args[place + 1 :])

    full = f"gdpa::{name}{SUFFIX}"
    torch.library.define(full, "(" + signature.replace("Tensor[] tables", "Tensor[]? tables"))
    torch.library.impl(full, "CompositeExplicitAutograd")(call)
    torch.library.register_fake(full)(call)
    return op, getattr(torch.ops.gdpa, name + SUFFIX).default


SERVED = dict(_define(name) for name in ("attention", "attention_packed", "normalized", "normalized_packed"))


@contextmanager
def with_served_operators(program: ExportedProgram) -> Iterator[ExportedProgram]:
    """The program with the operators of this module in place of gdpa's, until the end of the block."""
    parts = [part for part in program.graph_module.modules() if isinstance(part, GraphModule)]
    nodes = [(node, node.target) for part in parts for node in part.graph.nodes if node.op == "call_function"]
    try:
        _set_targets(parts, [(node, SERVED.get(target, target)) for node, target in nodes])
        yield program
    finally:
        _set_targets(parts, nodes)


def _set_targets(parts: Sequence[GraphModule], nodes: Sequence[tuple[Node, Any]]) -> None:
    for node, target in nodes:
        node.target = target
    for part in parts:
        part.recompile()
