"""Devices behind `torch.accelerator`: CUDA, ROCm, XPU, and backends registered as PrivateUse1.

Streams and events are torch's generic ones. The functions at the top cover what torch has no
generic call for.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import threading
import warnings
import weakref
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch

from lohan.device.base import Event, HostMemory, Pairs, pages
from lohan.device.out_of_memory import is_out_of_memory
from lohan.device.pageable import DeferredEvent, PageableCopies
from lohan.errors import BudgetError, ConfigError, LohanError
from lohan.model.layout import local_rank
from lohan.planner.memory import card_overhead
from lohan.util.units import PAGE, counted, format_bytes

# -- All calls that torch offers only under the name of a backend ----------------------------------
#
# Each function has a fallback for backends that do not offer the call.


def has_bf16(device: torch.device) -> bool:
    """Return whether bf16 is native; True for backends that do not report it."""
    module: Any = torch.get_device_module(device)
    query = getattr(module, "is_bf16_supported", None)
    if query is None:
        return True
    try:
        return bool(query(including_emulation=False))
    except TypeError:  # a backend without this argument
        return bool(query())


def has_fp64(device: torch.device) -> bool:
    """Return whether the device has double precision; True for backends that do not report it.

    Intel's desktop cards have none.
    """
    query = getattr(torch.get_device_module(device), "get_device_properties", None)
    return True if query is None else bool(getattr(query(device.index or 0), "has_fp64", True))


def is_integrated(device: torch.device) -> bool:
    """Return whether the GPU has no memory of its own and can compute in the host's memory.

    Only CUDA and ROCm can, because other backends do not provide tensors over host memory.
    """
    if device.type != "cuda":
        return False
    return bool(torch.cuda.get_device_properties(device).is_integrated)


def free_memory(device: torch.device) -> int | None:
    """Return the free bytes of the device, or None if the backend does not report them."""
    module: Any = torch.get_device_module(device)
    for owner, name in ((torch.accelerator, "get_memory_info"), (module, "mem_get_info")):
        query = getattr(owner, name, None)
        if query is not None:
            with suppress(RuntimeError):  # the allocator keeps no statistics
                return int(query(device.index or 0)[0])
    return None


def identity(device: torch.device) -> str:
    """Return a string that identifies the physical device, or "" if the backend reports none.

    The device number does not identify it, because processes may see different devices.
    """
    if device.type == "cpu":
        return ""
    query = getattr(torch.get_device_module(device), "get_device_properties", None)
    return "" if query is None else str(getattr(query(device.index or 0), "uuid", ""))


def load_libraries(device: torch.device) -> None:
    """Create the handles of matrix libraries on the calling thread and on autograd's.

    The handles take memory outside torch's allocator when they are first used. After this call, the
    reported free memory is available to the run.
    """
    matrix = torch.ones(8, 8, device=device, requires_grad=True)
    with torch.enable_grad():
        (matrix @ matrix).sum().backward()
    record_event(current_stream(device)).synchronize()


def keep_pinned_memory(device: torch.device) -> None:
    """Let torch's allocator keep a little pinned memory, two blocks of each small size.

    `.item()` on CUDA uses such a block, and fails if the run has pinned all the memory that can be
    pinned.
    """
    if device.type == "cuda":
        with suppress(RuntimeError):
            sizes = [2**power for power in range(13)] * 2
            blocks = [torch.empty(size, dtype=torch.uint8, pin_memory=True) for size in sizes]
            # Free both blocks together. If one were freed first, the next request would reuse it.
            del blocks


def set_device(device: torch.device) -> None:
    setter = getattr(torch.accelerator, "set_device_index", None)  # the name in torch 2.8 and later
    (setter or torch.accelerator.set_device_idx)(device.index or 0)


def random_state(device: torch.device) -> torch.Tensor | None:
    """Return the state of the device's own generator, or None if it has none."""
    query = getattr(torch.get_device_module(device), "get_rng_state", None)
    return None if query is None else query(device)


