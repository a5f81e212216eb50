"""Sums of scores and places for guarded code: rewritten, they are the same numbers."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from gdpa.functions.activation import resolve_one
from gdpa.functions.emit import emit
from gdpa.functions.graph import Ref
from gdpa.functions.passes.expand import expand
from gdpa.functions.passes.fold import fold
from gdpa.functions.passes.simplify import value_of
from gdpa.functions.places.names import TableKind
from gdpa.functions.places.program import Places
from gdpa.functions.places.tables import TableView
from gdpa.functions.places.terms.bias import halves
from gdpa.functions.places.terms.distances import by_sides
from gdpa.functions.places.terms.opening import opened
from gdpa.functions.places.terms.units import best_units, in_units, sides_of
from support import FULL

bf16, f16 = torch.bfloat16, torch.float16


def slopes(s, t, *, h, q_idx, kv_idx):
    return F.silu(s + t[h] * (kv_idx - q_idx))


def half_slopes(s, *, h, q_idx, kv_idx):
    return F.silu(s - torch.exp2(-(h + 1.0)) * (q_idx - kv_idx) / 2)


def two_terms(s, t, *, h, q_idx, kv_idx):
    return F.silu(s - 0.01 * (q_idx - kv_idx) + t[h] * (kv_idx - q_idx) + t[h])


def alibi(s, t, *, h, q_idx, kv_idx):
    return F.silu(s - t[h] * (q_idx - kv_idx).abs())


def rows(s, t, *, q_idx, kv_idx):
    return F.silu(s + t[q_idx] - t[kv_idx])


def squares(s, *, q_idx, kv_idx):
    return F.silu(s - 0.001 * (q_idx - kv_idx) * (q_idx - kv_idx))


# Of each function: whether distances are differences, whether the sum comes in the function's own units.
FUNCTIONS: dict[str, tuple[Callable[..., Tensor], int, bool, bool]] = {
    "slopes": (slopes, 1, True, True),
    "slopes without a gradient": (half_slopes, 0, True, True),
    "two terms": (two_terms, 1, True, True),
    "absolute": (alibi, 1, False, True),
    "rows": (rows, 1, False, True),
    "squares": (squares, 0, False, False),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_the_same_sum(name: str) -> None:
    fn, n_tables, differences, own_units = FUNCTIONS[name]
    act = resolve_one(fn, 0, (TableKind(1, torch.float32),) * n_tables)
    assert act.placed is not None
    assert act.placed.shift is not None
    program, sums = act.placed.program, value_of(act.placed.shift.joint)
    g = torch.Generator().manual_seed(0)
    s, table = torch.randn(12, 40, generator=g).double(), torch.rand(64, generator=g).double()
    at = {"h": torch.tensor(2), "q_idx": torch.arange(20, 32)[:, None], "kv_idx": torch.arange(10, 50)[None]}
    places = Places(at, [TableView(table, "t")])
    exact = sums.evaluate(s, *program.evaluate(places, s))[0]

    new_program, new_sums = opened(program, sums)
    leaves = new_program.evaluate(places, s)
    torch.testing.assert_close(new_sums.evaluate(s, *leaves)[0], exact)
    sides = tuple(len(new_program.sides[o.index]) if isinstance(o, Ref) else 0 for o in new_program.graph.outputs)
    rewritten = by_sides(new_program, new_sums, sides)
    assert (rewritten is not None) == differences
    if rewritten is not None:
        new_sums, sides = rewritten
        leaves += [(at[side] - 10).double() for side in ("q_idx", "kv_idx")]
        torch.testing.assert_close(new_sums.evaluate(s, *leaves)[0], exact)
        products = [Ref(i) for i, n in enumerate(new_sums.nodes) if n.op == "mul"]
        assert all(sides_of(new_sums, sides, a) < 2 for a in products), "a product for every pair"
    divided = in_units(new_sums, sides, 2.0)
    assert (divided is not None) == own_units
    if divided is not None:
        torch.testing.assert_close(2 * divided.evaluate(s / 2, *leaves)[0], exact)


def two_in_brackets(s, t, *, h, q_idx, kv_idx):
    return F.silu(s + (t[h] * (kv_idx - q_idx) + t[kv_idx]))


def of_queries(s, t, *, q_idx):
    return F.silu(s + t[q_idx])


def of_keys_and_heads(s, t, *, h, kv_idx):
    return F.silu(s - (t[kv_idx] - 0.5 * t[h]) + 2)


def rows_in_brackets(s, t, *, q_idx, kv_idx):
    return F.silu(s + (t[q_idx] - t[kv_idx]))


def product_of_rows(s, t, *, q_idx, kv_idx):
    return F.silu(s + t[q_idx] * t[kv_idx])


WITH_HALVES = [slopes, half_slopes, two_terms, of_keys_and_heads, two_in_brackets]


@pytest.mark.parametrize("fn", [*WITH_HALVES, alibi, squares, of_queries, rows, rows_in_brackets, product_of_rows])
def test_halves_of_a_bias(fn: Callable[..., Tensor]) -> None:
    """Terms of queries and terms of keys, each computed without the other side, are what is added to the score."""
    act = resolve_one(fn, 0, (TableKind(1, torch.float32),) * (fn not in (half_slopes, squares)))
    assert act.placed is not None
    assert act.placed.shift is not None
    program, sums = act.placed.program, value_of(act.placed.shift.joint)
    assert emit(act, bf16, "sm90").bias == (fn in WITH_HALVES)
    new_program, new_sums = opened(program, sums)
    found = halves(new_program, new_sums)
    assert (found is not None) == (fn in WITH_HALVES)
    if found is None:
        return
    table, sides = torch.rand(64, generator=torch.Generator().manual_seed(0)).double(), ("q_idx", "kv_idx")
    at = {"h": torch.tensor(2), "q_idx": torch.arange(20, 32)[:, None], "kv_idx": torch.arange(10, 50)[None]}
    whole, s = Places(at, [TableView(table, "t")]), torch.zeros(12, 40).double()
    total = s
    for side, half in zip(sides, found, strict=True):
        alone = {name: t if name in ("h", side) else torch.tensor(0) for name, t in at.items()}
        leaves = new_program.evaluate(Places(alone, whole.tables), s)
        leaves += [(alone[name] - 20).double() for name in sides]
        total = total + half.evaluate(s, *leaves)[0]
    torch.testing.assert_close(total, sums.evaluate(s, *program.evaluate(whole, s))[0])


UNITS = [(F.silu, 2.0), (torch.sigmoid, 2.0), (F.relu, 1.0), (lambda u: F.gelu(u, approximate="tanh"), 1.0)]


@pytest.mark.parametrize(("f", "units"), UNITS if FULL else UNITS[::2])
def test_units(f: Callable[[Tensor], Tensor], units: float) -> None:
    """silu and sigmoid by one tanh halve their argument first; gelu_tanh has nothing to gain, relu no vote."""

    def biased(s, t, *, h):
        return f(s + t[h])

    act = resolve_one(biased, 0, (TableKind(1, torch.float32),))
    assert act.placed is not None
    assert act.placed.shift is not None
    outer = act.placed.shift.outer
    assert best_units(outer, bf16, "sm90") == emit(act, bf16, "sm90").units == units
    # What the kernel makes of a sum in its units, and multiplies by the factor afterwards, is the function.
    u = torch.linspace(-4, 4, 33).double()
    for dtype in (bf16, f16):
        own = emit(act, dtype, "sm90").units
        factor = emit(outer, dtype, "sm90", own).factor
        code = fold(expand(value_of(outer.joint), "close"), own, factor)
        torch.testing.assert_close(factor * code.evaluate(u / own)[0], f(u), rtol=1e-5, atol=1e-5)


def test_a_product_with_a_position_is_rounded_by_itself() -> None:
    """As one instruction with the sum it would not be: at i = j its rounding would be left over."""
    act = resolve_one(slopes, 0, (TableKind(1, torch.float32),))
    source = emit(act, bf16, "sm90").source
    voted = source[source.index("_shifted_for_vote(") :].split("@triton.jit")[0]
    assert voted.count("places.product(") == 2
    assert "ends[2]" in voted
