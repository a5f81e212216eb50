"""What the compiler makes of a graph: shared work, folded constants, readable code, and the precision it chooses."""

from __future__ import annotations

import ast
import re

import pytest
import torch
import torch.nn.functional as F

import gdpa
from functions.evaluation import by_autograd, compiled, grid, worst
from functions.library import BUILTIN_FUNCTIONS, FUNCTIONS
from gdpa.functions.activation import from_function, from_name
from gdpa.functions.emit import emit, jit_functions
from gdpa.functions.graph import Graph, Node, Ref, vanishes_at_zero
from gdpa.functions.passes.expand import expand
from gdpa.functions.passes.fold import factor_of, fold
from gdpa.functions.passes.simplify import Builder
from support import FULL, INTERPRET, bf16, f16, f32, in_turn

every_function = pytest.mark.parametrize("f", FUNCTIONS, ids=repr)
every_builtin = pytest.mark.parametrize("f", BUILTIN_FUNCTIONS, ids=repr)
NVIDIA = ("cuda", "sm90")
ALL_TARGETS = (*NVIDIA, "hip", "interpret")


def ops_of(fn, n_params=0):
    return [n.op for n in from_function(fn, n_params).joint.nodes if n.op != "input"]


# ---- simplification --------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("name", "costly"),
    [("gelu", {"erfc": 1, "exp": 1}), ("gelu_tanh", {"sigmoid": 1}), ("silu", {"sigmoid": 1}),
     ("sigmoid", {"sigmoid": 1}), ("tanh", {"tanh": 1, "sigmoid": 1}),
     ("softplus", {"exp": 1, "log1p": 1}), ("mish", {"exp": 1}), ("exp", {"exp": 1}),
     ("laplace", {"erfc": 1, "exp": 1}), ("relu", {}), ("identity", {})],
)  # fmt: skip
def test_value_and_derivative_share_costly_operations(name, costly):
    ops = [n.op for n in from_name(name).joint.nodes]
    found = {op: ops.count(op) for op in ("exp", "exp2", "log", "log1p", "tanh", "sigmoid", "erfc", "expm1", "pow")}
    assert {op: n for op, n in found.items() if n} == costly


def test_constants_are_folded_and_identities_dropped():
    assert ops_of(lambda s: s * 1 + 0 - 0.0) == []
    assert ops_of(lambda s: (s * 2) * 3 * 0.5) == ["mul"]
    assert ops_of(lambda s: torch.neg(-s)) == []
    assert ops_of(lambda s: s / 4) == ["mul"]
    assert ops_of(lambda s: s + torch.tensor(2.0) * torch.tensor(3.0).exp()) == ["add"]
    assert ops_of(lambda s: torch.where(torch.ones_like(s, dtype=torch.bool), s, -s)) == []
    assert ops_of(lambda s: s.float().clone().detach() * 0 + s.double().float() * 2)[-1] != "exp"


def test_equal_expressions_are_computed_once():
    ops = ops_of(lambda s: torch.sin(s) * torch.sin(s) + torch.sin(s + 0))
    assert ops.count("sin") == 1
    assert ops.count("cos") == 1


def test_nothing_is_computed_in_vain():
    def wasteful(s):
        torch.exp(s) * 7
        return s * 2

    assert ops_of(wasteful) == ["mul"]


def test_non_finite_values_survive_simplification():
    """x * 0 is NaN for x = inf, so it must stay."""
    s = torch.tensor([torch.inf, -torch.inf, torch.nan, 1.0])
    assert torch.isnan(from_function(lambda s: s * 0, 0).joint.evaluate(s)[0]).tolist() == [True, True, True, False]


def test_small_powers_are_products():
    assert "pow" not in ops_of(lambda s: s**8 + s**3)
    assert "pow" not in emit(from_function(lambda s: s**0.5 + s**-0.5 + s**-1, 0), f32, "cuda").source.split("def ")[2]
    assert "pow" in ops_of(lambda s: s**2.5)


