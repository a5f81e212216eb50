"""`gdpa compare`: what is compared, that it is fair, and that the report says what the numbers say."""

from __future__ import annotations

import io
import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from rich.console import Console

import browser
import gdpa
from gdpa.bench.timing import QUICK, Timing
from gdpa.cli import main
from gdpa.cli.claiming import claim_report
from gdpa.compare import page, plan, speed, training
from gdpa.demo import contest, workers
from gdpa.spec import load_function
from gdpa.train import ConfigError

SCREENSHOTS = Path(__file__).parents[2] / "build" / "screenshots"
MINE = '''\
import torch
import torch.nn.functional as F


def scaled(s, gain):
    """A gelu with a gain."""
    return gain * F.gelu(s)


def same(s):
    return F.silu(s)


class Gate(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.slope = torch.nn.Parameter(torch.tensor(0.25))

    def forward(self, s):
        return torch.relu(s) + self.slope * s


gate = Gate()
'''


@pytest.fixture(scope="module")
def mine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("mine") / "mine.py"
    file.write_text(MINE)
    return file


def invoke(*args: Any) -> Any:
    return CliRunner().invoke(main, ["compare", *map(str, args)])


@pytest.fixture(scope="module")
def quick(mine: Path) -> tuple[Path, str]:
    """The folder that the command writes, and what it prints."""
    out = mine.parent / "out"
    functions = ("--activation", f"{mine}:Gate", "--activation", "softmax", "--activation", f"{mine}:scaled")
    result = invoke(*functions, "--params", "scaled=0.5", "--quick", "--steps", 4, "--out", out)
    assert result.exit_code == 0, result.output
    return out, result.output


@pytest.fixture(scope="module")
def document(quick: tuple[Path, str]) -> dict[str, Any]:
    return json.loads((quick[0] / "compare.json").read_text())


# ---- the command -----------------------------------------------------------------------------------------------------
def test_the_document_is_complete(quick: tuple[Path, str], document: dict[str, Any]) -> None:
    out, printed = quick
    claim_report("compare", quick[0], True, [file["file"] for file in document["functions"]])  # it may be run again
    assert document["failures"] == []
    assert [f["name"] for f in document["functions"]] == ["Gate", "softmax", "scaled"]
    assert [f["params"] for f in document["functions"]] == [[0.25], [], [0.5]]
    assert document["training"]["rival"] == "softmax"
    for name in ("Gate", "softmax", "scaled"):
        assert document["checks"][name]["ok"]
        assert f"def {'exp' if name == 'softmax' else name}_forward" in (out / f"kernel_{name}.py").read_text()
        (run,) = document["training"]["models"][name]["runs"]
        assert len(run["losses"]) == 4
        assert name in printed
    assert "class Gate" in document["functions"][0]["written"]


def test_the_report_needs_nothing_else_and_says_what_the_numbers_say(
    quick: tuple[Path, str], document: dict[str, Any]
) -> None:
    report = (quick[0] / "report.html").read_text(encoding="utf-8")
    assert "http" not in report
    assert not re.search(r"<(script|link|iframe)", report)
    for section in ("functions", "correctness", "speed", "accuracy", "machine"):
        assert f'<section id="{section}">' in report
    for figure in ("curves", "speed", "accuracy", "losses"):
        assert f'id="figure-{figure}"' in report
    for model in document["training"]["models"].values():
        assert f"{model['auc']['mean']:.4f}" in report
        assert f"{model['logloss']['mean']:.4f}" in report
    for case in document["speed"]["cases"]:
        for times in case["times"].values():
            assert f"{times['median_ms']:.2f}" in report
    assert report.count("<details>") == 3


