"""The kernels on rows compiled for sm_90 and sm_80 without a GPU: nothing spills, memory is read 16 bytes at a time."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch

triton = pytest.importorskip("triton")
if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("kernels are interpreted in this run, not compiled", allow_module_level=True)

import gdpa.device.norms as norm_kernels  # noqa: E402
import gdpa.device.rotary as rotary_kernels  # noqa: E402
import gdpa.device.segments as segments  # noqa: E402
from aot import Recorder, compile_for, resources  # noqa: E402
from gdpa.rowwise import norms, rotary, tables  # noqa: E402
from support import FULL  # noqa: E402

BF16, F32 = torch.bfloat16, torch.float32


def turn(d: int, dtype: torch.dtype) -> None:
    heads = torch.empty(4096, 12, d, dtype=dtype)
    torch.ops.gdpa.rotary_(heads, torch.arange(4096), 8, 10000.0, True)
    torch.ops.gdpa.rotary(heads.view(4, 1024, 12, d), torch.arange(1024), 8, 10000.0, False)


def backward(c: int) -> None:
    wide, narrow, weight = torch.empty(4096, c), torch.empty(4096, c, dtype=BF16), torch.empty(c)
    torch.ops.gdpa.norm_backward(wide, narrow, weight, None, 1e-5, True)
    torch.ops.gdpa.norm_backward(narrow, wide, weight, wide, 1e-5, True)
    torch.ops.gdpa.add_normed_backward(wide, wide, narrow, weight, None, None, 1e-5, 1e-5, 0.0)
    torch.ops.gdpa.add_normed_backward(wide, wide, narrow, weight, narrow, weight, 1e-5, 1e-5, 1e-5)


def update(dim: int, dtype: torch.dtype) -> None:
    """Sums of gradients, and both updates of a float32 table."""
    rows = torch.zeros(9 * tables.CHUNK, dim, dtype=dtype)
    found = tables.sum_by_row([tables.Column(0, torch.arange(rows.shape[0]), rows)], [rows.shape[0]])
    assert found is not None
    weights, clip, adam = torch.zeros(rows.shape[0], dim), torch.ones(()), {"BETA1": 0.9, "BETA2": 0.999}
    logs = {"LOG2_BETA1": -0.15, "LOG2_BETA2": -0.0014}
    of_rows = {"optimizer_adagrad_kernel": [weights[:, 0].clone()], "optimizer_adam_kernel": [weights, weights, clip]}
    for name, state in of_rows.items():
        more = {**adam, **logs} if "adam_" in name else {}
        tables.launch_update(getattr(segments, name), weights, state, found, 0, clip, 0.1, EPS=1e-8, **more)


CASES = {
    "rotary 128": lambda: turn(128, BF16),
    "rotary 96, float32": lambda: turn(96, F32),
    "norms 512": lambda: backward(512),
    "norms 1024": lambda: backward(1024),
    "tables 512": lambda: update(512, BF16),
    "tables 1024, float32": lambda: update(1024, F32),
}


# Each kernel once for either architecture, the wider rows on the newer one.
EACH_ONCE = [(name, (80, 90)[i % 2]) for i, name in enumerate(CASES)]
EVERY_PAIR = [(name, arch) for name in CASES for arch in (80, 90)]


@pytest.mark.parametrize(("name", "arch"), EVERY_PAIR if FULL else EACH_ONCE)
def test_kernels(name: str, arch: int, monkeypatch: pytest.MonkeyPatch) -> None:
    launches: list[tuple[Any, tuple[Any, ...], dict[str, Any]]] = []
    for module, kernel in (
        (rotary_kernels, "turn_kernel"), (norm_kernels, "norm_backward_kernel"), (norm_kernels,
        "add_normed_backward_kernel"), (segments, "embedding_sum_kernel"), (segments, "optimizer_adagrad_kernel"),
        (segments, "optimizer_adam_kernel"),
    ):  # fmt: skip
        monkeypatch.setattr(module, kernel, Recorder(getattr(module, kernel), launches))
    for module in (norms, rotary, tables):
        monkeypatch.setattr(module, "has_kernel", lambda *tensors: True)
        monkeypatch.setattr(module, "_BOUND", {})
    CASES[name]()
    assert launches
    for kernel, args, kwargs in launches:
        compiled = compile_for(kernel, args, kwargs, arch)
        found = resources(compiled)
        assert found.spills == 0, f"{kernel.__name__}: {found}"
        assert found.registers <= 128, f"{kernel.__name__}: {found}"
        assert "ld.global.v4" in compiled.ptx
        assert "st.global.v4" in compiled.ptx
