"""Gradients, from the block that makes them to the update that consumes them.

They never exist for the whole model unless something needs them all: where updates wait for the
norm (clipping, the default of `lohan train`, or loss scaling) they are held until it is known, in
memory or, without room, on SSD. A gradient is, in this order,

    in GradientSink     on the compute device: hooks add up what the calls of this backward make,
                        until the last use of its group (fp32 where several are summed)
    set aside           by GradientOffload, in host memory, where a device has its own memory and an
                        earlier block will add to it: tied weights of head and embedding, say
    pending.on_device   that was the last use (GradientCollector.finish): in flight off a device,
                        reduced over the ranks by X, offloaded to host memory by D
    pending.on_host
                        where its update U finds it; on the CPU at once
    in GradientSpill    held without room in host memory: written by P, read by G for U

`pending` is PendingGradients. Inside `session.accumulate()` sums of several backward calls are in
Accumulated, and the step takes all of them from there to `on_host`. Gradients of resident
parameters are in `.grad` until the step ends, then in `on_host`.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryFile
from typing import IO, TYPE_CHECKING, Any

import numpy as np
import torch
from torch import nn

from lohan import _core
from lohan.capture.placeholders import OffloadedParameter
from lohan.device.base import Device, Event
from lohan.engine.buffers import HostPool
from lohan.engine.collectives import StepCollectives
from lohan.engine.step import Steps
from lohan.engine.user_code import (
    KeptGradients,
    UnwantedGradients,
    WatchedParameters,
    run_gradient_hooks,
)
from lohan.errors import BudgetError, ModelError, StorageIOError
from lohan.model.layout import Blocks, FlatGroup, Site
from lohan.model.plan import Plan
from lohan.model.state import FLOAT, chunks, gradient_key
from lohan.schedule.placement import Gate, gate_of
from lohan.store.io_engine import Buffer
from lohan.store.store import Store, Ticket
from lohan.util.units import PAGE, align_up, format_bytes

if TYPE_CHECKING:
    from lohan.engine.scheduler import ActionScheduler

GroupGrads = Mapping[int, torch.Tensor]  # index of the tensor in its group -> gradient


SCALED = 2**22  # elements of 16 bit at a time
DOUBLE = 8  # bytes


def scale_(values: torch.Tensor, factor: float | torch.Tensor) -> None:
    """Multiply in place by a number, or by a tensor on the compute device.

    Both give the same bits, which a factor that is rounded to 16 bits would not.
    """
    if not isinstance(factor, torch.Tensor):
        if factor != 1.0:
            values.mul_(factor)
    elif values.dtype == torch.float32:
        values.mul_(factor)
    else:
        for part in values.view(-1).split(SCALED):
            part.copy_(part.float().mul_(factor))


class GradientSink:
    """Collects gradients by (group, tensor); uses are counted so that the last one is known."""

    def __init__(self) -> None:
        self._grads: dict[str, dict[int, torch.Tensor]] = {}
        self._uses: dict[str, int] = {}
        self.period = 0  # Increases when a step ends or is rolled back. Uses count within one.
        self._sums_wide: dict[str, bool] = {}

    def expect(self, group: str) -> None:
        self._uses[group] = self._uses.get(group, 0) + 1

    def end_use(self, group: str) -> bool:
        """One use is over; true if it was the last."""
        self._uses[group] -= 1
        return self._uses[group] == 0

    def sum_wide(self, group: str, wide: bool) -> None:
        """Select whether the following calls sum in fp32, where sums of 16-bit parts lose bits."""
        self._sums_wide[group] = wide

    def add(self, group: str, tensor: int, grad: torch.Tensor) -> None:
        grads = self._grads.setdefault(group, {})
        if tensor in grads:
            grads[tensor].add_(grad)
        else:
            wide = self._sums_wide.get(group, False)
            grads[tensor] = grad.float() if wide else grad.contiguous()

    def hook_for(self, group: str, tensor: int) -> Callable[[torch.Tensor], None]:
        """Return a hook for a leaf that adds its gradient to this sink."""

        def hook(leaf: torch.Tensor) -> None:
            assert leaf.grad is not None
            self.add(group, tensor, leaf.grad)
            leaf.grad = None

        return hook

    def take(self, group: str) -> dict[int, torch.Tensor]:
        return self._grads.pop(group, {})

    def add_scaled(
        self, group: str, made: dict[int, torch.Tensor], *, factor: float | torch.Tensor
    ) -> None:
        """Add gradients that were computed in forward, multiplied by `factor`."""
        grads = self._grads.setdefault(group, {})
        for tensor, grad in made.items():
            scale_(grad, factor)
            grads[tensor] = grads[tensor].float().add_(grad) if tensor in grads else grad

    def waiting(self) -> list[str]:
        return list(self._grads)

    def uses(self, group: str) -> int:
        return self._uses.get(group, 0)

    def clear(self) -> None:
        self._grads.clear()

    def end_period(self) -> None:
        """Drop all uses: the weights move on, so no earlier forward may run its backward."""
        self._uses.clear()
        self.period += 1


@dataclass
class PendingGradients:
    """Gradients of groups whose last use is over, until their updates are done and accepted."""

    on_host: dict[int, GroupGrads] = field(default_factory=dict)
    on_device: dict[int, GroupGrads] = field(default_factory=dict)  # in flight to host memory
    # Sums of the squares of those, where the device makes them.
    squares_on_device: dict[int, torch.Tensor | None] = field(default_factory=dict)
    squares: dict[int, float] = field(default_factory=dict)  # of groups, in this step

    def clear(self) -> None:
        self.on_host.clear()
        self.on_device.clear()
        self.squares_on_device.clear()
        self.squares = {}  # updates that are queued may still look at those of the step before


class OffloadedGradients(Mapping[int, torch.Tensor]):
    """Gradients in host memory that a copy from the device fills.

    A reader waits for the copy: a lane or, for the norm at the end of backward, the caller.
    `squares` is the sum of their squares, computed on the device and copied with them.
    """

    def __init__(
        self, grads: GroupGrads, event: Event, squares: torch.Tensor | None = None
    ) -> None:
        self._grads, self.event, self._squares, self._here = grads, event, squares, False

    def __getitem__(self, index: int) -> torch.Tensor:
        self.wait()
        return self._grads[index]

    def wait(self) -> None:
        if not self._here:
            self.event.synchronize()
            self._here = True

    def sum_of_squares(self) -> float | None:
        """Return the sum of squares in double precision, in a fixed order.

        The result is the same on every lane and in every mode. If a device has already
        computed it, its result is returned, so that no lane reads the gradients for it.
        """
        if self._squares is None:
            return None
        self.wait()
        return float(self._squares)

    def destinations(self) -> Iterable[tuple[int, torch.Tensor]]:
        """Where they will be; what a lane reads there must come after the event."""
        return self._grads.items()

    def __iter__(self) -> Iterator[int]:
        return iter(self._grads)

    def __len__(self) -> int:
        return len(self._grads)


class GradientOffload:
    """Copies gradients from the device into reusable buffers in host memory.

    `limit` is the number of bytes that the buffers may take before unused ones are freed for
    new ones. `groups` is the number of groups that come with the sum of their squares.
    """

    def __init__(self, device: Device, limit: int, *, groups: int = 0) -> None:
        self._device, self._limit = device, limit
        memory = device.host_memory(max(1, groups) * DOUBLE)
        self._squares = torch.from_numpy(memory).view(torch.float64)
        self._resting: list[torch.Tensor] = []
        self._used: dict[int, torch.Tensor] = {}  # by number of group
        self._own: dict[int, torch.Tensor] = {}  # for what the caller sends here, by group
        self.aside: dict[
            int, OffloadedGradients
        ] = {}  # what waits for a block that adds to it, by group

    def sum_squares(self, grads: GroupGrads) -> torch.Tensor | None:
        """Sum the squares of a group's gradients on the device, after the work that computes them.

        Returns None if there are no gradients, or if the host must compute the sum.
        """
        return self._device.sum_squares([grads[i] for i in sorted(grads)]) if grads else None

    def offload_async(
        self,
        number: int,
        group: FlatGroup,
        grads: GroupGrads,
        *,
        squares: torch.Tensor | None = None,
    ) -> OffloadedGradients:
        """Copy gradients to the host when compute has produced them, without blocking.

        The gradients copied earlier for this group must have been used.
        """
        width = max((grad.itemsize for grad in grads.values()), default=0)
        if number not in self._own:
            self._own[number] = torch.from_numpy(self._device.host_memory(group.numel * FLOAT))
        there = self._placed(self._own[number], group, grads, width)
        pairs, summed = self._pairs(number, there, grads, squares)
        event = self._device.copy("d2h", pairs, after=self._device.mark())
        self._device.record_stream("d2h", [source for _, source in pairs])
        return OffloadedGradients(there, event, summed)

    def _pairs(
        self, number: int, there: GroupGrads, grads: GroupGrads, squares: torch.Tensor | None
    ) -> tuple[list[tuple[torch.Tensor, torch.Tensor]], torch.Tensor | None]:
        """Return the targets and sources of the copies, and where the sum of squares will be."""
        pairs = [(there[index], grad.contiguous()) for index, grad in grads.items()]
        if squares is None:
            return pairs, None
        summed = self._squares[number : number + 1]
        return [*pairs, (summed, squares)], summed

    def set_aside(self, number: int, group: FlatGroup, grads: Mapping[int, torch.Tensor]) -> None:
        """Gradients to which another block of this backward adds wait in host memory, in fp32."""
        if grads:
            wide = {index: grad.float() for index, grad in grads.items()}
            self.aside[number] = self.offload_async(number, group, wide)

    def fetch_aside(self, number: int) -> dict[int, torch.Tensor]:
        """Return the gradients that were set aside, copied back to the device.

        Sums then continue in the order of the blocks. Compute waits for the copy, the
        caller does not.
        """
        if number not in self.aside:
            return {}
        aside = self.aside.pop(number)
        made, pairs = {}, []
        for index, own in aside.destinations():
            flat = self._device.allocate(own.numel() * FLOAT)
            made[index] = flat.view(torch.float32).view(own.shape)
            pairs.append((made[index], own))
        self._device.wait(self._device.copy("slices", pairs, after=aside.event))
        return made

    def offload(
        self,
        number: int,
        group: FlatGroup,
        grads: GroupGrads,
        *,
        squares: torch.Tensor | None = None,
    ) -> OffloadedGradients:
        """Copy a group's gradients to the host, and wait for the copy."""
        width = max((grad.itemsize for grad in grads.values()), default=0)
        there = self._placed(self._take(number, group.numel * width), group, grads, width)
        pairs, summed = self._pairs(number, there, grads, squares)
        made = OffloadedGradients(there, self._device.copy("d2h", pairs), summed)
        made.wait()
        return made

    @staticmethod
    def _placed(
        flat: torch.Tensor, group: FlatGroup, grads: Mapping[int, torch.Tensor], width: int
    ) -> dict[int, torch.Tensor]:
        """Return a view of the buffer for each gradient, with `width` bytes per element."""
        made = {}
        for index, grad in grads.items():
            start, count = group.tensors[index].offset * width, grad.numel() * grad.itemsize
            made[index] = flat[start : start + count].view(grad.dtype).view(grad.shape)
        return made

    def _take(self, number: int, size: int) -> torch.Tensor:
        self.release(number)
        fitting = [i for i, buffer in enumerate(self._resting) if len(buffer) >= size]
        if fitting:
            best = min(fitting, key=lambda i: len(self._resting[i]))
            self._used[number] = self._resting.pop(best)
        else:
            there = sum(map(len, (*self._resting, *self._used.values())))
            if there + size > self._limit:
                self._resting.clear()
            self._used[number] = torch.from_numpy(self._device.host_memory(max(size, 1)))
        return self._used[number]

    def release(self, number: int) -> None:
        """Frees the buffers of a group's gradients."""
        buffer = self._used.pop(number, None)
        if buffer is not None:
            self._resting.append(buffer)

    def clear(self) -> None:
        self.aside.clear()
        for number in list(self._used):
            self.release(number)


