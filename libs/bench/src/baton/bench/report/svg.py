"""Charts as SVG that takes its colours from the page's style sheet, so that they follow a dark page.

Drawn here and not by matplotlib: its SVG has fixed colours and glyphs as paths, ten times the size of what follows."""

from collections.abc import Iterable
from html import escape

from baton.bench.report.content import Chart, HeatMap, LineChart, Series, Waterfall
from baton.bench.report.scale import Scale, short

WIDTH, HEIGHT = 520, 300
LEFT, RIGHT, TOP, BOTTOM = 58, 12, 12, 44
LEGEND_LINE = 18
BAR = 22
NUM_COLOURS = 8
LABEL_CHARS = 16
#: Of a character, in the drawing's font; wide enough for the widest.
CHAR_WIDTH = 7.6


def draw(chart: Chart, title: str) -> str:
    if isinstance(chart, LineChart):
        return _lines(chart, title)
    return _waterfall(chart, title) if isinstance(chart, Waterfall) else _heat(chart, title)


def _svg(height: float, title: str, parts: Iterable[str]) -> str:
    body = "\n".join(parts)
    return f'<svg viewBox="0 0 {WIDTH} {height:g}" role="img" aria-label="{escape(title)}" xmlns="http://www.w3.org/2000/svg">\n{body}\n</svg>'


def _text(x: float, y: float, text: str, anchor: str = "middle", extra: str = "") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"{extra}>{escape(text)}</text>'


def _line(x1: float, y1: float, x2: float, y2: float, kind: str) -> str:
    return f'<line class="{kind}" x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}"/>'


def _rect(x: float, y: float, width: float, height: float, kind: str, title: str = "", extra: str = "") -> str:
    inner = f"<title>{escape(title)}</title>" if title else ""
    return f'<rect class="{kind}" x="{x:.1f}" y="{y:.1f}" width="{max(width, 0.0):.1f}" height="{height:.1f}"{extra}>{inner}</rect>'


def _legend(names: list[tuple[str, str]], top: float) -> tuple[list[str], float]:
    """(drawing, height) of (class, name), in as many lines as it takes."""
    parts, x, y = [], float(LEFT), top
    for kind, name in names:
        width = 22 + CHAR_WIDTH * len(name)
        if x > LEFT and x + width > WIDTH - RIGHT:
            x, y = float(LEFT), y + LEGEND_LINE
        parts += [_rect(x, y, 12, 12, kind), _text(x + 17, y + 11, name, "start")]
        x += width + 8
    return parts, (y - top + LEGEND_LINE if names else 0.0)


def _lines(chart: LineChart, title: str) -> str:
    names = [(f"fill c{number % NUM_COLOURS}", series.name) for number, series in enumerate(chart.series) if series.name]
    if chart.bands:
        names.append(("band", chart.band_name))
    legend, legend_height = _legend(names, 4)
    top = TOP + legend_height
    height = HEIGHT + legend_height
    xs = [x for series in chart.series for x, _ in series.points] + [x for band in chart.bands for x in band]
    ys = [y for series in chart.series for _, y in series.points] + ([chart.mark[0]] if chart.mark else [])
    across = Scale.over(xs, LEFT, WIDTH - RIGHT, is_log=chart.log_x, from_zero=not chart.log_x)
    up = Scale.over(ys, height - BOTTOM, top, is_log=chart.log_y, from_zero=not chart.log_y)
    parts = [*legend]
    for start, end in chart.bands:
        parts.append(_rect(across.at(start), top, max(across.at(end) - across.at(start), 1.0), height - BOTTOM - top, "band"))
    parts += _axes(across, up, chart, height, top)
    for number, series in enumerate(chart.series):
        parts += _series(series, across, up, number % NUM_COLOURS)
    if chart.mark is not None:
        y = up.at(chart.mark[0])
        parts += [_line(LEFT, y, WIDTH - RIGHT, y, "mark"), _text(WIDTH - RIGHT, y - 4, chart.mark[1], "end")]
    return _svg(height, title, parts)


