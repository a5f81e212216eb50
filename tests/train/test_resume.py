"""Killed anywhere, a run continues and ends with the same bits; folders are not mixed up."""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from tiny import build, settings

from gdpa.train import ConfigError, RunFolderError, Stopped, train
from gdpa.train.storage import checkpoint
from gdpa.train.storage.checkpoint import Checkpoints, write_whole
from support import FULL

RUN = settings(epochs=2, eval_every=3, checkpoint_every=2, log_every=3, clip=1.0, warmup=4)


def last(out: Path) -> dict[str, Any]:
    return checkpoint.load(Checkpoints(out, 1).paths()[-1])


def assert_same_end(out: Path, expected: Path) -> None:
    """Weights, optimizer, generators and records, bit by bit."""
    for one, other in ((last(out), last(expected)), (_best(out), _best(expected))):
        assert one["step"] == other["step"]
        for key in ("model", "optimizer", "random", "reader", "progress", "schedule"):
            assert_equal(one[key], other[key], key)
    assert records(out) == records(expected)


def _best(out: Path) -> dict[str, Any]:
    return checkpoint.load(out / "checkpoints" / "best.pt")


def records(out: Path) -> list[dict[str, Any]]:
    lines = (out / "metrics.jsonl").read_text().splitlines()
    timed = ("seconds", "samples_per_s")
    return [{k: v for k, v in json.loads(line).items() if k not in timed} for line in lines]


def assert_equal(one: Any, other: Any, where: str) -> None:
    if isinstance(one, dict):
        assert one.keys() == other.keys(), where
        for key in one:
            assert_equal(one[key], other[key], f"{where}.{key}")
    elif isinstance(one, list | tuple):
        assert len(one) == len(other), where
        for i, (a, b) in enumerate(zip(one, other, strict=True)):
            assert_equal(a, b, f"{where}[{i}]")
    elif isinstance(one, torch.Tensor):
        assert torch.equal(one, other), where
    else:
        assert one == other, where


class KilledError(Exception):
    pass


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("expected") / "run"
    train({**RUN, "out": str(out)}, build=build)
    return out


@pytest.mark.parametrize("stop", [1, 2, 7, 8, 9, 15, 16] if FULL else [1, 8, 9, 16])
def test_stopped_after_any_step(stop: int, expected: Path, tmp_path: Path) -> None:
    """Also in the middle of the second pass, and at the ends of both."""
    config = {**RUN, "out": str(tmp_path / "run")}

    def kill(progress: Any) -> None:
        if progress.step == stop:
            raise KilledError

    with pytest.raises(KilledError):
        train(config, build=build, on_step=kill)
    train(config, build=build, resume=True)
    assert_same_end(tmp_path / "run", expected)


def test_finished_runs_only_report_again(expected: Path) -> None:
    before = records(expected)
    result = train({**RUN, "out": str(expected)}, build=build, resume=True)
    assert result.steps == 16
    assert records(expected) == before
    assert len(result.history.losses) == 5


DRIVER = """
import os, random, signal, sys, time
sys.path.insert(0, {tests!r})
import scipy.stats, sklearn.metrics, torch, torch._dynamo  # once, not in every child
from gdpa.train import train
from tiny import build
torch.set_num_threads(1)
CONFIG = {config!r}
# Not trained before the forks: with torch's CUDA builds autograd has threads then, and refuses to work in a child.

def attempt(prepare):
    pid = os.fork()
    if pid == 0:
        prepare()
        train(CONFIG, build=build, resume=True)
        os._exit(0)
    return pid

def die_at_call(n):
    '''SIGKILL at the n-th time that a file is flushed or renamed: before, in and after every write.'''
    left = [n]
    def wrap(name):
        real = getattr(os, name)
        def wrapped(*arguments):
            left[0] -= 1
            if left[0] == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            return real(*arguments)
        setattr(os, name, wrapped)
    wrap("fsync")
    wrap("replace")

kills = 0
for n in [*range(1, {first}), *range({first}, 40, {every})]:
    pid = attempt(lambda: die_at_call(n))
    status = os.waitpid(pid, 0)[1]
    if status == 0:
        break
    assert os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL, status
    kills += 1
random.seed(1)
for _ in range({times}):  # and at any moment
    pid = attempt(lambda: None)
    time.sleep(random.random() * 2.0)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
assert os.waitpid(attempt(lambda: None), 0)[1] == 0
print("kills", kills)
"""


