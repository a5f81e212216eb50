"""Sequences never see each other: whatever stands in one, the bits of all others stay, values and gradients."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from gdpa.testing.cases import Case, Inputs, dense, make_inputs
from support import FULL, INTERPRET, Results, Target, f16, f32, in_turn, output_gradient, run_gdpa, targets

# Lengths around one tile of the interpreter (16); the first number is the sequence that is disturbed.
LAYOUTS = [
    (1, dense("dense", 3, 17, 9, heads=2, heads_k=1, d=8)),
    (0, dense("dense-causal", 2, 9, 18, heads=2, d=8, causal=True)),
    (2, Case("packed", (7, 0, 18, 3), (5, 4, 17, 9), heads=2, d=8, packed_q=True, packed_k=True)),
    (1, Case("window", (5, 9, 4), (17, 9, 3), heads=2, heads_k=1, d=8, packed_q=True, packed_k=True, window=(3, 2))),
    (1, Case("dense-keys", (4, 17, 0, 3), (9,) * 4, heads=2, d=8, packed_q=True)),
    (0, dense("shared-queries", 3, 5, 17, heads=2, d=8, shared=True)),
    (2, Case("shared-queries-packed-keys", (5,) * 4, (4, 0, 17, 3), heads=2, d=8, packed_k=True, shared=True)),
]  # fmt: skip


def zero_at_zero(s: Tensor) -> Tensor:
    return F.gelu(s)


def half_at_zero(s: Tensor) -> Tensor:
    return torch.sigmoid(s)


def infinite_at_zero(s: Tensor) -> Tensor:
    return torch.log(s.abs())


FUNCTIONS = [infinite_at_zero, half_at_zero, zero_at_zero]
DISTURBANCES = ("nan", "random", "inf")[: 2 if INTERPRET else None]  # numpy has one way with NaN and inf
if INTERPRET and not FULL:  # what other numbers change, NaN changes too
    DISTURBANCES = DISTURBANCES[:1]


def disturb(t: Tensor, how: str, rng: torch.Generator) -> Tensor:
    if how == "random":
        return torch.randn(t.shape, generator=rng).to(t.dtype) * 3
    bad = t.clone()
    bad[..., ::3] = {"nan": torch.nan, "inf": torch.inf}[how]
    return bad


def rows(case: Case, name: str, b: int) -> slice | int:
    """Where sequence ``b`` stands in the tensor called ``name``."""
    keys = name in ("k", "v", "dk", "dv")
    packed, lengths = (case.packed_k, case.len_k) if keys else (case.packed_q, case.len_q)
    if packed or (name in ("out", "do") and case.varlen):
        return slice(sum(lengths[:b]), sum(lengths[: b + 1]))
    return b


def disturbed(case: Case, x: Inputs, do: Tensor, victim: int, how: str) -> tuple[Inputs, Tensor]:
    """Everything that belongs to ``victim``, changed."""
    rng = torch.Generator().manual_seed(7)
    tensors = {"q": x.q.detach().clone(), "k": x.k.detach().clone(), "v": x.v.detach().clone(), "do": do.clone()}
    for name, t in tensors.items():
        if not (name == "q" and case.shared):  # those belong to everybody
            t[rows(case, name, victim)] = disturb(t[rows(case, name, victim)], how, rng)
    q, k, v = (tensors[name].requires_grad_() for name in "qkv")
    return Inputs(q, k, v, x.cu_q, x.cu_k), tensors["do"]


def leaks(case: Case, clean: Results, dirty: Results, victim: int, exact_dq: bool = True) -> list[str]:
    """What changed in the sequences other than ``victim``. The gradient of shared queries sums over all of them."""
    found = []
    for name in ("out", "dq", "dk", "dv"):
        if name == "dq" and case.shared:
            continue
        for b in range(len(case.len_q)):
            if b == victim:
                continue
            before, after = (r[name][rows(case, name, b)] for r in (clean, dirty))
            same = torch.equal(before, after)
            if name == "dq" and not exact_dq:  # atomic additions come in any order
                same = torch.allclose(before, after, rtol=1e-2, atol=1e-3)
            if not same:
                found.append(f"{name} of sequence {b}")
    return found


@pytest.mark.parametrize("target", [*targets(f32), *targets(f16, backends=("triton", "hopper"), interpret=(f32,))])
@pytest.mark.parametrize(
    ("victim", "case", "fn"),
    [
        pytest.param(victim, case, fn, id=f"{case.name}-{fn.__name__}")
        for i, (victim, case) in enumerate(LAYOUTS)
        for fn in (in_turn(FUNCTIONS[:2], i) if INTERPRET else FUNCTIONS)
    ],
)
def test_other_sequences_stay_bit_identical(victim, case, fn, target):
    torch.use_deterministic_algorithms(True)
    check_isolation(case, victim, fn, target)


def check_isolation(case: Case, victim: int, fn, target: Target, exact_dq: bool = True) -> None:
    x, do = make_inputs(case, target.dtype), output_gradient(case)
    clean = run_gdpa(case, x, target, fn, (), do)
    for name in ("out", "dq", "dk", "dv"):
        assert not clean[name].isnan().any()
    for how in DISTURBANCES:
        bad_x, bad_do = disturbed(case, x, do, victim, how)
        dirty = run_gdpa(case, bad_x, target, fn, (), bad_do)
        found = leaks(case, clean, dirty, victim, exact_dq)
        assert not found, f"{how} in sequence {victim} changed {', '.join(found)}"


ATOMIC = LAYOUTS[2:3] if INTERPRET and not FULL else LAYOUTS[:3]


@pytest.mark.parametrize("target", targets(f32, backends=("triton", "hopper")))
@pytest.mark.parametrize(("victim", "case"), ATOMIC, ids=[case.name for _, case in ATOMIC])
def test_with_atomic_additions(victim, case, target):
    """Outside of the deterministic mode dq may differ in its last bits, but never by a neighbour's NaN."""
    check_isolation(case, victim, half_at_zero, target, exact_dq=False)


