"""Helpers of the bench's tests are modules beside them."""

import socket
import sys
from pathlib import Path

import pytest
from hypothesis import settings

sys.path.insert(0, str(Path(__file__).parent))

# How long one example takes says nothing on a machine that is shared.
settings.register_profile("bench", deadline=None)
settings.load_profile("bench")


@pytest.fixture
def closed_port() -> int:
    """A port that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
