"""Selection of a device by name, and compilation of blocks for it."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import torch
from torch.utils import _pytree as pytree

from lohan.device.accelerator import AcceleratorDevice, available_type, is_integrated
from lohan.device.base import CpuDevice, Device
from lohan.device.emulated import UNIFIED_NAME, EmulatedDevice, UnifiedDevice
from lohan.device.integrated import IntegratedDevice
from lohan.errors import ConfigError
from lohan.util.settings import BACKENDS, DEVICES

_AN_ACCELERATOR = re.compile(rf"(accelerator|gpu|{'|'.join(BACKENDS)})(?::(\d+))?")


def open_device(name: str, *, memory: int | None = None, link: float | None = None) -> Device:
    """Open a device by name; `auto` is the accelerator if there is one, otherwise the CPU.

    `memory` is the most that a run may use, in bytes. `link` is the speed of an emulated link in
    bytes/s, for each direction.
    """
    name, number = _parted(canonical_name(name))
    if link is not None and name != "emulated":
        raise ConfigError(
            f"--link applies only to emulated devices, not to --device {name}; leave it out"
        )
    if name == "emulated":
        if memory is None:
            raise ConfigError("--device emulated requires --device-memory, such as 2GiB")
        return EmulatedDevice(memory, h2d=link, d2h=link)
    if name == "accelerator":
        return _accelerator(memory, number)
    if memory is not None:
        raise ConfigError(f"device {name}: it has no memory of its own; leave --device-memory out")
    return UnifiedDevice() if name == UNIFIED_NAME else CpuDevice()


def _accelerator(memory: int | None, number: int | None) -> AcceleratorDevice:
    """Open the accelerator with this number.

    A GPU that shares the host's memory computes in that memory. If `memory` is given, such a GPU is
    treated like a card with that much memory of its own: tensors are copied to it and back.
    """
    device = AcceleratorDevice(memory, number=number)
    if memory is None and is_integrated(device.torch_device):
        device.close()
        return IntegratedDevice(number=number)
    return device


def canonical_name(name: str) -> str:
    """Return the canonical name of a device, after resolving `auto`.

    Every name of an accelerator becomes `accelerator`, with its number if given: accelerator:1.
    """
    if (named := _AN_ACCELERATOR.fullmatch(name)) is not None:
        if named[1] in BACKENDS and (available := available_type()) != named[1]:
            raise ConfigError(
                f"device: {name} was requested, but the accelerator of this machine is {available}"
                f"; use --device {available}"
            )
        return f"accelerator:{named[2]}" if named[2] is not None else "accelerator"
    if name not in DEVICES:
        names = ", ".join((*DEVICES, "cuda", "cuda:1"))
        raise ConfigError(f"device: got {name!r}, wants one of {names}")
    if name == "auto":
        return "accelerator" if has_accelerator() else "cpu"
    return name


def _parted(name: str) -> tuple[str, int | None]:
    kind, _, number = name.partition(":")
    return kind, int(number) if number else None


def default_dtype(name: str) -> str:
    """Return the type of parameters on this device if the user does not choose one."""
    kind, number = _parted(canonical_name(name))
    if kind == "accelerator":
        return AcceleratorDevice(number=number).default_dtype
    return CpuDevice.default_dtype


def has_accelerator() -> bool:
    return hasattr(torch, "accelerator") and torch.accelerator.is_available()


# -- Blocks compiled by torch ----------------------------------------------------------------------
#
# Compilation is optional, for devices whose results need not match the CPU's bits.
#
# Note [what is compiled] Blocks are compiled in training, for forward and for recomputation.
# Evaluation is not compiled. If the plan keeps results from inside a block, the block's operations
# run one by one, as without the option. The same holds for a block that draws random numbers,
# because its compiled form may draw different ones in recomputation than in forward. The first call
# of a block runs uncompiled and shows whether it draws any. Blocks in tiles are not compiled.
#
# Note [compiled recomputation] Forward runs without a graph and recomputation with one, so torch
# compiles the two separately in any case. Backward needs what recomputation saves, not what the
# block returns. Therefore the form for recomputation returns tensors without values, through which
# gradients flow. Whatever only the block's output needs, mainly its last projection, is then dead
# code to the compiler. If dynamo splits a block into several graphs, this holds for the graph that
# makes the output.


Backend = str | Callable[..., Any]  # as accepted by torch.compile
Forward = Callable[..., Any]
# The number of compiled forms for other batch shapes, in addition to two per site (forward and
# recomputation).
SPARE = 8
# dynamo's limits on the number of compiled forms: for one function, and for all functions. Each
# limit is listed by its current and its former name.
LIMITS = (
    ("recompile_limit", "cache_size_limit"),
    ("accumulated_recompile_limit", "accumulated_cache_size_limit"),
)


def backend_of(choice: bool | Backend, device: Device) -> Backend | None:
    """Return the torch.compile backend for the user's choice, or None for no compilation."""
    if choice is False:
        return None
    if not device.compiles:
        raise ConfigError(
            f"compile: blocks are compiled on accelerators only, and this run computes on "
            f"{device.name}, where results have the same bits in every mode; leave --compile out"
        )
    return "inductor" if choice is True else choice


class Compiled:
    """The compiled forwards of a model's sites; `decide` compiles a site after its first call."""

    def __init__(self, backend: Backend | None, *, sites: int) -> None:
        self._backend = backend
        # (forward, recomputation) by site; None if the site runs uncompiled.
        self._compiled: dict[int, tuple[Forward, Forward] | None] = {}
        if backend is None:
            return
        from torch import _dynamo

        for names in LIMITS:  # All sites of a class share dynamo's limits for its code.
            name = next(name for name in names if hasattr(_dynamo.config, name))
            forms = max(2 * sites + SPARE, getattr(_dynamo.config, name))
            setattr(_dynamo.config, name, forms)

    def forward(self, site: int) -> Forward | None:
        compiled = self._compiled.get(site)
        return None if compiled is None else compiled[0]

    def recompute(self, site: int) -> Forward | None:
        """Return the compiled recomputation of a site, or None if the site runs uncompiled.

        Its result has a graph but no values. See Note [compiled recomputation].
        """
        compiled = self._compiled.get(site)
        return None if compiled is None else compiled[1]

    def undecided(self, site: int) -> bool:
        """Return whether `decide` is still to be called for this site."""
        return self._backend is not None and site not in self._compiled

    def decide(self, site: int, forward: Forward, before: Any, after: Any) -> None:
        """Decide whether to compile a site after an uncompiled call.

        `before` and `after` are the random states around that call. A site is compiled if they are
        equal.
        """
        compiled = None
        if self._backend is not None and _same(before, after):
            compiled = (
                torch.compile(forward, backend=self._backend),
                torch.compile(_without_values(forward), backend=self._backend),
            )
        self._compiled[site] = compiled


def _without_values(forward: Forward) -> Forward:
    """Return a forward whose results have a graph but no values."""

    def dropped(leaf: Any) -> Any:
        learns = isinstance(leaf, torch.Tensor) and leaf.requires_grad
        return _DropValue.apply(leaf) if learns else leaf

    def run(*args: Any, **kwargs: Any) -> Any:
        return pytree.tree_map(dropped, forward(*args, **kwargs))

    return run


class _DropValue(torch.autograd.Function):
    """A function that replaces a tensor by an uninitialised one of the same shape.

    Gradients flow through it unchanged.
    """

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
