"""The console over a real stack in a real browser: a request held in every state, its waterfall against its report, a drain, keys, the keyboard;
and `baton top` beside it."""

from __future__ import annotations

import json
import os
import pty
import signal
import subprocess
import sys
import termios
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from browser import INIT, LAUNCH, SHOTS, listen, needs_browser
from fleet import MODEL, Fleet, wait_for

from baton.servicekit import KeyRole, new_key
from baton.wire.v1 import common_pb2
from baton.wire.v1 import inference_pb2 as pb
from baton.wire.v1.inference_pb2_grpc import InferenceStub

pytestmark = [pytest.mark.integration, needs_browser]

HELD = Path(__file__).parent / "faults" / "held_service.py"
CLIENT, CLIENT_RECORD = new_key(KeyRole.CLIENT)
ADMIN, ADMIN_RECORD = new_key(KeyRole.ADMIN)
METADATA = (("authorization", f"Bearer {CLIENT}"),)
#: Several chunks of the prefill servers here, so that a transfer can be held between two.
PROMPT = [100 + 7 * i % 4000 for i in range(200)]
#: Of a busy machine. Nothing waits for it but a failure.
SOON_MS = 30_000


class HeldFleet(Fleet):
    def hold(self, *, prefill: str = "", decode: str = "") -> None:
        """A prefill server that is idle begins before decode has pages: only held by itself it has nothing to send when decode goes on."""
        for service, words in (("prefill", prefill), ("decode", decode)):
            fresh = self.run_dir / f"hold.{service}.new"
            fresh.write_text(words)
            fresh.rename(self.run_dir / f"hold.{service}")

    def _command(self, service: str, *flags: str) -> tuple[str, ...]:  # type: ignore[override]
        if service == "gateway":
            return super()._command(service, *flags)
        return (sys.executable, str(HELD), service, str(self.run_dir / f"hold.{service}"), *flags)


