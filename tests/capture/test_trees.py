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
    for made in (tree(draw) for _ in range(40)):
        leaves, spec = saved_call.flatten(made)
        assert leaves == pytree.tree_leaves(made) == saved_call.tree_leaves(made)
        again = saved_call.unflatten(leaves, spec)
        assert again == made and repr(again) == repr(made)


def test_tensors_lose_their_history():
    x = torch.ones(2, requires_grad=True)
    made = saved_call.detached({"a": (x * 2, 3), "b": [x]})
    assert made["a"][1] == 3 and isinstance(made["b"], list)
    assert not made["a"][0].requires_grad and not made["b"][0].requires_grad
