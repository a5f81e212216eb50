"""gdpa.set_precision and gdpa.precision: whose calls they reach, and that a backward computes as its forward did."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

import gdpa
from gdpa import backends, numerics
from gdpa.functions.activation import from_name
from gdpa.masks.band import Band
from gdpa.problem import Operands, Problem, make_problem

Q = torch.randn(1, 1, 3, 4)


@pytest.fixture(autouse=True)
def _exact_again() -> Iterator[None]:
    yield
    gdpa.set_precision("exact")


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str]]:
    """(pass, precision) of all that the CPU's backend is asked for."""
    found: list[tuple[str, str]] = []
    backend = type(backends.get("cpu"))
    forward, backward = backend.forward, backend.backward

    def forward_of(self: object, problem: Problem, x: Operands, out: Tensor) -> None:
        found.append(("forward", problem.precision))
        forward(self, problem, x, out)

    def backward_of(self: object, problem: Problem, *args: object) -> None:
        found.append(("backward", problem.precision))
        backward(self, problem, *args)

    monkeypatch.setattr(backend, "forward", forward_of)
    monkeypatch.setattr(backend, "backward", backward_of)
    return found


def test_exact_by_default() -> None:
    assert numerics.current() == "exact"


def test_the_innermost_counts() -> None:
    gdpa.set_precision("fast")
    assert numerics.current() == "fast"
    again = gdpa.precision("exact")
    with again, gdpa.precision("fast"), again:
        assert numerics.current() == "exact"
        gdpa.set_precision("exact")
    assert numerics.current() == "exact"
    with pytest.raises(KeyError), gdpa.precision("fast"):
        raise KeyError
    assert numerics.current() == "exact"


def test_a_block_is_one_threads_own_and_the_default_is_everyones() -> None:
    found = []
    with gdpa.precision("fast"):
        thread = threading.Thread(target=lambda: found.append(numerics.current()))
        thread.start()
        thread.join()
    gdpa.set_precision("fast")
    thread = threading.Thread(target=lambda: found.append(numerics.current()))
    thread.start()
    thread.join()
    assert found == ["exact", "fast"]


@pytest.mark.parametrize("bad", ["high", None, 1])
def test_others_are_refused(bad: object) -> None:
    for take in (gdpa.set_precision, gdpa.precision):
        with pytest.raises(ValueError, match=f"precision must be 'exact' or 'fast', got {bad!r}"):
            take(bad)  # type: ignore[arg-type]


def test_the_backward_has_what_the_forward_had(seen: list[tuple[str, str]]) -> None:
    q = Q.clone().requires_grad_()
    with gdpa.precision("fast"):
        out = gdpa.attention(q, q, q)
    gdpa.attention(q, q, q).sum().backward()
    out.sum().backward()
    assert seen == [("forward", "fast"), ("forward", "exact"), ("backward", "exact"), ("backward", "fast")]


def test_compiled_code_sees_it(seen: list[tuple[str, str]]) -> None:
    @torch.compile(fullgraph=True, backend="aot_eager")
    def attend(q: Tensor) -> Tensor:
        with gdpa.precision("fast"):
            first = gdpa.attention(q, q, q)
        return gdpa.attention(first, q, q)

    def run() -> list[str]:
        seen.clear()
        attend(Q)
        return [precision for _, precision in seen]

    assert run() == ["fast", "exact"]
    with gdpa.precision("fast"):
        assert run() == ["fast", "fast"]
    gdpa.set_precision("fast")
    assert run() == ["fast", "fast"]
    gdpa.set_precision("exact")
    assert run() == ["fast", "exact"]
    thread_saw = []
    with gdpa.precision("fast"):
        thread = threading.Thread(target=lambda: thread_saw.extend(run()))
        thread.start()
        thread.join()
    assert thread_saw == ["fast", "exact"]


def test_torchs_switches_change_nothing(seen: list[tuple[str, str]]) -> None:
    matmul = torch.backends.cuda.matmul
    allowed = matmul.allow_bf16_reduced_precision_reduction
    try:
        for matmul.allow_bf16_reduced_precision_reduction in (False, True):
            gdpa.attention(Q, Q, Q)
    finally:
        matmul.allow_bf16_reduced_precision_reduction = allowed
    assert seen == [("forward", "exact")] * 2


@pytest.mark.parametrize("setting", ["highest", "high", "medium"])
def test_products_of_float32_do_not_depend_on_torch(setting: str) -> None:
    """As exact as IEEE, or TF32 if a person asks gdpa for it."""
    pytest.importorskip("triton")
    from gdpa.backends.triton import config

    torch.set_float32_matmul_precision(setting)
    hopper, every = (9, 0), Band()
    three, in_parts, fma = ("tf32x3", False), ("tf32x3", True), ("ieee", True)
    for d, rows, band, capability, want in (
        (64, 512, every, hopper, three), (64, 511, every, hopper, in_parts), (64, 319, every, hopper, fma),
        (128, 2048, every, hopper, three), (128, 2047, every, hopper, in_parts), (128, 320, every, hopper, in_parts),
        (130, 4096, every, hopper, ("ieee", False)), (64, 4096, Band(None, 0), hopper, in_parts),
        (64, 640, Band(None, 0), hopper, in_parts), (64, 639, Band(None, 0), hopper, fma),
        (64, 4096, Band(None, -5), hopper, fma), (64, 4096, Band(15, 0), hopper, fma),
        (64, 4096, Band(300, 300), hopper, in_parts), (64, 400, Band(2000, 0), hopper, fma),
        (64, 512, every, (8, 0), fma), (64, 512, every, (10, 0), fma),
    ):  # fmt: skip
        q = torch.empty(1, 1, rows, d)
        for precision in numerics.PRECISIONS:
            problem = make_problem(Operands(q, q, q), (from_name("relu"),), 1.0, 1.0, band, precision=precision)
            for choose in (config.forward_config, config.backward_config, config.dq_config):
                found = choose(problem, capability)
                assert (found.products, found.part > 0) == (want if precision == "exact" else ("tf32", False))
