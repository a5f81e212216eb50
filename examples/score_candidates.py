"""Rank 100 candidates for one user: read the history once, or once for each candidate, and compare the times."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

import gdpa
from gdpa.data import Batch, Inputs, PackedEvents

CANDIDATES, ROUNDS = 100, 3


def median_ms(run: Callable[[], object]) -> float:
    run()
    times = []
    for _ in range(ROUNDS):
        started = time.perf_counter()
        run()
        times.append(time.perf_counter() - started)
    return 1e3 * sorted(times)[ROUNDS // 2]


def repeated(events: PackedEvents, n: int) -> PackedEvents:
    """The history of one user, n times."""
    length = events.ids.shape[0]
    cu = torch.arange(n + 1, dtype=torch.int32) * length
    return PackedEvents(events.ids.repeat(n, 1), events.values.repeat(n, 1), cu, length)


def main() -> tuple[float, float]:
    """How much scores differ from each other, and from those of the plain forward."""
    spreads, errors = [], []
    torch.manual_seed(0)
    log = gdpa.data.SyntheticLog(seed=0, lengths="uniform", longest=200)
    first = [log.sample(i) for i in range(50)]
    user: Batch = gdpa.data.collate([max(first, key=lambda sample: len(sample.sequences["history"]))])
    history = user.sequences["history"]
    # Every candidate is an item and its category, in the situation of the user.
    items = torch.randint(0, log.vocabulary_sizes["item"], (CANDIDATES,))
    sparse = user.sparse.repeat(CANDIDATES, 1)
    sparse[:, 0], sparse[:, 1] = items, items % log.vocabulary_sizes["category"]
    dense = user.dense.repeat(CANDIDATES, 1)

    candidates = Inputs(dense, sparse, {"history": history})
    plain = Inputs(dense, sparse, {"history": repeated(history, CANDIDATES)})
    counts = torch.tensor([CANDIDATES])  # all of them are of the first and only user
    print(f"{CANDIDATES} candidates, a history of {history.ids.shape[0]} events")
    for name in ("transformer", "interformer", "kunlun"):
        model = gdpa.models.build(name, gdpa.models.Features.of(log), activation="silu", both_ways=False).eval()
        with torch.inference_mode():
            scores = model.score_candidates(candidates, counts)
            spreads.append(float(scores.std()))
            errors.append(float((scores - model(plain)).abs().max()))
            once = median_ms(lambda model=model: model.score_candidates(candidates, counts))  # type: ignore[misc]
            each = median_ms(lambda model=model: model(plain))  # type: ignore[misc]
        times = f"history once {once:6.1f} ms, for each {each:6.1f} ms, ratio {each / once:5.1f}"
        print(f"{name:12} {times}, difference {errors[-1]:.1e}")
    return min(spreads), max(errors)


if __name__ == "__main__":
    main()
