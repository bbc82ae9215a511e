"""How a module call becomes a block call: the autograd function and the wrapped forward."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.autograd.function import once_differentiable
from torch.utils import _pytree as pytree

from lohan.capture.ambient import hand_on
from lohan.capture.buffers import BlockBuffers
from lohan.capture.call import SavedCall
from lohan.errors import LohanError, ModelError
from lohan.model.layout import Site

if TYPE_CHECKING:
    from lohan.engine.executor import Executor


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
        self._trained = any(parameter.requires_grad for parameter in module.parameters())
        self.buffers = BlockBuffers(site.name, module)
        self.original: Callable[..., Any] = module.forward
        module.forward = self

    def remove(self) -> None:
        if vars(self.module).get("forward") is self:
            del self.module.forward

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        executor = self.executor
        if any(self.within(other) for other in executor.running):  # its weights are in place
            return self.original(*args, **kwargs)
        if not torch.is_grad_enabled():
            return executor.calls.evaluate(self, args, kwargs)
        self._check_arguments(args, kwargs)
        call = SavedCall(self.site.name, args, kwargs)
        inputs = call.tensors
        call.detach()
        if not self._trained and not any(call.wants_grad):  # nothing before it learns either
            with torch.no_grad():
                leaves, spec = executor.calls.forward(self, call, graph=False)
            return hand_on(*pytree.tree_unflatten(leaves, spec))
        box: list[Any] = []
        out = _BlockFunction.apply(self, call, box, executor.anchor, *inputs)
        leaves, spec = box
        found = iter(out if isinstance(out, tuple) else (out,))
        leaves = [next(found) if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
        return hand_on(*pytree.tree_unflatten(leaves, spec))

    def _check_arguments(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if fills_cache((*args, *kwargs.values())):
            raise ModelError(
                f"block {self.site.name} fills a cache of keys and values in training, which "
                "recomputation would fill twice; set use_cache=False in the call or in model.config"
            )
        for leaf in pytree.tree_leaves((args, kwargs)):
            if any(tensor.requires_grad for tensor in hidden_tensors(leaf)):
                raise ModelError(
                    f"block {self.site.name} is given tensors that take a gradient inside a "
                    f"{type(leaf).__name__}, where they cannot be seen; pass them as arguments, in "
                    "tuples, lists or dicts"
                )

    @contextmanager
    def installed(self, tensors: dict[str, list[torch.Tensor]]) -> Iterator[None]:
        """Puts tensors in the place of the site's parameters for the duration of a call."""
        kept = [module._parameters[attribute] for module, attribute, _, _ in self._places]
        self.executor.running.append(self)
        try:
            for module, attribute, group, index in self._places:
                module._parameters[attribute] = tensors[group][index]  # type: ignore[assignment]
            yield
        finally:
            self.executor.running.remove(self)
            for (module, attribute, _, _), parameter in zip(self._places, kept, strict=True):
                module._parameters[attribute] = parameter

    def within(self, other: SiteRunner) -> bool:
        """Whether it is the other, or a part of it."""
        return self is other or self.site.name.startswith(f"{other.site.name}.")

    def mark_trainable(self) -> None:
        """Lets the tensors installed for a forward say which of them take a gradient: what
        autograd saves depends on it."""
        groups = self.executor.blocks.by_key
        for module, attribute, group, index in self._places:
            tensor = module._parameters[attribute]
            if tensor is not None:
                tensor.requires_grad_(groups[group].tensors[index].trainable)


def fills_cache(inputs: Iterable[Any]) -> bool:
    """Whether one of them is a cache of keys and values, which knows how much it holds."""
    return any(hasattr(value, "get_seq_length") for value in inputs)


def hidden_tensors(leaf: Any, depth: int = 3) -> Iterator[torch.Tensor]:
    """Tensors inside an object that is no tuple, list or dict."""
    if isinstance(leaf, torch.Tensor | nn.Module | type) or not hasattr(leaf, "__dict__"):
        return
    for value in vars(leaf).values():
        for inner in pytree.tree_leaves(value):
            if isinstance(inner, torch.Tensor):
                yield inner
            elif depth:
                yield from hidden_tensors(inner, depth - 1)


class Uses:
    """The groups that a call will use once more in backward.

    A graph that is dropped without a backward gives its uses back by itself.
    """

    def __init__(self, executor: Executor, site: Site, owner: object) -> None:
        self._withdraw = weakref.finalize(owner, _give_back, weakref.ref(executor), site.groups)
        self._step, self._groups = executor.progress.step, site.groups
        for key in site.groups:
            executor.collector.sink.expect(key)

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
            alive.collector.sink.withdraw(key)


class _BlockFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, runner: SiteRunner, call: SavedCall, box: list[Any], *_: Any) -> Any:
        leaves, spec = runner.executor.calls.forward(runner, call)
        box.extend((leaves, spec))
        out = tuple(leaf for leaf in leaves if isinstance(leaf, torch.Tensor))
        for leaf in leaves:
            if any(t.is_floating_point() for t in hidden_tensors(leaf)):
                raise ModelError(
                    f"block {runner.site.name} returns tensors inside a {type(leaf).__name__}, "
                    "where their gradients would be lost; return them in tuples, lists or dicts"
                )
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
            inputs = runner.executor.calls.backward(runner, call, grads)
        ctx.call = None
        return (None, None, None, None, *inputs)
