"""Functions of positions and tables against plain torch on full grids of positions: values and all gradients."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

import gdpa
from gdpa.testing.cases import Case, call, make_inputs
from places.library import FUNCTIONS, MASKS, PLACED_CASES, TINY_PLACED, Function, Masked, leaves, naive
from support import (
    CASES,
    FULL,
    INTERPRET,
    TINY_PACKED,
    TINY_SHARED_PACKED,
    TINY_WINDOW,
    Target,
    bf16,
    f16,
    f32,
    f64,
    on,
    output_gradient,
    targets,
)

REFERENCE_64 = Target("reference", f64)


def results(out: Tensor, wanted: Sequence[Tensor], do: Tensor) -> list[Tensor]:
    grads = torch.autograd.grad(out, wanted, do, allow_unused=True, materialize_grads=True)
    return [out.detach().cpu(), *(g.cpu() for g in grads)]


def check(case: Case, target: Target, f: Function | None, masked: Masked | None = None, tolerance: float = 0.0) -> None:
    """Errors relative to the largest entry, of the output and of the gradients of q, k, v, params and tables."""
    x = make_inputs(case, target.dtype, spread=1.0)
    do = output_gradient(case).to(target.dtype)
    params, tables = f.make(case) if f is not None else ((), ())
    exact, own_params, own_tables = x.to(f64), leaves(params), leaves(tables)
    learned = [t for t in own_tables if t.is_floating_point()]
    want = results(
        naive(case, exact, f, own_params, own_tables, masked), [*exact.leaves, *own_params, *learned], do.double()
    )
    wide = f64 if target.dtype == f64 else f32
    mine, held = leaves(params, wide, target.device), leaves(tables, wide, target.device)
    y = on(target.device, x)
    mask = None if masked is None else moved(masked.make(case), target.device)
    out = call(
        case, y, "silu" if f is None else f.fn, params=tuple(mine), tables=tuple(held), mask=mask,
        backend=target.backend,
    )  # fmt: skip
    got = results(out, [*y.leaves, *mine, *(t for t in held if t.is_floating_point())], do.to(target.device))
    allowed = tolerance or {f64: 1e-6, f32: 2e-5, f16: 4e-3, torch.bfloat16: 3e-2}[target.dtype]
    for i, (a, b) in enumerate(zip(got, want, strict=True)):
        assert a.shape == b.shape
        error = (a.double() - b).abs().max() if a.numel() else torch.zeros(())
        assert error <= allowed * (b.abs().max() + 1e-6 if b.numel() else 1), (i, error, b.abs().max())


def moved(mask, device):
    return gdpa.Mask(mask, ()) if not isinstance(mask, gdpa.Mask) else on_device(mask, device)


def on_device(mask: gdpa.Mask, device: str) -> gdpa.Mask:
    mask.tables = tuple(t.to(device) for t in mask.tables)
    return mask


# Each function in one layout (in the full grid in two), so that all layouts are met many times over, and each mask
# likewise.
def layouts(names: Iterable[str], cases: Sequence[Case], twice: bool = FULL) -> list[Any]:
    pairs = [(n, cases[(i + k) % len(cases)]) for i, n in enumerate(names) for k in ((0, 1 + i % 3) if twice else (0,))]
    return [pytest.param(n, c, id=f"{n}-{c.name}") for n, c in pairs]


@pytest.mark.parametrize(("name", "case"), layouts(FUNCTIONS, PLACED_CASES))
def test_cpu_in_float64(name: str, case: Case) -> None:
    check(case, Target("cpu", f64), FUNCTIONS[name])


@pytest.mark.parametrize("name", FUNCTIONS)
def test_the_reference(name: str) -> None:
    check(CASES["packed-mqa-window"], REFERENCE_64, FUNCTIONS[name])


@pytest.mark.parametrize(("name", "case"), layouts(MASKS, [*TINY_PLACED, CASES["packed"]]))
def test_masks_on_the_cpu(name: str, case: Case) -> None:
    check(case, Target("cpu", f64), None, MASKS[name])


@pytest.mark.parametrize("name", MASKS)
def test_masks_in_the_reference(name: str) -> None:
    check(TINY_PACKED, REFERENCE_64, None, MASKS[name])


@pytest.mark.parametrize("target", targets(f32, f16, bf16, backends=("cpu", "reference")))
def test_a_placed_function_under_a_mask(target: Target) -> None:
    check(CASES["packed"], target, FUNCTIONS["hstu"], MASKS["hstu"])


# ---- kernels ---------------------------------------------------------------------------------------------------------
# Of one kind of index each: none, of the head, the query, the key, of pairs, and of several tables.
COMPILED = ("alibi", "head_gate", "row_gate", "key_gate", "sequence_gate", "biased_silu", "hstu", "negative_division",
            "two_tables", "mean_of_heads", "ignores_the_score", "bits", "shifts", "byte_ids", "truths")  # fmt: skip
MASKS_IN_KERNELS = ("window_negative", "prefix_lm", "document_causal", "document_both", "targets_group", "context",
                    "dilated", "not_causal", "natten", "tree", "heads", "nothing", "rows")  # fmt: skip
if INTERPRET and not FULL:  # the others' own code is met on tiles in test_classify.py
    MASKS_IN_KERNELS = ("document_causal", "targets_group", "not_causal", "tree", "heads", "nothing", "rows")


@pytest.mark.parametrize("target", targets(f32, backends=("triton",)))
@pytest.mark.parametrize(("name", "case"), layouts(COMPILED, TINY_PLACED, twice=False))
def test_kernels(target: Target, name: str, case: Case) -> None:
    check(case, target, FUNCTIONS[name])


@pytest.mark.parametrize("target", targets(f32, backends=("triton",)))
@pytest.mark.parametrize(("name", "case"), layouts(MASKS_IN_KERNELS, TINY_PLACED, twice=False))
def test_masks_in_kernels(target: Target, name: str, case: Case) -> None:
    check(case, target, None, MASKS[name])


@pytest.mark.parametrize("target", targets(f16, f32, backends=("triton",), interpret=(f16,)))
def test_kernels_with_both(target: Target) -> None:
    check(TINY_WINDOW, target, FUNCTIONS["hstu"], MASKS["hstu"])


@pytest.mark.parametrize("target", targets(f32, backends=("triton",)))
def test_deterministic_gradients(target: Target) -> None:
    """dq in a fixed order comes from a kernel of its own, which needs positions and masks as well; gradients of tables
    from the definition."""
    torch.use_deterministic_algorithms(True)
    check(TINY_WINDOW, target, FUNCTIONS["hstu"], MASKS["hstu"])
    check(TINY_SHARED_PACKED, target, FUNCTIONS["head_gate"])
