"""Training on files: several labels, weights, bags, splits, rows that cannot be read, and exact resume."""

from __future__ import annotations

import copy
import io
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner, Result
from rich.console import Console

from gdpa.cli import main
from gdpa.data import Batch, SyntheticLog, batches, collate
from gdpa.models import Features, build
from gdpa.train import Config, ConfigError, load_model, make_config, to_toml, train
from gdpa.train.config.validating import validate
from gdpa.train.data.splits import held_out_in_vain, open_splits, read_again
from gdpa.train.run.step import losses

SCHEMA: dict[str, Any] = {
    "label": ["click", "like"],
    "group": "user",
    "categorical": ["item"],
    "bags": [{"name": "genres", "vocabulary": "genre"}],
    "weight": "weight",
    "time": "time",
    "histories": [{
        "name": "seen",
        "columns": [
            {"name": "items", "vocabulary": "item"},
            {"name": "stars", "kind": "numeric"},
            {"name": "times", "kind": "time"},
        ],
        "max_len": 5,
    }],
}  # fmt: skip


def write(folder: Path, rows: int = 90, bad: tuple[int, ...] = ()) -> Path:
    lines = ["click,like,user,item,genres,weight,time,items,stars,times"]
    for n in range(rows):
        past = range(n % 6)
        lists = ["^".join(str(f(j)) for j in past) for f in (lambda j: j % 7, lambda j: j / 2, lambda j: 900 + j)]
        label = 9 if n in bad else n % 2
        lines.append(f"{label},{int(n % 3 == 0)},{n % 9},{n % 7},{'a|b' if n % 4 else ''},{n % 3},{1000 + n},"
                     + ",".join(lists))  # fmt: skip
    path = folder / "log.csv"
    path.write_text("\n".join(lines) + "\n")
    return path


def settings(path: Path, **changes: Any) -> dict[str, Any]:
    data = {"source": "files", "train": str(path), "schema": SCHEMA, "shuffle": 30, "split": "last"}
    data |= changes.pop("data", {})
    return {"data": data, "batch_size": 16, "epochs": 2, "model": {"name": "din", "options": {"dim": 4}}, **changes}


@pytest.mark.parametrize("model", ["dlrm", "din", "transformer", "hstu", "interformer", "kunlun"])
def test_every_model_has_a_head_for_each_label_and_reads_bags(model: str, tmp_path: Path) -> None:
    config = make_config(settings(write(tmp_path), model={"name": model}))
    log = open_splits(config).train
    features = Features.of(log)
    assert features.labels == ("click", "like")
    assert Features.from_dict(json.loads(json.dumps(features.to_dict()))) == features
    torch.manual_seed(0)
    network, batch = build(model, features).double(), next(batches(log, 12))
    logits = network(batch)
    assert logits.shape == (12, 2)
    logits[:, 0].sum().backward()
    heads = network.get_submodule("head.mlps")
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in heads[0].parameters())  # type: ignore[index]
    assert all(p.grad is None or not p.grad.any() for p in heads[1].parameters())  # type: ignore[index]
    if model == "kunlun":  # the ages of events, from a column of time stamps, are its positions
        assert network.get_submodule("sequences.0").age == 1
    genre = network.get_parameter("tables.of_genre")
    assert genre.grad is not None
    assert genre.grad[2:].abs().sum() > 0
    with pytest.raises(ValueError, match="the batch has no bag 'genres'"):
        network(Batch(**{**vars(batch), "bags": {}}))


@pytest.mark.parametrize("model", ["transformer", "hstu"])
def test_histories_without_a_candidate_are_named(model: str, tmp_path: Path) -> None:
    """A vocabulary that is misspelt."""
    schema = copy.deepcopy(SCHEMA)
    schema["histories"][0]["columns"][0]["vocabulary"] = "itm"
    for given, told in ((schema, f"{model} has no candidate for seen: no sparse column has a"), (SCHEMA, "")):
        options = {"dim": 8, "num_heads": 2, "num_layers": 1, "depth": 1}
        config = settings(write(tmp_path), epochs=1, data={"schema": given}, model={"name": model, "options": options})
        (tmp_path / "run.toml").write_text(to_toml(make_config(config)))
        arguments = ["train", "--config", str(tmp_path / "run.toml"), "--out", str(tmp_path / f"run{bool(told)}")]
        result = CliRunner().invoke(main, arguments)
        assert result.exit_code == 0, result.output
        assert told in " ".join(result.output.split())
        assert told or "no candidate" not in result.output


