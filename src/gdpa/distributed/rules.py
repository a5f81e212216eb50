"""How the operators may be sharded: the rules that make gdpa.attention take DTensors.

A rule is one way to run a call on the ranks of one dimension of a mesh: the placements of what it returns, and of the
tensors that it takes. DTensor chooses the rule that moves least data, for every dimension of the mesh. In the layout of
problem.py, q (Bq, Hq, Tq, D), k and v (Bk, Hk, Tk, D), the dimensions are 0 batch, 1 heads, 2 rows.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch.distributed.tensor import Partial, Placement, Replicate, Shard
from torch.distributed.tensor.experimental import register_sharding

from gdpa.compat import RuntimeSchemaInfo, dtensor_dispatcher
from gdpa.functions.activation import from_keys
from gdpa.functions.graph import Ref
from gdpa.functions.mask import mask_from_key
from gdpa.functions.places.names import POSITIONS
from gdpa.functions.places.program import Program
from gdpa.ops import normalized, records
from gdpa.problem import Settings

Placements = list[Placement | None]
BATCH, HEADS, ROWS = Shard(0), Shard(1), Shard(2)
WHOLE, SUM = Replicate(), Partial("sum")


@dataclass(frozen=True)
class Rule:
    """Where q, k (and v alike), params and the output are; and their gradients, of which those of a part are summed."""

    q: Placement
    k: Placement
    params: Placement
    out: Placement
    dq: Placement
    dk: Placement
    dparams: Placement


REPLICATE = Rule(WHOLE, WHOLE, WHOLE, WHOLE, WHOLE, WHOLE, WHOLE)
BY_HEADS = Rule(HEADS, HEADS, HEADS, HEADS, HEADS, HEADS, HEADS)
BY_QUERY_HEADS = Rule(HEADS, WHOLE, HEADS, HEADS, HEADS, SUM, HEADS)  # all of them share the one head of k and v
BY_BATCH = Rule(BATCH, BATCH, WHOLE, BATCH, BATCH, BATCH, SUM)
BY_BATCH_OF_KEYS = Rule(WHOLE, BATCH, WHOLE, BATCH, SUM, BATCH, SUM)  # shared queries
BY_KEYS = Rule(WHOLE, ROWS, WHOLE, SUM, SUM, ROWS, SUM)  # there is no softmax: partial outputs add up
BY_QUERIES = Rule(ROWS, WHOLE, WHOLE, ROWS, ROWS, SUM, SUM)


@dataclass(frozen=True)
class Call:
    """What rules look at: in ``x`` the DTensorSpecs of the tensors, which know their global shape, mesh and
    placements; and what stands behind them among the operator's arguments."""

    x: Any  # Operands
    settings: Settings
    grad: Any = None

    @classmethod
    def of(cls, args: Sequence[Any], grad: Any = None) -> Call:
        return cls(*records(args), grad)

    def rules(self) -> list[Rule]:
        """Those that are exact for this call."""
        found = [REPLICATE]  # first, so that it wins where nothing is sharded
        x, settings = self.x, self.settings
        by_heads = BY_QUERY_HEADS if x.k.shape[1] == 1 else BY_HEADS
        # Of a list of functions a rank would need its part, which no rule can give it.
        if len(settings.activations) == 1 and self._heads_divide(by_heads) and self._tables_of_heads() is not None:
            found.append(by_heads)
        # Positions of a shard begin at 0: what asks for those of a dimension is not divided over it.
        if self._dense and not self._asks("b", "q_row", "kv_row"):
            found.append(BY_BATCH_OF_KEYS if x.q.shape[0] == 1 else BY_BATCH)
        if settings.left is None and settings.right is None:  # a band is laid by the number of rows
            additive = not settings.normalize  # a row sum is of all keys
            keys = additive and x.cu_k is None and x.used_k is None and not self._asks("kv_idx", "kv_len", "kv_row")
            found += [BY_KEYS] if keys else []
            found += [BY_QUERIES] if x.cu_q is None and not self._asks("q_idx", "q_len", "q_row") else []
        return found

    def _programs(self) -> list[tuple[Program, int]]:
        """What is computed from positions, by the functions and by the mask, and the number of its first table."""
        functions = from_keys(self.settings.activations)
        found = [(f.placed.program, 0) for f in functions if f.placed is not None]
        if self.settings.mask is not None:
            found.append((mask_from_key(self.settings.mask).program, len(functions[0].tables)))
        return found

    def _asks(self, *names: str) -> bool:
        return any(name in program.positions for program, _ in self._programs() for name in names)

    def _tables_of_heads(self) -> set[int] | None:
        """The tables that are sharded as the heads are: those that have one entry per head, and are looked up by the
        head's number first. None if that number is used in any other way."""
        found: set[int] = set()
        for program, first in self._programs():
            tables = tables_of_heads(program)
            if tables is None:
                return None
            found |= {first + i for i in tables}
        heads = self.x.q.shape[1]
        if any(self.x.tables[i].shape[0] != heads for i in found):
            return None
        alone = len(self._learned) == 1 or not found & self._learned  # their gradients are one tensor, end to end
        return found if alone or not self.settings.learn else None

    @property
    def _learned(self) -> set[int]:
        """The tables that have gradients."""
        tables = from_keys(self.settings.activations)[0].tables
        return {i for i, kind in enumerate(tables) if kind.differentiable}

    def dtables(self, rule: Rule) -> Placement:
        """Where the gradients of tables are, which are one tensor."""
        if not self.settings.learn or rule is REPLICATE:
            return WHOLE
        if rule.params != HEADS:
            return SUM
        return Shard(0) if self._learned.intersection(self._tables_of_heads() or ()) else SUM

    def inputs(self, rule: Rule) -> Placements:
        """Placements of the operands, None for what is not given, and None for what is no tensor."""
        others = zip(self.x.others[:-1], (WHOLE, WHOLE, rule.params, WHOLE, WHOLE), strict=True)
        placed: Placements = [None if t is None else at for t, at in others]
        of_heads = (self._tables_of_heads() or ()) if rule.params == HEADS else ()
        tables: Placements = [Shard(0) if i in of_heads else WHOLE for i in range(len(self.x.tables))]
        return [rule.q, rule.k, rule.k, *placed, *(tables or [None]), *(None for _ in self.settings.values)]

    def sink(self, at: Placement) -> Placement | None:
        """Where the sink (Hq,), or its gradient, is if the params (n, Hq) or theirs are ``at``."""
        return None if self.x.sink is None else Shard(0) if at == HEADS else at

    @property
    def _dense(self) -> bool:
        return self.x.cu_q is None and self.x.cu_k is None

    def _heads_divide(self, rule: Rule) -> bool:
        """Whether ranks get equally many heads of q, and of k: else a group of grouped queries could come apart, or a
        rank be left with none. Dimensions of the mesh count if DTensor could choose to shard heads over them, which it
        does not where REPLICATE or the rule for batches moves nothing."""
        mesh = self.x.q.mesh
        places = [self._places(i) for i in range(mesh.ndim)]
        batch = [i for i, at in enumerate(places) if at == {BATCH} or at == {WHOLE, BATCH}]
        if not self._dense or self.x.k.shape[0] % math.prod(mesh.size(i) for i in batch) != 0:
            batch = []
        open_ = [i for i, at in enumerate(places) if at != {WHOLE} and i not in batch]
        ranks = math.prod(mesh.size(i) for i in open_)
        return self.x.q.shape[1] % ranks == 0 and (rule.k == WHOLE or self.x.k.shape[1] % ranks == 0)

    def _places(self, dim: int) -> set[Placement]:
        """How the tensors lie over one dimension of the mesh."""
        places = {t.placements[dim] for t in (self.x.q, self.x.k, self.x.v, self.grad) if t is not None}
        if self.x.params is not None:
            at = self.x.params.placements[dim]
            places.add(at if at == WHOLE else HEADS)  # sharded in either dimension: no rule for batches takes it as is
        if self.x.sink is not None and self.x.sink.placements[dim] != WHOLE:
            places.add(HEADS)
        return places


