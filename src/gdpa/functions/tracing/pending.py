"""Whether a function computes in Python what it computes in the code that torch.compile is about to make.

Dynamo only notes what the code it traces makes and changes: a module that it makes is still without its settings, an
attribute, a list or a global that it sets still has its old value. The function is traced in Python, which sees those.
So what Dynamo has traced of the function is computed on a few numbers, and so is the function.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, fx

from gdpa import compat
from gdpa.errors import UnsupportedActivationError
from gdpa.functions.isolation import isolated

ITS_OWN = (
    "what the code being compiled makes or changes itself (a module, an attribute, a global), which torch.compile "
    "keeps back until that code has run"
)
OPEN = "a number that torch.compile leaves open, inside of activation checkpointing or the like"
COUNT = 9  # scores, or positions, on which both are computed


def nodes_so_far() -> int:
    """Of the graph that Dynamo makes; 0 if what compiles is not Dynamo."""
    return len(_nodes())


def in_region() -> bool:
    """Whether Dynamo traces what it makes a graph of its own for, as activation checkpointing."""
    tx = _translator()
    return tx is not None and tx.output.current_tracer.parent is not None


nodes_so_far._dynamo_marked_constant = True  # type: ignore[attr-defined]  # see api.py
in_region._dynamo_marked_constant = True  # type: ignore[attr-defined]


Span = tuple[int, int]  # of nodes: the first one and the end


def refuse_pending(what: str, span: Span, dtypes: Sequence[torch.dtype], call: Callable[[list[Tensor]], Any]) -> None:
    """Refuse a function whose nodes in Dynamo's graph compute something else than ``call`` of the same stand-ins.
    Theirs are the nodes before, one for each of ``dtypes``."""
    first, end = span
    if first == end:
        return
    with isolated(), torch.no_grad():
        nodes = _nodes()
        stand_ins = nodes[first - len(dtypes) : first]
        if any(node.target != "new_ones" for node in stand_ins):
            return
        compiled = _computed(nodes[first:end], dict(zip(stand_ins, _samples(dtypes), strict=True)))
        if compiled is None:
            if in_region():  # where no number was made a constant (see guards)
                raise UnsupportedActivationError(f"the {what} reads {OPEN}: pass it through params or tables")
            return
        if _is_same(compiled, call, _samples(dtypes)):
            return
    raise UnsupportedActivationError(
        f"the {what} reads {ITS_OWN}: make or change it outside, or pass numbers through params or tables"
    )


@contextmanager
def told_of_pending() -> Iterator[None]:
    """Says what may be the reason where Python does not find an attribute while Dynamo traces."""
    try:
        yield
    except UnsupportedActivationError as e:
        if not isinstance(e.__cause__, AttributeError) or _translator() is None:
            raise
        raise UnsupportedActivationError(f"{e}. If it is {ITS_OWN}: make it outside") from e.__cause__


def _nodes() -> list[fx.Node]:
    """In order, without inputs: Dynamo puts new ones before all others."""
    tx = _translator()
    return [] if tx is None else [node for node in tx.output.graph.nodes if node.op != "placeholder"]


def _translator() -> Any:
    return getattr(compat.dynamo_state, "current_tx", None)


def _samples(dtypes: Sequence[torch.dtype]) -> list[Tensor]:
    """New ones at every call: a function may work in place."""
    return [_sample(i, dtype) for i, dtype in enumerate(dtypes)]


def _sample(i: int, dtype: torch.dtype) -> Tensor:
    """Scores, then single numbers; integers and truths of many kinds."""
    if dtype.is_floating_point:
        return torch.linspace(-2.5, 3.0, COUNT) if i == 0 else torch.tensor([0.6 + 0.2 * i])
    steps = (torch.arange(COUNT) * (i + 2) + i) % 11
    return steps % 2 == 0 if dtype == torch.bool else steps.to(dtype)


def _computed(nodes: Sequence[fx.Node], known: dict[fx.Node, Any]) -> Tensor | None:
    """The value of the last node; None if they need more than is known."""
    found: Any = None
    for node in nodes:
        if node.op not in ("call_function", "call_method") or not known.keys() >= set(node.all_input_nodes):
            return None
        args = fx.map_arg(node.args, known.__getitem__)
        kwargs = fx.map_arg(node.kwargs, known.__getitem__)
        target: Any = node.target
        found = target(*args, **kwargs) if node.op == "call_function" else getattr(args[0], target)(*args[1:], **kwargs)
        known[node] = found
    return found if isinstance(found, Tensor) else None


def _is_same(compiled: Tensor, call: Callable[[list[Tensor]], Any], samples: list[Tensor]) -> bool:
    try:
        found = call(samples)
    except Exception:  # an object that has not got its attributes yet; for Dynamo, which saw them, nothing failed
        return False
    one, other = torch.broadcast_tensors(compiled.double(), torch.as_tensor(found).double())
    return torch.allclose(one, other, rtol=1e-4, atol=1e-6, equal_nan=True)
