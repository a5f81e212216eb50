"""Arguments that other libraries' attention takes, or tensors' methods, and what to use here instead, which the error
message says."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Mapping
from functools import wraps
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor

P = ParamSpec("P")
R = TypeVar("R")

PADDING = (
    "padded rows are left out, not masked: gdpa.nn.Jagged.from_padded(x, mask) packs the real ones for the layers, and "
    "gdpa.attention_varlen takes cu_seqlens, or seqused_k"
)
DROPOUT = (
    "weights are not dropped inside the kernel: a random number for each score would cost more instructions than most "
    "functions have, in the forward and again in the backward. Put nn.Dropout after the attention, or drop whole keys "
    "with a mask (docs/functions.md, Dropout)"
)
# Of F.scaled_dot_product_attention, FlexAttention, FlashAttention and nn.MultiheadAttention.
INSTEAD = {
    "is_causal": "use causal=True; it is aligned to the last key (bottom right), which differs where Lq != Lk",
    "attn_mask": "mask= takes a function of positions that returns bool, lambda q_idx, kv_idx: ..., or a gdpa.Mask "
    "with tables; write a mask that is added to scores as a function of positions, s + table[q_idx, kv_idx] "
    f"(docs/positions.md). For padding: {PADDING}",
    "key_padding_mask": PADDING,
    "dropout_p": DROPOUT,
    "dropout": DROPOUT,
    "enable_gqa": "it is not needed: q may have any multiple of k's heads",
    "score_mod": "pass it as the activation: gdpa.attention(q, k, v, score_mod), with normalize as needed",
    "block_mask": "use mask=gdpa.masks.from_flex(mask_mod); blocks that it leaves empty are found automatically",
    "softmax_scale": "use scale=",
    "window_size": "use window=(left, right), with None instead of -1 for no bound",
    "softcap": "write it into the function: lambda s: f(cap * torch.tanh(s / cap))",
    "alibi_slopes": "write it into the function: lambda s, slope, *, q_idx, kv_idx: f(s - slope * (q_idx - kv_idx)), "
    "with params=(slopes,), or use gdpa.nn.ALiBi",
    "deterministic": "use torch.use_deterministic_algorithms(True)",
    "return_attn_probs": "weights are never stored; return_weights_sum=True returns the row sums",
    "return_lse": "use return_weights_sum=True",
    "need_weights": "weights are never stored; return_weights_sum=True returns the row sums",
}  # fmt: skip
FOURTH = (
    "The fourth argument is the function here, where F.scaled_dot_product_attention has attn_mask: "
    f"{INSTEAD['attn_mask']}"
)
NAMES = frozenset(INSTEAD)
_TWICE = (
    "nn.MultiheadAttention takes (x, x, x) where this takes x once; where queries, keys and values differ, "
    "use gdpa.nn.Attention"
)
# What a layer is called with elsewhere; what it is made with has INSTEAD.
INSTEAD_IN_LAYERS = {
    **INSTEAD,
    "is_causal": "pass causal=True when the layer is made, if its rows have an order",
    "need_weights": "weights are never stored",
    "average_attn_weights": "weights are never stored",
    "src_mask": INSTEAD["attn_mask"],
    "src_key_padding_mask": PADDING,
    "query": _TWICE,
    "key": _TWICE,
    "value": _TWICE,
}
NAMES_IN_LAYERS = frozenset(INSTEAD_IN_LAYERS)


def points_the_way(function: Callable[P, R]) -> Callable[P, R]:
    """``function``, which says what to write instead of an argument that another library has."""
    arguments = list(inspect.signature(function).parameters.values())
    placed = [a.name for a in arguments if a.kind is a.POSITIONAL_OR_KEYWORD]
    most = sys.maxsize if any(a.kind is a.VAR_POSITIONAL for a in arguments) else len(placed)

    @wraps(function)
    def called(*args: P.args, **kwargs: P.kwargs) -> R:
        if not NAMES.isdisjoint(kwargs):
            raise _refusal(function.__name__, INSTEAD, kwargs)
        if len(args) > most:
            raise TypeError(
                f"{function.__name__}() takes {most} positional arguments ({', '.join(placed)}), got {len(args)}: "
                "pass the others by name (other libraries have max_seqlen_q, dropout_p and the like there)"
            )
        return function(*args, **kwargs)

    return _apart(called, function.__name__)


def layer_points_the_way(forward: Callable[P, R]) -> Callable[P, R]:
    """The same of a layer's ``forward``, which others also call with x for the queries, the keys and the values."""
    arguments = [a for a in inspect.signature(forward).parameters.values() if a.kind is a.POSITIONAL_OR_KEYWORD]
    most, needed = len(arguments), [a.name for a in arguments[1:] if a.default is a.empty]
    usage = f"layer({', '.join(needed)})"

    @wraps(forward)
    def called(*args: P.args, **kwargs: P.kwargs) -> R:
        if not NAMES_IN_LAYERS.isdisjoint(kwargs):
            raise _refusal(type(args[0]).__name__, INSTEAD_IN_LAYERS, kwargs)
        if len(args) > most:
            given = f"{type(args[0]).__name__} is called as {usage}, got {len(args) - 1} arguments"
            raise TypeError(f"{given}: {_TWICE}" if needed == ["x"] else given)
        return forward(*args, **kwargs)

    return _apart(called, forward.__qualname__)


def only_a_device(device: Any, instead: str) -> None:
    """Refuse what the ``to`` of a tensor takes beside a device: a dtype would make floats of ids and offsets, too."""
    if isinstance(device, torch.dtype | Tensor):
        given = device if isinstance(device, torch.dtype) else "a tensor"
        raise TypeError(f"to() takes only a device, got {given}: {instead}")


def _apart(called: Callable[P, R], name: str) -> Callable[P, R]:
    """With code of its own: torch.compile counts recompilations by code, and gives up after eight."""
    called.__code__ = called.__code__.replace(co_name=name)
    return called


def _refusal(of: str, instead: Mapping[str, str], given: Mapping[str, Any]) -> TypeError:
    """Refused even where it asks for nothing, as others' defaults do: the next call of the same line may ask for it."""
    name = next(name for name in given if name in instead)
    value = given[name]
    nothing = f"{name}={value!r} has no effect here, leave it out. Otherwise: " if _is_nothing(value) else ""
    return TypeError(f"{of}() has no argument {name!r}: {nothing}{instead[name]}")


def _is_nothing(value: Any) -> bool:
    """None, False, 0.0 and FlashAttention's window of (-1, -1)."""
    return (
        value is None
        or (isinstance(value, int | float) and not value)
        or (isinstance(value, tuple) and value == (-1, -1))
    )
