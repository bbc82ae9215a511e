"""The graph of operations of one call of a module, recorded on fake tensors.

A value is the content of a storage between two changes: an in-place operation reads the old value
of a storage and gives it a new value. A view has the value of its base.
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

from lohan.capture.fake import CPU, UNKNOWN, DispatchMode, KnownValues, faking
from lohan.capture.recompute import Block
from lohan.capture.saved_call import SavedCall, collecting, swapped
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
from lohan.capture.workspaces import recurrent_workspace
from lohan.errors import ModelError
from lohan.model.shapes import Activation, BlockShape
from lohan.model.workload import OFFLOAD_ALIGN
from lohan.util.units import align_up

# All attention kernels get one name, since device, mask and dtype determine which one runs.
_ATTENTION = re.compile(r"_?scaled_dot_product_\w*attention\w*")


@dataclass(frozen=True)
class Node:
    """An operation. `reads` are the nodes that computed the values it needs; views are resolved."""

    index: int
    key: OpKey
    module: str  # the innermost module, relative to the traced one
    reads: tuple[int, ...]
    bytes: int  # bytes of the results
    moved_bytes: int  # bytes that are read and written
    flops: float  # FLOPs of matrix products, attention and convolutions
    # The part of `flops` that is spent in attention and grows with the length of the sequence.
    context_flops: float
    # True if the operation has other effects than its results, or if its results may be lengths
    # that Python reads.
    must_run: bool
    storable: bool

    @property
    def op(self) -> str:
        return self.key[0].split(".")[1].strip("_")


@dataclass(frozen=True)
class Graph:
    nodes: tuple[Node, ...]
    saved: frozenset[int]  # nodes that computed a value that autograd saves

    @property
    def ops(self) -> tuple[str, ...]:
        return tuple(node.key[0] for node in self.nodes)

    def cone(self, start: int, *, bounds: frozenset[int]) -> set[int]:
        """Return the nodes that have to run to compute `start`, including `start`.

        The results of the nodes in `bounds` are given, so these nodes need not run.
        """
        cone, waiting = {start}, [start]
        while waiting:
            for read in self.nodes[waiting.pop()].reads:
                if read not in cone and read not in bounds:
                    cone.add(read)
                    waiting.append(read)
        return cone


def trace(run: Callable[[], Any], module: nn.Module) -> Graph:
    """Run a call of `module` on fake tensors, in the caller's grad mode, and return its graph."""
    tracer = _Tracer()

    hooks = torch.autograd.graph.saved_tensors_hooks(tracer.save, tracer.saved_tensor)
    try:
        with tracer.names_of(module), hooks, tracer:
            run()
    finally:
        tracer.release()
    return Graph(tuple(tracer.nodes), frozenset(tracer.saved))


@contextmanager
def faked(module: nn.Module, leaves: list[Any]) -> Iterator[tuple[list[Any], list[torch.Tensor]]]:
    """Provide the arguments and parameters of a module as fake tensors.

    They belong to the active fake mode, or to a new one if none is active. If no argument requires
    grad, the first floating-point argument does.
    """
    random = torch.random.fork_rng(devices=[])
    with faking(KnownValues.NUMBERS), random, _fake_parameters(module) as weights:
        yield _fake_inputs(leaves), weights


def _fake_inputs(leaves: list[Any]) -> list[Any]:
    tensors = tensors_in(leaves)
    floats = [tensor for tensor in tensors if tensor.is_floating_point()]
    wanted = {id(tensor) for tensor in tensors if tensor.requires_grad} or set(map(id, floats[:1]))

    def fake(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor) or not leaf.is_floating_point():
            return leaf
        tensor = torch.empty_strided(
            leaf.shape, leaf.stride(), dtype=leaf.dtype, device=_device_of(leaf)
        )
        return tensor.requires_grad_(id(leaf) in wanted)

    return [fake(leaf) for leaf in leaves]


