"""What is made of a result: the file, tables, plots and the HTML report."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest
import torch

from gdpa.bench import earlier, join, rates, results, timing
from gdpa.bench.functions import benchmark_function
from gdpa.bench.kernels import memory, run, suite
from gdpa.bench.kernels.measurements import describe_case
from gdpa.bench.report import documents, page, summary, tables

CPU = torch.device("cpu")
RATES = rates.Rates(matmul_tflops=0.1, copy_tb_s=0.01)
FASTEST = timing.Effort(warmup_ms=0, measure_ms=0, least=1, most=1)
NAMES_OF_RECORD = {
    "case", "function", "backend", "pass", "median_ms", "p20_ms", "p80_ms", "tflops", "floor_fraction", "peak_mib",
    "precision", "layout", "rms_error", "rms_errors",
}  # fmt: skip
ROWS = 5 + 1 + 1 + 1  # cpu in every layout on the first case, eager, and both on the second


@pytest.fixture(scope="module")
def document() -> dict:
    """A real run of two tiny cases, without the time that memory and rates take."""
    plan = run.make_plan(("self-256", "pma-d64"), (benchmark_function("softplus_squared"),), device=CPU)
    plan = replace(plan, effort=FASTEST, precisions=("exact",))
    plan = replace(plan, cases=tuple(replace(c, len_q=c.len_q[:2], len_k=c.len_k[:2]) for c in plan.cases))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(memory, "cpu_peaks", lambda request: [{"fwd": 2**20, "bwd": 2**21, "both": 2**21}])
        patch.setattr(run, "measure_rates", lambda device, dtype, effort: RATES)
        return run.run(plan)


def test_records_have_what_readers_need(document: dict) -> None:
    assert len(document["records"]) == ROWS * 3
    for record in document["records"]:
        assert set(record) >= NAMES_OF_RECORD
        assert record["precision"] == ("exact" if record["backend"] == "cpu" else None)
        assert 0 < record["rms_error"] < 1e-5  # float32
        names = {"fwd": {"out"}, "bwd": {"dq", "dk", "dv"}, "both": {"out", "dq", "dk", "dv"}}[record["pass"]]
        assert set(record["rms_errors"]) == names
        assert record["rms_error"] == max(record["rms_errors"].values())
        assert record["function"] == "softplus_squared"
        assert record["floor_fraction"] > 0
        assert record["p20_ms"] <= record["median_ms"] <= record["p80_ms"]
    assert {r["pass"] for r in document["records"]} == {"fwd", "bwd", "both"}
    assert {"date", "commit", "versions", "gpu", "cpu", "clocks", "rates", "cases", "dtype"} <= set(document)
    assert len(document["rates"]["readings"]) == 3
    assert document["cases"]["self-256"]["gflop"]["fwd"] > 0


def test_document_survives_its_file(document: dict, tmp_path: Path) -> None:
    path = tmp_path / "deep" / "result.json"
    results.save(document, path)
    assert results.read(path) == document
    for text, message in (("[]", "not a result"), ("{", "not JSON")):
        path.write_text(text)
        with pytest.raises(ValueError, match=message):
            results.read(path)


def test_a_file_is_whole_or_untouched(document: dict, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run may be killed while it writes."""
    path = tmp_path / "result.json"
    results.save(document, path)
    assert [p.name for p in tmp_path.iterdir()] == ["result.json"]

    def killed(self: Path, text: str) -> None:
        self.open("w").close()
        raise KeyboardInterrupt

    monkeypatch.setattr(Path, "write_text", killed)
    with pytest.raises(KeyboardInterrupt):
        results.save({**document, "records": []}, path)
    assert results.read(path) == document


def test_runs_in_pieces_become_one_result(document: dict) -> None:
    """What was measured again counts; what one run left out and another did is no longer left out."""
    later = json.loads(json.dumps(document))
    moved, kept = later["records"][:3], later["records"][3:]
    for record in kept:
        record["median_ms"] *= 2
    later["rates"]["copy_tb_s"] = 99.0
    name = {key: moved[0][key] for key in ("case", "function", "backend", "precision", "layout")}
    other = {**name, "case": "pma-d64", "backend": "flex-log", "precision": None, "why": "no"}
    later.update(records=kept, skipped=[{**name, "why": "later"}, other])
    found = join.joined([document, later])
    assert len(found["records"]) == len(document["records"])
    assert found["records"][:3] == moved
    assert found["records"][3:] == kept
    assert found["skipped"] == [other]
    assert len(found["rates"]["readings"]) == len(found["clocks"]) == 6
    assert (found["rates"]["copy_tb_s"], found["took_s"]) == (99.0, round(2 * document["took_s"], 1))
    assert tables.table(found).row_count == ROWS
    with pytest.raises(ValueError, match="cannot be joined: dtype 'float32' and 'bfloat16'"):
        join.joined([document, {**later, "dtype": "bfloat16"}])


