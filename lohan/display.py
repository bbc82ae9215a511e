"""What a person sees while a run goes on: bars on a terminal, plain lines elsewhere."""

from __future__ import annotations

import time
from typing import Any, Protocol

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

from lohan.units import format_bytes


class Display(Protocol):
    def note(self, text: str) -> None:
        """One line that stays."""
        ...

    def advance(self, task: str, done: int, total: int) -> None:
        """Long work: `done` of `total` in any unit."""
        ...

    def step(self, row: dict[str, Any], total: int) -> None:
        """A committed step: its row of metrics."""
        ...

    def close(self) -> None: ...


def open_display(console: Console) -> Display:
    return BarDisplay(console) if console.is_terminal else LineDisplay(console)


def describe_step(row: dict[str, Any]) -> str:
    return (
        f"loss {row['loss']:.4f}  lr {row['lr']:.2e}  {row['tokens_per_s']:.0f} tok/s  "
        f"{row['step_s']:.2f} s/step  rss {format_bytes(row['rss_bytes'])}"
    )


class LineDisplay:
    """For logs and pipes: a line per step, and one line a piece of long work."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._started: dict[str, float] = {}

    def note(self, text: str) -> None:
        self._console.print(text, markup=False, highlight=False, soft_wrap=True)

    def advance(self, task: str, done: int, total: int) -> None:
        start = self._started.setdefault(task, time.monotonic())
        if done >= total:
            self.note(f"{task}: done in {time.monotonic() - start:.1f} s")
            del self._started[task]

    def step(self, row: dict[str, Any], total: int) -> None:
        self.note(f"step {row['step']}/{total}  {describe_step(row)}")

    def close(self) -> None:
        pass


class BarDisplay:
    """For a terminal: one bar for the work under way."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            TextColumn("{task.completed:,.0f}/{task.total:,.0f}"),
            TimeRemainingColumn(),
            TextColumn("{task.fields[detail]}"),
            console=console,
            transient=False,
        )
        self._tasks: dict[str, TaskID] = {}

    def note(self, text: str) -> None:
        self._progress.console.print(text, markup=False, highlight=False, soft_wrap=True)

    def advance(self, task: str, done: int, total: int, detail: str = "") -> None:
        if task not in self._tasks:
            self._progress.start()
            self._tasks[task] = self._progress.add_task(task, total=total, detail="")
        self._progress.update(self._tasks[task], completed=done, total=total, detail=detail)
        if done >= total:
            self._progress.refresh()

    def step(self, row: dict[str, Any], total: int) -> None:
        self.advance("training", row["step"], total, describe_step(row))

    def close(self) -> None:
        self._progress.stop()
