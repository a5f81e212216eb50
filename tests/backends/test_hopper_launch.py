"""What Hopper's host code decides without a GPU: which strides descriptors express, and how dq is made."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

import gdpa
from gdpa.backends.hopper import HopperBackend, config
from gdpa.functions.activation import resolve_one
from gdpa.masks.band import Band
from gdpa.problem import SUM, Operands, Problem, is_regular, make_problem
from gdpa.testing.cases import Case, dense, make_inputs
from support import INTERPRET, bf16, f16, operands, problem_of


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
    ("functions", "refused"), [(["relu", "gelu"], None), (["relu", torch.sin], "cos, sin in ")], ids=["", "refused"]
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
PROCESSORS = 132
LIMIT = config.MOST_TILES * 128  # keys of a sequence whose sums go round


@pytest.fixture
def launch(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The module, as on an H100, without kernels that would run."""
    pytest.importorskip("triton")
    if INTERPRET:
        pytest.skip("Triton's interpreter does not take Gluon kernels")
    from aot import Recorder
    from gdpa.backends.hopper import binding, launch, wide_dq
    from gdpa.backends.hopper.scheduling import work
    from gdpa.backends.triton import arguments

    monkeypatch.setattr(launch, "processors", lambda device: PROCESSORS)
    monkeypatch.setattr(arguments, "zero_unused_kernel", Recorder(None, []))
    monkeypatch.setattr(work, "ordered_records_kernel", Recorder("ordered_records_kernel", []))
    for module, name in ((binding, "backward_kernel"), (wide_dq, "round_rows_kernel")):
        monkeypatch.setattr(module, name, Recorder(name, []))
    return launch


def dense_case(len_q: int, len_k: int, d: int = 64, **kwargs: Any) -> Case:
    return dense("dense", 1, len_q, len_k, heads=1, d=d, **kwargs)


def packed_case(len_q: tuple[int, ...], len_k: tuple[int, ...], d: int = 64, **kwargs: Any) -> Case:
    return Case("packed", len_q, len_k, heads=1, d=d, packed_q=True, packed_k=True, **kwargs)


def make(case: Case, longest: int | None = None, dtype: torch.dtype = bf16) -> tuple[Problem, Operands]:
    """The problem with a promise of the longest keys."""
    x = operands(case, make_inputs(case, dtype))
    return replace(problem_of(case, x, "gelu"), max_k=longest), x


SHORT, LONG = packed_case((300, 5), (300, 20)), packed_case((3000,) * 3, (3000,) * 3)
RING, ADD, TURNS, NONE = ([(mode, (1, None, None))] for mode in ("ring", "add", "turns", "none"))
PACKED_RING = [("ring", (1, LIMIT, None))]  # no sequence may be longer, which the device checks
TWO_PASSES = [("ring", (1, LIMIT, False)), ("none", (1, LIMIT, True))]
# case, longest keys that the caller promises: what is launched for which sequences, and the same in deterministic mode
DQ: dict[str, tuple[Case, int | None, list[Any], list[Any]]] = {
    "dense": (dense_case(300, 300), None, RING, RING),
    "one tile": (dense_case(1, 128), None, RING, RING),
    "more queries": (dense_case(1000, 300), None, RING, RING),
    "as many blocks as tiles": (dense_case(128, 256, d=128), None, RING, RING),
    "fewer blocks than tiles": (dense_case(128, 256, d=64), None, ADD, NONE),
    "causal, one wave": (dense_case(300, 300, causal=True), None, TURNS, TURNS),
    "causal, two tiles": (dense("two", 99, 256, 256, heads=4, causal=True), None, RING, RING),
    "causal": (dense("causal", 99, 300, 300, heads=4, causal=True), None, ADD, NONE),
    "open window": (dense_case(300, 300, window=(5, None)), None, ADD, NONE),
    "window": (dense_case(300, 300, window=(5, 7)), None, ADD, TURNS),
    "causal, wider": (dense("causal", 99, 300, 300, heads=4, d=128, causal=True), None, TURNS, TURNS),
    "open window, wider": (dense_case(300, 300, d=128, window=(5, None)), None, TURNS, TURNS),
    "window, wider": (dense_case(300, 300, d=128, window=(5, 7)), None, TURNS, TURNS),
    "shared queries": (dense("shared", 3, 300, 300, heads=1, shared=True), None, ADD, NONE),
    "longest ring": (dense_case(LIMIT, LIMIT), None, RING, RING),
    "too long": (dense_case(LIMIT + 1, LIMIT + 1), None, ADD, TURNS),
    "packed": (SHORT, None, PACKED_RING, PACKED_RING),
    "packed queries": (replace(SHORT, len_k=(20, 20), packed_k=False), None, RING, RING),
    "packed, few queries": (packed_case((5, 5), (300, 20)), None, ADD, NONE),
    "packed, causal": (replace(SHORT, causal=True), None, ADD, NONE),
    "packed, causal, wider": (packed_case((300, 5), (300, 20), 128, causal=True), None, TURNS, TURNS),
    "perhaps too long": (LONG, None, TWO_PASSES, TWO_PASSES),
    "promised to be short": (LONG, 3000, PACKED_RING, PACKED_RING),
    "promised to be just short enough": (LONG, LIMIT, PACKED_RING, PACKED_RING),
    "promised to be long": (LONG, LIMIT + 1, TWO_PASSES, TWO_PASSES),
    "most of them too long": (packed_case((LIMIT, LIMIT + 2), (LIMIT, LIMIT + 2)), None, ADD, TURNS),
}


