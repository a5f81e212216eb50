"""Functions as blocks of PTX on a few scores: which have one, that it is assembled, and what it computes."""

from __future__ import annotations

import re
import struct

import pytest
import torch
from torch import Tensor

from functions.evaluation import UNIT, by_autograd, compiled, grid, worst
from functions.library import BUILTIN_FUNCTIONS, BY_NAME, FUNCTIONS
from gdpa.functions.accuracy.precision import choose_level
from gdpa.functions.activation import Activation, from_function, from_name
from gdpa.functions.emission.ptx import GUARDED_LANES, LANES, ROW_SAMPLES, Block, _vote, assemble
from gdpa.functions.emit import emit, jit_functions
from gdpa.functions.graph import Graph
from gdpa.functions.passes.expand import expand
from gdpa.functions.passes.fold import factor_of, fold
from support import FULL, INTERPRET, bf16, f16, f32, in_turn

every_function = pytest.mark.parametrize("f", FUNCTIONS, ids=repr)
both_dtypes = pytest.mark.parametrize("dtype", [f16, bf16], ids=str)
SCALE = 64**-0.5  # a power of 2: steps of a function stay where they are

# One or two instructions each: arithmetic, comparisons and choices at every level of precision, and what the special
# function unit computes where its accuracy is good enough.
ALWAYS = {
    "input", "neg", "abs", "add", "sub", "mul", "maximum", "minimum", "floor", "ceil", "trunc", "round", "sign",
    "saturate", "where", "lt", "le", "gt", "ge", "eq", "ne", "isnan", "and", "or", "xor", "not",
}  # fmt: skip
COARSE = {"exp2", "log2", "reciprocal", "sqrt", "rsqrt"}
SHORT = {
    "accurate": ALWAYS, "close": ALWAYS | COARSE, "short": ALWAYS | COARSE, "approx": ALWAYS | COARSE | {"tanh"},
}  # fmt: skip


def folded(act: Activation, dtype: torch.dtype, scale: float = SCALE) -> tuple[Graph, str]:
    """The graph of value and derivatives as it is emitted for Hopper, and its level of precision."""
    level = choose_level(act, dtype, "sm90", derivatives=True)
    graph = expand(act.joint, level)
    return fold(graph, scale, 1.0 if dtype == f16 else factor_of(graph, scale)), level


def block_of(act: Activation, dtype: torch.dtype) -> Block | None:
    graph, level = folded(act, dtype)
    return assemble(graph, level, dtype)


