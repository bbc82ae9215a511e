"""A deadline for calls into the kernel that have none of their own: fsync and fdatasync.

A drive that hangs keeps such a call for ever, and no signal ends it. So it runs on a thread of its
own, and the caller stops waiting when the deadline passes; the thread ends with the process.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from pathlib import Path

from lohan.errors import ConfigError, StorageIOError

VARIABLE = "LOHAN_SYNC_TIMEOUT"  # seconds
DEFAULT_S = 600.0  # a drive that writes back a cache of many GiB may take minutes


def sync_timeout_s() -> float:
    text = os.environ.get(VARIABLE, "")
    if not text:
        return DEFAULT_S
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds <= threading.TIMEOUT_MAX:
        raise ConfigError(
            f"{VARIABLE}={text} is no number of seconds above 0; set one, or unset it"
        )
    return seconds


def sync_in_time(call: Callable[[], None], path: str | Path) -> None:
    """Calls it and passes on what it raises; StorageIOError if it has not come back in time."""
    limit_s = sync_timeout_s()
    raised: list[BaseException] = []
    done = threading.Event()

    def run() -> None:
        try:
            call()
        except BaseException as error:
            raised.append(error)
        finally:
            done.set()

    threading.Thread(target=run, name="lohan-sync", daemon=True).start()
    if not done.wait(limit_s):
        raise StorageIOError(
            f"{path}: a sync has not come back after {limit_s:g} s, so nothing is known of what the"
            f" drive has; check it (dmesg, iostat), or give it longer with {VARIABLE} (seconds)"
        )
    if raised:
        raise raised[0]