HOW_OFTEN = {"first": 12, "every": 4, "times": 6} if FULL else {"first": 11, "every": 29, "times": 1}


def test_killed_at_any_moment(expected: Path, tmp_path: Path) -> None:
    """SIGKILL in the middle of writes and elsewhere, again and again, each time continued from what is there."""
    config = {**RUN, "out": str(tmp_path / "run")}
    script = tmp_path / "driver.py"
    script.write_text(DRIVER.format(tests=str(Path(__file__).parent), config=config, **HOW_OFTEN))
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, str(script)], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert int(done.stdout.split()[-1]) >= 10
    assert_same_end(tmp_path / "run", expected)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_signals_finish_the_step_and_save(number: signal.Signals, expected: Path, tmp_path: Path) -> None:
    config = {**RUN, "out": str(tmp_path / "run"), "checkpoint_every": 100, "eval_every": 3}
    handler = signal.getsignal(number)

    def interrupt(progress: Any) -> None:
        if progress.step == 5:
            os.kill(os.getpid(), number)

    with pytest.raises(Stopped, match=f"signal {number.value} after step 6: saved") as caught:
        train(config, build=build, on_step=interrupt)
    assert caught.value.signal == number
    assert last(tmp_path / "run")["step"] == 6
    assert signal.getsignal(number) is handler
    train({**config, "checkpoint_every": 2}, build=build, resume=True)
    assert_same_end(tmp_path / "run", expected)


def test_longer_than_planned(tmp_path: Path) -> None:
    config = settings(steps=5, out=str(tmp_path / "short"))
    train(config, build=build)
    train({**config, "steps": 9}, build=build, resume=True)
    train({**config, "steps": 9, "out": str(tmp_path / "long")}, build=build)
    short, long = last(tmp_path / "short"), last(tmp_path / "long")
    assert_equal(short["model"], long["model"], "model")


def test_fewer_steps_than_taken_are_refused(tmp_path: Path) -> None:
    """It would never come to that step; the folder stays as it is."""
    config = settings(steps=5, out=str(tmp_path / "run"))
    train(config, build=build)
    before = (tmp_path / "run" / "config.toml").read_bytes()
    with pytest.raises(RunFolderError, match="has taken 5 steps, more than steps=4"):
        train({**config, "steps": 4}, build=build, resume=True)
    assert (tmp_path / "run" / "config.toml").read_bytes() == before


def test_fewer_passes_than_begun_are_refused(tmp_path: Path) -> None:
    """Also in the middle of one: the run would stop where its settings do not say."""
    config = settings(epochs=2, out=str(tmp_path / "run"))
    train(config, build=build)
    with pytest.raises(RunFolderError, match="has begun 2 passes over the data, more than epochs=1"):
        train({**config, "epochs": 1}, build=build, resume=True)
    longer = {**config, "epochs": None, "steps": 18}
    assert train(longer, build=build, resume=True).steps == 18
    with pytest.raises(RunFolderError, match="has begun 3 passes"):
        train(config, build=build, resume=True)
    assert train({**config, "epochs": 3}, build=build, resume=True).steps == 24


def test_longer_runs_validate_once_where_a_pass_ends(tmp_path: Path) -> None:
    config = settings(steps=8, out=str(tmp_path / "run"), data={"test_size": 0})
    train(config, build=build)
    longer = train({**config, "steps": 16}, build=build, resume=True)
    assert [one.step for one in longer.evaluations] == [8, 16]


