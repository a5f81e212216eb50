"""Arguments of other libraries' attention, and what to use here instead: whoever writes one is told in the error."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")

PADDING = (
    "padded rows are left out, not masked: gdpa.nn.Jagged.from_padded(x, mask) packs the others for the layers, and "
    "gdpa.attention_varlen takes cu_seqlens, or seqused_k"
)
DROPOUT = (
    "weights are not dropped inside the kernel: a random number for each score would cost more instructions than most "
    "functions have, in the forward and again in the backward. Put nn.Dropout behind the attention, or drop whole keys "
    "by a mask (docs/functions.md, Dropout)"
)
# Of F.scaled_dot_product_attention, FlexAttention, FlashAttention and nn.MultiheadAttention.
INSTEAD = {
    "is_causal": "causal=True is meant; it ends where the keys end (bottom right), which differs where Lq != Lk",
    "attn_mask": "mask= takes a function of positions that returns bool, lambda q_idx, kv_idx: ..., or a gdpa.Mask "
    "with tables; a mask that is added to scores is a function of positions, s + table[q_idx, kv_idx] "
    f"(docs/positions.md). Of padding: {PADDING}",
    "key_padding_mask": PADDING,
    "dropout_p": DROPOUT,
    "dropout": DROPOUT,
    "enable_gqa": "it is not needed: q may have any multiple of k's heads",
    "score_mod": "it is the activation itself: gdpa.attention(q, k, v, score_mod), with normalize as it is wanted",
    "block_mask": "mask=gdpa.masks.from_flex(mask_mod) is meant; blocks that it leaves empty are found by themselves",
    "softmax_scale": "scale= is meant",
    "window_size": "window=(left, right) is meant, with None instead of -1 for no bound",
    "softcap": "write it into the function: lambda s: f(cap * torch.tanh(s / cap))",
    "alibi_slopes": "write it into the function: lambda s, slope, *, q_idx, kv_idx: f(s - slope * (q_idx - kv_idx)), "
    "with params=(slopes,), or use gdpa.nn.ALiBi",
    "deterministic": "torch.use_deterministic_algorithms(True) is meant",
    "return_attn_probs": "weights are never stored; return_weights_sum=True gives the sums of rows",
    "return_lse": "return_weights_sum=True is meant",
    "need_weights": "weights are never stored; return_weights_sum=True gives the sums of rows",
}  # fmt: skip
NAMES = frozenset(INSTEAD)


def points_the_way(function: Callable[P, R]) -> Callable[P, R]:
    """``function``, which says what to write instead of an argument that another library has."""

    @wraps(function)
    def called(*args: P.args, **kwargs: P.kwargs) -> R:
        if not NAMES.isdisjoint(kwargs):
            name = next(name for name in kwargs if name in NAMES)
            raise TypeError(f"{function.__name__}() has no argument {name!r}: {INSTEAD[name]}")
        return function(*args, **kwargs)

    # Code of its own for each: torch.compile counts recompilations by code, and gives up after eight.
    called.__code__ = called.__code__.replace(co_name=function.__name__)  # type: ignore[attr-defined]
    return called
