"""All private names of PyTorch that gdpa uses: a release that renames one breaks this module, and a test that names it.

Names in ``PRIVATE`` are imported from here like any other, and are looked up on first use: some take a second.

Another few tell whether anything watches operator calls right now (a tracer, a transform, a profiler). ``missing`` are
those of them that this PyTorch lacks. If it lacks any, something might always be watching, and every call takes the
operator's way, which computes the same and takes longer (see calling/direct.py).
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from functools import cache
from pkgutil import resolve_name
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

if TYPE_CHECKING:
    from torch._ops import OpOverload as OpOverload
    from torch._ops import OpOverloadPacket as OpOverloadPacket
    from torch._subclasses.fake_tensor import FakeTensor as FakeTensor
    from torch._subclasses.fake_tensor import FakeTensorMode as FakeTensorMode
    from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode

PRIVATE = {
    "DataDependentOutputException": "torch._subclasses.fake_tensor:DataDependentOutputException",
    "DispatchKey": "torch._C:DispatchKey",
    "FakeTensor": "torch._subclasses.fake_tensor:FakeTensor",
    "FakeTensorMode": "torch._subclasses.fake_tensor:FakeTensorMode",
    "ForceDispatchKeyGuard": "torch._C:_ForceDispatchKeyGuard",
    "GetAttrKey": "torch.utils._pytree:GetAttrKey",
    "OpOverload": "torch._ops:OpOverload",
    "OpOverloadPacket": "torch._ops:OpOverloadPacket",
    "RuntimeSchemaInfo": "torch.distributed.tensor._op_schema:RuntimeSchemaInfo",
    "SetExcludeDispatchKeyGuard": "torch._C:_SetExcludeDispatchKeyGuard",
    "DisableTorchFunction": "torch._C:DisableTorchFunction",
    "TorchDispatchMode": "torch.utils._python_dispatch:TorchDispatchMode",
    "aoti_compile_and_package": "torch._inductor:aoti_compile_and_package",
    "core_aten_decompositions": "torch._decomp:core_aten_decompositions",
    "core_decompositions_after_autograd": "torch._decomp:_core_aten_decompositions_post_autograd",
    "ddp_leave_out": "torch.nn.parallel:DistributedDataParallel._set_params_and_buffers_to_ignore_for_model",
    "disable_current_modes": "torch.utils._python_dispatch:_disable_current_modes",
    "dtensor_dispatcher": "torch.distributed.tensor:DTensor._op_dispatcher",
    "dynamo_counters": "torch._dynamo.utils:counters",
    "dynamo_state": "torch._dynamo.symbolic_convert:tls",
    "excluded_keys": "torch._C:_dispatch_tls_local_exclude_set",
    "foreach_add_": "torch:_foreach_add_",
    "functional_collectives": "torch.distributed._functional_collectives",
    "functorch_config": "torch._functorch.config",
    "get_proxy_mode": "torch.fx.experimental.proxy_tensor:get_proxy_mode",
    "global_backward_hooks": "torch.nn.modules.module:_global_backward_hooks",
    "global_backward_pre_hooks": "torch.nn.modules.module:_global_backward_pre_hooks",
    "global_forward_hooks": "torch.nn.modules.module:_global_forward_hooks",
    "global_forward_pre_hooks": "torch.nn.modules.module:_global_forward_pre_hooks",
    "has_global_hooks": "torch.nn.modules.module:_has_any_global_hook",
    "included_keys": "torch._C:_dispatch_tls_local_include_set",
    "is_functorch_wrapped_tensor": "torch._C._functorch:is_functorch_wrapped_tensor",
    "is_traceable_wrapper_subclass": "torch.utils._python_dispatch:is_traceable_wrapper_subclass",
    "maybe_mark_dynamic": "torch._dynamo:maybe_mark_dynamic",
    "peek_interpreter_stack": "torch._C._functorch:peek_interpreter_stack",
    "pop_saved_tensors_hooks": "torch._C._autograd:_pop_saved_tensors_default_hooks",
    "push_saved_tensors_hooks": "torch._C._autograd:_push_saved_tensors_default_hooks",
    "register_pytree_node": "torch.utils._pytree:register_pytree_node",
    "symbolic_shapes_config": "torch.fx.experimental._config",
    "temporarily_clear_interpreter_stack": "torch._functorch.pyfunctorch:temporarily_clear_interpreter_stack",
    "top_saved_tensors_hooks": "torch._C._autograd:_top_saved_tensors_default_hooks",
    "tracing": "torch._guards:tracing",
    "tree_leaves": "torch.utils._pytree:tree_leaves",
    "triton_kernel_wrap": "torch._higher_order_ops.triton_kernel_wrap",
}

# Of their classes are hooks of all modules that only observe which module runs.
TRACKERS = frozenset(
    {"torch.utils.module_tracker", "torch.distributed._tools.mod_tracker", "torch.distributed.tensor.debug._comm_mode"}
)


def __getattr__(name: str) -> Any:
    if name not in PRIVATE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = resolve_name(PRIVATE[name])
    return globals()[name]


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
_hooks = found(PRIVATE["top_saved_tensors_hooks"])


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
        or forward_mode()
    )


def jit_records() -> bool:
    """Whether torch.jit.trace does."""
    return _tracing is not None and _tracing() is not None


def make_fx_records() -> bool:
    """Whether make_fx does, on tensors of any kind. (Its module takes a second, and is there by then.)"""
    return "torch.fx.experimental.proxy_tensor" in sys.modules and __getattr__("get_proxy_mode")() is not None


def autocasting() -> bool:
    """Whether autocast is on, for any kind of device."""
    return bool(_autocasting())


def hooks_save() -> bool:
    """Whether hooks (torch.autograd.graph.saved_tensors_hooks) may get what autograd saves, or nothing tells."""
    return _hooks is None or _hooks(True) is not None


def forward_mode() -> bool:
    """Whether forward-mode differentiation is on, or nothing tells: then tensors are looked at one by one."""
    return FORWARD_MODE in missing or forward_ad._current_level >= 0


def transformed() -> bool:
    """Whether a transform of torch.func (grad, vmap, ...) is running. False if nothing tells: torch.func then refuses
    the operators itself."""
    return _transform is not None and _transform() is not None


# Constants of compiled code: Dynamo enters what it traces of both, and guards the transforms around it.
forward_mode._dynamo_marked_constant = True  # type: ignore[attr-defined]
transformed._dynamo_marked_constant = True  # type: ignore[attr-defined]


@contextmanager
def recording() -> Iterator[None]:
    """Record gradients even inside a torch.library op, whose kernels run with the autograd dispatch keys excluded.

    enable_grad() alone does not lift that; torch.utils.checkpoint uses the same guard.
    """
    keys, lift = __getattr__("DispatchKey"), __getattr__("SetExcludeDispatchKeyGuard")
    with lift(keys.AutogradFunctionality, False), lift(keys.ADInplaceOrView, False), torch.enable_grad():
        yield


def usual_keys() -> AbstractContextManager[None]:
    """Dispatch as in a thread in which nothing has happened yet, whatever keys are included and excluded here."""
    guard = __getattr__("ForceDispatchKeyGuard")
    return guard(*_keys_of_a_new_thread())


@cache
def _keys_of_a_new_thread() -> tuple[Any, Any]:
    sets = __getattr__("included_keys"), __getattr__("excluded_keys")
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(lambda: (sets[0](), sets[1]())).result()


def ragged_dim(nested: Tensor) -> int:
    """The dimension of a jagged nested tensor whose size differs."""
    return nested._ragged_idx  # type: ignore[attr-defined]


def known_lengths(nested: Tensor) -> tuple[int | None, int | None]:
    """The smallest and the largest length of a jagged nested tensor, where it knows them."""
    return nested._maybe_min_seqlen, nested._maybe_max_seqlen  # type: ignore[attr-defined]


def is_view(t: Tensor) -> bool:
    return t._is_view()
