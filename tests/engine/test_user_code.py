"""User code and blocks may do what PyTorch allows between and inside steps."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import lohan
from lohan.device.emulated import EmulatedDevice
from lohan.errors import ConfigError, ModelError
from lohan.util.units import MiB
from tests.support.architectures import MODULE_WIDTH, Plain, StepOutput
from tests.support.delayed_runs import net_batches, small_net
from tests.support.models import (
    assert_close,
    assert_same,
    attached,
    loss_of,
    master_weights,
    plain_run,
)


@contextmanager
def opened(place: Path, *, device: bool = False, **options: Any) -> Iterator[lohan.Session]:
    place.mkdir(exist_ok=True)
    budget = lohan.Budget(host="64MiB", ssd=[place])
    if device:
        options["device"] = EmulatedDevice(64 * MiB)
    with attached(small_net(), place, budget=budget, **options) as session:
        yield session


# -- evaluation between steps ---------------------------------------------------------------------


@pytest.mark.parametrize("options", [{}, {"device": True}, {"micro_batch": 2}, {"tiles": 4}])
def test_inference_mode_before_the_first_step(options: dict[str, Any], tmp_path: Path) -> None:
    batches, weights = net_batches(2), []
    for evaluates in (False, True):
        with opened(tmp_path / str(evaluates), **options) as session, warnings.catch_warnings():
            warnings.simplefilter("error", RuntimeWarning)  # trials must not fail
            if evaluates:
                with torch.inference_mode():
                    session.model(**batches[0])
            for batch in batches:
                session.model(**batch).backward()
            weights.append(master_weights(session))
    assert_same(*weights)


def test_evaluation_between_steps_of_two_forwards(tmp_path: Path) -> None:
    """The evaluation is expected to run the blocks as often as a step does, and does not."""
    batches, weights = net_batches(6), []
    for evaluates in (False, True):
        with opened(tmp_path / str(evaluates), device=True) as session:
            for first, second in zip(batches[::2], batches[1::2], strict=True):
                (session.model(**first) + session.model(**second)).backward()
                if evaluates:
                    session.commit()
                    with torch.no_grad():
                        session.model(**first)
            weights.append(master_weights(session))
    assert_same(*weights)


# -- errors of the model's own code ---------------------------------------------------------------


class Part(nn.Sequential):
    """A part of a block that can run in tiles and records the shape of its last input."""

    last_shape: tuple[int, ...] = ()

    def __init__(self) -> None:
        super().__init__(
            nn.Linear(MODULE_WIDTH, 4 * MODULE_WIDTH),
            nn.Tanh(),
            nn.Linear(4 * MODULE_WIDTH, MODULE_WIDTH),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        Part.last_shape = tuple(x.shape)
        return super().forward(x)


class Failing(nn.Module):
    """A block that raises errors in its next calls."""

    failures = 0

    def __init__(self) -> None:
        super().__init__()
        self.part = Part()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if Failing.failures:
            Failing.failures -= 1
            raise ValueError("a bug of the user")
        return x + self.part(x)


@pytest.mark.parametrize(
    ("options", "shape"),
    [({"micro_batch": 2}, (2, 5, MODULE_WIDTH)), ({"tiles": 4}, (4, 1, MODULE_WIDTH))],
)
@pytest.mark.parametrize("failures", [1, 100])
def test_an_error_in_the_first_call_is_raised(
    options: dict[str, Any], shape: tuple[int, ...], failures: int, tmp_path: Path
) -> None:
    """Micro-batches and tiles are used once the error no longer occurs."""
    torch.manual_seed(3)
    model, batches = Plain(Failing), Plain.data(1)
    with attached(model, tmp_path, **options), warnings.catch_warnings():
        warnings.simplefilter("ignore" if failures > 1 else "error", RuntimeWarning)
        try:
            Failing.failures = failures
            with pytest.raises(ValueError, match="a bug of the user"):
                loss_of(model, batches[0])
        finally:
            Failing.failures = 0
        warnings.simplefilter("error", RuntimeWarning)
        loss_of(model, batches[0]).backward()
        assert Part.last_shape == shape


# -- gradients inside a forward -------------------------------------------------------------------


class Forces(StepOutput):
    """A model that adds the gradient of an energy, as models of atoms do."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.enable_grad():
            at = x if x.requires_grad else x.detach().requires_grad_()
            energy = torch.tanh(self.linear(at)).square().sum()
            (forces,) = torch.autograd.grad(energy, at, create_graph=True)
        return x + 0.1 * forces


@pytest.mark.parametrize("planned", [True, False])
def test_gradients_inside_a_forward_are_refused(planned: bool, tmp_path: Path) -> None:
    torch.manual_seed(3)
    model, batches = Plain(Forces), Plain.data(2)
    options = {"batch": batches[0]} if planned else {}
    refused = pytest.raises(ModelError, match=r"block blocks\.0 computes gradients inside .*resid")
    with refused, attached(model, tmp_path / "streamed", **options):
        loss_of(model, batches[0])


def test_rejects_unknown_resident_names(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"resident names 'blocks\.9', and Plain has no module"):
        attached(Plain(), tmp_path, resident=["blocks.9"])


def test_a_block_with_gradients_inside_runs_in_memory(tmp_path: Path) -> None:
    torch.manual_seed(3)
    model, batches = Plain(Forces), Plain.data(2)
    expected, weights = plain_run(model, batches)
    names = [name for name, child in model.named_modules() if isinstance(child, Forces)]
    collected = []
    with attached(model, tmp_path, resident=names) as session:
        for batch in batches:
            loss = loss_of(model, batch)
            loss.backward()
            collected.append(loss.item())
        assert collected == pytest.approx(expected, rel=1e-5)
        assert_close(master_weights(session), weights)


# -- trials leave no trace ------------------------------------------------------------------------


class Normed(nn.Module):
    """A block with BatchNorm beside a part that runs in tiles."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.part = nn.BatchNorm1d(MODULE_WIDTH), Part()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.part(self.norm(x.transpose(1, 2)).transpose(1, 2))


def test_batch_norm_counts_no_trial(tmp_path: Path) -> None:
    torch.manual_seed(3)
    model, batches = Plain(Normed), Plain.data(2)
    with attached(model, tmp_path, batch=batches[0], tiles=4):
        for batch in batches:
            loss_of(model, batch).backward()
    for block in model.blocks:
        assert int(block.norm.num_batches_tracked) == 2
