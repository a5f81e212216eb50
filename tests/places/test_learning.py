"""What threads add to the gradients of tables: which of their scores are added up first, and the emitted code."""

from __future__ import annotations

import random
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from gdpa.functions.activation import resolve_one
from gdpa.functions.places.emit import function_writer
from gdpa.functions.places.learned.additions import GROUPS, SCORES, Additions, kind_of
from gdpa.functions.places.learned.source import _lookup
from gdpa.functions.places.names import TableKind
from gdpa.nn.biases import log_buckets
from places.machine import THREADS, Machine, emitted_scope, place_of
from support import FULL, in_turn

ENTRY: dict[str, Callable[[int, int], Any]] = {  # of query i and key j
    "tile": lambda i, j: 0,
    "key": lambda i, j: j,
    "query": lambda i, j: i,
    "diagonal": lambda i, j: i - j,
}


@pytest.mark.parametrize("kind", ENTRY)
def test_groups_hold_the_scores_of_one_entry(kind: str) -> None:
    groups = GROUPS[kind]
    assert sorted(i for group in groups for i in group) == list(range(SCORES))
    for lane in range(32):
        entries = [{ENTRY[kind](*place_of(i, lane)[::-1]) for i in group} for group in groups]
        assert all(len(found) == 1 for found in entries)
        assert len({next(iter(found)) for found in entries}) == len(groups)  # none could be joined


