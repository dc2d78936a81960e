"""What this machine can build and run containers with, and a Docker of our own where it has one that nobody started.

A Docker daemon that answers is used as it is. Otherwise, as root, Debian's `dockerd` is started on a socket and a data folder of its own and ended
afterwards, firewall rules included. Images that no registry can be asked for are made here: a base with Python from Debian's packages (kept in the
cache folder), and an etcd from this machine's own.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).parents[2]
CERTIFICATES = Path("/etc/ssl/certs/ca-certificates.crt")
BASE = "baton-tests/python:3.11"
ETCD = "baton-tests/etcd"
_START_S = 60.0
_BUILD_S = 1800.0


class NoEngineError(Exception):
    """Why there is no Docker here."""


def tool(name: str) -> str:
    """A command of this test environment, or of the machine."""
    beside = Path(sys.executable).with_name(name)
    found = str(beside) if beside.exists() else shutil.which(name)
    if found is None:
        raise NoEngineError(f"there is no `{name}` command")
    return found


def run(*words: str, env: dict[str, str] | None = None, timeout_s: float = 120, cwd: Path = ROOT) -> str:
    """Standard output; fails with everything that was said."""
    done = subprocess.run(words, env=env, cwd=cwd, capture_output=True, text=True, timeout=timeout_s, check=False, errors="replace")
    assert done.returncode == 0, f"`{' '.join(words)}` ended with {done.returncode}:\n{done.stdout[-6000:]}\n{done.stderr[-6000:]}"
    return done.stdout


@dataclass
class Engine:
    """docker: a command line that can BuildKit. environment: for it, and for compose."""

    docker: str
    environment: dict[str, str]
    python_image: str = ""
    built: set[str] = field(default_factory=set)

    def __call__(self, *words: str, timeout_s: float = 120) -> str:
        return run(self.docker, *words, env=self.environment, timeout_s=timeout_s)

    def succeeds(self, *words: str, timeout_s: float = 60) -> bool:
        with contextlib.suppress(subprocess.TimeoutExpired):
            return not subprocess.run([self.docker, *words], env=self.environment, capture_output=True, timeout=timeout_s, check=False).returncode
        return False

    def build(self, dockerfile: str, tag: str, context: Path) -> None:
        """Once a session; with BATON_DEPLOY_REUSE set, not where an earlier session's is there."""
        if os.environ.get("BATON_DEPLOY_REUSE") and self.succeeds("image", "inspect", tag):
            print(f"{tag}: AN EARLIER SESSION'S IMAGE IS USED, BATON_DEPLOY_REUSE is set")
            return
        if tag not in self.built:
            arguments = ("--build-arg", f"PYTHON_IMAGE={self.python_image}", "--file", str(context / dockerfile), "--tag", tag)
            began = time.monotonic()
            self("build", *arguments, str(context), timeout_s=_BUILD_S)
            print(f"{tag}: built in {time.monotonic() - began:.0f} s")
            self.built.add(tag)


def survey() -> list[str]:
    """One line for each engine: what there is, and why it is not used."""
    lines = []
    for name in ("docker", "dockerd", "podman", "buildah"):
        path = shutil.which(name)
        version = ""
        if path:
            said = subprocess.run([path, "--version"], capture_output=True, text=True, check=False)
            version = said.stdout.strip().splitlines()[0] if said.stdout.strip() else said.stderr.strip()
        lines.append(f"{name}: {version or 'not installed'}")
    return lines


@contextlib.contextmanager
def engine() -> Iterator[Engine]:
    """Raises NoEngineError."""
    docker = _client()
    running = Engine(docker, {**os.environ, "DOCKER_BUILDKIT": "1"})
    if running.succeeds("info", timeout_s=10):
        print("docker: the daemon that runs here is used")
        _find_base(running)
        yield running
        return
    with _own_daemon(docker) as own:
        _find_base(own)
        yield own


