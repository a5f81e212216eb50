"""The benchmark's layouts and precisions of gdpa, and the errors of its contenders."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention import SDPBackend

import gdpa
from gdpa.bench import rates, timing
from gdpa.bench.contenders import everybody, layouts, softmax
from gdpa.bench.contenders.contender import Prepared
from gdpa.bench.contenders.everybody import Ours
from gdpa.bench.contenders.plain import Eager
from gdpa.bench.functions import benchmark_function
from gdpa.bench.kernels import accuracy, coverage, memory, run, suite
from gdpa.testing.cases import SMALL_CASES, Case, Inputs, call, dense, make_inputs

CPU = torch.device("cpu")
SIGMOID = benchmark_function("sigmoid")
SELF = dense("self", 3, 12, 12, heads=2, d=8, causal=True)
SHORT = dense("short", 2, 12, 5, heads=4, heads_k=2, d=8)
JAGGED = replace(suite.packed((7, 0, 12)), heads=2, d=8)
small_cases = pytest.mark.parametrize("case", SMALL_CASES, ids=lambda case: case.name)


def prepared_of(contender: Any, case: Case, x: Inputs) -> Prepared:
    prepared = contender.prepare(case, x, SIGMOID)
    assert isinstance(prepared, Prepared), prepared
    return prepared


# ---- layouts ---------------------------------------------------------------------------------------------------------
def test_layouts_of_cases() -> None:
    assert layouts.available(SELF) == ("heads", "rows", "packed", "packed-nohint", "qkv")
    assert layouts.available(SHORT) == layouts.available(SELF)
    assert layouts.available(JAGGED) == ("packed", "packed-nohint", "qkv")
    for name in ("uniform-512", "pma"):
        assert layouts.available(suite.make(name)) == ("packed", "packed-nohint")
    reason = Ours("cpu", layout="qkv").prepare(SMALL_CASES[1], make_inputs(SMALL_CASES[1]), SIGMOID)
    assert reason == "layout qkv needs values as wide as keys, here 40 beside 24"
    assert "dense cases" in str(Ours("cpu", layout="rows").prepare(JAGGED, make_inputs(JAGGED), SIGMOID))


@pytest.mark.parametrize("case", [SELF, SHORT, JAGGED, *SMALL_CASES[1:8:2]], ids=lambda case: case.name)
def test_every_layout_computes_the_same(case: Case) -> None:
    """Output and gradients of each sequence are those of the case's own layout, wherever they are found."""
    x = make_inputs(case, torch.float64)
    want = pieces_of(Ours("reference"), case, x)
    for layout in layouts.available(case):
        for found, exact in zip(pieces_of(Ours("cpu", layout=layout), case, x), want, strict=True):
            torch.testing.assert_close(found, exact)


def pieces_of(contender: Ours, case: Case, x: Inputs) -> list[Tensor]:
    """out, dq, dk, dv of every sequence, for a gradient that differs from one to the next."""
    prepared = prepared_of(contender, case, x)
    assert prepared.pieces is not None
    out = prepared.forward()
    dout, found = torch.zeros_like(out), []
    for b in range(len(case.len_q)):
        prepared.pieces.out(dout, b)[:] = torch.linspace(b, b + 2, case.len_q[b])[:, None]
    grads = torch.autograd.grad(out, prepared.leaves, dout)
    for b in range(len(case.len_q)):
        found += [prepared.pieces.out(out, b), *prepared.pieces.grads(grads, b)]
    return found


