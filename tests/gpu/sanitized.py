"""A small forward and backward of every kind on Hopper's kernels, to be run under compute-sanitizer."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch

import gdpa
from gdpa.backends.hopper import config
from gdpa.testing.cases import Case, call, dense, make_inputs


def cases(d: int) -> Iterator[tuple[Case, str]]:
    lengths = {"len_q": (130, 0, 65, 257), "len_k": (70, 129, 0, 256)}
    jagged = Case("jagged", **lengths, heads=4, heads_k=2, d=d, packed_q=True, packed_k=True)
    yield dense("dense", 2, 450, 257, heads=4, heads_k=2, d=d), "gelu_tanh"
    yield dense("more tiles than blocks", 1, 70, 1100, heads=2, d=d), "gelu_tanh"
    yield dense("many rounds", 1, 1500, 257, heads=2, d=d), "gelu_tanh"
    yield dense("short keys", 3, 500, 100, heads=2, d=d), "relu"
    yield jagged, "gelu_tanh"
    yield replace(jagged, causal=True), "silu"
    yield replace(jagged, causal=True, len_q=(130, 0, 1, 257) * 14, len_k=(130, 0, 1, 257) * 14), "silu"  # as they come
    yield replace(jagged, window=(40, 20)), "sigmoid"
    yield Case("shared", (70,) * 4, lengths["len_k"], heads=2, d=d, packed_k=True, shared=True), "silu"


def run(case: Case, activation: str, params: tuple[torch.Tensor, ...] = ()) -> None:
    x = make_inputs(case, torch.bfloat16, "cuda")
    out = call(case, x, activation, params=params, backend="hopper")
    torch.autograd.grad(out, (*x.leaves, *params), torch.randn_like(out))
    torch.cuda.synchronize()


def run_mask() -> None:
    q, k, v = torch.randn(3, 2, 2, 300, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True).unbind()
    mask = gdpa.masks.prefix(torch.tensor([200, 0], device="cuda"))
    out = gdpa.attention(q, k, v, "silu", mask=mask, causal=True, backend="hopper")
    torch.autograd.grad(out, (q, k, v), torch.randn_like(out))
    torch.cuda.synchronize()


def run_two_passes() -> None:
    """What the backward does with very long sequences (config.MOST_TILES), here with short ones."""
    most, config.MOST_TILES = config.MOST_TILES, 1
    for d in (64, 128):
        lengths = (130, 0, 65, 257)
        run(Case("long", lengths, lengths, heads=2, d=d, packed_q=True, packed_k=True), "gelu_tanh")
    config.MOST_TILES = most


if __name__ == "__main__":
    for d in (64, 128):
        for case, activation in cases(d):
            run(case, activation)
    slope = torch.full((4,), 0.5, device="cuda", requires_grad=True)
    run(dense("params", 1, 130, 200, heads=4, d=64), lambda s, t: torch.tanh(s * t), (slope,))  # type: ignore[arg-type]
    run_mask()
    run_two_passes()
    torch.use_deterministic_algorithms(True)
    run(dense("in a fixed order", 2, 450, 450, heads=2, d=64), "gelu_tanh")
    print("finished")
