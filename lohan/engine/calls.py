"""Calls of sites: the wrapped forward, backward by recomputation, compilation."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.autograd.function import once_differentiable
from torch.utils import _pytree as pytree

from lohan.capture.blocks import views
from lohan.capture.call import (
    ActivationOffload,
    BlockState,
    CallContext,
    Gathered,
    Output,
    SavedCall,
    as_before,
    deliver_collected,
    fills_cache,
    is_prefix,
    no_saved_tensors,
    put_back,
    refuse_cache,
    swapped,
)
from lohan.capture.mappings import share, unshare, with_writes
from lohan.capture.placeholders import lacks_values
from lohan.capture.selective_checkpoint import EarlyStop, SavePlan, run_again, run_and_keep
from lohan.capture.slicing import Cuts, NotSliceable
from lohan.capture.tracing import Inventories
from lohan.device.base import Device, forked_random_state
from lohan.engine.first_call import FirstCalls, plain_gradients
from lohan.engine.gradients import Collector
from lohan.engine.pipeline import Pipeline
from lohan.errors import ConfigError, LohanError, ModelError
from lohan.model.layout import Group, Site

if TYPE_CHECKING:
    from lohan.engine.executor import Executor


# -- How a module call becomes a block call: the autograd function and the wrapped forward ---------


class WrappedSite:
    """Stands in for one module's forward; the module itself is not changed otherwise."""

    def __init__(self, executor: Executor, number: int, site: Site, module: nn.Module) -> None:
        self.number, self.site = number, site
        self.executor = executor
        self.module = module
        self._places = [
            (executor.model.get_submodule(ref.module), ref.attribute, ref.group, ref.tensor)
            for ref in site.parameters
        ]
        self._trained = any(parameter.requires_grad for parameter in module.parameters())
        self.state = BlockState(site.name, module)
        self.original: Callable[..., Any] = with_writes(module.forward)
        module.forward = self

    def remove(self) -> None:
        if vars(self.module).get("forward") is self:
            del self.module.forward

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        executor = self.executor
        if any(self.within(other) for other in executor.running):  # its weights are in place
            return self.original(*args, **kwargs)
        self._check_values(args, kwargs)
        args, kwargs, mappings = share(args, kwargs)
        if not torch.is_grad_enabled():
            return unshare(executor.calls.evaluate(self, args, kwargs), mappings)
        return unshare(self._train(args, kwargs), mappings)

    def _train(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        executor = self.executor
        self._check_arguments(args, kwargs)
        call = SavedCall(self.site.name, args, kwargs)
        inputs = call.detach()
        if not self._trained and not any(call.wants_grad):  # nothing before it learns either
            with torch.no_grad():
                leaves, spec = executor.calls.forward(self, call, graph=False)
            return deliver_collected(*pytree.tree_unflatten(leaves, spec))
        box: list[Any] = []
        out = _BlockFunction.apply(self, call, box, executor.anchor, *inputs)
        leaves, spec = box
        found = iter(out if isinstance(out, tuple) else (out,))
        leaves = [next(found) if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
        return deliver_collected(*pytree.tree_unflatten(leaves, spec))

    def _check_values(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        for leaf in pytree.tree_leaves((args, kwargs)):
            if isinstance(leaf, torch.Tensor) and lacks_values(leaf):
                raise ModelError(
                    f"block {self.site.name} is called with a tensor of shape {list(leaf.shape)} "
                    "that has no values (it is on the meta device), so it would compute on "
                    "whatever lies in memory; make that tensor on the device of the inputs"
                )

    def _check_arguments(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        refuse_cache(self.site.name, args, kwargs)
        for leaf in pytree.tree_leaves((args, kwargs)):
            if not is_prefix(leaf) and any(t.requires_grad for t in hidden_tensors(leaf)):
                raise ModelError(
                    f"block {self.site.name} is given tensors that take a gradient inside a "
                    f"{type(leaf).__name__}, where they cannot be seen; pass them as arguments, in "
                    "tuples, lists or dicts"
                )

    @contextmanager
    def installed(self, tensors: dict[str, list[torch.Tensor]]) -> Iterator[None]:
        """Puts tensors in the place of the site's parameters for the duration of a call, as
        parameters: a parametrization inside the call, as PEFT's of experts, gives back what it
        finds."""
        others = [
            (module._parameters, attribute, _as_parameter(tensors[group][index]))
            for module, attribute, group, index in self._places
        ]
        self.executor.running.append(self)
        try:
            with swapped(others):
                yield
        finally:
            self.executor.running.remove(self)

    def within(self, other: WrappedSite) -> bool:
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


def _as_parameter(tensor: torch.Tensor) -> nn.Parameter:
    if isinstance(tensor, nn.Parameter):
        return tensor
    return nn.Parameter(tensor, requires_grad=tensor.requires_grad)


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
        self._step, self._groups = executor.train_state.step, site.groups
        for key in site.groups:
            executor.collector.sink.expect(key)

    def consume(self, executor: Executor, name: str) -> None:
        if self._withdraw.detach() is None:
            raise LohanError(
                f"{name}: backward ran twice through the same forward; every forward takes one "
                "backward, since its inputs are given up and the weights move on"
            )
        if executor.train_state.step != self._step:
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
    def forward(ctx: Any, wrapped: WrappedSite, call: SavedCall, box: list[Any], *_: Any) -> Any:
        leaves, spec = wrapped.executor.calls.forward(wrapped, call)
        box.extend((leaves, spec))
        out = tuple(leaf for leaf in leaves if isinstance(leaf, torch.Tensor))
        for leaf in leaves:
            if any(t.is_floating_point() for t in hidden_tensors(leaf)):
                raise ModelError(
                    f"block {wrapped.site.name} returns tensors inside a {type(leaf).__name__}, "
                    "where their gradients would be lost; return them in tuples, lists or dicts"
                )
        ctx.mark_non_differentiable(*(t for t in out if not t.is_floating_point()))
        ctx.set_materialize_grads(False)
        ctx.wrapped, ctx.call = wrapped, call
        ctx.uses = Uses(wrapped.executor, wrapped.site, call)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: torch.Tensor | None) -> Any:
        wrapped, call = ctx.wrapped, ctx.call
        ctx.uses.consume(wrapped.executor, wrapped.site.name)
        with wrapped.executor.guarded():
            wrapped.executor.enter_backward()
            inputs = wrapped.executor.calls.backward(wrapped, call, grads)
        ctx.call = None
        return (None, None, None, None, *inputs)


# -- Blocks compiled by torch ----------------------------------------------------------------------
#
# An option, for devices whose results need not have the cpu's bits.
#
# Note [what is compiled] Calls of which no results are kept. Where the plan keeps results from
# inside a block, its operations run one by one as without the option. So do those of a block that
# draws random numbers: a compiled one may draw others in recomputation than in forward. A block's
# first call runs as it is and shows whether it draws any.


Backend = str | Callable[..., Any]  # as torch.compile takes it
Forward = Callable[..., Any]
SPARE = 8  # forms of a block beyond one for every site: forward, backward, other batches
LIMITS = ("recompile_limit", "cache_size_limit")  # dynamo's name for it now, and before


def backend_of(choice: bool | Backend, device: Device) -> Backend | None:
    """The user's choice as a backend of torch.compile; None: blocks are not compiled."""
    if choice is False:
        return None
    if not device.compiles:
        raise ConfigError(
            f"compile: blocks are compiled on accelerators only, and this run computes on "
            f"{device.name}, where results have the same bits in every mode; leave --compile out"
        )
    return "inductor" if choice is True else choice


class Compiled:
    """The compiled forwards of a model's sites, each made when it is known that it may be."""

    def __init__(self, backend: Backend | None, *, sites: int) -> None:
        self._backend = backend
        self._made: dict[int, Forward | None] = {}  # None: it runs as it is
        if backend is None:
            return
        from torch import _dynamo

        for name in LIMITS:  # all sites of one class share dynamo's forms of its code
            if hasattr(_dynamo.config, name):
                forms = max(2 * sites + SPARE, getattr(_dynamo.config, name))
                setattr(_dynamo.config, name, forms)
                return

    def of(self, site: int) -> Forward | None:
        return self._made.get(site)

    def undecided(self, site: int) -> bool:
        """Whether a call of this site has something to tell."""
        return self._backend is not None and site not in self._made

    def decide(self, site: int, forward: Forward, before: Any, after: Any) -> None:
        """A call ran as it is, between these states of the random numbers."""
        made = None
        if self._backend is not None and _same(before, after):
            made = torch.compile(forward, backend=self._backend)
        self._made[site] = made


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)
    return all(map(_same, one, other))


# -- Which results each call keeps, found when a block runs for the first time ---------------------
#
# A plan names classes of activations; which operations make them is known only with the real
# inputs, since models choose their operations by them (a mask or none, say).


class SavePlans:
    """`kept`: classes by number of site."""

    def __init__(self, kept: Mapping[int, frozenset[str]]) -> None:
        self._kept = kept
        self._inventories = Inventories()
        self._made: dict[tuple[Any, ...], SavePlan | None] = {}

    def of(self, wrapped: WrappedSite, call: SavedCall, part: slice) -> SavePlan | None:
        """For one slice of a call; None: nothing is kept."""
        classes = self._kept.get(wrapped.number)
        if not classes:
            return None
        key = (wrapped.number, part.stop - part.start, *(tuple(t.shape) for t in call.tensors))
        if key not in self._made:
            _, args, kwargs = call.restore(part, grad=True)
            with wrapped.state.untouched():
                found = self._inventories.of(wrapped.module, args, kwargs, forward=wrapped.original)
            names = classes & found.keys.keys()
            self._made[key] = found.save_plan(names) if names else None
        return self._made[key]


# -- A call of one site: forward without a graph, backward by recomputation, evaluation ------------
#
# Forward keeps the inputs and what the plan keeps besides. Backward runs the block once more,
# slice by slice, from what was kept; weight gradients go to the collector, input gradients return.


Guard = Callable[[], AbstractContextManager[None]]
Weights = dict[str, list[torch.Tensor]]  # by key of group


class Calls:
    """`guarded`: what an error in a call does to the step."""

    def __init__(
        self, groups: Sequence[Group], pipeline: Pipeline, activations: ActivationOffload,
        collector: Collector, *, device: Device, micro_batch: int | None, save_plans: SavePlans,
        compiled: Compiled, guarded: Guard,
    ) -> None:  # fmt: skip
        self._groups, self._pipeline, self._activations = groups, pipeline, activations
        self._collector, self._device, self._micro_batch = collector, device, micro_batch
        self._guarded = guarded
        self.save_plans, self.compiled, self.cuts = save_plans, compiled, Cuts()
        self._early_stop = EarlyStop()
        self.first_calls = FirstCalls()

    @contextmanager
    def weights(
        self, wrapped: WrappedSite, *, training: bool, graph: bool = True
    ) -> Iterator[Weights]:
        """The site's parameters for a forward."""
        with self._guarded():
            flats = self._pipeline.begin_forward(wrapped.number, training=training, graph=graph)
            yield self._views(flats)
            self._pipeline.end()

    def _views(self, flats: dict[int, torch.Tensor]) -> Weights:
        groups = self._groups
        return {groups[n].key: views(groups[n], flat) for n, flat in flats.items()}

    def forward(
        self, wrapped: WrappedSite, call: SavedCall, *, graph: bool = True
    ) -> tuple[list[Any], Any]:
        """Runs a site; returns its output as leaves and layout, without a graph. `graph`: backward
        will come to it."""
        output = Output(call)
        weights = self.weights(wrapped, training=True, graph=graph)
        with weights as tensors, wrapped.installed(tensors), self._device.computing():
            self._find_cut(wrapped, call)
            if graph:
                self._activations.save_inputs(
                    wrapped.number, call, self._pipeline.activation_places()
                )
                wrapped.mark_trainable()
            before = wrapped.state.before()
            for part in call.slices(self._micro_batch):
                call.rng.append(self._device.random_state())
                out, kept = self._run_slice(wrapped, call, part, graph=graph)
                call.kept.append(kept)
                self._activations.save_slice(wrapped.number, call)
                output.put(part, out)
            call.check_untouched()
            call.changed = wrapped.state.after(before)
            if graph and self.first_calls.begins(call.name):
                self._check_results(wrapped, call, output.leaves)
            self._activations.forward_done(wrapped.number, call)
        return output.leaves, output.spec

    def _run_slice(
        self, wrapped: WrappedSite, call: SavedCall, part: slice, *, graph: bool
    ) -> tuple[Any, Any]:
        """What a slice returns and what it keeps. Note [what is compiled]."""
        _, args, kwargs = call.restore(part, grad=graph)
        save_plan = self.save_plans.of(wrapped, call, part)
        fast = self.compiled.of(wrapped.number) if save_plan is None else None
        if fast is not None:
            with torch.no_grad():
                return call.context.run(fast, *args, **kwargs), None
        run = partial(call.context.run, wrapped.original, *args, **kwargs)
        if graph:
            run = partial(no_saved_tensors, run, call.name)
        if save_plan is not None:
            return run_and_keep(run, save_plan)
        out = run()
        if self.compiled.undecided(wrapped.number):
            states = call.rng[-1], self._device.random_state()
            self.compiled.decide(wrapped.number, wrapped.original, *states)
        return out, None

    def _find_cut(self, wrapped: WrappedSite, call: SavedCall) -> None:
        """Finds out how a call falls into slices; its weights are in place."""
        call.context = CallContext.now(self._device.torch_device.type)
        if self._micro_batch and self._micro_batch < call.batch:

            def run(*args: Any, **kwargs: Any) -> Any:
                before = wrapped.state.before()
                out = call.context.run(wrapped.original, *args, **kwargs)
                if name := wrapped.state.advanced(before):
                    raise NotSliceable(f"changes its {name} in every call")
                return out

            with forked_random_state(self._device), wrapped.state.untouched():
                call.cut = self.cuts.of(wrapped.module, call, run)

    def evaluate(self, wrapped: WrappedSite, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Runs a site without gradients: nothing is kept. What fills a cache is not cut."""
        call = SavedCall(wrapped.site.name, args, kwargs)
        weights = self.weights(wrapped, training=False)
        with weights as tensors, wrapped.installed(tensors), self._device.computing():
            if fills_cache((*args, *kwargs.values())):
                return wrapped.original(*args, **kwargs)
            self._find_cut(wrapped, call)
            output = Output(call)
            for part in call.slices(self._micro_batch):
                _, args, kwargs = call.restore(part, grad=False)
                output.put(part, call.context.run(wrapped.original, *args, **kwargs))
        return deliver_collected(*pytree.tree_unflatten(output.leaves, output.spec))

    def backward(
        self, wrapped: WrappedSite, call: SavedCall, grads: tuple[torch.Tensor | None, ...]
    ) -> list[torch.Tensor | None]:
        """Recomputes a site slice by slice; input gradients return, weight gradients move on."""
        parts, site = call.slices(self._micro_batch), wrapped.number
        inputs = [Gathered(call.batch) for _ in call.tensors]
        flats = self._pipeline.begin_backward(site)
        self._activations.load_inputs(site, call, self._pipeline.activation_places())
        self._collector.take_back(wrapped.site.groups)
        leaves = self._collector.leaves(wrapped.site, self._views(flats), parts=len(parts))
        seen = _watched(wrapped, leaves) if call.checked else {}
        with (
            wrapped.installed(leaves), forked_random_state(self._device), self._device.computing(),
            as_before(call.changed),
        ):  # fmt: skip
            for number, part in enumerate(parts):
                self._device.set_random_state(call.rng[number])
                self._activations.load_slice(site, call, number)
                self._recompute_slice(wrapped, call, grads, number, part, inputs)
                self._activations.release_slice(site, call, number)
        if call.checked:
            self._check_gradients(wrapped, call, grads, self._views(flats), inputs, seen)
        self._activations.release(site, call)
        self._collector.finish(site)
        return [slot.value for slot in inputs]

    def _recompute_slice(
        self, wrapped: WrappedSite, call: SavedCall, grads: tuple[torch.Tensor | None, ...],
        number: int, part: slice, inputs: list[Gathered],
    ) -> None:  # fmt: skip
        """Forward and backward of one slice, of which nothing is left but gradients."""
        kept = call.kept[number]
        tensors, _, _ = call.restore(part, grad=True)
        fast = self.compiled.of(wrapped.number) if kept is None else None

        def run() -> Any:
            args, kwargs = call.arguments(tensors)  # it may run twice, and fill what it is given
            return call.context.run(fast or wrapped.original, *args, **kwargs)

        with torch.enable_grad():
            if kept is not None:
                out = run_again(run, kept)
            elif fast is not None:
                out = pytree.tree_leaves(run())
            else:
                kind = wrapped.number, part.stop - part.start, *(t.shape for t in tensors)

                state = call.rng[number]

                def rewind() -> None:
                    self._device.set_random_state(state)
                    put_back(call.changed)

                out = self._early_stop.run(kind, run, rewind)
        outputs = [leaf for leaf in out if isinstance(leaf, torch.Tensor)]
        pairs = [
            (output, grad)
            for output, grad in zip(outputs, _gradients(call, grads, number, part), strict=True)
            if output.requires_grad and grad is not None
        ]
        if pairs:
            torch.autograd.backward([output for output, _ in pairs], [grad for _, grad in pairs])
        whole = part == slice(0, call.batch)
        for position, (gathered, tensor) in enumerate(zip(inputs, tensors, strict=True)):
            if tensor.grad is not None and (whole or call.cut.inputs[position]):
                gathered.put(part, tensor.grad)
            elif tensor.grad is not None:  # what all slices have in common
                gathered.add(tensor.grad)

    def _check_results(self, wrapped: WrappedSite, call: SavedCall, ours: list[Any]) -> None:
        """Of a block's first call; its weights are in place."""
        call.checked, part = True, call.slices(self._micro_batch)[0]
        _, args, kwargs = call.restore(part, grad=True)
        with self._as_in_forward(call), torch.enable_grad():
            plain = call.context.run(wrapped.original, *args, **kwargs)
        if part != slice(0, call.batch):
            rows = iter(call.cut.outputs)
            ours = [
                leaf[: part.stop * each] if isinstance(leaf, torch.Tensor) and (each := next(rows))
                else leaf
                for leaf in ours
            ]  # fmt: skip
        self.first_calls.compare_results(call.name, ours, pytree.tree_leaves(plain))

    def _check_gradients(
        self, wrapped: WrappedSite, call: SavedCall, grads: tuple[torch.Tensor | None, ...],
        weights: Weights, inputs: list[Gathered], seen: dict[str, torch.Tensor],
    ) -> None:  # fmt: skip
        """Those of its first slice; of weights, if that is all there is."""
        parts = call.slices(self._micro_batch)
        tensors, args, kwargs = call.restore(parts[0], grad=True)
        found: dict[str, torch.Tensor | None] = dict(seen) if len(parts) == 1 else {}
        leaves = {}
        for number, (tensor, slot) in enumerate(zip(tensors, inputs, strict=True)):
            if len(parts) == 1 or call.cut.inputs[number]:
                leaves[f"input {number}"] = tensor
                rows = slot.value if len(parts) == 1 or slot.value is None else slot.value[parts[0]]
                found[f"input {number}"] = rows
        run = partial(call.context.run, wrapped.original, *args, **kwargs)
        own = {key: [t.detach() for t in weights[key]] for key in wrapped.site.groups}
        if len(parts) == 1:
            leaves |= dict(_named(wrapped, own))
        with wrapped.installed(own), self._as_in_forward(call), self._device.computing():
            wrapped.mark_trainable()
            plain = plain_gradients(run, leaves, _gradients(call, grads, 0, parts[0]))
        self.first_calls.compare_gradients(call.name, found, plain)

    @contextmanager
    def _as_in_forward(self, call: SavedCall) -> Iterator[None]:
        """The state of things at the beginning of a call's first slice."""
        with forked_random_state(self._device), as_before(call.changed):
            self._device.set_random_state(call.rng[0])
            yield


def _named(wrapped: WrappedSite, tensors: Weights) -> Iterator[tuple[str, torch.Tensor]]:
    for key in wrapped.site.groups:
        specs = wrapped.executor.blocks.by_key[key].tensors
        for spec, tensor in zip(specs, tensors[key], strict=True):
            yield spec.name, tensor


def _watched(wrapped: WrappedSite, leaves: Weights) -> dict[str, torch.Tensor]:
    """Gradients that leaves will get."""
    seen: dict[str, torch.Tensor] = {}
    for name, leaf in _named(wrapped, leaves):
        if leaf.requires_grad:
            leaf.register_hook(partial(_add, seen, name))
    return seen


def _add(seen: dict[str, torch.Tensor], name: str, grad: torch.Tensor) -> None:
    seen[name] = grad.detach().clone() if name not in seen else seen[name] + grad


def _gradients(
    call: SavedCall, grads: tuple[torch.Tensor | None, ...], number: int, part: slice
) -> list[torch.Tensor | None]:
    """Of the outputs of one slice. What all slices have in common gets it in the first."""
    if part == slice(0, call.batch):
        return list(grads)
    found: list[torch.Tensor | None] = []
    for grad, rows in zip(grads, call.cut.outputs, strict=True):
        if grad is not None and rows:
            grad = grad[part.start * rows : part.stop * rows]
        found.append(grad if rows or number == 0 else None)
    return found
