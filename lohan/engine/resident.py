"""Small parameters that stay in memory for the whole run, as ordinary leaves of the user's graph.

These are norms and single vectors outside the blocks, and parameters that the model reads outside a
call of their block. Their groups have cached weight slots. The trained group is updated like any
other group, and the leaves are copies of its values, which are refreshed when the next forward
begins. Frozen parameters are views of their slot or, on a device, copies. With several ranks, the
slot of each rank holds its shard, and the caller's thread gathers the shards.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from lohan.capture.blocks import views
from lohan.capture.placeholders import (
    AttachedParameter,
    ResidentParameter,
    StepGradients,
    put_parameter,
)
from lohan.device.ranks import ProcessGroup
from lohan.model.layout import RESIDENT, FlatGroup, ParameterRef, TensorSpec


class Resident:
    """The owner of the parameters of the resident groups, given with their cached slots."""

    def __init__(
        self,
        model: nn.Module,
        *,
        groups: Sequence[tuple[FlatGroup, torch.Tensor]],
        refs: tuple[ParameterRef, ...],
        torch_device: torch.device,
        process_group: ProcessGroup,
        step: StepGradients,
    ) -> None:
        self._process_group = process_group
        # pairs of the values on the device and the slot, for the trained group
        self._copies: list[tuple[torch.Tensor, torch.Tensor]] = []
        self.outdated = False  # True if the slot has newer values than the parameters, after a step
        parameters: dict[str, list[ResidentParameter]] = {RESIDENT: []}
        olds = {
            (ref.group, ref.tensor): model.get_submodule(ref.module)._parameters[ref.attribute]
            for ref in refs
        }
        for group, flat in groups:
            if group.frozen:
                current = self._gathered(flat, group.numel).to(torch_device)
            else:
                current = flat.new_empty(group.numel, device=torch_device)
                self._copies.append((current, flat))
            parameters[group.key] = [
                _resident_parameter(olds[group.key, index], view, spec, step)
                for index, (view, spec) in enumerate(
                    zip(views(group, current), group.tensors, strict=True)
                )
            ]
        self.parameters = parameters[RESIDENT]
        self.by_tensor: dict[tuple[str, int], AttachedParameter] = {
            (key, index): parameter
            for key, members in parameters.items()
            for index, parameter in enumerate(members)
        }
        for ref in refs:
            put_parameter(model, ref, parameters[ref.group][ref.tensor])
        self.copy_updated()

    def copy_updated(self) -> None:
        self.outdated = False
        with torch.no_grad():
            for current, flat in self._copies:
                # The slot is updated only after compute has finished the step, which includes this
                # copy.
                current.copy_(self._gathered(flat, current.numel()), non_blocking=True)

    def _gathered(self, flat: torch.Tensor, count: int) -> torch.Tensor:
        return self._process_group.all_gather(flat)[:count]

    def take_gradients(self) -> dict[int, torch.Tensor]:
        """Return and remove the gradients, on the device that computed them."""
        grads = {
            index: parameter.grad.contiguous()
            for index, parameter in enumerate(self.parameters)
            if parameter.grad is not None
        }
        self.drop_gradients()
        return grads

    def swap_gradients(self, grads: Sequence[torch.Tensor | None]) -> list[torch.Tensor | None]:
        """Set the gradients of all resident parameters, and return their previous gradients.

        An empty sequence removes them.
        """
        before = [parameter.grad for parameter in self.parameters]
        for index, parameter in enumerate(self.parameters):
            parameter._store_gradient(grads[index] if grads else None)
        return before

    @property
    def has_gradients(self) -> bool:
        return any(parameter.grad is not None for parameter in self.parameters)

    def drop_gradients(self) -> None:
        for parameter in self.parameters:
            parameter.grad = None


def _resident_parameter(
    old: nn.Parameter | None, values: torch.Tensor, spec: TensorSpec, step: StepGradients
) -> ResidentParameter:
    """Return a parameter over `values`.

    If there was one under an earlier plan, the same object is returned, so that its hooks and
    references to it stay valid.
    """
    parameter = old
    with torch._C.DisableTorchFunctionSubclass():
        if isinstance(parameter, ResidentParameter) and (parameter.dtype, parameter.device) == (
            values.dtype,
            values.device,
        ):
            parameter.data = values
        else:
            trains = spec.trainable if old is None else old.requires_grad
            parameter = ResidentParameter(values, requires_grad=trains)
    parameter.label, parameter.stored_as = (spec.name, "(in memory)"), spec.name
    parameter.step_gradients = step
    return parameter
