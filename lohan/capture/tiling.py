"""Position-wise parts of a block (MLP, norms) in tiles of tokens, for very long sequences.

A part is a submodule whose result for a token depends on that token alone. This is determined by
trial, not by name: the calls inside the block are observed on fake tensors, and each part runs on
two tiles of a few tokens, first together and then one by one. The results must agree, and invalid
values (NaN) in one tile must not reach the other. When a part is called for the first time, the
trial is repeated with its real weights and inputs, on two tiles of the real size.

Forward then runs a part tile by tile and saves only its inputs. Backward runs every tile again and
adds the gradients of its weights in fp32 or wider. The result is exact except for the order of
these sums, and random numbers are drawn in another order than without tiles.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import _disable_current_modes

from lohan.capture.casting import has_hooks
from lohan.capture.derivatives import differentiable_once
from lohan.capture.recompute import BlockState
from lohan.capture.saved_call import CallContext, collecting, swapped
from lohan.capture.selective_checkpoint import (
    generator_state,
    set_generator_state,
    storage_key,
    tensors_in,
)
from lohan.capture.slicing import AlwaysFails, ConstantRandomness, NotSliceable, agree, attempt
from lohan.capture.tracing import faked, kind_of_call

TRIAL_TOKENS = 8  # tokens of each of the two tiles of a trial
# Tiles are used for a part only if the bytes that autograd saves inside it are at least this share
# of the bytes of its inputs.
MIN_SAVED_SHARE = 0.5
# types of arguments besides tensors
PLAIN_TYPES = (int, float, bool, str, type(None), torch.dtype, torch.device)

Forward = Callable[..., Any]


@dataclass(frozen=True)
class TileCut:
    """The division of a call of a part into tiles.

    It contains the dimension of tokens, and states which inputs and results have that dimension.
    All other tensors are the same for all tokens.
    """

    dim: int
    inputs: tuple[bool, ...]
    outputs: tuple[bool, ...]
    draws: bool  # whether the call draws random numbers


Cuts = dict[str, TileCut]  # keys are names of parts relative to their block


class Tiling:
    """Wrappers that run the position-wise parts of blocks in tiles of `tokens`.

    With `brief`, only two tiles run. This is sufficient to measure memory on fake tensors, because
    further tiles use no more.
    """

    def __init__(self, tokens: int, *, brief: bool = False) -> None:
        self.tokens, self.brief = tokens, brief
        self.cuts_by_kind: dict[Hashable, Cuts] = {}  # by kind of call
        # The results of trials with real values, by kind of part.
        self.sound: dict[Hashable, bool] = {}

    def forward(self, module: nn.Module, original: Forward) -> TiledForward:
        return TiledForward(self, module, original)


class TiledForward:
    """The forward of one block, with its position-wise parts run in tiles."""

    def __init__(self, tiling: Tiling, module: nn.Module, original: Forward) -> None:
        self._tiling, self._module, self._original = tiling, module, original
        self._parts: dict[Hashable, list[_Part]] = {}  # by kind of call

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.prepare(args, kwargs)
        kind = self._kind(args, kwargs)
        try:
            with _installed(self._parts.get(kind, ())):
                return self._original(*args, **kwargs)
        except Exception:
            # No parts were found, possibly because this error occurred in the trial too.
            if not self._parts.get(kind, True):
                del self._parts[kind]
            raise

    def prepare(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Find and store the parts to tile in calls of this kind, before the first is recorded."""
        stream, kind = _stream((args, kwargs)), self._kind(args, kwargs)
        if stream is None or kind in self._parts:
            return
        if stream.numel() // stream.shape[-1] > self._tiling.tokens:
            cuts_by_kind, state = (
                self._tiling.cuts_by_kind,
                BlockState(type(self._module).__name__, self._module),
            )
            # Trials leave the block unchanged, and their tensors are not tensors of inference mode.
            with torch.inference_mode(False), state.preserved():
                cuts = find_parts(
                    self._module, self._original, args, kwargs, known_cuts=cuts_by_kind
                )
            self._parts[kind] = [
                _Part(self._module.get_submodule(name), cut, self._tiling)
                for name, cut in cuts.items()
            ]

    def _kind(self, args: Any, kwargs: Any) -> Hashable:
        """Return a key that is equal for calls that can share cuts. A cut is valid for any size."""
        return self._module.training, *(
            (leaf.ndim, leaf.dtype)
            for leaf in pytree.tree_leaves((args, kwargs))
            if isinstance(leaf, torch.Tensor)
        )


