"""Two codes and a vote: for which functions, and what comes out, on draws of whole blocks with rows of their own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from functions.library import BY_NAME
from gdpa.functions.accuracy.hardware import emulate
from gdpa.functions.accuracy.precision import (
    Case,
    cases_of,
    choose_level,
    emulated,
    keeps_rules,
    means_keep_rules,
    means_of,
    mixed_means,
)
from gdpa.functions.activation import Activation, from_function, from_name, resolve_one
from gdpa.functions.emission.guarded import Guard, choose_guard, choose_guard_of_sums
from gdpa.functions.emission.ptx import GUARDED_LANES, LANES, ROW_SAMPLES
from gdpa.functions.emit import emit
from gdpa.functions.passes.expand import expand
from gdpa.functions.passes.fold import fold
from gdpa.functions.passes.simplify import value_of
from gdpa.functions.passes.stretch import Stretch, composed, has_rest_of_params, split_stretch
from gdpa.functions.places.names import TableKind
from support import FULL, bf16, f16, f32, in_turn

RESULTS = ("exact", "definition", "plain")  # of a case
ROWS, COLUMNS = 16, 128  # of a warp's block

GUARDED = [
    ("gelu_tanh", bf16), ("silu", f16), ("gelu", bf16), ("sigmoid", f16), ("softplus", f16),
]  # fmt: skip


# ---- which functions -------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(("name", "dtype"), GUARDED, ids=str)
def test_functions_that_fail_in_one_tail(name, dtype):
    act = from_name(name)
    guard = choose_guard(act, dtype, "sm90")
    assert guard is not None
    assert guard.cheap == "approx"
    assert -8 < guard.threshold < -2
    emitted = emit(act, dtype, "sm90")
    assert (emitted.level, emitted.packed_level) == (choose_level(act, dtype, "sm90", False), "guarded")
    assert "vote.sync" in emitted.source.split("def forward_packed")[1].split("def backward_packed")[0]
    assert emitted.source.count("vote.sync") == 1
    assert "is_pure=False" in emitted.source, "the vote must stay where all lanes take part"


@pytest.mark.parametrize("share", [0.0, 0.01, 0.5, 0.97, 1.0])
def test_errors_of_a_mixture_are_those_of_its_points(share):
    """Every point twice: with the weight that the cheap code's result has, and with that of the other's."""
    act = from_name("gelu_tanh")
    (case,) = cases_of(act, bf16, False)
    graph = value_of(act.joint)
    cheap, careful = (emulated(graph, level, "sm90", case)[0] for level in ("approx", "short"))
    weights = torch.cat([share * case.weights, (1 - share) * case.weights], -1)
    twice = replace(case, weights=weights, **{k: torch.cat([getattr(case, k)] * 2, -1) for k in RESULTS})
    of_points = keeps_rules(torch.cat([cheap, careful], -1), twice)
    means = mixed_means(means_of(cheap, case), means_of(careful, case), torch.tensor(share))
    assert torch.equal(means_keep_rules(means, case), of_points)
    assert share in (0.01, 0.5, 0.97) or of_points.all() == (share == 0)


@pytest.mark.parametrize(("name", "threshold"), [("gelu_tanh", -4.0), ("gelu", -3.5)])
def test_threshold_of_gelu(name, threshold):
    """Everything hangs on it: ordinary scores must be before it."""
    assert choose_guard(from_name(name), bf16, "sm90") == Guard("approx", threshold)


@pytest.mark.parametrize(
    ("name", "dtype", "target"),
    [("gelu_tanh", bf16, "cuda"), ("gelu_tanh", bf16, "hip"), ("gelu_tanh", f32, "sm90"), ("relu", bf16, "sm90"),
     ("gelu", bf16, "cuda"), ("gelu", f16, "sm90"), ("gelu_tanh", f16, "sm90"),
     ("laplace", bf16, "sm90"), ("laplace", f16, "sm90")],
)  # fmt: skip
def test_others_have_none(name, dtype, target):
    """Other targets and dtypes, a function that is cheap everywhere, those that fail in the middle, and one whose
    threshold (-2.75) is so near that every seventh warp would vote in vain on scores of spread 2.5."""
    assert choose_guard(from_name(name), dtype, target) is None
    emitted = emit(from_name(name), dtype, target)
    assert emitted.packed_level == emitted.level
    assert "vote" not in emitted.source


def test_a_mirrored_function_has_the_mirrored_threshold():
    mirrored = from_function(lambda s: BY_NAME["gelu_tanh"].fn(-s), 0)
    assert choose_guard(mirrored, bf16, "sm90") == Guard("approx", 4.0)


def test_a_tail_where_scores_are_has_none():
    """All ordinary scores of sigmoid(s - 7) are in its tail: the vote would never be won."""
    assert choose_guard(from_function(lambda s: torch.sigmoid(s - 7), 0), bf16, "sm90") is None


def test_params_that_shift_have_none():
    """Where its tail begins depends on the param."""
    shifted = from_function(lambda s, b: torch.sigmoid(s + b), 1)
    assert choose_level(shifted, bf16, "sm90", False) == "short"
    assert choose_guard(shifted, bf16, "sm90") is None


def test_the_choice_does_not_depend_on_what_runs_around_it():
    default = torch.get_default_dtype()
    try:
        torch.set_default_dtype(torch.float64)
        with torch.inference_mode(), torch.device("meta"):
            assert choose_guard.__wrapped__(from_name("gelu_tanh"), bf16, "sm90") == Guard("approx", -4.0)
    finally:
        torch.set_default_dtype(default)


# ---- on draws --------------------------------------------------------------------------------------------------------
def votes_for_cheap(s: Tensor, threshold: float) -> Tensor:
    """(blocks,) of s (blocks, ROWS, COLUMNS): as the lanes of a warp hold an accumulator of the tensor cores."""
    rows = torch.arange(ROWS)[:, None]
    lanes = 2 * torch.arange(4)[None, :]
    near = torch.zeros(len(s), ROWS, 4, dtype=torch.bool)
    for half, samples in enumerate(ROW_SAMPLES):
        for i in samples:
            sampled = s[:, rows, 8 * (i // 4) + lanes + i % 2] > threshold
            near |= sampled & (rows // 8 == half)
    return near.flatten(1).all(1)


# Stretched scores, a factor of the whole, and both: a function, params, and its form (see passes/stretch.py).
STRETCHED = {
    "temperature": (lambda s, a: F.silu(a * s), (True, False, 0)),
    "gain": (lambda s, c: c * F.silu(s), (False, True, 0)),
    "swish": (lambda s, b: s * torch.sigmoid(b * s), (True, True, 1)),
    "two": (lambda s, a, c: c * F.silu(torch.exp(a) * s), (True, True, 0)),
}
if FULL:  # of the same forms, and the function inside has a guard of its own above; it takes longest to choose
    STRETCHED |= {
        "temperature of gelu": (lambda s, a: F.gelu(a * s, approximate="tanh"), (True, False, 0)),
        "gain of gelu": (lambda s, c: c * F.gelu(s, approximate="tanh"), (False, True, 0)),
    }


@pytest.mark.parametrize("name", STRETCHED)
def test_stretched_scores(name):
    """The parts make the whole, and the vote is about what the function inside takes."""
    fn, form = STRETCHED[name]
    act = from_function(fn, n_params_of(fn))
    value = value_of(act.joint)
    stretch = split_stretch(value)
    assert (stretch.factor is not None, stretch.rest is not None, stretch.power) == form
    s = torch.randn(100, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    for values in ((0.7, -1.3), (-2.5, 0.1)):
        params = [torch.full_like(s, x) for x in values[: act.n_params]]
        torch.testing.assert_close(stretch.outer.evaluate(*inside(stretch, s, *params))[0], fn(s, *params))
        parts = (stretch.factor, stretch.rest if has_rest_of_params(stretch) else None)
        given = [s, *(part.evaluate(s, *params)[0] for part in parts if part is not None)]
        torch.testing.assert_close(composed(stretch.outer, stretch).evaluate(*given)[0], fn(s, *params))
    emitted = emit(act, bf16, "sm90", 128**-0.5)
    assert emitted.packed_level == "guarded"
    assert emitted.zero_at_zero


def test_a_temperature_costs_nothing_per_score():
    """The cheap code of silu(a s) is that of silu: a product, a tanh, a sum and product."""
    act = from_function(STRETCHED["temperature"][0], 1)
    source = emit(act, bf16, "sm90", 128**-0.5).source.split("def forward_packed")[1]
    cheap = source.split("bra.uni CAREFUL;")[1].split("bra.uni DONE;")[0]
    operations = [line.split()[0] for line in cheap.split("\\n") if "_0," in line and "mov" not in line]
    assert operations[:3] == ["mul.rn.f32", "tanh.approx.f32", "fma.rn.f32"]
    assert len(operations) == 3 * GUARDED_LANES // LANES


@pytest.mark.parametrize(
    "fn",
    [lambda s, a: torch.sigmoid(s + a), lambda s, a: torch.where(s > 0, s, a * s), lambda s, a: F.silu(a * s) + s,
     lambda s, a: F.silu(a * s) * torch.sigmoid(s), lambda s, a: a * torch.ones_like(s), lambda s, a: F.silu(s)],
)  # fmt: skip
def test_functions_that_params_do_not_only_stretch(fn):
    assert split_stretch(value_of(from_function(fn, 1).joint)) is None


def n_params_of(fn) -> int:
    return fn.__code__.co_argcount - 1


def inside(stretch: Stretch, s: Tensor, *params: Tensor) -> list[Tensor]:
    """What the outer function takes."""
    u = s if stretch.factor is None else s * stretch.factor.evaluate(s, *params)[0]
    return [u] if stretch.rest is None else [u, s**stretch.power * stretch.rest.evaluate(s, *params)[0]]


VALUES = (0.3, 1.7, -6.0)


@pytest.mark.parametrize(
    ("name", "value"),
    [(name, value) for name in STRETCHED for value in VALUES]
    if FULL
    else [("temperature", 1.7), ("temperature", -6.0), ("swish", 0.3)],
)
def test_guarded_code_of_stretched_scores_keeps_the_rules_on_draws(name, value):
    """Rows whose stretched scores lie around the threshold."""
    fn, _ = STRETCHED[name]
    act = from_function(fn, n_params_of(fn))
    guard, stretch = choose_guard(act, bf16, "sm90"), split_stretch(value_of(act.joint))
    params = [torch.tensor(x) for x in (value, 0.6)[: act.n_params]]
    factor = 1.0 if stretch.factor is None else float(stretch.factor.evaluate(torch.zeros(()), *params)[0])
    for mean, spread in mixed_rows(guard.threshold):
        if ((mean / factor).abs() > 8).any():
            continue  # beyond what the rules are about
        case, found = draws(act, bf16, mean / factor, spread / abs(factor), guard.threshold, params)
        assert keeps_rules(found, case).all(), (mean[0], spread[0])


def draws(
    act: Activation, dtype: torch.dtype, mean: Tensor, spread: Tensor, threshold: float, params: Sequence[Tensor] = ()
) -> tuple[Case, Tensor]:
    """Blocks whose rows have the given means and spreads (ROWS,): the exact values and the guarded code's, per row."""
    rng = torch.Generator().manual_seed(int(10 * mean.sum()))
    s = mean[:, None] + spread[:, None] * torch.randn(64, ROWS, COLUMNS, generator=rng)
    graph, given = value_of(act.joint), [s]
    if params:
        stretch = split_stretch(graph)
        graph, given = stretch.outer, inside(stretch, s, *params)
    cheap, careful = (
        emulate(fold(expand(graph, level)), level, "sm90", *given)[0]
        for level in ("approx", choose_level(act, dtype, "sm90", False))
    )
    found = torch.where(votes_for_cheap(given[0], threshold)[:, None, None], cheap, careful)
    rows = lambda x: x.double().movedim(1, 0).flatten(1)[None]
    near = (mean.abs() <= 3) & (spread >= 0.3)
    weights = torch.full((64 * COLUMNS,), 1 / (64 * COLUMNS), dtype=torch.float64)
    like = torch.float32 if params else dtype  # float32 params make all of PyTorch's function float32
    case = Case(
        rows(s)[0], weights, near, (), act.joint.evaluate(rows(s), *(p.double() for p in params))[0],
        rows(act.eager(s, *params).to(dtype)), rows(act.eager(s.to(dtype).to(like), *params).to(dtype)), dtype,
    )  # fmt: skip
    return case, rows(found)


