"""A real browser for tests of the console, and what it must never say."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import pytest

CHROMIUM = next((path for name in ("chromium", "chromium-browser", "google-chrome") if (path := shutil.which(name))), None)

needs_browser = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium is installed (Debian: chromium): the console is not looked at")

#: Where the tests leave what they saw, to be looked at; git ignores it.
SHOTS = Path(__file__).parents[1] / "build" / "console"
SHOTS.mkdir(parents=True, exist_ok=True)

#: As root, which CI is, Chromium's sandbox does not start; what it shows is our own page.
LAUNCH: dict[str, Any] = {"executable_path": CHROMIUM, "args": ["--no-sandbox", "--disable-gpu"]}

#: Before anything of the page runs: what its policy forbids, and tasks of more than 50 ms.
INIT = """
window.violations = [];
document.addEventListener("securitypolicyviolation", (event) => window.violations.push(`${event.violatedDirective} ${event.blockedURI}`));
window.longTasks = [];
new PerformanceObserver((list) => window.longTasks.push(...list.getEntries().map((entry) => entry.duration))).observe({ type: "longtask" });
"""

#: Chromium's own line for an answer of 401 or 403, which the page asks for on purpose and shows in words.
_REFUSALS = ("status of 401", "status of 403")


class _Page(Protocol):
    def on(self, event: Any, f: Any) -> None: ...


def listen(page: _Page) -> Callable[[], list[str]]:
    """Collects what the page complains of; call the result for it."""
    said: list[str] = []

    def line(message: Any) -> None:
        if message.type in ("error", "warning") and not any(words in message.text for words in _REFUSALS):
            said.append(f"{message.type}: {message.text}")

    page.on("console", line)
    page.on("pageerror", lambda error: said.append(f"uncaught: {error}"))
    page.on("requestfailed", lambda request: None if request.url.endswith("/feed") else said.append(f"failed: {request.url}"))
    return lambda: said
