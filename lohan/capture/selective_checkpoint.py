"""Selective activation checkpointing: results of chosen operations are saved, others recomputed."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import _get_current_dispatch_mode

from lohan.capture.fake import DispatchMode
from lohan.device import accelerator
from lohan.errors import LohanError

# -- When the result of an operation can be saved, and when the operation can be skipped -----------
#
# Both are decided from the operation's schema and from the tensors. Names matter in three cases:
# operations that autograd and fake tensors insert by themselves are not counted, one view does not
# declare in its schema that it is a view, and ATen's factories (`empty_like`, `new_zeros`) read no
# values.
#
# Views are not counted either. They cost nothing and work without values, and their number depends
# on how a module is called: an assignment to a slice creates more of them on fake tensors.


# The name of an operation, and how many operations of the same name precede it in the call.
OpKey = tuple[str, int]

_UNCOUNTED = {torch.ops.aten.detach.default, torch.ops.prim.device.default}
_HIDDEN_VIEWS = {torch.ops.aten._unsafe_view.default}


class Traits(NamedTuple):
    """Properties of an operation that do not depend on its arguments."""

    func: Any
    name: str
    # True if the operation is part of the sequence that forward and recomputation share.
    counts: bool
    reads_values: bool  # False for a factory, which uses only shapes and types of its tensors.
    mutates: bool
    # True if the operation may advance a random generator. Operations outside ATen may do so even
    # if they have no tag.
    may_draw: bool

    @classmethod
    def of(cls, func: Any) -> Traits:
        name, is_aten = str(func), getattr(func, "namespace", "") == "aten"
        schema = getattr(func, "_schema", None)
        return cls(
            func,
            name,
            counts=func not in _UNCOUNTED and not _is_view(func),
            reads_values=not is_aten
            or not (name.split(".")[1].endswith("_like") or name.startswith("aten.new_")),
            mutates=schema is not None and schema.is_mutable,
            may_draw=not is_aten or torch.Tag.nondeterministic_seeded in func.tags,
        )


# Keys are ids, because the hash of an operation is computed in Python and is looked up every time.
_TRAITS: dict[int, Traits] = {}


def traits_of(func: Any) -> Traits:
    traits = _TRAITS.get(id(func))
    if traits is None:
        # keeps the operation alive, so that its id is not reused
        traits = _TRAITS[id(func)] = Traits.of(func)
    return traits


def counts(func: Any) -> bool:
    return traits_of(func).counts


def _is_view(func: Any) -> bool:
    if func in _HIDDEN_VIEWS:
        return True
    returns = getattr(getattr(func, "_schema", None), "returns", ())
    marks = [result.alias_info for result in returns]
    return any(mark is not None and not mark.is_write for mark in marks)


class Counter:
    """The keys of the operations of one call, assigned in the order of the operations."""

    def __init__(self) -> None:
        self._counts: dict[str, int] = {}

    def key(self, func: Any) -> OpKey:
        name = traits_of(func).name
        count = self._counts[name] = self._counts.get(name, -1) + 1
        return name, count


def leaves_of(*trees: Any) -> list[Any]:
    """Return the leaves of an operation's arguments or results.

    They may be nested in lists, tuples and dicts. torch's own function for this takes as long
    as launching the operation.
    """
    leaves: list[Any] = []
    for tree in trees:
        kind = type(tree)
        if kind is torch.Tensor:
            leaves.append(tree)
        elif issubclass(kind, (tuple, list)):
            leaves += leaves_of(*tree)
        elif issubclass(kind, dict):
            if tree:
                leaves += leaves_of(*tree.values())
        else:
            leaves.append(tree)
    return leaves


def tensors_in(*trees: Any) -> list[torch.Tensor]:
    return [leaf for leaf in leaves_of(*trees) if isinstance(leaf, torch.Tensor)]


def reads_values(func: Any) -> bool:
    return traits_of(func).reads_values


def makes_empty(func: Any) -> bool:
    """Return whether an operation only allocates memory, as `empty_like` and `new_empty` do."""
    name = traits_of(func).name
    return name.startswith(("aten.empty", "aten.new_empty"))


def written(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[torch.Tensor]:
    """Return the arguments that the operation changes."""
    if not traits_of(func).mutates:
        return []
    return tensors_in(list(_written_arguments(func._schema, args, kwargs)))


def _written_arguments(schema: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[Any]:
    for position, argument in enumerate(schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            yield args[position] if position < len(args) else kwargs.get(argument.name)


def may_draw(func: Any) -> bool:
    return traits_of(func).may_draw


def storable(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> bool:
    """Return whether saved results can replace the operation completely.

    This holds if every result fills a plain storage of its own, or if the operation changes one
    whole tensor in place.
    """
    results = tensors_in(out)
    if getattr(func, "_schema", None) is None or kwargs.get("generator") is not None:
        return False
    if not results or not all(_fills_storage(result) for result in results):
        return False
    changed = written(func, args, kwargs)
    if changed:
        return len(changed) == 1 and out is changed[0] and out is args[0]
    storages = {storage_key(result) for result in results}
    return len(storages) == len(results) and storages.isdisjoint(
        map(storage_key, tensors_in(args, kwargs))
    )


def replaceable(func: Any, args: Any, kwargs: Any, out: Any, fresh: int) -> bool:
    """Return whether empty tensors could replace the results of an operation, if none is needed.

    `fresh` is the number of results that have a storage of their own.
    """
    if getattr(func, "_schema", None) is None or kwargs.get("generator") is not None:
        return False
    if any(not isinstance(leaf, torch.Tensor | None) for leaf in leaves_of(out)):
        return False
    changed, results = written(func, args, kwargs), tensors_in(out)
    if changed:
        return len(changed) == 1 and out is changed[0] and out is args[0]
    return 0 < len(results) == fresh


def storage_key(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def _fills_storage(tensor: torch.Tensor) -> bool:
    if tensor.layout != torch.strided or tensor.is_conj() or tensor.is_neg():
        return False
    whole = tensor.numel() * tensor.itemsize == tensor.untyped_storage().nbytes()
    return whole and is_dense(tensor)


def is_dense(tensor: torch.Tensor) -> bool:
    """Return whether the elements are adjacent in some order of the dimensions."""
    if tensor.is_contiguous():
        return True
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size != 1:
            if stride != expected:
                return False
            expected *= size
    return True


# -- Saved results of one slice of a block call ----------------------------------------------------


@dataclass(frozen=True)
class SavePlan:
    """The results that one slice of a block's call keeps.

    The operations in `skip` need not run again. The plan applies only to a call that runs exactly
    the operations `ops`; an empty `ops` matches any call.
    """

    keep: frozenset[OpKey]
    skip: frozenset[OpKey] = frozenset()
    ops: tuple[str, ...] = ()
    # The operations of the last call with this plan.
    earlier: list[EarlierOperation] = field(default_factory=list, compare=False, repr=False)


class Layout(NamedTuple):
    """Shape, strides, type and device of a tensor."""

    shape: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device

    @classmethod
    def of(cls, tensor: torch.Tensor) -> Layout:
        return cls(tensor.shape, tensor.stride(), tensor.dtype, tensor.device)

    def fits(self, leaf: Any) -> bool:
        return (
            type(leaf) is torch.Tensor
            and leaf.shape == self.shape
            and leaf.stride() == self.stride
            and leaf.dtype == self.dtype
            and leaf.device == self.device
        )

    def empty(self) -> torch.Tensor:
        return torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device=self.device)

    def over(self, flat: torch.Tensor) -> torch.Tensor:
        """Return a tensor of this layout over flat values. Autograd does not see it as a view."""
        tensor = flat.new_empty(0)
        return tensor.set_(flat.untyped_storage(), flat.storage_offset(), self.shape, self.stride)


class Signature(NamedTuple):
    """The arguments of an operation without the values of tensors."""

    plain: bool  # True if the arguments are exactly the leaves, without nesting and keywords.
    # The leaves of the arguments; each tensor is replaced by its shape, dtype and device.
    leaves: list[Any]
    numbers: list[tuple[int, Any]]  # The positions and values of the leaves that are not tensors.

    @classmethod
    def of(cls, args: Any, kwargs: Any) -> Signature:
        leaves = leaves_of(args, kwargs)
        plain = not kwargs and all(a is b for a, b in zip(args, leaves, strict=False))
        return cls(
            plain and len(args) == len(leaves),
            [(x.shape, x.dtype, x.device) if isinstance(x, torch.Tensor) else x for x in leaves],
            [(n, x) for n, x in enumerate(leaves) if not isinstance(x, torch.Tensor)],
        )

    def same_numbers(self, args: Any, kwargs: Any) -> bool:
        """Return whether the arguments that are not tensors are the same.

        If a tensor has another type or shape and the result has the same layout, the difference is
        not detected here. It is detected when backward calls the operation again.
        """
        leaves = args if self.plain and not kwargs else leaves_of(args, kwargs)
        if len(leaves) != len(self.leaves):
            return False
        for number, expected in self.numbers:
            leaf = leaves[number]
            if leaf is not expected and (isinstance(leaf, torch.Tensor) or leaf != expected):
                return False
        return True

    def fits(self, args: Any, kwargs: Any) -> bool:
        leaves = args if self.plain and not kwargs else leaves_of(args, kwargs)
        if len(leaves) != len(self.leaves):
            return False
        for leaf, expected in zip(leaves, self.leaves, strict=True):
            if isinstance(leaf, torch.Tensor):
                if type(expected) is not tuple or (leaf.shape, leaf.dtype, leaf.device) != expected:
                    return False
            elif leaf is not expected and leaf != expected:
                return False
        return True


@dataclass
class Result:
    """The replacement of one operation in recomputation.

    It holds the layouts of the results, the position of their values in `SavedOps.tensors` (None if
    the values are not needed), and the random state after the operation.
    """

    called_with: Signature
    leaves: list[Any]
    spec: Any  # None if the only leaf is the result itself
    first: int | None
    in_place: bool
    random: tuple[torch.device, torch.Tensor] | None

    @property
    def repeats(self) -> bool:
        """True if another call with the same arguments has the same result."""
        # The leaves hold layouts in place of tensors, except tensors on the host, such as the seed
        # of an attention kernel.
        has_host_tensors = any(isinstance(leaf, torch.Tensor) for leaf in self.leaves)
        return not has_host_tensors and not self.in_place and self.random is None

    def fits(self, out: Any) -> bool:
        """Return whether results have these layouts."""
        if self.spec is None and type(self.leaves[0]) is Layout:
            return self.leaves[0].fits(out)
        leaves = [out] if self.spec is None else leaves_of(out)
        return len(leaves) == len(self.leaves) and all(
            layout.fits(leaf) if isinstance(layout, Layout) else leaf == layout
            for leaf, layout in zip(leaves, self.leaves, strict=True)
        )

    def join(self, leaves: list[Any]) -> Any:
        return leaves[0] if self.spec is None else pytree.tree_unflatten(leaves, self.spec)


class EarlierOperation(NamedTuple):
    """An operation of an earlier call with the same save plan.

    The next call usually runs the same operation at the same position, so its properties need not
    be determined again.
    """

    func: Any
    key: OpKey
    quick: bool  # True if nothing but `result` depends on the arguments.
    may_draw: bool  # True if `result` is only valid for a call that draws no random numbers.
    result: Result | None  # None if it is neither saved nor skipped

    @classmethod
    def of(cls, func: Any, key: OpKey, result: Result | None) -> EarlierOperation:
        traits = traits_of(func)
        quick = not traits.mutates and (result is None or result.repeats)
        may_draw = traits.may_draw and result is not None
        return cls(func, key, quick, may_draw, result if quick else None)


_NOTHING = torch.empty(0)


@dataclass
class SavedOps:
    """The saved results of one slice of one call.

    `tensors` are flat and contiguous. Tensors that `hand_over` has given away, for example to
    another tier, must be returned with `adopt` before backward.
    """

    tensors: list[torch.Tensor] = field(default_factory=list)
    # The reason why the slice has to be recomputed in full; empty if it need not be.
    lost: str = ""
    ops: list[Any] = field(default_factory=list)
    results: dict[int, Result] = field(default_factory=dict)
    _versions: list[int] = field(default_factory=list)
    _sizes: list[tuple[torch.dtype, int]] = field(default_factory=list)

    @property
    def count(self) -> int:
        """The number of tensors that `hand_over` gives away and `adopt` takes back."""
        return 0 if self.lost else len(self._sizes)

    def hand_over(self) -> list[torch.Tensor]:
        """Return the tensors, and release this object's references to them.

        The list is empty if backward cannot use any of them.
        """
        self.check()
        tensors, self.tensors, self._versions = self.tensors, [], []
        return tensors

    def adopt(self, tensors: Sequence[torch.Tensor]) -> None:
        """Take back tensors with the values that `hand_over` gave away."""
        sizes = [(tensor.dtype, tensor.numel()) for tensor in tensors]
        if sizes != self._sizes and not (self.lost and not tensors):
            raise LohanError(
                f"a slice keeps {len(self._sizes)} results of {self._sizes} elements and got back "
                f"{len(sizes)} of {sizes}; return what export gave, in its order"
            )
        self.tensors, self._versions = list(tensors), []

    def release(self, why: str = "") -> None:
        self.lost = self.lost or why
        self.tensors, self._versions = [], []
        self.ops, self.results = [], {}

    def seal(self) -> None:
        """Record the versions of the tensors, which must not change after forward."""
        self._versions = [tensor._version for tensor in self.tensors]
        self._sizes = [(tensor.dtype, tensor.numel()) for tensor in self.tensors]

    def check(self) -> None:
        if not self.lost and len(self.tensors) != len(self._sizes):
            raise LohanError(
                f"backward needs {len(self._sizes)} saved results and has {len(self.tensors)};"
                " give those taken with export back with adopt"
            )
        versions = [tensor._version for tensor in self.tensors[: len(self._versions)]]
        if versions != self._versions:
            self.release("a saved result was changed in place after the block had returned it")

    def take(self, result: Result) -> list[Any]:
        """Return the results of an operation, and remove them from the saved tensors."""
        results, position = [], result.first
        for leaf in result.leaves:
            if isinstance(leaf, Layout) and position is not None:
                results.append(leaf.over(self.tensors[position]))
                self.tensors[position] = _NOTHING
                position += 1
            else:
                results.append(leaf.empty() if isinstance(leaf, Layout) else leaf)
        return results


# -- Saving and reusing results of chosen operations -----------------------------------------------
#
# Results are saved in forward and reused when backward recomputes.
#
# Both runs use a dispatch mode, which sees the operations below autograd. In forward the mode keeps
# the results that the save plan names. In recomputation it compares every operation with the one
# that forward ran at that position; a saved result replaces the operation, and operations that only
# led to saved results are skipped: they return tensors without values. Such a tensor may be viewed
# and passed on, but no operation may compute with it, and nothing may refer to it after the
# recomputation, neither autograd nor other code. If any of this is violated, the slice is
# recomputed in full. A wrong save plan therefore costs time and never changes a result.


class _Disagreement(Exception):
    """Raised when recomputation differs from forward. The message says how."""


def run_and_save(run: Callable[[], Any], save_plan: SavePlan) -> tuple[Any, SavedOps]:
    """Call `run` and return its result and what the save plan keeps.

    The caller ensures that `run` leaves no graph.
    """
    mode = _Recorder(save_plan)
    with mode:
        result = run()
    return result, mode.seal()


def recompute_with(run: Callable[[], Any], saved: SavedOps) -> list[Any]:
    """Call `run` again, with saved results in place of operations; return the leaves of its result.

    The call records a graph. Leaves that backward does not need have no values. If the saved
    results cannot be used, all operations run again, with a warning. `saved` is consumed.
    """
    saved.check()
    if not saved.lost:
        device = saved.tensors[0].device if saved.tensors else torch.device("cpu")
        state, drawn = torch.get_rng_state(), generator_state(device)
        leaves = _restored(run, saved)
        saved.release()
        if leaves is not None:
            return leaves
        torch.set_rng_state(state)
        set_generator_state(*drawn)
    warnings.warn(
        f"a block was recomputed in full, though results of it were saved: {saved.lost}",
        RuntimeWarning,
        stacklevel=2,
    )
    saved.release()
    return pytree.tree_leaves(run())


class SkipUnneededOps:
    """Recomputation of calls that keep nothing, without operations that backward does not need.

    An example is the last projection of a block. The operations are determined in the first
    recomputation of each kind of call. The dispatch mode that skips them starts at the last
    submodule that is called before the first skipped operation. Earlier operations therefore run
    without overhead in Python.
    """

    def __init__(self) -> None:
        self._endings: dict[Hashable, Ending | None] = {}  # None if all operations run

    def run(
        self, kind: Hashable, module: nn.Module, run: Callable[[], Any], rewind: Callable[[], None]
    ) -> list[Any]:
        """Call `run`, which runs the module with a graph, and return the leaves of its result.

        Leaves that backward does not need have no values. `rewind` resets the random state
        to what it was before the call.
        """
        if kind not in self._endings:
            leaves, self._endings[kind] = _learn_ending(run, module)
            return leaves
        ending = self._endings[kind]
        if ending is None:
            return pytree.tree_leaves(run())
        restored = _restored(run, SavedOps(ops=ending.ops, results=ending.results), ending.begins)
        if restored is not None:
            return restored
        self._endings[kind] = None  # its operations depend on more than its shapes
        rewind()
        return pytree.tree_leaves(run())


class SubmoduleCall(NamedTuple):
    """A point in the call of a block: the entry of a submodule."""

    module: nn.Module
    number: int  # the number of earlier calls of this module


class Ending(NamedTuple):
    """The operations of a call after the entry of a submodule, and which of them can be skipped."""

    begins: SubmoduleCall | None  # None: at the start of the call
    ops: list[Any]
    results: dict[int, Result]


def _learn_ending(run: Callable[[], Any], module: nn.Module) -> tuple[list[Any], Ending | None]:
    """Run a call; return the leaves of its result, and the operations that later calls can skip."""
    mode = _Learner()
    hooks = [child.register_forward_pre_hook(mode.enters) for child in module.modules()]
    try:
        with torch.autograd.graph.saved_tensors_hooks(mode.save, _itself), _HostReads(mode), mode:
            leaves = pytree.tree_leaves(run())
    finally:
        for hook in hooks:
            hook.remove()
    return leaves, mode.ending()


def _itself(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


def _restored(
    run: Callable[[], Any], saved: SavedOps, begins: SubmoduleCall | None = None
) -> list[Any] | None:
    mode = _Replay(saved)
    try:
        with mode if begins is None else _beginning(mode, begins):
            leaves = pytree.tree_leaves(run())
        mode.finish()
    except _Disagreement as disagreement:
        saved.release(str(disagreement))
        return None
    leaves = [mode.stand_in(leaf) for leaf in leaves]
    if alive := mode.alive():
        saved.release(f"the result of {alive} is needed after all")
        return None
    return leaves


@contextmanager
def _beginning(mode: DispatchMode, begins: SubmoduleCall) -> Iterator[None]:
    """Enable the mode when the given call of a submodule begins, until the context ends.

    If that call does not happen, the mode is never enabled.
    """
    calls, entered = 0, False

    def enter(*_: Any) -> None:
        nonlocal calls, entered
        if calls == begins.number:
            mode.__enter__()
            entered = True
        calls += 1

    hook = begins.module.register_forward_pre_hook(enter)
    try:
        yield
    finally:
        hook.remove()
        if entered:
            mode.__exit__(None, None, None)


class _Recorder(DispatchMode):
    def __init__(self, save_plan: SavePlan) -> None:
        super().__init__()
        self._save_plan, self._saved = save_plan, SavedOps()
        self._counter, self._earlier = Counter(), save_plan.earlier
        self._held: list[torch.Tensor] = []  # the results as the operations returned them

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        traits = _TRAITS.get(id(func)) or traits_of(func)
        if not traits.counts or self._saved.lost:
            return func(*args, **kwargs)
        index, expected_ops = len(self._saved.ops), self._earlier
        self._saved.ops.append(func)
        expected = expected_ops[index] if index < len(expected_ops) else None
        if expected is None or expected.func is not func:
            self._leave_earlier()
            return self._run_new(index, self._counter.key(func), func, args, kwargs)
        if not expected.quick:
            return self._run_new(index, expected.key, func, args, kwargs)
        before = _random_state(func, args, kwargs) if expected.may_draw else None
        out = func(*args, **kwargs)
        result = expected.result
        if result is not None and (
            _drew(func, args, kwargs, before) or not self._repeats(index, result, args, kwargs, out)
        ):
            keep = result.first is not None
            self._record_result(index, func, args, kwargs, out, keep=keep, before=before)
        return out

    def _run_new(self, index: int, key: OpKey, func: Any, args: Any, kwargs: Any) -> Any:
        """Run an operation whose properties cannot be taken from the previous call.

        Return its results, or their replacements.
        """
        ops = self._save_plan.ops
        if ops and ops[index : index + 1] != (key[0],):
            self._lose(f"it runs {key[0]} where {_at(ops, index)} was planned for")
            return func(*args, **kwargs)
        if traits_of(func).mutates:
            self._copy_before_change(written(func, args, kwargs))
        if key not in self._save_plan.keep and key not in self._save_plan.skip:
            return func(*args, **kwargs)
        before = _random_state(func, args, kwargs)
        out = func(*args, **kwargs)
        self._record_result(
            index, func, args, kwargs, out, keep=key in self._save_plan.keep, before=before
        )
        return out

    def _repeats(self, index: int, earlier: Result, args: Any, kwargs: Any, out: Any) -> bool:
        """Return whether an operation repeats that of the previous call, and if so record it."""
        if earlier.first is not None and earlier.first != len(self._held):
            return False
        if not earlier.called_with.same_numbers(args, kwargs) or not earlier.fits(out):
            return False
        self._saved.results[index] = earlier
        if earlier.first is None:
            return True
        if earlier.spec is None:
            self._held.append(out)
        else:
            pairs = zip(leaves_of(out), earlier.leaves, strict=True)
            self._held.extend(leaf for leaf, layout in pairs if isinstance(layout, Layout))
        return True

    def _leave_earlier(self) -> None:
        """Stop comparing with the previous call, because this call differs from it."""
        if self._earlier:
            self._earlier = []
            for func in self._saved.ops[:-1]:
                self._counter.key(func)

    def _learn(self) -> None:
        """Remember the operations of this call as the expectation for the next one."""
        counter, results = Counter(), self._saved.results
        self._save_plan.earlier[:] = [
            EarlierOperation.of(func, counter.key(func), results.get(index))
            for index, func in enumerate(self._saved.ops)
        ]

    def _record_result(
        self,
        index: int,
        func: Any,
        args: Any,
        kwargs: Any,
        out: Any,
        *,
        keep: bool,
        before: tuple[torch.device, torch.Tensor] | None,
    ) -> None:
        if keep and not storable(func, args, kwargs, out):
            self._lose(f"the result of {func} is not a tensor of its own")
            return
        leaves, spec = ([out], None) if type(out) is torch.Tensor else pytree.tree_flatten(out)
        device = _device_of(args, kwargs)
        drew = _drew(func, args, kwargs, before)
        self._saved.results[index] = Result(
            called_with=Signature.of(args, kwargs),
            leaves=[Layout.of(x) if _is_at(x, device) else x for x in leaves],
            spec=spec,
            first=len(self._held) if keep else None,
            in_place=bool(written(func, args, kwargs)),
            random=_random_state(func, args, kwargs) if drew else None,
        )
        if keep:
            self._held.extend(leaf for leaf in leaves if _is_at(leaf, device))

    def _copy_before_change(self, changed: list[torch.Tensor]) -> None:
        storages = set(map(storage_key, changed))
        for position, tensor in enumerate(self._held if storages else ()):
            if storage_key(tensor) in storages:
                self._held[position] = tensor.clone()

    def _lose(self, why: str) -> None:
        self._held.clear()
        self._saved.release(why)

    def seal(self) -> SavedOps:
        saved, ops = self._saved, self._save_plan.ops
        if not saved.lost and len(saved.ops) < len(ops):
            self._lose(f"it ends where {ops[len(saved.ops)]} was planned for")
        if not saved.lost and len(self._earlier) != len(saved.ops):
            self._learn()
        # The tensors are detached, because an output of the block will get a history that leads
        # back to this call.
        saved.tensors = [t.detach().as_strided((t.numel(),), (1,)) for t in self._held]
        saved.seal()
        self._held.clear()
        return saved


class _Replay(DispatchMode):
    def __init__(self, saved: SavedOps) -> None:
        super().__init__()
        self._saved, self._index = saved, 0
        # The references are weak, but they keep the addresses of the storages from being reused.
        self._valueless: dict[int, tuple[StorageWeakRef, Any]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        traits = _TRAITS.get(id(func)) or traits_of(func)
        if not traits.counts:
            return func(*args, **kwargs)
        index, self._index, ops = self._index, self._index + 1, self._saved.ops
        if index >= len(ops) or ops[index] is not func:
            raise _Disagreement(f"backward runs {func} where forward ran {_at(ops, index)}")
        result = self._saved.results.get(index)
        if result is not None:
            return self._replace(func, result, args, kwargs)
        if self._valueless and traits.reads_values:
            self._check_values(func, tensors_in(args, kwargs))
        return func(*args, **kwargs)

    def _replace(self, func: Any, result: Result, args: Any, kwargs: Any) -> Any:
        if not result.called_with.fits(args, kwargs):
            raise _Disagreement(f"backward calls {func} with other arguments than forward")
        if result.random is not None:
            set_generator_state(*result.random)
        if result.in_place:
            return self._replace_in_place(func, result, args[0])
        leaves = self._saved.take(result)
        if result.first is None:
            self._mark(func, [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)])
        return result.join(leaves)

    def _replace_in_place(self, func: Any, result: Result, target: torch.Tensor) -> torch.Tensor:
        if result.first is None:
            self._mark(func, [target])
        else:
            (value,) = self._saved.take(result)
            with torch.no_grad():
                target.copy_(value)
            self._valueless.pop(storage_key(target), None)
        return target

    def _mark(self, func: Any, tensors: list[torch.Tensor]) -> None:
        for tensor in tensors:
            reference = StorageWeakRef(tensor.untyped_storage())
            self._valueless[reference.cdata] = (reference, func)

    def _check_values(self, func: Any, tensors: list[torch.Tensor]) -> None:
        for tensor in tensors:
            if (skipped := self._valueless.get(storage_key(tensor))) is not None:
                raise _Disagreement(f"{func} needs the result of {skipped[1]}, which was skipped")

    def finish(self) -> None:
        if self._index < len(self._saved.ops):
            raise _Disagreement(f"backward ends where forward ran {self._saved.ops[self._index]}")

    def stand_in(self, leaf: Any) -> Any:
        """Return a new empty tensor that has the autograd history of a leaf without values."""
        if isinstance(leaf, torch.Tensor) and storage_key(leaf) in self._valueless:
            return _StandIn.apply(leaf)
        return leaf

    def alive(self) -> str:
        """Return the name of an operation whose missing result is still referenced, or ""."""
        return next((str(func) for ref, func in self._valueless.values() if not ref.expired()), "")


class _Learner(DispatchMode):
    """A mode that finds the operations of a call whose results backward does not need.

    An operation is needed if autograd saves its result or a needed operation reads it. It is also
    needed if it draws random numbers, if it changes a tensor from outside the call, or if its
    result is read without an operation: by the host, or by a kernel that takes its address. A
    kernel that is called from C++ takes addresses without being seen. It can only be recognized by
    what it writes: a tensor was allocated empty and is read although no operation has filled it. In
    this case every operation is needed.
    """

    def __init__(self) -> None:
        super().__init__()
        self._ops: list[Any] = []
        self._results: dict[int, Result] = {}  # results of operations that could be skipped
        self._reads: list[set[int]] = []
        self._needed: set[int] = set()
        # The operation that computed the value of each storage. The references are weak, but they
        # keep the addresses of the storages from being reused.
        self._maker: dict[int, tuple[StorageWeakRef, int | None]] = {}
        # Storages that were allocated empty and have not been written to.
        self._unfilled: set[int] = set()
        # True if something that is not an operation has written a tensor. It is then also unknown
        # what has been read.
        self._reads_unseen = False
        # The calls of submodules, each with the number of operations before it.
        self._entered: list[tuple[SubmoduleCall, int]] = []
        self._calls: dict[nn.Module, int] = {}

    def enters(self, module: nn.Module, _: Any) -> None:
        """Record the entry of a submodule, if this mode is the innermost dispatch mode."""
        number = self._calls[module] = self._calls.get(module, -1) + 1
        if _get_current_dispatch_mode() is self:
            self._entered.append((SubmoduleCall(module, number), len(self._ops)))

    def need(self, tensor: torch.Tensor) -> None:
        """Mark a tensor as needed because it is read, or may be written, without an operation."""
        self._unfilled.discard(storage_key(tensor))
        _, maker = self._maker.get(storage_key(tensor), (None, None))
        if maker is not None:
            self._needed.add(maker)

    def save(self, tensor: torch.Tensor) -> torch.Tensor:
        """Mark as needed a tensor that autograd saves, and return it detached from the graph."""
        self._look_for_unseen_writes([tensor])
        self.need(tensor)
        # Returning the tensor itself would let the graph refer to itself through its result.
        return tensor.detach()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not counts(func):
            return func(*args, **kwargs)
        index, changed = len(self._ops), written(func, args, kwargs)
        tensors = tensors_in(args, kwargs)
        producers = set(map(self._node_of, tensors))
        self._unfilled.difference_update(map(storage_key, changed))
        if reads_values(func):
            self._look_for_unseen_writes(tensors)
        outside = any(self._node_of(tensor) is None for tensor in changed)
        out = func(*args, **kwargs)
        fresh = [t for t in tensors_in(out) if storage_key(t) not in self._maker]
        self._ops.append(func)
        self._reads.append(
            {maker for maker in producers if maker is not None and reads_values(func)}
        )
        # Integers may be lengths that Python reads.
        counted = not all(t.is_floating_point() for t in tensors_in(out))
        if (
            outside
            or counted
            or may_draw(func)
            or not replaceable(func, args, kwargs, out, len(fresh))
        ):
            self._needed.add(index)
        else:
            leaves, spec = pytree.tree_flatten(out)
            layouts = [Layout.of(x) if isinstance(x, torch.Tensor) else x for x in leaves]
            self._results[index] = Result(
                Signature.of(args, kwargs), layouts, spec, None, bool(changed), None
            )
        for tensor in (*fresh, *changed):
            self._maker[storage_key(tensor)] = (StorageWeakRef(tensor.untyped_storage()), index)
        if makes_empty(func):
            self._unfilled.update(storage_key(tensor) for tensor in fresh if tensor.numel())
        return out

    def _look_for_unseen_writes(self, read: Sequence[torch.Tensor]) -> None:
        self._reads_unseen |= any(storage_key(tensor) in self._unfilled for tensor in read)

    def _node_of(self, tensor: torch.Tensor) -> int | None:
        reference = StorageWeakRef(tensor.untyped_storage())
        return self._maker.setdefault(reference.cdata, (reference, None))[1]

    def ending(self) -> Ending | None:
        """Return the operations that can be skipped, or None if every operation is needed."""
        if self._reads_unseen:
            return None
        needed, waiting = set(self._needed), list(self._needed)
        while waiting:
            for read in self._reads[waiting.pop()] - needed:
                needed.add(read)
                waiting.append(read)
        results = {index: one for index, one in self._results.items() if index not in needed}
        if not results:
            return None
        before = [(call, at) for call, at in self._entered if at <= min(results)]
        begins, at = before[-1] if before else (None, 0)
        return Ending(begins, self._ops[at:], {n - at: one for n, one in results.items()})


# Functions that read the values of a tensor without an operation.
_READS = {
    torch.Tensor.tolist,
    torch.Tensor.numpy,
    torch.Tensor.__array__,
    torch.Tensor.data_ptr,
    torch.Tensor.__dlpack__,
    torch.Tensor.__cuda_array_interface__.__get__,
}


class _HostReads(TorchFunctionMode):
    """A mode that marks tensors as needed if the host reads them or a kernel takes an address."""

    def __init__(self, learner: _Learner) -> None:
        super().__init__()
        self._learner = learner

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _READS:
            self._learner.need(args[0])
        return func(*args, **(kwargs or {}))


class _StandIn(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, leaf: torch.Tensor) -> torch.Tensor:
        return torch.empty_like(leaf)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return grad


def _device_of(args: Any, kwargs: Any) -> torch.device | None:
    """Return the device of an operation, or None if all its tensors are on the host."""
    devices = (t.device for t in tensors_in(args, kwargs) if t.device.type != "cpu")
    return next(devices, None)


def _is_at(leaf: Any, device: torch.device | None) -> bool:
    """Return whether a result is a tensor on the device that computed it.

    Other results are values on the host, such as the seed and offset of an attention kernel.
    They are few, backward reads them on the host, and they are kept.
    """
    return isinstance(leaf, torch.Tensor) and device in (None, leaf.device)


def _at(ops: Sequence[Any], index: int) -> str:
    return str(ops[index]) if index < len(ops) else "nothing more"


def _random_state(func: Any, args: Any, kwargs: Any) -> tuple[torch.device, torch.Tensor] | None:
    """Return the device and the state of the generator that the operation may draw from."""
    if not may_draw(func):
        return None
    device = next((t.device for t in tensors_in(args, kwargs)), kwargs.get("device"))
    return generator_state(torch.device(device or "cpu"))


def _drew(
    func: Any, args: Any, kwargs: Any, before: tuple[torch.device, torch.Tensor] | None
) -> bool:
    """Return whether the random generator has advanced since the state `before`."""
    if before is None:
        return False
    after = _random_state(func, args, kwargs)
    return after is not None and not torch.equal(before[1], after[1])


def generator_state(device: torch.device) -> tuple[torch.device, torch.Tensor]:
    """Return the device of the random generator and its state.

    Devices without a generator use that of the host.
    """
    state = None if device.type == "cpu" else accelerator.random_state(device)
    return (torch.device("cpu"), torch.get_rng_state()) if state is None else (device, state)


def set_generator_state(device: torch.device, state: torch.Tensor) -> None:
    if device.type == "cpu":
        torch.set_rng_state(state)
    else:
        accelerator.set_random_state(device, state)
