"""Tile sizes by measurement: each branch says what it was measured on (docs/kernels.md has the log)."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from gdpa.problem import Problem


@dataclass(frozen=True)
class Config:
    """Queries and keys per tile, warps per program, stages of the software pipeline."""

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int


INTERPRETED = Config(16, 16, 1, 1)  # small, so that short test sequences span several tiles


def padded(d: int) -> int:
    """The power of two, at least 16, that holds a head dimension."""
    return max(16, 1 << (d - 1).bit_length())


def widest(problem: Problem) -> int:
    return max(padded(problem.head_dim), padded(problem.head_dim_v))


def forward_config(problem: Problem, capability: tuple[int, int]) -> Config:
    width = widest(problem)
    if problem.dtype == torch.float32:
        return Config(64, 32, 4, 2) if width <= 128 else Config(32, 32, 4, 1)
    if capability >= (9, 0):
        return Config(128, 128, 8, 2) if width <= 128 else Config(128, 64, 8, 2)
    return Config(128, 64, 4 if width <= 64 else 8, 2) if width <= 128 else Config(64, 32, 4, 2)


def backward_config(problem: Problem, capability: tuple[int, int]) -> Config:
    width = widest(problem)
    if problem.dtype == torch.float32:
        return Config(32, 32, 4, 1) if width <= 128 else Config(16, 32, 4, 1)
    if capability >= (9, 0):
        return Config(64, 128, 8, 2) if width <= 128 else Config(32, 64, 8, 1)
    return Config(32, 128, 8, 1) if width <= 128 else Config(32, 32, 4, 1)


def dq_config(problem: Problem, capability: tuple[int, int]) -> Config:
    width = widest(problem)
    if problem.dtype == torch.float32:
        return Config(32, 32, 4, 1) if width <= 128 else Config(32, 16, 4, 1)
    if capability >= (9, 0):
        return Config(128, 64, 8, 2) if width <= 128 else Config(64, 32, 8, 1)
    return Config(128, 32, 8, 1) if width <= 128 else Config(32, 32, 4, 1)
