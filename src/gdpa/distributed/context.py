"""Context parallelism: each rank takes a part of the keys. Partial outputs add up, or are merged by their row sums."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import DeviceMesh, ProcessGroup
from torch.distributed.tensor import DTensor

from gdpa import api, masks
from gdpa.api import ActivationLike, MaskLike, NormalizeLike
from gdpa.arguments import checks
from gdpa.arguments.integers import is_int
from gdpa.distributed.collectives import shared
from gdpa.distributed.division import Division
from gdpa.distributed.places import Keys, Move, is_placed, moved, moved_mask, shared_tables
from gdpa.distributed.split import each_evenly, offsets_in, span, whole_sequences
from gdpa.masks.mask import as_mask

Group = ProcessGroup | DeviceMesh | None
Window = tuple[int | None, int | None] | None


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    activation: ActivationLike = "gelu",
    *,
    group: Group = None,
    key_span: tuple[int, int] | None = None,
    params: Sequence[Tensor] = (),
    tables: Sequence[Tensor] = (),
    mask: MaskLike = None,
    normalize: NormalizeLike = None,
    sink: float | Tensor = 0.0,
    scale: float | None = None,
    out_scale: float = 1.0,
    causal: bool = False,
    window: Window = None,
    backend: str | None = None,
) -> Tensor:
    """gdpa.attention over keys that are divided among the ranks of ``group``: each rank computes a part of the sum.

    q (B, Hq, Lq, D) or (1, Hq, Lq, D), params, tables and sink are the same on all ranks; k (B, Hk, L, D) and v (B, Hk,
    L, Dv) are this rank's keys, of which there may be none, after those of lower ranks. The result (B, Hq, Lq, Dv) is
    that of all keys, the same on all ranks: row sums, positions and masks are those of the whole. Gradients of k and v
    stay with this rank, the others are of all keys.

    Args:
        group: a process group or a mesh of one dimension; all processes by default.
        key_span: (start, total), the place of this rank's first key and the number of keys in all. Only bands and
            positions need it. If it is not given, the ranks tell each other their lengths, which under a band waits for
            the GPU.
        activation, params, tables, mask, normalize, sink, scale, out_scale, causal, window, backend: see
            gdpa.attention; bands are those of all keys.

    >>> out = gdpa.distributed.attention(q, k[:, :, start:stop], v[:, :, start:stop], "silu")
    """
    return _dense(
        q, k, v, activation, process_group(group), key_span, (causal, window), mask, None, 0, params=params,
        tables=tables, normalize=normalize, sink=sink, scale=scale, out_scale=out_scale, backend=backend,
    )  # fmt: skip


def attention_varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor | None,
    cu_seqlens_k: Tensor | None,
    activation: ActivationLike = "gelu",
    *,
    group: Group = None,
    params: Sequence[Tensor] = (),
    tables: Sequence[Tensor] = (),
    mask: MaskLike = None,
    normalize: NormalizeLike = None,
    sink: float | Tensor = 0.0,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    scale: float | None = None,
    out_scale: float = 1.0,
    causal: bool = False,
    window: Window = None,
    backend: str | None = None,
) -> Tensor:
    """gdpa.attention_varlen over keys that are divided among the ranks of ``group``.

    q, cu_seqlens_q, params, tables and sink are the same on all ranks; k, v and cu_seqlens_k are this rank's keys of
    the same sequences, any of which may have none here, after those of lower ranks. The result is that of all keys, the
    same on all ranks; kv_row counts the rows of all keys, sequence by sequence. Gradients and the arguments not named
    here are those of :func:`attention`; max_seqlen_k bounds the lengths on this rank.

    A band is refused: it is laid by the length of each sequence, and the shift that this rank's part would need
    differs from sequence to sequence. ``mask=gdpa.masks.window(left, right)`` is the same, and possible.

    >>> out = gdpa.distributed.attention_varlen(q, k_part, v_part, None, cu_part, "silu")  # q shared by all sequences
    """
    return _varlen(
        q, k, v, cu_seqlens_q, cu_seqlens_k, activation, process_group(group), (causal, window), mask, None, None, 0,
        params=params, tables=tables, normalize=normalize, sink=sink, max_seqlen_q=max_seqlen_q,
        max_seqlen_k=max_seqlen_k, scale=scale, out_scale=out_scale, backend=backend,
    )  # fmt: skip


# ---- by layers: keys that all ranks hold ---------------------------------------------------------------------------
Functions = Mapping[Move, Any] | None  # made ahead, by how positions are moved; None: made when they are needed


def attention_of_all(
    q: Tensor, k: Tensor, v: Tensor, activation: ActivationLike, *, group: ProcessGroup, causal: bool, window: Window,
    mask: MaskLike, functions: Functions = None, head: int = 0, whole_keys: bool = True, **options: Any,
) -> Tensor:  # fmt: skip
    """gdpa.attention of keys that all ranks hold, of which each takes its part; all gradients are the same on all. Or,
    without ``whole_keys``, of keys that are its part. ``head``: the number of this rank's first head."""
    key_span = None
    if whole_keys:
        total = k.shape[2]
        start, stop = span(total, group)
        k, v = (shared(t, group)[:, :, start:stop] for t in (k, v))
        key_span = (start, total)
    return _dense(q, k, v, activation, group, key_span, (causal, window), mask, functions, head, **options)


