"""Modules as functions: the function is the module's forward, and the parameters of the nn.Module become its params.

A parameter is one number, shape () or (1,), or one number per query head. ``forward(s, ...)`` sees each as if it were
one number, whatever its shape, for a kernel computes one head at a time: ``self.slope * s``, not
``self.slope[:, None, None] * s``.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property, partial
from typing import Any, TypeGuard

import torch
from torch import Tensor, nn

from gdpa.errors import UnsupportedActivationError
from gdpa.functions.places.names import Signature, signature_of


class Lifted:
    """``module`` as f(s, *params, *parameters, *tables) of as many ``params`` as its forward takes after the score.

    >>> Lifted(nn.PReLU())(torch.tensor([-2.0, 1.0]), torch.tensor(0.5))
    tensor([-1.,  1.])
    """

    def __init__(self, module: nn.Module, n_params: int = 0) -> None:
        check_module(module)
        self.module, self.n_params = module, n_params
        self.held, self.ties = _held(module)
        self.names = tuple(self.held)
        self.__name__ = type(module).__name__

    @cached_property
    def _signature(self) -> Signature:
        return signature_of(self.module)

    @property
    def __signature__(self) -> inspect.Signature:
        kinds = inspect.Parameter
        taken = ["s", *(f"param{i}" for i in range(self.n_params + len(self.names)))]
        return inspect.Signature(
            [kinds(name, kinds.POSITIONAL_ONLY) for name in taken]
            + [kinds("tables", kinds.VAR_POSITIONAL)]
            + [kinds(name, kinds.KEYWORD_ONLY) for name in self._signature.positions]
        )

    def __call__(self, s: Tensor, *rest: Any, **at: Tensor) -> Tensor:
        first = self.n_params + len(self.names)
        given, own, tables = rest[: self.n_params], rest[self.n_params : first], rest[first:]
        module, weights = _private(self.module), dict(zip(self.names, own, strict=True))

        def call(*args: Any, **named: Any) -> Tensor:
            found: Tensor = torch.func.functional_call(module, weights, args, named)
            return found

        return self._signature.call(call, [s, *given, *tables], at)


def _held(module: nn.Module) -> tuple[dict[str, nn.Parameter], tuple[tuple[str, str], ...]]:
    """The parameters of ``module`` by name, and the names under which one is held once more, with its first name."""
    first: dict[int, str] = {}
    found, ties = {}, []
    for name, p in module.named_parameters(remove_duplicate=False):
        if id(p) in first:
            ties.append((name, first[id(p)]))
        else:
            first[id(p)], found[name] = name, p
    return found, tuple(ties)


def _prelu_of_one(module: nn.PReLU, s: Tensor) -> Tensor:
    """nn.PReLU of one number. torch.prelu has a weight per channel, dimension 1: of scores these are the heads, and a
    function sees one of them."""
    return torch.where(s > 0, s, module.weight * s)


def _is_prelu(module: nn.Module) -> TypeGuard[nn.PReLU]:
    is_own = isinstance(module, nn.PReLU) and type(module).forward is nn.PReLU.forward
    return is_own and "forward" not in vars(module)


def _private(module: nn.Module) -> nn.Module:
    """A copy for one call, of parts that can take numbers for their parameters. Those are replaced during the call,
    which the user's own module must not show, neither to other threads nor, if it has a part twice, afterwards."""
    memo: dict[int, Any] = {}
    for part in module.modules():
        tensors = [*part._parameters.values(), *vars(part).values()]
        memo |= {id(t): t for t in tensors if isinstance(t, Tensor)}  # not copied: they are replaced, or refused
    copied = copy.deepcopy(module, memo)
    for part in copied.modules():
        if _is_prelu(part):  # whose weight may be computed (torch.nn.utils.parametrize): only its forward is replaced
            part.forward = partial(_prelu_of_one, part)  # type: ignore[method-assign]
    return copied


def has_parameters(spec: Any) -> TypeGuard[nn.Module]:
    return isinstance(spec, nn.Module) and next(spec.parameters(), None) is not None


def check_module(module: nn.Module) -> None:
    """Refuse what no kernel can be given."""
    if not any(part._buffers for part in module.modules()):  # at every call
        return
    for name, _ in module.named_buffers():
        raise UnsupportedActivationError(
            f"activation={type(module).__name__} has the buffer {name!r}, and only parameters become params of a "
            "function: make it a Parameter (with requires_grad=False if it is fixed), a Python number, or a table "
            "(tables=, docs/positions.md)"
        )


def parameters_of(module: nn.Module, heads: int) -> tuple[Tensor, ...]:
    """The parameters of ``module`` as the operator takes params: of shape (), or (heads,)."""
    return as_params(module, dict(module.named_parameters()), heads)


def as_params(module: nn.Module, held: Mapping[str, Tensor], heads: int) -> tuple[Tensor, ...]:
    """``held``: its parameters, by name."""
    return tuple([_as_param(module, name, p, heads) for name, p in held.items()])


def _as_param(module: nn.Module, name: str, p: Tensor, heads: int) -> Tensor:
    if p.shape == () or p.shape == (heads,):
        return p
    if p.shape == (1,):
        return p.reshape(())
    raise UnsupportedActivationError(
        f"activation={type(module).__name__}: its parameter {name!r} has shape {tuple(p.shape)}, and what becomes a "
        f"param of the function is a number, shape () or (1,), or one per query head, ({heads},); what is looked up by "
        "position is a table (tables=, docs/positions.md), and what mixes scores is not a function of one score"
    )


def lift(activation: Any, params: Any, heads: int) -> tuple[Any, Any]:
    """What attention() is given, with a module's parameters behind the params."""
    if isinstance(activation, list | tuple):
        for one in activation:
            if has_parameters(one):
                raise UnsupportedActivationError(
                    f"activation is a list, and {type(one).__name__} in it owns parameters; give one module for all "
                    f"heads, with a parameter of shape ({heads},) for what differs between them"
                )
        return activation, params
    if not has_parameters(activation):
        return activation, params
    if not isinstance(params, list | tuple):
        return activation, params  # which is refused
    if torch.compiler.is_compiling():  # then gdpa.api does it
        return activation, (*params, *parameters_of(activation, heads))
    return lifted(activation, params, heads)


def lifted(module: nn.Module, params: Sequence[Any], heads: int) -> tuple[Lifted, tuple[Any, ...]]:
    """``module``, which has parameters, and those behind the params."""
    found = Lifted(module, len(params))
    return found, (*params, *as_params(module, found.held, heads))


def slots(module: nn.Module) -> Iterator[tuple[nn.Module, str]]:
    """Where each parameter of ``module`` is held, in the order of parameters_of."""
    for path, _ in module.named_parameters():
        owner, _, name = path.rpartition(".")
        yield module.get_submodule(owner), name
