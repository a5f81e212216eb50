"""What the machine can do: the rate of matrix products and of copies, measured in the run they are compared with.

Both drift by 10 % with power and heat, so a run reads them at its start, middle and end. Every reading is a median;
the floor takes the best of them, since what the machine did once in the run it could have done for a contender.

>>> rates = measure_rates(torch.device("cuda"), torch.bfloat16)
>>> floor_ms(flops=1e12, traffic=1e9, rates=rates)
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

from gdpa.bench.timing import Effort, time_ms

# (M, N, K) of the products; the best of them counts, so that no kernel is compared with a bad choice of tiles.
GPU_PRODUCTS = ((4096, 4096, 4096), (8192, 8192, 8192), (8192, 8192, 16384))
CPU_PRODUCTS = ((512, 512, 512), (1024, 1024, 1024), (1536, 1536, 1536))
GPU_COPY_BYTES = 4 * 2**30
CPU_COPY_BYTES = 256 * 2**20


@dataclass(frozen=True)
class Rates:
    """``matmul_tflops``: TFLOP/s of the library's best product. ``copy_tb_s``: TB/s, bytes read plus bytes written.

    ``products``: TFLOP/s of each product that was tried.
    """

    matmul_tflops: float
    copy_tb_s: float
    products: Mapping[str, float] = field(default_factory=dict)


def matmul_rates(device: torch.device, dtype: torch.dtype, effort: Effort | None = None) -> dict[str, float]:
    """Median TFLOP/s of cuBLAS (on a GPU) or the CPU's library for several sizes, on random data."""
    rates = {}
    for m, n, k in GPU_PRODUCTS if device.type == "cuda" else CPU_PRODUCTS:
        a = torch.randn(m, k, device=device, dtype=dtype)
        b = torch.randn(k, n, device=device, dtype=dtype)
        out = torch.empty(m, n, device=device, dtype=dtype)
        timing = time_ms(lambda a=a, b=b, out=out: torch.mm(a, b, out=out), device, effort)  # type: ignore[misc]
        rates[f"{m}x{n}x{k}"] = 2 * m * n * k / timing.median_ms / 1e9
    return rates


def copy_rate(device: torch.device, effort: Effort | None = None) -> float:
    """TB/s of copying a tensor much larger than any cache."""
    size = GPU_COPY_BYTES if device.type == "cuda" else CPU_COPY_BYTES
    source = torch.ones(size // 4, device=device)
    target = torch.empty_like(source)
    timing = time_ms(lambda: target.copy_(source), device, effort)
    return 2 * size / timing.median_ms / 1e9


def measure_rates(device: torch.device, dtype: torch.dtype, effort: Effort | None = None) -> Rates:
    """One reading of both."""
    products = matmul_rates(device, dtype, effort)
    return Rates(max(products.values()), copy_rate(device, effort), products)


def best(readings: list[Rates]) -> Rates:
    """The best medians of a run."""
    return Rates(max(r.matmul_tflops for r in readings), max(r.copy_tb_s for r in readings))


def floor_ms(flops: float, traffic: float, rates: Rates) -> float:
    """The least time for ``flops`` operations and ``traffic`` bytes at these rates."""
    return max(flops / rates.matmul_tflops / 1e9, traffic / rates.copy_tb_s / 1e9)
