"""Integers as people give them: Python's, numpy's, and the symbolic ones of compiled code."""

from __future__ import annotations

import operator
from numbers import Integral
from typing import Any

import torch

INTS = (int, torch.SymInt)


def as_int(value: Any) -> Any:
    """numpy's integers as Python's, which programs and keys are made of; anything else as it is. (A tensor is not one:
    reading it would wait for its device.)"""
    return operator.index(value) if isinstance(value, Integral) and not isinstance(value, INTS) else value


def is_int(value: Any) -> bool:
    """Whether it is one of Python's, or a symbolic one."""
    return isinstance(value, INTS) and not isinstance(value, bool)