def mixed_rows(threshold: float) -> list[tuple[Tensor, Tensor]]:
    """Rows around the threshold: all alike, and every second one beside ordinary rows."""
    found = []
    for mean in torch.arange(threshold - 3, threshold + 1.1, 0.5 if FULL else 1.0).tolist():
        for spread in (0.1, 0.3, 0.6, 1.0):
            alike = torch.full((ROWS,), mean), torch.full((ROWS,), spread)
            odd = torch.arange(ROWS) % 2 == 1
            found += [alike, tuple(torch.where(odd, t, x) for t, x in zip(alike, (0.0, 1.0), strict=True))]
    return found


def keep_rules(name: str, dtype: torch.dtype, threshold: float) -> bool:
    rows = mixed_rows(threshold)
    return all(
        bool(keeps_rules(found, case).all())
        for case, found in (draws(from_name(name), dtype, *r, threshold) for r in rows)
    )


@pytest.mark.parametrize(("name", "dtype"), GUARDED if FULL else GUARDED[2:4], ids=str)
def test_guarded_code_keeps_the_rules_on_draws(name, dtype):
    guard = choose_guard(from_name(name), dtype, "sm90")
    assert guard is not None
    assert keep_rules(name, dtype, guard.threshold)


@pytest.mark.parametrize(("name", "threshold"), [("gelu_tanh", -5.5), ("gelu", -5.5)])
def test_a_threshold_too_far_out_does_not(name, threshold):
    assert not keep_rules(name, bf16, threshold)


