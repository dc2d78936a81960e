"""What a report holds, before it is HTML, Markdown or JSON."""

from dataclasses import dataclass

Cell = str | float | int | None


@dataclass(frozen=True)
class Table:
    head: tuple[str, ...]
    rows: tuple[tuple[Cell, ...], ...]


@dataclass(frozen=True)
class Series:
    """Points in the order of x. `style`: "line", "steps" (a distribution), "dots", or "dashes" (a reference)."""

    name: str
    points: tuple[tuple[float, float], ...]
    style: str = "line"


@dataclass(frozen=True)
class LineChart:
    """`bands`: intervals of x that are marked, called `band_name`. `mark`: a horizontal line with its name."""

    x_label: str
    y_label: str
    series: tuple[Series, ...]
    log_x: bool = False
    log_y: bool = False
    bands: tuple[tuple[float, float], ...] = ()
    band_name: str = ""
    mark: tuple[float, str] | None = None


@dataclass(frozen=True)
class Bar:
    """One row of a waterfall: (state, start, end) in its own order, milliseconds."""

    name: str
    spans: tuple[tuple[str, float, float], ...]


@dataclass(frozen=True)
class Waterfall:
    x_label: str
    bars: tuple[Bar, ...]
    states: tuple[str, ...]


@dataclass(frozen=True)
class HeatMap:
    """`values[row][column]` from 0 to 1; None was not measured."""

    x_label: str
    y_label: str
    columns: tuple[str, ...]
    rows: tuple[str, ...]
    values: tuple[tuple[float | None, ...], ...]


Chart = LineChart | Waterfall | HeatMap


def is_empty(chart: Chart) -> bool:
    """Whether nothing was measured that it could show."""
    if isinstance(chart, LineChart):
        return not any(series.points for series in chart.series)
    return not chart.bars if isinstance(chart, Waterfall) else not (chart.rows and chart.columns)


@dataclass(frozen=True)
class Section:
    """`lines` are sentences; `wide` sections take the whole width of a page."""

    title: str
    lines: tuple[str, ...] = ()
    table: Table | None = None
    chart: Chart | None = None
    wide: bool = False


@dataclass(frozen=True)
class Report:
    """`kind`: "run", "compare" or "decide". `facts`: (name, value) of how it was measured. `flags`: what speaks against the figures."""

    title: str
    kind: str
    facts: tuple[tuple[str, str], ...]
    flags: tuple[str, ...]
    sections: tuple[Section, ...]