@every_function
@pytest.mark.parametrize("scale", [1.0, 0.0883883, 3.0])
def test_scale_and_constant_factors_fold_into_the_function(f, scale):
    """factor * fold(f, scale, factor)(s) is f(scale * s), its derivative by s, and those by the params."""
    joint = compiled(f).joint
    factor = factor_of(joint, scale)
    s = grid(f, 200).double() / scale
    values = [torch.full_like(s, p) for p in f.scalar_params()]
    whole = torch.stack(joint.evaluate(scale * s, *values))
    whole[1] *= scale
    folded = fold(joint, scale, factor)
    assert worst(factor * torch.stack(folded.evaluate(s, *values)), whole).max() < 1e-7


@pytest.mark.parametrize("name", ["identity", "relu", "gelu", "gelu_tanh", "silu", "sigmoid", "laplace"])
def test_the_usual_functions_take_a_scale_for_nothing(name):
    """f(scale * s) and its derivative by s take no more operations than f(s) and its own."""
    graph = from_name(name).joint
    plain = expand(graph, "approx")
    folded = fold(plain, 0.0883883, factor_of(plain, 0.0883883))
    assert len(folded.nodes) <= len(plain.nodes), folded.text()


@every_function
@pytest.mark.parametrize("level", ["approx", "short", "close", "accurate"])
def test_expansion_only_changes_how_a_function_is_computed(f, level):
    joint = compiled(f).joint
    s = grid(f, 200).double()
    values = [torch.full_like(s, p) for p in f.scalar_params()]
    whole = torch.stack(joint.evaluate(s, *values))
    of_erf = {"approx": 7e-4, "short": 7e-4, "close": 1e-4}  # of erfc, and what its neighbours make of it
    tolerance = of_erf[level] * whole.abs().max() if level in of_erf and "erf" in joint.text() else 1e-7
    assert worst(torch.stack(expand(joint, level).evaluate(s, *values)), whole).max() < tolerance


def test_constants_of_params_are_multiplied_once():
    """And those of what differs from score to score are not, which would be one instruction more."""
    joint = from_function(lambda s, a: F.silu(a * s), 1).joint
    per_score = [n for n in fold(joint, 0.25).nodes if n.op == "mul" and Ref(0) in n.args]
    assert all(isinstance(a, Ref) for n in per_score for a in n.args)
    gated = from_function(lambda s, a: a * F.silu(s), 1).joint
    for n_params in (0, 1):
        folded = fold(expand(gated, "short"), 0.25, n_params=n_params)
        gate = folded.nodes.index(Node("input", (1,), torch.float32))
        scaled = any(n.op == "mul" and Ref(gate) in n.args and 0.25 in n.args for n in folded.nodes)
        assert scaled == (n_params == 1)


def test_long_chains_of_params_fold_in_no_time():
    def newton(s, a):
        x = 0.1 * a
        for _ in range(40):
            x = x * (2 - a * x)
        return s * x

    joint = from_function(newton, 1).joint  # a walk that forgets would take 2^40 steps
    assert fold(joint, 0.25).n_inputs == 2


def test_which_factors_leave_the_kernel():
    gelu_tanh = expand(from_name("gelu_tanh").joint, "approx")
    assert factor_of(gelu_tanh) == 0.5
    assert factor_of(gelu_tanh, 0.25) == 0.125
    assert factor_of(from_function(lambda s: torch.sin(s) * 3, 0).joint) == 3.0
    assert factor_of(from_name("silu").joint) == 1.0
    assert factor_of(from_function(lambda s: torch.sin(s) * 1e-40, 0).joint) == 1.0, "1 / c would overflow"
    # float16 could overflow without the factor that keeps p small
    act = from_function(lambda s: torch.exp(s) / 1024, 0)
    assert emit(act, f16, "cuda").factor == 1.0
    assert emit(act, bf16, "cuda").factor == 2**-10
    # silu's minimum over sqrt(7) lies between two numbers of bfloat16, and silu's own does not
    assert emit(from_function(lambda s: F.silu(s) / 7**0.5, 0), bf16, "cuda").factor == 1.0
    assert emit(from_function(lambda s: torch.exp(s) / 1000, 0), bf16, "cuda").factor == 1e-3


def test_scale_costs_no_instruction():
    """gelu_tanh and silu of scale * s take as many operations as of s (a product and a sum are one instruction)."""
    for name, most in (("gelu_tanh", 9), ("silu", 4), ("gelu", 15), ("relu", 1)):
        source = emit(from_name(name), bf16, "sm90", 0.0883883).source.split("def ")[2]
        assert source.count(" = ") - 2 <= most, source


