"""Recording a function without PyTorch's compiler, whose import takes one to two seconds of the first call.

``make_fx`` imports all of torch._dynamo, and ``torch.func.vjp`` does, too. Most functions need neither: run on a few
numbers they are a sequence of operations, which a dispatch mode sees. Whatever is not just that (a value that Python
asks for, a tensor from elsewhere, an operation that writes into one, an error) is left to ``make_fx``: ``record`` and
``record_joint`` return None.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx, nn

from gdpa.compat import TorchDispatchMode
from gdpa.errors import UnsupportedActivationError


class _UnusualError(Exception):
    """Something that make_fx knows how to treat."""


class Recorder(TorchDispatchMode):
    """The operations on real numbers, by which a tensor is known: where they are, and how they are laid out. (Autograd
    hands on what it has saved as other objects.)"""

    def __init__(self, table: dict[Any, Any]) -> None:
        super().__init__()
        self.table = table
        self.graph = fx.Graph()
        self.nodes: dict[Any, fx.Node] = {}
        self.alive: list[Tensor] = []  # so that no address is used twice

    @classmethod
    def _should_skip_dynamo(cls) -> bool:  # else PyTorch imports it to skip it
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func._schema.is_mutable:
            return self.write(func, args, kwargs)
        for decomposed in (self.table.get(func), func.decompose):
            if decomposed is not None:
                with self:
                    out = decomposed(*args, **kwargs)
                if out is not NotImplemented:
                    return out
        out = func(*args, **kwargs)
        if not isinstance(out, Tensor):
            raise _UnusualError
        if not self.table and _place(out) in self.nodes:  # detach(): the graph is differentiated later, and the same
            raise _UnusualError  # numbers have two gradients
        given, named = fx.node.map_aggregate((args, kwargs), self.node_of)
        self.add(out, self.graph.call_function(func, given, named))
        return out

    def write(self, func: Any, args: Any, kwargs: Any) -> Any:
        """An operation in place, which derivatives use on what they have just made: from now on these numbers are the
        result of the same operation that makes new ones."""
        to, name = args[0], func._schema.name.removeprefix("aten::")
        alike = [place for place in self.nodes if place[0] == to.data_ptr()]
        functional = getattr(getattr(torch.ops.aten, name.removesuffix("_")), func._overloadname)
        if not self.table or not name.endswith("_") or alike != [_place(to)] or functional._schema.is_mutable:
            raise _UnusualError
        with self:
            made = functional(*args, **kwargs)
        if (made.shape, made.dtype) != (to.shape, to.dtype):
            raise _UnusualError
        self.nodes[_place(to)] = self.node_of(made)
        return func(*args, **kwargs)

    def add(self, t: Tensor, node: fx.Node) -> None:
        node.meta["val"] = t.detach()
        self.nodes[_place(t)] = node
        self.alive.append(t)

    def node_of(self, x: Any) -> Any:
        if not isinstance(x, Tensor):
            return x
        if _place(x) not in self.nodes:
            raise _UnusualError
        return self.nodes[_place(x)]


def _place(t: Tensor) -> Any:
    return t.data_ptr(), t.shape, t.stride(), t.dtype


def record(fn: Callable[..., Any], inputs: list[Tensor], table: dict[Any, Any]) -> fx.GraphModule | None:
    """The graph of ``fn(*inputs)``, in-place operations made functional."""
    return _recorded(torch.func.functionalize(fn), inputs, table)


def record_joint(fn: Callable[..., Tensor], inputs: list[Tensor], table: dict[Any, Any]) -> fx.GraphModule | None:
    """That of ``(p, dp/dinput...)``, p = fn(*inputs), a function that was recorded."""

    def joint(*leaves: Tensor) -> tuple[Tensor, ...]:
        with torch.enable_grad():
            p = fn(*leaves)
            if not p.requires_grad:
                return p, *map(torch.zeros_like, leaves)
            total = _Total.apply(p)
            grads = torch.autograd.grad(total, leaves, allow_unused=True, materialize_grads=True)
        return p, *grads

    return _recorded(joint, [t.requires_grad_() for t in inputs], table)


class _Total(torch.autograd.Function):
    """A number with the derivative 1 by each of p. (Given a gradient, torch.autograd.grad imports sympy.)"""

    @staticmethod
    def forward(ctx: Any, p: Tensor) -> Tensor:
        ctx.save_for_backward(p)
        return p.new_zeros(())

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return torch.ones_like(ctx.saved_tensors[0])


def _recorded(fn: Callable[..., Any], inputs: list[Tensor], table: dict[Any, Any]) -> fx.GraphModule | None:
    try:
        recorder = Recorder(table)
        for i, t in enumerate(inputs):
            recorder.add(t, recorder.graph.placeholder(f"arg{i}"))
        with recorder:
            out = fn(*inputs)
        recorder.graph.output(fx.node.map_aggregate(out, recorder.node_of))
        recorder.graph.eliminate_dead_code(lambda node: node.op in ("placeholder", "output"))
        return fx.GraphModule(nn.Module(), recorder.graph)
    except UnsupportedActivationError:
        raise
    except Exception:  # whatever it was: make_fx meets it again, and says what is wrong
        return None
