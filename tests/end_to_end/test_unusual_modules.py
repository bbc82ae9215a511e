"""Unusual blocks behave exactly as in memory, or are refused."""

from __future__ import annotations

import copy
import warnings
from collections import UserDict
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn
from transformers import CLIPVisionConfig, CLIPVisionModel

import lohan
from lohan.errors import BudgetError, ConfigError, ModelError
from tests.support.architectures import (
    MODULE_WIDTH,
    Centred,
    Plain,
    StepOutput,
    Streams,
)
from tests.support.models import (
    assert_close,
    attached,
    lohan_run,
    loss_of,
    master_weights,
    plain_run,
)


class Rebinding(StepOutput):
    """Gives its weight other memory in every call, as `module.to(dtype)` does."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.linear.weight.data = self.linear.weight.data.clone()
        return super().forward(x)


class Normed(nn.Module):
    """BatchNorm over samples and tokens: statistics that change, samples that mix."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(MODULE_WIDTH, MODULE_WIDTH, bias=False)
        self.norm = nn.BatchNorm1d(MODULE_WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.tanh(self.norm(self.linear(x).transpose(1, 2)).transpose(1, 2))


class SequenceFirst(nn.Module):
    """Attention over the first dimension: tokens come first here, samples second."""

    def __init__(self) -> None:
        super().__init__()
        # The gradient of a key bias is zero in exact arithmetic; Adam would update it by rounding.
        self.attention = nn.MultiheadAttention(MODULE_WIDTH, 2, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.attention(x, x, x, need_weights=False)[0]


class Spectral(nn.Module):
    """Each forward moves a vector on which its result depends."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(MODULE_WIDTH, MODULE_WIDTH)
        self.register_buffer("direction", torch.ones(MODULE_WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            moved = self.linear.weight @ self.direction
            self.direction = moved / moved.norm()
        return x + torch.tanh(self.linear(x) * (self.linear.weight @ self.direction))


class Counting(nn.Module):
    """Counts its calls in a buffer, in place, and in an attribute; its result depends on both."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(MODULE_WIDTH, MODULE_WIDTH)
        self.calls = nn.Buffer(torch.zeros((), dtype=torch.long))
        self.count = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls.add_(1)
        self.count += 1
        return x + torch.tanh(self.linear(x)) * (1 + 0.1 * self.calls + 0.2 * self.count)


class Sharing(nn.Module):
    """Blocks that write into a mapping which all of them get, and read what others wrote.

    The model chooses its path by integers, and counts its calls as its blocks do.
    """

    def __init__(self, kind: Any = dict) -> None:
        super().__init__()
        self.entry = nn.Linear(MODULE_WIDTH, MODULE_WIDTH)
        self.blocks = nn.ModuleList(Writer() for _ in range(3))
        self.kind, self.seen = kind, nn.Buffer(torch.zeros(2, dtype=torch.long))

    def forward(self, x: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        self.seen[0] += 1
        self.seen = self.seen + 1
        hidden, shared = self.entry(x[rows.nonzero()[:, 0]]), self.kind()
        for number, block in enumerate(self.blocks):
            hidden = block(hidden, number, shared=shared)
        return hidden.square().mean() + shared["first"][1].sin().mean() * self.seen.sum()

    @staticmethod
    def data(steps: int) -> list[dict[str, torch.Tensor]]:
        g = torch.Generator().manual_seed(3)
        rows = torch.tensor([1, 0, 1, 1, 1])
        return [
            {"x": torch.randn(5, 3, MODULE_WIDTH, generator=g), "rows": rows} for _ in range(steps)
        ]


class Writer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.key, self.value = (
            nn.Linear(MODULE_WIDTH, MODULE_WIDTH),
            nn.Linear(MODULE_WIDTH, MODULE_WIDTH),
        )

    def forward(self, x: torch.Tensor, number: int, *, shared: Any) -> torch.Tensor:
        if number == 0:
            shared["first"] = torch.tanh(self.key(x)), self.value(x)
        if number == 1:
            shared["second"] = shared["first"][0] + self.key(x)
        extra = shared["second"] if number == 2 else shared["first"][1]
        return x + torch.tanh(self.value(x)) * extra


def module_of(kind, *args, **options) -> nn.Module:
    torch.manual_seed(3)
    return kind(*args, **options)


def site_names(session) -> set[str]:
    return {site.name for site in session.executor.blocks.sites}


@pytest.mark.parametrize("options", [{}, {"micro_batch": 1}, {"micro_batch": 3}])
def test_streams_conditions_and_nested_lists(options, tmp_path):
    """Gradients of shared inputs add up, and only inputs with samples are sliced.

    The table is not sliced although it has as many rows as there are samples.
    """
    model, data = module_of(Streams), Streams.data(6)
    expected_losses, expected = plain_run(model, data)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # micro-batches stay on
        losses, weights = lohan_run(model, data, tmp_path, **options)
    assert losses == pytest.approx(expected_losses, rel=1e-5)
    assert_close(weights, expected)


def test_nested_lists_are_cut_into_their_modules(tmp_path):
    with attached(module_of(Streams), tmp_path) as session:
        assert site_names(session) == {
            "entry",
            "condition.0",
            "blocks.0",
            "blocks.1",
            "blocks.2",
            "nested.0.0",
            "nested.0.2",
            "nested.1.0",
            "nested.1.2",
        }


def test_only_named_modules_become_blocks(tmp_path):
    """Only what is named is a block; the rest falls into its layers."""
    with attached(module_of(Streams), tmp_path, blocks=["nested", "blocks.1"]) as session:
        assert site_names(session) == {
            "entry",
            "condition.0",
            "blocks.1",
            "nested.0.0",
            "nested.0.2",
            "nested.1.0",
            "nested.1.2",
            "blocks.0.one",
            "blocks.0.two",
            "blocks.0.scale",
            "blocks.2.one",
            "blocks.2.two",
            "blocks.2.scale",
        }


def test_blocks_by_a_wrong_name(tmp_path):
    with pytest.raises(ConfigError, match=r"blocks names 'block'.*lists are blocks, nested"):
        attached(module_of(Streams), tmp_path, blocks=["block"])
    assert not any(tmp_path.iterdir())


# -- used outside of its block --------------------------------------------------------------------


@pytest.mark.parametrize("outside", ["module", "parameter"])
@pytest.mark.parametrize("micro_batch", [None, 3])
def test_uses_outside_a_block_are_found_with_a_batch(outside, micro_batch, tmp_path):
    model, data = module_of(Plain, outside=outside), Plain.data(5)
    expected_losses, expected = plain_run(model, data)
    losses, weights = lohan_run(model, data, tmp_path, batch=data[0], micro_batch=micro_batch)
    assert losses == pytest.approx(expected_losses, rel=1e-5)
    assert_close(weights, expected)


@pytest.mark.parametrize("outside", ["module", "parameter"])
def test_uses_outside_a_block_are_streamed_without(outside, tmp_path):
    model, data = module_of(Plain, outside=outside), Plain.data(3)
    expected_losses, expected = plain_run(model, data)
    losses, weights = lohan_run(model, data, tmp_path)
    assert losses == pytest.approx(expected_losses, rel=1e-5)
    assert_close(weights, expected)


def test_a_module_that_is_kept_in_memory_may_be_read_anywhere(tmp_path):
    model, data = module_of(Plain, outside="parameter"), Plain.data(3)
    expected_losses, expected = plain_run(model, data)
    losses, weights = lohan_run(model, data, tmp_path, resident=["entry"])
    assert losses == pytest.approx(expected_losses, rel=1e-5)
    assert_close(weights, expected)


# -- samples that mix -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("block", "reason"),
    [
        (Centred, "Centred (mixes|gives other results)"),
        (SequenceFirst, "SequenceFirst (mixes|gives other results)"),
        (Normed, "BatchNorm, which mixes samples"),
    ],
)
def test_a_block_that_mixes_samples_runs_as_a_whole(block, reason, tmp_path):
    model, data = module_of(Plain, block), Plain.data(4)
    expected_losses, expected = plain_run(model, data)
    with pytest.warns(RuntimeWarning, match=f"micro-batches are off for block blocks.0.*{reason}"):
        losses, weights = lohan_run(model, data, tmp_path, micro_batch=1)
    assert losses == pytest.approx(expected_losses, rel=1e-5)
    assert_close(weights, expected)


def test_micro_batches_that_are_off_are_planned_for(tmp_path):
    """BatchNorm is known before the start: the plan has memory for the whole batch."""
    peaks = {}
    for block in (StepOutput, Normed):
        (batch,) = Plain.data(1, samples=512)
        with attached(
            module_of(Plain, block), tmp_path / block.__name__, batch=batch, micro_batch=1
        ) as s:
            footprint = s.context.workload.measure(1)
            peaks[block] = footprint.sites["blocks.0"].peak_bytes
    assert peaks[Normed] > 100 * peaks[StepOutput]


def test_a_block_that_turns_out_to_mix_samples_stays_within_the_budget(tmp_path):
    model, (batch,) = module_of(Plain, Centred), Plain.data(1, samples=4096)
    budget = lohan.Budget(host="7MiB", ssd=[tmp_path])
    with attached(model, tmp_path, batch=batch, budget=budget, micro_batch=64) as session:
        wrong = r"blocks\.0 cannot run in micro-batches: .* 4096 samples need .* MiB, the plan has"
        with pytest.raises(BudgetError, match=wrong):
            model(**batch)
        assert session.step == 0


# -- buffers that change --------------------------------------------------------------------------


@pytest.mark.parametrize("block", [Normed, Spectral])
def test_buffers_change_once_per_step_and_come_back_with_resume(block, tmp_path):
    model, data = module_of(Plain, block), Plain.data(6)
    reference = copy.deepcopy(model)
    optimizer = torch.optim.AdamW(
        [
            {"params": [p for p in reference.parameters() if p.ndim >= 2], "weight_decay": 0.1},
            {"params": [p for p in reference.parameters() if p.ndim < 2], "weight_decay": 0.0},
        ],
        lr=1e-3,
        betas=(0.9, 0.95),
    )
    for batch in data:
        reference(**batch).backward()
        optimizer.step()
        optimizer.zero_grad()
    adamw = lohan.AdamW(lr=1e-3, betas=(0.9, 0.95), weight_decay=0.1)
    first = copy.deepcopy(model)
    with attached(first, tmp_path, optimizer=adamw):
        for batch in data[:3]:
            first(**batch).backward()
    again = copy.deepcopy(model)
    with attached(again, tmp_path, optimizer=adamw, resume=True) as session:
        for batch in data[3:]:
            again(**batch).backward()
        assert_close(master_weights(session), dict(reference.named_parameters()))
    buffers = dict(again.named_buffers())
    for name, wanted in reference.named_buffers():
        assert torch.allclose(buffers[name].float(), wanted.float(), atol=1e-5), name


@pytest.mark.parametrize("options", [{}, {"planned": True}, {"micro_batch": 2}])
def test_counters_advance_once_per_step(options, tmp_path):
    """Counters in buffers or attributes, changed in place or not, advance once per step.

    Neither planning nor recomputation counts, and a block that counts is not run in slices.
    """
    model, data = module_of(Plain, Counting), Plain.data(3)
    reference = copy.deepcopy(model)
    expected_losses, expected = plain_run(model, data)
    if options.pop("planned", False):
        options = {"batch": data[0], "activations": "all"}
    with warnings.catch_warnings(record=True) as messages:
        warnings.simplefilter("always", RuntimeWarning)
        losses, weights = lohan_run(model, data, tmp_path, **options)
    whole = [str(w.message) for w in messages if "micro-batches are off" in str(w.message)]
    assert len(whole) == ("micro_batch" in options)
    assert losses == pytest.approx(expected_losses, rel=1e-5)
    assert_close(weights, expected)
    for block in model.blocks:
        assert (int(block.calls), block.count) == (3, 3)
    assert int(reference.blocks[0].calls) == 0


@pytest.mark.parametrize("kind", [dict, UserDict])
@pytest.mark.parametrize("options", [{}, {"planned": True}, {"micro_batch": 2}])
def test_mappings_that_blocks_write_into(kind, options, tmp_path):
    """A value that one block writes and another reads has its gradient.

    The plan needs the values of integers here, so buffers really change while it is made.
    """
    model, data = module_of(Sharing, kind), Sharing.data(3)
    expected_losses, expected = plain_run(model, data)
    if options.pop("planned", False):
        options = {"batch": data[0], "activations": "all"}
    losses, weights = lohan_run(model, data, tmp_path, **options)
    assert losses == pytest.approx(expected_losses, rel=1e-5)
    assert_close(weights, expected)
    assert model.seen.tolist() == [6, 3]


def test_buffers_that_are_too_large_to_commit_are_refused(tmp_path):
    class Remembering(StepOutput):
        def __init__(self):
            super().__init__()
            self.register_buffer("seen", torch.zeros(2**20 + 1))

        def forward(self, x):
            self.seen += 1
            return super().forward(x)

    model = module_of(Plain, Remembering)
    with attached(model, tmp_path) as session:
        with pytest.raises(
            ModelError, match=r"changes 3 buffers of 12\.\d+ MiB .*4\.00 MiB can be"
        ):
            loss_of(model, Plain.data(1)[0]).backward()
        assert session.step == 0


# -- what cannot be seen --------------------------------------------------------------------------


@dataclass
class Box:
    tensor: torch.Tensor


class Taking(StepOutput):
    def forward(self, x):
        return super().forward(x.tensor if isinstance(x, Box) else x)


class Boxed(Plain):
    """A block that passes the hidden state inside an object."""

    def forward(self, x):
        hidden = self.entry(x)
        for block in self.blocks:
            hidden = block(Box(hidden))
        return self.exit(hidden).square().mean()


class Returning(StepOutput):
    def forward(self, x):
        return Box(super().forward(x))


class Unboxing(Plain):
    def forward(self, x):
        hidden = self.entry(x)
        for block in self.blocks:
            hidden = block(hidden).tensor
        return self.exit(hidden).square().mean()


def test_tensors_inside_objects_are_refused(tmp_path):
    (batch,) = Plain.data(1)
    given = pytest.raises(ModelError, match=r"blocks\.0 is given tensors .* inside a Box")
    with attached(model := module_of(Boxed, Taking), tmp_path / "in"), given:
        model(**batch)
    returned = pytest.raises(ModelError, match=r"blocks\.0 returns tensors inside a Box")
    with attached(model := module_of(Unboxing, Returning), tmp_path / "out"), returned:
        model(**batch)


def test_autocast_is_the_same_in_recomputation(tmp_path):
    model, data = module_of(Plain), Plain.data(4)

    class Cast(nn.Module):
        def __init__(self, inner):
            super().__init__()
            self.inner = inner

        def forward(self, **batch):
            with torch.autocast("cpu", dtype=torch.bfloat16):
                return self.inner(**batch).float()

    expected_losses, expected = plain_run(Cast(model), data)
    losses, weights = lohan_run(Cast(model), data, tmp_path)
    assert losses == pytest.approx(expected_losses, rel=1e-5)
    assert_close(weights, expected)


class WithTower(nn.Module):
    """A block that uses the second-last hidden states of a transformers model."""

    def __init__(self) -> None:
        super().__init__()
        config = CLIPVisionConfig(
            image_size=8,
            patch_size=4,
            hidden_size=16,
            intermediate_size=16,
            num_attention_heads=2,
            num_hidden_layers=2,
        )
        self.tower = CLIPVisionModel(config)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        actual = self.tower(pixel_values=x, output_hidden_states=True).hidden_states
        return x + actual[-2].mean((1, 2))[:, None, None, None]


class Towers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks, self.head = nn.ModuleList(WithTower() for _ in range(2)), nn.Linear(8, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x).pow(2).mean()


@pytest.mark.parametrize("check", [False, True])
def test_hidden_states_of_a_model_inside_a_block(check, tmp_path):
    """Recomputation does not install transformers' hooks once more."""
    torch.manual_seed(0)
    model = Towers()
    data = [{"x": torch.randn(2, 3, 8, 8)} for _ in range(3)]
    losses, weights = plain_run(model, data)
    actual, result = lohan_run(model, data, tmp_path, blocks=["blocks"], check=check)
    assert actual == pytest.approx(losses, rel=1e-5)
    assert_close(result, weights)


@pytest.mark.parametrize("options", [{}, {"micro_batch": 1}, {"overlap": False}])
def test_a_block_that_rebinds_its_weight_sees_every_update(options, tmp_path):
    """Data assigned to a parameter in one call must not be used in the next."""
    data = Plain.data(4)
    expected_losses, expected = plain_run(module_of(Plain), data)
    losses, weights = lohan_run(module_of(Plain, Rebinding), data, tmp_path, **options)
    assert losses == pytest.approx(expected_losses, rel=1e-5)
    assert_close(weights, expected)