def test_graph_text_shows_operations_and_constants():
    one, two = (from_function(lambda s, c=c: torch.sin(s) * c, 0).joint for c in (0.5, 0.25))
    assert one.text() != two.text()
    assert "sin(%0)" in one.text()


def test_builder_tells_0_from_false():
    b = Builder(1)
    s = b.input(0)
    assert b("add", s, 1.0) == b("add", s, 1.0)
    different = [b.intern(n) for n in (b.nodes[0],)]
    assert different == [s]
    where = [b("where", b("gt", s, 0.0, dtype=torch.bool), yes, 0.5) for yes in (True, 1, 1.0)]
    assert len({w.index for w in where if isinstance(w, Ref)}) == 3


# ---- emitted code ----------------------------------------------------------------------------------------------------
# On two of the targets each, in turns.
@pytest.mark.parametrize(
    ("f", "target"),
    [(f, t) for i, f in enumerate(FUNCTIONS) for t in (ALL_TARGETS if FULL else ALL_TARGETS[i % 2 :: 2])],
    ids=str,
)
def test_emitted_code_is_python_with_known_names(f, target):
    for dtype in in_turn((f32, f16, bf16), FUNCTIONS.index(f) + ALL_TARGETS.index(target)):
        emitted = emit(compiled(f), dtype, target)
        tree = ast.parse(emitted.source)
        functions = {node.name: node for node in tree.body if isinstance(node, ast.FunctionDef)}
        packed = {"forward_packed", "backward_packed"} if target == "sm90" and dtype != f32 else set()
        packed |= {"products", "gains"} if packed and f.params else set()
        packed |= {"forward_careful"} if emitted.packed_level == "guarded" else set()
        name = compiled(f).name
        assert set(functions) == {"load_params", f"{name}_forward", f"{name}_backward"} | packed
        for function in functions.values():
            names = [node for node in ast.walk(function) if isinstance(node, ast.Name)]
            assigned = {n.id for n in names if isinstance(n.ctx, ast.Store)}
            used = {n.id for n in names if isinstance(n.ctx, ast.Load)}
            arguments = {a.arg for a in function.args.args}
            assert used <= assigned | arguments | {"tl", "triton", "maths", "float"} | set(functions)