def _stream(arguments: Any) -> torch.Tensor | None:
    """Return the hidden state among the arguments of a block, or None if there is none.

    The dimension before the last is that of tokens.
    """
    tensors = (t for t in tensors_in(arguments) if t.is_floating_point() and t.ndim >= 2)
    return next(tensors, None)


@contextmanager
def _installed(parts: Sequence[_Part]) -> Iterator[None]:
    """Temporarily replace the forwards of the modules of parts by forwards in tiles."""
    before = [vars(part.module).get("forward") for part in parts]
    try:
        for part in parts:
            part.forward = part.module.forward
            part.module.forward = part
        yield
    finally:
        for part, forward in zip(parts, before, strict=True):
            if forward is None:
                del part.module.forward
            else:
                part.module.forward = forward


# -- A part's call in tiles ------------------------------------------------------------------------


class _Part:
    """The forward of one part in tiles."""

    def __init__(self, module: nn.Module, cut: TileCut, tiling: Tiling) -> None:
        self.module, self.cut = module, cut
        self._tokens, self._sound = tiling.tokens, tiling.sound
        self.most = 2 if tiling.brief else None  # the number of tiles to run; None means all
        self.forward: Forward = module.forward
        self._is_sound: bool | None = None  # None before the first call with real values

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        call = _TiledCall(self, args, kwargs)
        tiles = call.tiles(self._tokens)
        if len(tiles) < 2 or not self._tiles_are_independent(call, tiles):
            return self.forward(*args, **kwargs)
        if not torch.is_grad_enabled():
            return pytree.tree_unflatten(call.run(call.tensors, tiles), call.result_spec)
        weights = call.weights()
        out = _TileFunction.apply(call, tiles, *call.release(), *weights)
        return pytree.tree_unflatten(call.with_results(out), call.result_spec)

    def _tiles_are_independent(self, call: _TiledCall, tiles: Sequence[slice]) -> bool:
        """Return whether two tiles of the real size, with real values, do not affect each other."""
        if self._is_sound is not None:
            return self._is_sound
        if any(isinstance(tensor, FakeTensor) for tensor in call.tensors):
            return True
        kind = kind_of_call(self.module, call.tensors), self.module.training
        if kind not in self._sound:
            size = min(tiles[0].stop, tiles[1].stop - tiles[1].start)  # the last may be shorter
            drawn = generator_state(call.tensors[0].device)
            try:
                with _disable_current_modes(), torch.inference_mode(False):
                    pair = call.narrowed(call.tensors, slice(0, 2 * size))
                    outputs = attempt(
                        lambda: _try_tiles(
                            self.module, self.forward, call.arguments, pair, self.cut, size
                        )
                    )
                self._sound[kind] = outputs == self.cut.outputs
                why = "" if self._sound[kind] else "has other results than it had on fewer tokens"
            except NotSliceable as refused:
                self._sound[kind], why = False, str(refused) or "fails on two"
            finally:
                set_generator_state(*drawn)
            if why:
                warnings.warn(
                    f"tiles are off for {type(self.module).__name__}: it {why}; it runs all tokens "
                    "at once, and needs memory for them",
                    RuntimeWarning,
                    stacklevel=2,
                )
        self._is_sound = self._sound[kind]
        return self._is_sound


