"""Any nn.Module made of repeated blocks, with its own loss, equals the in-memory run."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import lohan
from lohan.model.layout import RESIDENT
from tests.support.models import (
    assert_close,
    assert_same,
    attached,
    lohan_run,
    master_weights,
    plain_run,
)
from tests.support.models import stored_bytes as stored

WIDTH = 24


class Block(nn.Module):
    """A block that takes a keyword and a tuple, and returns a tuple."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH)
        self.frozen = nn.Parameter(torch.randn(WIDTH), requires_grad=False)

    def forward(self, x, pair=None, *, gain=None):
        y = self.down(torch.tanh(self.up(self.norm(x) * self.frozen)))
        if pair is not None:
            y = y * pair[0] + pair[1]
        if gain is not None:
            y = y * gain
        return x + y, y.square().mean(-1)


class Mixer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return x + torch.tanh(self.linear(x))


class Net(nn.Module):
    """A model with a ModuleList, a Sequential, parameters on the root and a frozen layer.

    `skip` leaves one block out, so that it gets no gradient.
    """

    def __init__(self) -> None:
        super().__init__()
        self.entry = nn.Linear(10, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.tail = nn.Sequential(*(Mixer() for _ in range(2)))
        self.exit = nn.Linear(WIDTH, 4)
        self.shift = nn.Parameter(0.1 * torch.randn(WIDTH))
        self.mix = nn.Parameter(torch.eye(WIDTH) + 0.1 * torch.randn(WIDTH, WIDTH))
        self.basis = nn.Linear(WIDTH, WIDTH).requires_grad_(False)

    def forward(self, x, target, skip=None):
        hidden = self.entry(x) + self.shift
        extra = 0.0
        for number, block in enumerate(self.blocks):
            if skip is None or int(skip) != number:
                pair = (torch.full_like(hidden[:, :1], 0.9), hidden.mean(1, keepdim=True))
                hidden, aux = block(hidden, pair, gain=self.shift[:1] + 1.0)
                extra = extra + aux.mean()
        hidden = self.basis(self.tail(hidden @ self.mix))
        return nn.functional.mse_loss(self.exit(hidden), target) + 0.1 * extra


def net() -> Net:
    torch.manual_seed(3)
    return Net()


def data(steps, *, skip=None):
    """Return batches; `skip` maps a step to the block that is left out."""
    generator = torch.Generator().manual_seed(5)
    created = []
    for step in range(steps):
        batch = {
            "x": torch.randn(6, 5, 10, generator=generator),
            "target": torch.randn(6, 5, 4, generator=generator),
        }
        if skip and step in skip:
            batch["skip"] = torch.tensor(skip[step])
        created.append(batch)
    return created


@pytest.mark.parametrize("micro_batch", [None, 4])
def test_equals_in_memory_adamw(micro_batch, tmp_path):
    model = net()
    start = {name: p.detach().clone() for name, p in model.named_parameters()}
    expected_losses, expected = plain_run(model, data(10))
    losses, weights = lohan_run(model, data(10), tmp_path, micro_batch=micro_batch)
    assert losses == pytest.approx(expected_losses, rel=1e-5)
    assert_close(weights, expected)
    for name in start:  # frozen ones have not moved at all, the others have
        moved = not torch.equal(weights[name], start[name])
        assert moved is not ("frozen" in name or "basis" in name), name


def test_finds_the_blocks_of_a_plain_module(tmp_path):
    model = net()
    with attached(model, tmp_path) as session:
        blocks = session.executor.blocks
        assert {site.name for site in blocks.sites} == {
            "entry",
            "exit",
            "basis",
            "blocks.0",
            "blocks.1",
            "blocks.2",
            "tail.0",
            "tail.1",
        }
        loose = {tensor.name for tensor in blocks.by_key[RESIDENT].tensors}
        assert loose == {"shift", "mix"}


def test_block_without_gradient_keeps_weights_and_state(tmp_path):
    model = net()
    first, skipping = data(2, skip={1: 1})
    with attached(model, tmp_path) as session:
        model(**first).backward()
        before = stored(session)
        model(**skipping).backward()
        after = stored(session)
        assert session.step == 2
    same = {key for key in before if before[key] == after[key]}
    frozen = {f"w/{name}/frozen" for name in ("basis", "blocks.0", "blocks.1", "blocks.2")}
    assert same == {"w/blocks.1", "s/blocks.1", *frozen}


def test_block_without_gradient_then_with(tmp_path):
    """PyTorch counts Adam's steps per parameter: one that missed an update is behind in it."""
    model, batches = net(), data(8, skip={0: 2, 3: 1, 4: 1})
    expected_losses, expected = plain_run(model, batches)
    losses, weights = lohan_run(model, batches, tmp_path)
    assert losses == pytest.approx(expected_losses, rel=1e-5)
    assert_close(weights, expected)


def test_second_session_continues_where_the_first_ended(tmp_path):
    """Both sessions together give the bits of a single one."""
    whole, first = net(), net()
    _, expected = lohan_run(whole, data(6), tmp_path / "whole")
    with attached(first, tmp_path / "parts"):
        for batch in data(6)[:3]:
            first(**batch).backward()
    second = copy.deepcopy(net())
    with attached(second, tmp_path / "parts", resume=True) as session:
        assert session.step == 3
        for batch in data(6)[3:]:
            second(**batch).backward()
        assert_same(master_weights(session), expected)


class Twice(nn.Module):
    """A block that is called three times in a forward, with weights shared with another place."""

    def __init__(self) -> None:
        super().__init__()
        self.entry = nn.Linear(10, WIDTH)
        self.blocks = nn.ModuleList([Mixer(), Mixer()])
        self.blocks[1].linear.weight = self.blocks[0].linear.weight
        self.exit = nn.Linear(WIDTH, 4)

    def forward(self, x, target):
        hidden = self.entry(x)
        for _ in range(3):
            hidden = self.blocks[1](self.blocks[0](hidden))
        return nn.functional.mse_loss(self.exit(hidden), target)


def test_shared_and_repeated_blocks(tmp_path):
    torch.manual_seed(3)
    model = Twice()
    expected_losses, expected = plain_run(model, data(6))
    losses, weights = lohan_run(model, data(6), tmp_path, micro_batch=4)
    assert losses == pytest.approx(expected_losses, rel=1e-5)
    assert_close(weights, expected)


def test_fp16_with_a_loss_of_its_own_is_refused(tmp_path):
    with pytest.raises(lohan.LohanError, match="use bf16 or fp32"):
        attached(net().half(), tmp_path)
    assert not any(tmp_path.iterdir())
