"""A device with random pauses on its lanes, which reveals missing waits on a fast card.

On a card, copying the weights of a small model takes microseconds. Code that reads them without
waiting for the copy therefore still reads the right values. To reveal such code, `lohan doctor
--gpu` enqueues a pause of random length before every copy and before every event on the compute
stream.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import torch

from lohan.device.accelerator import AcceleratorDevice
from lohan.device.base import Event, Pairs

LONGEST_PAUSE = 3_000_000  # clock cycles; about two milliseconds


class LateDevice(AcceleratorDevice):
    """An accelerator with random pauses on its streams.

    `pause(cycles)` enqueues a pause of that many clock cycles on the current stream. The default is
    `torch.cuda._sleep`.
    """

    def __init__(
        self,
        memory: int | None = None,
        *,
        number: int | None = None,
        pause: Callable[[int], Any] | None = None,
        seed: int = 0,
    ) -> None:
        super().__init__(memory, number=number)
        self._pause: Callable[[int], Any] = pause or torch.cuda._sleep
        self._random = random.Random(seed)

    def copy(self, lane: str, pairs: Pairs, *, after: Event | None = None) -> Event:
        self._be_late(self._streams[lane])
        return super().copy(lane, pairs, after=after)

    def mark(self) -> Event:
        self._be_late(self._compute())
        return super().mark()

    def _be_late(self, stream: Any) -> None:
        with self._current(stream):
            self._pause(self._random.randrange(LONGEST_PAUSE))
