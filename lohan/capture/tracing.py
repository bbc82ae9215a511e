"""One call of a module as a graph of operations, found on fake tensors.

Values are storages between two changes: an operation in place reads the old value of a storage and
makes a new one, and a view is the value that it looks at.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils import _pytree as pytree
from torch.utils.flop_counter import flop_registry

from lohan.capture.call_context import collecting, swapped
from lohan.capture.fake import CPU, UNKNOWN, DispatchMode, Known, faking
from lohan.capture.recompute import Block, SavedCall
from lohan.capture.selective_checkpoint import (
    Counter,
    OpKey,
    SavePlan,
    counts,
    reads_values,
    replaceable,
    storable,
    storage_key,
    tensors_in,
    written,
)
from lohan.errors import ModelError
from lohan.model.shapes import Activation, BlockShape

# One name for all kernels of it: which one runs depends on the device, the mask and the dtype.
_ATTENTION = re.compile(r"_?scaled_dot_product_\w*attention\w*")


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
    must_run: bool  # does more than make its results, or they are lengths, which Python may read
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
    """Run a call of `module` on fake tensors, in the caller's grad mode, and return its graph."""
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
    """Provide the arguments and parameters of a module as fake tensors.

    They belong to the current fake mode, or to a new one. If no argument takes a gradient, the
    first one that can is made to.
    """
    random = torch.random.fork_rng(devices=[])
    with faking(Known.NUMBERS), random, _fake_parameters(module) as weights:
        yield _fake_inputs(leaves), weights


def _fake_inputs(leaves: list[Any]) -> list[Any]:
    tensors = tensors_in(leaves)
    floats = [tensor for tensor in tensors if tensor.is_floating_point()]
    wanted = {id(tensor) for tensor in tensors if tensor.requires_grad} or set(map(id, floats[:1]))

    def fake(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor) or not leaf.is_floating_point():
            return leaf
        made = torch.empty_strided(
            leaf.shape, leaf.stride(), dtype=leaf.dtype, device=_device_of(leaf)
        )
        return made.requires_grad_(id(leaf) in wanted)

    return [fake(leaf) for leaf in leaves]


@contextmanager
def _fake_parameters(module: nn.Module) -> Iterator[list[torch.Tensor]]:
    """Fake tensors in the place of all parameters that are not fake already."""
    parameters = [
        (child._parameters, attribute, parameter)
        for child in module.modules()
        for attribute, parameter in child._parameters.items()
        if parameter is not None
    ]
    made: dict[int, nn.Parameter] = {}
    for _, _, old in parameters:
        if id(old) not in made:
            new: torch.Tensor = old
            if not isinstance(old, FakeTensor):
                new = torch.empty(old.shape, dtype=old.dtype, device=_device_of(old))
            made[id(old)] = nn.Parameter(new, requires_grad=old.requires_grad)
    with swapped((tensors, attribute, made[id(old)]) for tensors, attribute, old in parameters):
        yield list(made.values())


def _device_of(tensor: torch.Tensor) -> torch.device:
    """Return the device of a tensor; a meta tensor represents one on the CPU."""
    return CPU if tensor.device.type == "meta" else tensor.device


