"""A fast replacement of pytree for the arguments and results of calls."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch.utils import _pytree as pytree

PLAIN = frozenset({torch.Tensor, torch.nn.Parameter, type(None), bool, int, float, str})


# None for a leaf, pytree's own specification, or type, keys and specifications of the contents.
Spec = Any


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
    inner, spec = pytree.tree_flatten(tree)
    leaves += inner
    return spec


def _unflatten(remaining: Iterator[Any], spec: Spec) -> Any:
    if spec is None:
        return next(remaining)
    if isinstance(spec, pytree.TreeSpec):
        return pytree.tree_unflatten([next(remaining) for _ in range(spec.num_leaves)], spec)
    kind, keys, parts = spec
    children = [_unflatten(remaining, part) for part in parts]
    if kind is dict:
        return dict(zip(keys, children, strict=True))
    return children if kind is list else tuple(children)
