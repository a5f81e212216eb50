"""Activation: a function of the scores, traced once and identified by its graph.

A function's identity is its traced graph, so two lambdas that compute the same are one Activation: they share compiled
kernels, and re-creating one at every step neither recompiles nor leaks. Which Activations stay in memory: see kept.py.
"""

from __future__ import annotations

import pickle
import re
import threading
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import cached_property, partial
from pathlib import Path
from typing import Any, overload

import torch
from torch import Tensor, fx, nn

from gdpa.errors import UnsupportedActivationError
from gdpa.functions import stored
from gdpa.functions.builtin import BUILTINS
from gdpa.functions.exponent import exponent_of
from gdpa.functions.fingerprint import fingerprint
from gdpa.functions.isolation import isolated, run_alone
from gdpa.functions.kept import count_variant, kept_with_activation
from gdpa.functions.keys import MARK, placed_key, recorded_key
from gdpa.functions.modules import Lifted, has_parameters
from gdpa.functions.places.names import PLAIN, Signature, TableKind, few_tables, in_words, signature_of
from gdpa.functions.places.program import Program
from gdpa.functions.recent.glance import RecentFunctions, reading_of
from gdpa.functions.traced import Placed, Shift, TracedFunction


class Activation(TracedFunction):
    """A traced function ``f(s, *params)``; make one with :func:`gdpa.activation`, or pass the function itself.

    >>> @gdpa.activation
    ... def squared_softplus(s):
    ...     return torch.nn.functional.softplus(s) ** 2
    >>> out = gdpa.attention(q, k, v, squared_softplus)
    """

    @cached_property
    def exponent(self) -> Activation | None:
        """g, where f is exp(g): row sums of such functions are made of g less its maximum."""
        graphs = exponent_of(self)
        if graphs is None:
            return None
        placed = self.placed
        if placed is not None:
            inner = Activation(f"{placed.inner.name}_exponent", f"{self.key}-exponent-scores", *graphs)
            shift = run_alone(partial(traced_shift, inner, placed.n_leaves, False)) if self.n_params == 0 else None
            placed = Placed(placed.program, placed.learned, inner, shift)
        return register(Activation(f"{self.name}_exponent", f"{self.key}-exponent", *graphs, placed=placed))

    def source(self, dtype: torch.dtype = torch.bfloat16, target: str = "sm90") -> str:
        """The Triton code this function becomes for inputs of ``dtype``.

        ``target``: "sm90" (Hopper), "cuda" (other NVIDIA), "hip" (AMD) or "interpret".
        """
        from gdpa.functions.emit import DTYPES, TARGETS, emit

        if dtype not in DTYPES:
            raise ValueError(f"dtype must be one of {', '.join(map(str, DTYPES))}, got {dtype!r}")
        if target not in TARGETS:
            raise ValueError(f"target must be one of {', '.join(TARGETS)}, got {target!r}")
        return emit(self, dtype, target).source

    def __repr__(self) -> str:
        tables = f", n_tables={len(self.tables)}" if self.tables else ""
        return f"gdpa.Activation({self.name!r}, n_params={self.n_params}{tables}, key={self.key!r})"

    def __copy__(self) -> Activation:
        return self  # one graph, one Activation; what it computes never changes

    def __deepcopy__(self, memo: Any) -> Activation:
        return self

    def __reduce__(self) -> Any:
        """Built-ins are pickled by name, others by their graph, which needs no importable function."""
        for name, act in _by_name.items():
            if act is self:
                return from_name, (name,)
        parts = self._traced, self.joint, self.triton, self.placed, self.part_of
        return _restore, (self.name, self.key, pickle.dumps(parts))


def _restore(name: str, key: str, parts: bytes) -> Activation:
    """An Activation from its pickled parts: the one of this process, if it has it."""
    from gdpa.compat import triton_kernel_wrap  # noqa: F401  torch needs it to load a graph, and does not import it

    return _by_key.get(key) or _by_key.setdefault(key, Activation(name, key, *pickle.loads(parts)))


class _Named:
    """Activations as attributes, by key: of a dictionary Dynamo would guard how many there are."""


