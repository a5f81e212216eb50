"""Direct calls with tables, masks and row sums: the operator's results by a shorter way, and its errors."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

import gdpa
from calling.test_direct import FORMS, H, in_two_threads, qkv, ways  # noqa: F401  ways is a fixture
from gdpa.backends import tuning
from gdpa.calling import direct
from gdpa.functions import mask as mask_functions
from gdpa.functions.activation import from_name


def near(s: Tensor, *, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
    return torch.sigmoid(s) * torch.exp(-0.1 * (q_idx - kv_idx).abs())


def biased(s: Tensor, table: Tensor, *, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
    return s + table[h, (q_idx - kv_idx).clamp(-6, 6) + 6]


def grouped(s: Tensor, slope: Tensor, ids: Tensor, bias: Tensor, *, kv_idx: Tensor) -> Tensor:
    return torch.sigmoid(s * slope) + bias[ids[kv_idx]]


def scores(s: Tensor, table: Tensor, *, kv_idx: Tensor) -> Tensor:
    return torch.exp(s + table[kv_idx % 7])


def floats(*shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.linspace(0.1, 0.9, int(torch.Size(shape).numel())).reshape(shape).to(dtype)


def learned(*shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return floats(*shape, dtype=dtype).requires_grad_()


def seen(ids: Tensor) -> gdpa.Mask:
    return gdpa.Mask(lambda kv_idx, t: t[kv_idx] < 2, tables=(ids,))


IDS = torch.tensor([0, 1, 2, 1, 0, 2, 1, 0, 0, 1, 2, 2])

# name: makes the arguments anew
MORE: dict[str, Callable[[], dict[str, Any]]] = {
    "softmax": lambda: {"activation": "softmax"},
    "softmax and a sink": lambda: {"activation": "softmax", "sink": learned(H)},
    "one sink for all heads": lambda: {"activation": "exp", "normalize": "sum", "sink": learned(dtype=torch.float32)},
    "sink as a number": lambda: {"activation": "relu", "normalize": "sum", "sink": 0.5},
    "absolute values": lambda: {"activation": "gelu", "normalize": "abs"},
    "some heads": lambda: {"activation": "relu", "normalize": ["sum", None, "abs", None]},
    "softmax in some heads": lambda: {"activation": ["softmax", "relu", "relu", "softmax"]},
    "sums": lambda: {"activation": "softmax", "return_weights_sum": True},
    "sums and a sink": lambda: {
        "activation": "softplus", "normalize": "sum", "sink": learned(H), "return_weights_sum": True
    },
    "positions, divided": lambda: {"activation": near, "normalize": "sum"},
    "table": lambda: {"activation": biased, "tables": (floats(H, 13),)},
    "learned table": lambda: {"activation": biased, "tables": [learned(H, 13)]},
    "learned table of 16 bits": lambda: {"activation": biased, "tables": [learned(H, 13, dtype=torch.bfloat16)]},
    "tables and params": lambda: {"activation": grouped, "params": (learned(H),), "tables": (IDS, learned(3))},
    "learned table, divided": lambda: {
        "activation": scores, "normalize": "sum", "tables": (learned(7),), "sink": learned(H)
    },
    "mask": lambda: {"mask": gdpa.masks.dilated(2)},
    "mask as a function": lambda: {"mask": lambda q_idx, kv_idx: q_idx >= kv_idx - 1, "causal": True},
    "mask with tables": lambda: {"mask": seen(IDS), "activation": "softmax"},
    "all of it": lambda: {
        "mask": seen(IDS), "activation": scores, "normalize": "sum",
        "tables": (learned(7),), "sink": learned(H), "return_weights_sum": True, "window": (3, 3),
    },
}  # fmt: skip
SHAPES = ("dense", "shared", "varlen", "used", "shared queries", "qkv", "kv, varlen")
CASES = [("dense", more) for more in MORE] + [
    (shape, more) for shape in SHAPES[1:] for more in ("softmax", "sums and a sink", "learned table", "all of it")
]


def leaves_of(kwargs: dict[str, Any]) -> list[Tensor]:
    given = (*kwargs.get("params", ()), *kwargs.get("tables", ()), kwargs.get("sink"))
    return [t for t in given if isinstance(t, Tensor) and t.requires_grad]


def both(name: str, tensors: list[Tensor], kwargs: dict[str, Any]) -> list[Tensor]:
    """The results, with and without a graph, and all gradients."""
    function, _, own = FORMS[name]
    leaves = [t.detach().requires_grad_() for t in tensors]
    found = function(*leaves, **{**own, **kwargs})
    outs = list(found) if isinstance(found, tuple) else [found]
    with torch.no_grad():
        again = function(*leaves, **{**own, **kwargs})
    for one, other in zip(outs, again if isinstance(again, tuple) else [again], strict=True):
        assert torch.equal(one, other)
    generator = torch.Generator().manual_seed(1)
    grads = [torch.randn(o.shape, generator=generator, dtype=o.dtype) for o in outs]
    return [*outs, *torch.autograd.grad(outs, [*leaves, *leaves_of(kwargs)], grads)]


def same(got: list[Tensor], want: list[Tensor]) -> None:
    for g, w in zip(got, want, strict=True):
        assert torch.equal(g, w)
        assert (g.shape, g.stride(), g.dtype) == (w.shape, w.stride(), w.dtype)


@pytest.mark.parametrize(("name", "more"), CASES, ids=lambda part: part)
def test_results_are_the_operators(name: str, more: str, ways: list[str], monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: F811
    tensors = FORMS[name][1]()
    results = []
    for watched in (False, False, True):  # the first makes the plan, the second finds it
        monkeypatch.setattr(direct, "nobody_watches", lambda watched=watched: not watched)
        results.append(both(name, tensors, MORE[more]()))
    assert ways[:4] == ["direct"] * 4
    assert "direct" not in ways[4:]
    for got in results[:2]:
        same(got, results[2])


@pytest.mark.parametrize("more", MORE)
def test_the_backward_alone_is_watched_or_hooked(more: str) -> None:
    """Then it takes the operator's way, and computes the same."""
    tensors = FORMS["dense"][1]()
    for name in ("dense", "varlen", "qkv"):
        function, make, own = FORMS[name]
        tensors, kwargs = [t.requires_grad_() for t in make()], {**own, **MORE[more]()}
        leaves = [*tensors, *leaves_of(kwargs)]

        def result() -> Tensor:
            found = function(*tensors, **kwargs)  # noqa: B023
            return found[0] if isinstance(found, tuple) else found

        want = torch.autograd.grad(result().sum(), leaves)
        out = result()
        with FlopCounterMode(display=False) as counter:
            same(list(torch.autograd.grad(out.sum(), leaves)), list(want))
        assert counter.get_total_flops() > 0
        with torch.autograd.graph.saved_tensors_hooks(
            lambda t: t.clone(), lambda t: t.repeat(2, *[1] * (t.dim() - 1))[: len(t)]
        ):
            out = result()
        for g, w in zip(torch.autograd.grad(out.sum(), leaves), want, strict=True):
            torch.testing.assert_close(g, w)


