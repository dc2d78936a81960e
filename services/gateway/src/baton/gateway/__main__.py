"""`baton-gateway` and `python -m baton.gateway`: signals are answered first, then the rest is imported, which takes seconds."""

from __future__ import annotations

import sys

from baton.entry import answer_signals


def main() -> int:
    """The exit status: docs/deploy.md says what it means."""
    answer_signals("gateway")
    from baton.gateway.app import main as serve

    return serve()


if __name__ == "__main__":
    sys.exit(main())
