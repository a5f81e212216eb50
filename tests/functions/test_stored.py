"""Functions on disk: found by what they read, never taken for another one, and never needed."""

from __future__ import annotations

import json
import math
import pickle
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._dynamo
import torch.nn.functional as F
from torch import Tensor

import gdpa
from gdpa.functions import activation, stored
from gdpa.functions.activation import Activation, from_function, from_name
from gdpa.functions.builtin import BUILTINS
from gdpa.functions.documents.graphs import of_recorded, recorded_of
from gdpa.functions.emit import emit
from gdpa.functions.keys import recorded_key
from gdpa.functions.recent.glance import RecentFunctions
from gdpa.functions.tracing import trace

bf16 = torch.bfloat16


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(stored.VARIABLE, str(tmp_path / "functions"))
    for registry in ("_by_key", "_by_name", "_by_fingerprint"):
        monkeypatch.setattr(activation, registry, type(getattr(activation, registry))())
    return tmp_path / "functions"


def in_another_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if: nothing is known."""
    activation._by_key.clear()
    activation._by_name.clear()
    monkeypatch.setattr(activation, "_by_fingerprint", RecentFunctions())


@pytest.fixture
def traced(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Functions that were traced."""
    found: list[Any] = []
    inner = trace.trace
    monkeypatch.setattr(trace, "trace", lambda fn, n, *quick: found.append(fn) or inner(fn, n, *quick))
    return found


def squared(shift: float) -> Callable[[Tensor], Tensor]:
    return lambda s: torch.relu(s) ** 2 + shift * s


def leaky(s: Tensor, slope: Tensor) -> Tensor:
    return torch.where(s > 0, s, slope * s)


@torch.enable_grad()
def wrapped(s: Tensor) -> Tensor:
    return s * 2


def same(a: Activation, b: Activation) -> bool:
    return a is not b and (a.key, a.joint, a.n_params, a.name) == (b.key, b.joint, b.n_params, b.name)


@pytest.mark.parametrize(
    ("fn", "n_params"),
    [(squared(0.5), 0), (leaky, 1), (torch.nn.functional.silu, 0)],
    ids=["closure", "params", "torch"],
)
def test_what_was_traced_is_found(fn, n_params: int, folder: Path, traced: list[Any], monkeypatch) -> None:
    first = from_function(fn, n_params)
    source = emit(first, bf16, "sm90", 0.125)
    assert len(list(folder.iterdir())) == 2
    in_another_process(monkeypatch)
    traced.clear()
    second = from_function(fn, n_params)
    assert same(second, first)
    assert emit(second, bf16, "sm90", 0.125) == source
    assert not traced
    inputs = [torch.linspace(-2, 2, 9)] * (1 + n_params)
    assert torch.equal(second.eager(*inputs), first.eager(*inputs))
    assert pickle.loads(pickle.dumps(second)) is second
    assert not traced


POWER: float | None = None


def powered(s: Tensor) -> Tensor:
    return torch.relu(s) ** POWER


