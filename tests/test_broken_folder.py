"""Real workers on folders that cannot be served: they end with one message, without a traceback, and have opened no port."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from baton.engine.inventory import inventory
from baton.engine.model_config import parse_model_config

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 131,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
}
FILE = "model.safetensors"


def write_config(folder: Path, **changes: object) -> None:
    (folder / "config.json").write_text(json.dumps({**CONFIG, **changes}))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_config(tmp_path)
    tensors = {spec.name: torch.ones(spec.shape) for spec in inventory(parse_model_config(CONFIG, tmp_path / "config.json"))}
    save_file(tensors, tmp_path / FILE)
    return tmp_path


def pipe(folder: Path) -> None:
    (folder / FILE).unlink()
    os.mkfifo(folder / FILE)


def yarn_without_turns(folder: Path) -> None:
    write_config(folder, rope_parameters={"rope_type": "yarn", "factor": 4.0, "rope_theta": 1})


BROKEN = {
    "sizes without end": (
        "prefill",
        lambda folder: write_config(folder, num_hidden_layers=10**12),
        "config.json: num_hidden_layers = 1000000000000: ",
    ),
    "a rotation that does not turn": ("decode", yarn_without_turns, "config.json: rope_parameters.rope_theta = 1: "),
    "a layer left out": ("prefill", lambda folder: write_config(folder, num_hidden_layers=1), f"{FILE}: tensor model.layers.1."),
    "weights that are a pipe": ("decode", pipe, f"{FILE}: is not a regular file"),
}


def run(worker: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """With every port taken, by sockets that share with nobody: a worker that goes so far as to open one ends with a message about that."""
    flags = ["--port", "--metrics-port", *(["--bootstrap-port"] if worker == "prefill" else [])]
    command = [sys.executable, "-m", f"baton.{worker}.app", "--model-path", str(folder), "--num-pages", "16", "--log-format", "json"]
    with ExitStack() as stack:
        for flag in flags:
            taken = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
            command += [flag, str(taken.getsockname()[1])]
        command += ["--metrics-exporter", "prometheus"]
        return subprocess.run(command, capture_output=True, text=True, timeout=240, check=False, env={**os.environ, "OMP_NUM_THREADS": "1"})


@pytest.mark.parametrize("case", BROKEN)
def test_a_broken_folder_ends_a_worker_before_it_opens_a_port(folder: Path, case: str) -> None:
    worker, damage, message = BROKEN[case]
    damage(folder)
    ended = run(worker, folder)
    told = ended.stdout + ended.stderr
    assert ended.returncode == 2, told
    assert f"baton-{worker}: {folder}/{message}" in told
    assert "Traceback" not in told
    assert "port" not in told.replace(str(folder), "")


@pytest.mark.parametrize("worker", ["prefill", "decode"])
def test_on_a_good_folder_the_same_worker_does_come_to_its_ports(folder: Path, worker: str) -> None:
    ended = run(worker, folder)
    assert ended.returncode == 1
    assert "port" in ended.stderr
    assert "Traceback" not in ended.stderr
