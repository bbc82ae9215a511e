"""Functions that a process calls before it runs a command (`Forge.start(before=...)`).

They interrupt it, record its phase or make it replan. Run as a script, this file interrupts an
import. Nothing of lohan is imported before a function needs it.
"""

from __future__ import annotations

import json
import os
import runpy
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lohan.model.machine import Profile

# -- interrupts ------------------------------------------------------------------------------------


def interrupt() -> None:
    """Send Ctrl-C to this process."""
    os.kill(os.getpid(), signal.SIGINT)


def interrupt_twice_in_a_step() -> None:
    """Send two Ctrl-C to this process in its third step."""
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
    """Send `count` Ctrl-C to a process that waits in `hold_backward`, then let it continue."""
    while not (folder / "held").exists():
        time.sleep(0.01)
        assert Path(f"/proc/{pid}").exists()
    for _ in range(count):
        os.kill(pid, signal.SIGINT)
        time.sleep(0.5)
    (folder / "go").touch()


class InterruptOnDeletion:
    def __del__(self) -> None:
        interrupt()


class InterruptOnImport:
    """An import hook that interrupts the process when a module is imported."""

    def __init__(self, where: str, name: str) -> None:
        self._where, self._name = where, name

    def find_spec(self, name: str, path: object = None, target: object = None) -> None:
        if name == self._name:
            self._name = ""
            if self._where == "here":
                interrupt()
            elif self._where == "callback":
                InterruptOnDeletion()
            else:
                with suppress(KeyboardInterrupt):
                    interrupt()
                raise ModuleNotFoundError("a part of it is missing")


# -- phases ----------------------------------------------------------------------------------------

PHASES = ("load", "resume", "step", "commit", "snapshot", "restore", "export")
FIRST_PHASE = {"train": "load", "resume": "resume", "export": "export"}
_PHASE_BYTES = 16


def read_phase(file: Path) -> str:
    return file.read_text().strip() if file.exists() else ""


class PhaseLog:
    """The phase of this process, kept in the file that LOHAN_PHASE names. Phases are nested."""

    def __init__(self, first: str) -> None:
        self._fd = os.open(os.environ["LOHAN_PHASE"], os.O_WRONLY | os.O_CREAT, 0o644)
        self._counts: Counter[str] = Counter()
        self.now = first
        self.show(first)

    def show(self, phase: str) -> None:
        self.now = phase
        os.pwrite(self._fd, phase.ljust(_PHASE_BYTES).encode(), 0)

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


def log_phases() -> None:
    """Record the phases of a run or an export."""
    import lohan.train.run_folder as run_folder
    import lohan.train.trainer as trainer
    from lohan.engine import export
    from lohan.store.store import Store

    phases = PhaseLog(FIRST_PHASE.get(sys.argv[1], "load"))
    phases.during(trainer, "begin", "load", then="step")
    phases.during(trainer, "resume_session", "resume", then="step")
    phases.during(trainer, "one_step", "step")
    phases.during(trainer, "snapshot", "snapshot")
    phases.during(trainer, "export", "export")
    phases.during(export, "export_store", "export")
    phases.during(run_folder, "restore", "restore")
    phases.during(Store, "commit", "commit")
    if os.environ.get("LOHAN_REPLAN"):
        replan_at_once()


# -- replanning ------------------------------------------------------------------------------------


def fixed_profile() -> Profile:
    """Return a machine that a step could have measured."""
    from lohan.model.machine import Drive, Profile

    return Profile(
        name="fixed",
        device="cpu",
        compute=((1.0, 1e10),),
        backward=((1.0, 1e10),),
        head_flops=1e10,
        host_bytes=2**34,
        adam=1e8,
        drives=(Drive(name="fixed", read=1e9, write=1e9, mixed=1e9),),
    )


