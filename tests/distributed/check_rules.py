"""DTensors through gdpa.attention and gdpa.attention_varlen: each rule, and calls that no rule fits."""

from __future__ import annotations

import random
import warnings
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor

import gdpa
import gdpa.distributed
from distributed.compare import close, mesh

R, S, P = Replicate(), Shard, Partial("sum")
FOUR = ["gelu", "silu", "gelu", "relu"]


def leaky(s: Tensor, slope: Tensor, shift: Tensor) -> Tensor:
    return torch.where(s > shift, s, slope * s)


PER_HEAD = (torch.tensor([0.1, 0.2, 0.3, 0.4], dtype=torch.float64), torch.tensor(0.05, dtype=torch.float64))


def draw(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64).requires_grad_()


def spread(t: Tensor, over: Any, places: Any) -> DTensor:
    """A leaf DTensor of the values of ``t``, sharded as asked."""
    places = [places] if isinstance(places, Placement) else list(places)
    mine = distribute_tensor(t.detach(), over, [R if p.is_partial() else p for p in places]).to_local()
    if any(p.is_partial() and over.get_local_rank(i) > 0 for i, p in enumerate(places)):
        mine = torch.zeros_like(mine)
    spread = DTensor.from_local(mine, over, places, shape=t.shape, stride=t.stride())
    return spread.requires_grad_(t.is_floating_point())


def compare(
    call: Any,
    tensors: list[Tensor],
    params: list[Tensor],
    places: list[Any],
    over: Any,
    out: Any = None,
    grads: Any = None,
) -> None:
    """``call(*tensors, params=...)`` of plain tensors and of DTensors: output, gradients, and where they are."""
    for t in (*tensors, *params):
        t.grad = None
    expected = call(*tensors, params=params)
    weights = torch.randn_like(expected)
    (expected * weights).sum().backward()
    leaves = [spread(t, over, place) for t, place in zip((*tensors, *params), places, strict=True)]
    n = len(tensors)
    actual = call(*leaves[:n], params=leaves[n:])
    assert isinstance(actual, DTensor)
    (actual * distribute_tensor(weights, over, [R] * over.ndim)).sum().backward()
    close(actual, expected, "output", 1e-10)
    for i, (leaf, t) in enumerate(zip(leaves, (*tensors, *params), strict=True)):
        close(leaf.grad, t.grad, f"gradient {i}", 1e-10)
    if out is not None:
        assert actual.placements == (out,), actual.placements
    if grads is not None:
        assert [leaf.grad.placements[0] for leaf in leaves] == grads, [leaf.grad.placements for leaf in leaves]


def dense(
    world: int, q: Placement, k: Placement, out: Placement | None, grads: Any = None, *, batch: int = 4,
    batch_q: int = 0, heads: int = 4, heads_k: int = 4, keys: int = 8, params: Any = (), at_params: Any = (),
    **options: Any,
) -> None:  # fmt: skip
    tensors = [draw(batch_q or batch, heads, 8, 8), draw(batch, heads_k, keys, 8), draw(batch, heads_k, keys, 6)]
    own = [p.clone().requires_grad_() for p in params]
    call = lambda q, k, v, params: gdpa.attention(q, k, v, params=params, **options)
    compare(call, tensors, own, [q, k, k, *at_params], mesh(world), out, grads)


def check_heads(world: int) -> None:
    dense(world, S(1), S(1), S(1), [S(1)] * 3)
    dense(world, S(1), S(1), S(1), [S(1)] * 3, causal=True)
    dense(world, S(1), S(1), S(1), [S(1)] * 3, heads=8, heads_k=4, window=(2, 1))
    dense(world, S(1), R, S(1), [S(1), P, P], heads_k=1)
    dense(world, S(1), S(1), S(1), [S(1)] * 3, backend="reference")
    dense(world, S(1), S(1), S(1), [S(1), S(1), S(1), S(0), P], activation=leaky, params=PER_HEAD, at_params=[S(0), R])


def check_heads_that_do_not_divide(world: int) -> None:
    dense(world, S(1), S(1), R, heads=6, heads_k=3)
    dense(world, S(1), S(1), R, heads=5, heads_k=5)
    dense(world, S(1), S(1), None, heads=5, heads_k=1)


def check_functions_per_head(world: int) -> None:
    """Gathered, for no rule can cut the list; and a call of one function in between, which shares the shapes."""
    for activation, out in ((FOUR, R), ("gelu", S(1)), (FOUR, R)):
        dense(world, S(1), S(1), out, activation=activation)
    dense(world, S(0), S(0), S(0), [S(0)] * 3, activation=FOUR)
    dense(world, S(1), S(1), None, activation=[leaky, leaky] * 2, params=PER_HEAD, at_params=[S(0), R])


