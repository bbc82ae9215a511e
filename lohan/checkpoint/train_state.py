"""What every manifest has of a run: step counters, loss scale, random state, changed buffers."""

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
from lohan.model.state import damaged, stored
from lohan.util.units import MiB, format_bytes

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
    # Skipped updates by parameter: it had no gradient. Named as in the store.
    missed: Mapping[str, int] = field(default_factory=dict)

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


# -- Buffers that a model changes while it trains --------------------------------------------------
#
# Statistics of BatchNorm, vectors of spectral norm, counters: those that belong to the checkpoint
# are committed with each step, so a resumed run has them too.


LIMIT = 4 * MiB  # what a manifest can carry
KEY = "buffers"


class ChangedBuffers:
    """Those of a whole model that have changed since the run began and belong to its state. Once
    committed, a buffer stays among them: each commit replaces all that came before."""

    def __init__(self, model: nn.Module, committed: Mapping[str, Any]) -> None:
        self._model = model
        self._known = frozenset(committed.get(KEY, {}))
        self._first = {
            name: (id(tensor), tensor._version) for name, tensor in _persistent(model).items()
        }
        self._at_first = _versions(model)
        self._counting = {  # they count no versions
            f"{name}.{key}" if name else key
            for name, module in model.named_modules()
            if isinstance(module, _NormBase)
            for key in module._buffers
        }

    @property
    def unchanged(self) -> bool:
        """No buffer, of the checkpoint or not, has changed since the run began: a step that is run
        again finds what it found."""
        return not self._known and not self._counting and _versions(self._model) == self._at_first

    def to_meta(self) -> dict[str, Any]:
        changed = {
            name: tensor
            for name, tensor in _persistent(self._model).items()
            if name in self._known
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
    """The values that were committed with the last step."""
    there = _persistent(model)
    kind = dict[str, tuple[str, tuple[int, ...], str]]
    for name, found in stored(meta, KEY, kind, {}).items():
        if name in there:
            try:
                value = _decode(*found)
            except (ValueError, TypeError, RuntimeError, AttributeError) as error:
                raise damaged(f"buffer {name}: {str(error).splitlines()[0]}") from None
            if value.shape != there[name].shape:
                raise damaged(
                    f"buffer {name} is {list(value.shape)}, not {list(there[name].shape)}"
                )
            with torch.no_grad():
                there[name].copy_(value)


def _versions(model: nn.Module) -> list[tuple[int, int]]:
    return [(id(tensor), tensor._version) for tensor in model.buffers()]


def _persistent(model: nn.Module) -> dict[str, torch.Tensor]:
    found = {}
    for prefix, module in model.named_modules():
        for name, buffer in module._buffers.items():
            if buffer is not None and name not in module._non_persistent_buffers_set:
                found[f"{prefix}.{name}" if prefix else name] = buffer
    return found


def _encode(tensor: torch.Tensor) -> list[Any]:
    flat = tensor.detach().cpu().contiguous().view(-1).view(torch.uint8)
    text = base64.b64encode(flat.numpy().tobytes()).decode()
    return [str(tensor.dtype).removeprefix("torch."), list(tensor.shape), text]


def _decode(dtype: str, shape: tuple[int, ...], text: str) -> torch.Tensor:
    flat = torch.frombuffer(bytearray(base64.b64decode(text)), dtype=torch.uint8)
    return flat.view(getattr(torch, dtype)).view(shape)
