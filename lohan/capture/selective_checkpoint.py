"""Results of chosen operations, kept in forward and put in their place when backward recomputes.

Both runs go through a dispatch mode, below autograd. In forward the mode holds on to the results
that the recipe names. In recomputation it compares every operation with the one that forward ran
at that point; a kept result takes the operation's place, and operations that only led to kept
results are skipped: they return tensors without values. Such a tensor may be viewed and passed on,
but no operation may compute with it, and none may outlive the recomputation, neither saved by
autograd nor held by anyone else. Where any of this does not hold the slice is recomputed in full,
so a wrong recipe costs time and never changes a result.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from lohan.capture.kept import Kept, Layout, Recipe, Result
from lohan.capture.operations import (
    Counter,
    counts,
    may_draw,
    reads_values,
    storable,
    storage_key,
    tensors_in,
    written,
)
from lohan.device import specific


class _Disagreement(Exception):
    """Recomputation does something else than forward did; says what."""


def run_and_keep(run: Callable[[], Any], recipe: Recipe) -> tuple[Any, Kept]:
    """Calls `run` without a graph; returns its result and what the recipe keeps of it."""
    mode = _Keep(recipe)
    with mode:
        result = run()
    return result, mode.seal()


def run_again(run: Callable[[], Any], kept: Kept) -> list[Any]:
    """Calls `run` once more, now with a graph, and returns the leaves of its result. Leaves whose
    values nothing in backward needs have none. Uses `kept` up."""
    kept.check()
    if not kept.lost:
        device = kept.tensors[0].device if kept.tensors else torch.device("cpu")
        state, drawn = torch.get_rng_state(), _generator_state(device)
        leaves = _restored(run, kept)
        kept.release()
        if leaves is not None:
            return leaves
        torch.set_rng_state(state)
        _set_random_state(*drawn)
    warnings.warn(
        f"a block was recomputed in full, though results of it were kept: {kept.lost}",
        RuntimeWarning, stacklevel=2,
    )  # fmt: skip
    kept.release()
    return pytree.tree_leaves(run())


def _restored(run: Callable[[], Any], kept: Kept) -> list[Any] | None:
    mode = _Restore(kept)
    try:
        with mode:
            leaves = pytree.tree_leaves(run())
        mode.finish()
    except _Disagreement as disagreement:
        kept.release(str(disagreement))
        return None
    leaves = [mode.stand_in(leaf) for leaf in leaves]
    if alive := mode.alive():
        kept.release(f"the result of {alive} is needed after all")
        return None
    return leaves


class _Keep(TorchDispatchMode):
    supports_higher_order_operators = True

    def __init__(self, recipe: Recipe) -> None:
        super().__init__()
        self._recipe, self._kept = recipe, Kept()
        self._counter = Counter()
        self._held: list[torch.Tensor] = []  # as the operations returned them

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not counts(func) or self._kept.lost:
            return func(*args, **kwargs)
        key, index = self._counter.key(func), len(self._kept.ops)
        self._kept.ops.append(func)
        ops = self._recipe.ops
        if ops and ops[index : index + 1] != (key[0],):
            self._lose(f"it runs {key[0]} where {_at(ops, index)} was planned for")
            return func(*args, **kwargs)
        self._copy_before_change(written(func, args, kwargs))
        if key not in self._recipe.keep and key not in self._recipe.skip:
            return func(*args, **kwargs)
        before = _random_state(func, args, kwargs)
        out = func(*args, **kwargs)
        self._note(index, func, args, kwargs, out, keep=key in self._recipe.keep, before=before)
        return out

    def _note(
        self, index: int, func: Any, args: Any, kwargs: Any, out: Any, *, keep: bool,
        before: tuple[torch.device, torch.Tensor] | None,
    ) -> None:  # fmt: skip
        if keep and not storable(func, args, kwargs, out):
            self._lose(f"the result of {func} is not a tensor of its own")
            return
        leaves, spec = pytree.tree_flatten(out)
        after = _random_state(func, args, kwargs)
        drew = before is not None and after is not None and not torch.equal(before[1], after[1])
        self._kept.results[index] = Result(
            called_with=_signature(args, kwargs),
            leaves=[Layout.of(x) if isinstance(x, torch.Tensor) else x for x in leaves],
            spec=spec,
            first=len(self._held) if keep else None,
            in_place=bool(written(func, args, kwargs)),
            random=after if drew else None,
        )
        if keep:
            self._held.extend(leaf for leaf in leaves if isinstance(leaf, torch.Tensor))

    def _copy_before_change(self, changed: list[torch.Tensor]) -> None:
        storages = set(map(storage_key, changed))
        for position, tensor in enumerate(self._held if storages else ()):
            if storage_key(tensor) in storages:
                self._held[position] = tensor.clone()

    def _lose(self, why: str) -> None:
        self._held.clear()
        self._kept.release(why)

    def seal(self) -> Kept:
        kept, ops = self._kept, self._recipe.ops
        if not kept.lost and len(kept.ops) < len(ops):
            self._lose(f"it ends where {ops[len(kept.ops)]} was planned for")
        # Detached, since an output of the block will get a history that leads back to this call.
        kept.tensors = [t.detach().as_strided((t.numel(),), (1,)) for t in self._held]
        kept.seal()
        self._held.clear()
        return kept


class _Restore(TorchDispatchMode):
    supports_higher_order_operators = True

    def __init__(self, kept: Kept) -> None:
        super().__init__()
        self._kept, self._index = kept, 0
        # Weak, yet no other storage gets the address of one of these while they are here.
        self._valueless: dict[int, tuple[StorageWeakRef, Any]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not counts(func):
            return func(*args, **kwargs)
        index, self._index = self._index, self._index + 1
        if index >= len(self._kept.ops) or self._kept.ops[index] is not func:
            raise _Disagreement(
                f"backward runs {func} where forward ran {_at(self._kept.ops, index)}"
            )
        result = self._kept.results.get(index)
        if result is not None:
            return self._replace(func, result, args, kwargs)
        if self._valueless and reads_values(func):
            self._check_values(func, tensors_in(args, kwargs))
        return func(*args, **kwargs)

    def _replace(self, func: Any, result: Result, args: Any, kwargs: Any) -> Any:
        if not _same(result.called_with, _signature(args, kwargs)):
            raise _Disagreement(f"backward calls {func} with other arguments than forward")
        if result.random is not None:
            _set_random_state(*result.random)
        if result.in_place:
            return self._replace_in_place(func, result, args[0])
        made = self._kept.take(result)
        if result.first is None:
            self._mark(func, tensors_in(made))
        return pytree.tree_unflatten(made, result.spec)

    def _replace_in_place(self, func: Any, result: Result, target: torch.Tensor) -> torch.Tensor:
        if result.first is None:
            self._mark(func, [target])
        else:
            (value,) = self._kept.take(result)
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
            if (found := self._valueless.get(storage_key(tensor))) is not None:
                raise _Disagreement(f"{func} needs the result of {found[1]}, which was skipped")

    def finish(self) -> None:
        if self._index < len(self._kept.ops):
            raise _Disagreement(f"backward ends where forward ran {self._kept.ops[self._index]}")

    def stand_in(self, leaf: Any) -> Any:
        """The same place in the graph without the storage, if that has no values."""
        if isinstance(leaf, torch.Tensor) and storage_key(leaf) in self._valueless:
            return _StandIn.apply(leaf)
        return leaf

    def alive(self) -> str:
        """An operation whose missing result somebody still holds."""
        return next((str(func) for ref, func in self._valueless.values() if not ref.expired()), "")


class _StandIn(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, leaf: torch.Tensor) -> torch.Tensor:
        return torch.empty_like(leaf)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return grad


def _at(ops: Sequence[Any], index: int) -> str:
    return str(ops[index]) if index < len(ops) else "nothing more"


def _signature(args: Any, kwargs: Any) -> list[Any]:
    return [
        (leaf.shape, leaf.dtype, leaf.device) if isinstance(leaf, torch.Tensor) else leaf
        for leaf in pytree.tree_leaves((args, kwargs))
    ]


def _same(one: list[Any], other: list[Any]) -> bool:
    return len(one) == len(other) and all(a is b or a == b for a, b in zip(one, other, strict=True))


def _random_state(func: Any, args: Any, kwargs: Any) -> tuple[torch.device, torch.Tensor] | None:
    """State of the generator that the operation may draw from."""
    if not may_draw(func):
        return None
    device = next((t.device for t in tensors_in(args, kwargs)), kwargs.get("device"))
    return _generator_state(torch.device(device or "cpu"))


def _generator_state(device: torch.device) -> tuple[torch.device, torch.Tensor]:
    """The host's generator draws for devices that have none of their own."""
    own = None if device.type == "cpu" else specific.random_state(device)
    return (torch.device("cpu"), torch.get_rng_state()) if own is None else (device, own)


def _set_random_state(device: torch.device, state: torch.Tensor) -> None:
    if device.type == "cpu":
        torch.set_rng_state(state)
    else:
        specific.set_random_state(device, state)
