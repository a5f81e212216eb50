"""What a run has found so far, as a document at any time."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from gdpa.bench.contenders.layouts import native
from gdpa.bench.kernels.passes import PASSES, floor, flops
from gdpa.bench.rates import Rates, best
from gdpa.bench.results import product_rate
from gdpa.testing.cases import Case


@dataclass
class Measurements:
    """Records, refusals and readings of the machine's rates; ``head`` is what the document begins with."""

    head: dict[str, Any]
    itemsize: int
    cases: tuple[Case, ...]
    records: list[dict[str, Any]] = field(default_factory=list)
    skipped: list[dict[str, str | None]] = field(default_factory=list)
    readings: list[tuple[str, Rates]] = field(default_factory=list)
    clocks: list[dict[str, float] | None] = field(default_factory=list)

    def add(self, names: dict[str, str | None], result: list[dict[str, Any]] | str) -> None:
        """The records of a contender on a case, or why there are none; ``names`` says which contender and case."""
        if isinstance(result, str):
            self.skipped.append({**names, "why": result})
        else:
            self.records += result

    def add_rates(self, when: str, rates: Rates, clocks: dict[str, float] | None) -> None:
        self.readings.append((when, rates))
        self.clocks.append(clocks)

    def document(self, took_s: float) -> dict[str, Any]:
        """Everything, with fractions of the floor that the best rates so far set."""
        rates, cases = best([reading for _, reading in self.readings]), {case.name: case for case in self.cases}

        def fraction(record: dict[str, Any]) -> float:
            return floor(cases[record["case"]], record["pass"], self.itemsize, rates) / record["median_ms"]

        return {
            **self.head,
            "took_s": round(took_s, 1),
            "clocks": list(self.clocks),
            "rates": self._rates(rates),
            "records": [{**record, "floor_fraction": fraction(record)} for record in self.records],
            "skipped": list(self.skipped),
        }

    def _rates(self, rates: Rates) -> dict[str, Any]:
        """The rates used, and every reading of them."""
        product = product_rate(self.head)

        def show(r: Rates) -> dict[str, Any]:
            return {product: r.matmul_tflops, "copy_tb_s": r.copy_tb_s}

        readings = [{"when": when, **show(r), "products": dict(r.products)} for when, r in self.readings]
        return {**show(rates), "readings": readings}


def describe_case(case: Case) -> dict[str, Any]:
    """What a reader of the numbers needs to know of a case."""
    return {
        "batch": len(case.len_q),
        "heads": case.heads,
        "d": case.d,
        "max_q": max(case.len_q),
        "mean_q": sum(case.len_q) / len(case.len_q),
        "max_k": max(case.len_k),
        "mean_k": sum(case.len_k) / len(case.len_k),
        "band": list(case.band),
        "layout": native(case),
        "gflop": {which: flops(case, which) / 1e9 for which in PASSES},
    }
