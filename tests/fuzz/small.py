"""Small calls of the fuzzer, to be changed one thing at a time."""

from __future__ import annotations

from dataclasses import replace

import torch

from gdpa.fuzz import draw, run
from gdpa.fuzz.draw import Call, Config
from gdpa.testing.cases import Case

CPU = torch.device("cpu")
TARGET = run.Target(CPU, "cpu")
PACKED = Case("packed", (70, 0, 9), (37, 5, 40), heads=2, heads_k=1, d=16, dv=16, packed_q=True, packed_k=True)
SAME = replace(PACKED, len_q=(50, 1, 20), len_k=(50, 1, 20))
DENSE = Case("dense", (40, 40), (33, 33), heads=2, heads_k=1, d=16, dv=16)
SHARED = replace(DENSE, name="shared-packed-keys", len_q=(12, 12), len_k=(0, 40), packed_k=True, shared=True)
CASES = (PACKED, SAME, DENSE, SHARED)
CONFIG = Config(
    "silu", "float32", 16, 16, 1, 2, "packed", False, False, None, True, ("contiguous",) * 3, "contiguous", True, False,
    False, (False, False),
)  # fmt: skip
CALL = Call(
    5, CONFIG, PACKED, "edges", None, 0.5, 0, None, None, None, False, draw.Scores(0.0, 1.0), 0.0,
)  # fmt: skip


def outcome(case: Case, seed: int = 5, **changes) -> run.Outcome:
    """Of one small call."""
    config = replace(CONFIG, used=(case.slots_q is not None, case.slots_k is not None), **changes)
    return run.run_call(replace(CALL, seed=seed, case=case, config=config), TARGET)