def test_an_empty_bag_is_zeros_and_order_does_not_matter() -> None:
    import numpy as np

    from gdpa.data import Events, Sample
    from gdpa.models.embedding import ContextTokens, Tables
    from gdpa.models.features import BagFeatures

    def sample(*ids: int) -> Sample:
        bag = Events(np.array(ids, dtype=np.int64).reshape(-1, 1), np.empty((len(ids), 0), np.float32))
        return Sample(np.zeros(0, np.float32), np.zeros(0, np.int64), {}, 1.0, 0, bags={"g": bag})

    features = Features((), (), (), {"v": 5}, (BagFeatures("g", "v"),))
    tables, tokens = Tables(features, 3, {}), ContextTokens(features, 3, (4,), {})
    batch = collate([sample(1, 4), sample(4, 1), sample(), sample(2)])
    found = tokens(batch.dense, tables(batch))
    table = tables.get_parameter("of_v")
    assert found.shape == (4, 1, 3)
    torch.testing.assert_close(found[:, 0], torch.stack([(table[1] + table[4]) / 2] * 2 + [torch.zeros(3), table[2]]))


def test_rows_of_bags_learn_by_rows(tmp_path: Path) -> None:
    """Their gradients are sparse then, and those of a dense backward."""
    run = settings(write(tmp_path), table_updates="rowwise_adagrad", device="cpu", epochs=1)
    log = open_splits(make_config(run)).train
    torch.manual_seed(0)
    network = build("din", Features.of(log), dim=4)
    dense, tables = copy.deepcopy(network), network.get_submodule("tables")
    tables.row_gradients = True
    batch = next(batches(log, 16))
    for model in (network, dense):
        losses(model(batch), batch).sum().backward()
    for ours, theirs in zip(network.parameters(), dense.parameters(), strict=True):
        assert ours.grad is not None
        assert theirs.grad is not None
        torch.testing.assert_close(ours.grad.to_dense() if ours.grad.is_sparse else ours.grad, theirs.grad)
    assert network.get_parameter("tables.of_genre").grad.is_sparse  # type: ignore[union-attr]
    assert len(train(run).history.losses) > 1


def test_weights_and_several_labels_in_the_loss() -> None:
    plain = collate([SyntheticLog().sample(i) for i in range(3)])
    logits = torch.tensor([[0.5, -1.0], [2.0, 0.0], [-3.0, 1.0]])
    labels = torch.tensor([[1.0, 0.0], [0.0, 0.0], [1.0, 1.0]])
    batch = Batch(**{**vars(plain), "labels": labels, "weights": torch.tensor([2.0, 0.0, 1.0])})
    p = torch.sigmoid(logits)
    each = -(labels * p.log() + (1 - labels) * (1 - p).log()).sum(1)
    torch.testing.assert_close(losses(logits, batch), each * torch.tensor([2.0, 0.0, 1.0]))
    torch.testing.assert_close(losses(logits[:, 0], plain), torch.nn.functional.binary_cross_entropy_with_logits(
        logits[:, 0], plain.labels, reduction="none"))  # fmt: skip


def test_a_run_with_several_labels(tmp_path: Path) -> None:
    result = train(settings(write(tmp_path), out=str(tmp_path / "run")))
    assert {"auc", "logloss", "like.auc", "like.logloss"} <= set(result.metrics["valid"])
    assert "like.samples" not in result.metrics["valid"]
    assert result.metrics["test"]["samples"] == 9  # one of each user
    model = load_model(result.best_checkpoint)
    batch = next(batches(open_splits(make_config(settings(tmp_path / "log.csv"))).test, 9))  # type: ignore[arg-type]
    torch.testing.assert_close(model(batch), result.model(batch))