class GradientSpill:
    """Held gradients on SSD, and the staging buffers that they pass through.

    They are written chunk by chunk during backward, and read before their update.
    """

    def __init__(
        self,
        store: Store,
        pool: HostPool,
        groups: Sequence[FlatGroup],
        *,
        buffers: int,
        chunk_params: int,
    ) -> None:
        self._store, self._groups = store, groups
        self._chunks = [chunks(group, chunk_params) for group in groups]
        largest = min(chunk_params, max(group.numel for group in groups))
        self._buffers = [pool.allocate("gradient staging", largest * FLOAT) for _ in range(buffers)]
        self._spilled: dict[int, tuple[torch.dtype, frozenset[int]]] = {}

    def write(
        self, number: int, chunk: int, buffer: int, grads: Mapping[int, torch.Tensor]
    ) -> Ticket:
        """Packs one chunk of a group's gradients, as wide as they are, and submits its write."""
        dtypes = {grad.dtype for grad in grads.values()} or {torch.float32}
        dtype = dtypes.pop() if len(dtypes) == 1 else torch.float32
        self._spilled[number] = (dtype, frozenset(grads))
        cut = self._chunks[number][chunk]
        flat = self._buffers[buffer].tensor(dtype)
        for own_range in cut.ranges:
            grad = grads.get(own_range.tensor)
            if grad is not None:
                part = grad.view(-1)[own_range.start : own_range.stop]
                flat[own_range.at : own_range.at + len(part)] = part
        data = self._bytes_of(number, chunk, buffer)
        return self._store.write(gradient_key(self._groups[number]), chunk, data)

    def read(self, number: int, chunk: int, buffer: int) -> Ticket:
        data = self._bytes_of(number, chunk, buffer)
        return self._store.read(gradient_key(self._groups[number]), chunk, data)

    def grad(
        self, number: int, buffer: int, tensor: int, at: int, count: int
    ) -> torch.Tensor | None:
        """Return a range of a fetched chunk, or None if the tensor had no gradient."""
        dtype, present = self._spilled[number]
        return self._buffers[buffer].tensor(dtype)[at : at + count] if tensor in present else None

    def _bytes_of(self, number: int, chunk: int, buffer: int) -> Buffer:
        cut, (dtype, _) = self._chunks[number][chunk], self._spilled[number]
        size = (cut.stop - cut.start) * dtype.itemsize
        return self._buffers[buffer].bytes[: align_up(size, PAGE)]


