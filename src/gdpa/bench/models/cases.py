"""What the whole-model benchmark trains: a model, and click logs of one distribution of lengths. `gdpa bench --model`.

    MODEL-uniform       histories of U[1, longest] events
    MODEL-lognormal     lognormal, sigma 0.85 (KuaiRand's shape), median longest / 4, cut at longest

MODEL is interformer or kunlun. On a GPU a batch has 1152 samples and a sequence at most 1024 rows, of 4 heads of 128.
InterFormer puts 4 tokens before the events, so its histories have at most 1020: with 1028 rows the padded contenders
would pay for a whole tile more. On a CPU it is 8 samples, 32 rows and 2 heads of 16.

Ids are random, uniform over vocabularies that are small beside production's: tables of 1e9 rows live on many machines
and are updated there; here the step is to be about the model.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor

from gdpa.data import Batch, PackedEvents, lengths
from gdpa.models import Features, Model, SequenceFeatures, build
from gdpa.spec import Loaded

MODELS = ("interformer", "kunlun")
SIGMA = 0.85
CLS_TOKENS = 4
HISTORY = "history"
SEED = 1


@dataclass(frozen=True)
class Scale:
    """How large everything is. ``rows``: of the longest sequence, with the tokens that a model puts before it."""

    batch: int
    rows: int
    dim: int  # of a sequence
    heads: int
    units: int  # of PFFN, in each head
    window: int  # Kunlun's
    seeds: int  # Kunlun's
    tokens: int  # Kunlun's, and pooled ones of InterFormer twice as few
    context: int  # width of Kunlun's tables and context
    hidden: int
    items: int
    sparse: int  # columns of ids beside item and category
    values: int  # numbers of an event; multiples of 8 keep products aligned
    batches: int = 4  # of different lengths, one after another


FULL_SCALE = Scale(
    batch=1152, rows=1024, dim=512, heads=4, units=256, window=100, seeds=256, tokens=32, context=128, hidden=1024,
    items=100_000, sparse=13, values=8,
)  # fmt: skip
CPU_SCALE = Scale(
    batch=8, rows=32, dim=32, heads=2, units=8, window=4, seeds=8, tokens=4, context=16, hidden=32, items=200, sparse=2,
    values=2,
)  # fmt: skip


@dataclass(frozen=True)
class ModelCase:
    """A model on one distribution of lengths."""

    model: str
    lengths: str
    scale: Scale

    @property
    def name(self) -> str:
        return f"{self.model}-{self.lengths}"

    @property
    def before(self) -> int:
        """Rows that the model puts before the events of each sequence."""
        return CLS_TOKENS if self.model == "interformer" else 0

    @property
    def longest(self) -> int:
        """Events of the longest history."""
        return self.scale.rows - self.before

    def draw(self, seed: int) -> tuple[int, ...]:
        """The lengths of one batch."""
        if self.lengths == "uniform":
            return lengths.uniform(self.scale.batch, self.longest, seed)
        return lengths.lognormal(self.scale.batch, self.longest, SIGMA, self.longest / 4, seed)

    def draws(self) -> list[tuple[int, ...]]:
        """The lengths of all batches."""
        return [self.draw(seed) for seed in range(self.scale.batches)]


def names() -> list[str]:
    return [f"{model}-{kind}" for model in MODELS for kind in ("uniform", "lognormal")]


def find(patterns: Iterable[str], scale: Scale) -> list[ModelCase]:
    """The cases that ``patterns`` (names or globs) ask for, each once; all if there are none."""
    chosen: dict[str, None] = {}
    for pattern in patterns or ("*",):
        matches = [name for name in names() if fnmatchcase(name, pattern)]
        if not matches:
            raise ValueError(f"no case of --model is called {pattern!r}; cases: {', '.join(names())}")
        chosen.update(dict.fromkeys(matches))
    return [ModelCase(model, kind, scale) for model, kind in (name.split("-") for name in names() if name in chosen)]


def features(s: Scale) -> Features:
    """Dense features, ids of the candidate and of its surroundings, and one history of items with their age."""
    others = tuple(f"context{i}" for i in range(s.sparse))
    sizes = {"item": s.items, "category": max(s.items // 100, 1), **dict.fromkeys(others, max(s.items // 10, 1))}
    values = ("age", *(f"value{i}" for i in range(1, s.values)))
    history = SequenceFeatures(HISTORY, ("item", "category"), values)
    return Features(tuple(f"dense{i}" for i in range(16)), ("item", "category", *others), (history,), sizes)


def options(model: str, s: Scale) -> dict[str, Any]:
    """Options of the model's Config, but for its function. Kunlun's sizes are those that its paper has for clicks, but
    for the width. One recent token: every history has that many, so padding is never taken for an event."""
    if model == "interformer":
        return {
            "dim": s.dim, "num_heads": s.heads, "num_layers": 2, "hidden_units": s.units, "cls_tokens": CLS_TOKENS,
            "pooled_tokens": max(s.tokens // 2, 1), "recent_tokens": 1, "longest": s.rows, "hidden": (s.hidden,),
            "cross_rank": max(s.context // 2, 1),
        }  # fmt: skip
    history = {
        "dim": s.dim, "num_heads": s.heads, "num_layers": 3, "tokens": s.tokens, "seeds": s.seeds, "rank": 8,
        "hidden_units": s.units, "window": s.window,
    }  # fmt: skip
    return {
        "sequences": {HISTORY: history}, "dim": s.context, "num_tokens": s.tokens, "summary_tokens": 4,
        "fm_rank": max(s.tokens // 2, 1), "hidden": (s.hidden,), "longest": s.rows,
    }  # fmt: skip


def make_model(
    model: str, s: Scale, function: Loaded, device: torch.device | str, backend: str | None = None, **more: Any
) -> Model:
    """The model with its attention by gdpa. Every contender's has the same weights."""
    torch.manual_seed(SEED)
    given = {"activation": function.compile(), "params": function.params, "backend": backend}
    return build(model, features(s), device=device, **options(model, s), **given, **more)


