"""A real Prometheus for the tests, and what a service says when it is scraped."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import urllib.parse
import urllib.request
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fleet import Worker, free_port, wait_for
from prometheus_client.parser import text_string_to_metric_families

#: One sample: its name and its labels, sorted.
Sample = tuple[str, tuple[tuple[str, str], ...]]


def why_not() -> str:
    """Why no Prometheus can be started; "" when one can."""
    missing = [name for name in ("prometheus", "promtool") if shutil.which(name) is None]
    return f"NOTHING WAS SCRAPED BY PROMETHEUS: there is no {' and no '.join(missing)} (Debian: prometheus)" if missing else ""


class Prometheus:
    """Scrapes `targets` (job -> host:port) every half second from being made until `close`."""

    def __init__(self, targets: Mapping[str, str], folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        jobs = [{"job_name": job, "static_configs": [{"targets": [target]}]} for job, target in targets.items()]
        config = folder / "prometheus.json"  # JSON is YAML
        config.write_text(json.dumps({"global": {"scrape_interval": "500ms", "scrape_timeout": "500ms"}, "scrape_configs": jobs}))
        self.address = f"127.0.0.1:{free_port()}"
        self._log = (folder / "prometheus.log").open("w")
        flags = (f"--config.file={config}", f"--storage.tsdb.path={folder / 'data'}", f"--web.listen-address={self.address}")
        self._process = subprocess.Popen(["prometheus", *flags], stdout=self._log, stderr=subprocess.STDOUT)
        wait_for(self._scraped_all(targets), 60, lambda: f"every target up: {self.ask('up')}")

    def _scraped_all(self, targets: Mapping[str, str]) -> Any:
        def up() -> bool:
            assert self._process.poll() is None, "prometheus ended: see its log"
            try:
                return {labels["job"] for labels, value in self.ask("up") if value == 1} == set(targets)
            except OSError:
                return False

        return up

    def ask(self, expression: str) -> list[tuple[dict[str, str], float]]:
        """(labels, value) of each series of an instant query."""
        return [(one["metric"], float(one["value"][1])) for one in self._get("query", query=expression)["result"]]

    def series(self) -> list[dict[str, str]]:
        """Labels, and name as `__name__`, of everything of Baton's."""
        found: list[dict[str, str]] = self._get("series", **{"match[]": '{__name__=~"baton_.*"}'})
        return found

    def _get(self, what: str, **parameters: str) -> Any:
        url = f"http://{self.address}/api/v1/{what}?{urllib.parse.urlencode(parameters)}"
        with urllib.request.urlopen(url, timeout=10) as answer:
            return json.load(answer)["data"]

    def close(self) -> None:
        self._process.send_signal(signal.SIGTERM)
        self._process.wait(30)
        self._log.close()


def scrape(address: str) -> dict[Sample, float]:
    """All samples of a service's metrics port."""
    with urllib.request.urlopen(f"http://{address}/metrics", timeout=10) as answer:
        text = answer.read().decode()
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def counted(worker: Worker, name: str, **labels: str) -> float:
    """A counter of one worker, as its metrics port says it."""
    wanted = set(labels.items())
    return sum(value for (sample, has), value in scrape(worker.address("metrics")).items() if sample == name and wanted <= set(has))
