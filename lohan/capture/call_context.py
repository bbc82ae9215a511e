"""The context of a block's call, which its recomputation restores."""

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
    """Restore the random state on exit."""
    state = device.random_state()
    try:
        yield
    finally:
        device.set_random_state(state)


@contextmanager
def swapped(replacements: Iterable[tuple[dict[str, Any], str, Any]]) -> Iterator[None]:
    """Temporarily replace tensors in the `_parameters` or `_buffers` of modules."""
    replacements = list(replacements)
    before = [(tensors, key, tensors[key]) for tensors, key, _ in replacements]
    try:
        for tensors, key, other in replacements:
            tensors[key] = other
        yield
    finally:
        for tensors, key, old in before:
            tensors[key] = old


# Outputs that transformers collects during a call, by name.
Taken = dict[str, list[Any]]


# Collected between blocks, not inside them.
_HIDDEN_STATES = "hidden_states"


@dataclass(frozen=True)
class CallContext:
    wanted: tuple[str, ...] = ()  # the outputs to collect
    autocast: tuple[str, torch.dtype] | None = None

    @classmethod
    def current(cls, device: str) -> CallContext:
        enabled = torch.is_autocast_enabled(device)
        autocast = (device, torch.get_autocast_dtype(device)) if enabled else None
        return cls(tuple(key for key in _collected() if key != _HIDDEN_STATES), autocast)

    def run(self, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> tuple[Any, Taken]:
        """Return the result of the call and what was collected inside it."""
        with collecting(self.wanted) as taken:
            if self.autocast is None:
                return forward(*args, **kwargs), taken
            device, dtype = self.autocast
            with torch.autocast(device, dtype=dtype, cache_enabled=False):
                return forward(*args, **kwargs), taken


def deliver_collected(out: Any, taken: Taken) -> Any:
    """Pass the outputs collected inside a call to the outer collector; return the result."""
    if taken:
        outer = _collected()
        for key, values in taken.items():
            outer[key].extend(values)
    return out


def _variable() -> Any:
    """Return transformers' active collector, or None if the library is not in use."""
    module = sys.modules.get("transformers.utils.output_capturing")
    return getattr(module, "_active_collector", None)


def _collected() -> Taken:
    variable = _variable()
    active = variable.get() if variable is not None else None
    return {key: value for key, value in (active or {}).items() if not key.startswith("_")}


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
