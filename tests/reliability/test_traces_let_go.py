"""Tracing a block leaves nothing behind: neither its tensors nor its graph."""

from __future__ import annotations

import gc

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor

from lohan.capture.tracing import inventory


def fake_tensors() -> int:
    gc.collect()
    return sum(type(found) is FakeTensor for found in gc.get_objects())


def test_a_trace_lets_go_of_its_graph() -> None:
    """exp and softmax save their own results, which closes a circle with a hook that keeps them."""
    block = nn.Sequential(nn.Linear(8, 8), nn.Softmax(-1), nn.Tanh())
    before = fake_tensors()
    for _ in range(2):
        assert inventory(block, (torch.zeros(2, 4, 8, device="meta"),)).graph.saved
    assert fake_tensors() == before