def test_sums_alone_have_gradients() -> None:
    leaves = [t.requires_grad_() for t in qkv()]
    for backend in (None, "reference"):
        _, sums = gdpa.attention(*leaves, "softmax", return_weights_sum=True, backend=backend)
        got = torch.autograd.grad(sums.sum(), leaves, allow_unused=True, materialize_grads=True)
        want = got if backend is None else want  # noqa: F821
        for g, w in zip(got, want, strict=True):
            torch.testing.assert_close(g, w)


def test_sums_of_unused_rows_are_zero() -> None:
    function, make, own = FORMS["used"]
    tensors = make()
    for _ in range(3):
        trash = torch.full((10, H), float("nan"))  # what memory held
        del trash
        _, sums = function(*tensors, **own, activation="exp", normalize="sum", return_weights_sum=True)
        want = function(
            *tensors, **own, activation="exp", normalize="sum", return_weights_sum=True, backend="reference"
        )[1]
        torch.testing.assert_close(sums, want)


def test_in_place_changes_of_a_result_that_is_saved_are_noticed() -> None:
    leaves = [t.requires_grad_() for t in qkv()]
    out = gdpa.attention(*leaves, "softmax")
    out.mul_(2.0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


TABLED: dict[str, Any] = {"activation": biased, "tables": (floats(H, 13),)}
SUMMED: dict[str, Any] = {"normalize": "sum", "return_weights_sum": True}
REFUSED: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {  # what is said: a call that is made before, what changes
    "contradicts": ({"activation": "softmax"}, {"normalize": "abs"}),
    "must not be negative": ({"activation": "softmax", "sink": 0.5}, {"sink": -0.5}),
    "there are none": ({"activation": "exp", "normalize": "sum", "sink": 0.5}, {"normalize": None}),
    "sink must have shape": ({"normalize": "sum", "sink": torch.ones(H)}, {"sink": torch.ones(2)}),
    "normalize must be None": ({"normalize": "sum"}, {"normalize": "mean"}),
    "needs normalize": (SUMMED, {"normalize": None}),
    "return_weights_sum must": (SUMMED, {"return_weights_sum": 1}),
    "mask must be": ({"mask": gdpa.masks.causal()}, {"mask": 3}),
    "one index per dimension": (TABLED, {"tables": (floats(13),)}),
    "must be a tensor": (TABLED, {"tables": (None,)}),
    "index": (TABLED, {"tables": (floats(1, 13),)}),
}


@pytest.mark.parametrize("error", REFUSED)
def test_errors_are_the_operators(error: str, monkeypatch: pytest.MonkeyPatch) -> None:
    tensors, said = qkv(), []
    good, changed = REFUSED[error]
    gdpa.attention(*tensors, **good)
    for watched in (False, False, True):
        monkeypatch.setattr(direct, "nobody_watches", lambda watched=watched: not watched)
        with pytest.raises(Exception, match=error) as raised:
            gdpa.attention(*tensors, **{**good, **changed})
        said.append((raised.type, str(raised.value)))
    assert said[0] == said[1] == said[2]


def test_a_table_that_begins_to_learn_is_another_plan() -> None:
    """And so is one that is not to learn while no gradients are recorded."""
    tensors, table = [t.requires_grad_() for t in qkv()], floats(H, 13)
    for learns in (False, True, False, True):
        table.requires_grad_(learns)
        with torch.no_grad():
            gdpa.attention(*tensors, biased, tables=(table,))
        out = gdpa.attention(*tensors, biased, tables=(table,))
        want = gdpa.attention(*tensors, biased, tables=(table,), backend="reference")
        leaves = [*tensors, *[table][: int(learns)]]
        for g, w in zip(*(torch.autograd.grad(o.sum(), leaves) for o in (out, want)), strict=True):
            torch.testing.assert_close(g, w)


def test_a_sink_alone_learns(ways: list[str]) -> None:  # noqa: F811
    sink, tensors = learned(H), qkv()
    for _ in range(2):
        (got,) = torch.autograd.grad(gdpa.attention(*tensors, "softmax", sink=sink).sum(), sink)
    (want,) = torch.autograd.grad(gdpa.attention(*tensors, "softmax", sink=sink, backend="reference").sum(), sink)
    torch.testing.assert_close(got, want)
    assert ways == ["direct"] * 2


def test_a_repeated_call_finds_its_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Any] = []
    make = direct.make
    monkeypatch.setattr(direct, "make", lambda *args: made.append(make(*args)) or made[-1])
    tensors = qkv()
    for name in ("exp", "silu"):
        from_name(name).plans.clear()
    for i in range(3):
        gdpa.attention(*tensors, "softmax", sink=floats(H) * i)  # other data of the same kind
        gdpa.attention(*tensors, lambda s, t, *, h, kv_idx: 2 * s * t[h, kv_idx], tables=(floats(H, 13 + i),))
        gdpa.attention(*tensors, "silu", mask=lambda q_idx, kv_idx, n=2: q_idx >= kv_idx - n)
        gdpa.attention(*tensors, "silu", mask=seen(IDS + i))
    assert len(made) == 4


