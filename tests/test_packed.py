"""q, k and v in one tensor: the results and gradients of the separate ones, and one gradient, written once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.func import functional_call, grad, vmap
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

import gdpa
from gdpa import api, packed
from gdpa.testing.cases import offsets
from support import FULL, INTERPRET, f16, f32, f64, skipping_refusals, targets

H, D = 2, 8
CU_Q, CU_K = offsets((5, 0, 18)), offsets((3, 4, 0))
LEAKY = gdpa.activation(lambda s, a: torch.where(s > 0, s, a * s))


def dense_qkv(qkv: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    return gdpa.attention(*(t.transpose(1, 2) for t in qkv.unbind(2)), *args, **kwargs).transpose(1, 2)


def dense_kv(q: Tensor, kv: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    k, v = (t.transpose(1, 2) for t in kv.unbind(2))
    return gdpa.attention(q.transpose(1, 2), k, v, *args, **kwargs).transpose(1, 2)


def varlen_qkv(
    qkv: Tensor, cu: Tensor, *args: Any, max_seqlen: Any = None, seqused: Any = None, **kwargs: Any
) -> Tensor:
    kwargs |= {"max_seqlen_q": max_seqlen, "max_seqlen_k": max_seqlen, "seqused_q": seqused, "seqused_k": seqused}
    return gdpa.attention_varlen(*qkv.unbind(1), cu, cu, *args, **kwargs)


def varlen_kv(q: Tensor, kv: Tensor, cu_q: Tensor | None, cu_k: Tensor | None, *args: Any, **kwargs: Any) -> Tensor:
    return gdpa.attention_varlen(q, *kv.unbind(-3), cu_q, cu_k, *args, **kwargs)


QKV, KV = gdpa.attention_qkvpacked, gdpa.attention_kvpacked
VARLEN_QKV, VARLEN_KV = gdpa.attention_varlen_qkvpacked, gdpa.attention_varlen_kvpacked
# (the packed form, the separate one, shapes of its tensors, what follows them, options)
Form = tuple[Callable[..., Tensor], Callable[..., Tensor], list[tuple[int, ...]], tuple[Any, ...], dict[str, Any]]
FORMS: dict[str, Form] = {
    "qkv": (QKV, dense_qkv, [(2, 7, 3, H, D)], (), {"causal": True}),
    "kv": (KV, dense_kv, [(2, 5, 4, D), (2, 18, 2, 2, D)], (), {"window": (3, None)}),
    "kv-shared-queries": (KV, dense_kv, [(1, 5, H, D), (3, 7, 2, H, D)], (), {}),
    "qkv-empty": (QKV, dense_qkv, [(2, 0, 3, H, D)], (), {}),
    "varlen-qkv": (VARLEN_QKV, varlen_qkv, [(23, 3, H, D)], (CU_Q,), {"causal": True, "max_seqlen": 18}),
    "varlen-qkv-used": (
        VARLEN_QKV, varlen_qkv, [(25, 3, H, D)], (CU_Q,), {"seqused": torch.tensor([4, 0, 17]), "out_scale": 0.5},
    ),
    "varlen-kv": (VARLEN_KV, varlen_kv, [(23, 4, D), (7, 2, 2, D)], (CU_Q, CU_K), {"causal": True, "scale": 0.2}),
    "varlen-kv-shared": (VARLEN_KV, varlen_kv, [(4, H, D), (7, 2, H, D)], (None, CU_K), {}),
    "varlen-kv-dense": (
        VARLEN_KV, varlen_kv, [(23, H, D), (3, 6, 2, H, D)], (CU_Q, None), {"seqused_k": torch.tensor([0, 6, 2])},
    ),
}  # fmt: skip
INTERPRETED = [FORMS["qkv"], FORMS["varlen-qkv-used"], FORMS["varlen-kv-dense"]]
all_forms = pytest.mark.parametrize("form", FORMS.values(), ids=FORMS.keys())


def leaves(form: Form, dtype: torch.dtype = f64, device: str = "cpu") -> list[Tensor]:
    draw = torch.Generator().manual_seed(0)
    return [torch.randn(s, generator=draw).to(device, dtype).requires_grad_() for s in form[2]]


def on_device(args: Any, device: str) -> Any:
    return tuple(a.to(device) if isinstance(a, Tensor) else a for a in args)


@pytest.mark.parametrize("target", targets(f64, f32, f16, interpret=(f16,)))
@all_forms
def test_results_and_gradients(form: Form, target: Any) -> None:
    together, apart, _, args, kwargs = form
    if target.dtype == f64 and target.backend in ("triton", "hopper"):
        pytest.skip("no float64")
    if target.backend == "triton" and INTERPRET and form not in INTERPRETED:
        pytest.skip("takes long in the interpreter")
    torch.use_deterministic_algorithms(True)  # also fills new memory with NaN
    x = leaves(form, target.dtype, target.device)
    args = on_device(args, target.device)
    options = dict(zip(kwargs, on_device(kwargs.values(), target.device), strict=True))
    options["params"] = (torch.tensor(0.1, device=target.device, requires_grad=True),)
    wanted = [*x, *options["params"]]
    results = []
    for attend in (together, apart):
        with skipping_refusals(target):
            out = attend(*x, *args, LEAKY, backend=target.backend, **options)
        do = torch.arange(out.numel(), device=out.device).view(out.shape).to(out.dtype) / max(out.numel(), 1)
        results.append([out.detach(), *torch.autograd.grad(out, wanted, do)])
    for got, want in zip(*results, strict=True):
        assert got.shape == want.shape
        torch.testing.assert_close(got, want, rtol=1e-6, atol=1e-6, equal_nan=False)


# ---- one gradient ----------------------------------------------------------------------------------------------------
class Operations(TorchDispatchMode):
    """Names of all that runs."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