def varlen_of_all(
    q: Tensor, k: Tensor, v: Tensor, cu_q: Tensor | None, cu_k: Tensor | None, activation: ActivationLike, *,
    group: ProcessGroup, causal: bool, window: Window, mask: MaskLike, functions: Functions = None, head: int = 0,
    whole_keys: bool = True, **options: Any,
) -> Tensor:  # fmt: skip
    """gdpa.attention_varlen, likewise."""
    band, keys = (causal, window), None
    if whole_keys and cu_q is not None and cu_k is not None:
        return _self(q, k, v, cu_q, cu_k, activation, group, band, mask, functions, head, **options)
    if whole_keys:
        k, v = shared(k, group), shared(v, group)
        if cu_k is None:
            total = k.shape[1]
            start, stop = span(total, group)
            keys = Keys.dense(start, total, k.shape[0], k.device)
            k, v, options["max_seqlen_k"] = k[:, start:stop], v[:, start:stop], None
        else:
            start, stop = span(k.shape[0], group)
            first = cu_k.long()[:-1]
            keys = Keys((start - first).clamp(min=0), cu_k.long().diff(), first)
            k, v, cu_k = k[start:stop], v[start:stop], offsets_in(cu_k, start, stop)
    return _varlen(q, k, v, cu_q, cu_k, activation, group, band, mask, keys, functions, head, **options)


def _self(
    q: Tensor, k: Tensor, v: Tensor, cu_q: Tensor, cu_k: Tensor, activation: Any, group: ProcessGroup,
    band: tuple[bool, Window], mask: MaskLike, functions: Functions, head: int, **options: Any,
) -> Tensor:  # fmt: skip
    """Both sides packed: each rank takes its share of each sequence's keys or, under a band, whole sequences."""
    k, v = shared(k, group), shared(v, group)
    if checks.band(*band) != (None, None):
        part, move, keys = whole_sequences(cu_q, cu_k, k.shape[0], group), Move(head, -1), None
    else:
        part, move = each_evenly(cu_q, cu_k, k.shape[0], options["max_seqlen_k"], group), Move(head, keys=True)
        assert part.first is not None
        keys = Keys(part.first, cu_k.long().diff(), cu_k.long()[:-1])
    division = _division(q, activation, options)
    activation, options = _placed(activation, move, keys, mask, functions, group, options | division.options)
    options |= {"max_seqlen_k": part.max_k, "causal": band[0], "window": band[1]}
    result = api.attention_varlen(
        shared(q, group), part.take(k), part.take(v), part.cu_q, part.cu_k, activation, **options
    )
    return division.combined(result, group)


# ---- what all have in common ---------------------------------------------------------------------------------------
def _dense(
    q: Tensor, k: Tensor, v: Tensor, activation: Any, group: ProcessGroup, key_span: Any, band: tuple[bool, Window],
    mask: MaskLike, functions: Functions, head: int, **options: Any,
) -> Tensor:  # fmt: skip
    _plain(q=q, k=k, v=v)
    left, right = checks.band(*band)
    for name, t in (("q", q), ("k", k)):
        checks.tensor(name, t, 4, "(B, H, L, D)")
    _check_span(k, key_span)
    division = _division(q, activation, options)
    options |= division.options
    if mask is not None or is_placed(activation, options["tables"]):
        if (left, right) != (None, None):  # laid as a mask, it goes by the positions of the whole
            band_mask = masks.window(left, right)
            mask = band_mask if mask is None else as_mask(mask) & band_mask
        keys = _dense_keys(k, key_span, group)
        activation, options = _placed(activation, Move(head, keys=True), keys, mask, functions, group, options)
        return division.combined(api.attention(shared(q, group), k, v, activation, **options), group)
    after = _keys_after(k, key_span, left is not None or right is not None, group)
    q, options["params"] = shared(q, group), _shared_params(options["params"], group)
    # Seen from the end of this rank's keys, a band lies `after` keys further to the right.
    right = None if right is None else right + after
    blind = 0 if left is None else max(0, after - left)  # queries at the end that see none of these keys
    if blind == 0:
        left = None if left is None else left - after
        return division.combined(api.attention(q, k, v, activation, window=(left, right), **options), group)
    seeing = max(0, q.shape[2] - blind)
    window = (0, None if right is None else right - blind)
    result = api.attention(q[:, :, :seeing], k, v, activation, window=window, **options)
    return division.combined(division.padded(result, q.shape[2] - seeing), group)


