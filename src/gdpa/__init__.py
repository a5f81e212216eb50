"""gdpa: attention in which softmax is replaced by any function you write.

>>> out = gdpa.attention(q, k, v, lambda s: torch.nn.functional.softplus(s) ** 2)
"""

import importlib
from typing import Any

from gdpa.api import attention, attention_varlen, explain
from gdpa.errors import UnsupportedActivationError, UnsupportedProblemError
from gdpa.functions.activation import Activation, activation, activations
from gdpa.functions.emit import TritonSource
from gdpa.masks import Mask
from gdpa.merging import merge
from gdpa.numerics import precision, set_precision
from gdpa.packed import (
    attention_kvpacked,
    attention_qkvpacked,
    attention_varlen_kvpacked,
    attention_varlen_qkvpacked,
)
from gdpa.warming import warm_up

__version__ = "0.1.0"
__all__ = [
    "Activation",
    "Mask",
    "TritonSource",
    "UnsupportedActivationError",
    "UnsupportedProblemError",
    "activation",
    "activations",
    "attention",
    "attention_kvpacked",
    "attention_qkvpacked",
    "attention_varlen",
    "attention_varlen_kvpacked",
    "attention_varlen_qkvpacked",
    "explain",
    "merge",
    "precision",
    "set_precision",
    "warm_up",
]
# Loaded on first use; gdpa.train needs more than a plain installation has.
MODULES = ("bench", "data", "distributed", "masks", "models", "nn", "serving", "train")


def __getattr__(name: str) -> Any:
    """gdpa.nn and the like without importing them by name."""
    if name in MODULES:
        return importlib.import_module(f"gdpa.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
