"""Interrupt a process at a given place of its code."""

from __future__ import annotations

import os
import runpy
import signal
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any


def interrupt() -> None:
    os.kill(os.getpid(), signal.SIGINT)


def twice_in_a_step() -> None:
    """For `Forge.start(before=...)`: in the third step, one after the other."""
    from lohan.train import trainer

    step = trainer.one_step

    def interrupted(session: Any, *given: Any) -> dict[str, Any]:
        if session.step == 2:
            interrupt()
            interrupt()
        return step(session, *given)

    trainer.one_step = interrupted


def hold_backward() -> None:
    """Stop backward of the third step before its first block.

    A file `held` is created in the folder that the environment variable HOLD names; backward
    continues when there is a file `go`.
    """
    from lohan.engine.wrapping import BlockRunner

    folder, backward = Path(os.environ["HOLD"]), BlockRunner.backward

    def held(runner: BlockRunner, wrapped: Any, *given: Any) -> Any:
        if wrapped.executor.record.train_state.step == 2:
            (folder / "held").touch()
            while not (folder / "go").exists():
                time.sleep(0.01)
        return backward(runner, wrapped, *given)

    BlockRunner.backward = held  # type: ignore[method-assign]


def send_while_held(pid: int, folder: Path, count: int) -> None:
    """So many Ctrl-C to a process of `hold_backward`, each when the one before has been seen."""
    while not (folder / "held").exists():
        time.sleep(0.01)
        assert Path(f"/proc/{pid}").exists()
    for _ in range(count):
        os.kill(pid, signal.SIGINT)
        time.sleep(0.5)
    (folder / "go").touch()


class Dying:
    def __del__(self) -> None:
        interrupt()


class Watch:
    """Looks for no module itself."""

    def __init__(self, where: str, name: str) -> None:
        self._where, self._name = where, name

    def find_spec(self, name: str, path: object = None, target: object = None) -> None:
        if name == self._name:
            self._name = ""
            if self._where == "here":
                interrupt()
            elif self._where == "callback":
                Dying()
            else:
                with suppress(KeyboardInterrupt):
                    interrupt()
                raise ModuleNotFoundError("a part of it is missing")


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.default_int_handler)  # jobs in the background ignore it
    sys.meta_path.insert(0, Watch(*sys.argv[1:3]))  # type: ignore[arg-type]
    del sys.argv[1:3]
    runpy.run_module("lohan", run_name="__main__", alter_sys=True)
