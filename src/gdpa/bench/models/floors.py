"""What a training step must at least take: the work of each group of kernels, in FLOP and bytes, over measured rates.

A step of the jagged model is run on tensors that hold nothing (torch's fake ones), under autocast, and every operator
is seen. Products, attention, rotary positions, look-ups and moves of rows are kernels: they read and write what they
are given once. All that can be done between two of them is one region, as if a perfect compiler made one kernel of it:
it reads once what others have made, writes once what others need, and computes again what is less to read that way.
AdamW reads and writes weights, gradients and averages once. A floor is the sum over kernels of
max(FLOP / rate of products, bytes / rate of copies).
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.flop_counter import flop_registry

from gdpa.bench.models.cases import HISTORY, ModelCase, make_batch, make_model
from gdpa.bench.models.flops import formulas
from gdpa.bench.models.profile import group_of
from gdpa.bench.rates import Rates, floor_ms
from gdpa.compat import FakeTensorMode, TorchDispatchMode, disable_current_modes, tree_leaves
from gdpa.data import Batch
from gdpa.rowwise import rotary
from gdpa.spec import Loaded

BETWEEN = "norms, element-wise"
ADAM_PASSES = 7  # over float32: weights, gradients and two averages are read, all but gradients are written


@dataclass(frozen=True)
class Work:
    """Of one kernel."""

    group: str
    flops: float
    traffic: float


def floors(work: Iterable[Work], rates: Rates) -> dict[str, float]:
    """Milliseconds by group."""
    found: dict[str, float] = {}
    for w in work:
        found[w.group] = found.get(w.group, 0.0) + floor_ms(w.flops, w.traffic, rates)
    return found


def step_work(case: ModelCase, function: Loaded, dtype: torch.dtype) -> list[Work]:
    """The kernels of a step on the first batch of ``case``."""
    drawn = case.draws()[0]
    batch = make_batch(case, drawn, 0)
    narrow = torch.autocast("cpu", dtype) if dtype != torch.float32 else nullcontext()
    with FakeTensorMode() as fake, mock.patch.object(rotary, "has_kernel", return_value=True):
        model = make_model(case.model, case.scale, function, "cpu")
        given = _fake(batch, fake)
        with Seen(formulas(drawn)) as seen:
            with narrow:
                logits = model(given)
            loss = F.binary_cross_entropy_with_logits(logits.float(), given.labels)
            seen.begin_backward()
            seen.keep(torch.autograd.grad(loss, list(model.parameters())))  # backward() would copy fake gradients
    weights = sum(p.numel() for p in model.parameters())
    return [*seen.work(), Work("optimizer", 0.0, ADAM_PASSES * 4.0 * weights)]


def _fake(batch: Batch, mode: FakeTensorMode) -> Batch:
    of = mode.from_tensor
    events = batch.sequences[HISTORY]
    events = replace(events, ids=of(events.ids), values=of(events.values), cu_seqlens=of(events.cu_seqlens))
    dense, sparse, labels = (of(t) for t in (batch.dense, batch.sparse, batch.labels))
    return replace(batch, dense=dense, sparse=sparse, labels=labels, sequences={HISTORY: events})


@dataclass
class _Region:
    """Operators that one kernel could do: bytes of the storages that they read, and of those that they make, each with
    the storages that it is made of."""

    read: dict[int, float] = field(default_factory=dict)
    made: dict[int, float] = field(default_factory=dict)
    sources: dict[int, dict[int, float]] = field(default_factory=dict)

    def add(self, inputs: dict[int, float], outputs: dict[int, float]) -> None:
        sources: dict[int, float] = {}
        for key, size in inputs.items():
            if key in self.made:
                sources |= self.sources[key]
            else:
                sources[key] = self.read[key] = max(self.read.get(key, 0.0), size)
        for key, size in outputs.items():
            self.made[key], self.sources[key] = size, sources


class Seen(TorchDispatchMode):
    """Operators as they come, as kernels and regions. An operator belongs to the first region that has all it needs."""

    def __init__(self, flop_formulas: dict[Any, Any]) -> None:
        super().__init__()
        self.formulas = {**flop_registry, **flop_formulas}
        self.kernels: list[Work] = []
        self.regions = [_Region()]
        self.ready: dict[int, int] = {}  # by storage, the first region that can read it
        self.backward = 0  # the first region of backward
        self.anywhere: dict[int, dict[int, float]] = {}  # what backward makes of what forward left, and that
        self.wanted: set[int] = set()  # by kernels, or in the end
        self.held: list[Any] = []  # every tensor, or another would get the number of its storage

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        name = str(func).removesuffix(".default")
        inputs, outputs = ([t for t in tree_leaves(x) if isinstance(t, Tensor)] for x in ((args, kwargs), out))
        self.held += [*inputs, *outputs]
        taken, given = _sizes(inputs), _sizes(outputs)
        if given.keys() <= taken.keys() and not func._schema.is_mutable:
            return out  # a view
        group = _group(name)
        if group == BETWEEN:
            self._between(taken, given)
        else:
            for key in taken.keys() & self.anywhere.keys():
                self.regions[-1].add(self.anywhere.pop(key), {key: taken[key]})
            flops = self._flops(func, args, kwargs or {}, out)
            self.kernels.append(Work(group, flops, _traffic(name, args, inputs, outputs)))
            self.wanted |= taken.keys()
            self.regions.append(_Region())
            self.ready |= dict.fromkeys(given, len(self.regions) - 1)
        return out

    def _between(self, taken: dict[int, float], given: dict[int, float]) -> None:
        place = max((self.ready.get(key, 0) for key in taken), default=0)
        inputs: dict[int, float] = {}
        for key, size in taken.items():
            inputs |= self.anywhere.get(key, {key: size})
        if place < self.backward:
            self.anywhere |= dict.fromkeys(given, inputs)
        else:
            self.regions[place].add(inputs, given)
            self.ready |= dict.fromkeys(given, place)

    def keep(self, results: Iterable[Tensor]) -> None:
        """What is to be written in the end."""
        self.wanted |= set(map(_storage, results))

    def begin_backward(self) -> None:
        self.regions.append(_Region())
        self.backward = len(self.regions) - 1

    def _flops(self, func: Any, args: Any, kwargs: Any, out: Any) -> float:
        formula = self.formulas.get(func.overloadpacket)
        with disable_current_modes():
            return 0.0 if formula is None else float(formula(*args, **kwargs, out_val=out))

    def work(self) -> list[Work]:
        """Of kernels and of regions. What a region made and another needs is either written by the one and read by the
        other, or computed again of what it is made of, whichever is less to read; kernels need it written."""
        made_by = {key: region for region in self.regions for key in region.made}
        written = {key for key in self.wanted if key in made_by}
        traffic = []
        for region in self.regions:
            read = _least(region, made_by)
            written |= {key for key in read if key in made_by}
            traffic.append(sum(read.values()))
        for i, region in enumerate(self.regions):
            traffic[i] += sum(size for key, size in region.made.items() if key in written)
        return [*self.kernels, *(Work(BETWEEN, 0.0, size) for size in traffic if size)]


def _least(region: _Region, made_by: dict[int, _Region]) -> dict[int, float]:
    """What ``region`` reads: of what other regions made as it is, or what that is made of, all or one by one."""
    given = {key: size for key, size in region.read.items() if key not in made_by}
    carried = sorted(region.read.keys() - given.keys(), key=lambda key: region.read[key])
    sources = {key: made_by[key].sources[key] for key in carried}
    stored, again, mixed = dict(region.read), dict(given), dict(given)
    for key in carried:
        again |= sources[key]
        new = {k: size for k, size in sources[key].items() if k not in mixed}
        mixed |= new if sum(new.values()) <= region.read[key] else {key: region.read[key]}
    return min((again, mixed, stored), key=lambda read: sum(read.values()))


def _sizes(tensors: list[Tensor]) -> dict[int, float]:
    found: dict[int, float] = {}
    for t in tensors:
        found[_storage(t)] = max(found.get(_storage(t), 0.0), _bytes(t))
    return found


def _group(name: str) -> str:
    """Of an operator: that of its kernel, by the names that the profile goes by; the rest can be part of any kernel."""
    space, _, op = name.partition(".")
    if op.split(".")[0] in MOVES:
        return "copies"
    found = group_of(f"{space}::{op}")
    return found if found in KERNELS else BETWEEN


KERNELS = ("attention kernels", "batched products", "matrix products", "rotary", "embedding")
MOVES = {"index_select", "index_copy", "index_add", "index_put", "index"}  # of rows, by their numbers


def _traffic(name: str, args: Any, inputs: list[Tensor], outputs: list[Tensor]) -> float:
    """Bytes of a kernel."""
    op = name.partition(".")[2]
    if op.startswith("rotary"):  # the heads that are turned, read and written
        x, _, heads, *_ = args
        return 2 * _bytes(x) * heads / x.shape[-2]
    if op in ("embedding", "index_select", "index.Tensor"):  # of what it reads from, only these rows
        return 2 * sum(map(_bytes, outputs))
    if op.startswith("index_add"):  # rows that are added to others, where those are
        return 3 * _bytes(args[3])
    return sum(_sizes([*inputs, *outputs]).values())


def _storage(t: Tensor) -> int:
    return t.untyped_storage()._cdata


def _bytes(t: Tensor) -> float:
    """Of an expanded tensor those that exist."""
    return float(min(t.numel() * t.element_size(), t.untyped_storage().nbytes()))
