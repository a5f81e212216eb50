"""`gdpa fuzz`: draws what it should, agrees with the reference, and finds what is planted."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
import torch
from click.testing import CliRunner

from gdpa.backends import interpreting
from gdpa.backends.cpu import CpuBackend
from gdpa.cli import main
from gdpa.exactness import results
from gdpa.functions.builtin import BUILTINS
from gdpa.fuzz import draw, features, masks, report, run
from gdpa.fuzz.draw import DTYPES, GRAD_STYLES, LAYOUTS, STYLES, SUMS, TABLE_DTYPES
from gdpa.fuzz.functions import PLACED
from gdpa.fuzz.tensors import make_tensors
from gdpa.testing import cases
from processes import exit_of
from support import FULL

SPACES = {"gpu": draw.GPU, "cpu": draw.CPU, "interpreter": draw.INTERPRETER}
CPU = torch.device("cpu")
TARGET = run.Target(CPU, "cpu")
spaces = pytest.mark.parametrize("space", SPACES.values(), ids=SPACES.keys())


# ---- what is drawn ---------------------------------------------------------------------------------------------------
@spaces
def test_a_seed_gives_one_call(space):
    first = [draw.draw(seed, space) for seed in range(50)]
    assert first[::-1] == [draw.draw(seed, space) for seed in reversed(range(50))]
    assert len({call.case for call in first}) > 40


def test_a_seed_gives_one_set_of_tensors():
    for seed in range(20):
        call = draw.draw(seed, draw.CPU)
        torch.rand(3)  # the global generator has no part in it
        a, b = (make_tensors(call, CPU) for _ in range(2))
        assert a.sink == b.sink if isinstance(a.sink, float) else torch.equal(a.sink, b.sink)
        first, second = ((*x.x.leaves, x.do, *x.params, *x.tables, *x.mask_tables, *x.x.used.values()) for x in (a, b))
        for t, u in zip(first, second, strict=True):
            assert torch.equal(t.nan_to_num(nan=7), u.nan_to_num(nan=7))  # what no pair reads of a table
            assert t.stride() == u.stride()


@spaces
def test_drawn_calls_are_valid(space):
    for seed in range(300):
        call = draw.draw(seed, space)
        case, c = call.case, call.config
        assert len(case.len_q) == len(case.len_k) <= space.most_seqs
        assert case.packed_q or (len(set(case.rooms_q)) == 1 and not c.used[0] and not case.spare[0])
        assert case.packed_k or (len(set(case.rooms_k)) == 1 and not case.spare[1])
        assert case.varlen or not any(c.used)
        assert c.dtype in space.dtypes
        for used, lengths, rooms in zip(c.used, (case.len_q, case.len_k), (case.rooms_q, case.rooms_k), strict=True):
            assert all(n <= room if used else n == room for n, room in zip(lengths, rooms, strict=True))
        pairs = sum(q * k for q, k in zip(case.len_q, case.len_k, strict=True))
        rows = max((*case.len_q, *case.len_k), default=0) * max(len(case.len_q), 1)  # a total is rounded up to 16
        assert pairs * case.heads * (c.d + c.dv) / 2 <= space.work + 32 * rows * case.heads * (c.d + c.dv)
        for hint, lengths in ((call.max_q, case.len_q), (call.max_k, case.len_k)):
            assert hint is None or hint >= max(lengths, default=0)
        if call.poison is not None:
            assert call.poison[0] < len(case.len_q)


def test_five_hundred_seeds_cover_everything():
    found: dict[str, Counter[str]] = {}
    for seed in range(500):
        for group, value in features.features(draw.draw(seed, draw.CPU)):
            found.setdefault(group, Counter())[value] += 1
    expected = {
        "layout": set(LAYOUTS),
        "dtype": set(DTYPES),
        "D, Dv": {"64", "128", "96", "192", "256", "24", "40", "64/128", "128/64"},
        "heads": {"equal", "GQA", "MQA"},
        "function": {fn.__name__ for fn in BUILTINS}
        | {*PLACED, "softmax", "softmax|silu|sigmoid", "prelu", "nan_at_zero", "log_of_size", "gelu|sigmoid"},
        "has lengths": {"0", "1", "64 m - 1, 0, + 1", "all empty", "no pair"},
        "lengths": {"giant", "edges", "tails", "short", "empty"},
        "mask": {"none", *masks.MENU},
        "places": {"none", "positions", "tables", "learned tables"},
        "row sums": {
            "none",
            "softmax, sink: none",
            "softmax, sink: number",
            "softmax, sink: per head",
            "sum, sink: none",
            "sum, sink: number",
            "abs, sink: number",
            "abs, sink: scalar tensor",
            "abs, sink: per head",
            "list, sink: none",
            "list, sink: number",
            "list, sink: per head",
        },
        "weights_sum": set(SUMS),
        "float tables": set(TABLE_DTYPES),
        "unused rows": {"none", "seqused_q", "seqused_k", "q after the last", "k after the last"},
        "band": {"none", "causal", "one-sided", "two-sided", "diagonal", "wider than everything"},
        "memory": {*STYLES, "fused", "aligned", "unaligned"},
        "do": set(GRAD_STYLES),
        "offsets": {"int32", "int64"},
        "max_seqlen": {"given", "not given"},
        "params": {"per head", "scalar"},
        "scores": {"centred", "near", "far"},
        "mean of v": {"0", "1"},
        "mode": {"deterministic", "any order"},
        "also": {"nan in a neighbour", "inf in a neighbour", "run twice"},
        "scale": {"default", "given", "zero"},
        "out_scale": {"1", "given", "zero"},
    }
    for group, values in expected.items():
        assert values <= set(found[group]), f"{group}: never drawn: {values - set(found[group])}"


def test_a_session_on_a_gpu_compiles_for_a_handful_of_configurations():
    session = draw.GPU.session
    configs = {draw.draw(seed, draw.GPU).config for seed in range(3 * session, 4 * session)}
    assert 3 <= len(configs) <= draw.GPU.configs


# ---- what it is compared with ----------------------------------------------------------------------------------------
def widened(given):
    """In float64, if it is a float tensor."""
    floating = isinstance(given, torch.Tensor) and given.is_floating_point()
    return given.detach().double().requires_grad_(given.requires_grad) if floating else given


def test_exact_results_are_those_of_the_reference():
    """The padded batches of the fuzzer and the loop of reference.py share no code."""
    for seed in range(80 if FULL else 40):
        call = draw.draw(seed, draw.INTERPRETER)
        x = make_tensors(call, CPU)
        wide = replace(
            x, x=x.x.to(torch.float64), do=x.do.double(), params=tuple(map(widened, x.params)),
            tables=tuple(map(widened, x.tables)), sink=widened(x.sink), dsums=widened(x.dsums),
        )  # fmt: skip
        truth = results.exact(call.formula, wide).values
        settings = run._settings(call, wide, run.Target(CPU, "reference"))
        expected = results.ours(call.formula, wide, call.f.activation(call.case.heads), **settings)
        assert truth.keys() == expected.keys()
        for name, want in expected.items():
            torch.testing.assert_close(truth[name], want.double(), rtol=1e-10, atol=1e-10, msg=f"{name} of seed {seed}")


# ---- what it finds ---------------------------------------------------------------------------------------------------
def fuzz_command(*arguments: str):
    return CliRunner().invoke(main, ["fuzz", "--device", "cpu", *arguments], catch_exceptions=False)


@pytest.mark.parametrize(
    "wrong",
    ["--calls 0", "--calls -3", "--minutes 0", "--minutes nan", "--limit 0", "--only-seed 3 --calls 5",
     f"--seed {2**63}", f"--only-seed {2**64}", f"--only-seed {-(2**63) - 1}"],
)  # fmt: skip
def test_numbers_that_have_no_meaning(wrong):
    result = fuzz_command(*wrong.split())
    assert result.exit_code == 2, result.output
    assert wrong.split()[-2] in result.output


def test_nothing_is_wrong_with_the_cpu_backend():
    calls = "100" if FULL else "30"
    result = fuzz_command("--backend", "cpu", "--calls", calls, "--seed", "7000")
    assert result.exit_code == 0, result.output
    for word in (f"{calls} calls", "nothing found", "shared-packed-keys", "bfloat16", "worst error"):
        assert word in result.output


@pytest.mark.triton
def test_nothing_is_wrong_with_the_triton_backend():
    """On a GPU, or a few tiny calls under the interpreter."""
    device = "cpu" if interpreting() else "cuda"
    calls = 3 if interpreting() and not FULL else 6
    found = run.fuzz(run.Plan(run.Target(torch.device(device), "triton"), 7000, None, calls=calls, keep_going=True))
    assert not found.failures, report.describe_failure(found.failures[0], run.Target(CPU, "triton"))
    assert found.coverage["backend"] == {"triton": calls}


def _plant(monkeypatch: pytest.MonkeyPatch, name: str, change) -> None:
    """Let ``change(problem, x, outputs)`` follow the CPU backend's forward or backward."""
    right = getattr(CpuBackend, name)

    def wrong(self, problem, x, *tensors, **more):
        right(self, problem, x, *tensors, **more)
        change(problem, x, tensors)

    monkeypatch.setattr(CpuBackend, name, wrong)


