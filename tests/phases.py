"""For processes of their own (`Forge.start(before="phases:watch")`): what the process is doing is
kept in a file, so that it is known also of one that was killed.

    LOHAN_PHASE    the file
    LOHAN_ANEW     if set, the run plans anew as soon as it may (plan_anew.py)
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

PHASES = ("load", "resume", "step", "commit", "snapshot", "restore", "export")
FIRST = {"train": "load", "resume": "resume", "export": "export"}
_WIDTH = 16


def read(file: Path) -> str:
    return file.read_text().strip() if file.exists() else ""


def watch() -> None:
    import lohan.train.run_folder
    import lohan.train.trainer as trainer
    from lohan.store.store import Store

    fd = os.open(os.environ["LOHAN_PHASE"], os.O_WRONLY | os.O_CREAT, 0o644)
    now = [FIRST[sys.argv[1]]]

    def enter(phase: str) -> None:
        now[0] = phase
        os.pwrite(fd, phase.ljust(_WIDTH).encode(), 0)

    def during(owner: Any, name: str, phase: str, *, then: str = "") -> None:
        original: Callable[..., Any] = getattr(owner, name)

        def watched(*args: Any, **kwargs: Any) -> Any:
            before = now[0]
            enter(phase)
            try:
                return original(*args, **kwargs)
            finally:
                enter(then or before)

        setattr(owner, name, watched)

    enter(now[0])
    during(trainer, "begin", "load", then="step")
    during(trainer, "take_up", "resume", then="step")
    during(trainer, "snapshot", "snapshot")
    during(trainer, "export", "export")
    during(lohan.train.run_folder, "restore", "restore")
    during(Store, "commit", "commit")
    if os.environ.get("LOHAN_ANEW"):
        import plan_anew

        plan_anew.always()
