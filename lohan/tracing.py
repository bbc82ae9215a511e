"""One call of a module as a graph of operations, found on fake tensors.

Values are storages between two changes: an operation in place reads the old value of a storage and
makes a new one, and a view is the value that it looks at.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from lohan.fakes import CPU, faking
from lohan.runtime.operations import (
    Counter,
    OpKey,
    counts,
    reads_values,
    storable,
    storage_key,
    tensors_in,
    written,
)


@dataclass(frozen=True)
class Node:
    """An operation. `reads` are the nodes that made the values it needs, views looked through."""

    index: int
    key: OpKey
    module: str  # innermost, relative to the traced one
    reads: tuple[int, ...]
    bytes: int  # of its results
    moved_bytes: int  # read and written
    flops: float  # matrix products, attention, convolution
    context_flops: float  # of these, in attention: they grow with the sequence
    must_run: bool  # does more than make its results
    storable: bool

    @property
    def op(self) -> str:
        return self.key[0].split(".")[1].strip("_")


@dataclass(frozen=True)
class Graph:
    nodes: tuple[Node, ...]
    saved: frozenset[int]  # nodes that made a value which autograd saves

    @property
    def ops(self) -> tuple[str, ...]:
        return tuple(node.key[0] for node in self.nodes)

    def cone(self, start: int, *, bounds: frozenset[int]) -> set[int]:
        """`start` and all that it takes to make it, where the results of `bounds` are there."""
        found, waiting = {start}, [start]
        while waiting:
            for read in self.nodes[waiting.pop()].reads:
                if read not in found and read not in bounds:
                    found.add(read)
                    waiting.append(read)
        return found


def trace(run: Callable[[], Any], module: nn.Module) -> Graph:
    """Runs a call of `module` on fake tensors, in the caller's grad mode."""
    tracer = _Tracer()

    hooks = torch.autograd.graph.saved_tensors_hooks(tracer.save, tracer.saved_tensor)
    try:
        with tracer.names_of(module), hooks, tracer:
            run()
    finally:
        tracer.let_go()
    return Graph(tuple(tracer.nodes), frozenset(tracer.saved))


@contextmanager
def faked(module: nn.Module, leaves: list[Any]) -> Iterator[tuple[list[Any], list[torch.Tensor]]]:
    """Arguments and parameters of a module as fake tensors, in the mode under way or one for the
    purpose. If no argument takes a gradient, the first that can does."""
    random = torch.random.fork_rng(devices=[])
    with faking(numbers=True), random, _fake_parameters(module) as weights:
        yield _fake_inputs(leaves), weights


def _fake_inputs(leaves: list[Any]) -> list[Any]:
    tensors = tensors_in(leaves)
    floats = [tensor for tensor in tensors if tensor.is_floating_point()]
    wanted = {id(tensor) for tensor in tensors if tensor.requires_grad} or set(map(id, floats[:1]))

    def fake(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor) or not leaf.is_floating_point():
            return leaf
        made = torch.empty_strided(leaf.shape, leaf.stride(), dtype=leaf.dtype, device=_place(leaf))
        return made.requires_grad_(id(leaf) in wanted)

    return [fake(leaf) for leaf in leaves]


@contextmanager
def _fake_parameters(module: nn.Module) -> Iterator[list[torch.Tensor]]:
    """Fake tensors in the place of all parameters that are not fake already."""
    places = [
        (child, attribute, parameter)
        for child in module.modules()
        for attribute, parameter in child._parameters.items()
        if parameter is not None
    ]
    made: dict[int, torch.Tensor] = {}
    for _, _, old in places:
        if id(old) not in made:
            new: torch.Tensor = old
            if not isinstance(old, FakeTensor):
                new = torch.empty(old.shape, dtype=old.dtype, device=_place(old))
            made[id(old)] = new.requires_grad_(old.requires_grad)
    try:
        for child, attribute, old in places:
            child._parameters[attribute] = made[id(old)]  # type: ignore[assignment]
        yield list(made.values())
    finally:
        for child, attribute, old in places:
            child._parameters[attribute] = old


def _place(tensor: torch.Tensor) -> torch.device:
    """What has a shape only stands for something on the CPU."""
    return CPU if tensor.device.type == "meta" else tensor.device


