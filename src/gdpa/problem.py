"""What one call computes: shapes, dtype, device, function and band. Made once, read everywhere.

Tensors reach every backend in one form, the layout of ``F.scaled_dot_product_attention``:

    q (Bq, Hq, Tq, D)    k (Bk, Hk, Tk, D)    v (Bk, Hk, Tk, Dv)    out (B or 1, Hq, rows, Dv)

with any strides and a contiguous last dimension. A *packed* side has batch 1 and offsets ``cu_q`` / ``cu_k`` of B+1
entries; a *dense* side has no offsets and batch B, or batch 1 for queries shared by all sequences. "Dense" is thus
only varlen without offsets, and packed tensors of shape (T, H, D) arrive as transposed views, never as copies.

Rows may be *unused*: those of a packed side behind the last offset, and those of a sequence's slot behind the first
``used_q[b]`` / ``used_k[b]``, where such lengths are given. They are no part of any sequence: nothing reads them, and
outputs and gradients have zeros there.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field, replace
from functools import wraps
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor

from gdpa.compat import FakeTensor, is_functorch_wrapped_tensor
from gdpa.functions.activation import Activation, from_keys
from gdpa.functions.mask import MaskFunction, mask_from_key
from gdpa.masks.band import Band

T = TypeVar("T")

# What a head's outputs are divided by: nothing, the sum of p over the row, that of |p|, or, for p = exp(g), the sum of
# p computed from g less its largest value in the row, as softmax is.
PLAIN, SUM, ABS, EXP = "none", "sum", "abs", "exp"


@dataclass(frozen=True)
class Operands:
    """The tensors of one call, in the order of the operator's arguments (see the module's docstring for their shapes);
    ``params`` is (n_params, Hq) or None, ``used_q`` and ``used_k`` are (B,) or None, ``tables`` those of the function,
    then those of the mask; ``sink`` (Hq,) is part of row sums, if there are any, and None for 0."""

    q: Tensor
    k: Tensor
    v: Tensor
    cu_q: Tensor | None = None
    cu_k: Tensor | None = None
    params: Tensor | None = None
    used_q: Tensor | None = None
    used_k: Tensor | None = None
    tables: Sequence[Tensor] = ()
    sink: Tensor | None = None  # only operators of row sums take it

    # Stands for the strides, dtypes and alignment of all tensors: calls with equal kinds agree in them. None if these
    # have not been compared (calling.layouts.Given has one).
    kind: ClassVar[Hashable] = None

    @property
    def others(self) -> tuple[Tensor | Sequence[Tensor] | None, ...]:
        """What all operators take besides q, k and v."""
        return self.cu_q, self.cu_k, self.params, self.used_q, self.used_k, list(self.tables)

    def with_tables(self, tables: Sequence[Tensor]) -> Operands:
        """The same with other tables, in the operator's layout."""
        others = (self.cu_q, self.cu_k, self.params, self.used_q, self.used_k)
        return Operands(self.q, self.k, self.v, *others, tables, self.sink)

    @property
    def starts(self) -> tuple[Any, Any, Any]:
        """Tensors that begin at the addresses of q, k and v, in any shape: enough for a launch that repeats another."""
        return self.q, self.k, self.v

    def written(self, out: Tensor) -> Tensor:
        """``out``, which may have the caller's layout, as (out_batch, Hq, rows, Dv)."""
        return out


@dataclass(frozen=True)
class Divided:
    """What a backward with row sums takes besides: the forward's output, divided, and its ``sums`` (out_batch, Hq,
    rows_q), the denominators, or their logarithms where the norm is EXP; ``dsums``, the gradient of the sums if the
    caller has used them; and ``dsink``, where the gradient of the sink is written, if there is a sink."""

    out: Tensor
    sums: Tensor
    dsums: Tensor | None
    dsink: Tensor | None

    def of_heads(self, q: slice) -> Divided:
        dsums = None if self.dsums is None else self.dsums[:, q]
        dsink = None if self.dsink is None else self.dsink[q]
        return Divided(self.out[:, q], self.sums[:, q], dsums, dsink)


