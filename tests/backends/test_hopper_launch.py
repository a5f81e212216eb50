"""What Hopper's host code decides without a GPU: which strides descriptors express, and how dq is made."""

from __future__ import annotations

import os
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from gdpa.backends.hopper import HopperBackend, config
from gdpa.bench.cases import Case, dense, make_inputs
from gdpa.functions.activation import resolve_one
from gdpa.problem import Band, Operands, Problem, is_regular, make_problem
from support import bf16, f16, operands, problem_of


def fast_problem(case: Case, x: Operands) -> Problem:
    return replace(problem_of(case, x, "gelu"), precision="fast")


def base(*shape: int) -> Tensor:
    return torch.empty(shape, dtype=bf16)


REGULAR = {
    "contiguous": base(2, 4, 7, 64),
    "rows outside heads": base(2, 7, 4, 64).transpose(1, 2),
    "heads outermost": base(4, 2, 7, 64).transpose(0, 1),
    "fused projection": base(2, 7, 3, 4, 64)[:, :, 1].transpose(1, 2),
    "packed projection": base(9, 3, 4, 64)[:, 2].transpose(0, 1)[None],
    "every other head": base(2, 4, 7, 64)[:, 1::2],
    "every other row": base(2, 4, 8, 64)[:, :, ::2],
    "columns 8 to 24": base(2, 4, 7, 64)[..., 8:24],
    "one entry for the whole batch": base(1, 4, 7, 64).expand(3, -1, -1, -1),
    "one head": base(2, 7, 64)[:, None],
    "no rows": base(2, 4, 0, 64),
}
IRREGULAR = {
    "unaligned rows": base(2, 4, 7, 65)[..., :64],
    "unaligned start": base(2, 4, 7, 72)[..., 1:65],
    "batch inside rows": base(7, 2, 4, 64).permute(1, 2, 0, 3),
    "one head expanded": base(2, 1, 7, 64).expand(-1, 4, -1, -1),
    "one row expanded": base(2, 4, 1, 64).expand(-1, -1, 7, -1),
}


@pytest.mark.parametrize("name", REGULAR)
def test_regular_strides(name: str) -> None:
    assert is_regular(REGULAR[name])


@pytest.mark.parametrize("name", IRREGULAR)
def test_irregular_strides(name: str) -> None:
    assert not is_regular(IRREGULAR[name])


def test_the_problem_knows() -> None:
    case = dense("strides", 2, 7, 7, heads=4, d=64)
    x = operands(case, make_inputs(case, bf16))
    assert problem_of(case, x, "gelu").regular
    q, k, v = x.q, x.k, IRREGULAR["batch inside rows"]
    assert not problem_of(case, type(x)(q, k, v), "gelu").regular


def test_the_cpu_is_refused_in_words() -> None:
    case = dense("cpu", 2, 7, 7, heads=4, d=64)
    reason = HopperBackend().supports(problem_of(case, operands(case, make_inputs(case, bf16)), "gelu"))
    assert reason is not None
    assert any(words in reason for words in ("needs a GPU", "not installed", "interpreter"))