def test_nothing_is_cut_off_in_a_browser(quick: tuple[Path, str]) -> None:
    path = browser.installed()
    if path is None:
        pytest.skip(f"no browser installed: looked for {', '.join(browser.BROWSERS)}")
    with browser.Browser(path) as opened:
        browser.check(opened, quick[0] / "report.html", SCREENSHOTS, "compare")


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (("--activation", "gelu"), "at least two functions"),
        (("--activation", "gelu", "--activation", "gelu"), "two functions are called 'gelu'"),
        (("--activation", "gelu", "--activation", "silu", "--params", "relu=1"), "no such function"),
        (("--activation", "gelu", "--activation", "silu", "--params", "gelu=1"), "takes 0 params"),
        (("--activation", "gelu", "--activation", "silu", "--params", "0.5"), "does not look like gate=0.5"),
        (("--activation", "gelu", "--activation", "silu", "--normalize", "gelu=mean"), "'mean' is not one of"),
        (("--activation", "gelu", "--activation", "silu", "--normalize", "relu=sum"), "no such function"),
        (("--activation", "gelu", "--activation", "silk"), "'silk' is not a built-in"),
        (("--activation", "gelu", "--activation", "none.py:f"), "none.py"),
        (("--activation", "gelu", "--activation", "silu", "--set", "depth"), "must look like option=value"),
        (("--activation", "gelu", "--activation", "silu", "--set", "depth=1"), "interformer has no option depth"),
        (("--activation", "gelu", "--activation", "silu", "--model", "nope"), "'nope' is unknown"),
        (
            ("--activation", "gelu", "--activation", "silu", "--set", "activation=relu"),
            "--set activation=relu: functions are compared by --activation gelu",
        ),
        (
            ("--activation", "gelu", "--activation", "silu", "--set", "normalize=sum"),
            "--set normalize=sum: functions are compared by --normalize NAME=sum",
        ),
        (
            ("--activation", "gelu", "--activation", "silu", "--set", "params=[2]"),
            "--set params=[2]: functions are compared by --params NAME=0.5",
        ),
    ],
)
def test_what_cannot_be_compared_is_refused(args: tuple[str, ...], words: str, tmp_path: Path) -> None:
    result = invoke(*args, "--out", tmp_path / "out")
    assert result.exit_code in (1, 2)
    assert words in result.output
    assert not (tmp_path / "out").exists()


# ---- what is compared ------------------------------------------------------------------------------------------------
def test_the_rival_is_softmax_or_the_first() -> None:
    functions = plan.load_functions(["gelu", "silu"], {})
    assert plan.rival_of(functions) == "gelu"
    assert plan.rival_of(plan.load_functions(["gelu", "softmax"], {})) == "softmax"


def test_a_module_brings_its_params(mine: Path) -> None:
    trial = plan.make_trial(plan.load_functions([f"{mine}:Gate", f"{mine}:scaled"], {}), seeds=2)
    by_name = {c.name: c.options for c in trial.contestants}
    assert "params" not in by_name["Gate"]
    assert by_name["scaled"]["params"] == [1.0]
    assert trial.seeds == (0, 1)


@pytest.mark.parametrize("name", ["Gate", "gate"])
def test_a_module_starts_where_it_says(name: str, mine: Path, tmp_path: Path) -> None:
    """Neither command trains it from elsewhere; the reports said that they did."""
    said = f"'{mine}:{name}' is a module, which sets the initial values of its parameters"
    result = invoke(
        "--activation", f"{mine}:{name}", "--activation", "gelu", "--params", f"{name}=3", "--out", tmp_path
    )
    assert result.exit_code == 1
    assert f"--params {name}=3: {said}" in result.output
    result = CliRunner().invoke(main, ["demo", "--activation", f"{mine}:gate", "--params", "3", "--out", str(tmp_path)])
    assert result.exit_code == 1
    assert "--params 3: " in result.output


@pytest.mark.parametrize("name", plan.FUNCTION)
def test_options_that_say_what_is_compared_are_no_options_of_the_model(name: str, tmp_path: Path) -> None:
    """Beside a file, too, whose own function makes way for those that are compared."""
    (tmp_path / "run.toml").write_text("steps = 2\n")
    for file in (None, tmp_path / "run.toml"):
        with pytest.raises(ConfigError, match=f"--set {name}=sum: functions are compared by --{name} "):
            plan.make_trial(plan.load_functions(["gelu", "silu"], {}), options={name: "sum"}, file=file)


def test_seeds_and_steps_win_over_quick() -> None:
    functions = plan.load_functions(["gelu", "silu"], {})
    assert plan.make_trial(functions).seeds == (0, 1, 2)
    assert plan.make_trial(functions, quick=True).seeds == (0,)
    assert plan.make_trial(functions, quick=True, seeds=2, steps=5).seeds == (0, 1)
    assert plan.make_trial(functions, quick=True, seeds=2, steps=5).steps == 5


@pytest.mark.parametrize("model", plan.MODELS)
def test_divided_functions_are_divided_in_every_model(model: str) -> None:
    functions = plan.load_functions(["relu_squared", "softmax"], {}, {"relu_squared": "sum"})
    options = next(c for c in plan.make_trial(functions, model=model).contestants if c.name == "relu_squared").options
    assert options["normalize"] == functions[0].normalize == "sum"
    built = gdpa.models.build(model, gdpa.models.Features.of(gdpa.data.SyntheticLog()), **options)
    cores = [m for m in built.modules() if isinstance(m, gdpa.nn.Attention)]
    assert cores
    assert all(core.normalize == "sum" and core.out_scale >= 1 for core in cores)