def tables_of_heads(program: Program) -> set[int] | None:
    """The tables of a program whose first index is always the number of the head; None if that is used otherwise."""
    number = POSITIONS.index("h")
    heads = {Ref(i) for i, n in enumerate(program.graph.nodes) if n.op == "position" and n.args[0] == number}
    first: dict[int, set[bool]] = {}
    for node in program.graph.nodes:
        lookup = node.op == "lookup"
        if heads.intersection(a for a in (node.args[2:] if lookup else node.args) if isinstance(a, Ref)):
            return None
        if lookup:
            first.setdefault(cast(int, node.args[0]), set()).add(node.args[1] in heads)
    if heads.intersection(o for o in program.graph.outputs if isinstance(o, Ref)):
        return None
    found = {table for table, by_head in first.items() if True in by_head}
    return found if all(first[table] == {True} for table in found) else None


@register_sharding(torch.ops.gdpa.attention.default)
def attention_sharding(*args: Any) -> list[tuple[Placements, Placements]]:
    """What gdpa::attention may return for what it may take."""
    call = Call.of(args)
    return [([rule.out], call.inputs(rule)) for rule in call.rules()]


@register_sharding(torch.ops.gdpa.attention_backward.default)
def attention_backward_sharding(grad: Any, *args: Any) -> list[tuple[Placements, Placements]]:
    """What gdpa::attention_backward may return: (dq, dk, dv, dparams, dtables)."""
    call = Call.of(args, grad)
    found: list[tuple[Placements, Placements]] = []
    for rule in call.rules():
        dparams = WHOLE if call.x.params is None else rule.dparams  # the operator then returns an empty tensor
        grad_at = WHOLE if rule.out == SUM else rule.out
        found.append(([rule.dq, rule.dk, rule.dk, dparams, call.dtables(rule)], [grad_at, *call.inputs(rule)]))
    return found