@pytest.mark.parametrize("mode", ["grad", "compile", "autocast"])
def test_modes(mode: str, ways: list[str]) -> None:  # noqa: F811
    q, k, v = (t.float() for t in qkv())
    sink = torch.rand(H)

    def attend(q: Tensor) -> Any:
        return gdpa.attention(q, k, v, "softmax", sink=sink)

    want = attend(q)
    ways.clear()
    if mode == "grad":
        torch.func.grad(lambda q: attend(q).sum())(q)
        assert "direct" not in ways
    elif mode == "compile":
        torch.testing.assert_close(torch.compile(attend, backend="eager")(q), want)
        assert "direct" not in ways
    else:
        with torch.autocast("cpu", torch.bfloat16):
            assert attend(q).dtype == torch.bfloat16
        assert ways == ["direct"]


def test_softmax_has_no_plan_of_exp() -> None:
    """Though its function is exp."""
    tensors = qkv()
    from_name("exp").plans.clear()
    for _ in range(2):
        a, b = gdpa.attention(*tensors, "softmax"), gdpa.attention(*tensors, "exp")
        torch.testing.assert_close(a, gdpa.attention(*tensors, "softmax", backend="reference"))
        torch.testing.assert_close(b, gdpa.attention(*tensors, "exp", backend="reference"))


