"""The benchmark's contenders: what is timed beside gdpa computes the same, or says in words why it cannot."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from types import ModuleType

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend
from torch.nn.attention.flex_attention import create_block_mask

from gdpa import backends
from gdpa.bench.contenders import eager, everybody, flex, layouts, packing, plain, softmax, varlen
from gdpa.bench.contenders.contender import Prepared, tried
from gdpa.bench.contenders.document_mask import BLOCK, Blocks, document_mask
from gdpa.bench.functions import benchmark_function
from gdpa.bench.kernels import accuracy, suite
from gdpa.masks.band import Band
from gdpa.reference import keep
from gdpa.testing.cases import SMALL_CASES, Case, Inputs, call, dense, make_inputs, offsets

CPU = torch.device("cpu")
SOFTPLUS_SQUARED = benchmark_function("softplus_squared")
small_cases = pytest.mark.parametrize("case", SMALL_CASES, ids=lambda case: case.name)


def unpadded(case: Case, out: Tensor) -> Tensor:
    """gdpa's layout of a padded (B, H, longest, Dv)."""
    if not case.varlen:
        return out
    return torch.cat([o[:, :n].transpose(0, 1) for o, n in zip(out, case.len_q, strict=True)])


# ---- who takes part --------------------------------------------------------------------------------------------------
def test_contenders_of_a_cpu() -> None:
    assert [c.name for c in everybody.contenders(CPU, torch.float32)] == ["cpu", "eager"]
    named = ("reference", "eager-compiled", "flex-log")
    assert tuple(c.name for c in everybody.contenders(CPU, torch.float32, named)) == named
    with pytest.raises(ValueError, match="'sdpa-cudnn' is unknown here"):
        everybody.contenders(CPU, torch.float32, ("sdpa-cudnn",))


def test_contenders_of_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every backend of gdpa that can run there takes part, without being named anywhere else."""
    monkeypatch.setattr(backends, "BACKENDS", ("hopper", "triton", "cpu", "reference"))
    monkeypatch.setattr(everybody, "why_not", lambda name, device, dtype: "no" if name == "cpu" else None)
    found = [c.name for c in everybody.contenders(torch.device("cuda"), torch.bfloat16)]
    assert found[:2] == ["hopper", "triton"]
    others = {"eager", "eager-compiled", "flex-log", "gdpa-softmax"}
    others |= {"sdpa-cudnn", "sdpa-flash", "torch-varlen", "flash-attn"}
    assert set(found[2:]) == others


def test_a_failure_of_others_is_told_in_words() -> None:
    def fail() -> Tensor:
        raise RuntimeError("\nNo valid choices.\nlong trace")

    assert tried(Prepared(fail, ()), "Inductor") == "Inductor says: RuntimeError: No valid choices."

    def out_of_memory() -> Tensor:
        raise torch.OutOfMemoryError("too much")

    with pytest.raises(torch.OutOfMemoryError):
        tried(Prepared(out_of_memory, ()), "Inductor")
    q = torch.ones(2, requires_grad=True)
    broken_backward = Prepared(lambda: torch.ones(2) + q.detach(), (q,))
    assert "does not require grad" in str(tried(broken_backward, "PyTorch"))


def test_an_error_of_ours_is_not_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*arguments: object, **kwargs: object) -> Tensor:
        raise RuntimeError("illegal memory access")

    monkeypatch.setattr(layouts, "call", fail)
    case = SMALL_CASES[0]
    with pytest.raises(RuntimeError, match="illegal memory access"):
        everybody.Ours("cpu").prepare(case, make_inputs(case), SOFTPLUS_SQUARED)


# ---- plain PyTorch ---------------------------------------------------------------------------------------------------
@small_cases
def test_eager_computes_the_same(case: Case) -> None:
    """Padded or sequence by sequence."""
    x = make_inputs(case, torch.float64)
    want = call(case, x, "sigmoid", backend="reference")
    torch.testing.assert_close(eager.by_sequence(case, x, torch.sigmoid), want)
    prepared = plain.Eager().prepare(case, x, benchmark_function("sigmoid"))
    assert isinstance(prepared, Prepared)
    torch.testing.assert_close(unpadded(case, prepared.forward()), want)


@pytest.mark.parametrize("case", [SMALL_CASES[1], SMALL_CASES[4]], ids=lambda case: case.name)
def test_eager_compiled_computes_the_same(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the code generator, which needs a C++ compiler. Its backward runs twice, as when it is timed."""
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager"))
    x = make_inputs(case, torch.float64)
    prepared = plain.EagerCompiled().prepare(case, x, benchmark_function("sigmoid"))
    assert isinstance(prepared, Prepared), prepared
    out = prepared.forward()
    torch.testing.assert_close(unpadded(case, out), call(case, x, "sigmoid", backend="reference"))
    for _ in range(2):
        torch.autograd.grad(out, prepared.leaves, torch.ones_like(out), retain_graph=True)


