"""A loss over a count of tokens that the caller gives, as Trainer does for several batches."""

from __future__ import annotations

import copy

import pytest
import torch

from tests.support.models import attached, batches, small_model


def test_caller_sets_the_number_of_labels(tmp_path):
    model = small_model("llama")
    (batch,) = batches(1, batch=2, seq=12)
    given = {**batch, "num_items_in_batch": torch.tensor(50)}
    plain = copy.deepcopy(model)
    expected = plain(**given).loss
    expected.backward()
    norm = torch.nn.utils.get_total_norm([p.grad for p in plain.parameters()]).item()
    with attached(model, tmp_path, clip=1e9) as session:
        with torch.no_grad():
            assert model(**given).loss.item() == pytest.approx(expected.item(), rel=1e-5)
        loss = model(**given).loss
        loss.backward()
        assert loss.item() == pytest.approx(expected.item(), rel=1e-5)
        assert session.grad_norm == pytest.approx(norm, rel=1e-4)