def set_random_state(device: torch.device, state: torch.Tensor) -> None:
    torch.get_device_module(device).set_rng_state(state, device)


def limit_memory(device: torch.device, count: int | None) -> None:
    """Limit the caching allocator to `count` bytes, if the backend supports it.

    None removes the limit.
    """
    module: Any = torch.get_device_module(device)
    limit = getattr(module, "set_per_process_memory_fraction", None)
    info = getattr(module, "mem_get_info", None)
    if limit is not None and info is not None:
        whole = info(device.index or 0)[1]
        limit(1.0 if count is None else min(1.0, count / whole), device.index or 0)


def release_cached_memory(device: torch.device) -> None:
    """Return unused memory of the caching allocator to the device."""
    empty = getattr(torch.get_device_module(device), "empty_cache", None)
    if empty is not None:
        empty()


def new_stream(device: torch.device, lane: str) -> Any:
    """Create the stream of a lane, of the backend's own class on CUDA.

    The events of that class can wait without spinning.
    """
    if device.type == "cuda":
        return torch.cuda.Stream(device, priority=PRIORITIES.get(lane, 0))
    return torch.Stream(device=device)


def current_stream(device: torch.device) -> Any:
    if device.type == "cuda":
        return torch.cuda.current_stream(device)
    return torch.accelerator.current_stream(device)


def record_event(stream: Any) -> Event:
    """Record an event after all work enqueued on a stream, and return the event.

    On CUDA, a host thread that waits for the event sleeps. torch's generic events have no such
    option, so a thread that waits for a generic event occupies a core.
    """
    if isinstance(stream, torch.cuda.Stream):
        event: Any = torch.cuda.Event(blocking=True)
        event.record(stream)
    else:
        event = stream.record_event()
    recorded: Event = event
    return recorded


def read_back(tensor: torch.Tensor) -> torch.Tensor:
    """Return a copy of a tensor in host memory, after the work enqueued on this thread's stream.

    `.cpu()` and `.item()` poll the device in a loop, which would occupy a core that the lanes need.
    This function sleeps instead, unless no more memory can be pinned; then it polls too.
    """
    if tensor.device.type != "cuda":
        return tensor.cpu()
    try:
        host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    except RuntimeError:
        return tensor.cpu()
    host.copy_(tensor, non_blocking=True)
    record_event(current_stream(tensor.device)).synchronize()
    return host


def can_register(device: torch.device) -> bool:
    return device.type == "cuda"  # ROCm also uses this name


PORTABLE = 1  # cudaHostRegisterPortable: pinned for every device of the machine


def register(memory: HostMemory) -> None:
    """Pin memory in place for its lifetime, or raise the driver's error."""
    runtime: Any = torch.cuda.cudart()
    pointer = memory.ctypes.data
    failed = int(runtime.cudaHostRegister(pointer, memory.nbytes, PORTABLE))
    if failed:
        forget_error()
        torch.cuda.check_error(failed)
    weakref.finalize(memory, runtime.cudaHostUnregister, pointer)
    mapping: Any = getattr(memory.base, "obj", memory.base)
    if isinstance(mapping, mmap.mmap) and hasattr(mmap, "MADV_DONTFORK"):
        # A forked process does not need this memory, and copy-on-write would move the pinned pages.
        mapping.madvise(mmap.MADV_DONTFORK)


_RUNTIMES = {"libcudart": "cudaGetLastError", "libamdhip64": "hipGetLastError"}


def forget_error() -> None:
    """Clear the error that a failed call leaves in the thread.

    Otherwise the next kernel launch would report it. torch has no call for this, so the function is
    called in every runtime library that is loaded in this process. If the runtime is linked into
    torch itself, no such library is found. A small kernel is then launched to report the error,
    which is ignored.
    """
    with open("/proc/self/maps") as maps:
        paths = {line.split(maxsplit=5)[5].strip() for line in maps if line.count("/")}
    runtimes = [
        (path, name)
        for path in paths
        for library, name in _RUNTIMES.items()
        if Path(path).name.startswith(library)
    ]
    for path, name in runtimes:
        getattr(ctypes.CDLL(path), name)()
    if not runtimes:
        with suppress(RuntimeError):
            torch.zeros(1, device="cuda")


