"""Quotients and products whose last digit decides: floor(x / 41) is 1 at 41, but 41 times float32's 1 / 41 is less
than 1, and floor(x * 0.01 * 100) is what two products make of it, not one.

A product with an inverse is cheaper than a division, and the digit that it may lose is far below what reaches the
output, unless a step comes after it: a rounding, a cast to integers, a comparison. There a bucket or a block of
positions would begin one too late.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import fx

STEPS = {"floor", "ceil", "round", "trunc", "fmod", "remainder", "floor_divide", "sign", "sgn"}
# What every device rounds as PyTorch does. After another operation (a logarithm) the step is blurred anyway.
ROUNDED_ALIKE = {
    "add", "sub", "mul", "div", "neg", "abs", "sqrt", "square", "minimum", "maximum", "clamp", "clamp_min", "clamp_max",
    "relu", "where", "index", "expand", "clone", "alias", "detach", "contiguous", "_to_copy", *STEPS,
}  # fmt: skip


def before_steps(traced: fx.GraphModule, name_of: Callable[[fx.Node], str], score: fx.Node | None) -> set[fx.Node]:
    """The quotients and products that must be rounded as PyTorch rounds them. Those of the score are not among them:
    it is a sum, which has another last digit on every device."""
    followed, found = set[fx.Node](), set[fx.Node]()
    alike = _rounded_alike(traced, name_of, score)
    for node in reversed(traced.graph.nodes):
        if node.op != "call_function":
            continue
        name, rounding = _name(node, name_of), node.kwargs.get("rounding_mode")
        if node in followed or name in STEPS or rounding is not None or _leaves_floats(node):
            followed.update(node.all_input_nodes)
        if name in ("div", "mul") and rounding is None and node in followed and node in alike:
            found.add(node)
    return found


def _name(node: fx.Node, name_of: Callable[[fx.Node], str]) -> str:
    """Of an operation; none of what picks one of several results, which lower.py refuses with their operation."""
    return name_of(node) if hasattr(node.target, "_schema") else ""


def _leaves_floats(node: fx.Node) -> bool:
    """Whether it makes integers or truth values of floating-point numbers."""
    return not _is_float(node) and any(map(_is_float, node.all_input_nodes))


def _is_float(node: fx.Node) -> bool:
    value = node.meta.get("val")
    return isinstance(value, torch.Tensor) and value.is_floating_point()


def _rounded_alike(traced: fx.GraphModule, name_of: Callable[[fx.Node], str], score: fx.Node | None) -> set[fx.Node]:
    """The nodes that have the same value, to the last digit, on every device. (An integer has no digits to lose.)"""
    found: set[fx.Node] = set()
    for node in traced.graph.nodes:
        if node.op == "call_function":
            alike = not _is_float(node) or (
                _name(node, name_of) in ROUNDED_ALIKE and all(a in found for a in node.all_input_nodes)
            )
        else:
            alike = node is not score
        if alike:
            found.add(node)
    return found
