"""Step counters, loss scale and random state of a run, as every manifest has them."""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import numpy as np
import torch

from lohan.device.base import Device
from lohan.errors import first_line
from lohan.model.state import damaged, stored

GROWTH_INTERVAL = 2000  # clean updates before the fp16 loss scale doubles, as in PyTorch
LARGEST_SCALE, SMALLEST_SCALE = 2.0**24, 2.0**-14


@dataclass(frozen=True)
class TrainState:
    """`step` counts batches seen, `updates` the ones that changed the weights."""

    step: int = 0
    updates: int = 0
    skipped: int = 0
    loss_scale: float = 1.0
    clean_updates: int = 0
    missed: Mapping[str, int] = field(default_factory=dict)  # updates a parameter got no gradient

    @classmethod
    def of(cls, meta: Mapping[str, Any]) -> TrainState:
        found: TrainState = stored(meta, "progress", cls)
        counts = (found.step, found.updates, found.skipped, found.clean_updates)
        if min(counts) < 0 or not SMALLEST_SCALE <= found.loss_scale <= LARGEST_SCALE:
            raise damaged(f"progress is {found}")
        return found

    @classmethod
    def start(cls, mode: str) -> TrainState:
        return cls(loss_scale=65536.0 if mode == "fp16" else 1.0)

    def updated(self, *, scaled: bool, absent: Sequence[str]) -> TrainState:
        scale, clean = self.loss_scale, self.clean_updates + 1
        if scaled and clean == GROWTH_INTERVAL:
            scale, clean = min(scale * 2, LARGEST_SCALE), 0
        missed = {**self.missed, **{name: self.missed.get(name, 0) + 1 for name in absent}}
        return replace(
            self, step=self.step + 1, updates=self.updates + 1, loss_scale=scale,
            clean_updates=clean, missed=missed,
        )  # fmt: skip

    def overflowed(self) -> TrainState:
        return replace(
            self, step=self.step + 1, skipped=self.skipped + 1, clean_updates=0,
            loss_scale=max(self.loss_scale / 2, SMALLEST_SCALE),
        )  # fmt: skip

    def to_meta(self, random_state: Any = None) -> dict[str, Any]:
        """With the random state, so that dropout after a resume continues the same stream. That of
        an accelerator comes behind the host's."""
        states = random_state if isinstance(random_state, tuple) else (torch.get_rng_state(),)
        texts = [base64.b64encode(state.numpy().tobytes()).decode() for state in states]
        return {"progress": asdict(self), "rng": ",".join(texts)}


def restore_rng(meta: Mapping[str, Any], device: Device) -> None:
    """Goes on with what was drawn last, as far as it was drawn on a device of this kind."""
    texts = stored(meta, "rng", str).split(",")
    try:
        raw = [np.frombuffer(base64.b64decode(text), np.uint8).copy() for text in texts]
        states = [torch.from_numpy(state) for state in raw]
        torch.set_rng_state(states[0])
    except (ValueError, RuntimeError) as error:
        raise damaged(f"rng is not a random state of torch ({first_line(error)})") from None
    now = device.random_state()
    if isinstance(now, tuple) and len(states) == len(now):
        device.set_random_state(tuple(states))