def test_reports(document: dict, tmp_path: Path) -> None:
    assert tables.table(document).row_count == ROWS
    assert "cpu packed-nohint" in list(tables.table(document).columns[2].cells)
    text = tables.markdown(document, ["self-*"])
    assert "self-256" in text
    assert "pma" not in text
    faster = json.loads(json.dumps(document))
    for record in faster["records"]:
        record["floor_fraction"] *= 2
    assert tables.comparison(faster, document).row_count == len(document["records"])


def test_comparison_says_what_cannot_be_compared(document: dict) -> None:
    old = {**document, "gpu": "another one", "records": document["records"][3:]}
    caption = str(tables.comparison(document, old).caption)
    assert "gpu differs: another one before, None now" in caption
    assert "3 records are only in the new result" in caption
    assert tables.comparison(document, old).row_count == len(document["records"]) - 3


def test_reasons_are_told_once(document: dict) -> None:
    why = {"function": "softmax", "backend": "sdpa-cudnn", "why": "it takes dense tensors"}
    cases = {f"jagged-{i}": {"layout": "packed"} for i in range(9)}
    entries = [{"case": name, "precision": None, "layout": "packed", **why} for name in cases]
    lines = tables.skipped({**document, "cases": cases, "skipped": entries})
    assert len(lines) == 1
    assert "jagged-0" in lines[0]
    assert "3 more" in lines[0]


@pytest.fixture(scope="module")
def wide(document: dict) -> dict:
    """The document as a GPU's, with the lengths of a family, a softmax contender and a refusal that needs escaping."""
    steady = [{**r, "p20_ms": r["median_ms"], "p80_ms": r["median_ms"]} for r in document["records"]]
    cases, records = dict(document["cases"]), list(steady)
    for record in steady:
        if record["case"] == "self-256":
            records += [{**record, "case": f"self-{n}"} for n in (512, 1024)]
            records += [{**record, "case": "self-256-d64"}]
            if record["backend"] == "eager":
                softmax = {
                    **record,
                    "function": "softmax",
                    "backend": "sdpa-cudnn",
                    **{key: 2 * record[key] for key in ("median_ms", "p20_ms", "p80_ms")},
                }
                records.append(softmax)
    for name in ("self-512", "self-1024", "self-256-d64"):
        cases[name] = document["cases"]["self-256"]
    names = {"case": "self-256", "function": "softmax", "backend": "sdpa-flash", "precision": None, "layout": "heads"}
    refusal = {**names, "why": "a < b & c"}
    rates = {"cublas_tflops": 700.0, "copy_tb_s": 4.0, "readings": document["rates"]["readings"]}
    readings = [{**r, "cublas_tflops": 700.0} for r in rates["readings"]]
    clocks = [{"clocks.sm": 1900.0}, None, {"clocks.sm": 1800.0}]
    head = {"gpu": "A <GPU>", "clocks": clocks, "rates": {**rates, "readings": readings}, "skipped": [refusal]}
    return {**document, **head, "cases": cases, "records": records}


def test_softmax_stands_beside_every_function(wide: dict) -> None:
    found = results.groups(wide)
    assert set(found["self-256", "softplus_squared"]) == {"cpu", "eager", "sdpa-cudnn"}
    assert ("self-256", "softmax") not in found


def test_plots(wide: dict, document: dict, tmp_path: Path) -> None:
    from gdpa.bench.report.plot import groups, plot, split

    pytest.importorskip("matplotlib")
    lines, rest = split(groups(wide), "softplus_squared")
    assert {key: sorted(family) for key, family in lines.items()} == {("self", 128): [256, 512, 1024]}
    assert {case for case, _ in rest} == {"pma-d64", "self-256-d64"}
    said = plot(wide, tmp_path / "deep" / "x.png")
    assert "x-lengths.png" in said
    for name in ("x.png", "x-lengths.png", "x-layouts.png", "x-errors.png"):
        assert (tmp_path / "deep" / name).read_bytes().startswith(b"\x89PNG")
    few = {**document, "records": [{**r, "rms_error": None} for r in document["records"] if r["layout"] == "heads"]}
    plot(few, tmp_path / "few.png")  # one length, one layout, no errors: bars only
    assert [path.name for path in tmp_path.glob("few*")] == ["few.png"]


