"""score_candidates: one reading of a history for many candidates gives what the plain forward gives."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from gdpa import data, models
from gdpa.data import Batch, Inputs, PackedEvents
from gdpa.models import BagFeatures, Features, SequenceFeatures
from gdpa.nn import Jagged, SelfAttention

FEATURES = Features(
    dense=("price",),
    sparse=("item", "page"),
    sequences=(SequenceFeatures("clicks", ("item",), ("age",)), SequenceFeatures("views", ("item", "page"))),
    vocabularies={"item": 50, "page": 7},
)
CASES: list[tuple[str, dict[str, Any]]] = [
    ("transformer", {"dim": 8, "both_ways": False}),  # softmax
    ("transformer", {"dim": 8, "both_ways": False, "activation": "silu", "depth": 3, "rotary": None}),
    ("interformer", {"dim": 8, "both_ways": False, "num_layers": 2}),
    ("kunlun", {"dim": 8, "both_ways": False, "comp_skip": False}),
    ("kunlun", {"dim": 8, "both_ways": False, "activation": "softmax"}),
]
COUNTS = torch.tensor([3, 0, 1, 4])


def draw(counts: Tensor, seed: int = 0) -> Inputs:
    generator = torch.Generator().manual_seed(seed)
    n, users = int(counts.sum()), len(counts)

    def ids(rows: int, *sizes: int) -> Tensor:
        return torch.stack([torch.randint(0, size, (rows,), generator=generator) for size in sizes], 1)

    def events(lengths: list[int], values: int, *sizes: int) -> PackedEvents:
        cu = torch.tensor([0, *lengths]).cumsum(0, dtype=torch.int32)
        drawn = torch.rand(sum(lengths), values, generator=generator)
        return PackedEvents(ids(sum(lengths), *sizes), drawn, cu, max(lengths))

    lengths = [5, 2, 0, 7][:users]
    sequences = {"clicks": events(lengths, 1, 50), "views": events(lengths[::-1], 0, 50, 7)}
    return Inputs(torch.randn(n, 1, generator=generator), ids(n, 50, 7), sequences)


def repeated(inputs: Inputs, counts: Tensor) -> Inputs:
    """Every history as often as it has candidates."""

    def each(events: PackedEvents) -> PackedEvents:
        bounds = list(zip(events.cu_seqlens[:-1].tolist(), events.cu_seqlens[1:].tolist(), strict=True))
        spans = [bound for bound, n in zip(bounds, counts.tolist(), strict=True) for _ in range(n)]
        places = torch.cat([torch.arange(*span) for span in spans])
        cu = torch.tensor([0, *(stop - start for start, stop in spans)]).cumsum(0, dtype=torch.int32)
        return PackedEvents(events.ids[places], events.values[places], cu, events.longest)

    return Inputs(inputs.dense, inputs.sparse, {name: each(e) for name, e in inputs.sequences.items()})


@pytest.mark.parametrize(("name", "options"), CASES)
def test_equal_to_the_plain_forward(name: str, options: dict[str, Any]) -> None:
    torch.manual_seed(1)
    model = models.build(name, FEATURES, dtype=torch.float64, **options)
    with torch.no_grad():
        for parameter in model.parameters():  # whatever starts as zero or one
            parameter.add_(0.1 * torch.randn_like(parameter))
    inputs = draw(COUNTS)
    expected = model(repeated(inputs, COUNTS))
    got = model.score_candidates(inputs, COUNTS)
    torch.testing.assert_close(got, expected, rtol=1e-10, atol=1e-12)
    assert expected.std() > 0.01  # candidates of one user differ too
    assert expected[:3].std() > 1e-4
    for of_each in (torch.autograd.grad(s.sum(), model.parameters(), allow_unused=True) for s in (got, expected)):
        assert any(g is not None and g.abs().sum() > 0 for g in of_each)


@pytest.mark.parametrize("name", ["transformer", "kunlun"])
def test_one_way_does_not_see_the_candidate(name: str) -> None:
    """What is read of the history is the same whoever the candidate is, unlike with both ways."""
    torch.manual_seed(1)
    seen = {}
    for both_ways in (False, True):
        model = models.build(name, FEATURES, dim=8, activation="silu", both_ways=both_ways)
        pool = model.pool if name == "transformer" else model.sequences[0].layers[-1].pool  # type: ignore[index,union-attr]
        pooled = []
        handle = pool.register_forward_hook(lambda m, args, out, held=pooled: held.append(out))
        inputs = draw(torch.tensor([1, 1, 1, 1]))
        for sparse in (inputs.sparse, (inputs.sparse + 1) % 7):
            model(Inputs(inputs.dense, sparse, inputs.sequences))
        handle.remove()
        seen[both_ways] = (pooled[0] - pooled[1]).abs().max()
    assert seen[False] == 0 < seen[True]


def test_reading_is_attention_over_the_other_rows() -> None:
    """Against the layer itself: a single row that is appended and sees all others, but for what it adds itself."""
    torch.manual_seed(0)
    layer = SelfAttention(8, 2, "gelu", qk_norm=True, rotary=50.0, dtype=torch.float64)
    memory = Jagged.from_lengths(torch.randn(7, 8, dtype=torch.float64), torch.tensor([4, 0, 3]))
    x = Jagged.from_lengths(torch.randn(3, 8, dtype=torch.float64), torch.tensor([1, 1, 1]))
    got = layer.read(x, memory).values
    for b, (history, query) in enumerate(zip(memory.unbind(), x.unbind(), strict=True)):
        both = torch.cat([history, query])[None]
        q, k, v = (t[0] for t in _heads(layer, both))
        p = torch.nn.functional.gelu(torch.einsum("hd,lhd->hl", q[-1], k[:-1]) / 2)
        o = torch.einsum("hl,lhd->hd", p, v[:-1]).flatten()
        torch.testing.assert_close(got[b], layer.out(o), rtol=1e-10, atol=1e-12)


def _heads(layer: SelfAttention, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v = layer.qkv(x).unflatten(-1, (3, 2, 4)).unbind(2)
    q, k = layer.q_norm(q), layer.k_norm(k)  # type: ignore[misc]
    places = torch.arange(x.shape[1])
    return layer.rotary(q, places), layer.rotary(k, places), v  # type: ignore[misc]


REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("dlrm", {}, "DLRM cannot read a history once for many candidates: it reads no history"),
    ("din", {}, "each candidate weighs every event anew"),
    ("transformer", {}, "both_ways=False would not let them"),
    ("interformer", {}, "the context informs it"),
    ("kunlun", {}, "the context informs it"),
]


@pytest.mark.parametrize(("name", "options", "words"), REFUSED, ids=[name for name, *_ in REFUSED])
def test_models_that_cannot(name: str, options: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        models.build(name, FEATURES, **options).score_candidates(draw(COUNTS), COUNTS)


def test_refusals() -> None:
    model, inputs = models.build("interformer", FEATURES, both_ways=False), draw(COUNTS)
    with pytest.raises(TypeError, match="counts must be a tensor"):
        model.score_candidates(inputs, [8])  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"counts has 2 users, but sequences\['clicks'\] has 4"):
        model.score_candidates(inputs, torch.tensor([4, 4]))
    with pytest.raises(ValueError, match="add up to the 8 rows of dense and sparse"):
        model.score_candidates(inputs, torch.tensor([3, 0, 1, 5]))
    layer = SelfAttention(8, 2, causal=True)
    x = Jagged.from_lengths(torch.randn(3, 8), torch.tensor([1, 2]))
    with pytest.raises(ValueError, match="read is for layers without causal, window"):
        layer.read(x, x)
    with pytest.raises(ValueError, match="x and memory must have the same number of sequences, got 2 and 1"):
        SelfAttention(8, 2).read(x, Jagged.from_lengths(torch.randn(3, 8), torch.tensor([3])))


def test_bags_and_labels_are_those_of_the_candidates() -> None:
    features = replace(FEATURES, bags=(BagFeatures("genres", "page"),), labels=("click", "like"))
    torch.manual_seed(1)
    model, plain = models.build("interformer", features, both_ways=False, dtype=torch.float64), draw(COUNTS)
    ids = torch.tensor([[3], [1], [6], [0], [2], [4]])
    cu = torch.tensor([0, 2, 2, 3, 3, 4, 5, 5, 6], dtype=torch.int32)
    inputs = replace(plain, bags={"genres": PackedEvents(ids, torch.empty(6, 0), cu, 2)})
    got = model.score_candidates(inputs, COUNTS)
    assert got.shape == (8, 2)
    expected = model(replace(repeated(inputs, COUNTS), bags=inputs.bags))
    torch.testing.assert_close(got, expected, rtol=1e-10, atol=1e-12)
    of_users = PackedEvents(ids, torch.empty(6, 0), torch.tensor([0, 2, 3, 4, 6], dtype=torch.int32), 2)
    with pytest.raises(ValueError, match=r"bags\['genres'\] must have one bag for each of the 8 candidates, but has 4"):
        model.score_candidates(replace(plain, bags={"genres": of_users}), COUNTS)


def test_a_batch_of_samples_is_taken_too() -> None:
    log = data.SyntheticLog(seed=2)
    model = models.build("interformer", Features.of(log), both_ways=False)
    batch: Batch = next(data.batches(log, 4))
    torch.testing.assert_close(model.score_candidates(batch, torch.ones(4, dtype=torch.int64)), model(batch))


def packed(cu: list[int], rows: int) -> PackedEvents:
    return PackedEvents(torch.zeros(rows, 1, dtype=torch.long), torch.zeros(rows, 0), torch.tensor(cu).int(), None)


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ({"sequences": {"views": packed([0, 3], 3)}}, r"sequences\['views'\] has 1, dense has 3"),
        ({"bags": {"tags": packed([0, 1, 3], 3)}}, r"bags\['tags'\] has 2, dense has 3"),
        ({"sparse": torch.zeros(2, 1, dtype=torch.long)}, "sparse has 2, dense has 3"),
        ({"bags": {"tags": packed([0, 2, 1, 3], 3)}}, r"bags\['tags'\].cu_seqlens must not decrease: entry 2 is 1"),
        ({"sequences": {"views": packed([0, 1, 2, 9], 3)}}, r"sequences\['views'\].cu_seqlens must not end after"),
    ],
)
def test_parts_that_disagree_on_the_samples(parts: dict[str, Any], message: str) -> None:
    """DIN reads histories and bags without any attention that would see bad offsets."""
    views, tags = SequenceFeatures("views", ("item",)), BagFeatures("tags", "item")
    model = models.build("din", Features((), ("item",), (views,), {"item": 5}, (tags,)), dim=4)
    whole = packed([0, 1, 3, 3], 3)
    good = Inputs(torch.zeros(3, 0), torch.zeros(3, 1, dtype=torch.long), {"views": whole}, bags={"tags": whole})
    assert model(good).shape == (3,)
    with pytest.raises(ValueError, match=message):
        model(replace(good, **parts))
