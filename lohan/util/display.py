"""The progress display of a run: a live bar on a terminal, plain lines elsewhere."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from lohan.util.units import clock, format_bytes

if TYPE_CHECKING:
    from rich.console import Console, RenderableType
    from rich.live import Live
    from rich.table import Table

REDRAW_S = 0.1
RECENT_STEPS = 10  # The remaining time is estimated from this many steps.


def printable(text: str) -> str:
    """Return the text with U+FFFD in place of every character that is not printable.

    Names read from files (tensors, folders, chats) must not send control sequences to the terminal.
    Newlines and tabs are kept.
    """
    return "".join(c if c.isprintable() or c in "\n\t" else "\ufffd" for c in text)


def echo(text: str, *, nl: bool = True) -> None:
    """Print printable text to stdout from a command."""
    import typer

    typer.echo(printable(text), nl=nl)


class Display:
    """A display that shows nothing: the base class, and the display of ranks that do not print."""

    def note(self, text: str) -> None:
        """Show one permanent line."""

    def advance(self, task: str, done: int, total: int) -> None:
        """Report the progress of a long task: `done` of `total`, in any unit."""

    def memory(self, planned: Mapping[str, int], budgets: Mapping[str, int]) -> None:
        """Report the planned bytes and the budget of each memory tier."""

    def first_step(self, number: int, total: int) -> None:
        """Report that the first step of this process begins."""

    def step(self, row: dict[str, Any], total: int) -> None:
        """Report a finished step with its row of metrics."""

    def close(self) -> None:
        """End the display; nothing is shown afterwards."""


def open_display(console: Console) -> Display:
    return BarDisplay(console) if console.is_terminal else LineDisplay(console)


class LineDisplay(Display):
    """A display for logs and pipes: one line per step, and one line for each piece of long work."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._started: dict[str, float] = {}
        self._explained = False  # True once the memory figure of a step has been explained.

    def note(self, text: str) -> None:
        self._console.print(printable(text), markup=False, highlight=False, soft_wrap=True)

    def advance(self, task: str, done: int, total: int) -> None:
        start = self._started.setdefault(task, time.monotonic())
        if done >= total:
            self.note(f"{task}: done in {time.monotonic() - start:.1f} s")
            del self._started[task]

    def memory(self, planned: Mapping[str, int], budgets: Mapping[str, int]) -> None:
        if self._explained:
            return
        self._explained = True
        self.note(
            f"steps show the memory of the whole process: {format_bytes(planned.get('host', 0))} "
            f"of it is planned, within {format_bytes(budgets.get('host', 0))}; Python and torch "
            "come on top"
        )

    def first_step(self, number: int, total: int) -> None:
        self.note(
            f"step {number:,}/{total:,}: running; the first step determines the order of the blocks"
        )

    def step(self, row: dict[str, Any], total: int) -> None:
        self.note(f"step {row['step']}/{total}  {describe_step(row, lr=True)}")


class BarDisplay(LineDisplay):
    """A display for terminals: one bar for the current work at the bottom, with notes above it.

    The bar is drawn by the caller's thread, because a drawing thread would take time from the
    lanes.
    """

    def __init__(self, console: Console) -> None:
        super().__init__(console)
        self._live: Live | None = None
        self._task = ""
        self._started_s = self._drawn_s = 0.0
        self._recent_s: deque[float] = deque(maxlen=RECENT_STEPS)
        self._planned: Mapping[str, int] = {}
        self._budgets: Mapping[str, int] = {}
        self._written = 0  # Bytes written to SSD so far.

    def advance(self, task: str, done: int, total: int) -> None:
        share = f"{100 * done // max(total, 1)} %"
        self._draw(task, bar_line(task, done, total, share), last=done >= total)
        if done >= total:
            self._end(keep=False)
            self.note(f"{task}: done in {time.monotonic() - self._started_s:.1f} s")

    def memory(self, planned: Mapping[str, int], budgets: Mapping[str, int]) -> None:
        self._planned, self._budgets = planned, budgets

    def first_step(self, number: int, total: int) -> None:
        shown = bar_line(f"step {number:,}/{total:,}", number - 1, total, "learns the order")
        self._draw("training", shown, last=True)

    def step(self, row: dict[str, Any], total: int) -> None:
        from rich.console import Group
        from rich.text import Text

        done = row["step"]
        self._written += row.get("ssd_written_bytes", 0)
        self._recent_s.append(row["step_s"])
        left_s = (total - done) * sum(self._recent_s) / len(self._recent_s)
        right = f"{clock(left_s)} left" if done < total else "done"
        below = (
            step_parts(row, lr=True, memory=False),
            busy_bars(row.get("busy", {})),
            memory_bars(self._planned, self._budgets, row, self._written),
        )
        lines = [
            Text(f"  {line}", no_wrap=True, overflow="ellipsis")
            for parts in below
            for line in fitted(parts, self._console.width - 2)
        ]
        shown = Group(bar_line(f"step {done:,}/{total:,}", done, total, right), *lines)
        self._draw("training", shown, last=done >= total)
        if done >= total:
            self._end(keep=True)

    def close(self) -> None:
        self._end(keep=True)

    def _draw(self, task: str, shown: RenderableType, *, last: bool) -> None:
        if self._live is None or self._task != task:
            # The training bar need not be kept, because its next step draws it again.
            self._end(keep=self._task != "training")
            self._task, self._started_s, self._drawn_s = task, time.monotonic(), 0.0
            from rich.live import Live

            self._live = Live(console=self._console, auto_refresh=False)
            self._live.start()
        now = time.monotonic()
        due = last or now - self._drawn_s >= REDRAW_S
        self._live.update(shown, refresh=due)
        if due:
            self._drawn_s = now

    def _end(self, *, keep: bool) -> None:
        if self._live is not None:
            self._live.transient = not keep
            self._live.stop()
            self._live = None