class Structure(HTMLParser):
    """Counts what a page holds, and refuses tags that are not closed."""

    VOID = ("meta", "img", "br", "hr")

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.counts: Counter[str] = Counter()
        self.links: list[str] = []
        self.text = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.counts[tag] += 1
        self.links += [value or "" for name, value in attrs if name in ("src", "href")]
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


def test_page_is_whole_and_needs_nothing_else(wide: dict, tmp_path: Path) -> None:
    assert "x.html" in page.write_page(wide, tmp_path / "x.html")
    source = (tmp_path / "x.html").read_text(encoding="utf-8")
    seen = Structure()
    seen.feed(source)
    assert seen.open == []
    assert seen.counts["h3"] == len(wide["cases"])
    assert seen.counts["table"] == 3 + len(wide["cases"])  # facts, rates, overview, and one for each case
    assert seen.counts["svg"] == 4
    assert seen.counts["img"] == 0
    assert all(link.startswith("#") for link in seen.links)
    assert "A &lt;GPU&gt;" in source
    assert "sdpa-flash (softmax) not run: a < b & c" in seen.text
    words = (
        "speed vs cuDNN fwd / bwd",
        "2.00 / 2.00",
        "1.00 / 1.00",
        "SM clock, MHz",
        "middle",
        "roofline",
        wide["date"],
    )
    for word in words:
        assert word in seen.text, word
    for word in ("precision", "layout", "rms error fwd / bwd", "packed-nohint", "e-7"):
        assert word in seen.text, word


def test_page_of_a_cpu_and_of_a_result_without_products(document: dict) -> None:
    """Results of earlier versions have fewer fields."""
    readings = [{key: r[key] for key in ("matmul_tflops", "copy_tb_s")} for r in document["rates"]["readings"]]
    old = {**document, "rates": {**document["rates"], "readings": readings}}
    del old["took_s"]
    for found in (document, old):
        assert "GFLOP/s" in page.page(found)


def test_results_of_earlier_versions() -> None:
    """Their kernels on GPUs were what is called fast now; nobody had measured errors."""
    found = results.read(Path(__file__).parents[2] / "benchmarks" / "results" / "h200-d64.json")
    raw = json.loads(json.dumps(found))
    for entry in (*raw["records"], *raw["skipped"]):
        for name in ("precision", "layout", "rms_error", "rms_errors"):
            entry.pop(name, None)
    for case in raw["cases"].values():
        case.pop("layout")
    raw["cases"]["jagged-512"] = next(iter(raw["cases"].values()))
    raw["records"] += [{**r, "case": "jagged-512"} for r in raw["records"] if r["backend"] in ("hopper", "eager")]
    old = earlier.completed(raw)
    assert {(r["backend"], r["precision"]) for r in old["records"]} >= {("hopper", "fast"), ("sdpa-cudnn", None)}
    assert {(r["case"][:4], r["layout"]) for r in old["records"]} == {("self", "heads"), ("jagg", "packed")}
    assert all(r["rms_error"] is None for r in old["records"])
    assert earlier.completed(old) == old
    head = summary.markdown(old, ["hopper", "triton", "sdpa-cudnn"]).splitlines()[0]
    assert head == "| case | function | hopper fast | triton fast | sdpa-cudnn | hopper fast, of roofline |"
    assert tables.table(old).row_count > 0
    page.page(old)


def test_words_for_a_case() -> None:
    def words(name: str) -> str:
        return page.case_words(describe_case(suite.make(name)))

    assert "queries 64; keys up to 2048" in words("pma")
    assert "all before and 0 after" in words("causal-2048")
    assert "128 before and 128 after" in words("window128-2048")


def test_tables_in_documents(document: dict, tmp_path: Path) -> None:
    (tmp_path / "pyproject.toml").touch()
    results.save(document, tmp_path / "results" / "x.json")
    page = tmp_path / "README.md"
    page.write_text(
        "a\n<!-- table: bench results/x.json self-* -->\nold\n<!-- end -->\nb\n<!-- table: builtins -->\n<!-- end -->\n"
    )
    assert documents.refresh(page) == 2
    text = page.read_text()
    assert "old" not in text
    assert "| self-256 | softplus_squared | cpu |" in text
    assert "| `gelu` |" in text
    assert documents.refresh(page) == 2
    assert page.read_text() == text
    page.write_text("nothing")
    with pytest.raises(ValueError, match="no table to fill"):
        documents.refresh(page)


