"""A prefill or decode service whose engine can be held: `python held_service.py SERVICE HOLD_FILE [the service's flags]`.

Nothing else is changed. While HOLD_FILE holds one of these words, the engine's plans are affected; polls, aborts and deadlines go on:

    bootstrapping   decode reserves no pages for new rooms
    waiting         prefill computes nothing
    transferring    prefill computes one chunk of a prompt, whose pages are sent, and no further one
    slow SECONDS    each forward pass takes that much longer
    layers SECONDS  each layer of a pass of more than one row does: a chunk of a large model, or of any on a busy machine
"""

from __future__ import annotations

import importlib
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import Tensor

from baton.engine.models.llama import LlamaModel
from baton.engine.scheduling.decode import DecodeScheduler
from baton.engine.scheduling.prefill import PrefillScheduler
from baton.engine.scheduling.sequence import StepPlan

PAUSE_S = 0.01


class Hold:
    def __init__(self, path: Path) -> None:
        self._path = path

    def words(self) -> list[str]:
        return self._path.read_text().split() or [""]


def hold_prefill(hold: Hold, plan: Callable[[PrefillScheduler], StepPlan]) -> Callable[[PrefillScheduler], StepPlan]:
    def held(self: PrefillScheduler) -> StepPlan:
        word = hold.words()[0]
        begun = any(room.sequence.num_computed for room in self._computing.values())
        if word == "waiting" or (word == "transferring" and begun):
            time.sleep(PAUSE_S)
            return StepPlan((), ())
        return slowed(hold, plan(self))

    return held


def hold_decode(hold: Hold, plan: Callable[[DecodeScheduler], StepPlan]) -> Callable[[DecodeScheduler], StepPlan]:
    admits = DecodeScheduler._admits

    def admits_unless_held(self: DecodeScheduler) -> Callable[[Any], bool]:
        return (lambda _: False) if hold.words()[0] == "bootstrapping" else admits(self)

    def has_work(self: DecodeScheduler, before: Callable[[DecodeScheduler], bool] = DecodeScheduler.has_work) -> bool:
        return before(self) or (hold.words()[0] == "bootstrapping" and bool(self._waiting))

    def held(self: DecodeScheduler) -> StepPlan:
        planned = plan(self)
        if not planned.slices and hold.words()[0] == "bootstrapping":
            time.sleep(PAUSE_S)
        return slowed(hold, planned)

    DecodeScheduler._admits = admits_unless_held  # type: ignore[method-assign]
    DecodeScheduler.has_work = has_work  # type: ignore[method-assign]
    return held


def slowed(hold: Hold, plan: StepPlan) -> StepPlan:
    words = hold.words()
    if words[0] == "slow" and plan.slices:
        time.sleep(float(words[1]))
    return plan


def slow_layers(hold: Hold, attention: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def slowed_attention(self: LlamaModel, index: int, layer: object, hidden: Tensor, *rest: Any) -> Tensor:
        words = hold.words()
        if words[0] == "layers" and len(hidden) > 1:
            time.sleep(float(words[1]))
        return attention(self, index, layer, hidden, *rest)

    return slowed_attention


def main() -> int:
    service, path, *flags = sys.argv[1:]
    hold = Hold(Path(path))
    PrefillScheduler.plan = hold_prefill(hold, PrefillScheduler.plan)  # type: ignore[method-assign]
    DecodeScheduler.plan = hold_decode(hold, DecodeScheduler.plan)  # type: ignore[method-assign]
    LlamaModel._attention = slow_layers(hold, LlamaModel._attention)  # type: ignore[method-assign]
    sys.argv = [service, *flags]
    status: int = importlib.import_module(f"baton.{service}.app").main()
    return status


if __name__ == "__main__":
    sys.exit(main())