# What is shipped in both, other functions in turns.
TURNS = [
    (f, dtype)
    for i, f in enumerate(FUNCTIONS)
    for j, dtype in enumerate((f16, bf16))
    if FULL or f.builtin or i % 2 == j
]
in_turns = pytest.mark.parametrize(("f", "dtype"), TURNS, ids=str)
# What takes an assembler: each built-in in one dtype, and of the others those that test_compiler.py does not compile.
ASSEMBLED = [
    (f, dtype)
    for i, f in enumerate(FUNCTIONS)
    for j, dtype in enumerate((f16, bf16))
    if FULL or (i // 2 % 2 == j and (f.builtin or i % 2))
]


@in_turns
def test_functions_of_short_operations_have_a_block(f, dtype):
    """And no others: operations without an instruction, and numbers that are neither float32 nor bool."""
    graph, level = folded(compiled(f), dtype)
    short = all(n.op in SHORT[level] and n.dtype in (torch.float32, torch.bool) for n in graph.nodes)
    assert (block_of(compiled(f), dtype) is not None) == short


def test_the_usual_functions_have_one():
    assert all(block_of(compiled(f), bf16) for f in BUILTIN_FUNCTIONS)
    assert all(block_of(compiled(f), f16) for f in BUILTIN_FUNCTIONS)
    assert all(block_of(compiled(BY_NAME[name]), bf16) for name in ("squared_softplus", "prelu", "scaled_sigmoid"))


def test_operations_of_long_code_are_named():
    """Hopper's backend leaves them to triton, and says which."""
    assert emit(from_function(lambda s: torch.sin(s) * s, 0), bf16, "sm90").long_operations == ("cos", "sin")
    assert emit(compiled(BY_NAME["double_precision"]), bf16, "sm90").long_operations == ("float64",)
    assert emit(compiled(BY_NAME["gelu_with_temperature"]), bf16, "sm90").long_operations == ()
    assert all(emit(from_name(f.name), d, "sm90").long_operations == () for f in BUILTIN_FUNCTIONS for d in (bf16, f16))


def test_float32_has_none():
    graph, level = folded(from_name("silu"), bf16)
    assert assemble(graph, level, f32) is None
    assert "packed" not in emit(from_name("silu"), f32, "sm90").source


# Instructions per score of the float32 code: (value, value with derivatives), the half that packs two results included.
# (Not in the value of gelu_tanh and gelu, which the kernel rounds.)
# What each costs shows on the GPU: one more in the value is 2 to 3 % of the forward of D 128.
INSTRUCTIONS = {
    "identity": (0.5, 0.5), "relu": (1.5, 3.5), "silu": (3.5, 6.5), "gelu_tanh": (5 + 23 / 64, 10.5),
    "gelu": (6 + 23 / 64, 16.5), "sigmoid": (3.5, 5.5), "tanh": (2.5, 4.5), "exp": (2.5, 3.5),
}  # fmt: skip
CAREFUL = {"gelu_tanh": 7.5, "gelu": 9.5}  # of the value where there is no vote


@pytest.mark.parametrize("name", INSTRUCTIONS)
def test_instructions_per_score(name):
    source = emit(from_name(name), bf16, "sm90", 128**-0.5).source
    blocks = re.findall(r'inline_asm_elementwise\("(.*?)", "', source)
    careful = (CAREFUL[name],) if name in CAREFUL else ()
    assert tuple(map(instructions, blocks)) == INSTRUCTIONS[name] + careful
    assert ("vote" in source) == (name in CAREFUL)


def instructions(block: str) -> float:
    """Per score, of two codes the cheap one and the vote. neg is part of the instruction that takes its result, cvt.sat
    of the one before, and mov of none."""
    common, *careful = block.split("CAREFUL:")
    code = common.replace("\\n", ";").strip("{};").split(";")
    count = sum(bool(re.match(r"\s*(?!neg|cvt\.sat|mov|\.reg)[@\w]", line)) for line in code)
    return count / (GUARDED_LANES if careful else LANES)


# ---- the vote --------------------------------------------------------------------------------------------------------
def careful(
    threshold: float, lanes: list[dict[int, float]], rest: float = -0.5, factor: float | None = None
) -> bool:  # fmt: skip
    """What a warp decides whose lanes have the ``rest`` everywhere but at the indices of ``lanes``: the PTX, run here
    on the bits of the scores, or of their products with ``factor``."""
    names = [f"s{i}" for i in range(GUARDED_LANES)]
    code = _vote(names, threshold, None if factor is None else ["factor"] * GUARDED_LANES)
    more = {} if factor is None else {"factor": _bits(factor)}
    return any(
        _careful_lane(code, {**more, **{n: _bits(lane.get(i, rest)) for i, n in enumerate(names)}}) for lane in lanes
    )


def _bits(x: float) -> int:
    return struct.unpack("<I", struct.pack("<f", x))[0]


def _number(bits: int) -> float:
    return struct.unpack("<f", struct.pack("<I", bits))[0]


def _careful_lane(lines: list[str], registers: dict[str, int]) -> bool:
    get = lambda name: registers[name] if name in registers else int(name.replace("0f", "0x"), 0)
    code = {
        "sub.u32": lambda a, b: (a - b) & 0xFFFFFFFF, "min.u32": min,
        "mul.rn.f32": lambda a, b: _bits(_number(a) * _number(b)),
        "sub.rn.f32": lambda zero, x: _bits(-_number(x) + 0.0), "add.rn.f32": lambda zero, x: _bits(_number(x) + 0.0),
        "setp.lt.u32": lambda a, b: a < b, "setp.lt.or.u32": lambda a, b, c: a < b or c,
    }  # fmt: skip
    *lines, vote = [line for line in lines if not line.startswith(".reg")]
    assert vote == "vote.sync.any.pred careful, careful, 0xffffffff;"
    for line in lines:
        op, target, *args = line.rstrip(";").replace(",", "").split()
        registers[target] = code[op](*map(get, args))
    return bool(registers["careful"])


FIRST_ROW, SECOND_ROW = ROW_SAMPLES
FAR = {-4.0: (-4.0, -4.5, -100.0, float("-inf")), 3.0: (3.0, 3.5, 1e30, float("inf"))}


@pytest.mark.parametrize("threshold", FAR)
def test_a_row_in_the_tail_decides(threshold):
    ordinary = [{}] * 3
    sign = -1.0 if threshold < 0 else 1.0
    for far in FAR[threshold]:
        for row in ROW_SAMPLES:
            in_tail = dict.fromkeys(row, far)
            assert careful(threshold, [*ordinary, in_tail])
            assert not careful(threshold, [*ordinary, {**in_tail, row[1]: threshold * 0.999}])
            assert not careful(threshold, [*ordinary, {**in_tail, row[2]: -sign}])
    for near in (threshold * 0.999, sign * 1e-30, -sign * 1e-30, -sign * 100, -sign * float("inf")):
        assert not careful(threshold, [{}], rest=near)


@pytest.mark.parametrize("threshold", FAR)
def test_stretched_scores_decide(threshold):
    """The vote is about factor * score, whatever its sign; a zero stays one."""
    for factor in (0.25, -4.0):
        tail = dict.fromkeys(SECOND_ROW, 1.5 * threshold / factor)
        assert careful(threshold, [{}, tail], rest=0.1, factor=factor)
        assert not careful(threshold, [{**tail, SECOND_ROW[1]: 0.9 * threshold / factor}], rest=0.1, factor=factor)
        assert not careful(threshold, [{}], rest=0.0, factor=factor)
        assert careful(threshold, [{FIRST_ROW[0]: 2 * threshold / factor}], rest=0.0, factor=factor)


@pytest.mark.parametrize("zero", [0.0, -0.0])  # a negative param makes the other one of a zero
@pytest.mark.parametrize("threshold", FAR)
def test_pairs_that_do_not_exist_do_not_vote(threshold, zero):
    """Their scores are 0: alone they want nothing, and beside scores in the tail they do not hide them."""
    assert not careful(threshold, [{}], rest=zero)
    assert careful(threshold, [{FIRST_ROW[0]: 2 * threshold}], rest=zero)
    assert careful(threshold, [{SECOND_ROW[2]: 2 * threshold}], rest=zero)
    assert not careful(threshold, [{SECOND_ROW[2]: 0.5 * threshold}], rest=zero)


def test_samples_are_of_the_rows_they_should_be():
    """Two scores of one row, two of the one 8 below, and so on."""
    assert all(i % 4 // 2 == row for row, samples in enumerate(ROW_SAMPLES) for i in samples)
    assert all(len({i // 4 for i in samples}) == len(samples) for samples in ROW_SAMPLES), "in one column"


def test_the_threshold_is_one_of_unscaled_scores():
    near, far = (emit(from_name("gelu_tanh"), bf16, "sm90", scale).source for scale in (1.0, 0.25))
    assert f"{_bits(-4.0) - 1:#x}" in near
    assert f"{_bits(-16.0) - 1:#x}" in far


# ---- ptxas -----------------------------------------------------------------------------------------------------------
def assembled(act: Activation, dtype: torch.dtype, scale: float = SCALE) -> None:
    """Compile the packed functions for sm_90a; raises what ptxas says."""
    pytest.importorskip("triton")
    if INTERPRET:
        pytest.skip("Triton interprets in this process")
    from aot import compile_for
    from device.elementwise import packed_kernel

    f = jit_functions(act, dtype, "sm90", scale)
    s, params = torch.empty(4096), torch.empty(4) if act.n_params else None
    functions = {"LOAD_PARAMS": f.load_params, "FORWARD": f.packed_forward, "BACKWARD": f.packed_backward}
    block = max(256, 128 * f.packed_scores)
    settings = {"N_PARAMS": act.n_params, "BLOCK": block, "num_warps": 4}
    compiled_kernel = compile_for(packed_kernel, (s, params, s, 256), {**functions, **settings}, 90)
    if block_of(act, dtype) is not None:
        assert f"cvt.rn.{'bf16x2' if dtype == bf16 else 'f16x2'}.f32" in compiled_kernel.ptx


@pytest.mark.parametrize(("f", "dtype"), ASSEMBLED, ids=str)
def test_ptxas_takes_it(f, dtype):
    assembled(compiled(f), dtype)


def test_ptxas_meets_every_operation():
    """At every level of precision at which some function's block has it: also those that no function above has."""

    def operations(f, dtype):
        graph, level = folded(compiled(f), dtype)
        return {(n.op, level) for n in graph.nodes} if block_of(compiled(f), dtype) is not None else set()

    met = set().union(*(operations(f, dtype) for f, dtype in ASSEMBLED))
    for f, dtype in TURNS:
        if not operations(f, dtype) <= met:
            assembled(compiled(f), dtype)
            met |= operations(f, dtype)


ODD_FUNCTIONS = {
    "choice of conditions": lambda s: torch.where(torch.where(s > 0, s > 1, s < -1), s, 0.5 * s),
    "equal conditions": lambda s: torch.where((s > 0) == (s > 1), s, 0.5 * s),
    "product of conditions": lambda s: torch.where((s > 0) * (s < 1), s, 0.5 * s),
    "constant": lambda s: torch.full_like(s, 0.5),
    "infinite": lambda s: torch.where(s > 2, float("inf"), s),
    "overflowing constants": lambda s: s * 3e38 * 10,
    "constants far apart": lambda s: s * 1e-14 + 1e30,
    "product minus product": lambda s: s * s - torch.tanh(s) * s,
    "constant minus product": lambda s: 3 - s * torch.tanh(s),
    "product minus constant": lambda s: s * torch.tanh(s) - 3,
    "error function and slope": lambda s: torch.erf(s) + 0.5 * s,
    "param alone": lambda s, a: a.expand_as(s),
    "param minus product": lambda s, a: a - s * a,
    "param that stretches": lambda s, a: torch.nn.functional.silu(a * s),
    "param and a factor s": lambda s, a: s * torch.sigmoid(a * s),
}


@pytest.mark.parametrize(
    ("name", "dtype"), [(f, dtype) for i, f in enumerate(ODD_FUNCTIONS) for dtype in in_turn((f16, bf16), i)], ids=str
)
def test_ptxas_takes_odd_functions(name, dtype):
    assembled(from_function(ODD_FUNCTIONS[name], 1 if "param" in name else 0), dtype)


# ---- values ----------------------------------------------------------------------------------------------------------
def check_values(fn, act: Activation, s: Tensor, params: tuple[float, ...], dtype: torch.dtype, scale: float) -> None:
    """p and its derivatives: UNIT for approximations, and for rounding twice that (half an ulp just above 1)."""
    from device.elementwise import packed

    scaled = lambda s, *params: fn(s * scale, *params)
    exact = by_autograd(scaled, s.double(), params)
    plain = worst(by_autograd(scaled, s, params), exact)
    got = packed(act, s, params, dtype, scale)
    fits = (exact[0].abs() < torch.finfo(dtype).max / 2) & exact.isfinite().all(0)
    error = worst(got[:, fits], torch.cat([exact[:1], exact])[:, fits])
    allowed = (3 * torch.cat([plain[:1], plain])).clamp_min(3 * UNIT[dtype])
    assert (error <= allowed).all(), f"p, p, ds, dparams differ by {error.tolist()}, allowed {allowed.tolist()}"


@every_function
@both_dtypes
@pytest.mark.hopper
def test_packed_functions_match_autograd(f, dtype):
    check_values(f.fn, compiled(f), grid(f) / SCALE, f.scalar_params(), dtype, SCALE)


@both_dtypes
@pytest.mark.hopper
@pytest.mark.parametrize("name", [n for n in ODD_FUNCTIONS if "constants" not in n and "infinite" not in n])
def test_odd_packed_functions_match_autograd(name, dtype):
    fn, params = ODD_FUNCTIONS[name], (0.75,) if "param" in name else ()
    s = torch.linspace(-10, 10, 4001) / SCALE
    check_values(fn, from_function(fn, len(params)), s, params, dtype, SCALE)


@pytest.mark.hopper
@both_dtypes
@pytest.mark.parametrize("name", ["gelu_tanh", "silu", "relu", "softplus"])
def test_scales_that_are_no_power_of_two(name, dtype):
    f = BY_NAME[name]
    for scale in (96**-0.5, 128**-0.5, 0.3):
        check_values(f.fn, compiled(f), torch.linspace(-30, 30, 4001) / scale, (), dtype, scale)


@pytest.mark.hopper
@pytest.mark.parametrize(("name", "dtype"), [("gelu_tanh", bf16), ("gelu", bf16)], ids=str)
def test_guarded_code_in_and_before_the_tail(name, dtype):
    """Both codes: small relative errors where all scores are far to the left, and NaN where a score is NaN."""
    from device.elementwise import packed

    act, fn = from_name(name), BY_NAME[name].fn
    assert emit(act, dtype, "sm90", SCALE).packed_level == "guarded"
    rng = torch.Generator().manual_seed(0)
    for mean, spread in ((-5.0, 0.1), (-5.0, 0.3), (-6.0, 0.3), (-3.0, 0.5), (0.0, 1.0)):
        s = mean + spread * torch.randn(1 << 14, generator=rng)
        exact = act.joint.evaluate(s.double())[0]
        theirs = (fn(s.to(dtype)).double() - exact).square().mean().sqrt()
        s[5::64] = torch.nan
        got = packed(act, s / SCALE, (), dtype, SCALE)[0]
        assert torch.equal(got.isnan(), s.isnan())
        assert (got - exact)[~s.isnan()].square().mean().sqrt() <= 1.02 * theirs, (mean, spread)
