"""From a Python function of torch operations to graphs: the function itself, and it with its derivatives.

``trace`` runs the function once on fake tensors and records aten operations. ``trace_joint`` does the same for
``(f(s), df/ds, df/dparam...)`` through its vjp, with composite operations (gelu, softplus and their backwards)
decomposed, so that value and derivatives share work in one graph.
"""

from __future__ import annotations

import inspect
import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from operator import getitem
from typing import Any

import torch
from torch import Tensor, fx, nn

from gdpa import compat
from gdpa.compat import DataDependentOutputException, OpOverload
from gdpa.errors import UnsupportedActivationError
from gdpa.foreign import FOURTH
from gdpa.functions.graph import Graph
from gdpa.functions.places.names import PLAIN, Signature
from gdpa.functions.tracing.decompositions import DECOMPOSITIONS
from gdpa.functions.tracing.lower import FILLED, ONES, SAME_VALUE, TRACE_SHAPE, ZEROS, lower, refusal
from gdpa.functions.tracing.record import record, record_joint


@cache
def control_flow() -> tuple[type[Exception], ...]:
    """What tracing raises where Python asks for a value."""
    from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode  # here, since it imports sympy

    return GuardOnDataDependentSymNode, DataDependentOutputException


def trace(fn: Callable[..., Any], n_params: int, quick: bool = False) -> fx.GraphModule:
    """The aten operations of ``fn(s, *params)``, not decomposed: run eagerly it is what PyTorch would have run.
    ``quick``: without PyTorch's compiler, if that is possible (see record.py); then an error may be another one."""
    check_callable(fn, n_params)

    def call(*args: Tensor) -> Tensor:
        return checked_call(fn, *args)

    traced = None
    if quick:
        with _alone():
            traced = record(call, numbers(n_params), {})
    traced = traced or make_graph(call, score_inputs(n_params), {})
    return make_constants_follow_input(known_kinds(traced))


def score_inputs(n_params: int) -> list[Tensor]:
    """A score and params to trace with."""
    return [torch.empty(TRACE_SHAPE, dtype=torch.float32) for _ in range(1 + n_params)]


def numbers(n_params: int) -> list[Tensor]:
    """The same with something in them."""
    return [torch.zeros(TRACE_SHAPE, dtype=torch.float32) for _ in range(1 + n_params)]


def known_kinds(traced: fx.GraphModule) -> fx.GraphModule:
    """Refuse complex numbers and what is no operation on tensors."""
    for node in traced.graph.nodes:
        if getattr(node.meta.get("val"), "dtype", torch.float32).is_complex:
            raise refusal(f"complex numbers ({node.target})")
        if node.op == "call_function" and not (node.target is getitem or isinstance(node.target, OpOverload)):
            raise refusal(_not_elementwise(traced) or str(node.target))  # torch.cond, arithmetic of sizes
    return traced


def trace_joint(traced: fx.GraphModule, n_params: int, quick: bool = False) -> Graph:
    """The graph of ``(p, dp/ds, dp/dparam...)`` for a function that ``trace`` has recorded."""
    found = _quick_joint(traced, n_params) if quick else None
    if found is not None:
        return found

    def joint(*args: Tensor) -> tuple[Tensor, ...]:
        p, vjp = torch.func.vjp(traced.forward, *args)  # type: ignore[misc]  # three results only with has_aux
        return (p, *vjp(torch.ones_like(p)))

    table = decomposition_table()
    try:  # a bad operation is named before autograd stumbles on it, and by its own name if it is decomposed
        lower(make_graph(lambda *a: (traced.forward(*a),), score_inputs(n_params), table))
    except UnsupportedActivationError as e:
        culprit = _not_elementwise(traced)
        raise refusal(culprit) if culprit else e from None
    except RuntimeError as e:
        raise UnsupportedActivationError(f"the activation raised {type(e).__name__} when traced: {e}{hint(e)}") from e
    try:
        recorded = make_graph(joint, score_inputs(n_params), table)
    except RuntimeError as e:
        raise UnsupportedActivationError(f"the activation has no derivative in PyTorch: {e}") from e
    return lower(recorded)


