"""Commands begin at once: what is wrong is said before torch is imported, and results go where they were told to."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

import gdpa
from gdpa import paths
from gdpa.backends import BACKENDS
from gdpa.bench.functions import EXTRA
from gdpa.cli import main, options
from gdpa.cli.benchmarks import bench
from gdpa.cli.checking import check
from gdpa.cli.showing import demo
from gdpa.cli.tuning import tune
from gdpa.data import PRESETS
from gdpa.data.convert import CONVERTERS
from gdpa.models import MODELS
from gdpa.train.config.origins import ORIGINS

# Modules whose import takes longer than all the rest of gdpa.
SLOW = ("torch", "numpy", "triton", "sklearn", "scipy", "matplotlib", "pyarrow")


def imported(*code: str) -> set[str]:
    """The slow modules that a fresh Python has after running ``code``."""
    lines = [*code, "import sys", f"print([name for name in {SLOW} if name in sys.modules])"]
    path = os.pathsep.join([str(Path(gdpa.__file__).parents[1]), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, "-c", "\n".join(lines)], capture_output=True, text=True, check=True,
        env={**os.environ, "PYTHONPATH": path},
    )  # fmt: skip
    return set(json.loads(done.stdout.splitlines()[-1].replace("'", '"')))


def run(*arguments: str) -> str:
    """A command as code for ``imported``, whatever status it ends with."""
    return f"from gdpa.cli import main\ntry:\n    main({list(arguments)!r})\nexcept SystemExit:\n    pass"


@pytest.mark.parametrize(
    "code",
    [
        "import gdpa, gdpa.cli, gdpa.train",
        run("--help"),
        run("train", "--help"),
        run("bench", "--help"),
        run("train", "--data", "files", "--data-train", "none.csv", "--data-preset", "KuaiRand"),
        run("train", "--model", "none.py:f"),
        run("train", "--config", "none.toml"),
        run("check", "--activation", "none.py:f"),
        run("bench", "--function", "none.py:f"),
        run("train", "--model", "none"),
        run("train", "--set", "activation=none"),
        run("train", "--nothing"),
        run("check", "--activation", "none"),
        run("bench", "--function", "none"),
        run("compare", "--activation", "gelu"),
        run("convert", "none", "."),
    ],
    ids=lambda code: code.split("main(")[-1].split(")")[0],
)
def test_no_slow_import(code: str) -> None:
    assert imported(code) == set()


def test_names_appear_when_they_are_asked_for() -> None:
    found = imported(
        "import gdpa", "assert callable(gdpa.attention)", "assert gdpa.nn.MLP",
        "import sys, gdpa.cli, gdpa.train, gdpa.serving.command", "assert 'torchrec' not in sys.modules",
    )  # fmt: skip
    assert "torch" in found
    assert "pyarrow" not in found  # nor TorchRec: nobody asked for them
    with pytest.raises(AttributeError, match="module 'gdpa' has no attribute 'atention'"):
        gdpa.atention  # noqa: B018
    assert all(getattr(gdpa, name) is not None for name in gdpa.__all__)
    assert (
        imported("import gdpa, gdpa.train", "assert {'attention'} < {*dir(gdpa)}", "assert 'Result' in dir(gdpa.train)")
        == set()
    )


def test_operators_are_registered_where_torch_is_there_already() -> None:
    imported("import torch, gdpa", "assert 'attention' in dir(gdpa)", "assert 'gdpa.ops' in __import__('sys').modules")


def test_the_command_knows_what_there_is() -> None:
    assert tuple(BACKENDS) == options.BACKENDS
    assert list(paths.ACTIVATIONS) == gdpa.activations()
    assert tuple(MODELS) == paths.MODELS
    assert tuple(CONVERTERS) == paths.CONVERTERS
    assert set(ORIGINS) == set(PRESETS)
    for command, names in ((tune, EXTRA), (bench, EXTRA), (check, ("softmax", "all")), (demo, ("softmax",))):
        (kind,) = (option.type for option in command.params if isinstance(option.type, options.Specs))
        assert isinstance(kind, options.Specs)
        assert kind.also == tuple(names)


def test_names_that_are_unknown_are_refused_with_those_that_are() -> None:
    for arguments, known in (
        (("check", "--activation", "gellu"), "silu, softmax, soft"),
        (("bench", "--function", "gellu"), "softplus_squared"),
        (("train", "--set", "activation=gellu"), "silu, softmax, soft"),
    ):
        words = " ".join(invoke(*arguments).output.split())
        assert "'gellu' is not a built-in (" in words
        assert known in words
    assert "'softmax' is not a function of one score" in invoke("bench", "--function", "softmax").output
    assert "model 'none' is unknown; known models: dlrm, din" in invoke("train", "--model", "none").output


def test_help_says_how_long_a_comparison_takes() -> None:
    assert "two minutes on two idle cores" in " ".join(invoke("compare", "--help").output.split())


def test_help_does_not_list_all_seeds() -> None:
    assert "<=" not in "".join(line for line in invoke("fuzz", "--help").output.splitlines() if "seed" in line)
    assert "is not in the range" in invoke("fuzz", "--seed", str(2**63)).output


def invoke(*arguments: str) -> Result:
    return CliRunner().invoke(main, arguments, catch_exceptions=False)


def test_repeated_params_add_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "two.py").write_text("def two(s, a, b):\n    return a * s + b\n")
    monkeypatch.chdir(tmp_path)
    arguments = ("check", "--activation", "two.py:two", "--dtype", "float32", "--no-interpreter")
    result = invoke(*arguments, "--params", "0.5", "--params", "3")
    assert "params 0.5, 3 (within" in result.output
    assert (
        "2 params" in invoke(*arguments, "--params", "0.5,1,2").output or invoke(*arguments, "--params", "1").exit_code
    )


def test_nothing_agrees_where_everything_overflows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "huge.py").write_text("def huge(s):\n    return s * 1e30 * 1e8\n")
    monkeypatch.chdir(tmp_path)
    result = invoke("check", "--activation", "huge.py:huge", "--dtype", "float16", "--no-interpreter")
    assert result.exit_code == 1
    assert "every result overflows, PyTorch's too: nothing could be compared" in result.output
    assert "agrees" not in result.output


def test_results_stay_out_of_folders_of_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "gdpa-bench").mkdir()
    (tmp_path / "gdpa-bench" / "thesis.tex").write_text("mine")
    (tmp_path / "notes.json").write_text("[1, 2]")
    for arguments, message in (
        ((), "gdpa-bench holds files that gdpa bench did not make"),
        (("--out", "notes.json"), "notes.json was not made by gdpa bench"),
    ):
        result = invoke("bench", "--data", "--quick", *arguments)
        assert result.exit_code == 2
        assert message in result.output
    assert sorted(path.name for path in tmp_path.rglob("*") if path.is_file()) == ["notes.json", "thesis.tex"]


def test_rates_of_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where it is told to write, and nowhere else; rates are not judged here."""
    from gdpa.bench.host import data_rates

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(data_rates, "measure", _measure(data_rates.measure))
    whole = data_rates.run
    asked: list[int] = []
    monkeypatch.setattr(data_rates, "run", lambda rows, names, step: asked.append(rows) or whole(200, names, step))
    result = invoke("bench", "--data", "--quick", "--out", "deep/rates.json")
    assert result.exit_code == 0, result.output
    document = json.loads((tmp_path / "deep" / "rates.json").read_text())
    assert document["kind"] == "data"
    assert {record["source"] for record in document["records"]} >= {"csv"}
    assert all(record["rows_per_s"] > 0 for record in document["records"])
    assert "rows/s" in invoke("bench", "--from", "deep/rates.json").output
    assert "rows/s" in invoke("bench", "--from", "deep/rates.json", "--out", "deep/copy.json").output
    assert json.loads((tmp_path / "deep" / "copy.json").read_text()) == document
    assert all(r["resident_mb"]["tenth"] <= r["resident_mb"]["most"] for r in document["records"])
    assert [path.name for path in tmp_path.iterdir()] == ["deep"]
    again = invoke("bench", "--data", "--rows", "300", "--case", "csv", "--out", "deep/copy.json")
    assert again.exit_code == 0, again.output
    assert {r["source"] for r in json.loads((tmp_path / "deep" / "copy.json").read_text())["records"]} == {"csv"}
    assert asked == [20_000, 300]
    for record in document["records"]:  # of earlier versions
        del record["resident_mb"]
    (tmp_path / "deep" / "rates.json").write_text(json.dumps(document))
    assert "rows/s" in invoke("bench", "--from", "deep/rates.json").output
    assert "no data source is called 'orc'" in invoke("bench", "--data", "--case", "orc").output
    assert "--rows only applies with --data" in invoke("bench", "--rows", "3").output


def _measure(real):  # type: ignore[no-untyped-def]
    """Without worker processes, which take seconds to begin."""
    return lambda path, rows, schema, known, workers: real(path, rows, schema, known, 0)


def test_the_package_runs_as_a_command() -> None:
    """Without being installed: it is enough to be on the path."""
    path = str(Path(gdpa.__file__).parents[1])
    done = subprocess.run(
        [sys.executable, "-m", "gdpa", "--version"], capture_output=True, text=True, check=True,
        env={**os.environ, "PYTHONPATH": path},
    )  # fmt: skip
    assert done.stdout == f"gdpa, version {gdpa.__version__}\n"


def test_what_is_missing_is_installed_from_a_clone() -> None:
    """gdpa is on no index, so that pip install gdpa would be somebody else's."""
    for path in Path(gdpa.__file__).parent.rglob("*.py"):
        for hint in path.read_text(encoding="utf-8").split("pip install ")[1:]:
            assert hint.startswith("'.["), path
            assert "in a clone of gdpa" in hint[:60].replace('"\n        "', ""), path
