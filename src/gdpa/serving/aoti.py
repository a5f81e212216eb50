"""The attention operators as AOTInductor can call them.

Its caller of operators that it has no kernel for leaves an empty list of tensors out, so that it arrives as None
(torch 2.13, OSSProxyExecutor::call_function). Most calls have no tables: these operators take None for them.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.export import ExportedProgram

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


def replace_operators(program: ExportedProgram) -> ExportedProgram:
    """The program with the operators of this module in place of gdpa's, changed in place."""
    for node in program.graph.nodes:
        if node.op == "call_function":
            node.target = SERVED.get(node.target, node.target)
    program.graph_module.recompile()
    return program
