"""A seed gives one call, whatever ran before it.

Every new kernel costs seconds to compile on a GPU. So what a kernel is compiled for (a ``Config``) comes from the
seed's session, a run of consecutive seeds that share a handful of them; lengths, data, offsets and disturbances come
from the seed itself. Where nothing is compiled a session is one call.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from random import Random
from typing import TypeVar

from gdpa.exactness.draw import Scores
from gdpa.exactness.formula import Formula, Norm
from gdpa.fuzz import lengths, masks, unused
from gdpa.fuzz.functions import ALL, MENU, MIXED, PLACED, SOFTMAX, Function
from gdpa.testing.cases import Case

T = TypeVar("T")
Window = tuple[int | None, int | None]

LAYOUTS = {"packed": 6, "dense": 3, "shared": 2, "packed-dense-keys": 2, "shared-packed-keys": 2}
STYLES = {"contiguous": 4, "transposed": 3, "sliced": 2, "padded": 2, "strided": 1, "expanded": 1}
GRAD_STYLES = {"contiguous": 4, "transposed": 2, "padded": 2, "scalar": 1, "per row": 1}
DTYPES = ("bfloat16", "float16", "float32")
SINKS = {"number": 2, "scalar tensor": 1, "per head": 2}
TABLE_DTYPES = {"float32": 3, "bfloat16": 1, "float16": 1}
SUMS = {"not returned": 2, "returned": 1, "differentiated": 2}
FAR = 2**31 - 1  # the widest bound the API takes


@dataclass(frozen=True)
class Space:
    """What calls are drawn from on one kind of device. ``work`` bounds sum Lq * Lk * heads * (D + Dv) / 2."""

    dtypes: tuple[str, ...]
    tiles: tuple[int, ...]
    longest: int
    most_seqs: int
    most_heads_k: int
    work: int
    dims: dict[tuple[int, int], int]
    session: int = 1
    configs: int = 1


_DIMS = {
    (64, 64): 8, (128, 128): 8, (96, 96): 1, (192, 192): 1, (256, 256): 1, (24, 24): 1, (40, 40): 1, (64, 128): 1,
    (128, 64): 1, (40, 96): 1, (192, 128): 1, (256, 24): 1, (50, 50): 1, (20, 33): 1,
}  # fmt: skip
_SMALL_DIMS = {(16, 16): 4, (8, 8): 1, (24, 40): 1, (40, 16): 1, (64, 64): 1, (13, 5): 1}
# Sizes give 5 to 20 calls a second once kernels are compiled. A session of 256 calls spends a minute or two compiling.
GPU = Space(DTYPES, (64, 128, 256), 8192, 64, 4, 2 * 10**9, _DIMS, session=256, configs=6)
CPU = Space(DTYPES, (16, 64, 128), 700, 32, 3, 2 * 10**7, _DIMS)
INTERPRETER = Space(("float16", "float32"), (16,), 50, 4, 2, 10**5, _SMALL_DIMS)


@dataclass(frozen=True)
class Config:
    """What kernels are compiled for: all but lengths, numbers and data. ``styles`` is how q, k and v lie in memory."""

    function: str
    dtype: str
    d: int
    dv: int
    heads_k: int
    group: int
    layout: str
    same_lengths: bool
    causal: bool
    window: Window | None
    aligned: bool
    styles: tuple[str, str, str]
    grad_style: str
    per_head_params: bool
    long_offsets: bool
    deterministic: bool
    rounded: tuple[bool, bool]  # whether all rows of q, and of k, are a multiple of 16
    mask: str | None = None
    normalize: Norm = None
    sink: str = "none"  # or what it is: a key of SINKS
    learned: bool = True  # whether float tables have gradients
    table_dtype: str = "float32"
    sums: str = "not returned"  # or a key of SUMS
    used: tuple[bool, bool] = (False, False)  # whether seqused_q, and seqused_k, are given

    @property
    def f(self) -> Function:
        return ALL[self.function]

    @property
    def masked(self) -> masks.Masked | None:
        return None if self.mask is None else masks.MENU[self.mask]


@dataclass(frozen=True)
class Call:
    """One call of the API. ``shift``: where storage starts, in elements. ``poison``: (sequence, what it is filled with)
    in a second run. ``repeat``: a second run must give the same bits. ``scores``: how scale * <q, k> is distributed."""

    seed: int
    config: Config
    case: Case
    pattern: str
    scale: float | None
    out_scale: float
    shift: int
    max_q: int | None
    max_k: int | None
    poison: tuple[int, str] | None
    repeat: bool
    scores: Scores
    v_mean: float

    @property
    def f(self) -> Function:
        return self.config.f

    @property
    def true_scale(self) -> float:
        return 1 / math.sqrt(self.case.d) if self.scale is None else self.scale

    @property
    def formula(self) -> Formula:
        c = self.config
        sees = None if c.masked is None else c.masked.sees
        return Formula(
            self.case, self.f, self.true_scale, self.out_scale, c.normalize, self.f.at, sees, self.f.exponential,
            with_sums=c.sums != "not returned",
        )  # fmt: skip

    @property
    def independent(self) -> bool:
        """Whether rows are drawn one by one: where they repeat each other, one rounding stands for many."""
        return "expanded" not in self.config.styles and self.config.grad_style not in ("scalar", "per row")


def draw(seed: int, space: Space) -> Call:
    """The call of ``seed``."""
    rng = Random(f"call {seed}")
    config = draw_config(Random(f"config {seed // space.session} {rng.randrange(space.configs)}"), space)
    case, pattern = _draw_case(rng, config, space)
    case = unused.draw(
        Random(f"unused rows {seed}"), case, config.used, config.rounded, config.same_lengths, space.tiles
    )
    call = Call(
        seed, config, case, pattern,
        scale=_draw_scale(rng, config),
        out_scale=rng.choice([1.0, 1.0, 1 / 64, -2.5, rng.uniform(0.1, 2.0), 0.0 if rng.random() < 0.2 else 1.0]),
        shift=rng.choice([0, 8, 24]) if config.aligned else rng.randint(1, 7),
        max_q=_draw_hint(rng, case.len_q if case.packed_q else case.rooms_q) if case.varlen else None,
        max_k=_draw_hint(rng, case.len_k if case.packed_k else case.rooms_k) if case.varlen else None,
        poison=None,
        repeat=config.deterministic and rng.random() < 0.4,
        scores=_draw_scores(rng, config),
        v_mean=rng.choice([0.0, 0.0, 1.0]),
    )  # fmt: skip
    return replace(call, poison=_draw_poison(rng, call))


# ---- what is compiled ------------------------------------------------------------------------------------------------
def draw_config(rng: Random, space: Space) -> Config:
    d, dv = weighted(rng, space.dims)
    layout = weighted(rng, LAYOUTS)
    same = layout in ("packed", "dense") and rng.random() < 0.5
    causal, window = _draw_band(rng, space) if rng.random() < 0.5 else (False, rng.choice([None, None, (None, None)]))
    styles: tuple[str, str, str] = (weighted(rng, STYLES), weighted(rng, STYLES), weighted(rng, STYLES))
    if same and d == dv and rng.random() < 0.4:
        styles = ("fused", "fused", "fused")
    config = Config(
        function=rng.choice(list(MENU)),
        dtype=rng.choice(space.dtypes),
        d=d,
        dv=dv,
        heads_k=rng.randint(1, space.most_heads_k),
        group=rng.choice([1, 1, 1, 2, 3, 4]),
        layout=layout,
        same_lengths=same,
        causal=causal,
        window=window,
        aligned=rng.random() < 0.75,
        styles=styles,
        grad_style=weighted(rng, GRAD_STYLES),
        per_head_params=rng.random() < 0.6,
        long_offsets=rng.random() < 0.3,
        deterministic=rng.random() < 0.4,
        rounded=(rng.random() < 0.3, rng.random() < 0.3),
    )
    config = config if rng.random() < 0.5 else _draw_more(rng, config)
    return replace(config, used=unused.draw_used(rng, layout, same))


def _draw_more(rng: Random, config: Config) -> Config:
    """At least one of a mask, a function of positions, and row sums."""
    mask, placed, summed = rng.choices([(1, 0, 0), (0, 1, 0), (0, 0, 1), (1, 1, 0), (1, 0, 1), (0, 1, 1), (1, 1, 1)],
                                       [4, 5, 4, 3, 2, 2, 2])[0]  # fmt: skip
    config = replace(config, function=rng.choice(list(PLACED)) if placed else config.function)
    if summed:
        config = _draw_sums(rng, config, placed=bool(placed))
    name = rng.choice(list(masks.MENU)) if mask else None
    learned = rng.random() < 0.7
    tables = weighted(rng, TABLE_DTYPES) if placed else "float32"
    return replace(config, mask=name, learned=learned, table_dtype=tables)


def _draw_sums(rng: Random, config: Config, placed: bool) -> Config:
    """Only sums of positive functions go without a sink: others come close to 0."""
    function = SOFTMAX.name if not placed and rng.random() < 0.5 else config.function
    normalize: Norm = rng.choice(["sum", "sum", "abs"]) if ALL[function].positive else "abs"
    normalize = "softmax" if function == SOFTMAX.name else normalize
    if rng.random() < 0.3:
        function, normalize = _draw_list(rng, function)
    none = ALL[function].positive and rng.random() < 0.4
    sink = "none" if none else weighted(rng, SINKS)
    return replace(config, function=function, normalize=normalize, sink=sink, sums=weighted(rng, SUMS))


def _draw_list(rng: Random, function: str) -> tuple[str, tuple[str | None, ...]]:
    """A function, and how its heads are divided. The first one is, for a call without row sums takes no sink."""
    if function == SOFTMAX.name:
        return MIXED.name, ("softmax", "abs", None)
    some = ["sum", "abs"] if ALL[function].positive else ["abs"]
    return function, (rng.choice(some), *rng.choices([None, *some], k=rng.randint(1, 2)))


def _draw_band(rng: Random, space: Space) -> tuple[bool, Window | None]:
    def bound() -> int | None:
        near, far = rng.randint(0, space.tiles[0]), lengths.edge(rng, space.tiles, space.longest)
        return rng.choice([None, 0, near, near, far, 2 * space.longest, FAR])

    causal = rng.random() < 0.5
    window = (bound(), bound()) if not causal or rng.random() < 0.4 else None
    return causal, window


# ---- what varies from call to call -----------------------------------------------------------------------------------
def _draw_case(rng: Random, config: Config, space: Space) -> tuple[Case, str]:
    heads = config.heads_k * config.group
    pairs = int(space.work / (heads * (config.d + config.dv) / 2))
    longest = min(space.longest, math.isqrt(pairs))
    pattern = weighted(rng, lengths.WEIGHTS)
    n = min(space.most_seqs, rng.choice([1, 2, 3, rng.randint(2, 8), rng.randint(2, 64)]))
    packed_q, packed_k = config.layout.startswith("packed"), config.layout in ("packed", "shared-packed-keys")
    if packed_q and packed_k and rng.random() < 0.01:
        n = 0

    def side(pattern: str, packed: bool) -> lengths.Lengths:
        return lengths.PATTERNS[pattern](rng, n if packed else 1, space.tiles, longest)

    len_q = side(pattern, packed_q)
    other = pattern if pattern == "empty" and rng.random() < 0.5 else weighted(rng, lengths.WEIGHTS)
    len_k = list(len_q) if config.same_lengths else side(other, packed_k)
    len_q, len_k = _broadcast(len_q, len_k, n)
    len_q, len_k = lengths.fit(len_q, len_k, pairs)
    len_q, len_k = _settle(len_q, packed_q, config.rounded[0]), _settle(len_k, packed_k, config.rounded[1])
    if config.same_lengths:
        len_k = list(len_q)
    case = Case(
        config.layout, tuple(len_q), tuple(len_k), heads=heads, heads_k=config.heads_k, d=config.d,
        dv=config.dv, packed_q=packed_q, packed_k=packed_k, shared=config.layout.startswith("shared"),
        causal=config.causal, window=config.window,
    )  # fmt: skip
    return case, pattern


def _broadcast(len_q: lengths.Lengths, len_k: lengths.Lengths, n: int) -> tuple[lengths.Lengths, lengths.Lengths]:
    """A side that is not packed has one length for all sequences."""
    return (len_q * n if len(len_q) == 1 else len_q), (len_k * n if len(len_k) == 1 else len_k)


def _settle(some: lengths.Lengths, packed: bool, rounded: bool) -> lengths.Lengths:
    return lengths.settle(some, rounded) if packed else lengths.settle(some[:1], rounded) * len(some)


def _draw_scale(rng: Random, config: Config) -> float | None:
    plain = 1 / math.sqrt(config.d)
    zero = 0.0 if config.f.at_zero and rng.random() < 0.2 else plain
    return rng.choice([None, None, None, 0.7 * plain, -1.3 * plain, rng.uniform(0.05, 0.5), zero])


def _draw_scores(rng: Random, config: Config) -> Scores:
    """Half of them centred and as wide as the function allows; the others anywhere that the contract speaks of."""
    if rng.random() < 0.5:
        return Scores(0.0, config.f.spread)
    mean, spread = rng.choice([(3.0, 0.3), (3.0, 0.3), (8.0, 0.1)])
    return Scores(rng.uniform(-mean, mean), math.exp(rng.uniform(math.log(spread), math.log(1.6 * config.f.spread))))


def _draw_hint(rng: Random, some: tuple[int, ...]) -> int | None:
    longest = max(some, default=0)
    return rng.choice([None, None, longest, longest + rng.randint(0, 100)])


def _draw_poison(rng: Random, call: Call) -> tuple[int, str] | None:
    """Not where sequences share memory: what is written into one would stand in all."""
    case, n = call.case, len(call.case.len_q)
    if n < 2 or "expanded" in call.config.styles or rng.random() < 0.5:
        return None
    candidates = [b for b in range(n) if case.len_q[b] or case.len_k[b]]
    return (rng.choice(candidates), rng.choice(["nan", "inf"])) if candidates else None


def weighted(rng: Random, menu: dict[T, int]) -> T:
    return rng.choices(list(menu), list(menu.values()))[0]
