"""Settings: from files, flags and Python alike; what is not known or not possible is refused by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from gdpa.cli import main
from gdpa.train import Config, ConfigError, make_config, read_toml, to_toml
from gdpa.train.config import CsvData
from gdpa.train.config.reading import differences, parse_value
from gdpa.train.data.splits import schema_of

FILE = """
batch_size = 64
epochs = 3
lr = 0.01

[data]
size = 500

[model]
name = "interformer"

[model.options]
activation = "silu"
hidden = [8, 4]
"""


def print_config(*arguments: str) -> Result:
    return CliRunner().invoke(main, ["train", "--print-config", *arguments], catch_exceptions=False)


def test_defaults_and_the_round_trip_through_toml(tmp_path: Path) -> None:
    for config in (
        Config(),
        make_config({"steps": 3, "clip": 1, "data": {"size": 7}, "model": {"options": {"a": [1]}}}),
    ):
        path = tmp_path / "config.toml"
        path.write_text(to_toml(config))
        assert make_config(read_toml(path)) == config
    assert Config().epoch_limit == 1
    assert make_config({"steps": 3}).epoch_limit is None
    assert isinstance(make_config({"clip": 1}).clip, float)
    assert make_config({"clip": float("inf")}).clip == float("inf")  # norms are computed, none is too large
    assert make_config({"seed": 2**63 - 1}).seed == 2**63 - 1


def test_flags_win_over_the_file(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_text(FILE)
    arguments = ("--lr", "0.5", "--steps", "9", "--data-longest", "7", "--set", "activation=relu", "--set", "dim=8")
    result = print_config("--config", str(path), *arguments, "--compile", "--out", "somewhere")
    assert result.exit_code == 0
    (tmp_path / "printed.toml").write_text(result.output)
    config = make_config(read_toml(tmp_path / "printed.toml"))
    assert (config.batch_size, config.lr, config.steps, config.epochs) == (64, 0.5, 9, None)
    assert (config.data.size, config.data.longest) == (500, 7)  # type: ignore[union-attr]
    assert config.model.options == {"activation": "relu", "hidden": [8, 4], "dim": 8}
    assert (config.compile, config.out) == (True, "somewhere")


def test_another_model_has_options_of_its_own(tmp_path: Path) -> None:
    """Those of the file's model are left out, which is said."""
    path = tmp_path / "run.toml"
    path.write_text('[model]\nname = "transformer"\noptions = {activation = "relu", num_heads = 2}\n')
    result = print_config("--config", str(path), "--model", "din", "--set", "dim=8")
    assert result.stderr == (
        "note: the config's options of transformer are left out (activation, num_heads); --set gives those of din\n"
    )
    (tmp_path / "printed.toml").write_text(result.stdout)
    model = make_config(read_toml(tmp_path / "printed.toml")).model
    assert (model.name, model.options) == ("din", {"dim": 8})
    same = print_config("--config", str(path), "--model", "transformer")
    assert (same.exit_code, same.stderr) == (0, "")
    assert "num_heads = 2" in same.stdout


def test_a_module_of_ones_own_is_printed_too(tmp_path: Path) -> None:
    """The model is made without memory, and the module's parameters have values all the same."""
    path = tmp_path / "mine.py"
    path.write_text("import torch\n\n\nclass Slope(torch.nn.PReLU):\n    pass\n")
    result = print_config("--set", f"activation={path}:Slope")
    assert result.exit_code == 0, result.output
    assert "mine.py:Slope" in result.output


