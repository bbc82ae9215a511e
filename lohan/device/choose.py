"""From the user's words to a device."""

from __future__ import annotations

import torch

from lohan.device.accelerator import AcceleratorDevice
from lohan.device.base import CpuDevice, Device
from lohan.device.emulated import EmulatedDevice
from lohan.errors import ConfigError

NAMES = ("auto", "cpu", "accelerator", "emulated")


def open_device(name: str, *, memory: int | None = None, link: float | None = None) -> Device:
    """`auto` is the accelerator if there is one, else the cpu. `link`: bytes/s of an emulated one,
    each way."""
    name = known_name(name)
    if link is not None and name != "emulated":
        raise ConfigError(f"link: --device {name} has the link it has; leave --link out")
    if name == "emulated":
        if memory is None:
            raise ConfigError("device emulated: how much memory? add --device-memory, say 2GiB")
        return EmulatedDevice(memory, h2d=link, d2h=link)
    if name == "accelerator":
        return AcceleratorDevice(memory)
    if memory is not None:
        raise ConfigError("device cpu: it has no memory of its own; leave --device-memory out")
    return CpuDevice()


def known_name(name: str) -> str:
    """What `auto` means on this machine, or the name as it is."""
    if name not in NAMES:
        raise ConfigError(f"device: got {name!r}, wants one of {', '.join(NAMES)}")
    if name == "auto":
        return "accelerator" if has_accelerator() else "cpu"
    return name


def default_dtype(name: str) -> str:
    """How parameters are kept on a device of this name, unless the user says otherwise."""
    if name == "accelerator" or (name == "auto" and has_accelerator()):
        return AcceleratorDevice().default_dtype
    return CpuDevice.default_dtype


def has_accelerator() -> bool:
    return hasattr(torch, "accelerator") and torch.accelerator.is_available()
