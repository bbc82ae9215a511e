"""The environment and the result type shared by the checks of `lohan doctor --gpu`."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lohan.device.accelerator import AcceleratorDevice
from lohan.device.base import Device
from lohan.device.choose import open_device
from lohan.device.integrated import IntegratedDevice
from lohan.errors import LohanError
from lohan.tools.late_device import LateDevice


class WrongResult(LohanError):
    """Raised if two computations that must agree give different numbers."""


@dataclass(frozen=True)
class Bench:
    """The environment of a check: its device and its scratch folder.

    `real` is True on an actual card. Checks then run at the sizes of a real run, otherwise at a
    small scale.
    """

    device_name: str
    folder: Path
    real: bool

    def open(self, memory: int | None = None) -> Device:
        """Open the device; treat an integrated GPU as one with its own memory, to test copies."""
        device = open_device(self.device_name, memory=memory)
        if not isinstance(device, AcceleratorDevice):
            raise LohanError(f"--device {self.device_name}: this is no accelerator")
        if isinstance(device, IntegratedDevice):
            return AcceleratorDevice(number=device.torch_device.index)
        return device

    def open_integrated(self) -> Device | None:
        """Open the device if it is a GPU that computes in host memory; otherwise return None."""
        device = open_device(self.device_name)
        return device if isinstance(device, IntegratedDevice) else None

    def open_late(self) -> LateDevice:
        """Return the device with random pauses on its lanes.

        Only CUDA cards can pause. Tests delay the streams of their software devices themselves.
        """
        number = self.open().torch_device.index
        pauses = self.real and self.open().torch_device.type == "cuda"
        return LateDevice(number=number, pause=None if pauses else lambda cycles: None)


@dataclass
class CheckResult:
    """The figures that doctor compares with bounds, and the facts that it only reports."""

    figures: dict[str, float] = field(default_factory=dict)
    facts: dict[str, Any] = field(default_factory=dict)
