"""Two codes and a vote: for which functions, and what comes out, on draws of whole blocks with rows of their own."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from functions.library import BY_NAME
from gdpa.functions.accuracy.hardware import emulate
from gdpa.functions.accuracy.precision import Case, choose_level, keeps_rules
from gdpa.functions.activation import Activation, from_function, from_name
from gdpa.functions.emission.guarded import Guard, choose_guard
from gdpa.functions.emission.ptx import ROW_SAMPLES
from gdpa.functions.emit import emit
from gdpa.functions.passes.expand import expand
from gdpa.functions.passes.fold import fold
from gdpa.functions.passes.simplify import value_of
from support import FULL, bf16, f16, f32

ROWS, COLUMNS = 16, 64  # of a warp's block

GUARDED = [("gelu_tanh", bf16), ("gelu_tanh", f16), ("silu", f16), ("sigmoid", f16), ("softplus", f16)]


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


def test_threshold_of_gelu_tanh():
    """Everything hangs on it: ordinary scores must be before it."""
    assert choose_guard(from_name("gelu_tanh"), bf16, "sm90") == Guard("approx", -4.0)


@pytest.mark.parametrize(
    ("name", "dtype", "target"),
    [("gelu_tanh", bf16, "cuda"), ("gelu_tanh", bf16, "hip"), ("gelu_tanh", f32, "sm90"), ("relu", bf16, "sm90"),
     ("gelu", f16, "sm90"), ("laplace", f16, "sm90")],
)  # fmt: skip
def test_others_have_none(name, dtype, target):
    """Other targets and dtypes, a function that is cheap everywhere, two that fail in the middle."""
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


def test_params_have_none():
    swish = from_function(lambda s, beta: s * torch.sigmoid(beta * s), 1)
    assert choose_level(swish, bf16, "sm90", False) == "short"
    assert choose_guard(swish, bf16, "sm90") is None


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


def draws(act: Activation, dtype: torch.dtype, mean: Tensor, spread: Tensor, threshold: float) -> tuple[Case, Tensor]:
    """Blocks whose rows have the given means and spreads (ROWS,): the exact values and the guarded code's, per row."""
    rng = torch.Generator().manual_seed(int(10 * mean.sum()))
    s = mean[:, None] + spread[:, None] * torch.randn(64, ROWS, COLUMNS, generator=rng)
    graph = value_of(act.joint)
    cheap, careful = (
        emulate(fold(expand(graph, level)), level, "sm90", s)[0]
        for level in ("approx", choose_level(act, dtype, "sm90", False))
    )
    found = torch.where(votes_for_cheap(s, threshold)[:, None, None], cheap, careful)
    rows = lambda x: x.double().movedim(1, 0).flatten(1)[None]
    near = (mean.abs() <= 3) & (spread >= 0.3)
    weights = torch.full((64 * COLUMNS,), 1 / (64 * COLUMNS), dtype=torch.float64)
    case = Case(
        rows(s)[0], weights, near, (), act.joint.evaluate(rows(s))[0], rows(act.eager(s).to(dtype)),
        rows(act.eager(s.to(dtype))), dtype,
    )  # fmt: skip
    return case, rows(found)


def mixed_rows(threshold: float) -> list[tuple[Tensor, Tensor]]:
    """Rows around the threshold: all alike, and every second one beside ordinary rows."""
    found = []
    for mean in torch.arange(threshold - 3, threshold + 1.1, 0.5).tolist():
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


@pytest.mark.parametrize(("name", "dtype"), GUARDED if FULL else GUARDED[1:3], ids=str)
def test_guarded_code_keeps_the_rules_on_draws(name, dtype):
    guard = choose_guard(from_name(name), dtype, "sm90")
    assert guard is not None
    assert keep_rules(name, dtype, guard.threshold)


def test_a_threshold_too_far_out_does_not():
    assert not keep_rules("gelu_tanh", bf16, -5.5)


def test_ordinary_scores_use_the_cheap_code():
    rng = torch.Generator().manual_seed(0)
    for spread, share in ((1.0, 1.0), (2.0, 0.99)):
        s = spread * torch.randn(1000, ROWS, COLUMNS, generator=rng)
        assert votes_for_cheap(s, -4.0).double().mean() >= share
