"""Mutable mappings among the arguments of blocks. Gemma 4 shares keys and values of layers so."""

from __future__ import annotations

from collections import UserDict
from collections.abc import Callable
from typing import Any

from torch.utils import _pytree as pytree


class SharedMapping:
    """The contents of a mapping among the arguments of a call, and its type."""

    def __init__(self, kind: type, contents: dict[Any, Any]) -> None:
        self.kind, self.contents = kind, contents


pytree.register_pytree_node(
    SharedMapping,
    lambda one: (list(one.contents.values()), (one.kind, tuple(one.contents))),
    lambda values, context: SharedMapping(context[0], dict(zip(context[1], values, strict=True))),
)


def wrap_mappings(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any, list[Any]]:
    """Return the arguments with their mappings wrapped, and the caller's mappings in order."""
    mappings = [value for value in (*args, *kwargs.values()) if _is_mapping(value)]
    if not mappings:
        return args, kwargs, mappings
    wrapped = tuple(map(_wrapped, args))
    return wrapped, {key: _wrapped(value) for key, value in kwargs.items()}, mappings


def write_back_mappings(out: Any, mappings: list[Any]) -> Any:
    """Return the result of a call, after adding what it wrote to the mappings."""
    if not mappings:
        return out
    out, written = out
    for mapping, entries in zip(mappings, written, strict=True):
        mapping.update(entries)
    return out


def with_writes(forward: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a block's forward so that it also returns what it wrote to wrapped mappings."""

    def run(*args: Any, **kwargs: Any) -> Any:
        if not any(isinstance(value, SharedMapping) for value in (*args, *kwargs.values())):
            return forward(*args, **kwargs)
        unwrapped_mappings: list[tuple[Any, dict[Any, Any]]] = []

        def unwrapped(value: Any) -> Any:
            if not isinstance(value, SharedMapping):
                return value
            unwrapped_mappings.append((value.kind(value.contents), value.contents))
            return unwrapped_mappings[-1][0]

        args = tuple(map(unwrapped, args))
        out = forward(*args, **{key: unwrapped(value) for key, value in kwargs.items()})
        return out, [
            {key: value for key, value in now.items() if value is not before.get(key)}
            for now, before in unwrapped_mappings
        ]

    return run


def _is_mapping(value: Any) -> bool:
    return type(value) is dict or isinstance(value, UserDict)


def _wrapped(value: Any) -> Any:
    return SharedMapping(type(value), dict(value)) if _is_mapping(value) else value
