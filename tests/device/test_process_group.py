"""A single process is a process group of one, whose collectives are identities."""

from __future__ import annotations

import pytest
import torch

from lohan.device.ranks import ALONE, join
from lohan.engine.gradients import StepCollectives
from lohan.errors import DataError
from lohan.model.layout import FlatGroup, TensorSpec


def test_collectives_of_a_single_rank_return_their_input():
    value, shard = {"a": [1, None]}, torch.arange(3)
    assert join({}) is ALONE and (ALONE.world, ALONE.rank, ALONE.several) == (1, 0, False)
    assert ALONE.all_gather_object(value)[0] is value and ALONE.all_gather(shard) is shard
    assert ALONE.least(3, None) == [3, None] and ALONE.broadcast_made(lambda: 5) == 5
    assert ALONE.any_rank(True) and not ALONE.any_rank(False)


def test_error_in_a_single_rank_run_is_not_wrapped():
    error = DataError("no rows")
    with pytest.raises(DataError) as actual:
        ALONE.broadcast_made(lambda: (_ for _ in ()).throw(error))
    assert actual.value is error
    with pytest.raises(DataError), ALONE.all_or_none():
        raise error


def test_single_rank_step_reduces_nothing():
    group = FlatGroup("g", (TensorSpec("a", (4,), 0, 4, True, True),), 4)
    alone, grads = StepCollectives(ALONE, [group]), {0: torch.randn(4)}
    loss = torch.tensor(0.1)
    assert alone.loss(loss) is loss and alone.all_reduce_sum(0.1) == 0.1
    assert alone.reduce_scatter_host(0, grads)[0] is grads[0]
    assert alone.late_groups(7, [2, 0]) == [0, 2] and alone.absent(["b", "a"]) == ["b", "a"]
