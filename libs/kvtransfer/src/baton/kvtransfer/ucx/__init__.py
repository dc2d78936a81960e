"""The backend that moves bytes with UCX."""

from __future__ import annotations

from baton.kvtransfer.ucx.agent import UcxAgent

__all__ = ["UcxAgent"]