class _Tracer(DispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.nodes: list[Node] = []
        self.saved: set[int] = set()
        self._counter = Counter()
        self._maker: dict[int, int | None] = {}  # by storage: node of its value, None from outside
        self._alive: list[torch.Tensor] = []  # so that no storage gets the address of another
        self._modules: list[str] = []

    def let_go(self) -> None:
        """Release the tensors of the traced call.

        The hooks in the graph of the call refer to the tracer. References from the tracer
        back to tensors of that graph would form a cycle through autograd that Python's
        garbage collector cannot see.
        """
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
        counted = bool(results) and not any(t.is_floating_point() for t in (*given, *results))
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
                must_run=outside or counted or not replaceable(func, args, kwargs, out, len(fresh)),
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


# -- What a block could keep for backward, class by class, and what each class is worth ------------
#
# Found from one traced run of the real module on fake tensors, with nothing known of its names.
# What autograd saves must be there again in backward: kept, or made from other saved results. So
# each saved result has the operations between it and those others to itself, and keeping it saves
# their work. Results that share a matrix product belong together. Where a smaller tensor on the
# way holds all the expensive work (a 16-bit sum whose 32-bit copy is saved), that one is a class
# of its own.


FLOPS_PER_BYTE = 1.0  # work of an operation without FLOPs of its own, per byte that it moves


@dataclass(frozen=True)
class KeepClass:
    """A class of results, with its operations. Bytes and FLOPs are those of the traced slice."""

    activation: Activation
    keys: frozenset[OpKey]
    bytes: int
    flops: float

    @property
    def name(self) -> str:
        return self.activation.name

    @property
    def benefit(self) -> float:
        """FLOPs saved per byte kept."""
        return self.flops / self.bytes


@dataclass(frozen=True)
class Inventory:
    """`shape.activations` stand in forward's order, `classes` by falling benefit."""

    shape: BlockShape
    classes: tuple[KeepClass, ...]
    tokens: int
    context: int  # of them in a sequence
    graph: Graph
    _bytes: dict[frozenset[str], int] = field(default_factory=dict, compare=False, repr=False)

    @property
    def keys(self) -> dict[str, frozenset[OpKey]]:
        return {part.name: part.keys for part in self.classes}

    def save_plan(self, names: Iterable[str]) -> SavePlan:
        """How to keep these classes: nothing is stored that no operation and no gradient needs."""
        stored, runs = self._needed(names)
        nodes = self.graph.nodes
        skip = (node for node in nodes if node.index not in stored and node.index not in runs)
        return SavePlan(
            keep=frozenset(nodes[index].key for index in stored),
            skip=frozenset(node.key for node in skip),
            ops=self.graph.ops,
        )

    def kept_bytes(self, names: Iterable[str]) -> int:
        """Bytes that a slice of the traced size holds with that save plan."""
        chosen = frozenset(names)
        if chosen not in self._bytes:
            nodes = self.graph.nodes
            self._bytes[chosen] = sum(nodes[index].bytes for index in self._needed(chosen)[0])
        return self._bytes[chosen]

    def _needed(self, names: Iterable[str]) -> tuple[set[int], set[int]]:
        """Nodes whose results are taken from what was kept, and nodes that run again."""
        keys, names = self.keys, list(names)
        if unknown := [name for name in names if name not in keys]:
            raise ModelError(
                f"block {self.shape.name} has no activations {unknown[0]!r}; it has "
                + ", ".join(keys)
            )
        wanted = {key for name in names for key in keys[name]}
        stored: set[int] = set()
        runs: set[int] = set()
        waiting = [*self.graph.saved, *(n.index for n in self.graph.nodes if n.must_run)]
        while waiting:
            node = self.graph.nodes[waiting.pop()]
            if node.index in stored or node.index in runs:
                continue
            if node.key in wanted:
                stored.add(node.index)
            else:
                runs.add(node.index)
                waiting.extend(node.reads)
        return stored, runs


def inventory(
    module: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any] | None = None,
    *,
    name: str = "",
    forward: Callable[..., Any] | None = None,
    flops_per_byte: float = FLOPS_PER_BYTE,
) -> Inventory:
    """Trace one slice of a call and return what it could keep.

    The arguments give the shapes and say which tensors take a gradient; if none does, the first
    one is used. `forward` replaces the module's own forward.
    """
    run = forward or module.__call__
    leaves, spec = pytree.tree_flatten((args, kwargs or {}))
    with collecting(), faked(module, leaves) as (inputs, weights):
        a, k = pytree.tree_unflatten(inputs, spec)
        with torch.enable_grad():
            graph = trace(lambda: run(*a, **k), module)
    block = _Block(graph, tensors_in(inputs), weights, flops_per_byte)
    return block.inventory(name or type(module).__name__)


def kind_of_call(module: nn.Module, arguments: Any) -> Hashable:
    """Return a key that is equal for calls with the same operations on the same shapes."""
    leaves = [*module.parameters(), *pytree.tree_leaves(arguments)]
    return type(module), str(module), tuple(map(_shape, leaves))


class Inventories:
    """Inventories of calls; equal modules with inputs of equal shapes share one."""

    def __init__(self) -> None:
        self._known: dict[Any, Inventory] = {}

    def of(
        self,
        module: nn.Module,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        *,
        forward: Callable[..., Any],
    ) -> Inventory:
        kind = kind_of_call(module, (args, kwargs))
        if kind not in self._known:
            self._known[kind] = inventory(module, args, kwargs, forward=forward)
        return self._known[kind]


