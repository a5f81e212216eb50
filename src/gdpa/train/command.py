"""`gdpa train`: settings from a file and flags, and every end of a run as words and an exit status.

0  finished            1  refused, or failed        3  loss, gradient or prediction is inf or NaN
4  another rank is lost                128 + n  stopped by signal n, everything saved
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import click

from gdpa.commands.terminal import make_console
from gdpa.paths import SOFTMAX, check_function, check_model, check_spec, expand
from gdpa.train.config import Config, FilesData, ModelConfig, reading
from gdpa.train.config.flags import given
from gdpa.train.config.origins import ORIGINS
from gdpa.train.errors import ConfigError, LostRankError, NonFiniteError, RunFolderError, Stopped

DEFAULT_OUT = "gdpa-run"
CONFIG = "config.toml"
NONFINITE, LOST_RANK = 3, 4


def settings(values: Mapping[str, Any]) -> Config:
    """The file, or with --resume that of the run folder, or the defaults; then the flags, which win."""
    flags = given(values)
    flags.setdefault("out", DEFAULT_OUT)
    base: dict[str, Any] = {}
    if values.get("config") is not None:
        base = _without_options_of_another_model(reading.read_toml(values["config"]), flags)
        flags = {**flags, "out": given(values).get("out", base.get("out", DEFAULT_OUT))}
    elif values.get("resume") and (Path(flags["out"]) / CONFIG).is_file():
        base = reading.read_toml(Path(flags["out"]) / CONFIG)
        if "RANK" not in os.environ:
            base.pop("parallel", None)  # one process continues what several began
    elif values.get("resume") and flags.keys() <= {"out", "steps", "epochs"}:  # a folder misspelt, most likely
        raise RunFolderError(
            f"there is no run in {flags['out']!r} to continue; with settings (--config or flags), --resume starts one"
        )
    for one, other in (("steps", "epochs"), ("epochs", "steps")):
        if one in flags and other not in flags:
            base = {key: value for key, value in base.items() if key != other}
    return reading.read_config(reading.merged(base, flags))


def _without_options_of_another_model(base: dict[str, Any], flags: Mapping[str, Any]) -> dict[str, Any]:
    """What a file says of its own model is left out, and said to be, where ``--model`` names another one."""
    own, wanted = base.get("model"), flags.get("model", {}).get("name")
    if not isinstance(own, Mapping) or not isinstance(own.get("options"), Mapping) or wanted is None:
        return base  # what is no table is refused later
    name = own.get("name", ModelConfig().name)
    if wanted == name or not own["options"]:
        return base
    if _rank() == 0:
        options = ", ".join(own["options"])
        left = f"the config's options of {name} are left out ({options})"
        click.echo(f"note: {left}; --set gives those of {wanted}", err=True)
    return {**base, "model": {key: value for key, value in own.items() if key != "options"}}


def run(values: Mapping[str, Any]) -> None:
    """What the command does with its parsed options."""
    with_exit_status(lambda: _run(values))


def _run(values: Mapping[str, Any]) -> None:
    if values.get("replay") is not None:
        others = [k for k, v in values.items() if k not in ("replay", "trust") and v not in (None, False, ())]
        if others:
            names = ", ".join(map(_flag_name, others))
            raise ConfigError(f"--replay takes no option other than --trust, got {names}")
        from gdpa.train.run.nonfinite import replay

        return make_console().print(replay(values["replay"], trust=values["trust"]))
    if values.get("trust"):
        raise ConfigError("--trust needs --replay: a run trusts its own settings")
    config = settings(values)
    _check_names(config)
    if values.get("print_config"):
        from gdpa.train.config.validating import validate

        validate(config, values["resume"], values["overwrite"], told="out" in given(values))
        return click.echo(reading.to_toml(config), nl=False)
    from gdpa.train.run.start import train

    train(config, console=make_console(), resume=values["resume"], overwrite=values["overwrite"])


def _check_names(config: Config) -> None:
    """Files and names that are not there are refused before torch is imported; what a model of one's own takes as its
    activation is its own affair."""
    if isinstance(config.data, FilesData):
        try:
            expand([name for part in ("train", "valid", "test") for name in config.data.files(part)])
        except FileNotFoundError as error:
            origin = ORIGINS.get(config.data.preset or "")
            raise FileNotFoundError(f"{error}; {origin}" if origin else str(error)) from error
        if config.data.preset is not None and config.data.preset not in ORIGINS:
            raise ConfigError(f"data.preset must be one of {', '.join(ORIGINS)}, not {config.data.preset!r}")
    check_model(config.model.name)
    named = [value for name, value in config.model.options.items() if name.endswith("activation")]
    check = check_spec if ":" in config.model.name else partial(check_function, also=(SOFTMAX,))
    for spec in named:
        for one in spec if isinstance(spec, list) else [spec]:
            check(str(one))


def _flag_name(name: str) -> str:
    return "--" + name.removeprefix("top__").replace("data__", "data-").replace("_", "-")


def with_exit_status(action: Any) -> None:
    """Refusals are said once, by the first rank; what happens to a rank is said by that one."""
    try:
        action()
    except (ConfigError, RunFolderError) as error:
        _end(str(error) if _rank() == 0 else None, 1)
    except NonFiniteError as error:
        _end(str(error) if _rank() == 0 else None, NONFINITE)
    except Stopped as stop:
        _end(str(stop) if _rank() == 0 else None, 128 + stop.signal)
    except LostRankError as error:
        _end(f"{error}. --resume continues from there, even with a different number of ranks", LOST_RANK)
    except (ValueError, TypeError, ArithmeticError, ImportError, OSError) as error:
        who = f"rank {_rank()}: " if "RANK" in os.environ else ""
        hint = "; --skip-bad N leaves out up to N such rows of a pass" if getattr(error, "of_row", False) else ""
        _end(f"{who}{error}{hint}", 1)


def _rank() -> int:
    return int(os.environ.get("RANK", "0"))


def _end(message: str | None, status: int) -> None:
    if message is not None:
        click.echo(f"Error: {message}", err=True)
    sys.exit(status)
