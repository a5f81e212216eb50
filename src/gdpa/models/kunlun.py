"""Kunlun: sequences of different sizes, each read by layers that take turns, and Wukong's interaction."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, ClassVar, cast

import torch
from torch import Tensor, nn

from gdpa import backends
from gdpa.api import ActivationLike
from gdpa.data import Inputs, PackedEvents
from gdpa.models import attending, options
from gdpa.models.base import LearnedTokens, Model, Users, make_head, reset
from gdpa.models.embedding import ContextTokens, EventTokens, Looked, Tables
from gdpa.models.features import Features, SequenceFeatures
from gdpa.nn import (
    PFFN,
    Gating,
    HierarchicalSeedPooling,
    Jagged,
    LayerNorm,
    SelfAttention,
    TokenLinear,
    WukongBlock,
)


@dataclass(frozen=True)
class SequenceSize:
    """How large the part of :class:`Kunlun` is that reads one sequence: more for clicks than for impressions, say.

    Args:
        dim: the width of its events. num_heads divides it.
        num_layers: how many layers read it; afterwards its last pooling is used again.
        tokens, seeds, rank: of its pooling: ``seeds`` queries, compressed to ``tokens`` by ``rank`` Kronecker products.
        hidden_units: the units of PFFN in each head.
        window: events further apart than this do not see each other; None for no bound.
    """

    dim: int = 32
    num_heads: int = 2
    num_layers: int = 3
    tokens: int = 4
    seeds: int = 8
    rank: int = 2
    hidden_units: int = 16
    window: int | None = 50

    def __post_init__(self) -> None:
        options.sizes(self, "dim", "num_heads", "num_layers", "tokens", "seeds", "rank", "hidden_units")
        options.window(self)


@dataclass(frozen=True)
class KunlunConfig:
    """Options of :class:`Kunlun`; the defaults are for small runs on a CPU.

    Args:
        activation: of all attention: "softmax", or whatever gdpa.attention takes.
        params: where the params of ``activation`` start; each layer has its own.
        normalize: "sum" or "abs" of a row's weights, which outputs are divided by (docs/rowsums.md); not of softmax.
        sequences: a dict from the names of sequences to a :class:`SequenceSize`, or a dict of its fields; the others
            have the default.
        both_ways: whether the context informs the sequences. Without (one way), PFFN generates its weights from learned
            constants. The histories are read without the candidate then, once for all of them (score_candidates).
        comp_skip: whether layers take turns: 0, 2, ... run PFFN and pool, 1, 3, ... run self-attention and use the
            pooling again (but for the last layer, which pools). Without, every layer does all three.
        dim: the width of embeddings and of the context's tokens.
        num_tokens: the context's tokens after the first layer; half of them are products, half linear.
        summary_tokens: the tokens from which PFFN's weights are generated.
        fm_rank: the rank of the products in Wukong's block.
        hidden: the hidden widths of all MLPs.
        longest: the length that sums over a sequence are divided by (softmax needs no such division). Any history may
            be longer or shorter; it sets the scale.
        tau: what the scores in PFFN are divided by; None for the square root of a head's width.
        rotary: the base of rotary positions; None for none.
        time_scale: positions are log(1 + age / time_scale) where the events have an age, and their places otherwise.
            None for places always.
        backend: forces a backend of gdpa.attention.
    """

    activation: ActivationLike = "gelu"
    params: tuple[float, ...] = ()
    sequences: Mapping[str, SequenceSize] = field(default_factory=dict)
    both_ways: bool = True
    comp_skip: bool = True
    dim: int = 32
    num_tokens: int = 8
    summary_tokens: int = 4
    fm_rank: int = 8
    hidden: tuple[int, ...] = (64,)
    longest: int = 64
    tau: float | None = None
    rotary: float | None = 10000.0
    time_scale: float | None = 1.0
    backend: str | None = None
    normalize: str | None = None

    def __post_init__(self) -> None:
        options.flags(self, "both_ways", "comp_skip")
        options.sizes(self, "dim", "num_tokens", "summary_tokens", "fm_rank", "longest")
        if self.num_tokens < 2:
            raise ValueError(f"num_tokens must be at least 2, got {self.num_tokens}")
        options.widths(self, "hidden")
        options.above_zero(self, "tau", "rotary", "time_scale")
        if not isinstance(self.sequences, Mapping):
            raise TypeError(f"sequences must be a dict of sizes by the names of sequences, got {self.sequences!r}")
        found = {name: _size(name, size) for name, size in self.sequences.items()}
        object.__setattr__(self, "sequences", found)
        for size in (SequenceSize(), *found.values()):
            options.heads(size.dim, size.num_heads, self.rotary is not None)
        backends.check_name(self.backend)


def _size(name: str, size: Any) -> SequenceSize:
    """A size given as such or, from a file, as a dict."""
    if isinstance(size, SequenceSize):
        return size
    if not isinstance(size, Mapping):
        raise TypeError(f"sequences[{name!r}] must be a SequenceSize or a dict of its fields, got {size!r}")
    known = [f.name for f in fields(SequenceSize)]
    if unknown := sorted(set(size) - set(known)):
        raise ValueError(f"sequences[{name!r}] has no size {', '.join(unknown)}; sizes: {', '.join(known)}")
    return SequenceSize(**size)


class Feed(nn.Module):
    """S <- PFFN(Gating(LayerNorm(W X)), S), W over the axis of the context's tokens; one way, of learned tokens."""

    def __init__(self, c: KunlunConfig, size: SequenceSize, num_tokens: int, factory: dict[str, Any]) -> None:
        super().__init__()
        self.mix = TokenLinear(num_tokens, c.summary_tokens, **factory) if c.both_ways else None
        self.tokens = None if c.both_ways else LearnedTokens(c.summary_tokens, c.dim, factory)
        self.norm = nn.LayerNorm(c.dim, **factory)
        self.gate = Gating(c.dim, **factory)
        self.pffn = PFFN(
            size.dim, size.num_heads, size.hidden_units, c.summary_tokens, c.dim,
            scale=None if c.tau is None else 1 / c.tau,
            **attending.options(c, 1.0, softmax_scale=size.hidden_units), **factory,
        )  # fmt: skip

    def forward(self, s: Jagged, x: Tensor) -> Jagged:
        context = self.mix(x) if self.mix is not None else self.tokens(s.cu_seqlens.shape[0] - 1)  # type: ignore[misc]
        return self.pffn(s, self.gate(self.norm(context)))


