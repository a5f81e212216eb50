"""Operators on rows, beside attention: what a compiler would write as several passes over memory, in one.

Eager code on a GPU uses them. Code that torch.compile makes does so with GDPA_ROWWISE=compiled in the environment, and
else has the formulas: whole compiled models with these operators have run on CPUs only (torch 2.11 and 2.13).
"""

from __future__ import annotations

import os

import torch

COMPILED = os.environ.get("GDPA_ROWWISE") == "compiled"


def wanted() -> bool:
    """Whether what is being run or traced here is to use them."""
    return COMPILED or not torch.compiler.is_compiling()
