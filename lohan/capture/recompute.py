"""One call of a block, computed in slices.

The call is recorded with its context, its saved tensors and the state that it changes, so that
backward can compute it again.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from operator import is_
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch
from torch import nn

from lohan.capture.saved_call import (
    Attribute,
    CallContext,
    Gathered,
    OldValues,
    Output,
    SavedCall,
    changed_input,
    detached,
    forked_random_state,
    tree_leaves,
)
from lohan.capture.selective_checkpoint import SkipUnneededOps, recompute_with, run_and_save
from lohan.capture.slicing import Cuts, NotSliceable
from lohan.device.base import Device, Event
from lohan.device.choose import Compiled
from lohan.errors import ModelError
from lohan.util.libraries import is_user_code

if TYPE_CHECKING:
    from lohan.capture.tracing import SavePlans


# -- How far the caller may be ahead of the device -------------------------------------------------


SLICES_AHEAD = 2


class RunAhead:
    """A limit of two slices that are launched but not finished.

    A stream holds about a thousand launches. If it is full, a launch blocks in a busy loop, and so
    do launches of other threads on other streams, so copies for the next block would not be
    enqueued. Two slices are enough to keep the device busy, and here the thread sleeps.
    """

    def __init__(self, device: Device) -> None:
        self._device = device
        self._ends: deque[Event] = deque()  # end marks of the slices that might still run

    @contextmanager
    def slice(self) -> Iterator[None]:
        """Wait until fewer than two launched slices are unfinished; the body launches the next."""
        if len(self._ends) >= SLICES_AHEAD:
            self._ends.popleft().synchronize()
        yield
        self._ends.append(self._device.mark())


# -- Buffers and attributes that a call of a block changes -----------------------------------------


_ABSENT = object()


@dataclass(frozen=True)
class Snapshot:
    """The state of a block before a call.

    It holds the version of each buffer, copies of some buffers, all attributes of the modules, and
    the states of random generators besides that of the device.
    """

    buffers: list[tuple[torch.Tensor, int, torch.Tensor | None]]
    attributes: list[dict[str, Any]]
    generators: OldValues


class HostRandom:
    """The random states of Python and numpy, which are read and set as the items of a dict."""

    KEYS = ("random", "numpy.random")

    def get(self, key: str, _: Any = None) -> Any:
        return random.getstate() if key == "random" else np.random.get_state()

    def __setitem__(self, key: str, state: Any) -> None:
        if key == "random":
            random.setstate(state)
        else:
            np.random.set_state(state)


_HOST_RANDOM: Any = HostRandom()


def _has_advanced(now: Any, before: Any) -> bool:
    """Return whether numbers were drawn between two states of a random generator."""
    if isinstance(before, torch.Generator):
        same = isinstance(now, torch.Generator) and torch.equal(now.get_state(), before.get_state())
    elif isinstance(before[1], tuple):  # Python's
        same = now == before
    else:  # numpy's: numbers and position
        same = now[2] == before[2] and np.array_equal(now[1], before[1])
    return not same


# Set by transformers when it registers hooks. The hooks stay, so this attribute is not restored.
_HOOKED = "_output_capturing_hooks_installed"


class BlockState:
    """Buffers and attributes of one block."""

    def __init__(self, name: str, module: nn.Module) -> None:
        self._name = name
        # indices into `_attributes`; None before the first forward
        self._changing: set[int] | None = None
        self._modules = list(module.modules())
        # Modules of libraries draw random numbers from the generator of the device only. Those of
        # the user may draw from other generators, which recomputation has to restore.
        self._has_user_code = any(is_user_code(type(child)) for child in self._modules)
        self._attributes: list[Attribute] = [
            (child._buffers, key)
            for child in self._modules
            for key, buffer in child._buffers.items()
            if buffer is not None
        ]

    def snapshot(self) -> Snapshot:
        """Return the state before a forward. Buffers are copied if they may change.

        The first forward shows which buffers change.
        """
        copied = range(len(self._attributes)) if self._changing is None else self._changing
        buffers = [
            (tensor, tensor._version, tensor.detach().clone() if number in copied else None)
            for number, tensor in enumerate(self._current())
        ]
        return Snapshot(
            buffers, [dict(vars(module)) for module in self._modules], self._generators()
        )

    def _generators(self) -> OldValues:
        """Return copies of the generators of Python, numpy and of the modules' attributes."""
        hooked = any(module._forward_hooks or module._forward_pre_hooks for module in self._modules)
        if not self._has_user_code and not hooked:
            return []
        copies: OldValues = [
            ((_HOST_RANDOM, key), _HOST_RANDOM.get(key)) for key in HostRandom.KEYS
        ]
        for module in self._modules:
            attributes = vars(module)
            for key, value in attributes.items():
                if isinstance(value, torch.Generator):
                    copies.append(((attributes, key), value.clone_state()))
        return copies

    def changes_since(self, before: Snapshot) -> OldValues:
        """Return the old values of everything that forward has changed."""
        saved: OldValues = []
        changed: set[int] = set()
        for number, current in enumerate(self._current()):
            tensor, version, old = before.buffers[number]
            same = current is tensor and current._version == version
            # BatchNorm changes values without changing versions
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
        return saved + self._drawn(before) + self._other_attributes(before.attributes)

    def unchanged_since(self, before: Snapshot) -> list[tuple[torch.Tensor, int] | None]:
        """Return the buffers that forward has left alone with their versions, None for others."""
        return [
            (tensor, version) if current is tensor and current._version == version else None
            for current, (tensor, version, _) in zip(self._current(), before.buffers, strict=True)
        ]

    def changes_of_user(self, call: SavedCall) -> OldValues:
        """Return the values in forward of what was changed between forward and backward.

        User code may switch a module to `eval`, or set another attribute, before it calls backward.
        """
        saved: OldValues = []
        for number, (current, old) in enumerate(zip(self._current(), call.buffers, strict=True)):
            if old is None:
                continue
            if current is not old[0]:
                saved.append((self._attributes[number], old[0]))
            elif current._version != old[1]:
                raise ModelError(
                    f"buffer {self._attributes[number][1]} of block {self._name} was changed in "
                    "place between forward and backward, so the block cannot be recomputed; change "
                    "it after backward"
                )
        return saved + self._other_attributes(call.attributes)

    def _drawn(self, before: Snapshot) -> OldValues:
        """Return the states of the generators from which forward has drawn."""
        return [
            ((owner, key), old)
            for (owner, key), old in before.generators
            if _has_advanced(owner.get(key), old)
        ]

    def _other_attributes(self, before: list[dict[str, Any]]) -> OldValues:
        saved: OldValues = []
        for module, old in zip(self._modules, before, strict=True):
            current = vars(module)
            if current.keys() == old.keys() and all(map(is_, current.values(), old.values())):
                # The usual case: neither a value nor the order of the attributes has changed.
                continue
            for key in (current.keys() | old.keys()) - {_HOOKED}:
                if current.get(key, _ABSENT) is not (was := old.get(key, _ABSENT)):
                    saved.append(((current, key), was))
        return saved

    def advanced(self, before: Snapshot) -> str:
        """Return the name of what a call has changed, or an empty string.

        This may be a buffer, a number, or a random generator besides that of the device. A block
        with such state gives other results in several calls than in one.
        """
        for number, current in enumerate(self._current()):
            tensor, version, old = before.buffers[number]
            moved = current is not tensor or current._version != version
            if moved and (old is None or not torch.equal(current, old)):
                return f"buffer {self._attributes[number][1]}"
        for (_, key), _ in self._drawn(before):
            return f"random generator {key}"
        for (attributes, key), was in self._other_attributes(before.attributes):
            if isinstance(attributes.get(key), int | float) and isinstance(was, int | float):
                return f"attribute {key}"
        return ""

    def _current(self) -> list[torch.Tensor]:
        return [owner[key] for owner, key in self._attributes]

    @contextmanager
    def preserved(self) -> Iterator[None]:
        """Restore buffers, attributes and random generators on exit."""
        before = self.snapshot()
        pairs = zip(self._attributes, self._current(), strict=True)
        buffers: OldValues = [(attribute, tensor) for attribute, tensor in pairs]
        with with_old_values(buffers + before.generators):
            inside = [dict(vars(module)) for module in self._modules]
            try:
                yield
            finally:
                for attribute, old in self._other_attributes(inside):
                    _put(attribute, old)


