"""Every architecture equals in-memory PyTorch, although the engine has no code for any of them."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
import torch

from tests.support.architectures import (
    ARCHITECTURES,
    architecture_batches,
    architecture_model,
    without_noise,
)
from tests.support.models import (
    assert_close,
    assert_same,
    attached,
    lohan_run,
    loss_of,
    lr,
    master_weights,
    plain_run,
)

STEPS = 10
DIFFUSERS = ("dit", "flux", "sd3")
PLANNED = ("dit", "mixtral", "llava")  # with a batch: DiT must, for what it calls outside a block


def of(kind: str, steps: int) -> tuple[torch.nn.Module, list[dict[str, torch.Tensor]]]:
    if kind in DIFFUSERS:
        pytest.importorskip("diffusers")
    return architecture_model(kind), architecture_batches(kind, steps)


@pytest.mark.parametrize(
    ("kind", "micro_batch"), [*((kind, 1) for kind in ARCHITECTURES), ("dit", None), ("t5", None)]
)
def test_equals_in_memory_adamw(kind, micro_batch, tmp_path):
    """Models of many architectures equal AdamW in memory.

    Micro-batches are used wherever the inputs of a block have samples in their first dimension.
    The patches of all images of Qwen-VL do not.
    """
    model, data = of(kind, STEPS)
    torch.manual_seed(7)  # DiT drops classes at random
    expected_losses, expected = plain_run(model, data)
    torch.manual_seed(7)
    options = {"batch": data[0]} if kind in PLANNED else {}
    with warnings.catch_warnings():
        warnings.simplefilter("error" if kind != "qwen-vl" else "ignore", RuntimeWarning)
        losses, weights = lohan_run(model, data, tmp_path, micro_batch=micro_batch, **options)
    assert losses == pytest.approx(expected_losses, rel=1e-5)
    assert_close(without_noise(weights), without_noise(expected))


MODES = [
    {"update_mode": "serial"},
    {"update_mode": "naive"},
    {"update_mode": "optimized", "activations": "all"},
    {"activations": "all"},
    {"activations": "static", "clip": 1e9},
    {"activations": "recompute", "clip": 1e9, "update_mode": "serial"},
]
LAYERS = {"dit": 3, "qwen3-moe": 2, "mixtral": 2, "t5": 4}
CASES: list[Any] = [
    pytest.param(kind, options, marks=pytest.mark.slow if number % 2 == second else ())
    for second, kind in enumerate(("dit", "qwen3-moe"))
    for number, options in enumerate(MODES)
]
CASES += [("mixtral", MODES[3]), ("t5", MODES[3])]


@pytest.fixture(scope="module")
def one_after_the_other(tmp_path_factory):
    """Train each model without overlap; all other runs must equal it bit for bit."""
    created = {}
    for kind in LAYERS:
        model, data = of(kind, 3)
        torch.manual_seed(7)
        place = tmp_path_factory.mktemp(kind)
        created[kind] = (
            model,
            data,
            lohan_run(
                copy.deepcopy(model), data, place, batch=data[0], micro_batch=2, overlap=False
            ),
        )
    return created


@pytest.mark.parametrize(
    ("kind", "options"),
    CASES,
    ids=lambda value: value if isinstance(value, str) else "-".join(map(str, value.values())),
)
def test_gradient_and_activation_modes_change_no_bit(kind, options, one_after_the_other, tmp_path):
    model, data, (expected_losses, expected) = one_after_the_other[kind]
    model = copy.deepcopy(model)
    torch.manual_seed(7)
    with (
        warnings.catch_warnings(),
        attached(model, tmp_path, batch=data[0], micro_batch=2, **options) as session,
    ):
        warnings.simplefilter("error", RuntimeWarning)  # what is kept is used
        losses = []
        for batch in data:
            loss = loss_of(model, batch)
            loss.backward()
            losses.append(loss.item())
        assert_same(master_weights(session), expected)
        if options.get("activations") == "all":
            everywhere = [name for name, blocks in session.plan.kept if blocks == LAYERS[kind]]
            assert len(everywhere) > 8
    assert losses == expected_losses


def test_experts_without_tokens_are_updated_as_in_memory(tmp_path):
    """Their gradient is zero, not absent, so weight decay and momentum still apply."""
    model, data = of("qwen3-moe", 5)
    data = [{key: tensor[:1, 4:6] for key, tensor in batch.items()} for batch in data]
    name = "model.layers.0.mlp.experts.gate_up_proj"
    before = model.get_parameter(name).detach().clone()
    expected_losses, expected = plain_run(model, data)
    losses, weights = lohan_run(copy.deepcopy(model), data, tmp_path / "all")
    assert losses == pytest.approx(expected_losses, rel=1e-5)
    # With two tokens, some gradients of attention are smaller than their rounding error (4e-9 and
    # 2e-8), and Adam turns that into updates. Experts have no such gradients.
    experts = [key for key in weights if ".experts." in key]
    assert_close({key: weights[key] for key in experts}, {key: expected[key] for key in experts})
    _, first = lohan_run(model, data[:1], tmp_path / "first")
    decayed = before * (1 - lr(0) * 0.1)
    idle = [
        torch.allclose(a, b, rtol=1e-6, atol=0) for a, b in zip(first[name], decayed, strict=True)
    ]
    assert 4 <= sum(idle) < 8  # two tokens go to four of eight experts at most
    assert not any(torch.equal(a, b) for a, b in zip(first[name], before, strict=True))


def test_router_logits_of_the_whole_batch_have_gradients(tmp_path):
    """A loss of one's own on what is collected inside blocks, in slices or not."""
    model, data = of("mixtral", 3)

    class Own(torch.nn.Module):
        def __init__(self, inner):
            super().__init__()
            self.inner = inner

        def forward(self, input_ids, **_):
            out = self.inner(input_ids=input_ids)
            spread = torch.stack(
                [logits.logsumexp(-1).square().mean() for logits in out.router_logits]
            )
            return out.logits.square().mean() + spread.sum()

    expected_losses, expected = plain_run(Own(model), data)
    losses, weights = lohan_run(Own(model), data, tmp_path, micro_batch=1)
    assert losses == pytest.approx(expected_losses, rel=1e-5)
    assert_close(weights, expected)
