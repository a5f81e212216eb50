"""gdpa.warm_up, and the backward that is compiled beside its forward."""

from __future__ import annotations

import os
import threading
from typing import Any

import pytest
import torch

import gdpa
from gdpa.calling import warming
from gdpa.functions.activation import from_function
from gdpa.functions.places.names import TableKind
from gdpa.problem import Operands
from support import FULL

bf16 = torch.bfloat16


def indexed(s: torch.Tensor, t: torch.Tensor, *, kv_idx: torch.Tensor) -> torch.Tensor:
    return s + t[kv_idx]


WITH_TABLE = from_function(indexed, 0, tables=(TableKind(1, torch.float32),))


def test_without_a_gpu_there_is_nothing_to_compile() -> None:
    report = gdpa.warm_up("silu", device="cpu", dtypes=[bf16, torch.float32])
    assert report.kernels == ()
    assert "silu: 0 kernels" in str(report)
    assert "torch.float32 (8, 8, 1024, 128): the cpu backend compiles nothing" in str(report)


@pytest.mark.parametrize(
    ("args", "kwargs", "error", "words"),
    [
        ((["relu", "gelu"],), {}, TypeError, "activation must be one function"),
        (("soft",), {}, ValueError, "activation='soft' is unknown"),
        ((None,), {}, TypeError, "activation=None is neither a name, a function"),
        (("relu",), {"backend": "cuda"}, ValueError, "backend='cuda' is unknown"),
        (("relu",), {"scale": "1"}, TypeError, "scale must be a Python number"),
        (("relu",), {"window": 3}, TypeError, "window must be None or a pair"),
        (("relu",), {"shapes": (8, 8, 64, 64)}, ValueError, r"shapes\[0\] must be \(B, H, L, D\), .* got 8"),
        (("relu",), {"shapes": [(8, 8, 64)]}, ValueError, r"shapes\[0\] must be .* got \(8, 8, 64\)"),
        (("relu",), {"shapes": [(8, 8, 64, 0)]}, ValueError, r"four positive ints, got \(8, 8, 64, 0\)"),
        (("relu",), {"shapes": 8}, TypeError, r"shapes must be a list, such as \[\(B, H, L, D\)\], got 8"),
        (("relu",), {"dtypes": bf16}, TypeError, r"dtypes must be a list, .* got torch.bfloat16"),
        (("relu",), {"dtypes": ["bf16"]}, TypeError, r"dtypes\[0\] must be torch.float16, .* got 'bf16'"),
        (("relu",), {"dtypes": [torch.int32]}, TypeError, r"dtypes\[0\] must be .* got torch.int32"),
        (("relu",), {"varlen": True}, TypeError, r"varlen must be a list, such as \[True\], got True"),
        (("relu",), {"varlen": ["yes"]}, TypeError, r"varlen\[0\] must be True or False, got 'yes'"),
        (("relu",), {"backward": 1}, TypeError, "backward must be True or False, got 1"),
        (("relu",), {"device": "gpu"}, ValueError, "device='gpu' is unknown"),
        (("relu",), {"device": "cuda:99"}, ValueError, r"device='cuda:99' does not exist: torch sees \d+ GPUs?"),
        (("relu",), {"device": 0.5}, TypeError, "device must be .*, its index or None, got 0.5"),
        (("relu",), {"device": False}, TypeError, "device must be .*, got False"),
        (("relu",), {"device": 99}, ValueError, "device=99 (does not exist|is unknown)"),
        (("relu",), {"device": -1}, ValueError, "device=-1 is unknown"),
        (("relu",), {"device": 10**30}, ValueError, "device=10+ is unknown"),
        ((WITH_TABLE,), {}, ValueError, "activation 'indexed' takes tables"),
        pytest.param((lambda s: s.sum(),), {}, gdpa.UnsupportedActivationError, "one value per score", id="sum"),
    ],
)
def test_what_cannot_be_is_refused(args: Any, kwargs: Any, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        gdpa.warm_up(*args, **{"device": "cpu", **kwargs})


def test_operands_without_memory_have_the_same_layout() -> None:
    q = torch.randn(2, 5, 3, 8).transpose(1, 2)
    cu = torch.tensor([0, 2])
    x = warming.without_memory(Operands(q, q, q[:1], cu, cu.view(-1)))
    assert x.q.is_meta
    assert x.q is x.k
    assert x.cu_q is x.cu_k  # kernels differ where offsets of both sides are one tensor
    assert (x.v.shape, x.v.stride()) == (q[:1].shape, q.stride())
    assert x.params is None
    (table,) = warming.without_memory(Operands(q, q, q, tables=[cu])).tables
    assert table.is_meta
    for dtype, wide in ((torch.bfloat16, torch.float32), (torch.float64, torch.float64)):
        params = warming._operands((1, 2, 3, 8), dtype, False, 1).params
        assert params is not None
        assert params.dtype == wide


# ---- as on a GPU -----------------------------------------------------------------------------------------------------
@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Kernels that are compiled, with the name of the thread that does it."""
    pytest.importorskip("triton")
    if os.environ.get("TRITON_INTERPRET") == "1":
        pytest.skip("the interpreter compiles nothing")
    from triton.runtime.jit import JITFunction

    from fake_gpu import fake_hopper

    seen: list[tuple[str, str]] = []
    compile_it = JITFunction._do_compile

    def recorded(self: Any, *args: Any, **kwargs: Any) -> Any:
        seen.append((self.__name__, threading.current_thread().name))
        return compile_it(self, *args, **kwargs)

    monkeypatch.setattr(JITFunction, "_do_compile", recorded)
    with fake_hopper():
        yield seen


def inputs(length: int) -> list[torch.Tensor]:
    return [torch.zeros(2, 4, length, 64, dtype=bf16).requires_grad_() for _ in range(3)]


def test_a_call_finds_what_was_compiled_ahead(compiled: list[tuple[str, str]]) -> None:
    act = gdpa.activation(lambda s: torch.relu(s) - 0.0625)
    report = gdpa.warm_up(act, shapes=[(2, 4, 128, 64)], varlen=[False], device="cpu")
    assert [k.name for k in report.kernels] == ["forward_kernel", "backward_kernel"]
    assert all(thread.startswith("gdpa-compile") for _, thread in compiled)
    assert sorted(name for name, _ in compiled) == ["backward_kernel", "forward_kernel"]
    compiled.clear()
    out = gdpa.attention(*inputs(100), act)
    out.backward(torch.zeros_like(out))
    assert compiled == []


def test_the_backward_is_compiled_beside_the_forward(compiled: list[tuple[str, str]]) -> None:
    act = gdpa.activation(lambda s: torch.relu(s) + 0.0625)
    with torch.no_grad():
        gdpa.attention(*inputs(128), act)
    assert [name for name, _ in compiled] == ["forward_kernel"]  # no gradient, no backward
    for _ in range(2):
        out = gdpa.attention(*inputs(128), act)
        out.backward(torch.zeros_like(out))
    name, thread = compiled[1]
    assert name == "backward_kernel"
    assert thread.startswith("gdpa-compile")
    assert len(compiled) == 2


FORMS: dict[str, Any] = {
    "row sums": {"activation": lambda s: torch.exp(s * 1.0625), "normalize": "sum", "sink": torch.ones(4)},
    "learned table": {"activation": indexed, "tables": (torch.zeros(128, requires_grad=True),)},
    "mask": {"mask": lambda q_idx, kv_idx: q_idx >= kv_idx + 17},
}


@pytest.mark.parametrize("form", FORMS if FULL else ["row sums", "learned table"])  # a mask is part of the function
def test_other_forms_find_their_backward_compiled(form: str, compiled: list[tuple[str, str]]) -> None:
    out = gdpa.attention(*inputs(128), **FORMS[form])
    out.backward(torch.zeros_like(out))
    beside = [name for name, thread in compiled if thread.startswith("gdpa-compile")]
    assert "backward_kernel" in beside
    assert [name for name, _ in compiled if name not in beside] == ["forward_kernel"]


def test_not_while_a_graph_is_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    class OnGpu:
        is_cuda = True

    backend, x = type("B", (), {"name": "hopper"})(), type("X", (), {"q": OnGpu()})()
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    assert warming.start_backward(None, backend, x) is None  # type: ignore[arg-type]
