"""Buffers that a model changes while it trains: statistics of BatchNorm, vectors of spectral norm.

A block that changes its buffers does so once per forward. Recomputation starts from the values that
forward found, and what it makes of them is dropped. Those that belong to the checkpoint are
committed with each step, so a resumed run has them too.
"""

from __future__ import annotations

import base64
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase

from lohan.errors import ModelError
from lohan.model.state import damaged, stored
from lohan.util.units import MiB, format_bytes

LIMIT = 4 * MiB  # what a manifest can carry
KEY = "buffers"

Place = tuple[nn.Module, str]
Saved = list[tuple[Place, torch.Tensor]]
Seen = tuple[torch.Tensor, int, torch.Tensor | None]  # a buffer, its version and a copy


class BlockBuffers:
    """The buffers of one block."""

    def __init__(self, name: str, module: nn.Module) -> None:
        self._name = name
        self._changing: set[int] | None = None  # numbers of places, known after the first forward
        self._places: list[Place] = [
            (child, key)
            for child in module.modules()
            for key, buffer in child._buffers.items()
            if buffer is not None
        ]

    def before(self) -> list[Seen]:
        """Before a forward: copies of all of them at first, then of those known to change."""
        copied = range(len(self._places)) if self._changing is None else self._changing
        return [
            (tensor, tensor._version, tensor.detach().clone() if number in copied else None)
            for number, tensor in enumerate(self._current())
        ]

    def after(self, before: list[Seen]) -> Saved:
        """The old values of those that forward has changed."""
        saved: Saved = []
        changed: set[int] = set()
        for number, now in enumerate(self._current()):
            tensor, version, old = before[number]
            same = now is tensor and now._version == version
            if same and (old is None or torch.equal(now, old)):  # BatchNorm counts no versions
                continue
            if old is None:
                raise ModelError(
                    f"block {self._name} changes buffer {self._places[number][1]}, which it left "
                    "alone in its first forward, so it cannot be recomputed; change it in every "
                    "forward or in none"
                )
            changed.add(number)
            saved.append((self._places[number], old))
        self._changing = changed | (self._changing or set())
        return saved

    def _current(self) -> list[torch.Tensor]:
        return [module._buffers[key] for module, key in self._places]  # type: ignore[misc]

    def untouched(self) -> AbstractContextManager[None]:
        """For a run that must leave no trace."""
        pairs = zip(self._places, self._current(), strict=True)
        return as_before([(place, tensor.detach().clone()) for place, tensor in pairs])


@contextmanager
def as_before(saved: Saved) -> Iterator[None]:
    """Old values in their places for a recomputation."""
    current = [(module, key, module._buffers[key]) for (module, key), _ in saved]
    try:
        for (module, key), old in saved:
            module._buffers[key] = old.clone()
        yield
    finally:
        for module, key, buffer in current:
            module._buffers[key] = buffer


class ChangedBuffers:
    """Those of a whole model that have changed since the run began and belong to its state. Once
    committed, a buffer stays among them: each commit replaces all that came before."""

    def __init__(self, model: nn.Module, committed: Mapping[str, Any]) -> None:
        self._model = model
        self._known = frozenset(committed.get(KEY, {}))
        self._first = {
            name: (id(tensor), tensor._version) for name, tensor in _persistent(model).items()
        }
        self._counting = {  # they count no versions
            f"{name}.{key}" if name else key
            for name, module in model.named_modules()
            if isinstance(module, _NormBase)
            for key in module._buffers
        }

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
