"""Launches past Triton's binder: the same compiled kernel, the same grid and the same arguments as with it."""

from __future__ import annotations

import os
import weakref
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("triton")
if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("the interpreter has no compiled kernels", allow_module_level=True)

import triton
import triton.language as tl
from triton import knobs

import gdpa
from fake_gpu import FakeDriver, fake_hopper
from gdpa.api import _dense_call
from gdpa.backends.hopper import launch
from gdpa.backends.triton import TritonBackend, compat, launching
from gdpa.backends.triton import launch as portable
from gdpa.backends.triton.config import Config
from gdpa.backends.triton.launching import Bound, bind
from gdpa.calling import direct, plans
from gdpa.device.places import Tables
from gdpa.device.rows import Rows
from gdpa.functions.activation import from_name
from gdpa.problem import Divided
from support import FULL


@pytest.fixture
def gpu() -> Any:
    from_name("relu").plans.clear()  # the next test must not find what this one or one before it planted
    with fake_hopper() as fake:
        yield fake
    from_name("relu").plans.clear()


@triton.jit(do_not_specialize=["n"])
def copy_kernel(t, p_to, stride, n, pair, factor, BLOCK: tl.constexpr, TIMES: tl.constexpr = 2):
    i = tl.arange(0, BLOCK)
    x = tl.load(t.p + i * t.row, mask=i < n)
    if p_to is not None:
        tl.store(p_to + i * stride + pair[0], x * factor * TIMES, mask=i < n)


BUFFER = torch.zeros(64, dtype=torch.int32)


def arguments(offset: int = 0, to: int | None = 0, stride: int = 1, n: int = 5, first: int | None = 3, row: int = 1):
    """Arguments that Triton compiles other code for, one by one."""
    t = Rows(BUFFER[offset:], 0, 0, row)
    return t, None if to is None else BUFFER[to:], stride, n, (first, 2), 0.5


VARIANTS = {
    "plain": {}, "source not aligned": {"offset": 1}, "target not aligned": {"to": 2}, "no target": {"to": None},
    "stride 16": {"stride": 16}, "stride 17": {"stride": 17}, "stride 2^31": {"stride": 2**31},
    "stride -16": {"stride": -16}, "stride 2^31 + 16": {"stride": 2**31 + 16}, "n 1": {"n": 1}, "n 2^31": {"n": 2**31},
    "row 16": {"row": 16}, "first 1": {"first": 1}, "first 16": {"first": 16},
}  # fmt: skip