def test_what_was_found_stays_as_it_was(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the name that the functions read stands for by then."""
    s, q = torch.tensor([2.0, 3.0], requires_grad=True), torch.full((1, 1, 1, 1), 2.0, requires_grad=True)
    for _ in range(2):  # the second time from files
        acts, layers = [], []
        for power in (2.0, 3.0):
            monkeypatch.setitem(globals(), "POWER", power)
            acts.append(gdpa.activation(powered))
            layers.append(gdpa.nn.Attention(1, powered))
        monkeypatch.setitem(globals(), "POWER", None)
        assert [act(s).tolist() for act in acts] == [[4.0, 9.0], [8.0, 27.0]]
        assert [layer(q, q, q).item() for layer in layers] == [32.0, 128.0]
        (slope,) = torch.autograd.grad(acts[1](s).sum(), s, create_graph=True)
        assert torch.autograd.grad(slope.sum(), s)[0].tolist() == [12.0, 18.0]
        in_another_process(monkeypatch)


def test_compiled_code_takes_what_was_found(folder: Path, traced: list[Any], monkeypatch) -> None:
    q, k, v = torch.randn(3, 1, 1, 4, 8).requires_grad_()
    want = gdpa.attention(q, k, v, squared(0.5))
    in_another_process(monkeypatch)
    act = from_function(squared(0.5), 0)
    traced.clear()
    torch._dynamo.reset()
    got = torch.compile(lambda *x: gdpa.attention(*x, act), fullgraph=True, backend="aot_eager")(q, k, v)
    assert not traced
    assert torch.equal(got, want)


RECORDED: dict[str, Callable[..., Tensor]] = {
    **{fn.__name__: fn for fn in BUILTINS},
    "a param": leaky,
    "a constant": lambda s: s * torch.tensor(0.1) + torch.tensor(3) * torch.tensor(True),
    "dtypes": lambda s: (s.double() * 0.1).float() + s.half() + (s > 0).to(torch.bfloat16),
    "keywords": lambda s: torch.div(s, 0.3, rounding_mode="floor") + F.gelu(s, approximate="tanh"),
    "infinities": lambda s: s.clamp(-math.inf, 3).masked_fill(s > 2, math.nan).nan_to_num(-0.0),
    "made inside": lambda s: (
        torch.full((), -0.0) * s + s.new_ones(()) + torch.zeros_like(s, memory_format=torch.preserve_format)
    ),
    "several results": F.logsigmoid,
    "detached": lambda s: s.detach() * s,
}


@pytest.mark.parametrize("name", RECORDED)
def test_what_is_read_is_what_was_written(name: str) -> None:
    act = gdpa.activation(RECORDED[name])
    again = recorded_of(json.loads(json.dumps(of_recorded(act._traced))))
    assert recorded_key(again) == act.key
    inputs = [torch.linspace(-4, 4, 33, dtype=torch.float64) for _ in range(1 + act.n_params)]
    for dtype in (torch.float64, torch.float32):
        given = [t.to(dtype) for t in inputs]
        got, want = again.forward(*given), act._traced.forward(*given)
        assert got.dtype == want.dtype
        assert torch.equal(got.nan_to_num(7.5), want.nan_to_num(7.5))


def test_built_ins_are_found(folder: Path, traced: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    first = from_name("gelu")
    in_another_process(monkeypatch)
    traced.clear()
    assert same(from_name("gelu"), first)
    assert not traced


def test_other_numbers_and_dtypes_are_other_files(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for shift in (0.0, -0.0, 1.0, 2.0):
        from_function(squared(shift), 0)
    assert len(list(folder.iterdir())) == 4
    act = from_function(squared(1.0), 0)
    sources = [emit(act, dtype, "sm90", scale) for dtype in (bf16, torch.float16) for scale in (1.0, 0.125)]
    assert len(list(folder.iterdir())) == 4 + len(sources)


@pytest.mark.parametrize(
    "damage", ["empty", "cut off", "another function's", "another recording", "a graph that is none"]
)
def test_a_wrong_file_is_not_used(damage: str, folder: Path, traced: list[Any], monkeypatch) -> None:
    first = from_function(squared(0.5), 0)
    (file,) = folder.iterdir()
    if damage == "empty":
        file.write_text("")
    elif damage == "cut off":
        file.write_text(file.read_text()[:-10])
    elif damage == "another function's":
        other = from_function(squared(0.51), 0)
        stored.write_graphs(file, other.key, other._traced, other.joint)
    else:
        stored.write_graphs(
            file, first.key, first._traced, type(first.joint)(3, first.joint.nodes, first.joint.outputs)
        )
    in_another_process(monkeypatch)
    traced.clear()
    assert same(from_function(squared(0.5), 0), first)
    assert len(traced) == 1
    in_another_process(monkeypatch)
    assert same(from_function(squared(0.5), 0), first)
    assert len(traced) == 1  # it has been written anew


def test_other_code_of_this_package_is_another_file(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = stored.file_of(("x",))
    monkeypatch.setattr(stored, "_own_code", lambda: "other")
    assert stored.file_of(("x",)) != before


def test_what_no_name_stands_for_is_not_stored(folder: Path) -> None:
    assert stored.file_of((object(),)) is None
    assert stored.file_of((lambda s: s,)) is None  # a function is named by its code: see fingerprint.py
    assert stored.file_of((wrapped,)) is None  # a name of a file that may change
    assert stored.file_of(((torch.relu, torch.nn.functional.silu, bf16, int, None, 0.5),)) is not None


def test_nothing_is_stored_where_it_is_switched_off(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(stored.VARIABLE, "off")
    emit(from_function(squared(0.25), 0), bf16, "sm90")
    assert not folder.exists()


def test_a_folder_that_cannot_be_written_to(folder: Path) -> None:
    folder.write_text("no folder")
    assert from_function(squared(0.125), 0).n_params == 0


def test_files_are_bounded(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stored, "MOST", 3)
    for shift in range(1, 6):
        from_function(squared(float(shift)), 0)
    assert len(list(folder.iterdir())) == 3


def test_another_process_needs_no_compiler_of_torch(folder: Path) -> None:
    """Whose import takes longer than all else in a first call."""
    emit(from_name("silu"), bf16, "sm90")
    script = """
import sys
from gdpa.functions.activation import from_name
from gdpa.functions.emit import emit
import torch
emit(from_name("silu"), torch.bfloat16, "sm90")
assert "torch._dynamo" not in sys.modules and "gdpa.functions.tracing.trace" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", script], check=True)
