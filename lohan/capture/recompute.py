"""One call of a block, computed in slices.

The call is recorded with its context, its saved tensors and the state that it changes, so that
backward can compute it again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import nn
from torch.utils import _pytree as pytree

from lohan.capture.block_state import BlockState, OldValues, restore_values, with_old_values
from lohan.capture.call_context import CallContext, forked_random_state
from lohan.capture.selective_checkpoint import SkipUnneededOps, recompute_with, run_and_save
from lohan.capture.slicing import Cut, Cuts, NotSliceable
from lohan.capture.trees import PLAIN, detached, flatten, tree_leaves, unflatten
from lohan.device.base import Device
from lohan.device.choose import Compiled
from lohan.device.run_ahead import RunAhead
from lohan.errors import ModelError

if TYPE_CHECKING:
    from lohan.capture.tracing import SavePlans

# -- A forward that runs the operations of its recomputation and saves nothing ---------------------
#
# Operations may depend on whether a graph is recorded: attention kernels also return what backward
# needs, a matrix product folds dimensions differently if an input takes a gradient, and modules
# check whether gradients are enabled. A result that is kept in forward can only be reused in
# recomputation if both run the same operations. Forward therefore records a graph too, but one that
# saves no tensor and is discarded at the end of the call.


IN_PLACE = "in-place operation"  # part of torch's message when a leaf is changed


def no_saved_tensors(run: Callable[[], Any], name: str) -> Any:
    """Return the result of `run` without its graph; `name` is the name of the block."""
    try:
        with discard_saved_tensors(name):
            out = run()
    except RuntimeError as error:
        if IN_PLACE in str(error) and "leaf" in str(error):
            raise ModelError(changed_input(name)) from error
        raise
    return detached(out)


def changed_input(name: str) -> str:
    return (
        f"block {name} changes its input in place, so it cannot be recomputed; make the operation "
        "out of place"
    )


@contextmanager
def discard_saved_tensors(name: str) -> Iterator[None]:
    """Record a graph inside the context, and save no tensor for it. `name` is that of the block."""

    def refuse(saved: Any) -> torch.Tensor:
        raise ModelError(
            f"block {name} computes gradients inside its own forward (torch.autograd.grad or "
            "backward), and the forward of a block saves nothing for them; keep the block in "
            f"memory with resident=[{name!r}]"
        )

    # Each tensor is replaced by its id, a function in C that keeps nothing alive.
    hooks = torch.autograd.graph.saved_tensors_hooks(id, refuse)
    with torch.enable_grad(), hooks:
        yield


# -- What a block call keeps in forward for backward -----------------------------------------------
#
# A call keeps its tensor inputs, the layout of its arguments, and the random state before each
# micro-batch slice. Recomputation therefore repeats the forward exactly, including dropout.


def fills_cache(inputs: Iterable[Any]) -> bool:
    """Return whether an input is a cache of keys and values, which reports its length."""
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


class SavedCall:
    """The inputs of one block call.

    The constructor saves them; `restore` returns them by slices.
    """

    def __init__(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.name = name
        self._leaves, self._spec = flatten((args, kwargs))
        if any(map(is_prefix, self._leaves)):
            shown = [Prefix(leaf) if is_prefix(leaf) else leaf for leaf in self._leaves]
            self._leaves, self._spec = flatten(unflatten(shown, self._spec))
        self._where = [i for i, leaf in enumerate(self._leaves) if isinstance(leaf, torch.Tensor)]
        self.tensors: list[torch.Tensor] = [self._leaves[i] for i in self._where]
        self.wants_grad = [t.requires_grad for t in self.tensors]
        self.rng: list[torch.Tensor] = []
        self.saved_ops: list[Any] = []  # saved results of each slice, or None
        self.evicted = False
        self.cut = Cut(whole="it was not asked for")
        self.checked = False  # whether the cut was compared with a plain call
        self.changed: OldValues = []  # buffers that forward has changed, with their old values
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
        """The inputs that take a gradient."""
        return [
            t
            for t, takes_gradient in zip(self.tensors, self.wants_grad, strict=True)
            if takes_gradient
        ]

    def evict_inputs(self) -> None:
        """Free the inputs that take a gradient, after they were copied to another tier."""
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
        step = self.batch if self.cut.whole else micro_batch or self.batch
        return [slice(a, min(a + step, self.batch)) for a in range(0, self.batch, step)]

    def restore(
        self, part: slice, *, grad: bool
    ) -> tuple[list[torch.Tensor], tuple[Any, ...], dict[str, Any]]:
        """Return tensors, args and kwargs of one slice.

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


