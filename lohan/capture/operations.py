"""What must be known of an operation before its result may be stored, replaced or left out.

It comes from the operation's schema and from the tensors themselves. Names matter in three cases:
operations that autograd and fake tensors add on their own do not count, one view does not say in
its schema that it is one, and ATen's factories (`empty_like`, `new_zeros`) read no values.

Views do not count either. They cost nothing and work without values, and how many there are depends
on how a module is called: an assignment to a slice makes more of them on fake tensors.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import Any

import torch
from torch.utils import _pytree as pytree

OpKey = tuple[str, int]  # an operation, and how many of the same came before it in the call

_UNCOUNTED = {torch.ops.aten.detach.default, torch.ops.prim.device.default}
_HIDDEN_VIEWS = {torch.ops.aten._unsafe_view.default}


@cache
def counts(func: Any) -> bool:
    """Whether an operation is part of the sequence that forward and recomputation share."""
    return func not in _UNCOUNTED and not _is_view(func)


def _is_view(func: Any) -> bool:
    if func in _HIDDEN_VIEWS:
        return True
    returns = getattr(getattr(func, "_schema", None), "returns", ())
    marks = [result.alias_info for result in returns]
    return any(mark is not None and not mark.is_write for mark in marks)


class Counter:
    """Gives the operations of one call their keys."""

    def __init__(self) -> None:
        self._seen: dict[Any, tuple[str, int]] = {}

    def key(self, func: Any) -> OpKey:
        name, count = self._seen.get(func) or (str(func), 0)
        self._seen[func] = (name, count + 1)
        return name, count


def tensors_in(*trees: Any) -> list[torch.Tensor]:
    return [leaf for leaf in pytree.tree_leaves(trees) if isinstance(leaf, torch.Tensor)]


@cache
def reads_values(func: Any) -> bool:
    """False for a factory, which takes only shape and kind from its tensors."""
    return getattr(func, "namespace", "") != "aten" or not (
        str(func).split(".")[1].endswith("_like") or str(func).startswith("aten.new_")
    )


def written(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[torch.Tensor]:
    """Arguments that the operation changes."""
    schema = getattr(func, "_schema", None)
    if schema is None or not schema.is_mutable:
        return []
    return tensors_in(list(_written_arguments(schema, args, kwargs)))


def _written_arguments(schema: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[Any]:
    for position, argument in enumerate(schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            yield args[position] if position < len(args) else kwargs.get(argument.name)


def may_draw(func: Any) -> bool:
    """Whether it may move a random generator on. Foreign operations may, tagged or not."""
    return torch.Tag.nondeterministic_seeded in getattr(func, "tags", ()) or (
        getattr(func, "namespace", "") != "aten"
    )


def storable(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> bool:
    """Whether the results, put in the place of the operation, are all that it does: every tensor
    fills a plain storage of its own, or the operation changes one tensor as a whole in place."""
    results = tensors_in(out)
    if getattr(func, "_schema", None) is None or kwargs.get("generator") is not None:
        return False
    if not results or not all(_fills_storage(result) for result in results):
        return False
    changed = written(func, args, kwargs)
    if changed:
        return len(changed) == 1 and out is changed[0] and out is args[0]
    own = {storage_key(result) for result in results}
    return len(own) == len(results) and own.isdisjoint(map(storage_key, tensors_in(args, kwargs)))


def storage_key(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def _fills_storage(tensor: torch.Tensor) -> bool:
    if tensor.layout != torch.strided or tensor.is_conj() or tensor.is_neg():
        return False
    whole = tensor.numel() * tensor.itemsize == tensor.untyped_storage().nbytes()
    return whole and is_dense(tensor)


def is_dense(tensor: torch.Tensor) -> bool:
    """Its elements lie side by side in some order of the dimensions."""
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size != 1:
            if stride != expected:
                return False
            expected *= size
    return True
