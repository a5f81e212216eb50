"""The definition, in eager torch: what every backend must compute, and the only ground truth.

    s_ij = scale * <q_i, k_j>
    p_ij = f(s_ij; params)  where the band and the mask keep (i, j), else 0;  rounded to the input dtype
    o_i  = out_scale * sum_j p_ij v_j,  or that divided by a sum over the row (rowsums.py)

f may also depend on where (i, j) stands, and on tables indexed by that.

Sequence by sequence, holding each Lq x Lk matrix; differentiable as often as f is.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor

from gdpa.compat import recording
from gdpa.functions.activation import Activation
from gdpa.functions.places.program import Places
from gdpa.functions.places.tables import TableView
from gdpa.masks.band import Band
from gdpa.problem import PLAIN, Divided, Operands, Problem, sums_dtype
from gdpa.rowsums import divided


def attention(problem: Problem, x: Operands) -> Tensor:
    """(out_batch, Hq, rows_q, Dv), by the formula above."""
    return attention_and_sums(problem, x)[0]


def attention_and_sums(problem: Problem, x: Operands) -> tuple[Tensor, Tensor]:
    """(out_batch, Hq, rows_q, Dv), and what it was divided by, (out_batch, Hq, rows_q), of which exponents' sums are
    logarithms."""
    with _no_autocast(problem):
        found = [_one_sequence(problem, x, seq) for seq in _sequences(problem, x)]
    if not found:
        given = (x.q, x.k, x.v, x.params, x.sink, *(t for t in x.tables if t.is_floating_point()))
        nothing = sum(t[..., :0].sum() for t in given if t is not None)  # keeps gradients: zeros
        shape = (problem.out_batch, problem.heads_q, problem.rows_q)
        return x.q.new_zeros(*shape, problem.head_dim_v) + nothing, x.q.new_zeros(shape, dtype=sums_dtype(x.q.dtype))
    outs, sums = zip(*found, strict=True)
    if problem.packed_q:
        return torch.cat(outs, dim=1)[None], torch.cat(sums, dim=1)[None]
    return torch.stack(outs), torch.stack(sums)


def _no_autocast(problem: Problem) -> torch.autocast:
    """Autocast has had its say on q, k and v; here it would undo the wide arithmetic of the definition."""
    return torch.autocast(problem.device.type, enabled=False)


@dataclass(frozen=True)
class _Sequence:
    """Where sequence b stands: a batch entry and a range of rows on each side; and how many rows of no sequence follow
    its queries."""

    b: int
    batch_q: int
    rows_q: slice
    batch_k: int
    rows_k: slice
    unused: int


def _sequences(problem: Problem, x: Operands) -> Iterator[_Sequence]:
    spans_q = _spans(x.cu_q, x.used_q, problem.rows_q, problem.n_seqs)
    spans_k = _spans(x.cu_k, x.used_k, problem.rows_k, problem.n_seqs)
    for b, (rows_q, rows_k) in enumerate(zip(spans_q, spans_k, strict=True)):
        batch_q, batch_k = b if len(x.q) > 1 else 0, b if len(x.k) > 1 else 0
        following = spans_q[b + 1].start if problem.packed_q and b + 1 < problem.n_seqs else problem.rows_q
        yield _Sequence(b, batch_q, rows_q, batch_k, rows_k, following - rows_q.stop)


def _spans(cu: Tensor | None, used: Tensor | None, rows: int, n_seqs: int) -> list[slice]:
    """The rows of each sequence."""
    starts, ends = ([0] * n_seqs, [rows] * n_seqs) if cu is None else (cu.tolist()[:-1], cu.tolist()[1:])
    if used is not None:
        ends = [start + length for start, length in zip(starts, used.tolist(), strict=True)]
    return [slice(start, end) for start, end in zip(starts, ends, strict=True)]


def _one_sequence(problem: Problem, x: Operands, seq: _Sequence) -> tuple[Tensor, Tensor]:
    """(Hq, rows, Dv) and (Hq, rows): one sequence, and zeros for the unused rows behind it."""
    wide = sums_dtype(problem.dtype)
    q = x.q[seq.batch_q, :, seq.rows_q].to(wide)
    k = x.k[seq.batch_k, :, seq.rows_k].to(wide).repeat_interleave(problem.group, dim=0)
    v = x.v[seq.batch_k, :, seq.rows_k].to(wide).repeat_interleave(problem.group, dim=0)
    s = problem.scale * (q @ k.mT)
    kept = keep(problem.band, s.shape[-2], s.shape[-1], s.device)
    at = _positions(problem, seq, s) if problem.placed else {}
    if problem.mask is not None:
        kept = kept & problem.mask.eager(mask_places(problem, at, x.tables, kept), s)
    visible = None if problem.mask is None and problem.band.unbounded else kept
    p = apply(problem.activations, s, x.params, places_of(problem, at, x.tables, kept), visible)
    out, sums = divided(problem.norms or (PLAIN,), p, kept, v, x.sink, lambda p: rounded(p, problem.dtype))
    out = (problem.out_scale * out).to(problem.dtype)
    return F.pad(out, (0, 0, 0, seq.unused)), F.pad(sums, (0, seq.unused))


def _positions(problem: Problem, seq: _Sequence, s: Tensor) -> dict[str, Tensor]:
    """Positions of the scores (Hq, Lq, Lk) of one sequence (see places/names.py), to be broadcast against them."""
    _, len_q, len_k = s.shape
    heads = problem.first_head + problem.head_step * torch.arange(problem.heads_q, device=s.device)
    i = torch.arange(len_q, device=s.device)[:, None]
    j = torch.arange(len_k, device=s.device)
    first_q = seq.rows_q.start if problem.packed_q else seq.b * problem.rows_q
    first_k = seq.rows_k.start if problem.packed_k else seq.b * problem.rows_k
    numbers = {"b": seq.b, "q_len": len_q, "kv_len": len_k}
    return {
        **{name: torch.tensor(value, device=s.device) for name, value in numbers.items()},
        "h": heads[:, None, None], "q_idx": i, "kv_idx": j, "q_row": first_q + i, "kv_row": first_k + j,
    }  # fmt: skip


def places_of(problem: Problem, at: Mapping[str, Tensor], tables: Sequence[Tensor], visible: Tensor | None) -> Places:
    """What the function is given; only indices of ``visible`` pairs must be in range."""
    own = tables[: problem.n_tables]
    return Places(at, [TableView(t, f"tables[{i}]", visible) for i, t in enumerate(own)])


def mask_places(problem: Problem, at: Mapping[str, Tensor], tables: Sequence[Tensor], visible: Tensor | None) -> Places:
    """What the mask is given."""
    own = tables[problem.n_tables :]
    return Places(at, [TableView(t, f"mask.tables[{i}]", visible) for i, t in enumerate(own)])


def check_indices(problem: Problem, x: Operands) -> None:
    """Raise IndexError where a visible pair's index is out of range, for backends that look at none."""
    with torch.no_grad():
        for seq in _sequences(problem, x):
            len_q, len_k = (len(range(rows.start, rows.stop)) for rows in (seq.rows_q, seq.rows_k))
            s = torch.zeros((), device=problem.device).expand(problem.heads_q, len_q, len_k)
            kept, at = keep(problem.band, len_q, len_k, s.device), _positions(problem, seq, s)
            if problem.mask is not None:
                kept = kept & problem.mask.eager(mask_places(problem, at, x.tables, kept), s)
            for act in problem.activations:
                if act.placed is not None:
                    act.placed.program.evaluate(places_of(problem, at, x.tables, kept), s)


