"""What reads these files for a living finds nothing wrong with them, and they name only what there is."""

from __future__ import annotations

import re
import shutil
import subprocess
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import yaml
from machine import ROOT, base_of, run, tool

DEPLOY = ROOT / "deploy"
DOCKERFILES = sorted(ROOT.glob("*/*/Dockerfile"))
OVERLAYS = sorted(path.name for path in (DEPLOY / "compose").glob("*.yaml") if path.name != "compose.yaml")
COMPONENTS = sorted(path.name for path in (DEPLOY / "k8s" / "components").iterdir())
WORKERS = ("baton-prefill", "baton-decode")


def documents(text: str) -> list[dict[str, Any]]:
    return [document for document in yaml.safe_load_all(text) if document]


@pytest.mark.parametrize("dockerfile", DOCKERFILES, ids=lambda path: path.parent.name)
def test_dockerfiles(dockerfile: Path) -> None:
    run(tool("hadolint"), "--failure-threshold", "info", str(dockerfile))
    text = dockerfile.read_text()
    assert base_of(dockerfile) == base_of(DOCKERFILES[0])
    assert re.search(r"^USER 10001:10001$", text, re.MULTILINE)
    assert "HEALTHCHECK" in text


def test_a_pinned_base_is_the_same_everywhere() -> None:
    assert f"PYTHON_IMAGE={base_of(DOCKERFILES[0])}\n" in (DEPLOY / "compose" / ".env").read_text()
    assert ":latest" not in base_of(DOCKERFILES[0])


@pytest.mark.parametrize("overlays", [[], *[[name] for name in OVERLAYS], OVERLAYS], ids=lambda names: "+".join(names) or "base")
def test_compose(overlays: list[str], tmp_path: Path) -> None:
    files = [word for name in ("compose.yaml", *overlays) for word in ("-f", str(DEPLOY / "compose" / name))]
    whole = tmp_path / "whole.yaml"
    whole.write_text(run(tool("docker-compose"), *files, "config"))
    run(tool("check-jsonschema"), "--builtin-schema", "vendor.compose-spec", str(whole))
    services = yaml.safe_load(whole.read_text())["services"]
    for name in ("gateway", "prefill", "decode"):
        service = services[name]
        assert service["read_only"], name
        assert service["cap_drop"] == ["ALL"], name
        assert all(one["condition"].startswith("service_") for one in service["depends_on"].values()), name
    assert services["gateway"]["depends_on"]["prefill"]["condition"] == "service_healthy"
    assert {services[name]["ipc"] for name in ("prefill", "decode")} == {"service:namespaces"}, "CUDA IPC and shared memory need one IPC namespace"
    built = [service["image"] for service in services.values() if "build" in service]
    assert sorted(built) == sorted(set(built)), "two services build one name: side by side, one of them finds that it is there already and fails"
    for name, service in services.items():
        if "build" not in service and service["image"] in built:
            assert service["pull_policy"] == "never", f"{name}: a registry is asked for what is built here"


def test_every_variable_of_compose_has_its_line() -> None:
    told = set(re.findall(r"^([A-Z_]+)=", (DEPLOY / "compose" / ".env").read_text(), re.MULTILINE))
    used = set(re.findall(r"\$\{([A-Z_]+)", "".join(path.read_text() for path in (DEPLOY / "compose").glob("*.yaml"))))
    assert told == used


def test_three_commands_from_nothing_to_a_chat() -> None:
    """Those that test_deploy_stack.py runs, less what a tests' machine needs: `up --wait`, then `run model chat`."""
    readme = (ROOT / "README.md").read_text()
    (commands,) = re.findall(r"^Or on containers.*?^```\n(.*?)^```", readme, re.MULTILINE | re.DOTALL)
    clone, up, ask = commands.splitlines()
    assert clone.startswith("git clone ")
    file = "deploy/compose/compose.yaml"
    assert up == f"docker compose -f {file} up --build --wait"
    assert ask.startswith(f"docker compose -f {file} run --rm -T model chat --address gateway:8001 ")
    assert (ROOT / file).is_file()
    assert f"{up}\n{ask}\n" in (ROOT / "docs" / "deploy.md").read_text()


def rendered(tmp_path: Path, kustomization: Path) -> list[dict[str, Any]]:
    whole = tmp_path / "whole.yaml"
    whole.write_text(run(tool("kubectl"), "kustomize", str(kustomization)))
    run(tool("kubernetes-validate"), "--strict", "--quiet", str(whole))
    return documents(whole.read_text())


@pytest.mark.parametrize("name", ["base", "overlays/small", "overlays/production"])
def test_kustomize(name: str, tmp_path: Path) -> None:
    found = rendered(tmp_path, DEPLOY / "k8s" / name)
    check_pods(found)
    kinds = {(document["kind"], document["metadata"]["name"]) for document in found}
    assert {("Deployment", "baton-gateway"), *(("StatefulSet", worker) for worker in WORKERS)} <= kinds
    assert {("PodDisruptionBudget", worker) for worker in WORKERS} <= kinds


