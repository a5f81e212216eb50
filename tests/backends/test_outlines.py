"""Kernels filled with another function: the very PTX that compiling gives, or none."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

pytest.importorskip("triton")
if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("kernels are interpreted in this run, not compiled", allow_module_level=True)

import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from aot import Recorder, compile_for
from gdpa.backends.hopper import binding, config, launch
from gdpa.backends.hopper.scheduling.sorting import EVERY
from gdpa.backends.triton import compat
from gdpa.backends.triton.code import ProblemCode
from gdpa.backends.triton.compiled import finding, outlines
from gdpa.functions import stored
from gdpa.functions.activation import resolve_one
from gdpa.functions.emit import compiled, jit_functions
from gdpa.masks.band import Band
from gdpa.problem import Operands, make_problem
from support import FULL

# ---- text ------------------------------------------------------------------------------------------------------------
PTX = """
	mov.b32 %r1, 0;
	// begin inline asm
	{
add.f32 %r5, %r6, %r6;
}
	// end inline asm
	// begin inline asm
	fence;
	// end inline asm
	// begin inline asm
	{
add.f32 %r7, %r8, %r8;
}
	// end inline asm
	ret;
"""
ADD, MULTIPLY = "{\nadd.f32 $0, $1, $1;\n}", "{\nmul.f32 $0, $1, 0f3F800000;\nneg.f32 $0, $0;\n}"


def test_every_block_of_the_function_is_replaced_and_no_other() -> None:
    found = outlines.filled(PTX, [ADD], [MULTIPLY])
    assert found == PTX.replace("add.f32 %r5, %r6, %r6;", "mul.f32 %r5, %r6, 0f3F800000;\nneg.f32 %r5, %r5;").replace(
        "add.f32 %r7, %r8, %r8;", "mul.f32 %r7, %r8, 0f3F800000;\nneg.f32 %r7, %r7;"
    )
    assert outlines.filled(PTX, [ADD], [ADD]) == PTX


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (["{\nsub.f32 $0, $1, $1;\n}"], [MULTIPLY]),  # not there
        ([ADD, "fence.x;"], [MULTIPLY, "fence.x;"]),  # one of them is not
        (["{\nadd.f32 $0, $1, $2;\n}"], ["{\nadd.f32 $0, $1, $3;\n}"]),  # nobody knows the register of $3
        (["{\nadd.f32 $0, $0, $1;\n}"], [MULTIPLY]),  # one operand, two registers
        (["{\nadd.f32 $0, $1, $1;"], [MULTIPLY]),  # there is more in the block
        (["{\nadd.f32 $0, $1, $1;\n}\n}"], [MULTIPLY]),  # or less
        ([ADD, ADD], [MULTIPLY, ADD]),  # which is which?
    ],
)
def test_what_does_not_fit_is_left(old: list[str], new: list[str]) -> None:
    assert outlines.filled(PTX, old, new) is None


def test_a_block_that_two_texts_fit_is_left() -> None:
    """Where two operands have one register, a text fits that says them twice."""
    other = PTX.replace("ret;", "// begin inline asm\n\t{\nadd.f32 %r9, %r10, %r11;\n}\n\t// end inline asm\n\tret;")
    apart = "{\nadd.f32 $0, $1, $2;\n}"
    assert outlines.filled(other, [apart], [MULTIPLY]) is not None
    assert outlines.filled(other, [ADD, apart], [MULTIPLY, ADD]) is None


# ---- source ----------------------------------------------------------------------------------------------------------
def packed(function: Any, n_params: int = 0) -> Any:
    return jit_functions(resolve_one(function, n_params), torch.bfloat16, "sm90").packed_forward


def test_functions_of_blocks_alone_have_one_outline() -> None:
    some = [packed(f) for f in ("silu", lambda s: torch.tanh(3 * s) * s, lambda s: s.abs())]
    assert len({outlines.outline(f) for f in some}) == 1
    assert len({outlines.whole(f) for f in some}) == 3
    assert len({text for f in some for text in outlines.texts([f])}) == 3
    with_param = packed(lambda s, a: torch.tanh(a * s), 1)
    assert outlines.outline(with_param) != outlines.outline(some[0])


class Owner:
    pass


@pytest.mark.parametrize(
    "arguments", ['asm="mov.b32 $0, $1;", constraints="=r,r", args=[s]', '"mov.b32 " + "$0, $1;", "=r,r", [s]']
)
def test_blocks_written_by_hand_are_kept(arguments: str) -> None:
    """The text may be anywhere among the arguments, and made of others."""
    call = f"tl.inline_asm_elementwise({arguments}, dtype=tl.float32, is_pure=True, pack=1)"
    source = f"@triton.jit\ndef mine(s):\n    return {call}\n"
    function = compiled(Owner(), "<mine>", source)["mine"]
    assert outlines.outline(function) == source
    assert outlines.texts([function]) == []


def test_what_calls_others_keeps_its_blocks() -> None:
    block = 'tl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [s], dtype=tl.float32, is_pure=True, pack=1)'
    inner = f"\n\n@triton.jit\ndef inner(s):\n    return {block}\n"
    outer = "@triton.jit\ndef outer(s):\n    return inner(s) + 1\n"
    owner = Owner()
    scope = compiled(owner, "<one>", outer + inner)
    assert outlines.outline(scope["outer"]) == outer + inner
    assert outlines.texts([scope["outer"], scope["inner"]]) == []
    assert outlines.texts([scope["inner"]]) == ["mov.b32 $0, $1;"]
    scope = compiled(owner, "<other>", outer + "\n\n@triton.jit\ndef inner(s):\n    return s\n")
    assert outlines.texts([scope["outer"], packed("silu")]) == outlines.texts([packed("silu")])


# ---- kernels that are found ------------------------------------------------------------------------------------------
@triton.jit
def small_kernel(p_to, p_from, CODE: tl.constexpr):
    at = tl.arange(0, 8192)  # 64 to a thread, as the block of a vote takes
    tl.store(p_to + at, CODE.FORWARD(tl.load(p_from + at), (tl.load(p_from),)).to(tl.float32))


small_kernel.__module__ = "gdpa.backends.triton.small"  # by which it is one of this package's
TARGET = GPUTarget("cuda", 90, 32)
OPTIONS = {"num_warps": 4, "enable_fp_fusion": True}


class Found:
    """Compiles ``small_kernel`` with functions, and counts how often Triton is asked to."""

    def __init__(self) -> None:
        self.asked = 0

    def ordinary(self, src: Any, target: Any, options: Any) -> Any:
        self.asked += 1
        return triton.compile(src, target=target, options=options)

    def __call__(self, function: Any, n_params: int = 0) -> Any:
        f = jit_functions(resolve_one(function, n_params), torch.bfloat16, "sm90")
        constants = {(2,): ProblemCode(f.load_params, f.packed_forward)}
        signature = {"p_to": "*fp32", "p_from": "*fp32", "CODE": "constexpr"}
        return finding.find_or_compile(self.ordinary, ASTSource(small_kernel, signature, constants), TARGET, OPTIONS)


@pytest.fixture
def find(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Found:
    """On a machine that has compiled nothing."""
    monkeypatch.setenv(stored.VARIABLE, str(tmp_path / "functions"))
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "triton"))
    return Found()


def wave(s: Tensor) -> Tensor:
    return torch.tanh(1.7 * s) * s


def test_only_the_first_function_is_compiled(find: Found, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = find("silu"), find(wave)
    assert find.asked == 1
    assert first.hash != second.hash
    assert first.metadata._replace(hash="") == second.metadata._replace(hash="")
    again = find(wave)  # now it is known by itself
    assert (find.asked, again.hash, again.kernel) == (1, second.hash, second.kernel)
    monkeypatch.setenv(stored.VARIABLE, str(tmp_path / "other functions"))
    assert code_of(find(wave).asm["ptx"]) == code_of(second.asm["ptx"])
    assert find.asked == 2


def test_what_has_another_outline_is_compiled(find: Found) -> None:
    find("silu")
    find(lambda s, a: s * a, 1)
    find("gelu_tanh")  # with a vote
    assert find.asked == 3


@pytest.mark.parametrize("damage", ["ptx", "json", "outline"])
def test_a_damaged_kernel_is_filled_with_nothing(find: Found, tmp_path: Path, damage: str) -> None:
    find("silu")
    if damage == "outline":
        (file,) = (f for f in (tmp_path / "functions").glob("*.json") if '"texts"' in f.read_text())
    else:
        (file,) = (tmp_path / "triton").rglob(f"small_kernel.{damage}")
    file.write_text(file.read_text().replace("e", "E", 1))
    find(wave)
    assert find.asked == 2


def test_without_a_name_of_tritons_functions_are_compiled(find: Found, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compat, "cannot_fill", lambda: ("make_backend",))
    find("silu")
    find(wave)
    assert find.asked == 2
    monkeypatch.undo()
    assert not compat.cannot_fill()


def test_the_assembler_takes_what_the_other_kernel_took(find: Found) -> None:
    compiled = find("silu"), find(wave)
    kept = [json.loads(Path(compat.kept_as(one)[1]["small_kernel.json"]).read_text()) for one in compiled]
    assert [one["hash"] for one in kept] == [one.hash for one in compiled]
    assert compiled[0].kernel != compiled[1].kernel


# ---- the same PTX ----------------------------------------------------------------------------------------------------
def code_of(ptx: str) -> str:
    """But for which line of which file an instruction comes from."""
    code = re.sub(r"^\s*\.(loc|file)\b.*\n", "", ptx.split(".section")[0], flags=re.MULTILINE)
    return re.sub(r"^\$L__(tmp|func|info)\w*:\n", "", re.sub(r"[ \t]*//.*", "", code), flags=re.MULTILINE)


def guarded(s: Tensor) -> Tensor:
    return F.gelu(1.25 * s, approximate="tanh")


def polynomial(s: Tensor) -> Tensor:
    return torch.relu(s) ** 3 + 0.25 * s


def learned(s: Tensor, a: Tensor) -> Tensor:
    return torch.where(s > 0, s, a * s)


def learned_otherwise(s: Tensor, a: Tensor) -> Tensor:
    return torch.where(s > 1, s, a * s)


PAIRS = [("silu", polynomial, 64, 0)]
if FULL:
    PAIRS += [("silu", wave, 128, 0), ("gelu_tanh", guarded, 128, 0), (learned, learned_otherwise, 64, 1)]


@pytest.mark.parametrize(("old", "new", "d", "n_params"), PAIRS)
@pytest.mark.parametrize("which", ["forward", "backward"])
def test_a_filled_kernel_is_the_compiled_one(which, old, new, d, n_params, monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[Any] = []
    for name in ("forward_kernel", "backward_kernel"):
        monkeypatch.setattr(binding, name, Recorder(getattr(binding, name), found))
    monkeypatch.setattr(launch, "processors", lambda device: 132)
    ptx, texts, around = [], [], []
    for function in (old, new):
        x = operands(d, n_params)
        problem = make_problem(x, (resolve_one(function, n_params),), d**-0.5, 1.0, Band())
        if which == "forward":
            launch.forward(problem, x, torch.empty_like(x.q), config.default(problem, "fwd"))
        else:
            dparams = None if x.params is None else torch.empty_like(x.params)
            gradients = (*(torch.empty_like(x.q) for _ in range(4)), dparams)
            launch.launch_backward(problem, x, *gradients, "ring", config.default(problem, "bwd"), EVERY)
        kernel, args, constants = found.pop()
        ptx.append(compile_for(kernel, args, constants, 90).ptx)
        functions = list(finding._functions_in(constants.values()))
        texts.append(outlines.texts(functions))
        around.append([outlines.outline(f) for f in functions if outlines.is_emitted(f)])
    assert around[0] == around[1]
    filled = outlines.filled(ptx[0], *texts)
    assert filled is not None
    assert texts[0] != texts[1]
    assert code_of(filled) == code_of(ptx[1])


def operands(d: int, n_params: int) -> Operands:
    q, k, v = (torch.empty(64, 4, 1024, d, dtype=torch.bfloat16) for _ in range(3))
    return Operands(q, k, v, params=torch.empty(n_params, 4) if n_params else None)
