"""Training on the trial backend has the CPU's bits under any delays, within the planned memory."""

from __future__ import annotations

import functools
import gc
import json
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from lohan.config import UPDATE_MODES
from lohan.device.accelerator import AcceleratorDevice
from lohan.engine.replanning import OomGuard
from lohan.errors import BudgetError
from lohan.util.units import KiB, MiB
from tests.backend import register
from tests.support.delayed_runs import (
    MISSING_WAITS,
    OVERLAP_CLIP,
    OverlapCase,
    PlanTuning,
    RunResult,
    check_norm_of_device,
    missing_wait_shows,
    serial_result,
    train_with_delays,
)
from tests.support.models import attached, batches, deep_model, small_model
from tests.support.training_runs import (
    data_fixture,  # noqa: F401 - a fixture
    model_fixture,  # noqa: F401 - a fixture
    train_arguments,
)

pytestmark = pytest.mark.gpu
TINY = PlanTuning(window=1, slots=1, ring=2, spilled=0.6)
MEMORY = 64 * MiB
trial: Any = register()


@pytest.fixture(autouse=True)
def late_at_random() -> Iterator[None]:
    gc.collect()  # sessions before this one have memory of the device no more
    trial.set_delays(3000, 300, 1)
    trial.set_memory(MEMORY)
    yield
    trial.set_delays(0, 0, 0)
    trial.set_memory(1 << 30)


def trial_device(memory: int | None = None) -> AcceleratorDevice:
    return AcceleratorDevice(memory)


@functools.cache
def on_cpu(kind: str) -> RunResult:
    """Run on the CPU, with the attention kernel that torch has for every device."""
    with TemporaryDirectory() as place, sdpa_kernel(SDPBackend.MATH):
        train_batches = batches(4, batch=4, seq=24)
        return train_with_delays(
            small_model(kind),
            train_batches,
            Path(place),
            micro_batch=2,
            overlap=False,
            update_mode="serial",
        )


def same(actual: RunResult, wanted: RunResult) -> None:
    actual.check_there(wanted)


# -- equality --------------------------------------------------------------------------------------


@pytest.mark.parametrize("activations", ["recompute", "all"])
@pytest.mark.parametrize("mode", UPDATE_MODES)
@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_language_models(kind, mode, activations, tmp_path):
    """No kept result is computed again; that would raise a warning."""
    train_batches, before = batches(4, batch=4, seq=24), trial.counts()
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        result = train_with_delays(
            small_model(kind),
            train_batches,
            tmp_path,
            seed=1,
            batch=train_batches[0],
            micro_batch=2,
            device=trial_device(),
            update_mode=mode,
            activations=activations,
        )
    same(result, on_cpu(kind))
    after = trial.counts()
    assert all(after[name] > before[name] + 10 for name in ("operators", "copies in", "copies out"))


@pytest.mark.parametrize("doubles", [True, False])
def test_the_norm_is_made_on_the_device(doubles, monkeypatch, tmp_path):
    check_norm_of_device(trial_device(), doubles, TINY, tmp_path, monkeypatch)


@pytest.mark.parametrize("clip", [0.0, OVERLAP_CLIP])
@pytest.mark.parametrize("mode", UPDATE_MODES)
@pytest.mark.parametrize("kind", ["tied", "several"])
def test_every_buffer_is_used_again_and_again(kind, mode, clip, tmp_path):
    case = OverlapCase(kind=kind, clip=clip)
    same(
        case.run(tmp_path, TINY, update_mode=mode, seed=2, device=trial_device()),
        serial_result(case),
    )


def test_dropout_draws_from_the_device(tmp_path):
    """Whose generator begins with the seed that the host's has; recomputation draws the same."""
    case = OverlapCase(kind="several", micro_batch=1, dropout=0.2)
    result = case.run(tmp_path, TINY, update_mode="balanced", seed=3, device=trial_device())
    same(result, serial_result(case))


