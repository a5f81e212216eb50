"""Features of every layout, batches of them, and the models that the tests share."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gdpa.data import Batch, Events, Sample, collate
from gdpa.models import Features, Model, SequenceFeatures, build
from support import FULL

SIZES = {"item": 30, "category": 5, "kind": 3, "page": 7, "unused": 2}
CLICKS = SequenceFeatures("clicks", ("item", "category", "kind"), ("age",))
VIEWS = SequenceFeatures("views", ("item",))
FEATURES = {
    "usual": Features(("a", "b"), ("item", "category", "page"), (CLICKS,), SIZES),
    "two": Features(("a", "b"), ("item", "category", "page"), (CLICKS, VIEWS), SIZES),
    "two-values": Features(("a",), ("item",), (SequenceFeatures("clicks", ("item",), ("price", "age")),), SIZES),
    "no-dense": Features((), ("page", "item"), (VIEWS,), SIZES),
    "no-sparse": Features(("a", "b"), (), (CLICKS,), SIZES),
    "nothing": Features((), (), (SequenceFeatures("clicks", (), ("age",)),), {}),
    "no-sequence": Features(("a",), ("item",), (), SIZES),
}
NEEDS = {
    "din": {"usual", "two", "two-values", "no-dense", "no-sequence"},
    "transformer": set(FEATURES) - {"no-sequence"},
    "hstu": set(FEATURES) - {"no-sequence"},
}
LENGTHS = (5, 0, 3, 1, 12, 0, 7)
leaky = lambda s, slope: torch.where(s > 0, s, slope * s)
SMALL: dict[str, Any] = {"dim": 8, "hidden": (12,)}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "dlrm": ("dlrm", SMALL),
    "din": ("din", SMALL),
    "transformer": ("transformer", {**SMALL, "longest": 4}),
    "hstu": ("hstu", {**SMALL, "longest": 4, "time_buckets": 9, "time_unit": 0.1}),
    "hstu-softmax": ("hstu", {**SMALL, "activation": "softmax", "depth": 1, "num_layers": 1, "max_attn_len": 3}),
    "hstu-small": ("hstu", {**SMALL, "depth": 1, "num_layers": 1}),
    "interformer": ("interformer", {**SMALL, "num_layers": 2, "longest": 4}),
    "interformer-small": ("interformer", {**SMALL, "num_layers": 1}),
    "transformer-small": ("transformer", {**SMALL, "depth": 1, "num_layers": 1}),
    "interformer-one-way": ("interformer", {**SMALL, "both_ways": False, "activation": "silu"}),
    "interformer-softmax": ("interformer", {**SMALL, "activation": "softmax", "num_layers": 1}),
    "interformer-params": (
        "interformer",
        {**SMALL, "activation": leaky, "params": (0.1,), "window": 3, "rotary": None},
    ),
    "interformer-heads": ("interformer", {**SMALL, "activation": ["gelu", "sigmoid"], "recent_tokens": 0}),
    "kunlun": ("kunlun", {**SMALL, "longest": 4, "num_tokens": 5, "fm_rank": 3}),
    "kunlun-small": ("kunlun", {**SMALL, "sequences": {"clicks": {"num_layers": 2}}}),
    "kunlun-sizes": (
        "kunlun",
        {**SMALL, "sequences": {"clicks": {"dim": 12, "num_layers": 2, "window": 2, "tokens": 3}}, "comp_skip": False},
    ),
    "kunlun-softmax": ("kunlun", {**SMALL, "activation": "softmax", "tau": 5.0, "time_scale": None}),
}
# The plain model of each kind on every layout that it can read, variants on one of them (two in the full grid).
PAIRS = [
    (model, layout)
    for model, (name, _) in MODELS.items()
    for layout in FEATURES
    if layout in NEEDS.get(name, FEATURES) and (layout in (("usual", "two") if FULL else ("two",)) or model == name)
    if not model.endswith("-small")
]


def made(model: str, layout: str = "usual", dtype: torch.dtype = torch.float64) -> Model:
    """Away from where it starts, so that every parameter plays a part."""
    torch.manual_seed(1)
    name, options = MODELS[model]
    made = build(name, FEATURES[layout], dtype=dtype, **options)
    with torch.no_grad():
        for p in made.parameters():
            p.add_(torch.randn_like(p), alpha=0.1)
    return made


def samples(features: Features, lengths: Sequence[int] = LENGTHS, seed: int = 0) -> list[Sample]:
    """One per length; the histories of a sample differ in length."""
    rng = np.random.default_rng(seed)

    def ids(vocabularies: Sequence[str], *rows: int) -> np.ndarray:
        columns = [rng.integers(0, SIZES[name], rows) for name in vocabularies]
        return np.stack(columns, axis=-1) if columns else np.zeros((*rows, 0), dtype=np.int64)

    def events(s: SequenceFeatures, length: int) -> Events:
        return Events(ids(s.vocabularies, length), rng.gamma(2.0, 2.0, (length, len(s.values))).astype(np.float32))

    return [
        Sample(
            rng.normal(size=len(features.dense)).astype(np.float32),
            ids(features.sparse),
            {s.name: events(s, n if i == 0 else n * 2 % 5) for i, s in enumerate(features.sequences)},
            float(rng.integers(0, 2)),
            b,
        )
        for b, n in enumerate(lengths)
    ]


def batch(layout: str = "usual", lengths: Sequence[int] = LENGTHS, seed: int = 0) -> Batch:
    return collate(samples(FEATURES[layout], lengths, seed))


def outputs(model: Model, batches: Sequence[Batch]) -> list[Tensor]:
    """Logits of all batches together, and the gradient of each parameter of a sum that tells samples apart."""
    model.zero_grad()
    logits = torch.cat([model(b) for b in batches])
    (logits * torch.arange(1.0, len(logits) + 1, dtype=logits.dtype)).sum().backward()
    grads = [p.grad for p in model.parameters()]
    assert all(g is not None for g in grads), "DDP would wait for these"
    return [logits.detach(), *(g.clone() for g in grads if g is not None)]
