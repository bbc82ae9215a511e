"""Measure the storages that torch holds while a model trains, by owner, at their peak."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from lohan.capture.saved_call import SavedCall
from lohan.engine.session import Session

INPUTS, KEPT, GRADIENTS = "block inputs", "kept activations", "waiting gradients"


class LiveMemory(TorchDispatchMode):
    """Counts the bytes of all storages outside the pool that are created while it is active.

    It also records the owners of the storages at the peak. Use it around whole steps.
    """

    def __init__(self, session: Session) -> None:
        super().__init__()
        self._session = session
        self._live: dict[int, int] = {}
        self._calls: weakref.WeakSet[SavedCall] = weakref.WeakSet()
        self.total = self.peak = 0
        self.owners: dict[str, int] = {}  # at the peak
        self.most: dict[str, int] = {}  # of each owner, whenever that was

    def __enter__(self) -> LiveMemory:
        calls, result = self._calls, SavedCall.__init__
        self._made = result

        def remembered(call: SavedCall, *args: Any, **kwargs: Any) -> None:
            result(call, *args, **kwargs)
            calls.add(call)

        SavedCall.__init__ = remembered  # type: ignore[method-assign]
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        SavedCall.__init__ = self._made  # type: ignore[method-assign]
        super().__exit__(*error)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for leaf in pytree.tree_leaves(out):
            if isinstance(leaf, torch.Tensor):
                self._count(leaf)
        return out

    def _count(self, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._live or storage.device.type != "cpu" or not storage.resizable():
            return
        size = storage.nbytes()
        self._live[key] = size
        weakref.finalize(storage, self._dead, key, size)
        self.total += size
        if self.total > 1.002 * self.peak:
            self.peak, self.owners = self.total, self._by_owner()
            for owner, held in self.owners.items():
                self.most[owner] = max(held, self.most.get(owner, 0))

    def _dead(self, key: int, size: int) -> None:
        if self._live.pop(key, None) is not None:
            self.total -= size

    def _by_owner(self) -> dict[str, int]:
        work = self._session.executor.runner
        calls = list(self._calls)
        kept = [kept for call in calls for kept in call.saved_ops if kept is not None]
        held = self._session.executor.collector.sink._grads
        gradients = [*held.values(), *work.pending.on_host.values()]
        collected, seen = {}, set[int]()
        for owner, tensors in (
            (INPUTS, (t for call in calls for t in call.tensors)),
            (KEPT, (t for one in kept for t in one.tensors)),
            (GRADIENTS, (t for group in gradients for t in group.values())),
        ):
            collected[owner] = sum(self._sizes(tensors, seen))
        return {**collected, "work": self.total - sum(collected.values())}

    def _sizes(self, tensors: Iterable[torch.Tensor], seen: set[int]) -> Iterator[int]:
        for tensor in tensors:
            key = tensor.untyped_storage()._cdata
            if key not in seen:
                seen.add(key)
                yield self._live.get(key, 0)