def test_a_failing_compiler_is_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(graph: object, inputs: object) -> None:
        raise NotImplementedError("no compiler here")

    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=broken))
    case = SMALL_CASES[0]
    reason = plain.EagerCompiled().prepare(case, make_inputs(case), SOFTPLUS_SQUARED)
    assert isinstance(reason, str)
    assert reason.startswith("torch.compile says: BackendCompilerFailed")


@pytest.mark.parametrize("contender", [plain.Eager(), plain.EagerCompiled()], ids=lambda c: c.name)
def test_matrices_that_do_not_fit_are_declined(contender: plain.Eager, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plain, "free_memory", lambda device: 1000)
    case = dense("x", 1, 64, 64, heads=1, d=8)
    reason = contender.prepare(case, make_inputs(case), benchmark_function("relu"))
    assert isinstance(reason, str)
    assert "GiB" in reason


# ---- FlexAttention ---------------------------------------------------------------------------------------------------
@small_cases
@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_flex_computes_the_same(case: Case) -> None:
    """Uncompiled, which runs on a CPU, without gradients: masked pairs and queries without keys included."""
    x = make_inputs(case, torch.float32)
    if case.varlen and case.band != (None, None):
        assert "band" in str(flex.why_not(case, x, SOFTPLUS_SQUARED))
        return
    x = Inputs(*(leaf.detach() for leaf in x.leaves), x.cu_q, x.cu_k)
    out = flex.attention(*flex.operands(case, x), SOFTPLUS_SQUARED.function, flex.block_mask(case, x))
    want = call(case, x, SOFTPLUS_SQUARED.function, backend="reference")
    torch.testing.assert_close(out[0].transpose(0, 1) if case.varlen else out, want, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", ["gelu", "gelu_tanh", "silu", "relu"])
def test_flex_needs_a_positive_function(name: str) -> None:
    case = SMALL_CASES[0]
    reason = flex.FlexLog().prepare(case, make_inputs(case), benchmark_function(name))
    assert isinstance(reason, str)
    assert "log f(s) exists only where f is positive" in reason
    assert f"{name}(" in reason


def test_flex_refuses_the_rest_in_words() -> None:
    case = SMALL_CASES[0]
    assert "no backward on a CPU" in str(flex.FlexLog().prepare(case, make_inputs(case), SOFTPLUS_SQUARED))
    learned = replace(SOFTPLUS_SQUARED, params=(1.0,))
    assert "params" in str(flex.why_not(case, make_inputs(case), learned))


LENGTHS = [
    ((0, 300, 130, 5, 256, 700, 128), (140, 256, 0, 400, 256, 500, 128)),
    ((256, 128, 0, 512), (256, 128, 128, 512)),
    ((1, 2, 3), (1000, 0, 1)),
]


@pytest.mark.parametrize(("len_q", "len_k"), LENGTHS, ids=["mixed", "aligned", "few"])
def test_document_mask_visits_the_right_blocks(len_q: tuple[int, ...], len_k: tuple[int, ...]) -> None:
    """Against create_block_mask(), which looks at every pair: the same blocks without masking; of those with, no fewer,
    and each pair of blocks from both sides."""
    found = document_mask(offsets(len_q), offsets(len_k))
    want = create_block_mask(found.mask_mod, None, None, sum(len_q), sum(len_k), device="cpu", BLOCK_SIZE=BLOCK)
    for side in ("kv", "q"):
        mine, exact = (
            [visited(mask, f"{full}{side}") for full in ("", "full_")] for mask in (found, want)
        )  # fmt: skip
        assert mine[1] == exact[1]
        assert mine[0] >= exact[0]
        assert not mine[0] & mine[1]
    assert {(j, i) for i, j in visited(found, "full_q")} == visited(found, "full_kv")


def visited(mask: object, side: str) -> set[tuple[int, int]]:
    """(row, column) of every block in one of a mask's lists."""
    lists = Blocks(getattr(mask, f"{side}_num_blocks"), getattr(mask, f"{side}_indices"))
    rows = zip(lists.counts[0, 0].tolist(), lists.indices[0, 0].tolist(), strict=True)
    return {(row, column) for row, (count, columns) in enumerate(rows) for column in columns[:count]}


# ---- softmax ---------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("name", ["causal-2048", "self-512", "pma", "window128-2048", "jagged-256"])
def test_sdpa_takes_only_what_it_can(name: str) -> None:
    """The softmax columns, here by the math backend, on dense cases without a window."""
    case = replace(suite.make(name, suite.Scale(2, 32)), d=16)
    prepared = softmax.Sdpa("math", SDPBackend.MATH).prepare(case, make_inputs(case), benchmark_function("relu"))
    assert isinstance(prepared, str) == (name not in ("causal-2048", "self-512"))


def softmax_of_kept(s: Tensor, left: int, right: int) -> Tensor:
    """Softmax over the keys in the band; -1 is unbounded, as flash_attn has it. Rows without keys are zero."""
    distance = torch.arange(s.shape[-1]) - torch.arange(s.shape[-2])[:, None] - (s.shape[-1] - s.shape[-2])
    kept = ((distance >= -left) | (left < 0)) & ((distance <= right) | (right < 0))
    return s.masked_fill(~kept, -torch.inf).softmax(-1).nan_to_num(nan=0.0)


def fake_flash_attn() -> ModuleType:
    """The two functions of the package, by their documentation."""

    def one(q: Tensor, k: Tensor, v: Tensor, window: tuple[int, int]) -> Tensor:  # (L, H, D) each
        group = q.shape[1] // k.shape[1]
        q, k, v = (t.transpose(0, 1) for t in (q, k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)))
        return (softmax_of_kept(q @ k.mT / q.shape[-1] ** 0.5, *window) @ v).transpose(0, 1)

    def dense_function(q: Tensor, k: Tensor, v: Tensor, *, window_size: tuple[int, int]) -> Tensor:
        return torch.stack([one(*rows, window_size) for rows in zip(q, k, v, strict=True)])

    def varlen_function(
        q: Tensor, k: Tensor, v: Tensor, cu_q: Tensor, cu_k: Tensor, max_q: int, max_k: int, *,
        window_size: tuple[int, int],
    ) -> Tensor:  # fmt: skip
        assert (int(cu_q.diff().max()), int(cu_k.diff().max())) == (max_q, max_k)
        parts = (t.split(cu.diff().tolist()) for t, cu in ((q, cu_q), (k, cu_k), (v, cu_k)))
        return torch.cat([one(*rows, window_size) for rows in zip(*parts, strict=True)])

    module = ModuleType("flash_attn")
    module.__spec__ = object()  # type: ignore[assignment]  # find_spec only asks whether there is one
    module.flash_attn_func, module.flash_attn_varlen_func = dense_function, varlen_function  # type: ignore[attr-defined]
    return module