def wrong_element(problem, x, outputs):
    """One element of the last row."""
    if outputs[0].numel():
        outputs[0][..., -1, -1] += 1.0


def unwritten_row(problem, x, outputs):
    """As if the last row of dk had been left as it was allocated."""
    if outputs[2].numel():
        outputs[2][:, :, -1:] = torch.empty_like(outputs[2][:, :, -1:]).fill_(torch.nan)


def leaking_inf(problem, x, outputs):
    """Nothing, unless there is an inf in any sequence. (Rows of no sequence hold NaN.)"""
    outputs[0].add_(0 * x.v.nan_to_num(nan=0.0, posinf=torch.inf).sum())


def small_factor(problem, x, outputs):
    """dq too large by 3 %."""
    outputs[1].mul_(1.03)


def rounded_again(problem, x, outputs):
    """Two more roundings of a 16-bit output: no element of it is far off."""
    if problem.dtype != torch.float32:
        outputs[0].copy_(outputs[0] * 1.3 / 1.3)


def restless(problem, x, outputs):
    """The last bit of the output changes from run to run."""
    restless.runs += 1
    outputs[0].mul_(1 + restless.runs * 2 * torch.finfo(problem.dtype).eps)


restless.runs = 0


def crashing(problem, x, outputs):
    raise RuntimeError("an illegal memory access")