class _Tracer(TorchDispatchMode):
    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()
        self.nodes: list[Node] = []
        self.saved: set[int] = set()
        self._counter = Counter()
        self._maker: dict[int, int | None] = {}  # by storage: node of its value, None from outside
        self._alive: list[torch.Tensor] = []  # so that no storage gets the address of another
        self._modules: list[str] = []

    def let_go(self) -> None:
        """The hooks in the graph of the call hold the tracer. Tensors of that graph in the tracer,
        or in the hooks, would close a circle through autograd, where Python's collector does not
        see it."""
        self._alive.clear()

    def save(self, tensor: torch.Tensor) -> int:
        """As a hook of autograd: the number of the tensor stands for it."""
        maker = self._maker.get(storage_key(tensor))
        if maker is not None:
            self.saved.add(maker)
        self._alive.append(tensor)
        return len(self._alive) - 1

    def saved_tensor(self, number: int) -> torch.Tensor:
        return self._alive[number]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not counts(func):
            return func(*args, **kwargs)
        given = tensors_in(args, kwargs)
        makers = [self._maker.setdefault(storage_key(tensor), None) for tensor in given]
        changed = written(func, args, kwargs)
        outside = any(self._maker[storage_key(tensor)] is None for tensor in changed)
        out = func(*args, **kwargs)
        results = tensors_in(out)
        self._alive += [*given, *results]
        fresh = {storage_key(t): t for t in results if storage_key(t) not in self._maker}
        made = {**fresh, **{storage_key(t): t for t in changed}}
        flops, context = _flops(func, args, kwargs, out)
        index, needs = len(self.nodes), reads_values(func)
        self.nodes.append(
            Node(
                index=index,
                key=self._counter.key(func),
                module=self._modules[-1] if self._modules else "",
                reads=tuple({maker for maker in makers if maker is not None} if needs else ()),
                bytes=sum(tensor.untyped_storage().nbytes() for tensor in made.values()),
                moved_bytes=_bytes([*(given if needs else ()), *results]),
                flops=flops,
                context_flops=context,
                must_run=outside or not _replaceable(func, args, kwargs, out, fresh),
                storable=not outside and storable(func, args, kwargs, out),
            )
        )
        self._maker.update(dict.fromkeys(made, index))
        return out

    @contextmanager
    def names_of(self, module: nn.Module) -> Iterator[None]:
        """Follows which submodule is running."""

        def leave(*_: Any) -> None:
            self._modules.pop()

        handles = []
        for name, child in module.named_modules():
            handles += [
                child.register_forward_pre_hook(lambda *_, name=name: self._modules.append(name)),
                child.register_forward_hook(leave),
            ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()


def _bytes(tensors: list[torch.Tensor]) -> int:
    return sum(tensor.numel() * tensor.itemsize for tensor in tensors)


def _replaceable(func: Any, args: Any, kwargs: Any, out: Any, fresh: dict[int, Any]) -> bool:
    """Whether tensors without values could stand for the results where nobody needs those."""
    if getattr(func, "_schema", None) is None or kwargs.get("generator") is not None:
        return False
    if any(not isinstance(leaf, torch.Tensor | None) for leaf in pytree.tree_leaves(out)):
        return False
    changed, results = written(func, args, kwargs), tensors_in(out)
    if changed:
        return len(changed) == 1 and out is changed[0] and out is args[0]
    return 0 < len(results) == len(fresh)


def _flops(func: Any, args: Sequence[Any], kwargs: Any, out: Any) -> tuple[float, float]:
    """FLOPs, and the part of them that grows with the length of the sequence."""
    if not tensors_in(out):
        return 0.0, 0.0
    schema = getattr(func, "_schema", None)
    names = [argument.name for argument in schema.arguments] if schema is not None else []
    if names[:3] == ["query", "key", "value"]:
        query, key, value = (tensor.shape for tensor in args[:3])
        pairs = float(query.numel() // query[-1] * key[-2])
        causal = kwargs.get("is_causal", False)
        if "is_causal" in names and names.index("is_causal") < len(args):
            causal = args[names.index("is_causal")]
        flops = 2.0 * pairs * (key[-1] + value[-1]) / (2 if causal else 1)
        return flops, flops
    if str(func).startswith("aten._grouped_mm"):  # rows by groups: experts
        return 2.0 * out.numel() * args[0].shape[-1], 0.0
    formula = flop_registry.get(getattr(func, "_overloadpacket", None))
    return (float(formula(*args, **kwargs, out_val=out)) if formula else 0.0), 0.0
