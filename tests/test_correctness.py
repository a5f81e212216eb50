"""Every backend against float64: functions, shapes, bands, layouts, precisions (support.py: when a result passes)."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace

import pytest
import torch
from torch import Tensor

import gdpa
from functions.library import BY_NAME, FUNCTIONS, Function
from gdpa import backends
from gdpa.testing.cases import Case, Inputs, call, dense, make_inputs, offsets
from support import (
    CASES,
    FULL,
    GPU,
    INTERPRET,
    TINY,
    TINY_CASES,
    TINY_PACKED,
    TINY_SHARED,
    TINY_SHARED_PACKED,
    TINY_WINDOW,
    Target,
    bf16,
    check,
    f16,
    f32,
    f64,
    gradients,
    in_turn,
    on_targets,
    operands,
    output_gradient,
    poisoned,
    problem_of,
    run_gdpa,
    skipping_refusals,
    targets,
)

PRELU, GELU = BY_NAME["prelu"], BY_NAME["gelu"]
QUICK = INTERPRET and not FULL


def check_function(case: Case, target: Target, f: Function, **kwargs) -> None:
    if target.backend == "triton" and INTERPRET and not f.interpreted:
        pytest.skip("Triton's interpreter casts to bfloat16 wrongly")
    params = f.make_params(case.heads, dtype=f64 if target.dtype == f64 else f32)
    check(case, target, f.fn, f.activation, params, f.spread, f.rounding, **kwargs)


# ---- every function, every case --------------------------------------------------------------------------------------
# Under the interpreter some: there the kernel's own code is the same for all, and functions/test_values.py has the code
# of each of them.
FUNCTIONS_ON_CASES = [
    (f, case)
    for i, f in enumerate(FUNCTIONS[:: 9 if QUICK else 1])
    for case in ((TINY, TINY_PACKED) if GPU else in_turn((TINY, TINY_PACKED), i))
]


@pytest.mark.parametrize("target", targets(f32, backends=("reference", "cpu", "triton")))
@pytest.mark.parametrize(("f", "case"), FUNCTIONS_ON_CASES, ids=lambda x: x.name)
def test_every_function(f, case, target):
    check_function(case, target, f)


@pytest.mark.parametrize("target", targets(f16, bf16, backends=("cpu", "triton", "hopper"), interpret=(f32,)))
@pytest.mark.parametrize("f", FUNCTIONS, ids=repr)
def test_every_function_in_16_bits(f, target):
    check_function(TINY, target, f)


# Each function meets one case and each case nine functions (one under the interpreter), in all precisions.
MEETINGS = list(zip(FUNCTIONS, itertools.cycle(CASES.values()), strict=False))
if QUICK:
    del MEETINGS[len(CASES) :]


@pytest.mark.parametrize("backend", targets(f32))
@pytest.mark.parametrize(("f", "case"), MEETINGS, ids=lambda x: getattr(x, "name", str(x)))
def test_every_case(f, case, backend):
    dtypes = (f32, f16) if backend.backend == "triton" and INTERPRET else (f32, f16, bf16)
    dtypes = (f16, bf16) if backend.backend == "hopper" else dtypes
    dtype = dtypes[sum(divmod(MEETINGS.index((f, case)), len(CASES))) % len(dtypes)]
    check_function(case, Target(backend.backend, dtype), f)


@pytest.mark.parametrize("target", targets(f16, bf16, f32))
@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
@pytest.mark.gpu
def test_every_case_in_every_precision(case, target):
    for f in (GELU, BY_NAME["scaled_sigmoid"], BY_NAME["squared_softplus"]):
        check_function(case, target, f)


@pytest.mark.parametrize("target", targets(f64, backends=("reference", "cpu")))
@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_float64(case, target):
    check_function(case, target, GELU)
    check_function(case, target, PRELU)


@pytest.mark.parametrize("target", targets(f32))
@pytest.mark.parametrize("seed", range(6 if INTERPRET else 24))
def test_random_shapes(seed, target):
    """Shapes nobody thought of."""
    rng = random.Random(seed)
    f = rng.choice([f for f in FUNCTIONS if f.smooth])
    check_function(random_case(rng), target, f, seed=seed, out_scale=rng.choice([1.0, 0.3, -2.0]))


def random_case(rng: random.Random) -> Case:
    n, heads_k, group = rng.randint(1, 4), rng.randint(1, 2), rng.randint(1, 3)
    packed_q, packed_k = rng.random() < 0.6, rng.random() < 0.6
    shared = not packed_q and (packed_k or rng.random() < 0.4)
    longest = 20 if INTERPRET else 70

    def lengths(packed: bool) -> tuple[int, ...]:
        some = tuple(rng.choice([0, 1, rng.randint(1, longest)]) for _ in range(n))
        return some if packed else (rng.randint(1, longest),) * n

    def side() -> int | None:
        return rng.choice([None, 0, rng.randint(0, longest)])

    return Case(
        "random", lengths(packed_q), lengths(packed_k), heads=heads_k * group, heads_k=heads_k,
        d=8 * rng.randint(1, 5), dv=8 * rng.randint(1, 5), packed_q=packed_q, packed_k=packed_k, shared=shared,
        causal=rng.random() < 0.3, window=rng.choice([None, (side(), side())]),
    )  # fmt: skip


# ---- sizes at the edge of tiles --------------------------------------------------------------------------------------
EDGES = (1, 15, 16, 17) if INTERPRET else (1, 16, 31, 32, 33, 63, 64, 65, 127, 128, 129)


@pytest.mark.parametrize("target", targets(f32, f16, interpret=(f32,)))
@pytest.mark.parametrize("len_q", EDGES)
def test_tile_edges(len_q, target):
    for len_k in EDGES[:: 1 if INTERPRET or target.device == "cuda" else 3]:
        check(dense("edge", 1, len_q, len_k, heads=1, d=8, causal=len_q % 2 == 1), target, GELU.fn, "gelu")


HEAD_DIMS = [(8, 24), (40, 8), (256, 16), (16, 256), (200, 72), (64, 128), (128, 64), (256, 256)]


@pytest.mark.parametrize("target", targets(f32, f16, interpret=(f16,)))
@pytest.mark.parametrize("dims", HEAD_DIMS[: 4 if INTERPRET else None], ids=str)
def test_head_dims(dims, target):
    d, dv = dims
    check(dense("dims", 1, 17, 20, heads=2, heads_k=1, d=d, dv=dv, causal=True), target, GELU.fn, "gelu")


# Under the interpreter every second: on both sides, on either, and numbers that would overflow.
WINDOWS = [(0, 0), (0, None), (None, 0), (None, 3), (3, None), (100, 100), (2**31 - 1, 2**31 - 1), (5, 2)]


@pytest.mark.parametrize("target", targets(f32))
@pytest.mark.parametrize("window", WINDOWS[::2] if QUICK else WINDOWS, ids=str)
def test_windows(window, target):
    f = BY_NAME["sigmoid"]  # f(0) is not 0: a pair that is masked too early or too late shows
    for lengths in ((18, 18), (5, 18), (18, 5)):
        check_function(dense("window", 1, *lengths, heads=1, d=8, window=window), target, f)
    check_function(dense("both", 1, 20, 33, heads=1, d=8, window=window, causal=True), target, f)


def nan_at_zero(s: Tensor) -> Tensor:
    """A sigmoid, but NaN where tiles are padded with zeros, and so is its derivative."""
    return torch.sigmoid(s) + (s - s) / s


@pytest.mark.parametrize("target", targets(f32))
@pytest.mark.parametrize("case", [TINY, TINY_PACKED, TINY_WINDOW, TINY_SHARED], ids=lambda case: case.name)
def test_functions_undefined_at_zero(case, target):
    check(case, target, nan_at_zero)
    check(case, target, lambda s, a: torch.tanh(a * s) + a * (s - s) / s, params=(torch.tensor(0.5),))


LONG = [
    dense("long", 1, 600, 1100, heads=2, heads_k=1, d=8),
    dense("long-window", 2, 700, 600, heads=1, d=8, window=(90, 300)),
    Case("long-packed", (600, 3, 0, 900), (700, 1030, 5, 2), heads=2, d=8, packed_q=True, packed_k=True, causal=True),
    Case("long-shared", (520,) * 3, (0, 530, 40), heads=1, d=8, packed_k=True, shared=True),
    Case("many", tuple(range(1, 61)), tuple(range(60, 0, -1)), heads=2, d=8, packed_q=True, packed_k=True),
]


@pytest.mark.skipif(INTERPRET, reason="too slow under the interpreter")
@pytest.mark.parametrize(("case", "target"), on_targets(LONG, bf16, f32))
def test_sequences_of_many_tiles(case, target):
    """More than one tile on every backend (the CPU's hold 512 x 512 scores), and many short sequences."""
    check_function(case, target, BY_NAME["gelu_with_temperature"])


# ---- numbers and params ----------------------------------------------------------------------------------------------
@pytest.mark.parametrize("target", targets(f32, f16, interpret=(f16,)))
@pytest.mark.parametrize("scales", [(0.1, 1.0), (None, 0.01), (-0.3, -2.5), (0.0, 1.0), (0.4, 0.0)], ids=str)
def test_scales(scales, target):
    scale, out_scale = scales
    f = BY_NAME["gelu_tanh"]  # a constant factor of f, 0.5, is moved into out_scale
    check_function(TINY, target, f, scale=scale, out_scale=out_scale)


@pytest.mark.parametrize("target", targets(f32))
# Kernels see what is left of these shapes: a number per head, or one for all.
@pytest.mark.parametrize("shapes", ["mixed", "half", *([] if QUICK else ["scalar", "per head", "shared"])])
def test_shapes_of_params(shapes, target):
    fn = lambda s, a, b: torch.tanh(a * s) + b
    scalar, per_head = torch.tensor(0.7), torch.tensor([0.3, -0.8, 1.1, 0.5])
    params = {
        "scalar": (scalar, scalar + 1),
        "per head": (per_head, per_head.flip(0)),
        "mixed": (per_head, scalar),
        "shared": (per_head, per_head),
        "half": (per_head.half().float(), scalar.half().float()),
    }[shapes]
    case = dense("params", 2, 9, 18, heads=4, heads_k=2, d=8, causal=True)
    check(case, target, fn, params=params)


@pytest.mark.parametrize("target", targets(f32))
def test_params_keep_their_dtype(target):
    """16-bit params are used in float32; their gradient comes back in their own dtype."""
    x, do = make_inputs(TINY, f32), output_gradient(TINY)
    halves = torch.tensor([0.25, 0.75], dtype=f16)
    fn = lambda s, a: torch.tanh(a * s)
    wide = run_gdpa(TINY, x, target, fn, (halves.float(),), do)
    narrow = run_gdpa(TINY, x, target, fn, (halves,), do)
    assert narrow["dparam0"].dtype == f16
    assert torch.equal(narrow["dparam0"], wide["dparam0"].half())
    assert torch.equal(narrow["out"], wide["out"])


# ---- functions per head ----------------------------------------------------------------------------------------------
LISTS = {
    "all different": ["gelu", "relu", "sigmoid", "tanh"],
    "alternating": ["gelu", "sigmoid", "gelu", "sigmoid"],
    "runs": ["sigmoid", "sigmoid", "gelu", "gelu"],
    "one apart": ["softplus", "gelu", "gelu", "gelu"],
    "all the same": ["mish"] * 4,
}


@pytest.mark.parametrize("target", targets(f32, f16, interpret=(f32,)))
@pytest.mark.parametrize(
    ("names", "heads_k"),
    [(names, n) for i, names in enumerate(LISTS) for n in (in_turn((2, 1, 4), i) if INTERPRET else (4, 2, 1))],
)
def test_functions_per_head(names, heads_k, target):
    """With GQA, functions of one group share a key head, and its gradients add up."""
    names = LISTS[names]
    case = dense("per-head", 1, 9, 17, heads=4, heads_k=heads_k, d=8, causal=heads_k == 2)
    check(case, target, [BY_NAME[name].fn for name in names], list(names))


@pytest.mark.parametrize("target", targets(f32))
def test_functions_per_head_with_params(target):
    fns = [lambda s, a: torch.tanh(a * s), PRELU.fn, lambda s, a: torch.sigmoid(s) - a, PRELU.fn]
    case = replace(TINY_PACKED, heads=4, heads_k=2)
    check(case, target, fns, params=(torch.tensor([0.3, 0.1, -0.2, 0.4]),))


# ---- layouts ---------------------------------------------------------------------------------------------------------
def fused_qkv(dtype: torch.dtype, device: str) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(base, q, k, v): slices of one (B, L, 3, H, D) projection."""
    base = torch.randn(2, 18, 3, 2, 16, generator=torch.Generator().manual_seed(0)).to(device, dtype).requires_grad_()
    return base, *(base[:, :, i].transpose(1, 2) for i in range(3))


def expanded_v(dtype: torch.dtype, device: str) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """v without a batch of its own, k the same for all heads: strides of 0."""
    base = torch.randn(2, 2, 18, 16, generator=torch.Generator().manual_seed(1)).to(device, dtype).requires_grad_()
    return base, base, base[:, :1].expand(-1, 2, -1, -1), base[:1].expand(2, -1, -1, -1)


def padded_rows(dtype: torch.dtype, device: str) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Every other row, of rows that are longer than D."""
    base = torch.randn(2, 2, 36, 40, generator=torch.Generator().manual_seed(2)).to(device, dtype).requires_grad_()
    return base, base[:, :, ::2, :16], base[:, :, 1::2, 16:32], base[:, :, 18:, 8:24]


@pytest.mark.parametrize("target", targets(f32, f16, interpret=(f16,)))
@pytest.mark.parametrize("layout", [fused_qkv, expanded_v, padded_rows], ids=lambda f: f.__name__)
def test_strided_inputs(layout, target):
    """The bits do not depend on the strides."""
    base, q, k, v = layout(target.dtype, target.device)
    do = torch.randn(2, 2, 18, 16, generator=torch.Generator().manual_seed(3)).to(target.device, target.dtype)

    def run(*qkv: Tensor) -> list[Tensor]:
        torch.use_deterministic_algorithms(True)
        out = gdpa.attention(*qkv, "gelu", causal=True, backend=target.backend)
        return [out, *torch.autograd.grad(out, base, do, retain_graph=True)]

    with skipping_refusals(target):
        strided = run(q, k, v)
    plain = run(q.contiguous(), k.contiguous(), v.contiguous())
    for a, b in zip(strided, plain, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-6 * float(b.detach().abs().max()))


@pytest.mark.parametrize("target", targets(f32))
def test_strided_output_gradient(target):
    """do may be a view, or what a sum() leaves behind (strides of 0)."""
    x = make_inputs(TINY, f32)
    rng = torch.Generator().manual_seed(0)
    wide = torch.randn(1, 10, 2, 32, generator=rng)
    for do in (wide[..., 8:24].transpose(1, 2), torch.ones(()).expand(1, 2, 10, 16)):
        got, expected = (run_gdpa(TINY, x, target, "gelu", (), d) for d in (do, do.contiguous()))
        for name in got:
            torch.testing.assert_close(got[name], expected[name])


@pytest.mark.parametrize("target", targets(f32))
def test_packed_views_of_one_projection(target):
    """(T, 3, H, D) taken apart, as attention_varlen gets it."""
    case = replace(TINY_PACKED, len_k=TINY_PACKED.len_q)
    rng = torch.Generator().manual_seed(0)
    base = torch.randn(sum(case.len_q), 3, 2, 8, generator=rng).to(target.device, target.dtype)
    cu = offsets(case.len_q, target.device)
    views = Inputs(*(base[:, i].detach().requires_grad_() for i in range(3)), cu, cu)
    copies = Inputs(*(t.detach().contiguous().requires_grad_() for t in views.leaves), cu, cu)
    do = output_gradient(case).to(target.device, target.dtype)
    got, expected = (gradients(call(case, x, "silu", backend=target.backend), do, *x.leaves) for x in (views, copies))
    for name in got:
        torch.testing.assert_close(got[name], expected[name])


@pytest.mark.parametrize("target", targets(f32, f16, interpret=(f32,)))
@pytest.mark.parametrize("case", [*TINY_CASES, *([] if INTERPRET else CASES.values())], ids=lambda case: case.name)
def test_outputs_are_written_in_full(case, target):
    """Backends write every element of tensors they are given, in any layout, whatever was in them before."""
    f = BY_NAME["scaled_sigmoid"]
    params = [p.detach().to(target.device) for p in f.make_params(case.heads)]
    data = make_inputs(case, target.dtype, target.device)
    x = operands(case, data, params)
    problem = problem_of(case, x, f.fn, out_scale=0.7)
    backend = backends.get(target.backend)
    assert backend.supports(problem) is None
    out_shape = (problem.out_batch, case.heads, problem.rows_q, problem.head_dim_v)
    results = []
    for order in ((0, 1, 2, 3), (0, 2, 1, 3)):  # (B, H, L, D) and (B, L, H, D) in memory

        def poison(*shape, order=order):
            back = sorted(range(4), key=order.__getitem__)
            return poisoned(*(shape[i] for i in order), like=x.q).permute(back)

        out, dq, dk, dv = poison(*out_shape), poison(*x.q.shape), poison(*x.k.shape), poison(*x.v.shape)
        dparams = poisoned(*x.params.shape, like=x.params)
        backend.forward(problem, x, out)
        do = torch.randn(out_shape, generator=torch.Generator().manual_seed(4)).to(out)
        backend.backward(problem, x, do, dq, dk, dv, dparams)
        results.append([out, dq, dk, dv, dparams])
        assert all(t.isfinite().all() for t in results[-1])
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-2 if target.dtype == f16 else 1e-4, atol=1e-3 * float(b.abs().max()))


