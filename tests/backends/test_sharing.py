"""One copy of the code of a kernel's two consumers (compiled/sharing.py): when, and that both do their own work."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

pytest.importorskip("triton")
if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("kernels are interpreted in this run, not compiled", allow_module_level=True)

from exactness.grid import FEW_SCORES
from gdpa import masks
from gdpa.backends import tuning
from gdpa.backends.hopper import config
from gdpa.backends.triton import compat
from gdpa.backends.triton.compiled import scratch, sharing
from gdpa.exactness import results, rules
from gdpa.exactness.draw import draw
from gdpa.functions import stored
from gdpa.functions.activation import resolve_one
from gdpa.functions.mask import mask_from_key
from gdpa.functions.places.names import TableKind
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


def sloped(s: Tensor, a: Tensor, b: Tensor) -> Tensor:
    return torch.where(s > 0, b * s, a * s)


def in_buckets(s: Tensor, bias: Tensor, time: Tensor, *, q_row: Tensor, kv_row: Tensor) -> Tensor:
    return F.silu(s + bias[(time[q_row] - time[kv_row]).abs().clamp(0, 15)])


def broken_rules(fn: Callable[..., Tensor], case: Case, dtype: torch.dtype, device: str = "cpu") -> list[str]:
    """Of the accuracy contract. A param is another one for each head."""
    formula = results.Formula.of(case, fn)
    params, tables = (), ()
    if fn is sloped:
        params = tuple(torch.linspace(0.25, 1, case.heads) + i for i in range(2))
    if fn is in_buckets:
        times = torch.arange(max(sum(case.len_q), sum(case.len_k)), device=device) // 7
        tables = (torch.linspace(-1, 1, 16, device=device).requires_grad_(), times)
        formula = replace(formula, at=("q_row", "kv_row"))
    x = replace(draw(case, FEW_SCORES[1], dtype, device, params=params), tables=tables)
    return rules.problems(
        rules.measure(formula, FEW_SCORES[1], [x], lambda x: results.ours(formula, x, activation=fn, backend="hopper"))
    )


JAGGED = Case("jagged", (130, 0, 65), (270, 129, 0), heads=2, heads_k=1, d=64, packed_q=True, packed_k=True)
WIDE = replace(JAGGED, d=128)
DENSE = dense("dense", 1, 130, 257, heads=1, d=128)
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
    assert len(shared_kernels(simulator)) >= 2


# What the compiler's own shared memory is used for: sums over a warp's rows, and columns of another layout.
WITH_SCRATCH = {
    "params": (sloped, replace(WIDE, causal=True), bf16), "params, D 64": (sloped, JAGGED, f16),
    "entries of tables": (in_buckets, WIDE, bf16), "entries of tables, D 64": (in_buckets, JAGGED, f16),
}  # fmt: skip


@pytest.mark.parametrize("name", WITH_SCRATCH if FULL else ["params", "entries of tables, D 64"])
def test_each_has_its_scratch_memory(name: str, simulator: Simulator) -> None:
    assert not broken_rules(*WITH_SCRATCH[name])
    assert all("%scratch_at, %scratch;" in text for text in shared_kernels(simulator))


@pytest.mark.usefixtures("large_batch")  # few queries have one consumer
@pytest.mark.parametrize("case", [DENSE, WIDE, JAGGED] if FULL else [DENSE])
def test_the_forward_shares_lookups(case: Case, simulator: Simulator) -> None:
    assert not broken_rules(in_buckets, case, bf16)
    assert shared_kernels(simulator, "forward_kernel")


@pytest.mark.skipif(not FULL, reason="only with the full grid: it tests the tests above")
def test_scratch_memory_of_both_would_be_noticed(simulator: Simulator, monkeypatch: pytest.MonkeyPatch) -> None:
    told = sharing._told
    monkeypatch.setattr(sharing, "_told", lambda consumer, barrier, _: told(consumer, barrier, 0))
    assert "dparams" in str(broken_rules(sloped, JAGGED, bf16))


def shared_kernels(simulator: Simulator, which: str = "backward_kernel") -> list[str]:
    """The kernels of a pass that were launched, all of them with one copy."""
    texts = [ptx_of(kernel, name) for kernel, name in simulator.launched.items() if name == which]
    assert texts
    for text in texts:
        assert "%own_barrier" in text
        assert "$L_FIRST_OVER" in text
        labels = re.findall(r"^\$L\w+:", text, re.MULTILINE)
        assert len(labels) == len(set(labels))  # the assembler refuses one that is there twice
    return texts


@pytest.mark.hopper
@pytest.mark.parametrize("name", [*CASES, *WITH_SCRATCH])
def test_on_a_gpu(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(stored.VARIABLE, str(tmp_path))  # simulated ones keep nothing
    if name in CASES:
        case, dtype, in_order = CASES[name]
        torch.use_deterministic_algorithms(in_order)
        fn: Callable[..., Tensor] = steeper_gelu
    else:
        fn, case, dtype = WITH_SCRATCH[name]
    many = dense("long", 4, 1500, 1100, heads=4, heads_k=2, d=case.d)  # two consumers in the forward, too
    for one in [case] if SIMULATE else [case, replace(many, causal=case.causal)]:
        assert not broken_rules(fn, one, dtype, Target("hopper", dtype).device)


@pytest.mark.skipif(not FULL, reason="only with the full grid: where Triton writes other PTX than is known here")
@pytest.mark.parametrize("assembled", [False, True])
def test_each_may_have_a_copy_after_all(assembled: bool, simulator: Simulator, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: Any) -> None:
        raise compat.PTXASError("what no assembler takes")

    if assembled:
        monkeypatch.setattr(compat, "keep_filled", refuse)
    else:
        monkeypatch.setattr(sharing, "shared", lambda ptx: None)
    assert not broken_rules(lambda s: tilted_gelu(s) * 1.5, JAGGED, bf16)
    assert "backward_kernel" in simulator.launched.values()
    assert not any("%own_barrier" in ptx_of(*kernel) for kernel in simulator.launched.items())


def shares_code(fn: Callable[..., Tensor], d: int, n_params: int = 0, band: Band = NO_BAND, **changes: Any) -> bool:
    q = torch.empty(1, 2, 300, d, dtype=bf16)
    x = Operands(q, q, q, None, None, torch.empty(n_params, 2) if n_params else None)
    problem = make_problem(x, (resolve_one(fn, n_params, changes.pop("tables", ())),), d**-0.5, 1.0, band)
    return config.shares_code(replace(problem, **changes))


def test_where_it_pays(simulator: Simulator) -> None:
    mask = mask_from_key(masks.document(torch.zeros(1, 300, dtype=torch.int32)).key)
    assert shares_code(tilted_gelu, 64)
    assert not shares_code(lambda s: F.silu(s) * 1.25, 64)  # a short function
    assert not shares_code(tilted_gelu, 128)
    assert shares_code(tilted_gelu, 128, mask=mask)
    assert shares_code(tilted_gelu, 64, band=Band(None, 0))
    assert shares_code(sloped, 128, n_params=2, band=Band(None, 0))
    assert not shares_code(lambda s, a: F.softplus(a * s) / a, 128, n_params=1)  # no block of PTX
    kinds = TableKind(1, torch.float32), TableKind(1, torch.int64)
    assert shares_code(in_buckets, 128, tables=kinds)
    assert not shares_code(by_key, 64, tables=kinds[:1])
    assert shares_code(by_key, 64, tables=kinds[:1], learn=True)
    assert not shares_code(tilted_gelu, 64, norms=("sum",))


def forward_shares_code(fn: Callable[..., Tensor], tables: tuple[TableKind, ...], **changes: Any) -> bool:
    q = torch.empty(8, 32, 300, 128, dtype=bf16)
    problem = make_problem(Operands(q, q, q, None, None, None), (resolve_one(fn, 0, tables),), 0.1, 1.0, NO_BAND)
    problem = replace(problem, **changes)
    return config.forward_shares_code(problem, config.default(problem, "fwd"))


def test_where_it_pays_forward(simulator: Simulator) -> None:
    kinds = TableKind(1, torch.float32), TableKind(1, torch.int64)
    assert forward_shares_code(in_buckets, kinds)
    assert not forward_shares_code(in_buckets, kinds, norms=("sum",))
    assert not forward_shares_code(by_key, kinds[:1])  # looked up once per key
    assert not forward_shares_code(tilted_gelu, ())


def by_key(s: Tensor, bias: Tensor, *, kv_row: Tensor) -> Tensor:
    return F.silu(s + bias[kv_row])


def test_unknown_code_is_left_as_it_is() -> None:
    assert sharing.shared("") is None
    assert sharing.shared(f"{sharing.OWN_NUMBER}\n" * 2) is None


def test_code_that_differs_in_anything_else_is_not_shared() -> None:
    first, second = ("\tadd.s32 \t%r1, %r2, {};\n\tst.shared.b32 \t[%r1+{}], %r3;\n\tbarrier.sync \t1;\n".format(*at)
                     for at in ((1000, 8), (1500, 8)))  # fmt: skip

    def of_either(first: str, second: str) -> tuple[str, int]:
        return scratch.of_either(first + second, 0, len(first))

    text, apart = of_either(first, second)
    assert apart == 500
    assert text.startswith(first)
    assert text.count("add.s32 \t%r1, %r1, %scratch;") == 1
    assert of_either(first, first) == (first + first, 0)
    further = [second.replace("\tbar", f"\t{more}\n\tbar") for more in ("setp.eq.b32 \t%p1, %r1, 4;", "ret;")]
    for unlike in (second.replace("8]", "12]"), second.replace("%r3", "7"), second.replace("st.", "ld."), *further):
        with pytest.raises(scratch.UnlikeError):
            of_either(first, unlike)


def test_only_numbers_of_threads_are_counted_within_a_consumer() -> None:
    text = "\t.reg .pred\n\tmov.u32 \t%r1, %tid.x;\n\tadd.s32 \t%r2, %r1, -128;\n\tadd.s32 \t%r3, %r12, -128;\n"
    changed = sharing._counted_within(text)
    assert "and.b32 \t%r2, %r1, 127;" in changed
    assert "add.s32 \t%r3, %r12, -128;" in changed


@pytest.mark.parametrize(
    ("code", "more"),
    [
        ("\tand.b32 \t%r2, %r1, 96;", False),
        ("\tand.b32 \t%r2, %r1, 128;", True),
        ("\tshl.b32 \t%r2, %r1, 4;\n\tand.b32 \t%r3, %r2, 388;\n\tst.shared.b32 \t[%r3+8], %r12;", False),
        ("\tshr.u32 \t%r2, %r1, 3;\n\tand.b32 \t%r3, %r2, 16;", True),
        ("\tshr.u32 \t%r2, %r1, 5;\n\tsetp.eq.b32 \t%p1, %r2, 4;", True),
        ("\tsetp.eq.b32 \t%p1, %r1, 128;", True),
        ("\tbfe.u32 \t%r2, %r1, 2, 5;", False),
        ("\tbfe.u32 \t%r2, %r1, 3, 5;", True),
        ("\tmov.b32 \t%r2, %r1;", True),
        ("\tst.shared.b32 \t[%r1+8], %r2;", True),
        ("\tand.b32 \t%r1, %r2, 255;", False),
    ],
)
def test_code_must_not_tell_the_consumers_apart_by_their_threads(code: str, more: bool) -> None:
    assert sharing._counts_on(code, "%r1", bits=7) == more


def test_nothing_is_shared_where_nothing_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only what is kept on disk is compiled in two steps."""
    monkeypatch.setenv(stored.VARIABLE, "off")
    assert not sharing.is_possible()