@pytest.mark.parametrize("bad", [(), (13, 50)])
def test_resume_is_exact(bad: tuple[int, ...], tmp_path: Path) -> None:
    config = settings(write(tmp_path, bad=bad), skip_bad=len(bad), checkpoint_every=1, keep=1)
    config["data"]["split"] = None
    config["data"] = {k: v for k, v in config["data"].items() if v is not None}
    whole = train({**config, "out": str(tmp_path / "whole")})
    steps = {k: v for k, v in config.items() if k != "epochs"}
    train({**steps, "steps": 4, "out": str(tmp_path / "parts")})
    parts = train({**steps, "steps": whole.steps, "out": str(tmp_path / "parts")}, resume=True)
    assert parts.history.losses == whole.history.losses
    for a, b in zip(parts.model.parameters(), whole.model.parameters(), strict=True):
        assert torch.equal(a, b)


def test_a_bad_row_ends_a_run_and_skip_bad_continues_it(tmp_path: Path) -> None:
    path = write(tmp_path, bad=(70,))
    config = settings(path, out=str(tmp_path / "run"), checkpoint_every=1)
    config["data"] = {k: v for k, v in config["data"].items() if k != "split"} | {"shuffle": 0}
    with pytest.raises(ValueError, match=r"log\.csv:72, column 'click', value '9': the label must be 0 or 1"):
        train(config)
    result = train({**config, "skip_bad": 1}, resume=True)
    assert result.steps == 2 * 6


