"""Click models, from a gdpa.data.Batch to logits: InterFormer and Kunlun, and baselines in the same harness.

>>> log = gdpa.data.SyntheticLog(seed=1)
>>> model = gdpa.models.build("interformer", Features.of(log), activation="silu")
>>> model(next(gdpa.data.batches(log, 8))).shape
torch.Size([8])
"""

from __future__ import annotations

import dataclasses
from typing import Any

from gdpa.models.base import Model
from gdpa.models.din import DIN
from gdpa.models.dlrm import DLRM
from gdpa.models.features import BagFeatures, Features, SequenceFeatures
from gdpa.models.hstu import HSTU
from gdpa.models.interformer import InterFormer
from gdpa.models.kunlun import Kunlun, SequenceSize
from gdpa.models.transformer import Transformer

MODELS: dict[str, type[Model]] = {
    "dlrm": DLRM,
    "din": DIN,
    "transformer": Transformer,
    "hstu": HSTU,
    "interformer": InterFormer,
    "kunlun": Kunlun,
}
"""The models by name, as ``build`` and ``gdpa train --model`` take them."""


def build(name: str, features: Features, *, device: Any = None, dtype: Any = None, **options: Any) -> Model:
    """The model called ``name``; ``options`` are those of its Config, with defaults for the rest.

    >>> build("interformer", Features.of(gdpa.data.SyntheticLog()), dim=32, num_heads=4).config.dim
    32
    """
    if name not in MODELS:
        raise ValueError(f"model {name!r} is unknown; known models: {', '.join(MODELS)}")
    known = [field.name for field in dataclasses.fields(MODELS[name].Config)]
    if unknown := sorted(set(options) - set(known)):
        raise ValueError(f"{name} has no option {', '.join(unknown)}; its options: {', '.join(known)}")
    return MODELS[name](features, MODELS[name].Config(**options), device=device, dtype=dtype)  # type: ignore[call-arg]


__all__ = [
    "DIN",
    "DLRM",
    "HSTU",
    "MODELS",
    "BagFeatures",
    "Features",
    "InterFormer",
    "Kunlun",
    "Model",
    "SequenceFeatures",
    "SequenceSize",
    "Transformer",
    "build",
]
