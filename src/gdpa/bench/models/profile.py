"""Where the time of a step goes: the kernels of a few steps, in groups.

A kernel belongs to the group of the operator that launched it, or of one around that; where the profiler does not know
it, to the group that its name tells. Compiled code has names such as triton_red_fused_native_layer_norm_..., in which
one kernel may do the work of several operators: the first group that matches has it. What an eager formula does to its
scores are batched products and element-wise kernels.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

# In order: the first that matches the kernel, its operator or one around it.
GROUPS: dict[str, str] = {
    "optimizer": r"^Optimizer\.step|^optimizer_|adam|multi_tensor_apply|_foreach_",
    "attention kernels": r"gdpa::attention|scaled_dot_product|flash|fmha|sdpa|^(forward|backward|dq)_kernel|"
                         r"_records_kernel|zero_unused_kernel",
    "batched products": r"^aten::(bmm|baddbmm)|triton_tem_fused_bmm",
    "matrix products": r"^aten::(mm|addmm)\b|gemm|nvjet|cutlass|xmma|splitk|gemv|triton_tem|cublas",
    "rotary": r"gdpa::rotary|turn_kernel|triton_.*_cos_.*_sin_",
    "embedding": r"embedding",
    "copies": r"memcpy|memset|index_copy|index_select|index_put|scatter|gather|fillfunctor|catarray|direct_copy|"
              r"^aten::(copy_|clone|contiguous|cat|stack|fill_|zero_|index|zeros|new_zeros)\b",
    "norms, element-wise": r"triton_|elementwise|reduce_kernel|layer_norm|rms_norm|norm(ed)?_backward|^aten::",
}  # fmt: skip
OTHER = "other"
IDLE = "GPU waits"
PATTERNS = {name: re.compile(pattern, re.IGNORECASE) for name, pattern in GROUPS.items()}
NAMES = (*GROUPS, OTHER)
MOST_KERNELS = 12


def group_of(name: str, operators: Iterable[str] = ()) -> str:
    """The group of a kernel (or, on a CPU, of an operator) by its name and those of the operators around it."""
    words = [name, *operators]
    return next((group for group, p in PATTERNS.items() if any(map(p.search, words))), OTHER)


def profile_steps(step: Callable[[], Any], steps: int, device: torch.device) -> dict[str, Any]:
    """Milliseconds of a step by group, and the longest kernels by name, over ``steps`` calls of ``step``."""
    activities = [ProfilerActivity.CPU]
    if device.type == "cuda":
        activities.append(ProfilerActivity.CUDA)
        torch.cuda.synchronize(device)
    with profile(activities=activities) as found:
        for _ in range(steps):
            step()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
    spent = list(_on_gpu(found.events()) if device.type == "cuda" else _on_cpu(found.events()))
    return summary([(group, name, us / 1e3 / steps) for group, name, us in spent])


def summary(spent: Iterable[tuple[str, str, float]]) -> dict[str, Any]:
    """Of (group, kernel, ms): sums by group in the order of GROUPS, and the longest kernels."""
    groups: dict[str, float] = dict.fromkeys(NAMES, 0.0)
    kernels: dict[tuple[str, str], float] = defaultdict(float)
    for group, name, ms in spent:
        groups[group] += ms
        kernels[group, name] += ms
    longest = sorted(kernels.items(), key=lambda item: -item[1])[:MOST_KERNELS]
    return {
        "groups_ms": groups,
        "kernels": [{"group": group, "name": name[:160], "ms": ms} for (group, name), ms in longest],
    }


def _on_cpu(events: Any) -> Iterator[tuple[str, str, float]]:
    for event in events:
        if event.device_type == DeviceType.CPU and event.self_cpu_time_total > 0:
            yield group_of(event.name, _around(event)), event.name, event.self_cpu_time_total


def _on_gpu(events: Any) -> Iterator[tuple[str, str, float]]:
    """Every kernel once, as the device timed it, in the group of the operator that launched it or by its name.

    The profiler numbers operators and the runtime's calls alike, and so hangs some kernels on strangers as well:
    operators claim theirs first, and what has been claimed is gone.
    """
    left = Counter(
        (e.name, e.time_range.elapsed_us())
        for e in events
        if e.device_type == DeviceType.CUDA and not e.is_user_annotation
    )
    launching = [e for e in events if e.device_type == DeviceType.CPU]
    for event in sorted(launching, key=lambda e: e.name.startswith("cu")):  # cudaLaunchKernel, cuLaunchKernelEx
        for kernel in event.kernels:
            key = kernel.name, kernel.duration
            if left[key] > 0:
                left[key] -= 1
                yield group_of(kernel.name, (event.name, *_around(event))), kernel.name, kernel.duration
    for (name, us), count in left.items():
        if count > 0:
            yield group_of(name), name, us * count


def _around(event: Any) -> Iterator[str]:
    """The names of the operators and ranges that ``event`` is inside."""
    while (event := event.cpu_parent) is not None:
        yield event.name
