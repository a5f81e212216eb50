"""Calls from several threads at once, each with functions the others have not seen or are tracing right now."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from threading import Barrier

import pytest
import torch

import gdpa
from gdpa.functions import activation

THREADS = 6


def test_threads() -> None:
    x = torch.randn(2, 2, 9, 8, dtype=torch.float64)
    start = Barrier(THREADS)

    def work(number: int) -> tuple[torch.Tensor, torch.Tensor, gdpa.Activation]:
        q = x.clone().requires_grad_()
        start.wait()
        for step in range(8):
            factor = 2.0 + (number + step) % 3
            out = gdpa.attention(q, x, x, lambda s, c=factor: c * torch.sigmoid(s) + torch.sin(s))
        (dq,) = torch.autograd.grad(out.sum(), q)
        shared = gdpa.activation(lambda s: torch.cos(s) * torch.tanh(s))
        return out.detach(), dq, shared

    with ThreadPoolExecutor(THREADS) as pool:
        results = list(pool.map(work, range(THREADS)))
    for number, (out, dq, _) in enumerate(results):
        same, same_dq, _ = results[number % 3]
        assert torch.equal(out, same)
        assert torch.equal(dq, same_dq)
    assert len({act for *_, act in results}) == 1


def test_built_ins_are_traced_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever comes while another thread traces one waits."""
    for registry in ("_by_name", "_by_key", "_by_fingerprint"):
        monkeypatch.setattr(activation, registry, type(getattr(activation, registry))())
    x, names = torch.randn(1, 1, 3, 8), ["exp", "laplace", "mish", "gelu"]
    start = Barrier(len(names))

    def work(name: str) -> torch.Tensor:
        start.wait()
        return gdpa.attention(x, x, x, name)

    with ThreadPoolExecutor(len(names)) as pool:
        assert len(list(pool.map(work, names))) == len(names)


def test_graphs_that_are_recorded_later() -> None:
    """What a function was stored with on disk leaves its own graph to be recorded when somebody needs it, perhaps in
    several threads at once."""
    from gdpa.functions.tracing.trace import trace

    made = [gdpa.activation(lambda s, c=c: c * torch.sigmoid(s)) for c in range(2, 2 + THREADS)]
    start = Barrier(THREADS)

    def record(number: int) -> torch.Tensor:
        act = made[number]
        act._recorded = lambda: trace(lambda s: (2 + number) * torch.sigmoid(s), 0)
        start.wait()
        return act.eager(torch.zeros(1))

    with ThreadPoolExecutor(THREADS) as pool:
        assert [float(t) for t in pool.map(record, range(THREADS))] == [1 + n / 2 for n in range(THREADS)]
