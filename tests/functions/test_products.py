"""What the backward computes of scores where there are params: the same numbers with fewer instructions."""

from __future__ import annotations

import re

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from functions.evaluation import by_autograd, compiled, grid
from functions.library import FUNCTIONS
from functions.test_ptx import instructions
from gdpa.functions.accuracy.hardware import emulate
from gdpa.functions.accuracy.precision import cases_of, choose_level, keeps_rules
from gdpa.functions.activation import Activation, from_function
from gdpa.functions.emission.ptx import assemble_products
from gdpa.functions.emit import emit, jit_functions
from gdpa.functions.graph import Ref
from gdpa.functions.passes.expand import expand
from gdpa.functions.passes.products import Products, split_products
from gdpa.functions.passes.regroup import regroup
from support import INTERPRET, bf16, f16, in_turn

SCALE = 128**-0.5
ONE_PARAM = {
    "temperature": lambda s, a: F.silu(a * s),
    "gain": lambda s, a: a * F.silu(s),
    "gain of gelu": lambda s, a: a * F.gelu(s, approximate="tanh"),
    "swish": lambda s, a: s * torch.sigmoid(a * s),
    "slope": lambda s, a: torch.where(s > 0, s, a * s),
    "shift": lambda s, a: torch.sigmoid(s - a),
    "alone": lambda s, a: a.expand_as(s),
    "unused": lambda s, a: F.silu(s),
    "product": lambda s, a: a * s,
    "both": lambda s, a: a * torch.tanh(a * s),
}


def split(act: Activation, level: str, scale: float = 1.0, factor: float = 1.0, prescaled: bool = False) -> Products:
    return split_products(regroup(expand(act.joint, level)), scale, factor, prescaled)


def evaluated(products: Products, s: Tensor, dp: Tensor, params: list[Tensor], more: tuple = (), run=None) -> Tensor:
    """p, ds, and the terms with their gains."""
    run = run or (lambda graph, *inputs: graph.evaluate(*inputs))
    p, ds, *numbers = run(products.code, s, *params, dp, *more)
    gains = products.gains.evaluate(s, *params)
    factors = {"s": s, "dp": dp, "": 1.0}
    terms = [n * factors[times] * gain for n, times, gain in zip(numbers, products.times, gains, strict=True)]
    return torch.stack([p, ds, *terms])