class _TiledCall:
    """One call of a part. After `release`, only autograd holds its tensors."""

    def __init__(self, part: _Part, args: Any, kwargs: Any) -> None:
        self._part, self._cut, self._most = part, part.cut, part.most
        self._leaves, self._spec = pytree.tree_flatten((args, kwargs))
        self._where = [i for i, leaf in enumerate(self._leaves) if isinstance(leaf, torch.Tensor)]
        self.tensors: list[torch.Tensor] = [self._leaves[i] for i in self._where]
        self.count = len(self.tensors)
        self._results: list[Any] = []
        self.result_spec: Any = None  # the tree structure of the result
        self._context = CallContext()
        self._random: Any = None
        # For every use of a weight: the dictionary of its module, its name, and its index in
        # `weights()`.
        self._weights: list[tuple[dict[str, Any], str, int]] = []

    def weights(self) -> list[torch.Tensor]:
        """Return the current weights of the part."""
        weights: dict[int, torch.Tensor] = {}
        for child in self._part.module.modules():
            for name, weight in child._parameters.items():
                if weight is not None:
                    weights.setdefault(id(weight), weight)
                    number = list(weights).index(id(weight))
                    self._weights.append((child._parameters, name, number))
        return list(weights.values())

    def release(self) -> list[torch.Tensor]:
        tensors, self.tensors = self.tensors, []
        for i in self._where:
            self._leaves[i] = None
        return tensors

    def tiles(self, tokens: int) -> list[slice]:
        """Return the tiles, or an empty list if the cut does not apply to the call."""
        cut = self._cut
        if len(self.tensors) != len(cut.inputs):
            return []
        tiled = [t for t, is_tiled in zip(self.tensors, cut.inputs, strict=True) if is_tiled]
        if any(t.ndim <= cut.dim or t.shape[cut.dim] != tiled[0].shape[cut.dim] for t in tiled):
            return []
        length, rows = tiled[0].shape[cut.dim], math.prod(tiled[0].shape[: cut.dim])
        step = max(1, tokens // rows)
        return [slice(a, min(a + step, length)) for a in range(0, length, step)]

    def arguments(self, tensors: Sequence[torch.Tensor]) -> tuple[Any, Any]:
        leaves = list(self._leaves)
        for i, tensor in zip(self._where, tensors, strict=True):
            leaves[i] = tensor
        args, kwargs = pytree.tree_unflatten(leaves, self._spec)
        return args, kwargs

    def narrowed(self, tensors: Sequence[torch.Tensor], tile: slice) -> list[torch.Tensor]:
        return [
            tensor[_at(self._cut.dim, tile)].contiguous() if is_tiled else tensor
            for tensor, is_tiled in zip(tensors, self._cut.inputs, strict=True)
        ]

    def run(self, tensors: Sequence[torch.Tensor], tiles: Sequence[slice]) -> list[Any]:
        """Run the part tile by tile, without a graph, and return the leaves of the joined result.

        Results that are the same for all tokens come from the first tile.
        """
        if self._cut.draws:
            self._random = generator_state(tensors[0].device)
        self._context = CallContext.current(tensors[0].device.type)
        length, joined = tiles[-1].stop, list[Any]()
        for tile in tiles[: self._most]:
            args, kwargs = self.arguments(self.narrowed(tensors, tile))
            leaves, self.result_spec = pytree.tree_flatten(self._part.forward(*args, **kwargs))
            joined = joined or [None] * len(leaves)
            tiled_outputs = iter(self._cut.outputs)
            for index, leaf in enumerate(leaves):
                if not isinstance(leaf, torch.Tensor) or not next(tiled_outputs):
                    joined[index] = leaf if joined[index] is None else joined[index]
                    continue
                if joined[index] is None:
                    shape = list(leaf.shape)
                    shape[self._cut.dim] = length
                    joined[index] = leaf.new_empty(shape)
                joined[index][_at(self._cut.dim, tile)] = leaf
            del args, kwargs, leaves
        return joined

    def keep_others(self, leaves: Sequence[Any]) -> list[torch.Tensor]:
        """Remember the results that are not tensors, and return the tensors."""
        self._results = [None if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
        self._tensor = [isinstance(leaf, torch.Tensor) for leaf in leaves]
        return tensors_in(leaves)

    def with_results(self, out: Any) -> list[Any]:
        tensors = iter(out if isinstance(out, tuple) else (out,))
        return [
            next(tensors) if tensor else leaf
            for tensor, leaf in zip(self._tensor, self._results, strict=True)
        ]

    def gradients(
        self,
        tensors: Sequence[torch.Tensor],
        wanted: Sequence[bool],
        tiles: Sequence[slice],
        grads: Sequence[torch.Tensor | None],
    ) -> list[torch.Tensor | None]:
        """Return the gradients of inputs and weights, given the gradients of the results.

        `wanted` states for each input whether its gradient is needed. Every tile is computed again.
        """
        count = self.count
        # Parameters are needed because a parametrization inside the part, such as PEFT's for expert
        # tensors, restores the objects that it replaced, and a plain tensor would become an
        # attribute of the module.
        weights: list[torch.Tensor] = [
            nn.Parameter(weight.detach(), requires_grad=takes_gradient)
            for weight, takes_gradient in zip(tensors[count:], wanted[count:], strict=True)
        ]
        totals: list[torch.Tensor | None] = [None] * len(tensors)
        tiled = [*self._cut.inputs, *(False for _ in weights)]
        context = CallContext(autocast=self._context.autocast)
        replacements = [
            (parameters, name, weights[number]) for parameters, name, number in self._weights
        ]
        with swapped(replacements), self._as_in_forward(tensors[0].device):
            for number, tile in enumerate(tiles[: self._most]):
                pieces = self.narrowed(tensors[:count], tile)
                inputs = [
                    piece.detach().requires_grad_(takes_gradient)
                    for piece, takes_gradient in zip(pieces, wanted[:count], strict=True)
                ]
                args, kwargs = self.arguments(inputs)
                with torch.enable_grad():
                    out = tensors_in(context.run(self._part.forward, *args, **kwargs)[0])
                leaves = [*inputs, *weights]
                indices = [index for index, leaf in enumerate(leaves) if leaf.requires_grad]
                pairs = [
                    (result, grad[_at(self._cut.dim, tile)] if is_tiled else grad)
                    for result, grad, is_tiled in zip(out, grads, self._cut.outputs, strict=True)
                    if grad is not None and result.requires_grad and (is_tiled or number == 0)
                ]
                if not pairs:
                    continue
                gradients = torch.autograd.grad(
                    [result for result, _ in pairs],
                    [leaves[index] for index in indices],
                    [grad for _, grad in pairs],
                    allow_unused=True,
                )
                del out, pairs, args, kwargs
                for index, grad in zip(indices, gradients, strict=True):
                    if grad is None:
                        continue
                    if tiled[index]:
                        if totals[index] is None:
                            totals[index] = torch.zeros_like(tensors[index], dtype=grad.dtype)
                        totals[index][_at(self._cut.dim, tile)] = grad  # type: ignore[index]
                    else:
                        totals[index] = _added(totals[index], grad)
                del gradients, leaves, inputs, pieces
        return [
            None if grad is None else grad.to(tensor.dtype)
            for grad, tensor in zip(totals, tensors, strict=True)
        ]

    @contextmanager
    def _as_in_forward(self, device: torch.device) -> Iterator[None]:
        """Temporarily restore the random state of forward, so that the same numbers are drawn."""
        if self._random is None:
            yield
            return
        now = generator_state(device)
        set_generator_state(*self._random)
        try:
            yield
        finally:
            set_generator_state(*now)


def _at(dim: int, tile: slice) -> tuple[slice, ...]:
    return (*(slice(None) for _ in range(dim)), tile)


def _added(total: torch.Tensor | None, grad: torch.Tensor) -> torch.Tensor:
    """Return the sum of `total` and a gradient. Sums of 16-bit gradients are in fp32."""
    if total is None:
        return grad.to(torch.promote_types(grad.dtype, torch.float32), copy=True)
    return total.add_(grad)


class _TileFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, call: _TiledCall, tiles: Sequence[slice], *tensors: torch.Tensor) -> Any:
        out = call.keep_others(call.run(tensors[: call.count], tiles))
        ctx.call, ctx.tiles = call, tiles
        ctx.save_for_backward(*tensors)
        ctx.mark_non_differentiable(*(t for t in out if not t.is_floating_point()))
        ctx.set_materialize_grads(False)
        return tuple(out)

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, *grads: torch.Tensor | None) -> Any:
        wanted = ctx.needs_input_grad[2:]
        gradients = ctx.call.gradients(ctx.saved_tensors, wanted, ctx.tiles, grads)
        return (None, None, *gradients)