def test_checkpoints_that_cannot_be_read_take_no_place(tmp_path: Path) -> None:
    """A run that begins again below them keeps what it writes: nobody may come back to the first step for ever."""
    held = Checkpoints(tmp_path, keep=2)
    for step in (6, 8):
        held.save({"step": step}, step, is_best=False)
    for path in held.paths():
        path.write_bytes(path.read_bytes()[:100])
    for step, kept in ((2, [2, 8]), (4, [2, 4]), (6, [4, 6])):
        assert held.save({"step": step}, step, is_best=False).exists()
        assert [int(path.stem[5:]) for path in held.paths()] == kept
    newest = held.newest(pytest.fail)
    assert newest is not None
    assert newest[1]["step"] == 6

    config, text = settings(steps=2, out=str(tmp_path / "run")), io.StringIO()
    train(config, build=build)
    (damaged,) = Checkpoints(tmp_path / "run", 1).paths()
    damaged.write_bytes(damaged.read_bytes()[:100])
    assert train(config, build=build, resume=True, console=Console(file=text, width=500)).steps == 2
    assert "no checkpoint in" in text.getvalue()
    assert "can be read: starting at the first step" in text.getvalue()
    assert "trying the one before it" not in text.getvalue()


def test_damaged_checkpoint_is_named_and_the_one_before_taken(expected: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    config = {**RUN, "out": str(out)}
    train(config, build=build)
    newest = Checkpoints(out, 1).paths()[-1]
    newest.write_bytes(newest.read_bytes()[:1000])
    text = io.StringIO()
    train(config, build=build, resume=True, console=Console(file=text, width=500))
    assert f"{newest.name} cannot be read" in text.getvalue()
    assert "continuing from step 14" in text.getvalue()
    assert_same_end(out, expected)


# ---- folders ---------------------------------------------------------------------------------------------------------
def test_folders_are_not_mixed_up(tmp_path: Path) -> None:
    out = tmp_path / "run"
    config = settings(steps=2, out=str(out))
    train(config, build=build)
    (out / "notes.txt").write_text("mine")
    with pytest.raises(RunFolderError, match="is not empty: --resume continues"):
        train(config, build=build)
    with pytest.raises(RunFolderError, match=r"old -> new: lr: 0\.01 -> 0\.02$"):
        train({**config, "lr": 0.02}, build=build, resume=True)
    train({**config, "lr": 0.02, "steps": 1}, build=build, overwrite=True)
    assert (out / "notes.txt").read_text() == "mine"
    assert [path.name for path in Checkpoints(out, 1).paths()] == ["step-00000001.pt"]
    for change in ({"resume": True}, {"overwrite": True}):
        with pytest.raises(RunFolderError, match="contains no run"):
            train(settings(steps=1, out=str(tmp_path)), build=build, **change)
    assert (out / "notes.txt").exists()


def test_settings_that_were_edited_in_the_folder_are_refused(tmp_path: Path) -> None:
    """The optimizer of the checkpoint would go on with the old ones."""
    config = settings(steps=2, out=str(tmp_path / "run"))
    train(config, build=build)
    file = tmp_path / "run" / "config.toml"
    file.write_text(file.read_text().replace("lr = 0.01", "lr = 0.02"))
    with pytest.raises(RunFolderError, match=r"step-00000002\.pt' was made with settings that .*: lr: 0\.01 -> 0\.02$"):
        train({**config, "lr": 0.02, "steps": 3}, build=build, resume=True)


def test_one_process_at_a_time(tmp_path: Path) -> None:
    config = settings(steps=2, out=str(tmp_path / "run"))

    def again(progress: Any) -> None:
        with pytest.raises(RunFolderError, match="another process is training"):
            train(config, build=build, resume=True)

    train(config, build=build, on_step=again)


def test_resume_of_nothing_begins(tmp_path: Path) -> None:
    assert train(settings(steps=2, out=str(tmp_path / "new")), build=build, resume=True).steps == 2


def test_other_data_are_refused(tmp_path: Path) -> None:
    config = settings(steps=2, out=str(tmp_path / "run"))
    train(config, build=build)
    with pytest.raises((RunFolderError, ConfigError), match=r"data\.longest: 6 -> 7"):
        train({**config, "data": {**config["data"], "longest": 7}}, build=build, resume=True)


def test_write_whole_leaves_the_old_file_when_it_fails(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"old")

    def fail(file: Any) -> None:
        file.write(b"half")
        raise OSError("no space left")

    with pytest.raises(OSError, match="no space"):
        write_whole(path, fail)
    assert path.read_bytes() == b"old"