@pytest.mark.parametrize("target", targets(f32))
@pytest.mark.parametrize(
    "case", [TINY_WINDOW, TINY_SHARED_PACKED, *([] if QUICK else [TINY_PACKED])], ids=lambda case: case.name
)
def test_int64_offsets_and_length_hints(case, target):
    """Neither the type of the offsets nor hints about lengths change a result."""
    x, do = make_inputs(case, f32), output_gradient(case)
    torch.use_deterministic_algorithms(True)
    expected = run_gdpa(case, x, target, "silu", (), do)
    long = Inputs(*x.leaves, *(None if cu is None else cu.long() for cu in (x.cu_q, x.cu_k)))
    hints = {"max_seqlen_q": max(case.len_q), "max_seqlen_k": max(case.len_k)}
    loose = {"max_seqlen_q": 1000, "max_seqlen_k": 1000}
    for other, kwargs in ((long, {}), (x, hints), (x, loose)):
        got = run_gdpa(case, other, target, "silu", (), do, **kwargs)
        for key in got:
            torch.testing.assert_close(got[key], expected[key], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("target", targets(f32, f16, interpret=(f16,)))
def test_short_keys_with_a_hint(target):
    """All keys in one tile: dq is written without an accumulator."""
    case = Case("short", (5, 0, 3, 17), (16, 3, 0, 7), heads=2, d=8, packed_q=True, packed_k=True, causal=True)
    check(case, target, GELU.fn, "gelu")
    x, do = make_inputs(case, target.dtype), output_gradient(case)
    plain = run_gdpa(case, x, target, "gelu", (), do)
    hinted = run_gdpa(case, x, target, "gelu", (), do, max_seqlen_k=16)
    for key in plain:
        torch.testing.assert_close(hinted[key], plain[key], rtol=1e-2, atol=1e-3)


# ---- nothing to do ---------------------------------------------------------------------------------------------------
EMPTY = {
    "no batch": dense("b", 0, 0, 0),
    "no queries": dense("q", 2, 0, 7, heads=2, d=8),
    "no keys": dense("k", 2, 7, 0, heads=2, d=8),
    "no rows": dense("r", 2, 0, 0, heads=2, d=8),
    "packed, all empty": Case("e", (0, 0), (0, 0), heads=2, d=8, packed_q=True, packed_k=True),
    "packed, no keys": Case("e", (3, 5), (0, 0), heads=2, d=8, packed_q=True, packed_k=True, causal=True),
    "packed, no queries": Case("e", (0, 0), (3, 5), heads=2, d=8, packed_q=True, packed_k=True),
    "packed, no sequences": Case("e", (), (), heads=2, d=8, packed_q=True, packed_k=True),
    "shared, no keys": Case("e", (3, 3), (0, 0), heads=2, d=8, packed_k=True, shared=True),
    "no visible key": dense("w", 1, 20, 3, heads=2, d=8, causal=True),
}


@pytest.mark.parametrize("target", targets(f32))
@pytest.mark.parametrize("case", EMPTY.values(), ids=EMPTY.keys())
def test_empty(case, target):
    """A query without keys gives exactly zero, and so do its gradients: here with f(0) = 0.5."""
    if case.name == "b":
        q = torch.zeros(0, 2, 5, 8, device=target.device, dtype=target.dtype, requires_grad=True)
        x = Inputs(q, q.detach().clone().requires_grad_(), q.detach().clone().requires_grad_(), None, None)
        case = dense("b", 0, 5, 5, heads=2, d=8)
    else:
        x = make_inputs(case, target.dtype, target.device)
    fn = lambda s, a: torch.sigmoid(a * s)
    a = torch.tensor(0.5, device=target.device, requires_grad=True)
    out = call(case, x, fn, params=(a,), backend=target.backend)
    results = gradients(out, torch.ones_like(out), *x.leaves, (a,))
    for name, t in results.items():
        assert t.isfinite().all(), name
        assert case.pairs or not t.any(), name
    if case.name == "w":
        assert not results["out"][:, :, :17].any()
        assert not results["dq"][:, :, :17].any()
        assert results["out"][:, :, 17:].any()


# ---- other promises --------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("target", targets(f32, f16, bf16, backends=("triton", "hopper"), interpret=(f32,)))
@pytest.mark.parametrize("case", TINY_CASES[:: 2 if QUICK else 1], ids=lambda case: case.name)
def test_deterministic_mode(case, target):
    """The kernels with a fixed order of additions are as right as the others, and repeat themselves."""
    torch.use_deterministic_algorithms(True)
    check_function(case, target, BY_NAME["prelu"])
    x, do = make_inputs(case, target.dtype), output_gradient(case)
    first, second = (run_gdpa(case, x, target, "gelu", (), do) for _ in range(2))
    assert all(torch.equal(first[name], second[name]) for name in first)


SMOOTH = [f for f in FUNCTIONS if f.smooth and f.name not in ("double_precision", "only_the_param")]


@pytest.mark.parametrize("f", SMOOTH[:: 3 if FULL else 20], ids=repr)
def test_reference_gradcheck(f):
    """The reference can be differentiated twice, and both derivatives agree with finite differences."""
    for case in (
        dense("dense", 1, 3, 4, heads=2, heads_k=1, d=2, causal=True),
        Case("packed", (2, 0, 1), (1, 2, 3), heads=2, d=2, dv=1, packed_q=True, packed_k=True),
    ):
        x = make_inputs(case, f64, spread=1.0)
        params = f.make_params(case.heads, dtype=f64)

        def run(q, k, v, *params, case=case, x=x):
            data = Inputs(q, k, v, x.cu_q, x.cu_k)
            return call(case, data, f.activation, params=params, backend="reference")

        assert torch.autograd.gradcheck(run, (*x.leaves, *params))
        assert torch.autograd.gradgradcheck(run, (*x.leaves, *params))


@pytest.mark.parametrize("target", targets(f32))
def test_the_default_backend_is_one_of_these(target):
    x = make_inputs(TINY, target.dtype, target.device)
    got = call(TINY, x, "gelu")
    expected = call(TINY, x, "gelu", backend=target.backend)
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("target", targets(f32))
def test_only_the_gradients_that_are_asked_for(target):
    x = make_inputs(TINY, target.dtype, target.device)
    fn, a = (lambda s, a: torch.tanh(a * s)), torch.tensor(0.5, device=target.device, requires_grad=True)
    do = output_gradient(TINY).to(target.device, target.dtype)
    everything = gradients(call(TINY, x, fn, params=(a,), backend=target.backend), do, *x.leaves, (a,))
    names = {"dq": x.q, "dk": x.k, "dv": x.v, "dparam0": a}
    for name, wanted in names.items():
        for t in names.values():
            t.requires_grad_(t is wanted)
        (grad,) = torch.autograd.grad(call(TINY, x, fn, params=(a,), backend=target.backend), [wanted], do)
        torch.testing.assert_close(grad.cpu(), everything[name], rtol=1e-5, atol=1e-5)
