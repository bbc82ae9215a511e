"""What a person sees: everything fits 80 columns, and notes leave the bar whole."""

from __future__ import annotations

import io
import signal
from typing import Any

import pytest
from rich.console import Console

from lohan.util.display import BarDisplay, LineDisplay, clock, describe_step, open_display

ROW: dict[str, Any] = {
    "step": 3,
    "loss": 12.34567,
    "lr": 1e-5,
    "tokens_per_s": 12345.6,
    "step_s": 1.234,
    "rss_bytes": 745 * 2**20,
    "grad_norm": 123.456,
    "binding": "compute",
    "busy": {"compute": 0.987, "ssd": 0.43, "optimizer": 0.12},
    "ssd_written_bytes": 3 * 2**30,
}


def terminal(width: int = 80) -> Console:
    return Console(
        file=io.StringIO(), force_terminal=True, width=width, height=24, color_system=None
    )


def screen(console: Console) -> list[str]:
    """Return the final lines of the terminal: rich moves up and erases line by line."""
    lines, row = [""], 0
    text = console.file.getvalue().replace("\x1b[?25l", "").replace("\x1b[?25h", "")  # type: ignore[attr-defined]
    while text:
        if text.startswith("\x1b[2K"):
            lines[row], text = "", text[4:]
        elif text.startswith("\x1b[1A"):
            row, text = row - 1, text[4:]
        elif text[0] == "\r":
            text = text[1:]
        elif text[0] == "\n":
            row, text = row + 1, text[1:]
            lines += [""] * (row + 1 - len(lines))
        else:
            assert text[0] != "\x1b", repr(text[:20])
            lines[row], text = lines[row] + text[0], text[1:]
    return [line.rstrip() for line in lines]


@pytest.mark.parametrize("width", [50, 80, 120])
def test_bar_fits_and_notes_scroll_by_above_it(width: int) -> None:
    console = terminal(width)
    shown = BarDisplay(console)
    shown.memory({"host": 2**29, "device": 0}, {"host": 2**30, "device": 0})
    shown.first_step(1, 1000)
    assert "step 1/1,000" in "".join(screen(console))  # before anything is known of it
    for step in range(1, 4):
        shown.step({**ROW, "step": step}, 1000)
        shown.note(f"note {step}")
    shown.close()
    shown.note("after")
    lines = screen(console)
    assert max(map(len, lines)) <= width
    assert lines[:3] == ["note 1", "note 2", "note 3"]
    assert lines[3].startswith("step 3/1,000") and lines[3].endswith("20:30 left")
    assert lines[-2:] == ["after", ""]
    below = lines[4:-2]
    assert all(line.startswith("  ") for line in below)
    assert "  ".join(line.strip() for line in below) == (
        "loss 12.3457  norm 123  lr 1.00e-05  12,346 tok/s  1.23 s/step  "
        "compute ######## 99 %  ssd ###..... 43 %  optimizer #....... 12 %  "
        "host ####.... 512.00 MiB of 1.00 GiB  9.00 GiB written  "
        "process 745.00 MiB  233.00 MiB of it Python and torch"
    )  # nothing is cut
    assert len(below) == {50: 7, 80: 4, 120: 3}[width]


def test_details_fit_a_plain_terminal() -> None:
    assert len("  " + describe_step(ROW)) <= 80
    assert "compute 99 %" in describe_step(ROW)
    assert "lr 1.00e-05" in describe_step(ROW, lr=True)


def test_the_last_step_stays_and_long_work_leaves_a_line() -> None:
    console = terminal()
    shown = open_display(console)
    for done in (0, 50, 100):
        shown.advance("loading", done, 100)
    shown.step({**ROW, "step": 1000}, 1000)
    shown.advance("exporting", 10, 10)
    shown.close()
    lines = screen(console)
    assert lines[0].startswith("loading: done in ")
    assert lines[1].startswith("step 1,000/1,000") and lines[1].endswith("done")
    assert lines[5].startswith("exporting: done in ")


def test_prints_lines_without_a_terminal() -> None:
    console = Console(file=io.StringIO(), width=40)
    shown = open_display(console)
    assert isinstance(shown, LineDisplay)
    shown.advance("loading", 1, 2)
    shown.advance("loading", 2, 2)
    shown.step(ROW, 10)
    lines = console.file.getvalue().splitlines()  # type: ignore[attr-defined]
    assert lines[0].startswith("loading: done in ")
    assert lines[1].startswith("step 3/10  loss 12.3457") and len(lines) == 2


def test_escapes_control_characters_in_notes() -> None:
    console = Console(file=io.StringIO(), width=40)
    open_display(console).note("a\x1b[2Jb\nc [bold]d[/bold]")
    assert console.file.getvalue() == "a\ufffd[2Jb\nc [bold]d[/bold]\n"  # type: ignore[attr-defined]


@pytest.mark.parametrize(("seconds", "text"), [(0.4, "0:00"), (75, "1:15"), (5025, "1:23:45")])
def test_formats_durations(seconds: float, text: str) -> None:
    assert clock(seconds) == text


def test_the_first_ctrl_c_is_answered_at_once(capsys) -> None:
    from lohan.train.trainer import stop_signals

    messages: list[str] = []
    shown = LineDisplay(terminal(80))
    shown.note = messages.append  # type: ignore[method-assign]
    with pytest.raises(KeyboardInterrupt), stop_signals(shown) as stop:
        stop.step_began(12)
        stop.step_s = 40.4
        signal.raise_signal(signal.SIGINT)
        assert stop.requested and messages == ["finishing step 12, about 40 s; again to give it up"]
        signal.raise_signal(signal.SIGINT)


def test_lines_say_whose_memory_they_show() -> None:
    console = Console(file=io.StringIO(), width=200)
    LineDisplay(console).memory({"host": 2**20}, {"host": 2**30})
    output = console.file.getvalue()  # type: ignore[attr-defined]
    assert "whole process: 1.00 MiB of it is planned, within 1.00 GiB; Python and torch" in output