class GradientCollector:
    """Counts the uses of each group, and releases its gradients after the last use.

    This is what the reducer of DDP does with a bucket. StepCollectives sums gradients over
    ranks. `gradient_offload` is None if compute runs in host memory.
    """

    def __init__(
        self,
        blocks: Blocks,
        plan: Plan,
        *,
        scheduler: ActionScheduler,
        pending: PendingGradients,
        gradient_offload: GradientOffload | None,
        collectives: StepCollectives,
        steps: Steps,
    ) -> None:
        self.steps = steps
        self._needs_norm = gate_of(plan) is Gate.NORM
        self._wide = plan.dtype != "fp32"  # sums of several are made in fp32: one has fewer bits
        self.sink = GradientSink()
        self._blocks, self._scheduler, self._pending = blocks, scheduler, pending
        self._offload, self._collectives = gradient_offload, collectives
        self._numbers = {group.key: number for number, group in enumerate(blocks.groups)}
        # By id of the parameter over whose values each is: those of slots stay, and so do these.
        self._leaves: dict[int, tuple[nn.Parameter, nn.Parameter]] = {}
        # Where gradients go until a step takes them, or for good, if backward is not a step.
        self.accumulated: Accumulated | KeptGradients | UnwantedGradients | None = None
        self.watched: WatchedParameters | None = None  # set when the model is taken over
        # Parameters with gradient hooks, by group and index; looked up when backward begins.
        self.hooked: dict[tuple[str, int], OffloadedParameter] = {}

    def leaves(
        self, site: Site, weights: dict[str, list[torch.Tensor]], *, parts: int
    ) -> dict[str, list[torch.Tensor]]:
        """Return leaf tensors over the weights of a call, whose gradients arrive here one by one.

        `parts` is the number of slices of the call. Parameters that the user has frozen get
        no gradient.
        """
        frozen = self.watched.frozen if self.watched is not None else frozenset()
        for key in site.groups:
            self.sink.sum_wide(key, self._wide and (parts > 1 or self.sink.uses(key) > 1))
            own = weights[key]
            for index, spec in enumerate(self._blocks.by_key[key].tensors):
                trainable = spec.trainable and (key, index) not in frozen
                own[index] = self._leaf(own[index], key, index, trainable=trainable)
        return weights

    def _leaf(self, weight: torch.Tensor, key: str, index: int, *, trainable: bool) -> nn.Parameter:
        known = self._leaves.get(id(weight))
        if known is not None and known[0] is weight and layout(known[1]) == layout(weight):
            known[1].grad = None  # left behind if a backward broke off
            if known[1].requires_grad != trainable:
                known[1].requires_grad_(trainable)
            return known[1]
        # With a version of its own, as parameters have.
        leaf = nn.Parameter(weight.data)
        leaf.register_post_accumulate_grad_hook(self.sink.hook_for(key, index))
        leaf.requires_grad_(trainable)
        if isinstance(weight, nn.Parameter):
            self._leaves[id(weight)] = weight, leaf
        return leaf

    def finish(self, site: int) -> None:
        """Hand over the groups whose last use was the backward of this site.

        Gradients that wait for an earlier block leave the device meanwhile, unless ranks
        reduce them there.
        """
        keys = self._blocks.sites[site].groups
        over = [key for key in keys if self.sink.end_use(key)]
        if self._offload is not None and not self._collectives.process_group.several:
            for key in keys:
                if key not in over:
                    group = self._blocks.by_key[key]
                    self._offload.set_aside(self._numbers[key], group, self.sink.take(key))
        finished = [self._numbers[key] for key in over if not self._blocks.by_key[key].frozen]
        if self.accumulated is not None:
            for number in finished:
                grads = self.sink.take(self._blocks.groups[number].key)
                self.accumulated.add(number, self._hooked_gradients(number, grads))
            self._scheduler.end_backward(site, ())
            return
        scheduled = self._scheduler.last_use_groups()
        handed = finished if scheduled is None else scheduled
        there = self._pending.on_host if self._offload is None else self._pending.on_device
        for number in handed:
            grads = there[number] = self._for_update(
                self._hooked_gradients(number, self.sink.take(self._blocks.groups[number].key))
            )
            self.steps.current.gradients[number] = frozenset(grads)
            self._pending.squares_on_device[number] = self._sum_squares(grads)
        self._scheduler.end_backward(site, handed)

    def _sum_squares(self, grads: GroupGrads) -> torch.Tensor | None:
        """On the device, where something needs the norm; ranks take it of what they have summed."""
        alone = not self._collectives.process_group.several
        if self._offload is None or not (self._needs_norm and alone):
            return None
        return self._offload.sum_squares(grads)

    def _for_update(self, grads: dict[int, torch.Tensor]) -> dict[int, torch.Tensor]:
        """Return gradients as the next lane takes them.

        Without copies in the schedule, updates read them on the host. There they already are,
        except for those of a GPU that shares the host's memory: its allocator's is not readable by
        the CPU. Each is freed when it has been copied.
        """
        if self._offload is not None:
            return grads
        return {index: grads.pop(index).cpu() for index in list(grads)}

    def _hooked_gradients(
        self, number: int, grads: dict[int, torch.Tensor]
    ) -> dict[int, torch.Tensor]:
        """Run the user's hooks over the complete gradients of one backward."""
        key = self._blocks.groups[number].key
        for index in [index for index in grads if (key, index) in self.hooked]:
            parameter = self.hooked[key, index]
            if parameter._post_accumulate_grad_hooks and isinstance(self.accumulated, Accumulated):
                raise ModelError(
                    f"{parameter.label[0]} has a register_post_accumulate_grad_hook, which PyTorch "
                    "runs over the sum of all batches so far, but the batches of this step are "
                    "added up elsewhere; use register_hook, or one batch for each step"
                )
            left = run_gradient_hooks(parameter, grads.pop(index))
            if left is not None:
                grads[index] = left
        return grads

    def is_handed_over(self, number: int) -> bool:
        """Return whether the gradients of a group have gone to the update of this step."""
        return number in self.steps.current.gradients

    def add_outside(self, key: str, index: int, grad: torch.Tensor) -> None:
        """Add a gradient that was made outside the calls of the group's blocks."""
        self.fetch_aside([key])
        self.sink.add(key, index, grad.float() if self._wide else grad.clone())

    def fetch_aside(self, keys: Iterable[str]) -> None:
        """Fetch the gradients that were set aside, because a block is about to add to them."""
        if self._offload is not None:
            for key in keys:
                if grads := self._offload.fetch_aside(self._numbers[key]):
                    self.sink.add_scaled(key, grads, factor=1.0)

    def accumulate_rest(self) -> None:
        """Backward has ended, and another one adds to it: nothing of this one is left elsewhere."""
        assert self.accumulated is not None
        aside = {} if self._offload is None else self._offload.aside
        for number in self._waiting():
            grads = self.sink.take(self._blocks.groups[number].key)
            self.accumulated.add(number, self._hooked_gradients(number, grads))
            aside_grads = self._hooked_gradients(number, dict(aside.pop(number, {})))
            self.accumulated.add(number, aside_grads)

    def finish_rest(self, resident: Mapping[int, GroupGrads]) -> None:
        """Hand over the remaining groups at the end of backward.

        These are the groups of which some uses got no gradient, or all groups if the step
        had several backwards, followed by those of resident parameters.
        """
        sums = self.accumulated
        assert sums is None or isinstance(sums, Accumulated)  # else backward is not a step
        there = self._waiting() if sums is None else sums.numbers()
        for number in self._collectives.late_groups(self._scheduler.collectives_checksum, there):
            if sums is None:
                self.hand_over_late(number, self.sink.take(self._blocks.groups[number].key))
            else:
                self.hand_over_late(number, sums.take(number) if number in there else {})
        for number, grads in resident.items():
            self._hand_over_resident(number, grads)

    def _waiting(self) -> list[int]:
        """Return the groups whose gradients have not been handed over."""
        aside = {} if self._offload is None else self._offload.aside
        waiting = [self._numbers[key] for key in self.sink.waiting()]
        return waiting + [
            n for n in aside if n not in self.steps.current.gradients and n not in waiting
        ]

    def hand_over_late(self, number: int, grads: GroupGrads) -> None:
        """When backward has ended: past what the schedule brings to host memory."""
        alone = not self._collectives.process_group.several
        if self.accumulated is None:  # hooks have run over the sums of several backward calls
            grads = self._hooked_gradients(number, dict(grads))
        if self._offload is not None and not (alone and self.accumulated is not None):
            aside = dict(self._offload.aside.pop(number, {}))  # no other block added to it
            if self.accumulated is None:
                aside = self._hooked_gradients(number, aside)
            summed = None if aside else self._sum_squares(grads)
            if summed is not None:
                self._pending.squares[number] = float(summed)
            grads = {index: grad.cpu() for index, grad in grads.items()} | aside
        elif isinstance(grads, dict):  # sums in a file are read one by one
            grads = self._for_update(dict(grads))
        self.steps.current.gradients[number] = frozenset(grads)
        if self._offload is not None and not alone:
            grads = self._collectives.reduce_scatter_host(number, grads)
        self._pending.on_host[number] = grads

    def _hand_over_resident(self, number: int, grads: GroupGrads) -> None:
        """Hand over the gradients of parameters in memory at the end of backward.

        On a device, their copy is still in progress, and the lane that uses them waits for
        it.
        """
        if self._offload is None or self._collectives.process_group.several:
            self.hand_over_late(number, grads)
            return
        self.steps.current.gradients[number] = frozenset(grads)
        group, squares = self._blocks.groups[number], self._sum_squares(grads)
        self._pending.on_host[number] = (
            self._offload.offload_async(number, group, grads, squares=squares) if grads else {}
        )

    def absent(self) -> list[str]:
        """Parameters that got no gradient: PyTorch does not count the step for them."""
        names = [
            tensor.name
            for number, group in enumerate(self._blocks.groups)
            for index, tensor in enumerate(group.tensors)
            if tensor.trainable and index not in self.steps.current.gradients.get(number, ())
        ]
        return self._collectives.absent(names)

    def clear(self) -> None:
        self.sink.clear()


