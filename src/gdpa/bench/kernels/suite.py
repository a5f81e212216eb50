"""The benchmark's cases by name. Any N, K and W may be asked for; some run by default.

    self-N          self-attention over full length N
    uniform-N       jagged queries U[1, N], full keys and values of length N (Meta's protocol)
    jagged-N        jagged self-attention, lengths U[1, N]
    kvK-qN          N queries, K keys: generated weights (PFFN), short K/V
    pma             64 queries shared by the batch, jagged keys U[1, 2048] (pooling)
    lognormal085    jagged self-attention over real traffic: docs/benchmark.md; lognormal16, zipf, bimodal likewise
    full-X          for a jagged self-attention X (full-lognormal085): as many sequences, all of X's mean length, dense;
                    beside X it shows what unevenness costs in TFLOP/s and of the roofline (X has more pairs: not in ms)
    causal-N        self-attention, causal
    windowW-N       self-attention, each query sees W keys on either side
    cpu-dense, cpu-jagged, cpu-long: sizes for a CPU, the same everywhere

All have B 1152, H 4, D 128 (D 64 with the suffix -d64) and bfloat16; self-N and causal-N have B 16 at N 8192, B 1 at
32768 (the same work), likewise in between. On a CPU the batch is at most 32, every length and window is divided by 8,
and the dtype is float32; names stay, so ``self-2048`` then has length 256.
The cpu-* cases are float32 and never scaled.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase

from gdpa.data import lengths
from gdpa.testing.cases import Case, dense

HEADS = 4
PMA_QUERIES = 64
MAX_HISTORY = 4096
LONG, LONG_BATCH = 8192, 16  # from this length on the batch shrinks as the work of a sequence grows


@dataclass(frozen=True)
class Scale:
    """The batch, and what every length is divided by."""

    batch: int
    divisor: int

    def length(self, full: int) -> int:
        return max(full // self.divisor, 1)


FULL_SCALE = Scale(1152, 1)
CPU_SCALE = Scale(32, 8)


def _self(s: Scale, n: str) -> Case:
    return dense("", _batch(s, int(n)), s.length(int(n)), s.length(int(n)))


def _batch(s: Scale, n: int) -> int:
    return s.batch if n < LONG else min(s.batch, max(LONG_BATCH * LONG**2 // n**2, 1))


def _uniform(s: Scale, n: str) -> Case:
    longest = s.length(int(n))
    return Case("", lengths.uniform(s.batch, longest), lengths.full(s.batch, longest), packed_q=True)


def _jagged(s: Scale, n: str) -> Case:
    return packed(lengths.uniform(s.batch, s.length(int(n))))


def _short_keys(s: Scale, keys: str, queries: str) -> Case:
    return dense("", s.batch, s.length(int(queries)), s.length(int(keys)))


def _pma(s: Scale) -> Case:
    queries = lengths.full(s.batch, s.length(PMA_QUERIES))
    return Case("", queries, lengths.uniform(s.batch, s.length(2048)), packed_k=True, shared=True)


def _lognormal(sigma: float, median: int) -> Callable[[Scale], Case]:
    return lambda s: packed(lengths.lognormal(s.batch, s.length(MAX_HISTORY), sigma, median / s.divisor))


def _zipf(s: Scale) -> Case:
    return packed(lengths.zipf(s.batch, s.length(MAX_HISTORY)))


def _bimodal(s: Scale) -> Case:
    return packed(lengths.bimodal(s.batch, s.length(2048)))


def _causal(s: Scale, n: str) -> Case:
    return replace(_self(s, n), causal=True)


def _window(s: Scale, width: str, n: str) -> Case:
    w = s.length(int(width))
    return replace(_self(s, n), window=(w, w))


def _full(s: Scale, name: str) -> Case:
    jagged = _family(name, s).len_q
    mean = round(sum(jagged) / len(jagged))
    return dense("", s.batch, mean, mean)


def packed(both: tuple[int, ...]) -> Case:
    """Self-attention over packed sequences."""
    return Case("", both, both, packed_q=True, packed_k=True)


FAMILIES: dict[str, Callable[..., Case]] = {
    r"self-(\d+)": _self,
    r"uniform-(\d+)": _uniform,
    r"jagged-(\d+)": _jagged,
    r"kv(\d+)-q(\d+)": _short_keys,
    r"pma": _pma,
    r"lognormal085": _lognormal(0.85, 1024),
    r"lognormal16": _lognormal(1.6, 256),
    r"zipf": _zipf,
    r"bimodal": _bimodal,
    r"full-(jagged-\d+|lognormal085|lognormal16|zipf|bimodal)": _full,
    r"causal-(\d+)": _causal,
    r"window(\d+)-(\d+)": _window,
}

LONG_SIZES = (8192, 32768)

CPU_CASES: dict[str, Case] = {
    "cpu-dense": dense("cpu-dense", 8, 512, 512, heads=4, d=64),
    "cpu-jagged": replace(packed(lengths.uniform(16, 1024)), name="cpu-jagged", heads=4, d=64),
    "cpu-long": dense("cpu-long", 1, 12_288, 12_288, heads=2, d=32),
}

QUICK_NAMES = ("self-512", "jagged-1024", "kv256-q1024", "pma", "causal-2048")


def names(on_cpu: bool = False) -> list[str]:
    """The cases that run when none is asked for: the CPU's three, or the whole suite."""
    return list(CPU_CASES) if on_cpu else suite_names()


def suite_names() -> list[str]:
    """Every case at D 128, then every case at D 64."""
    sizes = (256, 512, 1024, 2048)
    found = [f"self-{n}" for n in (*sizes, *LONG_SIZES)]
    found += [f"{family}-{n}" for family in ("uniform", "jagged") for n in sizes]
    found += [f"kv{k}-q{n}" for k in (128, 256) for n in sizes]
    found += ["pma", "lognormal085", "full-lognormal085", "lognormal16", "zipf", "bimodal"]
    found += ["causal-2048", "causal-8192", "window128-2048"]
    return found + [f"{name}-d64" for name in found]


def find(patterns: Iterable[str], scale: Scale) -> list[Case]:
    """The cases that ``patterns`` (names or globs) ask for, each once."""
    known = suite_names() + list(CPU_CASES)
    chosen: dict[str, None] = {}
    for pattern in patterns:
        matches = [name for name in known if fnmatchcase(name, pattern)] or [pattern]
        chosen.update(dict.fromkeys(matches))
    return [make(name, scale) for name in chosen]


def make(name: str, scale: Scale = FULL_SCALE) -> Case:
    """The case called ``name``."""
    if name in CPU_CASES:
        return CPU_CASES[name]
    family, d = (name[:-4], 64) if name.endswith("-d64") else (name, 128)
    try:
        return replace(_family(family, scale), name=name, heads=HEADS, d=d)
    except LookupError:
        raise ValueError(f"no benchmark case is called {name!r}; `gdpa bench --list` shows them") from None


def _family(name: str, scale: Scale) -> Case:
    """The case of a name without head dimension, its name still to be set."""
    for pattern, build in FAMILIES.items():
        match = re.fullmatch(pattern, name)
        if match:
            return build(scale, *match.groups())
    raise LookupError(name)
