"""gdpa: attention in which softmax is replaced by any function you write.

>>> out = gdpa.attention(q, k, v, lambda s: torch.nn.functional.softplus(s) ** 2)
"""

import sys
from typing import TYPE_CHECKING

from gdpa.lazy import attributes

if TYPE_CHECKING:
    from gdpa.api import attention, attention_varlen, explain
    from gdpa.calling.warming import warm_up
    from gdpa.errors import UnsupportedActivationError, UnsupportedProblemError
    from gdpa.functions.activation import Activation, activation, activations
    from gdpa.functions.emission.handwritten import TritonSource
    from gdpa.masks import Mask
    from gdpa.merging import merge
    from gdpa.numerics import precision, set_precision
    from gdpa.packed import (
        attention_kvpacked,
        attention_qkvpacked,
        attention_varlen_kvpacked,
        attention_varlen_qkvpacked,
    )

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
_NAMES = {
    "Activation": "gdpa.functions.activation",
    "Mask": "gdpa.masks",
    "TritonSource": "gdpa.functions.emission.handwritten",
    "UnsupportedActivationError": "gdpa.errors",
    "UnsupportedProblemError": "gdpa.errors",
    "activation": "gdpa.functions.activation",
    "activations": "gdpa.functions.activation",
    "attention": "gdpa.api",
    "attention_kvpacked": "gdpa.packed",
    "attention_qkvpacked": "gdpa.packed",
    "attention_varlen": "gdpa.api",
    "attention_varlen_kvpacked": "gdpa.packed",
    "attention_varlen_qkvpacked": "gdpa.packed",
    "explain": "gdpa.api",
    "merge": "gdpa.merging",
    "precision": "gdpa.numerics",
    "set_precision": "gdpa.numerics",
    "warm_up": "gdpa.calling.warming",
}
# Loaded on first use; gdpa.train needs more than a plain installation has.
MODULES = ("bench", "data", "distributed", "integrations", "masks", "models", "nn", "serving", "train")

__getattr__ = attributes(globals(), _NAMES, MODULES)


def __dir__() -> list[str]:
    """Also what is not imported yet, for those who look for names."""
    return sorted({*globals(), *__all__})


if "torch" in sys.modules:  # then the rest is quick, and gdpa's operators are there for programs that were saved
    for _name in _NAMES:
        __getattr__(_name)
