"""An activation named on the command line: a built-in's name, ``module:function`` or ``path/to/file.py:function``."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import sys
import textwrap
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

import gdpa
from gdpa.arguments.normalizing import SOFTMAX
from gdpa.functions.activation import Activation, count_params
from gdpa.functions.modules import Lifted, has_parameters
from gdpa.functions.places.names import PLAIN, signature_of
from gdpa.paths import check_function
from gdpa.problem import ABS, SUM


@dataclass(frozen=True)
class Loaded:
    """A function as a person wrote it (built-ins too: the plain torch function), and where it came from."""

    spec: str
    function: Callable[..., Any]
    n_params: int
    params: tuple[float, ...] = ()
    normalize: str | None = None  # "sum" or "abs": outputs are divided by that sum over the row
    module: nn.Module | None = None  # whose parameters are the params, if the function is one

    @property
    def name(self) -> str:
        return self.spec.rpartition(":")[2]

    def compile(self) -> Activation:
        """The function traced; raises UnsupportedActivationError."""
        return gdpa.activation(self.function)

    def written(self) -> str:
        """The source as it stands in its file; of what has none, such as a decorated function, what it is called."""
        of: Any = self.function if self.module is None else type(self.module)
        try:
            return textwrap.dedent(inspect.getsource(of)).strip()
        except (OSError, TypeError):
            return repr(of)

    def param_names(self) -> list[str]:
        """As they are written, where that can be told."""
        if self.module is not None:
            return [name for name, _ in self.module.named_parameters()]
        if isinstance(self.function, Activation):
            return [f"param {i}" for i in range(self.n_params)]
        return list(inspect.signature(self.function).parameters)[1 : 1 + self.n_params]

    def with_params(self, values: tuple[float, ...]) -> Loaded:
        """The function with values for its params, which must be as many as it takes."""
        if len(values) != self.n_params:
            given = ", ".join(map(str, values)) or "none"
            raise ValueError(f"{self.spec!r} takes {self.n_params} param{'s' * (self.n_params != 1)}, got {given}")
        return replace(self, params=values)

    def check_start(self, values: tuple[float, ...], of: str = "") -> None:
        """Refuses values of --params for a module, with which models are trained as it is made."""
        if self.module is not None:
            given = f"--params {of}{','.join(f'{value:g}' for value in values)}"
            raise ValueError(f"{given}: {self.spec!r} is a module, which sets the initial values of its parameters")

    def leaves(self, like: Tensor) -> tuple[Tensor, ...]:
        """The params as differentiable scalars on the device of ``like``, in float32 or its dtype if that is wider."""
        dtype = torch.promote_types(like.dtype, torch.float32)
        return tuple(torch.tensor(p, dtype=dtype, device=like.device, requires_grad=True) for p in self.params)


def load_normalized(spec: str, normalize: str | None) -> Loaded:
    """What ``spec`` names, "softmax" included, with ``normalize``, see :class:`Loaded`."""
    if spec != SOFTMAX:
        return replace(load_function(spec), normalize=normalize)
    if normalize == ABS:
        raise ValueError("softmax is exp divided by its sum, which normalize='abs' contradicts")
    return replace(load("exp"), spec=SOFTMAX, normalize=SUM)


def load(spec: str) -> Loaded:
    """What ``spec`` names; ValueError in words if there is no such function."""
    from gdpa.functions.builtin import BUILTINS

    if ":" not in spec:
        check_function(spec)
        return Loaded(spec, next(fn for fn in BUILTINS if fn.__name__ == spec), 0)
    where, _, name = spec.rpartition(":")
    if not where or not name:
        raise ValueError(f"{spec!r} must look like module:function or file.py:function")
    module = _import_file(Path(where)) if where.endswith(".py") else _import_module(where)
    found = getattr(module, name, None)
    if found is None:
        functions = [n for n, value in vars(module).items() if callable(value) and not n.startswith("_")]
        raise ValueError(f"{where!r} has no {name!r}; it has: {', '.join(functions) or 'no function'}")
    if not callable(found):
        raise ValueError(f"{spec!r} is of type {type(found).__name__}, not a function")
    placed = found.placed is not None if isinstance(found, Activation) else signature_of(found) != PLAIN
    if placed:
        raise ValueError(f"{spec!r} takes positions; commands take functions of the score and params only")
    if has_parameters(found):
        return _of_module(spec, found)
    return Loaded(spec, found, found.n_params if isinstance(found, Activation) else count_params(found))


def load_function(spec: str) -> Loaded:
    """What ``spec`` names; of a class of modules, which :func:`load` leaves to whoever makes models, one made of it."""
    return as_function(load(spec))


def as_function(loaded: Loaded) -> Loaded:
    """A class of modules made a module, and its forward the function."""
    kind = loaded.function
    if not (isinstance(kind, type) and issubclass(kind, nn.Module)):
        return loaded
    try:
        made = kind()
    except TypeError as e:
        raise ValueError(f"{loaded.spec!r} is a class of modules that cannot be made without arguments: {e}") from e
    return _of_module(loaded.spec, made) if has_parameters(made) else Loaded(loaded.spec, made, count_params(made))


def _of_module(spec: str, module: nn.Module) -> Loaded:
    """The module's forward as a function; where its parameters start, params do, per head at their mean."""
    if count_params(module):
        raise ValueError(f"{spec!r} has a forward that takes params; here a module must own all its params")
    function = Lifted(module)
    starts = tuple(float(p.detach().double().mean()) for p in module.parameters())
    return Loaded(spec, function, count_params(function), starts, module=module)


def _import_module(name: str) -> ModuleType:
    """Import ``name``; modules in the current directory count, as they do for ``python -m``."""
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.insert(0, here)
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as e:
        if e.name is None or not f"{name}.".startswith(f"{e.name}."):
            raise ValueError(f"module {name!r} needs {e.name!r}, which is not installed") from e
        raise ValueError(f"there is no module {name!r}, neither installed nor in {here}") from e
    except Exception as e:
        raise ValueError(f"importing {name!r} raised {type(e).__name__}: {e}") from e


def _import_file(path: Path) -> ModuleType:
    if not path.is_file():
        raise ValueError(f"there is no file {str(path)!r} (looked in {Path.cwd()})")
    name = f"_gdpa_{path.stem}"
    module_spec = importlib.util.spec_from_file_location(name, path.resolve())
    assert module_spec is not None
    assert module_spec.loader is not None
    module = importlib.util.module_from_spec(module_spec)
    sys.modules[name] = module
    try:
        module_spec.loader.exec_module(module)
    except Exception as e:
        raise ValueError(f"importing {str(path)!r} raised {type(e).__name__}: {e}") from e
    return module
