"""Commands replace what they made themselves, and nothing else."""

from __future__ import annotations

import json
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from gdpa import demo
from gdpa.bench.report import plot
from gdpa.cli import main
from gdpa.cli.claiming import PLOTS, claim_bench
from gdpa.compare import command as compare

RESULT = Path(__file__).parents[2] / "benchmarks" / "results" / "cpu.json"
DATA = {"format": 1, "kind": "data", "rows": 1, "events": 1, "batch_size": 1, "load": None, "records": [],
        "skipped": []}  # fmt: skip


def invoke(*arguments: str) -> Result:
    return CliRunner().invoke(main, arguments, catch_exceptions=False)


def refused(result: Result, *words: str) -> None:
    assert result.exit_code == 2, result.output
    for word in (*words, "and will not be overwritten"):
        assert word in " ".join(result.output.split())


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize("name", ["thesis.html", "thesis.png", "thesis-lengths-d64.png", "thesis.json"])
def test_bench_leaves_files_of_others(name: str) -> None:
    Path(name).write_text("mine")
    refused(invoke("bench", "--from", str(RESULT), "--out", "thesis.json"), f"{name} was not made by gdpa bench")
    refused(invoke("bench", "--quick", "--out", "thesis.json"), f"{name} was not made by gdpa bench")
    assert [path.name for path in Path().iterdir()] == [name]
    assert Path(name).read_text() == "mine"


def test_bench_leaves_files_of_others_beside_a_result_of_its_own() -> None:
    Path("x.json").write_text(RESULT.read_text())
    Path("x.html").write_text("<title>My thesis</title>")
    refused(invoke("bench", "--from", "x.json"), "x.html was not made by gdpa bench")


def test_bench_replaces_its_own() -> None:
    for _ in range(2):
        result = invoke("bench", "--from", str(RESULT), "--out", "x.json")
        assert result.exit_code == 0, result.output
    assert {path.name for path in Path().iterdir()} == {"x.json", "x.html", "x.png"}
    assert invoke("bench", "--from", "x.json").exit_code == 0


def test_what_is_not_written_may_be_anybodys() -> None:
    Path("x.html").write_text("mine")
    Path("data.json").write_text(json.dumps(DATA))
    assert invoke("bench", "--from", "data.json", "--out", "x.json").exit_code == 0
    assert Path("x.html").read_text() == "mine"


def test_a_tuning_is_no_result() -> None:
    Path("x.json").write_text(json.dumps({"format": 1, "machines": {}}))
    refused(invoke("bench", "--quick", "--out", "x.json"), "x.json was not made by gdpa bench")


def test_a_result_is_no_page() -> None:
    assert "the result is JSON" in invoke("bench", "--quick", "--out", "x.html").output


def test_plots_of_earlier_versions() -> None:
    """They bear no name, and came with a report."""
    Path("x.png").write_bytes(b"\x89PNG Software Matplotlib")
    Path("x.html").write_text("<title>gdpa bench: cpu</title>")
    claim_bench(Path("x.json"), "bench", True)


def test_every_plot_is_looked_for() -> None:
    for name in plot.CAPTIONS:
        assert name == "cases" or any(fnmatch(f"-{name}", pattern) for pattern in PLOTS)


def test_the_plots_of_the_repository_are_known() -> None:
    for path in RESULT.parent.glob("*.json"):
        if path.with_suffix(".png").exists():
            claim_bench(path, "bench", True)


@pytest.mark.parametrize(
    ("command", "arguments", "module", "code"),
    [
        ("demo", (), demo, "kernel.py"),
        ("compare", ("--activation", "gelu", "--activation", "silu"), compare, "kernel_silu.py"),
    ],
)
def test_reports_replace_their_own(
    command: str, arguments: tuple[str, ...], module: Any, code: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(console: Any, *rest: Any) -> bool:
        out = next(value for value in rest if isinstance(value, Path))
        out.mkdir(exist_ok=True)
        (out / f"{command}.json").write_text(json.dumps({"kind": command}))
        (out / "report.html").write_text(f"<title>gdpa {command}: gelu</title>")
        (out / code).write_text("# silu (approx maths), graph fdb71f6c79a04318\n")
        return True

    monkeypatch.setattr(module, "run", run)
    for name in ("report.html", code, f"{command}.json"):
        Path(name).write_text("mine")
        refused(invoke(command, *arguments, "--out", "."), f"{name} was not made by gdpa {command}")
        assert Path(name).read_text() == "mine"
        Path(name).unlink()
    Path(f"gdpa-{command}").mkdir()
    Path(f"gdpa-{command}/thesis.tex").write_text("mine")
    assert f"holds files that gdpa {command} did not make" in invoke(command, *arguments).output
    Path(f"gdpa-{command}/{code}").write_text("# silu (approx maths), graph fdb71f6c79a04318\n")  # cut short
    assert invoke(command, *arguments).exit_code == 0
    for _ in range(2):
        assert invoke(command, *arguments, "--out", ".").exit_code == 0
    other = "compare" if command == "demo" else "demo"
    more = ("--activation", "gelu", "--activation", "silu") if other == "compare" else ()
    refused(invoke(other, *more, "--out", "."), f"report.html was not made by gdpa {other}")


def test_check_leaves_files_of_others() -> None:
    Path("notes.json").write_text("[1]")
    refused(invoke("check", "--errors", "notes.json"), "notes.json was not made by gdpa check")