def _axes(across: Scale, up: Scale, chart: LineChart, height: float, top: float) -> list[str]:
    floor = height - BOTTOM
    parts = []
    for tick in across.ticks():
        parts += [_line(across.at(tick), top, across.at(tick), floor, "grid"), _text(across.at(tick), floor + 16, short(tick))]
    for tick in up.ticks():
        parts += [_line(LEFT, up.at(tick), WIDTH - RIGHT, up.at(tick), "grid"), _text(LEFT - 6, up.at(tick) + 4, short(tick), "end")]
    parts.append(_text((LEFT + WIDTH - RIGHT) / 2, height - 8, chart.x_label))
    middle = (top + floor) / 2
    parts.append(_text(14, middle, chart.y_label, extra=f' transform="rotate(-90 14 {middle:.1f})"'))
    return parts


def _series(series: Series, across: Scale, up: Scale, colour: int) -> list[str]:
    places = [(across.at(x), up.at(y)) for x, y in series.points]
    if not places:
        return []
    if series.style == "dots":
        marks = zip(places, series.points, strict=True)
        return [
            f'<circle class="fill c{colour}" cx="{x:.1f}" cy="{y:.1f}" r="3"><title>{escape(series.name)}: {short(a)}, {short(b)}</title></circle>'
            for (x, y), (a, b) in marks
        ]
    path = [f"M{places[0][0]:.1f} {places[0][1]:.1f}"]
    for x, y in places[1:]:
        path.append(f"H{x:.1f}V{y:.1f}" if series.style == "steps" else f"L{x:.1f} {y:.1f}")
    dashes = " dashes" if series.style == "dashes" else ""
    drawn = [f'<path class="stroke{dashes} c{colour}" d="{"".join(path)}"><title>{escape(series.name)}</title></path>']
    if series.style == "line" and len(places) <= 30:
        drawn += [f'<circle class="fill c{colour}" cx="{x:.1f}" cy="{y:.1f}" r="3"/>' for x, y in places]
    return drawn


def _waterfall(chart: Waterfall, title: str) -> str:
    legend, legend_height = _legend([(f"fill c{number % NUM_COLOURS}", state) for number, state in enumerate(chart.states)], 4)
    left, top = LEFT + 60, TOP + legend_height
    height = top + BAR * len(chart.bars) + BOTTOM
    across = Scale.over([end for bar in chart.bars for _, _, end in bar.spans], left, WIDTH - RIGHT, from_zero=True)
    parts = [*legend]
    for tick in across.ticks():
        parts += [_line(across.at(tick), top, across.at(tick), height - BOTTOM, "grid"), _text(across.at(tick), height - BOTTOM + 16, short(tick))]
    for place, bar in enumerate(chart.bars):
        y = top + BAR * place
        parts.append(_text(left - 6, y + 15, bar.name[:LABEL_CHARS], "end"))
        for state, start, end in bar.spans:
            kind = f"fill c{chart.states.index(state) % NUM_COLOURS}"
            parts.append(_rect(across.at(start), y + 3, max(across.at(end) - across.at(start), 0.8), BAR - 6, kind, f"{state}: {end - start:.1f} ms"))
    parts.append(_text((left + WIDTH - RIGHT) / 2, height - 8, chart.x_label))
    return _svg(height, title, parts)


def _heat(chart: HeatMap, title: str) -> str:
    left = LEFT + 30
    width, row = (WIDTH - RIGHT - left) / max(1, len(chart.columns)), 34
    height = TOP + row * len(chart.rows) + BOTTOM
    parts = []
    for place, name in enumerate(chart.rows):
        parts.append(_text(left - 6, TOP + row * place + 21, name, "end"))
        for number, value in enumerate(chart.values[place]):
            x, y = left + width * number, TOP + row * place
            if value is None:
                parts.append(_rect(x + 1, y + 1, width - 2, row - 2, "empty", "not measured"))
                continue
            shade = f' style="--share:{100 * value:.0f}%"'
            parts.append(_rect(x + 1, y + 1, width - 2, row - 2, "heat", f"{name} at {chart.columns[number]}: {100 * value:.1f} %", shade))
            if width >= 3.2 * CHAR_WIDTH:
                parts.append(_text(x + width / 2, y + 21, f"{100 * value:.0f}", extra=f' class="on-heat{" high" if value > 0.55 else ""}"'))
    every = max(1, round(5.5 * CHAR_WIDTH / width + 0.5))
    floor = TOP + row * len(chart.rows)
    parts += [_text(left + width * (number + 0.5), floor + 16, name) for number, name in enumerate(chart.columns) if number % every == 0]
    parts.append(_text((left + WIDTH - RIGHT) / 2, height - 8, chart.x_label))
    return _svg(height, title, parts)