def test_a_padded_batch_keeps_all_that_is_planned(tmp_path):
    """The mask is not a floating-point input and stays on the device."""
    train_batches = batches(3, batch=4, seq=24)
    for batch in train_batches:
        batch["attention_mask"] = torch.ones_like(batch["input_ids"])
        batch["attention_mask"][0, -3:] = 0
    options = {"batch": train_batches[0], "micro_batch": 2, "activations": "all"}
    with sdpa_kernel(SDPBackend.MATH):
        wanted = train_with_delays(small_model("llama"), train_batches, tmp_path / "cpu", **options)
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        result = train_with_delays(
            small_model("llama"),
            train_batches,
            tmp_path / "there",
            device=trial_device(),
            **options,
        )
    same(result, wanted)


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_the_classes_of_a_plan_are_those_of_the_device(kind, tmp_path):
    train_batches = batches(1, batch=4, seq=24)
    options = {"batch": train_batches[0], "activations": "all", "device": trial_device()}
    with attached(small_model(kind), tmp_path, **options) as session:
        session.model(**train_batches[0]).loss.backward()
        save_plans = session.executor.block_runner.compute.save_plans
        (inventory,) = save_plans._inventories._by_kind.values()
        assert all(
            classes <= inventory.keys.keys() for classes in save_plans._saved_classes.values()
        )


def test_the_command_line(lohan, model, data, tmp_path):
    losses = {}
    for device in ("cpu", "accelerator"):
        more = ["--device", device, "--dtype", "fp32", "--micro-batch", 1]
        more += ["--device-memory", "8MiB"] if device == "accelerator" else []
        with sdpa_kernel(SDPBackend.MATH):
            ended = lohan(*train_arguments(model, data, tmp_path / device, *more))
        assert ended.code == 0, ended
        rows = (tmp_path / device / "metrics.jsonl").read_text().splitlines()
        losses[device] = [json.loads(row)["loss"] for row in rows]
    assert losses["accelerator"] == losses["cpu"] and len(losses["cpu"]) == 2


