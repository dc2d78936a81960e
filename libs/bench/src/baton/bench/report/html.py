"""A report as one page: no script, no font, no picture from elsewhere; it follows a dark system and fits a phone."""

from html import escape
from importlib import resources

from baton.bench.report.content import Cell, Report, Section, Table, is_empty
from baton.bench.report.scale import short
from baton.bench.report.svg import draw

STYLE = resources.files("baton.bench.report").joinpath("style.css").read_text(encoding="utf-8")


def html_page(report: Report) -> str:
    facts = "".join(f"<dt>{escape(name)}</dt><dd>{escape(value)}</dd>" for name, value in report.facts)
    sections = "\n".join(map(_section, report.sections))
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{escape(report.title)}</title>
<link rel="icon" href="data:,">
<style>{STYLE}</style>
</head>
<body>
<main>
<h1>{escape(report.title)}</h1>
<dl>{facts}</dl>
{_flags(report)}<div class="sections">
{sections}
</div>
</main>
</body>
</html>
"""


def _flags(report: Report) -> str:
    if not report.flags:
        return ""
    items = "".join(f"<li>{escape(flag)}</li>" for flag in report.flags)
    return f'<div class="flags"><strong>What to know before the figures</strong><ul>{items}</ul></div>\n'


def _section(section: Section) -> str:
    parts = [f"<h2>{escape(section.title)}</h2>"]
    if section.lines:
        parts.append("<ul>" + "".join(f"<li>{escape(line)}</li>" for line in section.lines) + "</ul>")
    if section.table is not None:
        parts.append(_table(section.table))
    if section.chart is not None:
        parts.append("<p>Nothing was measured.</p>" if is_empty(section.chart) else draw(section.chart, section.title))
    kind = ' class="wide"' if section.wide else ""
    return f"<section{kind}>\n" + "\n".join(parts) + "\n</section>"


def _table(table: Table) -> str:
    head = "".join(f"<th>{escape(name)}</th>" for name in table.head)
    rows = "".join("<tr>" + "".join(f"<td>{escape(shown(cell))}</td>" for cell in row) + "</tr>" for row in table.rows)
    return f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table></div>'


def shown(cell: Cell) -> str:
    """As a reader wants it; nothing for what was not measured."""
    if cell is None:
        return ""
    return short(cell) if isinstance(cell, float) else str(cell)