class Attend(nn.Module):
    """S <- S + LayerNorm(MHA(LayerNorm(S))), in a window, rotary."""

    def __init__(self, c: KunlunConfig, size: SequenceSize, factory: dict[str, Any]) -> None:
        super().__init__()
        self.in_norm, self.out_norm = LayerNorm(size.dim, **factory), LayerNorm(size.dim, **factory)
        window = None if size.window is None else (size.window, size.window)
        self.attention = SelfAttention(
            size.dim, size.num_heads, rotary=c.rotary, window=window, **attending.options(c, 1 / c.longest), **factory
        )
        attending.start_as_average(self.attention)

    def reset_parameters(self) -> None:
        """As its parts start, attention as an average."""
        reset(self)
        attending.start_as_average(self.attention)

    def forward(self, s: Jagged, positions: Tensor | None) -> Jagged:
        values, normed = self.in_norm(s.values, beside=True)
        update = self.attention(s.with_values(normed), positions)
        return s.with_values(values + self.out_norm(update.values))


class Pool(nn.Module):
    """P = LayerNorm(W HierarchicalSeedPooling(S)), of the context's width: (B, tokens, dim)."""

    def __init__(self, c: KunlunConfig, size: SequenceSize, factory: dict[str, Any]) -> None:
        super().__init__()
        self.pool = HierarchicalSeedPooling(
            size.dim, size.num_heads, size.seeds, size.tokens, size.rank, **attending.options(c, 1 / c.longest),
            **factory,
        )  # fmt: skip
        self.widen = nn.Linear(size.dim, c.dim, **factory)
        self.norm = nn.LayerNorm(c.dim, **factory)
        attending.start_as_average(self.pool.pool)

    def reset_parameters(self) -> None:
        """As its parts start, attention as an average."""
        reset(self)
        attending.start_as_average(self.pool.pool)

    def forward(self, s: Jagged) -> Tensor:
        return self.norm(self.widen(self.pool(s)))


class KunlunLayer(nn.Module):
    """One layer of one sequence: PFFN, self-attention, pooling, or some of them."""

    def __init__(
        self,
        c: KunlunConfig,
        size: SequenceSize,
        num_tokens: int,
        *,
        feeds: bool,
        attends: bool,
        pools: bool,
        factory: dict[str, Any],
    ) -> None:
        super().__init__()
        self.feed = Feed(c, size, num_tokens, factory) if feeds else None
        self.attend = Attend(c, size, factory) if attends else None
        self.pool = Pool(c, size, factory) if pools else None

    def forward(self, s: Jagged, x: Tensor, positions: Tensor | None, pooled: Any) -> tuple[Jagged, Tensor]:
        """The sequence after the layer, and its pooling: a fresh one or ``pooled`` as it came."""
        if self.feed is not None:
            s = self.feed(s, x)
        if self.attend is not None:
            s = self.attend(s, positions)
        return s, pooled if self.pool is None else self.pool(s)