# ---- plans -----------------------------------------------------------------------------------------------------------
def test_precision_and_tuning_make_other_plans(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Any] = []
    make = direct.make
    monkeypatch.setattr(direct, "make", lambda *args: made.append(make(*args)) or made[-1])
    tensors = qkv()
    for more in ("softmax and a sink", "learned table", "mask"):
        made.clear()
        kwargs = MORE[more]()

        def call() -> None:
            gdpa.attention(*tensors, **kwargs)  # noqa: B023

        call()
        before = len(made)
        with gdpa.precision("fast"):
            call()
        tuning.forget()
        call()
        call()
        assert len(made) == before + 2
        assert [plan.problem.precision for plan in made[before:]] == ["fast", "exact"]


def test_ways_for_gradients_of_many_strides_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(direct, "MOST_STRIDES", 2)
    cube = gdpa.activation(lambda s: s**3 - 0.25)
    leaves = [t.requires_grad_() for t in qkv()]
    for n in range(4):
        out = gdpa.attention(*leaves, cube)
        out.backward(torch.ones(*out.shape[:3], out.shape[3] + n, dtype=out.dtype)[..., : out.shape[3]])
    (plan,) = (plan for plan in cube.plans.values() if isinstance(plan, direct.DirectPlan))
    (sized,) = plan.passes.values()
    assert len(sized.backward) == 2


def test_two_threads_at_once() -> None:
    cases = [(name, more) for name in ("dense", "varlen") for more in ("softmax and a sink", "learned table, divided")]
    inputs = [(name, FORMS[name][1](), MORE[more]()) for name, more in cases]
    want = [both(*case) for case in inputs]
    for name in ("exp", "gelu"):
        from_name(name).plans.clear()

    def work() -> None:
        for _ in range(6):
            for case, wanted in zip(inputs, want, strict=True):
                same(both(*case), wanted)

    in_two_threads(work)


def test_a_function_and_its_mask_go_with_their_plans() -> None:
    """Though softmax's plans name exp and run its exponent."""
    act = gdpa.activation(lambda s: torch.exp(s * 0.4375))
    mask = gdpa.Mask(lambda q_idx, kv_idx: q_idx * 3 >= kv_idx)
    gdpa.attention(*qkv(), act, normalize="sum", mask=mask)
    gone = weakref.ref(act), weakref.ref(mask._held)
    gdpa.functions.activation._by_fingerprint.clear()
    mask_functions._recent.clear()
    del act, mask
    gc.collect()
    assert [found() for found in gone] == [None, None]


def test_the_backward_finds_its_function_after_the_plans_are_gone() -> None:
    """Where it takes the operator's way, which knows it by its key."""
    leaves = [t.requires_grad_() for t in qkv()]
    act = gdpa.activation(lambda s: torch.exp(s * 0.40625))
    out = gdpa.attention(*leaves, act, normalize="sum", mask=gdpa.Mask(lambda q_idx, kv_idx: q_idx * 5 >= kv_idx))
    gdpa.functions.activation._by_fingerprint.clear()
    mask_functions._recent.clear()
    act.plans.clear()
    del act
    gc.collect()
    with FlopCounterMode(display=False):
        out.sum().backward()
    assert leaves[0].grad is not None
