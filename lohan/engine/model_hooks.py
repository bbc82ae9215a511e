"""What an executor installs in a model while the model runs from the store."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from torch import nn
from torch.utils.hooks import RemovableHandle

from lohan.capture.placeholders import install_placeholders
from lohan.capture.tiling import Tiling
from lohan.checkpoint.adapters import base_of
from lohan.device.base import move_buffers
from lohan.engine.resident import Resident
from lohan.engine.user_code import WatchedParameters
from lohan.engine.wrapping import WrappedSite

if TYPE_CHECKING:
    from lohan.engine.executor import Executor


class ModelHooks:
    """Placeholders, resident parameters, wrapped forwards and hooks in the modules of a model.

    `remove` restores the forwards; placeholders and resident parameters stay.
    """

    resident: Resident  # Set by `install`, like `watched`.
    watched: WatchedParameters

    def __init__(self, model: nn.Module, tiling: Tiling | None) -> None:
        self.model, self.tiling = model, tiling
        self.wrapped_sites: list[WrappedSite] = []
        # sites whose weights are installed in their module
        self.sites_with_weights: list[WrappedSite] = []
        # A callback that gets the inputs of a forward by name, before and after their copy to a
        # device.
        self.inputs_moved: Callable[[dict[str, Any], dict[str, Any]], None] | None = None
        self._forward_handles: list[RemovableHandle] = []
        self._gradient_handles: list[RemovableHandle] = []  # of resident parameters

    def install(
        self,
        executor: Executor,
        *,
        before_forward: Callable[..., Any],
        after_resident_gradient: Callable[[Any], None],
    ) -> None:
        """Replace the forward of the model's blocks; they run from the store until `remove`."""
        model, blocks, device = self.model, executor.blocks, executor.device
        cached = executor.runner.host_cache.resident()
        self.resident = Resident(
            model,
            groups=[(blocks.groups[number], flat) for number, flat in cached],
            refs=blocks.resident,
            torch_device=device.torch_device,
            process_group=executor.collectives.process_group,
            step=executor.step_gradients,
        )
        for parameter in self.resident.parameters:
            takes_gradient = parameter.requires_grad
            parameter.requires_grad_()  # A frozen parameter would refuse the hook.
            handle = parameter.register_post_accumulate_grad_hook(after_resident_gradient)
            parameter.requires_grad_(takes_gradient)
            self._gradient_handles.append(handle)
        move_buffers(model, device.torch_device)
        placeholders = install_placeholders(
            model, blocks, device.torch_device, executor.step_gradients
        )
        self.watched = WatchedParameters(
            model, blocks.by_key, {**placeholders, **self.resident.by_tensor}
        )
        for number, site in enumerate(blocks.sites):
            wrapped = WrappedSite(executor, number, site, model.get_submodule(site.name))
            self.wrapped_sites.append(wrapped)
        for module in self._called_modules():
            handle = module.register_forward_pre_hook(before_forward, with_kwargs=True)
            self._forward_handles.append(handle)

    def _called_modules(self) -> list[nn.Module]:
        """Return the modules that user code may call: the model and, with an adapter, its base."""
        return list({id(module): module for module in (self.model, base_of(self.model))}.values())

    @contextmanager
    def removed(self) -> Iterator[None]:
        """Temporarily remove LoHan's hooks from the model. All other hooks stay."""
        before = [(module, dict(module._forward_pre_hooks)) for module in self._called_modules()]
        for handle in self._forward_handles:
            for module, _ in before:
                module._forward_pre_hooks.pop(handle.id, None)
        try:
            yield
        finally:
            for module, hooks in before:
                module._forward_pre_hooks.update(hooks)

    def remove(self) -> None:
        for handle in (*self._forward_handles, *self._gradient_handles):
            handle.remove()
        for wrapped in self.wrapped_sites:
            wrapped.remove()
