"""Bad arguments are refused with the argument's name and value, and before anything is computed."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import gdpa
from gdpa import backends, reference
from gdpa.testing.cases import offsets

B, H, L, D = 2, 4, 6, 8
ROWS = 7


def dense_arguments() -> dict[str, Any]:
    return {"q": torch.randn(B, H, L, D), "k": torch.randn(B, 2, L, D), "v": torch.randn(B, 2, L, D)}


def varlen_arguments() -> dict[str, Any]:
    cu = offsets((3, 4))
    rows = {"q": torch.randn(ROWS, H, D), "k": torch.randn(ROWS, 2, D), "v": torch.randn(ROWS, 2, D)}
    return {**rows, "cu_seqlens_q": cu, "cu_seqlens_k": cu}


@dataclass(frozen=True)
class Bad:
    """Good arguments but for ``change``, the error they must give, and what its message must hold, divided by " | "."""

    name: str
    error: type[Exception]
    words: str
    change: dict[str, Any]
    varlen: bool = False

    def arguments(self) -> dict[str, Any]:
        return {**(varlen_arguments() if self.varlen else dense_arguments()), **self.change}


def bad(name: str, error: type[Exception], words: str, **change: Any) -> Bad:
    return Bad(name, error, words, change)


def bad_varlen(name: str, error: type[Exception], words: str, **change: Any) -> Bad:
    return Bad(name, error, words, change, varlen=True)


def t(*shape: int, **kwargs: Any) -> Tensor:
    return torch.ones(shape, **kwargs)


def two_params(s: Tensor, a: Tensor, b: Tensor) -> Tensor:
    return a * torch.relu(s) + b


ONE_PARAM = gdpa.activation(lambda s, a: a * torch.relu(s))
STRIDED_NESTED = torch.nested.nested_tensor([torch.ones(2, 3, D), torch.ones(2, 4, D)])
JAGGED = torch.nested.nested_tensor_from_jagged(torch.ones(ROWS, 2, D), torch.tensor([0, 3, 7]))

TENSORS = [
    bad("q-list", TypeError, "q must be a tensor | list", q=[[1.0]]),
    bad("q-none", TypeError, "q must be a tensor | NoneType", q=None),
    bad("k-numpy", TypeError, "k must be a tensor | ndarray", k=torch.ones(B, 2, L, D).numpy()),
    bad("q-integer", TypeError, "q must be float | torch.int64", q=t(B, H, L, D, dtype=torch.int64)),
    bad("v-bool", TypeError, "v must be float | torch.bool", v=t(B, 2, L, D, dtype=torch.bool)),
    bad("q-complex", TypeError, "q must be float | torch.complex64", q=t(B, H, L, D, dtype=torch.complex64)),
    bad("q-fp8", TypeError, "q must be float | torch.float8_e4m3fn", q=t(B, H, L, D).to(torch.float8_e4m3fn)),
    bad("k-sparse", TypeError, "k must be a strided tensor | torch.sparse_coo", k=t(B, 2, L, D).to_sparse()),
    bad("v-strided-nested", TypeError, "v is a nested tensor | torch.strided | torch.jagged", v=STRIDED_NESTED),
    bad("k-only-nested", TypeError, "k is a jagged nested tensor | v must be", k=JAGGED.transpose(1, 2)),
    bad("q-3d", ValueError, "q must have 4 dimensions | (4, 6, 8)", q=t(H, L, D)),
    bad("v-5d", ValueError, "v must have 4 dimensions | (1, 2, 2, 6, 8)", v=t(1, B, 2, L, D)),
    bad("d-zero", ValueError, "q | head dimension 0 | (2, 4, 6, 0)", q=t(B, H, L, 0), k=t(B, 2, L, 0)),
    bad("dv-zero", ValueError, "v | head dimension 0", v=t(B, 2, L, 0)),
    bad("q-last-stride", ValueError, "q must be contiguous | strides | 6", q=t(B, H, D, L).transpose(2, 3)),
    bad(
        "v-last-stride", ValueError, "v must be contiguous | strides | (192, 96, 16, 2)", v=t(B, 2, L, 2 * D)[..., ::2]
    ),
    bad("dtypes", ValueError, "same dtype | torch.float32 | torch.float64", k=t(B, 2, L, D, dtype=torch.float64)),
    bad("devices", ValueError, "same device | cpu | meta", v=t(B, 2, L, D, device="meta")),
    bad("kv-length", ValueError, "k and v must agree | (2, 2, 6, 8) | (2, 2, 5, 8)", v=t(B, 2, 5, D)),
    bad("kv-heads", ValueError, "k and v must agree | (2, 4, 6, 8)", v=t(B, 4, L, D)),
    bad("kv-batch", ValueError, "k and v must agree | (1, 2, 6, 8)", v=t(1, 2, L, D)),
    bad("qk-head-dim", ValueError, "q and k must have the same head dimension | 16 | 8", q=t(B, H, L, 16)),
    bad("head-ratio", ValueError, "q's heads (3) | k's heads (2)", q=t(B, 3, L, D)),
    bad("more-key-heads", ValueError, "q's heads (1) | k's heads (2)", q=t(B, 1, L, D)),
    bad("no-heads", ValueError, "q's heads (4) | k's heads (0)", k=t(B, 0, L, D), v=t(B, 0, L, D)),
    bad("batch", ValueError, "q and k disagree on the number of sequences | 3 | 2", q=t(3, H, L, D)),
    bad("keys-are-not-shared", ValueError, "q and k disagree | 2 and 1", k=t(1, 2, L, D), v=t(1, 2, L, D)),
]

NUMBERS = [
    bad("scale-nan", ValueError, "scale must be finite | nan", scale=float("nan")),
    bad("scale-inf", ValueError, "scale must be finite | inf", scale=float("inf")),
    bad("scale-huge", ValueError, "scale must be finite | 1000", scale=10**400),
    bad("scale-beyond-float32", ValueError, "scale must be finite in float32 | torch.float32 | 1e+39", scale=1e39),
    bad("scale-tensor", TypeError, "scale must be a Python number | Tensor | params", scale=torch.tensor(1.0)),
    bad("scale-string", TypeError, "scale must be a Python number | str", scale="1"),
    bad("scale-bool", TypeError, "scale must be a Python number | bool", scale=True),
    bad("scale-complex", TypeError, "scale must be a Python number | complex", scale=1j),
    bad("out-scale-inf", ValueError, "out_scale must be finite | -inf", out_scale=float("-inf")),
    bad("out-scale-beyond-float32", ValueError, "out_scale must be finite in float32 | -1e+39", out_scale=-1e39),
    bad("out-scale-none", TypeError, "out_scale must be a Python number | NoneType", out_scale=None),
    bad("out-scale-parameter", TypeError, "out_scale | Parameter", out_scale=torch.nn.Parameter(torch.ones(()))),
    bad("causal-int", TypeError, "causal must be True or False | 1", causal=1),
    bad("causal-none", TypeError, "causal must be True or False | None", causal=None),
    bad("window-int", TypeError, "window must be | pair | 5", window=5),
    bad("window-triple", TypeError, "window must be | pair | (1, 2, 3)", window=(1, 2, 3)),
    bad("window-string", TypeError, "window must be | pair | '12'", window="12"),
    bad("window-negative", ValueError, "window's left bound | -1 | None means | gdpa.masks.window", window=(-1, 0)),
    bad("window-float", TypeError, "window's right bound must be an int | 2.0", window=(None, 2.0)),
    bad("window-bool", TypeError, "window's left bound must be an int | True", window=(True, 1)),
    bad("window-tensor", TypeError, "window's left bound must be an int | tensor(1)", window=(torch.tensor(1), 1)),
    bad("window-numpy-bool", TypeError, "window's left bound must be an int", window=(np.bool_(True), 1)),
    bad("window-numpy-negative", ValueError, "window's left bound | -1", window=(np.int64(-1), 1)),
    bad("window-huge", ValueError, "window's right bound | 2147483648", window=(0, 2**31)),
]

FUNCTIONS = [
    bad("unknown-name", ValueError, "activation='swosh' is unknown | silu", activation="swosh"),
    bad("activation-none", TypeError, "activation=None is neither", activation=None),
    bad("activation-number", TypeError, "activation=3 is neither", activation=3),
    bad("list-length", ValueError, "activation is a list of length 2 | query head (4)", activation=["relu", "gelu"]),
    bad("list-empty", ValueError, "activation is a list of length 0 | query head (4)", activation=[]),
    bad("list-entry", ValueError, "activation='nope' is unknown", activation=["relu", "gelu", "nope", "relu"]),
    bad("list-of-lists", TypeError, "activation=['relu'] is neither", activation=[["relu"]] * 4),
    bad("softmax", gdpa.UnsupportedActivationError, "softmax", activation=lambda s: torch.softmax(s, -1)),
    bad("module-with-rows", gdpa.UnsupportedActivationError, "'weight' has shape (3,)", activation=torch.nn.PReLU(3)),
    bad("no-tensor", gdpa.UnsupportedActivationError, "one tensor | NoneType", activation=lambda s: None),
    bad("params-for-a-built-in", ValueError, "params has length 1 | 'relu' takes 0", activation="relu", params=(t(),)),
    bad("params-missing", ValueError, "params has length 0 | takes 1", activation=ONE_PARAM),
    bad("params-missing-list", ValueError, "params has length 0 | takes 1", activation=["relu"] * 3 + [ONE_PARAM]),
    bad("params-too-few", TypeError, "two_params | 1 params", activation=two_params, params=(t(),)),
    bad("params-too-many", TypeError, "two_params | 3 params", activation=two_params, params=(t(),) * 3),
    bad("params-tensor", TypeError, "params must be a tuple | params=(x,)", activation=ONE_PARAM, params=t(4)),
    bad("params-none", TypeError, "params must be a tuple | NoneType", params=None),
    bad("params-number", TypeError, "params[0] must be a tensor | float", activation=ONE_PARAM, params=(0.5,)),
    bad("params-integer", TypeError, "params[0] | torch.int64", activation=ONE_PARAM, params=(torch.tensor(1),)),
    bad(
        "params-shape",
        ValueError,
        "params[1] must have shape () or (4,) | (2,)",
        activation=two_params,
        params=(t(), t(2)),
    ),
    bad("params-column", ValueError, "params[0] must have shape | (4, 1)", activation=ONE_PARAM, params=(t(4, 1),)),
    bad("params-device", ValueError, "params[0] | cpu | meta", activation=ONE_PARAM, params=(t(device="meta"),)),
    bad(
        "params-sparse", TypeError, "params[0] must be a dense tensor", activation=ONE_PARAM, params=(t(4).to_sparse(),)
    ),
    bad("backend-unknown", ValueError, "backend='cuda' is unknown | triton | cpu | reference", backend="cuda"),
    bad("backend-number", ValueError, "backend=0 is unknown", backend=0),
    bad("backend-list", ValueError, "backend=['cpu'] is unknown", backend=["cpu"]),
    bad("params-set", TypeError, "params must be a tuple or list of tensors, got set", params=set()),
    bad("params-dict", TypeError, "params must be a tuple or list of tensors, got dict", params={}),
]

OFFSETS = [
    bad_varlen("q-4d", ValueError, "q must have 3 dimensions | (1, 7, 4, 8)", q=t(1, ROWS, H, D)),
    bad_varlen("k-4d", ValueError, "k must have 3 dimensions | (2, 3, 2, 8)", k=t(2, 3, 2, D)),
    bad_varlen("k-3d-no-offsets", ValueError, "k must have 4 dimensions | (7, 2, 8)", cu_seqlens_k=None),
    bad_varlen("q-nested", TypeError, "q is a nested tensor | gdpa.attention", q=JAGGED),
    bad_varlen(
        "both-none", ValueError, "cu_seqlens_q and cu_seqlens_k are both None | gdpa.attention", cu_seqlens_q=None,
        cu_seqlens_k=None, k=t(2, 3, 2, D), v=t(2, 3, 2, D),
    ),
    bad_varlen("cu-list", TypeError, "cu_seqlens_q must be a tensor or None | list", cu_seqlens_q=[0, 3, 7]),
    bad_varlen("cu-float", TypeError, "cu_seqlens_k must be int32 | float32", cu_seqlens_k=torch.tensor([0.0, 3, 7])),
    bad_varlen("cu-int16", TypeError, "cu_seqlens_q must be | int16", cu_seqlens_q=offsets((3, 4), dtype=torch.int16)),
    bad_varlen("cu-2d", ValueError, "cu_seqlens_q | (B+1,) | (1, 3)", cu_seqlens_q=offsets((3, 4))[None]),
    bad_varlen("cu-0d", ValueError, "cu_seqlens_q | (B+1,) | ()", cu_seqlens_q=torch.tensor(7)),
    bad_varlen("cu-empty", ValueError, "cu_seqlens_k | (B+1,) | (0,)", cu_seqlens_k=offsets((3, 4))[:0]),
    bad_varlen("cu-device", ValueError, "cu_seqlens_q | cpu | meta", cu_seqlens_q=offsets((3, 4), "meta")),
    bad_varlen("cu-stride", ValueError, "cu_seqlens_q must be contiguous | 2", cu_seqlens_q=torch.arange(6)[::2]),
    bad_varlen("cu-sparse", TypeError, "cu_seqlens_q | sparse", cu_seqlens_q=offsets((3, 4)).to_sparse()),
    bad_varlen("batches", ValueError, "cu_seqlens_q and cu_seqlens_k | 3 and 2", cu_seqlens_q=offsets((3, 3, 1))),
    bad_varlen(
        "batches-dense-keys", ValueError, "cu_seqlens_q and k disagree | 2 and 3", cu_seqlens_k=None, k=t(3, 5, 2, D),
        v=t(3, 5, 2, D),
    ),
    bad_varlen("max-float", TypeError, "max_seqlen_q must be an int or None, got float", max_seqlen_q=4.0),
    bad_varlen("max-numpy-bool", TypeError, "max_seqlen_q must be an int | bool", max_seqlen_q=np.bool_(True)),
    bad_varlen("max-numpy-negative", ValueError, "max_seqlen_q | -1", max_seqlen_q=np.int64(-1)),
    bad_varlen("max-tensor", TypeError, "max_seqlen_k must be an int | Tensor", max_seqlen_k=torch.tensor(4)),
    bad_varlen("max-bool", TypeError, "max_seqlen_k must be an int | bool", max_seqlen_k=True),
    bad_varlen("max-negative", ValueError, "max_seqlen_k | -1", max_seqlen_k=-1),
    bad_varlen("max-huge", ValueError, "max_seqlen_q | 2147483648", max_seqlen_q=2**31),
    bad_varlen("max-shared-queries", ValueError, "max_seqlen_q=6 | (7)", cu_seqlens_q=None, max_seqlen_q=6),
    bad_varlen(
        "max-dense-keys", ValueError, "max_seqlen_k=4 | (5)", cu_seqlens_k=None, k=t(2, 5, 2, D), v=t(2, 5, 2, D),
        max_seqlen_k=4,
    ),
]  # fmt: skip

# Refused where the data is looked at, inside the operator: explain() does not go there.
AT_RUN_TIME = [
    bad_varlen("cu-start", ValueError, "cu_seqlens_q must start at 0 | 1", cu_seqlens_q=torch.tensor([1, 3, 7])),
    bad_varlen("cu-start-negative", ValueError, "cu_seqlens_k must start | -1", cu_seqlens_k=torch.tensor([-1, 3, 7])),
    bad_varlen("cu-decreases", ValueError, "cu_seqlens_k | entry 2 is 3 after 8", cu_seqlens_k=torch.tensor([0, 8, 3])),
    bad_varlen("cu-long", ValueError, "cu_seqlens_k must not end | 7 rows | 70", cu_seqlens_k=torch.tensor([0, 3, 70])),
    bad_varlen(
        "cu-of-other-rows", ValueError, "cu_seqlens_k must not end | 6 rows | 7", k=t(6, 2, D), v=t(6, 2, D)
    ),
    bad_varlen("max-too-small", ValueError, "max_seqlen_k=3 | (4)", max_seqlen_k=3),
    bad_varlen("max-too-small-q", ValueError, "max_seqlen_q=0 | (4)", max_seqlen_q=0),
]  # fmt: skip

EARLY = TENSORS + NUMBERS + FUNCTIONS + OFFSETS


@pytest.fixture
def nothing_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    def launched(*args: Any, **kwargs: Any) -> None:
        pytest.fail("something was launched")

    for name in backends.BACKENDS:
        monkeypatch.setattr(type(backends.get(name)), "forward", launched)
    monkeypatch.setattr(reference, "attention", launched)


def assert_says(error: pytest.ExceptionInfo[Exception], case: Bad) -> None:
    assert error.type is case.error
    for words in case.words.split(" | "):
        assert words in str(error.value), f"{words!r} is not in {str(error.value)!r}"


def call(case: Bad, **kwargs: Any) -> Tensor:
    return (gdpa.attention_varlen if case.varlen else gdpa.attention)(**case.arguments(), **kwargs)


def test_there_are_enough_kinds_and_no_two_share_a_name() -> None:
    names = [case.name for case in EARLY + AT_RUN_TIME]
    assert len(names) == len(set(names)) >= 40


def test_the_arguments_are_good_but_for_the_change() -> None:
    assert gdpa.attention(**dense_arguments()).shape == (B, H, L, D)
    assert gdpa.attention_varlen(**varlen_arguments()).shape == (ROWS, H, D)


@pytest.mark.parametrize("case", EARLY + AT_RUN_TIME, ids=lambda case: case.name)
@pytest.mark.usefixtures("nothing_runs")
def test_refused(case: Bad) -> None:
    with pytest.raises(case.error) as error:
        call(case)
    assert_says(error, case)


@pytest.mark.parametrize("case", AT_RUN_TIME, ids=lambda case: case.name)
@pytest.mark.usefixtures("nothing_runs")
def test_the_reference_refuses_bad_offsets_too(case: Bad) -> None:
    with pytest.raises(case.error) as error:
        call(case, backend="reference")
    assert_says(error, case)


@pytest.mark.parametrize("case", EARLY, ids=lambda case: case.name)
def test_explain_refuses_the_same(case: Bad) -> None:
    with pytest.raises(case.error) as error:
        gdpa.explain(**case.arguments())
    assert_says(error, case)


@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="the interpreter does run on the CPU")
@pytest.mark.usefixtures("nothing_runs")
def test_a_forced_backend_that_cannot_run_says_why() -> None:
    with pytest.raises(
        gdpa.UnsupportedProblemError, match=r"backend='triton' cannot run this call: .*GPU.* cpu|Triton"
    ):
        gdpa.attention(**dense_arguments(), backend="triton")


@pytest.mark.parametrize("name", ["q", "k", "v"])
@pytest.mark.usefixtures("nothing_runs")
def test_an_unknown_argument_is_refused(name: str) -> None:
    with pytest.raises(TypeError, match=f"{name}_scale"):
        gdpa.attention(**dense_arguments(), **{f"{name}_scale": 1.0})
    with pytest.raises(TypeError, match=f"{name}_scale"):
        gdpa.explain(**dense_arguments(), **{f"{name}_scale": 1.0})


GOOD = {
    "window-list": {"window": [1, 2]},
    "window-numpy": {"window": (np.int64(1), np.uint8(2))},
    "window-wider-than-keys": {"window": (10**6, None)},
    "scale-int": {"scale": 2},
    "scale-zero": {"scale": 0.0},
    "scale-of-float64": {"scale": 1e39, **{name: t(B, 2, L, D, dtype=torch.float64) for name in "qkv"}},
    "out-scale-negative": {"out_scale": -1.5},
    "params-list": {"activation": ONE_PARAM, "params": [torch.ones(())]},
    "params-half": {"activation": ONE_PARAM, "params": (torch.ones(H, dtype=torch.float16),)},
    "params-strided": {"activation": ONE_PARAM, "params": (torch.ones(2 * H)[::2],)},
    "queries-with-strides": {"q": torch.randn(B, L, H, D).transpose(1, 2)},
    "queries-expanded": {"q": torch.randn(1, H, L, D).expand(B, -1, -1, -1)},
    "values-a-slice": {"v": torch.randn(B, 2, L, 3 * D)[..., D : 2 * D]},
    "head-dimension-one": {"q": t(B, H, L, 1), "k": t(B, 2, L, 1), "v": t(B, 2, L, 1)},
    "no-queries": {"q": t(B, H, 0, D)},
    "no-keys": {"k": t(B, 2, 0, D), "v": t(B, 2, 0, D)},
    "no-batch": {"q": t(0, H, L, D), "k": t(0, 2, L, D), "v": t(0, 2, L, D)},
}


@pytest.mark.parametrize("change", GOOD.values(), ids=GOOD.keys())
def test_unusual_but_good(change: dict[str, Any]) -> None:
    arguments = {**dense_arguments(), **change}
    torch.testing.assert_close(
        gdpa.attention(**arguments), gdpa.attention(**arguments, backend="reference"), rtol=1e-4, atol=1e-4
    )


def test_a_hint_may_be_one_of_numpy() -> None:
    arguments = varlen_arguments()
    hints = {"max_seqlen_q": np.array([3, 4]).max(), "max_seqlen_k": np.int32(8)}
    assert torch.equal(gdpa.attention_varlen(**arguments, **hints), gdpa.attention_varlen(**arguments))
