"""Passes that serve many numbers of rows: the launches, with all arguments, are those of the ordinary way."""

from __future__ import annotations

import os
import random
from dataclasses import replace
from typing import Any

import pytest
import torch

pytest.importorskip("triton")
if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("the interpreter has no compiled kernels", allow_module_level=True)

import gdpa
from fake_gpu import FakeDriver, fake_hopper
from gdpa import masks
from gdpa.api import _varlen_call
from gdpa.arguments import checks
from gdpa.backends.hopper import HopperBackend, config, launch
from gdpa.backends.hopper.quick import backward, row_classes
from gdpa.calling import direct, layouts
from gdpa.functions.activation import from_name, resolve_one
from gdpa.functions.mask import mask_from_key
from gdpa.functions.places.names import TableKind
from gdpa.problem import Problem
from support import FULL

bf16 = torch.bfloat16
H, D = 4, 64


def _biased(s: torch.Tensor, bias: torch.Tensor, *, q_idx: torch.Tensor, kv_idx: torch.Tensor) -> torch.Tensor:
    return torch.relu(s + bias[q_idx - kv_idx + 1100])


BIASED = resolve_one(_biased, 0, (TableKind(1, torch.float32),))


def _sloped(s: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return torch.where(s > 0, s, a * s) * b


SLOPED = resolve_one(_sloped, 2)


def forget_plans() -> None:
    for function in (from_name("relu"), from_name("exp"), BIASED, SLOPED):
        function.plans.clear()


@pytest.fixture
def gpu() -> Any:
    forget_plans()
    with fake_hopper() as fake:
        yield fake
    forget_plans()


def cu_of(n: int) -> torch.Tensor:
    return torch.tensor([0, n // 3, n], dtype=torch.int32)


def packed(n: int, *shape: int, d: int = D) -> torch.Tensor:
    return torch.zeros(n, *shape, d, dtype=bf16).requires_grad_()


def varlen(n: int, d: int = D, **more: Any) -> torch.Tensor:
    return gdpa.attention_varlen(*(packed(n, H, d=d) for _ in range(3)), cu_of(n), cu_of(n), **more)


def dense(n: int, **more: Any) -> torch.Tensor:
    return gdpa.attention(*(torch.zeros(2, H, n, D, dtype=bf16).requires_grad_() for _ in range(3)), **more)


def ids(*shape: int) -> torch.Tensor:
    return torch.zeros(shape, dtype=torch.int32)


def bias(n: int, learned: bool = False) -> dict[str, Any]:
    return {"activation": _biased, "tables": (torch.zeros(2200 + n).requires_grad_(learned),)}


def params() -> dict[str, Any]:
    return {"activation": _sloped, "params": (torch.ones(H).requires_grad_(), torch.ones(()).requires_grad_())}


def few_queries(n: int, rows: int = 10) -> torch.Tensor:
    """With so many keys that these are divided."""
    q, k, v = (torch.zeros(2, 2, m, 16, dtype=bf16).requires_grad_() for m in (rows, 20000 + n, 20000 + n))
    return gdpa.attention(q, k, v, "relu")


def pooled(n: int) -> torch.Tensor:
    k, v = (packed(20000 + n, 2, d=16) for _ in range(2))
    return gdpa.attention_varlen(packed(30, 2, d=16), k, v, None, cu_of(20000 + n), "relu")


USED = torch.tensor([0, 1], dtype=torch.int32)
CALLS = {
    "packed": lambda n: varlen(n, activation="relu"),
    "hints": lambda n: varlen(n, activation="relu", max_seqlen_q=700, max_seqlen_k=700),
    "softmax": lambda n: varlen(n, activation="softmax"),
    "used": lambda n: varlen(n, activation="relu", seqused_q=USED, seqused_k=USED),
    "by turns": lambda n: varlen(n, 128, activation="relu", causal=True),
    "added up": lambda n: varlen(n, 64, activation="relu", causal=True),
    "added up in one": lambda n: gdpa.attention_varlen_qkvpacked(packed(n, 3, H, d=64), cu_of(n), "relu", causal=True),
    "shared": lambda n: gdpa.attention_varlen(packed(70, H), packed(n, H), packed(n, H), None, cu_of(n), "relu"),
    "qkv": lambda n: gdpa.attention_varlen_qkvpacked(packed(n, 3, H), cu_of(n), "relu"),
    "documents": lambda n: varlen(n, activation="relu", mask=masks.document(ids(n))),
    "targets": lambda n: varlen(n, 128, activation="softmax", mask=masks.targets(ids(2)), max_seqlen_k=700),
    "no keys, as a hint says": lambda n: gdpa.attention_varlen(
        packed(70, H),
        packed(n, H),
        packed(n, H),
        cu_of(70),
        cu_of(n) * 0,
        "relu",
        max_seqlen_k=0,
        mask=masks.dilated(2),
    ),
    "dense prefixes": lambda n: dense(n, activation="relu", mask=masks.prefix(ids(2)) | masks.causal()),
    "a mask of heads": lambda n: dense(n, activation="relu", mask=lambda h, q_idx, kv_idx: q_idx >= h + kv_idx),
    "bias": lambda n: varlen(n, **bias(n), causal=True),
    "learned bias": lambda n: varlen(n, **bias(n, learned=True)),
    "dense bias behind a mask": lambda n: dense(n, **bias(n, learned=True), mask=masks.document(ids(2, n))),
    "params": lambda n: varlen(n, **params()),
    "params, causal": lambda n: varlen(n, **params(), causal=True),
    "dense params": lambda n: dense(n, **params()),
    "dense, keys in parts": few_queries,
    "dense queries, packed keys in parts": pooled,
    "kv": lambda n: gdpa.attention_varlen_kvpacked(packed(n + 1, H), packed(n, 2, H), cu_of(n + 1), cu_of(n), "relu"),
}


if not FULL:  # packed rows with a mask of rows are enough: test_launching.py has others, and tables
    for name in ("targets", "dense prefixes", "a mask of heads", "bias", "learned bias", "dense bias behind a mask"):
        del CALLS[name]


def comparable(a: Any) -> Any:
    """Addresses differ from call to call; that of a descriptor is its second entry."""
    if isinstance(a, tuple):
        return tuple(map(comparable, a))
    return "address" if isinstance(a, torch.Tensor) or (type(a) is int and a > 2**40) else a


def launches(gpu: FakeDriver, out: torch.Tensor) -> list[Any]:
    out.backward(torch.zeros_like(out))
    found = [(code, where, comparable(args)) for code, where, args in gpu.launches]
    gpu.launches.clear()
    return found


@pytest.mark.parametrize("name", CALLS)
def test_any_number_of_rows_launches_what_the_ordinary_way_does(
    name: str, gpu: FakeDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = [2, 17, 64, 100, 127, 128, 129, 144, 256, 257, 300, 513, 780, 1030]
    if name.startswith("dense"):  # a plan of its own for each
        rows = [17, 128, 300]
    with monkeypatch.context() as m:
        m.setattr(HopperBackend, "quick_forward", lambda *args: None)
        m.setattr(HopperBackend, "quick_backward", lambda *args: None)
        want = {n: launches(gpu, CALLS[name](n)) for n in rows}
    forget_plans()
    for n in rows:
        launches(gpu, CALLS[name](n))
    passes = []
    for way in ("forward", "backward"):
        monkeypatch.setattr(launch, way, lambda *args, w=way, **kwargs: passes.append(w))
    for n in rows:
        assert launches(gpu, CALLS[name](n)) == want[n], n
    assert not passes


@pytest.mark.parametrize("call", [varlen, dense])
def test_gradients_of_params_are_sums_of_what_kernels_leave(
    call: Any, gpu: FakeDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    zeros = torch.zeros

    def counted(*shape: Any, **more: Any) -> torch.Tensor:
        """In the place of a kernel that has added its terms up."""
        made = zeros(*shape, **more)
        return made.copy_(torch.arange(made.numel()).view_as(made)) if made.dim() == 4 else made

    def gradients() -> list[torch.Tensor]:
        made = params()
        out = call(200, **made, out_scale=0.5)
        monkeypatch.setattr(torch, "zeros", counted)
        found = torch.autograd.grad(out, made["params"], torch.ones_like(out))
        monkeypatch.setattr(torch, "zeros", zeros)
        return list(found)

    first = gradients()
    monkeypatch.setattr(launch, "backward", lambda *args, **more: pytest.fail("the ordinary way"))
    second = gradients()
    for got, want in zip(second, first, strict=True):
        assert got.count_nonzero() == got.numel()
        torch.testing.assert_close(got, want, rtol=0, atol=0)


def test_keys_in_parts_are_two_launches(gpu: FakeDriver) -> None:
    for call in (few_queries, pooled):
        for _ in range(3):
            out = call(100)
            assert len(gpu.launches) == 2  # the sums of parts, and theirs
            gpu.launches.clear()
            del out


def test_new_numbers_of_rows_decide_nothing(gpu: FakeDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor do they leave anything behind."""
    monkeypatch.setattr(checks, "looks_at_offsets", lambda problem: False)  # as on a GPU
    for n in (160, 192):
        launches(gpu, varlen(n, activation="relu"))
    (plan,) = (plan for plan in from_name("relu").plans.values() if isinstance(plan, direct.DirectPlan))
    before = len(plan.passes), len(plan.problems), len(plan.problem.of_any_rows)
    for decision in ("forward_plan", "backward_plan", "backward_launch"):
        monkeypatch.setattr(launch, decision, lambda *args: pytest.fail("decided again"))
    for n in range(161, 192):
        assert len(launches(gpu, varlen(n, activation="relu"))) == 3
    assert (len(plan.passes), len(plan.problems), len(plan.problem.of_any_rows)) == before


def test_gradients_of_a_sum_take_the_quick_way(gpu: FakeDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their strides are 0, which no descriptor expresses."""
    for _ in range(2):
        varlen(200, activation="relu").sum().backward()
    monkeypatch.setattr(launch, "backward", lambda *args, **kwargs: pytest.fail("the ordinary way"))
    gpu.launches.clear()
    varlen(200, activation="relu").sum().backward()
    assert len(gpu.launches) == 3


def test_a_gradient_of_row_sums_where_the_output_counts_nothing(
    gpu: FakeDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With out_scale=0 the kernels compute the gradient of row sums as if it were 1 (see ops.run_backward)."""

    def run(learned_sums: bool) -> list[Any]:
        out, sums = varlen(200, activation="relu", normalize="sum", out_scale=0.0, return_weights_sum=True)
        return launches(gpu, out.float().sum() + (sums.sum() if learned_sums else 0.0))

    with monkeypatch.context() as m:
        m.setattr(HopperBackend, "quick_backward", lambda *args: None)
        want = [run(False), run(True)]
    forget_plans()
    for _ in range(3):
        assert [run(False), run(True)] == want
    assert want[0] != want[1]


def test_lists_of_too_many_blocks_are_another_plan(gpu: FakeDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    """The number of a block has 15 bits: however many rows the first batch had, such a batch is left to triton."""
    chosen = []
    monkeypatch.setattr(direct, "run", lambda plan, *args: chosen.append(plan.backend.name) or args)
    for n in (200, 2**21 + 64, 300, 2**21, 2**21 + 65):
        q = torch.empty(n, 1, 16, dtype=bf16)
        gdpa.attention_varlen(q[:70], q, q, torch.tensor([0, 70]), torch.tensor([0, n]), "relu", mask=masks.dilated(2))
    assert chosen == ["hopper", "triton", "hopper", "hopper", "triton"]
    plans = [plan for plan in from_name("relu").plans.values() if isinstance(plan, direct.DirectPlan)]
    plan = next(plan for plan in plans if plan.backend.name == "hopper")
    assert plan.takes((70, 2**20))
    assert plan.takes((2**18, 2**18))
    assert not plan.takes((2**20, 2**20))  # 2^29 bytes


def problem_of(name: str, shared: bool, dense_keys: bool, hint: int | None, n_seqs: int) -> Problem:
    q = torch.zeros(64, H, D, dtype=bf16)
    k = torch.zeros(n_seqs, 64, 2, D, dtype=bf16) if dense_keys else torch.zeros(64, 2, D, dtype=bf16)
    cu = torch.linspace(0, 64, n_seqs + 1).int()
    cu_q, cu_k = None if shared else cu, None if dense_keys else cu
    numbers = (None, hint, None, None, None, 1.0, False, None, None, False)
    call = _varlen_call(q, k, k, cu_q, cu_k, name, (), (), None, None, 0.0, *numbers)
    return call.settings.problem(call.x)


def decisions(problem: Problem, deterministic: bool) -> Any:
    """All that a pass holds fast, but for the kernels, which follow from these."""
    forward = launch.forward_plan(problem, None, bool(problem.norms))
    assert forward is not None
    back = launch.backward_plan(problem, None, deterministic)
    _, listing = launch.backward_launch(problem, back.config, back.mode, deterministic, back.listed)
    listings = [None if found is None else found.tiling for found in (forward.listing, listing)]
    kernel = forward.launch.kernel.bound.constants["T"]
    return forward.config, forward.items, forward.rows, kernel, back, listings, launch.ring_places(problem, back.config)


@pytest.mark.parametrize("name", ["relu", "softmax"])
@pytest.mark.parametrize("n_seqs", [1, 7, 300])
@pytest.mark.parametrize(
    ("shared", "dense_keys", "hint"),
    [(False, False, None), (False, False, 400), (True, False, None), (False, True, None)],
)
def test_rows_of_one_class_are_decided_alike(
    name: str, n_seqs: int, shared: bool, dense_keys: bool, hint: int | None, gpu: FakeDriver
) -> None:
    problem = problem_of(name, shared, dense_keys, hint, n_seqs)
    class_of, chance = row_classes.classes(problem), random.Random(0)
    found: dict[Any, Any] = {}
    for _ in range(600):
        rows_q = int(2 ** chance.uniform(1, 20)) if problem.packed_q else problem.rows_q
        rows_k = chance.choice((rows_q, int(2 ** chance.uniform(1, 20)))) if problem.packed_k else problem.rows_k
        if chance.random() < 0.3 and problem.packed_k:  # beside a bound
            rows_k = max(
                1,
                chance.choice((64, 65, 105, 128, 256, 384, 512, 768, 1024, 8192)) * n_seqs + chance.choice((-1, 0, 1)),
            )
        other = problem.with_rows(rows_q, rows_k)
        for deterministic in (False, True):
            torch.use_deterministic_algorithms(deterministic)
            try:
                decided = decisions(other, deterministic)
            finally:
                torch.use_deterministic_algorithms(False)
            key = class_of(rows_q, rows_k), deterministic
            assert found.setdefault(key, decided) == decided, (rows_q, rows_k)


@pytest.mark.parametrize(("name", "bounds"), [("relu", (105, 321)), ("gelu_tanh", (65, 641))])
def test_few_keys_are_a_class_of_their_own(name: str, bounds: tuple[int, int], gpu: FakeDriver) -> None:
    """Without a mask, and behind one."""
    mask = mask_from_key(masks.causal().key)
    for bound, other in zip(bounds, (None, mask), strict=True):
        problem = replace(problem_of(name, False, False, None, 7), mask=other)
        class_of = row_classes.classes(problem)
        for rows_k, few in ((bound * 7 - 1, True), (bound * 7, False)):
            assert config.has_few_keys(problem.with_rows(500, rows_k)) is few
        assert class_of(500, bound * 7 - 1) != class_of(500, bound * 7)


def test_few_processors_decide_by_the_mean_of_fewer_keys(gpu: FakeDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    """A part of a GPU (MIG) has fewer of them than tiles of keys may go round."""
    monkeypatch.setattr(launch, "processors", lambda device: 16)
    problem = problem_of("relu", False, False, None, 7)
    rows_k = (16 * config.BACKWARD[64].block_n + 1) * 7
    modes = [launch.backward_plan(problem.with_rows(rows, rows), None, False).mode for rows in (rows_k - 1, rows_k)]
    assert modes == ["ring", "add"]
    class_of = row_classes.classes(problem)
    assert class_of(rows_k - 1, rows_k - 1) != class_of(rows_k, rows_k)


def test_parts_of_one_buffer_do_not_overlap(gpu: FakeDriver) -> None:
    for n in (200, 1000):  # with a ring
        for _ in range(2):
            launches(gpu, varlen(n, activation="relu"))
        out = varlen(n, activation="relu")
        gpu.launches.clear()
        out.backward(torch.zeros_like(out))
        (_, _, first), (_, _, main) = gpu.launches
        table, flags = first[0], first[8]
        ring = [a for a in main if isinstance(a, tuple) and a[:1] == ("map",)][5][1]
        places, c = 132 * config.ROOM, config.BACKWARD[64]
        assert flags >= ring + places * c.block_m * 64 * 4
        assert table >= flags + places * 4
        assert (table | flags | ring) % 16 == 0
        assert table in main
        assert flags in main
        gpu.launches.clear()
    assert backward.apart(1) == backward.apart(512) == 512


def test_addresses_are_those_of_the_views() -> None:
    dense, q = torch.zeros(2, 5, 3, H, D), torch.zeros(7, 8, D)
    grouped, kv = torch.zeros(9, 4, H, D), torch.zeros(6, 2, H, D)[1:]
    forms: list[tuple[Any, tuple[Any, ...]]] = [
        (layouts.Dense(), tuple(torch.zeros(2, H, 5, D) for _ in range(3))),
        (layouts.Varlen(True, True), (q, q, q)),
        (layouts.Together(False, False, False, False), (None, dense, None)),
        (layouts.Together(False, True, True, True), (None, grouped, None)),
        (layouts.Together(True, True, True, True), (q, kv, None)),
    ]
    for layout, given in forms:
        assert layout.addresses(*given) == tuple(t.data_ptr() for t in layout.starts(*given))
