"""Who watches the calls of PyTorch's operators here and now. The inner names of PyTorch that tell are in one place.

``missing`` names those that this PyTorch lacks. Then somebody may always be watching, and every call takes the
operator's way: it computes the same and takes longer (see calling/direct.py).
"""

from __future__ import annotations

from pkgutil import resolve_name
from typing import Any

import torch
from torch.autograd import forward_ad

# Each is called, and true if something watches.
NAMES = (
    "torch._C:_len_torch_dispatch_stack",  # the FLOP counter, fake tensors, make_fx
    "torch._C:_len_torch_function_stack",  # torch.set_default_device among them
    "torch._C._functorch:peek_interpreter_stack",  # torch.func
    "torch._C:_get_tracing_state",  # torch.jit.trace
    "torch.autograd:_profiler_enabled",
)
AUTOCAST = "torch._C:_is_any_autocast_enabled"
FORWARD_MODE = "torch.autograd.forward_ad:_current_level"


def found(name: str) -> Any:
    """What ``name`` stands for, None if there is no such thing."""
    try:
        return resolve_name(name)
    except (AttributeError, ImportError):
        return None


missing = tuple(name for name in (*NAMES, AUTOCAST, FORWARD_MODE) if found(name) is None)
_dispatch_modes, _function_modes, _transform, _tracing, _profiling = map(found, NAMES)
_autocasting = found(AUTOCAST)


def nobody_watches() -> bool:
    """Whether calls are plain eager ones: nothing compiles, traces, transforms, counts, profiles or redirects them."""
    return not (
        torch.compiler.is_compiling()
        or missing
        or _dispatch_modes()
        or _function_modes()
        or _transform() is not None
        or _tracing() is not None
        or _profiling()
        or forward_ad._current_level >= 0
    )


def autocasting() -> bool:
    """Whether autocast is on, for any kind of device."""
    return bool(_autocasting())