def _varlen(
    q: Tensor, k: Tensor, v: Tensor, cu_q: Tensor | None, cu_k: Tensor | None, activation: Any, group: ProcessGroup,
    band: tuple[bool, Window], mask: MaskLike, keys: Keys | None, functions: Functions, head: int, **options: Any,
) -> Tensor:  # fmt: skip
    _plain(q=q, k=k, v=v, cu_seqlens_q=cu_q, cu_seqlens_k=cu_k)
    if checks.band(*band) != (None, None):
        raise ValueError(
            f"causal={band[0]} and window={band[1]} cannot be applied to packed sequences whose keys are divided among "
            "ranks: use mask=gdpa.masks.window(left, right), or context_parallel on a layer"
        )
    checks.tensor("q", q, 3, "(rows, heads, D)")
    division = _division(q, activation, options)
    if keys is None and (mask is not None or is_placed(activation, options["tables"])):
        lengths = cu_k.diff() if cu_k is not None else torch.full((k.shape[0],), k.shape[1], device=k.device)
        keys = Keys.of_lengths(lengths, group)
    move = Move(head, keys=True)
    activation, options = _placed(activation, move, keys, mask, functions, group, options | division.options)
    return division.combined(api.attention_varlen(shared(q, group), k, v, cu_q, cu_k, activation, **options), group)


def _division(q: Tensor, activation: Any, options: dict[str, Any]) -> Division:
    """By row sums; takes the sink out of ``options``, which belongs to all ranks' sums together."""
    normalize, sink = options.pop("normalize"), options.pop("sink")
    return Division(q, activation, normalize, sink, options["params"], options["tables"])


def _placed(
    activation: Any, move: Move, keys: Keys | None, mask: MaskLike, functions: Functions, group: ProcessGroup,
    options: dict[str, Any],
) -> tuple[Any, dict[str, Any]]:  # fmt: skip
    """The function with the positions of the whole, and the options that go with it; params and tables with gradients
    of all ranks."""
    params, tables = options["params"], options["tables"]
    found = dict(options, params=_shared_params(params, group), mask=moved_mask(mask, move, keys))
    if not is_placed(activation, tables):
        return activation, found
    activation = moved(activation, move, len(params), tables) if functions is None else functions[move]
    more = () if keys is None else keys.tables
    return activation, found | {"tables": [*shared_tables(tables, group), *more]}


def _dense_keys(k: Tensor, key_span: Any, group: ProcessGroup) -> Keys:
    b, _, length, _ = k.shape
    if key_span is not None:
        return Keys.dense(key_span[0], key_span[1], b, k.device)
    return Keys.of_lengths(torch.full((b,), length, device=k.device), group)


def process_group(group: Any) -> ProcessGroup:
    """That of a mesh of one dimension, or as given; None is all processes."""
    if isinstance(group, DeviceMesh):
        if group.ndim != 1:
            raise ValueError(
                f"group is a mesh of shape {tuple(group.shape)}; pass one of its dimensions, such as mesh['keys']"
            )
        return group.get_group()
    if not dist.is_initialized():
        raise RuntimeError("torch.distributed is not initialised: call init_process_group, or start with torchrun")
    if group is None:
        group = dist.group.WORLD
    if not isinstance(group, ProcessGroup):
        raise TypeError(f"group must be a process group, a DeviceMesh or None, got {group!r}")
    return group


def _plain(**tensors: Any) -> None:
    """Each rank's own tensors: a DTensor says itself how it is divided, and no collective takes a nested one."""
    for name, t in tensors.items():
        if isinstance(t, DTensor):
            raise TypeError(f"{name} is a DTensor; pass it to gdpa.attention or gdpa.attention_varlen")
        if isinstance(t, Tensor) and t.is_nested:
            raise TypeError(
                f"{name} is a nested tensor; use gdpa.distributed.attention_varlen with packed rows and offsets"
            )


def _shared_params(params: Any, group: ProcessGroup) -> Any:
    """The params with gradients summed over ranks; what is wrong with them gdpa.attention says."""
    if not isinstance(params, tuple | list):
        return params
    return [shared(p, group) if isinstance(p, Tensor) else p for p in params]


def _check_span(k: Tensor, key_span: Any) -> None:
    if key_span is None:
        return
    pair = isinstance(key_span, tuple | list) and len(key_span) == 2
    if not pair or not all(map(is_int, key_span)):
        raise TypeError(f"key_span must be a pair of ints (start, total) or None, got {key_span!r}")
    start, total = key_span
    if start < 0 or start + k.shape[2] > total:
        raise ValueError(f"key_span={key_span} has no room for the {k.shape[2]} keys of this rank")


def _keys_after(k: Tensor, key_span: Any, banded: bool, group: ProcessGroup) -> int:
    """How many keys higher ranks have. Without a band it does not matter, and is not asked for."""
    mine = k.shape[2]
    if key_span is not None:
        return int(key_span[1] - key_span[0] - mine)
    if not banded:
        return 0
    own = torch.tensor([mine], device=k.device)
    lengths = [torch.empty_like(own) for _ in range(group.size())]
    dist.all_gather(lengths, own, group=group)
    return int(torch.cat(lengths)[dist.get_rank(group) + 1 :].sum())
