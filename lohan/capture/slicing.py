"""The division of a block's call into slices of samples, determined by a trial on two samples.

Sizes alone do not show which tensors have samples in their first dimension, because there may be as
many tokens as samples. Two samples therefore run together and one by one, and the results must
agree. Then the inputs of the first sample are made invalid (NaN). If that changes the second, the
block mixes samples, as BatchNorm does, and must run on the whole batch. In trials, random numbers
are replaced by constants.
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
    from lohan.capture.saved_call import SavedCall

Run = Callable[..., Any]
Result = TypeVar("Result")
# As a share of the norm of the results; rounding errors are far smaller.
TOLERANCE = {torch.float32: 0.01, torch.float64: 0.01}
TOLERANCE_16_BIT = 0.1
# If at most this many tensors are as long as the batch, every combination of them is tried.
MAX_TENSORS = 6


@dataclass(frozen=True)
class Cut:
    """The division of a call into slices.

    `inputs` shows which tensors have samples in their first dimension. `outputs` contains the
    number of rows of each output that belong to one sample; 0 means that the output is the same for
    all samples.
    """

    inputs: tuple[bool, ...] = ()
    outputs: tuple[int, ...] = ()
    obstacle: str = ""  # the reason why the call cannot be divided; empty if it can
    # True if the block raised an error in every trial; the error may have another cause.
    failed: bool = False


class Cuts:
    """The cuts of all calls. There is one trial per block and kind of input.

    `needs` maps names of blocks to the bytes that a call with the whole batch takes, if known.
    `room` is the number of bytes that are available for a call with the whole batch.
    """

    def __init__(self) -> None:
        self._cuts: dict[Any, Cut] = {}
        self._unconfirmed: tuple[Any, str, int, Cut] | None = None  # key, name, batch
        self._warned: set[str] = set()
        self.needs: Mapping[str, int] = {}
        self.room = 0

    def of(self, module: nn.Module, call: SavedCall, run: Run) -> Cut:
        """Return the cut of a call; calls of one kind share a trial.

        `run` calls the block with its weights in memory and leaves the state of the block
        unchanged. Raise BudgetError if the call cannot be divided and the whole batch does not fit
        in `room`.
        """
        self._unconfirmed = None
        key = (id(module), module.training, *pattern(call))
        if key not in self._cuts:
            cut = find_cut(module, call, run, values=True)
            if cut.obstacle and self.needs.get(call.name, 0) > self.room:
                raise BudgetError(
                    f"block {call.name} cannot run in micro-batches: {cut.obstacle}; all "
                    f"{call.batch} samples need {format_bytes(self.needs[call.name])}, the plan "
                    f"has {format_bytes(self.room)} for them: raise the memory or lower the batch"
                )
            self._unconfirmed = key, call.name, call.batch, cut
            if not cut.failed:
                self.confirm()
            return cut
        return self._cuts[key]

    def confirm(self) -> None:
        """Keep the last cut for later calls.

        A cut that was determined by errors is kept only after the block has run the whole
        batch without an error. This shows that the errors were due to the division.
        """
        if self._unconfirmed is None:
            return
        key, name, batch, cut = self._unconfirmed
        self._cuts[key], self._unconfirmed = cut, None
        if cut.obstacle and cut.obstacle not in self._warned:
            self._warned.add(cut.obstacle)
            warnings.warn(
                f"micro-batches are off for block {name} and others like it: {cut.obstacle}; "
                f"it runs all {batch} samples at once, and needs memory for them",
                RuntimeWarning,
                stacklevel=2,
            )


def pattern(call: SavedCall) -> Iterator[Any]:
    """Yield the properties of a call on which its cut depends."""
    for tensor, takes_gradient in zip(call.tensors, call.wants_grad, strict=True):
        yield tensor.ndim, tensor.dtype, takes_gradient, tensor.shape[:1] == (call.batch,)


def find_cut(module: nn.Module, call: SavedCall, run: Run, *, values: bool) -> Cut:
    """Return how a call can be divided into slices.

    Without `values` (on fake tensors), only the shapes are compared.
    """
    if any(isinstance(child, _BatchNorm) and child.training for child in module.modules()):
        return Cut(obstacle=f"{type(module).__name__} has BatchNorm, which mixes samples")
    reason, failed = "its inputs have no samples in their first dimension", False
    for number, inputs in enumerate(_hypotheses(call)):

        def trial(number: int = number, inputs: tuple[bool, ...] = inputs) -> Cut:
            cut = _try_cut(call, Cut(inputs), run, values=values)
            if number and values:  # the first hypothesis was wrong, so sizes are not enough
                _check_whole_batch(call, cut, run)
            return cut

        try:
            return attempt(trial)
        except AlwaysFails as error:
            reason = f"{type(module).__name__} does not run on a slice of them ({error})"
            failed = True
        except NotSliceable as obstacle:
            reason = f"{type(module).__name__} {obstacle}"
    return Cut(obstacle=reason, failed=failed)


class NotSliceable(Exception):
    """The reason why a call cannot be divided in a given way."""


class AlwaysFails(NotSliceable):
    """Raised with the first line of an error that a trial raises every time."""


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
        except Exception as repeated:
            if is_out_of_memory(repeated):
                raise
            raise AlwaysFails((str(error).splitlines() or [""])[0]) from error
        raise


def _hypotheses(call: SavedCall) -> Iterator[tuple[bool, ...]]:
    """Yield the choices of tensors that may have samples in their first dimension, likeliest first.

    The first choice contains all tensors whose first dimension has the size of the batch; the other
    choices are subsets of it.
    """
    fits = [t.ndim > 0 and 1 < t.shape[0] == call.batch for t in call.tensors]
    likely = [
        tuple(fit and t.ndim >= least for fit, t in zip(fits, call.tensors, strict=True))
        for least in (1, 2, 3)
    ]
    choices: Iterable[tuple[bool, ...]] = ()
    if sum(fits) <= MAX_TENSORS:
        choices = itertools.product(*([True, False] if fit else [False] for fit in fits))
    seen = set()
    for flags in itertools.chain(likely, choices):
        if any(flags) and flags not in seen:
            seen.add(flags)
            yield flags


def _try_cut(call: SavedCall, cut: Cut, run: Run, *, values: bool) -> Cut:
    with torch.no_grad(), ConstantRandomness():
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
            with_nan = tensors_in(_slice(call, cut, run, slice(0, 2), invalid=True))
            for count, before, after in zip(cut.outputs, tensors_in(both), with_nan, strict=True):
                if count:
                    before, after = before[count:], after[count:]
                if after.is_floating_point() and (after.isnan() & ~before.isnan()).any():
                    raise NotSliceable("mixes the samples of a batch")
    return cut


def _check_whole_batch(call: SavedCall, cut: Cut, run: Run) -> None:
    """Raise NotSliceable unless two samples give the same results alone as in the whole batch.

    `cut` is the division to be checked.
    """
    with torch.no_grad(), ConstantRandomness():
        whole = tensors_in(_slice(call, cut, run, slice(0, call.batch)))
        two = tensors_in(_slice(call, cut, run, slice(0, 2)))
    for rows, expected, part in zip(cut.outputs, whole, two, strict=True):
        if not agree(expected[: 2 * rows] if rows else expected, part):
            raise NotSliceable("gives other results for two samples than for all")


def _slice(call: SavedCall, cut: Cut, run: Run, part: slice, *, invalid: bool = False) -> Any:
    tensors = []
    for tensor, sliced in zip(call.tensors, cut.inputs, strict=True):
        piece = tensor[part] if sliced else tensor
        if sliced and invalid and piece.is_floating_point():
            piece = piece.clone()
            piece[0] = torch.nan
        tensors.append(piece.detach())
    args, kwargs = call.arguments(tensors)
    return run(*args, **kwargs)


def _rows(both: Any, first: Any, second: Any, *, values: bool) -> int:
    """Return the number of rows of an output per sample; 0 if all samples share the output.

    The arguments are the output for two samples together, for the first one and for the second one.
    Raise NotSliceable if these do not fit each other. Without `values`, only shapes are compared.
    """
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


class ConstantRandomness(DispatchMode):
    """A mode that makes random results constant, so that two runs can be compared."""

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
        for result in tensors_in(out):
            value = 0.5 if result.is_floating_point() else 0
            result.fill_(1 if "bernoulli" in str(func) else value)
        return out