def _client() -> str:
    """A command line whose `docker build` can do cache mounts: with buildx, or old enough to have BuildKit in itself."""
    tried = []
    for path in dict.fromkeys(filter(None, (shutil.which("docker"), "/usr/bin/docker"))):
        if not Path(path).exists():
            continue
        if not subprocess.run([path, "buildx", "version"], capture_output=True, check=False).returncode:
            return path
        version = subprocess.run([path, "--version"], capture_output=True, text=True, check=False).stdout
        match = re.search(r"version (\d+)", version)
        if match and int(match[1]) < 23:
            return path
        tried.append(f"{path} ({version.strip()}) has no buildx")
    raise NoEngineError("; ".join(tried) or "there is no `docker` command (Debian: docker.io)")


@contextlib.contextmanager
def _own_daemon(docker: str) -> Iterator[Engine]:
    if os.geteuid():
        raise NoEngineError("no Docker daemon answers, and starting one needs root")
    daemon = shutil.which("dockerd")
    if daemon is None or shutil.which("iptables") is None:
        raise NoEngineError("no Docker daemon answers, and there is no dockerd with iptables to start one (Debian: docker.io, iptables)")
    with _only_one(), tempfile.TemporaryDirectory(prefix="baton-docker-", ignore_cleanup_errors=True) as folder, _network_as_before():
        socket = f"unix://{folder}/docker.sock"
        words = (daemon, "--data-root", f"{folder}/data", "--exec-root", f"{folder}/exec", "--host", socket, "--pidfile", f"{folder}/pid")
        with open(f"{folder}/log", "w") as log:
            process = subprocess.Popen(words, stdout=log, stderr=log)
        own = Engine(docker, {**os.environ, "DOCKER_HOST": socket, "DOCKER_BUILDKIT": "1"})
        try:
            deadline = time.monotonic() + _START_S
            while not own.succeeds("info", timeout_s=10):
                if process.poll() is not None or time.monotonic() > deadline:
                    said = Path(folder, "log").read_text()[-2000:]
                    raise NoEngineError(f"dockerd of Debian's packages does not start here: {said}")
                time.sleep(0.2)
            print(f"docker: a daemon of our own, {own('version', '--format', '{{.Server.Version}}').strip()}")
            yield own
        finally:
            process.terminate()
            process.wait(60)


