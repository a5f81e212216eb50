"""Which model reads the synthetic log best: no sequence, DIN, InterFormer one way and both ways; and its functions.

    python benchmarks/ordering.py [--out benchmarks/results/ordering.json]

Every model sees 102,400 samples once, in 400 steps, and is tested on 16,000 others of the same world; all have the
defaults of their Config and the same learning rate. A seed changes the world, the samples and the starting weights. Two
models at a time on 2 cores, about 12 minutes.
"""

from __future__ import annotations

import multiprocessing
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import click
import torch
from rich.table import Table

from gdpa.bench import machine, results
from gdpa.commands.terminal import make_console, progress
from gdpa.demo.statistics import interval, paired
from gdpa.train import train

LADDER: dict[str, dict[str, Any]] = {
    "no sequence": {"name": "dlrm"},
    "DIN": {"name": "din"},
    "InterFormer, one way": {"name": "interformer", "options": {"both_ways": False}},
    "InterFormer, both ways": {"name": "interformer"},
}
FUNCTIONS: dict[str, dict[str, Any]] = {
    f"InterFormer, {function}": {"name": "interformer", "options": {"activation": function}}
    for function in ("softmax", "silu")
}


def settings(model: dict[str, Any], seed: int, steps: int, test_size: int) -> dict[str, Any]:
    data = {"seed": seed, "size": 256 * steps, "valid_size": 0, "test_size": test_size, "longest": 32}
    return {
        "seed": seed, "data": data, "model": model, "batch_size": 256, "steps": steps, "lr": 0.005,
        "warmup": steps // 8, "schedule": "linear",
    }  # fmt: skip


def run(job: tuple[dict[str, Any], int, int, int]) -> dict[str, float]:
    """The test metrics of one run."""
    torch.set_num_threads(1)
    return train(settings(*job)).metrics["test"]


def table(document: dict[str, Any]) -> Table:
    shown = Table("model", "test AUC", "LogLoss", "less the row above, by seed", "least")
    runs, above = document["runs"], None
    for name, found in runs.items():
        aucs = [metrics["auc"] for metrics in found]
        auc, loss = interval(aucs), interval([metrics["logloss"] for metrics in found])
        row = [name, f"{auc.mean:.4f} ± {auc.half or 0:.4f}", f"{loss.mean:.4f} ± {loss.half or 0:.4f}"]
        if above is not None and name in LADDER:
            gain, least = paired(aucs, above), min(a - b for a, b in zip(aucs, above, strict=True))
            row += [f"{gain.mean:+.4f} ± {gain.half or 0:.4f}", f"{least:+.4f}"]
        shown.add_row(*row)
        above = aucs
    return shown


@click.command()
@click.option("--seeds", default=5, show_default=True)
@click.option("--steps", default=400, show_default=True)
@click.option("--test-size", default=16_000, show_default=True)
@click.option("--workers", default=2, show_default=True)
@click.option("--out", type=click.Path(path_type=Path), default=Path("benchmarks/scratch/ordering.json"))
def main(seeds: int, steps: int, test_size: int, workers: int, out: Path) -> None:
    console, models = make_console(), {**LADDER, **FUNCTIONS}
    jobs = [(model, seed, steps, test_size) for model in models.values() for seed in range(seeds)]
    with (
        ProcessPoolExecutor(workers, multiprocessing.get_context("spawn")) as pool,
        progress(console, len(jobs), "training") as step,
    ):
        found = []
        for metrics in pool.map(run, jobs):
            found.append(metrics)
            step(f"{len(found)} of {len(jobs)} runs")
    runs = {name: found[i * seeds : (i + 1) * seeds] for i, name in enumerate(models)}
    document = machine.describe(torch.device("cpu"))
    document |= {"settings": settings({}, 0, steps, test_size), "seeds": seeds, "runs": runs}
    results.save(document, out)
    console.print(table(document))


if __name__ == "__main__":
    main()
