"""Optimizers of embedding tables that look only at the rows which a batch has read.

Gradients of tables are sparse here, (rows, dim) of the rows that were read, and no dense one of the whole table; or
they are in ``Tables.gradients``, where a kernel for each table has all of the update: the formulas below in one pass.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from gdpa.compat import foreach_add_
from gdpa.models.embedding import Tables
from gdpa.rowwise.tables import Sums, launch_update

SMALLEST = 1e-300  # whose logarithm is a number


class _Rowwise(torch.optim.Optimizer):
    """What they share: for each table the rows that have a gradient, each once, and a learning rate. ``modules``: those
    whose ``gradients`` there are kernels for; their tables are among ``params``."""

    def __init__(self, params: Iterable[Tensor], defaults: dict[str, Any], modules: Iterable[Tables]) -> None:
        super().__init__(params, defaults)
        self.modules = list(modules)

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        assert closure is None
        for group in self.param_groups:
            for table in group["params"]:
                if table.grad is not None:
                    grad = table.grad.coalesce()
                    self._update(table, grad.indices()[0], grad.values(), group)
        groups = {table: group for group in self.param_groups for table in group["params"]}
        for module in self.modules:
            found = module.gradients.sums()
            if found is not None:
                read = [(i, p) for i, p in enumerate(module.parameters()) if found.most[i] is not None]
                self._launch(read, found, module.gradients.clip, groups)

    def zero_grad(self, set_to_none: bool = True) -> None:
        super().zero_grad(set_to_none)
        for module in self.modules:
            module.clear_gradients()

    def _update(self, table: Tensor, rows: Tensor, grad: Tensor, group: dict[str, Any]) -> None:
        raise NotImplementedError

    def _launch(
        self, read: Sequence[tuple[int, Tensor]], found: Sums, clip: Tensor | None, groups: dict[Tensor, dict[str, Any]]
    ) -> None:
        """The same by a kernel, of tables by their number in ``found``."""
        raise NotImplementedError


class RowwiseAdagrad(_Rowwise):
    """Adagrad with one sum of squares per row, as FBGEMM's exact row-wise Adagrad:

        s_r <- s_r + mean(g_r^2)        w_r <- w_r - lr * g_r / (sqrt(s_r) + eps)

    A row without a gradient does not change: a dense update would give the same.
    """

    def __init__(
        self, params: Iterable[Tensor], lr: float = 1e-2, eps: float = 1e-8, *, modules: Iterable[Tables] = ()
    ) -> None:
        super().__init__(params, {"lr": lr, "eps": eps}, modules)

    def _state(self, table: Tensor) -> dict[str, Any]:
        state = self.state[table]
        if not state:
            state["sum"] = torch.zeros(table.shape[0], dtype=table.dtype, device=table.device)
        return state

    def _launch(
        self, read: Sequence[tuple[int, Tensor]], found: Sums, clip: Tensor | None, groups: dict[Tensor, dict[str, Any]]
    ) -> None:
        from gdpa.device.segments import optimizer_adagrad_kernel as kernel

        for i, table in read:
            group, state = groups[table], self._state(table)
            launch_update(kernel, table, [state["sum"]], found, i, clip, group["lr"], EPS=group["eps"])

    def _update(self, table: Tensor, rows: Tensor, grad: Tensor, group: dict[str, Any]) -> None:
        state = self._state(table)
        total = state["sum"][rows] + grad.pow(2).mean(1)
        state["sum"][rows] = total
        table.index_add_(0, rows, grad / (total.sqrt() + group["eps"])[:, None], alpha=-group["lr"])


class RowwiseAdam(_Rowwise):
    """Adam of the rows that have a gradient, with the moments of Adam for each of their entries:

        m_r <- b1 m_r + (1 - b1) g_r      v_r <- b2 v_r + (1 - b2) g_r^2
        w_r <- w_r - lr * m_r / (1 - b1^t) / (sqrt(v_r / (1 - b2^t)) + eps)         t steps in all

    Of a row without a gradient the moments stay (a dense update would let them decay, and go on moving the row): with
    every row in every batch it is Adam.
    """

    def __init__(
        self, params: Iterable[Tensor], lr: float = 1e-3, betas: tuple[float, float] = (0.9, 0.999), eps: float = 1e-8,
        *, modules: Iterable[Tables] = (),
    ) -> None:  # fmt: skip
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps}, modules)

    def _state(self, table: Tensor) -> dict[str, Any]:
        state = self.state[table]
        if not state:
            state["step"] = torch.zeros((), dtype=torch.float32)  # a default of bfloat16 would count to 256
            state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(table), torch.zeros_like(table)
        return state

    def _launch(
        self, read: Sequence[tuple[int, Tensor]], found: Sums, clip: Tensor | None, groups: dict[Tensor, dict[str, Any]]
    ) -> None:
        from gdpa.device.segments import optimizer_adam_kernel as kernel

        states = [self._state(table) for _, table in read]
        for state, (_, table) in zip(states, read, strict=True):
            state["step"] = state["step"].to(table.device)  # which counts on without the host, as in a graph
        foreach_add_([state["step"] for state in states], 1)
        for state, (i, table) in zip(states, read, strict=True):
            group = groups[table]
            of_betas = {f"BETA{k}": beta for k, beta in enumerate(group["betas"], 1)}
            of_betas |= {f"LOG2_{k}": math.log2(max(beta, SMALLEST)) for k, beta in of_betas.items()}
            held = [state["exp_avg"], state["exp_avg_sq"], state["step"]]
            launch_update(kernel, table, held, found, i, clip, group["lr"], EPS=group["eps"], **of_betas)

    def _update(self, table: Tensor, rows: Tensor, grad: Tensor, group: dict[str, Any]) -> None:
        state = self._state(table)
        state["step"] += 1
        t, (beta1, beta2) = float(state["step"]), group["betas"]
        # A row whose gradient is zero was read by a rank whose samples do not count: it has not been read at all.
        read = (grad != 0).any(1, keepdim=True)
        m, v = state["exp_avg"][rows], state["exp_avg_sq"][rows]
        m_new, v_new = torch.lerp(m, grad, 1 - beta1), torch.lerp(v, grad * grad, 1 - beta2)
        state["exp_avg"][rows] = torch.where(read, m_new, m)
        state["exp_avg_sq"][rows] = torch.where(read, v_new, v)
        update = m_new / (1 - beta1**t) / ((v_new / (1 - beta2**t)).sqrt() + group["eps"])
        table.index_add_(0, rows, torch.where(read, update, 0.0), alpha=-group["lr"])


ROWWISE = {"rowwise_adagrad": RowwiseAdagrad, "rowwise_adam": RowwiseAdam}


class Joined(torch.optim.Optimizer):
    """Optimizers of different parameters as one: a schedule, a checkpoint and a step see all of them."""

    def __init__(self, parts: Sequence[torch.optim.Optimizer]) -> None:
        super().__init__([group for part in parts for group in part.param_groups], {})
        self.parts = parts
        for part in parts:
            part.state = self.state  # of different parameters

    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        assert closure is None
        for part in self.parts:
            part.step()

    def zero_grad(self, set_to_none: bool = True) -> None:
        for part in self.parts:
            part.zero_grad(set_to_none)


def tables_of(model: nn.Module) -> list[Tables]:
    return [part for part in model.modules() if isinstance(part, Tables)]


def coalesced(tensors: Iterable[Tensor]) -> list[Tensor]:
    """The gradients of parameters as plain tensors, whose changes change them: of a sparse one the rows, each once."""
    found = []
    for p in tensors:
        if p.grad is not None and p.grad.is_sparse:
            p.grad = p.grad.coalesce()
            found.append(p.grad.values())
        elif p.grad is not None:
            found.append(p.grad)
    return found