def test_speeds_and_errors_in_one_line_per_case(document: dict) -> None:
    """A column per contender, fast beside exact, and how near the first one is to the floor."""
    quick = [{**r, "precision": "fast", "tflops": 0.001, "rms_error": 2e-6} for r in document["records"][:3]]
    both = {**document, "records": document["records"] + quick}
    text = summary.markdown(both, ["cpu", "eager"])
    head, _, *lines = text.split("\n\n")[0].splitlines()
    assert head == "| case | function | cpu | cpu fast | eager | cpu, of roofline |"
    assert len(lines) == len(results.groups(document)) == 2
    assert all(line.count("|") == head.count("|") for line in lines)
    first, second = (line.split(" | ") for line in lines)
    assert first[3] == "1 / 1 (20 / 20)"
    assert second[3] == ""
    record = next(r for r in document["records"] if r["pass"] == "bwd")
    assert first[2].endswith(f" / {1e7 * record['rms_error']:.2g})")
    assert "10⁻⁷" in text
    unknown = {**document, "records": [{**r, "rms_error": None} for r in document["records"]]}
    assert "(" not in summary.markdown(unknown, ["cpu"]).split("\n\n")[0]
    with pytest.raises(ValueError, match="none of hopper; it has cpu, eager"):
        summary.markdown(document, ["hopper"])


def test_tables_name_contenders_that_a_file_may_not_have(document: dict) -> None:
    """A document can ask for one before there is a result with it: until then the table is as without it."""
    asked = ["cpu", "torch-varlen", "eager"]
    assert summary.markdown(document, asked) == summary.markdown(document, ["cpu", "eager"])
    theirs = {"backend": "torch-varlen", "function": "softmax", "precision": None, "layout": "packed"}
    eager = [r for r in document["records"] if r["backend"] == "eager" and r["case"] == "pma-d64"]
    text = summary.markdown({**document, "records": document["records"] + [{**r, **theirs} for r in eager]}, asked)
    head, _, *lines = text.split("\n\n")[0].splitlines()
    assert head == "| case | function | cpu | torch-varlen | eager | cpu, of roofline |"
    assert [bool(line.split(" | ")[3]) for line in lines] == [False, True]
    assert "sdpa-* compute softmax, on dense cases only; torch-varlen, too, on packed ones only. " in text


def test_a_headline_is_of_one_function(document: dict) -> None:
    """The first one that a case was measured with, unless another one is named."""
    own = [r for r in document["records"] if r["backend"] == "cpu" and r["layout"] == "heads"]
    rival = [r | {"backend": summary.RIVAL, "function": "softmax", "precision": None} for r in own]
    slower = [r | {"function": "gelu", "tflops": r["tflops"] / 8, "median_ms": r["median_ms"] * 8} for r in own]
    result = document | {"records": [*own, *slower, *rival]}
    first, other = (
        summary.headline_markdown(result, [case]).splitlines()[2].split(" | ") for case in ("self-256", "self-256:gelu")
    )
    assert (first[:2], other[:2]) == (["| self-256", "softplus_squared"], ["| self-256", "gelu"])
    assert float(first[2].split(" / ")[0]) > 4 * float(other[2].split(" / ")[0])
    shapes = {"self-256": {"batch": 8, "heads": 4, "d": 64}, "self-512": {"batch": 8, "heads": 4, "d": 128}}
    shapes["self-9"] = {"batch": 2, "heads": 4, "d": 128}
    words = summary._sizes({"cases": shapes}, ["self-512", "self-9", "self-256:gelu"])
    assert words == "batch 8 (self-9: 2), 4 heads of 128 (self-256: 64)"
    with pytest.raises(ValueError, match="has no self-256:relu of both"):
        summary.headline_markdown(result, ["self-256:relu"])


def test_layouts_in_one_line_per_case(document: dict) -> None:
    head, _, *lines = summary.layouts_markdown(document, ["cpu"]).split("\n\n")[0].splitlines()
    assert head == "| case | function | backend | heads | rows | packed | packed-nohint | qkv |"
    assert len(lines) == 1  # the other case has one layout
    assert lines[0].count("(") == 5