class KunlunSequence(nn.Module):
    """All that reads one sequence: its events as rows, their times as positions, and its layers."""

    def __init__(
        self,
        c: KunlunConfig,
        sequence: SequenceFeatures,
        size: SequenceSize,
        tokens: list[int],
        factory: dict[str, Any],
    ) -> None:
        super().__init__()
        self.events = EventTokens(sequence, c.dim, size.dim, factory)
        last = size.num_layers - 1
        self.layers = nn.ModuleList(
            KunlunLayer(
                c, size, tokens[i], feeds=i % 2 == 0 or not c.comp_skip, attends=i % 2 == 1 or not c.comp_skip,
                pools=i % 2 == 0 or i == last or not c.comp_skip, factory=factory,
            )
            for i in range(size.num_layers)
        )  # fmt: skip
        timed = c.time_scale is not None and c.rotary is not None and "age" in sequence.values
        self.time_scale = c.time_scale if timed else None
        self.age = sequence.values.index("age") if timed else None

    def begin(self, events: PackedEvents, looked: Looked) -> tuple[Jagged, Tensor | None]:
        """The events as rows, and log(1 + age / time_scale) of each; None for places. An age below 0, from clocks that
        differ, counts as 0."""
        rows = self.events(events, looked)
        if self.age is None or self.time_scale is None:
            return rows, None
        return rows, torch.log1p(events.values[:, self.age].clamp_min(0) / self.time_scale)


class Kunlun(Model):
    """Kunlun (arXiv 2602.10016): PFFN, pooling and windowed self-attention take turns; Wukong interacts.

        X = tokens(dense, sparse)          S_e = events of sequence e, merged by MaskNet, of a width of its own
        in layer i:
            X_sum = Gating(W X)
            i even:  S_e <- PFFN(X_sum, S_e)      P_e = HierarchicalSeedPooling(S_e)
            i odd:   S_e <- S_e + MHA(S_e), in a window, rotary by time; P_e stays
            X <- Wukong([X | P_1 | P_2 | ...])
        logit = MLP([X | P_1 | P_2 | ...])

    >>> log = gdpa.data.SyntheticLog()
    >>> model = Kunlun(Features.of(log), Kunlun.Config(sequences={"history": SequenceSize(dim=16, window=20)}))
    >>> model(next(gdpa.data.batches(log, 8))).shape
    torch.Size([8])
    """

    Config: ClassVar[type] = KunlunConfig
    config: KunlunConfig

    def __init__(
        self,
        features: Features,
        config: KunlunConfig | None = None,
        *,
        device: Any = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(features, config)
        c, factory = self.config, {"device": device, "dtype": dtype}
        names = [s.name for s in features.sequences]
        if unknown := sorted(set(c.sequences) - set(names)):
            raise ValueError(f"sequences has sizes for {unknown}, but the features' sequences are {names}")
        self.tables = Tables(features, c.dim, factory)
        self.context = ContextTokens(features, c.dim, c.hidden, factory)
        sizes = [c.sequences.get(name, SequenceSize()) for name in names]
        depth = max((size.num_layers for size in sizes), default=1)
        tokens = [self.context.num_tokens, *[c.num_tokens] * (depth - 1)]
        self.sequences = nn.ModuleList(
            KunlunSequence(c, s, size, tokens, factory) for s, size in zip(features.sequences, sizes, strict=True)
        )
        pooled, fm = sum(size.tokens for size in sizes), (c.num_tokens + 1) // 2
        self.interaction = nn.ModuleList(
            WukongBlock(c.dim, n + pooled, fm, c.num_tokens - fm, c.fm_rank, c.hidden, **factory) for n in tokens
        )
        self.head = make_head(features, [(c.num_tokens + pooled) * c.dim, *c.hidden], factory)

    def forward(self, batch: Inputs) -> Tensor:
        self.features.check(batch)
        return self._score(batch, None)

    def _needs_candidates(self) -> str | None:
        return "the context informs it (both_ways=False would not let it)" if self.config.both_ways else None

    def _score(self, batch: Inputs, users: Users | None) -> Tensor:
        looked = self.tables(batch)
        x = self.context(batch.dense, looked)
        parts = [cast(KunlunSequence, part) for part in self.sequences]
        began = [
            self._run(p.begin, batch.sequences[s.name], looked)
            for p, s in zip(parts, self.features.sequences, strict=True)
        ]
        rows, times = [r for r, _ in began], [t for _, t in began]
        pooled: list[Any] = [None] * len(parts)  # layer 0 makes all of them
        for i, interact in enumerate(self.interaction):
            for e, part in enumerate(parts):
                if i < len(part.layers):
                    rows[e], pooled[e] = self._run(part.layers[i], rows[e], x, times[e], pooled[e])
            known = pooled if users is None else [users.spread(p) for p in pooled]
            x = self._run(interact, torch.cat([x, *known], dim=1))
        return self.head(torch.cat([x, *known], dim=1).flatten(1)).squeeze(1)