def check_batch(world: int) -> None:
    dense(world, S(0), S(0), S(0), [S(0)] * 3, causal=True)
    dense(world, R, S(0), S(0), [P, S(0), S(0)], batch_q=1)
    dense(world, S(0), S(0), None, batch=3)
    dense(world, S(0), S(0), S(0), [S(0), S(0), S(0), P, P], activation=leaky, params=PER_HEAD, at_params=[R, R])


def check_rows(world: int) -> None:
    """Keys sharded: partial outputs. Queries sharded: partial dk and dv. Under a band neither."""
    dense(world, R, S(2), P, [P, S(2), S(2)])
    dense(world, R, S(2), P, [P, S(2), S(2)], keys=7)
    dense(world, R, S(2), P, [P, S(2), S(2), P, P], batch_q=1, activation=leaky, params=PER_HEAD, at_params=[R, R])
    dense(world, S(2), R, S(2), [S(2), P, P])
    dense(world, R, S(2), None, window=(3, 1))
    dense(world, S(2), S(2), None, causal=True)


def check_replicated(world: int) -> None:
    dense(world, R, R, R, [R] * 3)
    dense(world, R, R, R, [R] * 5, activation=leaky, params=PER_HEAD, at_params=[R, R])
    dense(world, P, R, None)


def check_row_sums(world: int) -> None:
    """Heads, batch and queries are sharded as without sums; keys are gathered, for a sum is of all of them."""
    sink = torch.tensor([0.1, 0.2, 0.3, 0.4], dtype=torch.float64)

    def softmax(places: list[Any], out: Any, grads: Any, **options: Any) -> None:
        call = lambda q, k, v, params: gdpa.attention(q, k, v, "softmax", sink=params[0], **options)
        tensors = [draw(4, 4, 8, 8), draw(4, 4, 8, 8), draw(4, 4, 8, 6)]
        compare(call, tensors, [sink.clone().requires_grad_()], places, mesh(world), out, grads)

    softmax([S(1), S(1), S(1), S(0)], S(1), [S(1), S(1), S(1), S(0)], causal=True)
    softmax([S(0), S(0), S(0), R], S(0), [S(0), S(0), S(0), P])
    softmax([S(2), R, R, R], S(2), [S(2), P, P, P])
    softmax([R, S(2), S(2), R], None, None)
    dense(world, S(1), S(1), S(1), [S(1)] * 3, activation="silu", normalize="abs", sink=0.5)
    dense(world, S(1), S(1), None, activation="relu", normalize=["sum", None] * 2)


