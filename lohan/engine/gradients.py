"""Gradients, from the block that computes them to the update that consumes them.

Gradients of the whole model exist at once only if updates wait for the norm: with clipping (the
default of `lohan train`) or loss scaling, they are held until the norm is known, in memory or on
SSD. A gradient passes through these places, in this order:

    GradientSink        on the compute device: hooks sum the gradients of the calls of this backward
                        until the last use of the group, in fp32 if several are summed
    set aside           by GradientOffload in host memory, if the device has its own memory and an
                        earlier block will add to it, as for tied weights of head and embedding
    pending.on_device   on a device, after the last use (GradientCollector.finish): reduced over the
                        ranks by X, copied to host memory by D
    pending.on_host     read by the update U; on the CPU, directly after the sink
    GradientSpill       held gradients without room in host memory: written by P, read by G for U

`pending` is PendingGradients. Inside `session.accumulate()`, the sums of several backward calls are
in Accumulated, and the step moves all of them to `on_host`. Gradients of resident parameters are in
`.grad` until the step ends, then in `on_host`.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import nn

from lohan import _core
from lohan.capture.placeholders import OffloadedParameter
from lohan.device.accelerator import read_back
from lohan.device.base import Device
from lohan.device.ranks import ProcessGroup
from lohan.engine.buffers import HostPool
from lohan.engine.gradient_transport import (
    GradientOffload,
    GroupGrads,
    OffloadedGradients,
)
from lohan.engine.user_code import (
    KeptGradients,
    UnwantedGradients,
    WatchedParameters,
    run_gradient_hooks,
)
from lohan.errors import ModelError, RankError
from lohan.model.layout import Blocks, FlatGroup, RankInfo, Site
from lohan.model.plan import Plan
from lohan.model.state import FLOAT
from lohan.schedule.placement import needs_all_gradients
from lohan.util.units import align_up

if TYPE_CHECKING:
    from lohan.engine.scheduler import ActionScheduler
    from lohan.engine.step import Steps


# -- Sums over the ranks, and what ranks agree on --------------------------------------------------
#
# Collectives of a step: sums of gradients over the ranks, and agreement on common decisions.
#
# In a process group with one rank, all of them are the identity.


FLAGS_ALIGN = 16


class StepCollectives:
    """Reductions over the ranks of one step.

    Groups are given by number. The net lane calls `reduce_scatter`, and the calling thread calls
    all other methods.
    """

    def __init__(self, process_group: ProcessGroup, groups: Sequence[FlatGroup]) -> None:
        self.process_group, self._groups = process_group, groups

    # -- gradients: every rank gets the sum of its own shard --------------------------------------

    def reduce_scatter(
        self, number: int, grads: dict[int, torch.Tensor], device: Device
    ) -> dict[int, torch.Tensor]:
        """Return the sum over all ranks of this rank's shard, and clear `grads`.

        Called on the net lane. The memory of `grads` belongs to compute's stream. It is recorded as
        used by the net stream, so compute does not reuse it before the net stream has read it.
        """
        rows = pack(self._groups[number], grads, self.process_group.ranks, device.torch_device)
        device.record_stream("net", list(grads.values()))
        grads.clear()  # The sum takes as much memory, so free this first.
        return self._shard_of(number, self.process_group.reduce_scatter(rows))

    def reduce_scatter_host(
        self, number: int, grads: Mapping[int, torch.Tensor]
    ) -> dict[int, torch.Tensor]:
        """Return the sum over all ranks of this rank's shard, computed in host memory."""
        host_grads = {index: grad.cpu() for index, grad in grads.items()}
        if not self.process_group.several:
            return host_grads
        rows = pack(self._groups[number], host_grads, self.process_group.ranks, torch.device("cpu"))
        host_grads.clear()
        return self._shard_of(number, self.process_group.reduce_scatter_host(rows))

    def _shard_of(self, number: int, total: torch.Tensor) -> dict[int, torch.Tensor]:
        """Return summed gradients by tensor, without tensors that have none on any rank."""
        shard = self.process_group.ranks.shard(self._groups[number])
        flags = read_back(total[shard.numel :]).tolist()
        return {
            index: total[spec.offset : spec.offset + spec.numel]
            for index, spec in enumerate(shard.tensors)
            if flags[index] and spec.numel
        }

    # -- agreement of the ranks --------------------------------------------------------------------

    def late_groups(self, collectives_checksum: int, numbers: list[int]) -> list[int]:
        """Return the union over all ranks of `numbers`, the groups that no schedule reduces.

        `collectives_checksum` covers the collectives that this rank has called, and an error is
        raised unless it is equal on all ranks.
        """
        gathered = self.process_group.all_gather_object([collectives_checksum, numbers])
        for rank, (checksum, _) in enumerate(gathered):
            if checksum != gathered[0][0]:
                raise RankError(
                    f"rank {rank} called the blocks of the model in another order than rank 0, "
                    "which several ranks cannot do: they gather every block together; switch off "
                    "random or data-dependent choices of blocks, or train on one rank"
                )
        return sorted({number for _, numbers_of_rank in gathered for number in numbers_of_rank})

    def all_reduce_sum(self, number: float) -> float:
        """Return the sum over all ranks, with the same bits on every rank."""
        return math.fsum(self.process_group.all_gather_object(number))

    def loss(self, part: torch.Tensor) -> torch.Tensor:
        """Return the sum over all ranks of `part`, the loss of this rank's tokens.

        With one rank, this does not wait for compute.
        """
        if not self.process_group.several:
            return part
        return torch.full_like(part, self.all_reduce_sum(part.item()))

    def absent(self, names: list[str]) -> list[str]:
        """Return the names of the gradients that are absent on all ranks."""
        common = set(names).intersection(*self.process_group.all_gather_object(names))
        return [name for name in names if name in common]


