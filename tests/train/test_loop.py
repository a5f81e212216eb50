"""train(): what it computes, what it returns, what it writes."""

from __future__ import annotations

import contextlib
import io
import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from rich.console import Console
from tiny import build, settings, without_dropout

import gdpa.data
from gdpa import lazy
from gdpa.models import Features
from gdpa.train import Config, ConfigError, Progress, load_model, make_config, train
from gdpa.train.data.splits import open_splits
from gdpa.train.storage import checkpoint


def test_plain_loop_gives_the_same_losses() -> None:
    """The same as the loop that everyone writes, over two passes with a last batch that is not full."""
    config = make_config(settings(epochs=2, clip=0.5, optimizer="adamw", weight_decay=0.1, warmup=5))
    result = train(config, build=without_dropout)
    torch.manual_seed(0)
    splits = open_splits(config)
    model = without_dropout(Features.of(splits.train))
    exempt = list(model.attention.attention.params)
    others = [p for p in model.parameters() if all(p is not one for one in exempt)]
    groups = [{"params": others}, {"params": exempt, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=0.01, weight_decay=0.1)
    losses = []
    for _ in range(2):
        for batch in gdpa.data.batches(splits.train, 8):
            for group in optimizer.param_groups:
                group["lr"] = 0.01 * min(1.0, (len(losses) + 1) / 5)
            loss = F.binary_cross_entropy_with_logits(model(batch), batch.labels)
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            losses.append(loss.item())
    assert result.steps == len(losses) == 16
    assert result.history.steps == list(range(1, 17))
    assert result.history.losses == pytest.approx(losses, rel=1e-6)


def test_parts_of_a_batch_add_up() -> None:
    whole = train(settings(steps=9, clip=0.3), build=without_dropout).history.losses
    parts = train(settings(steps=9, clip=0.3, accumulate=4), build=without_dropout).history.losses
    assert parts == pytest.approx(whole, rel=1e-5)


def test_result_without_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is written, the generators of the program are left alone, and the best weights come back."""
    monkeypatch.chdir(tmp_path)
    before = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()
    seen: list[Progress] = []
    config = make_config(settings(steps=12, eval_every=4, best="logloss", lr=0.3))
    result = train(config, build=build, on_step=seen.append)
    assert not list(tmp_path.iterdir())
    after = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()
    assert torch.equal(before[0], after[0])
    assert before[1:] == after[1:]
    assert [(p.step, p.total) for p in seen] == [(i, 12) for i in range(1, 13)]
    assert [p.loss for p in seen] == result.history.losses

    valid = [e for e in result.evaluations if e.split == "valid"]
    assert [e.step for e in valid] == [4, 8, 12]
    best = min(valid, key=lambda e: e.metrics["logloss"] or 0)
    assert result.best_step == best.step < 12  # such a learning rate makes it worse
    assert result.metrics["valid"] == best.metrics
    assert result.best_checkpoint is None
    labels, losses = [], []
    with torch.no_grad():
        for batch in gdpa.data.batches(open_splits(config).test, 20):  # type: ignore[arg-type]
            losses.append(F.binary_cross_entropy_with_logits(result.model(batch), batch.labels))
            labels.append(batch.labels)
    assert result.metrics["test"]["logloss"] == pytest.approx(float(torch.stack(losses).mean()), rel=1e-5)


def test_what_is_imported_at_first_use_draws_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """gdpa.train.train imports rich, which draws from random when it is imported."""
    (tmp_path / "drawing_at_import.py").write_text("import random\n\nnumber = random.random()\n")
    monkeypatch.syspath_prepend(tmp_path)
    before = random.getstate()
    find = lazy.attributes({"__name__": "mine"}, {"number": "drawing_at_import"})
    assert 0 <= find("number") < 1
    assert random.getstate() == before


def test_run_folder(tmp_path: Path) -> None:
    out = tmp_path / "run"
    config = make_config(settings(steps=11, eval_every=3, out=str(out), tensorboard=True, log_every=2, best="gauc"))
    result = train(config, build=build)
    assert result.best_checkpoint == out / "checkpoints" / "best.pt"
    names = sorted(path.name for path in (out / "checkpoints").iterdir())
    assert names == ["best.pt", "step-00000009.pt", "step-00000011.pt"]
    records = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    trained = [r for r in records if r["event"] == "train"]
    assert [r["step"] for r in trained] == [2, 4, 6, 8, 10] == result.history.steps
    assert all(r["loss"] > 0 and r["samples_per_s"] > 0 and r["gradient_norm"] > 0 for r in trained)
    assert [(r["step"], r["split"]) for r in records if r["event"] == "eval"][:4] == [
        (s, "valid") for s in (3, 6, 9, 11)
    ]
    assert next((out / "tensorboard").iterdir()).stat().st_size > 0
    loaded = load_model(result.best_checkpoint, build)
    for name, value in result.model.state_dict().items():
        assert torch.equal(value, loaded.state_dict()[name]), name


@pytest.mark.parametrize("name", ["din", "hstu"])
def test_named_models_load_without_help(name: str, tmp_path: Path) -> None:
    model = {"name": name, "options": {"dim": 4, "hidden": [4]}}
    config = settings(steps=2, out=str(tmp_path / "run"), model=model)
    result = train(config)
    assert result.best_checkpoint is not None
    loaded = load_model(result.best_checkpoint)
    batch = next(gdpa.data.batches(open_splits(make_config(config)).train, 4))
    assert torch.equal(loaded(batch), result.model(batch))


@pytest.mark.parametrize("what", ["name", "activation", "query_activation"])
def test_code_named_by_a_checkpoint_runs_only_if_asked_to(what: str, tmp_path: Path) -> None:
    ran, code = tmp_path / "ran", tmp_path / "theirs.py"
    code.write_text(f"import pathlib, torch\npathlib.Path({str(ran)!r}).touch()\nf = torch.tanh\n")
    config = settings(steps=1, out=str(tmp_path / "run"), model={"name": "din", "options": {"dim": 4, "hidden": [4]}})
    saved = train(config).best_checkpoint
    assert saved is not None
    state = checkpoint.load(saved)
    named = {"name": f"{code}:f"} if what == "name" else {"name": "din", "options": {what: ["silu", [f"{code}:f"]]}}
    torch.save({**state, "config": {**state["config"], "model": named}}, saved)
    with pytest.raises(ValueError, match=r"imported and run: .*theirs\.py:f'. If you trust .* trust=True"):
        load_model(saved)
    assert not ran.exists()
    with contextlib.suppress(Exception):  # this code makes no model
        load_model(saved, trust=True)
    assert ran.exists()


def test_loss_falls() -> None:
    """Ten passes over sixteen samples can be learned by heart."""
    result = train(settings(steps=40, lr=0.03, data={"size": 16, "valid_size": 0}), build=without_dropout)
    assert result.history.losses[-1] < 0.5 * result.history.losses[0]


def test_schedules() -> None:
    from gdpa.train.run.building import make_schedule

    def rates(**changes: Any) -> list[float]:
        config = Config(lr=1.0, steps=8, warmup=2, **changes)
        optimizer = torch.optim.Adam([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
        schedule, found = make_schedule(config, optimizer), []
        for _ in range(8):
            found.append(schedule.get_last_lr()[0])
            optimizer.step()
            schedule.step()
        return found

    assert rates() == pytest.approx([0.5, 1, 1, 1, 1, 1, 1, 1])
    assert rates(schedule="linear") == pytest.approx([0.5, 1, 1, 5 / 6, 4 / 6, 3 / 6, 2 / 6, 1 / 6])
    assert rates(schedule="cosine")[2:] == pytest.approx([0.5 * (1 + np.cos(np.pi * t / 6)) for t in range(6)])


def test_bf16_autocast() -> None:
    full = train(settings(steps=6), build=without_dropout).history.losses
    half = train(settings(steps=6, dtype="bf16"), build=without_dropout)
    assert half.history.losses != full
    assert half.history.losses == pytest.approx(full, rel=0.02)
    assert all(p.dtype == torch.float32 for p in half.model.parameters())


def test_compiled_once_for_all_lengths(monkeypatch: pytest.MonkeyPatch) -> None:
    """aot_eager: all of the compiler but its code generator."""
    from functools import partial

    from torch._dynamo.utils import counters

    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager"))
    torch._dynamo.reset()
    config = settings(steps=8, data={"size": 64, "valid_size": 0, "test_size": 0, "longest": 20})
    plain = train(config, build=without_dropout).history.losses
    counters.clear()
    compiled = train({**config, "compile": True}, build=without_dropout).history.losses
    assert compiled == pytest.approx(plain, rel=1e-5)
    assert counters["stats"]["unique_graphs"] == 1


# ---- CSV files -------------------------------------------------------------------------------------------------------
def write_csv(path: Path, rows: int, seed: int, bad: str = "") -> None:
    rng = np.random.default_rng(seed)
    lines = ["label,user_id,item_id,cate_id,item_history,cate_history"]
    for _ in range(rows):
        items = rng.integers(1, 9, rng.integers(0, 5))
        item = rng.integers(1, 9)
        history, kinds = "^".join(map(str, items)), "^".join(str(i % 3) for i in items)
        lines.append(f"{rng.integers(0, 2)},{rng.integers(1, 4)},{item},{item % 3},{history},{kinds}")
    path.write_text("\n".join(lines) + "\n" + bad)


def csv_settings(folder: Path, **changes: Any) -> dict[str, Any]:
    write_csv(folder / "train.csv", 37, 1)
    write_csv(folder / "test.csv", 20, 2)
    train_, test = str(folder / "train.csv"), str(folder / "test.csv")
    data = {
        "source": "csv",
        "train": train_,
        "valid": test,
        "test": test,
        "preset": "AmazonElectronics_x1",
        "shuffle": 10,
    }
    return {"batch_size": 8, "data": data, **changes}


def test_csv(tmp_path: Path) -> None:
    config = csv_settings(tmp_path, epochs=2, out=str(tmp_path / "run"), seed=3)
    result = train(config, build=build)
    assert result.steps == 10
    assert result.metrics["valid"] == result.metrics["test"]
    assert gdpa.data.Vocabularies.load(tmp_path / "run" / "vocabularies.json").sizes()["item_id"] == 2 + 8
    again = train({**config, "out": None}, build=build)
    assert again.history.losses == result.history.losses  # and it is shuffled differently by another seed
    assert train({**config, "out": None, "seed": 4}, build=without_dropout).history.losses != again.history.losses


def test_bad_rows_stop_with_their_line(tmp_path: Path) -> None:
    config = csv_settings(tmp_path, epochs=1)
    write_csv(tmp_path / "train.csv", 9, 1, "perhaps,1,1,1,,\n")
    with pytest.raises(gdpa.data.DataError, match=r"train\.csv:11, column 'label'"):
        train(config, build=build)


# ---- refusals --------------------------------------------------------------------------------------------------------
def test_refusals(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="resume needs out"):
        train(settings(), resume=True)
    with pytest.raises(ConfigError, match="contradict"):
        train(settings(out=str(tmp_path / "x")), resume=True, overwrite=True)
    with pytest.raises(ConfigError, match="parallel='ddp' needs ranks: torchrun"):
        train(settings(parallel="ddp"))
    with pytest.raises(ValueError, match="no_such"):
        train(settings(model={"name": "no_such"}))
    with pytest.raises(ValueError, match=r"logits of shape \(8,\), not \(8, 1\)"):
        train(settings(steps=1), build=lambda features: torch.nn.Sequential(_Dense(), torch.nn.Linear(4, 1)))
    with pytest.raises(TypeError, match=r"the model must give a tensor of logits of shape \(8,\), not a tuple"):
        train(settings(steps=1), build=lambda features: _Pair())
    with pytest.raises(TypeError, match=r"build must return the model, an nn\.Module, not None"):
        train(settings(steps=1), build=lambda features: None)  # type: ignore[arg-type, return-value]
    with pytest.raises(TypeError, match=r"builtins:repr must return the model, an nn\.Module, not "):
        train(settings(steps=1, model={"name": "builtins:repr"}))
    if not torch.cuda.is_available():
        with pytest.raises(ConfigError, match="no GPU"):
            train(settings(device="cuda"))


class _Dense(torch.nn.Module):
    def forward(self, batch: gdpa.data.Batch) -> torch.Tensor:
        return batch.dense


class _Pair(torch.nn.Module):
    def forward(self, batch: gdpa.data.Batch) -> tuple[torch.Tensor, torch.Tensor]:
        return batch.labels, batch.labels


class _Constant(torch.nn.Module):
    """Its logits are a view of the parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.bias = torch.nn.Parameter(torch.zeros(1))

    def forward(self, batch: gdpa.data.Batch) -> torch.Tensor:
        return self.bias.expand(len(batch))


def test_logits_may_be_a_view_of_a_parameter() -> None:
    """Without gradients it requires them all the same, which numpy refuses."""
    found = train(settings(steps=2), build=lambda features: _Constant())
    assert found.metrics["valid"]["auc"] == 0.5


@pytest.mark.parametrize("content", [b"a,b\n1,2\n", b"", b"\x80\x02}q\x00."])
def test_what_is_no_checkpoint_is_named(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "good.csv"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=r"good\.csv' is not a checkpoint of gdpa train \("):
        load_model(path)
    with pytest.raises(FileNotFoundError, match=r"none\.pt"):
        load_model(tmp_path / "none.pt")


# ---- what is shown ---------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("out", [None, "run"])
def test_without_a_defined_metric_the_last_weights_are_the_best(out: str | None, tmp_path: Path) -> None:
    said = io.StringIO()
    config = settings(steps=3, eval_every=1, data={"valid_size": 1}, out=None if out is None else str(tmp_path / out))
    result = train(config, build=build, console=Console(file=said))
    assert [e.metrics["auc"] for e in result.evaluations if e.split == "valid"] == [None] * 3
    assert result.best_step == 3
    assert said.getvalue().count("best='auc' is not defined on the validation samples") == 1


def test_lines_for_machines_and_a_table_for_people() -> None:
    text = io.StringIO()
    train(settings(steps=4, eval_every=2), build=build, console=Console(file=text, width=200))
    events = [json.loads(line) for line in text.getvalue().splitlines()]
    assert [e["event"] for e in events] == ["begin", "eval", "eval", "eval", "end"]
    assert events[-1]["metrics"]["test"]["samples"] == 20
    text = io.StringIO()
    console = Console(file=text, width=200, force_terminal=True)
    train(settings(steps=4, eval_every=2), build=build, console=console)
    # What the bar says while it runs is drawn now and then, so a run this short may end before.
    for word in ("loss", "valid", "test", "gauc", "best step", "samples per s"):
        assert word in text.getvalue()