def per_head(s: Tensor, bias: Tensor, *, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
    return torch.tanh(s + bias[h, (q_idx - kv_idx).clamp(-2, 2) + 2])


def of_all_heads(s: Tensor, bias: Tensor, *, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
    return torch.tanh(s + bias[(q_idx - kv_idx).clamp(-2, 2) + 2])


def counts_heads(s: Tensor, bias: Tensor, *, h: Tensor) -> Tensor:
    return torch.tanh(s * (h + 1) + bias[h])


def of_both(s: Tensor, bias: Tensor, more: Tensor, *, h: Tensor, b: Tensor) -> Tensor:
    return torch.tanh(s + bias[h] + more[b])


def check_positions(world: int) -> None:
    """Tables per head are sharded with the heads; what asks for positions of a dimension is gathered over it."""

    def call(fn: Any, places: list[Any], out: Any, grads: Any, *shapes: tuple[int, ...], **options: Any) -> None:
        run = lambda q, k, v, params: gdpa.attention(q, k, v, fn, tables=params, **options)
        tensors = [draw(4, 4, 8, 8), draw(4, 4, 8, 8), draw(4, 4, 8, 6)]
        compare(run, tensors, [draw(*shape) for shape in shapes], places, mesh(world), out, grads)

    heads = [S(1)] * 3
    call(per_head, [*heads, S(0)], S(1), [*heads, S(0)], (4, 5), causal=True)
    call(per_head, [*heads, S(0)], S(1), [*heads, S(0)], (4, 5), normalize="abs", sink=0.5)
    call(per_head, [*heads, R], S(1), None, (4, 5), mask=gdpa.masks.window(3, 2))
    call(of_all_heads, [*heads, R], S(1), [*heads, P], (5,))
    call(of_all_heads, [S(0)] * 3 + [R], S(0), [S(0)] * 3 + [P], (5,))
    call(of_all_heads, [R, S(2), S(2), R], None, None, (5,))
    call(of_all_heads, [S(2), R, R, R], None, None, (5,))
    call(counts_heads, [*heads, S(0)], R, None, (4,))
    call(per_head, [*heads, R], R, None, (7, 5))  # of more entries than heads: not divided as they are
    call(of_both, [*heads, S(0), R], None, None, (4,), (4,))  # two gradients of which one tensor is made
    call(of_both, [S(0)] * 3 + [R, S(0)], None, None, (4,), (4,))


def check_packed(world: int) -> None:
    """Rows and offsets: heads are sharded, sharded rows are gathered."""
    cu_q = torch.tensor([0, 3, 3, 9, 13], dtype=torch.int32)
    cu_k = torch.tensor([0, 4, 5, 5, 11], dtype=torch.int32)
    for cq, ck, q, k in (
        (cu_q, cu_k, draw(13, 4, 8), (11, 4, 8)),
        (None, cu_k, draw(3, 4, 8), (11, 4, 8)),
        (cu_q, None, draw(13, 4, 8), (4, 5, 4, 8)),
    ):
        heads_k = len(k) - 2
        for at_q, at_k, out in ((S(1), S(heads_k), S(1)), (R, R, R), (S(0), S(0), None)):
            tensors = [q, draw(*k), draw(*k)]
            offsets = [c for c in (cq, ck) if c is not None]

            def call(
                q: Any, k: Any, v: Any, *cu: Any, params: Any, dense_k: bool = ck is None, n: bool = cq is None
            ) -> Any:
                first, second = (cu[0], None) if dense_k else (None, cu[0]) if n else cu
                return gdpa.attention_varlen(q, k, v, first, second, "silu", params=params, causal=True)

            compare(call, [*tensors, *offsets], [], [at_q, at_k, at_k, *(R for _ in offsets)], mesh(world), out)


def check_hidden_units(world: int) -> None:
    """Dense keys of packed queries, as generated weights are, sharded on their rows."""
    cu = torch.tensor([0, 3, 3, 9, 13], dtype=torch.int32)
    call = lambda q, k, v, cu, params: gdpa.attention_varlen(q, k, v, cu, None, params=params)
    tensors = [draw(13, 4, 8), draw(4, 8, 4, 8), draw(4, 8, 4, 8), cu]
    compare(call, tensors, [], [R, S(1), S(1), R], mesh(world), P)


def check_any_placement(world: int) -> None:
    """Whatever the placements, on a mesh of one or two dimensions, the values are those of one process."""
    drawn = random.Random(0)
    over = mesh(world) if world == 2 else mesh(2, world // 2)
    kinds = [R, P, S(0), S(1), S(2)]
    for _ in range(16 if world == 2 else 8):
        heads_k = drawn.choice([1, 2, 3, 4])
        heads = heads_k * drawn.choice([1, 2])
        batch, keys = drawn.choice([2, 3, 4]), drawn.choice([3, 5, 8])
        options: dict[str, Any] = drawn.choice([{}, {"causal": True}, {"window": (2, 1)}, {"out_scale": 0.5}])
        params = drawn.choice([(), (torch.rand(heads, dtype=torch.float64),)])
        options["activation"] = "gelu" if not params else (lambda s, a: torch.sigmoid(a * s))
        if drawn.random() < 0.2 and not params:
            options["activation"] = [drawn.choice(["gelu", "silu"]) for _ in range(heads)]
        tensors = [
            draw(drawn.choice([1, batch]), heads, 4, 8),
            draw(batch, heads_k, keys, 8),
            draw(batch, heads_k, keys, 8),
        ]
        places = [[drawn.choice(kinds) for _ in range(over.ndim)] for _ in tensors]
        places += [[drawn.choice([R, S(0)]) for _ in range(over.ndim)] for _ in params]
        call = lambda q, k, v, params, options=options: gdpa.attention(q, k, v, params=params, **options)
        try:
            compare(call, tensors, [p.requires_grad_() for p in params], places, over)
        except Exception as error:
            shapes = [tuple(t.shape) for t in tensors]
            raise AssertionError(f"shapes {shapes}, {options}, placements {places}: {error}") from error


def check_two_dimensions(world: int) -> None:
    """Batch over one dimension of a mesh, heads over the other: nothing moves."""
    if world != 4:
        return
    over = mesh(2, 2)
    tensors = [draw(2, 4, 5, 8), draw(2, 2, 6, 8), draw(2, 2, 6, 8)]
    leaves = [spread(t, over, [S(0), S(1)]) for t in tensors]
    out = gdpa.attention(*leaves)
    assert out.placements == (S(0), S(1))
    close(out, gdpa.attention(*tensors), "output")


def check_compiled(world: int) -> None:
    if world > 2:  # one size is enough for what takes this long
        return
    plain = [draw(2, 4, 5, 8) for _ in range(3)]
    leaves = [spread(t, mesh(world), S(1)) for t in plain]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        out = torch.compile(lambda *x: gdpa.attention(*x, "silu"), backend="aot_eager", fullgraph=True)(*leaves)
        out.sum().backward()
    gdpa.attention(*plain, "silu").sum().backward()
    assert out.placements == (S(1),)
    for leaf, t in zip(leaves, plain, strict=True):
        close(leaf.grad, t.grad, "gradient")