FLAWS = [
    ("forward", wrong_element, "out: sequence", "more than"),
    ("backward", unwritten_row, "dk: sequence", "nan instead of"),
    ("forward", leaking_inf, "out: sequence", "was filled with NaN or inf"),
    ("backward", small_factor, "dq: ", "PyTorch"),
    ("forward", rounded_again, "out: ", "times the definition's"),
    ("forward", restless, "out: ", "a second run gave"),
    ("forward", crashing, "crash: ", "an illegal memory access"),
]


@pytest.mark.parametrize(("method", "flaw", "where", "what"), FLAWS, ids=[flaw.__name__ for _, flaw, _, _ in FLAWS])
def test_a_planted_flaw_is_found_and_can_be_repeated(method, flaw, where, what, monkeypatch):
    _plant(monkeypatch, method, flaw)
    result = fuzz_command("--backend", "cpu", "--calls", "60", "--seed", "100")
    assert result.exit_code == 1, result.output
    for word in (where, what, "FAILED on cpu", "len_q", "memory:"):
        assert word in result.output
    repeat = next(line for line in result.output.splitlines() if line.startswith("reproduce: "))
    assert " --backend cpu" in repeat
    again = CliRunner().invoke(main, repeat.split("gdpa ")[1].split(), catch_exceptions=False)
    assert again.exit_code == 1
    assert what in again.output
    monkeypatch.undo()
    fine = CliRunner().invoke(main, repeat.split("gdpa ")[1].split(), catch_exceptions=False)
    assert fine.exit_code == 0, fine.output


