"""Checks of the options of models, by name and value."""

from __future__ import annotations

from typing import Any

from gdpa.arguments import checks
from gdpa.nn.linear import positive


def sizes(config: Any, *names: str) -> None:
    """Ints of at least 1."""
    for name in names:
        positive(name, getattr(config, name))


def counts(config: Any, *names: str) -> None:
    """Ints of at least 0."""
    for name in names:
        value = getattr(config, name)
        if isinstance(value, bool) or not isinstance(value, int):
            raise TypeError(f"{name} must be an int, got {value!r}")
        if value < 0:
            raise ValueError(f"{name} must be at least 0, got {value}")


def window(config: Any) -> None:
    """None, or an int of at least 0."""
    if config.window is not None:
        counts(config, "window")


def widths(config: Any, *names: str) -> None:
    """Tuples of hidden widths; lists, as files have them, become tuples."""
    for name in names:
        value = getattr(config, name)
        if not isinstance(value, tuple | list):
            raise TypeError(f"{name} must be a tuple of ints, got {value!r}")
        for i, width in enumerate(value):
            positive(f"{name}[{i}]", width)
        object.__setattr__(config, name, tuple(value))


def flags(config: Any, *names: str) -> None:
    for name in names:
        if not isinstance(getattr(config, name), bool):
            raise TypeError(f"{name} must be True or False, got {getattr(config, name)!r}")


def above_zero(config: Any, *names: str) -> None:
    """Positive numbers, or None."""
    for name in names:
        value = getattr(config, name)
        if value is not None and checks.number(name, value) <= 0:
            raise ValueError(f"{name} must be positive, got {value}")


def heads(dim: int, num_heads: int, rotary: bool) -> None:
    """Heads divide the width, and rotary positions turn pairs of features."""
    if dim % num_heads != 0:
        raise ValueError(f"dim must be a multiple of num_heads, got dim={dim} and num_heads={num_heads}")
    if rotary and dim // num_heads % 2 != 0:
        raise ValueError(f"rotary needs heads of even width, got dim={dim} and num_heads={num_heads}")
