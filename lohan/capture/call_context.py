"""What a block's call finds around it, so that its recomputation finds the same."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from lohan.device.base import Device


@contextmanager
def forked_random_state(device: Device) -> Any:
    """Restores the random state on exit."""
    state = device.random_state()
    try:
        yield
    finally:
        device.set_random_state(state)


@contextmanager
def swapped(others: Iterable[tuple[dict[str, Any], str, Any]]) -> Iterator[None]:
    """Other tensors meanwhile, each in its place in a module's `_parameters` or `_buffers`."""
    others = list(others)
    before = [(tensors, key, tensors[key]) for tensors, key, _ in others]
    try:
        for tensors, key, other in others:
            tensors[key] = other
        yield
    finally:
        for tensors, key, own in before:
            tensors[key] = own


Taken = dict[str, list[Any]]


_OWN = "hidden_states"  # taken where blocks meet, not inside them


@dataclass(frozen=True)
class CallContext:
    wanted: tuple[str, ...] = ()  # what is collected
    autocast: tuple[str, torch.dtype] | None = None

    @classmethod
    def current(cls, device: str) -> CallContext:
        enabled = torch.is_autocast_enabled(device)
        autocast = (device, torch.get_autocast_dtype(device)) if enabled else None
        return cls(tuple(key for key in _collected() if key != _OWN), autocast)

    def run(self, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> tuple[Any, Taken]:
        """Return the result of the call and what was collected inside it."""
        with collecting(self.wanted) as taken:
            if self.autocast is None:
                return forward(*args, **kwargs), taken
            device, dtype = self.autocast
            with torch.autocast(device, dtype=dtype, cache_enabled=False):
                return forward(*args, **kwargs), taken


def deliver_collected(out: Any, taken: Taken) -> Any:
    """Hand what was collected inside a call to the outer collector, and return the result."""
    if taken:
        outer = _collected()
        for key, found in taken.items():
            outer[key].extend(found)
    return out


def _variable() -> Any:
    """Return transformers' active collector, or None if the library is not in use."""
    module = sys.modules.get("transformers.utils.output_capturing")
    return getattr(module, "_active_collector", None)


def _collected() -> Taken:
    variable = _variable()
    found = variable.get() if variable is not None else None
    return {key: value for key, value in (found or {}).items() if not key.startswith("_")}


@contextmanager
def collecting(wanted: tuple[str, ...] = ()) -> Iterator[Taken]:
    """Capture only the requested outputs, and hide them from outer collectors."""
    variable = _variable()
    taken: Taken = {key: [] for key in wanted}
    if variable is None:
        yield taken
        return
    token = variable.set(taken)
    try:
        yield taken
    finally:
        variable.reset(token)