# -- Which parts of a block are position-wise ------------------------------------------------------


@dataclass
class _RecordedCall:
    """A call of a submodule on fake tensors.

    `saved` holds the bytes that autograd saved inside it, by storage, without inputs, weights
    and results.
    """

    name: str
    leaves: list[Any]
    spec: Any
    saved: dict[int, int] = field(default_factory=dict)

    @property
    def tensors(self) -> list[torch.Tensor]:
        return tensors_in(self.leaves)

    @property
    def pattern(self) -> Any:
        return self.spec, tuple((type(leaf), getattr(leaf, "ndim", 0)) for leaf in self.leaves)

    @property
    def saves_memory(self) -> bool:
        inputs = sum(t.numel() * t.itemsize for t in self.tensors if t.is_floating_point())
        return sum(self.saved.values()) >= MIN_SAVED_SHARE * inputs > 0

    def arguments(self, tensors: Sequence[torch.Tensor]) -> tuple[Any, Any]:
        remaining = iter(tensors)
        leaves = [next(remaining) if isinstance(x, torch.Tensor) else x for x in self.leaves]
        args, kwargs = pytree.tree_unflatten(leaves, self.spec)
        return args, kwargs


_KNOWN: WeakKeyDictionary[nn.Module, dict[Hashable, Cuts]] = WeakKeyDictionary()


