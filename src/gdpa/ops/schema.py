"""The schemas of the operators, and their arguments by name."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from gdpa.problem import Operands, Settings, parts

# The arguments are the fields of Operands and Settings. The scales are Scalar, not float: only a Scalar may stay
# symbolic, so that out_scale = 1 / k.shape[2] does not make torch.compile compile again for every length.
OTHERS = "Tensor? cu_q, Tensor? cu_k, Tensor? params, Tensor? used_q, Tensor? used_k, Tensor[] tables"
SETTINGS = (
    "str[] activations, Scalar scale, Scalar out_scale, SymInt? left, SymInt? right, SymInt? max_q, SymInt? max_k, "
    "str precision, str? backend, str? mask, bool learn"
)
SEPARATE = f"Tensor q, Tensor k, Tensor v, {OTHERS}, {SETTINGS}"
TOGETHER = f"Tensor? q, Tensor rows, {OTHERS}, {SETTINGS}"
GRADS = "(Tensor, Tensor, Tensor, Tensor, Tensor)"
N_OPERANDS = 3 + OTHERS.count(",") + 1


def define(*schemas: str) -> None:
    for schema in schemas:
        name, _, rest = schema.partition("(")
        torch.library.define(f"gdpa::{name}", f"({rest}", tags=torch.Tag.pt2_compliant_tag)


define(
    f"attention({SEPARATE}) -> Tensor",
    f"attention_backward(Tensor grad, {SEPARATE}) -> {GRADS}",
    f"attention_packed({TOGETHER}) -> Tensor",
    f"attention_packed_backward(Tensor grad, {TOGETHER}) -> (Tensor, Tensor, Tensor, Tensor)",
)


def together(q: Tensor | None, rows: Tensor, *args: Any) -> tuple[Any, ...]:
    """The arguments of gdpa::attention for those of gdpa::attention_packed."""
    return (*parts(q, rows), *args)


def records(args: Sequence[Any]) -> tuple[Operands, Settings]:
    """The arguments of gdpa::attention by name."""
    return Operands(*args[:N_OPERANDS]), Settings(*args[N_OPERANDS:])