@pytest.mark.parametrize(
    ("text", "value"),
    [("2", 2), ("0.5", 0.5), ("true", True), ("[1, 2]", [1, 2]), ("silu", "silu"), ("a.b:c", "a.b:c"), ('"2"', "2")],
)
def test_values_of_set(text: str, value: object) -> None:
    assert parse_value(text) == value


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"batchsize": 3}, "unknown key 'batchsize'; known keys: out, seed, data, model, batch_size"),
        ({"data": {"longst": 3}}, "unknown key 'data.longst'; known keys: data.source, data.seed, data.size"),
        ({"data": {"train": "x.csv"}}, "'data.train' of this source of data: it goes with data.source = \"files\""),
        ({"data": {"source": "files", "items": 3}}, 'it goes with data.source = "synthetic" (--data synthetic); known'),
        ({"data": {"source": "sql"}}, "data.source must be one of synthetic, files, csv, not 'sql'"),
        ({"data": {"source": "csv"}}, "data.train must name"),
        ({"data": {"source": "csv", "train": "x"}}, "data.preset or data.schema"),
        ({"data": 3}, "data.source must be one of"),
        ({"model": {"nam": "din"}}, "unknown key 'model.nam'; known keys: model.name, model.options"),
        ({"model": "din"}, "model must be a table, not 'din'"),
        ({"batch_size": 0}, "batch_size must be at least 1, not 0"),
        ({"batch_size": True}, "batch_size must be of type int, not True"),
        ({"batch_size": 2.5}, "batch_size must be of type int, not 2.5"),
        ({"lr": "high"}, "lr must be of type float, not 'high'"),
        ({"lr": float("nan")}, "lr must be at least 0"),
        ({"lr": float("inf")}, "lr must be a finite number, not inf"),
        ({"weight_decay": float("inf")}, "weight_decay must be a finite number, not inf"),
        ({"timeout": float("inf")}, "timeout must be a finite number, not inf"),
        ({"lr": 10**400}, "lr must be a whole number of at most 64 bits"),
        ({"seed": 2**63}, "seed must be a whole number of at most 64 bits, not 9223372036854775808"),
        ({"data": {"seed": -(2**63) - 1}}, "data.seed must be a whole number of at most 64 bits"),
        ({"lr": 1e300}, "lr must lie between 1e-37 and 1e+37, which float32 holds, not 1e+300"),
        ({"lr": 1e38}, "lr must lie between"),  # ten times as much at the first step
        ({"lr": 1e-60}, "lr must lie between"),
        ({"weight_decay": 1e300}, "weight_decay must lie between"),
        ({"table_lr": 1e300, "table_updates": "rowwise_adam"}, "table_lr must lie between"),
        ({"clip": 1e-60}, "clip must lie between 1e-37 and inf"),
        ({"lr": 0}, "lr must be positive"),
        ({"clip": 0.0}, "clip must be positive"),
        ({"optimizer": "sgd"}, "optimizer must be one of adam, adamw, not 'sgd'"),
        ({"steps": 3, "epochs": 2}, "steps=3 and epochs=2: give one"),
        ({"schedule": "cosine"}, "schedule='cosine' needs steps"),
        ({"schedule": "linear", "steps": 5, "warmup": 5}, "warmup=5 must be less than steps=5"),
        ({"batch_size": 8, "accumulate": 3}, "batch_size=8 must be a multiple of accumulate=3"),
        ({"tensorboard": True}, "tensorboard=true needs out"),
        (None, "config must be a Config or a table of settings, not None"),
    ],
)
def test_refusals(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        make_config(values)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (("--batch-size", "none"), 2, "not a valid integer"),
        (("--optimizer", "sgd"), 2, "'sgd' is not one of"),
        (("--no-such-flag",), 2, "No such option"),
        (("--set", "layers"), 1, "must look like option=value"),
        (("--set", "dim=4", "--set", "dim=8"), 1, "--set gives dim twice, 4 and 8; a list is one, in brackets"),
        (("--data", "csv", "--data-train", "x", "--data-size", "3"), 1, "unknown key 'data.size'"),
        (("--steps", "3", "--epochs", "3"), 1, "give one of the two"),
    ],
)
def test_refused_flags(arguments: tuple[str, ...], code: int, message: str) -> None:
    result = print_config(*arguments)
    assert result.exit_code == code
    assert message in result.output


