"""The gateway's image, built and run by a real engine; buildah builds it too where there is one."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from machine import BASE, Engine

pytestmark = pytest.mark.engine

IMAGE = "baton-gateway:tests"
LIMIT_MB = 250
READ_ONLY = ("--read-only", "--tmpfs", "/tmp", "--tmpfs", "/run/baton:uid=10001", "--cap-drop", "ALL", "--security-opt", "no-new-privileges")

_FOUND = """
import importlib.util, json
names = "baton.gateway", "torch", "numpy", "pip", "baton.engine", "baton.kvtransfer"
print(json.dumps({name: importlib.util.find_spec(name) is not None for name in names}))
"""


@pytest.fixture(scope="module")
def image(here: Engine, context: Path) -> str:
    here.build("services/gateway/Dockerfile", IMAGE, context)
    return IMAGE


@pytest.fixture
def gateway(here: Engine, image: str, tmp_path: Path) -> Iterator[str]:
    """A gateway that runs and has no servers yet. Its model is a tokenizer of two words."""
    model = tiny_tokenizer(tmp_path / "tiny")
    words = ("--env", "BATON_GATEWAY_MODEL_PATH=/model", "--env", "BATON_GATEWAY_PREFILL=127.0.0.1:9", "--env", "BATON_GATEWAY_DECODE=127.0.0.1:10")
    name = here("run", "--detach", *READ_ONLY, "--volume", f"{model}:/model:ro", *words, "--health-interval=1s", image).strip()
    yield name
    here("rm", "--force", name)


def tiny_tokenizer(folder: Path) -> Path:
    folder.mkdir(mode=0o755)
    folder.parent.chmod(0o755)
    tokenizer = {"version": "1.0", "added_tokens": [], "model": {"type": "WordLevel", "vocab": {"hello": 0, "[UNK]": 1}, "unk_token": "[UNK]"}}
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    (folder / "config.json").write_text(json.dumps({"model_type": "llama", "vocab_size": 2, "eos_token_id": 1, "max_position_embeddings": 64}))
    (folder / "tokenizer_config.json").write_text("{}")
    return folder


def test_it_is_small_and_says_what_it_is(here: Engine, image: str) -> None:
    about = json.loads(here("image", "inspect", image))[0]
    size_mb = about["Size"] / 1e6
    base_mb = json.loads(here("image", "inspect", here.python_image))[0]["Size"] / 1e6
    print(f"{image}: {size_mb:.0f} MB, {base_mb:.0f} of them its base {here.python_image}")
    assert size_mb < LIMIT_MB
    assert about["Config"]["User"] == "10001:10001"
    labels = about["Config"]["Labels"]
    assert labels["org.opencontainers.image.title"] == "baton-gateway"
    assert labels["org.opencontainers.image.licenses"] == "Apache-2.0"
    assert labels["org.opencontainers.image.base.name"] == here.python_image


def test_it_has_its_own_closure_and_no_more(here: Engine, image: str) -> None:
    answer = here("run", "--rm", *READ_ONLY, "--entrypoint", "python", image, "-c", _FOUND)
    assert json.loads(answer) == {
        "baton.gateway": True,
        "torch": False,
        "numpy": False,
        "pip": False,
        "baton.engine": False,
        "baton.kvtransfer": False,
    }


def test_settings_that_cannot_be_used_are_told_and_end_it(here: Engine, image: str) -> None:
    done = subprocess.run([here.docker, "run", "--rm", *READ_ONLY, image], env=here.environment, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "BATON_GATEWAY_MODEL_PATH" in done.stderr


def test_it_serves_without_rights_and_ends_at_the_signal(here: Engine, gateway: str) -> None:
    """Health is asked of the service: without servers it is not healthy, and says so itself."""
    script = "import urllib.request as u; print(u.urlopen('http://127.0.0.1:8000/health').read().decode())"
    deadline = time.monotonic() + 60
    while not here.succeeds("exec", gateway, "python", "-c", script):
        assert time.monotonic() < deadline, here("logs", gateway)
        time.sleep(0.5)
    while not (log := json.loads(here("inspect", gateway))[0]["State"]["Health"]["Log"]):
        assert time.monotonic() < deadline
        time.sleep(0.5)
    assert any("says NOT_SERVING" in entry["Output"] or "not ready yet" in entry["Output"] for entry in log), log
    assert here("exec", gateway, "id", "-u").strip() == "10001"
    began = time.monotonic()
    here("stop", "--time", "60", gateway, timeout_s=90)
    assert json.loads(here("inspect", gateway))[0]["State"]["ExitCode"] == 0, here("logs", gateway)
    print(f"stopped after {time.monotonic() - began:.1f} s")


def test_a_stop_right_after_the_start_is_heard(here: Engine, image: str, tmp_path: Path) -> None:
    """Python is process 1 there, and the kernel keeps from that one what it has no handler for: docker would wait, and kill."""
    model = tiny_tokenizer(tmp_path / "tiny")
    words = ("--volume", f"{model}:/model:ro", "--env", "BATON_GATEWAY_MODEL_PATH=/model", "--env", "BATON_GATEWAY_PLAIN=127.0.0.1:9")
    for wait_s in (0.0, 0.1, 0.3, 0.0, 0.2):
        name = here("run", "--detach", *READ_ONLY, *words, image).strip()
        try:
            time.sleep(wait_s)
            began = time.monotonic()
            here("stop", "--time", "20", name, timeout_s=60)
            took_s = time.monotonic() - began
            print(f"stopped {wait_s:g} s after the start: took {took_s:.1f} s")
            assert json.loads(here("inspect", name))[0]["State"]["ExitCode"] == 0, here("logs", name)
            assert took_s < 10
        finally:
            here("rm", "--force", name)


@pytest.mark.full
def test_buildah_builds_it_without_a_daemon(here: Engine, context: Path, tmp_path: Path) -> None:
    if shutil.which("buildah") is None or os.geteuid():
        pytest.skip("BUILDAH WAS NOT TRIED: it needs the command (Debian: buildah) and root")
    if here.python_image != BASE:
        pytest.skip("BUILDAH WAS NOT TRIED: it is tried with the base that is made here")
    storage = ("--root", str(tmp_path / "root"), "--runroot", str(tmp_path / "run"), "--storage-driver", "vfs")
    archive = tmp_path / "base.tar"
    here("save", "--output", str(archive), BASE, timeout_s=300)
    buildah = ("buildah", *storage)

    def run_buildah(*words: str, timeout_s: float) -> str:
        done = subprocess.run([*buildah, *words], capture_output=True, text=True, timeout=timeout_s, check=False)
        assert done.returncode == 0, done.stderr[-4000:]
        return done.stdout

    try:
        run_buildah("pull", f"docker-archive:{archive}", timeout_s=300)
        words = ("--isolation=chroot", "--pull-never", "--format=docker", f"--build-arg=PYTHON_IMAGE={BASE}", "--file=services/gateway/Dockerfile")
        run_buildah("bud", *words, "--tag=baton-gateway-buildah", str(context), timeout_s=1200)
        assert "baton-gateway-buildah" in run_buildah("images", timeout_s=60)
    finally:  # gigabytes, which pytest would keep
        shutil.rmtree(tmp_path, ignore_errors=True)
