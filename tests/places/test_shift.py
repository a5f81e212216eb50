"""Functions of a sum of the score and places: found, and taken apart without changing what they compute."""

from __future__ import annotations

import pickle

import pytest
import torch
import torch.nn.functional as F

from gdpa.functions.accuracy.hardware import emulate
from gdpa.functions.activation import resolve_one
from gdpa.functions.emit import emit
from gdpa.functions.passes.expand import expand
from gdpa.functions.passes.simplify import value_of
from gdpa.functions.places.names import TableKind

TABLE = TableKind(1, torch.float32)


def linear(s, *, h, q_idx, kv_idx):
    return F.silu(s - torch.exp2(-(h + 1.0)) * (q_idx - kv_idx).abs())


def learned(s, t, *, h, q_idx, kv_idx):
    return torch.sigmoid(3.0 + s + t[h] * (kv_idx - q_idx)) * 2.0


def two_sums(s, t, *, q_row, kv_row):
    return torch.tanh((s + t[q_row]) - t[kv_row])


SUMS = {"linear": (linear, ()), "learned": (learned, (TABLE,)), "two sums": (two_sums, (TABLE,))}


@pytest.mark.parametrize("name", SUMS)
def test_what_is_a_sum(name: str) -> None:
    fn, tables = SUMS[name]
    placed = resolve_one(fn, 0, tables).placed
    assert placed is not None
    assert placed.shift is not None
    leaves = [torch.randn(50, dtype=torch.float64) for _ in placed.program.graph.outputs]
    s = torch.randn(50, dtype=torch.float64)
    value, by_s, *by_leaves = placed.inner.joint.evaluate(s, *leaves)
    u, one, *du = placed.shift.joint.evaluate(s, *leaves)
    p, slope = placed.shift.outer.joint.evaluate(u)
    torch.testing.assert_close(p, value)
    assert bool((one == 1).all())
    torch.testing.assert_close(slope, by_s)
    for i in placed.learned:
        torch.testing.assert_close((slope * du[i]).expand(50), by_leaves[i].expand(50))


@pytest.mark.parametrize("f", [torch.sigmoid, F.silu], ids=["sigmoid", "silu"])
def test_a_bias_costs_no_accuracy(f) -> None:
    """sigmoid(s - log n) and its like: far from 0 the shortest form of f, which is good enough for f alone, is not."""

    def biased(s, t, *, h):
        return f(s + t[h])

    placed = pickle.loads(pickle.dumps(resolve_one(biased, 0, (TABLE,)))).placed
    assert placed.shift.outer.part_of is not None
    level = emit(placed.shift.outer, torch.bfloat16, "sm90").level
    graph = expand(value_of(placed.shift.outer.joint), level)
    for mean in range(-24, 9, 4):
        u = mean + 0.3 * torch.randn(5000, dtype=torch.float64, generator=torch.Generator().manual_seed(mean + 24))
        exact = f(u)
        found, ideal = (x.to(torch.bfloat16).double() for x in (emulate(graph, level, "sm90", u.float())[0], exact))
        assert (found - exact).norm() <= 1.15 * (ideal - exact).norm()


NO_SUMS = {
    "a factor": lambda s, t, *, q_row: F.silu(s) * t[q_row],
    "the score twice": lambda s, t, *, q_row: s * torch.sigmoid(s + t[q_row]),
    "a leaf again": lambda s, t, *, q_row: torch.sigmoid(s + t[q_row]) * t[q_row],
    "a scaled score": lambda s, t, *, q_row: torch.sigmoid(2.0 * s + t[q_row]),
    "minus the score": lambda s, t, *, q_row: torch.sigmoid(t[q_row] - s),
    "nothing but the sum": lambda s, t, *, q_row: s + t[q_row],
    "an integer sum": lambda s, t, *, q_row, kv_row: torch.where(q_row + kv_row > 3, s, s * t[q_row]),
}


@pytest.mark.parametrize("name", NO_SUMS)
def test_what_is_none(name: str) -> None:
    placed = resolve_one(NO_SUMS[name], 0, (TABLE,)).placed
    assert placed is not None
    assert placed.shift is None


FINITE = {
    "positions": (lambda s, *, q_idx, kv_idx: F.silu(s + 0.1 * (q_idx - kv_idx)), True),
    "a row's entry": (lambda s, t, *, q_row: torch.sigmoid(s + t[q_row]), True),
    "an entry by head": (lambda s, t, *, h, kv_idx: torch.sigmoid(s + t[h] * kv_idx), True),
    "an entry near a row": (lambda s, t, *, q_row: torch.sigmoid(s + t[q_row + 1]), False),
    "an entry of a pair": (lambda s, t, *, q_idx, kv_idx: torch.sigmoid(s + t[q_idx - kv_idx]), False),
    "a quotient": (lambda s, *, kv_idx, kv_len: torch.sigmoid(s) / (kv_len - kv_idx), False),
    "a logarithm of the score": (lambda s, *, kv_idx: torch.log(s.abs()) + kv_idx, False),
    "growth without bounds": (lambda s, *, q_idx, kv_idx: torch.exp(s + kv_idx - q_idx), False),
}


@pytest.mark.parametrize("name", FINITE)
def test_what_is_finite_past_the_end(name: str) -> None:
    """Past the end of its sequence a row's score is 0, its position no one's: finite values there need no mask."""
    fn, finite = FINITE[name]
    tables = (TABLE,) if "t" in fn.__code__.co_varnames[: fn.__code__.co_argcount] else ()
    assert resolve_one(fn, 0, tables).finite_at_zero == finite
