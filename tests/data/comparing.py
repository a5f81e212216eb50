"""Samples as plain values, which == can compare: a NaN or a rounding is a difference."""

from __future__ import annotations

from typing import Any

from gdpa.data import Sample


def plain(sample: Sample) -> tuple[Any, ...]:
    sequences, bags = (
        {name: (e.ids.tolist(), e.values.tolist()) for name, e in held.items()}
        for held in (sample.sequences, sample.bags)
    )
    return (
        sample.dense.tolist(),
        sample.sparse.tolist(),
        sequences,
        sample.label,
        sample.group,
        sample.probability,
        sample.weight,
        bags,
    )
