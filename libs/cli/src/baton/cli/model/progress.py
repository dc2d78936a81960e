"""Progress on a terminal as a bar, elsewhere as a few plain lines."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Protocol

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

PLAIN_STEPS = 4


class Step(Protocol):
    def __call__(self, done: int) -> None: ...


class Reporter(Protocol):
    """Told about the steps of a long job; `total` and the step's `done` share a unit."""

    def note(self, text: str) -> None: ...

    def step(self, text: str, total: int) -> AbstractContextManager[Step]: ...


class ConsoleReporter:
    """A bar a step on a terminal; where output is a file or a pipe, a line at every quarter."""

    def __init__(self, console: Console) -> None:
        self._console = console

    def note(self, text: str) -> None:
        self._console.print(text, markup=False, highlight=False, soft_wrap=True)

    @contextmanager
    def step(self, text: str, total: int) -> Iterator[Step]:
        if self._console.is_terminal:
            columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.percentage:>3.0f}%"), TimeElapsedColumn())
            with Progress(*columns, console=self._console) as bar:
                task = bar.add_task(text, total=total)
                yield lambda done: bar.update(task, completed=done)
        else:
            yield self._plain(text, total)

    def _plain(self, text: str, total: int) -> Step:
        reached = -1

        def show(done: int) -> None:
            nonlocal reached
            quarter = PLAIN_STEPS * done // max(total, 1)
            if quarter > reached:
                reached = quarter
                self.note(f"{text}: {100 * done // max(total, 1)} %")

        return show