def _quick_joint(traced: fx.GraphModule, n_params: int) -> Graph | None:
    table = {**compat.core_decompositions_after_autograd(), **DECOMPOSITIONS}
    with _alone():
        value = record(lambda *a: (traced.forward(*a),), numbers(n_params), table)
        joint = record_joint(traced.forward, numbers(n_params), table)
    if value is None or joint is None:
        return None
    lower(value)  # as below
    return lower(joint)


# Element-wise, and not tagged so by PyTorch; some of it make_constants_follow_input has put there.
HARMLESS = SAME_VALUE | FILLED.keys() | ZEROS | ONES | {"expand", "expand_as", "type_as", "hardswish"}


def _not_elementwise(traced: fx.GraphModule) -> OpOverload | None:
    """The first operation that mixes scores, if PyTorch's tags tell."""
    for node in traced.graph.nodes:
        if isinstance(node.target, OpOverload) and isinstance(node.meta.get("val"), Tensor):
            name = node.target._schema.name.removeprefix("aten::")
            if torch.Tag.pointwise not in node.target.tags and name not in HARMLESS:
                return node.target
    return None


@cache
def decomposition_table() -> dict[Any, Callable[..., Any]]:
    return {**compat.core_aten_decompositions(), **DECOMPOSITIONS}


_one_at_a_time = threading.RLock()  # make_fx keeps what it patches in a global


def make_graph(fn: Callable[..., Any], inputs: list[Tensor], table: dict[Any, Any]) -> fx.GraphModule:
    """``make_fx`` on fake tensors, in-place operations made functional, failures turned into readable errors."""
    from torch.fx.experimental.proxy_tensor import make_fx  # here, since it imports sympy, and calling it the rest

    functional = torch.func.functionalize(fn)
    try:
        with _one_at_a_time, _quiet_fakes(), _alone():
            return make_fx(functional, decomposition_table=table, tracing_mode="fake")(*inputs)
    except UnsupportedActivationError:
        raise
    except control_flow() as e:
        raise UnsupportedActivationError(
            "the activation's control flow depends on the scores (an `if`, `while`, bool() or .item() on a tensor); "
            "use torch.where"
        ) from e
    except AssertionError as e:
        if "FakeTensor" not in str(e):
            raise
        raise UnsupportedActivationError(
            "the activation captures a tensor (a closure, a global or a module's buffer); pass it through params, or "
            "through tables if it is indexed, or capture a Python number"
        ) from e


@contextmanager
def _alone() -> Iterator[None]:
    with torch.random.fork_rng(devices=[]), torch.no_grad(), _no_autocast():
        yield


def _no_autocast() -> Any:
    """A function means the same inside and outside of an autocast region."""
    return torch.autocast("cpu", enabled=False)


def checked_call(fn: Callable[..., Any], *args: Tensor) -> Tensor:
    """``fn`` on copies of its arguments (it may work in place), with its result checked."""
    try:
        p = fn(*(a.clone() for a in args))
    except Exception as e:
        if isinstance(e, (UnsupportedActivationError, AssertionError, *control_flow())):
            raise
        if "autograd.Function" in str(e) or "custom_function_call" in str(e):
            raise UnsupportedActivationError(
                "the activation uses a custom torch.autograd.Function, whose backward tracing does not see; write it "
                "with torch operations (a straight-through estimator is s + (g(s) - s).detach())"
            ) from e
        raise UnsupportedActivationError(f"the activation raised {type(e).__name__} when traced: {e}{hint(e)}") from e
    if not isinstance(p, Tensor):
        raise UnsupportedActivationError(f"the activation must return one tensor, but it returned {type(p).__name__}")
    if p.shape != TRACE_SHAPE:
        raise UnsupportedActivationError(
            f"the activation must return one value per score, but it returned shape {tuple(p.shape)} for "
            f"{tuple(TRACE_SHAPE)}"
        )
    if not p.is_floating_point():
        raise UnsupportedActivationError(f"the activation must return floating point values, but it returned {p.dtype}")
    return p.float() if p.dtype != torch.float32 else p


