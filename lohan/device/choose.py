"""From the user's words to a device, and to blocks that are compiled for it."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import torch
from torch.utils import _pytree as pytree

from lohan.device.accelerator import AcceleratorDevice, found_type
from lohan.device.base import CpuDevice, Device
from lohan.device.emulated import EmulatedDevice
from lohan.errors import ConfigError

NAMES = ("auto", "cpu", "accelerator", "emulated")
BACKENDS = ("cuda", "xpu", "mps", "npu")  # torch's names of accelerators
_AN_ACCELERATOR = re.compile(rf"(accelerator|gpu|{'|'.join(BACKENDS)})(?::(\d+))?")


def open_device(name: str, *, memory: int | None = None, link: float | None = None) -> Device:
    """`auto` is the accelerator if there is one, else the cpu. `link`: bytes/s of an emulated one,
    each way."""
    name, number = _parted(known_name(name))
    if link is not None and name != "emulated":
        raise ConfigError(f"link: --device {name} has the link it has; leave --link out")
    if name == "emulated":
        if memory is None:
            raise ConfigError("device emulated: how much memory? add --device-memory, say 2GiB")
        return EmulatedDevice(memory, h2d=link, d2h=link)
    if name == "accelerator":
        return AcceleratorDevice(memory, number=number)
    if memory is not None:
        raise ConfigError("device cpu: it has no memory of its own; leave --device-memory out")
    return CpuDevice()


def known_name(name: str) -> str:
    """What `auto` means on this machine; an accelerator by any of its names is one, maybe with its
    number: accelerator:1."""
    if (named := _AN_ACCELERATOR.fullmatch(name)) is not None:
        if named[1] in BACKENDS and (found := found_type()) != named[1]:
            raise ConfigError(
                f"device: {name} was asked for, but the accelerator of this machine is {found}; "
                f"use --device {found}"
            )
        return f"accelerator:{named[2]}" if named[2] is not None else "accelerator"
    if name not in NAMES:
        known = ", ".join((*NAMES, "cuda", "cuda:1"))
        raise ConfigError(f"device: got {name!r}, wants one of {known}")
    if name == "auto":
        return "accelerator" if has_accelerator() else "cpu"
    return name


def _parted(name: str) -> tuple[str, int | None]:
    kind, _, number = name.partition(":")
    return kind, int(number) if number else None


def default_dtype(name: str) -> str:
    """How parameters are kept on a device of this name, unless the user says otherwise."""
    kind, number = _parted(known_name(name))
    if kind == "accelerator":
        return AcceleratorDevice(number=number).default_dtype
    return CpuDevice.default_dtype


def has_accelerator() -> bool:
    return hasattr(torch, "accelerator") and torch.accelerator.is_available()


# -- Blocks compiled by torch ----------------------------------------------------------------------
#
# An option, for devices whose results need not have the cpu's bits.
#
# Note [what is compiled] Training calls of which no results are kept, forward and recomputation;
# evaluation runs as it is. Where the plan keeps results from inside a block, its operations run one
# by one as without the option. So do those of a block that draws random numbers: a compiled one may
# draw others in recomputation than in forward. A block's first call runs as it is and shows whether
# it draws any. Blocks in tiles are not compiled.
#
# Note [compiled recomputation] Forward runs without a graph, recomputation with one: torch compiles
# the two apart in any case. Backward needs what recomputation saves, not what the block returns. So
# the form for recomputation returns tensors without values, through which gradients flow: what
# only the block's output needs, its last projection above all, is dead code to the compiler. Where
# dynamo takes a block in several parts, that is true of the part that the output is made in.


Backend = str | Callable[..., Any]  # as torch.compile takes it
Forward = Callable[..., Any]
SPARE = 8  # forms beyond two for every site (forward, recomputation): other batches
LIMITS = ("recompile_limit", "cache_size_limit")  # dynamo's name for it now, and before


def backend_of(choice: bool | Backend, device: Device) -> Backend | None:
    """The user's choice as a backend of torch.compile; None: blocks are not compiled."""
    if choice is False:
        return None
    if not device.compiles:
        raise ConfigError(
            f"compile: blocks are compiled on accelerators only, and this run computes on "
            f"{device.name}, where results have the same bits in every mode; leave --compile out"
        )
    return "inductor" if choice is True else choice


class Compiled:
    """The compiled forwards of a model's sites, each made when it is known that it may be."""

    def __init__(self, backend: Backend | None, *, sites: int) -> None:
        self._backend = backend
        # Forward and recomputation; None: it runs as it is.
        self._made: dict[int, tuple[Forward, Forward] | None] = {}
        if backend is None:
            return
        from torch import _dynamo

        for name in LIMITS:  # all sites of one class share dynamo's forms of its code
            if hasattr(_dynamo.config, name):
                forms = max(2 * sites + SPARE, getattr(_dynamo.config, name))
                setattr(_dynamo.config, name, forms)
                return

    def forward(self, site: int) -> Forward | None:
        made = self._made.get(site)
        return None if made is None else made[0]

    def recompute(self, site: int) -> Forward | None:
        """For backward alone: what it returns has a graph and no values. Note [compiled
        recomputation]."""
        made = self._made.get(site)
        return None if made is None else made[1]

    def undecided(self, site: int) -> bool:
        """Whether a call of this site has something to tell."""
        return self._backend is not None and site not in self._made

    def decide(self, site: int, forward: Forward, before: Any, after: Any) -> None:
        """A call ran as it is, between these states of the random numbers."""
        made = None
        if self._backend is not None and _same(before, after):
            made = (
                torch.compile(forward, backend=self._backend),
                torch.compile(_without_values(forward), backend=self._backend),
            )
        self._made[site] = made


def _without_values(forward: Forward) -> Forward:
    """What a forward returns, for its graph alone."""

    def dropped(leaf: Any) -> Any:
        learns = isinstance(leaf, torch.Tensor) and leaf.requires_grad
        return _DropValue.apply(leaf) if learns else leaf

    def run(*args: Any, **kwargs: Any) -> Any:
        return pytree.tree_map(dropped, forward(*args, **kwargs))

    return run


class _DropValue(torch.autograd.Function):
    """A tensor of the same shape that has not been filled; gradients pass."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor) -> torch.Tensor:
        return torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return grad


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)
    return all(map(_same, one, other))
