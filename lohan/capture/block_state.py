"""The state that a block changes in training, and its restoration for recomputation."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from operator import is_
from typing import Any

import torch
from torch import nn

from lohan.errors import ModelError

# the dictionary of a module's buffers or attributes, and a key
Attribute = tuple[dict[str, Any], str]


OldValues = list[tuple[Attribute, Any]]


_ABSENT = object()


@dataclass(frozen=True)
class Snapshot:
    """The state of a block before a call.

    It holds the version of each buffer, for some a copy, and all attributes of the modules.
    """

    buffers: list[tuple[torch.Tensor, int, torch.Tensor | None]]
    attributes: list[dict[str, Any]]


# set by transformers when it registers hooks, which stay
_HOOKED = "_output_capturing_hooks_installed"


class BlockState:
    """Buffers and attributes of one block."""

    def __init__(self, name: str, module: nn.Module) -> None:
        self._name = name
        # indices into `_attributes`; None before the first forward
        self._changing: set[int] | None = None
        self._modules = list(module.modules())
        self._attributes: list[Attribute] = [
            (child._buffers, key)
            for child in self._modules
            for key, buffer in child._buffers.items()
            if buffer is not None
        ]

    def snapshot(self) -> Snapshot:
        """Record the state before a forward. Buffers are copied if they may change.

        The first forward shows which buffers change.
        """
        copied = range(len(self._attributes)) if self._changing is None else self._changing
        buffers = [
            (tensor, tensor._version, tensor.detach().clone() if number in copied else None)
            for number, tensor in enumerate(self._current())
        ]
        return Snapshot(buffers, [dict(vars(module)) for module in self._modules])

    def changes_since(self, before: Snapshot) -> OldValues:
        """Return the old values of everything that forward has changed."""
        saved: OldValues = []
        changed: set[int] = set()
        for number, current in enumerate(self._current()):
            tensor, version, old = before.buffers[number]
            same = current is tensor and current._version == version
            # BatchNorm does not change versions
            if same and (old is None or torch.equal(current, old)):
                continue
            if old is None:
                raise ModelError(
                    f"block {self._name} changes buffer {self._attributes[number][1]}, which it "
                    "left alone in its first forward, so it cannot be recomputed; change it in "
                    "every forward or in none"
                )
            changed.add(number)
            saved.append((self._attributes[number], old))
        self._changing = changed | (self._changing or set())
        return saved + self._other_attributes(before)

    def _other_attributes(self, before: Snapshot) -> OldValues:
        saved: OldValues = []
        for module, old in zip(self._modules, before.attributes, strict=True):
            current = vars(module)
            if current.keys() == old.keys() and all(map(is_, current.values(), old.values())):
                continue  # the usual case, in which the order is the same too
            for key in (current.keys() | old.keys()) - {_HOOKED}:
                if current.get(key, _ABSENT) is not (was := old.get(key, _ABSENT)):
                    saved.append(((current, key), was))
        return saved

    def advanced(self, before: Snapshot) -> str:
        """Return the name of a buffer or number that a call has changed, or an empty string.

        A block with such state gives other results in several calls than in one.
        """
        for number, current in enumerate(self._current()):
            tensor, version, old = before.buffers[number]
            moved = current is not tensor or current._version != version
            if moved and (old is None or not torch.equal(current, old)):
                return f"buffer {self._attributes[number][1]}"
        for (attributes, key), was in self._other_attributes(before):
            if isinstance(attributes.get(key), int | float) and isinstance(was, int | float):
                return f"attribute {key}"
        return ""

    def _current(self) -> list[torch.Tensor]:
        return [owner[key] for owner, key in self._attributes]

    @contextmanager
    def preserved(self) -> Iterator[None]:
        """Restore buffers and attributes on exit."""
        before = self.snapshot()
        pairs = zip(self._attributes, self._current(), strict=True)
        with with_old_values([(attribute, tensor) for attribute, tensor in pairs]):
            try:
                yield
            finally:
                for attribute, old in self._other_attributes(before):
                    _put(attribute, old)


def _put(attribute: Attribute, value: Any) -> None:
    owner, key = attribute
    if value is _ABSENT:
        owner.pop(key, None)
    else:
        owner[key] = value


def restore_values(saved: OldValues) -> None:
    for attribute, old in saved:
        _put(attribute, old.detach().clone() if isinstance(old, torch.Tensor) else old)


@contextmanager
def with_old_values(saved: OldValues) -> Iterator[None]:
    """Temporarily restore old values for a recomputation. Tensors are copied."""
    current = [(attribute, attribute[0].get(attribute[1], _ABSENT)) for attribute, _ in saved]
    try:
        restore_values(saved)
        yield
    finally:
        for attribute, value in current:
            _put(attribute, value)