IS_A_TABLE = "an argument that is indexed is a table: pass it through tables, not params"
FEW_GIVEN = (
    "what follows the score is given by params=(...), or by tables=(...) if the function indexes it (layers of gdpa.nn "
    "have score_bias for that)"
)
# What PyTorch says, and what is meant, most likely.
_HINTS = {
    # a tensor as large as the scores of one call
    ("broadcast", "must match the size"): (
        "a function sees one score at a time, of any sequence: a bias or mask for each pair is a table, indexed by the "
        "keyword-only arguments q_idx and kv_idx; docs/positions.md"
    ),
    # of params and positions, which are tensors too
    ("Boolean value of Tensor", "converted to Python scalars"): (
        "`if`, `and`, `or`, `not`, chained comparisons and Python's math need a single number, but here there is one "
        "per pair: use torch.where, &, |, ~ and torch's functions"
    ),
    ("tensors used as indices",): IS_A_TABLE,
    ("Indexed",): "a table can only be indexed, with one index per dimension",
}


def hint(error: Exception) -> str:
    """What to write instead, in parentheses, if that can be guessed."""
    found = (meant for said, meant in _HINTS.items() if any(words in str(error) for words in said))
    return next((f" ({meant})" for meant in found), "")


@contextmanager
def _quiet_fakes() -> Iterator[None]:
    """torch logs the traceback of what fails on fake tensors, which the error here says in a line."""
    logger = logging.getLogger("torch._subclasses.fake_tensor")
    logger.addFilter(_nothing)
    try:
        yield
    finally:
        logger.removeFilter(_nothing)


def _nothing(record: logging.LogRecord) -> bool:
    return record.levelno < logging.ERROR


def check_callable(fn: Any, n_params: int, n_tables: int = 0, signature: Signature = PLAIN) -> None:
    """Refuse what is not a function of ``1 + n_params`` tensors, tables and positions, before it is run."""
    if not callable(fn):
        given = f" is a tensor of shape {tuple(fn.shape)}," if isinstance(fn, Tensor) else f"={fn!r} is"
        hint = f". {FOURTH}" if fn is None or isinstance(fn, Tensor) else ""
        raise TypeError(f"activation{given} neither a name, a function, a gdpa.Activation nor a list of those{hint}")
    if isinstance(fn, nn.Module) and next(fn.parameters(), None) is not None:
        raise UnsupportedActivationError(
            f"activation={type(fn).__name__} owns parameters, which gdpa.attention and gdpa.nn layers take as params "
            "of the function; here write it as a function f(s, *params)"
        )
    if hasattr(fn, "_torchdynamo_orig_callable"):
        raise UnsupportedActivationError(
            "the activation was made by torch.compile; pass the plain function, it becomes part of the kernel"
        )
    try:
        signature.call(inspect.signature(fn).bind, range(1 + n_params + n_tables), dict.fromkeys(signature.positions))
    except ValueError:  # builtins without a signature
        return
    except TypeError as e:
        tables = f" and {n_tables} tables" if n_tables else ""
        if len(inspect.signature(fn).parameters) == 5 and not n_params and not n_tables:
            tables += " (a score mod of FlexAttention names its arguments score, b, h, q_idx, kv_idx)"
        name = getattr(fn, "__name__", fn)
        missing = f"; {FEW_GIVEN}" if "missing" in str(e) else ""
        said = f"activation {name!r} cannot be called with a score and {n_params} params{tables}: {e}{missing}"
        raise TypeError(said) from e


def check_faithful(fn: Callable[..., Any], traced: fx.GraphModule, n_params: int) -> None:
    """Refuse a function that computes something else than was recorded of it: on other numbers and in another shape.

    Tracing sees neither that a number came from ``s.shape`` nor ``torch.no_grad()`` nor hooks nor state.
    """
    compare(fn, traced.forward, other_numbers(n_params))


def other_numbers(n_params: int) -> list[Tensor]:
    s = torch.linspace(-3.7, 4.1, 24, dtype=torch.float32).view(2, 3, 4)
    return [s, *(0.3 * (s + i).cos() + 0.6 for i in range(n_params))]


