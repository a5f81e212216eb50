"""Two and four ranks against one: the same losses, the same metrics, whatever the ranks share."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from ranks_worker import RUN, STEPS, WAYS, WAYS_OF_FOUR, WAYS_OF_TWO, main, run
from tiny import without_dropout

from gdpa.train import train
from gdpa.train.storage import checkpoint
from processes import forked

TOLERANCE = 1e-5


def start(world: int, folder: Path) -> list[dict[str, Any]]:
    """What each rank found."""
    workers = [forked().Process(target=main, args=(folder, rank, world), daemon=True) for rank in range(world)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    codes = [worker.exitcode for worker in workers]
    logs = [log.read_text()[-3000:] for log in sorted(folder.glob("log-*"))]
    assert not any(codes), "\n".join(map(str, (codes, *logs)))
    return [json.loads((folder / f"found-{rank}.json").read_text()) for rank in range(world)]


def test_two_ranks(tmp_path: Path) -> None:
    """All in one test, so that the ranks are started once, whichever process of pytest it runs in."""
    found = start(2, tmp_path)
    tiny, interformer = run("tiny"), run("interformer")
    for way in WAYS_OF_TWO:
        assert_same(found, f"interformer-{way}", interformer)
    for way in WAYS:
        assert_same(found, f"tiny-{way}", tiny)
    assert_same(found, "rowwise", run("interformer", table_updates="rowwise_adam"))
    for name in ("accumulate-ddp", "accumulate-fsdp"):
        assert_same(found, name, tiny)
    for name in ("resumed", "resumed-parts"):
        assert_same(found, name, tiny, metrics=False)  # validated more often, so that another step is its best
    assert {of_rank["stopped"] for of_rank in found} == {
        "stopped by signal 15 after step 4: saved; --resume continues from step 4"
    }
    assert_own_dropout(tmp_path, found)
    assert_refusals(tmp_path, found)
    for name in ("resumed", "resumed-parts"):
        continue_alone(tmp_path / name)


def test_four_ranks(tmp_path: Path) -> None:
    found = start(4, tmp_path)
    interformer = run("interformer")
    for way in WAYS_OF_FOUR:
        assert_same(found, f"interformer-{way}", interformer)


def assert_same(found: list[dict[str, Any]], name: str, expected: dict[str, Any], metrics: bool = True) -> None:
    """On every rank the losses and metrics of one process."""
    for of_rank in found:
        ours = of_rank[name]
        assert ours["steps"] == list(range(1, STEPS + 1)), name
        assert ours["losses"] == pytest.approx(expected["losses"], rel=0, abs=TOLERANCE), name
        for split in ("valid", "test") if metrics else ():
            assert ours["metrics"][split] == pytest.approx(expected["metrics"][split], abs=TOLERANCE), name


def continue_alone(out: Path) -> None:
    """For five more steps, from the checkpoint of several ranks, as if it had always been one."""
    longer = {**RUN, "steps": STEPS + 5}
    ours = train({**longer, "out": str(out)}, build=without_dropout, resume=True)
    expected = train(longer, build=without_dropout)
    assert ours.history.steps == list(range(1, STEPS + 6))
    assert ours.history.losses == pytest.approx(expected.history.losses, rel=0, abs=TOLERANCE)


def assert_own_dropout(folder: Path, found: list[dict[str, Any]]) -> None:
    states = checkpoint.load(folder / "dropout" / "checkpoints" / "step-00000002.pt")["random"]
    assert len({tuple(state["torch"].tolist()) for state in states}) == len(states) == len(found)
    assert all(of_rank["dropout"] == found[0]["dropout"] for of_rank in found)


def assert_refusals(folder: Path, found: list[dict[str, Any]]) -> None:
    """They reach every rank."""
    for rank, of_rank in enumerate(found):
        taken, divided, silent, nonfinite = of_rank["refusals"]
        assert "is not empty" in taken
        assert f"batch_size=7 must be a multiple of the {len(found)} ranks" in divided
        assert "set parallel to what they share" in silent
        assert "--replay" in nonfinite
        (saved,) = (folder / "bad").glob("nonfinite-step-*")
        assert (saved / f"batch-rank{rank}.pt").exists()
    assert (saved / "model.pt").exists()
