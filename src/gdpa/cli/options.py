"""What several commands share: kinds of options, and how refusals are printed."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import click

from gdpa.errors import UnsupportedActivationError
from gdpa.paths import check_function

if TYPE_CHECKING:
    import torch

BACKENDS = ("hopper", "triton", "cpu", "reference")  # gdpa.backends.BACKENDS, which needs torch
DTYPES = click.Choice(["float32", "bfloat16", "float16"])


class Numbers(click.ParamType):
    """Comma-separated numbers: 0.5 or 0.5,1,2."""

    name = "numbers"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[float, ...]:
        try:
            return tuple(float(part) for part in value.split(",")) if isinstance(value, str) else value
        except ValueError:
            self.fail(f"{value!r} is not a list of numbers such as 0.5 or 0.5,1,2", param, ctx)


class AboveZero(click.FloatRange):
    """A positive number, neither inf nor NaN."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        number = float(super().convert(value, param, ctx))
        return number if math.isfinite(number) else self.fail(f"{value} is not a finite number", param, ctx)


class Specs(click.ParamType):
    """A function, or a name of ``also``; what is not there is refused at once, before torch is imported."""

    name = "spec"

    def __init__(self, *also: str) -> None:
        self.also = also

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        try:
            check_function(value, self.also)
        except (FileNotFoundError, ValueError) as e:
            self.fail(str(e), param, ctx)
        return value


class Seed(click.ParamType):
    """A whole number in a range that help need not show: hardly anybody leaves it."""

    name = "integer"

    def __init__(self, least: int, most: int) -> None:
        self.range = click.IntRange(least, most)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        return int(self.range.convert(value, param, ctx))


def together(ctx: click.Context, param: click.Parameter, value: tuple[tuple[float, ...], ...]) -> Any:
    """Repeated --params add up: --params 1 --params 2,3 is --params 1,2,3. None if there is none."""
    return tuple(number for numbers in value for number in numbers) if value else None


ABOVE_ZERO = AboveZero(min=0, min_open=True)
SEED = Seed(-(2**63), 2**64 - 1)  # what torch takes
FIRST_SEED = Seed(-(2**63), 2**63 - 1)  # which leaves torch's others to those that follow


@contextmanager
def refusals_as_errors() -> Iterator[None]:
    """What is refused in words is printed as such, without a traceback."""
    try:
        yield
    except UnsupportedActivationError as e:
        raise click.ClickException(f"this function cannot be compiled: {e}") from e
    except (ValueError, TypeError, FileNotFoundError) as e:
        raise click.ClickException(str(e)) from e


@contextmanager
def missing_as_errors() -> Iterator[None]:
    """What is not installed, and predictions that are no numbers, in words."""
    try:
        yield
    except (ImportError, ArithmeticError) as e:
        raise click.ClickException(str(e)) from e


def given(ctx: click.Context, name: str) -> bool:
    """Whether somebody wrote this option, rather than leaving it at its default."""
    return ctx.get_parameter_source(name) is click.core.ParameterSource.COMMANDLINE


def only_with(ctx: click.Context, mode: str, allowed: tuple[str, ...]) -> None:
    """Refuse options that ``mode`` would ignore."""
    for option in ctx.command.params:
        if given(ctx, option.name or "") and option.opts[0] not in (mode, *allowed):
            raise click.UsageError(f"{option.opts[0]} does not apply with {mode}")


def device_named(device: str | None) -> torch.device | None:
    import torch

    if device == "cuda" and not torch.cuda.is_available():
        raise click.UsageError("--device cuda: torch sees no GPU here")
    return torch.device(device) if device else None