def check(fn, act: Activation, s: Tensor, values: tuple[float, ...]) -> None:
    exact = by_autograd(fn, s, values)
    dp = torch.randn(s.shape, dtype=s.dtype, generator=torch.Generator().manual_seed(3))
    params = [torch.tensor(v).to(s).expand_as(s) for v in values]
    finite = exact.isfinite().all(0)
    for scale, factor, prescaled in ((1.0, 1.0, False), (SCALE, 0.25, False), (SCALE, 1.0, True)):
        more = (torch.full_like(s, 3.0),) if prescaled else ()
        got = evaluated(split(act, "accurate", scale, factor, prescaled), s / scale, dp, params, more)
        want = torch.cat([exact[:1], exact[1:] * dp]) / factor
        want[1] *= scale * (3.0 if prescaled else 1.0)
        torch.testing.assert_close(got[:, finite], want[:, finite], rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("f", [f for f in FUNCTIONS if f.params], ids=repr)
def test_they_are_what_autograd_computes(f):
    check(f.fn, compiled(f), grid(f, 401).double(), f.scalar_params())


@pytest.mark.parametrize("name", ONE_PARAM)
@pytest.mark.parametrize("value", [0.7, -1.3, 0.0])
def test_they_are_what_autograd_computes_of_one_param(name, value):
    fn = ONE_PARAM[name]
    s = torch.randn(500, dtype=torch.float64, generator=torch.Generator().manual_seed(2)) * 3
    check(fn, from_function(fn, 1), s, (value,))


def test_what_scores_have_in_common_leaves_the_terms():
    """Constants and params become gains, and the derivative that ds and the term share is computed once."""
    found = {name: split(from_function(ONE_PARAM[name], 1), "close", SCALE) for name in ONE_PARAM}
    assert {name: found[name].times for name in ("temperature", "gain", "shift", "slope", "swish")} == {
        "temperature": ("s",), "gain": ("dp",), "shift": ("",), "slope": ("dp",), "swish": ("dp",),
    }  # fmt: skip
    for name, gain in (("temperature", SCALE), ("gain", SCALE), ("shift", -1.0)):
        assert found[name].gains.outputs == pytest.approx((gain,))
    two = split(from_function(lambda s, a, b: b * F.silu(a * s), 2), "close", SCALE)
    assert all(isinstance(gain, Ref) for gain in two.gains.outputs)  # b, and a


@pytest.mark.parametrize("name", ["temperature", "gain", "swish", "shift"])
def test_they_keep_the_rules(name):
    """Other roundings than those of the code by which the level was chosen, but no larger ones."""
    act = from_function(ONE_PARAM[name], 1)
    level = choose_level(act, bf16, "sm90", derivatives=True)
    products = split(act, level)
    for case in cases_of(act, bf16, derivatives=True):
        for sign in (1, -1):
            run = lambda graph, *inputs, sign=sign: emulate(graph, level, "sm90", *inputs, sign=sign)
            s, params = case.s.float(), [t.float() for t in case.params]
            found = evaluated(products, s, torch.ones_like(s), params, run=run)
            assert keeps_rules(found, case).all()


# Instructions per score of the block, packing p and ds included; the kernel adds up the terms with one more.
INSTRUCTIONS = {"temperature": 12, "gain": 11, "shift": 10}


@pytest.mark.parametrize("name", INSTRUCTIONS)
def test_instructions_per_score(name):
    source = emit(from_function(ONE_PARAM[name], 1), bf16, "sm90", SCALE).source.split("def products")[1]
    block = re.findall(r'inline_asm_elementwise\("(.*?)", "', source)[0]
    code = block.split("SKIPPED;")[1].split("bra.uni DONE")[0]
    alike = len(re.findall(r"mul\.rn\.f32 x\d+_0, \$24, 0f", code))  # of the param, computed once
    assert instructions("{" + code + "}") - alike == INSTRUCTIONS[name]


def test_functions_without_params_have_none():
    f = jit_functions(from_function(F.silu, 0), bf16, "sm90")
    assert f.products is None
    assert f.gains is None


@pytest.mark.parametrize(
    ("name", "dtype"), [(f, dtype) for i, f in enumerate(ONE_PARAM) for dtype in in_turn((f16, bf16), i)], ids=str
)
def test_ptxas_takes_them(name, dtype):
    pytest.importorskip("triton")
    if INTERPRET:
        pytest.skip("Triton interprets in this process")
    from aot import compile_for
    from device.elementwise import products_kernel

    act = from_function(ONE_PARAM[name], 1)
    assert assemble_products(split(act, choose_level(act, dtype, "sm90", True)).code, "close", dtype) is not None
    f = jit_functions(act, dtype, "sm90", SCALE)
    functions = {"LOAD_PARAMS": f.load_params, "PRODUCTS": f.products, "GAINS": f.gains}
    s = torch.empty(4096)
    settings = {**functions, "N_PARAMS": 1, "BLOCK": 1024, "num_warps": 4}
    compiled_kernel = compile_for(products_kernel, (s, s, torch.empty(4), s, 256, 0), settings, 90)
    assert compiled_kernel.ptx.count(f"cvt.rn.{'bf16x2' if dtype == bf16 else 'f16x2'}.f32") >= 8


@pytest.mark.hopper
@pytest.mark.parametrize("name", ONE_PARAM)
@pytest.mark.parametrize("dtype", [f16, bf16], ids=str)
def test_they_match_autograd_on_the_device(name, dtype):
    from device.elementwise import products

    fn = ONE_PARAM[name]
    act, s = from_function(fn, 1), torch.linspace(-10, 10, 4096)
    dp = torch.randn(4096, generator=torch.Generator().manual_seed(3))
    exact = by_autograd(fn, s.double(), (0.75,))
    want = torch.cat([exact[:1], exact[1:] * dp.double()])
    want[1] *= SCALE
    got = products(act, s / SCALE, dp, (0.75,), dtype, SCALE)
    rounding = torch.tensor([2**-8, 2**-8, 2**-16])[:, None]
    assert ((got - want).abs() <= rounding * want.abs().clamp_min(want.abs().mean(-1, keepdim=True))).all()
    skipped = products(act, s / SCALE, dp, (0.75,), dtype, SCALE, skips=1)
    assert (skipped == 0).all()
