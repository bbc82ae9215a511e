"""Wrapped modules: forward from the store, backward by recomputation, the check of first calls."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import nn

from lohan.capture.blocks import views
from lohan.capture.derivatives import differentiable_once
from lohan.capture.placeholders import lacks_values, without_views
from lohan.capture.recompute import BlockState, SlicedCompute, slice_gradients
from lohan.capture.saved_call import (
    Gathered,
    SavedCall,
    deliver_collected,
    fills_cache,
    refuse_cache,
    swapped,
    tree_leaves,
    unflatten,
    with_writes,
    wrap_mappings,
    write_back_mappings,
)
from lohan.capture.selective_checkpoint import tensors_in
from lohan.capture.tiling import TiledForward
from lohan.device.base import Device
from lohan.engine.buffers import Dequantised
from lohan.engine.gradients import GradientCollector, GradientSink, layout
from lohan.engine.scheduler import ActionScheduler
from lohan.errors import LohanError, ModelError
from lohan.model.layout import FlatGroup, Site

if TYPE_CHECKING:
    from lohan.engine.executor import Executor


# -- How a module call becomes a block call: the autograd function and the wrapped forward ---------


class WrappedSite:
    """The replacement of one module's forward. Nothing else in the module is changed."""

    def __init__(self, executor: Executor, number: int, site: Site, module: nn.Module) -> None:
        self.number, self.name, self.site = number, site.name, site
        self.executor = executor
        self.module = module
        modules, groups = executor.hooks.model.get_submodule, executor.blocks.by_key
        self._parameters = [
            (modules(ref.module)._parameters, ref.attribute, ref.group, ref.tensor)
            for ref in site.parameters
        ]
        self._owned = list(module.parameters())
        self._trainable = [
            groups[ref.group].tensors[ref.tensor].trainable for ref in site.parameters
        ]
        self.refresh()
        self.state = BlockState(site.name, module)
        self._forward: Callable[..., Any] = module.forward
        self._removed = False
        self.original: Callable[..., Any] = with_writes(module.forward)
        if executor.hooks.tiling is not None:
            self.original = executor.hooks.tiling.forward(module, self.original)
        module.forward = self

    def refresh(self) -> None:
        """Update which parameters take a gradient, after user code has frozen or unfrozen some."""
        frozen = self.executor.hooks.watched.frozen
        self._takes_grad = [
            trainable and (group, index) not in frozen
            for (_, _, group, index), trainable in zip(
                self._parameters, self._trainable, strict=True
            )
        ]
        with torch._C.DisableTorchFunctionSubclass():
            self._trained = any(parameter.requires_grad for parameter in self._owned)

    def remove(self) -> None:
        self._removed = True
        if vars(self.module).get("forward") is self:
            del self.module.forward

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self._removed:  # User code has wrapped this forward before the plan changed.
            return self._forward(*args, **kwargs)
        executor = self.executor
        if any(map(self.within, executor.hooks.sites_with_weights)):
            return self.original(*args, **kwargs)
        if not torch.is_grad_enabled():
            args, kwargs, mappings = wrap_mappings(*without_views(args, kwargs))
            return write_back_mappings(executor.block_runner.evaluate(self, args, kwargs), mappings)
        args, kwargs, mappings = wrap_mappings(args, kwargs)
        return write_back_mappings(self._train(args, kwargs), mappings)

    def _train(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        executor = self.executor
        refuse_cache(self.name, args, kwargs)
        call = SavedCall(self.name, args, kwargs)
        self.check_values(call)
        self._check_hidden(call)
        inputs = call.detach()
        # If this block trains nothing and no input requires a gradient, no earlier block needs one.
        if not self._trained and not any(call.wants_grad):
            with torch.no_grad():
                leaves, spec = executor.block_runner.forward(self, call, backward_follows=False)
            return deliver_collected(*unflatten(leaves, spec))
        output: list[Any] = []
        out = _BlockFunction.apply(self, call, output, executor.anchor.tensor, *inputs)
        leaves, spec = output
        tensors = iter(out if isinstance(out, tuple) else (out,))
        leaves = [next(tensors) if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
        return deliver_collected(*unflatten(leaves, spec))

    def check_values(self, call: SavedCall) -> None:
        for tensor in call.tensors:
            if lacks_values(tensor):
                raise ModelError(
                    f"block {self.name} is called with a tensor of shape {list(tensor.shape)} "
                    "that has no values (it is on the meta device), so it would compute on "
                    "whatever lies in memory; make that tensor on the device of the inputs"
                )

    def _check_hidden(self, call: SavedCall) -> None:
        for leaf in call.objects:
            if any(t.requires_grad for t in hidden_tensors(leaf)):
                raise ModelError(
                    f"block {self.name} is given tensors that take a gradient inside a "
                    f"{type(leaf).__name__}, where they cannot be seen; pass them as arguments, in "
                    "tuples, lists or dicts"
                )

    @contextmanager
    def installed(
        self, tensors: dict[str, list[torch.Tensor]], *, with_graph: bool = False
    ) -> Iterator[None]:
        """Replace the site's parameters by tensors for the duration of a call.

        The tensors are installed as parameters, because a parametrization inside the call, such as
        PEFT's for experts, restores the objects that it finds. With `with_graph`, each tensor takes
        a gradient if its parameter does, because this determines what autograd saves.
        """
        for parameters, attribute, _, _ in self._parameters:
            if attribute not in parameters:
                raise ModelError(
                    f"{attribute} of a module in block {self.site.name} was removed or renamed "
                    "after the model was attached, as torch.nn.utils.prune and parametrize do; "
                    "change the model first, then attach it"
                )
        others = [
            (parameters, attribute, _as_parameter(tensors[group][index]))
            for parameters, attribute, group, index in self._parameters
        ]
        for (_, _, parameter), takes in zip(others, self._takes_grad, strict=True):
            if with_graph and parameter.requires_grad != takes:
                parameter.requires_grad_(takes)
        self.executor.hooks.sites_with_weights.append(self)
        try:
            with swapped(others):
                yield
        finally:
            self.executor.hooks.sites_with_weights.remove(self)

    def within(self, other: WrappedSite) -> bool:
        """Return whether this site is `other` or a part of `other`."""
        return self is other or self.site.name.startswith(f"{other.site.name}.")


def _as_parameter(tensor: torch.Tensor) -> nn.Parameter:
    if isinstance(tensor, nn.Parameter):
        return tensor
    return nn.Parameter(tensor, requires_grad=tensor.requires_grad)


def hidden_tensors(leaf: Any, depth: int = 3) -> Iterator[torch.Tensor]:
    """Yield tensors in the attributes of an object, down to `depth` nested objects."""
    if isinstance(leaf, torch.Tensor | nn.Module | type) or not hasattr(leaf, "__dict__"):
        return
    for value in vars(leaf).values():
        for inner in tree_leaves(value):
            if isinstance(inner, torch.Tensor):
                yield inner
            elif depth:
                yield from hidden_tensors(inner, depth - 1)


class GroupUses:
    """The groups that a forward call will use again in its backward.

    The sink counts the uses, so it detects the last use in a step. A use ends with the backward of
    the call, or when `owner` is freed because the graph is dropped. The end of the step, or its
    roll-back, ends all remaining uses.
    """

    def __init__(self, executor: Executor, groups: tuple[str, ...], owner: object) -> None:
        sink = executor.collector.sink
        self._period = sink.period
        self._withdraw = weakref.finalize(owner, _withdraw, weakref.ref(sink), groups, sink.period)
        for key in groups:
            sink.expect(key)

    def claim(self, executor: Executor, name: str) -> None:
        """Mark the backward of this call as started.

        Raise an error if it has run already, or if the weights have changed since the forward.
        `name` is the name of the block in the message.
        """
        if self._withdraw.detach() is None:
            raise LohanError(
                f"{name}: backward ran twice through the same forward; every forward takes one "
                "backward, which frees its inputs and updates the weights"
            )
        if executor.collector.sink.period != self._period:
            raise LohanError(
                f"{name}: this loss is from before the last step, or from before a step that "
                "failed, and the weights have changed since; run forward again, or add the "
                "losses and call backward once"
            )


def _withdraw(sink: weakref.ref[GradientSink], groups: tuple[str, ...], period: int) -> None:
    """End the uses of a graph that was dropped, unless the end of the step has ended them."""
    alive = sink()
    if alive is not None and alive.period == period:
        for key in groups:
            alive.end_use(key)


class _BlockFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, wrapped: WrappedSite, call: SavedCall, output: list[Any], *_: Any) -> Any:
        leaves, spec = wrapped.executor.block_runner.forward(wrapped, call)
        output.extend((leaves, spec))
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
        ctx.uses = GroupUses(wrapped.executor, wrapped.site.groups, call)
        return out

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, *grads: torch.Tensor | None) -> Any:
        wrapped, call = ctx.wrapped, ctx.call
        ctx.uses.claim(wrapped.executor, wrapped.site.name)
        with wrapped.executor.guarded():
            wrapped.executor.enter_backward()
            inputs = wrapped.executor.block_runner.backward(wrapped, call, grads)
        ctx.call = None
        return (None, None, None, None, *inputs)