@pytest.mark.parametrize("f", FUNCTIONS if FULL else FUNCTIONS[::2], ids=repr)
def test_emitted_code_compiles_for_a_gpu(f):
    """Triton and ptxas take it, for float32 or (in turns) with the shortcuts of 16 bits; needs no GPU. The interpreter
    runs the code of every function, and test_ptx.py compiles that of pairs."""
    pytest.importorskip("triton")
    if INTERPRET:
        pytest.skip("Triton interprets in this process")
    from aot import compile_for
    from device.elementwise import joint_kernel

    act = compiled(f)
    s, params = torch.empty(128), torch.empty(4) if f.params else None
    for dtype in in_turn((f32, bf16), FUNCTIONS.index(f) // 2):
        fns = jit_functions(act, dtype, "sm90")
        constants = {"LOAD_PARAMS": fns.load_params, "FORWARD": fns.forward, "BACKWARD": fns.backward}
        settings = {"N_PARAMS": act.n_params, "BLOCK": 128, "num_warps": 1}
        compile_for(joint_kernel, (s, params, s, 128), {**constants, **settings}, 90)


def test_source_is_readable():
    @gdpa.activation
    def squared_softplus(s, slope):
        return F.softplus(slope * s) ** 2

    source = squared_softplus.source(f32, "interpret")
    assert "def squared_softplus_forward(s, params):" in source
    assert "def squared_softplus_backward(s, params):" in source
    assert squared_softplus.key in source
    assert "return p, ds, dparam0" in source
    assert source.count("maths.log1p") == 2, "once in each function"
    assert max(map(len, source.splitlines())) < 100
    assert squared_softplus.source() == squared_softplus.source(torch.bfloat16, "sm90")


@pytest.mark.parametrize("name", ["<lambda>", "näme", "9 lives", "class", "", "a.b-c", "packed", "load_params", "tl"])
def test_any_name_gives_valid_code(name):
    fn = lambda s: torch.sin(s) * (1 + len(name) / 64)
    fn.__name__ = name
    act = gdpa.activation(fn)
    tree = ast.parse(act.source())
    assert len({node.name for node in tree.body}) == 5, "two functions of one name"
    jit_functions(act, f32, "interpret")


def test_jit_functions_are_made_once():
    """Kernels are specialised on them, so a new object would compile again."""
    act = from_function(lambda s: torch.sin(s) + 0.75, 0)
    again = from_function(lambda s: torch.sin(s) + 0.75, 0)
    assert jit_functions(act, f32, "cuda") is jit_functions(again, f32, "cuda")


def test_ptx_only_where_it_exists():
    for f in FUNCTIONS:
        for dtype in (f32, f16, bf16):
            for target in ("hip", "interpret"):
                assert not re.search(r"_(close|approx)\(", emit(compiled(f), dtype, target).source)
        for target in NVIDIA:
            assert not re.search(r"_(close|approx)\(", emit(compiled(f), f32, target).source), "float32 is accurate"


@pytest.mark.triton
def test_hand_written_code_is_used():
    from device.elementwise import joint

    code = gdpa.TritonSource(forward="p = s * s * s", backward="p = s * s * s; ds = 3.0 * s * s")
    act = gdpa.activation(lambda s: s**3, name="cube", triton=code)
    s = torch.linspace(-2, 2, 50)
    got = joint(act, s)[1:].double()
    assert worst(got, by_autograd(lambda s: s**3, s.double())).max() < 1e-6
    assert act.key != from_function(lambda s: s**3, 0).key
    assert "s * s * s" in act.source()


@pytest.mark.triton
def test_hand_written_code_with_params():
    from device.elementwise import joint

    code = gdpa.TritonSource(forward="p = s * param0", backward="p = s * param0; ds = param0; dparam0 = s")
    act = gdpa.activation(lambda s, a: s * a, name="scaled", triton=code)
    s = torch.linspace(-2, 2, 50)
    got = joint(act, s, (1.5,))[1:].double()
    assert worst(got, by_autograd(lambda s, a: s * a, s.double(), (1.5,))).max() < 1e-6


@pytest.mark.triton
def test_hand_written_code_keeps_its_indentation():
    from device.elementwise import joint

    loop = """
        p = s
        for _ in tl.static_range(2):
            p = p * s
    """
    act = gdpa.activation(lambda s: s**3, triton=gdpa.TritonSource(loop, loop + "    ds = 3.0 * s * s"))
    s = torch.linspace(-2, 2, 50)
    assert worst(joint(act, s)[1:].double(), by_autograd(lambda s: s**3, s.double())).max() < 1e-6


def test_hand_written_code_must_be_a_triton_source():
    with pytest.raises(TypeError, match="forward must be a string of Triton code, got NoneType"):
        gdpa.TritonSource(None, None)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="backward never assigns ds"):
        gdpa.TritonSource("p = s", "p = s")
    with pytest.raises(ValueError, match="forward is not Python source"):
        gdpa.TritonSource("p = = s", "p = s; ds = s")
    with pytest.raises(TypeError, match=r"triton must be a gdpa\.TritonSource, got str"):
        gdpa.activation(lambda s: s**3, triton="p = s * s * s")


