"""How a block's call falls into slices of samples, found by trying it on two samples.

Sizes alone do not say which tensors have samples in their first dimension: there may be as many
tokens as samples. So two samples run together and one by one, and the results must agree. Then the
inputs of the first sample are made invalid (NaN): if that reaches the second, the block mixes
samples, as BatchNorm does, and must run as a whole. Random numbers are taken out of it.
"""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils import _pytree as pytree

from lohan.capture.fake import DispatchMode
from lohan.capture.selective_checkpoint import tensors_in
from lohan.device.out_of_memory import is_out_of_memory
from lohan.errors import BudgetError
from lohan.util.units import format_bytes

if TYPE_CHECKING:
    from lohan.capture.recompute import SavedCall

Run = Callable[..., Any]
Result = TypeVar("Result")
TOLERANCE = {torch.float32: 0.01, torch.float64: 0.01}  # of the norm; rounding is far below
TOLERANCE_16_BIT = 0.1
MOST_TENSORS = 6  # as long as the batch: for more of them not every choice is tried


@dataclass(frozen=True)
class Cut:
    """How a call can be divided into slices.

    `inputs` says which tensors have samples in their first dimension. `outputs` says how many
    rows of each output belong to one sample; 0 means that the output is the same for all
    samples.
    """

    inputs: tuple[bool, ...] = ()
    outputs: tuple[int, ...] = ()
    whole: str = ""  # why it cannot be cut
    failed: bool = False  # because the block raised an error in each trial, maybe one of its own


class Cuts:
    """The cuts of all calls, each tried once per block and kind of input.

    `needs` holds the bytes of blocks that run a whole batch, where they are known, and `room`
    the bytes that are available.
    """

    def __init__(self) -> None:
        self._known: dict[Any, Cut] = {}
        self._unconfirmed: tuple[Any, str, int, Cut] | None = None  # key, name, batch
        self._told: set[str] = set()
        self.needs: Mapping[str, int] = {}
        self.room = 0

    def of(self, module: nn.Module, call: SavedCall, run: Run) -> Cut:
        """Return the cut of a call.

        `run` calls the block with its weights in place and leaves no trace.
        """
        self._unconfirmed = None
        key = (id(module), module.training, *pattern(call))
        if key not in self._known:
            cut = find_cut(module, call, run, values=True)
            if cut.whole and self.needs.get(call.name, 0) > self.room:
                raise BudgetError(
                    f"block {call.name} cannot run in micro-batches: {cut.whole}; all "
                    f"{call.batch} samples need {format_bytes(self.needs[call.name])}, the plan "
                    f"has {format_bytes(self.room)} for them: raise the memory or lower the batch"
                )
            self._unconfirmed = key, call.name, call.batch, cut
            if not cut.failed:
                self.confirm()
            return cut
        return self._known[key]

    def confirm(self) -> None:
        """Keep the last cut for later calls.

        A cut that was determined by errors is kept only after the block has run the whole
        batch, because the errors were then not due to the block itself.
        """
        if self._unconfirmed is None:
            return
        key, name, batch, cut = self._unconfirmed
        self._known[key], self._unconfirmed = cut, None
        if cut.whole and cut.whole not in self._told:
            self._told.add(cut.whole)
            warnings.warn(
                f"micro-batches are off for block {name} and others like it: {cut.whole}; "
                f"it runs all {batch} samples at once, and needs memory for them",
                RuntimeWarning,
                stacklevel=2,
            )


def pattern(call: SavedCall) -> Iterator[Any]:
    """Yield the properties of a call on which its cut depends."""
    for tensor, wants in zip(call.tensors, call.wants_grad, strict=True):
        yield tensor.ndim, tensor.dtype, wants, tensor.shape[:1] == (call.batch,)


def find_cut(module: nn.Module, call: SavedCall, run: Run, *, values: bool) -> Cut:
    """Return how a call can be divided into slices.

    Without `values` (on fake tensors), only the shapes are compared.
    """
    if any(isinstance(child, _BatchNorm) and child.training for child in module.modules()):
        return Cut(whole=f"{type(module).__name__} has BatchNorm, which mixes samples")
    reason, failed = "its inputs have no samples in their first dimension", False
    for number, inputs in enumerate(_hypotheses(call)):

        def trial(number: int = number, inputs: tuple[bool, ...] = inputs) -> Cut:
            cut = _tried(call, Cut(inputs), run, values=values)
            if number and values:  # The first hypothesis was wrong, so sizes are not enough.
                _check_truth(call, cut, run)
            return cut

        try:
            return attempt(trial)
        except AlwaysFails as error:
            reason = f"{type(module).__name__} does not run on a slice of them ({error})"
            failed = True
        except NotSliceable as found:
            reason = f"{type(module).__name__} {found}"
    return Cut(whole=reason, failed=failed)


class NotSliceable(Exception):
    """What speaks against a cut."""


class AlwaysFails(NotSliceable):
    """The first line of an error that a trial raises whenever it runs."""


