"""Compiled kernels found again: by all that their code depends on, never another one, and never needed."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
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
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia import driver as nvidia
from triton.backends.nvidia.compiler import CUDABackend
from triton.compiler import ASTSource
from triton.experimental.gluon._runtime import GluonASTSource
from triton.runtime import cache as kernels

import gdpa
from fake_gpu import fake_hopper
from gdpa.backends.triton import compat
from gdpa.backends.triton.code import ProblemCode
from gdpa.backends.triton.compiled import finding
from gdpa.backends.triton.compiled.ahead import compiling
from gdpa.backends.triton.launching import Bound
from gdpa.device import maths, places, unused
from gdpa.device.rows import Rows
from gdpa.device.unused import zero_unused_kernel
from gdpa.functions import stored
from gdpa.functions.activation import from_name
from gdpa.functions.emit import compiled, jit_functions


# ---- what is found again ---------------------------------------------------------------------------------------------
@dataclass
class Counts:
    asked: int = 0  # of Triton's own way
    made: int = 0  # compiled


@pytest.fixture
def counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Of a machine that has compiled nothing."""
    found = Counts()
    inner, stages = triton.compiler.compile, CUDABackend.add_stages

    def compile(*args: Any, **kwargs: Any) -> Any:
        found.asked += 1
        return inner(*args, **kwargs)

    def add_stages(*args: Any, **kwargs: Any) -> Any:
        found.made += 1
        return stages(*args, **kwargs)

    monkeypatch.setenv(stored.VARIABLE, str(tmp_path / "functions"))
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "triton"))
    monkeypatch.setattr(triton.compiler, "compile", compile)
    monkeypatch.setattr(CUDABackend, "add_stages", add_stages)
    with fake_hopper():
        yield found
        in_another_process()


def in_another_process() -> None:
    """As if: nothing is known."""
    zero_unused_kernel.device_caches.clear()
    zero_unused_kernel.hash = None


def launch(width: int = 16, offset: int = 0) -> Any:
    """A kernel of this package that compiles quickly."""
    in_another_process()
    constants = dict(D=width, DU=width, BLOCK_D=16, BLOCK_DU=16, BLOCK=16, ALIGN=8, num_warps=1, enable_fp_fusion=True)
    rows = Rows(torch.zeros(1024, dtype=torch.bfloat16)[offset:], 0, 0, 2)
    cu = torch.zeros(2, dtype=torch.int32)
    bound = Bound(zero_unused_kernel, constants)
    args = (rows, None, cu, None, 16, 1, 0)
    bound((1, 1), *args)
    return bound.compiled(0, args)


def files(folder: Path, pattern: str) -> list[Path]:
    return sorted(path for path in folder.rglob(pattern) if path.is_file())


def test_a_kernel_is_compiled_once(counts: Counts) -> None:
    first = launch()
    assert (counts.asked, counts.made) == (1, 1)
    second = launch()
    assert (counts.asked, counts.made) == (1, 1)
    assert second is not first
    assert (second.hash, second.kernel, second.metadata) == (first.hash, first.kernel, first.metadata)


def test_what_was_compiled_ahead_is_found_and_the_other_way_round(counts: Counts) -> None:
    with compiling():
        launch()
        launch()
    launch()
    assert counts.asked == 1