def pinned_by_torch(count: int) -> HostMemory:
    """Allocate pinned memory from the backend's host allocator, which may round up.

    One page is added, because direct I/O requires that the result starts on a page boundary.
    """
    tensor = torch.empty(count + PAGE, dtype=torch.uint8, pin_memory=True)
    skip = -tensor.data_ptr() % PAGE
    return cast("HostMemory", tensor.numpy()[skip : skip + count])


# -- Accelerator ----------------------------------------------------------------------------------


LINK = ("h2d", "d2h")
# Elements summed at a time. A backend that first copies them to double precision needs 32 MiB.
SUMMED_ELEMENTS = 2**22
# The lanes that have a stream of their own; compute uses the caller's stream. `slices` is for
# copies to the device that compute itself requests. Each of these copies waits for the compute that
# frees its buffer. On the stream of h2d, they would delay the weights and activations of later
# blocks, which need not wait.
STREAMS = (*LINK, "slices", "net")
# Collectives occupy few multiprocessors. With the priority of compute they would still queue behind
# whole matrix products.
PRIORITIES = {"net": -1}


def _load_libraries(torch_device: torch.device, name: str) -> None:
    """Load the libraries of a device, or raise BudgetError if its memory is full."""
    try:
        load_libraries(torch_device)
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
        raise BudgetError(
            f"{name}: no memory even for the libraries of the device "
            f"({str(error).splitlines()[0]}); stop other programs that use it"
        ) from error