@small_cases
def test_flash_attn_is_given_the_case(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "flash_attn", fake_flash_attn())
    x = make_inputs(case, torch.float64)
    prepared = softmax.FlashAttention().prepare(case, x, benchmark_function("relu"))
    assert isinstance(prepared, Prepared), prepared
    window = tuple(-1 if side is None else side for side in case.band)
    want = eager.by_sequence(replace(case, causal=False, window=None), x, lambda s: softmax_of_kept(s, *window))
    torch.testing.assert_close(prepared.forward(), want)


def test_flash_attn_that_is_missing_is_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(softmax.importlib.util, "find_spec", lambda name: None)
    case = SMALL_CASES[0]
    assert "not installed" in str(softmax.FlashAttention().prepare(case, make_inputs(case), SOFTPLUS_SQUARED))


# ---- PyTorch's softmax of packed rows --------------------------------------------------------------------------------
def sdpa_by_sequence(
    q: Tensor, k: Tensor, v: Tensor, cu_q: Tensor, cu_k: Tensor, max_q: int, max_k: int,
    window_size: tuple[int, int], enable_gqa: bool = False,
) -> Tensor:  # fmt: skip
    """varlen_attn by its documentation: SDPA on one sequence after the other. Like its kernels it counts positions from
    the last key, and refuses offsets that are not int32."""
    assert cu_q.dtype == cu_k.dtype == torch.int32
    assert (int(cu_q.diff().max()), int(cu_k.diff().max())) == (max_q, max_k)
    assert enable_gqa == (q.shape[1] != k.shape[1])
    assert isinstance(window_size, tuple)  # PyTorch recognises causal ones by == (-1, 0)
    left, right = (None if side < 0 else side for side in window_size)
    parts = (t.split(cu.diff().tolist()) for t, cu in ((q, cu_q), (k, cu_k), (v, cu_k)))
    outs = []
    for rows in zip(*parts, strict=True):
        heads = (t.transpose(0, 1) for t in rows)
        mask = keep(Band(left, right), len(rows[0]), len(rows[1]), q.device)
        outs.append(F.scaled_dot_product_attention(*heads, attn_mask=mask, enable_gqa=enable_gqa).transpose(0, 1))
    return torch.cat(outs)