def test_a_short_sequence_beside_a_long_one_is_not_overlooked(monkeypatch):
    """Its error is far below the largest value of the whole tensor."""
    call = draw.draw(0, draw.CPU)
    config = replace(
        call.config, function="identity", dtype="bfloat16", d=64, dv=64, heads_k=1, group=1, layout="packed",
        causal=False, window=None, styles=("contiguous",) * 3, grad_style="contiguous", deterministic=False, mask=None,
        normalize=None, sink="none", sums="not returned", used=(False, False),
    )  # fmt: skip
    case = cases.Case("packed", (600, 1), (600, 1), heads=1, heads_k=1, packed_q=True, packed_k=True)
    call = replace(call, config=config, case=case, scale=None, out_scale=1.0, max_q=None, max_k=None, poison=None)
    assert not run.run_call(call, TARGET).findings

    def change(problem, x, outputs):
        outputs[0][:, :, -1] += 0.5

    _plant(monkeypatch, "forward", change)
    (finding,) = run.run_call(call, TARGET).findings
    assert finding.output == "out"
    assert finding.where.startswith("sequence 1, head 0, row 0 of 1")
    assert "roundings explain" in finding.what


def test_keep_going_collects_failures(monkeypatch):
    _plant(monkeypatch, "forward", wrong_element)
    found = run.fuzz(run.Plan(TARGET, seed=100, minutes=None, calls=8, keep_going=True))
    assert found.calls == 8
    assert len(found.failures) > 3


def test_what_a_backend_refuses_is_counted_not_failed():
    result = fuzz_command("--backend", "triton", "--calls", "3", "--seed", "0", "--dtype", "bfloat16")
    assert result.exit_code == 1
    assert "no call could run" in result.output
    assert "not run" in result.output


HANGS = {
    # A kernel that never ends: the thread waits without Python's lock, so the watchdog can describe the call.
    "waiting": ("time.sleep(600)", run.HANG_STATUS, "HANG: no result after 1 s"),
    # C code that keeps the lock: what is left is a traceback, which names the command.
    "locked": ("sum(itertools.repeat(0))", 1, "Timeout"),
}


@pytest.mark.parametrize(("hang", "status", "words"), HANGS.values(), ids=HANGS.keys())
def test_a_hang_ends_the_process_with_the_command_that_repeats_it(hang, status, words, tmp_path):
    drawn = draw.draw(6, run.Target(CPU, "cpu", ("float32",)).space).config
    assert (drawn.function, drawn.mask, drawn.normalize) == ("softplus", None, None)
    code = f"""
import itertools, time
import gdpa, torch
from gdpa.backends.cpu import CpuBackend
from gdpa.cli import main
from gdpa.fuzz import run
run.GRACE_S = 1.0
gdpa.attention(*[torch.zeros(1, 1, 1, 8)] * 3, "softplus")  # traced before the clock runs
CpuBackend.forward = lambda *args: {hang}
main(["fuzz", "--device", "cpu", "--backend", "cpu", "--limit", "1", "--seed", "6", "--dtype", "float32"])
"""
    left = exit_of(code, tmp_path / "stderr")
    told = (tmp_path / "stderr").read_text()
    assert left == status, told
    assert words in told
    assert "gdpa fuzz --only-seed 6 --device cpu --backend cpu --dtype float32" in told


@pytest.mark.parametrize("seed", [12, 2**63, -(2**63)], ids=("12", "beyond the first seeds", "the lowest"))
def test_one_seed_is_described(seed):
    """Any that a run may have come to: one that begins below 2**63 goes on beyond."""
    result = fuzz_command("--backend", "cpu", "--only-seed", str(seed))
    assert result.exit_code == 0, result.output
    assert report.describe(draw.draw(seed, run.Target(CPU, "cpu").space)) in result.output


def test_settings_are_restored():
    before = torch.are_deterministic_algorithms_enabled()
    run.fuzz(run.Plan(TARGET, seed=0, minutes=None, calls=5))
    assert torch.are_deterministic_algorithms_enabled() == before