class ActivationHooks:
    """Callbacks that decide where the activations of a call are between forward and backward.

    This class leaves them where they are. Subclasses move them to another tier and back.
    """

    def save_inputs(self, site: int, call: SavedCall, buffers: Sequence[int]) -> None:
        """Handle the start of forward. `buffers` are those that the schedule names."""

    def save_slice(self, site: int, call: SavedCall) -> None:
        """Handle the end of one slice of forward."""

    def forward_done(self, site: int, call: SavedCall) -> None:
        """Handle the end of forward."""

    def load_inputs(self, site: int, call: SavedCall, buffers: Sequence[int]) -> None:
        """Provide the inputs at the start of backward."""

    def load_slice(self, site: int, call: SavedCall, number: int) -> None:
        """Provide the saved results of a slice that is about to be recomputed."""

    def release_slice(self, site: int, call: SavedCall, number: int) -> None:
        """Release the saved results of a slice whose backward has been launched."""

    def release(self, site: int, call: SavedCall) -> None:
        """Handle the end of backward."""


class Gathered:
    """Joins per-slice tensors of one position along the batch dimension, without a second copy."""

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


# -- Computing a call slice by slice ---------------------------------------------------------------
#
# Forward keeps the inputs and the results that the plan saves. Backward runs the block again from
# them.


class Block(Protocol):
    """A block whose weights are in memory."""

    number: int
    name: str
    module: nn.Module
    original: Callable[..., Any]  # the forward before it was wrapped
    state: BlockState