def bar_line(text: str, done: int, total: int, right: str) -> Table:
    """Return a line with text on both sides and a bar that fills the space between them."""
    from rich.progress_bar import ProgressBar
    from rich.table import Table
    from rich.text import Text

    line = Table.grid(padding=(0, 1), expand=True)
    line.add_column(no_wrap=True)
    line.add_column(ratio=1)
    line.add_column(no_wrap=True, justify="right")
    bar = ProgressBar(total=max(total, 1), completed=done)
    line.add_row(Text(printable(text)), bar, Text(right))
    return line


def fitted(parts: Sequence[str], width: int) -> list[str]:
    """Return the parts in lines of at most `width` characters, without splitting a part."""
    lines: list[str] = []
    for part in parts:
        if lines and len(longer := f"{lines[-1]}  {part}") <= width:
            lines[-1] = longer
        else:
            lines.append(part)
    return lines


def busy_bars(busy: Mapping[str, float]) -> list[str]:
    """Return a bar for each lane that shows its busy share of the step."""
    return [f"{lane} {bar(share)} {100 * share:.0f} %" for lane, share in busy.items()]


def memory_bars(
    planned: Mapping[str, int], budgets: Mapping[str, int], row: Mapping[str, Any], written: int
) -> list[str]:
    """Return a bar for each tier that shows its planned bytes relative to its budget.

    The bars are followed by the bytes written to SSD and by the memory of the whole process,
    including Python and torch.
    """
    parts = [
        f"{tier} {bar(planned[tier] / budget)} {format_bytes(planned[tier])} of "
        f"{format_bytes(budget)}"
        for tier, budget in budgets.items()
        if budget and tier in planned
    ]
    parts.append(f"{format_bytes(written)} written")
    held = planned.get("host", 0)
    parts.append(f"process {format_bytes(row['rss_bytes'])}")
    if held:
        parts.append(f"{format_bytes(max(0, row['rss_bytes'] - held))} of it Python and torch")
    return parts


def bar(share: float, width: int = 8) -> str:
    full = round(min(max(share, 0.0), 1.0) * width)
    return "#" * full + "." * (width - full)


def describe_step(row: dict[str, Any], *, lr: bool = False) -> str:
    """Return the description of a step in 80 columns, or in a few more with the learning rate."""
    return "  ".join(step_parts(row, lr=lr))


def step_parts(row: dict[str, Any], *, lr: bool = False, memory: bool = True) -> list[str]:
    """Return the parts of a step's description.

    With `memory`, the last parts are the memory of the process and the binding lane with its busy
    share of the step.
    """
    parts = [f"loss {row['loss']:.4f}"]
    if row.get("grad_norm") is not None:
        parts.append(f"norm {row['grad_norm']:.3g}")
    if lr:
        parts.append(f"lr {row['lr']:.2e}")
    if "reward_accuracy" in row:
        parts.append(f"margin {row['reward_margin']:.3g}  acc {100 * row['reward_accuracy']:.0f} %")
    parts.append(f"{row['tokens_per_s']:,.0f} tok/s")
    parts.append(f"{row['step_s']:.{2 if row['step_s'] < 100 else 0}f} s/step")
    lane = row.get("binding") if memory else None
    if memory:
        parts.append(format_bytes(row["rss_bytes"]))
    if isinstance(lane, str) and lane in row.get("busy", {}):
        parts.append(f"{lane} {100 * row['busy'][lane]:.0f} %")
    if row.get("skipped"):
        parts.append("skipped: overflow")
    return parts
