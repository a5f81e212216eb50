"""Direct calls: the operator's results by a shorter way, wherever nobody watches, and never by a stale plan."""

from __future__ import annotations

import gc
import tracemalloc
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

import gdpa
from gdpa import compat
from gdpa.backends import tuning
from gdpa.calling import direct, plans
from gdpa.functions import mask as mask_functions
from gdpa.functions.activation import from_name

H, D = 4, 8
CU = torch.tensor([0, 3, 3, 10])
USED = torch.tensor([2, 0, 5])


def rows(*shape: int) -> Tensor:
    return torch.randn(*shape, D, dtype=torch.float64)


def odd(*shape: int) -> Tensor:
    """Rows that begin at no multiple of 16 bytes, and lie apart."""
    return torch.randn(*shape, D + 1, dtype=torch.float64)[..., 1:]


def slopes() -> tuple[Tensor, ...]:
    return torch.tensor(0.3, dtype=torch.float64), torch.linspace(0.1, 1, H)


def leaky(s: Tensor, a: Tensor, b: Tensor) -> Tensor:
    return torch.where(s > 0, s, a * s) + b


def nearer(s: Tensor, *, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
    return s * (h + 1) - (q_idx - kv_idx).abs()


# name: the function, its differentiable tensors, its other arguments
FORMS: dict[str, Any] = {
    "dense": (gdpa.attention, lambda: [rows(2, H, 5), rows(2, 2, 7), rows(2, 2, 7)], {"causal": True}),
    "rows first": (gdpa.attention, lambda: [rows(2, 5, H).transpose(1, 2) for _ in range(3)], {}),
    "odd": (gdpa.attention, lambda: [odd(2, H, 5), odd(2, H, 6), odd(2, H, 6)], {"window": (2, None)}),
    "shared": (gdpa.attention, lambda: [rows(1, H, 5), rows(3, H, 7), rows(3, H, 7)], {"scale": 0.5}),
    "functions": (gdpa.attention, lambda: [rows(2, H, 5) for _ in range(3)], {"activation": ["silu", "relu"] * 2}),
    "positions": (gdpa.attention, lambda: [rows(2, H, 5) for _ in range(3)], {"activation": nearer}),
    "positions by heads": (
        gdpa.attention, lambda: [rows(2, H, 5) for _ in range(3)], {"activation": ["silu", nearer, nearer, "relu"]}
    ),
    "positions, varlen": (
        gdpa.attention_varlen,
        lambda: [rows(10, H) for _ in range(3)],
        {"cu_seqlens_q": CU, "cu_seqlens_k": CU, "activation": nearer},
    ),
    "varlen": (
        gdpa.attention_varlen, lambda: [rows(10, H) for _ in range(3)], {"cu_seqlens_q": CU, "cu_seqlens_k": CU}
    ),
    "varlen, heads first": (
        gdpa.attention_varlen,
        lambda: [rows(H, 10).transpose(0, 1), rows(10, H), rows(10, H)],
        {"cu_seqlens_q": CU, "cu_seqlens_k": CU},
    ),
    "used": (
        gdpa.attention_varlen,
        lambda: [rows(10, H), rows(12, 2), rows(12, 2)],
        {"cu_seqlens_q": CU, "cu_seqlens_k": CU, "seqused_q": USED, "seqused_k": USED},
    ),
    "shared queries": (
        gdpa.attention_varlen,
        lambda: [rows(5, H), rows(10, H), rows(10, H)],
        {"cu_seqlens_q": None, "cu_seqlens_k": CU},
    ),
    "dense keys": (
        gdpa.attention_varlen,
        lambda: [rows(10, H), rows(3, 6, H), rows(3, 6, H)],
        {"cu_seqlens_q": CU, "cu_seqlens_k": None, "seqused_k": USED},
    ),
    "qkv": (gdpa.attention_qkvpacked, lambda: [rows(2, 5, 3, H)], {}),
    "qkv, odd": (gdpa.attention_qkvpacked, lambda: [rows(2, 3, 5, H).transpose(1, 2)], {"out_scale": 0.5}),
    "kv": (gdpa.attention_kvpacked, lambda: [rows(2, 5, H), rows(2, 7, 2, 2)], {"causal": True}),
    "qkv, varlen": (gdpa.attention_varlen_qkvpacked, lambda: [rows(12, 3, H)], {"cu_seqlens": CU}),
    "kv, varlen": (
        gdpa.attention_varlen_kvpacked,
        lambda: [rows(10, H), rows(12, 2, 2)],
        {"cu_seqlens_q": CU, "cu_seqlens_k": CU},
    ),
    "kv, shared": (
        gdpa.attention_varlen_kvpacked,
        lambda: [rows(5, H), rows(12, 2, H)],
        {"cu_seqlens_q": None, "cu_seqlens_k": CU},
    ),
}  # fmt: skip


@pytest.fixture
def ways(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Which way each call took."""
    seen: list[str] = []
    run, operator, packed = direct.run, gdpa.ops.attention, gdpa.ops.attention_packed
    monkeypatch.setattr(direct, "run", lambda *args: seen.append("direct") or run(*args))
    monkeypatch.setattr(gdpa.ops, "attention", lambda *args: seen.append("operator") or operator(*args))
    monkeypatch.setattr(gdpa.ops, "attention_packed", lambda *args: seen.append("operator") or packed(*args))
    normalized = gdpa.ops.normalized.normalized
    monkeypatch.setattr(gdpa.ops.normalized, "normalized", lambda *args: seen.append("operator") or normalized(*args))
    return seen


def qkv() -> list[Tensor]:
    return [rows(2, H, 5) for _ in range(3)]


# ---- the same results ------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("name", FORMS)
@pytest.mark.parametrize("with_params", [False, True], ids=["", "params"])
def test_results_are_the_operators(name: str, with_params: bool, ways: list[str], monkeypatch) -> None:
    function, make, kwargs = FORMS[name]
    tensors, kwargs = make(), dict(kwargs)
    if with_params:
        if "activation" in kwargs:
            pytest.skip("their functions take no params")
        kwargs |= {"activation": leaky}
    grad = None
    results = []
    for watched in (False, False, True):  # the first makes the plan, the second finds it
        monkeypatch.setattr(direct, "nobody_watches", lambda watched=watched: not watched)
        leaves = [t.detach().requires_grad_() for t in tensors]
        params = [p.requires_grad_() for p in slopes()] if with_params else []
        out = function(*leaves, **kwargs, params=params)
        grad = torch.randn_like(out) if grad is None else grad
        results.append((out, *torch.autograd.grad(out, leaves + params, grad)))
        with torch.no_grad():
            assert torch.equal(function(*leaves, **kwargs, params=params), out)
    way = "operator" if name == "varlen, heads first" else "direct"
    assert ways == [way] * 4 + ["operator"] * 2
    for got in results[:2]:
        for g, w in zip(got, results[2], strict=True):
            assert torch.equal(g, w)
            assert g.stride() == w.stride()
            assert g.shape == w.shape


def test_the_result_can_be_changed_in_place() -> None:
    for name in ("dense", "varlen", "qkv", "shared queries"):
        function, make, kwargs = FORMS[name]
        leaves = [t.requires_grad_() for t in make()]
        out = function(*leaves, **kwargs)
        out.mul_(2.0).sum().backward()
        assert leaves[0].grad is not None


@pytest.mark.parametrize("name", ["dense", "varlen", "qkv"])
def test_gradients_that_are_expanded_or_transposed(name: str) -> None:
    function, make, kwargs = FORMS[name]
    leaves = [t.requires_grad_() for t in make()]
    want = torch.autograd.grad(function(*leaves, **kwargs, backend="reference").sum(), leaves)
    for _ in range(2):
        for g, w in zip(torch.autograd.grad(function(*leaves, **kwargs).sum(), leaves), want, strict=True):
            torch.testing.assert_close(g, w)


# ---- who watches -----------------------------------------------------------------------------------------------------
def test_nothing_is_recorded_where_no_gradient_is_wanted(ways: list[str]) -> None:
    assert gdpa.attention(*qkv()).grad_fn is None
    with torch.no_grad():
        assert gdpa.attention(*(t.requires_grad_() for t in qkv())).grad_fn is None
    with torch.inference_mode():
        assert gdpa.attention(*qkv()).is_inference()
    assert ways == ["direct"] * 3


def test_flops_are_counted(ways: list[str]) -> None:
    q, k, v = (t.requires_grad_() for t in qkv())
    gdpa.attention(q, k, v)
    with FlopCounterMode(display=False) as counter:
        gdpa.attention(q, k, v).sum().backward()
    assert counter.get_total_flops() == 7 * 2 * 2 * H * 5 * 5 * D
    out = gdpa.attention(q, k, v)
    with FlopCounterMode(display=False) as backward:  # the forward was direct
        out.sum().backward()
    assert backward.get_total_flops() == 5 * 2 * 2 * H * 5 * 5 * D
    assert ways == ["direct", "operator", "direct"]


def test_a_profiler_sees_the_operator() -> None:
    with torch.profiler.profile() as profile:
        gdpa.attention(*qkv())
    assert "gdpa::attention" in {event.key for event in profile.key_averages()}


@pytest.mark.parametrize("mode", ["grad", "vmap", "compile", "default device"])
def test_modes_take_the_operators_way(mode: str, ways: list[str]) -> None:
    q, k, v = (t.float() for t in qkv())
    gdpa.attention(q, k, v)
    ways.clear()
    want = gdpa.attention(q, k, v)
    ways.clear()
    if mode == "grad":
        torch.func.grad(lambda q: gdpa.attention(q, k, v).sum())(q)
    elif mode == "vmap":
        torch.testing.assert_close(torch.vmap(lambda q: gdpa.attention(q, k, v))(q[None])[0], want)
    elif mode == "compile":
        torch.testing.assert_close(torch.compile(lambda q: gdpa.attention(q, k, v), backend="eager")(q), want)
    else:
        with torch.device("meta"):
            torch.testing.assert_close(gdpa.attention(q, k, v), want)
    assert "direct" not in ways


@pytest.mark.parametrize("name", ["dense", "varlen", "kv", "qkv"])
def test_autocast(name: str, ways: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    function, make, kwargs = FORMS[name]
    leaves = [t.float().requires_grad_() for t in make()]
    results = []
    for watched in (False, False, True):
        monkeypatch.setattr(direct, "nobody_watches", lambda watched=watched: not watched)
        with torch.autocast("cpu", torch.bfloat16):
            out = function(*leaves, **kwargs)
        assert out.dtype == torch.bfloat16
        results.append((out, *torch.autograd.grad(out.float().sum(), leaves)))
        assert function(*leaves, **kwargs).dtype == torch.float32  # outside, by another plan
    assert ways == ["direct"] * 4 + ["operator"] * 2
    for got in results[:2]:
        assert all(torch.equal(g, w) and g.dtype == w.dtype for g, w in zip(got, results[2], strict=True))


class Named(Tensor):
    """A subclass that sees every function."""


def test_unusual_tensors_take_the_operators_way(ways: list[str]) -> None:
    q, k, v = qkv()
    minus_q = torch._neg_view(q)  # numbers that are not what is in memory
    torch.testing.assert_close(gdpa.attention(minus_q, k, v), gdpa.attention(-q, k, v))
    assert ways == ["operator", "direct"]
    ways.clear()
    assert gdpa.attention(q[:, :, :0], k, v).shape == (2, H, 0, D)
    gdpa.attention(q.as_subclass(Named), k, v)
    assert gdpa.attention(q.to("meta"), k.to("meta"), v.to("meta")).is_meta
    assert ways == ["operator"] * 3


def test_one_packed_row_takes_the_operators_way(ways: list[str]) -> None:
    """Its gradients would be laid out otherwise than those of more rows with the same strides."""
    for n in (1, 2, 5):
        q, k, v = (t.detach().requires_grad_() for t in rows(n, 3, H).unbind(1))
        cu = torch.tensor([0, n])
        out = gdpa.attention_varlen(q, k, v, cu, cu)
        want = gdpa.attention_varlen(q, k, v, cu, cu, backend="reference")
        for g, w in zip(*(torch.autograd.grad(o.square().sum(), (q, k, v)) for o in (out, want)), strict=True):
            torch.testing.assert_close(g, w)
    assert ways == ["operator", "direct", "direct"]


def with_table(s: Tensor, t: Tensor, *, kv_idx: Tensor) -> Tensor:
    return s + t[kv_idx]


def test_plans_with_tables_masks_and_row_sums_are_kept_apart(ways: list[str]) -> None:
    """Beside calls without them that are the same otherwise; no mask, and no size of a table, is taken for another."""
    tensors = [t.requires_grad_() for t in qkv()]
    ids = torch.tensor([0, 0, 1, 1, 1])
    others: list[Any] = [{"mask": gdpa.Mask(lambda q_idx, kv_idx, n=n: q_idx != kv_idx + n)} for n in (0, 1)]
    others.append({"mask": gdpa.Mask(lambda q_idx, kv_idx, t: t[q_idx] == t[kv_idx], tables=(ids,))})
    others += [{"activation": with_table, "tables": (torch.linspace(0, 1, n).requires_grad_(),)} for n in (5, 7)]
    others += [{"activation": "softmax"}, {"activation": "exp", "normalize": "sum"}, {"normalize": "abs", "sink": 1.0}]
    for kwargs in (*others, *others):
        gdpa.attention(*tensors)
        leaves = [*tensors, *kwargs.get("tables", ())]
        got, want = (gdpa.attention(*tensors, **kwargs, backend=name) for name in (None, "reference"))
        torch.testing.assert_close(got, want)
        grads = (torch.autograd.grad(out.square().sum(), leaves) for out in (got, want))
        for g, w in zip(*grads, strict=True):
            torch.testing.assert_close(g, w)
    assert ways == ["direct"] * 4 * len(others)


@pytest.mark.parametrize("tables", [None, 3, torch.zeros(2), "", {}, set()], ids=str)
def test_what_is_no_table_is_refused_by_the_checks(tables: Any) -> None:
    gdpa.attention(*qkv())  # whose plan is not that of an empty something else
    with pytest.raises(TypeError, match="tables must be a tuple or list of tensors"):
        gdpa.attention(*qkv(), tables=tables)


def test_a_mask_is_held_by_plans_at_most(monkeypatch: pytest.MonkeyPatch) -> None:
    """And plans are few."""
    tensors, seen = qkv(), []
    from_name("gelu").plans.clear()
    monkeypatch.setattr(plans.remember, "__defaults__", (3,))
    for n in range(6):
        mask = gdpa.Mask(lambda q_idx, kv_idx, n=n: q_idx != kv_idx + n)
        gdpa.attention(*tensors, mask=mask)
        seen.append(weakref.ref(mask._held))
    mask_functions._recent.clear()
    del mask
    gc.collect()
    assert [found() is not None for found in seen] == [False] * 4 + [True] * 2  # each has two, one the operator's


def test_double_backward_is_refused() -> None:
    q, k, v = (t.requires_grad_() for t in qkv())
    (g,) = torch.autograd.grad(gdpa.attention(q, k, v, "silu").sum(), q, create_graph=True)
    with pytest.raises(RuntimeError, match="double backward is not available"):
        g.sum().backward()


@pytest.mark.parametrize("name", ["dense", "varlen", "dense keys", "kv", "qkv, varlen", "kv, varlen", "shared queries"])
def test_hooks_may_change_what_was_saved(name: str) -> None:
    """As torch.autograd.graph.save_on_cpu does: the same numbers with other strides."""
    function, make, kwargs = FORMS[name]
    leaves = [t.requires_grad_() for t in make()]
    want = torch.autograd.grad(function(*leaves, **kwargs).sum(), leaves)

    def apart(t: Tensor) -> Tensor:
        return t if t.dim() < 3 else torch.cat([t, t], -1)[..., :D]

    with torch.autograd.graph.saved_tensors_hooks(lambda t: t.clone(), apart):
        out = function(*leaves, **kwargs)
    for g, w in zip(torch.autograd.grad(out.sum(), leaves), want, strict=True):
        torch.testing.assert_close(g, w)


def test_watchers_of_the_backward_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every form has its gradients by the operator, too."""
    for function, make, kwargs in FORMS.values():
        leaves = [t.requires_grad_() for t in make()]
        want = torch.autograd.grad(function(*leaves, **kwargs).sum(), leaves)
        out = function(*leaves, **kwargs)
        with FlopCounterMode(display=False):
            for g, w in zip(torch.autograd.grad(out.sum(), leaves), want, strict=True):
                torch.testing.assert_close(g, w)


FOUND = ("_dispatch_modes", "_function_modes", "_transform", "_tracing", "_profiling", "_autocasting")
VARIABLES = dict(zip((*compat.NAMES, compat.AUTOCAST), FOUND, strict=True))


@pytest.mark.parametrize("name", [*compat.NAMES, compat.AUTOCAST, compat.FORWARD_MODE])
def test_without_a_name_calls_take_the_operators_way(
    name: str, ways: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whichever of torch's private names is gone: results and gradients are the same, and nothing calls it."""
    leaves = [t.requires_grad_() for t in qkv()]
    want = torch.autograd.grad(gdpa.attention(*leaves).sum(), leaves)
    monkeypatch.setattr(compat, "missing", (name,))
    if name in VARIABLES:
        monkeypatch.setattr(compat, VARIABLES[name], None)
    for g, w in zip(torch.autograd.grad(gdpa.attention(*leaves).sum(), leaves), want, strict=True):
        torch.testing.assert_close(g, w)
    assert ways == ["direct", "operator"]


def test_without_the_name_of_hooks_all_that_was_saved_is_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compat, "_hooks", None)
    test_hooks_may_change_what_was_saved("dense")


# ---- plans -----------------------------------------------------------------------------------------------------------
@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Plans that are made."""
    seen: list[Any] = []
    make = direct.make
    monkeypatch.setattr(direct, "make", lambda *args: seen.append(make(*args)) or seen[-1])
    from_name("gelu").plans.clear()
    return seen


def test_a_repeated_call_finds_its_plan(made: list[Any]) -> None:
    q, k, v = qkv()
    for _ in range(3):
        gdpa.attention(q, k, v)
        gdpa.attention(q.clone(), k, v, "gelu", causal=False)
    assert len(made) == 1


CHANGES: dict[str, Any] = {
    "length": lambda q, k, v: (q, k[:, :, 1:], v[:, :, 1:]),
    "strides": lambda q, k, v: (q.transpose(1, 2).contiguous().transpose(1, 2), k, v),
    "dtype": lambda q, k, v: (q.float(), k.float(), v.float()),
    "batch": lambda q, k, v: (q[:1], k, v),
}


@pytest.mark.parametrize("change", CHANGES)
def test_another_kind_of_call_is_another_plan(change: str, made: list[Any]) -> None:
    q, k, v = qkv()
    gdpa.attention(q, k, v)
    q, k, v = CHANGES[change](q, k, v)
    got = gdpa.attention(q, k, v)
    assert len(made) == 2
    torch.testing.assert_close(got, gdpa.attention(q, k, v, backend="reference"))


@pytest.mark.parametrize("kwargs", [{"causal": True}, {"window": (1, 1)}, {"scale": 0.1}, {"out_scale": 2.0}], ids=str)
def test_another_setting_is_another_plan(kwargs: dict[str, Any], made: list[Any]) -> None:
    q, k, v = qkv()
    gdpa.attention(q, k, v)
    got = gdpa.attention(q, k, v, **kwargs)
    torch.testing.assert_close(got, gdpa.attention(q, k, v, **kwargs, backend="reference"))
    assert len(made) >= 2


def test_precision_and_tuning_make_other_plans(made: list[Any]) -> None:
    q, k, v = qkv()
    gdpa.attention(q, k, v)
    with gdpa.precision("fast"):
        gdpa.attention(q, k, v)
    assert [plan.problem.precision for plan in made] == ["exact", "fast"]
    tuning.forget()
    gdpa.attention(q, k, v)
    assert len(made) == 3
    assert made[2].problem is not made[0].problem


@pytest.mark.parametrize(
    ("good", "bad"),
    [({"causal": True}, {"causal": 1}), ({"out_scale": 1.0}, {"out_scale": True}),
     ({"window": (1, 0)}, {"window": (True, 0)}), ({"scale": 1.0}, {"scale": torch.tensor(1.0)}),
     ({"window": (1, 0)}, {"window": "ab"}), ({"params": ()}, {"params": {}})],
    ids=str,
)  # fmt: skip
def test_what_is_refused_is_refused_after_an_equal_call_too(good: dict[str, Any], bad: dict[str, Any]) -> None:
    q, k, v = qkv()
    gdpa.attention(q, k, v, **good)
    with pytest.raises(TypeError, match=next(iter(bad))):
        gdpa.attention(q, k, v, **bad)


def test_zeros_of_both_signs_are_two_scales(made: list[Any]) -> None:
    for scale in (0.0, -0.0):
        gdpa.attention(*qkv(), scale=scale)
    assert [str(plan.problem.scale) for plan in made] == ["0.0", "-0.0"]


def test_packed_batches_of_any_number_of_rows_share_a_plan(made: list[Any]) -> None:
    for n in range(11, 21):
        q, k, v = (rows(n, H) for _ in range(3))
        cu = torch.tensor([0, 4, n])
        got = gdpa.attention_varlen(q, k, v, cu, cu)
        torch.testing.assert_close(got, gdpa.attention_varlen(q, k, v, cu, cu, backend="reference"))
    assert len([plan for plan in made if plan.direct]) == 1


def test_k_and_v_of_different_numbers_of_rows_are_refused() -> None:
    q, k, v = (rows(10, H) for _ in range(3))
    gdpa.attention_varlen(q, k, v, CU, CU)
    with pytest.raises(ValueError, match="k and v must agree"):
        gdpa.attention_varlen(q, k, rows(11, H), CU, CU)


def test_offsets_are_checked_at_every_call() -> None:
    q, k, v = (rows(10, H) for _ in range(3))
    gdpa.attention_varlen(q, k, v, CU, CU)
    with pytest.raises(ValueError, match="must not decrease"):
        gdpa.attention_varlen(q, k, v, CU, torch.tensor([0, 5, 3, 10]))


# ---- memory and threads ----------------------------------------------------------------------------------------------
def test_plans_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    table: dict[Any, Any] = {}
    for i in range(10):
        plans.remember(table, i, i, most=4)
    assert list(table) == [6, 7, 8, 9]
    monkeypatch.setattr(direct, "MOST_LENGTHS", 4)
    square = gdpa.activation(lambda s: s * s + 0.25)
    for n in range(11, 21):
        q, k, v = (rows(n, H) for _ in range(3))
        cu = torch.tensor([0, 4, n])
        gdpa.attention_varlen(q, k, v, cu, cu, square)
    (plan,) = (plan for plan in square.plans.values() if isinstance(plan, direct.DirectPlan))
    assert len(plan.problems) == 4


def test_a_function_goes_with_its_plans() -> None:
    act = gdpa.activation(lambda s: s * s * 0.123)
    gdpa.attention(*qkv(), act)
    gone = weakref.ref(act)
    gdpa.functions.activation._by_fingerprint.clear()
    del act
    gc.collect()
    assert gone() is None


def test_many_calls_keep_memory_flat() -> None:
    """Lengths, shapes and functions that change; 10,000 calls of it are in the script for a GPU."""
    generator = torch.Generator().manual_seed(0)

    def step(i: int) -> None:
        n = int(torch.randint(5, 40, (), generator=generator))
        q, k, v = (torch.randn(n, 2, 8).requires_grad_() for _ in range(3))
        cu = torch.tensor([0, n // 2, n])
        slope = (i % 3) / 8
        gdpa.attention_varlen(q, k, v, cu, cu, lambda s: torch.relu(s) + slope * s).sum().backward()
        gdpa.attention(*(t.transpose(0, 1)[None] for t in (q, k, v)), lambda s: s * s, causal=True)

    for i in range(150):
        step(i)
    gc.collect()
    tracemalloc.start()
    before = tracemalloc.take_snapshot()
    for i in range(150):
        step(i)
    gc.collect()
    after = tracemalloc.take_snapshot()
    tracemalloc.stop()
    grown = sum(line.size_diff for line in after.compare_to(before, "filename") if "gdpa" in line.traceback[0].filename)
    assert grown < 100_000


def in_two_threads(work: Callable[[], None]) -> None:
    with ThreadPoolExecutor(2) as pool:
        for done in [pool.submit(work) for _ in range(2)]:
            done.result()


def test_two_threads_at_once() -> None:
    square = gdpa.activation(lambda s: s * s - 0.5)
    inputs = [[torch.randn(1, 2, n, 8, dtype=torch.float64).requires_grad_() for _ in range(3)] for n in range(3, 9)]
    want = [gdpa.attention(*x, square, backend="reference") for x in inputs]
    want_grads = [torch.autograd.grad(out.sum(), x) for out, x in zip(want, inputs, strict=True)]
    square.plans.clear()

    def work() -> None:
        for _ in range(10):
            for x, w, g in zip(inputs, want, want_grads, strict=True):
                out = gdpa.attention(*x, square)
                torch.testing.assert_close(out, w)
                torch.testing.assert_close(torch.autograd.grad(out.sum(), x), g)

    in_two_threads(work)
