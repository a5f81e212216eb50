"""One copy of the code of the backward's two consumers (compiled/sharing.py): when, and that both do their own work."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

pytest.importorskip("triton")
if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("kernels are interpreted in this run, not compiled", allow_module_level=True)

from exactness.grid import FEW_SCORES
from gdpa.backends import tuning
from gdpa.backends.hopper import config
from gdpa.backends.triton.compiled import sharing
from gdpa.exactness import results, rules
from gdpa.exactness.draw import draw
from gdpa.functions import stored
from gdpa.functions.activation import resolve_one
from gdpa.masks.band import Band
from gdpa.problem import Operands, make_problem
from gdpa.testing.cases import Case, dense
from simulator.launching import Simulator, ptx_of, simulated_hopper
from support import FULL, SIMULATE, Target, bf16, f16

NO_BAND = Band()


@pytest.fixture
def simulator(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Simulator]:
    """Of a machine that keeps what it compiles."""
    monkeypatch.setenv(stored.VARIABLE, str(tmp_path))
    tuning.forget()
    with simulated_hopper(seed=7) as found:
        yield found
    tuning.forget()


def tilted_gelu(s: Tensor) -> Tensor:
    return F.gelu(s, approximate="tanh") + 0.25 * s


def steeper_gelu(s: Tensor) -> Tensor:
    return F.gelu(s, approximate="tanh") + 0.75 * s


def broken_rules(fn: Callable[[Tensor], Tensor], case: Case, dtype: torch.dtype, device: str = "cpu") -> list[str]:
    """Of the accuracy contract."""
    formula = results.Formula.of(case, fn)
    x = draw(case, FEW_SCORES[1], dtype, device)
    return rules.problems(
        rules.measure(formula, FEW_SCORES[1], [x], lambda x: results.ours(formula, x, activation=fn, backend="hopper"))
    )


JAGGED = Case("jagged", (130, 0, 65), (270, 129, 0), heads=2, heads_k=1, d=64, packed_q=True, packed_k=True)
# How dq is made, what with, and whether in a fixed order.
CASES = {
    "a ring": (JAGGED, bf16, False),
    "a ring, in a fixed order": (dense("dense", 1, 130, 257, heads=1, d=64), f16, True),
    "sums in memory": (dense("few", 1, 70, 420, heads=1, d=64), bf16, False),
    "a kernel of its own": (dense("few", 1, 70, 420, heads=1, d=64), bf16, True),
    "shared queries": (replace(JAGGED, len_q=(70,) * 3, packed_q=False, shared=True), f16, False),
}


@pytest.mark.parametrize("name", CASES if FULL else ["a ring"])
def test_both_consumers_do_their_own_work(name: str, simulator: Simulator) -> None:
    """With another function, too, which fills the kernel of the first one."""
    case, dtype, in_order = CASES[name]
    torch.use_deterministic_algorithms(in_order)
    assert not broken_rules(tilted_gelu, case, dtype)
    assert not broken_rules(steeper_gelu, case, dtype)
    texts = [ptx_of(kernel, name) for kernel, name in simulator.launched.items() if name == "backward_kernel"]
    assert len(texts) >= 2
    assert all("%own_barrier" in text and "$L_FIRST_OVER" in text for text in texts)


@pytest.mark.hopper
@pytest.mark.parametrize("name", CASES)
def test_on_a_gpu(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where tests keep nothing, as all others do, there is nothing of this."""
    monkeypatch.setenv(stored.VARIABLE, str(tmp_path))
    case, dtype, in_order = CASES[name]
    torch.use_deterministic_algorithms(in_order)
    cases = [case] if SIMULATE else [case, dense("long", 4, 1500, 1100, heads=4, heads_k=2, d=64)]
    for one in cases:
        assert not broken_rules(lambda s: steeper_gelu(s) * 0.5, one, dtype, Target("hopper", dtype).device)


@pytest.mark.skipif(not FULL, reason="only with the full grid: where Triton writes other PTX than is known here")
def test_each_may_have_a_copy_after_all(simulator: Simulator, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sharing, "shared", lambda ptx: None)
    assert not broken_rules(lambda s: tilted_gelu(s) * 1.5, JAGGED, bf16)
    assert "backward_kernel" in simulator.launched.values()
    assert not any("%own_barrier" in ptx_of(*kernel) for kernel in simulator.launched.items())


def has_long_steps(fn: Callable[..., Tensor], d: int, n_params: int = 0, band: Band = NO_BAND) -> bool:
    q = torch.empty(1, 2, 300, d, dtype=bf16)
    x = Operands(q, q, q, None, None, torch.empty(n_params, 2) if n_params else None)
    problem = make_problem(x, (resolve_one(fn, n_params),), d**-0.5, 1.0, band)
    return config.has_long_steps(problem, config.default(problem, "bwd"))


def test_where_it_pays(simulator: Simulator) -> None:
    assert has_long_steps(tilted_gelu, 64)
    assert not has_long_steps(lambda s: F.silu(s) * 1.25, 64)  # a short function
    assert not has_long_steps(tilted_gelu, 128)
    assert not has_long_steps(lambda s, a: tilted_gelu(s) * a, 64, n_params=1)
    assert not has_long_steps(tilted_gelu, 64, band=Band(None, 0))


def test_unknown_code_is_left_as_it_is() -> None:
    assert sharing.shared("") is None
    assert sharing.shared(f"{sharing.OWN_NUMBER}\n" * 2) is None


def test_only_numbers_of_threads_are_counted_within_a_consumer() -> None:
    text = "\t.reg .pred\n\tmov.u32 \t%r1, %tid.x;\n\tadd.s32 \t%r2, %r1, -128;\n\tadd.s32 \t%r3, %r12, -128;\n"
    changed = sharing._of_either(text)
    assert "and.b32 \t%r2, %r1, 127;" in changed
    assert "add.s32 \t%r3, %r12, -128;" in changed


def test_nothing_is_shared_where_nothing_is_kept() -> None:
    """The tests' own setting: only what is kept on disk is compiled in two steps."""
    assert stored.folder() is None
    assert not sharing.is_possible()
