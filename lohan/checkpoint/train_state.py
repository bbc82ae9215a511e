"""Training state in every manifest: step counters, loss scale, random state, changed buffers."""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase

from lohan.device.base import Device
from lohan.errors import ModelError, first_line
from lohan.model.state import (
    damaged,
    stored,
)
from lohan.util.units import MiB, format_bytes

GROWTH_INTERVAL = 2000  # consecutive updates without overflow before the fp16 loss scale doubles
LARGEST_SCALE, SMALLEST_SCALE = 2.0**24, 2.0**-14


@dataclass(frozen=True)
class TrainState:
    """Step counters and loss scale; `step` counts all batches, `updates` changes of the weights."""

    step: int = 0
    updates: int = 0
    skipped_steps: int = 0  # number of steps without an update because of an overflow
    loss_scale: float = 1.0
    clean_updates: int = 0
    # Parameter name -> number of updates in which the parameter had no gradient.
    missed_updates: Mapping[str, int] = field(default_factory=dict)

    @classmethod
    def of(cls, meta: Mapping[str, Any]) -> TrainState:
        state: TrainState = stored(meta, "progress", cls)
        counts = (state.step, state.updates, state.skipped_steps, state.clean_updates)
        if min(counts) < 0 or not SMALLEST_SCALE <= state.loss_scale <= LARGEST_SCALE:
            raise damaged(f"progress is {state}")
        return state

    @classmethod
    def start(cls, dtype: str) -> TrainState:
        return cls(loss_scale=65536.0 if dtype == "fp16" else 1.0)

    def updated(self, *, scaled: bool, absent: Sequence[str]) -> TrainState:
        scale, clean = self.loss_scale, self.clean_updates + 1
        if scaled and clean == GROWTH_INTERVAL:
            scale, clean = min(scale * 2, LARGEST_SCALE), 0
        missed = dict(self.missed_updates)
        missed |= {name: missed.get(name, 0) + 1 for name in absent}
        return replace(
            self,
            step=self.step + 1,
            updates=self.updates + 1,
            loss_scale=scale,
            clean_updates=clean,
            missed_updates=missed,
        )

    def overflowed(self) -> TrainState:
        return replace(
            self,
            step=self.step + 1,
            skipped_steps=self.skipped_steps + 1,
            clean_updates=0,
            loss_scale=max(self.loss_scale / 2, SMALLEST_SCALE),
        )

    def to_meta(self, random_state: Any = None) -> dict[str, Any]:
        """Return the metadata of this state and of the random state.

        The random state is included so that dropout continues the same stream after a resume. If
        there is an accelerator, its random state follows that of the host.
        """
        states = random_state if isinstance(random_state, tuple) else (torch.get_rng_state(),)
        texts = [base64.b64encode(state.numpy().tobytes()).decode() for state in states]
        return {"progress": asdict(self), "rng": ",".join(texts)}


def restore_rng(meta: Mapping[str, Any], device: Device) -> None:
    """Restore the committed random state.

    The device's random state is restored only if the commit contains the state of a device of the
    same kind.
    """
    texts = stored(meta, "rng", str).split(",")
    try:
        raw = [np.frombuffer(base64.b64decode(text), np.uint8).copy() for text in texts]
        states = [torch.from_numpy(state) for state in raw]
        torch.set_rng_state(states[0])
    except (ValueError, RuntimeError) as error:
        raise damaged(f"rng is not a random state of torch ({first_line(error)})") from None
    random_state = device.random_state()
    if isinstance(random_state, tuple) and len(states) == len(random_state):
        device.set_random_state(tuple(states))


# -- Buffers that a model changes while it trains --------------------------------------------------
#
# Examples are the statistics of BatchNorm, the vectors of spectral norm, and counters. Persistent
# buffers are committed with each step, so that a resumed run continues with their values.


LIMIT = 4 * MiB  # maximum size of all changed buffers in a manifest
KEY = "buffers"


class ChangedBuffers:
    """The persistent buffers of a model that have changed since the run began.

    A buffer that was committed once is included in every later commit, because each commit replaces
    the previous one entirely.
    """

    def __init__(self, model: nn.Module, committed: Mapping[str, Any]) -> None:
        self._model = model
        self._committed_names = frozenset(committed.get(KEY, {}))
        self._first = {
            name: (id(tensor), tensor._version) for name, tensor in _persistent(model).items()
        }
        self._at_first = _versions(model)
        # Normalisation layers update their buffers without increasing the version counter.
        self._counting = {
            f"{name}.{key}" if name else key
            for name, module in model.named_modules()
            if isinstance(module, _NormBase)
            for key in module._buffers
        }

    @property
    def unchanged(self) -> bool:
        """True if no buffer, persistent or not, has changed since the run began.

        In this case, a repeated step starts with the same buffers.
        """
        return (
            not self._committed_names
            and not self._counting
            and _versions(self._model) == self._at_first
        )

    def to_meta(self) -> dict[str, Any]:
        changed = {
            name: tensor
            for name, tensor in _persistent(self._model).items()
            if name in self._committed_names
            or name in self._counting
            or self._first.get(name) != (id(tensor), tensor._version)
        }
        size = sum(tensor.numel() * tensor.itemsize for tensor in changed.values())
        if size > LIMIT:
            raise ModelError(
                f"{type(self._model).__name__} changes {len(changed)} buffers of "
                f"{format_bytes(size)} in training, first {next(iter(changed))}; "
                f"{format_bytes(LIMIT)} can be committed with a step: freeze them (eval mode of "
                "their module) or make them parameters"
            )
        return {KEY: {name: _encode(tensor) for name, tensor in changed.items()}} if changed else {}


def restore_buffers(model: nn.Module, meta: Mapping[str, Any]) -> None:
    """Copy the committed buffer values into the model."""
    persistent = _persistent(model)
    kind = dict[str, tuple[str, tuple[int, ...], str]]
    for name, saved in stored(meta, KEY, kind, {}).items():
        if name in persistent:
            try:
                value = _decode(*saved)
            except (ValueError, TypeError, RuntimeError, AttributeError) as error:
                raise damaged(f"buffer {name}: {str(error).splitlines()[0]}") from None
            if value.shape != persistent[name].shape:
                raise damaged(
                    f"buffer {name} is {list(value.shape)}, not {list(persistent[name].shape)}"
                )
            with torch.no_grad():
                persistent[name].copy_(value)


def _versions(model: nn.Module) -> list[tuple[int, int]]:
    return [(id(tensor), tensor._version) for tensor in model.buffers()]


def _persistent(model: nn.Module) -> dict[str, torch.Tensor]:
    buffers = {}
    for prefix, module in model.named_modules():
        for name, buffer in module._buffers.items():
            if buffer is not None and name not in module._non_persistent_buffers_set:
                buffers[f"{prefix}.{name}" if prefix else name] = buffer
    return buffers


def _encode(tensor: torch.Tensor) -> list[Any]:
    flat = tensor.detach().cpu().contiguous().view(-1).view(torch.uint8)
    text = base64.b64encode(flat.numpy().tobytes()).decode()
    return [str(tensor.dtype).removeprefix("torch."), list(tensor.shape), text]


def _decode(dtype: str, shape: tuple[int, ...], text: str) -> torch.Tensor:
    flat = torch.frombuffer(bytearray(base64.b64decode(text)), dtype=torch.uint8)
    return flat.view(getattr(torch, dtype)).view(shape)
