"""What a block's call finds around it, so that its recomputation finds the same.

Autocast is one such thing. The other: transformers collects results from inside blocks (router
logits, attention weights) through hooks. They leave the block as further outputs of it, with their
gradients, and are handed on to whoever collects.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch

Taken = dict[str, list[Any]]
_OWN = "hidden_states"  # taken where blocks meet, not inside them


@dataclass(frozen=True)
class Ambient:
    wanted: tuple[str, ...] = ()  # what is collected
    autocast: tuple[str, torch.dtype] | None = None

    @classmethod
    def now(cls, device: str) -> Ambient:
        enabled = torch.is_autocast_enabled(device)
        autocast = (device, torch.get_autocast_dtype(device)) if enabled else None
        return cls(tuple(key for key in _collected() if key != _OWN), autocast)

    def run(self, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> tuple[Any, Taken]:
        """What the call returns, and what was collected inside it."""
        cast = nullcontext() if self.autocast is None else _autocast(*self.autocast)
        with cast, collecting(self.wanted) as taken:
            return forward(*args, **kwargs), taken


def hand_on(out: Any, taken: Taken) -> Any:
    """Gives what was collected inside a call to whoever collects; returns the rest."""
    outer = _collected()
    for key, found in taken.items():
        outer[key].extend(found)
    return out


def _autocast(device: str, dtype: torch.dtype) -> torch.autocast:
    return torch.autocast(device, dtype=dtype, cache_enabled=False)


def _variable() -> Any:
    """transformers' own, if it is there and in use."""
    module = sys.modules.get("transformers.utils.output_capturing")
    return getattr(module, "_active_collector", None)


def _collected() -> Taken:
    variable = _variable()
    found = variable.get() if variable is not None else None
    return {key: value for key, value in (found or {}).items() if not key.startswith("_")}


@contextmanager
def collecting(wanted: tuple[str, ...] = ()) -> Iterator[Taken]:
    """Of what is collected inside, this and nothing else, and for nobody outside."""
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