def find_parts(
    module: nn.Module, forward: Forward, args: Any, kwargs: Any, *, known_cuts: dict[Hashable, Cuts]
) -> Cuts:
    """Return the cuts of the largest position-wise parts of a block in which tiles save memory.

    `known_cuts` holds the parts of the model's blocks by kind of call, and is updated. A block that
    was tried for a plan is not tried again for a run, unless the trial failed.
    """
    leaves = [*module.parameters(), *pytree.tree_leaves((args, kwargs))]
    shapes = tuple(leaf.shape if isinstance(leaf, torch.Tensor) else type(leaf) for leaf in leaves)
    kind = type(module), str(module), module.training, shapes
    cached = _KNOWN.setdefault(module, {})
    if kind not in cached:
        cuts = known_cuts[kind] if kind in known_cuts else _find_cuts(module, forward, args, kwargs)
        if cuts is None:
            return {}
        cached[kind] = cuts
    known_cuts[kind] = cached[kind]
    return cached[kind]


def _find_cuts(module: nn.Module, forward: Forward, args: Any, kwargs: Any) -> Cuts | None:
    """Return the tile cuts of the parts of a block that can run in tiles.

    Return None, after a warning, if the block does not run on fake tensors.
    """
    stream = _stream((args, kwargs))
    assert stream is not None
    sizes = stream.shape[-2], stream.numel() // stream.shape[-1]
    try:
        seen = attempt(lambda: _record_calls(module, forward, args, kwargs))
    except AlwaysFails as error:  # the block depends on values
        warnings.warn(
            f"tiles are off for {type(module).__name__}: it does not run on shapes alone ({error})",
            RuntimeWarning,
            stacklevel=2,
        )
        return None
    cuts: Cuts = {}
    for name, calls in sorted(seen.items(), key=lambda item: item[0].count(".")):
        if any(name.startswith(f"{larger}.") for larger in cuts):
            continue
        cut = _cut_of(module.get_submodule(name), calls, sizes)
        if cut is not None:
            cuts[name] = cut
    return cuts


