"""Each model on jagged batches: equal to sample by sample, on every layout of features, and as modules should be."""

from __future__ import annotations

import copy
import io
from collections.abc import Mapping
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from gdpa.data import PackedEvents, SyntheticLog, batches, collate
from gdpa.models import MODELS as CLASSES
from gdpa.models import BagFeatures, Features, build
from models.cases import FEATURES, LENGTHS, MODELS, PAIRS, batch, made, outputs, samples
from support import FULL

VARIANTS = [model for model in MODELS if not model.endswith("-small")]
# One of each kind, and those with parameters that the others do not have.
OF_OTHER_STATE = [m for m in VARIANTS if FULL or m in CLASSES or m in ("interformer-params", "kunlun-sizes")]


@pytest.mark.parametrize(("model", "layout"), PAIRS)
def test_a_batch_is_its_samples_one_by_one(model: str, layout: str) -> None:
    m = made(model, layout)
    got = outputs(m, [batch(layout)])
    want = outputs(m, [collate([s]) for s in samples(FEATURES[layout])])
    assert got[0].shape == (len(LENGTHS),)
    assert (got[0].std() > 1e-3) == ((model, layout) != ("dlrm", "nothing"))
    torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize(("model", "layout"), PAIRS)
def test_no_history_at_all(model: str, layout: str) -> None:
    m = made(model, layout)
    got = m(batch(layout, (0, 0, 0)))
    assert got.shape == (3,)
    assert got.isfinite().all()
    got.sum().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in m.parameters())


@pytest.mark.parametrize("model", VARIANTS)
def test_only_sequence_models_read_the_history(model: str) -> None:
    m, one, other = made(model), batch(), batch()
    other.sequences["clicks"].ids.copy_((one.sequences["clicks"].ids + 1) % 3)
    assert torch.equal(m(one), m(other)) == (model == "dlrm")


def test_one_way_the_sequence_knows_nothing_of_the_context() -> None:
    """The rows that leave a layer are the same whatever the context is; both ways they are not."""
    for model, same in (("interformer-one-way", True), ("interformer", False)):
        m, rows = made(model), []
        layer = m.sequence[-1]  # type: ignore[index]
        layer.register_forward_hook(lambda _m, _in, out, rows=rows: rows.append(out[0].values))
        one, other = batch(), batch(seed=0)
        other.sparse.copy_((other.sparse + 1) % 5)
        other.dense.neg_()
        assert not torch.equal(m(one), m(other))
        assert torch.equal(rows[0], rows[1]) == same


@pytest.mark.parametrize("model", OF_OTHER_STATE)
def test_state_and_copies(model: str) -> None:
    m, b = made(model, "two"), batch("two")
    file = io.BytesIO()
    torch.save(m.state_dict(), file)
    file.seek(0)
    name, options = MODELS[model]
    other = build(name, FEATURES["two"], dtype=torch.float64, **options)
    assert not torch.equal(other(b), m(b))
    other.load_state_dict(torch.load(file))
    assert torch.equal(other(b), m(b))
    assert torch.equal(copy.deepcopy(m)(b), m(b))


@pytest.mark.parametrize("model", OF_OTHER_STATE)
def test_reset_starts_anew_as_built(model: str) -> None:
    name, options = MODELS[model]
    torch.manual_seed(3)
    meta = build(name, FEATURES["two"], device="meta", **options).to_empty(device="cpu")
    with torch.no_grad():
        for p in meta.parameters():
            p.fill_(float("nan"))
    meta.reset_parameters()
    fresh = build(name, FEATURES["two"], **options)
    assert meta.state_dict().keys() == fresh.state_dict().keys()
    for key, value in meta.state_dict().items():
        want = fresh.state_dict()[key]
        assert value.isfinite().all(), key
        torch.testing.assert_close(value.std(correction=0), want.std(correction=0), rtol=0.5, atol=0.1, msg=key)
        assert (value.std(correction=0) == 0) == (want.std(correction=0) == 0), key


@pytest.mark.parametrize("model", VARIANTS)
def test_bf16_autocast_and_bf16(model: str) -> None:
    m, b = made(model, dtype=torch.float32), batch()
    want = m(b)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        got = m(b)
    got.float().sum().backward()
    torch.testing.assert_close(got.float(), want, rtol=0.1, atol=0.15)
    assert m.bfloat16()(b).dtype == torch.bfloat16


@pytest.mark.parametrize("name", CLASSES)
def test_training_lowers_the_loss(name: str) -> None:
    log = SyntheticLog(seed=1, longest=8, items=20)
    b = next(batches(log, 64))
    torch.manual_seed(0)
    m = build(name, Features.of(log), dim=16, hidden=(16,))
    optimizer = torch.optim.Adam(m.parameters(), lr=0.01)
    losses = []
    for _ in range(12):
        loss = F.binary_cross_entropy_with_logits(m(b), b.labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0] - 0.2


def test_ids_outside_the_table() -> None:
    m, b = made("interformer"), batch()
    b.sequences["clicks"].ids[2, 1] = 99
    with pytest.raises(IndexError, match=r"vocabulary 'category' has 5 ids, 0 to 4; the batch has ids from 0 to 99"):
        m(b)
    m, b = made("dlrm"), batch()
    b.sparse[0, 0] = -1
    with pytest.raises(IndexError, match="vocabulary 'item' has 30 ids"):
        m(b)


def test_a_nan_stays_in_its_sample() -> None:
    m, b = made("kunlun"), batch()
    want = m(b)
    b.dense[2, 0] = float("nan")
    got = m(b)
    assert got[2].isnan()
    others = [0, 1, 3, 4, 5, 6]
    assert torch.equal(got[others], want[others])


@pytest.mark.parametrize("model", ["dlrm", "din", "transformer-small", "hstu", "interformer-small", "kunlun-small"])
def test_rows_of_no_sequence_change_nothing(model: str) -> None:
    features = replace(FEATURES["two"], bags=(BagFeatures("tags", "item"),))
    m = build(MODELS[model][0], features, **MODELS[model][1]).eval()
    whole = replace(batch("two"), bags={"tags": batch("two").sequences["views"]})
    spare = replace(whole, sequences=_longer(whole.sequences), bags=_longer(whole.bags))
    results = []
    for one in (whole, spare):
        m.zero_grad()
        logits = m(one)
        logits.sum().backward()
        results.append([logits, *(p.grad for p in m.parameters() if p.grad is not None)])
    torch.testing.assert_close(results[1], results[0])


def _longer(jagged: Mapping[str, PackedEvents]) -> dict[str, PackedEvents]:
    """With three more rows, which the offsets leave out: a batch of fixed capacity."""
    return {
        name: replace(e, ids=torch.cat([e.ids, e.ids[:3]]), values=torch.cat([e.values, e.values[:3] + 7]))
        for name, e in jagged.items()
    }


def test_a_batch_of_other_columns_is_refused() -> None:
    m = made("interformer")
    with pytest.raises(ValueError, match=r"dense must have 2 columns.*got shape \(7, 0\)"):
        m(batch("no-dense"))
    with pytest.raises(ValueError, match=r"the batch has no sequence 'views'; it has \['clicks'\]"):
        made("interformer", "two")(batch())
    with pytest.raises(ValueError, match=r"sparse must have 3 columns"):
        m(batch("no-sparse"))