@pytest.mark.parametrize(("threshold", "of_wide"), [(-4.0, 0.98), (-3.5, 0.95)])
def test_ordinary_scores_use_the_cheap_code(threshold, of_wide):
    rng = torch.Generator().manual_seed(0)
    for spread, share in ((1.0, 1.0), (2.5, of_wide)):
        s = spread * torch.randn(1000, ROWS, COLUMNS, generator=rng)
        assert votes_for_cheap(s, threshold).double().mean() >= share


# ---- sums of scores and places ---------------------------------------------------------------------------------------
def outer_of(f) -> Activation:
    def biased(s, t, *, q_idx, kv_idx):
        return f(s + t[q_idx - kv_idx])

    return resolve_one(biased, 0, (TableKind(1, f32),)).placed.shift.outer


@pytest.mark.parametrize(
    ("f", "threshold"),
    [(F.silu, -3.75), (torch.sigmoid, -5.25), (lambda u: F.gelu(u, approximate="tanh"), -2.75), (F.softplus, -4.75)],
    ids=["silu", "sigmoid", "gelu_tanh", "softplus"],
)
def test_sums(f, threshold):
    """Nearer to 0 than for scores alone: one before it must hide what the cheap code makes of all others."""
    outer = outer_of(f)
    guard = choose_guard_of_sums(outer, bf16, "sm90")
    assert guard == Guard("approx", threshold)
    assert emit(outer, bf16, "sm90").packed_level == "guarded"
    assert choose_guard_of_sums(outer, bf16, "cuda") is None