def _put(attribute: Attribute, value: Any) -> None:
    owner, key = attribute
    if value is _ABSENT:
        owner.pop(key, None)
    else:
        owner[key] = value


def restore_values(saved: OldValues) -> None:
    for attribute, old in saved:
        if isinstance(old, torch.Tensor):
            old = old.detach().clone()
        elif isinstance(old, torch.Generator):
            old = old.clone_state()
        _put(attribute, old)


@contextmanager
def with_old_values(saved: OldValues) -> Iterator[None]:
    """Temporarily restore old values for a recomputation. Tensors and generators are copied."""
    current = [(attribute, attribute[0].get(attribute[1], _ABSENT)) for attribute, _ in saved]
    try:
        restore_values(saved)
        yield
    finally:
        for attribute, value in current:
            _put(attribute, value)


# -- A forward that runs the operations of its recomputation and saves nothing ---------------------
#
# Operations may depend on whether a graph is recorded: attention kernels also return what backward
# needs, a matrix product folds dimensions differently if an input requires a gradient, and modules
# check whether gradients are enabled. A result that is kept in forward can only be reused in
# recomputation if both run the same operations. Forward therefore records a graph too, but one that
# saves no tensor and is discarded at the end of the call.


IN_PLACE = "in-place operation"  # part of torch's message when a leaf is changed


