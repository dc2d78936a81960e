"""Runs, comparisons and decisions as one HTML page, as Markdown and as JSON."""

from baton.bench.report.collect import collect
from baton.bench.report.html import html_page
from baton.bench.report.plain import markdown
from baton.bench.report.writing import write_report

__all__ = ["collect", "html_page", "markdown", "write_report"]
