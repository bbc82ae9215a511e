"""Every operation of an emulated device is seen here: how much memory lives, and whether compute
and copies meet in the same memory.

Compute of the emulated device is done by the time it is given, its event comes later. So a copy
that does not wait for that event would find right values; a real device would not have made them
yet. Each storage therefore knows the last piece of compute that read or wrote it, and a copy that
comes before the event of that piece is an error. So is compute on what a copy is still under way
to, or that changes what a copy is still to read.
"""

from __future__ import annotations

import threading
import time
import weakref
from dataclasses import dataclass, field
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from lohan.device.timeline import EmulatedEvent
from lohan.errors import LohanError
from lohan.util.units import format_bytes


@dataclass
class Piece:
    """Compute between two marks."""

    event: EmulatedEvent = field(default_factory=EmulatedEvent)
    flops: float = 0.0
    begun_s: float = 0.0


@dataclass
class _Tracked:
    size: int
    read: Piece | None = None
    written: Piece | None = None
    coming: int = 0  # copies to it that were given and are not done
    leaving: int = 0  # and copies of it


class Memory:
    """The storages of one device: their bytes, and who used them last."""

    def __init__(self, budget: int) -> None:
        self.budget = budget
        self.live = self.peak = 0
        self.piece = Piece()
        self._known: dict[int, _Tracked] = {}
        self._lock = threading.RLock()  # a storage may die while another is added

    def add(self, storage: torch.UntypedStorage, *, made: bool) -> None:
        """A storage has come to life, `made` by compute; it counts until it dies."""
        key, size = storage._cdata, storage.nbytes()
        with self._lock:
            if key in self._known:
                return
            if self.live + size > self.budget:
                raise torch.OutOfMemoryError(
                    f"emulated device out of memory: tried to allocate {format_bytes(size)}, "
                    f"{format_bytes(self.live)} of {format_bytes(self.budget)} are in use"
                )
            self.live += size
            self.peak = max(self.peak, self.live)
            self._known[key] = _Tracked(size, written=self.piece if made else None)
        weakref.finalize(storage, self._dead, key)

    def _dead(self, key: int) -> None:
        with self._lock:
            self.live -= self._known.pop(key).size

    def touched(self, key: int, *, write: bool) -> None:
        """Compute uses a storage."""
        found = self._known.get(key)
        if found is None:
            return
        if found.coming or (write and found.leaving):
            raise _race("compute", "overwrites" if write else "reads", found.size, "a copy")
        if write:
            found.written = self.piece
        else:
            found.read = self.piece

    def given(self, key: int, *, write: bool, more: int = 1) -> None:
        """A copy to or from a storage was given to a lane; with -1, it is done."""
        with self._lock:
            found = self._known.get(key)
            if found is not None and write:
                found.coming += more
            elif found is not None:
                found.leaving += more

    def check_copy(self, key: int, *, write: bool) -> None:
        """Raises if compute may still write what is copied, or use what is overwritten."""
        found = self._known.get(key)
        if found is None:
            return
        pieces = (found.written, found.read) if write else (found.written,)
        if any(piece is not None and not piece.event.passed for piece in pieces):
            raise _race("a copy", "overwrites" if write else "reads", found.size, "compute")


def _race(who: str, does: str, size: int, other: str) -> LohanError:
    return LohanError(
        f"race on the emulated device: {who} {does} {format_bytes(size)} that {other} has not "
        "finished with; an event was not waited for"
    )


class Watch(TorchDispatchMode):
    """Tells the memory of every operation."""

    supports_higher_order_operators = True

    def __init__(self, memory: Memory) -> None:
        super().__init__()
        self._memory = memory

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, memory = kwargs or {}, self._memory
        memory.piece.begun_s = memory.piece.begun_s or time.perf_counter()
        out = func(*args, **kwargs)
        changed = _changed(func, args)
        given = set()
        for tensor in _real(args, kwargs):
            key = tensor.untyped_storage()._cdata
            given.add(key)
            memory.touched(key, write=tensor is changed)
        for tensor in _real(out):
            storage = tensor.untyped_storage()
            if storage._cdata not in given:  # no view of host memory
                memory.add(storage, made=True)
        count = flop_registry.get(getattr(func, "overloadpacket", None))
        if count is not None:
            memory.piece.flops += count(*args, **kwargs, out_val=out)
        return out


def _real(*trees: Any) -> list[torch.Tensor]:
    return [
        leaf
        for leaf in pytree.tree_leaves(trees)
        if isinstance(leaf, torch.Tensor)
        and leaf.device.type == "cpu"
        and not isinstance(leaf, FakeTensor)
    ]


def _changed(func: Any, args: tuple[Any, ...]) -> Any:
    """In-place operations change their first argument."""
    schema = getattr(func, "_schema", None)
    return args[0] if schema is not None and schema.is_mutable and args else None
