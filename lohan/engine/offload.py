"""Activation offload: the activations of a site leave memory after forward and return for backward.

    ActivationSpill           host memory -> SSD
    DeviceActivationOffload   device -> host memory and, through an ActivationSpill, on to SSD

Only inputs that take a gradient (masks and positions are shared by all blocks) and the results of
the save plan are offloaded. The inputs, or the results of one slice, are packed into one buffer.
There is room for one call of each site. If a site is called again before backward, the activations
of the second call stay in memory.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from lohan.capture.recompute import ActivationHooks
from lohan.capture.saved_call import SavedCall
from lohan.capture.selective_checkpoint import Layout, is_dense
from lohan.device.base import Device, Event
from lohan.engine.buffers import HostPool
from lohan.errors import LohanError, StoreError
from lohan.model.workload import OFFLOAD_ALIGN
from lohan.store.extents import Region
from lohan.store.store import Status, Store
from lohan.store.transfers import Counters, Ticket
from lohan.util.units import PAGE, MiB, align_up

# size in bytes of one transfer; transfers are spread over the directories
TRANSFER_BYTES = 16 * MiB
SLICE_BUFFERS = 2  # slices of a site that have a buffer on the device


@dataclass(frozen=True)
class Pack:
    """The layout of tensors packed side by side, and their offset in the memory of a site."""

    start: int
    size: int
    parts: tuple[tuple[int, Layout], ...]

    @classmethod
    def of(cls, tensors: Sequence[torch.Tensor], start: int) -> Pack:
        at, parts = 0, []
        for tensor in tensors:
            parts.append((at, Layout.of(tensor if is_dense(tensor) else tensor.contiguous())))
            at += align_up(tensor.numel() * tensor.itemsize, OFFLOAD_ALIGN)
        return cls(start, at, tuple(parts))

    def fits(self, tensors: Sequence[torch.Tensor], start: int) -> bool:
        """Return whether the pack begins at `start` and has the layouts of these tensors."""
        return (
            start == self.start
            and len(tensors) == len(self.parts)
            and all(layout.fits(t) for (_, layout), t in zip(self.parts, tensors, strict=True))
        )

    def tensors_in(self, memory: torch.Tensor) -> list[torch.Tensor]:
        """Return views of the memory of the pack as its tensors."""
        tensors = []
        for at, layout in self.parts:
            size = layout.shape.numel() * layout.dtype.itemsize
            flat = memory[at : at + size].view(layout.dtype)
            tensors.append(flat.as_strided(layout.shape, layout.stride, flat.storage_offset()))
        return tensors

    def fill(self, memory: torch.Tensor, tensors: Sequence[torch.Tensor]) -> None:
        for target, tensor in zip(self.tensors_in(memory), tensors, strict=True):
            target.copy_(tensor)

    def part_of(self, memory: torch.Tensor) -> torch.Tensor:
        """Return the part of the memory of a site that the pack occupies."""
        return memory[self.start : self.start + self.size]


# -- From host memory to SSD -----------------------------------------------------------------------


@dataclass
class _Spilled:
    """A call whose activations are on SSD: the pack of its inputs, then the packs of its slices."""

    call: weakref.ref[SavedCall]
    packs: list[Pack]


class ActivationSpill(ActivationHooks):
    """Kept activations on SSD, and the host buffers for their transfers.

    The space on SSD is a separate store with scratch regions only, created with the buffers of a
    plan and removed with them. `sizes` are bytes by site number.
    """

    def __init__(
        self,
        dirs: Sequence[Path],
        pool: HostPool,
        sizes: Mapping[int, int],
        *,
        buffers: int,
    ) -> None:
        self.sizes = {site: align_up(size, PAGE) for site, size in sizes.items()}
        largest = max(self.sizes.values())
        self._buffers = [
            pool.allocate("activation buffers", largest, for_device=True) for _ in range(buffers)
        ]
        # Every store must have a durable region, although nothing is written to this one.
        regions = [Region("nothing", (PAGE,))]
        regions += [Region(_key(s), _transfers(n), scratch=True) for s, n in self.sizes.items()]
        self._store = Store.create(dirs, regions, durability="checkpoint", engine="auto")
        self._dirs = dirs
        self._compute_view = pool.compute_view
        self._new: dict[int, SavedCall] = {}  # calls that have run and are not written yet
        self._spilled: dict[int, _Spilled] = {}
        self._used: dict[int, int] = {}  # bytes on SSD, by site number
        self._from_device: set[int] = set()  # sites whose activations were packed on a device
        self.moved_bytes = 0

    @property
    def counters(self) -> Counters:
        return self._store.counters

    def close(self) -> None:
        self._store.close()  # This also removes the files, because the store was never committed.

    # -- the caller's side ------------------------------------------------------------------------

    def forward_done(self, site: int, call: SavedCall) -> None:
        spilled = self._spilled.get(site)
        other = spilled.call() if spilled is not None else None
        if site not in self.sizes or site in self._new or (other is not None and other.evicted):
            return
        if sum(pack.size for pack in _packs(_saved(call))) <= self.sizes[site]:
            self._new[site] = call

    def load_inputs(self, site: int, call: SavedCall, buffers: Sequence[int]) -> None:
        """Restore all activations from the buffer that the backward action names."""
        if not call.evicted:
            return
        memory = self._compute_view(self.buffer(buffers[0]))
        inputs, *slices = self._spilled[site].packs
        call.restore_inputs(inputs.tensors_in(inputs.part_of(memory)))
        for saved, pack in zip(call.saved_ops, slices, strict=True):
            if saved is not None:
                saved.adopt(pack.tensors_in(pack.part_of(memory)) if saved.count else [])

    # -- activations that were packed on a device -------------------------------------------------

    def buffer(self, number: int) -> torch.Tensor:
        return self._buffers[number].tensor(torch.uint8)

    def filled(self, site: int, used: int) -> None:
        """Record that `used` bytes of a site were copied from a device into the buffer of its O."""
        self._from_device.add(site)
        self._used[site] = align_up(used, PAGE)
        self.moved_bytes += used

    # -- the ssd lane ------------------------------------------------------------------------------

    def write(self, site: int, buffer: int) -> Iterator[Ticket]:
        """Run O: pack a site's activations, submit their writes, and yield the tickets.

        Nothing is written if the site has not run.
        """
        call = self._new.get(site)
        if call is not None:
            saved, memory = _saved(call), self.buffer(buffer)
            packs = _packs(saved)
            for pack, tensors in zip(packs, saved, strict=True):
                pack.fill(pack.part_of(memory), tensors)
            self._spilled[site] = _Spilled(weakref.ref(call), packs)
            used = sum(pack.size for pack in packs)
            self._used[site] = align_up(used, PAGE)
            self.moved_bytes += used
        elif site not in self._from_device:
            return
        for chunk, start, stop in self._used_transfers(site):
            yield self._store.write(_key(site), chunk, self._buffers[buffer].bytes[start:stop])

    def written(self, site: int) -> None:
        """Complete O: free the activations that are on SSD."""
        call = self._new.pop(site, None)
        if call is not None:
            call.evict_inputs()
            for saved in call.saved_ops:
                if saved is not None:
                    saved.hand_over()

    def read(self, site: int, buffer: int) -> Iterator[Ticket]:
        """Run I: submit reads of what `write` has written, and yield the tickets.

        Nothing is read if no call still needs the activations.
        """
        spilled = self._spilled.get(site)
        if site in self._from_device or (spilled is not None and spilled.call() is not None):
            for chunk, start, stop in self._used_transfers(site):
                yield self._store.read(_key(site), chunk, self._buffers[buffer].bytes[start:stop])

    def wait(self, tickets: Sequence[Ticket]) -> None:
        self._store.wait_all(tickets)

    def discard_in_flight(self) -> None:
        """Wait until no I/O uses the buffers, after an error; raise StoreError if that fails."""
        self._store.discard()
        if self._store.health.status is Status.FAILED:
            raise StoreError(
                f"{self._dirs[0]}: activations in flight to or from SSD did not come back;"
                " check the drive"
            )

    def forget(self) -> None:
        self._new.clear()
        self._spilled.clear()
        self._from_device.clear()

    def _used_transfers(self, site: int) -> Iterator[tuple[int, int, int]]:
        """Yield the transfers that contain data: number, first and last byte."""
        start = 0
        for chunk, size in enumerate(_transfers(self.sizes[site])):
            if start < self._used[site]:
                yield chunk, start, start + size
            start += size


def _saved(call: SavedCall) -> list[list[torch.Tensor]]:
    """Return the tensors of a call that can be offloaded: its inputs, then each slice's results."""
    return [call.grad_inputs, *([] if saved is None else saved.tensors for saved in call.saved_ops)]


