"""The value of a function in bfloat16 arithmetic, two scores per instruction, where that is as good as plain PyTorch.

Plain PyTorch rounds the scores of a bfloat16 model to bfloat16 before the function sees them, and p after it. A
function that rounds its intermediate results too can be just as accurate: in gelu_tanh's  s + s tanh(s (a + b s^2))
the errors made inside tanh hardly reach p. The forward kernel gains from it, being bound by issue slots and power: 4
instead of 5.5 instructions per score. ``suits`` decides by evaluating the function that way, beside PyTorch's two
roundings.

Only values: derivatives lose too much to cancellation (1 - tanh^2). Not float16, which would overflow in s^2. Calls of
precision "fast" alone use it (see backends/hopper).
"""

from __future__ import annotations

import re
import struct
from collections.abc import Callable
from functools import lru_cache

import torch
from torch import Tensor

from gdpa.functions.graph import Graph, Node, Ref
from gdpa.functions.kept import KEPT
from gdpa.functions.ptx import LANES, PACK, Block, Dialect, Lane, fused_products, has_code, interleaved


def _constant(c: float) -> str:
    """The name of the register that holds ``c`` twice."""
    (bits,) = struct.unpack("<H", torch.tensor(c, dtype=torch.bfloat16).view(torch.int16).numpy().tobytes())
    return f"k{bits:04X}{bits:04X}"


BFLOAT16 = Dialect(
    {
        "neg": "neg.bf16x2 {d}, {0};", "abs": "abs.bf16x2 {d}, {0};",
        "add": "add.rn.bf16x2 {d}, {0}, {1};", "sub": "sub.rn.bf16x2 {d}, {0}, {1};",
        "mul": "mul.rn.bf16x2 {d}, {0}, {1};",
        "maximum": "max.NaN.bf16x2 {d}, {0}, {1};", "minimum": "min.NaN.bf16x2 {d}, {0}, {1};",
        "tanh": "tanh.approx.bf16x2 {d}, {0};", "exp2": "ex2.approx.ftz.bf16x2 {d}, {0};",
    },
    "fma.rn.bf16x2 {d}, {0}, {1}, {2};", "neg.bf16x2 {d}, {0};", {torch.float32: ".b32"}, _constant,
)  # fmt: skip


def assemble(graph: Graph) -> Block:
    """p on LANES scores: two share a register from the first instruction to the last."""
    pairs = [Lane(graph, BFLOAT16, pair, [f"s{pair}"]) for pair in range(LANES // 2)]
    code = interleaved(pairs)
    results = [f"mov.b32 ${pair}, {lane.value(graph.outputs[0])};" for pair, lane in enumerate(pairs)]
    lines = ["{"]
    for name in sorted(set(re.findall(r"\bk[0-9A-F]{8}\b", "\n".join(code + results)))):
        lines += [f".reg .b32 {name};", f"mov.b32 {name}, 0x{name[1:]};"]
    for pair in range(LANES // 2):
        low, high = (f"${LANES // 2 + 2 * pair + i}" for i in (0, 1))
        lines += [f".reg .b32 s{pair};", f"{PACK[torch.bfloat16]} s{pair}, {high}, {low};"]
    return Block("\n".join([*lines, *code, *results, "}"]), ",".join(["=r"] * (LANES // 2) + ["r"] * LANES))


# What the PTX manual allows beyond the rounding of the result, as a relative error.
EXTRA = {"tanh": 2**-9, "exp2": 3 * 2**-9}
WIDTHS = (0.3, 1.0, 3.0, 10.0, 30.0, 100.0)  # standard deviations of the scores at which a function is tried
POINTS = 4000
# How much worse than PyTorch's two roundings it may be, in the root mean square and at worst over max |p|.
MEAN, WORST = 1.25, 1.5
# Errors of one sign add up over keys: their mean may be one rounding of the mean |p|.
BIAS = 2**-9


@lru_cache(maxsize=KEPT)
def suits(graph: Graph, exact: Graph, scale: float) -> bool:
    """Whether bfloat16 arithmetic has all operations of ``graph``, which takes unscaled scores, and is good enough.
    ``exact`` is the same function before its operations were replaced by coarser ones."""
    if graph.n_inputs > 1 or not has_code(graph, BFLOAT16):  # params can have any value, and no sample covers them all
        return False
    return all(_is_good(graph, exact, width / scale) for width in WIDTHS)


def _is_good(graph: Graph, exact_graph: Graph, width: float) -> bool:
    at = torch.linspace(0.5 / POINTS, 1 - 0.5 / POINTS, POINTS, dtype=torch.float64)
    s = torch.special.ndtri(at) * width  # a normal distribution's quantiles
    exact, narrow = exact_graph.evaluate(s)[0], evaluate(graph, s)
    if not exact.isfinite().all() or not narrow.isfinite().all():
        return False
    if (exact == exact[0]).all():  # nothing of the function was seen
        return False
    ours, theirs = narrow - exact, _rounded(exact_graph.evaluate(_rounded(s))[0]) - exact
    return bool(
        ours.norm() <= MEAN * theirs.norm()
        and ours.abs().max() <= WORST * theirs.abs().max()
        and ours.mean().abs() <= BIAS * exact.abs().mean()
    )


def _rounded(x: Tensor) -> Tensor:
    return x.to(torch.bfloat16).double()


def evaluate(graph: Graph, s: Tensor) -> Tensor:
    """p with every result and constant rounded, a product that is part of a multiply-add excepted."""
    constants = Graph(graph.n_inputs, tuple(_with_rounded_constants(n) for n in graph.nodes), graph.outputs)
    return constants.evaluate(_rounded(s), hook=_rounder(graph))[0]


def _with_rounded_constants(node: Node) -> Node:
    if node.op == "input":
        return node
    args = (a if isinstance(a, Ref) else float(torch.tensor(float(a), dtype=torch.bfloat16)) for a in node.args)
    return Node(node.op, tuple(args), node.dtype)


def _rounder(graph: Graph) -> Callable[[int, Tensor], Tensor]:
    fused, rng = fused_products(graph), torch.Generator().manual_seed(0)

    def hook(index: int, value: Tensor) -> Tensor:
        if index in fused:
            return value
        extra = EXTRA.get(graph.nodes[index].op, 0.0)
        noise = torch.rand(value.shape, generator=rng, dtype=value.dtype) * 2 - 1
        return _rounded(value * (1 + extra * noise))

    return hook