@contextmanager
def _fake_parameters(module: nn.Module) -> Iterator[list[torch.Tensor]]:
    """Temporarily replace all parameters that are not fake tensors by fake ones."""
    parameters = [
        (child._parameters, attribute, parameter)
        for child in module.modules()
        for attribute, parameter in child._parameters.items()
        if parameter is not None
    ]
    replacements: dict[int, nn.Parameter] = {}
    for _, _, old in parameters:
        if id(old) not in replacements:
            new: torch.Tensor = old
            if not isinstance(old, FakeTensor):
                new = torch.empty(old.shape, dtype=old.dtype, device=_device_of(old))
            replacements[id(old)] = nn.Parameter(new, requires_grad=old.requires_grad)
    with swapped(
        (tensors, attribute, replacements[id(old)]) for tensors, attribute, old in parameters
    ):
        yield list(replacements.values())


def _device_of(tensor: torch.Tensor) -> torch.device:
    """Return the device of a tensor; a meta tensor represents one on the CPU."""
    return CPU if tensor.device.type == "meta" else tensor.device


class _Tracer(DispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.nodes: list[Node] = []
        self.saved: set[int] = set()
        self._counter = Counter()
        # The node that computed the value of each storage; None for a value from outside.
        self._maker: dict[int, int | None] = {}
        self._alive: list[torch.Tensor] = []  # keeps addresses of storages from being reused
        self._modules: list[str] = []

    def release(self) -> None:
        """Release the tensors of the traced call.

        The hooks in the graph of the call refer to the tracer. References from the tracer
        back to tensors of that graph would form a cycle through autograd that Python's
        garbage collector cannot see.
        """
        self._alive.clear()

    def save(self, tensor: torch.Tensor) -> int:
        """Record a tensor that autograd saves, and return its number, which replaces it."""
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
        arguments = tensors_in(args, kwargs)
        makers = [self._maker.setdefault(storage_key(tensor), None) for tensor in arguments]
        changed = written(func, args, kwargs)
        outside = any(self._maker[storage_key(tensor)] is None for tensor in changed)
        out = func(*args, **kwargs)
        results = tensors_in(out)
        self._alive += [*arguments, *results]
        fresh = {storage_key(t): t for t in results if storage_key(t) not in self._maker}
        values = {**fresh, **{storage_key(t): t for t in changed}}
        flops, context = _flops(func, args, kwargs, out)
        index, needs = len(self.nodes), reads_values(func)
        counted = bool(results) and not any(t.is_floating_point() for t in (*arguments, *results))
        self.nodes.append(
            Node(
                index=index,
                key=self._counter.key(func),
                module=self._modules[-1] if self._modules else "",
                reads=tuple({maker for maker in makers if maker is not None} if needs else ()),
                bytes=sum(tensor.untyped_storage().nbytes() for tensor in values.values())
                + recurrent_workspace(func, args, out),
                moved_bytes=_bytes([*(arguments if needs else ()), *results]),
                flops=flops,
                context_flops=context,
                must_run=outside or counted or not replaceable(func, args, kwargs, out, len(fresh)),
                storable=not outside and storable(func, args, kwargs, out),
            )
        )
        self._maker.update(dict.fromkeys(values, index))
        return out

    @contextmanager
    def names_of(self, module: nn.Module) -> Iterator[None]:
        """Record which submodule is running."""

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
    """Return the FLOPs, and the part of them that grows with the length of the sequence."""
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
    # The rows are divided into groups, one per expert.
    if str(func).startswith("aten._grouped_mm"):
        return 2.0 * out.numel() * args[0].shape[-1], 0.0
    formula = flop_registry.get(getattr(func, "_overloadpacket", None))
    return (float(formula(*args, **kwargs, out_val=out)) if formula else 0.0), 0.0


# -- Classes of activations that a block could keep for backward, and their benefits ---------------
#
# Classes are derived from one traced run of the real module on fake tensors, without names of
# modules. What autograd saves must exist again in backward: kept, or computed from other saved
# results. So each saved result has a set of operations between it and the other saved results, and
# keeping it saves their work. Results that share a matrix product belong to one class. If a smaller
# tensor between them contains all expensive work (a 16-bit sum whose 32-bit copy is saved), it
# becomes a class by itself.


FLOPS_PER_BYTE = 1.0  # Assumed work per byte moved of an operation for which no FLOPs are counted.


@dataclass(frozen=True)
class KeepClass:
    """A class of results to keep, and the keys of the operations that compute them.

    Bytes and FLOPs are those of the traced slice.
    """

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
    """The classes of results that a block could keep, with its shape and graph.

    `shape.activations` are in the order of forward, `classes` are sorted by falling benefit.
    """

    shape: BlockShape
    classes: tuple[KeepClass, ...]
    tokens: int
    context: int  # tokens in a sequence
    graph: Graph
    _bytes: dict[frozenset[str], int] = field(default_factory=dict, compare=False, repr=False)

    @property
    def keys(self) -> dict[str, frozenset[OpKey]]:
        return {part.name: part.keys for part in self.classes}

    def save_plan(self, names: Iterable[str]) -> SavePlan:
        """Return the plan that keeps the classes `names`, without results that nothing needs."""
        stored, runs = self._needed(names)
        nodes = self.graph.nodes
        skip = (node for node in nodes if node.index not in stored and node.index not in runs)
        return SavePlan(
            keep=frozenset(nodes[index].key for index in stored),
            skip=frozenset(node.key for node in skip),
            ops=self.graph.ops,
        )

    def kept_bytes(self, names: Iterable[str]) -> int:
        """Return the bytes that the classes `names` keep in a slice of the traced size."""
        chosen = frozenset(names)
        if chosen not in self._bytes:
            nodes = self.graph.nodes
            self._bytes[chosen] = sum(nodes[index].bytes for index in self._needed(chosen)[0])
        return self._bytes[chosen]

    def offloaded_bytes(self, names: Iterable[str], share: float) -> int:
        """Return the bytes that a slice offloads if it keeps the activations called `names`.

        `share` is the size of the slice relative to the traced slice.
        """
        nodes = self.graph.nodes
        sizes = (math.ceil(share * nodes[index].bytes) for index in self._needed(names)[0])
        return sum(align_up(size, OFFLOAD_ALIGN) for size in sizes)

    def _needed(self, names: Iterable[str]) -> tuple[set[int], set[int]]:
        """Return the nodes whose results are kept, and the nodes that run again.

        `names` are the classes that are kept.
        """
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

    The arguments give the shapes and show which tensors require grad. If none does, the first
    floating-point tensor does. `forward` replaces the module's own forward.
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
    """Inventories of calls. Equal modules with inputs of equal shapes share one."""

    def __init__(self) -> None:
        self._by_kind: dict[Any, Inventory] = {}

    def of(
        self,
        module: nn.Module,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        *,
        forward: Callable[..., Any],
    ) -> Inventory:
        kind = kind_of_call(module, (args, kwargs))
        if kind not in self._by_kind:
            self._by_kind[kind] = inventory(module, args, kwargs, forward=forward)
        return self._by_kind[kind]


def shapes_together(
    inventories: Mapping[str, Inventory], batch: tuple[int, ...]
) -> tuple[int, dict[str, BlockShape]]:
    """Return the tokens per sample, and the shapes of all blocks relative to that count.

    If the blocks of a model process different numbers of tokens, the largest number is returned.
    `batch` is the shape of the model's input: samples and, if there are no blocks, tokens.
    """
    most = max((one.tokens for one in inventories.values()), default=math.prod(batch[:2]))
    seq = max(1, most // batch[0])
    shapes = {}
    for name, one in inventories.items():
        more = one.tokens / (batch[0] * seq)
        shapes[name] = one.shape.scaled(more, context=more * one.context / seq)
    return seq, shapes


def _shape(leaf: Any) -> Any:
    if isinstance(leaf, torch.Tensor):
        return tuple(leaf.shape), leaf.dtype, leaf.requires_grad
    return leaf if isinstance(leaf, (int, float, bool, str, type(None))) else type(leaf)


@dataclass
class _Part:
    """Results to be kept together, and the operations that then need not run again."""

    saved: list[Node]
    saved_work: set[int]


class _Block:
    """A traced graph that is divided into classes of activations."""

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
        """Return one part for each group of saved results that share expensive work."""
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
        """Return the saved results `roots` as one part, or as two if there is a cheaper result.

        A cheaper result has fewer bytes than all roots, and keeping it saves the expensive work of
        all of them. It is the first part.
        """
        saved = [self._nodes[root] for root in sorted(roots)]
        heavy, exclusive = self._heavy(work), work - shared
        smaller = [
            node
            for node in (self._nodes[index] for index in sorted(work))
            if node.storable
            and node.bytes < sum(root.bytes for root in saved)
            and self._holds(node.index, roots, heavy)
        ]
        if not heavy or not smaller:
            return [_Part(saved, exclusive)]
        cheapest = min(smaller, key=lambda node: (node.bytes, -node.index))
        bounds = self._graph.saved - {cheapest.index}
        before = self._graph.cone(cheapest.index, bounds=bounds) & exclusive
        return [_Part([cheapest], before), _Part(saved, exclusive - before)]

    def _holds(self, index: int, roots: list[int], heavy: set[int]) -> bool:
        """Return whether keeping the results of a node saves the work `heavy` of all roots."""
        if index in roots:
            return False
        bounds = self._graph.saved | {index}
        cones = (self._graph.cone(root, bounds=bounds - {root}) for root in roots)
        return not any(cone & heavy for cone in cones)

    def _merged(self, parts: list[_Part]) -> list[_Part]:
        """Return the parts, with those merged that have the same operations, bytes and work."""
        by_content: dict[Any, _Part] = {}
        for part in parts:
            ops = tuple(node.op for node in part.saved)
            size = sum(node.bytes for node in part.saved)
            work = sorted((self._nodes[i].op, self._nodes[i].moved_bytes) for i in part.saved_work)
            merged = by_content.setdefault((ops, size, tuple(work)), _Part([], set()))
            merged.saved += part.saved
            merged.saved_work |= part.saved_work
        return [part for part in by_content.values() if sum(node.bytes for node in part.saved)]

    def _classes(self, parts: list[_Part]) -> list[KeepClass]:
        classes: dict[str, KeepClass] = {}
        for part in parts:
            name = label = self._label(part)
            count = 1
            while name in classes:
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
            classes[name] = KeepClass(activation, keys, size, plain + context)
        return list(classes.values())

    def _label(self, part: _Part) -> str:
        """Return a name made of the operations of a part and the modules of its main work."""
        heavy = [self._nodes[index] for index in sorted(self._heavy(part.saved_work))]
        modules = dict.fromkeys(node.module.rpartition(".")[2] for node in heavy or part.saved)
        ops = dict.fromkeys(_ATTENTION.sub("attention", node.op) for node in part.saved)
        return f"{'+'.join(ops)} {'+'.join(filter(None, modules))}".strip()

    def _work(self, indices: Iterable[int]) -> tuple[float, float]:
        """Return the FLOPs of nodes: those independent of the sequence length, and the others."""
        nodes = [self._nodes[index] for index in indices]
        context = sum(node.context_flops for node in nodes)
        other = sum(node.flops or self._rate * node.moved_bytes for node in nodes)
        return other - context, context

    def _heavy(self, indices: Iterable[int]) -> set[int]:
        return {index for index in indices if self._nodes[index].flops}

    def _per_token(self, size: int) -> float:
        return size / self._first.itemsize / self._tokens


# -- The results that each call keeps, determined when a block runs for the first time -------------
#
# A plan names classes of activations. The operations that compute them depend on the real inputs,
# because models choose their operations by them, for example with or without a mask.


# A call may keep this many times the planned bytes, since only real calls may have a mask.
KEPT_TOLERANCE = 1.05


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
        self._save_plans: dict[tuple[Any, ...], SavePlan | None] = {}

    def of(self, block: Block, call: SavedCall, part: slice) -> SavePlan | None:
        """Return the save plan of one slice of a call, or None if nothing is kept.

        A call that would keep more than was planned keeps nothing, because there is no memory for
        its results.
        """
        classes = self._saved_classes.get(block.number)
        if not classes:
            return None
        rows = part.stop - part.start
        key = (block.number, rows, *(tuple(t.shape) for t in call.tensors))
        if key not in self._save_plans:
            _, args, kwargs = call.restore(part, grad=True)
            self._save_plans[key] = None
            # A block whose operations depend on tensor values gets no save plan, and all of it is
            # recomputed.
            with block.state.preserved(), suppress(*UNKNOWN):
                inventory = self._inventories.of(block.module, args, kwargs, forward=block.original)
                names = classes & inventory.keys.keys()
                most = self._planned_bytes.get(block.number, math.inf)
                fits = inventory.kept_bytes(names) * call.batch <= KEPT_TOLERANCE * most * rows
                self._save_plans[key] = inventory.save_plan(names) if names and fits else None
        return self._save_plans[key]
