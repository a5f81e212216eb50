"""Activation: a function of the scores, traced once and named by its graph.

A function's identity is its traced graph, so two lambdas that compute the same are one Activation: they share compiled
kernels, and re-creating one at every step neither recompiles nor leaks.
"""

from __future__ import annotations

import hashlib
import re
import threading
from collections.abc import Callable, Hashable, Sequence
from functools import cached_property
from typing import Any, overload

import torch
from torch import Tensor, fx

from gdpa.functions.fingerprint import fingerprint
from gdpa.functions.graph import Graph


class Activation:
    """A traced function ``f(s, *params)``; make one with :func:`gdpa.activation`, or pass the function itself.

    >>> @gdpa.activation
    ... def squared_softplus(s):
    ...     return torch.nn.functional.softplus(s) ** 2
    >>> out = gdpa.attention(q, k, v, squared_softplus)
    """

    def __init__(self, name: str, traced: fx.GraphModule, joint: Graph, triton: Any = None) -> None:
        self.name = name
        self.joint = joint
        self.triton = triton
        self._traced = traced
        self.key = _key(traced, triton)

    @property
    def n_params(self) -> int:
        return self.joint.n_inputs - 1

    @cached_property
    def finite_at_zero(self) -> bool:
        """Whether f and its derivatives are finite at 0, where zero padding puts the scores. Unknown with params."""
        if self.n_params:
            return False
        return all(bool(y.isfinite()) for y in self.joint.evaluate(torch.zeros((), dtype=torch.float64)))

    def eager(self, s: Tensor, *params: Tensor) -> Tensor:
        """f(s, *params) in eager torch, differentiable, in the dtype of ``s``."""
        p = self._traced(s, *params)
        return p.to(s.dtype).expand_as(s)

    __call__ = eager

    def source(self, dtype: torch.dtype = torch.bfloat16, target: str = "cuda") -> str:
        """The Triton code this function becomes for inputs of ``dtype`` on ``target`` ("cuda", "hip", "interpret")."""
        from gdpa.functions.emit import emit

        return emit(self, dtype, target).source

    def __repr__(self) -> str:
        return f"gdpa.Activation({self.name!r}, n_params={self.n_params}, key={self.key!r})"

    def __reduce__(self) -> Any:
        raise TypeError(f"{self!r} cannot be pickled; pickle the Python function it was made from")


def _key(traced: fx.GraphModule, triton: Any) -> str:
    """A name for the graph: nodes are numbered, so that variable names do not matter."""
    number: dict[fx.Node, int] = {}
    lines = []
    for node in traced.graph.nodes:
        number[node] = len(number)
        args = fx.map_arg((node.args, node.kwargs), lambda n: f"%{number[n]}")
        constant = repr(getattr(traced, node.target)) if node.op == "get_attr" else ""
        lines.append(f"{node.op} {'' if node.op in ('placeholder', 'get_attr') else node.target} {args!r} {constant}")
    if triton is not None:
        lines.append(f"triton {triton.forward} {triton.backward}")
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16]


# Every Activation in use, by key (what the torch ops carry), by name (built-ins), and by what a function reads.
_by_key: dict[str, Activation] = {}
_by_name: dict[str, Activation] = {}
_by_fingerprint: dict[Hashable, Activation] = {}
_lock = threading.RLock()


def from_function(fn: Callable[..., Any], n_params: int, name: str | None = None, triton: Any = None) -> Activation:
    """The Activation of ``fn``; traced only if nothing with the same fingerprint has been."""
    if isinstance(fn, Activation):
        return fn
    with _lock:
        mark = None if triton is not None else fingerprint(fn)
        known = _by_fingerprint.get((mark, n_params)) if mark is not None else None
        if known is not None:
            return known
        act = _trace(fn, n_params, name, triton)
        if mark is not None:
            _by_fingerprint[mark, n_params] = act
        return act


def _trace(fn: Callable[..., Any], n_params: int, name: str | None, triton: Any) -> Activation:
    from gdpa.functions.trace import trace, trace_joint

    traced = trace(fn, n_params)
    known = _by_key.get(_key(traced, triton))
    if known is not None:
        return known
    label = name or getattr(fn, "__name__", None) or type(fn).__name__
    act = Activation(re.sub(r"\W+", "_", label).strip("_") or "f", traced, trace_joint(traced, n_params), triton)
    _by_key[act.key] = act
    return act


def from_key(key: str) -> Activation:
    """The Activation that an op's string argument names."""
    return _by_key[key]


def register_builtin(name: str, act: Activation) -> None:
    _by_name[name] = act


def from_name(name: str) -> Activation:
    """The built-in called ``name``."""
    if not _by_name:
        import gdpa.functions.builtin  # noqa: F401  fills the registry
    if name not in _by_name:
        raise ValueError(
            f"activation={name!r} is unknown; built-ins: {', '.join(sorted(_by_name))}, or pass a function"
        )
    return _by_name[name]


def activations() -> list[str]:
    """The names of the built-in activations."""
    from_name("identity")
    return sorted(_by_name)


@overload
def activation(fn: Callable[..., Tensor], *, name: str | None = ..., triton: Any = ...) -> Activation: ...
@overload
def activation(
    fn: None = ..., *, name: str | None = ..., triton: Any = ...
) -> Callable[[Callable[..., Tensor]], Activation]: ...
def activation(fn: Any = None, *, name: str | None = None, triton: Any = None) -> Any:
    """Decorator: make ``fn(s, *params)`` a :class:`gdpa.Activation`, traced now instead of at the first call.

    ``triton`` optionally gives hand-tuned device code, a :class:`gdpa.TritonSource`; the torch function stays the
    definition that it is checked against by ``gdpa check``.

    >>> @gdpa.activation
    ... def leaky(s, slope):
    ...     return torch.where(s > 0, s, slope * s)
    """
    if fn is None:
        return lambda f: activation(f, name=name, triton=triton)
    return from_function(fn, count_params(fn), name, triton)


def count_params(fn: Callable[..., Any]) -> int:
    """How many params ``fn`` takes after the score: its positional arguments without a default."""
    import inspect

    try:
        arguments = inspect.signature(fn).parameters.values()
    except ValueError:
        return 0
    positional = [a for a in arguments if a.kind in (a.POSITIONAL_ONLY, a.POSITIONAL_OR_KEYWORD)]
    return max(0, sum(a.default is a.empty for a in positional) - 1)


def resolve_one(spec: Any, n_params: int) -> Activation:
    """A name, a function or an Activation as an Activation that takes ``n_params``."""
    act = from_name(spec) if isinstance(spec, str) else from_function(spec, n_params)
    if act.n_params != n_params:
        raise ValueError(f"params has {n_params} entries, but activation {act.name!r} takes {act.n_params}")
    return act


def resolve(spec: Any, n_params: int, heads: int) -> tuple[Activation, ...]:
    """``activation`` as given to the API: one Activation, or one per query head if the heads differ."""
    if not isinstance(spec, list | tuple):
        return (resolve_one(spec, n_params),)
    if len(spec) != heads:
        raise ValueError(f"activation is a list of {len(spec)}, it needs one entry per query head ({heads})")
    acts = tuple(resolve_one(one, n_params) for one in spec)
    return acts[:1] if len(set(acts)) == 1 else acts


def from_keys(keys: Sequence[str]) -> tuple[Activation, ...]:
    return tuple(from_key(key) for key in keys)