def attempt(trial: Callable[[], Result]) -> Result:
    """Return the result of a trial.

    A block that does not fit a slice may raise any kind of error. An error that is raised again
    when the trial is repeated becomes `AlwaysFails`. An error that is not raised again is not
    due to the slice, and is passed on to the caller.
    """
    try:
        return trial()
    except NotSliceable:
        raise
    except Exception as error:
        if is_out_of_memory(error):
            raise
        try:
            trial()
        except Exception as again:
            if is_out_of_memory(again):
                raise
            raise AlwaysFails((str(error).splitlines() or [""])[0]) from error
        raise


def _hypotheses(call: SavedCall) -> Iterator[tuple[bool, ...]]:
    """Yield which tensors may have samples in their first dimension, the likeliest choice first.

    All tensors whose first dimension has the size of the batch come first, then subsets of
    them.
    """
    fits = [t.ndim > 0 and 1 < t.shape[0] == call.batch for t in call.tensors]
    likely = [
        tuple(fit and t.ndim >= least for fit, t in zip(fits, call.tensors, strict=True))
        for least in (1, 2, 3)
    ]
    choices: Iterable[tuple[bool, ...]] = ()
    if sum(fits) <= MOST_TENSORS:
        choices = itertools.product(*([True, False] if fit else [False] for fit in fits))
    seen = set()
    for flags in itertools.chain(likely, choices):
        if any(flags) and flags not in seen:
            seen.add(flags)
            yield flags


def _tried(call: SavedCall, cut: Cut, run: Run, *, values: bool) -> Cut:
    with torch.no_grad(), NoChance():
        both, first, second = (
            pytree.tree_leaves(_slice(call, cut, run, part))
            for part in (slice(0, 2), slice(0, 1), slice(1, 2))
        )
        if not len(both) == len(first) == len(second):
            raise NotSliceable("returns something else for one sample than for two")
        rows = tuple(
            _rows(*parts, values=values)
            for parts in zip(both, first, second, strict=True)
            if isinstance(parts[0], torch.Tensor)
        )
        cut = Cut(cut.inputs, rows)
        if values:
            spoilt = tensors_in(_slice(call, cut, run, slice(0, 2), spoilt=True))
            for count, before, after in zip(cut.outputs, tensors_in(both), spoilt, strict=True):
                if count:
                    before, after = before[count:], after[count:]
                if after.is_floating_point() and (after.isnan() & ~before.isnan()).any():
                    raise NotSliceable("mixes the samples of a batch")
    return cut


def _check_truth(call: SavedCall, cut: Cut, run: Run) -> None:
    """Compare the results of two samples with those of the same two in the whole batch."""
    with torch.no_grad(), NoChance():
        whole = tensors_in(_slice(call, cut, run, slice(0, call.batch)))
        two = tensors_in(_slice(call, cut, run, slice(0, 2)))
    for rows, all_of_it, part in zip(cut.outputs, whole, two, strict=True):
        if not agree(all_of_it[: 2 * rows] if rows else all_of_it, part):
            raise NotSliceable("gives other results for two samples than for all")


def _slice(call: SavedCall, cut: Cut, run: Run, part: slice, *, spoilt: bool = False) -> Any:
    tensors = []
    for tensor, sliced in zip(call.tensors, cut.inputs, strict=True):
        piece = tensor[part] if sliced else tensor
        if sliced and spoilt and piece.is_floating_point():
            piece = piece.clone()
            piece[0] = torch.nan
        tensors.append(piece.detach())
    args, kwargs = call.arguments(tensors)
    return run(*args, **kwargs)


def _rows(both: Any, first: Any, second: Any, *, values: bool) -> int:
    """How many rows of an output belong to a sample; 0 if it is the same for all."""
    if first.shape == second.shape == both.shape:
        if values and not (agree(both, first) and agree(both, second)):
            raise NotSliceable("has a result that depends on all samples")
        return 0
    each = first.shape[0] if first.ndim else 0
    if not each or both.shape != (2 * each, *first.shape[1:]) or first.shape != second.shape:
        raise NotSliceable("has a result whose size does not grow with the samples")
    if values and not agree(both, torch.cat([first, second])):
        raise NotSliceable("gives other results for two samples than for each of them")
    return int(each)


def agree(one: torch.Tensor, other: torch.Tensor) -> bool:
    if not one.is_floating_point():
        return torch.equal(one, other)
    if one.shape != other.shape:
        return False
    limit = TOLERANCE.get(one.dtype, TOLERANCE_16_BIT)
    one, other = one.nan_to_num().float(), other.nan_to_num().float()
    return bool((one - other).norm() <= limit * one.norm() + 1e-30)


class NoChance(DispatchMode):
    """Random results are constant, so that runs can be compared."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if torch.Tag.nondeterministic_seeded not in getattr(func, "tags", ()):
            return func(*args, **kwargs)
        if func is torch.ops.aten.native_dropout.default:
            return args[0].clone(), torch.ones_like(args[0], dtype=torch.bool)
        names = [argument.name for argument in func._schema.arguments]
        if "dropout_p" in names:  # attention
            index = names.index("dropout_p")
            if index >= len(args):
                return func(*args, **{**kwargs, "dropout_p": 0.0})
            return func(*args[:index], 0.0, *args[index + 1 :], **kwargs)
        out = func(*args, **kwargs)
        for made in tensors_in(out):
            chance = 0.5 if made.is_floating_point() else 0
            made.fill_(1 if "bernoulli" in str(func) else chance)
        return out