@pytest.mark.parametrize("target", targets(f32))
def test_params_see_every_sequence(target):
    """The other way round: the gradient of a param sums over all sequences, so a NaN must show there."""
    _, case = LAYOUTS[2]
    fn, slope = (lambda s, a: torch.tanh(a * s)), torch.tensor(0.5)
    x, do = make_inputs(case, target.dtype), output_gradient(case)
    clean = run_gdpa(case, x, target, fn, (slope,), do)
    x, do = disturbed(case, x, do, 2, "nan")
    dirty = run_gdpa(case, x, target, fn, (slope,), do)
    assert clean["dparam0"].isfinite().all()
    assert dirty["dparam0"].isnan().all()
    assert not leaks(case, clean, dirty, 2)


@pytest.mark.parametrize("target", targets(f32))
def test_a_poisoned_head_stays_in_its_head(target):
    case = dense("heads", 1, 9, 17, heads=4, heads_k=2, d=8)
    x, do = make_inputs(case, target.dtype), output_gradient(case)
    clean = run_gdpa(case, x, target, "gelu", (), do)
    k = x.k.detach().clone()
    k[:, 1] = torch.nan
    dirty = run_gdpa(case, Inputs(x.q, k.requires_grad_(), x.v, None, None), target, "gelu", (), do)
    for name, heads in (("out", 2), ("dq", 2), ("dk", 1), ("dv", 1)):
        torch.testing.assert_close(clean[name][:, :heads], dirty[name][:, :heads], rtol=1e-6, atol=1e-6)
        assert dirty[name][:, heads:].isnan().any()


@pytest.mark.parametrize("target", targets(f32))
def test_masked_pairs_do_not_count(target):
    """Keys outside of every window may hold anything, as far as other keys and the outputs are concerned."""
    case = dense("window", 1, 4, 40, heads=1, d=8, window=(3, 0))  # rows see keys 33 to 39
    x, do = make_inputs(case, target.dtype), output_gradient(case)
    clean = run_gdpa(case, x, target, half_at_zero, (), do)
    k, v = x.k.detach().clone(), x.v.detach().clone()
    k[:, :, :20], v[:, :, :20] = 100.0, -100.0
    far = run_gdpa(case, Inputs(x.q, k.requires_grad_(), v.requires_grad_(), None, None), target, half_at_zero, (), do)
    for name in ("out", "dq"):
        assert torch.equal(clean[name], far[name])
    for name in ("dk", "dv"):
        assert torch.equal(clean[name][:, :, 33:], far[name][:, :, 33:])
        assert not far[name][:, :, :33].any()
