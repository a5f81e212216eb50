"""Checks of documents that come from elsewhere, such as a program's file: of what passes, a graph can be made safely.

A graph that torch has recorded becomes Python code (fx), and one of the compiler Triton code. So every name is one of a
list, or replaced, and all else is a number. Only element-wise operations that write nowhere are let through.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from keyword import iskeyword
from typing import Any

import torch

from gdpa.compat import OpOverload
from gdpa.functions.documents.graphs import OF_TORCH, operator_of
from gdpa.functions.graph import OPS
from gdpa.functions.places.lower import INTEGER_OPS
from gdpa.functions.places.names import INTEGERS, MAX_TABLES, PART_TABLES, POSITIONS, TableKind
from gdpa.functions.tracing.lower import SAME_VALUE

FLOATS = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
DTYPES = {str(t).removeprefix("torch."): t for t in (*FLOATS, *INTEGERS)}
OPERATOR = re.compile(r"aten\.\w+\.\w+", re.ASCII)
WORD = re.compile(r"[a-z_]{1,40}")  # as of rounding_mode
DEVICE = re.compile(r"[a-z]+(:\d{1,4})?")
# Element-wise, though PyTorch has no tag that says so.
ELEMENTWISE = SAME_VALUE | {
    "full_like", "zeros_like", "ones_like", "expand_as", "type_as", "hardswish", "log_sigmoid_forward", "floor_divide",
}  # fmt: skip


class RefusedError(ValueError):
    """What a document has and may not have."""


def need(right: bool, what: str) -> None:
    if not right:
        raise RefusedError(what)


def whole(x: Any, end: int) -> bool:
    """Whether it is an integer from 0 on, before ``end``."""
    return type(x) is int and 0 <= x < end


# ---- graphs of the compiler ------------------------------------------------------------------------------------------
def table_kinds(document: Any) -> tuple[TableKind, ...]:
    need(type(document) is list and len(document) <= MAX_TABLES + PART_TABLES, "tables")
    for ndim, dtype in document:
        need(whole(ndim, 9) and ndim > 0 and DTYPES[dtype] in (torch.float32, *INTEGERS), "a table")
    return tuple(TableKind(ndim, DTYPES[dtype]) for ndim, dtype in document)


def check_places(document: Any, tables: Sequence[TableKind]) -> None:
    """A graph of positions and tables."""
    need(document["n_inputs"] == 0, "inputs of places")
    nodes = document["nodes"]
    for index, (op, args, dtype) in enumerate(nodes):
        need(dtype in DTYPES, f"dtype {dtype!r}")
        if op == "position":
            need(len(args) == 1 and whole(args[0], len(POSITIONS)) and dtype == "int64", "a position")
        elif op == "lookup":
            need(whole(args[0], len(tables)) and len(args) == 1 + tables[args[0]].ndim, "a lookup")
            need(DTYPES[dtype] == tables[args[0]].dtype, "the dtype of a lookup")
        else:
            need(op in OPS or op in INTEGER_OPS, f"operation {op!r}")
        for a in args:
            _check_arg(a, index)
    for a in document["outputs"]:
        _check_arg(a, len(nodes))


def check_learned(learned: Any, document: Any) -> None:
    """Which outputs of places are entries of differentiable tables."""
    outputs, nodes = document["outputs"], document["nodes"]
    for i in learned:
        need(whole(i, len(outputs)) and type(outputs[i]) is dict, "a learned output")
        op, _, dtype = nodes[outputs[i]["ref"]]
        need(op == "lookup" and DTYPES[dtype].is_floating_point, "a learned output")


def _check_arg(a: Any, index: int) -> None:
    """An argument of node ``index``: an earlier node, or a number."""
    if type(a) is dict:
        need(a.keys() == {"ref"} and whole(a["ref"], index), "a reference")
    else:
        need(type(a) in (bool, int, float), "an argument")


# ---- what torch has recorded -----------------------------------------------------------------------------------------
def checked_recorded(document: Any, n_inputs: int) -> list[Any]:
    """A function of ``n_inputs`` numbers, with names of our own for what has no other."""
    need([op for op, *_ in document].count("placeholder") == n_inputs, "inputs")
    return [_checked_node(node, index, index == len(document) - 1) for index, node in enumerate(document)]


def _checked_node(node: Any, index: int, last: bool) -> list[Any]:
    op, target, args, kwargs, constant = node
    need(op in ("placeholder", "get_attr", "call_function", "output") and (op == "output") is last, f"node {op!r}")
    need((constant is not None) is (op == "get_attr"), "a constant")
    if constant is not None:
        dtype, number = constant
        need(dtype in DTYPES and _is_one_number(number), "a constant")
    if op == "call_function":
        need(_is_elementwise(target), f"operation {target!r}")
    else:
        target = "output" if op == "output" else f"{op}_{index}"
        need(not kwargs and len(args) == (op == "output"), f"arguments of {op}")
    for a in (*args, *kwargs.values()):
        _check_value(a, index)
    need(all(name.isidentifier() and not iskeyword(name) for name in kwargs), "a keyword")
    return [op, target, args, kwargs, constant]


def _is_elementwise(name: Any) -> bool:
    if name == "getitem":
        return True
    if type(name) is not str or not OPERATOR.fullmatch(name):
        return False
    op = operator_of(name)
    if not isinstance(op, OpOverload) or op._schema.is_mutable or torch.Tag.nondeterministic_seeded in op.tags:
        return False
    return torch.Tag.pointwise in op.tags or op._schema.name.removeprefix("aten::") in ELEMENTWISE


def _is_one_number(x: Any) -> bool:
    """As Tensor.tolist() has it."""
    return _is_one_number(x[0]) if type(x) is list and len(x) == 1 else type(x) in (bool, int, float)


def _check_value(x: Any, index: int) -> None:
    if type(x) is str:
        need(WORD.fullmatch(x) is not None, "a word")
    elif type(x) is list:
        for item in x:
            _check_value(item, index)
    elif type(x) is dict:
        ((kind, named),) = x.items()
        if kind == "tuple":
            _check_value(list(named), index)
        elif kind == "node":
            need(whole(named, index), "a reference")
        elif kind == "torch":
            need(type(named) is str and isinstance(getattr(torch, named, None), OF_TORCH), "a name of torch")
        else:
            need(kind == "device" and DEVICE.fullmatch(named) is not None, f"a value of kind {kind!r}")
    else:
        need(x is None or type(x) in (bool, int, float), "a value")
