"""Reports of a run, of a comparison and of a decision: that the page is whole, strict and self-contained, and that a browser agrees."""

import dataclasses
import json
import math
import shutil
import subprocess
from html.parser import HTMLParser
from pathlib import Path
from xml.etree import ElementTree

import pytest
from bench_planned import CPU, chat, poisson, run_of
from hypothesis import example, given
from hypothesis import strategies as st

from baton.bench.decide.record import Capacity, Cell, DecideRecord, Equality, Machine, Targets, Topology, Verdict, load, save
from baton.bench.energy import DeviceEnergy, Energy, EnergySource, IdlePower
from baton.bench.errors import BenchFileError
from baton.bench.generator import Measured
from baton.bench.measures import Objectives
from baton.bench.percentiles import Percentiles
from baton.bench.plan import FleetShape
from baton.bench.report import collect, html_page, markdown, write_report
from baton.bench.report.content import Bar, HeatMap, LineChart, Report, Section, Series, Table, Waterfall
from baton.bench.report.scale import Scale
from baton.bench.report.svg import draw
from baton.bench.runfile import Run, RunWriter

VOID = {"meta", "link", "br", "hr", "img"}
NASTY = '<script>alert("x")</script> & "quotes" | pipes'
CHROMIUM = next((path for name in ("chromium", "chromium-browser", "google-chrome") if (path := shutil.which(name))), None)


class Strict(HTMLParser):
    """Every tag is closed in order; nothing is fetched."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.seen: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.append(tag)
        for name, value in attrs:
            assert not (name in ("src", "href") and not (value or "").startswith("data:")), f"{tag} fetches {value}"
            assert not name.startswith("on"), f"{tag} has {name}"
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def parsed(page: str) -> Strict:
    strict = Strict()
    strict.feed(page)
    strict.close()
    assert strict.open == []
    assert "script" not in strict.seen
    assert "url(" not in page
    assert "@import" not in page
    for svg in page.split("<svg")[1:]:
        root = ElementTree.fromstring("<svg" + svg.split("</svg>")[0] + "</svg>")
        for element in root.iter():
            for value in element.attrib.values():
                assert "nan" not in value.lower().split()
                assert "inf" not in value.lower().split()
    return strict


def with_states(run: Run) -> Run:
    """As Baton's gateway reports them."""
    samples = []
    for number, sample in enumerate(run.samples):
        whole_ms, first_ms = 1000 * (sample.ended_s - sample.sent_s), 1000 * (sample.token_s[0] - sample.sent_s)
        states = {
            "state_bootstrapping_ms": 1.0,
            "state_waiting_ms": first_ms - 1.0,
            "state_transferring_ms": 5.0,
            "state_success_ms": whole_ms - first_ms - 6.0,
        }
        is_long = (sample.prompt_tokens or 0) > 1000
        samples.append(dataclasses.replace(sample, is_long=is_long, kind="document" if is_long else "chat", server=states if number else {}))
    return Run(run.header, tuple(samples), run.loop_lag_s)


def written(folder: Path, name: str, run: Run) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    writer = RunWriter(folder / f"{name}.jsonl", dataclasses.replace(run.header, name=name))
    writer.add(0, run.samples, Measured(loop_lag_s=[0.0001]))
    writer.close()
    return folder


@pytest.fixture(scope="module")
def runs() -> dict[str, Run]:
    load = poisson(0.4, [(min(prompt, 1200), 12) for prompt, _ in chat(40)])
    shapes = {"plain": FleetShape(num_plain=1), "split": FleetShape(num_prefill=1, num_decode=1)}
    return {name: with_states(run_of(CPU, shape, load)) for name, shape in shapes.items()}


@pytest.fixture
def decided(runs: dict[str, Run], tmp_path: Path) -> Path:
    topologies = (Topology("one", "one", 1, 0, 0, ("plain-0",)), Topology("split-1-1", "split", 0, 1, 1, ("prefill-0", "decode-1")))
    cells = []
    for number, (topology, rate) in enumerate((topology, rate) for topology in topologies for rate in (0.5, 1.0)):
        run = runs["plain" if topology.kind == "one" else "split"]
        written(tmp_path / "cells", f"cell-{number}", run)
        some = Percentiles(40, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0)
        cells.append(
            Cell(number, topology.name, "bracket", 0, rate, 1, f"cells/cell-{number}.jsonl", 0.0, 10.0, 40, 40 - 10 * number, 0, 0, 0, 4, {}, {},
                 rate, 5.0, some, some, some, some, some, some, {}, 480, 480, 0, ("it lagged",) if number == 1 else ())
        )  # fmt: skip
    capacities = (Capacity("one", 0.9, 0.8, 1.0, False, False, "itl"), Capacity("split-1-1", 1.0, 0.9, 1.1, True, False, ""))
    verdict = Verdict("too_close", "one", NASTY, ("a reason",), ("a size",), ("a diagnosis",), capacities, ())
    machine = Machine("a cpu", 2, 1, "linux", (), {}, 0.1)
    record = DecideRecord(1, "now", "baton decide", "m", ("cpu:0", "cpu:1"), False, machine, Targets(100, 50, 0.9, "given"), {"workload": "chat"}, 64,
                          (), topologies, (), Equality(1, 1, ()), tuple(cells), verdict)  # fmt: skip
    save(record, tmp_path)
    return tmp_path


