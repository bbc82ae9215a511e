"""Activation offload: from the device to host memory, from there to SSD, and back in backward."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import torch

from lohan.capture.call import ActivationOffload, SavedCall
from lohan.capture.selective_checkpoint import Layout, SavedOps, is_dense
from lohan.device.base import Device, Event
from lohan.engine.buffers import HostPool
from lohan.engine.lanes import wait_all
from lohan.errors import LohanError, StoreError
from lohan.store.engine import ALIGN
from lohan.store.extents import Region
from lohan.store.store import Counters, State, Store
from lohan.store.transfers import Ticket
from lohan.util.units import MiB, align_up

# -- Kept activations on SSD -----------------------------------------------------------------------
#
# A site's inputs and kept results leave after its forward and are back before its backward.
#
# The space is a store of its own with scratch regions only, made with the session and removed with
# it. Only tensors that take a gradient travel: masks and positions are shared by all blocks.


PIECE = 16 * MiB  # of one transfer; pieces are spread over the directories
PAD = 64  # bytes to which each tensor is aligned


class ActivationSpill(ActivationOffload):
    """Owner of the buffers and of the space on SSD. `sizes`: bytes by site number."""

    def __init__(
        self, dirs: Sequence[Path], pool: HostPool, sizes: Mapping[int, int], *, buffers: int,
        engine: str,
    ) -> None:  # fmt: skip
        self._sizes = {site: align_up(size, ALIGN) for site, size in sizes.items()}
        largest = max(self._sizes.values())
        self._buffers = [
            pool.allocate("activation buffers", largest, for_device=True) for _ in range(buffers)
        ]
        regions = [Region("nothing", (ALIGN,))]  # a store has state; this one needs none
        regions += [Region(_key(s), _pieces(n), scratch=True) for s, n in self._sizes.items()]
        self._store = Store.create(dirs, regions, durability="checkpoint", engine=engine)
        self._dirs = dirs
        self._new: dict[int, SavedCall] = {}  # made, not yet put away
        self._away: dict[int, weakref.ref[SavedCall]] = {}
        self._used: dict[int, int] = {}  # bytes on SSD
        self._filled: set[int] = set()  # sites whose activations came from a device
        self.moved_bytes = 0

    @property
    def counters(self) -> Counters:
        return self._store.counters

    def close(self) -> None:
        self._store.close()  # and with it goes its space: it is never committed

    # -- the caller's side ------------------------------------------------------------------------

    def hold(self, site: int, call: SavedCall) -> None:
        """A site has run. A second call before backward stays in memory: there is one place."""
        if site not in self._sizes:
            return
        other = self._away.get(site, lambda: None)()
        if other is None or other.evicted is None:
            fits = sum(_padded(tensor) for tensor in _travelling(call)) <= self._sizes[site]
            if fits and site not in self._new:
                self._new[site] = call

    def restore(self, site: int, call: SavedCall, places: Sequence[int]) -> None:
        """The activations lie in the buffer that backward's action names."""
        if call.evicted is None:
            return
        flat, at = self._buffers[places[0]].tensor(torch.uint8), 0
        tensors = []
        for layout in call.evicted:
            count = layout.numel * layout.dtype.itemsize
            tensors.append(flat[at : at + count].view(layout.dtype).view(layout.shape))
            at += align_up(count, PAD)
        call.restore_evicted(tensors)

    # -- activations that come from a device, packed already --------------------------------------

    def size(self, site: int) -> int:
        return self._sizes[site]

    def buffer(self, number: int) -> torch.Tensor:
        return self._buffers[number].tensor(torch.uint8)

    def filled(self, site: int, used: int) -> None:
        """So many bytes of a site lie in the buffer that its O will name."""
        self._filled.add(site)
        self._used[site] = align_up(used, ALIGN)
        self.moved_bytes += used

    # -- the ssd lane's side ----------------------------------------------------------------------

    def put(self, site: int, buffer: int) -> Iterator[Ticket]:
        """Packs a site's activations and submits their writes; nothing, if it did not run."""
        call = self._new.get(site)
        if call is not None:
            self._pack(site, buffer, call)
        elif site not in self._filled:
            return
        for chunk, start, stop in self._cut(site):
            yield self._store.write(_key(site), chunk, self._buffers[buffer].bytes[start:stop])

    def _pack(self, site: int, buffer: int, call: SavedCall) -> None:
        flat, at = self._buffers[buffer].tensor(torch.uint8), 0
        for tensor in _travelling(call):
            part = tensor.detach().contiguous().view(-1).view(torch.uint8)
            flat[at : at + len(part)] = part
            at += _padded(tensor)
        self._used[site] = align_up(at, ALIGN)
        self.moved_bytes += at

    def was_put(self, site: int) -> None:
        call = self._new.pop(site, None)
        if call is not None:
            call.evict()
            self._away[site] = weakref.ref(call)

    def get(self, site: int, buffer: int) -> Iterator[Ticket]:
        if site not in self._filled and self._away.get(site, lambda: None)() is None:
            return
        for chunk, start, stop in self._cut(site):
            yield self._store.read(_key(site), chunk, self._buffers[buffer].bytes[start:stop])

    def wait(self, tickets: Sequence[Ticket]) -> None:
        wait_all(self._store, tickets)

    def check_idle(self) -> None:
        """After an error: nothing is on its way to or from the buffers, or it raises."""
        self._store.discard()
        if self._store.state is State.FAILED:
            raise StoreError(
                f"{self._dirs[0]}: activations on their way to or from SSD did not come back;"
                " check the drive"
            )

    def forget(self) -> None:
        self._new.clear()
        self._away.clear()
        self._filled.clear()

    def _cut(self, site: int) -> Iterator[tuple[int, int, int]]:
        """Pieces that hold anything: number, first and last byte."""
        start = 0
        for chunk, size in enumerate(_pieces(self._sizes[site])):
            if start < self._used[site]:
                yield chunk, start, start + size
            start += size


