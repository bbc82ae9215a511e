"""Processes for the sides of a benchmark, run one after another or in turn.

The speed of a shared machine changes within a minute. Sides that run in turn are started once and
run a few steps per turn. A round of all of them is therefore short, and the ratios within a round
are meaningful. A process that waits for its turn uses no processor, but all are in memory.
"""

from __future__ import annotations

import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any, TypeVar

from common import HERE, cores, note

RESULT = "RESULT "  # prefix of the last line of a child, followed by one JSON object
TURN = "TURN"  # line that a child prints at the end of its turn
T = TypeVar("T")


class Child:
    """A benchmark script in a process group of its own, with its settings as JSON.

    Waiting for a turn or for the report fails after `deadline_s` seconds.
    """

    def __init__(
        self,
        script: str,
        spec: Mapping[str, Any],
        *,
        threads: int,
        deadline_s: float,
        python: str = sys.executable,
        extra: Mapping[str, str] | None = None,
    ) -> None:
        self._what, self._deadline_s = f"{script} {dict(spec)}", deadline_s
        self._process = subprocess.Popen(
            [python, str(HERE / script), json.dumps(dict(spec))],
            text=True,
            start_new_session=True,
            env={**environment(threads=threads, python=python), **(extra or {})},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
        self._lines: queue.Queue[str | None] = queue.Queue()
        self._tail: deque[str] = deque(maxlen=25)
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._lines.put(line.rstrip("\n"))
        self._lines.put(None)

    def ready(self) -> None:
        """Wait until the child can take turns."""
        self._wait(TURN)

    def turn(self) -> None:
        """Let the child run until its turn ends."""
        self.go_on()
        self._wait(TURN)

    def go_on(self) -> None:
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):  # `_wait` reports why the child died
            self._process.stdin.write("\n")
            self._process.stdin.flush()

    def result(self) -> dict[str, Any]:
        """Return the report that the child prints at its end."""
        report: dict[str, Any] = json.loads(self._wait(RESULT)[len(RESULT) :])
        return report

    def _wait(self, word: str) -> str:
        until = time.monotonic() + self._deadline_s
        while True:
            try:
                line = self._lines.get(timeout=max(0.0, until - time.monotonic()))
            except queue.Empty:
                late = f"not done within {self._deadline_s:.0f} s"
                raise SystemExit(f"{late}: {self._what}") from None
            if line is None:
                code, tail = self._process.wait(timeout=60), "\n".join(self._tail)
                raise SystemExit(f"failed with exit code {code}: {self._what}\n{tail}")
            if line.startswith(word):
                return line
            self._tail.append(line)

    def close(self) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)  # also what the child has started
        self._process.wait()


def run_child(script: str, spec: Mapping[str, Any], **options: Any) -> dict[str, Any]:
    """Run one child and return its report; `options` are those of `Child`."""
    with started(script, spec, **options) as child:
        return child.result()


@contextmanager
def started(script: str, spec: Mapping[str, Any], **options: Any) -> Iterator[Child]:
    child = Child(script, spec, **options)
    try:
        yield child
    finally:
        child.close()


def environment(*, threads: int, python: str = sys.executable) -> dict[str, str]:
    """Return equal conditions for every child: thread count, and no spinning at OpenMP barriers."""
    settings = {
        "OMP_NUM_THREADS": str(threads),
        "OMP_WAIT_POLICY": "PASSIVE",
        "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_VERBOSITY": "error",
        "TOKENIZERS_PARALLELISM": "false",
        "PATH": f"{Path(python).absolute().parent}:{os.environ.get('PATH', '')}",
    }
    return {**os.environ, **settings}


def default_threads() -> int:
    return int(os.environ.get("OMP_NUM_THREADS") or cores())


# -- in turn --------------------------------------------------------------------------------------


def order(names: Sequence[str], number: int) -> list[str]:
    """Return the order of a round: every other round is reversed."""
    return list(names) if number % 2 == 0 else list(reversed(names))


def alternate(sides: Mapping[str, Callable[[], T]], rounds: int) -> dict[str, list[T]]:
    """Run every side once per round, in turn."""
    results: dict[str, list[T]] = {name: [] for name in sides}
    for number in range(rounds):
        for name in order(list(sides), number):
            results[name].append(sides[name]())
    return results


def take_turns(
    sides: Mapping[str, tuple[str, Mapping[str, Any]]],
    rounds: int,
    between: Callable[[int], object] = lambda number: None,
    **options: Any,
) -> dict[str, dict[str, Any]]:
    """Start all sides, give each its turn once per round, and return their reports.

    Each side is a script and its settings. `between` is called before every round and after the
    last one; `options` are those of `Child`.
    """
    with ExitStack() as open_ones:
        children = {}
        for name, (script, spec) in sides.items():
            settings = {**spec, "turns": rounds}
            children[name] = open_ones.enter_context(started(script, settings, **options))
            children[name].ready()
        for number in range(rounds):
            between(number)
            note(f"  round {number + 1} of {rounds}")
            for name in order(list(children), number):
                children[name].turn()
        between(rounds)
        for child in children.values():
            child.go_on()
        return {name: child.result() for name, child in children.items()}


# -- inside a child -------------------------------------------------------------------------------


def await_turn() -> None:
    """Wait until it is the turn of this process or, after its last turn, until all are done."""
    if not sys.stdin.readline():
        raise SystemExit("nobody gives turns any more")


def end_turn() -> None:
    print(TURN, flush=True)


def tell(result: Mapping[str, Any]) -> None:
    """Print the report of a child."""
    print(RESULT + json.dumps(dict(result)), flush=True)
