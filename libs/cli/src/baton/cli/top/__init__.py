"""`baton top`: the gateway's console in a terminal."""

from baton.cli.top.command import top

__all__ = ["top"]
