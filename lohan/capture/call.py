"""One block call: what it saves, what surrounds it, and buffers that it changes."""

from __future__ import annotations

import base64
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase
from torch.utils import _pytree as pytree

from lohan.errors import LohanError, ModelError
from lohan.model.state import damaged, stored
from lohan.util.units import MiB, format_bytes

# -- What a block's call finds around it, so that its recomputation finds the same -----------------
#
# Autocast is one such thing. The other: transformers collects results from inside blocks (router
# logits, attention weights) through hooks. They leave the block as further outputs of it, with
# their gradients, and are delivered to the collector.


@contextmanager
def swapped(others: Iterable[tuple[dict[str, Any], str, Any]]) -> Iterator[None]:
    """Other tensors meanwhile, each in its place in a module's `_parameters` or `_buffers`."""
    others = list(others)
    before = [(tensors, key, tensors[key]) for tensors, key, _ in others]
    try:
        for tensors, key, other in others:
            tensors[key] = other
        yield
    finally:
        for tensors, key, own in before:
            tensors[key] = own


Taken = dict[str, list[Any]]
_OWN = "hidden_states"  # taken where blocks meet, not inside them


@dataclass(frozen=True)
class CallContext:
    wanted: tuple[str, ...] = ()  # what is collected
    autocast: tuple[str, torch.dtype] | None = None

    @classmethod
    def now(cls, device: str) -> CallContext:
        enabled = torch.is_autocast_enabled(device)
        autocast = (device, torch.get_autocast_dtype(device)) if enabled else None
        return cls(tuple(key for key in _collected() if key != _OWN), autocast)

    def run(self, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> tuple[Any, Taken]:
        """What the call returns, and what was collected inside it."""
        cast: AbstractContextManager[Any] = nullcontext()
        if self.autocast is not None:
            device, dtype = self.autocast
            cast = torch.autocast(device, dtype=dtype, cache_enabled=False)
        with cast, collecting(self.wanted) as taken:
            return forward(*args, **kwargs), taken


def deliver_collected(out: Any, taken: Taken) -> Any:
    """Gives what was collected inside a call to the outer collector; returns the rest."""
    outer = _collected()
    for key, found in taken.items():
        outer[key].extend(found)
    return out


def _variable() -> Any:
    """transformers' own, if it is there and in use."""
    module = sys.modules.get("transformers.utils.output_capturing")
    return getattr(module, "_active_collector", None)


def _collected() -> Taken:
    variable = _variable()
    found = variable.get() if variable is not None else None
    return {key: value for key, value in (found or {}).items() if not key.startswith("_")}


@contextmanager
def collecting(wanted: tuple[str, ...] = ()) -> Iterator[Taken]:
    """Of what is collected inside, this and nothing else, and not for collectors outside."""
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


# -- A forward that runs what its recomputation will run, and keeps nothing for it -----------------
#
# Operations may depend on whether a graph is made: attention kernels also give what backward
# wants, a matrix product folds otherwise where an input takes a gradient, modules ask whether
# gradients are on. A result that is kept in forward can only take its place in recomputation if
# both run the same. So forward makes a graph too, but one that saves no tensor and is gone when
# the call ends.


IN_PLACE = "in-place operation"  # what torch calls it when an input is changed


def no_saved_tensors(run: Callable[[], Any], name: str) -> Any:
    """What `run` returns, without its graph. `name` is the block's."""
    try:
        with discard_saved_tensors():
            out = run()
    except RuntimeError as error:
        if IN_PLACE in str(error) and "leaf" in str(error):
            raise ModelError(changed_input(name)) from error
        raise
    return pytree.tree_map_only(torch.Tensor, torch.Tensor.detach, out)


def changed_input(name: str) -> str:
    return (
        f"block {name} changes its input in place, so it cannot be recomputed; make the operation "
        "out of place"
    )


@contextmanager
def discard_saved_tensors() -> Iterator[None]:
    """Gradients are on, and nothing is saved for them."""
    hooks = torch.autograd.graph.saved_tensors_hooks(lambda tensor: None, _empty)
    with torch.enable_grad(), hooks:
        yield


def _empty(saved: Any) -> torch.Tensor:
    raise LohanError("backward ran through a forward that saves nothing; this is a bug in LoHan")


# -- What a block call leaves behind in forward, and how backward takes it up again ----------------
#
# A call keeps its tensor inputs, the layout of its arguments, and the random state before each
# micro-batch slice. Recomputation therefore repeats the forward exactly, dropout included.


@dataclass(frozen=True)
class Cut:
    """How a call falls into slices: which of its tensors have samples in their first dimension, and
    how many rows of each output belong to one sample (0: it is the same for all of them)."""

    inputs: tuple[bool, ...] = ()
    outputs: tuple[int, ...] = ()
    whole: str = ""  # why it cannot be cut


def fills_cache(inputs: Iterable[Any]) -> bool:
    """Whether one of them is a cache of keys and values, which knows how much it holds."""
    return any(hasattr(value, "get_seq_length") and not is_prefix(value) for value in inputs)


def refuse_cache(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    if fills_cache((*args, *kwargs.values())):
        raise ModelError(
            f"block {name} fills a cache of keys and values in training, which recomputation would "
            "fill twice; set use_cache=False in the call or in model.config"
        )


class Prefix:
    """A cache whose keys and values learn (prefix tuning), shown as the tensors that it holds.
    Every run of a block gets a cache of its own, with nothing but these in it."""

    def __init__(self, cache: Any) -> None:
        self.kind = type(cache)
        self.tensors = [t for layer in cache.layers for t in (layer.keys, layer.values)]

    @staticmethod
    def rebuild(tensors: Iterable[Any], kind: Any) -> Any:
        held = list(tensors)
        return kind(list(zip(held[::2], held[1::2], strict=True)))


def is_prefix(value: Any) -> bool:
    """Whether it is a cache that was filled before the model runs, with what takes a gradient."""
    layers = getattr(value, "layers", None) if hasattr(value, "get_seq_length") else None
    keys = [getattr(layer, "keys", None) for layer in layers or ()]
    return bool(keys) and all(isinstance(k, torch.Tensor) and k.requires_grad for k in keys)


pytree.register_pytree_node(Prefix, lambda prefix: (prefix.tensors, prefix.kind), Prefix.rebuild)


class SavedCall:
    """Inputs of one block call: save on construction, `restore` slice by slice in backward."""

    def __init__(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.name = name
        given = pytree.tree_map(lambda x: Prefix(x) if is_prefix(x) else x, (args, kwargs))
        self._leaves, self._spec = pytree.tree_flatten(given)
        self._where = [i for i, leaf in enumerate(self._leaves) if isinstance(leaf, torch.Tensor)]
        self.tensors: list[torch.Tensor] = [self._leaves[i] for i in self._where]
        self.wants_grad = [t.requires_grad for t in self.tensors]
        self.rng: list[torch.Tensor] = []
        self.kept: list[Any] = []  # results of each slice, where the plan keeps any
        self.evicted = False
        self.cut = Cut(whole="it was not asked for")
        self.checked = False  # compared with a plain call
        self.changed: Saved = []  # what forward has changed, as it was
        self.context: Any = None  # what forward found around it
        for i in self._where:
            self._leaves[i] = None
        first = next((t for t in self.tensors if t.ndim >= 2), None)
        self.batch = first.shape[0] if first is not None else 1

    def detach(self) -> list[torch.Tensor]:
        """Inputs without their history; returns those that have it."""
        inputs, self.tensors = self.tensors, [t.detach() for t in self.tensors]
        self._versions = [t._version for t in inputs]
        return inputs

    @property
    def grad_inputs(self) -> list[torch.Tensor]:
        """The inputs that take a gradient."""
        return [t for t, wants in zip(self.tensors, self.wants_grad, strict=True) if wants]

    def evict_inputs(self) -> None:
        """Lets go of those inputs: they are in another memory, or on SSD."""
        self.restore_inputs([tensor.new_empty(0) for tensor in self.grad_inputs])
        self.evicted = True

    def restore_inputs(self, tensors: Sequence[torch.Tensor]) -> None:
        """Takes tensors of equal values in their place."""
        coming = iter(tensors)
        pairs = zip(self.tensors, self.wants_grad, strict=True)
        self.tensors = [next(coming) if wants else tensor for tensor, wants in pairs]
        self.evicted = False

    def slices(self, micro_batch: int | None) -> list[slice]:
        step = self.batch if self.cut.whole else micro_batch or self.batch
        return [slice(a, min(a + step, self.batch)) for a in range(0, self.batch, step)]

    def restore(
        self, part: slice, *, grad: bool
    ) -> tuple[list[torch.Tensor], tuple[Any, ...], dict[str, Any]]:
        """Tensors, args and kwargs of one slice; with `grad`, fresh leaves for backward."""
        whole = part == slice(0, self.batch)
        tensors = []
        for number, (tensor, wants) in enumerate(zip(self.tensors, self.wants_grad, strict=True)):
            piece = tensor if whole or not self.cut.inputs[number] else tensor[part]
            tensors.append(piece.detach().requires_grad_(grad and wants))
        return tensors, *self.arguments(tensors)

    def arguments(self, tensors: Sequence[torch.Tensor]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The call's arguments with these in the place of its tensors."""
        leaves = list(self._leaves)
        for i, tensor in zip(self._where, tensors, strict=True):
            leaves[i] = tensor
        args, kwargs = pytree.tree_unflatten(leaves, self._spec)
        return args, kwargs

    def check_untouched(self) -> None:
        """The block has left its inputs as they were when `detach` was called."""
        if [tensor._version for tensor in self.tensors] != self._versions:
            raise ModelError(changed_input(self.name))


class ActivationOffload:
    """What becomes of a call's activations between its forward and its backward. This one leaves
    them where they are; others move them and bring them back."""

    def save_inputs(self, site: int, call: SavedCall, places: Sequence[int]) -> None:
        """Forward begins. `places` are those that the schedule names."""

    def save_slice(self, site: int, call: SavedCall) -> None:
        """One more slice has run."""

    def forward_done(self, site: int, call: SavedCall) -> None:
        """Forward has ended."""

    def load_inputs(self, site: int, call: SavedCall, places: Sequence[int]) -> None:
        """Backward begins and needs the inputs."""

    def load_slice(self, site: int, call: SavedCall, number: int) -> None:
        """A slice is about to be recomputed and needs its kept results."""

    def release_slice(self, site: int, call: SavedCall, number: int) -> None:
        """A slice's backward is given to compute."""

    def release(self, site: int, call: SavedCall) -> None:
        """Backward has ended."""


class Gathered:
    """Joins per-slice tensors of one position along the batch dimension, without a second copy."""

    def __init__(self, batch: int) -> None:
        self._batch = batch
        self.value: torch.Tensor | None = None

    def put(self, part: slice, piece: torch.Tensor, *, rows: int = 1) -> None:
        """`rows` belong to each sample."""
        if part == slice(0, self._batch):
            self.value = piece
            return
        if self.value is None:
            self.value = piece.new_empty((self._batch * rows, *piece.shape[1:]))
        self.value[part.start * rows : part.stop * rows] = piece

    def add(self, piece: torch.Tensor) -> None:
        self.value = piece if self.value is None else self.value.add_(piece)


class Output:
    """What a call returns, put together from its slices."""

    def __init__(self, call: SavedCall) -> None:
        self._batch, self._call = call.batch, call
        self._joined: list[Gathered] = []
        self._last: list[Any] = []
        self.spec: Any = None

    def put(self, part: slice, out: Any) -> None:
        self._last, self.spec = pytree.tree_flatten(out)
        self._joined = self._joined or [Gathered(self._batch) for _ in self._last]
        rows = iter(self._call.cut.outputs)
        for slot, leaf in zip(self._joined, self._last, strict=True):
            if isinstance(leaf, torch.Tensor):
                each = next(rows, 1)
                if each:
                    slot.put(part, leaf, rows=each)
                elif slot.value is None:
                    slot.value = leaf

    @property
    def leaves(self) -> list[Any]:
        return [
            leaf if slot.value is None else slot.value
            for slot, leaf in zip(self._joined, self._last, strict=True)
        ]


# -- What a model changes while it trains ----------------------------------------------------------
#
# Statistics of BatchNorm, vectors of spectral norm, counters.
#
# A block that changes its buffers or attributes does so once per forward. Recomputation starts from
# the values that forward found, and what it makes of them is dropped. Buffers that belong to the
# checkpoint are committed with each step, so a resumed run has them too.


LIMIT = 4 * MiB  # what a manifest can carry
KEY = "buffers"

Place = tuple[dict[str, Any], str]  # a module's buffers or attributes, and a name in it
Saved = list[tuple[Place, Any]]
_ABSENT = object()


@dataclass(frozen=True)
class Before:
    """What a block had before a call: of each buffer its version and maybe a copy, and all
    attributes of its modules."""

    buffers: list[tuple[torch.Tensor, int, torch.Tensor | None]]
    attributes: list[dict[str, Any]]


class BlockState:
    """Buffers and attributes of one block."""

    def __init__(self, name: str, module: nn.Module) -> None:
        self._name = name
        self._changing: set[int] | None = None  # numbers of places, known after the first forward
        self._modules = list(module.modules())
        self._places: list[Place] = [
            (child._buffers, key)
            for child in self._modules
            for key, buffer in child._buffers.items()
            if buffer is not None
        ]

    def before(self) -> Before:
        """Before a forward: copies of all buffers at first, then of those known to change."""
        copied = range(len(self._places)) if self._changing is None else self._changing
        buffers = [
            (tensor, tensor._version, tensor.detach().clone() if number in copied else None)
            for number, tensor in enumerate(self._current())
        ]
        return Before(buffers, [dict(vars(module)) for module in self._modules])

    def after(self, before: Before) -> Saved:
        """The old values of what forward has changed."""
        saved: Saved = []
        changed: set[int] = set()
        for number, now in enumerate(self._current()):
            tensor, version, old = before.buffers[number]
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
        return saved + self._other_attributes(before)

    def _other_attributes(self, before: Before) -> Saved:
        saved: Saved = []
        for module, old in zip(self._modules, before.attributes, strict=True):
            now = vars(module)
            for key in now.keys() | old.keys():
                if now.get(key, _ABSENT) is not (was := old.get(key, _ABSENT)):
                    saved.append(((now, key), was))
        return saved

    def advanced(self, before: Before) -> str:
        """A buffer or number that a call has changed, so that several calls are not one."""
        for number, now in enumerate(self._current()):
            tensor, version, old = before.buffers[number]
            moved = now is not tensor or now._version != version
            if moved and (old is None or not torch.equal(now, old)):
                return f"buffer {self._places[number][1]}"
        for (attributes, key), was in self._other_attributes(before):
            if isinstance(attributes.get(key), int | float) and isinstance(was, int | float):
                return f"attribute {key}"
        return ""

    def _current(self) -> list[torch.Tensor]:
        return [there[key] for there, key in self._places]

    @contextmanager
    def untouched(self) -> Iterator[None]:
        """For a run that must leave no trace."""
        before = self.before()
        pairs = zip(self._places, self._current(), strict=True)
        with as_before([(place, tensor) for place, tensor in pairs]):
            try:
                yield
            finally:
                for place, old in self._other_attributes(before):
                    _put(place, old)


def _put(place: Place, value: Any) -> None:
    there, key = place
    if value is _ABSENT:
        there.pop(key, None)
    else:
        there[key] = value


def put_back(saved: Saved) -> None:
    for place, old in saved:
        _put(place, old.detach().clone() if isinstance(old, torch.Tensor) else old)


@contextmanager
def as_before(saved: Saved) -> Iterator[None]:
    """Old values in their places for a recomputation, tensors as copies."""
    current = [(place, place[0].get(place[1], _ABSENT)) for place, _ in saved]
    try:
        put_back(saved)
        yield
    finally:
        for place, value in current:
            _put(place, value)


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
