"""What both Hopper kernels share: tensor descriptors of jagged tensors, and barriers by which consumers take turns.

A tensor is read through one descriptor of five dimensions, (wrap, end, row, head, column). The first two let the
hardware bound every sequence: with coordinates (2^30, start + length, 2^30 - length + row) the row's address is that of
``start + row`` (the first stride makes 2^30 steps vanish modulo 2^64), and the third coordinate leaves its range of
2^30 exactly when row reaches the length. Rows past a sequence's end thus read zero and are not written, so tails need
no mask and neighbours cannot leak. (The idea is that of triton.tools.ragged_tma.)
"""

from functools import cache, lru_cache

import torch

from gdpa.backends.hopper import config
from gdpa.backends.hopper.compat import TensorDescriptor, gl, gluon
from gdpa.backends.triton.compiled import sharing
from gdpa.backends.triton.launching import Description
from gdpa.device.sequences import in_band, within

# Warpgroups that compute ("consumers") have four warps each; one more warp feeds them. Registers per thread: at launch
# every thread gets an equal share of the SM's 64 K, and then consumers take over what the producer gives back.
LAUNCH_REGISTERS = {1: 136, 2: 168, 3: 128}  # by the number of consumers
CONSUMER_REGISTERS = gl.constexpr(240)  # of two; of three:
CONSUMER_REGISTERS_OF_3 = gl.constexpr(160)
PRODUCER_REGISTERS = gl.constexpr(24)
ROWS = gl.constexpr(config.WARPGROUP_ROWS)  # of a consumer: queries in the forward, keys in the backward
BACKWARD_CONSUMERS = gl.constexpr(config.CONSUMERS)

RAGGED = gl.constexpr(2**30)
LARGEST = 0x7FFF0000


def ragged_descriptor(t: torch.Tensor, rows: int, columns: int) -> Description:
    """The descriptor by which kernels read or write tiles of ``rows`` x ``columns`` of one head of t (B, H, L, D). It
    has no dimension for batch entries: these are reached by the number of their first row. Columns past D read zero."""
    _, heads, _, d = t.shape
    _, head, row, _ = t.stride()
    return Description(t, *_extents(heads, d, head, row), (rows, columns, t.dtype), _make)


def _make(d: Description) -> TensorDescriptor:
    rows, columns, dtype = d.kind
    return TensorDescriptor(d.base, d.shape, d.strides, [1, 1, rows, 1, columns], _layout(rows, columns, dtype))


@lru_cache(maxsize=1024)
def _extents(heads: int, d: int, head: int, row: int) -> tuple[list[int], list[int]]:
    return [LARGEST, LARGEST, RAGGED.value, heads, d], [2**34 - row, row, row, head, 1]


@cache  # made anew it would take half of a call's time on the host
def _layout(rows: int, columns: int, dtype: torch.dtype) -> gl.NVMMASharedLayout:
    kind = {torch.bfloat16: gl.bfloat16, torch.float16: gl.float16, torch.float32: gl.float32}[dtype]
    return gl.NVMMASharedLayout.get_default_for([1, 1, rows, 1, columns], kind)


def batch_rows(*tensors: torch.Tensor) -> tuple[int, ...]:
    """Rows from one batch entry to the next, for each tensor; 0 where there is one entry for all sequences."""
    return tuple(0 if t.shape[0] == 1 else t.stride(0) // t.stride(2) for t in tensors)


@gluon.jit
def ragged(start, length, row, head, column):
    """Coordinates, for a ragged_descriptor, of ``row`` in the sequence that has ``length`` rows from ``start`` on."""
    return [RAGGED, start + length, RAGGED - length + row, head, column]


@gluon.jit
def visible_pairs(i, j, len_q, len_k, band, T: gl.constexpr):
    """Which queries ``i`` see which keys ``j`` (broadcast): those in the band. Pairs past the ends of the sequence are
    only masked where f(0) may not be finite: otherwise they are multiplied by the zeros that padding reads as."""
    if T.FINITE_AT_ZERO:
        return within(j - i - (len_k - len_q), band)
    else:
        return in_band(i, j, len_q, len_k, band)


@gluon.jit
def wait_turn(x, consumer):
    """Sleep until another consumer passes the turn on to this one. Named barrier 8 + consumer (Triton itself uses the
    lower ones). Returns ``x``, any number: a token that keeps turns in order."""
    return at_turn(x, consumer, "sync")


@gluon.jit
def pass_turn(x, consumer):
    """Let ``consumer`` go on; does not wait."""
    return at_turn(x, consumer, "arrive")


@gluon.jit
def at_turn(x, consumer, DOES: gl.constexpr):
    """Arrive at the barrier of ``consumer``, and wait there if it DOES "sync"."""
    TEXT: gl.constexpr = "{ .reg .u32 turn; add.u32 turn, $2, 8; bar." + DOES + " turn, 256; mov.b32 $0, $1; }"
    return gl.inline_asm_elementwise(TEXT, "=r,r,r", [x, consumer], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def number_of_consumer(x):
    """0 or 1, the consumer that asks: for code that two consumers share (compiled/sharing.py). ``x`` is any number,
    since such code must have an operand."""
    return gl.inline_asm_elementwise(OWN_NUMBER, "=r,r", [x], dtype=gl.int32, is_pure=False, pack=1)


OWN_NUMBER = gl.constexpr(sharing.OWN_NUMBER)
