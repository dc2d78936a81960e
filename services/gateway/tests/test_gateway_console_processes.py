"""The console of a gateway of several processes: whichever of them a page is connected to, it shows what all of them have."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from gateway_feed import Page
from gateway_harness import eventually
from gateway_worker import ScriptedWorker, Shared
from test_gateway_processes import PROCESSES, many

from baton.gateway.model_folder import read_model_folder
from baton.gateway.tokenizer import PromptTokenizer


@pytest.fixture
async def plain_server(model_folder: Path) -> AsyncIterator[ScriptedWorker]:
    tokenizer = PromptTokenizer(read_model_folder(model_folder))
    one = await ScriptedWorker("plain", Shared(lambda _: [3, 4, 5, 2]), "plain-0", vocab_size=tokenizer.vocab_size).start()
    yield one
    await one.kill()


async def test_the_feed_is_that_of_every_process(model_folder: Path, tmp_path: Path, plain_server: ScriptedWorker) -> None:
    async with many(model_folder, tmp_path, "--plain", plain_server.address) as one:
        await one.all_answer()
        page = Page()
        following = asyncio.create_task(page.follow(one.http))

        def all_told() -> bool:
            return page.num_snapshots > 0 and page.known["counts"]["ended"] == len(page.ended) == len(one.lines("answered"))

        await eventually(all_told, 30)
        for _ in range(6):
            await one.ask()
        await eventually(all_told, 30)
        await eventually(lambda: sum(point[0] for point in page.known["series"].values()) == len(page.ended), 30)
        assert {row["room"] for row in page.ended.values()} == {str(line["room"]) for line in one.lines("answered")}

        victim = (page.known["about"]["process"] + 1) % PROCESSES
        os.kill(one.process_ids()[victim], signal.SIGSTOP)
        try:
            await eventually(lambda: page.known["about"]["away"] == [victim], 30)
            assert len(page.ended) == page.known["counts"]["ended"]
        finally:
            os.kill(one.process_ids()[victim], signal.SIGCONT)
        await eventually(lambda: page.known["about"]["away"] == [], 30)
        following.cancel()
        await asyncio.gather(following, return_exceptions=True)