def add_table_gradients(
    problem: Problem, x: Operands, do: Tensor, dtables: Sequence[Tensor | None], sums: Divided | None = None
) -> None:
    """The gradients of tables alone, sequence by sequence and in a fixed order, added to ``dtables``."""
    dsums = None if sums is None else sums.dsums
    tables = [t.detach().requires_grad_(t.is_floating_point()) for t in x.tables]
    pairs = [(t, into) for t, into in zip(tables, dtables, strict=False) if into is not None]
    own = x.with_tables(tables)
    for seq in _sequences(problem, x):
        rows = slice(seq.rows_q.start, seq.rows_q.stop + seq.unused)
        with recording(), _no_autocast(problem):
            results = _one_sequence(problem, own, seq)
            given = [(r, g) for r, g in zip(results, (do, dsums), strict=True) if g is not None and r.requires_grad]
            outs = [r for r, _ in given]
            mine = [g[0, :, rows] if problem.packed_q else g[seq.b] for _, g in given]
            leaves = [t for t, _ in pairs]
            grads = torch.autograd.grad(outs, leaves, mine, allow_unused=True, materialize_grads=True)
        for (_, into), grad in zip(pairs, grads, strict=True):
            into += grad


def rounded(p: Tensor, dtype: torch.dtype) -> Tensor:
    """p rounded to ``dtype``, with the gradient of p: a cast would round dp too, which the definition does not."""
    change = (p.to(dtype).to(p.dtype) - p).detach()
    return p + change.nan_to_num(nan=0.0, posinf=torch.inf, neginf=-torch.inf)  # NaN: inf - inf


