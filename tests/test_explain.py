"""gdpa.explain names the backend that would run and the reason of each other one."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import gdpa
from gdpa import backends
from gdpa.testing.cases import offsets


@pytest.fixture
def qkv() -> tuple[Tensor, Tensor, Tensor]:
    q, k, v = torch.randn(3, 2, 4, 5, 8).unbind()  # bfloat16 is refused by the interpreter too, float32 is not
    return q.bfloat16(), k.bfloat16(), v.bfloat16()


def lines(text: str) -> dict[str, str]:
    """What is said of each backend, and of the chosen one under "backend"."""
    return {name.strip(): said.strip() for name, said in (line.split(":", 1) for line in text.splitlines())}


def test_every_backend_is_spoken_of(qkv: tuple[Tensor, ...]) -> None:
    said = lines(gdpa.explain(*qkv))
    assert set(said) == {"backend", "precision", *backends.BACKENDS}


def test_fake_tensors_are_not_asked_for_their_address(
    qkv: tuple[Tensor, ...], recwarn: pytest.WarningsRecorder
) -> None:
    expected = gdpa.explain(*qkv)
    with torch._subclasses.FakeTensorMode() as mode:
        assert gdpa.explain(*map(mode.from_tensor, qkv)) == expected
    assert not [w for w in recwarn if "data pointer" in str(w.message)]


def test_precision(qkv: tuple[Tensor, ...]) -> None:
    assert lines(gdpa.explain(*qkv))["precision"] == "exact"
    with gdpa.precision("fast"):
        assert lines(gdpa.explain(*qkv))["precision"].startswith("fast (no faster form here")


def test_automatic(qkv: tuple[Tensor, ...]) -> None:
    said = lines(gdpa.explain(*qkv, "silu", causal=True, window=(3, None)))
    assert said["backend"] == "cpu"
    assert said["cpu"].startswith("runs")
    assert said["triton"].startswith("no, ")
    assert said["reference"] == "could run, but cpu is preferred"


def test_forced(qkv: tuple[Tensor, ...]) -> None:
    said = lines(gdpa.explain(*qkv, backend="reference"))
    assert said["backend"] == "reference"
    assert said["reference"] == "runs, as requested"
    assert said["cpu"] == "could run, but backend='reference' was requested"


def test_forced_but_impossible(qkv: tuple[Tensor, ...]) -> None:
    said = lines(gdpa.explain(*qkv, backend="triton"))
    assert said["backend"] == "none can run this call"
    with pytest.raises(gdpa.UnsupportedProblemError) as error:
        gdpa.attention(*qkv, backend="triton")
    assert said["triton"].removeprefix("no, ") in str(error.value)


@pytest.mark.parametrize("by_name", [True, False])
def test_varlen(qkv: tuple[Tensor, ...], by_name: bool) -> None:
    rows = [t[0].transpose(0, 1) for t in qkv]
    cu = offsets((2, 3))
    if by_name:
        text = gdpa.explain(*rows, cu_seqlens_q=cu, cu_seqlens_k=cu, activation="silu", max_seqlen_q=3)
    else:
        text = gdpa.explain(*rows, cu, cu, "silu", max_seqlen_q=3)
    assert lines(text)["backend"] == "cpu"


def test_varlen_with_one_side_dense(qkv: tuple[Tensor, ...]) -> None:
    q, k, v = qkv
    cu = offsets((2, 3))
    rows, blocks = q[0].transpose(0, 1), [t.transpose(1, 2) for t in (k, v)]
    assert lines(gdpa.explain(rows, *blocks, cu, None))["backend"] == "cpu"
    packed = [t[0].transpose(0, 1) for t in (k, v)]
    assert lines(gdpa.explain(rows, *packed, None, cu))["backend"] == "cpu"


def test_nested_params_and_functions_per_head(qkv: tuple[Tensor, ...]) -> None:
    q = torch.nested.nested_tensor_from_jagged(torch.randn(5, 2, 8), torch.tensor([0, 2, 5])).transpose(1, 2)
    functions = ["relu", lambda s: torch.relu(s) ** 2]
    assert lines(gdpa.explain(q, q, q, functions))["backend"] == "cpu"
    a = torch.ones(4)
    assert lines(gdpa.explain(*qkv, lambda s, a: a * s, params=(a,)))["backend"] == "cpu"


def test_nothing_is_computed(qkv: tuple[Tensor, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    for name in backends.BACKENDS:
        monkeypatch.setattr(type(backends.get(name)), "forward", lambda *args: pytest.fail("something was launched"))
    gdpa.explain(*qkv)
    gdpa.explain(*qkv, backend="reference")


def test_wrong_arguments_are_those_of_the_call(qkv: tuple[Tensor, ...]) -> None:
    with pytest.raises(TypeError, match="has no argument 'dropout'"):
        gdpa.explain(*qkv, dropout=0.1)
    with pytest.raises(TypeError, match="missing a required argument: 'cu_seqlens_k'"):
        gdpa.explain(*qkv, cu_seqlens_q=None)
    with pytest.raises(TypeError, match=r"activation=None is neither .* fourth argument"):
        gdpa.explain(*qkv, None)