# Every Activation alive, by key (what the torch ops carry); those that are kept alive here are the built-ins, by name,
# the ones used last, by what the function reads, and those that compiled programs name.
_by_key: weakref.WeakValueDictionary[str, Activation] = weakref.WeakValueDictionary()
_by_name: dict[str, Activation] = {}
_builtins: dict[str, Callable[[Tensor], Tensor]] = {fn.__name__: fn for fn in BUILTINS}
_by_fingerprint: RecentFunctions[Activation] = RecentFunctions()
_in_programs = _Named()
_lock = threading.RLock()


def register(act: Activation) -> Activation:
    """``act``, or the one of the same key that is there already."""
    return _by_key.setdefault(act.key, act)


def from_function(
    fn: Callable[..., Any], n_params: int, name: str | None = None, triton: Any = None,
    tables: tuple[TableKind, ...] = (),
) -> Activation:  # fmt: skip
    """The Activation of ``fn``; traced only if nothing with the same fingerprint has been."""
    if isinstance(fn, Activation):
        return fn
    with _lock:
        others = n_params, torch.get_default_dtype(), tables  # the dtype is that of tensors which fn makes
        known = _by_fingerprint.glance(fn, others) if triton is None else None
        if known is not None:
            return known
        reading = reading_of(fn) if triton is None else None
        mark = None if triton is not None else fingerprint(fn)
        reads = mark, *others
        known = _by_fingerprint.find(reads) if mark is not None else None
        if known is not None:
            _by_fingerprint.note(fn, others, known, reading)
            return known
        signature = signature_of(fn)
        if signature == PLAIN and not tables:
            file = None if mark is None else stored.file_of(reads)
            act = _stored(file, fn, n_params, name)
            if act is None:
                act = _trace(fn, n_params, name, triton)
                stored.write_graphs(file, act.key, act._traced, act.joint)
        else:
            act = _trace_placed(fn, signature, n_params, name, triton, tables)
        _by_fingerprint.put(reads if mark is not None else act.key, act)
        return act


def _trace(fn: Callable[..., Any], n_params: int, name: str | None, triton: Any) -> Activation:
    with suppress(UnsupportedActivationError):  # PyTorch's compiler may think otherwise, and says best what is wrong
        return _traced(fn, n_params, name, triton, quick=True)
    return _traced(fn, n_params, name, triton, quick=False)


def _traced(fn: Callable[..., Any], n_params: int, name: str | None, triton: Any, quick: bool) -> Activation:
    from gdpa.functions.tracing.trace import check_faithful, trace, trace_joint

    with isolated():
        traced = trace(fn, n_params, quick)
        key = recorded_key(traced, triton)
        act = _by_key.get(key)
        if act is None:
            label = _label(fn, name)
            act = Activation(label, key, traced, trace_joint(traced, n_params, quick), triton)
            count_variant(fn, label)
        check_faithful(fn, traced, n_params)
    return _by_key.setdefault(key, act)


def _stored(file: Path | None, fn: Callable[..., Any], n_params: int, name: str | None) -> Activation | None:
    """The Activation of a function that some process has traced already, all of it from the file: what ``fn`` reads may
    change before its graph is asked for."""
    with isolated():
        found = stored.read_graphs(file, fn, n_params)
    if found is None or found[0] != recorded_key(found[1]):
        return None
    key, traced, joint = found
    act = _by_key.get(key)
    if act is None:
        label = _label(fn, name)
        act = Activation(label, key, traced, joint)
        count_variant(fn, label)
    return _by_key.setdefault(key, act)


def _trace_placed(
    fn: Callable[..., Any], signature: Signature, n_params: int, name: str | None, triton: Any,
    tables: tuple[TableKind, ...],
) -> Activation:  # fmt: skip
    from gdpa.functions.places.trace import check_placed_faithful, trace_placed

    if signature.flex and (n_params or tables):
        raise ValueError(
            f"{_label(fn, name)!r} is a score mod of FlexAttention, (score, b, h, q_idx, kv_idx), and takes no params "
            "or tables; make b, h, q_idx and kv_idx keyword-only to give it some"
        )
    if triton is not None:
        raise ValueError(
            f"{_label(fn, name)!r} takes positions or tables, and such a function has no hand-written code"
        )
    with isolated():
        program, traced, learned = trace_placed(fn, signature, n_params, tables)
        uses_places = bool(program.graph.outputs or tables)  # a score mod may look at none
        key = placed_key(traced, program, learned, n_params) if uses_places else recorded_key(traced)
        act = _by_key.get(key)
        if act is None:
            label = _label(fn, name)
            act = _made(label, key, traced, n_params, program if uses_places else None, learned)
            count_variant(fn, label)
        check_placed_faithful(fn, act, signature)
    return _by_key.setdefault(key, act)


