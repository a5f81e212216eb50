"""inf and NaN stop a run before they reach the weights, with everything needed to look into it."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from tiny import Tiny, settings
from torch import Tensor, nn

from gdpa.data import Batch
from gdpa.models import Features
from gdpa.train import NonFiniteError, replay, train
from gdpa.train.run.nonfinite import from_plain, to_plain
from gdpa.train.storage import checkpoint
from gdpa.train.storage.checkpoint import Checkpoints


class Poisoned(Tiny):
    """The logit of samples of a rare user is NaN, or only its gradient."""

    def __init__(self, features: Features, where: str) -> None:
        super().__init__(features, dropout=0.0)
        self.where = where
        self.last = nn.Identity()

    def forward(self, batch: Batch) -> Tensor:
        logits = super().forward(batch)
        rare = batch.groups == 3
        if self.where == "loss":
            return self.last(torch.where(rare, logits * float("nan"), logits))
        if self.where == "gradient":  # sqrt(0) is 0, its derivative is infinite
            return self.last(logits + rare * (logits * 0).abs().sqrt())
        return self.last(logits if self.training else logits * float("nan"))


def poisoned(where: str) -> Any:
    return lambda features: Poisoned(features, where)


@pytest.mark.parametrize(
    ("where", "problem"), [("loss", "the loss is nan"), ("gradient", "norm of the gradient is nan")]
)
def test_stops_with_the_batch_saved(where: str, problem: str, tmp_path: Path) -> None:
    out = tmp_path / "run"
    config = settings(steps=9, checkpoint_every=1, out=str(out))
    with pytest.raises(NonFiniteError, match=problem) as caught:
        train(config, build=poisoned(where))
    saved = caught.value.saved
    assert saved == out / f"nonfinite-step-{caught.value.step:08d}"
    assert f"gdpa train --replay {saved}" in str(caught.value)
    model = torch.load(saved / "model.pt", weights_only=True)
    assert all(value.isfinite().all() for value in model["model"].values())
    (plain,) = torch.load(saved / "batch-rank0.pt", weights_only=True)
    batch = from_plain(plain)
    assert len(batch) == 8
    assert (batch.groups == 3).any()
    if paths := Checkpoints(out, 1).paths():
        before = checkpoint.load(paths[-1])
        assert before["step"] == caught.value.step - 1
        for name, value in before["model"].items():
            assert torch.equal(value, model["model"][name])

    text = io.StringIO()
    Console(file=text, width=300).print(replay(saved, poisoned(where)))
    assert f"step {caught.value.step}: " in text.getvalue()
    assert "sparse.0.weight" in text.getvalue()
    assert ("last" in text.getvalue().split("-rank0.pt[0]")[1]) == (where == "loss")


def test_without_a_folder() -> None:
    with pytest.raises(NonFiniteError, match="the loss is nan") as caught:
        train(settings(steps=9), build=poisoned("loss"))
    assert caught.value.saved is None


def test_predictions() -> None:
    with pytest.raises(NonFiniteError, match="valid after step 2: 30 of 30 predictions are inf or NaN"):
        train(settings(steps=2), build=poisoned("predictions"))


def test_batches_survive_the_way_through_a_file(tmp_path: Path) -> None:
    from gdpa.data import SyntheticLog, batches

    batch = next(batches(SyntheticLog(size=5), 5))
    torch.save(to_plain(batch), tmp_path / "x.pt")
    again = from_plain(torch.load(tmp_path / "x.pt", weights_only=True))
    assert torch.equal(again.dense, batch.dense)
    assert torch.equal(again.sequences["history"].ids, batch.sequences["history"].ids)
    assert again.sequences["history"].longest == batch.sequences["history"].longest


def test_replay_of_nothing(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="contains no stopped step"):
        replay(tmp_path)
