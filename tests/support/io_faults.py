"""Faults below Python: the n-th call of a kind on a run's files fails, is short or is late."""

from __future__ import annotations

import ctypes
import errno
import hashlib
import json
import os
import shutil
import struct
import subprocess
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path

SOURCE = Path(__file__).parents[1] / "faults" / "interpose.c"
BUILD = Path(__file__).parents[2] / "build" / "faults"
CALLS = (
    "pread",
    "pwrite",
    "pwritev",
    "write",
    "fsync",
    "fdatasync",
    "fallocate",
    "rename",
    "renameat2",
    "io_uring_enter",
)
FATES = {"short": -1, "delay": -2}
VARIABLE = "LOHAN_FAULT"


@dataclass(frozen=True)
class Fault:
    call: str
    at: int  # from 1
    kind: str  # an errno by name, or one of FATES
    engine: str = "auto"  # in place of what the run would choose
    every: bool = False  # and all calls after it

    def __str__(self) -> str:
        return f"{self.kind} at {self.call} {self.at}{' and after' if self.every else ''}"

    def env(self, under: Path, tally: Path) -> dict[str, str]:
        given = {**asdict(self), "under": str(under), "tally": str(tally)}
        return {VARIABLE: json.dumps(given)}


def seen_and_fired(tally: Path) -> tuple[int, int]:
    seen, fired = struct.unpack("ll", tally.read_bytes())
    return seen, fired


def compiler() -> str | None:
    return shutil.which(os.environ.get("CC", "cc"))


def preloaded() -> dict[str, str]:
    return {"LD_PRELOAD": " ".join(filter(None, [str(library()), os.environ.get("LD_PRELOAD")]))}


def library() -> Path:
    """Built once for each state of the source."""
    result = BUILD / f"interpose-{hashlib.sha256(SOURCE.read_bytes()).hexdigest()[:16]}.so"
    if result.exists():
        return result
    BUILD.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=BUILD) as folder:
        built = Path(folder) / result.name
        options = ["-shared", "-fPIC", "-O1", "-U_FORTIFY_SOURCE", "-Wall"]
        command = [str(compiler()), *options, "-o", str(built), str(SOURCE), "-ldl"]
        subprocess.run(command, check=True)
        built.replace(result)
    return result


def arm() -> None:
    """In the process that is to have the fault."""
    given = json.loads(os.environ[VARIABLE])
    kind = FATES.get(given["kind"]) or getattr(errno, given["kind"])
    armed = ctypes.CDLL(None).lohan_faults_arm
    armed.argtypes = [
        ctypes.c_char_p,
        ctypes.c_long,
        ctypes.c_int,
        ctypes.c_int,
        ctypes.c_char_p,
        ctypes.c_char_p,
    ]
    words = [given[name].encode() for name in ("call", "under", "tally")]
    assert armed(words[0], given["at"], given["every"], kind, words[1], words[2]) == 0
    if given["engine"] != "auto":
        from lohan.store import io_engine

        opened = io_engine.open_engine
        io_engine.open_engine = lambda kind: opened(given["engine"])  # type: ignore[assignment,misc]
