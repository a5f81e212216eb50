"""The definition of row sums as one would write it in PyTorch, sharing no code with the library."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from gdpa.testing.cases import Case, Inputs, call
from support import _sequence, gradients, keep_mask, make_inputs, on, output_gradient, problems


@dataclass(frozen=True)
class Normalised:
    """A function people divide by a sum of its row. ``stable``: computed with the row's maximum subtracted."""

    name: str
    fn: Callable[..., Tensor]
    normalize: str = "sum"
    activation: Any = None  # what gdpa is given, if not fn
    sink: float | None = None
    params: tuple[float, ...] = ()
    stable: bool = False

    def __repr__(self) -> str:
        return self.name


FUNCTIONS = [
    Normalised("softmax", torch.exp, activation="softmax", stable=True),
    Normalised("off by one", torch.exp, activation="softmax", sink=1.0, stable=True),
    Normalised("relu", F.relu, activation="relu"),
    Normalised("relu squared", lambda s: F.relu(s) ** 2, sink=0.5),
    Normalised("sigmoid", torch.sigmoid, sink=0.25),
    Normalised("softplus", F.softplus),
    Normalised("gaussian", lambda s: torch.exp(-s * s / 2), stable=True),
    Normalised("tempered", lambda s, t: torch.exp(s * t), params=(0.7,), sink=2.0, stable=True),
    Normalised("tanh", torch.tanh, "abs", "tanh", sink=0.1),
    Normalised("silu", F.silu, "abs", "silu", sink=0.3),
    Normalised("leaky", lambda s, a: torch.where(s > 0, s, a * s), "abs", params=(-0.2,)),
    Normalised("taylor", lambda s: 1 + s + s * s / 2),
    Normalised("half gelu", lambda s: 0.5 * F.gelu(s), "abs", sink=0.2),  # a factor that kernels leave out
]
BY_NAME = {f.name: f for f in FUNCTIONS}


def naive(
    case: Case, x: Inputs, f: Normalised | Sequence[Any], params: Sequence[Tensor], sink: Tensor | None,
    out_scale: float = 1.0, seen: Callable[[int, int, int], Tensor] | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """(out, denominators), in the dtype of the inputs. ``seen(b, len_q, len_k)`` is a further mask."""
    group = case.heads // (case.heads_k or case.heads)
    outs, sums = [], []
    for b, (len_q, len_k) in enumerate(zip(case.len_q, case.len_k, strict=True)):
        q = _sequence(x.q, case, b, case.len_q, case.packed_q, case.shared)  # (H, Lq, D)
        k = _sequence(x.k, case, b, case.len_k, case.packed_k).repeat_interleave(group, dim=0)
        v = _sequence(x.v, case, b, case.len_k, case.packed_k).repeat_interleave(group, dim=0)
        s = (q @ k.mT) / math.sqrt(case.d)
        keep = keep_mask(case, len_q, len_k)
        keep = keep if seen is None else keep & seen(b, len_q, len_k)
        p = f.fn(s, *(a.to(s.dtype).expand(case.heads).view(-1, 1, 1) for a in params))
        p = torch.where(keep, p, torch.zeros_like(p))
        d = (p.abs() if f.normalize == "abs" else p).sum(-1, keepdim=True)
        if sink is not None:
            d = d + sink.to(s.dtype).expand(case.heads).view(-1, 1, 1)
        inverse = torch.where(d == 0, torch.zeros_like(d), 1 / torch.where(d == 0, torch.ones_like(d), d))
        outs.append((p @ v) * inverse * out_scale)
        sums.append(d.squeeze(-1))
    if case.varlen:
        return torch.cat([o.transpose(0, 1) for o in outs]), torch.cat([d.transpose(0, 1) for d in sums])
    return torch.stack(outs), torch.stack(sums)


def _leaves(f: Normalised, case: Case, dtype: torch.dtype, device: str) -> tuple[list[Tensor], Tensor | None]:
    """Params, and a sink per head; float32 at least, as kernels take them."""
    wide = torch.promote_types(dtype, torch.float32)
    params = [torch.tensor(p, dtype=wide, device=device, requires_grad=True) for p in f.params]
    if f.sink is None:
        return params, None
    sink = f.sink + 0.1 * torch.arange(case.heads, dtype=wide, device=device)
    return params, sink.requires_grad_()


def check(case: Case, target: Any, f: Normalised, spread: float = 1.5, mask: Any = None, **kwargs: Any) -> None:
    """gdpa on ``target`` against float64 and plain PyTorch: output, denominators and all gradients. ``mask``: gdpa's,
    and what ``naive`` takes for it."""
    x = make_inputs(case, target.dtype, "cpu", 0, spread)
    do = output_gradient(case).to(target.dtype)
    theirs, seen = mask or (None, None)

    def plainly(dtype: torch.dtype) -> dict[str, Tensor]:
        own = x.to(dtype)
        params, sink = _leaves(f, case, torch.float64 if dtype == torch.float64 else torch.float32, "cpu")
        out, sums = naive(case, own, f, params, sink, seen=seen, **kwargs)
        leaves = [*params, *([] if sink is None else [sink])]
        return {**gradients(out, do.to(dtype), *own.leaves, leaves), "sums": sums.detach()}

    own = on(target.device, x.to(target.dtype))
    params, sink = _leaves(f, case, target.dtype, target.device)
    out, sums = call(
        case, own, f.activation or f.fn, params=params, sink=0.0 if sink is None else sink, normalize=f.normalize,
        mask=theirs, backend=target.backend, return_weights_sum=True, **kwargs,
    )  # fmt: skip
    leaves = [*params, *([] if sink is None else [sink])]
    got = gradients(out, do.to(target.device), *own.leaves, leaves)
    got["sums"] = (sums.exp() if f.stable else sums).cpu()
    plain, exact = plainly(target.dtype), plainly(torch.float64)
    # The terms of a param's gradient cancel: it is as accurate as they are large, in whatever order they are added, and
    # each has the rounding error of an output.
    sums_of_all = {name for name in exact if name.startswith("dparam")}
    found = problems(got, plain, {n: t for n, t in exact.items() if n not in sums_of_all}, target.dtype)
    rounding = max(1e-5, 3 * torch.finfo(target.dtype).eps)
    found += problems(got, plain, {n: exact[n] for n in sums_of_all}, target.dtype, rounding)
    assert not found, f"{f} on {case.name}, {target!r}: " + "; ".join(found)