def layout(tensor: torch.Tensor) -> Any:
    """Return a key that is equal for tensors over the same elements."""
    return tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride()


def sum_of_squares(grads: GroupGrads) -> float:
    """Return the sum of squares in double precision, in a fixed order.

    The result is the same on every lane and in every mode. If a device has already computed it,
    its result is returned, so that no lane reads the gradients for it.
    """
    made = grads.sum_of_squares() if isinstance(grads, OffloadedGradients) else None
    if made is not None:
        return made
    return math.fsum(_core.sum_squares(grads[index].view(-1)) for index in sorted(grads))


# -- Gradients added up over several backward calls, until one step takes them all -----------------
#
# They are sums in fp32: in host memory where the budget has room for those of the whole model, else
# in a file without a name next to the store, read and written tensor by tensor.


OWNER = "accumulated gradients"


class Accumulated:
    """Sums by number of group and index of tensor."""

    def __init__(self, groups: Sequence[FlatGroup], pool: HostPool, folder: Path) -> None:
        self._groups = groups
        self._sums: dict[int, dict[int, torch.Tensor]] = {}
        self._file: GradientFile | None = None
        size = sum(group.numel for group in groups if not group.frozen) * FLOAT
        try:
            pool.reserve(OWNER, size)
            self._pool, self._reserved = pool, size
        except BudgetError:
            self._file, self._reserved = GradientFile(groups, folder, size), 0

    def add(self, number: int, grads: Mapping[int, torch.Tensor]) -> None:
        if self._file is not None:
            self._file.add(number, grads)
            return
        sums = self._sums.setdefault(number, {})
        for index, grad in grads.items():
            if index in sums:
                sums[index].add_(grad.to("cpu", torch.float32))
            else:
                sums[index] = grad.to("cpu", torch.float32).contiguous()

    def numbers(self) -> list[int]:
        return sorted(self._sums if self._file is None else self._file.present)

    def take(self, number: int) -> Mapping[int, torch.Tensor]:
        if self._file is None:
            return self._sums.pop(number)
        return self._file.take(number)

    def close(self) -> None:
        """Release the sums. Values that were taken from a file can still be read."""
        self._sums.clear()
        if self._reserved:
            self._pool.unreserve(OWNER, self._reserved)
            self._reserved = 0


