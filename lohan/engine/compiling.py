"""Blocks compiled by torch: an option, for devices whose results need not have the cpu's bits.

Note [what is compiled]
Calls that nobody looks into. Where the plan keeps results from inside a block, its operations run
one by one as without the option. So do those of a block that draws random numbers: a compiled one
may draw others in recomputation than in forward. A block's first call runs as it is and shows
whether it draws any.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from lohan.device.base import Device
from lohan.errors import ConfigError

Backend = str | Callable[..., Any]  # as torch.compile takes it
Forward = Callable[..., Any]
SPARE = 8  # forms of a block beyond one for every site: forward, backward, other batches
LIMITS = ("recompile_limit", "cache_size_limit")  # dynamo's name for it now, and before


def backend_of(wish: bool | Backend, device: Device) -> Backend | None:
    """The user's wish as a backend of torch.compile; None: blocks are not compiled."""
    if wish is False:
        return None
    if not device.compiles:
        raise ConfigError(
            f"compile: blocks are compiled on accelerators only, and this run computes on "
            f"{device.name}, where results have the same bits in every mode; leave --compile out"
        )
    return "inductor" if wish is True else wish


class Compiled:
    """The compiled forwards of a model's sites, each made when it is known that it may be."""

    def __init__(self, backend: Backend | None, *, sites: int) -> None:
        self._backend = backend
        self._made: dict[int, Forward | None] = {}  # None: it runs as it is
        if backend is not None:
            _allow_forms(2 * sites + SPARE)

    def of(self, site: int) -> Forward | None:
        return self._made.get(site)

    def curious(self, site: int) -> bool:
        """Whether a call of this site has something to tell."""
        return self._backend is not None and site not in self._made

    def learn(self, site: int, forward: Forward, before: Any, after: Any) -> None:
        """A call ran as it is, between these states of the random numbers."""
        made = None
        if self._backend is not None and _same(before, after):
            made = torch.compile(forward, backend=self._backend, dynamic=False)
        self._made[site] = made


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)
    return all(map(_same, one, other))


def _allow_forms(count: int) -> None:
    """All sites of one class share dynamo's forms of its code, which are few unless it is told."""
    from torch import _dynamo

    for name in LIMITS:
        if hasattr(_dynamo.config, name):
            setattr(_dynamo.config, name, max(count, getattr(_dynamo.config, name)))
            return
