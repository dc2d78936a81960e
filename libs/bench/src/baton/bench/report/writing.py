"""Writes a folder's report beside what it reports."""

import json
from dataclasses import asdict
from pathlib import Path

from baton.bench.measures import Objectives
from baton.bench.report.collect import collect
from baton.bench.report.html import html_page
from baton.bench.report.plain import markdown

NAME = "report"


def write_report(folder: Path, out: Path | None = None, objectives: Objectives | None = None) -> list[Path]:
    """report.html, report.md and report.json in `out` (`folder` when None); earlier ones are replaced. Raises BenchFileError, OSError."""
    report = collect(folder, objectives)
    target = folder if out is None else out
    target.mkdir(parents=True, exist_ok=True)
    texts = {"html": html_page(report), "md": markdown(report), "json": json.dumps(asdict(report), indent=1) + "\n"}
    paths = []
    for ending, text in texts.items():
        paths.append(target / f"{NAME}.{ending}")
        paths[-1].write_text(text, encoding="utf-8")
    return paths
