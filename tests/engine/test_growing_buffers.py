"""Buffers of activations that grow while the launching thread uses others."""

from __future__ import annotations

from typing import Any

import torch

from lohan.device.emulated import EmulatedDevice
from lohan.engine.offload import DeviceActivationOffload, Pack
from lohan.util.units import MiB


class Interrupted(tuple[Any, ...]):
    """An entry of the views; reading it lets the launching thread add another."""

    __slots__ = ()
    add: Any = None

    def __getitem__(self, index: Any) -> Any:
        Interrupted.add()
        return super().__getitem__(index)


def test_a_view_is_added_while_another_buffer_grows() -> None:
    device = EmulatedDevice(64 * MiB)
    try:
        offload = DeviceActivationOffload(
            device, sites=frozenset({0}), device_buffers=1, spill=None
        )
        pack = Pack.of([torch.zeros(256)], 0)
        small, other = offload._input_buffer(0, 512), offload._slice_buffer(0, 0, 2048)
        offload._tensors_in(pack, other)
        offload._tensors_in(Pack.of([torch.zeros(64)], 0), small)
        added = iter(range(1, 100))
        Interrupted.add = staticmethod(
            lambda: offload._tensors_in(Pack.of([torch.zeros(next(added))], 0), other)
        )
        for key, entry in offload._views.items():
            offload._views[key] = Interrupted(entry)
        grown = offload._input_buffer(0, 4096)
        assert len(grown) >= 4096 and next(added) > 2
        assert not any(tuple.__getitem__(v, 0) is small for v in offload._views.values())
    finally:
        Interrupted.add = None
        device.close()