COPIES = ("cat", "stack", "copy", "clone", "add", "new_zeros", "zeros", "slice_backward", "select_backward")


@all_forms
def test_the_gradient_is_one_tensor_written_once(form: Form) -> None:
    together, _, _, args, kwargs = form
    x = leaves(form)
    out = together(*x, *args, **kwargs)
    do = torch.ones_like(out)
    with Operations() as ran:
        grads = torch.autograd.grad(out, x, do)
    assert sum("attention_packed_backward" in name for name in ran.names) == 1
    assert not [name for name in ran.names if any(f"aten.{copy}" in name for copy in COPIES)]
    assert all(g.is_contiguous() for g in grads)


@pytest.mark.parametrize("directly", [True, False], ids=["directly", "by the operator"])
def test_a_leaf_keeps_the_tensor_that_was_written(directly: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    written = []
    empty_drows = api.ops.empty_drows

    def seen(q: Tensor | None, rows: Tensor) -> Tensor:
        drows = empty_drows(q, rows)
        written.append(drows.data_ptr())  # only that: a gradient that somebody else holds is copied
        return drows

    monkeypatch.setattr(api.ops, "empty_drows", seen)
    monkeypatch.setattr(api.direct, "nobody_watches", lambda: directly)
    qkv = torch.randn(23, 3, H, D, requires_grad=True)
    VARLEN_QKV(qkv, CU_Q).square().sum().backward()
    assert qkv.grad is not None
    assert written[-1] == qkv.grad.data_ptr()


def test_strides_are_kept() -> None:
    """(B, 3, L, H, D) in memory: its gradient too."""
    base = torch.randn(2, 3, 7, H, D, dtype=f64, requires_grad=True)
    out = QKV(base.transpose(1, 2), "silu")
    want = dense_qkv(base.transpose(1, 2), "silu")
    (g,) = torch.autograd.grad(out.sum(), base)
    assert g.is_contiguous()
    torch.testing.assert_close(g, torch.autograd.grad(want.sum(), base)[0])


def test_grouped_queries_inside_one_tensor() -> None:
    """As gdpa.nn.SelfAttention has them: (B, L, Hq / Hk + 2, Hk, D), also in a tensor of which q is no view."""
    base = torch.randn(2, H, 7, 5, D, dtype=f64, requires_grad=True)
    for rows in (base.reshape(2, 7, 5, H, D), base.permute(0, 2, 3, 1, 4)):
        options = {"params": (), "scale": None, "out_scale": 1.0, "causal": True, "window": None, "backend": None}
        out = packed.attend(None, rows, "silu", grouped=True, **options)
        q, k, v = rows[:, :, :3].flatten(2, 3), rows[:, :, 3], rows[:, :, 4]
        want = gdpa.attention(*(t.transpose(1, 2) for t in (q, k, v)), "silu", causal=True).transpose(1, 2)
        torch.testing.assert_close(out, want)
        got, exact = (torch.autograd.grad(o.square().sum(), base)[0] for o in (out, want))
        torch.testing.assert_close(got, exact)


# ---- the operators ---------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("form", [FORMS[n] for n in ("qkv", "varlen-qkv-used", "varlen-kv")], ids=["qkv", "used", "kv"])
def test_opcheck(form: Form, monkeypatch: pytest.MonkeyPatch) -> None:
    together, _, _, args, kwargs = form
    seen: list[tuple[Any, ...]] = []
    attend = api.ops.attention_packed
    monkeypatch.setattr(api.ops, "attention_packed", lambda *args: seen.append(args) or attend(*args))
    monkeypatch.setattr(api.direct, "nobody_watches", lambda: False)
    together(*leaves(form), *args, "silu", **kwargs)
    torch.library.opcheck(torch.ops.gdpa.attention_packed, seen[0])
    plain = tuple(a.detach() if isinstance(a, Tensor) else a for a in seen[0])
    grad = torch.randn_like(torch.ops.gdpa.attention_packed(*plain))
    torch.library.opcheck(torch.ops.gdpa.attention_packed_backward, (grad, *plain))


# The others differ in numbers that the compiler does not see.
SOME = [name for name in FORMS if FULL or name in ("qkv", "kv-shared-queries", "varlen-qkv-used", "varlen-kv-dense")]


@pytest.mark.parametrize("form", [FORMS[name] for name in SOME], ids=SOME)
def test_compiled(form: Form) -> None:
    together, _, _, args, kwargs = form
    x = leaves(form)
    want = together(*x, *args, "silu", **kwargs)
    got = torch.compile(together, fullgraph=True, backend="aot_eager")(*x, *args, "silu", **kwargs)
    torch.testing.assert_close(got, want)
    for g, w in zip(*(torch.autograd.grad(o.square().sum(), x) for o in (got, want)), strict=True):
        torch.testing.assert_close(g, w)


@pytest.mark.parametrize("name", ["qkv", "varlen-kv"])
def test_flops(name: str) -> None:
    together, apart, _, args, kwargs = FORMS[name]
    counts = []
    for attend in (together, apart):
        with FlopCounterMode(display=False) as counter:
            attend(*leaves(FORMS[name]), *args, **kwargs).sum().backward()
        counts.append(counter.get_total_flops())
    assert counts[0] == counts[1] > 0


def test_meta_tensors_have_shapes() -> None:
    qkv = torch.randn(2, 7, 3, H, D, device="meta", requires_grad=True)
    out = QKV(qkv)
    assert out.shape == (2, 7, H, D)
    out.sum().backward()
    assert qkv.grad.shape == qkv.shape


def test_transforms() -> None:
    qkv = torch.randn(2, 7, 3, H, D, dtype=f64)

    def loss(x: Tensor) -> Tensor:
        return QKV(x, "silu").square().sum()

    want = torch.autograd.grad(loss(x := qkv.clone().requires_grad_()), x)[0]
    torch.testing.assert_close(grad(loss)(qkv), want)
    each = vmap(grad(lambda x: loss(x[None])))(qkv)
    torch.testing.assert_close(each, want)
    with pytest.raises(NotImplementedError, match="forward-mode"):
        torch.func.jvp(loss, (qkv,), (qkv,))


def test_double_backward() -> None:
    qkv = torch.randn(1, 3, 3, 1, 2, dtype=f64, requires_grad=True)
    (g,) = torch.autograd.grad(QKV(qkv).sum(), qkv, create_graph=True)
    with pytest.raises(RuntimeError, match="double backward is not available"):
        g.sum().backward()
    assert torch.autograd.gradgradcheck(lambda x: QKV(x, "silu", backend="reference"), qkv)


def test_autocast() -> None:
    qkv = torch.randn(2, 7, 3, H, D, requires_grad=True)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = QKV(qkv)
    assert out.dtype == torch.bfloat16
    out.sum().backward()
    assert qkv.grad.dtype == f32


@pytest.mark.parametrize(
    ("wrong", "text"),
    [
        ({"cu_seqlens": torch.tensor([1, 5])}, "cu_seqlens must start at 0, but it starts at 1"),
        ({"cu_seqlens": torch.tensor([0.0, 5.0])}, "cu_seqlens must be int32 or int64"),
        ({"max_seqlen": 2}, r"max_seqlen=2 is less than the longest sequence \(5\)"),
        ({"max_seqlen": 5.0}, "max_seqlen must be an int or None, got float"),
        ({"seqused": torch.tensor([6])}, "seqused must lie between 0 and the number of rows of each sequence"),
        ({"seqused": 5}, "seqused must be a tensor or None, got int"),
    ],
)
def test_errors_name_the_arguments_of_both_sides_as_they_are_called_here(wrong: dict[str, Any], text: str) -> None:
    with pytest.raises((TypeError, ValueError), match=f"^{text}"):
        gdpa.attention_varlen_qkvpacked(**{"qkv": torch.randn(5, 3, H, D), "cu_seqlens": offsets((5,)), **wrong})


def test_functions_per_head() -> None:
    qkv = torch.randn(2, 7, 3, H, D, dtype=f64, requires_grad=True)
    outs = [attend(qkv, ["relu", "silu"]) for attend in (QKV, dense_qkv)]
    got, want = (torch.autograd.grad(out.square().sum(), qkv)[0] for out in outs)
    torch.testing.assert_close(got, want)


# ---- refusals --------------------------------------------------------------------------------------------------------
BAD = {
    "grouped": (lambda: QKV(torch.zeros(2, 7, 4, H, D)), r"qkv must have shape \(B, L, 3, H, D\).* a kv-packed form"),
    "qkv-dims": (lambda: QKV(torch.zeros(7, 3, H, D)), "qkv must have 5 dimensions"),
    "varlen-dims": (lambda: VARLEN_QKV(torch.zeros(1, 7, 3, H, D), CU_Q), "qkv must have 4 dimensions"),
    "no-offsets": (lambda: VARLEN_QKV(torch.zeros(7, 3, H, D), None), "cu_seqlens must be a tensor, got NoneType"),
    "kv-count": (lambda: KV(torch.zeros(2, 7, H, D), torch.zeros(2, 7, 3, H, D)), r"kv must have shape .* \(2, 7, 3"),
    "kv-heads": (lambda: KV(torch.zeros(2, 7, 3, D), torch.zeros(2, 7, 2, 2, D)), "q's heads .3. must be a multiple"),
    "kv-dense": (lambda: VARLEN_KV(torch.zeros(23, H, D), torch.zeros(7, 2, H, D), CU_Q, None), "kv must have 5 dim"),
    "kv-q": (lambda: VARLEN_KV(torch.zeros(1, 23, H, D), torch.zeros(7, 2, H, D), CU_Q, CU_K), "q must have 3 dim"),
    "strides": (lambda: QKV(torch.zeros(2, 7, 3, H, D, D)[..., 0]), "qkv must be contiguous in its last dimension"),
    "both-dense": (
        lambda: VARLEN_KV(torch.zeros(2, H, D), torch.zeros(3, 7, 2, H, D), None, None), "are both None",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("call", "text"), BAD.values(), ids=BAD.keys())
def test_refused(call: Callable[[], Tensor], text: str) -> None:
    with pytest.raises((ValueError, TypeError), match=text):
        call()


# ---- gdpa.nn ---------------------------------------------------------------------------------------------------------
LAYERS = {
    "self": lambda: (gdpa.nn.SelfAttention(16, 4, "silu", causal=True), ()),
    "grouped": lambda: (gdpa.nn.SelfAttention(16, 4, "silu", num_kv_heads=2), ()),
    "pooling": lambda: (gdpa.nn.SeedPooling(16, 4, 3), ()),
    "pffn": lambda: (gdpa.nn.PFFN(16, 4, 6, 2, 8), (torch.randn(3, 2, 8),)),
}


@pytest.mark.parametrize("layer", LAYERS.values(), ids=LAYERS.keys())
def test_layers_copy_nothing_together(layer: Any) -> None:
    module, rest = layer()
    out = module(torch.randn(3, 5, 16), *rest)
    with Operations() as ran:
        out.sum().backward()
    assert sum("attention_packed_backward" in name for name in ran.names) == 1
    assert not [name for name in ran.names if "aten.cat" in name or "aten.stack" in name]


@pytest.mark.parametrize("layer", LAYERS.values(), ids=LAYERS.keys())
def test_layers_as_before(layer: Any) -> None:
    """The same with separate tensors, as cores of gdpa.models take them."""
    module, rest = layer()
    x = torch.randn(3, 5, 16)
    got = module(x, *rest)
    attention = module.attention

    class Apart(torch.nn.Module):
        def forward(self, *args: Any, **kwargs: Any) -> Tensor:
            q, k, v, *others = (*args, None, None)[: max(len(args), 3)]
            return attention(*gdpa.nn.attention.unpacked(q, k, v), *others, **kwargs)

    module.attention = Apart()
    torch.testing.assert_close(functional_call(module, {}, (x, *rest)), got)
