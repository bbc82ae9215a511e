"""Anything behind `torch.accelerator`: CUDA, ROCm, XPU, and backends registered as PrivateUse1.

Streams and events are torch's generic ones. What torch has no generic call for comes first.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import warnings
import weakref
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any, cast

import torch

from lohan.device.base import Event, HostMemory, Pairs, pages
from lohan.errors import ConfigError
from lohan.model.layout import local_rank
from lohan.planner.memory import card_overhead
from lohan.util.units import PAGE, counted, format_bytes

# -- The one place for calls that torch has under a backend's own name only ------------------------
#
# Each has an answer for backends that do not offer it.


def has_bf16(device: torch.device) -> bool:
    """Whether bf16 is native. Backends that cannot say are taken to have it."""
    module: Any = torch.get_device_module(device)
    asked = getattr(module, "is_bf16_supported", None)
    if asked is None:
        return True
    try:
        return bool(asked(including_emulation=False))
    except TypeError:  # a backend that knows nothing of emulation
        return bool(asked())


def has_fp64(device: torch.device) -> bool:
    """Whether it computes in double precision; Intel's cards for desktops do not. Backends that
    cannot say are taken to have it."""
    asked = getattr(torch.get_device_module(device), "get_device_properties", None)
    return True if asked is None else bool(getattr(asked(device.index or 0), "has_fp64", True))


def free_memory(device: torch.device) -> int | None:
    """None: the backend does not say."""
    module: Any = torch.get_device_module(device)
    for owner, name in ((torch.accelerator, "get_memory_info"), (module, "mem_get_info")):
        asked = getattr(owner, name, None)
        if asked is not None:
            with suppress(RuntimeError):  # its allocator does not keep count
                return int(asked(device.index or 0)[0])
    return None


def set_device(device: torch.device) -> None:
    asked = getattr(torch.accelerator, "set_device_index", None)  # its name since torch 2.8
    (asked or torch.accelerator.set_device_idx)(device.index or 0)


def random_state(device: torch.device) -> torch.Tensor | None:
    """Of the device's own generator; None: it has none."""
    asked = getattr(torch.get_device_module(device), "get_rng_state", None)
    return None if asked is None else asked(device)


def set_random_state(device: torch.device, state: torch.Tensor) -> None:
    torch.get_device_module(device).set_rng_state(state, device)


def limit_memory(device: torch.device, count: int | None) -> None:
    """The caching allocator itself refuses to go beyond, where it can; None: as far as it goes."""
    module: Any = torch.get_device_module(device)
    limit = getattr(module, "set_per_process_memory_fraction", None)
    info = getattr(module, "mem_get_info", None)
    if limit is not None and info is not None:
        whole = info(device.index or 0)[1]
        limit(1.0 if count is None else min(1.0, count / whole), device.index or 0)


def release_cached_memory(device: torch.device) -> None:
    """Returns unused memory of the caching allocator to the device."""
    empty = getattr(torch.get_device_module(device), "empty_cache", None)
    if empty is not None:
        empty()


def new_stream(device: torch.device) -> Any:
    """Of the backend's own kind where it has one: its events can wait without spinning."""
    if device.type == "cuda":
        return torch.cuda.Stream(device)
    return torch.Stream(device=device)


def current_stream(device: torch.device) -> Any:
    if device.type == "cuda":
        return torch.cuda.current_stream(device)
    return torch.accelerator.current_stream(device)


def record_event(stream: Any) -> Event:
    """An event behind what is on a stream. A thread of the host that waits for it sleeps:
    torch's generic events have no such kind, and waits for theirs take a core each."""
    if isinstance(stream, torch.cuda.Stream):
        event: Any = torch.cuda.Event(blocking=True)
        event.record(stream)
    else:
        event = stream.record_event()
    made: Event = event
    return made


def can_register(device: torch.device) -> bool:
    return device.type == "cuda"  # ROCm goes by this name too


PORTABLE = 1  # cudaHostRegisterPortable: pinned for every device of the machine


def register(memory: HostMemory) -> None:
    """Pins memory in place for as long as it lives; raises what the driver says."""
    runtime: Any = torch.cuda.cudart()
    pointer = memory.ctypes.data
    failed = int(runtime.cudaHostRegister(pointer, memory.nbytes, PORTABLE))
    if failed:
        forget_error()
        torch.cuda.check_error(failed)
    weakref.finalize(memory, runtime.cudaHostUnregister, pointer)
    mapping: Any = getattr(memory.base, "obj", memory.base)
    if isinstance(mapping, mmap.mmap) and hasattr(mmap, "MADV_DONTFORK"):
        # A process that is forked has no use for it, and copies on write would move it.
        mapping.madvise(mmap.MADV_DONTFORK)