KINDS = {
    "tile": [
        lambda s, t, *, h: F.silu(s + t[h, 0]),
        lambda s, t, *, h, b, q_idx, kv_idx: F.silu(s + t[h, b % 2] * (q_idx - kv_idx)),
    ],
    "query": [lambda s, t, *, h, q_row: F.silu(s + t[h, q_row])],
    "key": [lambda s, t, *, h, kv_idx: F.silu(s + t[h, kv_idx // 2])],
    "diagonal": [
        lambda s, t, *, h, q_idx, kv_idx: F.silu(s + t[h, q_idx - kv_idx + 9]),
        lambda s, t, *, h, q_row, kv_row: F.silu(s + t[h, (kv_row - q_row).abs().clamp(max=9)]),
        lambda s, t, *, h, q_idx, kv_idx, q_len: F.silu(s + t[h, -(kv_idx - 2) + q_len + q_idx]),
        lambda s, t, *, q_idx, kv_idx: F.silu(s + t[(q_idx - kv_idx) % 4, (q_idx - kv_idx) // 4]),
    ],
    "pair": [
        lambda s, t, *, h, q_idx, kv_idx: F.silu(s + t[h, q_idx + kv_idx]),
        lambda s, t, *, q_idx, kv_idx: F.silu(s + t[q_idx, kv_idx]),
        lambda s, t, *, h, q_idx, kv_idx: F.silu(s + t[h, 2 * q_idx - kv_idx]),
        lambda s, t, *, h, q_idx, kv_idx: F.silu(s + t[h, q_idx // 2 - kv_idx // 2]),
        lambda s, t, *, h, q_idx, kv_idx: F.silu(s + t[h, (q_idx * 0.5).long() - kv_idx]),
    ],
}


@pytest.mark.parametrize("kind", KINDS)
def test_indices_are_told_apart(kind: str) -> None:
    for fn in KINDS[kind]:
        placed = resolve_one(fn, 0, (TableKind(2, torch.float32),)).placed
        (learned,) = placed.learned
        assert kind_of(placed.program, placed.program.graph.outputs[learned].index) == kind


# ---- the code, run by threads of a warp group that has a tile of 64 keys and 64 queries ------------------------------
PLACES = [place_of(score, THREADS) for score in range(SCORES)]
COPIES, PROGRAM = 16, 3


def gradient_of(
    fn: Any, tables: list[torch.Tensor], ds: torch.Tensor, first_q: int, length: int = 300
) -> tuple[torch.Tensor, int, bool]:
    """What the code adds to the first table for queries from ``first_q`` on, how many additions it takes, and whether
    they are spread over copies, as those of most kinds are."""
    placed = resolve_one(fn, 0, tuple(TableKind(t.ndim, t.dtype) for t in tables)).placed
    index, _, entries = _lookup(placed.program, placed.learned[0])
    block = Additions(placed.program, function_writer(placed.program), index, "ds", entries)
    made = torch.zeros(COPIES, *tables[0].shape)
    count = [0]

    class Counting(Machine):
        def _add(self, address: torch.Tensor, values: torch.Tensor, where: torch.Tensor) -> None:
            count[0] += int(where.sum())
            super()._add(address, values, where)

    def assembly(text: str, constraints: str, given: list[Any], dtype: Any, is_pure: bool, pack: int) -> None:
        assert pack == SCORES
        letters = constraints.split(",")[SCORES::SCORES]
        registers = {"%laneid": (THREADS % 32).int(), "%ctaid.x": torch.full((128,), PROGRAM, dtype=torch.int32)}
        for n, (value, letter) in enumerate(zip(given, letters, strict=True)):
            tile = torch.as_tensor(value).expand(64, 64)
            assert letter == ("l" if tile.dtype == torch.int64 else "r")
            registers |= {f"${SCORES * (1 + n) + k}": tile[place] for k, place in enumerate(PLACES)}
        Counting(registers, [made, *tables[1:]]).run(text)

    i, j = torch.arange(64, dtype=torch.int32)[None] + first_q, torch.arange(64, dtype=torch.int32)[:, None]
    h = torch.tensor(1, dtype=torch.int32)
    named = {"b": h, "h": h, "q_idx": i, "kv_idx": j, "q_len": torch.tensor(length, dtype=torch.int32),
             "kv_len": torch.tensor(length, dtype=torch.int32), "q_row": i, "kv_row": j}  # fmt: skip
    scope = emitted_scope(named, tables, assembly)
    scope |= {
        "ds": ds,
        "gradients": scope["tables"],
        "spot": [None] * 5 + [SimpleNamespace(copies=torch.tensor(COPIES, dtype=torch.int32))],
    }
    exec("\n".join([*block.lines, block.call]), scope)
    copies = int(made.flatten(1).any(1).sum())
    spread = kind_of(placed.program, index) not in ("diagonal", "tile")
    assert spread or copies <= 1
    return made.sum(0), count[0], not spread or copies > 1


def log_bucketed(s, t, times, *, q_row, kv_row):
    return F.silu(s + t[log_buckets(times[q_row] - times[kv_row]).clamp(0, 70)])


def bucketed(s, t, times, *, q_row, kv_row):
    return F.silu(s + t[(times[q_row] - times[kv_row]).clamp(0, 127)])


GROWING = torch.randint(1, 4000, (300,), generator=torch.Generator().manual_seed(0)).cumsum(0)
MIXED = torch.randint(0, 90, (300,), generator=torch.Generator().manual_seed(1))
# The function, its tables, the entries of queries i and keys j, and the most additions of a thread.
CODE: dict[str, tuple[Any, list[torch.Tensor], Callable[..., Any], int]] = {
    "head": (lambda s, t, *, h: F.silu(s + t[h]), [torch.zeros(4)], lambda i, j: 1, 1 / 32),
    "key": (lambda s, t, *, kv_row: F.silu(s + t[kv_row // 2]), [torch.zeros(40)], lambda i, j: j // 2, 0.5),
    "query": (lambda s, t, *, q_row: F.silu(s + t[q_row]), [torch.zeros(300)], lambda i, j: i, 2),
    "distance": (lambda s, t, *, h, q_idx, kv_idx: F.silu(s + t[h, (q_idx - kv_idx).clamp(-20, 20) + 20]),
                 [torch.zeros(2, 41)], lambda i, j: 41 + (i - j).clamp(-20, 20) + 20, 4),
    "distance, partly outside": (lambda s, t, *, q_idx, kv_idx: F.silu(s + t[q_idx - kv_idx]),
                                 [torch.zeros(90)], lambda i, j: of_length(90, i - j), 4),
    "logarithms of 64 bits": (log_bucketed, [torch.zeros(71), GROWING],
                              lambda i, j: log_buckets(GROWING[i] - GROWING[j]).clamp(0, 70), 32),
    "logarithms": (log_bucketed, [torch.zeros(71), GROWING.int()],
                   lambda i, j: log_buckets(GROWING[i] - GROWING[j]).clamp(0, 70), 32),
    "buckets without runs": (bucketed, [torch.zeros(128), MIXED.int()],
                             lambda i, j: (MIXED[i] - MIXED[j]).clamp(0, 127), 32),
    "buckets, too few": (bucketed, [torch.zeros(50), MIXED.int()],
                         lambda i, j: of_length(50, (MIXED[i] - MIXED[j]).clamp(0, 127)), 32),
    "outside, and from the end": (lambda s, t, *, q_idx, kv_idx: F.silu(s + t[q_idx - 2 * kv_idx]),
                                  [torch.zeros(60)], lambda i, j: of_length(60, i - 2 * j), 32),
    "entries that tell entries": (lambda s, t, u, *, q_idx, kv_idx: F.silu(s + t[u[q_idx + kv_idx].long()]),
                                  [torch.zeros(60), MIXED.float()], lambda i, j: of_length(60, MIXED[i + j]), 32),
    "entries that choose": (lambda s, t, u, *, q_idx, kv_idx: F.silu(s + t[torch.where(u[q_idx - kv_idx] > 40, 1, 2)]),
                            [torch.zeros(3), MIXED.float()], lambda i, j: torch.where(MIXED[i - j] > 40, 1, 2), 32),
    "no code in PTX": (lambda s, t, *, q_idx, kv_idx: F.silu(s + t[(q_idx * kv_idx) % 7]),
                       [torch.zeros(7)], lambda i, j: (i * j) % 7, 32),
}  # fmt: skip


def of_length(n: int, entry: torch.Tensor) -> torch.Tensor:
    """-1 outside; a negative index counts from the end."""
    entry = torch.where(entry < 0, entry + n, entry)
    return torch.where((entry >= 0) & (entry < n), entry, -1)


@pytest.mark.parametrize(("name", "first_q"), [(name, n) for i, name in enumerate(CODE) for n in in_turn((0, 64), i)])
def test_emitted_additions(name: str, first_q: int) -> None:
    fn, tables, entry_of, most = CODE[name]
    ds = torch.randn(64, 64, generator=torch.Generator().manual_seed(2))
    found, count, spread = gradient_of(fn, tables, ds, first_q)
    i, j = torch.arange(64)[None] + first_q, torch.arange(64)[:, None]
    entries = torch.as_tensor(entry_of(i, j)).expand(64, 64)
    want = torch.zeros(tables[0].numel() + 1).index_add(0, entries.flatten() % (tables[0].numel() + 1), ds.flatten())
    torch.testing.assert_close(found.flatten(), want[:-1], atol=1e-4, rtol=1e-5)
    assert count <= 128 * most
    assert spread


def test_runs_are_added_up_first() -> None:
    """A thread has two keys, and 64 queries 200 hours later are in three buckets of each."""
    times = 3600 * torch.arange(300)
    _, count, _ = gradient_of(log_bucketed, [torch.zeros(71), times], torch.ones(64, 64), 200)
    assert count <= 128 * 2 * 3
    _, count, _ = gradient_of(bucketed, [torch.zeros(128), times.int()], torch.ones(64, 64), 200)
    assert count == 128 * 2


# ---- indices drawn at random -----------------------------------------------------------------------------------------
START = {"tile": ["h", "b"], "key": ["kv_idx", "kv_row"], "query": ["q_idx", "q_row"],
         "diagonal": ["(q_idx - kv_idx)", "(kv_row - q_row)"],
         "pair": ["(2 * q_idx - kv_row)", "(q_row + kv_idx)"]}  # fmt: skip
STEPS = ["({0} + {1})", "{0}.clamp(-{1}, 2 * {1})", "({0} // {1})", "({0} % {1})", "(-{0})", "{0}.abs()",
         "torch.where({0} > {1}, {0}, 2)", "u[{0}]", "(-1 - {0})"]  # fmt: skip


def drawn_index(kind: str, r: random.Random) -> str:
    code = r.choice(START[kind])
    for _ in range(r.randint(0, 3)):
        code = r.choice(STEPS).format(code, r.randint(2, 40))
    return code


@pytest.mark.parametrize("kind", START)
@pytest.mark.parametrize("seed", range(40 if FULL else 4))
def test_any_index(kind: str, seed: int) -> None:
    """Clamped, negative, looked up, outside, in one or two dimensions; of sequences that end within the tile."""
    r, g = random.Random(f"{kind} {seed}"), torch.Generator().manual_seed(seed)
    indices = [drawn_index("tile", r)] * r.randint(0, 1) + [drawn_index(kind, r)]
    shape = [r.choice([2, 4])] * (len(indices) - 1) + [r.choice([3, 40, 64, 150])]
    u = torch.randint(-60, 60, (r.choice([64, 300]),), generator=g, dtype=r.choice([torch.int32, torch.int64]))
    names = "*, b, h, q_idx, kv_idx, q_row, kv_row"
    fn = eval(f"lambda s, t, u, {names}: F.silu(s + t[{', '.join(indices)}] + 0 * u[0])", {"F": F, "torch": torch})
    length = r.choice([20, 65, 100, 300])
    i, j = torch.arange(64)[None], torch.arange(64)[:, None]
    ds = torch.where((i < length) & (j < length) & (j <= i), torch.randn(64, 64, generator=g), 0.0)

    class Found:
        def __getitem__(self, at: Any) -> Any:
            at = of_length(len(u), torch.as_tensor(at))
            return torch.where(at >= 0, u[at.clamp(min=0)].long(), 0)

    given = {"b": torch.tensor(1), "h": torch.tensor(1), "q_idx": i, "kv_idx": j, "q_row": i, "kv_row": j}
    entry = torch.zeros(64, 64, dtype=torch.int64)
    for n, code in zip(shape, indices, strict=True):
        at = of_length(n, torch.as_tensor(eval(code, {"torch": torch, "u": Found(), **given})))
        entry = torch.where((entry >= 0) & (at >= 0), entry * n + at, -1)
    found, _, _ = gradient_of(fn, [torch.zeros(shape), u], ds, 0, length)
    count = found.numel() + 1
    want = torch.zeros(count).index_add(0, entry.flatten() % count, ds.flatten())
    torch.testing.assert_close(found.flatten(), want[:-1], atol=2e-4, rtol=1e-5)
