"""`gdpa train` as people call it: what it prints, and the exit statuses that scripts rely on."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from tiny import DATA

from gdpa.cli import main
from gdpa.data import PRESETS
from gdpa.train import train
from gdpa.train.command import settings
from gdpa.train.config.origins import ORIGINS
from gdpa.train.storage.checkpoint import Checkpoints
from processes import exit_of

TINY = Path(__file__).parent / "tiny.py"
SMALL = [argument for name, value in DATA.items() for argument in (f"--data-{name.replace('_', '-')}", str(value))]

FAULTY = """
import os, signal
from tiny import Tiny

class Faulty(Tiny):
    steps = 0
    def forward(self, batch):
        self.steps += self.training
        if self.steps == int(os.environ.get("DIE_AT", "0")) and os.environ.get("RANK", "0") == os.environ["DIE_RANK"]:
            os.kill(os.getpid(), int(os.environ["DIE_OF"]))
        logits = super().forward(batch)
        return logits * float("nan") if self.steps == int(os.environ.get("NAN_AT", "0")) else logits
"""


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "faulty.py").write_text(FAULTY)
    (tmp_path / "functions.py").write_text("def cube(s):\n    return s * s * s\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    for name in ("faulty", "functions"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    return tmp_path


def gdpa_train(*arguments: str) -> Result:
    return CliRunner().invoke(main, ["train", "--batch-size", "8", *SMALL, *arguments], catch_exceptions=False)


def test_from_start_to_resume(here: Path) -> None:
    arguments = (
        "--model",
        "interformer",
        "--set",
        "dim=8",
        "--set",
        "num_layers=1",
        "--set",
        "activation=functions:cube",
    )
    result = gdpa_train(*arguments, "--steps", "3", "--out", "run", "--tensorboard")
    assert result.exit_code == 0, result.output
    events = [json.loads(line) for line in result.output.splitlines()]
    assert [event["event"] for event in events] == ["begin", "eval", "eval", "end"]
    assert Path(events[-1]["best_checkpoint"]).exists()

    refused = gdpa_train(*arguments, "--steps", "3", "--out", "run")
    assert (refused.exit_code, "--overwrite starts over" in refused.output) == (1, True)
    refused = gdpa_train("--resume", "--out", "run", "--lr", "0.5")
    assert (refused.exit_code, "lr: 0.001 -> 0.5" in refused.output) == (1, True)

    # The settings come from the folder.
    result = CliRunner().invoke(main, ["train", "--resume", "--out", "run", "--steps", "5"], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    assert "continuing from step 3" in result.output
    assert Checkpoints(Path("run"), 1).paths()[-1].name == "step-00000005.pt"
    assert gdpa_train(*arguments, "--steps", "1", "--out", "run", "--overwrite").exit_code == 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--model", "no_such_model"), "no_such_model"),
        (("--model", "din", "--set", "layrs=2"), "layrs"),
        (("--model", "din", "--set", "activation=functions:missing"), "functions"),
        (("--parallel", "ddp"), "torchrun"),
        (("--data-lengths", "long"), "lengths must be one of"),
        (("--replay", ".", "--steps", "3"), "--replay takes no option other than --trust"),
        (("--trust",), "--trust needs --replay"),
        (("--replay", "."), "--replay takes no option other than --trust"),
        (("--data", "csv", "--data-train", "missing.csv", "--data-preset", "KuaiVideo_x1"), "unknown key"),
    ],
)
def test_refused_in_words(here: Path, arguments: tuple[str, ...], message: str) -> None:
    result = gdpa_train("--steps", "1", "--out", "run", *arguments)
    assert result.exit_code == 1
    assert message in result.output
    assert "Traceback" not in result.output


def test_missing_file(here: Path) -> None:
    arguments = ["train", "--data", "csv", "--data-train", "missing.csv", "--data-preset", "KuaiVideo_x1"]
    result = CliRunner().invoke(main, arguments, catch_exceptions=False)
    assert result.exit_code == 1
    assert "there is no file 'missing.csv'" in result.output
    assert "https://github.com/reczoo/Datasets has it" in result.output
    assert set(ORIGINS) == set(PRESETS)


COMMAND = ("train", "--batch-size", "8", "--out", "run")


def on_two_ranks(here: Path, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    launcher = ["-m", "torch.distributed.run", "--nproc-per-node", "2", "--rdzv-backend", "c10d",
                "--rdzv-endpoint", "localhost:0", "--monitor-interval", "0.1"]  # fmt: skip
    path = os.pathsep.join([str(TINY.parent), str(here)])
    full = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path, **environment}
    command = [sys.executable, *launcher, "-m", "gdpa.cli", *COMMAND, *arguments]
    return subprocess.run(command, env=full, cwd=here, capture_output=True, text=True, check=False)


ALONE = """
import os, runpy, sys
os.chdir({here!r})
os.environ |= {environment!r}
sys.path[:0] = [{here!r}, {tests!r}]
sys.argv = ["gdpa", *{arguments!r}]
runpy.run_module("gdpa.cli", run_name="__main__", alter_sys=True)
"""


def alone(here: Path, *arguments: str, **environment: str) -> tuple[int | None, str]:
    """The exit status of a process of its own, forked from one that has imported torch, and its stderr."""
    program = ALONE.format(
        here=str(here), tests=str(TINY.parent), arguments=[*COMMAND, *arguments],
        environment={"DIE_RANK": "0", **environment},
    )  # fmt: skip
    return exit_of(program, here / "stderr"), (here / "stderr").read_text()


START = ("--model", "faulty:Faulty", *SMALL, "--steps", "8", "--checkpoint-every", "2")


def test_exit_statuses(here: Path) -> None:
    """NaN, a signal and the end, one after another in one run."""
    status, said = alone(here, *START, NAN_AT="4")
    assert status == 3, said
    assert "Error: step 4: the loss is nan" in said
    replay = ["train", "--replay", "run/nonfinite-step-00000004"]
    assert f"gdpa {' '.join(replay)} --trust" in said
    refused = CliRunner().invoke(main, replay, catch_exceptions=False)
    assert refused.exit_code == 1
    assert "imported and run: 'faulty:Faulty'" in refused.output
    replayed = CliRunner().invoke(main, [*replay, "--trust"], catch_exceptions=False)
    assert replayed.exit_code == 0
    assert "step 4: the loss is nan" in replayed.output
    status, said = alone(here, "--resume", DIE_AT="3", DIE_OF=str(int(signal.SIGTERM)))
    assert status == 128 + signal.SIGTERM, said
    assert "stopped by signal 15 after step 5: saved; --resume continues from step 5" in said
    done = CliRunner().invoke(main, ["train", "--out", "run", "--resume"], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    assert "continuing from step 5" in done.output


def test_a_killed_rank_ends_the_job_and_fewer_ranks_continue(here: Path) -> None:
    killed = on_two_ranks(here, *START, "--parallel", "ddp", DIE_AT="6", DIE_RANK="1", DIE_OF=str(int(signal.SIGKILL)))
    assert killed.returncode != 0
    assert "rank 0 of 2 lost another rank after step 5" in killed.stderr
    assert "--resume continues from there, even with a different number of ranks" in killed.stderr
    assert "Signal 9 (SIGKILL)" in killed.stderr  # torchrun's own words
    assert Checkpoints(here / "run", 1).paths()[-1].name == "step-00000004.pt"
    done = CliRunner().invoke(main, ["train", "--out", "run", "--resume"], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    assert "continuing from step 4" in done.output


# ---- nothing is begun that cannot be finished ------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--model", "no_such_model"), "no_such_model"),
        (("--model", "din", "--set", "layrs=2"), "din has no option layrs"),
        (("--model", "din", "--set", "dim=0"), "dim must be"),
        (("--data-lengths", "long"), "lengths must be one of"),
        (("--model", "nowhere.py:Model"), "there is no file 'nowhere.py'"),
        (("--set", "activation=nowhere.py:f"), "there is no file 'nowhere.py'"),
    ],
)
def test_what_is_refused_leaves_no_folder_and_is_not_printed(
    here: Path, arguments: tuple[str, ...], message: str
) -> None:
    for more in (("--out", "run"), ("--print-config",)):
        result = gdpa_train("--steps", "1", *arguments, *more)
        assert result.exit_code == 1
        assert message in result.output
        assert not Path("run").exists()


def test_print_config_refuses_a_folder_that_out_names(here: Path) -> None:
    """Others may be where the run will be, or were, or be those of a run whose settings somebody looks at."""
    run = ("--model", "din", "--set", "dim=8", "--steps", "1")
    for out in ("gdpa-run", "run"):
        assert gdpa_train(*run, "--out", out).exit_code == 0
    refused = gdpa_train(*run, "--out", "run", "--print-config")
    assert (refused.exit_code, "--overwrite starts over" in refused.output) == (1, True)
    refused = gdpa_train("--resume", "--out", "run", "--lr", "0.5", "--print-config")
    assert (refused.exit_code, "lr: 0.001 -> 0.5" in refused.output) == (1, True)
    for more in (
        ("--out", "run", "--resume"),
        ("--out", "run", "--overwrite"),
        ("--config", "run/config.toml"),
        ("--device", "cuda"),
        ("--parallel", "ddp"),
    ):
        result = gdpa_train(*run, *more, "--print-config")
        assert result.exit_code == 0, result.output


def test_print_config_reads_the_header_of_files(here: Path) -> None:
    Path("log.csv").write_text("timestamp,user_id,item_id,is_click\n1,1,1,1\n")
    files = ["--data", "files", "--data-preset", "KuaiVideo_x1"]
    for names, message in (
        (["--data-train", "log.csv"], "column 'pos_items': this column is missing"),
        (["--data-train", "log.csv", "--data-train", "no*.csv"], "no file matches 'no*.csv'"),
    ):
        result = CliRunner().invoke(main, ["train", "--print-config", *files, *names], catch_exceptions=False)
        assert result.exit_code == 1
        assert message in result.output


def test_repeated_files_are_a_list(here: Path) -> None:
    for name in ("a.csv", "b.csv"):
        Path(name).write_text("timestamp,user_id,item_id,is_click,pos_items,neg_items\n1,1,1,1,,\n")
    base = ["train", "--print-config", "--model", "din", "--data", "files", "--data-preset", "KuaiVideo_x1"]
    for given, expected in ((["a.csv"], 'train = "a.csv"'), (["a.csv", "b.csv"], '"a.csv",\n    "b.csv",\n')):
        named = [argument for name in given for argument in ("--data-train", name)]
        result = CliRunner().invoke(main, [*base, *named], catch_exceptions=False)
        assert result.exit_code == 0, result.output
        assert expected in result.output


def test_resume_of_a_misspelt_folder_is_refused(here: Path) -> None:
    """It would train the default model for minutes; with settings, a run may begin there."""
    for more in ((), ("--steps", "9")):
        result = CliRunner().invoke(main, ["train", "--resume", "--out", "rnu", *more])
        assert result.exit_code == 1
        assert "there is no run in 'rnu' to continue" in result.output
    assert not Path("rnu").exists()


def test_resume_takes_what_ranks_share_from_the_run(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Under torchrun; a single process continues alone, and a flag wins over both."""
    Path("run").mkdir()
    Path("run/config.toml").write_text('parallel = "fsdp"\nsteps = 3\n')
    values = {"resume": True, "top__out": "run"}
    assert settings(values).parallel is None
    monkeypatch.setenv("RANK", "0")
    assert settings(values).parallel == "fsdp"
    assert settings({**values, "top__parallel": "ddp"}).parallel == "ddp"


def test_the_best_checkpoint_is_there_after_the_first_validation(here: Path) -> None:
    """Also where the metric is not defined yet: one sample has no AUC."""
    seen = []
    config = {
        "model": {"name": "din", "options": {"dim": 4}}, "data": {**DATA, "valid_size": 1}, "batch_size": 8, "steps": 3,
        "eval_every": 1, "checkpoint_every": 3, "out": "run",
    }  # fmt: skip
    train(config, on_step=lambda progress: seen.append(Path("run/checkpoints/best.pt").exists()))
    assert seen == [False, True, True]  # on_step comes before the validation of its step


def test_columns_that_a_model_does_not_read_are_named(here: Path) -> None:
    result = gdpa_train("--model", "din", "--set", "dim=4", "--steps", "1", "--out", "run")
    assert "din does not read history.kind, history.age" in result.output
    result = gdpa_train("--model", "interformer", "--set", "dim=8", "--steps", "1", "--out", "run2")
    assert "does not read" not in result.output