@pytest.mark.parametrize(
    ("functions", "refused"), [(["relu", "gelu"], None), (["relu", torch.sin], "cos, sin in sin")], ids=["", "refused"]
)
def test_functions_per_head_are_asked_about_together(functions, refused, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a Hopper GPU."""
    pytest.importorskip("triton")
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    case = dense("heads", 2, 7, 7, heads=2, d=64)
    x = operands(case, make_inputs(case, bf16))
    problem = make_problem(x, tuple(resolve_one(f, 0) for f in functions), 0.125, 1.0, Band())
    object.__setattr__(problem, "device", torch.device("cuda"))
    reason = HopperBackend().supports(problem)
    assert reason is None if refused is None else refused in str(reason)


# ---- dq --------------------------------------------------------------------------------------------------------------
def dense_case(len_k: int) -> Case:
    return dense("dense", 2, 70, len_k, heads=2, d=64)


PACKED = Case("packed", (70, 5), (config.NARROW_DQ_KEYS, 20), heads=2, d=64, packed_q=True, packed_k=True)
SHARED = dense("shared", 3, 70, 100, heads=2, d=64, shared=True)
# case, longest keys that the caller promises: (mode, dtype and number of sums), and the same in deterministic mode
DQ = {
    "one tile": (dense_case(128), None, ("store", bf16, 1), ("store", bf16, 1)),
    "two tiles": (dense_case(256), None, ("add", bf16, 1), ("add", bf16, 1)),
    "three tiles": (dense_case(257), None, ("add", bf16, 1), ("none", bf16, 1)),
    "many tiles": (dense_case(config.ONE_SUM_KEYS), None, ("add", bf16, 1), ("none", bf16, 1)),
    "two sums": (dense_case(config.ONE_SUM_KEYS + 1), None, ("add", bf16, 2), ("none", bf16, 1)),
    "most tiles": (dense_case(config.NARROW_DQ_KEYS), None, ("add", bf16, 2), ("none", bf16, 1)),
    "more": (dense_case(config.NARROW_DQ_KEYS + 1), None, ("add", torch.float32, 1), ("none", bf16, 1)),
    "one tile seen": (replace(dense_case(4096), window=(0, 0)), None, ("add", bf16, 1), ("add", bf16, 1)),
    "two tiles seen": (replace(dense_case(4096), window=(100, 28)), None, ("add", bf16, 1), ("add", bf16, 1)),
    "three tiles seen": (replace(dense_case(4096), window=(100, 29)), None, ("add", bf16, 1), ("none", bf16, 1)),
    "two sums seen": (replace(dense_case(4096), window=(500, 500)), None, ("add", bf16, 2), ("none", bf16, 1)),
    "packed": (PACKED, None, ("add", torch.float32, 1), ("none", bf16, 1)),
    "packed with a promise": (PACKED, 128, ("store", bf16, 1), ("store", bf16, 1)),
    "shared queries": (SHARED, None, ("add", torch.float32, 1), ("none", bf16, 1)),
}


@pytest.mark.parametrize("deterministic", [False, True], ids=["", "deterministic"])
@pytest.mark.parametrize("name", DQ)
def test_how_dq_is_made(name: str, deterministic: bool) -> None:
    pytest.importorskip("triton")
    if os.environ.get("TRITON_INTERPRET") == "1":
        pytest.skip("Triton's interpreter does not take Gluon kernels")
    from gdpa.backends.hopper import launch

    case, longest, usual, fixed_order = DQ[name]
    x = operands(case, make_inputs(case, bf16))
    problem = fast_problem(case, x)
    object.__setattr__(problem, "max_k", longest)
    torch.use_deterministic_algorithms(deterministic)
    mode, parts = launch.dq_target(problem, torch.ones_like(x.q), config.default(problem, "bwd"))
    assert (mode, parts[0].dtype, len(parts)) == (fixed_order if deterministic else usual)
    assert all(part.shape == x.q.shape for part in parts)
    if mode == "add":
        assert not any(part.any() for part in parts), "added to something other than zero"


ALL_KEYS = dense("all keys", 3, 70, 256, heads=2, d=64)
# What keeps a program from taking all keys of a sequence, however many of those there are.
NOT_ALL_KEYS = {
    "one tile anyway": replace(ALL_KEYS, len_k=(128,) * 3),
    "too many keys": replace(ALL_KEYS, len_k=(128 * config.MOST_KEY_TILES + 1,) * 3),
    "packed keys": replace(ALL_KEYS, packed_k=True),
    "band": replace(ALL_KEYS, causal=True),
    "shared queries": replace(ALL_KEYS, shared=True),
}


@pytest.mark.parametrize("name", ["", *NOT_ALL_KEYS])
def test_when_a_program_takes_all_keys(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    case = NOT_ALL_KEYS.get(name, ALL_KEYS)
    problem = fast_problem(case, operands(case, make_inputs(case, bf16)))
    c = config.default(problem, "bwd")
    assert config.key_tiles_per_item(problem, c) == 1, "too few items"
    monkeypatch.setattr(config, "MANY_ITEMS", 1)
    assert config.key_tiles_per_item(problem, c) == (1 if name else 2)
    monkeypatch.setattr(config, "wide_dq", lambda problem: True)
    assert config.key_tiles_per_item(problem, c) == 1


@pytest.mark.parametrize("dtype", [f16, bf16], ids=str)
def test_narrow_sums_are_an_explicit_choice(dtype: torch.dtype) -> None:
    case = dense_case(300)
    x = operands(case, make_inputs(case, dtype))
    assert config.wide_dq(problem_of(case, x, "gelu"))
    assert not config.wide_dq(fast_problem(case, x))


@pytest.mark.parametrize(
    ("fn", "n_params", "here"),
    [
        (lambda s: s.abs().log(), 0, True),
        (lambda s, a, b: torch.nn.functional.gelu(a * s + b), 2, True),
        (lambda s, a: s / a, 1, False),  # not finite at 0 if a is 0
    ],
    ids=["none", "finite at zero", "perhaps infinite"],
)
def test_who_adds_up_the_gradients_of_params(fn, n_params: int, here: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    if os.environ.get("TRITON_INTERPRET") == "1":
        pytest.skip("Triton's interpreter does not take Gluon kernels")
    from gdpa.backends.hopper import launch

    case = dense("", 2, 70, 90, heads=2)
    x = operands(case, make_inputs(case, bf16), [torch.ones(2)] * n_params)
    problem = problem_of(case, x, fn)
    gradients = [torch.empty_like(t) if t is not None else None for t in (x.q, x.q, x.k, x.v, x.params)]
    calls = []
    monkeypatch.setattr(launch, "launch_backward", lambda *args: calls.append("here"))
    monkeypatch.setattr(launch.portable, "backward", lambda *args: calls.append(args))
    launch.backward(problem, x, *gradients)
    assert calls == (["here"] if here else [(problem, x, *gradients)])


@pytest.mark.parametrize("dtype", [f16, bf16], ids=str)
def test_stored_dq_is_zero_where_no_tile_comes_by(dtype: torch.dtype) -> None:
    pytest.importorskip("triton")
    if os.environ.get("TRITON_INTERPRET") == "1":
        pytest.skip("Triton's interpreter does not take Gluon kernels")
    from gdpa.backends.hopper import launch

    x = operands(PACKED, make_inputs(PACKED, dtype))
    problem = problem_of(PACKED, x, "gelu")
    object.__setattr__(problem, "max_k", 100)
    mode, (dq,) = launch.dq_target(problem, torch.full_like(x.q, torch.nan), config.default(problem, "bwd"))
    assert mode == "store"
    assert not dq.any()
