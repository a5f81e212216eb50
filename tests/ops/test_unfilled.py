"""In deterministic mode results are not filled with NaN before they are written, and what others make still is."""

from __future__ import annotations

import pytest
import torch
from torch.utils import deterministic

import gdpa
from gdpa.ops.unfilled import unfilled


@pytest.fixture(autouse=True)
def deterministic_mode():
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@unfilled
def is_filled(inside=None) -> list[bool]:
    found = [deterministic.fill_uninitialized_memory]
    return found + (inside() if inside else []) + [deterministic.fill_uninitialized_memory]


def test_only_while_it_runs() -> None:
    assert is_filled(is_filled) == [False] * 4
    assert deterministic.fill_uninitialized_memory
    with pytest.raises(ZeroDivisionError):
        is_filled(lambda: 1 // 0)
    assert deterministic.fill_uninitialized_memory
    torch.use_deterministic_algorithms(False)
    assert is_filled() == [True, True]


def test_what_the_caller_has_set_stays_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deterministic, "fill_uninitialized_memory", False)
    assert is_filled() == [False, False]
    assert not deterministic.fill_uninitialized_memory


@pytest.mark.parametrize("normalize", [None, "sum"])
def test_forward_and_backward(normalize: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    from gdpa.backends import cpu

    found: list[bool] = []

    def seen(name: str) -> None:
        run = getattr(cpu.CpuBackend, name)

        def watched(*args, **kwargs):
            found.append(deterministic.fill_uninitialized_memory)
            return run(*args, **kwargs)

        monkeypatch.setattr(cpu.CpuBackend, name, watched)

    seen("forward")
    seen("backward")
    q, k, v = (torch.randn(1, 1, 5, 8, requires_grad=True) for _ in range(3))
    out = gdpa.attention(q, k, v, "sigmoid", normalize=normalize, backend="cpu")
    out.sum().backward()
    assert found == [False, False]
    assert deterministic.fill_uninitialized_memory