def _made(
    label: str, key: str, traced: fx.GraphModule, n_params: int, program: Program | None, learned: tuple[int, ...],
    quick: bool = False,
) -> Activation:  # fmt: skip
    """The Activation of what was recorded of a function, and of the program of its places, if it has any."""
    from gdpa.functions.tracing.trace import trace_joint

    leaves = 0 if program is None else len(program.graph.outputs)
    joint = trace_joint(traced, n_params + leaves, quick)
    if program is None:
        return Activation(label, key, traced, joint)
    inner = Activation(f"{label}_scores", f"{key}-scores", traced, joint)
    shift = traced_shift(inner, leaves, quick) if n_params == 0 else None
    return Activation(label, key, traced, joint, placed=Placed(program, learned, inner, shift))


def traced_shift(inner: TracedFunction, leaves: int, quick: bool) -> Shift | None:
    """Of a function of scores and leaves."""
    from gdpa.functions.places.shift import split_shift
    from gdpa.functions.tracing.trace import trace_joint

    parts = split_shift(inner._traced)
    if parts is None:
        return None
    shift, outer = parts
    act = Activation(f"{inner.name}_outer", f"{inner.key}-outer", outer, trace_joint(outer, 0, quick), part_of=inner)
    return Shift(trace_joint(shift, leaves, quick), act)


def _label(fn: Any, name: str | None) -> str:
    """A name that can be part of a Python name."""
    label = name or getattr(fn, "__name__", None) or type(fn).__name__
    label = re.sub(r"\W+", "_", label, flags=re.ASCII).strip("_") or "f"
    return f"f_{label}" if label[0].isdigit() else label


def from_key(key: str) -> Activation:
    """The Activation that an op's string argument names."""
    act = _by_key.get(key) or _carried(key)
    if act is None:
        for name in activations():
            from_name(name)
        act = _by_key.get(key)
    if act is None:
        raise RuntimeError(
            f"there is no activation with the key {key!r} in this process: import what defines it, and keep a "
            "gdpa.Activation of it alive while a program uses it; for layers with score_bias, as in hstu, the model"
        )
    return act


def _carried(key: str) -> Activation | None:
    """The Activation that an exported program carries in its key, made once, and found by either key from then on."""
    short, mark, text = key.partition(MARK)
    if not mark:
        return None
    with _lock:
        act = _by_key.get(short) or run_alone(partial(_restored, short, text))
        _by_key[short] = _by_key[key] = act
        _by_fingerprint.put(key, act)
        return act


def _restored(key: str, text: str) -> Activation:
    from gdpa.functions.documents.carried import read_function

    found = read_function(key, text)
    parts = found.name, key, found.traced, found.n_params, found.program, found.learned
    with suppress(UnsupportedActivationError):  # as in _trace
        return _made(*parts, quick=True)
    return _made(*parts)


def key_in_program(key: str) -> str:
    """The key by which an exported program names a function, which it carries, unless it is known everywhere."""
    act = from_key(key)
    return act.key if act in _by_name.values() else _carrying(act)


@kept_with_activation
def _carrying(act: Activation) -> str:
    from gdpa.functions.documents.carried import with_function

    return run_alone(partial(with_function, act))


def keep_for_programs(keys: Sequence[str]) -> None:
    """Keep these for good: a compiled program holds nothing but their keys. torch.compile bounds how many there are."""
    vars(_in_programs).update((key, from_key(key)) for key in keys)


def in_program(key: str) -> Activation:
    """One that is kept for programs, also while Dynamo traces: it reads attributes, but calls no weak dictionary."""
    return getattr(_in_programs, key)