def test_a_run_has_its_charts_and_numbers(runs: dict[str, Run], tmp_path: Path) -> None:
    report = collect(written(tmp_path, "split", runs["split"]), Objectives(5000, 500))
    assert report.kind == "run"
    titles = [section.title for section in report.sections]
    assert titles == [
        "Latency, ms",
        "Served",
        "Time to the first token",
        "Gaps between tokens",
        "split: gaps over time",
        "split: the slowest requests",
    ]
    over_time, slowest = (section.chart for section in report.sections[-2:])
    assert isinstance(over_time, LineChart)
    assert isinstance(slowest, Waterfall)
    assert len(over_time.bands) == sum(sample.is_long for sample in runs["split"].samples) > 0
    assert len(slowest.bars) == 12
    longest = max(runs["split"].samples, key=lambda sample: sample.ended_s - sample.sent_s)
    assert slowest.bars[0].name.startswith(f"{longest.index} (")
    assert slowest.bars[0].spans[-1][2] == pytest.approx(1000 * (longest.ended_s - longest.sent_s), abs=0.01)
    assert set(slowest.states) >= {"bootstrapping", "waiting", "transferring", "decoding"}


def test_runs_are_compared(runs: dict[str, Run], tmp_path: Path) -> None:
    for name, run in runs.items():
        written(tmp_path, name, run)
    report = collect(tmp_path)
    assert report.kind == "compare"
    compared = next(section for section in report.sections if section.title == "plain over split")
    assert compared.table is not None
    assert "TTFT ms" in [row[0] for row in compared.table.rows]
    page = html_page(report)
    assert parsed(page).seen.count("svg") == 6


def test_a_decision_shows_its_verdict_goodput_and_ratios(decided: Path) -> None:
    report = collect(decided)
    assert report.kind == "decide"
    charts = {section.title: section.chart for section in report.sections}
    heat = charts["Which ratio at which load: % of good requests"]
    assert isinstance(heat, HeatMap)
    assert (heat.rows, heat.columns, heat.values) == (("1 plain", "1P:1D"), ("0.5", "1"), ((1.0, 0.75), (0.5, 0.25)))
    goodput = charts["Goodput over load"]
    assert isinstance(goodput, LineChart)
    assert [series.name for series in goodput.series] == ["one", "split-1-1", "all good"]
    assert "it lagged" in report.flags[0]
    page = html_page(report)
    parsed(page)
    assert "&lt;script&gt;alert(&quot;x&quot;)" in page
    text = markdown(report)
    assert "| 1P:1D | 50 % | 25 % |" in text
    assert "at least 1" in text


def test_a_decision_shows_joules_by_role_in_all_three_forms(decided: Path) -> None:
    found = load(decided)
    split = Energy((DeviceEnergy("cuda:0", ("prefill",), 48.0, 10.0), DeviceEnergy("cuda:1", ("decode",), 96.0, 10.0)))
    one = Energy((DeviceEnergy("cuda:0", ("plain",), 240.0, 10.0), DeviceEnergy("cuda:1", (), 24.0, 10.0)))
    cells = tuple(dataclasses.replace(cell, energy=one if cell.topology == "one" else split) for cell in found.cells)
    save(dataclasses.replace(found, cells=cells, energy=EnergySource(idle=(IdlePower("cuda:0", 75.0, 3.0),))), decided)
    report = collect(decided)
    sections = {section.title: section for section in report.sections}
    chart = sections["Energy per output token over load"].chart
    assert isinstance(chart, LineChart)
    assert {series.name: series.points for series in chart.series} == {"one": ((0.5, 0.5), (1.0, 0.5)), "split-1-1": ((0.5, 0.3), (1.0, 0.3))}
    page, text, body = html_page(report), markdown(report), json.dumps(dataclasses.asdict(report))
    parsed(page)
    for form in (page, text, body):
        assert "prefill 0.1, decode 0.2" in form
        assert "cuda:0 75 W" in form
    save(dataclasses.replace(found, energy=EnergySource("no GPU among the devices")), decided)
    bare = markdown(collect(decided))
    assert [line for line in bare.splitlines() if "nergy" in line] == ["* energy: not available: no GPU among the devices"]


