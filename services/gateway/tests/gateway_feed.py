"""A reader of the console's feed over HTTP, for tests."""

from __future__ import annotations

import json
from typing import Any

import httpx


class Page:
    """What a page knows that follows the feed, as the console's own store does."""

    def __init__(self) -> None:
        self.known: dict[str, Any] = {}
        self.ended: dict[int, dict[str, Any]] = {}
        self.num_snapshots = self.num_deltas = self.num_skipped = 0
        self.text = ""

    def take(self, kind: str, data: dict[str, Any]) -> None:
        if kind == "snapshot":
            self.known, self.ended = data, {}
            self.num_snapshots += 1
            return
        self.num_deltas += kind == "delta"
        self.num_skipped += data.get("skipped", 0)
        self.ended |= {row["n"]: row for row in data.pop("ended")}
        for section, value in data.items():
            if isinstance(value, dict) and set(value) == {"set", "gone"}:
                known = self.known[section]
                self.known[section] = {key: row for key, row in known.items() if key not in value["gone"]} | value["set"]
            else:
                self.known[section] = value

    async def follow(self, http: str, key: str = "") -> None:
        headers = {"authorization": f"Bearer {key}"} if key else {}
        async with httpx.AsyncClient(base_url=http, timeout=30) as client, client.stream("GET", "/console/feed", headers=headers) as answer:
            assert answer.status_code == 200
            kind = ""
            async for line in answer.aiter_lines():
                self.text += line + "\n"
                if line.startswith("event: "):
                    kind = line.removeprefix("event: ")
                elif line.startswith("data: "):
                    self.take(kind, json.loads(line.removeprefix("data: ")))