@contextlib.contextmanager
def _only_one() -> Iterator[None]:
    """Daemons share a bridge and the firewall's chains, whatever their folders: another run of these tests on this machine is waited for."""
    cache = _cache()
    cache.mkdir(parents=True, exist_ok=True)
    with open(cache / "docker.lock", "w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            print("docker: another run of these tests has a daemon of its own; waiting for its end")
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _cache() -> Path:
    return Path(os.environ.get("BATON_CACHE_DIR") or Path.home() / ".cache" / "baton") / "deploy"


@contextlib.contextmanager
def _network_as_before() -> Iterator[None]:
    """A daemon leaves its chains, a FORWARD policy, its bridge and forwarding behind."""
    forward = Path("/proc/sys/net/ipv4/ip_forward")
    before, tables = forward.read_text(), run("iptables-save")
    try:
        yield
    finally:
        forward.write_text(before)
        for table in ("filter", "nat"):
            if f"*{table}" not in tables:
                for words in (("-F",), ("-X",)):
                    subprocess.run(["iptables", "-t", table, *words], capture_output=True, check=False)
        if "*filter" not in tables:
            subprocess.run(["iptables", "-P", "FORWARD", "ACCEPT"], capture_output=True, check=False)
        else:
            subprocess.run(["iptables-restore"], input=tables, text=True, capture_output=True, check=False)
        subprocess.run(["ip", "link", "del", "docker0"], capture_output=True, check=False)


def _find_base(here: Engine) -> None:
    """The Dockerfiles' own base where a registry gives it, else one made here."""
    pinned = base_of(ROOT / "services/gateway/Dockerfile")
    if here.succeeds("image", "inspect", pinned) or here.succeeds("pull", pinned, timeout_s=120):
        here.python_image = pinned
        return
    print(f"{pinned}: no registry gives it here; a base is made from Debian's packages")
    here.python_image = BASE
    if not here.succeeds("image", "inspect", BASE):
        archive = _debian_archive()
        here("import", str(archive), f"{BASE}-plain", timeout_s=300)
        with tempfile.TemporaryDirectory() as folder:
            shutil.copy(CERTIFICATES, Path(folder, "ca-certificates.crt"))
            Path(folder, "Dockerfile").write_text(_LAYER.format(plain=f"{BASE}-plain"))
            here("build", "--tag", BASE, folder, timeout_s=600)


def base_of(dockerfile: Path) -> str:
    match = re.search(r"^ARG PYTHON_IMAGE=(\S+)$", dockerfile.read_text(), re.MULTILINE)
    assert match, f"{dockerfile} names no base"
    return match[1]


#: The host's extra certificates, and Python's headers, which the official image has and Debian keeps in a package of their own.
_LAYER = """FROM {plain} AS headers
RUN apt-get update && cd /tmp && apt-get download libpython3.11-dev && dpkg-deb --extract libpython3.11-dev_*.deb /headers
FROM {plain}
COPY --from=headers /headers/usr/include /usr/include
COPY ca-certificates.crt /etc/ssl/certs/ca-certificates.crt
ENV PIP_CERT=/etc/ssl/certs/ca-certificates.crt PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_DEFAULT_TIMEOUT=180
"""
_UNNEEDED = "usrmerge perl perl-modules-5.36 libperl5.36 libnumber-compare-perl libtext-glob-perl"


def _debian_archive() -> Path:
    """A root file system with Python, as slim as the official image's; made once and kept."""
    archive = _cache() / "debian-bookworm-python-2.tar"
    if archive.exists():
        return archive
    if shutil.which("mmdebstrap") is None:
        raise NoEngineError("no registry gives the base image, and there is no mmdebstrap to make one (Debian: mmdebstrap)")
    archive.parent.mkdir(parents=True, exist_ok=True)
    fresh = archive.with_suffix(f".{os.getpid()}.tar")
    began = time.monotonic()
    run(
        "mmdebstrap", "--variant=minbase", "--include=ca-certificates,python3,python3-venv,usr-is-merged",
        *(f"--dpkgopt=path-exclude=/usr/share/{folder}/*" for folder in ("man", "doc", "locale", "info")),
        f'--customize-hook=chroot "$1" apt-get --yes --auto-remove purge {_UNNEEDED}',
        "bookworm", str(fresh), timeout_s=_BUILD_S,
    )  # fmt: skip
    fresh.rename(archive)
    print(f"{archive}: made in {time.monotonic() - began:.0f} s")
    return archive


def build_context(folder: Path) -> Path:
    """What .dockerignore lets through, without what editable installs and tests left in the tree, and a torch wheel where pip knows of one."""
    unwanted = shutil.ignore_patterns("__pycache__", "*.egg-info", "*.so", "_native.cpp", "tests", "build")
    for name in ("libs", "services", "requirements"):
        shutil.copytree(ROOT / name, folder / name, ignore=unwanted)
    for name in ("scripts", "wheels"):
        shutil.copytree(ROOT / "deploy" / name, folder / "deploy" / name, ignore=unwanted)
    for name in ("LICENSE", "constraints.txt", ".dockerignore"):
        shutil.copy(ROOT / name, folder / name)
    for place in os.environ.get("PIP_FIND_LINKS", "").split():
        for wheel in Path(place).glob("torch-*.whl") if Path(place).is_dir() else ():
            shutil.copy(wheel, folder / "deploy" / "wheels")
    return folder


def make_etcd(here: Engine) -> str:
    """An image with this machine's etcd. Raises NoEngineError."""
    binary = shutil.which("etcd")
    if binary is None:
        raise NoEngineError("there is no etcd to make an image of (Debian: etcd-server)")
    with tempfile.TemporaryDirectory() as folder:
        shutil.copy(binary, Path(folder, "etcd"))
        Path(folder, "Dockerfile").write_text(f"FROM {here.python_image}\nCOPY etcd /usr/local/bin/etcd\n")
        here("build", "--tag", ETCD, folder, timeout_s=300)
    return ETCD
