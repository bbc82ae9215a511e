"""Batches of a Trainer: several made one, and the shapes to plan for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from lohan.errors import DataError

# What stands where a row of one batch is shorter than those of another. Behind a row's end nothing
# is learnt and nothing looks back at it.
FILL = {
    "input_ids": 0,
    "attention_mask": 0,
    "labels": -100,
    "shift_labels": -100,
    "token_type_ids": 0,
    "position_ids": 0,
}


def merged(batches: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """One batch with the rows of all. Rows are filled on the right to the longest."""
    if len(batches) == 1:
        return dict(batches[0])
    made: dict[str, Any] = {}
    for name, first in batches[0].items():
        values = [batch.get(name) for batch in batches]
        if not isinstance(first, torch.Tensor) or first.ndim == 0:
            if any(value != first for value in values):
                raise _unequal(name, "values that are no tensors")
            made[name] = first
            continue
        made[name] = torch.cat(_filled(name, values))
    return made


def _filled(name: str, tensors: Sequence[Any]) -> list[torch.Tensor]:
    if any(not isinstance(t, torch.Tensor) or t.ndim != tensors[0].ndim for t in tensors):
        raise _unequal(name, "different ranks")
    if len({t.shape[1:] for t in tensors}) == 1:
        return list(tensors)
    if name not in FILL or tensors[0].ndim != 2:
        raise _unequal(name, f"shapes {', '.join(str(list(t.shape)) for t in tensors)}")
    longest = max(t.shape[1] for t in tensors)
    return [
        torch.nn.functional.pad(t, (0, longest - t.shape[1]), value=FILL[name]) for t in tensors
    ]


def _unequal(name: str, what: str) -> DataError:
    return DataError(
        f"gradient accumulation: {name!r} has {what} in the batches of one step, so they cannot be "
        "joined; set gradient_accumulation_steps to 1 and raise per_device_train_batch_size"
    )


def shapes_for(inputs: Mapping[str, Any], max_length: int | None) -> dict[str, torch.Tensor]:
    """The batch to plan for: this one, with its tokens as long as batches may become."""
    tensors = {n: t for n, t in inputs.items() if isinstance(t, torch.Tensor)}
    ids = tensors.get("input_ids")
    if ids is None or ids.ndim != 2:
        return tensors
    length = ids.shape[1]
    longest = max(length, max_length or 0)

    def shaped(tensor: torch.Tensor) -> torch.Tensor:
        longer = tensor.ndim >= 2 and tensor.shape[1] == length
        size = (tensor.shape[0], longest, *tensor.shape[2:]) if longer else tensor.shape
        return torch.empty(size, dtype=tensor.dtype, device="meta")

    return {name: shaped(t) for name, t in tensors.items() if t.ndim}


def largest_shapes(all_ranks: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """What is to be planned for where each of several processes has a batch of its own."""
    first = dict(all_ranks[0])
    for other in all_ranks[1:]:
        for name, (shape, dtype) in first.items():
            if name in other and len(other[name][0]) == len(shape):
                first[name] = [list(map(max, shape, other[name][0])), dtype]
    return first


def shapes_to_json(shapes: Mapping[str, torch.Tensor]) -> dict[str, Any]:
    return {n: [list(t.shape), str(t.dtype).removeprefix("torch.")] for n, t in shapes.items()}


def shapes_from_json(data: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    return {
        name: torch.empty(shape, dtype=getattr(torch, dtype), device="meta")
        for name, (shape, dtype) in data.items()
    }