_RUNTIMES = {"libcudart": "cudaGetLastError", "libamdhip64": "hipGetLastError"}


def forget_error() -> None:
    """A call that failed leaves its error with the thread, and the next kernel would fail with it.
    torch has no call for it, so every runtime library of this process is asked."""
    with open("/proc/self/maps") as maps:
        paths = {line.split(maxsplit=5)[5].strip() for line in maps if line.count("/")}
    for path in paths:
        for library, name in _RUNTIMES.items():
            if Path(path).name.startswith(library):
                getattr(ctypes.CDLL(path), name)()


def pinned_by_torch(count: int) -> HostMemory:
    """From the backend's host allocator, which may round up; with a page more, since drives
    want pages."""
    tensor = torch.empty(count + PAGE, dtype=torch.uint8, pin_memory=True)
    skip = -tensor.data_ptr() % PAGE
    return cast(HostMemory, tensor.numpy()[skip : skip + count])


# -- Accelerator ----------------------------------------------------------------------------------


LINK = ("h2d", "d2h")
SUMMED = 2**22  # elements that are summed at a time: in double precision they take 32 MiB
STREAMS = (*LINK, "net")  # lanes with a stream of their own; compute has the caller's


class AcceleratorDevice:
    """The current accelerator: its first device or, of several ranks on a machine, the one with the
    rank's number there. `memory`: the most that a run may use."""

    has_own_memory = compiles = True

    def __init__(self, memory: int | None = None, *, number: int | None = None) -> None:
        self.torch_device = torch.device(found_type(), _number(number))
        self.name = str(self.torch_device)
        self.default_dtype = "bf16" if has_bf16(self.torch_device) else "fp16"
        set_device(self.torch_device)
        self._has_fp64 = has_fp64(self.torch_device)
        self._memory = memory
        if memory is not None:
            limit_memory(self.torch_device, memory)
        self._streams: dict[str, Any] = {lane: new_stream(self.torch_device) for lane in STREAMS}
        self._computing = current_stream(self.torch_device)  # compute's, as far as is known
        self._said = False

    def memory_bytes(self) -> int:
        free = free_memory(self.torch_device)
        known = [count for count in (self._memory, free) if count is not None]
        if not known:
            raise ConfigError(
                f"{self.name} does not say how much memory it has; give --device-memory, say 24GiB"
            )
        return min(known)

    def overhead(self, host_bytes: int) -> dict[str, int]:
        """Backends outside torch's tree are taken to have none that is known."""
        known = self.torch_device.type in ("cuda", "xpu")
        return card_overhead(self.memory_bytes(), host_bytes) if known else {}

    def allocate(self, count: int) -> torch.Tensor:
        """Note [long-lived buffers]. A lane may ask too: the memory is compute's all the same."""
        with self._current(compute := self._compute()):
            made = torch.empty(count, dtype=torch.uint8, device=self.torch_device)
        given = record_event(compute)
        for stream in self._streams.values():
            stream.wait_event(given)
        return made

    def enter(self, lane: str) -> None:
        """Note [per thread]."""
        set_device(self.torch_device)
        if lane in self._streams:
            torch.accelerator.set_stream(self._streams[lane])

    # -- lanes ------------------------------------------------------------------------------------

    def copy(self, lane: str, pairs: Pairs, *, after: Event | None = None) -> Event:
        stream = self._streams[lane]
        if after is not None:
            stream.wait_event(after)
        with self._current(stream):
            for dst, src in pairs:
                self._copy_one(lane, dst, src)
        return record_event(stream)

    def record_stream(self, lane: str, tensors: Sequence[torch.Tensor], event: Event) -> None:
        """CUDA's allocator knows a second stream, and compute goes on meanwhile. Others free memory
        at once: there compute waits."""
        if self.torch_device.type != "cuda":
            self.wait(event)
            return
        for tensor in tensors:
            tensor.record_stream(self._streams[lane])

    def mark(self) -> Event:
        return record_event(self._compute())

    def stamp(self) -> Event | None:
        """CUDA and ROCm; elsewhere the host's clock must do."""
        if self.torch_device.type != "cuda":
            return None
        event: Any = torch.cuda.Event(enable_timing=True, blocking=True)
        event.record(self._compute())
        made: Event = event
        return made

    def elapsed_s(self, first: Any, last: Any) -> float:
        return float(first.elapsed_time(last)) / 1e3

    def wait(self, event: Event) -> None:
        self._compute().wait_event(event)

    def sum_squares(self, tensors: Sequence[torch.Tensor]) -> torch.Tensor | None:
        """In double precision, by the device's own reduction: in a fixed order, which is not the
        host's."""
        if not self._has_fp64:
            return None
        parts = [part for tensor in tensors for part in tensor.reshape(-1).split(SUMMED)]
        norms = [torch.linalg.vector_norm(part, dtype=torch.float64) for part in parts]
        return torch.stack(norms).square_().sum().view(1)

    def computing(self) -> AbstractContextManager[Any]:
        return nullcontext()

    # -- what a backend provides ------------------------------------------------------------------

    def _compute(self) -> Any:
        """The caller's current stream is the compute lane's. A lane's thread has its own stream:
        there it is the one that compute was last seen on."""
        current = current_stream(self.torch_device)
        if current not in self._streams.values():
            self._computing = current
        return self._computing

    @contextmanager
    def _current(self, stream: Any) -> Iterator[None]:
        before = current_stream(self.torch_device)
        torch.accelerator.set_stream(stream)
        try:
            yield
        finally:
            torch.accelerator.set_stream(before)

    def _copy_one(self, lane: str, dst: torch.Tensor, src: torch.Tensor) -> None:
        dst.copy_(src, non_blocking=True)

    # -- host memory ------------------------------------------------------------------------------

    def host_memory(self, count: int) -> HostMemory:
        """Registered where it lies, without rounding, or else from torch's own allocator. Pageable
        memory works too, since nothing is read before its event."""
        try:
            return self._pinned(count)
        except (RuntimeError, OSError) as error:
            if not self._said:
                self._said = True
                warnings.warn(
                    f"{self.name}: cannot pin {format_bytes(count)} of host memory ({error}); "
                    "copies go through pageable memory, at about half the speed of the link. Lower "
                    "--host, or under WSL2 raise its share of memory: half of it can be pinned",
                    RuntimeWarning, stacklevel=2,
                )  # fmt: skip
            return pages(count)

    def _pinned(self, count: int) -> HostMemory:
        if can_register(self.torch_device):
            memory = pages(count)
            register(memory)
            return memory
        return pinned_by_torch(count)

    def release_cached_memory(self) -> None:
        release_cached_memory(self.torch_device)

    # -- random numbers ---------------------------------------------------------------------------

    def random_state(self) -> Any:
        """Of the host's generator and the device's own, if it has one."""
        own = random_state(self.torch_device)
        return (torch.get_rng_state(),) if own is None else (torch.get_rng_state(), own)

    def set_random_state(self, state: Any) -> None:
        torch.set_rng_state(state[0])
        for own in state[1:]:
            set_random_state(self.torch_device, own)

    def close(self) -> None:
        """Streams go with their last reference, the limit on memory now."""
        if self._memory is not None:
            limit_memory(self.torch_device, None)


