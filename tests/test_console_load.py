"""1,000 rooms in half a minute through a real gateway, and a page that keeps up: what it counts is what the gateway has counted, within a
second."""

from __future__ import annotations

import asyncio
import contextlib
import random
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import grpc.aio
import pytest
from browser import INIT, LAUNCH, SHOTS, listen, needs_browser

sys.path.insert(0, str(Path(__file__).parents[1] / "services" / "gateway" / "tests"))

from gateway_harness import Stack, ask, start_stack
from gateway_model import make_model_folder
from gateway_worker import TRANSFER, ScriptedWorker

from baton.wire.v1 import worker_pb2

pytestmark = [pytest.mark.integration, pytest.mark.long, needs_browser]

NUM_ROOMS = 1000
DURATION_S = 30.0
LOOK_S = 1.0
#: Of the run, what the page's main thread may compute: beyond it, it would fall behind on a slower machine.
MAX_BUSY_SHARE = 0.3

dice = random.Random(8)


async def paced(worker: ScriptedWorker, start: worker_pb2.Start) -> None:
    """A server whose parts take some time each, more for a longer prompt."""
    room, answer = start.room, worker.shared.tokens(start)
    unit_s = dice.lognormvariate(-5.0, 0.5) * (1 + len(start.prompt_token_ids) / 400)
    if worker.role == "prefill":
        worker.event(room, bootstrapped=worker_pb2.Bootstrapped())
        worker.event(room, prefill_started=worker_pb2.PrefillStarted())
        await asyncio.sleep(unit_s)
        worker.event(room, transfer_started=worker_pb2.TransferStarted())
        await asyncio.sleep(unit_s)
        worker.tokens(room, 0, answer[:1])
        worker.event(room, transferred=worker_pb2.Transferred(transfer=TRANSFER))
        return
    worker.event(room, reserved=worker_pb2.Reserved(pages=1))
    await asyncio.sleep(2.5 * unit_s)
    worker.event(room, kv_ready=worker_pb2.KvReady(digest_checked=True, exposed_ms=0.4))
    fails = dice.random() < 0.01
    for index in range(1, len(answer)):
        if fails and index > 3:
            worker.fail(room, grpc.StatusCode.INTERNAL, "engine_error")
            return
        await asyncio.sleep(dice.lognormvariate(-5.6, 0.3))
        worker.tokens(room, index, answer[index : index + 1])
    worker.event(room, finished=worker_pb2.Finished(reason=worker.shared.reason(start), completion_tokens=len(answer)))


async def ask_all(stack: Stack, num: int, duration_s: float) -> None:
    """Evenly, whatever becomes of those before."""
    begun, asked = time.monotonic(), []

    async def one() -> None:
        words = dice.choice((4, 6, 10, 24, 60)) if dice.random() > 0.03 else 420
        with contextlib.suppress(grpc.aio.AioRpcError):  # a scripted failure
            await stack.reply(ask("hello " * words))

    for number in range(num):
        await asyncio.sleep(max(0.0, begun + number * duration_s / num - time.monotonic()))
        asked.append(asyncio.create_task(one()))
    await asyncio.gather(*asked)


async def counted(page: Any) -> int:
    return int((await page.locator("#count-ended").inner_text()).replace(",", "").replace("–", "0"))


async def test_the_page_counts_what_the_gateway_counts_within_a_second() -> None:
    from playwright.async_api import async_playwright

    with tempfile.TemporaryDirectory() as folder:
        about = {"max_model_len": 4096, "total_pages": 512}
        model = make_model_folder(Path(folder) / "tiny")
        async with start_stack(model, prefill=2, decode=3, worker={"prefill": about, "decode": about}) as stack, async_playwright() as playwright:
            for number, worker in enumerate(stack.workers):
                worker.script = paced
                worker.report_load(free_pages=(430, 390, 210, 96, 305)[number], running=number, reserved_pages=9 * number, published_pages=4)
            browser = await playwright.chromium.launch(**LAUNCH)
            context = await browser.new_context(viewport={"width": 1280, "height": 900})
            await context.add_init_script(INIT)
            page = await context.new_page()
            complaints = listen(page)
            # Of its main thread's own time: what others do on these cores is none of it.
            profile = await context.new_cdp_session(page)
            await profile.send("Performance.enable", {"timeDomain": "threadTicks"})
            await page.goto(f"{stack.http}/console")
            await page.locator("body[data-ready=true]").wait_for()
            console = stack.gateway.console
            assert console is not None
            history = console.feed._sources.history

            load = asyncio.create_task(ask_all(stack, NUM_ROOMS, DURATION_S))
            behind = []
            while not load.done():
                ended = history.num_ended
                await asyncio.sleep(LOOK_S)
                behind.append(max(0, ended - await counted(page)))
            await load
            assert history.num_ended == NUM_ROOMS
            await asyncio.sleep(LOOK_S)
            assert await counted(page) == NUM_ROOMS
            assert await page.locator("#finished tr").count() == 300
            assert len(behind) >= DURATION_S / LOOK_S / 3
            assert behind == [0] * len(behind)
            long = await page.evaluate("window.longTasks")
            print(f"{NUM_ROOMS} rooms in {DURATION_S:g} s, looked at {len(behind)} times; {len(long)} long tasks, {sum(long):.0f} ms of them")
            busy = {one["name"]: one["value"] for one in (await profile.send("Performance.getMetrics"))["metrics"]}
            parts = {name: round(busy[f"{name}Duration"], 2) for name in ("Task", "Script", "Layout", "RecalcStyle")}
            print(f"seconds of the page's main thread: {parts}")
            assert busy["TaskDuration"] <= MAX_BUSY_SHARE * DURATION_S
            assert await page.evaluate("window.violations") == []
            assert complaints() == []
            for scheme in ("light", "dark"):
                await page.emulate_media(color_scheme=scheme)
                await page.screenshot(path=SHOTS / f"load-{scheme}.png", full_page=True)
            await browser.close()
