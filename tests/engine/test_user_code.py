"""User code and blocks may do what PyTorch allows between and inside steps."""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

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
    decay_groups,
    lohan_run,
    loss_of,
    lr,
    master_weights,
    plain_run,
    small_model,
)
from tests.support.models import batches as text_batches


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


def test_a_checkpoint_around_the_model_is_refused(tmp_path: Path) -> None:
    model, (batch,) = small_model("llama"), text_batches(1, batch=2, seq=8)
    with attached(model, tmp_path) as session:
        with pytest.raises(ModelError, match="leave the checkpoint out"):
            checkpoint(lambda: loss_of(model, batch), use_reentrant=False).backward()
        loss_of(model, batch).backward()
        assert session.step == 1


class Summed(Plain):
    """A model whose result has a constant gradient, as that of a critic."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in (self.entry, *self.blocks, self.exit):
            x = block(x)
        return x.sum()


@pytest.mark.parametrize("kind", [Plain, Summed])
@pytest.mark.parametrize("options", [{}, {"tiles": 4}])
def test_a_penalty_on_gradients_is_refused(
    kind: type[Plain], options: dict[str, Any], tmp_path: Path
) -> None:
    torch.manual_seed(3)
    model, batches = kind(), Plain.data(2)
    with attached(model, tmp_path, **options) as session:
        x = batches[0]["x"].requires_grad_()
        loss = model(x)
        (slope,) = torch.autograd.grad(loss, x, create_graph=True)
        with pytest.raises(ModelError, match="second derivative is computed through a block"):
            (loss.detach() + slope.square().sum()).backward()
        loss_of(model, batches[1]).backward(create_graph=True)  # without a second derivative
        assert session.step == 1


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


# -- changes between forward and backward, and random numbers of Python and numpy -----------------


class Dropping(StepOutput):
    """A block whose result depends on its mode, on an attribute and on a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.factor, self.scale = 1.0, nn.Buffer(torch.ones(MODULE_WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        changed = super().forward(x) * self.factor * self.scale
        return nn.functional.dropout(changed, 0.5, self.training)


class DropsByPython(StepOutput):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * random.uniform(0.5, 1.5)


class DropsByNumpy(StepOutput):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * float(np.random.uniform(0.5, 1.5))


class DropsByGenerator(StepOutput):
    def __init__(self) -> None:
        super().__init__()
        self.generator = torch.Generator().manual_seed(4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * torch.rand(MODULE_WIDTH, generator=self.generator)


def set_factor(model: nn.Module) -> None:
    for block in model.blocks:
        block.factor = 0.25


def replace_scale(model: nn.Module) -> None:
    for block in model.blocks:
        block.scale = block.scale * 0.5


def losses_and_weights(
    block: type[nn.Module], between: Callable[[nn.Module], None], place: Path | None, **options: Any
) -> Any:
    """Train for three steps, in memory or in a store, with `between` before every backward."""
    torch.manual_seed(3)
    model, losses = Plain(block), []
    optimizer = torch.optim.AdamW(decay_groups(model, 0.1), lr=1.0, betas=(0.9, 0.95))
    torch.manual_seed(4)
    random.seed(5)
    np.random.seed(6)
    with nullcontext() if place is None else attached(model, place, **options) as session:
        for step, batch in enumerate(Plain.data(3)):
            loss = loss_of(model, batch)
            between(model)
            loss.backward()
            if session is None:
                for group in optimizer.param_groups:
                    group["lr"] = lr(step)
                optimizer.step()
                optimizer.zero_grad()
            model.train()
            losses.append(loss.item())
        drawn = torch.rand(()).item(), random.random(), float(np.random.random())
        weights = dict(model.named_parameters()) if session is None else master_weights(session)
    return losses, drawn, weights


@pytest.mark.parametrize("activations", ["recompute", "all"])
@pytest.mark.parametrize(
    ("block", "between"),
    [
        (Dropping, nn.Module.eval),
        (Dropping, set_factor),
        (Dropping, replace_scale),
        (DropsByPython, nn.Module.train),
        (DropsByNumpy, nn.Module.train),
        (DropsByGenerator, nn.Module.train),
    ],
)
def test_backward_uses_the_block_as_it_was_in_forward(
    block: type[nn.Module], between: Callable[[nn.Module], None], activations: Any, tmp_path: Path
) -> None:
    expected = losses_and_weights(block, between, None)
    options = {"activations": activations, "batch": Plain.data(1)[0]}
    actual = losses_and_weights(block, between, tmp_path, **options)
    assert actual[0] == pytest.approx(expected[0], rel=1e-5)
    assert actual[1] == expected[1]
    assert_close(actual[2], expected[2])


def test_a_hook_that_draws_in_a_block_of_a_library_is_recomputed_with_its_numbers(
    tmp_path: Path,
) -> None:
    def scaled(module: nn.Module, args: Any, out: torch.Tensor) -> torch.Tensor:
        return out * random.uniform(0.5, 1.5)

    model, data = small_model("llama"), text_batches(2, batch=2, seq=8)
    model.model.layers[1].mlp.register_forward_hook(scaled)
    random.seed(5)
    losses, weights = plain_run(model, data)
    random.seed(5)
    actual, result = lohan_run(model, data, tmp_path)
    assert actual == pytest.approx(losses, rel=1e-5)
    assert_close(result, weights)


@pytest.mark.parametrize("block", [DropsByPython, DropsByNumpy, DropsByGenerator])
def test_a_block_that_draws_its_own_random_numbers_is_not_sliced(
    block: type[nn.Module], tmp_path: Path
) -> None:
    expected = losses_and_weights(block, nn.Module.train, None)
    with pytest.warns(RuntimeWarning, match="random generator"):
        actual = losses_and_weights(block, nn.Module.train, tmp_path, micro_batch=2)
    assert actual[0] == pytest.approx(expected[0], rel=1e-5)
    assert_close(actual[2], expected[2])


def test_a_buffer_that_is_changed_in_place_before_backward_is_refused(tmp_path: Path) -> None:
    model = Plain(Dropping)
    with attached(model, tmp_path) as session:
        loss = loss_of(model, Plain.data(1)[0])
        model.blocks[1].scale.mul_(0.5)
        with pytest.raises(
            ModelError, match=r"buffer scale of block blocks\.1 was changed in plac"
        ):
            loss.backward()
        loss_of(model, Plain.data(1)[0]).backward()
        assert session.step == 1