def apply(
    activations: tuple[Activation, ...], s: Tensor, params: Tensor | None, places: Places | None = None,
    visible: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """f(s) for s (Hq, Lq, Lk) and params (n_params, Hq), with gradients where it is ``visible``."""
    columns = [] if params is None else [row[:, None, None].to(s.dtype) for row in params]
    if visible is not None:
        # Where a pair is masked dp is 0, but f' may be inf or NaN there, and autograd would multiply the two.
        s, *columns = (torch.where(visible, t, t.detach()) for t in (s, *columns))
    if len(activations) == 1:
        return activations[0].eager(s, *columns, places=places)
    heads = [
        act.eager(s[h], *(c[h] for c in columns), places=places and _of_head(places, h))
        for h, act in enumerate(activations)
    ]
    return torch.stack(heads)


def _of_head(places: Places, h: int) -> Places:
    """Of one head of places of (Hq, Lq, Lk)."""

    def one(t: Tensor | None) -> Tensor | None:
        return t if t is None or t.dim() < 3 else t[h if len(t) > 1 else 0]

    at = {name: cast(Tensor, one(t)) for name, t in places.at.items()}
    return Places(at, [TableView(t.t, t.name, one(t.visible)) for t in places.tables])


def keep(band: Band, len_q: int, len_k: int, device: torch.device) -> Tensor:
    """(len_q, len_k) of bool: True where ``-left <= j - i - (len_k - len_q) <= right``."""
    i = torch.arange(len_q, device=device)[:, None]
    j = torch.arange(len_k, device=device)[None, :]
    return band.holds(j - i - (len_k - len_q))


class ReferenceBackend:
    """The definition as a backend. Asked for by name it is called without the operator, to be differentiable twice."""

    name = "reference"

    def supports(self, problem: Problem) -> str | None:
        return None

    def forward(self, problem: Problem, x: Operands, out: Tensor, sums: Tensor | None = None) -> None:
        o, d = attention_and_sums(problem, x)
        out.copy_(o)
        if sums is not None:
            sums.copy_(d)

    def backward(
        self, problem: Problem, x: Operands, do: Tensor, dq: Tensor, dk: Tensor, dv: Tensor, dparams: Tensor | None,
        dtables: Sequence[Tensor | None] = (), sums: Divided | None = None,
    ) -> None:  # fmt: skip
        def leaf(t: Tensor) -> Tensor:
            return t.detach().requires_grad_()

        tables = [leaf(t) if t.is_floating_point() else t for t in x.tables]
        own = replace(
            x, q=leaf(x.q), k=leaf(x.k), v=leaf(x.v), params=None if x.params is None else leaf(x.params),
            tables=tables, sink=None if x.sink is None else leaf(x.sink),
        )  # fmt: skip
        dsink = None if sums is None else sums.dsink
        wanted = [
            (own.q, dq), (own.k, dk), (own.v, dv), (own.params, dparams), (own.sink, dsink),
            *zip(tables, dtables, strict=False),
        ]  # fmt: skip
        pairs = [(t, into) for t, into in wanted if t is not None and into is not None]
        with recording(), _no_autocast(problem):
            out, d = attention_and_sums(problem, own)
            leaves = [t for t, _ in pairs]
            of, given = [out], [do]
            if sums is not None and sums.dsums is not None and d.requires_grad:
                of, given = [out, d], [do, sums.dsums]
            grads = torch.autograd.grad(of, leaves, given, allow_unused=True, materialize_grads=True)
        for (_, into), grad in zip(pairs, grads, strict=True):
            if any(into is t for t in dtables):
                into += grad  # heads of another function may have been there
            else:
                into.copy_(grad)
