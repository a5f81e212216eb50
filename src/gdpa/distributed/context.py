"""Context parallelism: each rank takes a part of the keys, and the partial outputs, having no softmax, add up."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed import DeviceMesh, ProcessGroup
from torch.distributed.tensor import DTensor

from gdpa import api, checks
from gdpa.api import ActivationLike
from gdpa.distributed.collectives import shared, summed
from gdpa.distributed.split import each_evenly, offsets_in, span, whole_sequences
from gdpa.normalizing import SOFTMAX

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
    scale: float | None = None,
    out_scale: float = 1.0,
    causal: bool = False,
    window: Window = None,
    backend: str | None = None,
) -> Tensor:
    """gdpa.attention over keys that are divided among the ranks of ``group``: the sum of what each makes of its own.

    q (B, Hq, Lq, D) or (1, Hq, Lq, D) and the params are the same on all ranks; k (B, Hk, L, D) and v (B, Hk, L, Dv)
    are this rank's keys, of which there may be none, after those of lower ranks. The result (B, Hq, Lq, Dv) is that of
    all keys, the same on all ranks. Gradients of q and params are of all keys, those of k and v stay with this rank.

    Args:
        group: a process group or a mesh of one dimension; all processes by default.
        key_span: (start, total), the place of this rank's first key and the number of keys in all. Only bands need it;
            where it is not given they ask the other ranks for their lengths, for which a GPU must be waited for.
        activation, params, scale, out_scale, causal, window, backend: see gdpa.attention; bands are those of all keys.

    >>> out = gdpa.distributed.attention(q, k[:, :, start:stop], v[:, :, start:stop], "silu")
    """
    ranks = process_group(group)
    checks.unplaced(activation)
    _additive(activation)
    _plain(q=q, k=k, v=v)
    left, right = checks.band(causal, window)
    for name, t in (("q", q), ("k", k)):
        checks.tensor(name, t, 4, "(B, H, L, D)")
    after = _keys_after(k, key_span, left is not None or right is not None, ranks)
    q, params = shared(q, ranks), _shared_params(params, ranks)
    options: dict[str, Any] = {"params": params, "scale": scale, "out_scale": out_scale, "backend": backend}
    # Seen from the end of this rank's keys, a band lies `after` keys further to the right.
    right = None if right is None else right + after
    blind = 0 if left is None else max(0, after - left)  # queries at the end that see none of these keys
    if blind == 0:
        left = None if left is None else left - after
        return summed(api.attention(q, k, v, activation, window=(left, right), **options), ranks)
    seeing = max(0, q.shape[2] - blind)
    window = (0, None if right is None else right - blind)
    out = api.attention(q[:, :, :seeing], k, v, activation, window=window, **options)
    return summed(F.pad(out, (0, 0, 0, q.shape[2] - seeing)), ranks)


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
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    scale: float | None = None,
    out_scale: float = 1.0,
    causal: bool = False,
    window: Window = None,
    backend: str | None = None,
) -> Tensor:
    """gdpa.attention_varlen over keys that are divided among the ranks of ``group``.

    q, cu_seqlens_q and the params are the same on all ranks; k, v and cu_seqlens_k are this rank's keys of the same
    sequences, any of which may have none here. The result is that of all keys, the same on all ranks. Gradients and the
    arguments not named here are those of :func:`attention`; max_seqlen_k bounds the lengths on this rank.

    A band is refused: it is laid by the length of each sequence, and the shift that this rank's part would need
    differs from sequence to sequence.

    >>> out = gdpa.distributed.attention_varlen(q, k_part, v_part, None, cu_part, "silu")  # q shared by all sequences
    """
    ranks = process_group(group)
    checks.unplaced(activation)
    _additive(activation)
    _plain(q=q, k=k, v=v, cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k)
    if checks.band(causal, window) != (None, None):
        raise ValueError(
            f"causal={causal} and window={window} cannot be laid on packed sequences whose keys are divided among "
            "ranks: use gdpa.distributed.attention on dense ones, or context_parallel on a layer"
        )
    out = api.attention_varlen(
        shared(q, ranks), k, v, cu_seqlens_q, cu_seqlens_k, activation, params=_shared_params(params, ranks),
        max_seqlen_q=max_seqlen_q, max_seqlen_k=max_seqlen_k, scale=scale, out_scale=out_scale, backend=backend,
    )  # fmt: skip
    return summed(out, ranks)


def attention_of_all(q: Tensor, k: Tensor, v: Tensor, *args: Any, group: ProcessGroup, **kwargs: Any) -> Tensor:
    """gdpa.attention of keys that all ranks hold, of which each takes its part. All gradients are the same on all."""
    total = k.shape[2]
    start, stop = span(total, group)
    k, v = (shared(t, group)[:, :, start:stop] for t in (k, v))
    return attention(q, k, v, *args, group=group, key_span=(start, total), **kwargs)


def varlen_of_all(
    q: Tensor, k: Tensor, v: Tensor, cu_q: Tensor | None, cu_k: Tensor | None, activation: ActivationLike, *,
    group: ProcessGroup, max_seqlen_k: int | None, causal: bool, window: Window, **kwargs: Any,
) -> Tensor:  # fmt: skip
    """gdpa.attention_varlen of keys that all ranks hold, of which each takes its part."""
    checks.unplaced(activation)
    _additive(activation)
    banded = checks.band(causal, window) != (None, None)
    k, v = shared(k, group), shared(v, group)
    if cu_q is not None and cu_k is not None:
        if banded:
            part = whole_sequences(cu_q, cu_k, k.shape[0], group)
        else:
            part = each_evenly(cu_q, cu_k, k.shape[0], max_seqlen_k, group)
        kwargs["params"] = _shared_params(kwargs["params"], group)
        out = api.attention_varlen(
            shared(q, group), part.take(k), part.take(v), part.cu_q, part.cu_k, activation, max_seqlen_k=part.max_k,
            causal=causal, window=window, **kwargs,
        )  # fmt: skip
        return summed(out, group)
    if cu_k is None:
        start, stop = span(k.shape[1], group)
        k, v, bound = k[:, start:stop], v[:, start:stop], None
    else:
        start, stop = span(k.shape[0], group)
        k, v, cu_k, bound = k[start:stop], v[start:stop], offsets_in(cu_k, start, stop), max_seqlen_k
    return attention_varlen(
        q, k, v, cu_q, cu_k, activation, group=group, max_seqlen_k=bound, causal=causal, window=window, **kwargs
    )


def _additive(activation: Any) -> None:
    """Partial outputs add up only if nothing is divided by a sum over all keys."""
    for one in activation if isinstance(activation, tuple | list) else [activation]:
        if isinstance(one, str) and one == SOFTMAX:
            raise NotImplementedError(
                "gdpa: softmax divides by a sum over all keys, and is not available where keys are divided among "
                "ranks; divide heads or sequences, or merge partial results with gdpa.merge"
            )


def process_group(group: Any) -> ProcessGroup:
    """That of a mesh of one dimension, or as given; None is all processes."""
    if isinstance(group, DeviceMesh):
        if group.ndim != 1:
            raise ValueError(
                f"group is a mesh of shape {tuple(group.shape)}; give one dimension of it, as mesh['keys']"
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
            raise TypeError(f"{name} is a DTensor; gdpa.attention and gdpa.attention_varlen take those")
        if isinstance(t, Tensor) and t.is_nested:
            raise TypeError(f"{name} is a nested tensor; gdpa.distributed.attention_varlen takes rows and offsets")


def _shared_params(params: Any, group: ProcessGroup) -> Any:
    """The params with gradients summed over ranks; what is wrong with them gdpa.attention says."""
    if not isinstance(params, tuple | list):
        return params
    return [shared(p, group) if isinstance(p, Tensor) else p for p in params]


def _keys_after(k: Tensor, key_span: Any, banded: bool, group: ProcessGroup) -> int:
    """How many keys higher ranks have. Without a band it does not matter, and is not asked for."""
    mine = k.shape[2]
    if key_span is not None:
        pair = isinstance(key_span, tuple | list) and len(key_span) == 2
        if not pair or not all(isinstance(n, checks.INTS) for n in key_span):
            raise TypeError(f"key_span must be a pair of ints (start, total) or None, got {key_span!r}")
        start, total = key_span
        if start < 0 or start + mine > total:
            raise ValueError(f"key_span={key_span} has no room for the {mine} keys of this rank")
        return total - start - mine
    if not banded:
        return 0
    own = torch.tensor([mine], device=k.device)
    lengths = [torch.empty_like(own) for _ in range(group.size())]
    dist.all_gather(lengths, own, group=group)
    return int(torch.cat(lengths)[dist.get_rank(group) + 1 :].sum())
