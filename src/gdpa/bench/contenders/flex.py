"""FlexAttention made to compute gdpa's attention, by the trick that makes softmax disappear:

    score_mod  s' = log f(s)        out = sum_j e^(s'_j - lse) v_j        out * e^lse = sum_j f(s_j) v_j

with lse = log sum_j e^(s'_j), which FlexAttention returns. It needs f > 0. A pair that the mask drops has s' = -inf
after score_mod and contributes exactly zero, as gdpa defines it. A packed case is one long sequence with a mask of
documents.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from gdpa.bench.contenders.compiling import prepare_compiled
from gdpa.bench.contenders.contender import Pieces, Prepared, native_pieces
from gdpa.bench.contenders.document_mask import document_mask
from gdpa.bench.contenders.packing import packed_offsets, packed_rows
from gdpa.spec import Loaded
from gdpa.testing.cases import Case, Inputs

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask

Function = Callable[[Tensor], Tensor]
SCORES = 20.0  # the benchmark's scores have a standard deviation of 2.5: the largest of 10^10 is about 17


@dataclass(frozen=True)
class FlexLog:
    """FlexAttention compiled, for exactly these shapes."""

    name: str = "flex-log"
    function: str | None = None

    def prepare(self, case: Case, x: Inputs, function: Loaded) -> Prepared | str:
        reason = why_not(case, x, function)
        if reason is not None:
            return reason
        f, mask = function.function, block_mask(case, x)
        return prepare_compiled(
            attention, lambda: (*operands(case, x), f, mask), x.leaves, pieces(case, x), "FlexAttention"
        )


def why_not(case: Case, x: Inputs, function: Loaded) -> str | None:
    """Why the trick does not apply; None if it does."""
    if function.params:
        return "score_mod has no learned params here"
    s = torch.linspace(-SCORES, SCORES, 4001)
    p = function.function(s)
    if not bool((p > 0).all()):
        i = int((p <= 0).nonzero()[0])
        return (
            "log f(s) exists only where f is positive, "
            f"and {function.name}({float(s[i]):g}) is {float(p[i]) or 0.0:.1g}"  # -0.0 reads badly
        )
    if case.varlen and case.band != (None, None):
        return "the mask of documents made here has no band"
    if x.q.device.type == "cpu":
        return "compiled FlexAttention has no backward on a CPU"
    return None


def attention(q: Tensor, k: Tensor, v: Tensor, f: Function, mask: BlockMask | None) -> Tensor:
    """(B, Hq, Lq, Dv) of q (B, Hq, Lq, D), k (B, Hk, Lk, D), v (B, Hk, Lk, Dv)."""
    from torch.nn.attention.flex_attention import AuxRequest, flex_attention

    def score_mod(s: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return f(s).log()

    out, aux = flex_attention(
        q, k, v, score_mod, mask, enable_gqa=q.shape[1] != k.shape[1], return_aux=AuxRequest(lse=True)
    )
    assert aux.lse is not None  # it was asked for
    return (out * aux.lse.exp().unsqueeze(-1)).to(out.dtype)


def operands(case: Case, x: Inputs) -> tuple[Tensor, Tensor, Tensor]:
    """q, k, v as FlexAttention takes them: a packed case is a batch of one."""
    if case.varlen:
        q, k, v = (rows.transpose(0, 1)[None] for rows in packed_rows(case, x))
        return q, k, v
    return x.q.expand(len(x.k), -1, -1, -1), x.k, x.v


def pieces(case: Case, x: Inputs) -> Pieces:
    """Where a sequence is in its results: the output of a packed case is a batch of one."""
    plain = native_pieces(case, x)
    return replace(plain, out=lambda t, b: plain.out(t[0].transpose(0, 1), b)) if case.varlen else plain


def block_mask(case: Case, x: Inputs) -> BlockMask | None:
    """The case's mask: of documents, of a band, or none."""
    if case.varlen:
        return document_mask(*packed_offsets(case, x))
    left, right = case.band
    if left is None and right is None:
        return None
    from torch.nn.attention.flex_attention import create_block_mask

    len_q, len_k = case.len_q[0], case.len_k[0]

    def band(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        distance = j - i - (len_k - len_q)
        inside = distance >= (-len_q - len_k if left is None else -left)
        return inside & (distance <= (len_q + len_k if right is None else right))

    return create_block_mask(band, None, None, len_q, len_k, device=x.q.device)
