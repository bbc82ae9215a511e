"""The entry point of `lohan` and `python -m lohan`.

A Ctrl-C ends the process with one line and exit code 130, even during imports. If the reader of its
output has closed the pipe (`lohan plan ... | head -1`), the process exits silently.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from contextlib import suppress

EXIT_INTERRUPTED = 128 + signal.SIGINT
EXIT_UNREAD = 128 + signal.SIGPIPE
AGAIN_S = 0.01
INTERRUPT_CAUSE_S = 60.0  # An error this soon after a Ctrl-C is attributed to it.
_at_s = [float("-inf")]  # The time of the last Ctrl-C.


def main() -> None:
    if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
        signal.signal(signal.SIGINT, _interrupt)
    signal.signal(signal.SIGALRM, _interrupt)
    sys.unraisablehook = _dropped
    try:
        try:
            from lohan.cli.main import main as run  # Importing takes a noticeable part of a second.

            run(stopped=_just_now)
        finally:
            if sys.stdout is not None:
                sys.stdout.flush()
    except BaseException as end:
        if _interrupted(end) or (_just_now() and isinstance(end, Exception)):
            _leave(EXIT_INTERRUPTED, _last_words())
        if BrokenPipeError in (type(end), type(end.__context__)):
            _leave(EXIT_UNREAD)
        raise
    finally:
        if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
            # No code remains that could catch an exception.
            signal.signal(signal.SIGINT, signal.SIG_DFL)


def _interrupt(number: int, frame: object) -> None:
    _at_s[0] = time.monotonic()
    raise KeyboardInterrupt


def _just_now() -> bool:
    """Return whether Ctrl-C was pressed in the last `INTERRUPT_CAUSE_S` seconds.

    A library that is being imported may turn a Ctrl-C into another error. That error alone does not
    show its cause.
    """
    return time.monotonic() - _at_s[0] < INTERRUPT_CAUSE_S


def _dropped(lost: sys.UnraisableHookArgs) -> None:
    """Handle an exception that cannot be raised where it occurred, such as in a destructor.

    If the exception is a Ctrl-C, an alarm raises it again a moment later.
    """
    if lost.exc_type is KeyboardInterrupt:
        signal.setitimer(signal.ITIMER_REAL, AGAIN_S)
    else:
        sys.__unraisablehook__(lost)


def _interrupted(end: BaseException | None) -> bool:
    """Return whether an exception was caused by a Ctrl-C, even if it was caught and replaced."""
    while end is not None and not isinstance(end, KeyboardInterrupt):
        end = end.__cause__ or end.__context__
    return end is not None


def _last_words() -> str:
    if os.environ.get("RANK", "0") != "0":
        return ""  # Only the first rank prints the message.
    line = "\n" if sys.stderr is not None and sys.stderr.isatty() else ""
    safe = "; all committed steps are on disk" if sys.argv[1:2] in (["train"], ["resume"]) else ""
    return f"{line}lohan: interrupted{safe}\n"


def _leave(code: int, words: str = "") -> None:
    """Exit immediately: libraries that are still being imported cannot shut down in order."""
    with suppress(OSError):
        if sys.stderr is not None:
            sys.stderr.write(words)
            sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    main()
