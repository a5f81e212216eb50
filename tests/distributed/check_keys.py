"""Context parallelism: the functional form on shards of keys, and layers."""

from __future__ import annotations

import random
import warnings
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import gdpa
import gdpa.distributed as gd
import gdpa.nn as gnn
from distributed.check_heads import SOME, batches
from distributed.compare import (
    LAYERS,
    close,
    loss,
    mesh,
    same_losses,
    same_parameters,
    same_step,
    sequences,
    train,
    untouched,
)
from gdpa.functions.places.names import MAX_TABLES
from nn import cases
from support import FULL, in_turn


def draw(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64).requires_grad_()


def cuts(drawn: random.Random, length: int, world: int) -> list[int]:
    """Ends of the ranks' shards of ``length`` keys, some of them empty."""
    inner = sorted(drawn.choice([0, length, drawn.randint(0, length)]) for _ in range(world - 1))
    return [0, *inner, length]


def backward(out: Tensor) -> None:
    (out * torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view_as(out)).sum().backward()


def fresh(*tensors: Tensor) -> list[Tensor]:
    return [t.detach().clone().requires_grad_() for t in tensors]


def check_dense(world: int) -> None:
    """Bands, params, grouped and shared queries, on shards of any lengths, with and without key_span."""
    drawn, rank = random.Random(1), dist.get_rank()
    bands: list[dict[str, Any]] = [{}, {"causal": True}] + [
        {"window": w} for w in ((2, 1), (0, 0), (None, 3), (4, None))
    ]
    for trial in range(18):
        length_q, length = drawn.choice([1, 4, 9]), drawn.choice([0, 3, 8, 13])
        q, k, v = draw(drawn.choice([1, 2]), 4, length_q, 8), draw(2, 2, length, 8), draw(2, 2, length, 6)
        slope = torch.rand(4, dtype=torch.float64).requires_grad_()
        options = dict(bands[trial % len(bands)], out_scale=0.5)
        activation = ["gelu", "silu", "relu", "gelu"] if trial % 3 == 0 else cases.f.leaky
        params = (slope,) if trial % 3 else ()
        backward(expected := gdpa.attention(q, k, v, activation, params=params, **options))
        ends = cuts(drawn, length, world)
        start, stop = ends[rank], ends[rank + 1]
        (q2, slope2), (k2, v2) = fresh(q, slope), fresh(k[:, :, start:stop], v[:, :, start:stop])
        span = (start, length) if trial % 2 else None
        out = gd.attention(q2, k2, v2, activation, params=(slope2,) if params else (), key_span=span, **options)
        backward(out)
        what = f"{options}, {ends}, {length_q} queries"
        close(out, expected, f"output, {what}")
        close(q2.grad, q.grad, f"dq, {what}")
        close(k2.grad, k.grad[:, :, start:stop], f"dk, {what}")
        close(v2.grad, v.grad[:, :, start:stop], f"dv, {what}")
        close(slope2.grad, slope.grad, f"dparams, {what}")


