"""Leaves of arguments and results."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch.utils import _pytree as pytree

PLAIN = frozenset({torch.Tensor, torch.nn.Parameter, type(None), bool, int, float, str})


Spec = Any  # None: a leaf; pytree's own; or kind, keys and specs of what is inside


def flatten(tree: Any) -> tuple[list[Any], Spec]:
    leaves: list[Any] = []
    return leaves, _flatten(tree, leaves)


def tree_leaves(tree: Any) -> list[Any]:
    return flatten(tree)[0]


def unflatten(leaves: Sequence[Any], spec: Spec) -> Any:
    return _unflatten(iter(leaves), spec)


def detached(tree: Any) -> Any:
    """Return the same tree with tensors that have no autograd history."""
    leaves, spec = flatten(tree)
    return unflatten([x.detach() if isinstance(x, torch.Tensor) else x for x in leaves], spec)


def _flatten(tree: Any, leaves: list[Any]) -> Spec:
    kind = type(tree)
    if kind in PLAIN:
        leaves.append(tree)
        return None
    if kind is tuple or kind is list:
        return kind, None, [_flatten(part, leaves) for part in tree]
    if kind is dict:
        return kind, tuple(tree), [_flatten(part, leaves) for part in tree.values()]
    found, spec = pytree.tree_flatten(tree)
    leaves += found
    return spec


def _unflatten(coming: Iterator[Any], spec: Spec) -> Any:
    if spec is None:
        return next(coming)
    if isinstance(spec, pytree.TreeSpec):
        return pytree.tree_unflatten([next(coming) for _ in range(spec.num_leaves)], spec)
    kind, keys, parts = spec
    made = [_unflatten(coming, part) for part in parts]
    if kind is dict:
        return dict(zip(keys, made, strict=True))
    return made if kind is list else tuple(made)
