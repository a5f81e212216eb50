"""Derivatives through products that there are already: the same numbers with fewer instructions."""

from __future__ import annotations

import re

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from functions.evaluation import by_autograd, compiled, grid
from functions.library import FUNCTIONS
from functions.test_ptx import instructions
from gdpa.functions.activation import from_function, from_name, resolve_one
from gdpa.functions.emission.ptx import fused_products
from gdpa.functions.emit import emit
from gdpa.functions.graph import Graph, Ref
from gdpa.functions.passes import fold as folding
from gdpa.functions.passes.expand import expand
from gdpa.functions.passes.fold import fold
from gdpa.functions.passes.regroup import regroup
from gdpa.functions.passes.simplify import Builder
from support import bf16, in_turn


def operations(graph: Graph) -> int:
    return sum(n.op != "input" for n in graph.nodes) - len(fused_products(graph))


# Instructions per score of the value and its derivative.
COUNTS = {
    "silu": (F.silu, 6), "gelu_tanh": (lambda s: F.gelu(s, approximate="tanh"), 10),
    "quick gelu": (lambda s: s * torch.sigmoid(1.702 * s), 7), "squared relu": (lambda s: F.relu(s) ** 2, 3),
    "half of it": (lambda s: 0.5 * F.relu(s) ** 2, 3),
    "mish": (F.mish, 15),
}  # fmt: skip


@pytest.mark.parametrize("name", COUNTS)
def test_instructions(name):
    fn, count = COUNTS[name]
    assert emit(from_function(fn, 0), bf16, "sm90", 128**-0.5).backward_operations == count


def test_instructions_of_silu_of_a_sum():
    """Which is not one tanh, since a bias may put scores anywhere."""

    def biased(s: Tensor, *, q_idx: Tensor) -> Tensor:
        return F.silu(s + q_idx)

    source = emit(resolve_one(biased, 0), bf16, "sm90").source.split("def backward_packed")[1]
    assert instructions(re.findall(r'inline_asm_elementwise\("(.*?)", "', source)[0]) == 7.5  # packing included


@pytest.mark.parametrize(
    ("f", "level"),
    [(f, level) for i, f in enumerate(FUNCTIONS) for level in in_turn(("short", "accurate"), i)],
    ids=repr,
)
def test_the_numbers_are_the_same(f, level, monkeypatch):
    s, graph = grid(f, 401).double(), expand(compiled(f).joint, level)
    params = [torch.tensor(v, dtype=s.dtype).expand_as(s) for v in f.scalar_params()]
    after = torch.stack(fold(graph).evaluate(s, *params))
    monkeypatch.setattr(folding, "regroup", lambda graph: graph)
    before = torch.stack(fold(graph).evaluate(s, *params))
    torch.testing.assert_close(after, before, rtol=1e-6, atol=1e-9, equal_nan=True)


OTHER_NUMBERS = {
    "what is nearly 1": lambda s: ((s.double() * (1 + 1e-8) - s.double()) * 1e8).float(),
    "float64": lambda s: F.silu(s.double()).float(),
    "integers": lambda s: (s.int() * (s.int() * 3 + 1) + s.int() * s.int()) * s,
}


@pytest.mark.parametrize("name", OTHER_NUMBERS)
def test_other_numbers_are_left_alone(name, monkeypatch):
    graph = expand(from_function(OTHER_NUMBERS[name], 0).joint, "accurate")
    found = fold(graph)
    monkeypatch.setattr(folding, "regroup", lambda graph: graph)
    assert [n for n in found.nodes if n.dtype != torch.float32] == [
        n for n in fold(graph).nodes if n.dtype != torch.float32
    ]


def test_what_is_needed_elsewhere_stays():
    """Where the sum has other users, nothing is gained."""

    def graph(alone: bool) -> Graph:
        b = Builder(1)
        s = b.input(0)
        q = b("exp2", s)
        inner = b("add", b("mul", s, b("exp2", q)), 1.0)
        outputs = (b("mul", q, inner), inner if alone else b("mul", s, q))
        return b.finish(outputs)

    assert operations(regroup(graph(False))) == operations(graph(False)) - 1
    assert regroup(graph(True)) == graph(True)


def test_a_product_with_what_is_1_as_a_float32_is_none():
    b = Builder(1)
    graph = b.finish((b("mul", b("exp2", b.input(0)), 1.0 + 2.0**-30), b("mul", b.input(0), 1.0 + 2.0**-20)))
    first, second = regroup(graph).outputs
    assert isinstance(first, Ref)
    assert regroup(graph).nodes[first.index].op == "exp2"
    assert isinstance(second, Ref)
    assert regroup(graph).nodes[second.index].op == "mul"


@pytest.mark.parametrize("factor", [2.0, 0.5, -0.5])
def test_multiples_of_relu_are_0_where_it_is(factor):
    """where(r <= 0, 0, c r), as autograd writes the derivative of r^2, is c r; NaN stays."""

    def scaled(s: Tensor) -> Tensor:
        return factor * F.relu(s) ** 2

    graph = from_function(scaled, 0).joint
    assert all(n.op != "where" for n in graph.nodes)
    s = torch.tensor([-1.0, -0.0, 0.0, 0.5, 3.0, torch.inf, torch.nan], dtype=torch.float64)
    torch.testing.assert_close(torch.stack(graph.evaluate(s)), by_autograd(scaled, s), equal_nan=True)
    assert any(n.op == "where" for n in from_name("relu").joint.nodes), "a constant is not 0 there"