class AcceleratorDevice:
    """The current accelerator.

    The default is its first device or, with several ranks on a machine, the device with the local
    rank's number. `memory` is the most that a run may use, in bytes.
    """

    has_own_memory = compiles = True
    computes_on_cores = False

    def __init__(self, memory: int | None = None, *, number: int | None = None) -> None:
        self.torch_device = torch.device(available_type(), _number(number))
        self.name = str(self.torch_device)
        self.default_dtype = "bf16" if has_bf16(self.torch_device) else "fp16"
        set_device(self.torch_device)
        self._has_fp64 = has_fp64(self.torch_device)
        _load_libraries(self.torch_device, self.name)
        keep_pinned_memory(self.torch_device)
        self._memory = memory
        if memory is not None:
            limit_memory(self.torch_device, memory)
        self._streams: dict[str, Any] = {
            lane: new_stream(self.torch_device, lane) for lane in STREAMS
        }
        self._computing = current_stream(self.torch_device)  # the stream that compute last ran on
        self._pins_failed = False
        self._on_lane = threading.local()  # `entered` is set on threads of lanes
        self._pageable_copies = PageableCopies(partial(set_device, self.torch_device))

    def memory_bytes(self) -> int:
        free = free_memory(self.torch_device)
        limits = [count for count in (self._memory, free) if count is not None]
        if not limits:
            raise ConfigError(
                f"{self.name} does not report its memory; give --device-memory, such as 24GiB"
            )
        return min(limits)

    def overhead(self, host_bytes: int) -> dict[str, int]:
        """Return the device memory that no buffer accounts for, in bytes by owner.

        It is known for CUDA, ROCm and XPU. Other backends are assumed to have none.
        """
        has_libraries = self.torch_device.type in ("cuda", "xpu")
        return card_overhead(self.memory_bytes(), host_bytes) if has_libraries else {}

    def allocate(self, count: int) -> torch.Tensor:
        """Allocate a buffer. See Note [long-lived buffers].

        The memory belongs to the compute stream, even if a lane's thread allocates it.
        """
        with self._current(compute := self._compute()):
            buffer = torch.empty(count, dtype=torch.uint8, device=self.torch_device)
        compute_event = record_event(compute)
        for stream in self._streams.values():
            stream.wait_event(compute_event)
        return buffer

    def compute_view(self, host: torch.Tensor) -> torch.Tensor:
        raise LohanError(f"{self.name} computes in its own memory")

    def enter(self, lane: str) -> None:
        """Set the device and the stream of a lane's thread. See Note [per thread]."""
        set_device(self.torch_device)
        self._on_lane.entered = True
        if lane in self._streams:
            torch.accelerator.set_stream(self._streams[lane])

    # -- Lanes -------------------------------------------------------------------------------------

    def copy(self, lane: str, pairs: Pairs, *, after: Event | None = None) -> Event:
        if self._may_block():
            return self._pageable_copies.hand_over(lane, lambda: self._copy(lane, pairs, after))
        return self._copy(lane, pairs, after)

    def _may_block(self) -> bool:
        """Return whether the launching thread must leave its copies to another thread.

        It must as soon as some memory is pageable, even to copy pinned memory. Otherwise a copy of
        pinned memory could overtake an earlier copy of its lane, although the event of a copy means
        that all earlier copies of the lane are complete.
        """
        if not self._pins_failed or self.torch_device.type != "cuda":
            return False
        return not getattr(self._on_lane, "entered", False)

    def _copy(self, lane: str, pairs: Pairs, after: Event | None) -> Event:
        stream = self._streams[lane]
        if isinstance(after, DeferredEvent):
            after = after.resolve()
        if after is not None:
            stream.wait_event(after)
        with self._current(stream):
            for dst, src in pairs:
                self._copy_one(lane, dst, src)
        return record_event(stream)

    def record_stream(self, lane: str, tensors: Sequence[torch.Tensor]) -> None:
        """Keep the memory of `tensors` from being reused before the lane has read it.

        CUDA's allocator can track a second stream, so compute continues meanwhile. Other allocators
        free memory immediately, so with these allocators compute waits for the lane.
        """
        if self.torch_device.type != "cuda":
            self.wait(record_event(self._streams[lane]))
            return
        for tensor in tensors:
            tensor.record_stream(self._streams[lane])

    def mark(self) -> Event:
        return record_event(self._compute())

    def stamp(self) -> Event | None:
        """Return an event that records its time on CUDA and ROCm, or None on other backends."""
        if self.torch_device.type != "cuda":
            return None
        event: Any = torch.cuda.Event(enable_timing=True, blocking=True)
        event.record(self._compute())
        recorded: Event = event
        return recorded

    def elapsed_s(self, first: Any, last: Any) -> float:
        return float(first.elapsed_time(last)) / 1e3

    def wait(self, event: Event) -> None:
        if isinstance(event, DeferredEvent):
            event = event.resolve()
        self._compute().wait_event(event)

    def sum_squares(self, tensors: Sequence[torch.Tensor]) -> torch.Tensor | None:
        """Return the sum of squares in double precision, or None if the device has none.

        The device's reduction has a fixed order, which differs from the host's. CUDA's kernel for
        lists converts the values while it reads them. `vector_norm` would first write a copy in
        double precision, part by part, with five times the memory traffic and a launch for each
        part.
        """
        if not self._has_fp64:
            return None
        parts = [part for tensor in tensors for part in tensor.reshape(-1).split(SUMMED_ELEMENTS)]
        norms = torch._foreach_norm(parts, 2.0, dtype=torch.float64)
        return torch.stack(norms).square_().sum().view(1)

    def computing(self) -> AbstractContextManager[Any]:
        return nullcontext()

    # -- Hooks that other backends replace ---------------------------------------------------------

    def _compute(self) -> Any:
        """Return the stream of compute.

        On the caller's thread and on autograd's, this is the current stream. On the thread of a
        lane, the current stream is that of the lane, and the stream on which compute last ran is
        returned.
        """
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

    # -- Host memory -------------------------------------------------------------------------------

    def host_memory(self, count: int) -> HostMemory:
        """Return pinned host memory, or pageable memory if pinning fails.

        CUDA registers memory in place without rounding; other backends use torch's allocator.
        Pageable memory gives the same results, because no copy is read before its event.
        """
        try:
            return self._pinned(count)
        except (RuntimeError, OSError) as error:
            if not self._pins_failed:
                self._pins_failed = True
                warnings.warn(
                    f"{self.name}: cannot pin {format_bytes(count)} of host memory ({error}); "
                    "copies go through pageable memory, at about half the speed of the link. Lower "
                    "--host, or raise the limit on locked memory (ulimit -l); under WSL2 often no "
                    "more than 1 GiB can be pinned, whatever its share of memory",
                    RuntimeWarning,
                    stacklevel=2,
                )
            return pages(count)

    def _pinned(self, count: int) -> HostMemory:
        if can_register(self.torch_device):
            memory = pages(count)
            register(memory)
            return memory
        return pinned_by_torch(count)

    def release_cached_memory(self) -> None:
        release_cached_memory(self.torch_device)

    # -- Random numbers ----------------------------------------------------------------------------

    def random_state(self) -> Any:
        """Return the states of the host's generator and of the device's."""
        device_state = random_state(self.torch_device)
        return (
            (torch.get_rng_state(),)
            if device_state is None
            else (torch.get_rng_state(), device_state)
        )

    def set_random_state(self, state: Any) -> None:
        torch.set_rng_state(state[0])
        for device_state in state[1:]:
            set_random_state(self.torch_device, device_state)

    def close(self) -> None:
        """Stop the threads of pageable copies and remove the limit on memory.

        Streams are destroyed with their last reference.
        """
        self._pageable_copies.close()
        if self._memory is not None:
            limit_memory(self.torch_device, None)


