"""What the attention of all models has in common: softmax as one of the functions, and how it starts."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from gdpa import backends
from gdpa.models import cores
from gdpa.nn import SeedPooling, SelfAttention

SOFTMAX = "softmax"


def check(config: Any) -> None:
    """Refuses options of gdpa.attention that softmax would ignore, and unknown backends."""
    backends.check_name(config.backend)
    if config.activation == SOFTMAX:
        for name, usual in (("params", ()), ("backend", None)):
            if (value := getattr(config, name)) != usual:
                raise ValueError(f"{name}={value!r} is for gdpa.attention, which does not compute softmax")


def options(config: Any, out_scale: float, softmax_scale: float = 1.0) -> dict[str, Any]:
    """The arguments of a gdpa.nn layer for ``config``'s function. Sums grow with the number of keys, so they are
    scaled by ``out_scale``; averages by softmax by ``softmax_scale``."""
    if config.activation == SOFTMAX:
        return {"activation": "identity", "out_scale": softmax_scale}  # see with_softmax
    return {
        "activation": config.activation, "params": config.params, "out_scale": out_scale, "backend": config.backend,
    }  # fmt: skip


def with_softmax(model: nn.Module, config: Any) -> None:
    """Gives the model softmax cores, if that is its function."""
    if config.activation == SOFTMAX:
        cores.replace(model, cores.PaddedSoftmax)


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