class Positions(torch.nn.Module):
    """A module with a position table that is in the checkpoint and never changes."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("pos_embed", torch.ones(1, 6 * 2**18))  # 6 MiB
        self.blocks = torch.nn.ModuleList(torch.nn.Linear(8, 8) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = x + self.pos_embed[:, :8]
        for block in self.blocks:
            hidden = block(hidden)
        return hidden.square().mean()


def test_large_constant_buffer_is_not_committed_with_a_step(tmp_path):
    batch = {"x": torch.ones(2, 3, 8)}
    with attached(Positions(), tmp_path, batch=batch, device=trial_device()) as session:
        session.model(**batch).backward()
        session.commit()
        assert session.step == 1 and "buffers" not in session.store.meta


# -- a wait that is missing ------------------------------------------------------------------------


@pytest.mark.parametrize(("careless", "copies_us", "operators_us"), MISSING_WAITS)
def test_a_missing_wait_shows(careless, copies_us, operators_us):
    assert missing_wait_shows(
        careless, lambda times: trial.set_delays(times * copies_us, times * operators_us, 0)
    )


# -- memory ----------------------------------------------------------------------------------------


def test_a_quarter_of_what_the_model_needs(tmp_path):
    train_batches = batches(2, batch=4, seq=16)
    quarter = sum(p.numel() for p in deep_model().parameters()) * 16 // 4
    options = {"micro_batch": 2, "clip": 0.5}
    with sdpa_kernel(SDPBackend.MATH):
        wanted = train_with_delays(deep_model(), train_batches, tmp_path / "cpu", **options)
    torch.accelerator.reset_peak_memory_stats()
    before = torch.accelerator.memory_allocated()
    place = tmp_path / "there"
    device = trial_device(quarter)
    result = train_with_delays(
        deep_model(), train_batches, place, seed=4, device=device, batch=train_batches[0], **options
    )
    same(result, wanted)
    assert before < torch.accelerator.max_memory_allocated() <= quarter
    assert torch.accelerator.get_memory_info()[1] == MEMORY


def test_the_limit_ends_with_the_device():
    device = trial_device(1 * MiB)
    with pytest.raises(torch.OutOfMemoryError):
        device.allocate(2 * MiB)
    device.close()
    assert len(trial_device().allocate(2 * MiB)) == 2 * MiB


def test_a_device_that_is_too_small_is_refused(tmp_path):
    train_batches = batches(1, batch=1, seq=8)
    with pytest.raises(BudgetError, match=r"device budget too small.*--device-memory"):
        attached(
            small_model("llama"), tmp_path, batch=train_batches[0], device=trial_device(64 * KiB)
        )


def test_out_of_memory_raises_the_error_of_torch_and_aborts_the_step(tmp_path):
    train_batches = batches(2, batch=2, seq=8)
    with attached(small_model("llama"), tmp_path, device=trial_device()) as session:
        torch.accelerator.synchronize()
        trial.set_memory(torch.accelerator.memory_allocated() + 1024)
        with pytest.raises(torch.OutOfMemoryError, match="trial device out of memory"):
            session.model(**train_batches[0])
        trial.set_memory(MEMORY)
        session.model(**train_batches[1]).loss.backward()
        assert session.step == 1


class Optimist(AcceleratorDevice):
    """A device that reports more memory than it has."""

    def memory_bytes(self) -> int:
        return 6 * MiB


def test_a_smaller_plan_is_made_when_the_model_is_on_the_device(tmp_path):
    """Its buffers are there by then."""
    train_batches, messages = batches(2, batch=8, seq=64), []

    def step_of(batch: dict[str, torch.Tensor]) -> float:
        loss = session.model(**batch).loss
        loss.backward()
        return loss.item()

    with attached(
        small_model("llama"), tmp_path, batch=train_batches[0], device=Optimist()
    ) as session:
        before = session.plan.tier_bytes("device")
        trial.set_memory(torch.accelerator.memory_allocated() + before * 4 // 5)
        OomGuard(session, messages.append).run(lambda: step_of(train_batches[0]))
        assert session.plan.tier_bytes("device") < before
        step_of(train_batches[1])
        assert session.step == 2
    assert len(messages) == 1 and "ran out of memory in step 1" in messages[0]


def test_slot_is_reused_only_after_its_last_owner_is_done():
    """Memory that was released while compute had work on it goes to a slot that a lane fills."""
    device, here = trial_device(), torch.full((4096,), 3, dtype=torch.uint8)
    stream = torch.accelerator.current_stream().stream_id
    torch.accelerator.synchronize()
    trial.hold(stream, True)
    slot = device.allocate(4096)
    copied = device.copy("h2d", [(slot, here)])
    time.sleep(0.05)  # it must not come, however long this is
    early = copied.query()
    trial.hold(stream, False)
    copied.synchronize()
    assert not early and torch.equal(slot.cpu(), here)


@pytest.mark.parametrize("pinnable", [True, False])
def test_host_memory(pinnable, tmp_path):
    """Memory is pinned page by page; a failure is reported once and changes no result."""
    if pinnable:
        memory = trial_device().host_memory(5 * 4096)
        assert memory.nbytes == 5 * 4096 and memory.ctypes.data % 4096 == 0
        assert torch.from_numpy(memory).is_pinned()
        return
    case = OverlapCase(kind="plain")
    trial.set_pinnable(4096)
    try:
        with pytest.warns(RuntimeWarning, match=r"cannot pin .*are pinned.*half") as caught:
            result = case.run(tmp_path, TINY, update_mode="balanced", seed=5, device=trial_device())
    finally:
        trial.set_pinnable(1 << 40)
    assert len([w for w in caught if "cannot pin" in str(w.message)]) == 1
    same(result, serial_result(case))