@register_sharding(torch.ops.gdpa.normalized.default)
def normalized_sharding(*args: Any) -> list[tuple[Placements, Placements]]:
    """What gdpa::normalized may return, the output and its row sums (Bq, Hq, Tq), for what it may take."""
    call = Call(*normalized.records(*args))
    return [([rule.out, rule.out], [call.sink(rule.params), None, *call.inputs(rule)]) for rule in call.rules()]


@register_sharding(torch.ops.gdpa.normalized_backward.default)
def normalized_backward_sharding(
    grad: Any, grad_sums: Any, out: Any, sums: Any, *args: Any
) -> list[tuple[Placements, Placements]]:
    """What gdpa::normalized_backward may return: (dq, dk, dv, dparams, dtables, dsink)."""
    call = Call(*normalized.records(*args), grad)
    found: list[tuple[Placements, Placements]] = []
    for rule in call.rules():
        dparams = WHOLE if call.x.params is None else rule.dparams
        dsink = call.sink(rule.dparams) or WHOLE
        results: Placements = [rule.dq, rule.dk, rule.dk, dparams, call.dtables(rule), dsink]
        saved: Placements = [rule.out, None if grad_sums is None else rule.out, rule.out, rule.out]
        found.append((results, [*saved, call.sink(rule.params), None, *call.inputs(rule)]))
    return found


# DTensor keeps its choice for arguments that look alike. Of those that are not tensors register_sharding has it look at
# the ones from the first integer on, and the list of functions comes before.
for _op, _list in (
    (torch.ops.gdpa.attention.default, "activations"),
    (torch.ops.gdpa.attention_backward.default, "activations"),
    (torch.ops.gdpa.normalized.default, "normalize"),
    (torch.ops.gdpa.normalized_backward.default, "normalize"),
):
    _first = [argument.name for argument in _op._schema.arguments].index(_list)
    dtensor_dispatcher.sharding_propagator.op_to_schema_info[_op] = RuntimeSchemaInfo(_first, needs_pytree=True)
