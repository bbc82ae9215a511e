"""The first step checks itself: each block's first call beside a plain call of the same module.

A block is run once more on the same inputs, with the weights that are there and PyTorch's own
autograd. Results, gradients of its inputs and of its weights must be those of the call through
LoHan, up to the rounding of slices. What differs would differ in every step: a module that
remembers something from call to call, so that recomputing it gives another result, say.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch

from lohan.capture.selective_checkpoint import tensors_in
from lohan.errors import ModelError

RELATIVE = {torch.float32: 1e-3, torch.float64: 1e-3}  # of the norm; rounding is far below
RELATIVE_16_BIT = 0.1
NOISE = 1e-2  # times that: of the norm of all gradients of the block. A bias of keys has none
# in exact arithmetic, and what is computed for it is rounding

Grads = Mapping[str, torch.Tensor | None]


class FirstCalls:
    """Which blocks are still to be checked; `sites` are the names of those that are."""

    def __init__(self, sites: Collection[str] = ()) -> None:
        self._left = set(sites)
        self.checked: list[str] = []  # whose results were compared

    def begins(self, name: str) -> bool:
        """Whether this call is the one to check."""
        if name not in self._left:
            return False
        self._left.discard(name)
        return True

    def compare_results(self, name: str, ours: Sequence[Any], plain: Sequence[Any]) -> None:
        for number, (one, other) in enumerate(zip(ours, plain, strict=True)):
            if isinstance(other, torch.Tensor):
                _compare(name, f"result {number}", one, other, 0.0)
        self.checked.append(name)

    def compare_gradients(self, name: str, ours: Grads, plain: Grads) -> None:
        norms = [float(g.float().norm()) for g in plain.values() if g is not None]
        noise = NOISE * sum(norm**2 for norm in norms) ** 0.5
        for key, other in plain.items():
            _compare(name, f"the gradient of {key}", ours.get(key), other, noise)


def _compare(
    name: str, what: str, one: torch.Tensor | None, other: torch.Tensor | None, noise: float
) -> None:
    if one is None and other is None:
        return
    if one is None or other is None:
        there = other if one is None else one
        assert there is not None
        if float(there.float().norm()) == 0.0:  # none, and none in effect
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
        "module on the same inputs, so it would be trained wrongly: nothing was. A block must give "
        "the same whenever it is called with the same inputs; keep this one in memory with "
        f"resident=[{name!r}], or leave the comparison out with check=False if chance is meant"
    )


def plain_gradients(
    run: Callable[[], Any], leaves: Mapping[str, torch.Tensor], grads: Sequence[torch.Tensor | None]
) -> Grads:
    """Of one plain call, for leaves that take one; `grads` are those of its results."""
    with torch.enable_grad():
        out = tensors_in(run())
    pairs = [(o, g) for o, g in zip(out, grads, strict=True) if o.requires_grad and g is not None]
    wanted = {key: leaf for key, leaf in leaves.items() if leaf.requires_grad}
    if not pairs or not wanted:
        return {}
    found = torch.autograd.grad(
        [o for o, _ in pairs], list(wanted.values()), [g for _, g in pairs], allow_unused=True
    )
    return dict(zip(wanted, found, strict=True))
