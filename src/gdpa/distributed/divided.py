"""gdpa.nn.Attention on several ranks: each takes a part of the heads, of the keys, or of both."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.distributed import DeviceMesh

from gdpa.api import MaskLike
from gdpa.arguments import checks
from gdpa.distributed import context
from gdpa.distributed.collectives import gathered, part, shared
from gdpa.distributed.linear import local, sharded
from gdpa.distributed.places import Move, is_placed, moved_function, moved_mask, shared_tables
from gdpa.functions.modules import slots
from gdpa.masks.mask import Mask
from gdpa.nn.attention import Attention, unpacked
from gdpa.nn.biases import Times
from gdpa.nn.function import in_programs, keys_for_programs
from gdpa.nn.options import Heads, learned_sink

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
    _moves: tuple[Move, ...]
    _prepared: dict[Move, Any]

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

    @property
    def _first_head(self) -> int:
        mesh = self.head_mesh
        return 0 if mesh is None else self.num_heads // mesh.size() * mesh.get_local_rank()

    def _heads(self) -> Heads:
        whole = super()._heads()
        if self.head_mesh is None:
            return whole
        mesh = self.head_mesh
        heads = whole.count // mesh.size()
        mine = slice(self._first_head, self._first_head + heads)
        # A param per head is sharded as the heads are; one for all heads is on all ranks, its gradient their sum.
        params = tuple(local(p) if p.dim() else shared(p, mesh.get_group()) for p in whole.params)
        sink = whole.sink if self.sink_logits is None else learned_sink(local(self.sink_logits))
        normalize = whole.normalize[mine] if isinstance(whole.normalize, list) else whole.normalize
        activation = self._functions[Move()] if self.key_mesh is not None else self._functions[Move(self._first_head)]
        return Heads(heads, activation, params, normalize, sink)

    def _tables(self, times: Times | None) -> tuple[Tensor, ...]:
        tables = super()._tables(times)
        return tables if self.head_mesh is None else tuple(shared_tables(tables, self.head_mesh.get_group()))

    def _mask(self, given: MaskLike) -> Mask | None:
        whole = super()._mask(given)
        return whole if self.key_mesh is not None else moved_mask(whole, Move(self._first_head), None)

    def _operators(self) -> tuple[Callable[..., Tensor], Callable[..., Tensor]]:
        if self.key_mesh is None:
            return super()._operators()
        options: dict[str, Any] = {
            "group": self.key_mesh.get_group(), "functions": self._functions, "head": self._first_head,
            "whole_keys": self.whole_keys,
        }  # fmt: skip
        return partial(context.attention_of_all, **options), partial(context.varlen_of_all, **options)

    @property
    def _functions(self) -> dict[Move, Any]:
        """This rank's functions, by how positions may have to be moved."""
        if self.function is None:
            return self._prepared
        if torch.compiler.is_dynamo_compiling():  # what they read is guarded in _heads
            return {move: in_programs(self._moved_keys(*move)) for move in self._moves}
        return self._all_moved(self.activation)

    def prepare(self) -> None:
        """Functions that are no modules are moved here, for a compiler cannot trace them."""
        moves = {Move(), Move(self._first_head)}
        if self.key_mesh is not None:
            banded = checks.band(self.causal, self.window) != (None, None)
            moves |= {Move(self._first_head, keys=True)} | ({Move(self._first_head, -1)} if banded else set())
        self._moves = tuple(moves)
        self._prepared = self._all_moved(self.activation) if self.function is None else {}

    def _all_moved(self, activation: Any) -> dict[Move, Any]:
        head = self._first_head
        mine = slice(head, head + self.num_heads // (1 if self.head_mesh is None else self.head_mesh.size()))
        placed = is_placed(activation)
        return {move: self._moved(activation, move if placed else Move(), mine) for move in self._moves}

    def _moved_keys(self, *move: Any) -> tuple[str, ...]:
        return keys_for_programs(self._all_moved(self.activation)[Move(*move)])

    _moved_keys._dynamo_marked_constant = True  # type: ignore[attr-defined]  # see gdpa.nn.function

    def _moved(self, activation: Any, move: Move, mine: slice) -> Any:
        if isinstance(activation, list):
            return [one if move == Move() else moved_function(one, move) for one in activation[mine]]
        return activation if move == Move() else moved_function(activation, move)

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
    for owner, name in () if mine.function is None else slots(mine.function):
        p = getattr(owner, name)
        if p.shape == (mine.num_heads,):
            setattr(owner, name, sharded(p, mesh, 0))
    if mine.sink_logits is not None:
        mine.sink_logits = sharded(mine.sink_logits, mesh, 0)
    mine.head_mesh, mine.whole_q, mine.whole_kv, mine.gather = mesh, whole_q, whole_kv, gather
    mine.prepare()


def divide_keys(attention: Attention, mesh: DeviceMesh, *, whole_keys: bool) -> None:
    """Make ``attention`` in place one of which each rank of ``mesh`` takes a part of the keys."""
    mine = distributed(attention)
    mine.key_mesh, mine.whole_keys = mesh, whole_keys
    mine.prepare()