def sums_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype of row sums, and of arithmetic on scores, for inputs of ``dtype``."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def parts(q: Tensor | None, rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """q, k and v (B, H, L, D) of one projection, as views: of ``rows`` (B, L, Hq / Hk + 2, Hk, D), or beside a ``q`` of
    its own of ``rows`` (B, L, 2, Hk, D)."""
    k, v = (rows[:, :, i].transpose(1, 2) for i in (-2, -1))
    if q is None:
        # With as many heads of k there is nothing to flatten: that would hold exported programs to more than one row.
        q = (rows[:, :, 0] if rows.shape[2] == 3 else rows[:, :, :-2].flatten(2, 3)).transpose(1, 2)
    return q, k, v


@dataclass(frozen=True)
class Settings:
    """A call's arguments that are not tensors, in the order of the operator's. ``activations`` are keys of functions'
    graphs, one, or one per query head; the band is -left <= j - i - (Lk - Lq) <= right."""

    activations: Sequence[str]
    scale: float
    out_scale: float
    left: int | None
    right: int | None
    max_q: int | None
    max_k: int | None
    precision: str
    backend: str | None
    mask: str | None = None  # the key of its graph
    learn: bool = False  # gradients of tables are wanted
    normalize: Sequence[str] = ()  # PLAIN, SUM or ABS, one per entry of ``activations``; empty if all are plain

    @property
    def values(self) -> tuple[object, ...]:
        """The arguments that all operators take (``normalize`` is for those with row sums)."""
        return (
            self.activations, self.scale, self.out_scale, self.left, self.right, self.max_q, self.max_k,
            self.precision, self.backend, self.mask, self.learn,
        )  # fmt: skip

    def problem(self, x: Operands) -> Problem:
        """What a call with these settings computes of ``x``."""
        band, functions = Band(self.left, self.right), from_keys(self.activations)
        found = make_problem(
            x, functions, float(self.scale), float(self.out_scale), band, self.max_q, self.max_k, self.precision
        )
        if self.normalize:
            found = found.normalized(tuple(self.normalize))
        if self.mask is not None:
            found = found.masked(mask_from_key(self.mask))
        return replace(found, learn=True) if self.learn else found


@dataclass(frozen=True)
class Problem:
    """Everything about a call that is not tensor data. ``activations`` has one entry, or one per query head."""

    activations: tuple[Activation, ...]
    n_seqs: int
    heads_q: int
    heads_k: int
    rows_q: int
    rows_k: int
    head_dim: int
    head_dim_v: int
    dtype: torch.dtype
    device: torch.device
    scale: float
    out_scale: float
    band: Band
    packed_q: bool
    packed_k: bool
    shared_q: bool
    max_q: int | None
    max_k: int | None
    regular: bool  # strides of q, k and v that a tensor descriptor can express (see is_regular)
    used_q: bool = False  # lengths of their own are given, see the module's docstring
    used_k: bool = False
    precision: str = "exact"
    mask: MaskFunction | None = None
    learn: bool = False  # gradients of tables are wanted
    first_head: int = 0  # the number of the first query head in the call, and the step to the next (see ops/heads.py)
    head_step: int = 1
    norms: tuple[str, ...] = ()  # one per entry of ``activations``, empty if all are PLAIN; see ``normalized``
    # Decisions already made: for this problem (see kept), and for all that differ from it in nothing but their numbers
    # of rows, which share this dictionary (see kept_for_any_rows).
    derived: dict[Hashable, Any] = field(default_factory=dict, init=False, repr=False, compare=False)
    of_any_rows: dict[Hashable, Any] = field(default_factory=dict, init=False, repr=False, compare=False)

    def normalized(self, normalize: tuple[str, ...]) -> Problem:
        """The same problem with row sums. Of a function that is exp of another one, the other takes its place."""
        acts, norms = [], []
        for act, norm in zip(self.activations, normalize, strict=True):
            exponent = None if norm == PLAIN else act.exponent
            acts.append(exponent or act)
            norms.append(EXP if exponent else norm)
        return replace(self, activations=tuple(acts), norms=tuple(norms))

    def masked(self, mask: MaskFunction) -> Problem:
        """The same problem behind ``mask``, which becomes part of the band if it is one (see places/bands.py)."""
        shift = None if self.varying_q or self.varying_k else self.rows_k - self.rows_q  # kv_len - q_len
        bounds = None if mask.bands is None else mask.bands.as_one(shift)
        band = None if bounds is None else self.band.narrowed(bounds.least, bounds.most)
        return replace(self, mask=mask) if band is None else replace(self, band=band)

    @property
    def norm(self) -> str:
        """How a problem whose heads all share one function is normalised."""
        return self.norms[0] if self.norms else PLAIN

    @property
    def placed(self) -> bool:
        """Whether a function or the mask takes positions or tables (a band alone does not count)."""
        return self.mask is not None or any(act.placed is not None for act in self.activations)

    @property
    def gathers(self) -> bool:
        """Whether a function looks up an entry of a table for every pair of query and key."""
        return any(act.placed is not None and act.placed.program.gathers for act in self.activations)

    @property
    def n_tables(self) -> int:
        """Tables of the function; those of the mask follow them in Operands.tables."""
        return len(self.activations[0].tables)

    @property
    def activation(self) -> Activation:
        """The function of a problem whose heads all share one (both passes of a backend see only such problems)."""
        (only,) = self.activations
        return only

    @property
    def group(self) -> int:
        """Query heads per key head."""
        return self.heads_q // self.heads_k

    @property
    def n_params(self) -> int:
        return self.activations[0].n_params

    @property
    def varying_q(self) -> bool:
        """Whether sequences may have different numbers of queries."""
        return self.packed_q or self.used_q

    @property
    def varying_k(self) -> bool:
        """Whether sequences may have different numbers of keys, and some none."""
        return self.packed_k or self.used_k

    @property
    def longest_keys(self) -> int:
        """The number of keys of any sequence at most, if the hint ``max_k`` is right: only tiles are chosen by it."""
        return min(self.max_k, self.rows_k) if self.packed_k and self.max_k is not None else self.rows_k

    @property
    def longest_queries(self) -> int:
        """The same for queries."""
        return min(self.max_q, self.rows_q) if self.packed_q and self.max_q is not None else self.rows_q

    @property
    def mean_keys(self) -> int:
        """Keys per sequence on average, from what is known without reading the device."""
        return self.rows_k // max(self.n_seqs, 1) if self.packed_k else self.rows_k

    @property
    def mean_queries(self) -> int:
        """The same for queries."""
        return self.rows_q // max(self.n_seqs, 1) if self.packed_q else self.rows_q

    @property
    def most_rows(self) -> int:
        """Rows of the larger side, of all batch entries."""
        q, k = (1 if packed else self.n_seqs for packed in (self.packed_q, self.packed_k))
        return max(self.rows_q * q, self.rows_k * k)

    @property
    def out_batch(self) -> int:
        """Batch entries of the output: a packed output has one, a dense one has a row per sequence."""
        return 1 if self.packed_q else self.n_seqs

    def with_heads(
        self, activation: Activation, heads_q: int, heads_k: int, first_head: int = 0, head_step: int = 1,
        norm: str = PLAIN,
    ) -> Problem:  # fmt: skip
        """The same problem over a subset of heads that share ``activation`` and ``norm``."""
        return replace(
            self, activations=(activation,), heads_q=heads_q, heads_k=heads_k, first_head=first_head,
            head_step=head_step, norms=() if norm == PLAIN else (norm,),
        )  # fmt: skip

    def with_rows(self, rows_q: int, rows_k: int) -> Problem:
        """The same problem with other numbers of rows; not by replace(), which takes ten times as long."""
        other = object.__new__(Problem)
        other.__dict__.update(self.__dict__, rows_q=rows_q, rows_k=rows_k, derived={})
        return other


UNDECIDED = object()


def kept(decide: Callable[..., T]) -> Callable[..., T]:
    """Decorator: ``decide(problem, *args)`` runs once for each problem, whose ``derived`` keeps the result. It must
    follow from the arguments alone. A problem lives as long as the plan of the calls it describes (see
    gdpa.calling.plans), so repeated calls decide nothing."""

    @wraps(decide)
    def find_or_decide(problem: Problem, *args: Hashable) -> T:
        known, key = problem.derived, (decide, *args)
        found: Any = known.get(key, UNDECIDED)
        if found is UNDECIDED:
            found = known[key] = decide(problem, *args)
        return found

    return find_or_decide


def kept_for_any_rows(decide: Callable[..., T]) -> Callable[..., T]:
    """Like ``kept``, for results that depend neither on ``rows_q`` nor on ``rows_k``: batches of packed sequences,
    whose numbers of rows change every time, share them."""

    @wraps(decide)
    def find_or_decide(problem: Problem, *args: Hashable) -> T:
        known, key = problem.of_any_rows, (decide, *args)
        found: Any = known.get(key, UNDECIDED)
        if found is UNDECIDED:
            found = known[key] = decide(problem, *args)
        return found

    return find_or_decide


def kept_with_rows(make: Callable[[Problem], Problem | None]) -> Callable[[Problem], Problem | None]:
    """``make(problem)``, another problem or None, made once whatever the rows; what is returned has the same rows as
    ``problem``, so that what is decided of it for any rows is decided once, too."""
    made_of = kept_for_any_rows(make)

    @kept
    @wraps(make)
    def find_or_make(problem: Problem) -> Problem | None:
        found = made_of(problem)
        return None if found is None else found.with_rows(problem.rows_q, problem.rows_k)

    return find_or_make


def make_problem(
    x: Operands,
    activations: tuple[Activation, ...],
    scale: float,
    out_scale: float,
    band: Band,
    max_q: int | None = None,
    max_k: int | None = None,
    precision: str = "exact",
) -> Problem:
    """Read a Problem off operands that ``api.py`` has already checked."""
    if x.cu_k is not None:
        n_seqs = x.cu_k.numel() - 1
    elif x.cu_q is not None:
        n_seqs = x.cu_q.numel() - 1
    else:
        n_seqs = x.k.shape[0]
    return Problem(
        activations=activations,
        n_seqs=n_seqs,
        heads_q=x.q.shape[1],
        heads_k=x.k.shape[1],
        rows_q=x.q.shape[2],
        rows_k=x.k.shape[2],
        head_dim=x.q.shape[3],
        head_dim_v=x.v.shape[3],
        dtype=x.q.dtype,
        device=x.q.device,
        scale=scale,
        out_scale=out_scale,
        band=band,
        packed_q=x.cu_q is not None,
        packed_k=x.cu_k is not None,
        shared_q=x.cu_q is None and x.q.shape[0] == 1 and n_seqs != 1,
        max_q=max_q,
        max_k=max_k,
        regular=all(is_regular(t) for t in (x.q, x.k, x.v)),
        used_q=x.used_q is not None,
        used_k=x.used_k is not None,
        precision=precision,
    )


def is_regular(t: Tensor) -> bool:
    """Whether rows, heads and batch entries of (B, H, L, D) start at multiples of 16 bytes, and batch entries lie a
    whole number of rows apart, not more than 2^30 in all."""
    if is_functorch_wrapped_tensor(t):  # inside a transform: no address, and no kernel to take it
        return False
    batch, head, row, _ = t.stride()
    address = 0 if isinstance(t, FakeTensor) else t.data_ptr()  # which PyTorch warns of: it has none
    if address % 16 or any(s * t.element_size() % 16 for s in (head, row)):
        return False
    if row == 0 or (head == 0 and t.shape[1] > 1):
        return False
    return t.shape[0] == 1 or (batch % row == 0 and t.shape[0] * (batch // row) <= 2**30)
