"""Every Triton kernel compiled for sm_90 and sm_80 without a GPU: it must use tensor cores, fit, and hardly spill."""

from __future__ import annotations

import os
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from gdpa import masks
from gdpa.functions.activation import resolve_one
from gdpa.masks.band import Band
from gdpa.masks.mask import kinds_of
from gdpa.problem import Divided, Operands, make_problem
from support import FULL

triton = pytest.importorskip("triton")
if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("kernels are interpreted in this run, not compiled", allow_module_level=True)

from aot import RELEASE, Recorder, compile_for, resources  # noqa: E402
from gdpa.backends.triton import arguments, config, launch  # noqa: E402

SHARED_MEMORY = {80: 163 * 1024, 90: 227 * 1024}  # per program

# Bytes of spilled registers that were accepted with the measured speed (docs/kernels-log.md); more is a regression.
FORWARD_REGISTERS = 128  # two programs share an SM on Hopper, the largest single gain
SPILLS = {
    # float16's gelu between the two edges of a band: an erfc with all its digits in the tail, in three loops
    "forward_kernel": 448,
    "backward_kernel": 1536 if RELEASE < (3, 8) else 2560 if RELEASE < (3, 9) else 3328,
    "dq_kernel": 256,
    "other_dq_kernel": 256,
    "normalized_kernel": 64,
    "row_terms_kernel": 0,
}
ROW_TERM_SPILLS = 1024  # that the two numbers per row of a backward with row sums add under a band; not yet timed
FLOAT32_SPILLS = 0 if RELEASE < (3, 8) else 32
LONG_FLOAT32_SPILLS = {64: 64 if RELEASE < (3, 8) else 128, 128: 4096}  # by columns; other tiles were slower
WIDE_SPILLS = 512 if RELEASE < (3, 8) else 768  # of plain functions; softmax behind a band spills 932 bytes


def squared_softplus(s: torch.Tensor) -> torch.Tensor:
    return F.softplus(s) ** 2


def learned_slope(s: torch.Tensor, slope: torch.Tensor) -> torch.Tensor:
    return torch.where(s > 0, s, slope * s)


@pytest.fixture
def launches(monkeypatch, request):
    """Kernels launched while the test runs, recorded instead; the device pretends to be ``request.param``."""
    found: list = []
    capability = divmod(request.param, 10)
    monkeypatch.setattr(launch, "capability", lambda device: capability)
    for name in ("tile_records_kernel", "zero_unused_kernel"):
        monkeypatch.setattr(arguments, name, Recorder(getattr(arguments, name), []))
    for name in SPILLS:
        monkeypatch.setattr(launch, name, Recorder(getattr(launch, name), found))
    return request.param, found


NO_BAND = Band()


def record_all(activation, dtype, d, band=NO_BAND, packed=True, n_params=0, length=2048, mode="add") -> None:
    """Launch forward, backward (accumulating dq) and the deterministic dq on tensors that are never touched."""
    batch, heads = 4, 4
    if packed:
        rows = torch.empty(batch * length, heads, d, dtype=dtype).transpose(0, 1)[None]
        cu = torch.arange(batch + 1, dtype=torch.int32) * length
    else:
        rows, cu = torch.empty(batch, heads, length, d, dtype=dtype), None
    params = torch.empty(n_params, heads) if n_params else None
    x = Operands(rows, rows, rows, cu, cu, params)
    problem = make_problem(x, (resolve_one(activation, n_params),), 0.1, 1.0, band)
    launch.forward(problem, x, torch.empty_like(rows))
    c = config.backward_config(problem, launch.capability(rows.device))
    dq = torch.empty_like(rows, dtype=torch.float32)
    dparams = torch.empty_like(params) if params is not None else None
    launch.launch_backward(problem, x, rows, dq, torch.empty_like(rows), torch.empty_like(rows), dparams, mode, c)
    launch.launch_dq(problem, x, rows, torch.empty_like(rows))