def _travelling(call: SavedCall) -> list[torch.Tensor]:
    inputs = [t for t, wants in zip(call.tensors, call.wants_grad, strict=True) if wants]
    return [*inputs, *(t for kept in call.kept if kept is not None for t in kept.tensors)]


def _padded(tensor: torch.Tensor) -> int:
    return align_up(tensor.numel() * tensor.itemsize, PAD)


def _pieces(size: int) -> tuple[int, ...]:
    return tuple(min(PIECE, size - start) for start in range(0, size, PIECE))


def _key(site: int) -> str:
    return f"a/{site}"


# -- Activations on their way from the device to host memory in forward ----------------------------
#
# And back in backward.
#
# On the device they pass through places of the schedule: what a site takes with it is packed into
# one by compute and copied from there, so the memory that torch gave out is free again at once.
# Inputs travel as a whole. Kept results travel slice by slice, two slices at a time, while their
# block is still at work on the others: the device never holds those of a whole batch.
#
# Note [slices inside an action] The schedule's K and V stand for all slices of a site. Copies of
# slices are given to the link while F and B run, behind the compute that makes them or makes room
# for them; K waits for the last, V brings the first two. Host buffer and place belong to the site
# from the beginning of F to the end of K, and from V to the end of B.


BUFFERS = 2  # slices of a site that are on the device at a time


@dataclass(frozen=True)
class _Pack:
    """Tensors side by side: where the pack begins in host memory, and each tensor in it."""

    start: int
    size: int
    parts: tuple[tuple[int, Layout], ...]

    @classmethod
    def of(cls, tensors: Sequence[torch.Tensor], start: int) -> _Pack:
        at, parts = 0, []
        for tensor in tensors:
            parts.append((at, Layout.of(tensor if is_dense(tensor) else tensor.contiguous())))
            at += align_up(tensor.numel() * tensor.itemsize, PAD)
        return cls(start, at, tuple(parts))

    def over(self, flat: torch.Tensor) -> list[torch.Tensor]:
        """The tensors in memory that holds the pack."""
        made = []
        for at, layout in self.parts:
            size = layout.shape.numel() * layout.dtype.itemsize
            piece = flat[at : at + size].view(layout.dtype)
            made.append(piece.as_strided(layout.shape, layout.stride, piece.storage_offset()))
        return made