def plain(args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Arguments as they can be compared: tensors by their addresses."""
    return tuple(
        a.data_ptr() if isinstance(a, torch.Tensor)
        else plain(a) if isinstance(a, tuple)
        else a
        for a in args
    )  # fmt: skip


def launched(gpu: FakeDriver) -> list[Any]:
    found = [(code, where, plain(args)) for code, where, args in gpu.launches]
    gpu.launches.clear()
    return found


def test_every_specialisation_is_found_again(gpu: FakeDriver) -> None:
    """In any order, and for arguments of every kind, the code is what Triton chooses."""
    bound = Bound(copy_kernel, {"BLOCK": 16, "num_warps": 1, "enable_fp_fusion": True})
    want = {}
    for name, changes in VARIANTS.items():
        copy_kernel[(3, 2)](*arguments(**changes), BLOCK=16, num_warps=1, enable_fp_fusion=True)
        want[name] = launched(gpu)
    assert len({str(found[0][0]) for found in want.values()}) >= 11  # different code, or the test shows nothing
    for _ in range(3):
        for name, changes in VARIANTS.items():
            bound((3, 2), *arguments(**changes))
            assert launched(gpu) == want[name], name


@triton.jit
def table_kernel(tables, numbers, BLOCK: tl.constexpr):
    """Arguments as kernels of placed functions have them."""
    i = tl.arange(0, BLOCK)
    x = tl.load(tables[0][0] + i * numbers[0], mask=i < numbers[1][0])
    tl.store(tables[0][1] + i, x, mask=i < numbers[1][1])


def tables(offset: int = 0, to: int = 0, mask: bool = True, dtype=torch.int32, slot: int = 3, sizes=(5, 7)) -> Any:
    own = (BUFFER.view(dtype)[offset:], BUFFER[to:])
    return Tables(own, (BUFFER,) if mask else None, None), (slot, sizes)


TABLES = {
    "plain": {}, "not aligned": {"offset": 1}, "target not aligned": {"to": 1}, "no mask": {"mask": False},
    "float": {"dtype": torch.float32}, "slot 1": {"slot": 1}, "slot 16": {"slot": 16}, "slot 2^31": {"slot": 2**31 + 1},
    "size 1": {"sizes": (5, 1)}, "size 32": {"sizes": (5, 32)}, "size 2^31": {"sizes": (5, 2**31 + 1)},
}  # fmt: skip


def test_specialisations_inside_of_tuples_are_found_again(gpu: FakeDriver) -> None:
    bound = Bound(table_kernel, {"BLOCK": 16, "num_warps": 1, "enable_fp_fusion": True})
    want = {}
    for name, changes in TABLES.items():
        table_kernel[(1,)](*tables(**changes), BLOCK=16, num_warps=1, enable_fp_fusion=True)
        want[name] = launched(gpu)
    assert len({str(found[0][0]) for found in want.values()}) == len(TABLES)
    for _ in range(2):
        for name, changes in TABLES.items():
            bound((1,), *tables(**changes))
            assert launched(gpu) == want[name], name
    assert len(bound.found) == len(TABLES)


def test_other_sizes_of_tables_are_no_other_code(gpu: FakeDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    bound = Bound(table_kernel, {"BLOCK": 16, "num_warps": 1, "enable_fp_fusion": True})
    bound((1,), *tables(sizes=(5, 7)))
    monkeypatch.setattr(type(table_kernel), "run", lambda *args, **kwargs: pytest.fail("Triton's own way"))
    bound((1,), *tables(slot=9, sizes=(9, 11)))
    assert gpu.launches[-1][2][1] == (9, (9, 11))


def test_repeated_launches_do_without_the_binder(gpu: FakeDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    bound = Bound(copy_kernel, {"BLOCK": 16, "num_warps": 1, "enable_fp_fusion": True})
    bound((1,), *arguments())
    monkeypatch.setattr(type(copy_kernel), "run", lambda *args, **kwargs: pytest.fail("Triton's own way"))
    gpu.stream = 99
    bound((4, 5, 6), *arguments(n=7))
    assert gpu.launches[-1][1] == (4, 5, 6, 99)  # the stream of the moment


def test_another_device_is_another_kernel(gpu: FakeDriver) -> None:
    """A compiled kernel is loaded into one device."""
    bound = Bound(copy_kernel, {"BLOCK": 16, "num_warps": 1, "enable_fp_fusion": True})
    for device in (0, 1, 0, 1):
        gpu.device = device
        bound((1,), *arguments())
    assert len(bound.found) == 2


@pytest.mark.parametrize("watch", ["enter", "exit", "own function", "pre-run"])
def test_whoever_watches_launches_is_told(watch: str, gpu: FakeDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    bound = Bound(copy_kernel, {"BLOCK": 16, "num_warps": 1, "enable_fp_fusion": True})
    bound((1,), *arguments())
    own = []
    monkeypatch.setattr(type(copy_kernel), "run", lambda self, *args, **kwargs: own.append(args))
    if watch == "pre-run":
        monkeypatch.setattr(copy_kernel, "pre_run_hooks", [print])
    elif watch == "own function":
        monkeypatch.setattr(knobs.runtime, "launch_enter_hook", print)
    else:
        monkeypatch.setattr(getattr(knobs.runtime, f"launch_{watch}_hook"), "calls", [print])
    bound((1,), *arguments())
    assert len(own) == 1


def test_arguments_of_unknown_types_go_tritons_own_way(gpu: FakeDriver) -> None:
    assert launching.specialisation((torch.float32,)) is None
    assert launching.specialisation((True,)) is None
    assert launching.specialisation(((BUFFER, (3, True)),)) is None


def test_remembered_kernels_are_bounded(gpu: FakeDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launching, "MOST", 4)
    bound = Bound(copy_kernel, {"BLOCK": 16, "num_warps": 1, "enable_fp_fusion": True})
    for row in range(2, 9):
        bound((1,), *arguments(row=row))
    assert len(bound.found) == 4


def test_a_kernel_is_bound_once_for_equal_constants() -> None:
    holder: dict[Any, Any] = {}
    one = bind(holder, copy_kernel, BLOCK=16, num_warps=1)
    assert bind(holder, copy_kernel, BLOCK=16, num_warps=1) is one
    assert bind(holder, copy_kernel, BLOCK=32, num_warps=1) is not one


# ---- Triton's inner names: one test each, so that it is clear which is gone ------------------------------------------
def test_this_triton_has_all_inner_names() -> None:
    assert compat.missing() == ()


@pytest.mark.parametrize("name", compat.LAUNCHER)
def test_names_of_a_compiled_kernel(name: str, gpu: FakeDriver) -> None:
    compiled = copy_kernel[(1,)](*arguments(), BLOCK=16, num_warps=1, enable_fp_fusion=True)
    assert hasattr(compiled, name)


def test_without_a_name_all_launches_go_tritons_own_way(gpu: FakeDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compat, "missing", lambda: ("CompiledKernel.run",))
    bound = Bound(copy_kernel, {"BLOCK": 16, "num_warps": 1, "enable_fp_fusion": True})
    own = []
    monkeypatch.setattr(type(copy_kernel), "run", lambda self, *args, **kwargs: own.append(args))
    for _ in range(2):
        bound((1,), *arguments())
    assert len(own) == 2


# ---- whole calls -----------------------------------------------------------------------------------------------------
bf16 = torch.bfloat16
CU = torch.tensor([0, 60, 200, 333], dtype=torch.int32)


def dense(length: int = 128, activation: Any = "relu", **more: Any) -> torch.Tensor:
    q, k, v = (torch.zeros(2, 4, length, 64, dtype=bf16).requires_grad_() for _ in range(3))
    return gdpa.attention(q, k, v, activation, **more)


def varlen(cu: torch.Tensor = CU, activation: Any = "relu", **more: Any) -> torch.Tensor:
    q, k, v = (torch.zeros(int(cu[-1]), 4, 64, dtype=bf16).requires_grad_() for _ in range(3))
    return gdpa.attention_varlen(q, k, v, cu, cu, activation, **more)


def near(s: torch.Tensor, *, q_idx: torch.Tensor, kv_idx: torch.Tensor) -> torch.Tensor:
    return torch.relu(s - (q_idx - kv_idx).abs())


def nearer(s: torch.Tensor, *, q_idx: torch.Tensor, kv_idx: torch.Tensor) -> torch.Tensor:
    return torch.sigmoid(s) * torch.exp(-0.1 * (q_idx - kv_idx).abs())


SINK = torch.ones(9)


ALL_CALLS = {
    "dense": dense,
    "dense, another length": lambda: dense(129),
    "varlen": varlen,
    "varlen, more rows": lambda: varlen(CU * 16),  # whose tiles are in a list
    "varlen, offsets not aligned": torch.no_grad()(lambda: varlen(torch.cat([CU[:1], CU])[1:])),
    "softmax": lambda: dense(activation="softmax"),
    "softmax, varlen": lambda: varlen(activation="softmax"),
    "softmax, varlen, rows a multiple of 16": lambda: varlen(CU * 16, "softmax"),
    "softmax and a sink that is not aligned": lambda: dense(activation="softmax", sink=SINK[1:5]),
    "positions": lambda: dense(activation=near),
    "positions, varlen": lambda: varlen(activation=near),
    "positions beside the score": lambda: dense(activation=nearer),
    "qkv": lambda: gdpa.attention_qkvpacked(torch.zeros(2, 128, 3, 4, 64, dtype=bf16).requires_grad_(), "softmax"),
}
# Another Triton is tried for what it is made of, with one call of each kind. Packed rows that are no multiple of 16 are
# other arguments of relu's kernels too, and packed rows of functions without positions; where positions stand in a
# function changes no argument.
OTHER_TRITON = "EXPECTED_TRITON" in os.environ
LEFT_OUT: tuple[str, ...] = () if FULL else ("softmax, varlen", "positions, varlen", "positions beside the score")
if OTHER_TRITON and not FULL:
    LEFT_OUT += ("softmax and a sink that is not aligned",)
CALLS = {name: make for name, make in ALL_CALLS.items() if name not in LEFT_OUT and not (OTHER_TRITON and "," in name)}


def without_addresses(a: Any) -> Any:
    """They differ from call to call."""
    if isinstance(a, tuple):
        return tuple(map(without_addresses, a))
    return "address" if type(a) is int and a > 2**40 else a


def both(gpu: FakeDriver, make: Any) -> list[Any]:
    """All launches of a call and its backward."""
    out = make()
    if out.requires_grad:
        out.backward(torch.zeros_like(out))
    return [(code, where, without_addresses(args)) for code, where, args in launched(gpu)]


def test_calls_launch_what_triton_would_launch(gpu: FakeDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    """All kernels of forward and backward with all arguments, in any order of calls."""
    with monkeypatch.context() as m:
        m.setattr(compat, "is_watched", lambda kernel: True)  # Triton's own way
        want = {name: both(gpu, make) for name, make in CALLS.items()}
    for _ in range(2):
        assert {name: both(gpu, make) for name, make in CALLS.items()} == want
    with monkeypatch.context() as m:
        m.setattr(Bound, "__call__", lambda *args: pytest.fail("not repeated"))
        assert {name: both(gpu, make) for name, make in CALLS.items()} == want
        for name in ("forward", "backward"):
            m.setattr(launch, name, lambda *args, **kwargs: pytest.fail("not quick"))
        assert {name: both(gpu, make) for name, make in CALLS.items()} == want
    counts = (2, 2, 3, 4, 1, 3, 4, 5, 3, 2, 3, 2, 3)
    assert {name: len(found) for name, found in want.items()} == {
        name: n for name, n in zip(ALL_CALLS, counts, strict=True) if name in CALLS
    }


def bias(s: torch.Tensor, t: torch.Tensor, *, h: torch.Tensor, kv_idx: torch.Tensor) -> torch.Tensor:
    return torch.relu(s + t[h, kv_idx % 16])


IDS = torch.arange(128) // 40
PLACED = {
    "dense": lambda: dense(mask=gdpa.masks.dilated(2)),
    "softmax and a table": lambda: dense(activation="softmax", mask=gdpa.masks.document(IDS.expand(2, 128))),
    "varlen": lambda: varlen(mask=gdpa.masks.dilated(2)),
    "learned table": lambda: dense(activation=bias, tables=(torch.zeros(4, 16).requires_grad_(),)),
    "learned table, another size": lambda: dense(activation=bias, tables=(torch.zeros(4, 21).requires_grad_(),)),
    "table that is not aligned": torch.no_grad()(
        lambda: dense(activation=bias, tables=(torch.zeros(65)[1:].view(4, 16),))
    ),
    "table and a mask": lambda: varlen(
        activation=bias, tables=(torch.zeros(4, 16).requires_grad_(),), mask=gdpa.masks.document(torch.zeros(333).int())
    ),
}
if not FULL:  # dense rows with a table, and packed ones without, are enough
    del PLACED["dense"], PLACED["table and a mask"]


@pytest.mark.skipif(OTHER_TRITON and not FULL, reason="with the environment's Triton only")
def test_placed_calls_launch_what_the_operator_would(gpu: FakeDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as m:
        m.setattr(compat, "is_watched", lambda kernel: True)
        m.setattr(direct, "nobody_watches", lambda: False)
        want = {name: both(gpu, make) for name, make in PLACED.items()}
    for _ in range(2):
        assert {name: both(gpu, make) for name, make in PLACED.items()} == want
    for name in ("forward", "backward"):
        monkeypatch.setattr(launch, name, lambda *args, **kwargs: pytest.fail("not quick"))
    assert {name: both(gpu, make) for name, make in PLACED.items()} == want
    # A list of visits and a kernel each way, and the rounding of dq; terms of row sums; lists of tiles each way.
    counts = {"dense": 5, "softmax and a table": 6, "varlen": 7, "table and a mask": 7, "table that is not aligned": 1}
    assert {name: len(found) for name, found in want.items()} == {name: counts.get(name, 2) for name in PLACED}


def test_quick_passes_are_left_where_the_ordinary_way_must_decide(
    gpu: FakeDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A profiler came, or another device is the current one."""
    for _ in range(2):
        want = both(gpu, dense)
    ways: list[str] = []
    for name, way in (("forward", launch.forward), ("backward", launch.backward)):
        monkeypatch.setattr(launch, name, lambda *args, n=name, f=way, **more: ways.append(n) or f(*args, **more))
    assert both(gpu, dense) == want
    assert ways == []
    with monkeypatch.context() as m:
        m.setattr(compat, "is_watched", lambda kernel: True)
        assert both(gpu, dense) == want
    gpu.device = 1
    assert [code for code, _, _ in both(gpu, dense)] == [code for code, _, _ in want]
    gpu.device = 0
    assert ways == ["forward", "backward"] * 2


@pytest.mark.parametrize("packed", [False, True])
def test_deterministic_gradients_of_tables(packed: bool, gpu: FakeDriver) -> None:
    """PyTorch computes them, of tensors that lie as the caller has them."""
    table = torch.rand(4, 16, requires_grad=True)
    cu = torch.tensor([0, 5, 40], dtype=torch.int32)
    q, k, v = (torch.randn((40, 4, 64) if packed else (2, 4, 40, 64)).bfloat16().requires_grad_() for _ in range(3))

    def gradient(backend: str | None) -> torch.Tensor:
        if packed:
            out = gdpa.attention_varlen(q, k, v, cu, cu, bias, tables=(table,), backend=backend)
        else:
            out = gdpa.attention(q, k, v, bias, tables=(table,), backend=backend)
        return torch.autograd.grad(out, table, torch.ones_like(out))[0]

    torch.use_deterministic_algorithms(True)
    try:
        for _ in range(2):
            torch.testing.assert_close(gradient(None), gradient("reference"))
    finally:
        torch.use_deterministic_algorithms(False)


# ---- launches that are repeated --------------------------------------------------------------------------------------
def test_addresses_are_encoded_once_and_hold_no_tensor(gpu: FakeDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    launching._maps.clear()  # other tests had tensors at the addresses of these
    tensors = [torch.zeros(2, 4, 128, 64, dtype=bf16) for _ in range(3)]
    for _ in range(3):
        gdpa.attention(*tensors, "relu")
    encoded = []
    encode = compat.encoded
    monkeypatch.setattr(compat, "encoded", lambda d, meta: encoded.append(d.base.data_ptr()) or encode(d, meta))
    outs = [gdpa.attention(*tensors, "relu") for _ in range(3)]  # at several addresses
    gone = weakref.ref(outs[0])
    held = [torch.zeros(2, 4, 128, 64, dtype=bf16) for _ in range(64)]  # not all of them where something lay before
    for new in held:
        gdpa.attention(new, *tensors[1:], "relu")
        maps = [a for a in gpu.launches[-1][2] if isinstance(a, tuple) and a[:1] == ("map",)]
        assert [a[1] for a in maps[:3]] == [t.data_ptr() for t in (new, *tensors[1:])]
    assert not {t.data_ptr() for t in tensors} & set(encoded)
    assert {new.data_ptr() for new in held} & set(encoded)
    del outs
    assert gone() is None


def test_encoded_addresses_are_bounded(gpu: FakeDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    launching._maps.clear()
    monkeypatch.setattr(launching, "MOST_MAPS", 10)
    for _ in range(5):
        q, k, v = (torch.zeros(2, 4, 128, 64, dtype=bf16) for _ in range(3))
        held = q, k, v, gdpa.attention(q, k, v, "relu")
    assert len(launching._maps) <= 10
    assert held


def test_a_gradient_of_other_strides_is_another_launch(gpu: FakeDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    def strides(grad: torch.Tensor) -> Any:
        dense().backward(grad)
        described = [a for a in gpu.launches[-1][2] if isinstance(a, tuple) and a[:1] == ("map",)][3]
        assert described[1] % 16 == 0
        return described[7]

    plain, rows_first = torch.zeros(2, 4, 128, 64, dtype=bf16), torch.zeros(2, 128, 4, 64, dtype=bf16).transpose(1, 2)
    odd = torch.zeros(2 * 4 * 128 * 64 + 1, dtype=bf16)[1:].view(2, 4, 128, 64)  # is copied: it begins anywhere
    wanted = {}
    for _ in range(3):
        for name, grad in (("plain", plain), ("rows first", rows_first), ("odd", odd)):
            wanted.setdefault(name, strides(grad))
            assert strides(grad) == wanted[name]
    assert wanted["plain"] == wanted["odd"] != wanted["rows first"]


def test_deterministic_mode_launches_another_kernel(gpu: FakeDriver) -> None:
    codes = []
    for on in (False, True, False, True):
        torch.use_deterministic_algorithms(on)
        codes.append([code for code, _, _ in both(gpu, dense)])
    torch.use_deterministic_algorithms(False)
    assert codes[0] == codes[2] != codes[1] == codes[3]


@pytest.mark.parametrize("change", ["scratch", "hands on something else", "no C function"])
def test_a_launcher_of_another_kind_is_called_itself(change: str, gpu: FakeDriver) -> None:
    """Triton's launcher is repeated where what is under it is not as known."""
    compiled = copy_kernel[(1,)](*arguments(), BLOCK=16, num_warps=1, enable_fp_fusion=True)
    assert compat.below(compiled) is not None
    launcher = type("Launcher", (type(compiled.run),), {})
    other = object.__new__(launcher)
    other.__dict__.update(compiled.run.__dict__)
    if change == "scratch":
        other.global_scratch_size = 8
    elif change == "no C function":
        del other.launch
    else:
        launcher.__call__ = lambda self, *args: self.launch(*args[1:])
    stand_in = SimpleNamespace(run=other, function=1, packed_metadata=(), metadata=compiled.metadata)
    assert compat.below(stand_in) is None


def test_launches_that_cannot_be_repeated_are_made_as_before(gpu: FakeDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    want = {name: both(gpu, make) for name, make in CALLS.items()}
    from_name("relu").plans.clear()
    monkeypatch.setattr(compat, "below", lambda compiled: None)
    for _ in range(3):
        assert {name: both(gpu, make) for name, make in CALLS.items()} == want


def test_another_device_or_stream_is_seen(gpu: FakeDriver) -> None:
    for device, stream in ((0, 7), (1, 9), (0, 8), (1, 9)):
        gpu.device, gpu.stream = device, stream
        assert {where[3] for _, where, _ in both(gpu, dense)} == {stream}


def nearest(s: torch.Tensor, t: torch.Tensor, *, q_idx: torch.Tensor, kv_idx: torch.Tensor) -> torch.Tensor:
    return s + t[q_idx - kv_idx + 128]


@pytest.mark.parametrize("norm", [None, "sum"])
def test_kernels_with_tables_and_a_mask(norm: str | None, gpu: FakeDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    """Once with Triton's own way, then without: the same code, also for tables of other sizes."""

    def both(size: int) -> list[Any]:
        q = torch.zeros(2, 4, 128, 64, dtype=bf16)
        ids, table = torch.zeros(128, dtype=torch.int32), torch.zeros(size, requires_grad=True)
        mask = gdpa.Mask(lambda q_idx, kv_idx, t: t[q_idx] == t[kv_idx], tables=(ids,))
        call = _dense_call(q, q, q, nearest, (), (table,), mask, norm, 0.0, None, 1.0, False, None, "triton", False)
        plan = plans.of(call.x, call.settings)
        sums = None if norm is None else torch.zeros(2, 4, 128)
        divided = None if sums is None else Divided(q, sums, None, None)
        plan.backend.forward(plan.problem, call.x, torch.zeros_like(q), sums)
        gradients = [torch.zeros_like(q) for _ in range(3)]
        plan.backend.backward(plan.problem, call.x, q, *gradients, None, [torch.zeros_like(table)], divided)
        found = [(code, where, len(args)) for code, where, args in gpu.launches]
        gpu.launches.clear()
        return found

    monkeypatch.setattr(TritonBackend, "supports", lambda self, problem: None)
    monkeypatch.setattr(Bound, "_key_of", lambda self, args: None)
    want = both(256)
    monkeypatch.undo()
    monkeypatch.setattr(TritonBackend, "supports", lambda self, problem: None)
    both(256)
    monkeypatch.setattr(type(table_kernel), "run", lambda *args, **kwargs: pytest.fail("Triton's own way"))
    assert both(256) == both(255) == want
    assert len(want) == (2 if norm is None else 3)


def test_bound_kernels_with_a_mask_live_as_long_as_the_plan(gpu: FakeDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    """There may be any number of masks to a function, which may live for ever."""
    holders: list[Any] = []
    monkeypatch.setattr(portable, "bind", lambda holder, *args, **kwargs: holders.append(holder) or print)
    q = torch.zeros(1, 1, 16, 16)
    for mask in (None, lambda q_idx, kv_idx: q_idx != kv_idx):
        call = _dense_call(q, q, q, "relu", (), (), mask, None, 0.0, None, 1.0, False, None, None, False)
        problem = call.settings.problem(call.x)
        portable.forward(problem, call.x, torch.zeros_like(q), c=Config(16, 16, 4, 1))
    assert holders[0] is problem.activation.derived
    assert holders[1] is problem.of_any_rows
