"""Jagged: sequences of different lengths, end to end in one tensor; and the three forms in which layers take them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor

from gdpa.arguments import checks
from gdpa.arguments.integers import is_int
from gdpa.arguments.nested import is_jagged
from gdpa.compat import GetAttrKey, known_lengths, ragged_dim, register_pytree_node
from gdpa.foreign import PADDING, only_a_device


@dataclass(frozen=True, eq=False)
class Jagged:
    """B sequences of different lengths: sequence b has the rows cu_seqlens[b] to cu_seqlens[b+1] of ``values``.

    Args:
        values: (T, C), the rows of all sequences end to end.
        cu_seqlens: (B+1,), int32 or int64, on the device of ``values``; from 0 to T, or to less: rows after its last
            entry (a batch of fixed capacity) belong to no sequence, no other row sees them, and what layers compute for
            them is meaningless.
        max_seqlen: an upper bound on the lengths, optional; used by kernels and ``to_padded`` if given.

    >>> x = Jagged.from_lengths(torch.randn(8, 16), torch.tensor([5, 0, 3]))
    >>> len(x), x.cu_seqlens.tolist(), [tuple(s.shape) for s in x.unbind()]
    (3, [0, 5, 5, 8], [(5, 16), (0, 16), (3, 16)])
    """

    values: Tensor
    cu_seqlens: Tensor
    max_seqlen: int | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.values, Tensor):
            raise TypeError(f"values must be a tensor, got {type(self.values).__name__}")
        if self.values.is_nested:
            raise TypeError("values is a nested tensor; use Jagged.from_nested")
        if self.values.dim() != 2:
            raise ValueError(f"values must have shape (T, C), got {tuple(self.values.shape)}")
        checks.cu_seqlens("cu_seqlens", self.cu_seqlens, self.values, "values", optional=False)
        longest = checks.max_seqlen("max_seqlen", self.max_seqlen, self.cu_seqlens, self.values.shape[0])
        if type(longest) is not type(self.max_seqlen):  # numpy's, of which programs cannot be made
            object.__setattr__(self, "max_seqlen", longest)

    @staticmethod
    def from_lengths(values: Tensor, lengths: Tensor, max_seqlen: int | None = None) -> Jagged:
        """A Jagged of rows (T, C) with lengths (B,) that add up to T. Does not synchronise with the device."""
        if not isinstance(lengths, Tensor):
            raise TypeError(f"lengths must be a tensor, got {type(lengths).__name__}")
        if lengths.dtype not in (torch.int32, torch.int64):
            raise TypeError(f"lengths must be int32 or int64, got {lengths.dtype}")
        if lengths.dim() != 1:
            raise ValueError(f"lengths must have shape (B,), got {tuple(lengths.shape)}")
        found = Jagged(values, F.pad(lengths.cumsum(0, dtype=torch.int32), (1, 0)), max_seqlen)
        if found._cheap_to_read() and ((lengths < 0).any() or lengths.sum() != values.shape[0]):
            raise ValueError(
                f"lengths must not be negative and must add up to the {values.shape[0]} rows of values: they begin "
                f"with {lengths[:8].tolist()} and add up to {int(lengths.sum())}"
            )
        return found

    @staticmethod
    def from_sequences(sequences: Sequence[Tensor]) -> Jagged:
        """A Jagged of tensors (L_b, C), at least one; the inverse of ``unbind``."""
        if not isinstance(sequences, Sequence | Tensor):
            raise TypeError(f"sequences must be a list of tensors, got {type(sequences).__name__}")
        if len(sequences) == 0:
            raise ValueError("sequences is empty; it needs at least one (L, C) tensor")
        for b, s in enumerate(sequences):
            if not isinstance(s, Tensor):
                raise TypeError(f"sequences[{b}] must be a tensor, got {type(s).__name__}")
            if s.dim() != 2:
                raise ValueError(f"sequences[{b}] must have shape (L, C), got {tuple(s.shape)}")
            if s.shape[1] != sequences[0].shape[1]:
                raise ValueError(
                    f"sequences must have the same width C: sequences[0] has {sequences[0].shape[1]} and "
                    f"sequences[{b}] {s.shape[1]}"
                )
        lengths = [s.shape[0] for s in sequences]
        values = torch.cat(list(sequences))
        return Jagged.from_lengths(values, torch.tensor(lengths, device=values.device), max(lengths))

    @staticmethod
    def from_padded(padded: Tensor, keep: Tensor) -> Jagged:
        """A Jagged of the real rows of a padded batch (B, L, C). ``keep``: (B, L), True or 1 where a row is real,
        wherever those stand (Hugging Face's attention_mask; nn.MultiheadAttention's key_padding_mask is its negation);
        or (B,) lengths, if real rows come first. The number of real rows is read back from the device. The inverse is
        ``to_padded``, or ``padded.new_zeros(...)[keep.bool()] = x.values`` where the padding does not come last.

        >>> x = Jagged.from_padded(torch.randn(2, 3, 16), torch.tensor([[1, 1, 0], [1, 1, 1]]))
        >>> x.cu_seqlens.tolist(), x.max_seqlen
        ([0, 2, 5], 3)
        """
        for name, t in (("padded", padded), ("keep", keep)):
            if not isinstance(t, Tensor):
                raise TypeError(f"{name} must be a tensor, got {type(t).__name__}")
        if padded.is_nested or padded.dim() != 3:
            raise ValueError(f"padded must be a dense tensor (B, L, C), got shape {tuple(padded.shape)}")
        if keep.is_floating_point() or keep.is_complex():
            raise TypeError(f"keep must be of bool or integers, got {keep.dtype}")
        n, length, _ = padded.shape
        if keep.shape == (n,) and keep.dtype != torch.bool:
            if n and not 0 <= int(keep.min()) <= int(keep.max()) <= length:
                raise ValueError(f"keep has lengths from {int(keep.min())} to {int(keep.max())} of {length} rows")
            keep = torch.arange(length, device=keep.device) < keep[:, None]
        if keep.shape != (n, length):
            raise ValueError(f"keep must have shape ({n}, {length}), or ({n},) of lengths, got {tuple(keep.shape)}")
        kept = keep.bool()
        return Jagged.from_lengths(padded[kept], kept.sum(1), length)

    @staticmethod
    def from_nested(nested: Tensor) -> Jagged:
        """A Jagged of a nested tensor (B, j, C) of layout torch.jagged; a view."""
        if not is_jagged(nested):
            raise TypeError("nested must be a nested tensor of layout torch.jagged")
        if nested.dim() != 3 or ragged_dim(nested) != 1:
            raise ValueError(
                f"nested must be (B, j, C), ragged in dimension 1; it has {nested.dim()} dimensions and is ragged in "
                f"dimension {ragged_dim(nested)}"
            )
        if nested.lengths() is not None:  # type: ignore[attr-defined]
            raise ValueError("nested has holes (it was narrowed); call contiguous() first")
        return Jagged(nested.values(), nested.offsets(), known_lengths(nested)[1])  # type: ignore[attr-defined]

    def __len__(self) -> int:
        """The number of sequences, B."""
        return self.cu_seqlens.shape[0] - 1

    @property
    def lengths(self) -> Tensor:
        """(B,), in the dtype of cu_seqlens."""
        return self.cu_seqlens.diff()

    def with_values(self, values: Tensor) -> Jagged:
        """Other rows (T, C') with the same lengths."""
        if not isinstance(values, Tensor):
            raise TypeError(f"values must be a tensor, got {type(values).__name__}")
        if values.shape[0] != self.values.shape[0]:
            raise ValueError(f"values must have {self.values.shape[0]} rows, got shape {tuple(values.shape)}")
        return Jagged(values, self.cu_seqlens, self.max_seqlen)

    def to(self, device: torch.device | str, *, non_blocking: bool = False) -> Jagged:
        """The same sequences on another device."""
        only_a_device(device, "x.with_values(x.values.to(dtype)) has rows of another dtype")
        values, cu = (t.to(device, non_blocking=non_blocking) for t in (self.values, self.cu_seqlens))
        return Jagged(values, cu, self.max_seqlen)

    def sequence_ids(self) -> Tensor:
        """(T,) int64: the sequence that each row belongs to; B for rows of no sequence. Does not synchronise with the
        device."""
        rows = torch.arange(self.values.shape[0], device=self.values.device, dtype=self.cu_seqlens.dtype)
        # Of all offsets, not of those from 1 on: Inductor of torch 2.11 cannot search in a slice on a GPU.
        return torch.searchsorted(self.cu_seqlens, rows, right=True) - 1

    def positions(self) -> Tensor:
        """(T,) int64: the place of each row in its sequence, from 0. Does not synchronise with the device.

        >>> Jagged.from_lengths(torch.randn(4, 1), torch.tensor([3, 0, 1])).positions()
        tensor([0, 1, 2, 0])
        """
        rows = torch.arange(self.values.shape[0], device=self.values.device)
        return rows - self.cu_seqlens[self.sequence_ids()]

    def to_padded(self, length: int | None = None) -> Tensor:
        """(B, length, C), zero after the end of each sequence; rows of no sequence are left out. ``length`` must be at
        least max_seqlen, or, if that is None, at least the longest sequence's length. By default it is max_seqlen, or,
        if that is None, read from cu_seqlens, which waits for the GPU."""
        if self._cheap_to_read():
            checks.lengths_between("cu_seqlens", self.cu_seqlens, self.values.shape[0])
        if length is None:
            length = self.max_seqlen
        elif not is_int(length):
            raise TypeError(f"length must be an int or None, got {length!r}")
        elif length < 0 or (self.max_seqlen is not None and length < self.max_seqlen):
            raise ValueError(f"length={length} is less than max_seqlen={self.max_seqlen or 0}")
        if length is None:
            length = int(self.lengths.max()) if len(self) else 0
        elif self._cheap_to_read() and len(self) and length < self.lengths.max():
            raise ValueError(f"length={length} is less than the longest sequence's ({int(self.lengths.max())})")
        n, width = len(self), self.values.shape[1]
        ids = self.sequence_ids()
        places = torch.where(ids < n, ids * length + self.positions(), n * length)  # rows of none share one behind all
        padded = self.values.new_zeros(n * length + 1, width).index_put((places,), self.values)
        return padded[:-1].view(n, length, width)

    def _cheap_to_read(self) -> bool:
        """Whether lengths can be looked at: no device is waited for, no compiler is tracing."""
        return self.cu_seqlens.device.type == "cpu" and not torch.compiler.is_compiling()

    def unbind(self) -> list[Tensor]:
        """The sequences, (L_b, C) each: views. Lengths are read back from the device."""
        lengths = checks.lengths_between("cu_seqlens", self.cu_seqlens, self.values.shape[0]).tolist()
        return list(self.values[: sum(lengths)].split(lengths))

    def to_nested(self) -> Tensor:
        """A nested tensor (B, j, C) of layout torch.jagged over the same rows. It has none of no sequence: on the CPU
        these are left out, on a GPU, which would be waited for, there must not be any."""
        values = self.values
        if self._cheap_to_read():
            end = int(checks.lengths_between("cu_seqlens", self.cu_seqlens, values.shape[0]).sum())
            values = values[:end] if end < values.shape[0] else values
        return torch.nested.nested_tensor_from_jagged(values, self.cu_seqlens, max_seqlen=self.max_seqlen)


def _parts(x: Jagged) -> tuple[list[Any], int | None]:
    return [x.values, x.cu_seqlens], x.max_seqlen


def _parts_with_keys(x: Jagged) -> tuple[list[tuple[Any, Any]], int | None]:
    return [(GetAttrKey("values"), x.values), (GetAttrKey("cu_seqlens"), x.cu_seqlens)], x.max_seqlen


def _of_parts(parts: Iterable[Any], max_seqlen: int | None) -> Jagged:
    """Without the checks: the parts may be whatever a transformation has made of the tensors."""
    x = object.__new__(Jagged)
    for name, value in zip(("values", "cu_seqlens", "max_seqlen"), (*parts, max_seqlen), strict=True):
        object.__setattr__(x, name, value)
    return x


# So that torch finds the tensors in it, each under its name: torch.export does, and fully_shard of torch 2.11 has hooks
# on those that a layer returns.
register_pytree_node(
    Jagged, _parts, _of_parts, serialized_type_name="gdpa.nn.Jagged", flatten_with_keys_fn=_parts_with_keys
)


Batch = Tensor | Jagged
BatchT = TypeVar("BatchT", Tensor, Jagged)


def batch(name: str, x: Any, dim: int) -> Batch:
    """What a sequence layer computes with: a dense (B, L, dim) as it is, a Jagged as it is, a nested one as a Jagged.
    Anything else is refused under the argument's ``name``."""
    x = _unnested(name, x)
    if isinstance(x, Tensor) and x.dim() != 3:
        raise ValueError(
            f"{name} must have shape (B, L, {dim}), got {tuple(x.shape)}; rows (T, {dim}) go in a gdpa.nn.Jagged"
        )
    _wide(name, rows(x), dim)
    return x


def features(name: str, x: Any, dim: int) -> Tensor:
    """What a layer computes with that treats rows one by one: the rows of ``x``, or a dense (..., dim) as it is."""
    return _wide(name, rows(_unnested(name, x)), dim)


def _unnested(name: str, x: Any) -> Batch:
    if isinstance(x, Tensor) and x.is_nested:
        return Jagged.from_nested(x)
    if not isinstance(x, Tensor | Jagged):
        raise TypeError(f"{name} must be a dense tensor, a nested tensor (B, j, C) or a Jagged, got {type(x).__name__}")
    return x


def _wide(name: str, values: Tensor, dim: int) -> Tensor:
    if values.dim() == 0 or values.shape[-1] != dim:
        raise ValueError(f"{name} must have {dim} features in its last dimension, got shape {tuple(values.shape)}")
    return values


def no_mask(given: Any) -> None:
    """Refuse the second argument that layers of other libraries take."""
    if given is not None:
        raise TypeError(f"layer(x, mask): {PADDING}")


def rows(x: Batch) -> Tensor:
    """(T, C) of a Jagged, (B, L, C) of a dense tensor."""
    return x.values if isinstance(x, Jagged) else x


def count(x: Batch) -> int:
    """The number of sequences, B. Not len(x): Python's len is a plain int, to which torch.export would hold B."""
    return x.cu_seqlens.shape[0] - 1 if isinstance(x, Jagged) else x.shape[0]


def like(x: BatchT, values: Tensor) -> BatchT:
    """``values``, shaped as ``rows`` of ``x``, in the form that ``x`` has."""
    if isinstance(x, Jagged):
        return x.with_values(values)
    if not x.is_nested:
        return values
    shortest, longest = known_lengths(x)
    return torch.nested.nested_tensor_from_jagged(
        values,
        x.offsets(),  # type: ignore[attr-defined]
        min_seqlen=shortest,
        max_seqlen=longest,
    )
