"""torch's real CUDA build on a machine without a GPU.

torch's CUDA libraries find CUDA's runtime by its name, so one of our own takes its place
(runtime.cpp): devices are memory of this process that the host cannot read, streams are threads
that work in order and can be late, memory has an end, errors stay. Operators of the CUDA key run as
the CPU's, in the order of their stream (operators.cpp, with the fallback of tests/backend);
attention has the outputs and workspaces of CUDA's kernels; NCCL meets in shared memory
(collectives.cpp). Allocators, streams, events, copies, generators, `torch.cuda` and process groups
are torch's own.

So this tries dispatch, streams, memory, errors and waits. It says nothing of kernels, their
rounding or speed: numbers are the CPU's by construction.

`make test-cuda` sets up an environment with such a torch (environment.py) and runs check_*.py in
it. There every Python process has these devices, from the import of torch on.

    SOFTCUDA_DEVICES, SOFTCUDA_MIB         how many devices, and the memory of each (2, 1024)
    SOFTCUDA_COPY_US, _WORK_US, _SEED      how late streams are
    SOFTCUDA_CAPABILITY                    of the devices (8.9)
    SOFTCUDA_INTEGRATED=1                  devices say that they share the memory of the host
    SOFTCUDA_QUEUE                         launches that a stream holds (1024)
    SOFTCUDA_NCCL_MIB                      memory of a device that a communicator takes (0)
    SOFTCUDA_ORDER=1                       report unordered accesses to memory (order.hpp); a
                                           process that has found some exits with an error
    SOFTCUDA_GUARD=1                       pages of copies in flight cannot be touched (guard.hpp)
    SOFTCUDA_POISON=1                      fill memory with NaN when it is released
    SOFTCUDA_LOG                           says which kernels were asked for and do not run
"""

from __future__ import annotations

import importlib.util
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

MODULE = "lohan_softcuda"


def installed() -> bool:
    """Return whether this environment's torch runs on software CUDA."""
    return importlib.util.find_spec(MODULE) is not None


@cache
def extension() -> Any:
    """Return the compiled operators, which are active from the first call on."""
    import lohan_softcuda
    import torch  # brings them into force: start.py

    torch.cuda.init()
    lohan_softcuda.watch_memory()
    return lohan_softcuda


class Frame(NamedTuple):
    file: str  # as it is imported: lohan/engine/head.py
    line: int
    function: str  # with the class that it belongs to

    def __str__(self) -> str:
        return f"{self.file}:{self.line} {self.function}"


def stack_here() -> tuple[Frame, ...]:
    """Return the stack of the caller's caller."""
    collected, frame = [], sys._getframe(2)
    while frame is not None:
        code, path = frame.f_code, Path(frame.f_code.co_filename)
        package, _, _ = frame.f_globals.get("__name__", "").partition(".")
        at = len(path.parts) - 1 - path.parts[::-1].index(package) if package in path.parts else -1
        if package != "torch":
            collected.append(Frame("/".join(path.parts[at:]), frame.f_lineno, code.co_qualname))
        frame = frame.f_back  # type: ignore[assignment]
    return tuple(collected)


@dataclass(frozen=True)
class Wait:
    """A thread of the host waited for a stream."""

    what: str
    thread: str
    stack: tuple[Frame, ...]  # the innermost first, without those of torch

    @property
    def site(self) -> tuple[str, str]:
        """Who waited: file and function."""
        return self.stack[0].file, self.stack[0].function

    def __str__(self) -> str:
        return f"{self.what}: {' < '.join(map(str, self.stack[:6]))}"


@contextmanager
def unordered() -> Iterator[None]:
    """Run code that omits a wait on purpose: neither the detector nor the page guard objects."""
    extension().set_guard(False)
    try:
        yield
    finally:
        extension().take_races()
        extension().set_guard(True)


@contextmanager
def waits() -> Iterator[list[Wait]]:
    """Every wait of the host for a stream, with the Python stack that led to it."""
    collected: list[Wait] = []

    def note(what: str) -> None:
        collected.append(Wait(what, threading.current_thread().name, stack_here()))

    result = extension()
    result.on_wait(note)
    try:
        yield collected
    finally:
        result.on_wait(None)
