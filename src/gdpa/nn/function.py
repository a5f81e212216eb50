"""The function of a layer. A name or a plain function is traced once; a module is asked anew at every call.

A module is a part of the layer, and may change: it is parametrized, put into eval(), given another setting, replaced.
So what was traced of it is not kept with the layer: a call finds it by what the module reads now (see
gdpa.functions.fingerprint), just as gdpa.attention does.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from gdpa.functions.activation import Activation, in_program, keep_for_programs, resolve_one
from gdpa.functions.fingerprint import fingerprint
from gdpa.functions.modules import as_params, has_parameters, lift, lifted, parameters_of
from gdpa.functions.places.names import TableKind, signature_of
from gdpa.functions.recent.look import Seen, look_at, seen
from gdpa.functions.tracing.guards import guard_call, pending_in
from gdpa.functions.tracing.pending import Span
from gdpa.nn.biased import resolve
from gdpa.nn.biases import FixedTables, ScoreBias

Functions = Activation | list[Activation]
Signatures = tuple[tuple[tuple[str, ...], bool], ...]  # the names of positions, and whether it is FlexAttention's
MOST_BIASED = 16  # functions of one layer that are kept with its biases inside: of training and evaluation, say


class OfHeads(nn.ModuleDict):
    """The modules in a list of functions, one per head, by the number of their head."""


class _Known:
    """What came of modules: at a look, and, with a layer's biases inside, by what they read. It holds code, and a copy
    of the layer begins without."""

    def __init__(self) -> None:
        self.last: Seen | None = None
        self.biased: dict[Hashable, Activation] = {}

    def __reduce__(self) -> Any:
        return _Known, ()


class HasFunction(FixedTables):
    """A layer that computes ``function``, if there is one, else what it was made of, traced.

    >>> layer = gdpa.nn.Attention(4, nn.Softplus())
    >>> layer.function.beta = 2.0
    >>> layer.function = nn.PReLU()
    >>> layer.activation.n_params
    1
    """

    num_heads: int
    function: nn.Module | None
    params: nn.ParameterList
    score_bias: nn.ModuleList
    _activation: Any  # traced, one or a list; None where ``function`` has what a head computes
    _own_starts: dict[str, Tensor]
    _known: _Known

    def _adopt(self, activation: Any, device: Any, dtype: torch.dtype | None) -> None:
        """Modules are a part of the layer, as ``function``."""
        self.register_module("function", None)
        self._own_starts, self._known = {}, _Known()
        module = activation if isinstance(activation, nn.Module) else _of_heads(activation)
        if module is not None:
            self.function = module  # and where its parameters are now
            module.to(device=device, dtype=dtype)

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "activation":  # nn.Module takes modules for parts, whatever the class says of the name
            name = "function" if isinstance(value, nn.Module) else "_activation"
            if name == "_activation":
                self.function = None
        super().__setattr__(name, value)
        if name == "function":
            self._own_starts, self._known.last = _values(value), None

    @property
    def activation(self) -> Functions:
        """What the layer computes now, traced: one for all heads, or one for each."""
        return self._called(tuple(self.params))[0]

    @property
    def _biases(self) -> list[ScoreBias]:
        return list(self.score_bias)  # type: ignore[arg-type]

    def _called(self, given: tuple[Tensor, ...]) -> tuple[Functions, tuple[Tensor, ...]]:
        """The function of a call, and all its params: those ``given``, and the parameters of a module."""
        function = self.function
        if function is None:
            if self._activation is None:
                raise RuntimeError("function is None: the layer was made from a module, and has no other function")
            return self._activation, given
        if not torch.compiler.is_dynamo_compiling():
            return self._of_module(function, given)
        self._guard(len(given))
        own = () if isinstance(function, OfHeads) else parameters_of(function, self.num_heads)
        return in_programs(self._keys(*self._fixed_keys())), (*given, *own)

    def _of_module(self, function: nn.Module, given: tuple[Tensor, ...]) -> tuple[Functions, tuple[Tensor, ...]]:
        look, last = look_at(function), self._known.last
        if last is not None and look is not None and last.is_again(look, len(given)):
            return last.found, (*given, *as_params(function, look.parameters, self.num_heads))
        now = seen(look, len(given))
        specs: list[Any] = list(_modules(function))
        params: tuple[Tensor, ...] = given
        found: Functions
        if isinstance(function, OfHeads):
            found = self._of_heads(function, given)
        else:
            if has_parameters(function):
                specs[0], params = lifted(function, given, self.num_heads)
            found = self._resolved(specs[0], len(params))
        # Another thread may have changed it in between; and what has no fingerprint reads what may change unseen.
        known = now is not None and now.is_again(look_at(function), len(given))
        if now is not None and known and all(fingerprint(one) is not None for one in specs):
            now.found, self._known.last = found, now
        return found, params

    def _of_heads(self, modules: OfHeads, given: tuple[Tensor, ...]) -> list[Activation]:
        lift(list(modules.values()), given, self.num_heads)  # which refuses those with parameters
        found = {id(one): self._resolved(one, len(given)) for one in modules.values()}
        own = self._activation if isinstance(self._activation, list) else [self._activation] * self.num_heads
        at = {int(head): found[id(one)] for head, one in modules.items()}
        return [at.get(head, one) for head, one in enumerate(own)]

    def _resolved(self, spec: Any, n_params: int) -> Activation:
        if not len(self.score_bias):
            return resolve_one(spec, n_params)
        reads = fingerprint(spec)
        if reads is None:
            return resolve(spec, n_params, self._biases)
        known, key = self._known.biased, (reads, n_params, torch.get_default_dtype())
        found = known.get(key)
        if found is None:
            found = resolve(spec, n_params, self._biases)
            if len(known) >= MOST_BIASED:
                known.pop(next(iter(known)), None)  # another thread may have done so
            known[key] = found
        return found

    def _guard(self, n_params: int) -> None:
        """While Dynamo traces: what the modules and the biases read, since compiled code has their graphs for
        constants, and may be another layer's, too."""
        of_modules, of_biases = self._signatures()
        spans = []
        for module, (positions, flex) in zip(list(_modules(self.function)), of_modules, strict=False):
            spans.append(guard_call(module, 1 + n_params, (), positions, flex))
        self._refuse_pending(n_params, *spans)
        for one, (positions, flex) in zip(self._biases, of_biases, strict=False):
            nothing = torch.empty(0, dtype=torch.int64)
            tables = one.tables((nothing, nothing) if one.takes_times else None)
            guard_call(one.bias, 0, tuple([TableKind(t.dim(), t.dtype) for t in tables]), positions, flex)

    def _refuse_pending(self, n_params: int, *spans: Span) -> None:
        for module, span in zip(_modules(self.function), spans, strict=False):
            pending_in(module, 1 + n_params, (), span)

    def _fixed_keys(self) -> tuple[str, ...]:
        """Of heads that have no module. Dynamo guards what it hands to _keys, but not what that reads."""
        if not isinstance(self.function, OfHeads) or not isinstance(self._activation, list):
            return ()
        return tuple([one.key for one in self._activation if isinstance(one, Activation)])

    def _keys(self, *fixed: str) -> tuple[str, ...]:
        return keys_for_programs(self.activation)

    def _signatures(self) -> tuple[Signatures, Signatures]:
        """Of the modules and of the biases. None in an exported program, which guards nothing. (Asked here, not by
        Dynamo: see api._key_in_program.)"""
        if torch.compiler.is_exporting():
            return (), ()
        parts = _modules(self.function), [one.bias for one in self._biases]
        of_modules, of_biases = (tuple((one.positions, one.flex) for one in map(signature_of, fns)) for fns in parts)
        return of_modules, of_biases

    # Dynamo runs these instead of tracing them (see api.py). They are methods, for before 2.13 it hands no module on.
    _keys._dynamo_marked_constant = True  # type: ignore[attr-defined]
    _signatures._dynamo_marked_constant = True  # type: ignore[attr-defined]
    _refuse_pending._dynamo_marked_constant = True  # type: ignore[attr-defined]

    def _start_function(self) -> None:
        """The parameters of the function where they were when the layer took it."""
        function, starts = self.function, self._own_starts
        if function is None:
            return
        now = dict(function.named_parameters())
        if {name: p.shape for name, p in now.items()} != {name: start.shape for name, start in starts.items()}:
            _reset_modules(function, "has other parameters than when the layer took it")
            return
        if any(start.is_meta for start in starts.values()):
            _reset_modules(function, "was made on meta")
            return
        with torch.no_grad():
            for name, p in now.items():
                p.copy_(starts[name])

    def _function_names(self) -> str | list[str]:
        own: Any = self._activation if self.function is None else self.function
        if isinstance(own, OfHeads):
            fixed = self._activation if isinstance(self._activation, list) else [None] * self.num_heads
            own = [own._modules.get(str(head), one) for head, one in enumerate(fixed)]
        return [_name(one) for one in own] if isinstance(own, list) else _name(own)