def of_2_10(
    query: Tensor, key: Tensor, value: Tensor, cu_seq_q: Tensor, cu_seq_k: Tensor, max_q: int, max_k: int,
    is_causal: bool = False, return_aux: None = None,
) -> Tensor:  # fmt: skip
    window = (-1, 0) if is_causal else (-1, -1)
    return sdpa_by_sequence(query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, window)


def of_2_11(
    query: Tensor, key: Tensor, value: Tensor, cu_seq_q: Tensor, cu_seq_k: Tensor, max_q: int, max_k: int, *,
    return_aux: None = None, scale: float | None = None, window_size: tuple[int, int] = (-1, -1),
) -> Tensor:  # fmt: skip
    return sdpa_by_sequence(query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, window_size)


def of_2_12(
    query: Tensor, key: Tensor, value: Tensor, cu_seq_q: Tensor, cu_seq_k: Tensor, max_q: int, max_k: int, *,
    return_aux: None = None, scale: float | None = None, window_size: tuple[int, int] = (-1, -1),
    enable_gqa: bool = False,
) -> Tensor:  # fmt: skip
    return sdpa_by_sequence(query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, window_size, enable_gqa)


@pytest.fixture(params=[of_2_10, of_2_11, of_2_12])
def release(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Tensor]:
    """varlen_attn of a release of PyTorch, on a CPU."""
    module = ModuleType(varlen.MODULE)
    module.__spec__ = object()  # type: ignore[assignment]  # find_spec only asks whether there is one
    module.varlen_attn = request.param  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, varlen.MODULE, module)
    monkeypatch.setattr(varlen, "DEVICE", "cpu")
    return request.param


PACKED = [replace(case, dv=None) for case in SMALL_CASES if case.varlen]  # with sequences that have no rows
PACKED += [replace(case, name=f"{case.name}-causal", window=None, causal=True) for case in PACKED[:3]]


@pytest.mark.parametrize("case", PACKED, ids=lambda case: case.name)
def test_torch_varlen_is_given_the_case(case: Case, release: Callable[..., Tensor]) -> None:
    """Output and gradients are those of softmax, or the release has no word for the case."""
    x = make_inputs(case, torch.float64)
    prepared = varlen.TorchVarlen().prepare(case, x, benchmark_function("relu"))
    if case.window is not None and release is of_2_10:
        assert prepared == f"varlen_attn of torch {torch.__version__} has no window"
        return
    if case.heads_k is not None and release is not of_2_12:
        assert prepared == f"varlen_attn of torch {torch.__version__} has no grouped heads"
        return
    assert isinstance(prepared, Prepared), prepared
    assert prepared.leaves == x.leaves
    out, want = prepared.forward(), call(case, x, "softmax", backend="reference")
    torch.testing.assert_close(out, want)
    grad = torch.randn_like(out)
    found, exact = (torch.autograd.grad(t, x.leaves, grad) for t in (out, want))
    torch.testing.assert_close(found, exact)
    errors = accuracy.errors(prepared, accuracy.Truth(case, x), "softmax", SOFTPLUS_SQUARED)
    assert errors is not None
    assert max(errors.values()) < 1e-12


