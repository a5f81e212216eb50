"""What `gdpa fuzz` draws of masks, functions of positions and row sums: every one of them passes, and flaws do not."""

from __future__ import annotations

from dataclasses import replace

import pytest

from fuzz.small import CALL, CASES, CONFIG, CPU, PACKED, SAME, outcome
from gdpa import masks as library
from gdpa.backends.cpu import CpuBackend, places
from gdpa.fuzz import draw, features, masks
from gdpa.fuzz.functions import MENU, PLACED
from gdpa.fuzz.tensors import make_tensors
from support import FULL


@pytest.mark.parametrize(("i", "mask"), [*enumerate(masks.MENU)])
def test_masks(i, mask):
    for case in CASES if FULL else (CASES[i % 4], CASES[(i + 1) % 4]):
        assert not outcome(case, mask=mask, aligned=i % 3 > 0).findings


@pytest.mark.parametrize(("i", "function"), [*enumerate(PLACED)])
def test_functions_of_positions(i, function):
    for case in CASES if FULL else (CASES[i % 4],):
        found = outcome(case, function=function, mask="prefix", dtype=draw.DTYPES[i % 3], aligned=i % 2 == 0)
        assert not found.findings
        assert (("allowed", "dtables") in found.ratios) == (PLACED[function].tables is not None)


SUMS = [
    ("softmax", "softmax", "none"), ("softmax", "softmax", "per head"), ("t5", "sum", "scalar tensor"),
    ("relative", "abs", "number"), ("scaled_sigmoid", "sum", "per head"), ("relu|softplus|silu", "abs", "per head"),
]  # fmt: skip


@pytest.mark.parametrize(("function", "normalize", "sink"), SUMS)
def test_row_sums(function, normalize, sink):
    for case, dtype in zip(CASES[: 4 if FULL else 2], ("float32", "bfloat16", "float16", "float32"), strict=False):
        found = outcome(case, function=function, normalize=normalize, sink=sink, dtype=dtype, mask="few blocks")
        assert not found.findings
        assert (("allowed", "dsink") in found.ratios) == (sink in ("per head", "scalar tensor"))


def test_half_of_the_configurations_have_none_of_them():
    calls = [draw.draw(seed, draw.CPU) for seed in range(400)]
    plain = [c for c in calls if c.config.function in MENU and c.config.mask is None and c.config.normalize is None]
    assert 0.4 < len(plain) / len(calls) < 0.6
    for call in calls:  # what has no good sum is not divided by one
        assert call.config.normalize != "sum" or call.f.positive
        assert call.config.normalize != "abs" or call.f.positive or call.config.sink != "none"


def test_what_no_pair_reads_of_a_table_is_nan():
    config = replace(CONFIG, function="relative", causal=True)
    (bias,) = make_tensors(replace(CALL, case=replace(SAME, causal=True), config=config), CPU).tables
    assert bias.shape == (2, 100)  # distances 0 to 49, and those from -50 to -1, which causal queries do not see
    assert bias.isnan().tolist() == [[False] * 50 + [True] * 50] * 2


def test_tables_that_learn_nothing():
    """Kernels are other ones then."""
    found = outcome(PACKED, function="relative", learned=False)
    assert not found.findings
    assert ("allowed", "dtables") not in found.ratios


def test_features_are_counted():
    call = replace(CALL, config=replace(CONFIG, function="t5", mask="hstu", normalize="sum", sink="per head"))
    found = dict(features.features(call))
    assert (found["mask"], found["places"]) == ("hstu", "learned tables")
    assert found["row sums"] == "sum, sink: per head"


# ---- planted ---------------------------------------------------------------------------------------------------------
def after_backward(monkeypatch, change):
    """Let ``change(dtables, sums)`` follow the CPU backend's backward."""
    right = CpuBackend.backward

    def wrong(*args, dtables=(), sums=None):
        right(*args, dtables=dtables, sums=sums)
        change(dtables, sums)

    monkeypatch.setattr(CpuBackend, "backward", wrong)


def at_other_places(monkeypatch, **other):
    """Let positions be other ones: each of a name and a function of all."""
    right = places._positions

    def wrong(*args):
        at = right(*args)
        return {**at, **{name: fn(at) for name, fn in other.items()}}

    monkeypatch.setattr(places, "_positions", wrong)


def a_mask_off_by_one(monkeypatch):
    monkeypatch.setattr(library, "_causal", lambda q_idx, kv_idx, q_len, kv_len: kv_idx - q_idx < kv_len - q_len)


def an_entry_without_its_gradient(monkeypatch):
    def change(dtables, sums):
        found = dtables[0].view(-1)
        found[found.abs().argmax()] = 0.0

    after_backward(monkeypatch, change)


def a_gradient_of_what_is_not_read(monkeypatch):
    after_backward(monkeypatch, lambda dtables, sums: dtables[0].view(-1)[-1:].add_(1e-3))


def a_sink_that_is_ignored(monkeypatch):
    right = CpuBackend.forward
    monkeypatch.setattr(
        CpuBackend, "forward", lambda self, problem, x, *out: right(self, problem, replace(x, sink=None), *out)
    )


def a_sink_without_its_gradient(monkeypatch):
    after_backward(monkeypatch, lambda dtables, sums: sums.dsink.zero_())


def rows_counted_from_each_sequence(monkeypatch):
    at_other_places(monkeypatch, q_row=lambda at: at["q_idx"] + 0 * at["b"])


def one_head_for_all(monkeypatch):
    at_other_places(monkeypatch, h=lambda at: 0 * at["h"])


def lengths_of_another_sequence(monkeypatch):
    at_other_places(monkeypatch, kv_len=lambda at: at["kv_len"].max() + 0 * at["kv_len"])


FLAWS = [
    (a_mask_off_by_one, {"mask": "prefix"}, "out"),
    (an_entry_without_its_gradient, {"function": "relative"}, "dtables"),
    (an_entry_without_its_gradient, {"function": "t5", "normalize": "sum"}, "dtables"),
    (a_gradient_of_what_is_not_read, {"function": "t5"}, "dtables"),
    (a_sink_that_is_ignored, {"function": "softmax", "normalize": "softmax", "sink": "per head"}, "out"),
    (a_sink_that_is_ignored, {"function": "silu", "normalize": "abs", "sink": "number"}, "out"),
    (a_sink_without_its_gradient, {"function": "sigmoid", "normalize": "sum", "sink": "per head"}, "dsink"),
    (rows_counted_from_each_sequence, {"function": "row_gate"}, "out"),
    (one_head_for_all, {"function": "relative"}, "out"),
    (one_head_for_all, {"mask": "heads"}, "out"),
    (lengths_of_another_sequence, {"function": "last_keys"}, "out"),
]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(("flaw", "changes", "output"), FLAWS)
def test_planted_flaws_are_found(flaw, changes, output, dtype, monkeypatch):
    if dtype == "bfloat16" or FULL:  # what is found without one has other tests
        assert not outcome(PACKED, dtype=dtype, **changes).findings
    flaw(monkeypatch)
    assert output in {finding.output for finding in outcome(PACKED, dtype=dtype, **changes).findings}