def found_type() -> str:
    """Of the accelerator that torch was built for and that is there."""
    if not hasattr(torch, "accelerator"):
        raise ConfigError("--device: this torch knows no accelerators; use 2.6 or newer")
    found = _built_for()
    if found is not None and torch.accelerator.is_available():
        return found.type
    if found is None:
        raise ConfigError(
            "--device: torch finds no accelerator on this machine; install a build of torch "
            "for it, or use --device cpu"
        )
    raise ConfigError(
        f"--device: this torch is built for {found.type}, but finds no device: its driver is "
        f"missing or too old, or none is visible; check {_TOOLS.get(found.type, 'its driver')}, or "
        "use --device cpu"
    )


def _built_for() -> torch.device | None:
    """torch 2.6 raises where the device of its build is not there."""
    try:
        return torch.accelerator.current_accelerator()
    except RuntimeError:
        built = torch.version.cuda or torch.version.hip
        return torch.device("cuda") if built else None


_TOOLS = {"cuda": "nvidia-smi and CUDA_VISIBLE_DEVICES", "xpu": "xpu-smi"}


def _number(asked: int | None) -> int:
    """Of the device that is this process's own: the one asked for, or that with its rank."""
    count = torch.accelerator.device_count()
    number = local_rank(os.environ) if asked is None else asked
    if number < count or (asked is None and number == 0):
        return number
    if asked is not None:
        raise ConfigError(
            f"--device: there is no device {asked}, this machine has {counted(count, 'device')}, "
            f"numbered from 0"
        )
    raise ConfigError(
        f"--device accelerator: rank {number} of this machine has no device, there are {count};"
        f" start {count} ranks here, or use --device cpu"
    )
