"""f(scale * s) with its constants moved to where they cost nothing.

Every instruction per score counts: at head dimension 128 a warp has about 1000 issue slots for the 64 x 128 scores of a
tile, and gelu_tanh as traced takes a third more than it needs. After expand.py, and before emission, ``fold`` carries a
constant factor beside every value instead of multiplying it in, and pays for it only where some operation needs the
value itself. There it is first pushed into the constants of a sum below. What is left over of p's factor leaves the
kernel, with ``out_scale``.

gelu_tanh(scale * s) becomes  0.5 scale (s + s tanh(s (a + b s^2))):  a product, a sum and product, a product, a tanh
and a sum and product, and one factor for the whole output.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from gdpa.functions.graph import Arg, Graph, Node, Ref
from gdpa.functions.passes.regroup import regroup
from gdpa.functions.passes.simplify import Builder

TURNED = {"lt": "gt", "le": "ge", "gt": "lt", "ge": "le", "eq": "eq", "ne": "ne"}
LARGEST = torch.finfo(torch.float32).max


@dataclass(frozen=True)
class Scaled:
    """The value c * x; x is 1.0 for a constant."""

    c: float
    x: Arg


def factor_of(graph: Graph, scale: float = 1.0, n_params: int | None = None) -> float:
    """The constant factor of p = f(scale * s), which can move into ``out_scale``; 1 if there is none. See ``fold``."""
    p = _Folder(graph, n_params).run(scale)[0]
    return p.c if _is_ordinary(p.c) and isinstance(p.x, Ref) else 1.0


def fold(graph: Graph, scale: float = 1.0, factor: float = 1.0, n_params: int | None = None) -> Graph:
    """The outputs of ``graph`` at scale * s, divided by ``factor``. The second, the derivative, is by the unscaled s
    and so contains ``scale``. Of the inputs after s the first ``n_params`` (None: all) are the same for all scores."""
    folder = _Folder(graph, n_params)
    return regroup(folder.b.finish(tuple(map(folder.make, folder.outputs(scale, factor)))))


def fold_terms(graph: Graph, scale: float, factor: float, n_params: int) -> tuple[Graph, list[float]]:
    """The same, but for the constant factors of outputs after the second, which are returned."""
    folder = _Folder(graph, n_params)
    p, ds, *terms = folder.outputs(scale, factor)
    constants = [v.c if _is_ordinary(v.c) else 1.0 for v in terms]
    terms = [Scaled(v.c / c, v.x) for v, c in zip(terms, constants, strict=True)]
    return folder.b.finish(tuple(map(folder.make, (p, ds, *terms)))), constants


def _is_ordinary(c: float) -> bool:
    """Whether ``c`` and products with it stay normal float32 numbers."""
    return math.isfinite(c) and 1e-15 < abs(c) < 1e15


class _Folder:
    """One walk over a graph in which every float32 value is kept as a Scaled."""

    def __init__(self, graph: Graph, n_params: int | None) -> None:
        self.graph = graph
        self.n_params = graph.n_inputs - 1 if n_params is None else n_params
        self.of_params: dict[Ref, bool] = {}
        self.b = Builder(graph.n_inputs)
        self.uses: dict[Ref, int] = {}  # of the values already made, by nodes of the old graph
        self.products: dict[tuple[Arg, Arg], Scaled] = {}  # made of a param and something else, with their factors

    def run(self, scale: float) -> list[Scaled]:
        counts = [0] * len(self.graph.nodes)
        for node in self.graph.nodes:
            for a in node.args:
                if isinstance(a, Ref):
                    counts[a.index] += 1
        values: list[Scaled] = []
        for node, count in zip(self.graph.nodes, counts, strict=True):
            if node.op == "input":
                value = Scaled(scale if node.args[0] == 0 else 1.0, self.b.intern(node))
            else:
                args = [values[a.index] if isinstance(a, Ref) else Scaled(float(a), 1.0) for a in node.args]
                value = self.node(node, args)
            if isinstance(value.x, Ref):
                renamed = any(isinstance(a, Ref) and values[a.index].x == value.x for a in node.args)  # a factor more
                self.uses[value.x] = self.uses.get(value.x, 0) + count - renamed
            values.append(value)
        return [values[o.index] if isinstance(o, Ref) else Scaled(float(o), 1.0) for o in self.graph.outputs]

    def outputs(self, scale: float, factor: float) -> list[Scaled]:
        values = self.run(scale)
        if len(values) > 1:
            values[1] = Scaled(values[1].c * scale, values[1].x)
        return [Scaled(v.c / factor, v.x) for v in values]

    def node(self, node: Node, args: list[Scaled]) -> Scaled:
        """The value of ``node`` on ``args``, its factor outside where the operation allows it."""
        rule = getattr(self, f"_{node.op}", None)
        if rule is not None and node.dtype == torch.float32 and all(self._is_float(a) for a in args):
            found: Scaled | None = rule(*args)
            if found is not None and (_is_ordinary(found.c) or not isinstance(found.x, Ref)):
                return found
        if node.op in ("lt", "le", "gt", "ge", "eq", "ne"):
            return Scaled(1.0, self._compare(node, args))
        plain = tuple(
            self.make(value) if isinstance(old, Ref) else old for old, value in zip(node.args, args, strict=True)
        )
        if node.op == "where":  # the condition is no number
            old, value = node.args[0], args[0]
            plain = (value.x if isinstance(old, Ref) else old, *plain[1:])
        return Scaled(1.0, self.b(node.op, *plain, dtype=node.dtype))

    def _is_float(self, a: Scaled) -> bool:
        return self.b.dtype(a.x) == torch.float32

    def _mul(self, u: Scaled, v: Scaled) -> Scaled | None:
        if not isinstance(u.x, Ref):
            u, v = v, u
        if not isinstance(v.x, Ref):
            return Scaled(u.c * v.c, u.x) if v.c != 0 else None  # x * 0 stays: x may be inf
        for one, other in ((u, v), (v, u)):
            if self._is_of_params(one.x) and not self._is_of_params(other.x) and _is_ordinary(u.c * v.c):
                return self._times_params(u.c * v.c, one.x, other.x)
        return Scaled(u.c * v.c, self.b("mul", u.x, v.x))

    def _times_params(self, c: float, param: Arg, x: Arg) -> Scaled:
        """c * param * x by c * param, which is computed once (in PTX ptxas finds that), or by param * y, of x = y z."""
        n = self.b.node(x)
        if n is not None and n.op == "mul" and self.uses.get(x, 1) <= 1:  # type: ignore[arg-type]
            for y, z in (n.args, n.args[::-1]):
                if (param, y) in self.products:
                    known = self.products[param, y]
                    return Scaled(c / known.c, self.b("mul", known.x, z))
        made = self.b("mul", x, self.make(Scaled(c, param)))
        self.products[param, x] = Scaled(c, made)
        return Scaled(1.0, made)

    def _is_of_params(self, x: Arg) -> bool:
        """Whether x is the same for all scores."""
        if not isinstance(x, Ref):
            return True
        if x not in self.of_params:
            n = self.b.nodes[x.index]
            is_param = n.op == "input" and 0 < int(n.args[0]) <= self.n_params  # type: ignore[arg-type]
            self.of_params[x] = is_param or (n.op != "input" and all(map(self._is_of_params, n.args)))
        return self.of_params[x]

    def _neg(self, u: Scaled) -> Scaled:
        return Scaled(-u.c, u.x)

    def _abs(self, u: Scaled) -> Scaled:
        return Scaled(abs(u.c), self.b("abs", u.x))

    def _sub(self, u: Scaled, v: Scaled) -> Scaled | None:
        return self._add(u, Scaled(-v.c, v.x))

    def _add(self, u: Scaled, v: Scaled) -> Scaled | None:
        if not isinstance(u.x, Ref):
            u, v = v, u
        if not _is_ordinary(u.c):
            return None
        if not isinstance(v.x, Ref):
            return Scaled(u.c, self.b("add", u.x, v.c / u.c)) if abs(v.c / u.c) < LARGEST else None
        if not _is_ordinary(v.c):
            return None
        if u.c == v.c:
            return Scaled(u.c, self.b("add", u.x, v.x))
        if u.c == -v.c:
            return Scaled(u.c, self.b("sub", u.x, v.x))
        if self._is_free(v.x) and not self._is_free(u.x):
            u, v = v, u
        return Scaled(v.c, self.b("add", self.make(Scaled(u.c / v.c, u.x)), v.x))

    def _maximum(self, u: Scaled, v: Scaled) -> Scaled | None:
        return self._extremum("maximum", u, v)

    def _minimum(self, u: Scaled, v: Scaled) -> Scaled | None:
        return self._extremum("minimum", u, v)

    def _extremum(self, op: str, u: Scaled, v: Scaled) -> Scaled | None:
        if not isinstance(u.x, Ref):
            u, v = v, u
        if not isinstance(v.x, Ref) and v.c == 0 and u.c > 0:
            return Scaled(u.c, self.b(op, u.x, 0.0))
        return Scaled(u.c, self.b(op, u.x, v.x)) if u.c == v.c and u.c > 0 and isinstance(v.x, Ref) else None

    def _compare(self, node: Node, args: list[Scaled]) -> Arg:
        """A positive factor does not change how a value compares with zero, and a negative one turns it round."""
        u, v = args
        if isinstance(u.x, Ref) and not isinstance(v.x, Ref) and v.c == 0 and u.c != 0 and self._is_float(u):
            return self.b(node.op if u.c > 0 else TURNED[node.op], u.x, 0.0, dtype=node.dtype)
        plain = (self.make(a) if isinstance(old, Ref) else old for old, a in zip(node.args, args, strict=True))
        return self.b(node.op, *plain, dtype=node.dtype)

    def make(self, value: Scaled) -> Arg:
        """c * x as a value, the factor pushed into constants below x where there are some."""
        if not isinstance(value.x, Ref):
            return value.c
        if value.c == 1.0:
            return value.x
        if self._is_free(value.x):
            return self._push(value.c, value.x)
        return self.b("mul", value.x, value.c)

    def _is_free(self, x: Arg) -> bool:
        """Whether a factor of x costs no instruction per score: a constant of a sum below absorbs it, or a param."""
        n = self.b.node(x)
        if n is None or self._is_of_params(x):
            return True
        if n.dtype != torch.float32 or self.uses.get(x, 1) > 1:  # type: ignore[arg-type]
            return False
        return n.op in ("add", "mul", "reciprocal", "saturate") and any(self._is_free(a) for a in n.args)

    def _push(self, c: float, x: Arg) -> Arg:
        n = self.b.node(x)
        if n is None:
            return float(x) * c  # type: ignore[arg-type]
        if self._is_of_params(x):
            return self.b("mul", x, c)
        if n.op == "mul" and self._is_free(x):
            u, v = n.args if self._is_free(n.args[0]) else reversed(n.args)
            return self.b("mul", self._push(c, u), v)
        if n.op == "saturate" and self._is_free(x) and abs(c) <= 1:  # more might exceed 1
            rest = self.b("saturate", self._push(abs(c), n.args[0]))
            return rest if c > 0 else self.b("neg", rest)  # which costs nothing either
        if n.op == "reciprocal" and self._is_free(x) and _is_ordinary(c):
            return self.b("reciprocal", self._push(1 / c, n.args[0]))
        if n.op == "add" and self._is_free(x):
            return self.b("add", self._push(c, n.args[0]), self._push(c, n.args[1]))
        return self.b("mul", x, c)