# ---- at zero ---------------------------------------------------------------------------------------------------------
FINITE = {
    "slope": (lambda s, a: torch.where(s > 0, s, a * s), True),
    "swish": (lambda s, b: s * torch.sigmoid(b * s), True),
    "threshold": (lambda s, t: F.softplus(s) ** 2 * torch.sigmoid(3 * (s - t)), True),
    "shifted gelu": (lambda s, a: F.gelu(s * a + a), True),  # e^-x^2 is at most 1
    "shifted softplus": (lambda s, a: F.softplus(s + a), True),  # overflows in the branch that is not taken
    "shifted elu": (lambda s, a: F.elu(s - a), True),
    "shifted mish": (lambda s, a: F.mish(s + a), True),
    "rational": (lambda s, a: s / (1 + (a * s).abs() + a * a), True),
    "logarithm of a temperature": (lambda s, a: torch.tanh(s * torch.exp(-a)), True),
    "clamped": (lambda s, a: torch.exp((s + a).clamp(-5, 5)), True),
    "wave": (lambda s, a: s * torch.sin(a + s) ** 2, True),
    "gate": (lambda s, a: s * (1 - (s > a).float()), True),
    "steps": (lambda s, a: s * (a.int() + (s > a).long()), True),
    "half": (lambda s, a: (a / (s * s + 1e-5)).half().float(), False),
    "sum of gates": (lambda s, a: s / (4 - 2 * ((a > -5).float() + (a < 5).float())), False),
    "sign of an integer": (lambda s, a: s / (1 + torch.sign(a.int().float())), False),
    "zero times infinity": (lambda s, a: s + (torch.exp(a * a) * (20 - a)).detach().clamp(-1, 1), False),
    "zero of either sign": (lambda s, a: s + torch.exp(1 / (s * a).detach()), False),
    "the branch that is taken": (lambda s, a: torch.where(a > 2, torch.exp(a * a + s), s), False),
    "division by a difference": (lambda s, a: s / (a - 3), False),
    "product with what overflows": (lambda s, a: s * torch.exp(a * a), False),
    "logarithm": (lambda s, a: s + torch.log(a), False),
    "temperature": (lambda s, t: torch.tanh(s / t), False),  # of 0
    "power": (lambda s, a: torch.relu(s) ** a, False),
    "infinite by itself": (lambda s, a: a + torch.log(s.abs()), False),
    "infinite derivative": (lambda s, a: a * s.abs().sqrt(), False),
    "infinite everywhere": (lambda s, a: torch.full_like(s, torch.inf), False),
}


@pytest.mark.parametrize("name", FINITE)
def test_what_is_finite_at_zero_whatever_the_params(name):
    """Only then may kernels leave out masks at the ends of sequences."""
    fn, finite = FINITE[name]
    assert from_function(fn, 1).finite_at_zero == finite
    for a in (-30.0, -3.0, 0.0, 0.7, 40.0) if finite else ():
        s, a = torch.zeros((), requires_grad=True), torch.tensor(a, requires_grad=True)
        p = fn(s, a)
        gradients = torch.autograd.grad(p, (s, a), allow_unused=True, materialize_grads=True)
        assert all(t.isfinite() for t in (p, *gradients))


def test_finite_in_float32_whatever_the_defaults():
    """e^120 is finite in float64, and a default device has no values to look at."""
    default = torch.get_default_dtype()
    try:
        torch.set_default_dtype(torch.float64)
        assert not from_function(lambda s, a: s * torch.exp(3 * a), 1).finite_at_zero
    finally:
        torch.set_default_dtype(default)
    with torch.device("meta"):
        assert from_function(lambda s, a: s * torch.sigmoid(3 * a), 1).finite_at_zero


# ---- exactly zero at zero --------------------------------------------------------------------------------------------
@pytest.mark.parametrize("name", ["gelu", "gelu_tanh", "silu", "relu", "identity", "relu_squared", "tanh", "hardswish"])
def test_functions_with_a_factor_s_vanish(name):
    for level in ("approx", "short", "close", "accurate"):
        joint = expand(from_name(name).joint, level)
        cancels = name == "tanh" and level in ("short", "close")  # 2 / (1 + e^-2s) - 1
        assert vanishes_at_zero(Graph(1, joint.nodes, joint.outputs[:1])) == (not cancels)


NOT_ZERO = {
    "one": lambda s: torch.sigmoid(s),
    "cancels": lambda s: torch.exp(s) - 1.0,
    "infinite": lambda s: s * torch.log(s.abs()),
    "overflows on the way": lambda s: s * torch.cosh(s + 89),
    "zero by luck": lambda s: torch.cos(s) - 1.0,
    "one branch": lambda s: torch.where(s >= 0, s, s - 1.0),
}


@pytest.mark.parametrize("name", [n for n in NOT_ZERO if n != "one branch"])
def test_others_are_not_trusted(name):
    joint = expand(from_function(NOT_ZERO[name], 0).joint, "close")
    assert not vanishes_at_zero(Graph(1, joint.nodes, joint.outputs[:1]))


def test_the_branch_not_taken_counts():
    joint = from_function(NOT_ZERO["one branch"], 0).joint
    assert not vanishes_at_zero(Graph(1, joint.nodes, joint.outputs[:1]))
