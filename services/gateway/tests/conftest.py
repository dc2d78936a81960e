"""Fixtures of the gateway's tests: a tiny model folder, and scripted workers behind a real gateway."""

from __future__ import annotations

import os
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

sys.path.insert(0, str(Path(__file__).parent))

from gateway_harness import EMPTY, Stack, start_stack
from gateway_model import make_model_folder
from gateway_worker import ScriptedWorker

# How long one example takes says nothing on a machine that is shared.
settings.register_profile("gateway", deadline=None)
# pytest --hypothesis-profile=long services/gateway/tests/test_gateway_fuzz.py services/gateway/tests/test_gateway_openapi.py
settings.register_profile("long", deadline=None, max_examples=5000)
settings.load_profile("gateway")


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Hugging Face folder without weights: a byte-level tokenizer of 300-odd tokens and a chat template."""
    return make_model_folder(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture(scope="session")
def real_model_folder() -> Path:
    """SmolLM2-135M-Instruct, where `baton model fetch smollm2` has put it."""
    named = os.environ.get("BATON_TEST_MODEL")
    cache = Path(os.environ.get("BATON_CACHE_DIR") or "~/.cache/baton").expanduser()
    folder = Path(named) if named else cache / "models" / "smollm2"
    if not (folder / "tokenizer.json").is_file():
        pytest.skip(f"no model in {folder}: run `baton model fetch smollm2`")
    return folder


@pytest.fixture
async def stack_of(model_folder: Path) -> AsyncIterator[Callable[..., Any]]:
    """Starts gateways in front of scripted workers; all end with the test."""
    async with AsyncExitStack() as exits:

        async def make(**settings: Any) -> Stack:
            return await exits.enter_async_context(start_stack(model_folder, **settings))

        yield make


@pytest.fixture
async def split(stack_of: Callable[..., Any]) -> Stack:
    """A gateway with one prefill and one decode server."""
    stack: Stack = await stack_of()
    return stack


@pytest.fixture
async def plain(stack_of: Callable[..., Any]) -> Stack:
    """A gateway with one plain server."""
    stack: Stack = await stack_of(plain=1)
    return stack


@pytest.fixture
async def start(stack_of: Callable[..., Any]) -> Callable[..., Any]:
    """A gateway that knows nobody, and workers that it has not heard of."""

    async def make(*roles: str, **settings: Any) -> tuple[Stack, list[ScriptedWorker]]:
        seed: Stack = await stack_of(plain=1)  # for its words and what its workers share
        stack: Stack = await stack_of(**(EMPTY | settings))
        shared = seed.workers[0].shared
        started = []
        for number, role in enumerate(roles):
            one = ScriptedWorker(role, shared, f"{role}-{number}", vocab_size=stack.tokenizer.vocab_size)
            started.append(await one.start())
        stack.workers.extend(started)
        return stack, started

    return make