# -- A call of one site: load its weights, compute (capture/recompute.py), collect its gradients ---


Guard = Callable[[], AbstractContextManager[None]]
Weights = dict[str, list[torch.Tensor]]  # by key of group


class _Views(NamedTuple):
    """Parameters over a slot, and their layouts at creation."""

    flat: torch.Tensor
    parameters: list[nn.Parameter]
    layouts: list[Any]

    @property
    def unchanged(self) -> bool:
        return self.layouts == list(map(layout, self.parameters))


class BlockRunner:
    """The calls of sites: fetch the weights, run forward or backward, and release the weights.

    `guarded` rolls the step back if a call fails.
    """

    def __init__(
        self,
        groups: Sequence[FlatGroup],
        scheduler: ActionScheduler,
        collector: GradientCollector,
        compute: SlicedCompute,
        *,
        device: Device,
        guarded: Guard,
        dequantised: Dequantised,
    ) -> None:
        self._groups, self._scheduler, self._collector = groups, scheduler, collector
        self._dequantised = dequantised
        self._packed = {n for n, group in enumerate(groups) if group.dequantised}
        self.compute, self._device, self._guarded = compute, device, guarded
        self.first_calls = FirstCalls()
        self._made_views: dict[tuple[int, int], _Views] = {}

    @contextmanager
    def weights(
        self, wrapped: WrappedSite, *, training: bool, backward_follows: bool = True
    ) -> Iterator[Weights]:
        """Yield the site's parameters for a forward."""
        with self._guarded():
            # Views of slots are kept for later calls. A tensor created in inference mode could not
            # require gradients in those calls.
            with torch.inference_mode(False):
                flats = self._scheduler.begin_forward(
                    wrapped.number, training=training, backward_follows=backward_follows
                )
                tensors = self._views(wrapped, flats)
            yield tensors
            self._scheduler.end()

    def _views(self, wrapped: WrappedSite, flats: dict[int, torch.Tensor]) -> Weights:
        plain = {n: flat for n, flat in flats.items() if n not in self._packed}
        weights = {self._groups[n].key: self._views_of(n, flat) for n, flat in plain.items()}
        if len(plain) < len(flats):
            packed = [(self._groups[n], flat) for n, flat in flats.items() if n in self._packed]
            with self._device.computing():
                weights |= self._dequantised.views(
                    packed, nested=bool(wrapped.executor.hooks.sites_with_weights)
                )
        return weights

    def _views_of(self, number: int, flat: torch.Tensor) -> list[torch.Tensor]:
        """Return views of a slot as parameters.

        Slots do not move, so most views exist already. A view to which a block has assigned
        other data (`module.to(dtype)`, `weight.data = ...`) is created again.
        """
        key = number, flat.data_ptr()
        cached = self._made_views.get(key)
        if cached is None or cached.flat is not flat or not cached.unchanged:
            parameters = [
                nn.Parameter(t, requires_grad=False) for t in views(self._groups[number], flat)
            ]
            cached = self._made_views[key] = _Views(flat, parameters, list(map(layout, parameters)))
        return list(cached.parameters)

    def forward(
        self, wrapped: WrappedSite, call: SavedCall, *, backward_follows: bool = True
    ) -> tuple[list[Any], Any]:
        """Run a site, and return its output without a graph, as leaves and tree structure."""
        weights = self.weights(wrapped, training=True, backward_follows=backward_follows)
        installed = partial(wrapped.installed, with_graph=backward_follows)
        with weights as tensors, installed(tensors), self._device.computing():
            if isinstance(wrapped.original, TiledForward):
                wrapped.original.prepare(*call.arguments(call.tensors))
            output = self.compute.forward(
                wrapped, call, self._scheduler.activation_buffers, backward_follows=backward_follows
            )
            if backward_follows and self.first_calls.take_first(call.name):
                self._check_results(wrapped, call, output.leaves)
            self.compute.activations.forward_done(wrapped.number, call)
        return output.leaves, output.spec

    def evaluate(self, wrapped: WrappedSite, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a site without gradients, keep nothing for backward, and return its output.

        A call that fills a key-value cache is not sliced.
        """
        call = SavedCall(wrapped.name, args, kwargs)
        wrapped.check_values(call)
        weights = self.weights(wrapped, training=False)
        with weights as tensors, wrapped.installed(tensors), self._device.computing():
            # As in training, the parts to tile are found in the unsliced call.
            if isinstance(wrapped.original, TiledForward):
                wrapped.original.prepare(args, kwargs)
            if fills_cache((*args, *kwargs.values())):
                return wrapped.original(*args, **kwargs)
            output = self.compute.evaluate(wrapped, call)
        return deliver_collected(*unflatten(output.leaves, output.spec))

    def backward(
        self, wrapped: WrappedSite, call: SavedCall, grads: tuple[torch.Tensor | None, ...]
    ) -> list[torch.Tensor | None]:
        """Recompute a site slice by slice, and return the gradients of its inputs.

        The gradients of its weights are added to the sink.
        """
        site, parts = wrapped.number, len(call.slices(self.compute.micro_batch))
        flats = self._scheduler.begin_backward(site)
        self.compute.activations.load_inputs(site, call, self._scheduler.activation_buffers)
        self._collector.fetch_aside(wrapped.site.groups)
        leaves = self._collector.leaves(wrapped.site, self._views(wrapped, flats), parts=parts)
        with wrapped.installed(leaves):
            inputs = self.compute.backward(wrapped, call, grads)
        if call.checked:
            self._check_gradients(wrapped, call, grads, self._views(wrapped, flats), inputs)
        self.compute.activations.release(site, call)
        self._collector.finish(site)
        return [gathered.value for gathered in inputs]

    def _check_results(self, wrapped: WrappedSite, call: SavedCall, results: list[Any]) -> None:
        """Compare the results of the first slice with those of the block's original forward.

        The weights must still be in memory.
        """
        call.checked, part = True, call.slices(self.compute.micro_batch)[0]
        _, args, kwargs = call.restore(part, grad=True)
        with self.compute.as_in_forward(wrapped, call), torch.enable_grad():
            plain = call.context.run(wrapped.original, *args, **kwargs)
        if part != slice(0, call.batch):
            rows = iter(call.cut.outputs)
            results = [
                leaf[: part.stop * each]
                if isinstance(leaf, torch.Tensor) and (each := next(rows))
                else leaf
                for leaf in results
            ]
        self.first_calls.compare_results(call.name, results, tree_leaves(plain))

    def _check_gradients(
        self,
        wrapped: WrappedSite,
        call: SavedCall,
        grads: tuple[torch.Tensor | None, ...],
        weights: Weights,
        inputs: list[Gathered],
    ) -> None:
        """Compare the gradients of the inputs of the first slice with those of a plain call."""
        parts = call.slices(self.compute.micro_batch)
        tensors, args, kwargs = call.restore(parts[0], grad=True)
        leaves, gradients = {}, dict[str, torch.Tensor | None]()
        for number, (tensor, gathered) in enumerate(zip(tensors, inputs, strict=True)):
            if len(parts) == 1 or call.cut.inputs[number]:
                leaves[f"input {number}"] = tensor
                rows = (
                    gathered.value
                    if len(parts) == 1 or gathered.value is None
                    else gathered.value[parts[0]]
                )
                gradients[f"input {number}"] = rows
        run = partial(call.context.run, wrapped.original, *args, **kwargs)
        plain_weights = {key: [t.detach() for t in weights[key]] for key in wrapped.site.groups}
        installed = wrapped.installed(plain_weights, with_graph=True)
        with installed, self.compute.as_in_forward(wrapped, call), self._device.computing():
            plain = plain_gradients(run, leaves, slice_gradients(call, grads, 0, parts[0]))
        self.first_calls.compare_gradients(call.name, gradients, plain)


# -- A check of first calls: each block is compared with a plain call of the same module -----------
#
# A block runs once more on the same inputs and weights, with PyTorch's own autograd. Its results
# and the gradients of its inputs must equal those of the call through LoHan, up to the rounding of
# slices. Gradients of its weights are not compared, because they would need memory that no plan
# has. A difference would occur in every step, for example if a module keeps state from call to call
# and recomputation therefore gives another result.


# The largest difference, relative to the norm; differences by rounding are far smaller.
RELATIVE = {torch.float32: 1e-3, torch.float64: 1e-3}
RELATIVE_16_BIT = 0.1
# The norm of all gradients of the block, multiplied by this, is added to the norm of each gradient.
# The gradient of a key bias, for example, is zero in exact arithmetic and consists of rounding
# errors.
NOISE = 1e-2

NamedGrads = Mapping[str, torch.Tensor | None]


class FirstCalls:
    """A comparison of the first call of each block in `sites` with a plain call."""

    def __init__(self, sites: Collection[str] = ()) -> None:
        self._unchecked = set(sites)
        self.checked: list[str] = []  # sites whose results were compared

    def take_first(self, name: str) -> bool:
        """Return True for the first call of each block to check, and False for all other calls."""
        if name not in self._unchecked:
            return False
        self._unchecked.discard(name)
        return True

    def compare_results(self, name: str, results: Sequence[Any], plain: Sequence[Any]) -> None:
        for number, (one, other) in enumerate(zip(results, plain, strict=True)):
            if isinstance(other, torch.Tensor):
                _compare(name, f"result {number}", one, other, 0.0)
        self.checked.append(name)

    def compare_gradients(self, name: str, gradients: NamedGrads, plain: NamedGrads) -> None:
        norms = [float(g.float().norm()) for g in plain.values() if g is not None]
        noise = NOISE * sum(norm**2 for norm in norms) ** 0.5
        for key, other in plain.items():
            _compare(name, f"the gradient of {key}", gradients.get(key), other, noise)


def _compare(
    name: str, what: str, one: torch.Tensor | None, other: torch.Tensor | None, noise: float
) -> None:
    if one is None and other is None:
        return
    if one is None or other is None:
        present = other if one is None else one
        assert present is not None
        if float(present.float().norm()) == 0.0:  # A gradient of zero has the same effect as none.
            return
        raise _differs(name, what, "absent" if one is None else "there, absent in the plain call")
    if one.shape != other.shape:
        raise _differs(name, what, f"of shape {list(one.shape)}, not {list(other.shape)}")
    if not other.is_floating_point():
        if not torch.equal(one, other):
            raise _differs(name, what, "not the same")
        return
    limit = RELATIVE.get(other.dtype, RELATIVE_16_BIT)
    one, other = one.float().nan_to_num(), other.float().nan_to_num()
    far, norm = float((one - other).norm()), float(other.norm())
    if not far <= limit * (norm + noise):
        raise _differs(name, what, f"{far:.1e} from it, of norm {norm:.1e}")


def _differs(name: str, what: str, how: str) -> ModelError:
    return ModelError(
        f"block {name}: in its first call {what} is {how}, compared with a plain call of the same "
        "module on the same inputs, so it would be trained wrongly; no step was taken. A block "
        "must give the same result whenever it is called with the same inputs; keep this one in "
        f"memory with resident=[{name!r}], or leave the comparison out with check=False if it is "
        "random"
    )


def plain_gradients(
    run: Callable[[], Any], leaves: Mapping[str, torch.Tensor], grads: Sequence[torch.Tensor | None]
) -> NamedGrads:
    """Return the gradients of the leaves in a plain call of a block.

    `run` makes the call, and `grads` are the gradients of its results.
    """
    with torch.enable_grad():
        out = tensors_in(run())
    pairs = [(o, g) for o, g in zip(out, grads, strict=True) if o.requires_grad and g is not None]
    wanted = {key: leaf for key, leaf in leaves.items() if leaf.requires_grad}
    if not pairs or not wanted:
        return {}
    gradients = torch.autograd.grad(
        [o for o, _ in pairs], list(wanted.values()), [g for _, g in pairs], allow_unused=True
    )
    return dict(zip(wanted, gradients, strict=True))
