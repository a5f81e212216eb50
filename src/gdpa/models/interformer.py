"""InterFormer: context and history inform each other, layer by layer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from gdpa import backends
from gdpa.api import ActivationLike
from gdpa.data import Inputs
from gdpa.models import attending, options
from gdpa.models.base import LearnedTokens, Model, Users, make_head, reset
from gdpa.models.dlrm import interaction
from gdpa.models.embedding import ContextTokens, EventTokens, Tables
from gdpa.models.features import Features
from gdpa.models.joining import ends, every, join
from gdpa.nn import PFFN, Gating, Jagged, LayerNorm, SeedPooling, SelfAttention, TokenLinear


@dataclass(frozen=True)
class InterFormerConfig:
    """Options of :class:`InterFormer`; the defaults are for small runs on a CPU.

    Args:
        both_ways: whether the context informs the sequence. Without (one way), the CLS tokens and what PFFN generates
            its weights from are learned constants in place of the summary of the context; all sizes stay the same. The
            history is read without the candidate then, once for all of them (score_candidates).
        activation: of all attention: "softmax", or whatever gdpa.attention takes.
        params: where the params of ``activation`` start; each layer has its own.
        normalize: "sum" or "abs" of a row's weights, which outputs are divided by (docs/rowsums.md); not of softmax.
        dim: the width of embeddings, tokens and events. num_heads divides it.
        num_layers: rounds of exchange.
        hidden_units: the units of PFFN in each head.
        cls_tokens: tokens that summarise the context, and are prepended to the sequence.
        pooled_tokens: tokens pooled from the sequence by learned seeds.
        recent_tokens: the newest events of each sequence that are summary tokens themselves; may be 0.
        longest: the length that sums over a sequence are divided by (softmax needs no such division). Any history may
            be longer or shorter; it sets the scale.
        rotary: the base of rotary positions; None for none.
        window: rows further apart than this do not see each other, the CLS tokens being the first; None for no bound.
        cross_layers, cross_rank, hidden: of the interaction, as in :class:`DLRM`.
        backend: forces a backend of gdpa.attention.
    """

    both_ways: bool = True
    activation: ActivationLike = "gelu"
    params: tuple[float, ...] = ()
    dim: int = 64
    num_heads: int = 2
    num_layers: int = 1
    hidden_units: int = 16
    cls_tokens: int = 4
    pooled_tokens: int = 2
    recent_tokens: int = 2
    longest: int = 64
    rotary: float | None = 10000.0
    window: int | None = None
    cross_layers: int = 1
    cross_rank: int = 16
    hidden: tuple[int, ...] = (64,)
    backend: str | None = None
    normalize: str | None = None

    def __post_init__(self) -> None:
        options.flags(self, "both_ways")
        options.sizes(self, "dim", "num_heads", "num_layers", "hidden_units", "cls_tokens", "pooled_tokens", "longest")
        options.sizes(self, "cross_layers", "cross_rank")
        options.counts(self, "recent_tokens")
        options.above_zero(self, "rotary")
        options.window(self)
        options.widths(self, "hidden")
        options.heads(self.dim, self.num_heads, self.rotary is not None)
        backends.check_name(self.backend)


class SequenceLayer(nn.Module):
    """S <- PFFN(context, S)      S <- S + LayerNorm(MHA(LayerNorm(S)))      summary = Gating([CLS | PMA | recent])."""

    def __init__(self, c: InterFormerConfig, num_sequences: int, factory: dict[str, Any]) -> None:
        super().__init__()
        self.cls_tokens, self.recent_tokens = c.cls_tokens, c.recent_tokens
        units = attending.options(c, 1.0, softmax_scale=c.hidden_units)
        read, pooled = (attending.options(c, 1 / c.longest) for _ in range(2))
        window = None if c.window is None else (c.window, c.window)
        self.pffn = PFFN(c.dim, c.num_heads, c.hidden_units, c.cls_tokens, c.dim, **units, **factory)
        self.in_norm = LayerNorm(c.dim, **factory)
        self.attention = SelfAttention(c.dim, c.num_heads, rotary=c.rotary, window=window, **read, **factory)
        self.out_norm = LayerNorm(c.dim, **factory)
        self.pool = SeedPooling(c.dim, c.num_heads, c.pooled_tokens, **pooled, **factory)
        self.norm = nn.LayerNorm(c.dim, **factory)
        self.gate = Gating(c.dim, **factory)
        self.num_tokens = c.cls_tokens + c.pooled_tokens + num_sequences * c.recent_tokens
        self._start()

    def reset_parameters(self) -> None:
        """As its parts start, attention as an average."""
        reset(self)
        self._start()

    def _start(self) -> None:
        attending.start_as_average(self.attention)
        attending.start_as_average(self.pool)

    def forward(self, s: Jagged, context: Tensor, starts: Tensor) -> tuple[Jagged, Tensor]:
        """The sequence after the layer, and its summary (B, num_tokens, dim). ``starts`` (1 + sequences, B): where in
        the rows the CLS tokens and each sequence begin."""
        s, normed = self.pffn(s, context, then=self.in_norm)
        s = s.with_values(s.values + self.out_norm(self.attention(normed).values))
        s, cls, recent = ends(s, self.cls_tokens, starts[1:], self.recent_tokens)
        return s, self.gate(self.norm(torch.cat([cls, self.pool(s), recent], dim=1)))


class InterFormer(Model):
    """InterFormer (arXiv 2411.09852): sequence and context exchange summaries in every layer.

        X = tokens(dense, sparse)           S = [Gating(W X) | events of all sequences, merged by MaskNet]
        num_layers times:
            X_sum = Gating(W X)                             the context for the sequence
            S <- MHA(PFFN(X_sum, S))                        weights generated from the context; rotary
            S_sum = Gating([S_CLS | S_PMA | S_recent])      the sequence for the context
            X <- Interaction([X | S_sum])                   DHEN of DOT and DCN
        logit = MLP([Gating(W X) | S_sum])

    >>> log = gdpa.data.SyntheticLog()
    >>> model = InterFormer(Features.of(log), InterFormer.Config(activation="silu"))
    >>> model(next(gdpa.data.batches(log, 8))).shape
    torch.Size([8])
    """

    Config: ClassVar[type] = InterFormerConfig
    config: InterFormerConfig

    def __init__(
        self,
        features: Features,
        config: InterFormerConfig | None = None,
        *,
        device: Any = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(features, config)
        c, factory = self.config, {"device": device, "dtype": dtype}
        self.tables = Tables(features, c.dim, factory)
        self.context = ContextTokens(features, c.dim, c.hidden, factory)
        self.events = nn.ModuleList(EventTokens(s, c.dim, c.dim, factory) for s in features.sequences)
        n, layers = self.context.num_tokens, range(c.num_layers)
        sequence = [SequenceLayer(c, len(features.sequences), factory) for _ in layers]
        self.sequence = nn.ModuleList(sequence)
        self.interaction = nn.ModuleList(interaction(n + sequence[0].num_tokens, n, c, factory) for _ in layers)
        # What each layer of the sequence knows of the context.
        self.summaries = nn.ModuleList(
            ContextSummary(n, c, factory) if c.both_ways else LearnedTokens(c.cls_tokens, c.dim, factory)
            for _ in layers
        )
        self.summary = ContextSummary(n, c, factory)
        self.head = make_head(features, [(c.cls_tokens + sequence[0].num_tokens) * c.dim, *c.hidden], factory)

    def forward(self, batch: Inputs) -> Tensor:
        self.features.check(batch)
        return self._score(batch, None)

    def _needs_candidates(self) -> str | None:
        return "the context informs it (both_ways=False would not let it)" if self.config.both_ways else None

    def _score(self, batch: Inputs, users: Users | None) -> Tensor:
        looked = self.tables(batch)
        x = self.context(batch.dense, looked)
        histories = [batch.sequences[s.name] for s in self.features.sequences]
        events = [self._run(tokens, h, looked) for tokens, h in zip(self.events, histories, strict=True)]
        x_sum = self._context(0, x, users)
        s, starts = join([every(x_sum), *events])
        for i, (sequence, interact) in enumerate(zip(self.sequence, self.interaction, strict=True)):
            s, s_sum = self._run(sequence, s, x_sum if i == 0 else self._context(i, x, users), starts)
            s_sum = s_sum if users is None else users.spread(s_sum)
            x = self._run(interact, torch.cat([x, s_sum], dim=1))
        return self.head(torch.cat([self.summary(x), s_sum], dim=1).flatten(1)).squeeze(1)

    def _context(self, i: int, x: Tensor, users: Users | None) -> Tensor:
        """What layer i of the sequence knows of the context, for each history."""
        if self.config.both_ways:
            return self.summaries[i](x)
        return self.summaries[i](x.shape[0] if users is None else users.counts.shape[0])


class ContextSummary(nn.Module):
    """X_sum = Gating(W X), W over the token axis: (B, num_tokens, dim) -> (B, cls_tokens, dim)."""

    def __init__(self, num_tokens: int, c: InterFormerConfig, factory: dict[str, Any]) -> None:
        super().__init__()
        self.mix = TokenLinear(num_tokens, c.cls_tokens, **factory)
        self.norm = nn.LayerNorm(c.dim, **factory)
        self.gate = Gating(c.dim, **factory)
        nn.init.eye_(self.mix.weight)

    def reset_parameters(self) -> None:
        """As its parts start, with the first tokens as they are."""
        reset(self)
        nn.init.eye_(self.mix.weight)

    def forward(self, x: Tensor) -> Tensor:
        return self.gate(self.norm(self.mix(x)))