@pytest.mark.parametrize("name", COMPONENTS)
def test_each_component_alone(name: str, tmp_path: Path) -> None:
    """Copied beside the real ones, since kustomize takes relative folders only."""
    shutil.copytree(DEPLOY / "k8s", tmp_path / "deploy" / "k8s")
    shutil.copytree(DEPLOY / "observability", tmp_path / "deploy" / "observability")
    alone = tmp_path / "deploy" / "k8s" / "overlays" / "alone"
    alone.mkdir()
    (alone / "kustomization.yaml").write_text(f"resources: [../../base]\ncomponents: [../../components/{name}]\n")
    check_pods(rendered(tmp_path, alone))


def pods(found: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    return {document["metadata"]["name"]: document["spec"]["template"]["spec"] for document in found if "template" in document.get("spec", {})}


def check_pods(found: list[dict[str, Any]]) -> None:
    """Nobody is root, nothing is written but where it may, and every pod has time for its drain."""
    for name, pod in pods(found).items():
        assert pod["securityContext"]["runAsNonRoot"], name
        assert pod["enableServiceLinks"] is False, name
        for container in chain(pod.get("initContainers", []), pod["containers"]):
            assert container["securityContext"]["readOnlyRootFilesystem"], name
            check_references(name, container)
            assert container["resources"]["requests"] or container["resources"]["limits"], name
        variables = {one["name"]: one.get("value") for one in pod["containers"][0].get("env", [])}
        drain_s = next((float(value) for key, value in variables.items() if key.endswith("_DRAIN_TIMEOUT_S")), None)
        if drain_s is not None:
            assert drain_s + 20 <= pod["terminationGracePeriodSeconds"], f"{name}: Kubernetes kills it before its drain is over"


def check_references(pod: str, container: dict[str, Any]) -> None:
    """Kubernetes fills in $(NAME) only where NAME stands before it; elsewhere the text stays."""
    before: set[str] = set()
    for one in container.get("env", []):
        missing = set(re.findall(r"\$\((\w+)\)", one.get("value") or "")) - before
        assert not missing, f"{pod}: {one['name']} refers to {missing}, which do not stand before it"
        before.add(one["name"])
    for argument in container.get("args", []):
        assert set(re.findall(r"\$\((\w+)\)", argument)) <= before, f"{pod}: {argument}"


def test_the_autoscalers_alone_say_how_many_there_are(tmp_path: Path) -> None:
    found = rendered(tmp_path, DEPLOY / "k8s" / "overlays" / "production")
    scaled = [document["spec"]["scaleTargetRef"] for document in found if document["kind"] == "HorizontalPodAutoscaler"]
    assert len(scaled) == 3
    for target in scaled:
        (spec,) = (one["spec"] for one in found if (one["kind"], one["metadata"]["name"]) == (target["kind"], target["name"]))
        assert "replicas" not in spec, f"every `kubectl apply` takes {target['name']} back to {spec['replicas']}"


def test_policies_open_every_port_that_a_service_has(tmp_path: Path) -> None:
    found = rendered(tmp_path, DEPLOY / "k8s" / "overlays" / "production")
    policies = [document["spec"] for document in found if document["kind"] == "NetworkPolicy"]
    labels = [document["spec"]["template"]["metadata"]["labels"] for document in found if "template" in document.get("spec", {})]
    services = [document for document in found if document["kind"] == "Service"]
    assert {service["metadata"]["name"] for service in services} >= {"baton-gateway", "baton-etcd", "baton-collector", *WORKERS}
    for service in services:
        (pod,) = (one for one in labels if service["spec"]["selector"].items() <= one.items())
        rules = [rule for policy in policies if selects(policy["podSelector"], pod) for rule in policy.get("ingress", [])]
        for port in service["spec"]["ports"]:
            opened = [rule for rule in rules if "ports" not in rule or port["targetPort"] in [one["port"] for one in rule["ports"]]]
            assert opened, f"no policy lets anybody to port {port['name']} of {service['metadata']['name']}"


def selects(selector: dict[str, Any], labels: dict[str, str]) -> bool:
    among = all(labels.get(one["key"]) in one["values"] for one in selector.get("matchExpressions", []))
    return among and selector.get("matchLabels", {}).items() <= labels.items()


def test_a_first_look_asks_no_registry_for_what_was_built_here(tmp_path: Path) -> None:
    """Images are called latest there, which Kubernetes asks a registry for unless it is told not to."""
    for name, pod in pods(rendered(tmp_path, DEPLOY / "k8s" / "overlays" / "small")).items():
        for container in chain(pod["initContainers"], pod["containers"]):
            assert container["imagePullPolicy"] == "IfNotPresent", name


def test_etcd_stands_in_for_names(tmp_path: Path) -> None:
    found = pods(rendered(tmp_path, DEPLOY / "k8s" / "overlays" / "production"))
    gateway = {one["name"]: one.get("value", "") for one in found["baton-gateway"]["containers"][0]["env"]}
    assert (gateway["BATON_GATEWAY_PREFILL"], gateway["BATON_GATEWAY_ETCD"]) == ("", "baton-etcd:2379")


def test_the_base_names_as_many_servers_as_it_starts(tmp_path: Path) -> None:
    for name in ("base", "overlays/small"):
        found = rendered(tmp_path, DEPLOY / "k8s" / name)
        gateway = {one["name"]: one.get("value", "") for one in pods(found)["baton-gateway"]["containers"][0]["env"]}
        for document in found:
            worker = document["metadata"]["name"]
            if document["kind"] == "StatefulSet":
                role = worker.removeprefix("baton-")
                named = gateway[f"BATON_GATEWAY_{role.upper()}"].split(",")
                assert [one.split(".")[0] for one in named] == [f"{worker}-{number}" for number in range(document["spec"]["replicas"])]


def test_only_settings_that_there_are_are_set() -> None:
    known = set(re.findall(r"`((?:BATON|OTEL)_[A-Z0-9_]+)`", (ROOT / "docs" / "environment.md").read_text()))
    known |= {f"BATON_{name}" for name in ("UCX_LIBRARY", "CACHE_DIR", "API_KEY")}
    of_compose = set(re.findall(r"^(BATON_[A-Z0-9_]+)=", (DEPLOY / "compose" / ".env").read_text(), re.MULTILINE))
    setting = re.compile(r"\bBATON_(?:GATEWAY|PREFILL|DECODE|LOG|TLS|UCX|CACHE)_[A-Z0-9_]+\b")
    places = [*(DEPLOY / "k8s").rglob("*.yaml"), *(DEPLOY / "compose").glob("*.yaml"), *(DEPLOY / "systemd").rglob("*"), *DOCKERFILES]
    for path in (place for place in places if place.is_file()):
        for name in setting.findall(path.read_text()):
            assert name in known | of_compose, f"{path.relative_to(ROOT)} sets {name}, which docs/environment.md does not have"


def test_systemd_units(tmp_path: Path) -> None:
    if shutil.which("systemd-analyze") is None:
        pytest.skip("UNITS WERE NOT VERIFIED: there is no systemd-analyze (Debian: systemd)")
    units = sorted((DEPLOY / "systemd").glob("*.service"))
    assert {unit.stem for unit in units} == {"baton-gateway", "baton-prefill", "baton-decode"}
    for unit in units:  # what they start is installed elsewhere
        (tmp_path / unit.name).write_text(re.sub(r"^ExecStart=\S+", "ExecStart=/bin/true", unit.read_text(), flags=re.MULTILINE))
    done = subprocess.run(["systemd-analyze", "verify", *map(str, sorted(tmp_path.iterdir()))], capture_output=True, text=True, check=False)
    ours = [line for line in done.stderr.splitlines() if "baton-" in line and "Failed to create" not in line]
    assert not ours, "\n".join(ours)


def test_the_collector_names_only_parts_that_it_has() -> None:
    collector = yaml.safe_load((DEPLOY / "observability" / "collector.yaml").read_text())
    have = {kind: set(collector.get(kind, {})) for kind in ("receivers", "processors", "exporters")}
    for name, pipeline in collector["service"]["pipelines"].items():
        for kind, parts in pipeline.items():
            assert set(parts) <= have[kind], f"pipeline {name}: {kind}"
    used = {part for pipeline in collector["service"]["pipelines"].values() for parts in pipeline.values() for part in parts}
    assert set().union(*have.values()) == used, "parts that no pipeline has do nothing"


def test_prometheus_finds_every_service_on_its_port(tmp_path: Path) -> None:
    """In compose by its configuration, in Kubernetes by annotations, where services really listen. Rules and dashboard: tests/test_alerts.py."""
    settings = (ROOT / "docs" / "environment.md").read_text()
    told = re.findall(r"`BATON_(\w+)_METRICS_PORT` \| `--metrics-port` \| integer \| `(\d+)`", settings)
    ports = {service.lower(): int(port) for service, port in told}
    assert set(ports) == {"gateway", "prefill", "decode"}
    scraped = yaml.safe_load((DEPLOY / "observability" / "prometheus.yaml").read_text())["scrape_configs"]
    found = {job["dns_sd_configs"][0]["names"][0]: job["dns_sd_configs"][0]["port"] for job in scraped}
    assert found == ports
    whole = [document for document in rendered(tmp_path, DEPLOY / "k8s" / "base") if "template" in document.get("spec", {})]
    for document in whole:
        pod = document["spec"]["template"]
        container = pod["spec"]["containers"][0]
        port = ports[document["metadata"]["name"].removeprefix("baton-")]
        assert pod["metadata"]["annotations"] == {"prometheus.io/scrape": "true", "prometheus.io/port": str(port)}
        assert ("metrics", port) in [(one["name"], one["containerPort"]) for one in container["ports"]]
        assert {"name": "OTEL_METRICS_EXPORTER", "value": "prometheus"} in container["env"]
