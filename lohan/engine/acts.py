"""Kept activations on SSD: a site's inputs and kept results leave after its forward and are back
before its backward.

The space is a store of its own with scratch regions only, made with the session and removed with
it. Only tensors that take a gradient travel: masks and positions are shared by all blocks.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import torch

from lohan.capture.call import SavedCall, Stash
from lohan.engine.pool import HostPool
from lohan.engine.waiting import wait_all
from lohan.errors import StoreError
from lohan.store.engine import ALIGN
from lohan.store.extents import Region
from lohan.store.flight import Ticket
from lohan.store.store import Counters, State, Store
from lohan.util.units import MiB, align_up

PIECE = 16 * MiB  # of one transfer; pieces are spread over the directories
PAD = 64  # bytes to which each tensor is aligned


class ActivationSpill(Stash):
    """Owner of the buffers and of the space on SSD. `sizes`: bytes by site number."""

    def __init__(
        self, dirs: Sequence[Path], pool: HostPool, sizes: Mapping[int, int], *, buffers: int,
        engine: str,
    ) -> None:  # fmt: skip
        self._sizes = {site: align_up(size, ALIGN) for site, size in sizes.items()}
        largest = max(self._sizes.values())
        self._buffers = [
            pool.allocate("activation buffers", largest, travels=True) for _ in range(buffers)
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
        if other is None or other.away is None:
            fits = sum(_padded(tensor) for tensor in _travelling(call)) <= self._sizes[site]
            if fits and site not in self._new:
                self._new[site] = call

    def restore(self, site: int, call: SavedCall, places: Sequence[int]) -> None:
        """The activations lie in the buffer that backward's action names."""
        if call.away is None:
            return
        flat, at = self._buffers[places[0]].tensor(torch.uint8), 0
        tensors = []
        for layout in call.away:
            count = layout.numel * layout.dtype.itemsize
            tensors.append(flat[at : at + count].view(layout.dtype).view(layout.shape))
            at += align_up(count, PAD)
        call.come_back(tensors)

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
            call.go_away()
            self._away[site] = weakref.ref(call)

    def get(self, site: int, buffer: int) -> Iterator[Ticket]:
        if site not in self._filled and self._away.get(site, lambda: None)() is None:
            return
        for chunk, start, stop in self._cut(site):
            yield self._store.read(_key(site), chunk, self._buffers[buffer].bytes[start:stop])

    def wait(self, tickets: Sequence[Ticket]) -> None:
        wait_all(self._store, tickets)

    def settle(self) -> None:
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
