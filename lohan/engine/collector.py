"""Gradients on their way from the blocks to the optimizer.

Every call of a block adds to the gradients of its groups. A group is handed over when no call of
this backward will add to it any more, and what waits for a later call leaves the device meanwhile.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch

from lohan.engine.actions import ActionRunner
from lohan.engine.buffers import GradientSink
from lohan.engine.collectives import StepCollectives
from lohan.engine.pipeline import Pipeline
from lohan.model.layout import Blocks, Site


class Collector:
    def __init__(
        self,
        blocks: Blocks,
        *,
        pipeline: Pipeline,
        runner: ActionRunner,
        collectives: StepCollectives,
        wide: bool,
    ) -> None:
        """`wide`: sums of several gradients are made in fp32, since one has fewer bits."""
        self.sink = GradientSink()
        self._blocks, self._pipeline, self._runner = blocks, pipeline, runner
        self._collectives, self._wide = collectives, wide
        self._numbers = {group.key: number for number, group in enumerate(blocks.groups)}
        self._seen: dict[int, frozenset[int]] = {}  # tensors that got a gradient, by group

    def leaves(
        self, site: Site, weights: dict[str, list[torch.Tensor]], *, parts: int
    ) -> dict[str, list[torch.Tensor]]:
        """Leaf tensors over the weights of a call in so many parts, whose gradients come here one
        by one."""
        for key in site.groups:
            wide = self._wide and (parts > 1 or self.sink.uses(key) > 1)
            for index, spec in enumerate(self._blocks.by_key[key].tensors):
                leaf = weights[key][index] = weights[key][index].detach()
                if spec.trainable:
                    leaf.requires_grad_()
                    leaf.register_post_accumulate_grad_hook(self._take(key, index, wide))
        return weights

    def _take(self, key: str, index: int, wide: bool) -> Callable[[torch.Tensor], None]:
        def hook(leaf: torch.Tensor) -> None:
            assert leaf.grad is not None
            self.sink.add(key, index, leaf.grad, wide=wide)
            leaf.grad = None

        return hook

    def finish(self, number: int) -> None:
        """A site's backward is over: hands on the groups for which it was the last."""
        keys = self._blocks.sites[number].groups
        over = [key for key in keys if self.sink.withdraw(key)]
        self._set_aside([key for key in keys if key not in over])
        finished = [self._numbers[key] for key in over if not self._blocks.by_key[key].frozen]
        scheduled = self._pipeline.last_use_groups()
        handed = finished if scheduled is None else scheduled
        for group in handed:
            self._hand_over(group, self.sink.take(self._blocks.groups[group].key))
        self._pipeline.end_backward(number, handed)

    def _hand_over(self, number: int, grads: dict[int, torch.Tensor]) -> None:
        self._seen[number] = frozenset(grads)
        handover = self._runner.handover
        there = handover.grads if self._runner.device is None else handover.on_device
        there[number] = grads

    def _set_aside(self, keys: list[str]) -> None:
        """Gradients to which an earlier block adds, as of a head that shares the embedding's
        weights, do not wait on the device for it, unless ranks are to exchange them there."""
        if self._runner.device is None or self._collectives.process_group is not None:
            return
        for key in keys:
            number, grads = self._numbers[key], self.sink.take(key)
            self._runner.device.landing.set_aside(number, self._blocks.groups[number], grads)

    def take_back(self, keys: Iterable[str]) -> None:
        """A block is about to add to gradients that were set aside."""
        if self._runner.device is None:
            return
        for key in keys:
            if grads := self._runner.device.landing.take_back(self._numbers[key]):
                self.sink.put(key, grads, factor=1.0)

    def finish_rest(self) -> None:
        """Backward has ended: hands on the groups of which some uses got no gradient."""
        for number in self._collectives.late(
            self._pipeline.collectives_checksum, self._unfinished()
        ):
            self.hand_over_late(number, self.sink.take(self._blocks.groups[number].key))

    def hand_over_late(self, number: int, grads: dict[int, torch.Tensor]) -> None:
        """When backward has ended, beside what the schedule brings to host memory."""
        if self._runner.device is None:
            self._hand_over(number, grads)
            return
        here = {index: grad.cpu() for index, grad in grads.items()}
        here |= self._runner.device.landing.aside().pop(number, {})  # nobody else added to it
        self._seen[number] = frozenset(here)
        self._runner.handover.grads[number] = self._collectives.summed(number, here)

    def _unfinished(self) -> list[int]:
        """Groups whose gradients nobody has handed over."""
        device = self._runner.device
        aside = device.landing.aside() if device is not None else {}
        waiting = [self._numbers[key] for key in self.sink.waiting()]
        return waiting + [n for n in aside if n not in self._seen and n not in waiting]

    def absent(self) -> list[str]:
        """Parameters that got no gradient: PyTorch does not count the step for them."""
        names = [
            tensor.name
            for number, group in enumerate(self._blocks.groups)
            for index, tensor in enumerate(group.tensors)
            if tensor.trainable and index not in self._seen.get(number, ())
        ]
        return self._collectives.absent(names)

    def clear(self) -> None:
        self.sink.clear()
        self._seen.clear()
