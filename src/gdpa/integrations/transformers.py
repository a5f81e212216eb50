"""Any function as an attention of Hugging Face's transformers (extra ``transformers``).

>>> gdpa.integrations.transformers.register("gdpa_silu", "silu", out_scale=1 / 1024)
>>> model = AutoModelForCausalLM.from_config(GPT2Config(attn_pdrop=0.0), attn_implementation="gdpa_silu")

What models ask for is honoured or refused. Causal attention and the scale are the model's own; padding (a mask of two
dimensions) is left out of the computation where it is that of the queries, too, and is a mask of keys elsewhere; packed
sequences (position_ids that begin anew, or cu_seq_lens) are computed as such, and any other mask of booleans (sliding
windows, prefixes, static caches) is looked up as a table. Refused are masks that are added to scores, dropout of
weights, soft caps, sinks, position biases, and returning weights.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from gdpa import backends
from gdpa.api import ActivationLike, NormalizeLike, attention, attention_varlen
from gdpa.arguments import checks
from gdpa.arguments.normalizing import SOFTMAX
from gdpa.functions.activation import resolve_one
from gdpa.functions.modules import has_parameters
from gdpa.integrations.rows import RealRows, kept_with
from gdpa.masks import Mask

try:
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import bidirectional_mask_function, causal_mask_function, sdpa_mask
except ImportError as error:
    raise ImportError(
        "gdpa.integrations.transformers needs transformers 5.22 or newer: pip install '.[transformers]' in a clone of "
        "gdpa"
    ) from error

__all__ = ["register"]

BOTH_WAYS = "_gdpa_both_ways"  # of a mask of padding: whether it is causal, whatever the layer says
# What layers that attend within one sequence of rows are given beside these rows. Other names may be rows of keys.
NOT_ROWS = {
    "attention_mask", "cache_position", "cu_seqlens", "head_mask", "layer_head_mask", "layer_idx", "layer_past",
    "max_seqlen", "output_attentions", "past_key_value", "past_key_values", "position_embeddings", "position_ids",
    "relative_position_embeddings", "use_cache",
}  # fmt: skip
# Arguments with which models ask for more than attention with a mask.
REFUSED = {
    "softcap": "write it into the function: lambda s: f(cap * torch.tanh(s / cap))",
    "s_aux": "give register a sink",
    "position_bias": "a bias is part of the function (docs/positions.md)",
    "cache": "paged caches are not supported",
    "output_attentions": "weights are never stored",
}


def register(
    name: str,
    activation: ActivationLike,
    *,
    params: Sequence[Tensor] = (),
    normalize: NormalizeLike = None,
    sink: float | Tensor = 0.0,
    out_scale: float = 1.0,
    backend: str | None = None,
    without_dropout: bool = False,
) -> None:
    """Make ``activation`` an attention of transformers, under ``name``: attn_implementation=name.

    Args:
        name: as models are given it; a name that is registered already is replaced.
        activation, params, normalize, sink, out_scale, backend: see :func:`gdpa.attention`. An nn.Module's parameters
            are shared by all layers; ``model.function = module`` makes them the model's.
        without_dropout: leave out the dropout of weights that a model asks for in training. Without it such a model is
            refused; attn_pdrop=0.0 or attention_dropout=0.0 in its config is the other way.

    >>> register("gdpa_gelu", "gelu", normalize="abs")
    """
    if not isinstance(name, str) or not name or "|" in name or "/" in name:
        raise ValueError(f"name must be a word without '|' and '/', got {name!r}")
    checks.flag("without_dropout", without_dropout)
    checks.number("out_scale", out_scale)
    backends.check_name(backend)
    for one in activation if isinstance(activation, list | tuple) else [activation]:
        if one != SOFTMAX and not has_parameters(one):
            resolve_one(one, len(params))  # what cannot be compiled is refused here
    options = {
        "params": tuple(params), "normalize": normalize, "sink": sink, "out_scale": out_scale, "backend": backend,
    }  # fmt: skip
    AttentionInterface.register(name, _forward(name, activation, options, without_dropout))
    AttentionMaskInterface.register(name, make_mask)


def _forward(name: str, activation: Any, options: dict[str, Any], without_dropout: bool) -> Callable[..., Any]:
    def gdpa_attention_forward(
        module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None,
        dropout: float = 0.0, scaling: float | None = None, is_causal: bool | None = None, **kwargs: Any,
    ) -> tuple[Tensor, None]:  # fmt: skip
        if dropout and not without_dropout:
            raise ValueError(
                f"attn_implementation={name!r}: the model drops weights with probability {dropout}, which gdpa does "
                "not (docs/functions.md says why). Set attn_pdrop, attention_dropout, attention_probs_dropout_prob of "
                "its config to 0.0, or register with without_dropout=True"
            )
        for asked, why in REFUSED.items():
            given = kwargs.get(asked)
            if given is not None and given is not False:
                shown = f"tensor of shape {tuple(given.shape)}" if isinstance(given, Tensor) else repr(given)
                raise ValueError(f"attn_implementation={name!r} does not support {asked}={shown}: {why}")
        causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
        call = {**options, "scale": scaling}
        return _attend(module, query, key, value, attention_mask, bool(causal), activation, call, kwargs), None

    return gdpa_attention_forward


def _attend(
    module: nn.Module, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool, activation: Any,
    options: dict[str, Any], kwargs: dict[str, Any],
) -> Tensor:  # fmt: skip
    """(B, Lq, Hq, Dv)."""
    packed = mask is None or (mask.dim() == 2 and mask.dtype != torch.bool)
    if packed and kwargs.get("cu_seq_lens_q") is not None:
        return _varlen(q, k, v, causal, activation, options, kwargs)
    if mask is None:
        out = attention(q, k, v, activation, causal=causal, **options)
        return out.transpose(1, 2).contiguous()
    if mask.is_floating_point():
        raise ValueError(
            f"attention_mask of shape {tuple(mask.shape)} has dtype {mask.dtype}, to be added to scores; pass a bool "
            "mask, True where a key is visible"
        )
    if packed:
        return kept_with(mask, RealRows.of_packing).attend(q, k, v, activation, causal=causal, **options)
    if mask.dim() == 2:
        both_ways = getattr(mask, BOTH_WAYS, None)
        causal = causal if both_ways is None else not both_ways
        if not torch.compiler.is_compiling() and _is_of_queries(mask, module, q, k):
            return kept_with(mask, RealRows.of_padding).attend(q, k, v, activation, causal=causal, **options)
        seen = Mask(_key_counts, tables=(mask,))
        out = attention(q, k, v, activation, mask=seen, causal=causal, **options)
        return out.transpose(1, 2).contiguous()
    return _by_table(q, k, v, mask, activation, options)


def _is_of_queries(mask: Tensor, module: nn.Module, q: Tensor, k: Tensor) -> bool:
    """Whether the padding of keys is certainly that of queries, too. Equal lengths do not say so: a decoder may be as
    long as the encoder that it looks at. Causal masks do, which transformers makes for one sequence of rows only."""
    if q.shape[2] != k.shape[2]:
        return False
    return getattr(mask, BOTH_WAYS, None) is False or _has_one_input(type(module).forward)


@cache
def _has_one_input(forward: Callable[..., Any]) -> bool:
    """Whether queries and keys can only be those of the same hidden_states, as the arguments of ``forward`` tell."""
    names = {
        name for name, argument in inspect.signature(forward).parameters.items()
        if argument.kind is not argument.VAR_KEYWORD
    }  # fmt: skip
    return names - NOT_ROWS == {"self", "hidden_states"}


def _varlen(
    q: Tensor, k: Tensor, v: Tensor, causal: bool, activation: Any, options: dict[str, Any], kwargs: dict[str, Any]
) -> Tensor:
    """Sequences end to end in a batch of one, as a collator has told where they begin."""
    if q.shape[0] != 1:
        raise ValueError(f"cu_seq_lens_q is for sequences packed in a batch of 1, this one has {q.shape[0]}")
    cu_q, cu_k = kwargs["cu_seq_lens_q"], kwargs.get("cu_seq_lens_k", kwargs["cu_seq_lens_q"])
    longest: dict[str, Any] = {f"max_seqlen_{side}": _length(kwargs.get(f"max_length_{side}")) for side in "qk"}
    q, k, v = (t[0].transpose(0, 1) for t in (q, k, v))
    out: Tensor = attention_varlen(q, k, v, cu_q, cu_k, activation, causal=causal, **longest, **options)
    return out[None]


def _length(given: Any) -> int | None:
    return int(given) if given is not None else None


def _by_table(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, activation: Any, options: dict[str, Any]) -> Tensor:
    if mask.dim() != 4 or mask.shape[-2:] != (q.shape[2], k.shape[2]):
        want = f"(B, 1 or H, {q.shape[2]}, {k.shape[2]})"
        raise ValueError(f"attention_mask must have shape {want}, got {tuple(mask.shape)}")
    batch, heads = (n if n > 1 else 1 for n in mask.shape[:2])
    fn: dict[tuple[bool, bool], Callable[..., Tensor]] = {
        (True, True): _pair,
        (False, True): _pair_of_b,
        (True, False): _pair_of_h,
        (False, False): _pair_of_both,
    }
    table = mask.bool() if heads > 1 else mask.bool()[:, 0]
    table = table if batch > 1 else table[0]
    out = attention(q, k, v, activation, mask=Mask(fn[batch == 1, heads == 1], tables=(table,)), **options)
    return out.transpose(1, 2).contiguous()


def _key_counts(b: Tensor, kv_idx: Tensor, keep: Any) -> Tensor:
    return keep[b, kv_idx]


def _pair(q_idx: Tensor, kv_idx: Tensor, keep: Any) -> Tensor:
    return keep[q_idx, kv_idx]


def _pair_of_b(b: Tensor, q_idx: Tensor, kv_idx: Tensor, keep: Any) -> Tensor:
    return keep[b, q_idx, kv_idx]


def _pair_of_h(h: Tensor, q_idx: Tensor, kv_idx: Tensor, keep: Any) -> Tensor:
    return keep[h, q_idx, kv_idx]


def _pair_of_both(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor, keep: Any) -> Tensor:
    return keep[b, h, q_idx, kv_idx]


def make_mask(
    batch_size: int, q_length: int, kv_length: int, q_offset: Any = 0, kv_offset: Any = 0,
    mask_function: Callable[..., Any] = causal_mask_function, attention_mask: Tensor | None = None, **kwargs: Any,
) -> Tensor | None:  # fmt: skip
    """What transformers hands to each layer as its attention_mask: None, (B, L) of bool for padding, (B, L) of integers
    for packed sequences, or (B, 1, Lq, Lk) of bool for all else."""
    # Queries are the last rows: what a static cache holds behind them must not be seen.
    ends = isinstance(q_offset, int) and q_offset + q_length == kv_offset + kv_length
    whole = attention_mask is None or attention_mask.shape == (batch_size, kv_length)
    plain = mask_function is bidirectional_mask_function or (mask_function is causal_mask_function and ends)
    if plain and whole:
        if attention_mask is None or _all(attention_mask):
            return None
        seen = attention_mask.view_as(attention_mask)  # the caller's may serve other masks, too
        setattr(seen, BOTH_WAYS, mask_function is bidirectional_mask_function)
        return seen
    ids = _packed_ids(mask_function)
    if ids is not None and attention_mask is None and q_length == kv_length:
        return ids
    kwargs |= {"allow_is_causal_skip": False, "allow_is_bidirectional_skip": False}
    return sdpa_mask(
        batch_size=batch_size, q_length=q_length, kv_length=kv_length, q_offset=q_offset, kv_offset=kv_offset,
        mask_function=mask_function, attention_mask=attention_mask, **kwargs,
    )  # fmt: skip


def _all(keep: Tensor) -> bool:
    """Whether there is no padding, where that can be asked."""
    return not torch.compiler.is_compiling() and bool(keep.all())


def _packed_ids(mask_function: Callable[..., Any]) -> Tensor | None:
    """(B, L): the number of each token's sequence, if the mask is causal inside packed sequences and nothing else. How
    transformers joins masks is not its public matter: what is not recognised becomes a table."""
    parts = _held(mask_function, "and_masks.<locals>.and_mask").get("mask_functions", ())
    if len(parts) != 2:
        return None
    packed, causal = reversed(parts) if parts[0] is causal_mask_function else parts  # 5.22 has them the other way round
    # Since 5.23 causal in the positions of each sequence, which are counted up by one: the same as in rows.
    inner = _held(causal, "remap_positions_for_packed_sequence.<locals>.inner_mask").get("mask_function", causal)
    ids = _held(packed, "packed_sequence_mask_function.<locals>.inner_mask").get("packed_sequence_mask")
    return ids if inner is causal_mask_function and isinstance(ids, Tensor) and ids.dim() == 2 else None


def _held(fn: Any, name: str) -> dict[str, Any]:
    """What ``fn`` holds from where it was made, if its qualified name ends with ``name``."""
    code = getattr(fn, "__code__", None)
    if code is None or not fn.__qualname__.endswith(name):
        return {}
    return {of: cell.cell_contents for of, cell in zip(code.co_freevars, fn.__closure__ or (), strict=True)}