def test_layouts_are_what_they_say(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: dict[str, Any] = {}

    def record(case: Case, x: Inputs, activation: Any, **kwargs: Any) -> Tensor:
        seen.update(x=x, hints={name: kwargs[name] for name in kwargs if "max_seqlen" in name})
        return call(case, x, activation, **kwargs)

    monkeypatch.setattr(layouts, "call", record)
    x = make_inputs(SELF)
    lengths = {"max_seqlen_q": 12, "max_seqlen_k": 12}
    expected = {
        "heads": ((3, 2, 12, 8), (192, 96, 8, 1), {}),
        "rows": ((3, 2, 12, 8), (192, 8, 16, 1), {}),
        "packed": ((36, 2, 8), (16, 8, 1), lengths),
        "packed-nohint": ((36, 2, 8), (16, 8, 1), {}),
    }
    for layout, (shape, strides, hints) in expected.items():
        layouts.arrange(SELF, x, layout).call("relu")
        assert (tuple(seen["x"].q.shape), seen["x"].q.stride(), seen["hints"]) == (shape, strides, hints), layout
    assert layouts.arrange(SELF, x, "heads").leaves[0] is x.q  # not another copy of what is there


def test_one_projection_is_given_to_the_function_made_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where gdpa has one; until then to attention_varlen as views."""
    used = []

    def qkvpacked(qkv: Tensor, cu: Tensor, activation: Any, *, max_seqlen: int, **kwargs: Any) -> Tensor:
        used.append((tuple(qkv.shape), max_seqlen, kwargs["causal"]))
        return gdpa.attention_varlen(*qkv.unbind(1), cu, cu, activation, **kwargs)  # type: ignore[misc]

    def kvpacked(q: Tensor, kv: Tensor, cu_q: Tensor, cu_k: Tensor, activation: Any, **kwargs: Any) -> Tensor:
        used.append((tuple(kv.shape), kwargs["max_seqlen_k"], kwargs["causal"]))
        return gdpa.attention_varlen(q, *kv.unbind(1), cu_q, cu_k, activation, **kwargs)  # type: ignore[misc]

    for name, function in (("qkv", qkvpacked), ("kv", kvpacked)):
        monkeypatch.setattr(gdpa, f"attention_varlen_{name}packed", function, raising=False)
    for case in (SELF, SHORT):
        x = make_inputs(case, torch.float64)
        want, found = (pieces_of(Ours("cpu", layout=layout), case, x) for layout in ("packed", "qkv"))
        torch.testing.assert_close(found, want)
    assert set(used) == {((36, 3, 2, 8), 12, True), ((10, 2, 2, 8), 5, False)}


# ---- errors ----------------------------------------------------------------------------------------------------------
@pytest.fixture(params=["whole", "few heads", "few rows"])
def budget(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """What float64 affords: everything, not all heads, or not even one of them."""
    pairs = {"whole": 2**22, "few heads": 2500, "few rows": 200}[request.param]
    monkeypatch.setattr(accuracy, "PAIRS", {"cpu": pairs})
    monkeypatch.setattr(accuracy, "BLOCK_PAIRS", {"cpu": 150})


@small_cases
@pytest.mark.usefixtures("budget")
def test_errors_of_right_results_are_roundings(case: Case) -> None:
    x = make_inputs(case)
    truth = accuracy.Truth(case, x)
    for contender in (Ours("cpu"), Eager()):
        found = accuracy.errors(prepared_of(contender, case, x), truth, "sigmoid", SIGMOID)
        assert found is not None
        assert max(found.values()) < 1e-6, contender
    exact = accuracy.errors(prepared_of(Ours("cpu"), case, x), truth, "sigmoid", SIGMOID)
    found = accuracy.errors(wrong(prepared_of(Ours("cpu"), case, x)), truth, "sigmoid", SIGMOID)
    assert exact is not None
    assert found == pytest.approx(dict.fromkeys(accuracy.RESULTS, 0.01), rel=1e-3)
    assert accuracy.same(exact, exact)
    assert not accuracy.same(exact, {**exact, "dk": 1.01 * exact["dk"] + 1e-9})


def wrong(prepared: Prepared) -> Prepared:
    """Its results, one per cent too large."""
    return replace(prepared, forward=lambda: 1.01 * prepared.forward())


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.usefixtures("budget")
def test_errors_of_softmax_are_those_of_softmax(causal: bool) -> None:
    case = dense("x", 2, 40, 40, heads=2, d=16, causal=causal)
    x = make_inputs(case)
    prepared = prepared_of(softmax.Sdpa("math", SDPBackend.MATH), case, x)
    found = accuracy.errors(prepared, accuracy.Truth(case, x), "softmax", SIGMOID)
    assert found is not None
    assert max(found.values()) < 1e-6


def test_errors_see_params_and_the_dtype() -> None:
    """bfloat16 has the errors of its roundings, and params have the values that were asked for."""
    case = dense("x", 2, 64, 64, heads=2, d=16)
    function = benchmark_function(f"{__name__}:scaled", (0.7,))
    for dtype, least, most in ((torch.float32, 1e-9, 1e-6), (torch.bfloat16, 1e-4, 1e-2)):
        x = make_inputs(case, dtype)
        prepared = Ours("cpu").prepare(case, x, function)
        assert isinstance(prepared, Prepared)
        found = accuracy.errors(prepared, accuracy.Truth(case, x), "scaled", function)
        assert found is not None
        assert all(least < error < most for error in found.values()), found


def scaled(s: Tensor, factor: Tensor) -> Tensor:
    return torch.sigmoid(factor * s)


def test_the_part_that_is_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    """A CPU takes queries from a long sequence; a GPU whole heads of the longest one at any length of the suite."""
    rows = accuracy.part_of(suite.make("cpu-long"), CPU).rows
    assert (int(rows[0]), int(rows[-1]), len(rows)) == (0, 12_287, 341)
    monkeypatch.setattr(accuracy, "PAIRS", {"cpu": accuracy.PAIRS["cuda"]})
    for name, heads in (("self-2048", 4), ("self-8192", 4), ("self-32768", 1), ("jagged-1024", 4)):
        case = suite.make(name)
        part = accuracy.part_of(case, CPU)
        assert (part.heads, len(part.rows), case.len_q[part.b]) == (heads, max(case.len_q), max(case.len_q))


# ---- what runs -------------------------------------------------------------------------------------------------------
def names(*patterns: str, **asked: Any) -> list[str]:
    plan = run.make_plan(patterns, device=CPU, only=asked.pop("only", ("cpu", "eager")), **asked)
    return [str(job).split(" ", 1)[1] for job in plan.jobs()]


def test_layouts_and_precisions_that_run_by_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(coverage, "offered", lambda: ("exact",))
    gelu = "gelu_tanh cpu exact"
    every = [f"{gelu} {layout}" for layout in layouts.LAYOUTS]
    assert names("self-512") == [*every, "gelu_tanh eager heads"]
    assert names("self-512", quick=True) == names("self-1024") == [f"{gelu} heads", "gelu_tanh eager heads"]
    assert names("jagged-512")[0] == f"{gelu} packed"
    assert names("self-1024", chosen_layouts=("qkv",))[0] == f"{gelu} qkv"
    two = names("self-512", only=("cpu", "reference"))
    assert two == [*every, "gelu_tanh reference exact heads"]  # the backend that gdpa prefers
    assert all(case in suite.suite_names() for case in coverage.LAYOUT_CASES)
    monkeypatch.undo()
    assert names("self-512")[:3] == [f"{gelu} heads", "gelu_tanh cpu fast heads", f"{gelu} rows"]
    assert names("self-1024", quick=True, chosen_precisions=("fast",))[0] == "gelu_tanh cpu fast heads"


@pytest.fixture
def fast(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A gdpa with a fast precision. Returns where it was asked for: it differs only in functions put there."""
    now, differs = ["exact"], []

    @contextmanager
    def precision(name: str) -> Iterator[None]:
        now[0] = name
        yield
        now[0] = "exact"

    def rounded(case: Case, x: Inputs, activation: Any, **kwargs: Any) -> Tensor:
        factor = 1.001 if now[0] == "fast" and activation.name in differs else 1.0
        return factor * call(case, x, activation, **kwargs)

    monkeypatch.setattr(gdpa, "precision", precision, raising=False)
    monkeypatch.setattr(layouts, "call", rounded)
    monkeypatch.setattr(memory, "cpu_peaks", lambda request: None)
    monkeypatch.setattr(run, "measure_rates", lambda device, dtype, effort: rates.Rates(0.1, 0.01))
    return differs


def test_fast_is_measured_where_it_differs(fast: list[str]) -> None:
    fast.append("relu")
    functions = tuple(map(benchmark_function, ("relu", "silu")))
    plan = replace(
        run.make_plan(("self-256",), functions, only=("cpu",), device=CPU),
        cases=(replace(SELF, name="tiny"),),
        effort=timing.Effort(0, 0, 1, 1),
    )
    found = run.run(plan)
    errors = {(r["function"], r["precision"]): r["rms_error"] for r in found["records"] if r["pass"] == "fwd"}
    assert set(errors) == {("relu", "exact"), ("relu", "fast"), ("silu", "exact")}
    assert errors["relu", "fast"] == pytest.approx(1e-3, rel=0.01)
    (left_out,) = found["skipped"]
    assert (left_out["function"], left_out["precision"]) == ("silu", "fast")
    assert "--precision fast" in left_out["why"]
    asked = run.run(replace(plan, precisions=("exact", "fast")))
    assert {(r["function"], r["precision"]) for r in asked["records"]} == {*errors, ("silu", "fast")}


def test_precision_is_that_of_the_call(fast: list[str]) -> None:
    fast.append("sigmoid")
    x = make_inputs(SELF)
    exact, quick = (prepared_of(Ours("cpu", precision=name), SELF, x) for name in ("exact", "fast"))
    torch.testing.assert_close(quick.forward(), 1.001 * exact.forward())
    assert everybody.precisions() == ("exact", "fast")


def test_results_that_are_not_finite_are_a_reason(fast: list[str]) -> None:
    class Broken:
        name, function = "broken", None

        def prepare(self, case: Case, x: Inputs, function: object) -> Prepared:
            prepared = prepared_of(Ours("cpu"), case, x)
            return replace(prepared, forward=lambda: prepared.forward() * torch.inf)

    plan = run.Plan((SELF,), (SIGMOID,), (Broken(),), CPU, torch.float32, timing.Effort(0, 0, 1, 1))
    found = run.run(plan)
    assert found["records"] == []
    assert "its results are wrong" in found["skipped"][0]["why"]