def test_sums_of_functions_without_a_tail():
    """Nothing is cheaper than what is good everywhere."""
    for f in (torch.relu, torch.tanh):
        assert choose_guard_of_sums(outer_of(f), bf16, "sm90") is None


BIASES = {  # of a row's keys
    "none": lambda j: torch.zeros_like(j),
    "slow": lambda j: -0.01 * j,
    "steep": lambda j: -0.5 * j,
    "steeper": lambda j: -4.0 * j,
    "growing": lambda j: 0.3 * (j - 900),
    "far": lambda j: torch.full_like(j, -12.0),
    "one near, others far": lambda j: torch.where(j % 32 == 0, 0.0, -9.0),
    "steps": lambda j: -3.0 * (j // 100),
}


@pytest.mark.parametrize(
    ("name", "bias"), [(f, bias) for i, bias in enumerate(BIASES) for f in in_turn(("silu", "sigmoid", "softplus"), i)]
)
def test_guarded_code_of_sums_keeps_rule_a_on_rows(name, bias):
    """Whole rows of 1024 keys, whose blocks vote one by one."""
    f = BY_NAME[name].fn
    outer = outer_of(f)
    guard = choose_guard_of_sums(outer, bf16, "sm90")
    careful = choose_level(outer.part_of, bf16, "sm90", False)
    j = torch.arange(1024.0)
    for spread in (0.3, 1.0, 3.0):
        noise = torch.randn(32, ROWS, 1024, generator=torch.Generator().manual_seed(7))
        u = BIASES[bias](j) + spread * noise
        graph = value_of(outer.joint)
        cheap, close = (emulate(fold(expand(graph, one)), one, "sm90", u)[0] for one in (guard.cheap, careful))
        votes = torch.stack([votes_for_cheap(block, guard.threshold) for block in u.split(COLUMNS, -1)], -1)
        found = torch.where(votes.repeat_interleave(COLUMNS, -1)[:, None], cheap, close)
        exact = f(u.double())
        error, definition = ((x.to(bf16).double() - exact).pow(2).mean(-1).sqrt() for x in (found, exact.float()))
        assert (error <= 1.15 * definition).all()