def record_normalized(activation, norm, dtype, d, band=NO_BAND) -> None:
    """The same with row sums."""
    rows = torch.empty(4, 4, 2048, d, dtype=dtype)
    x = Operands(rows, rows, rows, sink=torch.empty(4))
    problem = make_problem(x, (resolve_one(activation, 0),), 0.1, 1.0, band).normalized((norm,))
    sums = torch.empty(4, 4, 2048)
    launch.forward(problem, x, torch.empty_like(rows), sums=sums)
    terms = launch.row_terms(problem, x, rows, Divided(rows, sums, sums, torch.empty(4)))
    c = config.backward_config(problem, launch.capability(rows.device))
    dq = torch.empty_like(rows, dtype=torch.float32)
    dk, dv = torch.empty_like(rows), torch.empty_like(rows)
    launch.launch_backward(problem, x, rows, dq, dk, dv, None, "add", c, (), terms)
    launch.launch_dq(problem, x, rows, torch.empty_like(rows), terms)


@pytest.mark.parametrize("launches", [90], indirect=True)
@pytest.mark.parametrize(
    ("activation", "norm", "band"), [("exp", "sum", Band(None, 0)), *([("silu", "abs", NO_BAND)] if FULL else [])]
)
def test_hopper_row_sums(launches, activation, norm, band):
    arch, found = launches
    record_normalized(activation, norm, torch.bfloat16, 128, band)
    check_all(arch, found, ROW_TERM_SPILLS)


@pytest.mark.parametrize("launches", [80], indirect=True)
@pytest.mark.parametrize(("activation", "norm"), [("silu", "abs"), *([("exp", "sum")] if FULL else [])])
def test_ampere_row_sums(launches, activation, norm):
    arch, found = launches
    record_normalized(activation, norm, torch.float16, 64)
    check_all(arch, found)


def check_all(arch: int, found: list, more_spills: int = 0) -> None:
    assert len(found) in (3, 4)
    for kernel, args, kwargs in found:
        r = resources(compile_for(kernel, args, kwargs, arch))
        name = kernel.fn.__name__
        if name != "row_terms_kernel":
            assert (r.hgmma if arch == 90 else r.hmma) > 0, f"{name} does not use the tensor cores: {r}"
        assert r.shared <= SHARED_MEMORY[arch], f"{name}: {r}"
        assert r.spills <= SPILLS[name] + more_spills * (name == "backward_kernel"), f"{name}: {r}"
        if arch == 90 and name in ("forward_kernel", "normalized_kernel"):
            assert r.registers <= FORWARD_REGISTERS, f"{name}: {r}"


CASES = [("gelu_tanh", 128), (squared_softplus, 64)]
OTHERS = [("gelu_tanh", 64), (squared_softplus, 128), *((name, d) for name in ("silu", "relu") for d in (64, 128))]


@pytest.mark.parametrize("launches", [90], indirect=True)
@pytest.mark.parametrize(("activation", "d"), CASES + OTHERS if FULL else CASES)
def test_hopper(launches, activation, d):
    arch, found = launches
    record_all(activation, torch.bfloat16, d)
    check_all(arch, found)


@pytest.mark.skipif(not FULL, reason="only with the full grid: bands and float16 run under the interpreter")
@pytest.mark.parametrize("launches", [90], indirect=True)
def test_hopper_banded_dense_fp16(launches):
    arch, found = launches
    record_all("gelu", torch.float16, 128, band=Band(128, 0), packed=False)
    check_all(arch, found)


@pytest.mark.parametrize("launches", [90], indirect=True)
def test_hopper_params(launches):
    arch, found = launches
    record_all(learned_slope, torch.bfloat16, 64, n_params=1)
    check_all(arch, found)


@pytest.mark.parametrize("launches", [80], indirect=True)
@pytest.mark.parametrize("d", [64, 128] if FULL else [128])
def test_ampere(launches, d):
    arch, found = launches
    record_all("gelu_tanh", torch.bfloat16, d)
    check_all(arch, found)


@pytest.mark.parametrize("launches", [90], indirect=True)
def test_float32_does_not_spill(launches):
    """IEEE products have no tensor core instruction; what matters is that they stay in registers."""
    arch, found = launches
    record_all("gelu", torch.float32, 64, length=100)
    rows = torch.empty(2, 4, 100, 128)
    x = Operands(rows, rows, rows)
    softmax = make_problem(x, (resolve_one("exp", 0),), 0.1, 1.0, Band(None, 0)).normalized(("sum",))
    launch.forward(softmax, x, rows, sums=torch.empty(2, 4, 100))
    for kernel, args, kwargs in found:
        assert resources(compile_for(kernel, args, kwargs, arch)).spills <= FLOAT32_SPILLS, kernel.fn.__name__


