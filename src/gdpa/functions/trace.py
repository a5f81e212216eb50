"""From a Python function of torch operations to graphs: the function itself, and it with its derivatives.

``trace`` runs the function once on fake tensors and records aten operations. ``trace_joint`` does the same for
``(f(s), df/ds, df/dparam...)`` through its vjp, with composite operations (gelu, softplus and their backwards)
decomposed, so that value and derivatives share work in one graph.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch._decomp import core_aten_decompositions
from torch._subclasses.fake_tensor import DataDependentOutputException
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode

from gdpa.errors import UnsupportedActivationError
from gdpa.functions.decompositions import DECOMPOSITIONS
from gdpa.functions.graph import Graph
from gdpa.functions.lower import ONES, ZEROS, lower

TRACE_SHAPE = torch.Size((3, 5))  # no dimension of it is 1, so that a lost or broadcast dimension shows


def trace(fn: Callable[..., Any], n_params: int) -> fx.GraphModule:
    """The aten operations of ``fn(s, *params)``, not decomposed: run eagerly it is what PyTorch would have run."""
    check_callable(fn, n_params)
    return make_constants_follow_input(_make_fx(lambda *a: checked_call(fn, *a), n_params, {}))


def trace_joint(traced: fx.GraphModule, n_params: int) -> Graph:
    """The graph of ``(p, dp/ds, dp/dparam...)`` for a function that ``trace`` has recorded."""

    def joint(*args: Tensor) -> tuple[Tensor, ...]:
        p, vjp = torch.func.vjp(traced, *args)
        return (p, *vjp(torch.ones_like(p)))

    table = _decomposition_table()
    lower(_make_fx(lambda *a: (traced(*a),), n_params, table))  # names a bad operation before autograd stumbles on it
    try:
        recorded = _make_fx(joint, n_params, table)
    except RuntimeError as e:
        raise UnsupportedActivationError(f"the activation has no derivative in PyTorch: {e}") from e
    return lower(recorded)


@cache
def _decomposition_table() -> dict[Any, Callable[..., Any]]:
    return {**core_aten_decompositions(), **DECOMPOSITIONS}


def _make_fx(fn: Callable[..., Any], n_params: int, table: dict[Any, Any]) -> fx.GraphModule:
    """``make_fx`` on fake tensors, in-place operations made functional, failures turned into readable errors."""
    inputs = [torch.empty(TRACE_SHAPE) for _ in range(1 + n_params)]
    functional = torch.func.functionalize(fn)
    try:
        with torch.random.fork_rng(devices=[]), torch.no_grad(), _no_autocast():
            return make_fx(functional, decomposition_table=table, tracing_mode="fake")(*inputs)
    except UnsupportedActivationError:
        raise
    except (GuardOnDataDependentSymNode, DataDependentOutputException) as e:
        raise UnsupportedActivationError(
            "the activation's control flow depends on the scores (an `if`, `while`, bool() or .item() on a tensor); "
            "use torch.where"
        ) from e
    except AssertionError as e:
        if "FakeTensor" not in str(e):
            raise
        raise UnsupportedActivationError(
            "the activation captures a tensor (a closure, a global or a module's buffer); pass it through params, "
            "or capture a Python number"
        ) from e


def _no_autocast() -> Any:
    """A function means the same inside and outside of an autocast region."""
    return torch.autocast("cpu", enabled=False)


def checked_call(fn: Callable[..., Any], *args: Tensor) -> Tensor:
    """``fn`` on copies of its arguments (it may work in place), with its result checked."""
    try:
        p = fn(*(a.clone() for a in args))
    except (UnsupportedActivationError, GuardOnDataDependentSymNode, DataDependentOutputException, AssertionError):
        raise
    except Exception as e:
        raise UnsupportedActivationError(f"the activation raised {type(e).__name__} when traced: {e}") from e
    if not isinstance(p, Tensor):
        raise UnsupportedActivationError(f"the activation must return one tensor, it returned {type(p).__name__}")
    if p.shape != TRACE_SHAPE:
        raise UnsupportedActivationError(
            f"the activation must return one value per score: it made shape {tuple(p.shape)} of {tuple(TRACE_SHAPE)}"
        )
    if not p.is_floating_point():
        raise UnsupportedActivationError(f"the activation must return floating point values, it returned {p.dtype}")
    return p.float() if p.dtype != torch.float32 else p


def check_callable(fn: Any, n_params: int) -> None:
    """Refuse what is not a function of ``1 + n_params`` tensors, before it is run."""
    if not callable(fn):
        raise TypeError(f"activation={fn!r} is neither a name, a function, a gdpa.Activation nor a list of those")
    if isinstance(fn, nn.Module) and next(fn.parameters(), None) is not None:
        raise UnsupportedActivationError(
            f"activation={type(fn).__name__} owns parameters; write it as a function and pass them through params"
        )
    try:
        inspect.signature(fn).bind(*range(1 + n_params))
    except ValueError:  # builtins without a signature
        return
    except TypeError as e:
        raise TypeError(
            f"activation {getattr(fn, '__name__', fn)!r} cannot be called with a score and {n_params} params: {e}"
        ) from e


def make_constants_follow_input(traced: fx.GraphModule) -> fx.GraphModule:
    """Give tensors made inside the function (zeros, full, ...) the shape and device of the score they meet."""
    graph = traced.graph
    score = next(n for n in graph.nodes if n.op == "placeholder")
    for node in list(graph.nodes):
        if node.op != "call_function" or any(isinstance(a, fx.Node) for a in node.args):
            continue
        name = node.target._schema.name.removeprefix("aten::")
        if name == "full" or name == "scalar_tensor":
            value = node.args[1 if name == "full" else 0]
        elif name in ZEROS | ONES and not name.startswith("empty"):
            value = int(name in ONES)
        else:
            continue  # lower() refuses it by name
        with graph.inserting_before(node):
            kwargs = {"dtype": node.kwargs["dtype"]} if node.kwargs.get("dtype") is not None else {}
            filled = graph.call_function(torch.ops.aten.full_like.default, (score, value), kwargs)
            filled.meta = node.meta
        node.replace_all_uses_with(filled)
        graph.erase_node(node)
    traced.recompile()
    return traced