def shapes_together(
    found: Mapping[str, Inventory], batch: tuple[int, ...]
) -> tuple[int, dict[str, BlockShape]]:
    """Return the tokens per sample, and the shapes of all blocks relative to that count.

    Blocks of one model may see different numbers of tokens; the largest one counts. `batch` is
    the shape of the model's input: samples and, if there are no blocks, tokens.
    """
    most = max((one.tokens for one in found.values()), default=math.prod(batch[:2]))
    seq = max(1, most // batch[0])
    shapes = {}
    for name, one in found.items():
        more = one.tokens / (batch[0] * seq)
        shapes[name] = one.shape.scaled(more, context=more * one.context / seq)
    return seq, shapes


def _shape(leaf: Any) -> Any:
    if isinstance(leaf, torch.Tensor):
        return tuple(leaf.shape), leaf.dtype, leaf.requires_grad
    return leaf if isinstance(leaf, (int, float, bool, str, type(None))) else type(leaf)


@dataclass
class _Part:
    """Results to be kept together and the operations that need not run again then."""

    saved: list[Node]
    saved_work: set[int]


class _Block:
    """The classes of a traced graph."""

    def __init__(
        self,
        graph: Graph,
        inputs: list[torch.Tensor],
        weights: list[torch.Tensor],
        flops_per_byte: float,
    ) -> None:
        self._graph, self._nodes = graph, graph.nodes
        self._weights, self._rate = weights, flops_per_byte
        taking = [tensor for tensor in inputs if tensor.requires_grad]
        self._first = next((t for t in taking if t.ndim >= 2), taking[0])
        self._tokens = max(1, self._first.numel() // self._first.shape[-1])
        self._context = self._first.shape[-2] if self._first.ndim >= 2 else 1
        self._input_bytes = sum(
            storage.nbytes()
            for storage in {storage_key(t): t.untyped_storage() for t in taking}.values()
        )

    def inventory(self, name: str) -> Inventory:
        classes = self._classes(self._merged(self._parts()))
        everything = range(len(self._nodes))
        plain, context = self._work(everything)
        shape = BlockShape(
            name=name,
            parameters=sum(weight.numel() for weight in self._weights),
            input_elements=self._per_token(self._input_bytes),
            flops=plain / self._tokens,
            flops_per_context=context / self._tokens / self._context,
            activations=tuple(part.activation for part in classes),
        )
        ordered = sorted(classes, key=lambda part: -part.benefit)
        return Inventory(shape, tuple(ordered), self._tokens, self._context, self._graph)

    def _parts(self) -> list[_Part]:
        """One for each group of saved results that share expensive work."""
        saved = self._graph.saved
        cones = {root: self._graph.cone(root, bounds=saved - {root}) for root in sorted(saved)}
        groups: list[list[int]] = []
        for root, cone in cones.items():
            heavy = self._heavy(cone)
            near = [group for group in groups if any(heavy & cones[other] for other in group)]
            groups = [group for group in groups if group not in near]
            groups.append([*(member for group in near for member in group), root])
        parts = []
        for group in sorted(groups, key=min):
            work = set().union(*(cones[root] for root in group))
            others = (cones[root] for root in saved if root not in group)
            parts += self._cut(group, work, shared=set().union(*others))
        return [part for part in parts if all(node.storable for node in part.saved)]

    def _cut(self, roots: list[int], work: set[int], *, shared: set[int]) -> list[_Part]:
        """Return the saved results as one part, or as two parts.

        Two parts are made if a smaller one holds the expensive work.
        """
        saved = [self._nodes[root] for root in sorted(roots)]
        heavy, own = self._heavy(work), work - shared
        smaller = [
            node
            for node in (self._nodes[index] for index in sorted(work))
            if node.storable
            and node.bytes < sum(root.bytes for root in saved)
            and self._holds(node.index, roots, heavy)
        ]
        if not heavy or not smaller:
            return [_Part(saved, own)]
        cheapest = min(smaller, key=lambda node: (node.bytes, -node.index))
        bounds = self._graph.saved - {cheapest.index}
        before = self._graph.cone(cheapest.index, bounds=bounds) & own
        return [_Part([cheapest], before), _Part(saved, own - before)]

    def _holds(self, index: int, roots: list[int], heavy: set[int]) -> bool:
        """Whether no root needs an expensive operation if the results of this one are there."""
        if index in roots:
            return False
        bounds = self._graph.saved | {index}
        cones = (self._graph.cone(root, bounds=bounds - {root}) for root in roots)
        return not any(cone & heavy for cone in cones)

    def _merged(self, parts: list[_Part]) -> list[_Part]:
        """Parts that are alike in operations, bytes and work become one."""
        alike: dict[Any, _Part] = {}
        for part in parts:
            ops = tuple(node.op for node in part.saved)
            size = sum(node.bytes for node in part.saved)
            work = sorted((self._nodes[i].op, self._nodes[i].moved_bytes) for i in part.saved_work)
            known = alike.setdefault((ops, size, tuple(work)), _Part([], set()))
            known.saved += part.saved
            known.saved_work |= part.saved_work
        return [part for part in alike.values() if sum(node.bytes for node in part.saved)]

    def _classes(self, parts: list[_Part]) -> list[KeepClass]:
        made: dict[str, KeepClass] = {}
        for part in parts:
            name = label = self._label(part)
            count = 1
            while name in made:
                count += 1
                name = f"{label} {count}"
            size = sum(node.bytes for node in part.saved)
            plain, context = self._work(part.saved_work)
            activation = Activation(
                name,
                self._per_token(size),
                plain / self._tokens,
                context / self._tokens / self._context,
            )
            keys = frozenset(node.key for node in part.saved)
            made[name] = KeepClass(activation, keys, size, plain + context)
        return list(made.values())

    def _label(self, part: _Part) -> str:
        """Return the operation and the module in which its most expensive work is done."""
        heavy = [self._nodes[index] for index in sorted(self._heavy(part.saved_work))]
        modules = dict.fromkeys(node.module.rpartition(".")[2] for node in heavy or part.saved)
        ops = dict.fromkeys(_ATTENTION.sub("attention", node.op) for node in part.saved)
        return f"{'+'.join(ops)} {'+'.join(filter(None, modules))}".strip()

    def _work(self, indices: Iterable[int]) -> tuple[float, float]:
        """FLOPs that do not grow with the sequence, and those that do."""
        nodes = [self._nodes[index] for index in indices]
        context = sum(node.context_flops for node in nodes)
        other = sum(node.flops or self._rate * node.moved_bytes for node in nodes)
        return other - context, context

    def _heavy(self, indices: Iterable[int]) -> set[int]:
        return {index for index in indices if self._nodes[index].flops}

    def _per_token(self, size: int) -> float:
        return size / self._first.itemsize / self._tokens


# -- Which results each call keeps, found when a block runs for the first time ---------------------
#
# A plan names classes of activations; which operations make them is known only with the real
# inputs, since models choose their operations by them (a mask or none, say).


MORE_KEPT = 1.05  # than planned: real calls may have a mask that fake ones have not


class SavePlans:
    """The save plans of all sites.

    `saved_classes` holds the classes that are saved, by number of the site. `planned_bytes`
    holds what they take in the call that was planned.
    """

    def __init__(
        self, saved_classes: Mapping[int, frozenset[str]], planned_bytes: Mapping[int, int]
    ) -> None:
        self._saved_classes, self._planned_bytes = saved_classes, planned_bytes
        self._inventories = Inventories()
        self._made: dict[tuple[Any, ...], SavePlan | None] = {}

    def of(self, block: Block, call: SavedCall, part: slice) -> SavePlan | None:
        """Return the save plan of one slice of a call, or None if nothing is kept.

        Nothing is kept of a call that would keep more than was planned, because there is no
        memory for it.
        """
        classes = self._saved_classes.get(block.number)
        if not classes:
            return None
        rows = part.stop - part.start
        key = (block.number, rows, *(tuple(t.shape) for t in call.tensors))
        if key not in self._made:
            _, args, kwargs = call.restore(part, grad=True)
            self._made[key] = None
            with block.state.preserved(), suppress(*UNKNOWN):  # it decides by values: recomputed
                found = self._inventories.of(block.module, args, kwargs, forward=block.original)
                names = classes & found.keys.keys()
                most = self._planned_bytes.get(block.number, math.inf)
                fits = found.kept_bytes(names) * call.batch <= MORE_KEPT * most * rows
                self._made[key] = found.save_plan(names) if names and fits else None
        return self._made[key]
