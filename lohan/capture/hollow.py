"""A forward that runs what its recomputation will run, and keeps nothing for it.

Operations may depend on whether a graph is made: attention kernels also give what backward wants,
a matrix product folds otherwise where an input takes a gradient, modules ask whether gradients are
on. A result that is kept in forward can only take its place in recomputation if both run the same.
So forward makes a graph too, but one that saves no tensor and is gone when the call ends.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils import _pytree as pytree

from lohan.errors import LohanError, ModelError

IN_PLACE = "in-place operation"  # what torch calls it when an input is changed


def run_hollow(run: Callable[[], Any], name: str) -> Any:
    """What `run` returns, without its graph. `name` is the block's."""
    try:
        with hollow_graph():
            out = run()
    except RuntimeError as error:
        if IN_PLACE in str(error) and "leaf" in str(error):
            raise ModelError(changed_input(name)) from error
        raise
    return pytree.tree_map_only(torch.Tensor, torch.Tensor.detach, out)


def changed_input(name: str) -> str:
    return (
        f"block {name} changes its input in place, so it cannot be recomputed; make the operation "
        "out of place"
    )


@contextmanager
def hollow_graph() -> Iterator[None]:
    """Gradients are on, and nothing is saved for them."""
    hooks = torch.autograd.graph.saved_tensors_hooks(lambda tensor: None, _empty)
    with torch.enable_grad(), hooks:
        yield


def _empty(saved: Any) -> torch.Tensor:
    raise LohanError("backward ran through a forward that saves nothing; this is a bug in LoHan")