def make_batches(case: ModelCase, device: torch.device | str) -> list[Batch]:
    """One for each draw of lengths; the same for every contender."""
    return [make_batch(case, drawn, seed).to(device) for seed, drawn in enumerate(case.draws())]


def make_batch(case: ModelCase, drawn: tuple[int, ...], seed: int) -> Batch:
    f, g = features(case.scale), torch.Generator().manual_seed(seed)
    n, total = len(drawn), sum(drawn)

    def ids(vocabularies: Iterable[str], rows: int) -> Tensor:
        columns = [torch.randint(f.vocabularies[name], (rows,), generator=g) for name in vocabularies]
        return torch.stack(columns, dim=1)

    history = f.sequences[0]
    values = torch.rand(total, len(history.values), generator=g)
    length = torch.tensor(drawn)
    stops = length.cumsum(0)
    values[:, 0] += stops.repeat_interleave(length) - torch.arange(total)  # the newest event comes last
    cu = torch.cat([torch.zeros(1, dtype=torch.int32), stops.int()])
    events = PackedEvents(ids(history.vocabularies, total), values, cu, case.longest)
    dense = torch.randn(n, len(f.dense), generator=g)
    labels = torch.randint(2, (n,), generator=g).float()
    return Batch(dense, ids(f.sparse, n), {HISTORY: events}, labels, torch.arange(n))


def describe(case: ModelCase) -> dict[str, Any]:
    """What a reader of the numbers needs to know of a case; ``gflop`` is added where it has been counted."""
    draws = case.draws()
    total = sum(map(sum, draws))
    return {
        "model": case.model,
        "lengths": case.lengths,
        "batch": case.scale.batch,
        "batches": len(draws),
        "longest": case.longest,
        "rows": case.scale.rows,
        "mean": total / len(draws) / case.scale.batch,
    }
