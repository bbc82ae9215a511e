"""Activations on their way from the device to host memory in forward, and back in backward.

On the device they pass through places of the schedule: what a site takes with it is packed into one
by compute and copied from there, so the memory that torch gave out is free again at once. Inputs
travel as a whole. Kept results travel slice by slice, two slices at a time, while their block is
still at work on the others: the device never holds those of a whole batch.

Note [slices inside an action]
The schedule's K and V stand for all slices of a site. Copies of slices are given to the link while
F and B run, behind the compute that makes them or makes room for them; K waits for the last, V
brings the first two. Host buffer and place belong to the site from the beginning of F to the end
of K, and from V to the end of B.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field

import torch

from lohan.capture.call import SavedCall, Stash
from lohan.capture.kept import Kept, Layout
from lohan.capture.operations import is_dense
from lohan.device.base import Device, Event
from lohan.engine.acts import ActivationSpill
from lohan.errors import LohanError
from lohan.util.units import align_up

PAD = 64  # bytes to which each tensor is aligned
HALVES = 2  # slices of a site that are on the device at a time


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
class Trip:
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
    away: bool = False


class Travel(Stash):
    """Owner of the places on the device and of host memory for what is not moved to SSD."""

    def __init__(
        self, device: Device, *, sites: frozenset[int], places: int, spill: ActivationSpill | None
    ) -> None:
        self._device, self._sites, self._spill = device, sites, spill
        self._inputs: list[torch.Tensor | None] = [None] * places
        self._halves: list[torch.Tensor | None] = [None] * (places * HALVES)
        self._host: dict[tuple[int, int], torch.Tensor] = {}  # by site and start
        self._trips: dict[int, Trip] = {}

    # -- forward, the caller's side ---------------------------------------------------------------

    def begin(self, site: int, call: SavedCall, places: Sequence[int]) -> None:
        """The inputs leave. A second call before backward stays where it is."""
        before = self._trips.get(site)
        taken = before is not None and (before.held is not None or before.call() is not None)
        tensors = [t for t, wants in zip(call.tensors, call.wants_grad, strict=True) if wants]
        if site not in self._sites or taken or not tensors:
            return
        pack = _Pack.of(tensors, 0)
        *buffer, place = places
        trip = Trip(weakref.ref(call), call, place, buffer[0] if buffer else None, pack)
        if not self._fits(site, trip, pack):
            return
        trip.used = pack.size
        self._trips[site] = trip
        there = self._grown(self._inputs, place, pack.size)
        trip.last = self._send(pack, tensors, there, self._memory(site, trip, pack))

    def keep(self, site: int, call: SavedCall) -> None:
        """Kept results of a slice leave."""
        trip = self._trip(site, call)
        if trip is None:
            return
        kept: Kept | None = call.kept[-1]
        number, half = len(trip.slices), len(trip.slices) % HALVES
        tensors = kept.export() if kept is not None else []
        pack = _Pack.of(tensors, trip.used)
        if not tensors or kept is None or not self._fits(site, trip, pack):
            if kept is not None and tensors:
                kept.release("there was no room for them in host memory")
            trip.slices.append(None)
            return
        trip.slices.append(pack)
        trip.used += pack.size
        if number >= HALVES and half in trip.halves:
            self._device.wait(trip.halves[half])
        there = self._half(trip.place, half, pack.size)
        trip.last = trip.halves[half] = self._send(
            pack, tensors, there, self._memory(site, trip, pack)
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
        trip = self._trips.get(site)
        if trip is None or trip.away or trip.last is None or trip.held is None:
            return
        trip.last.synchronize()
        for number, wants in enumerate(trip.held.wants_grad):
            if wants:
                trip.held.tensors[number] = trip.held.tensors[number].new_empty(0)
        if self._spill is not None and trip.buffer is not None:
            self._spill.filled(site, trip.used)
        trip.held, trip.away = None, True
        trip.halves.clear()

    def bring(self, site: int, places: Sequence[int]) -> None:
        """V: inputs and the first slices are on the device when it returns."""
        trip = self._trips.get(site)
        if trip is None or not trip.away or trip.call() is None:
            return
        *buffer, trip.place = places
        trip.buffer = buffer[0] if buffer else None
        there = self._grown(self._inputs, trip.place, trip.inputs.size)
        pairs = [(there[: trip.inputs.size], self._memory(site, trip, trip.inputs))]
        for number, pack in enumerate(trip.slices[:HALVES]):
            if pack is not None:
                half = self._half(trip.place, number, pack.size)
                pairs.append((half[: pack.size], self._memory(site, trip, pack)))
        self._device.copy("h2d", pairs).synchronize()

    # -- backward, the caller's side --------------------------------------------------------------

    def restore(self, site: int, call: SavedCall, places: Sequence[int]) -> None:
        trip = self._trip(site, call)
        if trip is None:
            return
        there = self._inputs[trip.place]
        assert there is not None and trip.away and trip.place == places[-1]
        coming = iter(trip.inputs.over(there))
        for number, wants in enumerate(call.wants_grad):
            if wants:
                call.tensors[number] = next(coming)

    def restore_slice(self, site: int, call: SavedCall, number: int) -> None:
        trip = self._trip(site, call)
        pack = trip.slices[number] if trip is not None else None
        if trip is None or pack is None:
            return
        if number >= HALVES:
            self._device.wait(trip.halves[number % HALVES])
        there = self._halves[trip.place * HALVES + number % HALVES]
        assert there is not None
        call.kept[number].adopt(pack.over(there))

    def drop_slice(self, site: int, call: SavedCall, number: int) -> None:
        """The slice after the next may take its half."""
        trip, following = self._trip(site, call), number + HALVES
        if trip is None or following >= len(trip.slices):
            return
        pack = trip.slices[following]
        if pack is not None:
            there = self._half(trip.place, number % HALVES, pack.size)
            trip.halves[number % HALVES] = self._device.copy(
                "h2d", [(there[: pack.size], self._memory(site, trip, pack))],
                after=self._device.mark(),
            )  # fmt: skip

    def drop(self, site: int, call: SavedCall) -> None:
        if self._trip(site, call) is not None:
            del self._trips[site]

    def _trip(self, site: int, call: SavedCall) -> Trip | None:
        trip = self._trips.get(site)
        return trip if trip is not None and trip.call() is call else None

    def forget(self) -> None:
        """After an error. The lanes are at rest; what they were given may be under way."""
        for trip in self._trips.values():
            for event in (trip.last, *trip.halves.values()):
                with suppress(LohanError, RuntimeError):
                    if event is not None:
                        event.synchronize()
        self._trips.clear()

    # -- memory -----------------------------------------------------------------------------------

    def _grown(self, slots: list[torch.Tensor | None], number: int, size: int) -> torch.Tensor:
        """A slot of at least this size. Shapes repeat, so after a step or two none grows."""
        there = slots[number]
        if there is None or len(there) < size:
            there = slots[number] = None  # before the new one takes its room
            there = slots[number] = self._device.allocate(align_up(size, PAD))
        return there

    def _half(self, place: int, half: int, size: int) -> torch.Tensor:
        return self._grown(self._halves, place * HALVES + half, size)

    def _fits(self, site: int, trip: Trip, pack: _Pack) -> bool:
        """Host memory for it: a buffer on the way to SSD has a size, any other grows."""
        if trip.buffer is None or self._spill is None:
            return True
        return pack.start + pack.size <= self._spill.size(site)

    def _memory(self, site: int, trip: Trip, pack: _Pack) -> torch.Tensor:
        if trip.buffer is not None and self._spill is not None:
            return self._spill.buffer(trip.buffer)[pack.start : pack.start + pack.size]
        key = (site, trip.slices.index(pack) + 1 if pack is not trip.inputs else 0)
        found = self._host.get(key)
        if found is None or len(found) < pack.size:
            self._host.pop(key, None)
            made = self._device.host_memory(align_up(pack.size, PAD))
            found = self._host[key] = torch.from_numpy(made)
        return found[: pack.size]