def replan_at_once() -> None:
    """Make a run replan as soon as possible, to another plan, however long its steps take."""
    from lohan.engine import replanning

    machine_plan = replanning.make_plan

    def other(problem: Any) -> Any:
        options = replace(problem.options, activations="all")
        return machine_plan(replace(problem, options=options))

    replanning.make_plan = other
    replanning.REPLAN_SPEEDUP = 0.0


def measure_fixed_profile() -> None:
    """Replace what a step measured by constants.

    A step measures nothing if its updates finish late, as they do on a busy machine; the run then
    keeps its plan. Tests that need a new plan and do not examine the measurement call this.
    """
    from lohan.engine.context import PlanContext

    def fixed(context: Any, *_: Any) -> Profile:
        if not context.device_bytes:
            return fixed_profile()
        return replace(fixed_profile(), device_bytes=context.device_bytes, h2d=1e9, d2h=1e9)

    PlanContext.measured = fixed  # type: ignore[method-assign]


def fail_to_replan() -> None:
    """As `replan_at_once`, and this process cannot follow the new plan."""
    from lohan.engine.plan_execution import PlanExecution
    from lohan.errors import StoreError

    replan_at_once()
    start = PlanExecution.start

    def started(execution: Any, plan: Any) -> None:
        if execution.planless:  # a change of plan, not the start
            raise StoreError("no space left for kept activations")
        start(execution, plan)

    PlanExecution.start = started  # type: ignore[method-assign]


# -- the short form of benchmarks/differential.py --------------------------------------------------

LEAST_ON_DEVICE = {"known_batch": True, "device": "emulated", "device_memory": 1.0}

# One of each kind; together they have a device, an error, an evaluation, a resume and a kill.
DIFFERENTIAL_CASES = [
    {"model": "net-tied", "dtype": "bf16", "clip": 1.0, "delays": 1, "known_batch": True},
    {"model": "gpt2", "events": [[1, "forward_error"], [1, "eval"], [2, "resume"]]},
    {"model": "lstm", "device": "emulated", "optimizer": "lion"},
    {"model": "llama", "lora": 2, "base": "nf4", "accumulate": 2},
    {"kind": "ranks", "model": "net-shared", "events": [[1, "commit"]]},
    {"kind": "train", "model": "tied", "kill": 20},
    # With the least memory that a refusal recommends.
    {"model": "net", "accumulate": 2, "update_mode": "optimized", "activations": "all"}
    | LEAST_ON_DEVICE,
    {"model": "net-shared", "dtype": "bf16", "micro_batch": 2, "cast": "attach"} | LEAST_ON_DEVICE,
    {"model": "experts", "dtype": "bf16", "activations": "holistic", "events": [[1, "replan"]]}
    | LEAST_ON_DEVICE,
    {"model": "lstm", "tiles": 3, "events": [[1, "replan"]]} | LEAST_ON_DEVICE,
    {"model": "experts", "dtype": "bf16", "dropout": 0.2, "optimizer": "lion", "moments": "int8"}
    | {"ema": 0.5, "accumulate": 2, "events": [[2, "replan"]]}
    | {**LEAST_ON_DEVICE, "device_memory": 1.02},
    {"kind": "ranks", "model": "centred", "known_batch": True, "host": 1.0, "device": "emulated"},
]


def run_differential_cases() -> None:
    """Run the cases in this process, a fork of the forge, which has no threads."""
    from benchmarks import differential
    from benchmarks.differential import SIMPLEST

    folder = Path(os.environ["LOHAN_CASE"])
    outcomes = [differential.run_case({**SIMPLEST, **case}, folder) for case in DIFFERENTIAL_CASES]
    ended = [[outcome.status, outcome.detail] for outcome in outcomes]
    (folder / "outcomes.json").write_text(json.dumps(ended))


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.default_int_handler)  # jobs in the background ignore it
    sys.meta_path.insert(0, InterruptOnImport(*sys.argv[1:3]))  # type: ignore[arg-type]
    del sys.argv[1:3]
    runpy.run_module("lohan", run_name="__main__", alter_sys=True)
