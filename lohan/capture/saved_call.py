"""One call of a block: its arguments, its context, and what it keeps in forward for backward."""

from __future__ import annotations

import sys
from collections import UserDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from lohan.capture.placeholders import without_view
from lohan.capture.slicing import Cut
from lohan.device.base import Device
from lohan.errors import ModelError

if TYPE_CHECKING:
    pass


# -- Arguments and results as leaves ---------------------------------------------------------------
#
# These functions do what pytree does, faster.


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


# -- The context of a call -------------------------------------------------------------------------


@contextmanager
def forked_random_state(device: Device) -> Any:
    """Restore the random state on exit."""
    state = device.random_state()
    try:
        yield
    finally:
        device.set_random_state(state)


@contextmanager
def swapped(replacements: Iterable[tuple[dict[str, Any], str, Any]]) -> Iterator[None]:
    """Temporarily replace tensors in the `_parameters` or `_buffers` of modules."""
    replacements = list(replacements)
    before = [(tensors, key, tensors[key]) for tensors, key, _ in replacements]
    try:
        for tensors, key, other in replacements:
            tensors[key] = other
        yield
    finally:
        for tensors, key, old in before:
            tensors[key] = old


# Outputs that transformers collects during a call, by name.
Taken = dict[str, list[Any]]


# Outputs of this name are collected between blocks, not inside them.
_HIDDEN_STATES = "hidden_states"


