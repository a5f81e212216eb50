"""What the attention of all models has in common: softmax as one of the functions, and initialisation."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn

from gdpa.nn import SeedPooling, SelfAttention

SOFTMAX = "softmax"


def options(config: Any, out_scale: float, softmax_scale: float = 1.0) -> dict[str, Any]:
    """The arguments of a gdpa.nn layer for ``config``'s function. Sums grow with the number of keys, so they are
    scaled by ``out_scale``; averages, by softmax or ``normalize``, by ``softmax_scale``."""
    average = config.normalize is not None or _is_softmax(config.activation)
    return {
        "activation": own(config.activation), "params": config.params, "backend": config.backend,
        "normalize": config.normalize, "out_scale": softmax_scale if average else out_scale,
    }  # fmt: skip


def _is_softmax(activation: Any) -> bool:
    """Of one function, or of one for each head."""
    heads = activation if isinstance(activation, list | tuple) else [activation]
    found = [isinstance(head, str) and head == SOFTMAX for head in heads]
    if any(found) and not all(found):
        raise ValueError(
            "activation must be softmax in all heads of a model or in none, since averages and sums are scaled "
            f"differently, got {activation!r}"
        )
    return all(found)


def own(activation: Any) -> Any:
    """A module that owns params is copied for each layer, as ``params`` are; what has none is shared."""
    return copy.deepcopy(activation) if isinstance(activation, nn.Module) else activation


def start_as_average(layer: SelfAttention | SeedPooling) -> None:
    """Attention that starts near the plain average of its rows, scaled: scores around 1, values as they are.

    Most functions have f(0) = 0: with scores around 0, what they make of a sequence at first is noise. And a summary
    that lies in the space of the embeddings can be compared with them at once, by their dot products.
    """
    with torch.no_grad():
        if isinstance(layer, SelfAttention):
            biases, value = [layer.qkv.bias[: -layer.dim]], layer.qkv.weight[-layer.dim :]
        else:
            biases, value = [layer.q.bias, layer.kv.bias[: layer.dim]], layer.kv.weight[layer.dim :]
        for bias in biases:
            nn.init.constant_(bias, layer.head_dim**-0.25)  # <b, b> / sqrt(head_dim) = 1
        nn.init.eye_(value)
        nn.init.eye_(layer.out.weight)