def compare(fn: Callable[..., Any], recorded_fn: Callable[..., Tensor], numbers: list[Tensor]) -> None:
    with torch.enable_grad(), _no_autocast():
        inputs = [t.requires_grad_() for t in numbers]
        s = inputs[0]
        try:
            called = fn(*(t.clone() for t in inputs))
        except Exception as e:
            raise UnsupportedActivationError(
                f"the activation raised {type(e).__name__} on scores of shape {tuple(s.shape)}, but must take any: {e}"
            ) from e
        recorded = recorded_fn(*inputs)
        if called.shape != s.shape or not _close(called, recorded):
            raise UnsupportedActivationError(
                "the activation depends on more than the score and params: on the shape of the scores (s.shape, "
                "len(s); lengths are the keyword-only arguments q_len and kv_len), or on something that changed "
                "between two calls; capture a Python number, or use out_scale"
            )
        _check_in_float64(fn, recorded_fn, [t.detach().double() for t in inputs])
        try:
            theirs = _gradients(called, inputs)
        except RuntimeError as e:
            raise UnsupportedActivationError(f"the activation has no derivative in PyTorch: {e}") from e
        pairs = zip(theirs, _gradients(recorded, inputs), strict=True)
        if not all(_close(*pair) for pair in pairs):
            raise UnsupportedActivationError(
                "the activation's gradient is not that of its operations, because of torch.no_grad() or a hook, which "
                "tracing does not see; use .detach()"
            )


def _check_in_float64(fn: Callable[..., Any], recorded_fn: Callable[..., Tensor], inputs: list[Tensor]) -> None:
    """Scores are float32 when a function is recorded, and float64 in calls of that dtype."""
    try:
        called = fn(*(t.clone() for t in inputs))
    except Exception:  # it insists on float32, which is what recorded casts give it
        return
    if not _close(called, recorded_fn(*inputs)):
        raise UnsupportedActivationError(
            "the activation depends on the dtype of the scores (s.dtype), which is float32 when it is recorded"
        )


def _close(a: Tensor, b: Tensor) -> bool:
    return torch.allclose(a.float(), b.float(), rtol=1e-4, atol=1e-6, equal_nan=True)


def _gradients(p: Tensor, inputs: list[Tensor]) -> tuple[Tensor, ...]:
    if not p.requires_grad:
        return tuple(torch.zeros_like(t) for t in inputs)
    return torch.autograd.grad(p.sum(), inputs, allow_unused=True, materialize_grads=True)  # a gradient imports sympy


def make_constants_follow_input(traced: fx.GraphModule) -> fx.GraphModule:
    """Give tensors made inside the function (zeros, full, ...) the shape and device of the score they meet, and what
    is cast to float32 its dtype: ``.to(s.dtype)`` looks the same here, and a float64 call is not to lose digits."""
    graph = traced.graph
    score = next(n for n in graph.nodes if n.op == "placeholder")
    for node in list(graph.nodes):
        value = node.meta.get("val")
        if not isinstance(node.target, OpOverload) or getattr(value, "shape", None) not in (TRACE_SHAPE, ()):
            continue
        name = node.target._schema.name.removeprefix("aten::")
        if name == "expand":
            node.target, node.args = torch.ops.aten.expand_as.default, (node.args[0], score)
            continue
        if name == "_to_copy" and value.dtype == torch.float32:
            node.target, node.args, node.kwargs = torch.ops.aten.type_as.default, (node.args[0], score), {}
            continue
        if name.endswith("_like"):
            continue  # already does
        if name in FILLED:
            fill = node.args[FILLED[name]]
        elif name in ZEROS | ONES and not name.startswith("empty"):
            fill = int(name in ONES)
        else:
            continue  # lower() refuses it by name
        with graph.inserting_before(node):
            kwargs = {"dtype": value.dtype} if value.dtype != torch.float32 else {}
            filled = graph.call_function(torch.ops.aten.full_like.default, (score, fill), kwargs)
            filled.meta = node.meta
        node.replace_all_uses_with(filled)
        graph.erase_node(node)
    traced.recompile()
    return traced