@dataclass
class OffloadedCall:
    """One call whose activations travel."""

    call: weakref.ref[SavedCall]
    held: SavedCall | None  # until they have left, whatever becomes of the graph
    place: int
    buffer: int | None  # in host memory, on the way to and from SSD
    inputs: _Pack
    slices: list[_Pack | None] = field(default_factory=list)
    used: int = 0  # bytes of host memory
    last: Event | None = None
    halves: dict[int, Event] = field(default_factory=dict)  # copies to or from each half
    evicted: bool = False


class DeviceActivationOffload(ActivationOffload):
    """Owner of the places on the device and of host memory for what is not moved to SSD."""

    def __init__(
        self, device: Device, *, sites: frozenset[int], places: int, spill: ActivationSpill | None
    ) -> None:
        self._device, self._sites, self._spill = device, sites, spill
        self._inputs: list[torch.Tensor | None] = [None] * places
        self._halves: list[torch.Tensor | None] = [None] * (places * BUFFERS)
        self._host: dict[tuple[int, int], torch.Tensor] = {}  # by site and start
        self._offloaded_calls: dict[int, OffloadedCall] = {}

    # -- forward, the caller's side ---------------------------------------------------------------

    def begin(self, site: int, call: SavedCall, places: Sequence[int]) -> None:
        """The inputs leave. A second call before backward stays where it is."""
        before = self._offloaded_calls.get(site)
        taken = before is not None and (before.held is not None or before.call() is not None)
        tensors = [t for t, wants in zip(call.tensors, call.wants_grad, strict=True) if wants]
        if site not in self._sites or taken or not tensors:
            return
        pack = _Pack.of(tensors, 0)
        *buffer, place = places
        offloaded = OffloadedCall(
            weakref.ref(call), call, place, buffer[0] if buffer else None, pack
        )
        if not self._fits(site, offloaded, pack):
            return
        offloaded.used = pack.size
        self._offloaded_calls[site] = offloaded
        there = self._grown(self._inputs, place, pack.size)
        offloaded.last = self._send(pack, tensors, there, self._memory(site, offloaded, pack))

    def keep(self, site: int, call: SavedCall) -> None:
        """Kept results of a slice leave."""
        offloaded = self._offloaded_call(site, call)
        if offloaded is None:
            return
        kept: SavedOps | None = call.kept[-1]
        number, half = len(offloaded.slices), len(offloaded.slices) % BUFFERS
        tensors = kept.export() if kept is not None else []
        pack = _Pack.of(tensors, offloaded.used)
        if not tensors or kept is None or not self._fits(site, offloaded, pack):
            if kept is not None and tensors:
                kept.release("there was no room for them in host memory")
            offloaded.slices.append(None)
            return
        offloaded.slices.append(pack)
        offloaded.used += pack.size
        if number >= BUFFERS and half in offloaded.halves:
            self._device.wait(offloaded.halves[half])
        there = self._half(offloaded.place, half, pack.size)
        offloaded.last = offloaded.halves[half] = self._send(
            pack, tensors, there, self._memory(site, offloaded, pack)
        )

    def _send(
        self, pack: _Pack, tensors: Sequence[torch.Tensor], there: torch.Tensor, host: torch.Tensor
    ) -> Event:
        for into, tensor in zip(pack.over(there), tensors, strict=True):
            into.copy_(tensor)
        return self._device.copy("d2h", [(host, there[: pack.size])], after=self._device.mark())

    # -- the link's side --------------------------------------------------------------------------

    def left(self, site: int) -> None:
        """K: all of it is in host memory; the call lets go of what was on the device."""
        offloaded = self._offloaded_calls.get(site)
        if (
            offloaded is None
            or offloaded.evicted
            or offloaded.last is None
            or offloaded.held is None
        ):
            return
        offloaded.last.synchronize()
        for number, wants in enumerate(offloaded.held.wants_grad):
            if wants:
                offloaded.held.tensors[number] = offloaded.held.tensors[number].new_empty(0)
        if self._spill is not None and offloaded.buffer is not None:
            self._spill.filled(site, offloaded.used)
        offloaded.held, offloaded.evicted = None, True
        offloaded.halves.clear()

    def bring(self, site: int, places: Sequence[int]) -> None:
        """V: inputs and the first slices are on the device when it returns."""
        offloaded = self._offloaded_calls.get(site)
        if offloaded is None or not offloaded.evicted or offloaded.call() is None:
            return
        *buffer, offloaded.place = places
        offloaded.buffer = buffer[0] if buffer else None
        there = self._grown(self._inputs, offloaded.place, offloaded.inputs.size)
        pairs = [(there[: offloaded.inputs.size], self._memory(site, offloaded, offloaded.inputs))]
        for number, pack in enumerate(offloaded.slices[:BUFFERS]):
            if pack is not None:
                half = self._half(offloaded.place, number, pack.size)
                pairs.append((half[: pack.size], self._memory(site, offloaded, pack)))
        self._device.copy("h2d", pairs).synchronize()

    # -- backward, the caller's side --------------------------------------------------------------

    def restore(self, site: int, call: SavedCall, places: Sequence[int]) -> None:
        offloaded = self._offloaded_call(site, call)
        if offloaded is None:
            return
        there = self._inputs[offloaded.place]
        assert there is not None and offloaded.evicted and offloaded.place == places[-1]
        coming = iter(offloaded.inputs.over(there))
        for number, wants in enumerate(call.wants_grad):
            if wants:
                call.tensors[number] = next(coming)

    def restore_slice(self, site: int, call: SavedCall, number: int) -> None:
        offloaded = self._offloaded_call(site, call)
        pack = offloaded.slices[number] if offloaded is not None else None
        if offloaded is None or pack is None:
            return
        if number >= BUFFERS:
            self._device.wait(offloaded.halves[number % BUFFERS])
        there = self._halves[offloaded.place * BUFFERS + number % BUFFERS]
        assert there is not None
        call.kept[number].adopt(pack.over(there))

    def drop_slice(self, site: int, call: SavedCall, number: int) -> None:
        """The slice after the next may take its half."""
        offloaded, following = self._offloaded_call(site, call), number + BUFFERS
        if offloaded is None or following >= len(offloaded.slices):
            return
        pack = offloaded.slices[following]
        if pack is not None:
            there = self._half(offloaded.place, number % BUFFERS, pack.size)
            offloaded.halves[number % BUFFERS] = self._device.copy(
                "h2d", [(there[: pack.size], self._memory(site, offloaded, pack))],
                after=self._device.mark(),
            )  # fmt: skip

    def drop(self, site: int, call: SavedCall) -> None:
        if self._offloaded_call(site, call) is not None:
            del self._offloaded_calls[site]

    def _offloaded_call(self, site: int, call: SavedCall) -> OffloadedCall | None:
        offloaded = self._offloaded_calls.get(site)
        return offloaded if offloaded is not None and offloaded.call() is call else None

    def forget(self) -> None:
        """After an error. The lanes are at rest; what they were given may be under way."""
        for offloaded in self._offloaded_calls.values():
            for event in (offloaded.last, *offloaded.halves.values()):
                with suppress(LohanError, RuntimeError):
                    if event is not None:
                        event.synchronize()
        self._offloaded_calls.clear()

    # -- memory -----------------------------------------------------------------------------------

    def _grown(self, slots: list[torch.Tensor | None], number: int, size: int) -> torch.Tensor:
        """A slot of at least this size. Shapes repeat, so after a step or two none grows."""
        there = slots[number]
        if there is None or len(there) < size:
            there = slots[number] = None  # before the new one takes its room
            there = slots[number] = self._device.allocate(align_up(size, PAD))
        return there

    def _half(self, place: int, half: int, size: int) -> torch.Tensor:
        return self._grown(self._halves, place * BUFFERS + half, size)

    def _fits(self, site: int, offloaded: OffloadedCall, pack: _Pack) -> bool:
        """Host memory for it: a buffer on the way to SSD has a size, any other grows."""
        if offloaded.buffer is None or self._spill is None:
            return True
        return pack.start + pack.size <= self._spill.size(site)

    def _memory(self, site: int, offloaded: OffloadedCall, pack: _Pack) -> torch.Tensor:
        if offloaded.buffer is not None and self._spill is not None:
            return self._spill.buffer(offloaded.buffer)[pack.start : pack.start + pack.size]
        key = (site, offloaded.slices.index(pack) + 1 if pack is not offloaded.inputs else 0)
        found = self._host.get(key)
        if found is None or len(found) < pack.size:
            self._host.pop(key, None)
            made = self._device.host_memory(align_up(pack.size, PAD))
            found = self._host[key] = torch.from_numpy(made)
        return found[: pack.size]
