"""What a mean over labels is taken over, where a model's loss is its own."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
import transformers as hf

from lohan.train.language import CausalLM
from lohan.train.task import Share
from tests.support.every_model import build

BATCH = {
    "input_ids": torch.arange(3, 15).view(2, 6),
    "labels": torch.tensor([[5, 6, 7, -100, -100, -100], [-100, -100, 4, 5, 6, 7]]),
}


@pytest.mark.parametrize(("kind", "count"), [("llama", 6), ("bart", 7), ("opt", 6)])
def test_weights_are_what_the_loss_is_a_mean_of(kind, count):
    """The weight of a batch is the number of labels that its loss is a mean of.

    BART's causal class does not shift its labels, so the halves of a batch add up to the whole
    only if labels are counted as they are.
    """
    model = build("causal", kind).eval()
    assert CausalLM().weight(model, BATCH) == count
    with torch.no_grad():
        whole = model(**BATCH).loss
        parts = [CausalLM().part(BATCH, row, row + 1) for row in range(2)]
        shares = [model(**part).loss * CausalLM().weight(model, part) for part in parts]
    assert torch.allclose(sum(shares) / count, whole, rtol=1e-5)


def test_a_rank_without_rows_has_a_loss_without_weight():
    """Where the loss is the model's own, that of no labels would be nan."""
    model = build("causal", "bart").eval()
    group = SimpleNamespace(
        several=True,
        world=3,
        ranks=SimpleNamespace(rows=lambda count: (2, 2)),
        all_gather_object=lambda value: [value, (1.5, {}, 3), (2.5, {}, 4)],
    )
    session = SimpleNamespace(model=model, process_group=group, head=None)
    loss, actual = Share(session, CausalLM()).loss(BATCH)
    assert loss.item() == 0.0 and actual() == pytest.approx(4.0 / 7)
    loss.backward()
    assert all(p.grad is None or not p.grad.any() for p in model.parameters())
    assert isinstance(model, hf.BartForCausalLM)