def test_from_published_files_to_a_trained_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The commands that the documents name; with one rating that cannot be read."""
    monkeypatch.chdir(tmp_path)
    raw = tmp_path / "ml-1m"
    raw.mkdir()
    ratings = [f"{n % 7 + 1}::{n % 11 + 1}::{n % 5 + 1}::{1000 + n}" for n in range(120)]
    (raw / "ratings.dat").write_text("\n".join(ratings) + "\n")
    (raw / "movies.dat").write_text("".join(f"{i}::Film::Action|Drama\n" for i in range(1, 12)))
    (raw / "users.dat").write_text("".join(f"{u}::F::25::3::1234\n" for u in range(1, 8)))
    assert invoke("convert", "movielens-1m", str(raw), "--out", "ml.csv").exit_code == 0
    lines = Path("ml.csv").read_text().splitlines()
    Path("ml.csv").write_text("\n".join([*lines[:50], "9" + lines[50][1:], *lines[51:]]) + "\n")
    arguments = ["train", "--data", "files", "--data-train", "ml.csv", "--data-preset", "MovieLens_1M", "--data-split",
                 "last", "--model", "kunlun", "--batch-size", "16", "--out", "run"]  # fmt: skip
    refused = invoke(*arguments)
    assert refused.exit_code == 1
    assert "ml.csv:51, column 'liked', value '9': the label must be 0 or 1; --skip-bad N leaves out" in refused.output
    result = invoke(*arguments, "--skip-bad", "1", "--overwrite")
    assert result.exit_code == 0, result.output
    assert "1 rows of the last pass could not be read and were left out" in result.output
    assert json.loads(result.output.splitlines()[-1])["metrics"]["test"]["samples"] == 7


def invoke(*arguments: str) -> Result:
    return CliRunner().invoke(main, arguments, catch_exceptions=False)


def test_lists_and_patterns(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        write(tmp_path / name, rows=20)
    names = [str(tmp_path / "a" / "log.csv"), str(tmp_path / "b" / "*.csv")]
    data = {"source": "files", "schema": SCHEMA, "train": names, "valid": names[0]}
    config = make_config({"data": data})
    splits = open_splits(config)
    assert (len(list(splits.train)), len(list(splits.valid or ()))) == (40, 20)
    assert make_config({"data": {**data, "source": "csv"}}).data.files("train") == names  # type: ignore[union-attr]


def test_a_split_that_holds_out_nothing_says_so(tmp_path: Path) -> None:
    config = make_config({"data": {"source": "files", "schema": SCHEMA, "train": str(write(tmp_path, rows=1)),
                                   "split": "user"}})  # fmt: skip
    said = held_out_in_vain(config.data, open_splits(config))
    assert said == [f"the split by user leaves no row to {what} on: there are too few rows for it"
                    for what in ("validate", "test")]  # fmt: skip


def test_doubtful_histories_are_told_of_once(tmp_path: Path) -> None:
    path = write(tmp_path)
    path.write_text(path.read_text().replace("900^901", "9000^901"))
    text = io.StringIO()
    train(settings(path, steps=4, epochs=None, eval_every=2), console=Console(file=text, width=500))
    for said in ("by times, are later than their row", "by times, are older than the one before"):
        assert text.getvalue().count(said) == 1


def test_files_that_are_read_twice_are_named(tmp_path: Path) -> None:
    """As a pattern easily means the file that was to be held out."""
    for name in ("a", "b", "c"):
        write(tmp_path).rename(tmp_path / f"{name}.csv")
    several, a, b = str(tmp_path / "*.csv"), str(tmp_path / "a.csv"), str(tmp_path / ".." / tmp_path.name / "b.csv")
    for train_on, valid, said in (
        (several, b, ["data.valid reads b.csv, as data.train does: its metrics are of rows trained on"]),
        ([several, a], None, ["data.train reads a.csv more than once"]),
        (a, b, []),
    ):
        data = {"source": "files", "schema": SCHEMA, "train": train_on, **({"valid": valid} if valid else {})}
        assert read_again(make_config({"data": data}).data) == said
    text = io.StringIO()
    data = {"train": several, "test": b, "split": None}
    train(settings(tmp_path, data=data, steps=1, epochs=None), console=Console(file=text, width=500))
    assert "data.test reads b.csv, as data.train does" in text.getvalue()


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({"split": "last", "valid": "x"}, "leave out data.valid and data.test"),
        ({"valid_share": 0.5, "test_share": 0.5}, "leave nothing to train on"),
        ({"train": [3]}, "data.train must be a file name or a list of them"),
        ({"split": "day"}, "data.split must be one of time, user, last"),
        ({"workers": -1}, "data.workers must be at least 0"),
    ],
)
def test_refusals(data: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make_config({"data": {"source": "files", "train": "x", "schema": SCHEMA, **data}})
    with pytest.raises(ValueError, match="synthetic data have no bad rows"):
        Config(skip_bad=3)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"histories": [{"name": "h", "columns": [{"name": "x", "kind": "date"}], "max_len": 3}]},
         "kind must be one of categorical, numeric, time, not 'date'"),
        ({"histories": [{"name": "h", "columns": [{"name": "x", "kind": "time", "unit": "h"}], "max_len": 3}]},
         "unit must be one of s, ms, us, ns, not 'h'"),
        ({"bags": [{"name": "g", "size": 3}]}, "unknown key 'data.schema.bags.size'"),
    ],
)  # fmt: skip
def test_refused_schemas(change: dict[str, Any], message: str, tmp_path: Path) -> None:
    config = settings(write(tmp_path), data={"schema": {**SCHEMA, **change}})
    with pytest.raises(ValueError, match=r"data\.schema") as caught:
        open_splits(make_config(config))
    assert message in str(caught.value)


def test_a_best_metric_that_no_validation_has_is_refused(tmp_path: Path) -> None:
    config = make_config(settings(write(tmp_path), best="gauc", steps=1, epochs=None))
    for refused in (train, validate):
        with pytest.raises(ConfigError, match=r"best='gauc' with data\.split='last': a group \(user\) has one row"):
            refused(config)
    validate(replace(config, best="auc"))
    validate(replace(config, data=replace(config.data, split="user")))


def test_shares_that_no_split_reads_are_refused(tmp_path: Path) -> None:
    config = make_config(settings(write(tmp_path), steps=1, epochs=None))
    for split, now in (("last", "'last'"), (None, "not given")):
        data = replace(config.data, split=split, test_share=0.3)
        for refused in (train, validate):
            with pytest.raises(ConfigError, match=rf"data\.test_share=0\.3 goes with .*; data\.split is {now}"):
                refused(replace(config, data=data))
        validate(replace(config, data=replace(data, valid_share=0.1, test_share=0.0)))
    validate(replace(config, data=replace(config.data, split="time", test_share=0.3)))


def test_validation_data_without_a_good_row(tmp_path: Path) -> None:
    """The error names the split; and what a run leaves is loaded by its folder."""
    (tmp_path / "other").mkdir()
    valid = write(tmp_path / "other", rows=3, bad=(0, 1, 2))
    config = settings(write(tmp_path), skip_bad=3, epochs=1, data={"split": None})
    with pytest.raises(ConfigError, match=r"the valid data has no samples to evaluate: all its rows \(3\) were left"):
        train({**config, "data": {**config["data"], "valid": str(valid)}})
    train({**config, "out": str(tmp_path / "run")})
    assert not load_model(tmp_path / "run").training