class GradientFile:
    """Gradients of all groups at the offsets of their parameters."""

    def __init__(self, groups: Sequence[FlatGroup], folder: Path, size: int) -> None:
        self._groups, self._folder = groups, folder
        self.present: dict[int, set[int]] = {}
        self._starts: dict[int, int] = {}
        at = 0
        for number, group in enumerate(groups):
            if not group.frozen:
                self._starts[number], at = at, at + group.numel * FLOAT
        try:
            self._file: IO[bytes] = TemporaryFile(dir=folder, buffering=0)  # noqa: SIM115
            os.posix_fallocate(self._file.fileno(), 0, max(size, 1))
        except OSError as error:
            raise StorageIOError(
                f"{folder}: no file of {format_bytes(size)} for gradients that are added up over "
                f"several backward calls ({error.strerror}); free space there, or run the batches "
                "as one: it is cut into micro-batches, and needs no room for gradients"
            ) from error

    def add(self, number: int, grads: Mapping[int, torch.Tensor]) -> None:
        there = self.present.setdefault(number, set())
        for index, grad in grads.items():
            values = grad.to("cpu", torch.float32)
            if index in there:
                values = self.read(number, index).view(values.shape).add_(values)
            self._move(os.pwritev, number, index, values.contiguous())
            there.add(index)

    def read(self, number: int, index: int) -> torch.Tensor:
        values = torch.empty(self._groups[number].tensors[index].shape, dtype=torch.float32)
        self._move(os.preadv, number, index, values)
        return values

    def take(self, number: int) -> Mapping[int, torch.Tensor]:
        return _InFile(self, number, frozenset(self.present.pop(number)))

    def _move(self, move: Any, number: int, index: int, values: torch.Tensor) -> None:
        start = self._starts[number] + self._groups[number].tensors[index].offset * FLOAT
        raw: Any = values.reshape(-1).numpy().view(np.uint8)
        rest = memoryview(raw)
        while rest:
            try:
                count = move(self._file.fileno(), [rest], start)
            except OSError as error:
                raise self._failed(str(error.strerror)) from error
            if count == 0:
                raise self._failed("the file ends")
            rest, start = rest[count:], start + count

    def _failed(self, why: str) -> StorageIOError:
        return StorageIOError(
            f"{self._folder}: gradients that are added up over several backward calls cannot be "
            f"moved: {why}; check the drive, then resume from the last step"
        )


class _InFile(Mapping[int, torch.Tensor]):
    """Gradients of one group, read when they are asked for; the last one stays."""

    def __init__(self, file: GradientFile, number: int, there: frozenset[int]) -> None:
        self._file, self._number, self._there = file, number, there
        self._last: tuple[int, torch.Tensor] | None = None

    def __getitem__(self, index: int) -> torch.Tensor:
        if index not in self._there:
            raise KeyError(index)
        if self._last is None or self._last[0] != index:
            self._last = None
            self._last = index, self._file.read(self._number, index)
        return self._last[1]

    def __iter__(self) -> Iterator[int]:
        return iter(sorted(self._there))

    def __len__(self) -> int:
        return len(self._there)