@dataclass(frozen=True)
class CallContext:
    wanted: tuple[str, ...] = ()  # the outputs to collect
    autocast: tuple[str, torch.dtype] | None = None

    @classmethod
    def current(cls, device: str) -> CallContext:
        enabled = torch.is_autocast_enabled(device)
        autocast = (device, torch.get_autocast_dtype(device)) if enabled else None
        return cls(tuple(key for key in _collected() if key != _HIDDEN_STATES), autocast)

    def run(self, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> tuple[Any, Taken]:
        """Call `forward` in this context; return its result and the outputs that were collected."""
        with collecting(self.wanted) as taken:
            if self.autocast is None:
                return forward(*args, **kwargs), taken
            device, dtype = self.autocast
            with torch.autocast(device, dtype=dtype, cache_enabled=False):
                return forward(*args, **kwargs), taken


def deliver_collected(out: Any, taken: Taken) -> Any:
    """Return the result of a call, after passing on the outputs that were collected in it.

    The outputs `taken` go to the outer collector.
    """
    if taken:
        outer = _collected()
        for key, values in taken.items():
            outer[key].extend(values)
    return out


def _variable() -> Any:
    """Return transformers' active collector, or None if the library is not in use."""
    module = sys.modules.get("transformers.utils.output_capturing")
    return getattr(module, "_active_collector", None)


def _collected() -> Taken:
    variable = _variable()
    active = variable.get() if variable is not None else None
    return {key: value for key, value in (active or {}).items() if not key.startswith("_")}


@contextmanager
def collecting(wanted: tuple[str, ...] = ()) -> Iterator[Taken]:
    """Collect the outputs named in `wanted` inside the `with` body, and yield their lists.

    Outer collectors do not receive any outputs of the body.
    """
    variable = _variable()
    taken: Taken = {key: [] for key in wanted}
    if variable is None:
        yield taken
        return
    token = variable.set(taken)
    try:
        yield taken
    finally:
        variable.reset(token)


# -- Dicts that a block shares with its caller -----------------------------------------------------
#
# Gemma 4 shares the keys and values of layers in this way.


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
    """Return the result of a call, after adding to the caller's mappings what the call wrote.

    `out` is what the function of `with_writes` has returned.
    """
    if not mappings:
        return out
    out, written = out
    for mapping, entries in zip(mappings, written, strict=True):
        mapping.update(entries)
    return out


def with_writes(forward: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a block's forward so that it also returns what it wrote to wrapped mappings."""

    def run(*args: Any, **kwargs: Any) -> Any:
        if SharedMapping not in map(type, (*args, *kwargs.values())):
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
    kind = type(value)
    # The check of plain types comes first, because `isinstance` with an abstract class is slow.
    return kind is dict or (kind not in PLAIN and isinstance(value, UserDict))


def _wrapped(value: Any) -> Any:
    return SharedMapping(type(value), dict(value)) if _is_mapping(value) else value


# -- What a block call keeps in forward for backward -----------------------------------------------
#
# A call keeps its tensor inputs, the layout of its arguments, and the random state before each
# micro-batch slice. Recomputation therefore repeats the forward exactly, including dropout.


def fills_cache(inputs: Iterable[Any]) -> bool:
    """Return whether an input is a cache of keys and values.

    A cache is recognized by its method that returns its length.
    """
    return any(
        type(value) not in PLAIN and hasattr(value, "get_seq_length") and not is_prefix(value)
        for value in inputs
    )


def refuse_cache(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    if fills_cache((*args, *kwargs.values())):
        raise ModelError(
            f"block {name} fills a cache of keys and values in training, which recomputation would "
            "fill twice; set use_cache=False in the call or in model.config"
        )


class Prefix:
    """A cache with trainable keys and values (prefix tuning), seen as the tensors that it holds.

    Every run of a block gets its own cache, which contains only these tensors.
    """

    def __init__(self, cache: Any) -> None:
        self.kind = type(cache)
        self.tensors = [t for layer in cache.layers for t in (layer.keys, layer.values)]

    @staticmethod
    def rebuild(tensors: Iterable[Any], kind: Any) -> Any:
        flat = list(tensors)
        return kind(list(zip(flat[::2], flat[1::2], strict=True)))


def is_prefix(value: Any) -> bool:
    """Return whether a value is a cache that contains trained keys before the model runs."""
    if type(value) in PLAIN:
        return False
    layers = getattr(value, "layers", None) if hasattr(value, "get_seq_length") else None
    keys = [getattr(layer, "keys", None) for layer in layers or ()]
    return bool(keys) and all(isinstance(k, torch.Tensor) and k.requires_grad for k in keys)


pytree.register_pytree_node(Prefix, lambda prefix: (prefix.tensors, prefix.kind), Prefix.rebuild)


def changed_input(name: str) -> str:
    return (
        f"block {name} changes its input in place, so it cannot be recomputed; make the operation "
        "out of place"
    )


# the dictionary of a module's buffers or attributes, and a key
Attribute = tuple[dict[str, Any], str]


OldValues = list[tuple[Attribute, Any]]


class SavedCall:
    """The inputs of one block call.

    The constructor saves them; `restore` returns those of one slice.
    """

    def __init__(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.name = name
        self._leaves, self._spec = flatten((args, kwargs))
        # Most calls have plain leaves only, and this runs for every call of every block.
        if not PLAIN.issuperset(map(type, self._leaves)):
            shown = [Prefix(leaf) if is_prefix(leaf) else leaf for leaf in self._leaves]
            self._leaves, self._spec = flatten(unflatten(shown, self._spec))
            self._leaves = list(map(without_view, self._leaves))
        self._where = [i for i, leaf in enumerate(self._leaves) if isinstance(leaf, torch.Tensor)]
        self.tensors: list[torch.Tensor] = [self._leaves[i] for i in self._where]
        self.wants_grad = [t.requires_grad for t in self.tensors]
        self.rng: list[torch.Tensor] = []
        self.saved_ops: list[Any] = []  # saved results of each slice, or None
        self.evicted = False
        self.cut = Cut(obstacle="it was not asked for")
        self.checked = False  # whether the cut was compared with a plain call
        # what forward has changed (buffers, attributes, random generators), with the old values
        self.changed: OldValues = []
        # the buffers that forward has left alone with their versions, and None for all others
        self.buffers: list[tuple[torch.Tensor, int] | None] = []
        self.attributes: list[dict[str, Any]] = []  # of all modules, when forward began
        self.context: Any = None  # the CallContext of forward
        for i in self._where:
            self._leaves[i] = None
        self.objects = [leaf for leaf in self._leaves if type(leaf) not in PLAIN]
        first = next((t for t in self.tensors if t.ndim >= 2), None)
        self.batch = first.shape[0] if first is not None else 1

    def detach(self) -> list[torch.Tensor]:
        """Detach the inputs from their autograd history, and return the originals."""
        inputs, self.tensors = self.tensors, [t.detach() for t in self.tensors]
        self._versions = [t._version for t in inputs]
        return inputs

    @property
    def grad_inputs(self) -> list[torch.Tensor]:
        """The inputs that require a gradient."""
        return [
            t
            for t, takes_gradient in zip(self.tensors, self.wants_grad, strict=True)
            if takes_gradient
        ]

    def evict_inputs(self) -> None:
        """Free the inputs that require a gradient, after they were copied to another tier."""
        self.restore_inputs([tensor.new_empty(0) for tensor in self.grad_inputs])
        self.evicted = True

    def restore_inputs(self, tensors: Sequence[torch.Tensor]) -> None:
        """Replace evicted inputs by tensors with the same values."""
        remaining = iter(tensors)
        pairs = zip(self.tensors, self.wants_grad, strict=True)
        self.tensors = [
            next(remaining) if takes_gradient else tensor for tensor, takes_gradient in pairs
        ]
        self.evicted = False

    def slices(self, micro_batch: int | None) -> list[slice]:
        step = self.batch if self.cut.obstacle else micro_batch or self.batch
        return [slice(a, min(a + step, self.batch)) for a in range(0, self.batch, step)]

    def restore(
        self, part: slice, *, grad: bool
    ) -> tuple[list[torch.Tensor], tuple[Any, ...], dict[str, Any]]:
        """Return the input tensors of one slice, and the args and kwargs that contain them.

        With `grad`, the tensors are leaves for backward.
        """
        tensors = self.inputs(part, grad=grad)
        return tensors, *self.arguments(tensors)

    def inputs(self, part: slice, *, grad: bool) -> list[torch.Tensor]:
        """Return the input tensors of one slice."""
        whole = part == slice(0, self.batch)
        tensors = []
        for number, (tensor, takes_gradient) in enumerate(
            zip(self.tensors, self.wants_grad, strict=True)
        ):
            piece = tensor if whole or not self.cut.inputs[number] else tensor[part]
            tensors.append(piece.detach().requires_grad_(grad and takes_gradient))
        return tensors

    def arguments(self, tensors: Sequence[torch.Tensor]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the arguments of the call with `tensors` in place of its own tensors."""
        leaves = list(self._leaves)
        for i, tensor in zip(self._where, tensors, strict=True):
            leaves[i] = tensor
        args, kwargs = unflatten(leaves, self._spec)
        return args, kwargs

    def check_untouched(self) -> None:
        """Raise an error if the block changed its inputs since `detach` was called."""
        if [tensor._version for tensor in self.tensors] != self._versions:
            raise ModelError(changed_input(self.name))


class Gathered:
    """The tensor that joins what the slices return at one position, without a second copy."""

    def __init__(self, batch: int) -> None:
        self._batch = batch
        self.value: torch.Tensor | None = None

    def put(self, part: slice, piece: torch.Tensor, *, rows: int = 1) -> None:
        """Add the piece of one slice. Each sample has `rows` rows."""
        if part == slice(0, self._batch):
            self.value = piece
            return
        if self.value is None:
            self.value = piece.new_empty((self._batch * rows, *piece.shape[1:]))
        self.value[part.start * rows : part.stop * rows] = piece

    def add(self, piece: torch.Tensor) -> None:
        self.value = piece if self.value is None else self.value.add_(piece)


class Output:
    """The return value of a call, joined from its slices."""

    def __init__(self, call: SavedCall) -> None:
        self._batch, self._call = call.batch, call
        self._joined: list[Gathered] = []
        self._last: list[Any] = []
        self.spec: Any = None

    def put(self, part: slice, out: Any) -> None:
        self._last, self.spec = flatten(out)
        self._joined = self._joined or [Gathered(self._batch) for _ in self._last]
        rows = iter(self._call.cut.outputs)
        for joined, leaf in zip(self._joined, self._last, strict=True):
            if isinstance(leaf, torch.Tensor):
                each = next(rows, 1)
                if each:
                    joined.put(part, leaf, rows=each)
                elif joined.value is None:
                    joined.value = leaf

    @property
    def leaves(self) -> list[Any]:
        return [
            leaf if joined.value is None else joined.value
            for joined, leaf in zip(self._joined, self._last, strict=True)
        ]


def forget_last_weights(model: nn.Module) -> None:
    """Empty the list in which recurrent layers keep the weights of their last call.

    These weights are views of slots, and would keep the memory of the slots from being freed. The
    next call fills the list again.
    """
    for module in model.modules():
        if isinstance(module, nn.RNNBase):
            module._flat_weights = [getattr(module, name) for name in module._flat_weights_names]