@pytest.mark.parametrize("launches", [90], indirect=True)
@pytest.mark.parametrize(("d", "length"), [(64, 2048), *([(64, 400), (128, 400), (128, 2048)] if FULL else [])])
def test_float32_of_long_sequences(launches, d, length):
    """Three products on tensor cores for one, of all columns at once or in parts."""
    arch, found = launches
    record_all("gelu", torch.float32, d, length=length)
    for kernel, args, kwargs in found:
        r = resources(compile_for(kernel, args, kwargs, arch))
        assert r.hgmma + r.hmma > 0
        assert r.shared <= SHARED_MEMORY[arch]
        assert r.spills <= LONG_FLOAT32_SPILLS[d], f"{kernel.fn.__name__}: {r}"


@pytest.mark.parametrize("launches", [90], indirect=True)
def test_wide_heads(launches):
    """dq has a kernel of its own."""
    arch, found = launches
    record_all("gelu_tanh", torch.bfloat16, 256, mode="none")
    for kernel, args, kwargs in found:
        r = resources(compile_for(kernel, args, kwargs, arch))
        assert r.hgmma > 0
        assert r.shared <= SHARED_MEMORY[arch], f"{kernel.fn.__name__}: {r}"
        assert r.spills <= WIDE_SPILLS, f"{kernel.fn.__name__}: {r}"


@pytest.mark.parametrize("launches", [90], indirect=True)
@pytest.mark.parametrize(("d", "names"), [(256, ["backward_kernel", "dq_kernel"]), (128, ["backward_kernel"])])
def test_which_heads_have_a_kernel_for_dq(launches, d, names):
    _, found = launches
    rows = torch.empty(2, 2, 40, d, dtype=torch.bfloat16)
    x = Operands(rows, rows, rows)
    problem = make_problem(x, (resolve_one("relu", 0),), 0.1, 1.0, NO_BAND)
    launch.backward(problem, x, rows, *(torch.empty_like(rows) for _ in range(3)), None)
    assert [kernel.fn.__name__ for kernel, _, _ in found] == names


@pytest.mark.parametrize("launches", [90], indirect=True)
def test_dq_of_the_other_sequences(launches):
    """Those of more than one tile of keys, where most have one: recorded whatever a hint says, with no more spills than
    when dq is made for all."""
    arch, found = launches
    rows = torch.empty(400, 4, 128, dtype=torch.bfloat16).transpose(0, 1)[None]
    cu = torch.arange(5, dtype=torch.int32) * 100
    x = Operands(rows, rows, rows, cu, cu)
    gradients = [torch.empty_like(rows) for _ in range(3)]
    for hint in (None, 10, 400):
        problem = make_problem(x, (resolve_one("relu", 0),), 0.1, 1.0, NO_BAND, hint, hint)
        launch.backward(problem, x, rows, *gradients, None)
    assert [kernel.fn.__name__ for kernel, _, _ in found] == ["backward_kernel", "other_dq_kernel"] * 3
    for kernel, args, kwargs in found[:2]:
        r = resources(compile_for(kernel, args, kwargs, arch))
        assert r.hgmma > 0
        assert r.spills <= SPILLS[kernel.fn.__name__], f"{kernel.fn.__name__}: {r}"


@pytest.mark.parametrize("arch", [80, 90])
def test_tile_records(arch, monkeypatch):
    """The kernel that writes where each tile lies: no tensor cores, no spills."""
    found: list = []
    monkeypatch.setattr(arguments, "tile_records_kernel", Recorder(arguments.tile_records_kernel, found))
    cu = torch.arange(5, dtype=torch.int32) * 100
    used = torch.full((4,), 50)
    arguments.make_tiles(cu, cu, 400, 400, 4, 128)
    arguments.make_tiles(None, cu, 100, 400, 4, 128, used, used)
    for kernel, args, kwargs in found:
        assert resources(compile_for(kernel, args, kwargs, arch)).spills == 0


