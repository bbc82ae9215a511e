"""Leaves of arguments and results, as torch's pytree finds them."""

from __future__ import annotations

import random
from collections import OrderedDict, namedtuple
from typing import Any

import pytest
import torch
from torch.utils import _pytree as pytree

from lohan.capture import saved_call

Pair = namedtuple("Pair", "one other")


def tree(draw: random.Random, depth: int = 4) -> Any:
    """Draw nested containers of all kinds, including empty ones."""
    if not depth or draw.random() < 0.3:
        return draw.choice((None, True, 3, 0.5, "text", b"bytes", slice(1), complex(1)))
    parts = [tree(draw, depth - 1) for _ in range(draw.randrange(4))]
    names = {f"{n}": part for n, part in enumerate(parts)}
    kinds = (parts, tuple(parts), names, OrderedDict(names), Pair(tree(draw, depth - 1), 1))
    return draw.choice(kinds)


@pytest.mark.parametrize("seed", range(5))
def test_finds_the_same_leaves_as_pytree(seed):
    draw = random.Random(seed)
    for item in (tree(draw) for _ in range(40)):
        leaves, spec = saved_call.flatten(item)
        assert leaves == pytree.tree_leaves(item) == saved_call.tree_leaves(item)
        again = saved_call.unflatten(leaves, spec)
        assert again == item and repr(again) == repr(item)


def test_detached_cuts_every_tensor_of_a_tree_from_its_graph():
    x = torch.ones(2, requires_grad=True)
    result = saved_call.detached({"a": (x * 2, 3), "b": [x]})
    assert result["a"][1] == 3 and isinstance(result["b"], list)
    assert not result["a"][0].requires_grad and not result["b"][0].requires_grad
