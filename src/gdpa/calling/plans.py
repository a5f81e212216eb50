"""A plan per kind of call: what follows from everything but the tensors' data and addresses is decided once.

A plan is the Problem of its calls and the backend that runs them. All further decisions (tiles, buffers' sizes,
compiled kernels) are kept with the problem (see problem.kept), so a repeated call finds its plan by one look-up and
launches. Plans live with the function they are for (Activation.plans), MOST of them at most; the oldest go first.

A key holds whatever a decision may depend on and may change: layouts, dtypes, the device, the settings of the call
(precision, mask and row sums among them), and how often the file of `gdpa tune` has been read. Of tables only their
kinds decide anything, and those are part of the function and of the mask. What the user can switch at any time besides
(deterministic algorithms, checks of indices) is asked at every call, where it matters.
"""

from __future__ import annotations

import threading
from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from gdpa.backends import Backend, select, tuning
from gdpa.functions.activation import from_keys
from gdpa.problem import Operands, Problem, Settings

MOST = 1024  # of one function; a plan takes about 4 KB

_lock = threading.Lock()


@dataclass(frozen=True, eq=False)
class OperatorPlan:
    problem: Problem
    backend: Backend


def remember(table: dict[Hashable, Any], key: Hashable, plan: Any, most: int = MOST) -> None:
    """Put ``plan`` into ``table``; readers need no lock, a dict is whole at any time."""
    with _lock:
        while len(table) >= most:
            del table[next(iter(table))]
        table[key] = plan


def layout(t: Tensor) -> Hashable:
    """All that decisions depend on in a tensor of the operator, but for its dtype and device."""
    return t.shape, t.stride(), t.data_ptr() % 16 == 0


def of(x: Operands, settings: Settings) -> OperatorPlan:
    """The plan of an operator's call."""
    functions = from_keys(settings.activations)
    key = (
        layout(x.q), layout(x.k), layout(x.v), x.q.dtype, x.q.device, None if x.cu_q is None else x.cu_q.shape,
        None if x.cu_k is None else x.cu_k.shape, x.used_q is None, x.used_k is None,
        repr(settings.values),  # 0.0 and -0.0 are one to a dictionary
        tuple(settings.normalize),
        tuning.times_read(),
    )  # fmt: skip
    table = functions[0].plans
    plan = table.get(key)
    if plan is None:
        plan = make(x, settings)
        remember(table, key, plan)
    found: OperatorPlan = plan
    return found


def make(x: Operands, settings: Settings) -> OperatorPlan:
    problem = settings.problem(x)
    return OperatorPlan(problem, select(problem, settings.backend))