@pytest.mark.parametrize("deterministic", [False, True], ids=["", "deterministic"])
@pytest.mark.parametrize("name", DQ)
def test_how_dq_is_made(name: str, deterministic: bool, launch: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    case, longest, usual, fixed_order = DQ[name]
    problem, x = make(case, longest)
    found: list[Any] = []
    monkeypatch.setattr(launch, "launch_backward", lambda *args: found.append((args[7], tuple(args[9]))))
    others: list[Any] = []
    monkeypatch.setattr(launch.portable, "launch_dq", lambda *args: others.append("dq"))
    monkeypatch.setattr(launch.portable, "launch_other_dq", lambda *args: others.append(args[4]))
    torch.use_deterministic_algorithms(deterministic)
    launch.backward(problem, x, *(torch.empty_like(t) for t in (x.q, x.q, x.k, x.v)), None)
    assert found == (fixed_order if deterministic else usual)
    assert config.dq_mode(problem) == found[0][0]
    assert others == (["dq"] if found[0][0] == "none" else [LIMIT] if found == TWO_PASSES else [])


def test_used_lengths_of_dense_keys_are_not_known_on_the_host(launch: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    case = dense_case(300, 300)
    x = replace(operands(case, make_inputs(case, bf16)), used_k=torch.tensor([20]))
    found: list[Any] = []
    monkeypatch.setattr(launch, "launch_backward", lambda *args: found.append((args[7], tuple(args[9]))))
    launch.backward(problem_of(case, x, "gelu"), x, *(torch.empty_like(t) for t in (x.q, x.q, x.k, x.v)), None)
    assert found == PACKED_RING


@pytest.mark.parametrize("d", [40, 64, 128])
def test_a_ring_takes_as_much_memory_whatever_the_batch(d: int, launch: Any) -> None:
    for case in (dense_case(300, 300, d), dense("many", 8, 900, 300, heads=3, d=d)):
        problem, x = make(case)
        c = config.default(problem, "bwd")
        wide, flags = launch.dq_buffers(problem, x.q, "ring", c)
        assert wide.shape == (1, 1, PROCESSORS * config.ROOM * c.block_m, 64 if d <= 64 else 128)
        assert wide.dtype == torch.float32
        assert flags.numel() == PROCESSORS * config.ROOM
        assert flags.dtype == torch.int32
        assert not flags.any()


@pytest.mark.parametrize(("rows", "places"), [(128, 1), (129, PROCESSORS * config.ROOM)])
def test_one_tile_of_keys_needs_no_ring(rows: int, places: int, launch: Any) -> None:
    for case in (dense_case(300, rows), packed_case((200, 100), (rows - 20, 20))):
        problem, x = make(case)
        c = config.default(problem, "bwd")
        wide, flags = launch.dq_buffers(problem, x.q, "ring", c)
        assert (wide.shape[2], flags.numel()) == (places * c.block_m, places)
        _, of_keys = launch.backward_launch(problem, c, "ring", False, launch.Listed())
        assert of_keys is None or of_keys.tiling.flags == (places if places > 1 else 0)  # that are made zero with it


def test_sums_in_memory_begin_at_zero(launch: Any) -> None:
    problem, x = make(LONG)
    wide, flags = launch.dq_buffers(problem, x.q, "add", config.default(problem, "bwd"))
    assert (wide.shape, wide.dtype, wide.stride()) == (x.q.shape, torch.float32, torch.empty_like(x.q).stride())
    assert not wide.any()
    assert not flags[0]  # counts items


@pytest.mark.parametrize("layout", ["heads", "rows", "qkv", "one row", "one head"])
def test_sums_by_turns_have_the_rows_of_dq(layout: str, launch: Any) -> None:
    """One number of a row does for both."""
    dq = {
        "heads": torch.empty(3, 2, 70, 8),
        "rows": torch.empty(3, 70, 2, 8).transpose(1, 2),
        "qkv": torch.empty(3, 70, 3, 2, 8)[:, :, 0].transpose(1, 2),
        "one row": torch.empty(3, 2, 1, 8),
        "one head": torch.empty(3, 70, 3, 1, 8)[:, :, 1].transpose(1, 2),
    }[layout]
    sums = launch.empty_sums(dq)
    assert launch.batch_rows(sums) == launch.batch_rows(dq)
    places = {tuple(at) for at in torch.ones_like(dq, dtype=torch.bool).nonzero().tolist()}
    steps = sums.stride()
    assert len({sum(i * n for i, n in zip(at, steps, strict=True)) for at in places}) == dq.numel(), "rows overlap"


@pytest.mark.parametrize("mode", ["ring", "turns", "add", "none"])
def test_only_programs_that_wait_for_each_other_must_run_together(
    mode: str, launch: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from aot import Recorder
    from gdpa.backends.hopper import binding

    found: list[Any] = []
    monkeypatch.setattr(binding, "backward_kernel", Recorder(None, found))
    problem, x = make(dense_case(300, 300))
    gradients = [torch.empty_like(t) for t in (x.q, x.q, x.k, x.v)]
    launch.launch_backward(problem, x, *gradients, None, mode, config.default(problem, "bwd"), launch.Listed(1))
    ((_, _, kwargs),) = found
    assert kwargs["launch_cooperative_grid"] == (mode == "ring")
    assert mode == kwargs["T"].DQ


def elsewhere(activations: tuple[Any, ...], heads_k: int = 4, **changes: Any) -> list[tuple[str, str]]:
    """What gdpa.explain says of the backward."""
    case = dense("heads", 2, 30, 30, heads=4, heads_k=heads_k)
    problem = problem_of(case, operands(case, make_inputs(case, bf16)), "silu")
    problem = replace(problem, activations=tuple(resolve_one(f, n) for f, n in activations), **changes)
    return HopperBackend().backward_elsewhere(problem)


def test_what_triton_does_of_a_backward_is_said() -> None:
    silu, scaled, shifted = ("silu", 0), (lambda s, a: torch.tanh(a * s), 1), (lambda s, a: torch.relu(s - a), 1)
    assert elsewhere((silu,)) == elsewhere((scaled,)) == elsewhere((shifted,), norms=(SUM,)) == []
    ((_, reason),) = elsewhere((scaled,), norms=(SUM,))
    assert reason == "there are no registers for row sums and params of so long a function"
    ((_, reason),) = elsewhere(((lambda s, a: (s * a).log(), 1),))
    assert reason == "a function with params may be infinite or undefined at 0"
    assert "by the triton" not in gdpa.explain(
        *torch.empty(3, 1, 2, 3, 8).unbind(), "silu"
    )  # the cpu backend has no such


def test_functions_of_one_key_head_leave_their_backward_to_triton() -> None:
    both = (("silu", 0), ("relu", 0))
    assert elsewhere(both * 2) == elsewhere((both[0],) * 2 + (both[1],) * 2, heads_k=2) == []
    assert [name for name, _ in elsewhere(both * 2, heads_k=2)] == ["silu", "relu"]
    assert [name for name, _ in elsewhere((*both, both[1], both[1]), heads_k=2)] == ["silu", "relu"]


def test_params_beside_positions_are_looked_up_from_the_first_head_on() -> None:
    def sloped(s: Any, slope: Any, *, q_idx: Any, kv_idx: Any) -> Any:
        return torch.nn.functional.silu(s - slope * (q_idx - kv_idx))

    def ramp(s: Any, slope: Any, *, q_idx: Any, kv_idx: Any) -> Any:
        return torch.relu(s - slope * (q_idx - kv_idx))

    both = ((sloped, 1), (ramp, 1))
    assert elsewhere((both[0],)) == elsewhere((both[0],), heads_k=2) == []
    for heads_k in (4, 2):
        assert [name for name, _ in elsewhere((both[0],) * 2 + (both[1],) * 2, heads_k=heads_k)] == ["ramp"]
    assert [name for name, _ in elsewhere(both * 2)] == ["sloped", "ramp"]


def test_long_sequences_add_to_the_gradients_of_params(launch: Any) -> None:
    case = packed_case((30, 5), (30, 5))
    x = operands(case, make_inputs(case, bf16), [torch.ones(1)])
    problem = problem_of(case, x, lambda s, a: torch.tanh(a * s))
    c = config.default(problem, "bwd")
    for listed, mode, left in ((launch.Listed(1, 8, False), "ring", 0.0), (launch.Listed(1, 8, True), "add", 3.0)):
        gradients = [torch.empty_like(t) for t in (x.q, x.q, x.k, x.v)]
        dparams = torch.full((1, 1), 3.0)
        launch.launch_backward(problem, x, *gradients, dparams, mode, c, listed)  # a kernel that adds nothing
        assert dparams.tolist() == [[left]]


# dtype, factor: what dq is multiplied by. In float16 ds has its factor already, down to 2^-3: to 2^-6 with the scale,
# which is in the derivative.
ROUNDED = [(bf16, 2**-3, 2**-3), (bf16, -(2**-10), -(2**-10)), (f16, 2**-3, 1.0), (f16, 2**-10, 2**-7), (f16, 0.0, 1.0)]


@pytest.mark.parametrize(("dtype", "factor", "left"), ROUNDED)
def test_rounding_applies_what_is_left_of_the_factor(
    dtype: torch.dtype, factor: float, left: float, launch: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from aot import Recorder
    from gdpa.backends.hopper import wide_dq

    problem, x = make(dense_case(10, 10), dtype=dtype)
    rounded: list[Any] = []
    monkeypatch.setattr(wide_dq, "round_rows_kernel", Recorder(None, rounded))
    launch.round_dq(problem, x, torch.empty_like(x.q, dtype=torch.float32), torch.empty_like(x.q), factor)
    ((_, args, _),) = rounded
    assert args[-1] == left


@pytest.mark.parametrize(
    ("fn", "n_params", "here"),
    [
        (lambda s: s.abs().log(), 0, True),
        (lambda s, a, b: torch.nn.functional.gelu(a * s + b), 2, True),
        (lambda s, a: s / a, 1, False),  # not finite at 0 if a is 0
    ],
    ids=["none", "finite at zero", "perhaps infinite"],
)
def test_who_adds_up_the_gradients_of_params(
    fn, n_params: int, here: bool, launch: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = dense("", 2, 70, 90, heads=2)
    x = operands(case, make_inputs(case, bf16), [torch.ones(2)] * n_params)
    problem = problem_of(case, x, fn)
    gradients = [torch.empty_like(t) if t is not None else None for t in (x.q, x.q, x.k, x.v, x.params)]
    calls = []
    monkeypatch.setattr(launch, "launch_backward", lambda *args: calls.append("here"))
    monkeypatch.setattr(launch.portable, "backward", lambda *args, dtables, sums: calls.append(args))
    launch.backward(problem, x, *gradients)
    assert calls == (["here"] if here else [(problem, x, *gradients)])


# ---- heads as queries ------------------------------------------------------------------------------------------------
def grouped(rows: int, contiguous: bool = True, keys: int = 8192, **more: Any) -> tuple[Problem, Operands, Tensor]:
    """Four query heads for each of two key heads, and an output."""
    q, out = (base(16, 8, rows, 128) if contiguous else base(16, rows, 8, 128).transpose(1, 2) for _ in range(2))
    k = torch.empty(16, 2, keys, 128, dtype=bf16, device="meta").expand(16, -1, -1, -1)
    x = Operands(q, k, k, **more)
    return make_problem(x, (resolve_one("silu", 0),), 0.1, 1.0, Band()), x, out


@pytest.mark.parametrize(("rows", "contiguous"), [(1, True), (1, False), (16, True)])
def test_few_queries_of_heads_that_share_keys_become_one_head(rows: int, contiguous: bool) -> None:
    from gdpa.backends.hopper.folding import fold

    problem, x, out = grouped(rows, contiguous)
    sums = torch.empty(16, 8, rows)
    folded, y, o, row_sums = fold(problem, x, out, sums)
    assert (folded.heads_q, folded.rows_q, folded.group) == (2, 4 * rows, 1)
    assert row_sums is not None
    for t, view in ((x.q, y.q), (out, o), (sums[..., None], row_sums[..., None])):
        t.copy_(torch.arange(t.numel()).view(t.shape) % 251)
        assert torch.equal(view, t.reshape(16, 2, 4 * rows, -1))
        assert view.data_ptr() == t.data_ptr()


def test_heads_that_stay_heads() -> None:
    """Rows that are no view, too many of them, keys that are few, and what depends on heads or queries."""
    from gdpa.backends.hopper.folding import fold

    sink = torch.zeros(8)
    for problem, x, out in (grouped(2, contiguous=False), grouped(65), grouped(1, keys=100), grouped(1, sink=sink)):
        assert fold(problem, x, out, None) == (problem, x, out, None)
    problem, x, out = grouped(1)
    for other in (replace(problem, band=Band(None, -1)), replace(problem, used_q=True)):
        assert fold(other, x, out, None)[0] is other
    assert fold(problem, x, out, torch.empty(16, 16, 1)[:, ::2])[0] is problem
    assert fold(replace(problem, band=Band(None, 0)), x, out, None)[0].band == Band()  # the last query sees all keys