def _record_calls(
    module: nn.Module, forward: Forward, args: Any, kwargs: Any
) -> dict[str, list[_RecordedCall]]:
    """Run the block on fake tensors, with a graph, and return the calls of its submodules."""
    leaves, spec = pytree.tree_flatten((args, kwargs))
    seen: dict[str, list[_RecordedCall]] = {}
    running: list[_RecordedCall] = []
    alive: list[torch.Tensor] = []  # keeps addresses of storages from being reused

    def begin(_: nn.Module, args: Any, kwargs: Any, *, name: str) -> None:
        running.append(_RecordedCall(name, *pytree.tree_flatten((args, kwargs))))
        seen.setdefault(name, []).append(running[-1])

    def end(_: nn.Module, __: Any, out: Any) -> None:
        call = running.pop()
        # Results are not counted, because the operations that read them save them anyway.
        for result in tensors_in(out):
            call.saved.pop(storage_key(result), None)

    def save(tensor: torch.Tensor) -> None:
        alive.append(tensor)
        for call in running:
            key = storage_key(tensor)
            if key not in weights and key not in map(storage_key, call.tensors):
                call.saved[key] = tensor.untyped_storage().nbytes()

    handles = []
    with collecting(), faked(module, leaves) as (inputs, parameters):
        weights = {storage_key(p.requires_grad_(p.is_floating_point())) for p in parameters}
        # What autograd saves depends on which inputs require a gradient. The parts are used for
        # later calls too, so they must not depend on it: the first call may have no gradients.
        inputs = [_with_gradient(leaf) for leaf in inputs]
        a, k = pytree.tree_unflatten(inputs, spec)
        for name, child in module.named_modules():
            if name:
                handles += [
                    child.register_forward_pre_hook(
                        lambda m, a, k, name=name: begin(m, a, k, name=name), with_kwargs=True
                    ),
                    child.register_forward_hook(end),
                ]
        try:
            hooks = torch.autograd.graph.saved_tensors_hooks(save, _nothing)
            with torch.enable_grad(), hooks:
                forward(*a, **k)
        finally:
            for handle in handles:
                handle.remove()
    return seen


def _with_gradient(leaf: Any) -> Any:
    """Return a floating-point tensor as one that requires grad, and any other value unchanged.

    The result is not a leaf of the graph, so that the block may change it in place.
    """
    if not isinstance(leaf, torch.Tensor) or leaf.requires_grad or not leaf.is_floating_point():
        return leaf
    return leaf + leaf.new_zeros(()).requires_grad_()


def _nothing(_: Any) -> torch.Tensor:
    raise AssertionError("a trial has no backward")


def _cut_of(
    part: nn.Module, calls: Sequence[_RecordedCall], sizes: tuple[int, int]
) -> TileCut | None:
    """Return how a part can be divided into tiles, or None if it cannot be or saves no memory.

    `sizes` are two numbers of tokens: in one sample, and in all samples.
    """
    call = calls[0]
    hooked = any(has_hooks(child) for child in part.modules() if child is not part)
    plain = all(isinstance(leaf, (torch.Tensor, *PLAIN_TYPES)) for leaf in call.leaves)
    if (
        hooked
        or not plain
        or not call.saves_memory
        or any(c.pattern != call.pattern for c in calls)
    ):
        return None
    first = next((t for t in call.tensors if t.is_floating_point()), None)
    if first is None:
        return None
    for dim in (1, 2, 0):
        if dim >= first.ndim - 1 or first.shape[dim] not in sizes:
            continue
        length = first.shape[dim]
        having = tuple(t.ndim > dim and t.shape[dim] == length for t in call.tensors)
        alone = tuple(tensor is first for tensor in call.tensors)
        for inputs in dict.fromkeys((having, alone)):
            random = torch.random.fork_rng(devices=[])
            with _disable_current_modes(), collecting(), random, _stand_ins(part):
                cut = _try_cut(part, call, dim, inputs)
            if cut is not None:
                return cut
    return None


def _try_cut(
    part: nn.Module, call: _RecordedCall, dim: int, inputs: tuple[bool, ...]
) -> TileCut | None:
    tensors = []
    for tensor, is_tiled in zip(call.tensors, inputs, strict=True):
        shape = list(tensor.shape)
        if is_tiled:
            shape[dim] = 2 * TRIAL_TOKENS
        tensors.append(_stand_in(shape, tensor.dtype, windows=False))
    cut = TileCut(dim, inputs, (), False)

    def trial() -> TileCut:
        outputs = _try_tiles(part, part.forward, call.arguments, tensors, cut, TRIAL_TOKENS)
        with torch.no_grad():
            before = torch.get_rng_state()
            args, kwargs = call.arguments(tensors)
            part(*args, **kwargs)
            draws = not torch.equal(before, torch.get_rng_state())
        return TileCut(dim, inputs, outputs, draws)

    try:
        return attempt(trial)
    except NotSliceable:
        return None


