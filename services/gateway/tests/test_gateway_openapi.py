"""The front against its own description: what the description takes is taken, what it does not is refused, and answers are as described."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from gateway_harness import MODEL, Stack
from hypothesis import settings

from baton.gateway.http.openapi import Limits, describe
from baton.gateway.http.parse import parse_chat, parse_completion

HERE = Path(__file__).parent
LIMITS = Limits(model=MODEL, vocab_size=300, context_tokens=512, max_body_bytes=1000)

CHECKS = (
    "not_a_server_error",
    "status_code_conformance",
    "content_type_conformance",
    "response_headers_conformance",
    "response_schema_conformance",
    "negative_data_rejection",
    "unsupported_method",
    "allow_header_conformance",
    "what_the_schema_takes_is_taken",
    "an_error_says_what_and_where",
)
#: A minimum that shows that requests were really sent.
LEAST_CASES = 300


async def test_it_is_served_with_the_limits_that_hold(stack_of: Callable[..., Any]) -> None:
    stack: Stack = await stack_of(max_body_bytes=4321, prefill=1, decode=1)
    async with httpx.AsyncClient(base_url=stack.http, timeout=20) as client:
        document = (await client.get("/openapi.json")).json()
    vocab_size = stack.prefill.vocab_size
    assert document == describe(Limits(MODEL, vocab_size, 512, 4321), document["info"]["version"])
    chat = document["components"]["schemas"]["ChatRequest"]["properties"]
    assert chat["model"]["const"] == MODEL
    assert chat["max_tokens"]["maximum"] == 511
    assert chat["top_k"]["maximum"] == vocab_size


LEAST = [("Chat", parse_chat, {"messages": [{"role": "user", "content": "x"}]}), ("Completion", parse_completion, {"prompt": "x"})]


@pytest.mark.parametrize(("name", "parse", "least"), LEAST)
def test_every_field_of_the_description_is_one_of_the_front(name: str, parse: Callable[[dict[str, Any]], Any], least: dict[str, Any]) -> None:
    """A field that is not given is the same as null; one that the front does not know is refused even so."""
    properties = describe(LIMITS, "1")["components"]["schemas"][f"{name}Request"]["properties"]
    assert parse(dict.fromkeys(properties) | {"model": MODEL} | least) == parse({"model": MODEL} | least)


@pytest.mark.long
@pytest.mark.timeout(900)
async def test_the_front_is_what_its_description_says(stack_of: Callable[..., Any], tmp_path: Path) -> None:
    """schemathesis: the limits of every field and their neighbours, then random bodies, sound and unsound (more with a longer profile)."""
    stack: Stack = await stack_of(prefill=1, decode=1, tool_call_format="hermes")
    fuzzing = ("--phases", "examples,coverage,fuzzing", "--mode", "all", "--max-examples", str(settings().max_examples // 10), "--seed", "7")
    command = (sys.executable, "-m", "schemathesis.cli", "run", f"{stack.http}/openapi.json", *fuzzing, "--checks", ",".join(CHECKS), "--no-color")
    environment = os.environ | {"SCHEMATHESIS_HOOKS": "openapi_checks", "PYTHONPATH": os.pathsep.join([str(HERE), os.environ.get("PYTHONPATH", "")])}
    process = await asyncio.create_subprocess_exec(
        *command, env=environment, cwd=tmp_path, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT
    )
    said = (await process.communicate())[0].decode()
    assert process.returncode == 0, said[-8000:]
    cases = int(said.split(" generated")[0].rsplit(maxsplit=1)[1])
    assert cases >= LEAST_CASES, said
    await stack.settled()
    assert not [outcome for outcome in stack.gateway.rooms.outcomes if outcome != "success" and outcome[0] != "client"]  # type: ignore[index]
