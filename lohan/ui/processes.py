"""The `lohan` processes that the pages start.

A training process has its own POSIX session, so it continues when the server ends. Its settings,
its process id and its output are kept in files below the root, so that a later server finds them.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any
from uuid import uuid4

from lohan.errors import ConfigError, LohanError
from lohan.ui.places import Places
from lohan.util.files import checked, from_json, load_json, write_atomic

MOST_RECORDS = 100  # Older records of ended processes are removed.
MOST_LOG_BYTES = 64 * 1024  # number of bytes that are read from the end of a log
POLL_S = 0.2
LOHAN = (sys.executable, "-m", "lohan")


@dataclass(frozen=True)
class Record:
    """A detached process: what it does, for which run, and how to find it again."""

    id: str
    kind: str  # train, resume, export or report
    run: str  # absolute path of the run folder
    words: list[str]  # arguments of lohan
    pid: int
    born: int  # start time in clock ticks; distinguishes the process from a later one with its id
    time: float  # in seconds since 1970


def lohan_environment() -> dict[str, str]:
    """Return the environment of a started process, which prints plain lines without a terminal."""
    return {**os.environ, "PYTHONUNBUFFERED": "1", "PYTHONIOENCODING": "utf-8", "COLUMNS": "200"}


class Processes:
    def __init__(self, places: Places) -> None:
        self._places = places
        self._children: dict[str, subprocess.Popen[bytes]] = {}

    def start(self, kind: str, run: Path, words: Sequence[str]) -> Record:
        """Start `lohan WORDS` as a process that outlives the server, and return its record.

        `kind` says what the process does, and `run` is the folder of the run.
        """
        work = self._places.work
        try:
            work.mkdir(mode=0o700, exist_ok=True)
            self._forget_old()
            name = f"{time.strftime('%Y%m%d-%H%M%S')}-{kind}-{uuid4().hex[:6]}"
            with open(work / f"{name}.log", "xb") as log:
                child = subprocess.Popen(
                    [*LOHAN, *words],
                    cwd=self._places.root,
                    env=lohan_environment(),
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                )
        except OSError as error:
            raise ConfigError(
                f"{work}: cannot start `lohan {kind}` ({error.strerror}); check its permissions "
                "and free space"
            ) from None
        self._children[name] = child
        record = Record(name, kind, str(run), list(words), child.pid, _born(child.pid), time.time())
        write_atomic(work / f"{name}.json", json.dumps(asdict(record), indent=1).encode())
        return record

    def records(self) -> list[Record]:
        """Return the records of all known processes, the latest first."""
        records = []
        for file in sorted(self._places.work.glob("*.json"), reverse=True):
            with suppress(OSError, ValueError, KeyError):
                records.append(from_json(Record, checked(load_json(file), dict[str, Any], "it")))
        return records

    def is_alive(self, record: Record) -> bool:
        child = self._children.get(record.id)
        if child is not None:
            return child.poll() is None
        return record.born != 0 and _born(record.pid) == record.born

    def exit_code(self, record: Record) -> int | None:
        """Return the exit code; None while the process runs, or if an earlier server started it."""
        child = self._children.get(record.id)
        return None if child is None else child.poll()

    def log(self, record: Record) -> list[str]:
        """Return the last lines that a process has printed."""
        with suppress(OSError), open(self._places.work / f"{record.id}.log", "rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - MOST_LOG_BYTES))
            return file.read().decode(errors="replace").splitlines()
        return []

    def of_run(self, run: Path) -> list[Record]:
        return [record for record in self.records() if record.run == str(run)]

    def _forget_old(self) -> None:
        for record in self.records()[MOST_RECORDS:]:
            if not self.is_alive(record):
                for suffix in (".json", ".log"):
                    (self._places.work / f"{record.id}{suffix}").unlink(missing_ok=True)


def _born(pid: int) -> int:
    """Return the start time of a process in clock ticks since boot, or 0 if there is none."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return 0
    state, *rest = text.rpartition(")")[2].split()
    return 0 if state == "Z" else int(rest[18])


def interrupt(pid: int) -> None:
    """Stop a training as Ctrl-C does: it finishes its step and commits."""
    try:
        os.kill(pid, signal.SIGINT)
    except ProcessLookupError:
        raise ConfigError("the run has just ended; reload the page") from None
    except PermissionError:
        raise ConfigError(
            f"process {pid} belongs to another user, who alone can stop it; ask them"
        ) from None


class CommandError(LohanError):
    """Raised when a `lohan` command fails; the text is its own message."""


async def output_of(
    words: Sequence[str],
    *,
    cwd: Path,
    disconnected: Callable[[], Awaitable[bool]],
) -> tuple[str, str]:
    """Run `lohan WORDS` to its end and return stdout and stderr.

    If `disconnected` returns True, the process is stopped and CommandError is raised.
    """
    process = await asyncio.create_subprocess_exec(
        *LOHAN,
        *words,
        cwd=cwd,
        env=lohan_environment(),
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        start_new_session=True,
    )
    ended = asyncio.ensure_future(process.communicate())
    try:
        while not (await asyncio.wait({ended}, timeout=POLL_S))[0]:
            if await disconnected():
                raise CommandError("nobody waits for the result any more")
        out, err = (text.decode(errors="replace") for text in ended.result())
    finally:
        if process.returncode is None:
            with suppress(ProcessLookupError):
                process.send_signal(signal.SIGTERM)
            await asyncio.wait({ended})
    if process.returncode:
        lines = [line for line in err.splitlines() if line.strip()]
        message = next((line for line in lines if line.startswith("lohan: ")), "")
        last = message.removeprefix("lohan: ") or (lines[-1] if lines else "")
        raise CommandError(last or f"lohan {words[0]} ended with code {process.returncode}")
    return out, err