def _try_tiles(
    part: nn.Module,
    forward: Forward,
    arguments: Callable[[Sequence[torch.Tensor]], tuple[Any, Any]],
    tensors: Sequence[torch.Tensor],
    cut: TileCut,
    size: int,
) -> tuple[bool, ...]:
    """Run two tiles of `size` tokens together and one by one, and compare the results.

    Return which results have a dimension of tokens. Raise `NotSliceable` if the tiles affect each
    other.
    """
    state = BlockState(type(part).__name__, part)

    def run(tile: slice, invalid: slice | None = None) -> list[torch.Tensor]:
        pieces = []
        for tensor, is_tiled in zip(tensors, cut.inputs, strict=True):
            piece = tensor.detach()
            if is_tiled:
                if invalid is not None and piece.is_floating_point():
                    piece = piece.clone()
                    piece[_at(cut.dim, invalid)] = torch.nan
                piece = piece[_at(cut.dim, tile)].contiguous()
            pieces.append(piece)
        args, kwargs = arguments(pieces)
        before = state.snapshot()
        out = forward(*args, **kwargs)
        if name := state.advanced(before):
            raise NotSliceable(f"changes its {name} in every call")
        return tensors_in(out)

    both, one, other = slice(0, 2 * size), slice(0, size), slice(size, 2 * size)
    with torch.no_grad(), ConstantRandomness(), state.preserved():
        whole, first, second = run(both), run(one), run(other)
        if not whole or not len(whole) == len(first) == len(second):
            raise NotSliceable("returns something else for fewer tokens")
        outputs = tuple(
            _has_tokens(cut.dim, *parts) for parts in zip(whole, first, second, strict=True)
        )
        if not any(outputs):
            raise NotSliceable("has no result with tokens")
        for changed, sound in ((one, other), (other, one)):
            for is_tiled, before, after in zip(outputs, whole, run(both, changed), strict=True):
                if is_tiled:
                    before, after = before[_at(cut.dim, sound)], after[_at(cut.dim, sound)]
                if after.is_floating_point() and (after.isnan() & ~before.isnan()).any():
                    raise NotSliceable("mixes tokens")
    return outputs


def _has_tokens(dim: int, both: torch.Tensor, one: torch.Tensor, other: torch.Tensor) -> bool:
    if both.shape == one.shape == other.shape:
        if not (agree(both, one) and agree(both, other)):
            raise NotSliceable("has a result that depends on all tokens")
        return False
    if both.ndim <= dim or one.shape != other.shape:
        raise NotSliceable("has a result whose size does not grow with the tokens")
    joined = torch.cat([one, other], dim) if one.ndim > dim else one
    if joined.shape != both.shape or not agree(both, joined):
        raise NotSliceable("gives other results for two tiles than for each of them")
    return True


@contextmanager
def _stand_ins(part: nn.Module) -> Iterator[None]:
    """Temporarily replace parameters, and buffers without values, by small substitutes.

    A dependence between tokens can be detected with any values, so substitutes that use little
    memory are sufficient.
    """
    others: list[tuple[dict[str, Any], str, torch.Tensor]] = []
    for child in part.modules():
        for name, weight in child._parameters.items():
            if weight is not None:
                substitute = _stand_in(weight.shape, weight.dtype, windows=True)
                others.append(
                    (child._parameters, name, nn.Parameter(substitute, requires_grad=False))
                )
        for name, buffer in child._buffers.items():
            if buffer is not None and (
                isinstance(buffer, FakeTensor) or buffer.device.type != "cpu"
            ):
                others.append(
                    (child._buffers, name, _stand_in(buffer.shape, buffer.dtype, windows=True))
                )
    with swapped(others):
        yield


def _stand_in(shape: Sequence[int], dtype: torch.dtype, *, windows: bool) -> torch.Tensor:
    """Return fp32 random numbers for floating-point types, ones for masks, and zeros for integers.

    With `windows`, rows are overlapping windows into one short row of random numbers, so the tensor
    takes little memory.
    """
    if dtype == torch.bool:
        return torch.ones(tuple(shape), dtype=dtype)
    if not dtype.is_floating_point:
        return torch.zeros(tuple(shape), dtype=dtype)
    generator = torch.Generator().manual_seed(0)
    if not windows:
        return torch.randn(tuple(shape), generator=generator)
    row = torch.randn(sum(shape) + 1, generator=generator).mul_(0.05)
    return row.as_strided(tuple(shape), (1,) * len(shape))