def pack(
    group: FlatGroup, grads: Mapping[int, torch.Tensor], ranks: RankInfo, torch_device: torch.device
) -> torch.Tensor:
    """Return the tensor that this rank contributes to a reduce-scatter, with a row for each rank.

    The row for a rank holds the gradients of that rank's shard in fp32, then a flag for each
    tensor: whether the calling rank has a gradient for it. A tensor has no gradient in the sum only
    if it has none on any rank. This function does not wait for the device.
    """
    count = ranks.shard_numel(group)
    flags = align_up(len(group.tensors), FLAGS_ALIGN)
    rows = torch.zeros(ranks.world, count + flags, dtype=torch.float32, device=torch_device)
    for first, last in _runs(sorted(grads)):
        # Assigning a number to a tensor would wait for the device.
        rows[:, count + first : count + last].fill_(1.0)
    for row, other in zip(rows, ranks.all(), strict=True):
        tensors = other.shard(group).tensors
        for index, grad in grads.items():
            spec = tensors[index]
            if spec.numel:
                shard = grad.reshape(-1)[spec.begin : spec.begin + spec.numel]
                row[spec.offset : spec.offset + spec.numel] = shard
    return rows


def _runs(numbers: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Yield the ranges (first, last + 1) of consecutive numbers in a sorted sequence."""
    for _, run in groupby(enumerate(numbers), lambda pair: pair[1] - pair[0]):
        run_numbers = [number for _, number in run]
        yield run_numbers[0], run_numbers[-1] + 1


# -- Sums over several backward calls --------------------------------------------------------------


OWNER = "accumulated gradients"


def bytes_of_sums(groups: Iterable[FlatGroup]) -> int:
    """Return the size in bytes of the fp32 gradient sums of all trained groups."""
    return sum(group.numel for group in groups if not group.frozen) * FLOAT


class Accumulated:
    """Sums of gradients in host memory, by number of group and index of tensor."""

    def __init__(self, groups: Sequence[FlatGroup], pool: HostPool) -> None:
        self._sums: dict[int, dict[int, torch.Tensor]] = {}
        self._pool, self._reserved = pool, bytes_of_sums(groups)
        pool.reserve(OWNER, self._reserved)

    def add(self, number: int, grads: Mapping[int, torch.Tensor]) -> None:
        sums = self._sums.setdefault(number, {})
        for index, grad in grads.items():
            on_host = grad.to("cpu")
            if index in sums:
                sums[index].add_(on_host)
            else:
                # Memory of the host, even if the tensors of the compute device are on the CPU.
                flat = torch.from_numpy(np.empty(grad.numel(), dtype=np.float32))
                sums[index] = flat.view(grad.shape).copy_(on_host)

    def numbers(self) -> list[int]:
        return sorted(self._sums)

    def take(self, number: int) -> dict[int, torch.Tensor]:
        return self._sums.pop(number)

    def close(self) -> None:
        """Release the sums."""
        self._sums.clear()
        self._pool.unreserve(OWNER, self._reserved)


SCALED_ELEMENTS = 2**22  # 16-bit elements that are scaled at a time


def scale_(values: torch.Tensor, factor: float | torch.Tensor) -> None:
    """Multiply in place by a number, or by a tensor on the compute device.

    Both give the same bits. The factor is not rounded to 16 bits, which would change the result.
    """
    if not isinstance(factor, torch.Tensor):
        if factor != 1.0:
            values.mul_(factor)
    elif values.dtype == torch.float32:
        values.mul_(factor)
    else:
        for part in values.view(-1).split(SCALED_ELEMENTS):
            part.copy_(part.float().mul_(factor))


class GradientSink:
    """The sums of gradients by (group, tensor), and a count of uses to detect the last one."""

    def __init__(self) -> None:
        self._grads: dict[str, dict[int, torch.Tensor]] = {}
        self._uses: dict[str, int] = {}
        # Increases when a step ends or is rolled back. A use ends only in the period in which it
        # began.
        self.period = 0
        self._sums_wide: dict[str, bool] = {}

    def expect(self, group: str) -> None:
        self._uses[group] = self._uses.get(group, 0) + 1

    def end_use(self, group: str) -> bool:
        """Record the end of one use of a group, and return whether it was the last."""
        self._uses[group] -= 1
        return self._uses[group] == 0

    def sum_wide(self, group: str, wide: bool) -> None:
        """Set whether further gradients of a group are summed in fp32.

        Sums in 16 bits lose bits.
        """
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
        self, group: str, scaled_grads: dict[int, torch.Tensor], *, factor: float | torch.Tensor
    ) -> None:
        """Add gradients that were computed in forward, multiplied by `factor`."""
        grads = self._grads.setdefault(group, {})
        for tensor, grad in scaled_grads.items():
            scale_(grad, factor)
            grads[tensor] = grads[tensor].float().add_(grad) if tensor in grads else grad

    def waiting(self) -> list[str]:
        return list(self._grads)

    def uses(self, group: str) -> int:
        return self._uses.get(group, 0)

    def clear(self) -> None:
        self._grads.clear()

    def end_period(self) -> None:
        """Drop all uses when weights change, so that no earlier forward can run its backward."""
        self._uses.clear()
        self.period += 1


@dataclass
class PendingGradients:
    """The gradients of groups whose last use is over, until their updates are done and accepted."""

    steps: Steps
    on_host: dict[int, GroupGrads] = field(default_factory=dict)
    on_device: dict[int, GroupGrads] = field(default_factory=dict)  # in flight to host memory
    # The sums of squares of the gradients in `on_device`, if the device computes them.
    squares_on_device: dict[int, torch.Tensor | None] = field(default_factory=dict)
    # sums of squares of groups, in this step
    squares: dict[int, float] = field(default_factory=dict)
    offload: GradientOffload | None = None  # None for a device without its own memory
    # Protects `keeps_gradients` and `used` of a step, which the caller and the lanes change.
    lock: threading.Lock = field(default_factory=threading.Lock)

    def release(self, number: int) -> None:
        """Free a group's used gradients or, if the step keeps gradients, record the group."""
        with self.lock:
            step = self.steps.current
            if step.keeps_gradients:
                step.used.append(number)
                return
        self.on_host.pop(number, None)
        if self.offload is not None:
            self.offload.release(number)

    def accept(self) -> None:
        """Free the kept gradients that were used, and free the others as soon as they are used."""
        with self.lock:
            step = self.steps.current
            step.keeps_gradients = False
        for number in step.used:
            self.release(number)

    def clear(self) -> None:
        """Discard all gradients that were handed over."""
        self.steps.current.keeps_gradients = False
        self.on_host.clear()
        self.on_device.clear()
        self.squares_on_device.clear()
        # A new dict, because queued updates may still read that of the previous step.
        self.squares = {}
        if self.offload is not None:
            self.offload.clear()


class GradientCollector:
    """A collector that counts the uses of each group, and releases its gradients after the last.

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
        self._needs_norm = needs_all_gradients(plan)
        # True if the device cannot hold the gradients of two consecutive blocks at the same time.
        self._waits_aside = plan.head_alone or plan.device_grads == 1
        # Sums of several 16-bit gradients are accumulated in fp32.
        self._wide = plan.dtype != "fp32"
        self.sink = GradientSink()
        self._blocks, self._scheduler, self._pending = blocks, scheduler, pending
        self._offload, self._collectives = gradient_offload, collectives
        self.numbers = {group.key: number for number, group in enumerate(blocks.groups)}
        # The leaf for each parameter view, by id of the view. Both live as long as their slot.
        self._leaves: dict[int, tuple[nn.Parameter, nn.Parameter]] = {}
        # The target of gradients if backward is not a step, or only a part of one; otherwise None.
        self.accumulated: Accumulated | KeptGradients | UnwantedGradients | None = None
        self.watched: WatchedParameters | None = None  # set when the model is taken over
        # Parameters with gradient hooks, by group and index, determined at the start of backward.
        self.hooked: dict[tuple[str, int], OffloadedParameter] = {}

    def leaves(
        self, site: Site, weights: dict[str, list[torch.Tensor]], *, parts: int
    ) -> dict[str, list[torch.Tensor]]:
        """Return leaf tensors over the weights of a call, whose gradients are added to the sink.

        `parts` is the number of slices of the call. Parameters that the user has frozen get no
        gradient.
        """
        frozen = self.watched.frozen if self.watched is not None else frozenset()
        for key in site.groups:
            self.sink.sum_wide(key, self._wide and (parts > 1 or self.sink.uses(key) > 1))
            tensors = weights[key]
            for index, spec in enumerate(self._blocks.by_key[key].tensors):
                trainable = spec.trainable and (key, index) not in frozen
                tensors[index] = self._leaf(tensors[index], key, index, trainable=trainable)
        return weights

    def _leaf(self, weight: torch.Tensor, key: str, index: int, *, trainable: bool) -> nn.Parameter:
        cached = self._leaves.get(id(weight))
        if cached is not None and cached[0] is weight and layout(cached[1]) == layout(weight):
            cached[1].grad = None  # An interrupted backward may have left a gradient.
            if cached[1].requires_grad != trainable:
                cached[1].requires_grad_(trainable)
            return cached[1]
        # `.data` gives the leaf its own version counter, as parameters have.
        leaf = nn.Parameter(weight.data)
        leaf.register_post_accumulate_grad_hook(self.sink.hook_for(key, index))
        leaf.requires_grad_(trainable)
        if isinstance(weight, nn.Parameter):
            self._leaves[id(weight)] = weight, leaf
        return leaf

    def finish(self, site: int) -> None:
        """Hand over the groups whose last use was the backward of this site.

        If an earlier block will add to a gradient, the gradient is moved to host memory until then,
        unless ranks reduce it on the device.
        """
        keys = self._blocks.sites[site].groups
        over = [key for key in keys if self.sink.end_use(key)]
        if self._offload is not None and not self._collectives.process_group.several:
            for key in keys:
                if key not in over:
                    group = self._blocks.by_key[key]
                    self._offload.set_aside(
                        self.numbers[key], group, self.sink.take(key), wait=self._waits_aside
                    )
        finished = [self.numbers[key] for key in over if not self._blocks.by_key[key].frozen]
        if self.accumulated is not None:
            for number in finished:
                grads = self.sink.take(self._blocks.groups[number].key)
                self.accumulated.add(number, self._hooked_gradients(number, grads))
            self._scheduler.end_site_backward(())
            return
        scheduled = self.steps.current.groups_to_hand_over()
        handed = finished if scheduled is None else scheduled
        target = self._pending.on_host if self._offload is None else self._pending.on_device
        for number in handed:
            grads = target[number] = self._for_update(
                self._hooked_gradients(number, self.sink.take(self._blocks.groups[number].key))
            )
            self.steps.current.tensors_with_gradient[number] = frozenset(grads)
            self._pending.squares_on_device[number] = self._sum_squares(grads)
        self._scheduler.end_site_backward(handed)

    def _sum_squares(self, grads: GroupGrads) -> torch.Tensor | None:
        """Return the sum of squares, computed on the device, or None if it is not needed there.

        It is not needed if no norm is computed, or if there are several ranks, because the net lane
        then sums the squares of the reduced gradients.
        """
        alone = not self._collectives.process_group.several
        if self._offload is None or not (self._needs_norm and alone):
            return None
        return self._offload.sum_squares(grads)

    def _for_update(self, grads: dict[int, torch.Tensor]) -> dict[int, torch.Tensor]:
        """Return gradients in the memory from which the next lane reads them.

        If the schedule contains no copies, updates read gradients from host memory. The gradients
        are there already, except on a GPU that shares the host's memory: the CPU cannot read memory
        from its allocator. They are then copied one by one, and each is freed after its copy.
        """
        if self._offload is not None:
            return grads
        return {index: grads.pop(index).cpu() for index in list(grads)}

    def _hooked_gradients(
        self, number: int, grads: dict[int, torch.Tensor]
    ) -> dict[int, torch.Tensor]:
        """Run the user's hooks on complete gradients of one backward, and return their results."""
        if not self.hooked:
            return grads
        key = self._blocks.groups[number].key
        for index in [index for index in grads if (key, index) in self.hooked]:
            parameter = self.hooked[key, index]
            if parameter._post_accumulate_grad_hooks and isinstance(self.accumulated, Accumulated):
                raise ModelError(
                    f"{parameter.label[0]} has a register_post_accumulate_grad_hook, which PyTorch "
                    "runs over the sum of all batches so far, but the batches of this step are "
                    "added up elsewhere; use register_hook, or one batch for each step"
                )
            hooked_grad = run_gradient_hooks(parameter, grads.pop(index))
            if hooked_grad is not None:
                grads[index] = hooked_grad
        return grads

    def is_handed_over(self, number: int) -> bool:
        """Return whether the gradients of a group were handed over to the update of this step."""
        return number in self.steps.current.tensors_with_gradient

    def add_outside(self, key: str, index: int, grad: torch.Tensor) -> None:
        """Add a gradient that was computed outside the calls of the group's blocks."""
        self.fetch_aside([key])
        self.sink.add(key, index, grad.float() if self._wide else grad.clone())

    def fetch_aside(self, keys: Iterable[str]) -> None:
        """Fetch the gradients that were set aside, because a block is about to add to them."""
        if self._offload is not None:
            for key in keys:
                if grads := self._offload.fetch_aside(self.numbers[key]):
                    self.sink.add_scaled(key, grads, factor=1.0)

    def accumulate_rest(self) -> None:
        """At the end of a backward that is not a step, add its remaining gradients to the sums."""
        assert self.accumulated is not None
        aside = {} if self._offload is None else self._offload.aside
        for number in self._waiting():
            grads = self.sink.take(self._blocks.groups[number].key)
            self.accumulated.add(number, self._hooked_gradients(number, grads))
            aside_grads = self._hooked_gradients(number, dict(aside.pop(number, {})))
            self.accumulated.add(number, aside_grads)

    def finish_rest(self, resident: Mapping[int, GroupGrads]) -> None:
        """Hand over the remaining groups at the end of backward.

        These are the groups for which some use got no gradient or, if the step had several backward
        calls, all groups. The groups of resident parameters follow.
        """
        sums = self.accumulated
        assert sums is None or isinstance(sums, Accumulated)  # Otherwise, backward is not a step.
        waiting = self._waiting() if sums is None else sums.numbers()
        for number in self._collectives.late_groups(self._scheduler.collectives_checksum, waiting):
            if sums is None:
                self.hand_over_late(number, self.sink.take(self._blocks.groups[number].key))
            else:
                self.hand_over_late(number, sums.take(number) if number in waiting else {})
        for number, grads in resident.items():
            self._hand_over_resident(number, grads)

    def _waiting(self) -> list[int]:
        """Return the groups whose gradients have not been handed over."""
        aside = {} if self._offload is None else self._offload.aside
        waiting = [self.numbers[key] for key in self.sink.waiting()]
        return waiting + [
            n
            for n in aside
            if n not in self.steps.current.tensors_with_gradient and n not in waiting
        ]

    def hand_over_late(self, number: int, grads: GroupGrads) -> None:
        """Hand over gradients at the end of backward, without the copies of the schedule."""
        alone = not self._collectives.process_group.several
        # The sums of several backward calls already include the results of hooks.
        if self.accumulated is None:
            grads = self._hooked_gradients(number, dict(grads))
        if self._offload is not None and not (alone and self.accumulated is not None):
            # These are complete, because no other block added to them.
            aside = dict(self._offload.aside.pop(number, {}))
            if self.accumulated is None:
                aside = self._hooked_gradients(number, aside)
            summed = None if aside else self._sum_squares(grads)
            if summed is not None:
                self._pending.squares[number] = float(summed)
            grads = {index: grad.cpu() for index, grad in grads.items()} | aside
        else:
            grads = self._for_update(dict(grads))
        self.steps.current.tensors_with_gradient[number] = frozenset(grads)
        if self._offload is not None and not alone:
            grads = self._collectives.reduce_scatter_host(number, grads)
        self._pending.on_host[number] = grads

    def _hand_over_resident(self, number: int, grads: GroupGrads) -> None:
        """Hand over the gradients of a group of resident parameters at the end of backward.

        With one rank, this does not wait for the copy from a device; the lane that uses the
        gradients does.
        """
        if self._offload is None or self._collectives.process_group.several:
            self.hand_over_late(number, grads)
            return
        self.steps.current.tensors_with_gradient[number] = frozenset(grads)
        group, squares = self._blocks.groups[number], self._sum_squares(grads)
        self._pending.on_host[number] = (
            self._offload.offload_async(number, group, grads, squares=squares) if grads else {}
        )

    def absent(self) -> list[str]:
        """Return the names of trained parameters that have no gradient in this step on any rank.

        Like PyTorch, LoHan does not count the step for them.
        """
        names = [
            tensor.name
            for number, group in enumerate(self._blocks.groups)
            for index, tensor in enumerate(group.tensors)
            if tensor.trainable
            and index not in self.steps.current.tensors_with_gradient.get(number, ())
        ]
        return self._collectives.absent(names)


def layout(tensor: torch.Tensor) -> Any:
    """Return a key that is equal for tensors over the same elements."""
    return tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride()


def sum_of_squares(grads: GroupGrads) -> float:
    """Return the sum of squares in double precision, in a fixed order.

    The result is the same on every lane and in every mode. If a device has already computed it, its
    result is returned, so no lane has to read the gradients.
    """
    squares = grads.sum_of_squares() if isinstance(grads, OffloadedGradients) else None
    if squares is not None:
        return squares
    return math.fsum(_core.sum_squares(grads[index].view(-1)) for index in sorted(grads))
