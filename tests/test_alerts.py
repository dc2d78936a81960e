"""Prometheus' own tool reads the rules and runs their unit tests; rules, dashboard and autoscalers name only metrics and labels that there are."""

from __future__ import annotations

import ast
import json
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from prometheus import why_not

from baton.servicekit.metrics import INSTRUMENTS
from baton.servicekit.metrics.instruments import CAUSES, OTHER, PEER_INSTANCE

DEPLOY = Path(__file__).parents[1] / "deploy"
OBSERVABILITY = DEPLOY / "observability"
#: What Prometheus adds to every series.
ADDED = {"job", "instance", "role", "le"}


def promtool(*arguments: str) -> None:
    if reason := why_not():
        pytest.skip(reason)
    done = subprocess.run(["promtool", *arguments], cwd=OBSERVABILITY, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_prometheus_reads_configuration_and_rules() -> None:
    promtool("check", "config", "prometheus.yaml")
    promtool("check", "rules", "rules.yaml")


def test_rules_and_alerts_do_what_their_tests_say() -> None:
    promtool("test", "rules", "rules_test.yaml")


def rules() -> list[dict[str, Any]]:
    read: list[dict[str, Any]] = yaml.safe_load((OBSERVABILITY / "rules.yaml").read_text())["groups"][0]["rules"]
    return read


def test_every_alert_is_tested_firing_and_silent() -> None:
    cases = [case for test in yaml.safe_load((OBSERVABILITY / "rules_test.yaml").read_text())["tests"] for case in test.get("alert_rule_test", [])]
    for alert in (rule["alert"] for rule in rules() if "alert" in rule):
        fires = [bool(case["exp_alerts"]) for case in cases if case["alertname"] == alert]
        assert True in fires, f"{alert} is never seen firing"
        assert False in fires, f"{alert} is never seen silent"


def expressions() -> Iterator[tuple[str, str]]:
    """(where, PromQL)"""
    for rule in rules():
        yield rule.get("alert") or rule["record"], rule["expr"]
    dashboard = json.loads((OBSERVABILITY / "grafana" / "dashboards" / "baton.json").read_text())
    for panel in dashboard["panels"]:
        for target in panel.get("targets", []):
            yield f"panel {panel['title']}", target["expr"]
    for document in yaml.safe_load_all((DEPLOY / "k8s" / "components" / "autoscaling" / "adapter.yaml").read_text()):
        for rule in document["rules"]["external"]:
            yield "adapter.yaml", rule["seriesQuery"]


def test_everybody_asks_for_what_is_counted() -> None:
    known = {
        name: instrument
        for instrument in INSTRUMENTS
        for name in (instrument.prometheus, *(f"{instrument.prometheus}_{part}" for part in ("bucket", "sum", "count")))
    }
    recorded = {rule["record"] for rule in rules() if "record" in rule}
    asked = list(expressions())
    assert len(asked) > 30
    for where, expression in asked:
        found = re.findall(r"\b(baton[_:][a-z0-9_:]+)(?:\{([^}]*)\})?", re.sub(r"\[[^]]*\]", "", expression))
        assert found or "up" in expression, f"{where}: {expression}"
        for name, selector in found:
            assert name in known or name in recorded, f"{where} asks for {name}, which nobody counts"
            if name in known:
                check_selector(where, selector, known[name].labels)


def check_selector(where: str, selector: str, labels: dict[str, tuple[str, ...]]) -> None:
    for label, operator, said in re.findall(r'(\w+)(=~|!~|!=|=)"([^"]*)"', selector):
        assert label in labels or label in ADDED, f"{where} selects by {label}, which there is not"
        if label in labels and labels[label] != PEER_INSTANCE:
            for value in said.split("|") if "~" in operator else [said]:
                assert value in (*labels[label], OTHER), f"{where} selects {label}={value!r}, which nobody says"


#: Functions and classes that are given a cause as text.
_SPEAKERS = re.compile(r"_?(failure|Failure|RefusedError|UnauthenticatedError|invalid|denied|misfit|refused|late|make)")
#: Words of the same shape that such calls also have: authors, and the second half of "prefill_lost". And what ends no room and no request.
_NO_CAUSES = {"client", "gateway", "prefill", "decode", "transfer", "lost", "silent", "model_folder", "server_not_connected", "server_not_found"}


def causes_in_code() -> set[str]:
    found = set()
    for path in [*DEPLOY.parent.glob("services/*/src/**/*.py"), *DEPLOY.parent.glob("libs/*/src/**/*.py")]:
        if not any(room in path.parts for room in ("gateway", "prefill", "decode", "workerkit", "engine")):
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Assign) and any(isinstance(target, ast.Name) and target.id == "cause" for target in node.targets):
                found |= {text.value for text in ast.walk(node.value) if isinstance(text, ast.Constant) and isinstance(text.value, str)}
            elif isinstance(node, ast.keyword) and node.arg == "cause":
                found |= {node.value.value} if isinstance(node.value, ast.Constant) else set()
            elif isinstance(node, ast.Call) and _SPEAKERS.fullmatch(getattr(node.func, "id", getattr(node.func, "attr", ""))):
                found |= {one.value for one in node.args if isinstance(one, ast.Constant) and isinstance(one.value, str)}
    return {text for text in found if re.fullmatch(r"[a-z]+(_[a-z]+)*", text) and text not in _NO_CAUSES}


def test_every_cause_that_the_code_names_is_in_the_table() -> None:
    """Else it would be counted as `other`: add it to CAUSES."""
    named = causes_in_code()
    assert len(named) > 60
    assert named - set(CAUSES) == set()


def test_the_causes_of_the_document_are_the_tables() -> None:
    """Faults are counted under their own name, not under `other`."""
    text = (DEPLOY.parent / "docs" / "failures.md").read_text()
    named = set(re.findall(r"\b([a-z_]+) \((?:client|gateway|prefill|decode|transfer)", text))
    assert len(named) >= 4
    assert named - set(CAUSES) == set()
