"""The model, the optimizer and the learning rate that a config names."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR

import gdpa
from gdpa import models
from gdpa.nn import function_parameters
from gdpa.spec import Loaded, as_function, load
from gdpa.train.config import Config, ModelConfig
from gdpa.train.errors import ConfigError
from gdpa.train.parallel import torchrec
from gdpa.train.parallel.ranks import Ranks
from gdpa.train.run.rowwise import ROWWISE, Joined, tables_of

Build = Callable[[models.Features], nn.Module]
Find = Callable[[str], Loaded]


def build_model(config: ModelConfig, features: models.Features, find: Find = load) -> nn.Module:
    """By name, or by calling module:function with the features; options that are functions may be named likewise.
    ``find`` is what makes a function of such a name, and the only thing that runs code that the config names."""
    options = {name: _function(name, value, find) for name, value in config.options.items()}
    if ":" in config.name:
        return _module(find(config.name).function(features, **options), config.name)
    return models.build(config.name, features, **options)


def build_own(build: Build, features: models.Features) -> nn.Module:
    """What the caller's function makes."""
    return _module(build(features), "build")


def _module(made: object, of: str) -> nn.Module:
    if not isinstance(made, nn.Module):
        raise TypeError(f"{of} must return the model, an nn.Module, not {made!r}")
    return made


def adapt(model: nn.Module, config: Config, ranks: Ranks) -> None:
    """What the settings ask of the model beside its own options."""
    if config.recompute:
        if not isinstance(model, models.Model):
            raise ConfigError(f"recompute=true is for the models of gdpa.models, not for {type(model).__name__}")
        model.recompute = True
    if config.table_updates != "dense":
        _set_tables(model, config, ranks)


def _set_tables(model: nn.Module, config: Config, ranks: Ranks) -> None:
    """Tables that learn row by row, here or divided among the ranks. Only gdpa.models' tables can."""
    if not (tables := tables_of(model)):
        raise ConfigError(
            f"table_updates={config.table_updates!r} is for the tables of gdpa.models, of which "
            f"{type(model).__name__} has none"
        )
    if config.tables == "torchrec":
        torchrec.divide_tables(model, table_lr(config), ranks.device)
    else:
        for table in tables:
            table.row_gradients = True


def table_lr(config: Config) -> float:
    return config.lr if config.table_lr is None else config.table_lr


def _function(name: str, value: Any, find: Find) -> Any:
    """An activation of one's own is named module:function; a list of them, one per head, may be given too."""
    if isinstance(value, list):
        return [_function(name, entry, find) for entry in value]
    if not (name.endswith("activation") and isinstance(value, str) and ":" in value):
        return value
    with torch.device("cpu"):  # also where a model is made without memory: a module's parameters say where they start
        loaded = as_function(find(value))
    return gdpa.activation(loaded.function) if loaded.module is None else loaded.module


def build_saved(config: ModelConfig, features: models.Features, trust: bool, where: Path) -> nn.Module:
    """The model that a file names. Code of its choice is run only if whoever asked for the file said so."""

    def refuse(spec: str) -> Loaded:
        raise ValueError(
            f"{str(where)!r} names code that would be imported and run: {spec!r}. If you trust whoever wrote it, pass "
            "trust=True (--trust on the command line); or pass build, which makes the model"
        )

    return build_model(config, features, load if trust else refuse)


def names_code(config: ModelConfig) -> bool:
    """Whether building the model takes code that is not gdpa's."""
    functions = [value for name, value in config.options.items() if name.endswith("activation")]
    return any(":" in str(named) for named in (config.name, *functions))


def make_optimizer(config: Config, model: nn.Module, mixed: bool) -> torch.optim.Optimizer:
    """``mixed``: some parameters are DTensors and others are not, which torch's fused loops over all cannot take."""
    cls = {"adam": torch.optim.Adam, "adamw": torch.optim.AdamW}[config.optimizer]
    foreach = False if mixed else None
    modules = [] if config.table_updates == "dense" else tables_of(model)
    tables = [p for module in modules for p in module.parameters()]
    others = [p for p in model.parameters() if not any(p is table for table in tables)]
    dense = cls(_groups(config, model, others), lr=config.lr, weight_decay=config.weight_decay, foreach=foreach)
    if fused := torchrec.tables_of(model):
        return Joined([dense, torchrec.FusedRows(fused, table_lr(config))])
    if not tables:
        return dense
    return Joined([dense, ROWWISE[config.table_updates](tables, lr=table_lr(config), modules=modules)])


def _groups(config: Config, model: nn.Module, parameters: list[nn.Parameter]) -> list[dict[str, Any]]:
    """With weight decay, the params of attention's functions are a group of their own that has none."""
    shape = {id(p) for p in function_parameters(model)} if config.weight_decay else set()
    exempt = [p for p in parameters if id(p) in shape]
    others = {"params": [p for p in parameters if id(p) not in shape]}
    return [others, {"params": exempt, "weight_decay": 0.0}] if exempt else [others]


def make_schedule(config: Config, optimizer: torch.optim.Optimizer) -> LambdaLR:
    """(t + 1) / warmup at first; then 1, or down to 0 at the last step, straight or along a cosine."""

    def factor(step: int) -> float:
        if step < config.warmup:
            return (step + 1) / config.warmup
        if config.schedule == "constant" or config.steps is None:
            return 1.0
        done = min(1.0, (step - config.warmup) / (config.steps - config.warmup))
        return 1.0 - done if config.schedule == "linear" else 0.5 * (1 + math.cos(math.pi * done))

    return LambdaLR(optimizer, factor)
