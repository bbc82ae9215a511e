"""Measurements of this machine: compute, links and drives, through the code that a run uses."""

from __future__ import annotations

import platform
import shutil
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from itertools import cycle
from pathlib import Path
from statistics import median

import numpy as np
import torch
from torch import nn
from torch.nn import functional as fn

from lohan import _core
from lohan.capture.blocks import dtype_of
from lohan.device.base import CpuDevice, Device
from lohan.device.out_of_memory import is_out_of_memory
from lohan.engine.buffers import HostPool, StepScalars, update_chunk
from lohan.errors import ConfigError, LohanError
from lohan.model.layout import FlatGroup, TensorSpec
from lohan.model.machine import Drive, Profile
from lohan.model.shapes import BlockShape, ModelShape, gated_block
from lohan.model.state import FLOAT, STATE_FORMATS, chunks
from lohan.optim import AdamW
from lohan.param_groups import GroupValues
from lohan.schedule.ops import Op
from lohan.schedule.simulate import BytesPerParameter, bus_bytes
from lohan.store.extents import Region
from lohan.store.store import Store
from lohan.store.transfers import Ticket
from lohan.util.memory import host_memory_bytes
from lohan.util.units import GiB, MiB, counted, format_bytes

# -- Compute: a Llama-shaped block, a token head, and the optimizer on chunks ----------------------
#
# Compute runs on the device of a run, through the same interface, on weights in its memory and in
# the type that it computes in. The update is the optimizer's own, on state in a host pool. Several
# sets of weights are used in turn, so that none stays in a cache from one use to the next, as in a
# model of many blocks.


LONGEST_SEQUENCE = 1024  # tokens of one sequence; larger numbers are divided into several sequences
ROTARY_BASE, NORM_EPSILON = 10000.0, 1e-6
# Features of one attention head: the largest that divides the width is used.
HEAD_SIZES = (128, 64, 32, 16)
Point = tuple[float, float]