@pytest.mark.usefixtures("release")
@pytest.mark.parametrize("name", ["jagged-256", "uniform-256", "lognormal085", "zipf", "pma", "jagged-256-d64"])
def test_torch_varlen_takes_packed_cases(name: str) -> None:
    """Keys of the suite are packed or dense beside packed queries, or queries are shared; some have no rows."""
    case = suite.make(name, suite.Scale(4, 32))
    prepared = varlen.TorchVarlen().prepare(case, make_inputs(case), SOFTPLUS_SQUARED)
    assert isinstance(prepared, Prepared), prepared


@pytest.mark.usefixtures("release")
@pytest.mark.parametrize(
    ("case", "reason"),
    [
        (SMALL_CASES[0], "for packed rows; F.scaled_dot_product_attention"),
        (SMALL_CASES[3], "for packed rows"),
        (SMALL_CASES[5], "values as wide as keys, here 8 beside 16"),
        (replace(SMALL_CASES[4], d=20), "multiples of 8, up to 256, here 20"),
        (replace(SMALL_CASES[4], d=264), "multiples of 8, up to 256, here 264"),
    ],
)
def test_torch_varlen_refuses_the_rest_in_words(case: Case, reason: str) -> None:
    assert reason in str(varlen.TorchVarlen().prepare(case, make_inputs(case), SOFTPLUS_SQUARED))


def test_torch_varlen_needs_a_gpu_and_a_new_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    case = SMALL_CASES[4]
    x, contender = make_inputs(case), varlen.TorchVarlen()
    assert contender.prepare(case, x, SOFTPLUS_SQUARED) == "varlen_attn has no kernel for a CPU"
    monkeypatch.setattr(varlen, "DEVICE", "cpu")  # the installed varlen_attn takes the arguments, then finds no kernel
    assert str(contender.prepare(case, x, SOFTPLUS_SQUARED)).startswith("PyTorch says: NotImplementedError")
    monkeypatch.setitem(sys.modules, varlen.MODULE, None)
    assert "which came with 2.10" in str(contender.prepare(case, x, SOFTPLUS_SQUARED))


@pytest.mark.gpu
@pytest.mark.parametrize("case", PACKED, ids=lambda case: case.name)
def test_torch_varlen_computes_softmax_on_a_gpu(case: Case) -> None:
    """PyTorch's kernels themselves: every row, beside sequences without queries, without keys and without both."""
    x = make_inputs(case, torch.bfloat16, "cuda")
    prepared = varlen.TorchVarlen().prepare(case, x, SOFTPLUS_SQUARED)
    if case.heads_k is not None and isinstance(prepared, str):
        assert "no grouped heads" in prepared  # torch 2.11
        return
    assert isinstance(prepared, Prepared), prepared
    out, exact = prepared.forward(), x.to(torch.float64)
    want, grad = call(case, exact, "softmax", backend="reference"), torch.randn_like(out)
    found = (out.detach(), *torch.autograd.grad(out, x.leaves, grad))
    right = (want.detach(), *torch.autograd.grad(want, exact.leaves, grad.double()))
    assert max(accuracy.relative_rms(*both) for both in zip(found, right, strict=True)) < 0.02


# ---- packing ---------------------------------------------------------------------------------------------------------
@small_cases
def test_packing_keeps_every_row(case: Case) -> None:
    """gdpa computes the same from packed rows and offsets as from the case's own layout."""
    if not case.varlen:
        return
    x = make_inputs(case, torch.float64)
    cu_q, cu_k = packing.packed_offsets(case, x)
    packed = replace(case, packed_q=True, packed_k=True, shared=False)
    rows = Inputs(*packing.packed_rows(case, x), cu_q, cu_k)
    torch.testing.assert_close(call(packed, rows, F.softplus), call(case, x, F.softplus))