def test_all_three_files_are_written_and_earlier_ones_replaced(runs: dict[str, Run], tmp_path: Path) -> None:
    folder = written(tmp_path / "run", "target", runs["plain"])
    for _ in range(2):
        paths = write_report(folder, tmp_path / "out")
    assert [path.name for path in paths] == ["report.html", "report.md", "report.json"]
    body = json.loads(paths[2].read_text())
    assert body["kind"] == "run"
    assert body["sections"][2]["chart"]["series"][0]["points"]


def test_a_run_without_answers_has_a_report(runs: dict[str, Run], tmp_path: Path) -> None:
    failed = tuple(dataclasses.replace(sample, token_s=(), token_counts=(), error="connect", output_tokens=None) for sample in runs["plain"].samples)
    report = collect(written(tmp_path, "target", Run(runs["plain"].header, failed, ())))
    assert html_page(report).count("Nothing was measured.") == 4
    assert "40 of 40 requests failed" in report.flags[0] + report.flags[1]


def test_a_folder_of_something_else_is_named(tmp_path: Path) -> None:
    with pytest.raises(BenchFileError, match=r"holds neither decide\.json nor run files"):
        collect(tmp_path)


def test_markup_in_names_stays_text() -> None:
    series = Series(NASTY, ((1.0, 1.0), (2.0, 3.0)), "dots")
    sections = (
        Section(NASTY, (NASTY,), Table((NASTY,), ((NASTY,), (None,), (1.5,)))),
        Section(NASTY, chart=LineChart(NASTY, NASTY, (series,), mark=(2.0, NASTY))),
        Section(NASTY, chart=Waterfall(NASTY, (Bar(NASTY, ((NASTY, 0.0, 1.0),)),), (NASTY,))),
        Section(NASTY, chart=HeatMap(NASTY, NASTY, (NASTY,), (NASTY,), ((0.5,),))),
    )
    report = Report(NASTY, "run", ((NASTY, NASTY),), (NASTY,), sections)
    parsed(html_page(report))
    assert "\\| pipes" in markdown(report)


POINTS = st.lists(st.tuples(st.floats(0, 1e7), st.floats(0, 1e7)), max_size=40)


@given(POINTS, st.sampled_from(["line", "steps", "dots", "dashes"]), st.booleans(), st.booleans())
@example([(0.0, 5e-324)], "line", False, False)
def test_whatever_was_measured_is_drawn_within_its_frame(points: list[tuple[float, float]], style: str, log_x: bool, log_y: bool) -> None:
    ordered = tuple(sorted(points))
    drawing = draw(LineChart("x", "y", (Series("s", ordered, style),), log_x=log_x, log_y=log_y, bands=((0.0, 1.0),), band_name="b"), "t")
    for element in ElementTree.fromstring(drawing).iter():
        for name, value in element.attrib.items():
            if name in ("x", "x1", "x2", "cx"):
                assert -1 <= float(value) <= 521


@given(st.floats(0, 1e9), st.floats(1e-6, 1e9), st.booleans())
def test_ticks_are_within_the_scale_and_not_too_many(low: float, width: float, is_log: bool) -> None:
    scale = Scale.over([max(low, 1e-6), low + width], 0, 100, is_log=is_log)
    ticks = scale.ticks()
    assert len(ticks) <= 15
    assert all(math.isfinite(tick) and -1e-6 <= scale.at(tick) <= 100 + 1e-6 for tick in ticks)


@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium here; the strict parser has read the same pages")
def test_a_browser_shows_it_without_a_word_on_its_console(decided: Path, tmp_path: Path) -> None:
    page = write_report(decided, tmp_path / "out")[0]
    assert CHROMIUM is not None
    flags = ("--headless", "--no-sandbox", "--disable-gpu", "--enable-logging=stderr", "--v=0", f"--user-data-dir={tmp_path / 'profile'}")
    shown = subprocess.run([CHROMIUM, *flags, "--dump-dom", page.as_uri()], capture_output=True, text=True, timeout=240, check=True)
    assert "CONSOLE" not in shown.stderr
    assert shown.stdout.count("<svg") == page.read_text().count("<svg") > 4
