"""How a module call becomes a block call: the autograd function and the wrapped forward."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.autograd.function import once_differentiable
from torch.utils import _pytree as pytree

from lohan.errors import LohanError
from lohan.layout import Site
from lohan.runtime.activations import SavedCall

if TYPE_CHECKING:
    from lohan.runtime.executor import Executor


class SiteRunner:
    """Stands in for one module's forward; the module itself is not changed otherwise."""

    def __init__(self, executor: Executor, number: int, site: Site, module: nn.Module) -> None:
        self.number, self.site = number, site
        self.executor = executor
        self.module = module
        self._places = [
            (executor.model.get_submodule(slot.module), slot.attribute, slot.group, slot.tensor)
            for slot in site.slots
        ]
        self._entered = False
        self.original: Callable[..., Any] = module.forward
        module.forward = self

    def remove(self) -> None:
        del self.module.forward

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self._entered:  # the weights are installed already: the head, or a nested call
            return self.original(*args, **kwargs)
        executor = self.executor
        if not torch.is_grad_enabled():
            with executor.weights(self, training=False) as tensors, self.installed(tensors):
                return self.original(*args, **kwargs)
        call = SavedCall(self.site.name, args, kwargs)
        inputs = call.tensors
        call.detach()
        box: list[Any] = []
        out = _BlockFunction.apply(self, call, box, executor.anchor, *inputs)
        leaves, spec = box
        found = iter(out if isinstance(out, tuple) else (out,))
        return pytree.tree_unflatten(
            [next(found) if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves], spec
        )

    @contextmanager
    def installed(self, tensors: dict[str, list[torch.Tensor]]) -> Iterator[None]:
        """Puts tensors in the place of the site's parameters for the duration of a call."""
        kept = [module._parameters[attribute] for module, attribute, _, _ in self._places]
        self._entered = True
        try:
            for module, attribute, group, index in self._places:
                module._parameters[attribute] = tensors[group][index]  # type: ignore[assignment]
            yield
        finally:
            self._entered = False
            for (module, attribute, _, _), parameter in zip(self._places, kept, strict=True):
                module._parameters[attribute] = parameter

    def mark_trainable(self) -> None:
        """Lets the tensors installed for a forward say which of them take a gradient: what
        autograd saves depends on it."""
        groups = self.executor.blocks.by_key
        for module, attribute, group, index in self._places:
            tensor = module._parameters[attribute]
            if tensor is not None:
                tensor.requires_grad_(groups[group].tensors[index].trainable)


class Uses:
    """The groups that a call will use once more in backward.

    A graph that is dropped without a backward gives its uses back by itself.
    """

    def __init__(self, executor: Executor, site: Site, owner: object) -> None:
        self._withdraw = weakref.finalize(owner, _give_back, weakref.ref(executor), site.groups)
        self._step, self._groups = executor.progress.step, site.groups
        for key in site.groups:
            executor.sink.expect(key)

    def settle(self, executor: Executor, name: str) -> None:
        if self._withdraw.detach() is None:
            raise LohanError(
                f"{name}: backward ran twice through the same forward; every forward takes one "
                "backward, since its inputs are given up and the weights move on"
            )
        if executor.progress.step != self._step:
            _give_back(weakref.ref(executor), self._groups)
            raise LohanError(
                f"{name}: this loss is from before the last step, and the weights have moved on; "
                "run forward again, or add the losses and call backward once"
            )


def _give_back(executor: weakref.ref[Executor], groups: tuple[str, ...]) -> None:
    alive = executor()
    if alive is not None:
        for key in groups:
            alive.sink.withdraw(key)


class _BlockFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, runner: SiteRunner, call: SavedCall, box: list[Any], *_: Any) -> Any:
        leaves, spec = runner.executor.forward(runner, call)
        box.extend((leaves, spec))
        out = tuple(leaf for leaf in leaves if isinstance(leaf, torch.Tensor))
        ctx.mark_non_differentiable(*(t for t in out if not t.is_floating_point()))
        ctx.set_materialize_grads(False)
        ctx.runner, ctx.call = runner, call
        ctx.uses = Uses(runner.executor, runner.site, call)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: torch.Tensor | None) -> Any:
        runner, call = ctx.runner, ctx.call
        ctx.uses.settle(runner.executor, runner.site.name)
        with runner.executor.guarded():
            runner.executor.enter_backward()
            inputs = runner.executor.backward(runner, call, grads)
        ctx.call = None
        return (None, None, None, None, *inputs)
