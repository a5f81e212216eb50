"""What `gdpa fuzz` draws of rows that no sequence uses, of row sums that are returned or differ from head to head, and
of tables in 16 bits: calls with them pass, and flaws do not."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from fuzz.small import CALL, CONFIG, CPU, DENSE, PACKED, SHARED, outcome
from gdpa.backends.cpu import CpuBackend
from gdpa.fuzz import draw, features, report
from gdpa.fuzz.tensors import make_tensors
from gdpa.ops import normalized
from gdpa.testing.cases import Case

SLOTS = replace(PACKED, slots_q=(75, 3, 9), slots_k=(37, 9, 44), spare=(5, 3))
DENSE_KEYS = replace(
    SLOTS, name="packed-dense-keys", len_k=(33, 0, 20), slots_k=(33,) * 3, packed_k=False, spare=(2, 0)
)
SHARED_SLOTS = replace(SHARED, slots_k=(3, 50), spare=(0, 1))
SOFTMAX = {"function": "softmax", "normalize": "softmax"}
ABS = {"function": "silu", "normalize": "abs", "sink": "per head"}
LIST = {"function": "sigmoid", "normalize": ("sum", None), "sink": "per head"}
LISTS = [
    LIST, {**LIST, "function": "gaussian", "normalize": ("abs", None, "sum"), "sink": "none"},
    {**LIST, "function": "softmax|silu|sigmoid", "normalize": ("softmax", "abs", None)},
]  # fmt: skip


def found(case: Case, **changes) -> dict[str, str]:
    """What is wrong with which output."""
    return {finding.output: f"{finding.where}: {finding.what}" for finding in outcome(case, **changes).findings}


# ---- nothing is wrong ------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("case", [SLOTS, DENSE_KEYS, SHARED_SLOTS], ids=lambda case: case.name)
def test_rows_of_no_sequence(case, dtype):
    assert not found(case, dtype=dtype)
    assert not found(case, dtype=dtype, function="row_gate", mask="documents", causal=True)
    assert not found(case, dtype=dtype, **ABS, sums="differentiated")


def test_rows_of_no_sequence_hold_nan():
    config = replace(CONFIG, used=(True, True), **SOFTMAX, sums="differentiated")
    x = make_tensors(replace(CALL, case=SLOTS, config=config), CPU)
    unused = [*range(70, 75), 75, 76, 77, *range(87, 92)]
    for t in (x.x.q, x.do, x.dsums):
        assert t.flatten(1).isnan().all(1).nonzero().flatten().tolist() == unused
    assert x.x.cu_q.tolist() == [0, 75, 78, 87]
    assert {name: t.tolist() for name, t in x.x.used.items()} == {"seqused_q": [70, 0, 9], "seqused_k": [37, 5, 40]}


@pytest.mark.parametrize("sums", ["returned", "differentiated"])
@pytest.mark.parametrize("changes", [SOFTMAX, {**SOFTMAX, "sink": "per head"}, ABS, *LISTS])
def test_row_sums_that_are_returned(changes, sums):
    for case, dtype in ((DENSE, "float32"), (SHARED, "float16")):
        got = outcome(case, **changes, sums=sums, dtype=dtype, mask="few blocks")
        assert not got.findings
        assert ("allowed", "sums") in got.ratios


@pytest.mark.parametrize("table_dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("dtype", draw.DTYPES)
def test_tables_in_16_bits(dtype, table_dtype):
    config = replace(CONFIG, function="decaying", dtype=dtype, table_dtype=table_dtype)
    (table,) = make_tensors(replace(CALL, config=config), CPU).tables
    assert table.dtype == getattr(torch, table_dtype)
    assert not found(PACKED, function="decaying", dtype=dtype, table_dtype=table_dtype)


def test_they_are_counted_and_described():
    config = replace(CONFIG, function="t5", normalize=("sum", None), sums="returned", table_dtype="float16")
    call = replace(CALL, case=SLOTS, config=replace(config, used=(True, True)))
    counted = list(features.features(call))
    for feature in (
        ("row sums", "list, sink: none"), ("weights_sum", "returned"), ("float tables", "float16"),
        ("unused rows", "seqused_q"), ("unused rows", "k after the last"),
    ):  # fmt: skip
        assert feature in counted
    for words in ("used of 75 3 9, and 5 rows more", "('sum', None), returned", "float16 tables"):
        assert words in report.describe(call)


# ---- planted ---------------------------------------------------------------------------------------------------------
def change_outputs(monkeypatch, method, change):
    """Let ``change(*outputs)`` follow the CPU backend."""
    right = getattr(CpuBackend, method)

    def wrong(self, problem, x, *tensors, **more):
        right(self, problem, x, *tensors, **more)
        change(*tensors)

    monkeypatch.setattr(CpuBackend, method, wrong)


def a_row_of_no_sequence_is_written(monkeypatch):
    change_outputs(monkeypatch, "backward", lambda do, dq, *more: dq[:, :, 72].fill_(1e-6))


def the_last_rows_are_left_as_they_were(monkeypatch):
    change_outputs(monkeypatch, "forward", lambda out, *sums: out[:, :, -1].fill_(torch.nan))


def slots_are_taken_for_lengths(monkeypatch):
    right = CpuBackend.forward
    monkeypatch.setattr(
        CpuBackend, "forward", lambda self, problem, x, *out: right(self, problem, replace(x, used_k=None), *out)
    )


def sums_that_are_too_small(monkeypatch):
    change_outputs(monkeypatch, "forward", lambda out, sums: sums.mul_(0.99))


def sums_have_no_gradient(monkeypatch):
    right = CpuBackend.backward

    def wrong(*args, sums, **more):
        right(*args, sums=replace(sums, dsums=None), **more)

    monkeypatch.setattr(CpuBackend, "backward", wrong)


def all_heads_are_divided(monkeypatch):
    right = normalized.fill_plain_sums
    monkeypatch.setattr(normalized, "fill_plain_sums", lambda problem, x, sums: (right(problem, x, sums), sums.mul_(2)))


def sums_of_nothing_are_ones(problem, x, sums: Tensor) -> None:
    sums[sums == 0] = 1.0


def rows_of_no_sequence_have_sums(monkeypatch):
    monkeypatch.setattr(normalized, "fill_plain_sums", sums_of_nothing_are_ones)


FLAWS = [
    (a_row_of_no_sequence_is_written, {}, "dq", "row 72, of no sequence"),
    (the_last_rows_are_left_as_they_were, {}, "out", "nan instead of 0"),
    (slots_are_taken_for_lengths, {}, "out", "instead of"),
    (sums_that_are_too_small, {**ABS, "sums": "returned"}, "sums", "more than roundings explain"),
    (sums_have_no_gradient, {**SOFTMAX, "sums": "differentiated"}, "dq", "sequence"),
    (sums_have_no_gradient, {**ABS, "sums": "differentiated"}, "dsink", "entry"),
    (all_heads_are_divided, {**LIST, "sums": "returned"}, "sums", "instead of 1"),
    (rows_of_no_sequence_have_sums, {**ABS, "sums": "returned"}, "sums", "1 instead of 0"),
]


@pytest.mark.parametrize(("flaw", "changes", "output", "words"), FLAWS)
def test_planted_flaws_are_found(flaw, changes, output, words, monkeypatch):
    flaw(monkeypatch)
    assert words in found(SLOTS, **changes)[output]


def test_gradients_of_tables_that_are_rounded_too_coarsely_are_found(monkeypatch):
    right = CpuBackend.backward

    def wrong(*args, dtables=(), **more):
        right(*args, dtables=dtables, **more)
        dtables[0].mul_(1.05)

    monkeypatch.setattr(CpuBackend, "backward", wrong)
    assert "dtables" in found(PACKED, function="decaying", table_dtype="float16")
