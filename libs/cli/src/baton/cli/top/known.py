"""What the feed of a gateway's console has said so far. Pure: docs/console.md describes the feed."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

Row = dict[str, Any]

KEYED = ("servers", "pairs", "live", "series")
#: As many as the gateway keeps.
MAX_ENDED = 400
MAX_POINTS = 60


@dataclass
class Known:
    """Sections by name, and the requests that have ended by number. `complete`: the first whole view has been heard."""

    sections: Row = field(default_factory=dict)
    ended: dict[int, Row] = field(default_factory=dict)

    @property
    def complete(self) -> bool:
        return bool(self.sections) and len(self.ended) >= self.sections["kept"]

    def take(self, kind: str, data: bytes) -> None:
        """One message: "snapshot", "ended" or "delta"."""
        heard: Row = json.loads(data)
        if kind == "snapshot":
            self.sections, self.ended = heard, {}
            return
        for row in heard.pop("ended"):
            self.ended[row["n"]] = row
        for row in self.newest()[MAX_ENDED:]:
            del self.ended[row["n"]]
        for name, value in heard.items():
            if name in KEYED:
                self._change(name, value)
            else:
                self.sections[name] = value

    def _change(self, name: str, change: Mapping[str, Any]) -> None:
        rows = {key: row for key, row in self.sections[name].items() if key not in change["gone"]} | change["set"]
        if name == "series":
            rows = {key: rows[key] for key in sorted(rows, key=int)[-MAX_POINTS:]}
        self.sections[name] = rows

    def newest(self, *, only_failed: bool = False) -> list[Row]:
        """Requests that have ended, newest first. Their numbers are in the order in which the gateway told them."""
        rows = sorted(self.ended.values(), key=lambda row: (row["at"], row["n"]), reverse=True)
        return [row for row in rows if not only_failed or "failure" in row]

    def as_json(self) -> Row:
        """All of it, for scripts."""
        return self.sections | {"ended": self.newest()}