@pytest.mark.skipif(not hasattr(nvidia, "make_launcher"), reason="launchers are not compiled since Triton 3.7")
def test_launchers_are_made_beside_their_kernels(counts: Counts, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the very text that Triton finds them by, with descriptors among the arguments and without."""
    made: dict[str, list[str]] = {"gdpa-launcher": [], "MainThread": []}
    build = nvidia.compile_module_from_src

    def record(src: str, **more: Any) -> Any:
        made[threading.current_thread().name].append(src)
        return build(src=src, **more)

    monkeypatch.setattr(nvidia, "compile_module_from_src", record)
    launch()
    q, k, v = (torch.randn(1, 1, 64, 64, dtype=torch.bfloat16) for _ in range(3))
    gdpa.attention(q, k, v, lambda s: s * 0.4375, backend="hopper")
    assert len(made["MainThread"]) == 2
    assert sorted(made["MainThread"]) == sorted(made["gdpa-launcher"])


def test_the_backward_of_packed_sequences_is_made_first(counts: Counts, monkeypatch: pytest.MonkeyPatch) -> None:
    """It takes longest. The kernels that make lists are launched before, and need not be compiled before."""
    made: list[str] = []
    for source in (ASTSource, GluonASTSource):
        make = source.make_ir
        monkeypatch.setattr(source, "make_ir", lambda *a, make=make, **k: (made.append(a[0].name), make(*a, **k))[1])
    q, k, v = (torch.randn(256, 2, 64, dtype=torch.bfloat16, requires_grad=True) for _ in range(3))
    cu = torch.tensor([0, 100, 256], dtype=torch.int32)
    gdpa.attention_varlen(q, k, v, cu, cu, lambda s: s * 0.4375, backend="hopper").sum().backward()
    assert made[0] == "backward_kernel"
    assert sorted(made[1:]) == ["forward_kernel", "ordered_records_kernel"]


def test_other_constants_and_alignments_are_other_kernels(counts: Counts) -> None:
    for _ in range(2):
        for width, offset in ((16, 0), (8, 0), (16, 1)):
            launch(width, offset)
    assert counts.asked == 3


@pytest.mark.parametrize("damage", ["cut", "changed", "gone"])
@pytest.mark.parametrize("what", ["*.cubin", "zero_unused_kernel.json", "__grp__*.json"])
def test_a_damaged_kernel_is_compiled_again(damage: str, what: str, counts: Counts, tmp_path: Path) -> None:
    if what.startswith("__grp__") and damage == "cut" and triton.__version__ < "3.7":
        pytest.skip("Triton itself does not read it, by any way")
    first = launch()
    (file,) = files(tmp_path / "triton", what)
    if damage == "gone":
        file.unlink()
    elif what.startswith("__grp__"):
        file.write_text(file.read_text()[:-9] if damage == "cut" else '{"child_paths": {}}')
    else:
        data = file.read_bytes()
        file.write_bytes(data[:-7] if damage == "cut" else data[:-7] + b"1234567")
    assert launch().kernel == first.kernel
    assert counts.made == 2
    launch()
    assert counts.asked == 2


def test_a_damaged_record_costs_a_look_at_tritons_own_files(counts: Counts, tmp_path: Path) -> None:
    launch()
    (file,) = files(tmp_path / "functions", "*.json")
    file.write_text(file.read_text()[:-3])
    launch()
    assert (counts.asked, counts.made) == (2, 1)


def test_an_emptied_cache_of_tritons_is_filled_again(
    counts: Counts, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    launch()
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "another"))
    launch()
    assert counts.made == 2
    launch()
    assert counts.asked == 2


def test_without_a_folder_all_is_tritons_own_way(counts: Counts, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(stored.VARIABLE, "off")
    launch()
    launch()
    assert counts.asked == 2


def test_without_a_name_of_tritons_all_is_tritons_own_way(counts: Counts, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compat, "cannot_find", lambda: ("cache.triton_key",))
    launch()
    launch()
    assert counts.asked == 2


def test_kernels_of_others_are_tritons_own_business(counts: Counts) -> None:
    @triton.jit
    def theirs(p_to, BLOCK: tl.constexpr):
        tl.store(p_to + tl.arange(0, BLOCK), 1)

    for _ in range(2):
        theirs.device_caches.clear()
        Bound(theirs, {"BLOCK": 16, "num_warps": 1, "enable_fp_fusion": True})((1,), torch.zeros(16))
    assert counts.asked == 2


# ---- what its code depends on ----------------------------------------------------------------------------------------
TARGET = GPUTarget("cuda", 90, 32)
OPTIONS: dict[str, Any] = {"num_warps": 4, "extern_libs": ()}


def source(**changes: Any) -> Any:
    """What Triton would compile."""
    functions = jit_functions(from_name("relu"), torch.bfloat16, "sm90")
    constants = {(1,): functions.forward, (2,): 0.5, (3,): None}
    usual = dict(fn=zero_unused_kernel, name="zero", signature={"t": "*bf16"}, attrs={(0,): []}, constants=constants)
    return SimpleNamespace(**{**usual, **changes})


@pytest.fixture
def name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Path | None]:
    monkeypatch.setenv(stored.VARIABLE, str(tmp_path))

    def name(target: Any = TARGET, options: dict[str, Any] = OPTIONS, **changes: Any) -> Path | None:
        finding._installation.cache_clear()
        finding._own_files.cache_clear()
        names = finding.names_of(source(**changes), target, options)
        return None if names is None else names.kernel

    assert name() is not None
    assert name() == name()
    return name


def test_the_launch_is_part_of_the_name(name: Any) -> None:
    silu = jit_functions(from_name("silu"), torch.bfloat16, "sm90").forward
    others = [
        name(),
        name(target=GPUTarget("cuda", 80, 32)),
        name(options={**OPTIONS, "num_warps": 8}),
        name(signature={"t": "*fp16"}),
        name(attrs={(0,): [["tt.divisibility", 16]]}),
        name(constants={(1,): silu, (2,): 0.5, (3,): None}),
        name(constants={(1,): source().constants[1,], (2,): 0.25, (3,): None}),
        name(constants={(1,): source().constants[1,], (2,): 1, (3,): None}),
        name(constants={(1,): source().constants[1,], (2,): True, (3,): None}),
        name(fn=maths.exp),
    ]
    assert None not in others
    assert len(set(others)) == len(others)


def test_all_of_the_emitted_source_is_part_of_the_name(name: Any) -> None:
    """A function may call another one of it."""
    text = "@triton.jit\ndef outer(s):\n    return inner(s)\n\n\n@triton.jit\ndef inner(s):\n    return s * {}\n"

    class Owner:
        pass

    owner = Owner()
    outers = [compiled(owner, f"<{i}>", text.format(factor))["outer"] for i, factor in enumerate((2, 3, 2))]
    first, second, third = (name(constants={(1,): outer}) for outer in outers)
    assert first == third != second


def test_functions_in_the_code_of_a_problem_are_part_of_the_name(name: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def named(function: str) -> Path | None:
        f = jit_functions(from_name(function), torch.bfloat16, "sm90")
        found: Path | None = name(fn=maths.exp, constants={(1,): ProblemCode(f.load_params, f.forward)})
        return found

    before = [named("relu"), named("silu")]
    monkeypatch.setattr(places.mod, "_src", places.mod.src + "\n")  # of a module that the kernel does not import
    found = {*before, named("relu")}
    assert None not in found
    assert len(found) == 3


def test_what_has_no_name_is_compiled_tritons_own_way(name: Any) -> None:
    @triton.jit
    def theirs(s):
        return s

    assert name(constants={(1,): theirs}) is None
    assert name(constants={(1,): object()}) is None


def test_constants_and_code_of_modules_are_part_of_the_name(name: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """As they are in this process, and of modules that only the emitted function uses, too."""
    found = [name()]
    with monkeypatch.context() as patch:
        patch.setattr(unused, "MADE_FOR_THIS_TEST", tl.constexpr(3), raising=False)
        found.append(name())
        patch.setattr(unused, "MADE_FOR_THIS_TEST", tl.constexpr(4))
        found.append(name())
    with monkeypatch.context() as patch:
        patch.setattr(maths.tanh, "_src", maths.tanh.src + "\n")
        found.append(name())
    assert len(set(found)) == 4
    assert name() == found[0]


def test_files_of_this_package_are_part_of_the_name(name: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    before, read = name(), Path.read_bytes

    def edited(path: Path) -> bytes:
        return read(path) + (b"\n" if path.name == "compat.py" and path.parent.name == "hopper" else b"")

    monkeypatch.setattr(Path, "read_bytes", edited)
    assert name() != before


@pytest.mark.parametrize("file", ["_C/libtriton.so", "language/core.py", "backends/nvidia/bin/ptxas"])
def test_files_of_triton_are_part_of_the_name(
    file: str, name: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = tmp_path / "triton" / file
    place.parent.mkdir(parents=True)
    place.write_text("before")
    monkeypatch.setattr(triton, "__file__", str(tmp_path / "triton" / "__init__.py"))
    before = name()
    place.write_text("longer")  # of the same size: its time tells
    os.utime(place, ns=(1, 1))
    assert name() != before
    os.utime(place, ns=(2, 2))
    after = name()
    monkeypatch.setattr(triton, "__version__", "99.0")
    assert name() != after


@pytest.mark.parametrize("variable", ["TRITON_F32_DEFAULT", "DISABLE_PTXAS_OPT", "PTXAS_OPTIONS", "DISABLE_LLVM_OPT"])
def test_environment_variables_are_part_of_the_name(variable: str, name: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The last is known to Triton's C++ alone."""
    before = name()
    monkeypatch.setenv(variable, "1")
    assert name() != before


def test_knobs_are_part_of_the_name(name: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    before = name()
    monkeypatch.setattr(knobs, "propagate_env", False)
    with knobs.nvidia.scope():
        knobs.nvidia.ptxas_options = "--verbose"
        assert name() != before
    assert name() == before


def test_tools_that_are_named_are_looked_at(name: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tool = tmp_path / "ptxas"
    tool.write_text("one")
    monkeypatch.setenv("TRITON_PTXAS_PATH", str(tool))
    before, libraries = name(), {**OPTIONS, "extern_libs": (("libdevice", str(tool)),)}
    with_library = name(options=libraries)
    os.utime(tool, ns=(1, 1))
    assert name() != before
    assert name(options=libraries) != with_library


@pytest.mark.parametrize("variable", ["TRITON_ALWAYS_COMPILE", "TRITON_KERNEL_DUMP", "TRITON_KERNEL_OVERRIDE"])
def test_who_compiles_otherwise_has_tritons_own_way(variable: str, name: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(variable, "1")
    assert name() is None


@pytest.mark.parametrize(("group", "hook"), [("compilation", "listener"), ("runtime", "add_stages_inspection_hook")])
def test_who_watches_compilations_has_tritons_own_way(
    group: str, hook: str, name: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(getattr(knobs, group), hook, print)
    assert name() is None


def test_where_files_are_kept_is_no_part_of_the_name(name: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    before = name()
    monkeypatch.setenv("TRITON_CACHE_DIR", "/elsewhere")
    assert name() == before


# ---- Triton's inner names --------------------------------------------------------------------------------------------
def test_this_triton_has_all_names() -> None:
    assert compat.cannot_find() == ()


def test_the_key_of_the_installation_is_replaced_for_our_kernels_only(monkeypatch: pytest.MonkeyPatch) -> None:
    source = SimpleNamespace(hash=lambda: "s")
    before = kernels.triton_key
    compat._install.cache_clear()
    monkeypatch.setattr(kernels, "triton_key", lambda: "contents")
    with compat.quick_key("ours"):
        assert kernels.get_cache_key(source, source, source, {}).startswith("ours-s")
        with compat.quick_key("inner"):
            assert kernels.triton_key() == "inner"
        assert kernels.triton_key() == "ours"
    assert kernels.get_cache_key(source, source, source, {}).startswith("contents-s")
    monkeypatch.setattr(kernels, "triton_key", before)
    compat._install.cache_clear()


# ---- a second process ------------------------------------------------------------------------------------------------
PROCESS = """
import sys, torch, triton.compiler
inner, asked = triton.compiler.compile, []
triton.compiler.compile = lambda src, **kwargs: asked.append(src.name) or inner(src, **kwargs)
import gdpa
from fake_gpu import fake_hopper
from triton.runtime import cache
hashed = cache.triton_key
q, k, v = (torch.zeros(2, 4, 128, 64, dtype=torch.bfloat16).requires_grad_() for _ in range(3))
with fake_hopper() as gpu:
    gdpa.attention(q, k, v, lambda s: torch.relu(s) + 0.0625 * s).sum().backward()
slow = [name for name in ("sympy", "torch._dynamo") if name in sys.modules]
print(len(gpu.launches), len(asked), hashed.cache_info().misses, *slow)
"""


def test_a_second_process_compiles_traces_and_hashes_nothing(tmp_path: Path) -> None:
    """Nor does it import what takes half a second or more. The first does not hash and import that, either."""
    here = Path(__file__).parents[1]
    env = {
        **os.environ, stored.VARIABLE: str(tmp_path / "functions"), "TRITON_CACHE_DIR": str(tmp_path / "triton"),
        "PYTHONPATH": os.pathsep.join([str(here), *sys.path]),
    }  # fmt: skip
    for asked in ("2", "0"):
        done = subprocess.run([sys.executable, "-c", PROCESS], env=env, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        launched, *compiled = done.stdout.split()
        assert launched == "2"
        assert compiled == [asked, "0"]
