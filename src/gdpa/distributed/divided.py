"""gdpa.nn.Attention on several ranks: each takes a part of the heads, of the keys, or of both."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from torch import Tensor
from torch.distributed import DeviceMesh

from gdpa import checks
from gdpa.distributed import context
from gdpa.distributed.collectives import gathered, part, shared
from gdpa.distributed.linear import local, sharded
from gdpa.nn.attention import Attention, unpacked
from gdpa.nn.options import Heads

HEAD_DIM = -2  # of q, k, v and the output: heads come after positions


class DistributedAttention(Attention):
    """An Attention of which this rank computes a part.

    Over ``head_mesh`` heads are divided: what comes in whole (``whole_q``, ``whole_kv``) is narrowed to this rank's
    heads, and the output is gathered if ``gather``. Over ``key_mesh`` keys are divided: those of k and v that this rank
    is to take, or, without ``whole_keys``, all of k and v, which are then its part already.
    """

    head_mesh: DeviceMesh | None = None
    whole_q = False
    whole_kv = False
    gather = False
    key_mesh: DeviceMesh | None = None
    whole_keys = True

    def forward(self, q: Tensor, k: Tensor | None = None, v: Tensor | None = None, *args: Any, **kwargs: Any) -> Tensor:
        q, k, v = unpacked(q, k, v)
        if self.head_mesh is None:
            return super().forward(q, k, v, *args, **kwargs)
        group = self.head_mesh.get_group()
        if self.whole_q:
            q = part(q, HEAD_DIM, group)
        if self.whole_kv:
            k, v = part(k, HEAD_DIM, group), part(v, HEAD_DIM, group)
        out = super().forward(q, k, v, *args, **kwargs)
        return gathered(out, HEAD_DIM, group) if self.gather else out

    def _heads(self) -> Heads:
        whole = super()._heads()
        if self.head_mesh is None:
            return whole
        mesh = self.head_mesh
        heads = whole.count // mesh.size()
        checks.unplaced(whole.activation)
        mine = slice(heads * mesh.get_local_rank(), heads * (mesh.get_local_rank() + 1))
        # A param per head is sharded as the heads are; one for all heads is on all ranks, its gradient their sum.
        params = tuple(local(p) if p.dim() else shared(p, mesh.get_group()) for p in whole.params)
        sink = whole.sink if self.sink_logits is None else local(self.sink_logits).exp()
        activation = whole.activation[mine] if isinstance(whole.activation, list) else whole.activation
        normalize = whole.normalize[mine] if isinstance(whole.normalize, list) else whole.normalize
        return Heads(heads, activation, params, normalize, sink)

    def _operators(self) -> tuple[Callable[..., Tensor], Callable[..., Tensor]]:
        if self.key_mesh is None:
            return super()._operators()
        group = self.key_mesh.get_group()
        if self.whole_keys:
            return partial(context.attention_of_all, group=group), partial(context.varlen_of_all, group=group)
        return partial(context.attention, group=group), partial(context.attention_varlen, group=group)

    def extra_repr(self) -> str:
        over = ((self.head_mesh, "heads"), (self.key_mesh, "keys"))
        return super().extra_repr() + "".join(f", {what} over {m.size()} ranks" for m, what in over if m is not None)


def distributed(attention: Attention) -> DistributedAttention:
    """``attention`` made a DistributedAttention in place, if it is not one yet."""
    if not isinstance(attention, DistributedAttention):
        attention.__class__ = DistributedAttention  # as fully_shard does: parents, hooks and names stay as they are
    assert isinstance(attention, DistributedAttention)
    return attention


def divide_heads(
    attention: Attention, mesh: DeviceMesh, *, whole_q: bool = False, whole_kv: bool = False, gather: bool = False
) -> None:
    """Make ``attention`` in place one of which each rank of ``mesh`` computes its heads."""
    mine = distributed(attention)
    for i, p in enumerate(mine.params):
        if p.dim():
            mine.params[i] = sharded(p, mesh, 0)
    if mine.sink_logits is not None:
        mine.sink_logits = sharded(mine.sink_logits, mesh, 0)
    mine.head_mesh, mine.whole_q, mine.whole_kv, mine.gather = mesh, whole_q, whole_kv, gather


def divide_keys(attention: Attention, mesh: DeviceMesh, *, whole_keys: bool) -> None:
    """Make ``attention`` in place one of which each rank of ``mesh`` takes a part of the keys."""
    mine = distributed(attention)
    mine.key_mesh, mine.whole_keys = mesh, whole_keys
