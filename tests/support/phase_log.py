"""Record the current phase of a process in a file (`Forge.start(before="phase_log:watch")`)."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

PHASES = ("load", "resume", "step", "commit", "snapshot", "restore", "export")
FIRST = {"train": "load", "resume": "resume", "export": "export"}
_WIDTH = 16


def read(file: Path) -> str:
    return file.read_text().strip() if file.exists() else ""


class Phases:
    """What the process is doing now; phases lie within each other."""

    def __init__(self, first: str) -> None:
        self._fd = os.open(os.environ["LOHAN_PHASE"], os.O_WRONLY | os.O_CREAT, 0o644)
        self._counts: Counter[str] = Counter()
        self.now = first
        self.show(first)

    def show(self, phase: str) -> None:
        self.now = phase
        os.pwrite(self._fd, phase.ljust(_WIDTH).encode(), 0)

    def enter(self, phase: str) -> None:
        from __main__ import boundaries

        self.show(phase)
        boundaries.cross(phase)
        name, number, delay_s = os.environ.get("LOHAN_KILL", " -1 0").split(" ")
        if (name, int(number)) == (phase, self._counts[phase]):
            timer = threading.Timer(float(delay_s), os.kill, (os.getpid(), signal.SIGKILL))
            timer.daemon = True
            timer.start()
        self._counts[phase] += 1

    def leave(self, phase: str, then: str, began_s: float) -> None:
        from __main__ import boundaries

        if "LOHAN_SPANS" in os.environ:
            with open(os.environ["LOHAN_SPANS"], "a") as spans:
                spans.write(f"{phase} {time.monotonic() - began_s}\n")
        boundaries.cross(f"{phase} done")
        self.show(then)

    def during(self, owner: Any, name: str, phase: str, *, then: str = "") -> None:
        original: Callable[..., Any] = getattr(owner, name)

        def watched(*args: Any, **kwargs: Any) -> Any:
            before, began_s = self.now, time.monotonic()
            if before in ("snapshot", "restore"):  # the commit that it ends with is part of it
                return original(*args, **kwargs)
            self.enter(phase)
            try:
                return original(*args, **kwargs)
            finally:
                self.leave(phase, then or before, began_s)

        setattr(owner, name, watched)


def watch() -> None:
    import lohan.train.run_folder as run_folder
    import lohan.train.trainer as trainer
    from lohan.engine import session
    from lohan.store.store import Store

    phases = Phases(FIRST.get(sys.argv[1], "load"))
    phases.during(trainer, "begin", "load", then="step")
    phases.during(trainer, "resume_session", "resume", then="step")
    phases.during(trainer, "one_step", "step")
    phases.during(trainer, "snapshot", "snapshot")
    phases.during(trainer, "export", "export")
    phases.during(session, "export_store", "export")
    phases.during(run_folder, "restore", "restore")
    phases.during(Store, "commit", "commit")
    if os.environ.get("LOHAN_REPLAN"):
        import replan_at_once

        replan_at_once.always()