@pytest.fixture(scope="module")
def fleet(model_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[HeldFleet]:
    folder = tmp_path_factory.mktemp("console")
    (folder / "keys").write_text(f"{CLIENT_RECORD.line()}\n{ADMIN_RECORD.line()}\n")
    fleet = HeldFleet(model_path, folder / "run")
    fleet.hold()
    fleet.prefill("--max-batched-tokens", "64")
    for _ in range(2):
        fleet.decode("--digest", "all")
    try:
        yield fleet.start("--api-key-file", str(folder / "keys"))
    finally:
        fleet.close()


class Request(threading.Thread):
    """One over gRPC, with its report."""

    def __init__(self, fleet: Fleet, max_tokens: int = 12) -> None:
        super().__init__(daemon=True)
        self._fleet, self._max_tokens = fleet, max_tokens
        self.report: pb.RoomReport | None = None
        self.error: grpc.RpcError | None = None
        self.start()

    def run(self) -> None:
        sampling = pb.SamplingParams(temperature=0, max_tokens=self._max_tokens, ignore_eos=True)
        asked = pb.GenerateRequest(model=MODEL, token_ids=pb.TokenIds(ids=PROMPT), sampling=sampling, report=True)
        try:
            with grpc.insecure_channel(self._fleet.grpc) as channel:
                self.report = list(InferenceStub(channel).Generate(asked, timeout=120, metadata=METADATA))[-1].report
        except grpc.RpcError as error:
            self.error = error

    def whole(self) -> pb.RoomReport:
        self.join(120)
        assert self.report is not None, self.error
        return self.report


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        launched = playwright.chromium.launch(**LAUNCH)
        yield launched
        launched.close()


@pytest.fixture
def page(fleet: HeldFleet, browser: Any) -> Iterator[Any]:
    """The console, opened with a client's key that is typed in; at the end nothing was complained of."""
    context = browser.new_context(viewport={"width": 1280, "height": 900})
    context.add_init_script(INIT)
    page = context.new_page()
    page.set_default_timeout(SOON_MS)
    complaints = listen(page)
    page.goto(f"http://{fleet.http}/console")
    page.get_by_label("API key").fill("baton-wrong")
    page.get_by_role("button", name="Watch").click()
    page.locator("#key-error:not(:empty)").wait_for()
    page.get_by_label("API key").fill(CLIENT)
    page.get_by_role("button", name="Watch").click()
    page.locator("body[data-ready=true]").wait_for()
    yield page
    page.screenshot(path=SHOTS / "last.png", full_page=True)
    assert page.evaluate("window.violations") == []
    assert complaints() == []
    fleet.hold()
    context.close()


def live_state(page: Any, state: str) -> None:
    page.locator(f'#live tr[data-state="{state}"]').wait_for()


def test_a_request_passes_through_every_state_and_its_waterfall_is_its_report(fleet: HeldFleet, page: Any) -> None:
    fleet.hold(prefill="waiting", decode="bootstrapping")
    request = Request(fleet)
    following = {
        "BOOTSTRAPPING": {"prefill": "waiting"},
        "WAITING": {"prefill": "transferring"},
        "TRANSFERRING": {"decode": "slow 0.4"},
        "SUCCESS": {},
    }
    for state, words in following.items():
        live_state(page, state)
        page.screenshot(path=SHOTS / f"{state.lower()}.png")
        fleet.hold(**words)
    report = request.whole()
    row = page.locator("#finished tr").first
    row.wait_for()
    page.locator("#no-live:not([hidden])").wait_for()
    row.get_by_role("button").click()
    dialog = page.get_by_role("dialog")
    dialog.wait_for()
    page.screenshot(path=SHOTS / "waterfall.png")
    drawn = {
        line.get_attribute("data-state"): (float(line.get_attribute("data-start")), float(line.get_attribute("data-ms")))
        for line in dialog.locator("tr[data-state]").all()
    }
    told = {common_pb2.RoomState.Name(span.state).removeprefix("ROOM_STATE_"): (span.start_ms, span.duration_ms) for span in report.states}
    assert drawn.keys() - {"queue"} == told.keys() == {"BOOTSTRAPPING", "WAITING", "TRANSFERRING", "SUCCESS"}
    for state, times in told.items():
        assert drawn[state] == pytest.approx(times, abs=1e-3), state
    layers = [line.get_attribute("data-layers") for line in dialog.locator("tr[data-layers]").all()]
    assert layers == [f"{part.first_layer}-{part.first_layer + part.num_layers - 1}" for part in report.transfer.parts]
    assert layers[-1].endswith("-29")
    facts = {fact.get_attribute("data-fact"): fact.locator("dd").inner_text() for fact in dialog.locator("[data-fact]").all()}
    assert facts["prompt"] == f"{len(PROMPT)} tokens"
    assert facts["answer"] == f"{report.usage.completion_tokens} tokens"
    assert f"in {report.transfer.puts} puts over {report.transfer.transport}" in facts["KV moved"]
    assert facts["digest"] == "equal on both sides"
    assert "room" not in facts  # for operators
    assert str(report.room) not in page.content()


def test_a_client_sees_paths_and_no_address(fleet: HeldFleet, page: Any) -> None:
    assert page.locator("#pairs tr").count() == 2
    text = page.locator("#pairs").inner_text()
    assert "sysv" in text
    assert float(text.split()[-1]) > 0
    assert not [worker.address() for worker in fleet.workers if worker.address() in page.content()]


def test_the_keyboard_reaches_everything(fleet: HeldFleet, page: Any) -> None:
    Request(fleet, 4).whole()
    page.locator("#finished tr").first.wait_for()

    def focus() -> dict[str, str]:
        found: dict[str, str] = page.evaluate(
            "(() => { const e = document.activeElement, s = getComputedStyle(e);"
            " return {id: e.id, tag: e.tagName, text: e.textContent.trim(), label: e.getAttribute('aria-label') ?? '', outline: s.outlineStyle}; })()"
        )
        return found

    page.locator("h1").click()  # from the top
    reached = []
    for _ in range(60):
        page.keyboard.press("Tab")
        reached.append(focus())
        if reached[-1]["tag"] == "BUTTON" and reached[-1]["text"] != "Drain":
            break
    assert all(one["outline"] != "none" for one in reached), reached
    assert sum(one["label"].startswith("Drain ") for one in reached) == len(fleet.workers)
    assert {"only-failed", "hold"} <= {one["id"] for one in reached}
    opener = reached[-1]["text"]
    page.keyboard.press("Enter")
    page.get_by_role("dialog", name=f"Request {opener}").wait_for()
    assert page.evaluate("document.getElementById('waterfall').contains(document.activeElement)")
    page.keyboard.press("Escape")
    page.get_by_role("dialog").wait_for(state="hidden")
    assert focus()["text"] == opener
    for _ in range(60):
        page.keyboard.press("Shift+Tab")
        if focus()["id"] == "only-failed":
            break
    page.keyboard.press("Space")
    page.locator("#finished tr").first.wait_for(state="hidden")
    page.keyboard.press("Space")
    page.locator("#finished tr").first.wait_for()


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_phone_has_all_of_it_and_scrolls_in_one_direction(fleet: HeldFleet, page: Any, scheme: str) -> None:
    page.set_viewport_size({"width": 360, "height": 740})
    page.emulate_media(color_scheme=scheme, reduced_motion="reduce")
    Request(fleet, 4).whole()
    page.locator("#ttft-chart circle").first.wait_for()
    page.locator("#finished tr").first.wait_for()
    page.screenshot(path=SHOTS / f"phone-{scheme}.png", full_page=True)
    assert page.evaluate("document.documentElement.scrollWidth") == 360
    assert page.locator("#servers tr").count() == 3
    wide = page.evaluate("[...document.querySelectorAll('.scroll')].filter((e) => e.scrollWidth > e.clientWidth + 1).map((e) => e.parentElement.id)")
    assert wide == []
    background = page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert (sum(int(part) for part in background[4:-1].split(",")) < 200) is (scheme == "dark")


def test_baton_top_prints_the_same(fleet: HeldFleet, page: Any) -> None:
    command = [sys.executable, "-m", "baton.cli.main", "top", "--once", "--address", fleet.grpc]
    environment = os.environ | {"BATON_API_KEY": CLIENT}
    told = json.loads(subprocess.run([*command, "--json"], env=environment, capture_output=True, text=True, check=True).stdout)
    assert f"{told['counts']['ended']:,}" == page.locator("#count-ended").inner_text()
    assert {row["role"] for row in told["servers"].values()} == {"prefill", "decode"}
    text = subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout
    for row in told["servers"].values():
        assert row["instance"] in text
    refused = subprocess.run(command, env=os.environ | {"BATON_API_KEY": ""}, capture_output=True, text=True, check=False)
    assert refused.returncode == 1
    assert "UNAUTHENTICATED" in refused.stderr


def test_baton_top_follows_in_a_terminal_until_q(fleet: HeldFleet) -> None:
    Request(fleet, 4).whole()
    leader, follower = pty.openpty()
    termios.tcsetwinsize(leader, (30, 110))
    command = [sys.executable, "-m", "baton.cli.main", "top", "--address", fleet.grpc]
    environment = os.environ | {"BATON_API_KEY": CLIENT, "TERM": "xterm", "COLUMNS": "", "LINES": ""}
    process = subprocess.Popen(command, stdin=follower, stdout=follower, stderr=follower, env=environment, start_new_session=True)
    os.close(follower)
    said = bytearray()

    def read() -> None:
        try:
            while chunk := os.read(leader, 65536):
                said.extend(chunk)
        except OSError:
            return  # the terminal's other end is closed

    reader = threading.Thread(target=read, daemon=True)
    reader.start()
    try:
        wait_for(lambda: b"length" in said and b"prefill" in said, 60, lambda: said.decode(errors="replace"))
        os.write(leader, b"\x1b[B")
        wait_for(lambda: b"\x1b[7m" in said, 30, "a request selected")
        os.write(leader, b"\r")
        wait_for(lambda: b"first token after" in said, 30, "its waterfall")
        termios.tcsetwinsize(leader, (10, 40))
        process.send_signal(signal.SIGWINCH)
        before = len(said)
        wait_for(lambda: len(said) > before, 30, "drawn again for another size")
        os.write(leader, b"q")
        assert process.wait(30) == 0
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()
        os.close(leader)


def test_a_server_is_drained_with_the_admin_key_and_with_no_other(fleet: HeldFleet, page: Any) -> None:
    victim = fleet.workers[-1].info().instance_id
    page.get_by_role("button", name=f"Drain decode server {victim}").click()
    dialog = page.get_by_role("dialog")
    dialog.get_by_label("Key of role admin").fill(CLIENT)
    dialog.get_by_role("button", name="Drain").click()
    dialog.get_by_role("alert").filter(has_text="role admin").wait_for()
    assert not fleet.workers[-1].info().draining
    dialog.get_by_label("Key of role admin").fill(ADMIN)
    dialog.get_by_role("button", name="Drain").click()
    dialog.wait_for(state="hidden")
    row = page.locator("#servers tr").filter(has_text=victim)
    row.locator('[data-state="draining"]').wait_for()
    page.screenshot(path=SHOTS / "draining.png")
    assert fleet.workers[-1].info().draining
    stored = page.evaluate("[Object.keys(localStorage), document.cookie]")
    assert stored == [[], ""]
    Request(fleet, 4).whole()  # the other one takes what comes
