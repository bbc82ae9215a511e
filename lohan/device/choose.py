"""From the user's words to a device."""

from __future__ import annotations

import re

import torch

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