def _packs(saved: Sequence[Sequence[torch.Tensor]]) -> list[Pack]:
    packs: list[Pack] = []
    for tensors in saved:
        packs.append(Pack.of(tensors, packs[-1].start + packs[-1].size if packs else 0))
    return packs


def _transfers(size: int) -> tuple[int, ...]:
    return tuple(min(TRANSFER_BYTES, size - start) for start in range(0, size, TRANSFER_BYTES))


def _key(site: int) -> str:
    return f"a/{site}"


# -- From the device to host memory ----------------------------------------------------------------
#
# On the device, activations pass through buffers that the schedule names. Compute packs them there,
# and they are copied from there, so that the memory from torch's allocator is free immediately.
# Inputs are copied as a whole. Kept results are copied slice by slice through two buffers, while
# the block still computes the other slices, so that the device never holds those of a whole batch.
#
# Note [slices inside an action] The schedule's K and V stand for all slices of a site. Copies of
# slices are enqueued while F and B run, after the compute that produces them or frees their buffer.
# K waits for the last copy, and V copies the first two slices. The host buffer and the device
# buffer belong to the site from the beginning of F to the end of K, and from V to the end of B.


@dataclass
class OffloadedCall:
    """A call whose activations are offloaded from the device."""

    call: weakref.ref[SavedCall]
    # keeps the call alive until its activations are copied, even if the graph is freed
    held: SavedCall | None
    device_buffer: int
    host_buffer: int | None  # the buffer through which the activations are spilled to SSD
    inputs: Pack
    slices: list[Pack | None] = field(default_factory=list)
    used: int = 0  # bytes of host memory used so far
    last: Event | None = None
    # the latest copy to or from each slice buffer
    copies: dict[int, Event] = field(default_factory=dict)
    evicted: bool = False