def check_packed(world: int) -> None:
    """Rows of each sequence on any rank; shared, packed and dense sides; a mesh and a group."""
    drawn, rank = random.Random(2), dist.get_rank()
    lengths = [5, 0, 7, 1]
    cu_q = torch.tensor([0, 2, 2, 5, 9])
    for shared in (True, False):
        q = draw(3, 4, 8) if shared else draw(9, 4, 8)
        parts = [draw(n, 2, 8) for n in lengths]
        ends = [cuts(drawn, n, world) for n in lengths]
        mine = [p.detach()[e[rank] : e[rank + 1]] for p, e in zip(parts, ends, strict=True)]
        cu = gnn.Jagged.from_sequences([p.detach().flatten(1) for p in parts]).cu_seqlens
        mine_cu = torch.tensor([0, *torch.tensor([len(m) for m in mine]).cumsum(0).tolist()], dtype=torch.int32)
        k = torch.cat(parts)
        backward(expected := gdpa.attention_varlen(q, k, k, None if shared else cu_q, cu, "silu"))
        (q2,), (k2,) = fresh(q), fresh(torch.cat(mine))
        group = mesh(world) if shared else dist.group.WORLD
        out = gd.attention_varlen(q2, k2, k2, None if shared else cu_q, mine_cu, "silu", group=group, max_seqlen_k=7)
        backward(out)
        close(out, expected, "output")
        close(q2.grad, q.grad, "dq")
        grads = [p.grad[e[rank] : e[rank + 1]] for p, e in zip(parts, ends, strict=True)]
        close(k2.grad, torch.cat(grads), "dk")
    q, k = draw(9, 4, 8), draw(4, 5, 4, 8)
    backward(expected := gdpa.attention_varlen(q, k, k, cu_q, None))
    start, stop = (5 * r // world for r in (rank, rank + 1))
    (q2,), (k2,) = fresh(q), fresh(k[:, start:stop])
    backward(out := gd.attention_varlen(q2, k2, k2, cu_q, None))
    close(out, expected, "output of generated weights")
    close(k2.grad, k.grad[:, start:stop], "their gradient")


SUMS: dict[str, dict[str, Any]] = {
    "softmax": {"activation": "softmax", "sink": True},
    "relu / sum": {"activation": "relu", "normalize": "sum"},
    "tanh / abs": {"activation": "tanh", "normalize": "abs", "sink": True},
    "heads": {"activation": ["softmax", "silu", "relu", "gelu"], "normalize": ["sum", "abs", "sum", None]},
}


def check_row_sums(world: int) -> None:
    """Softmax, relu / sum and others, with sinks, bands and shards without keys: merged by (sum, denominator, maximum);
    scores that would overflow without the maximum of all ranks."""
    drawn, rank = random.Random(3), dist.get_rank()
    bands: list[dict[str, Any]] = [{}, {"causal": True}, {"window": (2, 1)}, {"window": (0, 0)}]
    for trial in range(16):
        options = dict(SUMS[list(SUMS)[trial % 4]], **bands[trial // 4], out_scale=0.5)
        with_sink = options.pop("sink", False)
        q, k, v = draw(drawn.choice([1, 2]), 4, 9, 8), draw(2, 2, 13, 8), draw(2, 2, 13, 6)
        options["scale"] = 300.0 if trial == 0 else None
        sink = torch.rand(4, dtype=torch.float64).requires_grad_()
        backward(expected := gdpa.attention(q, k, v, sink=sink if with_sink else 0.0, **options))
        ends = cuts(drawn, 13, world)
        start, stop = ends[rank], ends[rank + 1]
        (q2, sink2), (k2, v2) = fresh(q, sink), fresh(k[:, :, start:stop], v[:, :, start:stop])
        backward(out := gd.attention(q2, k2, v2, sink=sink2 if with_sink else 0.0, **options))
        what = f"{options}, {ends}"
        close(out, expected, f"output, {what}")
        close(q2.grad, q.grad, f"dq, {what}")
        close(k2.grad, k.grad[:, :, start:stop], f"dk, {what}")
        close(v2.grad, v.grad[:, :, start:stop], f"dv, {what}")
        close(sink2.grad, sink.grad, f"dsink, {what}")


def biased(
    s: Tensor, slope: Tensor, bias: Tensor, times: Tensor, *, h: Tensor, b: Tensor, q_idx: Tensor, kv_idx: Tensor,
    kv_len: Tensor, kv_row: Tensor,
) -> Tensor:  # fmt: skip
    """Of every position that a part has to correct."""
    gap = (q_idx - kv_idx).clamp(-3, 3) + 3
    return torch.tanh(s * slope + bias[h, gap] + 0.01 * times[kv_row] + 0.1 * b) * (1 + (kv_len - kv_idx) % 3)


def check_positions(world: int) -> None:
    """Functions, tables and masks that know where they stand, on shards of any lengths, dense and packed."""
    drawn, rank = random.Random(4), dist.get_rank()
    for trial in range(6):
        q, k, v = draw(2, 4, 9, 8), draw(2, 2, 13, 8), draw(2, 2, 13, 6)
        slope, bias = torch.rand(4, dtype=torch.float64).requires_grad_(), draw(4, 7)
        times = torch.randint(0, 9, (26,))
        mask = gdpa.masks.prefix(torch.tensor([2, 9])) | gdpa.masks.causal() if trial % 2 else None
        options: dict[str, Any] = {"mask": mask, "normalize": "abs" if trial > 3 else None}
        options |= {"window": (5, 2)} if trial % 3 else {}
        backward(expected := gdpa.attention(q, k, v, biased, params=(slope,), tables=(bias, times), **options))
        ends = cuts(drawn, 13, world)
        start, stop = ends[rank], ends[rank + 1]
        (q2, slope2, bias2), (k2,) = fresh(q, slope, bias), fresh(k[:, :, start:stop])
        span = (start, 13) if trial % 2 else None
        backward(
            out := gd.attention(
                q2, k2, v.detach()[:, :, start:stop], biased, params=(slope2,), tables=(bias2, times), key_span=span,
                **options,
            )
        )  # fmt: skip
        close(out, expected, f"output {trial}, {ends}")
        for name, mine, one in (("dq", q2, q), ("dslope", slope2, slope), ("dbias", bias2, bias)):
            close(mine.grad, one.grad, f"{name} {trial}, {ends}")
        close(k2.grad, k.grad[:, :, start:stop], f"dk {trial}, {ends}")
    lengths, q = [5, 0, 7, 1], draw(3, 4, 8)
    parts, times = [draw(n, 2, 8) for n in lengths], torch.randint(0, 9, (13,))
    ends = [cuts(drawn, n, world) for n in lengths]
    mine = torch.cat([p.detach()[e[rank] : e[rank + 1]] for p, e in zip(parts, ends, strict=True)])
    cu = torch.tensor([0, 5, 5, 12, 13])
    mine_cu = torch.tensor([0, *torch.tensor([e[rank + 1] - e[rank] for e in ends]).cumsum(0).tolist()])
    mask = gdpa.masks.window(1, 3)
    for activation in (biased, ["softmax", "silu", "relu", "gelu"]):
        placed = activation is biased
        given: dict[str, Any] = {"params": (slope.detach(),), "tables": (bias.detach(), times)} if placed else {}
        want = gdpa.attention_varlen(q, torch.cat(parts), torch.cat(parts), None, cu, activation, mask=mask, **given)
        got = gd.attention_varlen(q, mine, mine, None, mine_cu, activation, mask=mask, **given)
        close(got, want, f"packed, placed {placed}")


def check_most_tables(world: int) -> None:
    """What says where a rank's keys stand takes none of the tables that a function and a mask may have."""
    q, k, v, rank = draw(2, 4, 5, 8), draw(2, 2, 6, 8), draw(2, 2, 6, 8), dist.get_rank()
    numbers = tuple(torch.rand(6) for _ in range(MAX_TABLES))
    lengths = tuple(torch.randint(0, 6, (2,)) for _ in range(MAX_TABLES))
    summed = lambda s, a, b, c, d, e, f, g, h, *, kv_idx: s * sum(t[kv_idx] for t in (a, b, c, d, e, f, g, h))
    mask = gdpa.masks.prefix(lengths[0])
    for more in lengths[1:]:
        mask = mask | gdpa.masks.prefix(more)
    want = gdpa.attention(q, k, v, summed, tables=numbers, mask=mask)
    ends = [6 * r // world for r in range(world + 1)]
    mine = slice(ends[rank], ends[rank + 1])
    close(gd.attention(q, k[:, :, mine], v[:, :, mine], summed, tables=numbers, mask=mask), want, "as many as may be")


def check_layers_with_positions(world: int) -> None:
    """HSTU and biases by time, of which one rank's part is not where it seems; divided by keys, by heads, by both."""
    values, make, _ = sequences("jagged")
    times, counts = torch.randint(0, 5000, (len(values),)), torch.tensor([2, 0, 1, 0, 3])
    layers = {
        "hstu": lambda: gnn.HSTU(cases.C, cases.H, 4, time_buckets=20, dtype=torch.float64),
        "contexts": lambda: gnn.HSTU(
            cases.C, cases.H, 4, "softmax", time_buckets=20, context_len=2, max_attn_len=3, dtype=torch.float64
        ),
    }
    by_both = lambda m: gd.context_parallel(gd.parallelize(m, mesh(2, 2)["inner"]), mesh(2, 2)["outer"])
    by_heads = lambda m: gd.parallelize(m, mesh(world))
    by_keys = lambda m: gd.context_parallel(m, mesh(world))
    ways = {"hstu": (by_keys, by_heads) if FULL else (by_heads,), "contexts": (by_keys,)}
    if world == 4:
        ways = {"hstu": (by_keys, by_heads) if FULL else (), "contexts": (by_both,)}
    for name, make_layer in layers.items():
        for how in ways[name]:
            torch.manual_seed(0)
            one = cases.stirred(make_layer())
            torch.manual_seed(0)
            mine = how(cases.stirred(make_layer()))
            for module in (one, mine):
                loss(module(make(values), times=times, num_targets=counts)).backward()
            same_parameters(name, mine, one, gradients=True)


def check_layers(world: int) -> None:
    for i, name in enumerate(LAYERS if FULL or world == 2 else SOME):
        for form in ("jagged",) if world == 4 else in_turn(("dense", "jagged"), i):
            same_step(name, gd.context_parallel(cases.made(name), mesh(world)), cases.made(name), form)
    for i, name in enumerate(("self", "self-hstu", "seeds", "pffn")):
        for form in in_turn(("nested", "bounded"), i):
            same_step(name, gd.context_parallel(cases.made(name), dist.group.WORLD), cases.made(name), form)


def check_training(world: int) -> None:
    for name in ("self-hstu", "self-params", "pma-norm", "pffn"):
        mine, one = gd.context_parallel(untouched(name, torch.float32), mesh(world)), untouched(name, torch.float32)
        same_losses(name, *(train(m, batches(name, torch.float32)) for m in (mine, one)), torch.float32)
        same_parameters(name, mine, one)


def check_lengths(world: int) -> None:
    """Fewer keys than ranks, empty sequences, no sequences; all of them on the same shapes of shards."""
    for lengths in ([0, 0, 0], [1], [0, 1, 0, 2], [17], [40, 1, 1, 1], []):
        values = torch.randn(sum(lengths), cases.C, dtype=torch.float64)
        x = gnn.Jagged.from_lengths(values, torch.tensor(lengths, dtype=torch.int64))
        for name in ("self", "self-window", "self-hstu", "seeds"):
            mine, one = gd.context_parallel(cases.made(name), mesh(world)), cases.made(name)
            close(cases.rows(mine(x)), cases.rows(one(x)), f"{name} of {lengths}")


def check_sequences_keep_apart(world: int) -> None:
    """A NaN in the first row of one sequence reaches no other, although the rows that fill up a shard come from it."""
    for name in ("self", "self-window"):
        values, make, _ = sequences("jagged")
        poisoned = values.detach().clone()
        poisoned[0] = torch.nan
        layer = gd.context_parallel(cases.made(name), mesh(world))
        clean, dirty = layer(make(values)).values, layer(make(poisoned)).values
        first = cases.LENGTHS[0]
        assert torch.equal(clean[first:], dirty[first:]), name
        assert dirty[:first].isnan().any()


def check_compiled(world: int) -> None:
    """Nothing waits for lengths, so all is one graph."""
    for name in () if world > 2 else ("self", "self-hstu", "self-biased") if FULL else ("self-softmax",):
        mine, one = gd.context_parallel(cases.made(name), mesh(world)), cases.made(name)
        for module in (torch.compile(mine, backend="aot_eager", fullgraph=True), one):
            values, make, _ = sequences("jagged")
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                loss(module(make(values))).backward()
        same_parameters(name, mine, one, gradients=True)


def check_with_heads(world: int) -> None:
    """Heads over one dimension of a mesh, keys over the other."""
    if world != 4:
        return
    both = mesh(2, 2)
    for name in LAYERS if FULL else [*SOME, "self-softmax"]:
        mine = gd.context_parallel(gd.parallelize(cases.made(name), both["inner"]), both["outer"])
        same_step(name, mine, cases.made(name), "jagged")


def check_key_part(world: int) -> None:
    x = gnn.Jagged.from_lengths(torch.randn(8, 4), torch.tensor([5, 0, 3]))
    parts: list[Any] = [None] * world
    dist.all_gather_object(parts, gd.key_part(x).unbind())
    for b, sequence in enumerate(x.unbind()):
        assert torch.equal(torch.cat([p[b] for p in parts]), sequence)
    dense = torch.randn(2, 7, 4, requires_grad=True)
    gd.key_part(dense).sum().backward()
    assert torch.equal(dense.grad, torch.ones_like(dense))