@pytest.mark.parametrize("model", plan.MODELS)
def test_every_model_has_small_sizes_that_it_takes(model: str) -> None:
    trial = plan.make_trial(plan.load_functions(["gelu", "softmax"], {}), model=model, quick=True, steps=2)
    world = replace(trial.world, batch_size=8, test_size=40, contestants=trial.contestants)
    found = training.run_seed(replace(trial, world=world), 0, lambda *_: None)
    assert [run["name"] for run in found["runs"]] == ["no sequence", "gelu", "softmax"]
    assert found["best"]["auc"] > 0.5


def test_settings_of_a_file_are_taken(tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text(
        'batch_size = 16\nepochs = 1\nout = "elsewhere"\n[data]\nsource = "synthetic"\nsize = 64\nvalid_size = 32\n'
        'test_size = 0\nlongest = 6\n[model]\nname = "transformer"\n[model.options]\ndepth = 1\nactivation = "relu"\n'
    )
    functions = plan.load_functions(["gelu", "silu"], {})
    with pytest.raises(ConfigError, match="--steps"):
        plan.make_trial(functions, file=file)
    trial = plan.make_trial(functions, file=file, steps=2, options={"dim": 8}, seeds=1)
    training.check(trial)
    assert trial.base is not None
    nothing = replace(trial.base, data=replace(trial.base.data, valid_size=0))
    with pytest.raises(ValueError, match="neither test nor validation samples"):
        training.check(replace(trial, base=nothing))
    config = trial.config(trial.contestants[1], 5)
    assert config.model.options == {"depth": 1, "dim": 8, "activation": "silu"}
    assert (config.seed, config.out, config.steps, config.batch_size) == (5, None, 2, 16)
    found = training.document(trial, [training.run_seed(trial, 0, lambda *_: None)])
    assert found["part"] == "valid"
    assert found["best"] is None
    assert not found["synthetic"]
    assert "data of the given settings" in page.about(found)


# ---- fairness --------------------------------------------------------------------------------------------------------
def test_functions_of_a_seed_share_everything_else(mine: Path) -> None:
    """A function against itself, under another name: no run differs."""
    trial = plan.make_trial(plan.load_functions(["silu", f"{mine}:same"], {}), seeds=2, steps=2)
    trial = replace(trial, world=replace(trial.world, batch_size=8, test_size=40))
    found = training.document(trial, [training.run_seed(trial, seed, lambda *_: None) for seed in trial.seeds])
    same = found["models"]["same"]
    assert same["auc_gain"]["mean"] == same["auc_gain"]["high"] == 0
    assert same["runs"][0]["losses"] == found["models"]["silu"]["runs"][0]["losses"]
    assert same["runs"][0]["losses"] != same["runs"][1]["losses"]
    assert training.verdict(same) == training.NO_DIFFERENCE


@pytest.mark.parametrize(
    ("low", "mean", "high", "said"),
    [(0.1, 0.2, 0.3, training.BETTER), (-0.3, -0.2, -0.1, training.WORSE), (-0.1, 0.1, 0.3, training.NO_DIFFERENCE),
     (None, 0.1, None, training.ONE_SEED)],
)  # fmt: skip
def test_verdicts_follow_the_interval(low: float | None, mean: float, high: float | None, said: str) -> None:
    assert training.verdict({"auc_gain": {"low": low, "mean": mean, "high": high}}) == said


def test_runs_without_a_finite_result_are_failures() -> None:
    """The worst AUC that there is, and none where it is not defined, are results."""
    runs = [{"name": "f", "seed": n, "auc": auc, "logloss": 0.5} for n, auc in enumerate((float("nan"), 0.0, None))]
    assert training.failures({"models": {"f": {"runs": runs}}}) == ["f, seed 0: AUC nan, LogLoss 0.5"]


@pytest.mark.parametrize("seeds", [1, 2])
def test_test_samples_of_one_class_have_no_auc(seeds: int, document: dict[str, Any], tmp_path: Path) -> None:
    """The report is finished all the same."""
    (tmp_path / "train.csv").write_text("y,u,i,h\n" + "".join(f"{n % 2},{n},{n % 3},{n % 3}^1\n" for n in range(64)))
    (tmp_path / "test.csv").write_text("y,u,i,h\n" + "".join(f"1,{n},{n % 3},{n % 3}^1\n" for n in range(20)))
    (tmp_path / "run.toml").write_text(
        'steps = 2\nbatch_size = 16\n[data]\nsource = "files"\n'
        f'train = "{tmp_path}/train.csv"\ntest = "{tmp_path}/test.csv"\n[data.schema]\nlabel = "y"\ngroup = "u"\n'
        'categorical = ["i"]\nhistories = [{name = "h", columns = [{name = "h", vocabulary = "i"}], max_len = 4}]\n'
        '[model]\nname = "transformer"\n[model.options]\ndepth = 1\ndim = 8\n'
    )
    trial = plan.make_trial(plan.load_functions(["gelu", "softmax"], {}), file=tmp_path / "run.toml", seeds=seeds)
    printed = Console(file=io.StringIO(), force_terminal=True)
    with workers.board(trial, printed) as tell:
        answers = [training.run_seed(trial, seed, tell) for seed in trial.seeds]
    with workers.board(trial, Console(file=io.StringIO())) as tell:
        tell("gelu", 0, 2, answers[0]["runs"][0])
    found = json.loads(json.dumps(training.document(trial, answers)))
    assert found["models"]["gelu"]["auc"] == {"mean": None, "low": None, "high": None, "n": seeds}
    assert training.failures(found) == []
    assert training.verdict(found["models"]["gelu"]) == training.NO_AUC
    assert [row.cells[1] for row in page.accuracy(found).rows] == ["-", "-"]
    speed = {
        **document["speed"],
        "cases": [with_times_of(case, "gelu", "softmax") for case in document["speed"]["cases"]],
    }
    functions = [{**f, "name": name} for f, name in zip(document["functions"], ("gelu", "softmax"), strict=False)]
    whole = {**document, "training": found, "speed": speed, "functions": functions}
    (said,) = page.conclusions(whole)
    assert said.startswith(
        "gelu: the test samples are all of one class, and have no AUC to tell it from softmax (LogLoss"
    )
    assert 'id="figure-losses"' in page.page(whole)
    assert 'id="figure-accuracy"' not in page.page(whole)


def with_times_of(case: dict[str, Any], *names: str) -> dict[str, Any]:
    return {**case, "times": dict(zip(names, case["times"].values(), strict=False))}


# ---- speed -----------------------------------------------------------------------------------------------------------
def test_functions_take_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    """All of a case, on tensors of the same numbers, by what times contenders in turns."""
    timed: list[tuple[list[str], list[Any]]] = []

    def in_turns(calls: dict[str, Any], device: Any, effort: Any) -> dict[str, Timing]:
        timed.append((list(calls), [call() for call in calls.values()]))
        return dict.fromkeys(calls, Timing(1.0, 0.9, 1.1, 3))

    monkeypatch.setattr(speed, "time_in_turns", in_turns)
    setting = replace(speed.setting_of(quick=True), lengths=(8,))
    functions = plan.load_functions(["silu", "relu"], {})
    found = speed.run(setting, functions, "silu", QUICK, lambda _: None)
    assert [names for names, _ in timed] == [["silu", "relu"]] * 2
    silu, relu = timed[0][1]
    assert silu.shape == relu.shape == (setting.batch, setting.heads, 8, setting.d)
    assert [len(grads) for grads in timed[1][1]] == [3, 3]
    assert "exceeds the difference of relu from silu, forward at length 8" in speed.warnings(found)[-2]


def test_a_busy_machine_is_told() -> None:
    case = {"length": 8, "pass": "both", "times": {"f": timing(1, 2, 3), "g": timing(7, 8, 9)}}
    document = {"rival": "g", "cases": [case], "load": {"others": 1.0, "cores": 2}}
    assert "other processes used 1.00 of 2 cores" in speed.warnings(document)[0]
    assert speed.warnings({**document, "load": None}) == []


def timing(low: float, median: float, high: float) -> dict[str, float]:
    return {"p20_ms": low, "median_ms": median, "p80_ms": high}


# ---- gdpa demo --activation ------------------------------------------------------------------------------------------
def test_the_demonstration_takes_other_functions(mine: Path) -> None:
    loaded = load_function(f"{mine}:Gate")
    made = contest.make_plan(loaded.spec, (), quick=True)
    assert made.contestants[-1] == contest.Contestant("Gate", "interformer", {"activation": loaded.spec})
    small = replace(made, contestants=made.contestants[-1:], steps=2, batch_size=16, test_size=400, warmup=1)
    found = contest.run_seed(small, 0, lambda *_: None)
    assert found["attention"]["Gate"]["params"] == pytest.approx([0.25], abs=0.1)
    assert found["agreement"]["Gate"] < 1e-4


def test_functions_are_shown_as_they_are_written(mine: Path) -> None:
    assert (
        load_function(f"{mine}:Gate")
        .written()
        .startswith("class Gate(torch.nn.Module):\n    def __init__(self):\n        s")
    )
    assert load_function(f"{mine}:Gate").param_names() == ["slope"]
    assert load_function(f"{mine}:scaled").param_names() == ["gain"]
    assert load_function("gelu").param_names() == []
    assert "def gelu" in load_function("gelu").written()


def test_params_of_the_demonstration_need_a_function() -> None:
    result = CliRunner().invoke(main, ["demo", "--params", "1"])
    assert result.exit_code == 2
    assert "--params needs --activation" in result.output