def available_type() -> str:
    """Return the type of the available accelerator; raise ConfigError if there is none."""
    if not hasattr(torch, "accelerator"):
        raise ConfigError(
            "--device: this version of torch has no torch.accelerator; use 2.6 or newer"
        )
    backend = _built_for()
    if backend is not None and torch.accelerator.is_available():
        return backend.type
    if backend is None:
        raise ConfigError(
            "--device: torch finds no accelerator on this machine; install a build of torch "
            "for it, or use --device cpu"
        )
    raise ConfigError(
        f"--device: this torch is built for {backend.type}, but finds no device: its driver is "
        f"missing or too old, or none is visible; check {_TOOLS.get(backend.type, 'its driver')}, "
        "or use --device cpu"
    )


def _built_for() -> torch.device | None:
    """Return the device type that torch was built for, or None.

    torch 2.6 raises an error if that device is not available.
    """
    try:
        return torch.accelerator.current_accelerator()
    except RuntimeError:
        built = torch.version.cuda or torch.version.hip
        return torch.device("cuda") if built else None


_TOOLS = {"cuda": "nvidia-smi and CUDA_VISIBLE_DEVICES", "xpu": "xpu-smi"}


# Variables by which a launcher shows each process its own devices.
_VISIBLE = (
    "CUDA_VISIBLE_DEVICES",
    "HIP_VISIBLE_DEVICES",
    "ROCR_VISIBLE_DEVICES",
    "ZE_AFFINITY_MASK",
)


def _number(requested: int | None) -> int:
    """Return the number of this process's device: `requested` or, if it is None, the local rank.

    Launchers such as SLURM may show every rank only one device, which has number 0 for all of them.
    """
    count = torch.accelerator.device_count()
    number = local_rank(os.environ) if requested is None else requested
    if number < count or (requested is None and number == 0):
        return number
    if requested is None and count and any(os.environ.get(name) for name in _VISIBLE):
        return number % count
    if requested is not None:
        raise ConfigError(
            f"--device: there is no device {requested}, this machine has "
            f"{counted(count, 'device')}, numbered from 0"
        )
    raise ConfigError(
        f"--device accelerator: rank {number} of this machine has no device, there are {count};"
        f" start {count} ranks here, or use --device cpu"
    )