class DeviceActivationOffload(ActivationHooks):
    """The owner of activation buffers on the device, and of host memory for them.

    Host memory holds the activations that are not spilled to SSD.
    """

    def __init__(
        self,
        device: Device,
        *,
        sites: frozenset[int],
        device_buffers: int,
        spill: ActivationSpill | None,
    ) -> None:
        self._device, self._sites, self._spill = device, sites, spill
        self._input_buffers: list[torch.Tensor | None] = [None] * device_buffers
        self._slice_buffers: list[torch.Tensor | None] = [None] * (device_buffers * SLICE_BUFFERS)
        # Keys are (site, slice + 1); 0 stands for the inputs.
        self._host: dict[tuple[int, int], torch.Tensor] = {}
        self._calls: dict[int, OffloadedCall] = {}
        # Keys are (site, slice); slice -1 stands for the inputs.
        self._packs: dict[tuple[int, int], Pack] = {}
        # Keys are (pack, address of the buffer).
        self._views: dict[Any, tuple[torch.Tensor, list[torch.Tensor]]] = {}

    # -- forward, the caller's side ---------------------------------------------------------------

    def save_inputs(self, site: int, call: SavedCall, buffers: Sequence[int]) -> None:
        before, inputs = self._calls.get(site), call.grad_inputs
        in_use = before is not None and (before.held is not None or before.call() is not None)
        if site not in self._sites or in_use or not inputs:
            return
        *host_buffer, device_buffer = buffers
        pack = self._pack(site, -1, inputs, 0)
        offloaded = OffloadedCall(
            weakref.ref(call), call, device_buffer, host_buffer[0] if host_buffer else None, pack
        )
        if self._fits(site, offloaded, pack):
            self._calls[site] = offloaded
            self._send(site, offloaded, pack, inputs, self._input_buffer(device_buffer, pack.size))

    def save_slice(self, site: int, call: SavedCall) -> None:
        offloaded = self._offloaded_call(site, call)
        if offloaded is None:
            return
        saved, number, buffer = (
            call.saved_ops[-1],
            len(offloaded.slices),
            len(offloaded.slices) % SLICE_BUFFERS,
        )
        tensors = saved.hand_over() if saved is not None else []
        pack = self._pack(site, number, tensors, offloaded.used)
        if not tensors or not self._fits(site, offloaded, pack):
            if tensors:
                saved.release("there was no room for them in host memory")
            offloaded.slices.append(None)
            return
        offloaded.slices.append(pack)
        if number >= SLICE_BUFFERS and buffer in offloaded.copies:
            self._device.wait(offloaded.copies[buffer])
        target = self._slice_buffer(offloaded.device_buffer, buffer, pack.size)
        offloaded.copies[buffer] = self._send(site, offloaded, pack, tensors, target)

    def _send(
        self,
        site: int,
        offloaded: OffloadedCall,
        pack: Pack,
        tensors: Sequence[torch.Tensor],
        target: torch.Tensor,
    ) -> Event:
        offloaded.used += pack.size
        for packed, tensor in zip(self._tensors_in(pack, target), tensors, strict=True):
            packed.copy_(tensor)
        pairs = [(self._host_memory(site, offloaded, pack), target[: pack.size])]
        offloaded.last = self._device.copy("d2h", pairs, after=self._device.mark())
        return offloaded.last

    # -- the lanes h2d and d2h ---------------------------------------------------------------------

    def evict(self, site: int) -> None:
        """Complete K: wait until all activations are in host memory; then free the originals."""
        offloaded = self._calls.get(site)
        if (
            offloaded is None
            or offloaded.evicted
            or offloaded.last is None
            or offloaded.held is None
        ):
            return
        offloaded.last.synchronize()
        offloaded.held.evict_inputs()
        if self._spill is not None and offloaded.host_buffer is not None:
            self._spill.filled(site, offloaded.used)
        offloaded.held, offloaded.evicted = None, True
        offloaded.copies.clear()

    def bring_back(self, site: int, buffers: Sequence[int]) -> None:
        """Run V: copy the inputs and the first slices to the device, and wait."""
        offloaded = self._calls.get(site)
        if offloaded is None or not offloaded.evicted or offloaded.call() is None:
            return
        *host_buffer, offloaded.device_buffer = buffers
        offloaded.host_buffer = host_buffer[0] if host_buffer else None
        target = self._input_buffer(offloaded.device_buffer, offloaded.inputs.size)
        pairs = [
            (target[: offloaded.inputs.size], self._host_memory(site, offloaded, offloaded.inputs))
        ]
        for buffer, pack in enumerate(offloaded.slices[:SLICE_BUFFERS]):
            if pack is not None:
                target = self._slice_buffer(offloaded.device_buffer, buffer, pack.size)
                pairs.append((target[: pack.size], self._host_memory(site, offloaded, pack)))
        self._device.copy("h2d", pairs).synchronize()

    # -- backward, the caller's side --------------------------------------------------------------

    def load_inputs(self, site: int, call: SavedCall, buffers: Sequence[int]) -> None:
        offloaded = self._offloaded_call(site, call)
        if offloaded is not None:
            source = self._input_buffers[offloaded.device_buffer]
            assert (
                source is not None and offloaded.evicted and offloaded.device_buffer == buffers[-1]
            )
            call.restore_inputs(self._tensors_in(offloaded.inputs, source))

    def load_slice(self, site: int, call: SavedCall, number: int) -> None:
        offloaded = self._offloaded_call(site, call)
        pack = offloaded.slices[number] if offloaded is not None else None
        if offloaded is None or pack is None:
            return
        if number >= SLICE_BUFFERS:
            self._device.wait(offloaded.copies[number % SLICE_BUFFERS])
        source = self._slice_buffers[
            offloaded.device_buffer * SLICE_BUFFERS + number % SLICE_BUFFERS
        ]
        assert source is not None
        call.saved_ops[number].adopt(self._tensors_in(pack, source))

    def release_slice(self, site: int, call: SavedCall, number: int) -> None:
        """Load the next slice but one into this buffer, after compute has used this slice."""
        offloaded, following = self._offloaded_call(site, call), number + SLICE_BUFFERS
        pack = (
            offloaded.slices[following] if offloaded and following < len(offloaded.slices) else None
        )
        if offloaded is None or pack is None:
            return
        buffer = number % SLICE_BUFFERS
        target = self._slice_buffer(offloaded.device_buffer, buffer, pack.size)
        offloaded.copies[buffer] = self._device.copy(
            "slices",
            [(target[: pack.size], self._host_memory(site, offloaded, pack))],
            after=self._device.mark(),
        )

    def release(self, site: int, call: SavedCall) -> None:
        if self._offloaded_call(site, call) is not None:
            del self._calls[site]

    def forget(self) -> None:
        """Discard all calls after an error.

        The lanes are idle, but copies that they enqueued may still be running.
        """
        for offloaded in self._calls.values():
            for event in (offloaded.last, *offloaded.copies.values()):
                with suppress(LohanError, RuntimeError):
                    if event is not None:
                        event.synchronize()
        self._calls.clear()

    def _offloaded_call(self, site: int, call: SavedCall) -> OffloadedCall | None:
        offloaded = self._calls.get(site)
        return offloaded if offloaded is not None and offloaded.call() is call else None

    # -- buffers; since shapes repeat, they do not grow after the first steps ----------------------

    def _pack(self, site: int, number: int, tensors: Sequence[torch.Tensor], start: int) -> Pack:
        """Return a pack for these tensors, reusing that of the previous step if it fits."""
        pack = self._packs.get((site, number))
        if pack is None or not pack.fits(tensors, start):
            pack = self._packs[site, number] = Pack.of(tensors, start)
        return pack

    def _tensors_in(self, pack: Pack, buffer: torch.Tensor) -> list[torch.Tensor]:
        """Return views of a buffer as the tensors of a pack."""
        key = pack.parts, buffer.data_ptr()
        cached = self._views.get(key)
        if cached is None or cached[0] is not buffer:
            cached = self._views[key] = buffer, pack.tensors_in(buffer)
        return cached[1]

    def _input_buffer(self, device_buffer: int, size: int) -> torch.Tensor:
        return self._grown(self._input_buffers, device_buffer, size)

    def _slice_buffer(self, device_buffer: int, buffer: int, size: int) -> torch.Tensor:
        return self._grown(self._slice_buffers, device_buffer * SLICE_BUFFERS + buffer, size)

    def _grown(self, buffers: list[torch.Tensor | None], number: int, size: int) -> torch.Tensor:
        buffer = buffers[number]
        if buffer is None or len(buffer) < size:
            # Remove views of the old buffer first, so that its memory is free for the new one. The
            # launching thread may add views at the same time, so iterate over a copy and change the
            # dict in place.
            for key in [key for key, view in list(self._views.items()) if view[0] is buffer]:
                self._views.pop(key, None)
            buffer = buffers[number] = None
            buffer = buffers[number] = self._device.allocate(align_up(size, OFFLOAD_ALIGN))
        return buffer

    def _fits(self, site: int, offloaded: OffloadedCall, pack: Pack) -> bool:
        """Return whether a pack fits into the host buffer.

        Only the buffers through which activations are spilled have a fixed size.
        """
        if offloaded.host_buffer is None or self._spill is None:
            return True
        return pack.start + pack.size <= self._spill.sizes[site]

    def _host_memory(self, site: int, offloaded: OffloadedCall, pack: Pack) -> torch.Tensor:
        if offloaded.host_buffer is not None and self._spill is not None:
            return pack.part_of(self._spill.buffer(offloaded.host_buffer))
        key = (site, offloaded.slices.index(pack) + 1 if pack is not offloaded.inputs else 0)
        memory = self._host.get(key)
        if memory is None or len(memory) < pack.size:
            self._host.pop(key, None)
            allocated = self._device.host_memory(align_up(pack.size, OFFLOAD_ALIGN))
            memory = self._host[key] = torch.from_numpy(allocated)
        return memory[: pack.size]
