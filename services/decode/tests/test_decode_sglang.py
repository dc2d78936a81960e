"""The port of SGLang's contract is an extra: without it nothing of it is imported, and asking for it says what to install."""

from __future__ import annotations

import sys
from typing import Any

import pytest

from baton.decode import app
from baton.decode.config import load_settings
from baton.servicekit import StartError

NOTHING: Any = None


def test_the_port_without_its_extra_is_refused_with_the_remedy(monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "baton.sglangcompat", None)
    flags = ["--model-path", "m"]
    assert app._sglang_door(load_settings(flags, {}), NOTHING, NOTHING, NOTHING) is None
    with pytest.raises(StartError, match=r"--sglang-port needs baton.sglangcompat.*pip install 'baton-decode\[sglang\]'"):
        app._sglang_door(load_settings([*flags, "--sglang-port", "0"], {}), NOTHING, NOTHING, NOTHING)