class SlicedCompute:
    """Runs blocks forward and, by recomputation, backward."""

    def __init__(
        self,
        device: Device,
        *,
        micro_batch: int | None,
        activations: ActivationHooks,
        save_plans: SavePlans,
        compiled: Compiled,
    ) -> None:
        self._device, self.micro_batch, self.activations = device, micro_batch, activations
        self.save_plans, self.compiled, self.cuts = save_plans, compiled, Cuts()
        self._skip_unneeded = SkipUnneededOps()
        self.run_ahead = RunAhead(device)

    def forward(
        self, block: Block, call: SavedCall, buffers: Sequence[int], *, backward_follows: bool
    ) -> Output:
        """Compute a call. `buffers` are those that the schedule reserves for its activations."""
        output = Output(call)
        self._find_cut(block, call)
        if backward_follows:
            self.activations.save_inputs(block.number, call, buffers)
        before = block.state.snapshot()
        for part in call.slices(self.micro_batch):
            with self.run_ahead.slice():
                call.rng.append(self._device.random_state())
                out, saved = self._run_slice(block, call, part, backward_follows=backward_follows)
                call.saved_ops.append(saved)
                self.activations.save_slice(block.number, call)
                output.put(part, out)
        call.check_untouched()
        call.changed = block.state.changes_since(before)
        self.cuts.confirm()
        return output

    def _find_cut(self, block: Block, call: SavedCall) -> None:
        """Determine how a call can be divided into slices."""
        call.context = CallContext.current(self._device.torch_device.type)
        if self.micro_batch and self.micro_batch < call.batch:

            def run(*args: Any, **kwargs: Any) -> Any:
                before = block.state.snapshot()
                out = call.context.run(block.original, *args, **kwargs)
                if name := block.state.advanced(before):
                    raise NotSliceable(f"changes its {name} in every call")
                return out

            # Trials compare versions of buffers, which tensors of inference mode do not have.
            trial = torch.inference_mode(False)
            with trial, forked_random_state(self._device), block.state.preserved():
                call.cut = self.cuts.of(block.module, call, run)

    def _run_slice(
        self, block: Block, call: SavedCall, part: slice, *, backward_follows: bool
    ) -> tuple[Any, Any]:
        """Return the result of a slice and what it keeps. See Note [what is compiled]."""
        _, args, kwargs = call.restore(part, grad=backward_follows)
        save_plan = self.save_plans.of(block, call, part)
        fast = self.compiled.forward(block.number) if save_plan is None else None
        if fast is not None:
            with torch.no_grad():
                return call.context.run(fast, *args, **kwargs), None
        run = partial(call.context.run, block.original, *args, **kwargs)
        if backward_follows:
            run = partial(no_saved_tensors, run, call.name)
        if save_plan is not None:
            return run_and_save(run, save_plan)
        out = run()
        if self.compiled.undecided(block.number):
            states = call.rng[-1], self._device.random_state()
            self.compiled.decide(block.number, block.original, *states)
        return out, None

    def evaluate(self, block: Block, call: SavedCall) -> Output:
        """Run a call without gradients, and keep nothing."""
        self._find_cut(block, call)
        output = Output(call)
        for part in call.slices(self.micro_batch):
            with self.run_ahead.slice():
                _, args, kwargs = call.restore(part, grad=False)
                output.put(part, call.context.run(block.original, *args, **kwargs))
        self.cuts.confirm()
        return output

    def backward(
        self, block: Block, call: SavedCall, grads: tuple[torch.Tensor | None, ...]
    ) -> list[Gathered]:
        """Compute the gradients of a call and return those of the inputs.

        The gradients of the weights are passed to the hooks on their leaves.
        """
        inputs = [Gathered(call.batch) for _ in call.tensors]
        old_values = with_old_values(call.changed) if call.changed else nullcontext()
        with forked_random_state(self._device), self._device.computing(), old_values:
            for number, part in enumerate(call.slices(self.micro_batch)):
                with self.run_ahead.slice():
                    self._device.set_random_state(call.rng[number])
                    self.activations.load_slice(block.number, call, number)
                    self._recompute_slice(block, call, grads, number, part, inputs)
                    self.activations.release_slice(block.number, call, number)
        return inputs

    def _recompute_slice(
        self,
        block: Block,
        call: SavedCall,
        grads: tuple[torch.Tensor | None, ...],
        number: int,
        part: slice,
        inputs: list[Gathered],
    ) -> None:
        """Run forward and backward of one slice. Only the gradients remain."""
        saved = call.saved_ops[number]
        tensors = call.inputs(part, grad=True)
        fast = self.compiled.recompute(block.number) if saved is None else None

        def run() -> Any:
            # created for each run, since a run may change containers
            args, kwargs = call.arguments(tensors)
            return call.context.run(fast or block.original, *args, **kwargs)

        with torch.enable_grad():
            if saved is not None:
                out = recompute_with(run, saved)
            elif fast is not None:
                out = tree_leaves(run())
            else:
                kind = block.number, part.stop - part.start, *(t.shape for t in tensors)

                state = call.rng[number]

                def rewind() -> None:
                    self._device.set_random_state(state)
                    restore_values(call.changed)

                out = self._skip_unneeded.run(kind, block.module, run, rewind)
        outputs = [leaf for leaf in out if isinstance(leaf, torch.Tensor)]
        pairs = [
            (output, grad)
            for output, grad in zip(
                outputs, slice_gradients(call, grads, number, part), strict=True
            )
            if output.requires_grad and grad is not None
        ]
        if pairs:
            torch.autograd.backward([output for output, _ in pairs], [grad for _, grad in pairs])
        whole = part == slice(0, call.batch)
        for position, (gathered, tensor) in enumerate(zip(inputs, tensors, strict=True)):
            if tensor.grad is not None and (whole or call.cut.inputs[position]):
                gathered.put(part, tensor.grad)
            elif tensor.grad is not None:  # an input that all slices share
                gathered.add(tensor.grad)

    @contextmanager
    def as_in_forward(self, call: SavedCall) -> Iterator[None]:
        """Restore the random state and buffers of the beginning of a call's first slice."""
        with forked_random_state(self._device), with_old_values(call.changed):
            self._device.set_random_state(call.rng[0])
            yield


def slice_gradients(
    call: SavedCall, grads: tuple[torch.Tensor | None, ...], number: int, part: slice
) -> list[torch.Tensor | None]:
    """Return the gradients of the outputs of one slice.

    An output that all slices share receives its gradient with the first slice.
    """
    if part == slice(0, call.batch):
        return list(grads)
    sliced: list[torch.Tensor | None] = []
    for grad, rows in zip(grads, call.cut.outputs, strict=True):
        if grad is not None and rows:
            grad = grad[part.start * rows : part.stop * rows]
        sliced.append(grad if rows or number == 0 else None)
    return sliced