def test_a_broken_file_is_named(tmp_path: Path) -> None:
    path = tmp_path / "broken.toml"
    path.write_text("lr = = 3")
    result = print_config("--config", str(path))
    assert result.exit_code == 1
    assert "broken.toml" in result.output
    path.write_text("unknown = 3\n")
    assert "unknown key 'unknown'" in print_config("--config", str(path)).output


def test_what_a_continued_run_may_change() -> None:
    old = make_config({"steps": 5, "model": {"options": {"dim": 4}}})
    assert not differences(old, make_config({"steps": 9, "device": "cpu", "model": {"options": {"dim": 4}}}))
    found = differences(old, make_config({"steps": 5, "lr": 0.1, "model": {"options": {"dim": 8, "deep": True}}}))
    assert sorted(found) == ["lr: 0.001 -> 0.1", "model.options.deep: None -> True", "model.options.dim: 4 -> 8"]
    scheduled = {"schedule": "linear", "steps": 5}
    assert differences(make_config(scheduled), make_config({**scheduled, "steps": 6})) == ["steps: 5 -> 6"]


# ---- schemas of files ------------------------------------------------------------------------------------------------
SCHEMA: dict[str, Any] = {
    "label": "click",
    "group": "user",
    "numeric": ["age", {"name": "price", "log1p": True}],
    "categorical": ["item"],
    "histories": [{"name": "bought", "columns": [{"name": "items", "vocabulary": "item"}], "max_len": 5}],
    "min_count": 2,
}


def test_schema_from_a_table() -> None:
    schema = schema_of(CsvData(train="x", schema=SCHEMA))
    assert [column.log1p for column in schema.numeric] == [False, True]
    assert schema.histories[0].columns[0].vocabulary_name == "item"
    assert schema.columns == ("click", "user", "age", "price", "item", "items")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"labl": "x"}, "unknown key 'data.schema.labl'; known keys: label, group"),
        ({"numeric": "price"}, "data.schema.numeric must be a list, not 'price'"),
        ({"numeric": [3]}, "data.schema.numeric must contain tables, not 3"),
        ({"histories": [{"name": "b", "columns": ["x"]}]}, "the key 'data.schema.histories.max_len' of 'b' is missing"),
        ({"histories": [{"name": "b", "max_len": 3}]}, "the history 'b' needs at least one column"),
        ({"numeric": [{"name": "price", "log1p": "false"}]}, "log1p of 'price' must be true or false, not 'false'"),
        ({"categorical": ["item", "click"]}, "the label 'click' is also a feature"),
        (
            {"histories": [{"name": "b", "columns": [{"name": "x", "vocab": "item"}], "max_len": 3}]},
            "'data.schema.histories.columns.vocab'; known keys: name, vocabulary, kind",
        ),
        ({"group": ["user"]}, "data.schema: group must be the name of a column, not ['user']"),
        ({"bags": [{"name": "item", "vocabulary": 3}]}, "data.schema.bags: vocabulary of Bag must be text, not 3"),
        ({"numeric": [{"log1p": True}]}, "the key 'data.schema.numeric.name' is missing"),
        ({"histories": [{"name": "b", "columns": ["x"], "max_len": 3, "maxlen": 2}]}, "'data.schema.histories.maxlen'"),
    ],
)
def test_refused_schemas(change: dict[str, Any], message: str) -> None:
    data = {"source": "files", "train": "x", "schema": {**SCHEMA, **change}}
    for refused in (lambda: schema_of(CsvData(train="x", schema=data["schema"])), lambda: make_config({"data": data})):
        with pytest.raises(ConfigError, match=r"data\.schema") as caught:
            refused()
        assert message in str(caught.value)


def test_unknown_preset() -> None:
    with pytest.raises(ConfigError, match=r"AmazonElectronics_x1, .*, KuaiRand, not 'Movies'"):
        schema_of(CsvData(train="x", preset="Movies"))