def test_zeros_of_unused_rows(monkeypatch):
    """Packed, and dense with used lengths; views of one tensor, as a fused projection has them."""
    found: list = []
    monkeypatch.setattr(arguments, "zero_unused_kernel", Recorder(arguments.zero_unused_kernel, found))
    q, k, v = torch.empty(400, 3, 2, 64, dtype=torch.bfloat16).transpose(0, 2)[None].unbind(2)
    cu, used = torch.arange(5, dtype=torch.int32) * 100, torch.full((4,), 50)
    x = Operands(q, k, v, cu, cu, None, used, None)
    problem = make_problem(x, (resolve_one("gelu", 0),), 0.1, 1.0, NO_BAND)
    arguments.zero_unused_queries(problem, x, q)
    arguments.zero_unused_keys(problem, x, k, v)
    k = torch.empty(4, 2, 100, 64, dtype=torch.bfloat16)
    x = Operands(q, k, k, cu, None, None, None, used)
    arguments.zero_unused_keys(make_problem(x, (resolve_one("gelu", 0),), 0.1, 1.0, NO_BAND), x, k, k)
    assert len(found) == 3
    for kernel, args, kwargs in found:
        compiled = compile_for(kernel, args, kwargs, 90)
        assert resources(compiled).spills == 0
        assert "st.global.v4" in compiled.ptx, "16 bytes at a time"


# ---- positions, tables, masks ----------------------------------------------------------------------------------------
def relative(s, bias, time, *, h, q_idx, kv_idx, q_row, kv_row):
    gap = (time[q_row] - time[kv_row]).clamp(0, 127)
    return F.silu(s + bias[h, (q_idx - kv_idx).clamp(0, 127)] + bias[h, gap])


# Bytes spilled: a gather per pair needs addresses and entries beside everything else, and its backward additions.
PLACED_SPILLS = {"forward_kernel": 512, "backward_kernel": 4096, "dq_kernel": 512}


EACH_ONCE = [(90, "relative"), (80, "mask")]  # each architecture and each kind of code once,
# and of the kernels those whose code the other pair does not have
CHOSEN = {"relative": ("backward_kernel",), "mask": ("forward_kernel", "dq_kernel")}
OTHER_PAIRS = [(80, "relative"), (90, "mask")]


@pytest.mark.parametrize(("launches", "name"), EACH_ONCE + OTHER_PAIRS if FULL else EACH_ONCE, indirect=["launches"])
def test_positions(launches, name):
    arch, found = launches
    rows = torch.empty(8192, 4, 128, dtype=torch.bfloat16).transpose(0, 1)[None]
    cu = torch.arange(5, dtype=torch.int32) * 2048
    counts = torch.zeros(4, dtype=torch.int64)
    tables = [torch.empty(4, 128), torch.empty(8192, dtype=torch.int64)] if name == "relative" else []
    fn = relative if name == "relative" else "silu"
    mask = masks.targets(counts, 2) & masks.document(torch.zeros(8192)) if name == "mask" else None
    x = Operands(rows, rows, rows, cu, cu, tables=[*tables, *(mask.tables if mask is not None else ())])
    act = resolve_one(fn, 0, kinds_of(tables, "tables"))
    problem = make_problem(x, (act,), 0.1, 1.0, Band(None, 0))
    problem = replace(problem, mask=None if mask is None else mask._held, learn=True)
    launch.forward(problem, x, torch.empty_like(rows))
    c = config.backward_config(problem, launch.capability(rows.device))
    dtables = [torch.zeros_like(t) if t.is_floating_point() else None for t in tables]
    dq, gradients = torch.empty_like(rows, dtype=torch.float32), [torch.empty_like(rows) for _ in range(2)]
    launch.launch_backward(problem, x, rows, dq, *gradients, None, "add", c, dtables)
    launch.launch_dq(problem, x, rows, torch.empty_like(rows))
    assert len(found) == 3
    for kernel, args, kwargs in found if FULL else [one for one in found if one[0].fn.__name__ in CHOSEN[name]]:
        r = resources(compile_for(kernel, args, kwargs, arch))
        assert (r.hgmma if arch == 90 else r.hmma) > 0
        assert r.shared <= SHARED_MEMORY[arch], f"{kernel.fn.__name__}: {r}"
        assert r.spills <= PLACED_SPILLS[kernel.fn.__name__], f"{kernel.fn.__name__}: {r}"