def from_name(name: str) -> Activation:
    """The built-in called ``name``, traced when it is first used."""
    found = _by_name.get(name)
    if found is not None:
        return found
    if name == "softmax":
        raise ValueError(
            "activation='softmax' is exp divided by its sum over the row, which gdpa.attention and its varlen and "
            "packed forms take; a function of one score is needed here"
        )
    fn = _builtins.get(name)
    if fn is None:
        known = ", ".join(sorted([*_builtins, "softmax"]))
        raise ValueError(f"activation={name!r} is unknown; built-ins: {known}, or pass a function")
    with _lock:
        act = from_function(fn, 0, name)
        act.name = name  # a user's function with the same graph may have come first
        return _by_name.setdefault(name, act)


def activations() -> list[str]:
    """The names of the built-in activations."""
    return sorted(_builtins)


@overload
def activation(fn: Callable[..., Tensor], *, name: str | None = ..., triton: Any = ...) -> Activation: ...
@overload
def activation(
    fn: None = ..., *, name: str | None = ..., triton: Any = ...
) -> Callable[[Callable[..., Tensor]], Activation]: ...
def activation(fn: Any = None, *, name: str | None = None, triton: Any = None) -> Any:
    """Decorator: make ``fn(s, *params)`` a :class:`gdpa.Activation`, traced now instead of at the first call.

    ``name`` is for messages and the kernel's name; functions of the same operations are one, and keep their first name.
    ``triton`` optionally gives hand-tuned device code, a :class:`gdpa.TritonSource`; the torch function stays the
    definition that it is checked against by ``gdpa check``. A module's parameters are further params, in the order of
    ``module.parameters()``; an Activation holds no tensors.

    >>> @gdpa.activation
    ... def leaky(s, slope):
    ...     return torch.where(s > 0, s, slope * s)
    """
    from gdpa.functions.emission.handwritten import TritonSource

    if triton is not None and not isinstance(triton, TritonSource):
        raise TypeError(f"triton must be a gdpa.TritonSource, got {type(triton).__name__}")
    if not isinstance(name, str | None):
        raise TypeError(f"name must be a string, got {name!r}")
    if fn is None:
        return lambda f: activation(f, name=name, triton=triton)
    if isinstance(fn, str):
        raise TypeError(f"fn={fn!r} is a name, which attention takes directly; a function is needed here")
    if isinstance(fn, Activation) and (name is not None or triton is not None):
        raise TypeError(f"{fn!r} already has a name and code; pass name and triton with the function itself")
    if has_parameters(fn):
        fn = Lifted(fn, count_params(fn))
    return from_function(fn, count_params(fn), name, triton)


def count_params(fn: Callable[..., Any]) -> int:
    """How many params ``fn`` takes after the score: its positional arguments without a default."""
    import inspect

    if signature_of(fn).flex:
        return 0
    try:
        arguments = inspect.signature(fn.forward if isinstance(fn, nn.Module) else fn).parameters.values()
    except ValueError:
        return 0
    positional = [a for a in arguments if a.kind in (a.POSITIONAL_ONLY, a.POSITIONAL_OR_KEYWORD)]
    return max(0, sum(a.default is a.empty for a in positional) - 1)


def resolve_one(spec: Any, n_params: int, tables: tuple[TableKind, ...] = ()) -> Activation:
    """A name, a function or an Activation as an Activation that takes ``n_params`` and ``tables``."""
    if not isinstance(spec, Activation):  # one that gdpa.distributed has made of it has tables of its own, too
        few_tables("tables", len(tables))
    act = from_name(spec) if isinstance(spec, str) else from_function(spec, n_params, tables=tables)
    if act.n_params != n_params:
        raise ValueError(f"params has length {n_params}, but activation {act.name!r} takes {act.n_params}")
    if act.tables != tables:
        raise ValueError(
            f"tables are {in_words(tables)}, but activation {act.name!r} was made for {in_words(act.tables)}; a plain "
            "function is traced for the tables that it is called with"
        )
    return act


def from_keys(keys: Sequence[str]) -> tuple[Activation, ...]:
    return tuple(from_key(key) for key in keys)