def no_saved_tensors(run: Callable[[], Any], name: str) -> Any:
    """Return the result of `run`, which records a graph that saves no tensors and is discarded.

    `name` is the name of the block, for errors.
    """
    try:
        with discard_saved_tensors(name):
            out = run()
    except RuntimeError as error:
        if IN_PLACE in str(error) and "leaf" in str(error):
            raise ModelError(changed_input(name)) from error
        raise
    return detached(out)


@contextmanager
def discard_saved_tensors(name: str) -> Iterator[None]:
    """Record a graph that saves no tensors; `name` is the name of the block, for errors."""

    def refuse(saved: Any) -> torch.Tensor:
        raise ModelError(
            f"block {name} computes gradients inside its own forward (torch.autograd.grad or "
            "backward), and the forward of a block saves nothing for them; keep the block in "
            f"memory with resident=[{name!r}]"
        )

    # The graph saves the id of each tensor instead of the tensor, so it keeps no tensor alive. `id`
    # is implemented in C and therefore fast.
    hooks = torch.autograd.graph.saved_tensors_hooks(id, refuse)
    with torch.enable_grad(), hooks:
        yield


# -- Computing a call slice by slice ---------------------------------------------------------------
#
# Forward keeps the inputs and the results that the plan saves. Backward runs the block again from
# them.


class ActivationHooks:
    """Callbacks that decide where the activations of a call are between forward and backward.

    This class leaves them where they are. Subclasses move them to another tier and back.
    """

    def save_inputs(self, site: int, call: SavedCall, buffers: Sequence[int]) -> None:
        """Handle the start of forward. `buffers` are the numbers of the reserved buffers."""

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
        """Release what is held for a call of a site whose backward has ended."""


class Block(Protocol):
    """A block whose weights are in memory."""

    number: int
    name: str
    module: nn.Module
    original: Callable[..., Any]  # the forward before it was wrapped
    state: BlockState


class SlicedCompute:
    """The computation of blocks: forward slice by slice, and backward by recomputation."""

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
        """Run the forward of a call slice by slice, and return its output.

        `buffers` are those that the schedule reserves for the activations of the call.
        """
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
        if backward_follows:
            call.buffers = block.state.unchanged_since(before)
            call.attributes = before.attributes
        self.cuts.confirm()
        return output

    def _find_cut(self, block: Block, call: SavedCall) -> None:
        """Determine how a call can be divided into slices, and store the cut in the call."""
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
        """Run the forward of a slice; return its result and the results saved for backward.

        The second value is None if none are saved. See Note [what is compiled] in device/choose.py.
        """
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
        """Run a call without gradients, keep nothing, and return its output."""
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
        """Compute the gradients of a call, and return the gradients of the inputs.

        The gradients of the weights are passed to the hooks on their leaves.
        """
        inputs = [Gathered(call.batch) for _ in call.tensors]
        changed = call.changed + block.state.changes_of_user(call)
        old_values = with_old_values(changed) if changed else nullcontext()
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
        """Run forward and backward of one slice, and release everything but the gradients."""
        saved = call.saved_ops[number]
        tensors = call.inputs(part, grad=True)
        fast = self.compiled.recompute(block.number) if saved is None else None

        def run() -> Any:
            # The arguments are created for each run, since a run may change containers.
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
    def as_in_forward(self, block: Block, call: SavedCall) -> Iterator[None]:
        """Temporarily restore the random state, buffers and attributes of a call's forward."""
        changed = call.changed + block.state.changes_of_user(call)
        with forked_random_state(self._device), with_old_values(changed):
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