@dataclass(frozen=True)
class Sizes:
    """The sizes of the measured block and head, which stand for the block and head of a model."""

    hidden: int = 1024
    inner: int = 2816
    heads: int = 16
    vocabulary: int = 8192
    copies: int = 4  # sets of weights and state that are used in turn
    chunk_params: int = 2**22

    @classmethod
    def of(cls, model: ModelShape) -> Sizes:
        """Return sizes with the width and the work per token of the model's largest block.

        The inner width compensates for other projections and for inactive experts.
        """
        block, h = max(model.blocks, key=lambda block: block.flops), model.hidden
        heads = next((h // size for size in HEAD_SIZES if h % size == 0), 1)
        inner = round((block.flops / 2 - 4 * h * h) / (3 * h))
        return cls(
            hidden=h,
            inner=max(1, inner),
            heads=heads,
            vocabulary=model.vocabulary or cls.vocabulary,
            copies=2,
        )


@dataclass(frozen=True)
class Weights:
    norm1: torch.Tensor
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    o: torch.Tensor
    norm2: torch.Tensor
    gate: torch.Tensor
    up: torch.Tensor
    down: torch.Tensor

    def leaves(self) -> list[torch.Tensor]:
        return list(vars(self).values())


PROBE_END_S = 120.0  # Seconds within which a probe in the background must end.


class Figure:
    """The duration of an operation, measured repeatedly.

    The speed of a shared machine changes within seconds, so the measurements are spread out in
    time.
    """

    def __init__(self, run: Callable[[], float]) -> None:
        """Store `run`, which returns the seconds it took."""
        self.run = run
        self._durations: list[float] = []

    def measure(self, seconds: float) -> None:
        """Measure at least two runs, for at least this many seconds.

        The very first run includes one-time set-up. It counts only if it is long enough for
        that not to matter.
        """
        durations: list[float] = []
        if not self._durations and (first := self.run()) > seconds:
            durations.append(first)
        while len(durations) < 2 or sum(durations) < seconds:
            durations.append(self.run())
        self._durations += durations

    @property
    def median_s(self) -> float:
        return median(self._durations)


def end(thread: threading.Thread) -> None:
    """Wait until the thread of a probe has ended after a request to stop.

    Raise LohanError after PROBE_END_S.
    """
    thread.join(PROBE_END_S)
    if thread.is_alive():
        raise LohanError(
            f"profile: the {thread.name} has not ended after {PROBE_END_S:g} s; look at the drive "
            "or device (`dmesg`), then repeat the command"
        )


def repeated(run: Callable[[], float], *, seconds: float) -> float:
    """Return the median duration of `run`, repeated for at least `seconds`."""
    figure = Figure(run)
    figure.measure(seconds)
    return figure.median_s


def computed_s(device: Device, run: Callable[[], object]) -> float:
    """Return the seconds that the device needs for `run`, by its own clock if it has one."""
    start_s, first = time.perf_counter(), device.stamp()
    with device.computing():
        run()
    last = device.stamp()
    device.mark().synchronize()
    if first is None or last is None:
        return time.perf_counter() - start_s
    return device.elapsed_s(first, last)


class BlockProbe:
    """Forward and backward of a decoder block, on several sets of weights in turn."""

    def __init__(self, sizes: Sizes, device: Device | None = None) -> None:
        self._sizes, self._device = sizes, device or CpuDevice()
        self._dtype = dtype_of(STATE_FORMATS[self._device.default_dtype])
        h, inner = sizes.hidden, sizes.inner
        self.shape: BlockShape = gated_block(
            parameters=4 * h * h + 3 * h * inner + 2 * h, hidden=h, queries=h, keys=h, inner=inner
        )
        self._weights: Iterator[Weights] = cycle([self.new_weights() for _ in range(sizes.copies)])
        self._tables: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self.backward_s(1)  # The first backward of a process also starts autograd's threads.

    def new_weights(self) -> Weights:
        h, inner = self._sizes.hidden, self._sizes.inner
        shapes = [(h,), (h, h), (h, h), (h, h), (h, h), (h,), (inner, h), (inner, h), (h, inner)]
        flat = compute_memory(self._device, self.shape.parameters * self._dtype.itemsize)
        flat = flat.view(self._dtype)
        parts, at = [], 0
        for shape in shapes:
            count = torch.Size(shape).numel()
            parts.append(flat[at : at + count].view(shape).normal_(std=0.02))
            at += count
        return Weights(*parts)

    def flops(self, tokens: int) -> float:
        return tokens * self.shape.flops_at(min(tokens, LONGEST_SEQUENCE))

    def forward_s(self, tokens: int) -> float:
        x, weights = self._input(tokens), next(self._weights)

        def run() -> None:
            with torch.no_grad():
                self.run(x, weights)

        return computed_s(self._device, run)

    def backward_s(self, tokens: int) -> float:
        """Return the seconds of a backward, excluding the forward before it."""
        x, weights = self._input(tokens).requires_grad_(), next(self._weights)
        leaves = [leaf.detach().requires_grad_() for leaf in weights.leaves()]
        outputs: list[torch.Tensor] = []
        computed_s(self._device, lambda: outputs.append(self.run(x, Weights(*leaves))))
        grad = torch.ones_like(outputs[0])
        return computed_s(self._device, lambda: torch.autograd.backward(outputs[0], grad))

    def _input(self, tokens: int) -> torch.Tensor:
        sequences = -(-tokens // LONGEST_SEQUENCE)
        values = torch.randn(sequences, tokens // sequences, self._sizes.hidden)
        return values.to(self._device.torch_device, self._dtype)

    def run(self, x: torch.Tensor, w: Weights) -> torch.Tensor:
        b, s, h = x.shape
        heads = self._sizes.heads
        cos, sin = self._rotation(s)

        def split(y: torch.Tensor, *, rotate: bool) -> torch.Tensor:
            y = y.view(b, s, heads, h // heads).transpose(1, 2)
            if not rotate:
                return y
            left, right = y.chunk(2, dim=-1)
            return y * cos + torch.cat((-right, left), dim=-1) * sin

        y = _normed(x, w.norm1)
        q, k = split(fn.linear(y, w.q), rotate=True), split(fn.linear(y, w.k), rotate=True)
        v = split(fn.linear(y, w.v), rotate=False)
        mixed = fn.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + fn.linear(mixed.transpose(1, 2).reshape(b, s, h), w.o)
        y = _normed(x, w.norm2)
        return x + fn.linear(fn.silu(fn.linear(y, w.gate)) * fn.linear(y, w.up), w.down)

    def _rotation(self, length: int) -> tuple[torch.Tensor, torch.Tensor]:
        if length not in self._tables:
            half = self._sizes.hidden // self._sizes.heads // 2
            rates = ROTARY_BASE ** (-torch.arange(half) / half)
            angles = torch.outer(torch.arange(length), torch.cat((rates, rates)))
            options = self._device.torch_device, self._dtype
            self._tables[length] = angles.cos().to(*options), angles.sin().to(*options)
        return self._tables[length]


def _normed(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Return the RMS norm, computed with separate operations as in most models."""
    return weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + NORM_EPSILON))


class BlockPoint:
    """The FLOP/s of a block at one number of tokens, in forward and backward.

    Backward counts as twice the work of forward.
    """

    def __init__(self, probe: BlockProbe, tokens: int) -> None:
        self.tokens, self._flops = tokens, probe.flops(tokens)
        self._forward = Figure(lambda: probe.forward_s(tokens))
        self._backward = Figure(lambda: probe.backward_s(tokens))

    def measure(self, seconds: float) -> None:
        self._forward.measure(seconds)
        self._backward.measure(seconds)

    @property
    def forward(self) -> Point:
        return float(self.tokens), self._flops / self._forward.median_s

    @property
    def backward(self) -> Point:
        return float(self.tokens), 2 * self._flops / self._backward.median_s

    def least_s(self, rate: float) -> float:
        """Return the approximate minimum seconds of a measurement.

        It consists of two forwards, and of two forwards with backward. `rate` is in FLOP/s.
        """
        return 8 * self._flops / rate


def head_flops(sizes: Sizes, tokens: int) -> float:
    """Return the FLOPs of logits, loss and both gradients of one slice of tokens."""
    return 6.0 * sizes.hidden * sizes.vocabulary * tokens


def head_figure(sizes: Sizes, tokens: int, device: Device) -> Figure:
    torch_device, dtype = device.torch_device, dtype_of(STATE_FORMATS[device.default_dtype])
    weight = torch.randn(sizes.vocabulary, sizes.hidden).mul_(0.02).to(torch_device, dtype)
    weight.requires_grad_()
    labels = torch.randint(sizes.vocabulary, (tokens,)).to(torch_device)

    def run() -> float:
        x = torch.randn(tokens, sizes.hidden).to(torch_device, dtype).requires_grad_()
        weight.grad = None

        def slice_of_tokens() -> None:
            logits = fn.linear(x, weight).float()
            fn.cross_entropy(logits, labels, reduction="sum").backward()

        return computed_s(device, slice_of_tokens)

    return Figure(run)


def adam_figure(sizes: Sizes, dtype: str) -> Figure:
    """Return a Figure that measures an AdamW update of one chunk in host memory."""
    fmt, count = STATE_FORMATS[dtype], sizes.chunk_params
    group = FlatGroup("probe", (TensorSpec("weight", (count,), 0, count, True, True),), count)
    (chunk,) = chunks(group, count)
    each = count * (fmt.weight_bytes + FLOAT) + fmt.state_size(count)
    pool = HostPool(sizes.copies * each)
    sets = []
    for _ in range(sizes.copies):
        weights = pool.allocate("weights", count * fmt.weight_bytes).tensor(dtype_of(fmt))
        grad = pool.allocate("gradient", count * FLOAT).tensor(torch.float32)
        state = pool.allocate("state", fmt.state_size(count)).tensor(torch.uint8)
        sets.append((weights.normal_(), grad.normal_(), state.zero_()))
    turns = cycle(sets)
    groups = GroupValues((AdamW(),), (1e-4,), {})
    scalars = StepScalars(groups=groups, update=1, grad_multiplier=1.0, missed_updates={})

    def run() -> float:
        weights, grad, state = next(turns)
        start = time.perf_counter()
        update_chunk(
            group,
            chunk,
            weights=weights,
            state=state,
            grad_of=lambda _: grad,
            state_format=fmt,
            scalars=scalars,
        )
        return time.perf_counter() - start

    for _ in sets:
        run()
    return Figure(run)


# -- Drives, through a store like that of a run ----------------------------------------------------
#
# The engine, the checksums and the commits are those of a run.


KEY, SMALL_KEY = "probe", "small"
IN_FLIGHT = 4  # chunks
WEIGHT_SHARE = 3  # In fp32, one chunk in three holds weights, which a step reads twice.
SMALL_BYTES = 4096
_PREFIX = "lohan-profile-"


@dataclass(frozen=True)
class Rates:
    """Rates in bytes per second. `mixed` is the sum of both directions in the pattern of a step."""

    read: float
    write: float
    mixed: float
    action_s: float  # seconds of the smallest read, from submission to completion
    commit_s: float


class DriveProbe:
    """A store of equal chunks with both generations written, and buffers for transfers."""

    def __init__(self, dirs: Sequence[Path], *, chunk_bytes: int, total_bytes: int) -> None:
        self._count = max(WEIGHT_SHARE, total_bytes // chunk_bytes)
        regions = [Region(KEY, (chunk_bytes,) * self._count), Region(SMALL_KEY, (SMALL_BYTES,))]
        # This comes first, because it checks the free space.
        self._store = Store.create(dirs, regions)
        pool = HostPool(IN_FLIGHT * chunk_bytes + SMALL_BYTES)
        self._buffers = [pool.allocate("chunks", chunk_bytes).bytes for _ in range(IN_FLIGHT)]
        self._small = pool.allocate("small chunk", SMALL_BYTES).bytes
        generator = np.random.default_rng(0)  # Drives may compress zeros, so use random bytes.
        for buffer in self._buffers:
            buffer[:] = generator.integers(0, 256, len(buffer), dtype=np.uint8)
        self.commits_s: list[float] = []
        for _ in range(2):  # The first writes to a preallocated file are slower than later ones.
            self._pass("write")
        self.commits_s.clear()

    def rate(self, kind: str, *, seconds: float) -> float:
        """Return the median bytes per second over passes, without commits.

        `kind` is "read", "write" or "mixed".
        """
        rates: list[float] = []
        stop = time.perf_counter() + seconds
        while not rates or time.perf_counter() < stop:
            rates.append(self._pass_rate(kind))
        return median(rates)

    def _pass_rate(self, kind: str) -> float:
        before, start = self._moved(), time.perf_counter()
        committing = self._pass(kind)
        return (self._moved() - before) / (time.perf_counter() - start - committing)

    def action_s(self, *, count: int = 50) -> float:
        durations = []
        for _ in range(count):
            start = time.perf_counter()
            self._store.wait(self._store.read(SMALL_KEY, 0, self._small))
            durations.append(time.perf_counter() - start)
        return median(durations)

    @contextmanager
    def busy(self, kind: str) -> Iterator[list[float]]:
        """Keep the drives busy in a thread, and yield a list to which it adds each pass's rate."""
        stop, failed, rates = threading.Event(), list[BaseException](), list[float]()

        def work() -> None:
            try:
                while not stop.is_set():
                    rates.append(self._pass_rate(kind))
            except BaseException as error:
                failed.append(error)

        thread = threading.Thread(target=work, name="drive probe", daemon=True)
        thread.start()
        try:
            yield rates
        finally:
            stop.set()
            end(thread)
        if failed:
            raise failed[0]

    def close(self) -> None:
        self._store.close()

    def _moved(self) -> int:
        return self._store.counters.bytes_read + self._store.counters.bytes_written

    def _pass(self, kind: str) -> float:
        """Run all requests in order, with IN_FLIGHT at a time; return the seconds of the commit."""
        in_flight: deque[Ticket] = deque()
        for number, (verb, index) in enumerate(requests(kind, self._count)):
            if len(in_flight) == IN_FLIGHT:
                self._store.wait(in_flight.popleft())
            submit = self._store.read if verb == "read" else self._store.write
            in_flight.append(submit(KEY, index, self._buffers[number % IN_FLIGHT]))
        for ticket in in_flight:
            self._store.wait(ticket)
        if kind == "read":
            return 0.0
        self._store.wait(self._store.write(SMALL_KEY, 0, self._small))
        start = time.perf_counter()
        self._store.commit()
        self.commits_s.append(time.perf_counter() - start)
        return self.commits_s[-1]


def requests(kind: str, count: int) -> Iterator[tuple[str, int]]:
    """Yield the requests of one pass.

    Each chunk is read or written once. In the pattern of a step ("mixed"), all chunks are read and
    written, and chunks with weights are read twice.
    """
    for index in range(count):
        if kind in ("read", "mixed"):
            yield "read", index
        if kind == "mixed" and index % WEIGHT_SHARE == 0:
            yield "read", (index + count // 2) % count
        if kind in ("write", "mixed"):
            yield "write", index


@contextmanager
def opened(
    dirs: Sequence[Path], *, total_bytes: int, chunk_bytes: int = 16 * MiB
) -> Iterator[DriveProbe]:
    """Open a probe in new folders inside `dirs`, which are removed afterwards."""
    with ExitStack() as stack:
        folders = []
        for path in dirs:
            if not path.is_dir():
                raise ConfigError(f"--ssd {path}: no such folder; create it or choose another")
            try:
                folder = tempfile.TemporaryDirectory(prefix=_PREFIX, dir=path)
            except OSError as error:
                raise ConfigError(
                    f"--ssd {path}: cannot be written to: {error.strerror}; choose another"
                ) from None
            folders.append(Path(stack.enter_context(folder)))
        probe = DriveProbe(folders, chunk_bytes=chunk_bytes, total_bytes=total_bytes)
        stack.callback(probe.close)
        yield probe


def rates(probe: DriveProbe, *, seconds: float) -> Rates:
    read = probe.rate("read", seconds=seconds)
    write = probe.rate("write", seconds=seconds)
    mixed = probe.rate("mixed", seconds=seconds)
    return Rates(read, write, mixed, probe.action_s(), median(probe.commits_s))


# -- Links to a device, through the device's own copies and host memory ----------------------------


LEAST_LINK_BYTES = 4096  # the smallest copy that is measured


def link_rates(device: Device, *, size: int, seconds: float) -> tuple[float, float]:
    """Return the bytes per second to the device and from it, each direction alone."""
    size = max(LEAST_LINK_BYTES, size)
    on_device = device.allocate(size)
    host = torch.from_numpy(device.host_memory(size))
    host.zero_()

    def taken_s(lane: str) -> float:
        pairs = [(on_device, host)] if lane == "h2d" else [(host, on_device)]
        start = time.perf_counter()
        device.copy(lane, pairs).synchronize()
        return time.perf_counter() - start

    to_device = size / repeated(lambda: taken_s("h2d"), seconds=seconds)
    return to_device, size / repeated(lambda: taken_s("d2h"), seconds=seconds)


@contextmanager
def busy_links(device: Device, *, size: int) -> Iterator[Callable[[], int]]:
    """Keep both directions of the link busy with copies of `size` bytes, a thread each.

    The context provides a function that returns the bytes copied so far.
    """
    stop, failed, moved = threading.Event(), list[BaseException](), {"h2d": 0, "d2h": 0}
    buffers = {lane: device.allocate(size) for lane in moved}
    hosts = {lane: torch.from_numpy(device.host_memory(size)).zero_() for lane in moved}

    def work(lane: str) -> None:
        try:
            device.enter(lane)
            pair = (buffers[lane], hosts[lane]) if lane == "h2d" else (hosts[lane], buffers[lane])
            while not stop.is_set():
                device.copy(lane, [pair]).synchronize()
                moved[lane] += size
        except BaseException as error:
            failed.append(error)

    threads = [
        threading.Thread(target=work, args=(lane,), name=f"{lane} probe", daemon=True)
        for lane in moved
    ]
    for thread in threads:
        thread.start()
    try:
        yield lambda: sum(moved.values())
    finally:
        stop.set()
        for thread in threads:
            end(thread)
    if failed:
        raise failed[0]


def under_load(device: Device, sizes: Sizes, *, size: int, seconds: float) -> tuple[Point, Point]:
    """Return the bytes per second that copies and updates move through main memory.

    Each pair has the rate of copies, then that of updates. The first pair was measured with one of
    the two running alone, before and after the second pair to compensate for drift. The second pair
    was measured with both running at the same time. `sizes` and `size` are those of the update and
    of the copies.
    """
    fmt = STATE_FORMATS[device.default_dtype]
    layout = BytesPerParameter(weight=fmt.weight_bytes, state=fmt.state_bytes, gradient=FLOAT)
    update_bytes = sizes.chunk_params * bus_bytes(layout)[Op.UPDATE]
    update = adam_figure(sizes, device.default_dtype)

    def updates() -> float:
        return update_bytes / repeated(update.run, seconds=seconds)

    def links(run: Callable[[], object]) -> float:
        before, start_s = moved(), time.perf_counter()
        run()
        return (moved() - before) / (time.perf_counter() - start_s)

    updates_alone = [updates()]
    with busy_links(device, size=size) as moved:
        links_alone = [links(lambda: time.sleep(seconds))]
        shared: list[float] = []
        links_shared = links(lambda: shared.append(updates()))
        links_alone.append(links(lambda: time.sleep(seconds)))
    updates_alone.append(updates())
    alone = sum(links_alone) / 2, sum(updates_alone) / 2
    return alone, (links_shared, shared[0])


def bus_rate(copied: float, alone: Point, shared: Point) -> float:
    """Return the bytes per second of main memory.

    `alone` and `shared` are the pairs that `under_load` returns, and `copied` is the rate of a
    plain copy. If copies or updates are slower in `shared`, memory was at its limit, and the rate
    is the sum of `shared`. Otherwise the rate is at least that sum, and at least `copied`.
    """
    total = sum(shared)
    slower = any(now < UNLIMITED_SHARE * before for before, now in zip(alone, shared, strict=True))
    return total if slower and total else max(copied, total)


# -- The profile of this machine -------------------------------------------------------------------
#
# Rates are measured through the store, the device and the optimizer that a run uses. On the CPU
# there is no link to measure, and device memory is host memory.


# A callback that gets the name of the measurement, the number of finished ones, and the total.
Progress = Callable[[str, int, int], None]
COMPUTE_ROUNDS = 3  # measurements of every compute figure, spread over time
# Concurrent work counts as limited if its speed falls below this share of its speed alone.
UNLIMITED_SHARE = 0.95


def memory_rate(size: int, seconds: float) -> float:
    """Return the bytes per second of main memory, read and written by a copy with all threads."""
    source, target = torch.zeros(size, dtype=torch.uint8), torch.ones(size, dtype=torch.uint8)

    def run() -> float:
        start = time.perf_counter()
        target.copy_(source)
        return time.perf_counter() - start

    return 2 * size / repeated(run, seconds=seconds)


def device_memory_rate(device: Device, size: int, seconds: float) -> float:
    """Return the bytes per second of the memory that compute uses, read and written.

    It is measured with large in-place additions of two fp32 tensors of `size` bytes each.
    """
    size = max(LEAST_LINK_BYTES, size // FLOAT * FLOAT)
    total, part = (compute_memory(device, size).view(torch.float32).zero_() for _ in range(2))
    return (
        3 * size / repeated(lambda: computed_s(device, lambda: total.add_(part)), seconds=seconds)
    )


def compute_memory(device: Device, count: int) -> torch.Tensor:
    """Return a buffer of `count` bytes in the memory that compute uses."""
    if device.has_own_memory:
        return device.allocate(count)
    return device.compute_view(torch.from_numpy(device.host_memory(count)))


def silent(task: str, done: int, total: int) -> None:
    pass


@dataclass(frozen=True)
class Effort:
    """The duration and size of the measurements; the default takes under a minute for one drive."""

    sizes: Sizes = field(default_factory=Sizes)
    tokens: tuple[int, ...] = (16, 64, 256, 1024, 4096)
    head_tokens: int = 256
    # Tokens of a block that is measured together with the drives. They are few, because a block
    # with many tokens computes for a long time and there would be little I/O.
    shared_tokens: int = 64
    shared_seconds: float = 1.0
    shared_bytes: int = 64 * MiB  # in each of the store's two disk slots
    seconds: float = 0.4  # at least, for each measurement that has no field here
    compute_seconds: float = 25.0  # in total; a point that would exceed it is left out
    drive_seconds: float = 2.0  # for each figure of a drive; less if there are many drives
    all_drives_seconds: float = 24.0
    drive_bytes: int = 512 * MiB  # in each of the store's two disk slots
    chunk_bytes: int = 16 * MiB
    link_bytes: int = 256 * MiB  # of one copy; less if the device has little memory


# A large card finishes a block with a thousand features before the next one is launched, so the
# measurement would show the speed of Python. A block with the width of a 7B model shows the speed
# of the card.
WIDE, WIDE_FROM = Sizes(hidden=4096, inner=11008, heads=32, vocabulary=32000, copies=2), 6 * GiB


def effort_for(device: Device, model: ModelShape | None = None) -> Effort:
    """Return the effort for blocks with the width of the model's blocks.

    Without a model, the width is typical of the models that are trained on such a device.
    """
    if model is not None:
        return Effort(sizes=_fitting(Sizes.of(model), device, model.name))
    wide = device.torch_device.type != "cpu" and device.memory_bytes() >= WIDE_FROM
    return Effort(sizes=WIDE) if wide else Effort()


def _fitting(sizes: Sizes, device: Device, name: str) -> Sizes:
    """Return the sizes with one copy of the weights if several would not fit.

    Weights and gradients may use half of the memory of the compute device.
    """
    memory = device.memory_bytes() if device.has_own_memory else host_memory_bytes()
    h, width = sizes.hidden, dtype_of(STATE_FORMATS[device.default_dtype]).itemsize
    block = (4 * h * h + 3 * h * sizes.inner) * width
    if (sizes.copies + 1) * block <= memory // 2:
        return sizes
    if 2 * block > memory // 2:
        raise ConfigError(
            f"--model {name}: one of its blocks takes, with its gradients, "
            f"{format_bytes(2 * block)}, more than half of {format_bytes(memory)} that "
            f"{device.name} has; leave --model out to measure a smaller block"
        )
    return replace(sizes, copies=1)


def profile(
    ssd: Sequence[Path],
    *,
    progress: Progress = silent,
    effort: Effort | None = None,
    device: Device | None = None,
    model: ModelShape | None = None,
) -> Profile:
    """Measure this machine, with these folders as its drives, and return its profile.

    Compute is measured on `device`. The measurement takes about a minute for one drive. With
    `model`, the measured blocks are as wide as those of the model.
    """
    device = device or CpuDevice()
    effort = effort or effort_for(device, model)
    host_bytes, device_bytes = host_memory_bytes(), device.memory_bytes()
    drives, joint, drive_rates = _drives(ssd, effort, progress)
    own_memory = device.has_own_memory
    h2d, d2h = _links(device, effort, progress) if own_memory else (0.0, 0.0)
    host_rate = _bus(device, effort, progress) if own_memory else 0.0
    probe = BlockProbe(effort.sizes, device)
    computed = _compute(probe, effort, device, progress)
    launch_s = (0.0, 0.0)
    if ssd and device.torch_device.type != "cpu":
        progress("launches", 0, 1)
        launch_s = launch_seconds(device, ssd[0])
        progress("launches", 1, 1)
    # Compute and I/O use the same cores.
    shared = bool(ssd) and not own_memory and device.computes_on_cores
    contention = _contention(ssd, probe, effort, progress) if shared else (0.0, 0.0)
    return Profile(
        name=platform.node() or "this machine",
        device=device.name,
        device_bytes=device_bytes,
        unified=not own_memory and not device.computes_on_cores,
        compute=computed.forward,
        backward=computed.backward,
        head_flops=computed.head_flops,
        block_width=effort.sizes.hidden,
        device_rate=computed.device_rate,
        forward_launch_s=launch_s[0],
        backward_launch_s=launch_s[1],
        h2d=h2d,
        d2h=d2h,
        host_bytes=host_bytes,
        adam=computed.adam,
        host_rate=host_rate,
        cores=float(_core.threads()),
        drives=drives,
        ssd_limit=joint,
        io_share=contention[0],
        compute_share=contention[1],
        action_s=max((each.action_s for each in drive_rates), default=0.0),
        commit_s=max((each.commit_s for each in drive_rates), default=0.0),
    )


def free_bytes(path: Path) -> int:
    return shutil.disk_usage(path).free


def _drives(
    ssd: Sequence[Path], effort: Effort, progress: Progress
) -> tuple[tuple[Drive, ...], float, list[Rates]]:
    """Measure the drives one by one, and then their common limit, which is 0 if there is none."""
    seconds = min(effort.drive_seconds, effort.all_drives_seconds / (3 * max(1, len(ssd))))
    sizes = {"total_bytes": effort.drive_bytes, "chunk_bytes": effort.chunk_bytes}
    total = len(ssd) + (len(ssd) > 1)
    drive_rates: list[Rates] = []
    for number, path in enumerate(ssd):
        progress("drives", number, total)
        with opened([path], **sizes) as probe:
            drive_rates.append(rates(probe, seconds=seconds))
    drives = tuple(
        Drive(
            name=str(path),
            read=each.read,
            write=each.write,
            mixed=each.mixed,
            bytes=free_bytes(path),
        )
        for path, each in zip(ssd, drive_rates, strict=True)
    )
    joint = 0.0
    if len(ssd) > 1:
        progress("drives", len(ssd), total)
        with opened(ssd, **sizes) as probe:
            joint = probe.rate("mixed", seconds=seconds)
        if joint >= UNLIMITED_SHARE * sum(each.mixed for each in drive_rates):
            joint = 0.0
    if total:
        progress("drives", total, total)
    return drives, joint, drive_rates


def _links(device: Device, effort: Effort, progress: Progress) -> tuple[float, float]:
    progress("links", 0, 1)
    rates = link_rates(device, size=_link_size(device, effort), seconds=effort.seconds)
    progress("links", 1, 1)
    return rates


def _link_size(device: Device, effort: Effort) -> int:
    """Return the bytes of one copy or pass; fewer if the device has little memory."""
    if not device.has_own_memory:
        return effort.link_bytes
    return min(effort.link_bytes, device.memory_bytes() // 4)


def _bus(device: Device, effort: Effort, progress: Progress) -> float:
    task = "main memory under load"
    progress(task, 0, 1)
    size = _link_size(device, effort) // 2  # bytes in each direction
    copied = memory_rate(effort.link_bytes, effort.seconds)
    moved = under_load(device, effort.sizes, size=size, seconds=effort.seconds)
    progress(task, 1, 1)
    return bus_rate(copied, *moved)


@dataclass(frozen=True)
class _Computed:
    forward: tuple[Point, ...]
    backward: tuple[Point, ...]
    head_flops: float
    adam: float
    device_rate: float


def _compute(probe: BlockProbe, effort: Effort, device: Device, progress: Progress) -> _Computed:
    """Measure all compute figures in several rounds, as far as time permits.

    Points that take long are measured only once.
    """
    sizes, tokens = effort.sizes, effort.tokens
    stop = time.perf_counter() + effort.compute_seconds
    points = [BlockPoint(probe, count) for count in tokens]
    head = head_figure(sizes, effort.head_tokens, device)
    update = adam_figure(sizes, device.default_dtype)
    measured: list[BlockPoint] = []
    too_large: list[BlockPoint] = []  # points that do not fit into the device's memory
    task, total = "blocks, head and optimizer", COMPUTE_ROUNDS * len(points)
    for number, point in enumerate(COMPUTE_ROUNDS * points):
        progress(task, number, total)
        if point is points[0]:
            head.measure(effort.seconds)
            update.measure(effort.seconds)
        elif time.perf_counter() + point.least_s(measured[-1].backward[1]) > stop:
            continue
        if point in too_large:
            continue
        try:
            point.measure(effort.seconds)
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise
            if not measured:
                raise LohanError(
                    f"profile: a block of {counted(point.tokens, 'token')} does not "
                    f"fit into {format_bytes(device.memory_bytes())} of device memory; raise "
                    "--device-memory"
                ) from error
            too_large += points[points.index(point) :]
            measured = [one for one in measured if one not in too_large]
            device.release_cached_memory()
            continue
        if point not in measured:
            measured.append(point)
    progress(task, total, total)
    return _Computed(
        forward=tuple(point.forward for point in measured),
        backward=tuple(point.backward for point in measured),
        head_flops=head_flops(sizes, effort.head_tokens) / head.median_s,
        adam=sizes.chunk_params / update.median_s,
        device_rate=device_memory_rate(device, _link_size(device, effort) // 2, effort.seconds),
    )


class _ProbedBlock(nn.Module):
    """The decoder block of a probe, as a module that a session can train."""

    def __init__(self, probe: BlockProbe) -> None:
        super().__init__()
        self._probe = probe
        weights = probe.new_weights().leaves()
        self.weights = nn.ParameterList(nn.Parameter(weight.cpu()) for weight in weights)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self._probe.run(x, Weights(*self.weights))


# The compute of this block takes almost no time.
LAUNCHED = Sizes(hidden=64, inner=128, heads=2, copies=1)
LAUNCHED_BLOCKS, LAUNCHED_STEPS = 4, 12


def launch_seconds(device: Device, folder: Path) -> tuple[float, float]:
    """Return the seconds of the launching thread per slice of a block, forward and backward.

    A session trains small decoder blocks, because its own work on that thread is part of the cost.
    Only the CPU time of this thread counts, and autograd runs backward on it.
    """
    from lohan.engine.attach import attach
    from lohan.engine.policies import Budget

    probe = BlockProbe(LAUNCHED, device)
    model = nn.Sequential(*(_ProbedBlock(probe) for _ in range(LAUNCHED_BLOCKS)))
    x = torch.randn(1, 16, LAUNCHED.hidden, dtype=next(model.parameters()).dtype)
    forward_s, backward_s = [], []
    with (
        tempfile.TemporaryDirectory(prefix="lohan-profile-", dir=folder) as ssd,
        attach(
            model,
            optimizer=AdamW(lr=1e-4),
            device=device,
            budget=Budget(host="256MiB", ssd=[ssd]),
        ) as session,
        torch.autograd.set_multithreading_enabled(False),
    ):
        for _ in range(LAUNCHED_STEPS):
            start_s = time.thread_time()
            loss = model(x).square().mean()
            turn_s = time.thread_time()
            loss.backward()
            end_s = time.thread_time()
            forward_s.append((turn_s - start_s) / LAUNCHED_BLOCKS)
            backward_s.append((end_s - turn_s) / LAUNCHED_BLOCKS)
            session.flush()
    return median(forward_s), median(backward_s)


def _contention(
    ssd: Sequence[Path], probe: BlockProbe, effort: Effort, progress: Progress
) -> tuple[float, float]:
    """Return the share of its speed that compute loses to I/O, and that I/O loses to compute.

    Each is measured alone before and after, to compensate for drift. Compute is forward and
    backward together.
    """
    task, tokens = "compute and drives together", effort.shared_tokens
    progress(task, 0, 1)

    def taken_s() -> float:
        run = lambda: probe.forward_s(tokens) + probe.backward_s(tokens)  # noqa: E731
        return repeated(run, seconds=effort.shared_seconds)

    with opened(ssd, total_bytes=effort.shared_bytes, chunk_bytes=effort.chunk_bytes) as drives:

        def alone() -> tuple[float, float]:
            return taken_s(), drives.rate("mixed", seconds=effort.shared_seconds)

        before = alone()
        with drives.busy("mixed") as rates:
            shared_s = taken_s()
            seen = rates[1:]  # The first pass began before compute did.
        after = alone()
    progress(task, 1, 1)
    alone_s, alone_rate = ((x + y) / 2 for x, y in zip(before, after, strict=True))
    # Drives that complete no pass in this time lose nothing to compute.
    rate = median(seen) if seen else alone_rate
    return max(0.0, 1.0 - alone_s / shared_s), max(0.0, 1.0 - rate / alone_rate)
