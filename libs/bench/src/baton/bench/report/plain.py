"""A report as Markdown: its sentences and tables, and of every chart the numbers that a reader would take from it."""

from baton.bench.report.content import Chart, HeatMap, LineChart, Report, Section, Series, Table, is_empty
from baton.bench.report.html import shown
from baton.bench.report.scale import short


def markdown(report: Report) -> str:
    parts = [f"# {report.title}", "\n".join(f"* {name}: {value}" for name, value in report.facts)]
    if report.flags:
        parts += ["## What to know before the figures", "\n".join(f"* {flag}" for flag in report.flags)]
    parts += [_section(section) for section in report.sections]
    return "\n\n".join(parts) + "\n"


def _section(section: Section) -> str:
    parts = [f"## {section.title}"]
    if section.lines:
        parts.append("\n".join(f"* {line}" for line in section.lines))
    if section.table is not None:
        parts.append(_table(section.table))
    if section.chart is not None:
        parts.append("Nothing was measured." if is_empty(section.chart) else _table(chart_table(section.chart)))
    return "\n\n".join(parts)


def _table(table: Table) -> str:
    rows = ["| " + " | ".join(shown(cell).replace("|", "\\|") for cell in row) + " |" for row in table.rows]
    return "\n".join(["| " + " | ".join(table.head) + " |", "|" + "---|" * len(table.head), *rows])


def chart_table(chart: Chart) -> Table:
    if isinstance(chart, HeatMap):
        rows = tuple(
            (name, *(None if value is None else f"{100 * value:.0f} %" for value in values))
            for name, values in zip(chart.rows, chart.values, strict=True)
        )
        return Table((chart.x_label, *chart.columns), rows)
    if isinstance(chart, LineChart):
        return _line_table(chart)
    states = chart.states
    bars = []
    for bar in chart.bars:
        took = {state: end - start for state, start, end in bar.spans}
        bars.append((bar.name, *(took.get(state) for state in states)))
    return Table(("request, ms in", *states), tuple(bars))


def _line_table(chart: LineChart) -> Table:
    if all(series.style == "steps" for series in chart.series):
        shares = (10, 50, 90, 95, 99, 100)
        rows = tuple((series.name, *(_at_share(series, share) for share in shares)) for series in chart.series)
        return Table((chart.x_label, *(f"{share} %" for share in shares)), rows)
    if any(series.style == "dots" for series in chart.series):
        slices = tuple((series.name, len(series.points), max((y for _, y in series.points), default=None)) for series in chart.series)
        return Table((chart.y_label, "slices of time", "most"), (*slices, (chart.band_name, len(chart.bands), None)))
    rows = tuple((series.name, ", ".join(f"{short(x)}: {short(y)}" for x, y in series.points)) for series in chart.series)
    return Table((f"{chart.x_label}: {chart.y_label}", ""), rows)


def _at_share(series: Series, share: float) -> float | None:
    return next((x for x, y in series.points if y >= share - 1e-9), None)
