"""The `gdpa` command: what it prints, what it refuses, and the exit codes that scripts rely on."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner, Result

import gdpa
from gdpa import spec
from gdpa.bench.kernels import function_errors
from gdpa.cli import main
from gdpa.commands import verification
from support import FULL

MODULE = """
import torch
import gdpa

def power(s, exponent, bias):
    return torch.relu(s + bias) ** exponent

def rowwise(s):
    return s.softmax(-1)

def unguarded(s):
    return torch.log(s)

number = 3
wrong = gdpa.activation(
    lambda s: s * s * s, name="wrong", triton=gdpa.TritonSource("p = s * s * s", "p = s * s * s; ds = 2.9 * s * s")
)
"""


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty current directory with one module of functions."""
    (tmp_path / "my_functions.py").write_text(MODULE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(__import__("sys").modules, "my_functions", raising=False)
    return tmp_path


def gdpa_command(*arguments: str) -> Result:
    return CliRunner().invoke(main, list(arguments), catch_exceptions=False)


def test_version_and_help() -> None:
    assert gdpa.__version__ in gdpa_command("--version").output
    for command in ((), ("info",), ("check",), ("demo",), ("bench",)):
        assert gdpa_command(*command, "--help").exit_code == 0


def test_info_names_versions_backends_and_functions() -> None:
    result = gdpa_command("info")
    assert result.exit_code == 0
    for word in (
        torch.__version__,
        gdpa.__version__,
        "cpu",
        "triton",
        "reference",
        *gdpa.activations(),
        "s sigmoid(s)",
    ):
        assert word in result.output


# ---- check -----------------------------------------------------------------------------------------------------------
def test_check_of_own_function_with_params(here: Path) -> None:
    result = gdpa_command("check", "--activation", "my_functions:power", "--params", "1.5,0.25", "--no-interpreter")
    assert result.exit_code == 0, result.output
    for word in (
        "float32",
        "bfloat16",
        "float16",
        "dense",
        "jagged",
        "dparams",
        "gdpa / definition",
        "gdpa / PyTorch",
        "ok",
        "1.5, 0.25",
    ):
        assert word in result.output
    assert "FAIL" not in result.output


@pytest.mark.parametrize(
    ("arguments", "title"),
    [
        (("--activation", "softmax"), "softmax"),
        (("--activation", "my_functions:power", "--normalize", "sum", "--params", "2,1"), "my_functions:power / sum"),
        (("--activation", "tanh", "--normalize", "abs"), "tanh / sum of sizes"),
    ],
)
def test_check_of_normalized_functions(here: Path, arguments: tuple[str, ...], title: str) -> None:
    result = gdpa_command("check", *arguments, "--no-interpreter", "--dtype", "float32", "--dtype", "bfloat16")
    assert result.exit_code == 0, result.output
    for word in (title, "gdpa / definition", "gdpa / PyTorch", "ok"):
        assert word in result.output


def test_the_interpreter_is_told_how_outputs_are_divided(monkeypatch: pytest.MonkeyPatch) -> None:
    """The process of its own gets what was asked for, and makes the same function of it."""
    if torch.cuda.is_available() or os.environ.get("TRITON_INTERPRET") == "1":
        pytest.skip("there is a GPU, or this process is the interpreter")
    pytest.importorskip("triton")
    asked = []

    def run(*args: Any, input: str, **kwargs: Any) -> Any:
        asked.append(json.loads(input))
        return subprocess.CompletedProcess(args, 0, json.dumps({"rows": [], "not_run": {}}), "")

    monkeypatch.setattr(verification.subprocess, "run", run)
    for loaded in (spec.load_normalized("softmax", None), spec.load_normalized("tanh", "abs")):
        verification.check(loaded, ("float32",))
        assert spec.load_normalized(asked[-1]["spec"], asked[-1]["normalize"]) == loaded


def test_check_fails_with_1(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever a backend gets wrong shows: here the CPU backend's gradients are 10 % too large."""
    from gdpa.backends.cpu import CpuBackend

    right = CpuBackend.backward

    def wrong(self, problem, x, do, dq, dk, dv, dparams):  # type: ignore[no-untyped-def]
        right(self, problem, x, do, dq, dk, dv, dparams)
        dk.mul_(1.1)

    monkeypatch.setattr(CpuBackend, "backward", wrong)
    result = gdpa_command("check", "--activation", "silu", "--dtype", "float32", "--no-interpreter")
    assert result.exit_code == 1
    assert "FAIL: dk" in result.output
    assert "FAILED" in result.output


def test_check_finds_a_rounding_too_many(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Below every tolerance in use elsewhere, but not exact: dq as if it had been summed in 16 bits."""
    from gdpa.backends.cpu import CpuBackend

    right = CpuBackend.backward

    def wrong(self, problem, x, do, dq, dk, dv, dparams):  # type: ignore[no-untyped-def]
        right(self, problem, x, do, dq, dk, dv, dparams)
        dq.copy_(dq * 1.3 / 1.3)

    monkeypatch.setattr(CpuBackend, "backward", wrong)
    result = gdpa_command("check", "--activation", "silu", "--dtype", "bfloat16", "--no-interpreter")
    assert result.exit_code == 1
    assert "FAIL: dq" in result.output
    assert "times the definition's" in result.output


@pytest.mark.triton
def test_check_finds_wrong_device_code(here: Path) -> None:
    """Hand-written Triton with a wrong derivative; the torch function stays the definition."""
    report = verification.check(spec.load("my_functions:wrong"), ("float32",))
    failed = {row.backend for row in report.rows if row.failed}
    assert failed == {"triton"}
    assert all(set(row.failed) == {"dq", "dk"} for row in report.rows if row.backend == "triton")


def test_check_runs_the_kernels_interpreted_without_a_gpu(here: Path) -> None:
    """In a process of its own, since this one has imported Triton already."""
    if torch.cuda.is_available() or os.environ.get("TRITON_INTERPRET") == "1":
        pytest.skip("there is a GPU, or this process is the interpreter")
    pytest.importorskip("triton")
    result = gdpa_command("check", "--activation", "my_functions:wrong", "--dtype", "float32")
    assert "triton (interpreter)" in result.output
    assert result.exit_code == 1
    assert "FAIL: dq, dk" in result.output


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (("--activation", "no_such_name"), 2, "is not a built-in"),
        (("--activation", "no_such_module:f"), 2, "there is no module 'no_such_module'"),
        (("--activation", "my_functions:missing"), 2, "it has: power"),
        (("--activation", "my_functions:number"), 2, "not a function"),
        (("--activation", "missing.py:f"), 2, "there is no file"),
        (("--activation", ":f"), 2, "must look like"),
        (("--activation", "my_functions:power", "--params", "1"), 2, "takes 2 params"),
        (("--activation", "my_functions:power", "--params", "one"), 2, "not a list of numbers"),
        (("--activation", "gelu", "--params", "1"), 2, "takes 0 params"),
        (("--activation", "my_functions:rowwise"), 1, "softmax"),
        (("--activation", "softmax", "--normalize", "abs"), 2, "normalize='abs' contradicts"),
        (("--normalize", "max"), 2, "'max' is not one of"),
        (("--activation", "my_functions:unguarded"), 1, "inf or NaN at s = -8.00"),
        (("--dtype", "float8"), 2, "float8"),
    ],
)
def test_check_refuses_in_words(here: Path, arguments: tuple[str, ...], code: int, message: str) -> None:
    result = gdpa_command("check", "--no-interpreter", *arguments)
    assert result.exit_code == code
    assert message in result.output
    assert "Traceback" not in result.output


def test_functions_come_from_files_and_broken_modules_say_so(here: Path) -> None:
    loaded = spec.load("my_functions.py:power")
    assert (loaded.name, loaded.n_params) == ("power", 2)
    (here / "broken.py").write_text("1 / 0\n")
    with pytest.raises(ValueError, match="raised ZeroDivisionError"):
        spec.load("broken:f")
    (here / "needy.py").write_text("import not_installed_at_all\n")
    with pytest.raises(ValueError, match="needs 'not_installed_at_all'"):
        spec.load("needy:f")


def test_overflow_is_no_failure_where_pytorch_overflows() -> None:
    """e^s leaves float16's range in both; that is the function's doing."""
    report = verification.check(spec.load("exp"), ("float16",), interpret=False)
    assert report.ok


# ---- errors of device code -------------------------------------------------------------------------------------------
@pytest.mark.triton
def test_errors_of_device_code(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if not FULL:  # functions/test_values.py has a finer grid
        monkeypatch.setattr(function_errors, "INTERPRETED_POINTS", 601)
    result = gdpa_command("check", "--errors", "errors.json")
    assert result.exit_code == 0, result.output
    document = json.loads(Path("errors.json").read_text())
    assert set(document["functions"]) == set(gdpa.activations())
    for by_dtype in document["functions"].values():
        assert set(by_dtype) == {"bfloat16", "float16", "float32"}
        assert all(0 <= entry["value"] < 1e-2 for entry in by_dtype.values())


def test_errors_of_device_code_need_a_device(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    result = gdpa_command("check", "--errors", "errors.json")
    assert result.exit_code == 1
    assert "needs a GPU" in result.output
    assert not Path("errors.json").exists()