def keys_for_programs(functions: Functions) -> tuple[str, ...]:
    """Of functions that compiled code has for constants."""
    keys = tuple(one.key for one in (functions if isinstance(functions, list) else [functions]))
    keep_for_programs(keys)
    return keys


def in_programs(keys: tuple[str, ...]) -> Functions:
    return in_program(keys[0]) if len(keys) == 1 else [in_program(key) for key in keys]


def _of_heads(activation: Any) -> OfHeads | None:
    if not isinstance(activation, list | tuple):
        return None
    found = {str(head): one for head, one in enumerate(activation) if isinstance(one, nn.Module)}
    return OfHeads(found) if found else None


def _modules(function: nn.Module | None) -> Iterator[nn.Module]:
    """Those that are functions."""
    if isinstance(function, OfHeads):
        yield from function.values()
    elif function is not None:
        yield function


def _values(module: nn.Module | None) -> dict[str, Tensor]:
    return {} if module is None else {name: p.detach().clone() for name, p in module.named_parameters()}


def _name(one: Any) -> str:
    return type(one).__name__ if isinstance(one, nn.Module) else str(getattr(one, "name", one))


def _reset_modules(function: nn.Module, why: str) -> None:
    """Where its parameters start the function alone knows: ``reset_parameters`` of all modules in it that have it, the
    inner ones first."""
    parts = dict(function.named_modules())
    resets = [name for name, part in parts.items() if hasattr(part, "reset_parameters")]
    for name, part in parts.items():
        known = any(outer in ("", name) or name.startswith(f"{outer}.") for outer in resets)
        owns = next(part.parameters(recurse=False), None) is not None
        if parametrize.is_parametrized(part):  # its reset_parameters would fill what is computed
            raise RuntimeError(f"{_place(name, part)} is parametrized: set its parameters yourself")
        if owns and not known:
            raise RuntimeError(
                f"{_place(name, part)} {why}, so that the values its parameters start with are not known, and it has "
                "no reset_parameters: give it one, or make it outside of torch.device('meta')"
            )
    for name in reversed(resets):
        parts[name].reset_parameters()


def _place(name: str, part: nn.Module) -> str:
    return f"{'.'.join(filter(None, ('function', name)))} ({type(part).__name__})"
