"""Training on software CUDA has the bits of the CPU in every mode, with any delays."""

from __future__ import annotations

import functools
import re
import subprocess
import sys
import threading
import time
import warnings
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, GPT2Config, LlamaConfig

from lohan.config import UPDATE_MODES
from lohan.device import determinism
from lohan.device.accelerator import AcceleratorDevice, read_back
from lohan.device.base import HostMemory
from lohan.engine.gradient_transport import GradientOffload
from lohan.engine.replanning import OomGuard
from lohan.errors import BudgetError, ConfigError
from lohan.model.layout import FlatGroup, TensorSpec
from lohan.util.units import MiB
from tests.softcuda import extension, unordered, waits
from tests.support.delayed_runs import (
    MISSING_WAITS,
    NET_WIDTH,
    OVERLAP_CLIP,
    ComputeCountsAsDone,
    CopiesCountAsDone,
    OverlapCase,
    PlanTuning,
    RunResult,
    check_norm_of_device,
    missing_wait_shows,
    serial_result,
    small_net,
    train_with_delays,
    train_with_kept_slices,
    tune_plans,
)
from tests.support.models import SMALL_SIZES, attached, batches, small_model

pytestmark = pytest.mark.gpu
OLD = tuple(map(int, torch.__version__.split(".")[:2])) < (2, 7)
TINY = PlanTuning(window=1, slots=1, ring=2, spilled=0.6)
ROOT = Path(__file__).resolve().parents[2]
cuda: Any = extension()


@pytest.fixture(autouse=True)
def late_and_poisoned() -> Iterator[None]:
    cuda.set_delays(2000, 200, 1)
    cuda.set_poison(True)
    yield


@pytest.fixture(autouse=True)
def nothing_is_made_anew() -> Iterator[None]:
    """Fail on the warning that an activation is recomputed instead of kept."""
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        yield


def cuda_device(memory: int | None = None, number: int | None = None) -> AcceleratorDevice:
    return AcceleratorDevice(memory, number=number)


def same(actual: RunResult, wanted: RunResult) -> None:
    actual.check_there(wanted)


def made_of(kind: str) -> nn.Module:
    return small_model(kind)


@functools.cache
def on_cpu(kind: str, rows: str = "") -> RunResult:
    with TemporaryDirectory() as place:
        return train_with_delays(
            small_model(kind),
            rows_of(rows),
            Path(place),
            micro_batch=2,
            overlap=False,
            update_mode="serial",
        )


def rows_of(how: str, steps: int = 3) -> list[dict[str, torch.Tensor]]:
    """Return batches of rows.

    `padded`: some rows are shorter. `packed`: each row has two examples, separated by
    positions.
    """
    train_batches = batches(steps, batch=4, seq=24)
    for batch in train_batches:
        if how == "padded":
            batch["attention_mask"] = torch.ones_like(batch["input_ids"])
            batch["attention_mask"][0, -3:] = 0
        if how == "packed":
            positions = torch.cat((torch.arange(10), torch.arange(14)))
            batch["position_ids"] = positions.expand(4, 24).clone()
    return train_batches


# -- equality --------------------------------------------------------------------------------------


@pytest.mark.parametrize("activations", ["recompute", "all"])
@pytest.mark.parametrize("mode", UPDATE_MODES)
@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_language_models(kind, mode, activations, tmp_path):
    actual_rows, before = rows_of(""), cuda.counts()
    result = train_with_delays(
        small_model(kind),
        actual_rows,
        tmp_path,
        seed=1,
        batch=actual_rows[0],
        micro_batch=2,
        device=cuda_device(),
        update_mode=mode,
        activations=activations,
    )
    same(result, on_cpu(kind))
    after = cuda.counts()
    assert all(after[name] > before[name] + 10 for name in ("operators", "copies in", "copies out"))
    assert after["kernels"] == 0


@pytest.mark.parametrize("activations", ["recompute", "all"])
@pytest.mark.parametrize("how", ["padded", "packed"])
@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_padded_and_packed_rows(kind, how, activations, tmp_path):
    """A mask selects another kernel, whose random state is on the host."""
    actual_rows = rows_of(how)
    result = train_with_delays(
        small_model(kind),
        actual_rows,
        tmp_path,
        batch=actual_rows[0],
        micro_batch=2,
        device=cuda_device(),
        activations=activations,
    )
    same(result, on_cpu(kind, how))


@pytest.mark.parametrize("doubles", [True, False])
def test_the_norm_is_made_on_the_device(doubles, monkeypatch, tmp_path):
    check_norm_of_device(cuda_device(), doubles, TINY, tmp_path, monkeypatch)


@pytest.mark.parametrize("clip", [0.0, OVERLAP_CLIP])
@pytest.mark.parametrize("mode", UPDATE_MODES)
@pytest.mark.parametrize("kind", ["tied", "several"])
def test_every_buffer_is_used_again_and_again(kind, mode, clip, tmp_path):
    case = OverlapCase(kind=kind, clip=clip)
    same(
        case.run(tmp_path, TINY, update_mode=mode, seed=2, device=cuda_device()),
        serial_result(case),
    )


def test_the_second_device(tmp_path):
    actual_rows, first = rows_of(""), torch.cuda.memory_reserved(0)
    device = cuda_device(number=1)
    result = train_with_delays(
        small_model("llama"),
        actual_rows,
        tmp_path,
        batch=actual_rows[0],
        micro_batch=2,
        device=device,
    )
    same(result, on_cpu("llama"))
    assert torch.cuda.memory_reserved(1) > 0
    assert torch.cuda.memory_reserved(0) == first


def dropping() -> nn.Module:
    torch.manual_seed(0)
    config = GPT2Config(
        n_embd=64,
        n_layer=3,
        n_head=4,
        vocab_size=131,
        n_positions=128,
        bos_token_id=1,
        eos_token_id=2,
        use_cache=False,
        attn_pdrop=0.2,
        resid_pdrop=0.1,
        embd_pdrop=0.1,
    )
    return AutoModelForCausalLM.from_config(config).train()


@pytest.mark.parametrize("how", ["", "padded"])
def test_dropout_draws_the_same_when_it_is_kept_and_when_it_is_recomputed(how, tmp_path):
    actual_rows, results = rows_of(how), []
    for activations in ("recompute", "all"):
        torch.cuda.manual_seed_all(3)
        results.append(
            train_with_delays(
                dropping(),
                actual_rows,
                tmp_path / activations,
                batch=actual_rows[0],
                micro_batch=2,
                activations=activations,
                device=cuda_device(),
            )
        )
    results[1].check(results[0])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_with_flash_attention(dtype, tmp_path):
    """Before torch 2.7, the CPU's kernel does not support shared heads, so Llama uses another."""
    kind, actual_rows = "gpt2" if OLD else "llama", rows_of("", steps=2)
    options = {"micro_batch": 2, "batch": actual_rows[0]}
    wanted = train_with_delays(
        small_model(kind, dtype=dtype), actual_rows, tmp_path / "cpu", **options
    )
    for activations in ("recompute", "all"):
        place = tmp_path / activations
        result = train_with_delays(
            small_model(kind, dtype=dtype),
            actual_rows,
            place,
            device=cuda_device(),
            activations=activations,
            **options,
        )
        same(result, wanted)


def test_lora(tmp_path):
    """The base is frozen; only the adapter learns."""
    from peft import LoraConfig, get_peft_model

    actual_rows, results = rows_of("", steps=2), []
    for device in ("cpu", cuda_device()):
        torch.manual_seed(5)
        model = get_peft_model(small_model("llama"), LoraConfig(r=4, task_type="CAUSAL_LM"))
        place = tmp_path / str(len(results))
        results.append(
            train_with_delays(
                model, actual_rows, place, batch=actual_rows[0], micro_batch=2, device=device
            )
        )
    same(results[1], results[0])


@pytest.mark.parametrize("deterministic", [False, True])
def test_a_deterministic_run_uses_kernels_with_a_fixed_order(deterministic, tmp_path, monkeypatch):
    """From its first launch to its end, and no other code of the process does."""
    inner, enabled, actual_rows = AcceleratorDevice.mark, set(), rows_of("")

    def mark(device: AcceleratorDevice) -> Any:
        enabled.add(torch.are_deterministic_algorithms_enabled())
        return inner(device)

    monkeypatch.setenv(determinism.WORKSPACE, determinism.FIXED[0])
    monkeypatch.setattr(AcceleratorDevice, "mark", mark)
    options = {"device": cuda_device(), "deterministic": deterministic}
    result = train_with_delays(
        small_model("llama"), actual_rows, tmp_path, batch=actual_rows[0], micro_batch=2, **options
    )
    same(result, on_cpu("llama"))
    assert enabled == {deterministic} and not torch.are_deterministic_algorithms_enabled()


class Large(nn.Module):
    """A diffusion transformer's entry: a table of positions that belongs to the checkpoint."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.register_buffer("pos_embed", torch.randn(1, 6 * 2**18))  # 6 MiB
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(32), nn.Linear(32, 32)) for _ in range(3)
        )

    def forward(self, x: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        hidden = x + self.pos_embed[:, : x.shape[-1]]
        for block in self.blocks:
            hidden = hidden + block(hidden)
        return nn.functional.mse_loss(hidden, target)


def test_large_constant_buffer_is_not_committed_with_a_step(tmp_path):
    created = [{"x": torch.randn(2, 5, 32), "target": torch.randn(2, 5, 32)} for _ in range(2)]
    wanted = train_with_delays(Large(), created, tmp_path / "cpu", batch=created[0])
    result = train_with_delays(
        Large(), created, tmp_path / "there", batch=created[0], device=cuda_device()
    )
    same(result, wanted)
    with attached(Large(), tmp_path / "meta", batch=created[0], device=cuda_device()) as session:
        session.model(**created[0]).backward()
        session.commit()
        assert "buffers" not in session.store.meta
        lines = {
            entry.owner: entry.bytes for entry in session.plan.ledger if entry.tier == "device"
        }
        assert lines["buffers"] >= 6 * MiB


# -- a wait that is missing ------------------------------------------------------------------------


@pytest.mark.parametrize("careless", [CopiesCountAsDone, ComputeCountsAsDone])
def test_a_missing_wait_of_the_host_shows(careless):
    """A missing wait changes results; check_order.py tests waits between streams."""
    warnings.simplefilter("ignore")  # of numbers that are not there
    (copies_us, operators_us) = next(late for kind, *late in MISSING_WAITS if kind is careless)
    with unordered():
        assert missing_wait_shows(
            careless, lambda times: cuda.set_delays(times * copies_us, times * operators_us, 0)
        )


@pytest.mark.parametrize("late", [(5000, 500, 2), (50_000, 0, 0), (0, 1000, 0)])
def test_two_of_four_slices_are_on_the_device(late):
    """This holds for any delays."""
    cuda.set_delays(*late)
    same(train_with_kept_slices(cuda_device()), train_with_kept_slices("cpu"))


def test_what_is_set_aside_comes_back_when_it_has_left():
    """The link from the device is held meanwhile, so that nothing leaves."""
    device, tensor = cuda_device(), torch.randn(8, device="cuda")
    wanted, link = tensor.cpu(), device._streams["d2h"].cuda_stream
    gradient_offload = GradientOffload(device, 1 * MiB)
    group = FlatGroup("g", (TensorSpec("a", (8,), 0, 8, True, True),), 8)
    cuda.set_delays(0, 0, 0)
    cuda.hold(link, True)
    try:
        with waits() as seen_waits:
            gradient_offload.set_aside(0, group, {0: tensor})
            del tensor
            filled = torch.full((8,), 7.0, device="cuda")  # in no memory that is still read
            back = gradient_offload.fetch_aside(0)[0] + 0
        time.sleep(0.1)  # what does not wait has its chance
    finally:
        cuda.hold(link, False)
    assert not seen_waits
    assert torch.equal(back.cpu(), wanted) and filled.sum().item() == 56


# -- waits of the host -----------------------------------------------------------------------------

LAUNCHING = ("MainThread", "Dummy")  # autograd's device threads have no name of their own
WAITS = Path(__file__).resolve().parents[2] / "docs" / "design.md"


def documented() -> dict[tuple[str, str], int]:
    """How often a step may wait, by file and function: the table of waits in docs/design.md."""
    rows = re.findall(r"^\| `([\w./]+)` \| `([\w.]+)` \|.*\| (\d+) \|$", WAITS.read_text(), re.M)
    return {(file, function): int(count) for file, function, count in rows}


@pytest.mark.parametrize("activations", ["recompute", "all"])
@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_a_step_waits_only_where_it_says(kind, activations, tmp_path):
    """Only launching threads are checked; lanes are supposed to wait, and sleep while they do."""
    train_batches = batches(5, batch=4, seq=24)
    cuda.set_delays(0, 0, 0)

    def step(batch: dict[str, torch.Tensor]) -> None:
        session.model(**batch).loss.backward()

    options = {
        "batch": train_batches[0],
        "micro_batch": 2,
        "activations": activations,
        "device": cuda_device(),
    }
    with attached(small_model(kind), tmp_path, clip=1.0, **options) as session:
        for batch in train_batches[:3]:
            step(batch)
        with waits() as seen_waits:
            for batch in train_batches[3:]:
                step(batch)
        session.commit()
    launching_waits = [wait for wait in seen_waits if wait.thread.startswith(LAUNCHING)]
    most = documented()
    assert most, "docs/design.md has no table of the waits of the host"
    for site, count in Counter(wait.site for wait in launching_waits).items():
        output = "\n".join(str(wait) for wait in launching_waits if wait.site == site)
        assert count <= 2 * most.get(site, 0), f"in two steps {count} waits in {site}:\n{output}"
    spinning = [
        str(wait) for wait in seen_waits if "spinning" in wait.what and wait not in launching_waits
    ]
    assert not spinning
    lanes = {wait.site[0] for wait in seen_waits if wait not in launching_waits}
    assert all(file.startswith("lohan/engine/") for file in lanes), lanes


def plain_batches(count: int, *, rows: int) -> list[dict[str, torch.Tensor]]:
    draws = torch.Generator().manual_seed(5)
    return [
        {name: torch.randn(rows, 3, NET_WIDTH, generator=draws) for name in ("x", "target")}
        for _ in range(count)
    ]


def launched_before_a_wait(phase: str, rows: int, place: Path) -> tuple[int, int]:
    """Return how many operators a phase launches before the launching thread first waits, and all.

    The phase is a forward or a backward, and compute is held. Slices of earlier phases have ended,
    so waiting for them would not block; they are forgotten.
    """
    launched: list[int] = []
    stream = torch.cuda.current_stream().cuda_stream

    def note(_: str) -> None:
        now = cuda.counts()["operators"]
        if now > before and threading.current_thread().name.startswith(LAUNCHING):
            launched.append(now)
            cuda.hold(stream, False)

    with attached(small_net("plain"), place, micro_batch=1, device=cuda_device()) as session:
        *settling, last = plain_batches(3, rows=rows)
        for batch in settling:
            session.model(**batch).backward()
        session.flush()
        loss = session.model(**last) if phase == "backward" else None
        torch.cuda.synchronize()
        session.executor.block_runner.compute.run_ahead._ends.clear()
        before = cuda.counts()["operators"]
        cuda.hold(stream, True)
        cuda.on_wait(note)
        try:
            loss = session.model(**last) if loss is None else loss
            loss.backward()
            torch.cuda.synchronize()
        finally:
            cuda.on_wait(None)
            cuda.hold(stream, False)
    return launched[0] - before, cuda.counts()["operators"] - before


@pytest.mark.parametrize("phase", ["forward", "backward"])
def test_the_host_is_two_slices_ahead_at_most(phase, tmp_path):
    """However many slices a block has."""
    cuda.set_delays(0, 0, 0)
    (few, _), (many, every) = (launched_before_a_wait(phase, n, tmp_path / str(n)) for n in (4, 12))
    assert 1 < many < 1.5 * few and many < every / 60, (few, many, every)


def test_weights_come_while_slices_wait_for_compute():
    """Weights and inputs of the next block are not delayed by slices that are copied back.

    A slice is copied back after the compute that frees its buffer.
    """
    cuda.set_delays(0, 0, 0)
    device, compute = cuda_device(), torch.cuda.current_stream().cuda_stream
    given = torch.zeros(16, dtype=torch.uint8, device="cuda")
    kept, weights = (torch.ones(16, dtype=torch.uint8).pin_memory() for _ in range(2))
    slot = device.allocate(16)
    torch.cuda.synchronize()
    cuda.hold(compute, True)
    try:
        given.add_(1)
        brought = device.copy("slices", [(given, kept)], after=device.mark())
        device.copy("h2d", [(slot, weights)]).synchronize()
        assert not brought.query()
    finally:
        cuda.hold(compute, False)
    torch.cuda.synchronize()
    assert slot.sum().item() == 16


def test_nothing_on_the_stream_of_weights_waits_for_compute(monkeypatch):
    """The run keeps the results of four slices per block."""
    waiting: list[str] = []
    inner = AcceleratorDevice.copy

    def copy(self: Any, lane: str, pairs: Any, *, after: Any = None) -> Any:
        if after is not None:
            waiting.append(lane)
        return inner(self, lane, pairs, after=after)

    monkeypatch.setattr(AcceleratorDevice, "copy", copy)
    cuda.set_delays(0, 0, 0)
    train_with_kept_slices(cuda_device())
    assert "slices" in waiting and "h2d" not in waiting


def test_spans_of_compute_are_by_the_clock_of_the_device(tmp_path, monkeypatch):
    train_batches = batches(4, batch=4, seq=24)
    cuda.set_delays(0, 0, 0)
    with attached(
        small_model("llama"), tmp_path, batch=train_batches[0], device=cuda_device()
    ) as session:
        for number, batch in enumerate(train_batches):
            session.executor.trace.take_step()
            if number == 3:  # a device on which no time passes
                monkeypatch.setattr(AcceleratorDevice, "elapsed_s", lambda *_: 0.0)
            session.model(**batch).loss.backward()
            session.flush()
            spans = [s for s in session.executor.trace.take_step() if s.lane == "compute"]
            lengths = [span.stop_s - span.start_s for span in spans]
            assert len(lengths) > 4 and all(length >= 0 for length in lengths)
            assert (sum(lengths) > 0) == (number < 3)


# -- memory ----------------------------------------------------------------------------------------


def test_pageable_memory_is_reported_once_and_changes_no_bit(tmp_path):
    case = OverlapCase(kind="plain")
    cuda.set_pinnable(4096)
    with pytest.warns(RuntimeWarning, match=r"cannot pin .*--host.*WSL2") as caught:
        result = case.run(tmp_path, TINY, update_mode="balanced", seed=5, device=cuda_device())
    assert len([w for w in caught if "cannot pin" in str(w.message)]) == 1
    same(result, serial_result(case))


def test_copies_to_pageable_memory_do_not_block_the_launching_thread():
    """Four slices a block leave and come back through memory that cannot be pinned."""
    warnings.simplefilter("ignore")
    wanted = train_with_kept_slices("cpu")
    cuda.set_pinnable(4096)
    with waits() as seen_waits:
        same(train_with_kept_slices(cuda_device()), wanted)
    blocked = [w for w in seen_waits if "pageable" in w.what and w.thread.startswith(LAUNCHING)]
    assert seen_waits and not [w for w in blocked if w.site[0].startswith("lohan/device")], list(
        map(str, blocked)
    )


def test_copies_of_pinned_memory_do_not_overtake_those_of_pageable_memory():
    """An event stands for all earlier copies of its lane by the launching thread."""
    warnings.simplefilter("ignore")
    device, size = cuda_device(), 4 * MiB
    values = torch.ones(2, size, dtype=torch.uint8, device="cuda")
    pinned = torch.from_numpy(device.host_memory(size))
    cuda.set_pinnable(size)
    pageable = torch.from_numpy(device.host_memory(size))
    assert pinned.is_pinned() and not pageable.is_pinned()
    pageable.zero_()
    cuda.set_delays(100_000, 0, 0)
    device.copy("d2h", [(pageable, values[0])], after=device.mark())
    device.copy("d2h", [(pinned, values[1])], after=device.mark()).synchronize()
    assert bool(pinned.all()) and bool(pageable.all())
    device.close()


class Few(AcceleratorDevice):
    """A device for which only the first bytes of host memory can be pinned."""

    pinnable = 0

    def _pinned(self, count: int) -> HostMemory:
        if count > self.pinnable:
            raise OSError("no more memory can be pinned")
        self.pinnable -= count
        return super()._pinned(count)


def test_slots_that_every_block_passes_through_are_pinned_first(tmp_path):
    """Weights that stay in host memory are in pageable memory when no more can be pinned."""
    warnings.simplefilter("ignore")
    actual_rows, pinned = rows_of(""), []
    device = Few()
    with pytest.MonkeyPatch.context() as patch:
        tune_plans(patch, PlanTuning(window=1, slots=1, ring=2, cached=0.5))
        for pinnable in (0, 1):
            place = tmp_path / str(pinnable)
            place.mkdir()
            with attached(made_of("llama"), place, batch=actual_rows[0], device=device) as session:
                moving = session.executor.runner.spec.slots
                slots = session.executor.runner.slots._buffers
                pinned = [slot.tensor(torch.uint8).is_pinned() for slot in slots]
                device.pinnable = sum(len(slot.bytes) for slot in slots[:moving])
    assert 0 < moving < len(pinned) and all(pinned[:moving]) and not any(pinned[moving:])


def test_a_value_is_read_back_where_nothing_can_be_pinned():
    cuda.set_pinnable(0)
    assert read_back(torch.full((7, 1 * MiB), 3.0, device="cuda")).sum() == 21 * MiB


ITEM = """
import torch
from lohan.device.accelerator import AcceleratorDevice
from tests.softcuda import extension
device = AcceleratorDevice()
extension().set_pinnable(0)
print(torch.ones(3, device="cuda").sum().item(), bool(torch.ones(1, device="cuda") > 0))
"""


def test_numbers_are_read_when_no_more_memory_can_be_pinned():
    """Torch reads them through pinned memory; a new process has none of it yet."""
    done = subprocess.run([sys.executable, "-c", ITEM], cwd=ROOT, capture_output=True, text=True)
    assert done.stdout.strip() == "3.0 True", done


def test_a_runtime_inside_the_build_is_asked_for_its_error_too(monkeypatch):
    """A statically linked runtime is no file of its own, so a kernel takes its error."""
    monkeypatch.setattr("lohan.device.accelerator._RUNTIMES", {})
    cuda.set_pinnable(0)
    with pytest.raises(RuntimeError):
        cuda_device()._pinned(MiB)
    torch.ones(8, device="cuda").add_(1)


def test_host_memory_is_pinned_for_all_devices_and_not_for_forks():
    memory = cuda_device().host_memory(5 * 4096)
    assert torch.from_numpy(memory).is_pinned() and memory.ctypes.data % 4096 == 0
    start = f"{memory.ctypes.data:x}-"
    lines = Path("/proc/self/smaps").read_text().splitlines()
    at = next(i for i, line in enumerate(lines) if line.startswith(start))
    flags = next(line for line in lines[at:] if line.startswith("VmFlags"))
    assert " dc" in flags  # do not copy on fork
    far = torch.ones(len(memory), dtype=torch.uint8, device="cuda:1")
    torch.cuda.synchronize(1)
    with waits() as seen_waits:  # a copy to memory that is not pinned would wait
        torch.from_numpy(memory).copy_(far, non_blocking=True)
    assert not seen_waits
    torch.cuda.synchronize(1)


def test_a_lane_takes_memory_of_compute():
    device = cuda_device()
    torch.cuda.empty_cache()

    def ask() -> None:
        device.enter("h2d")
        slots.append(device.allocate(2 * MiB))

    slots: list[torch.Tensor] = []
    thread = threading.Thread(target=ask)
    thread.start()
    thread.join()
    compute_stream = torch.cuda.current_stream().cuda_stream
    segments = torch.cuda.memory_snapshot()
    (owner,) = {
        s["stream"]
        for s in segments
        if any(b["address"] == slots[0].data_ptr() for b in s["blocks"])
    }
    assert owner == compute_stream


class Optimist(AcceleratorDevice):
    """Says that it has more than it has."""

    says = 400 * MiB

    def memory_bytes(self) -> int:
        return self.says


def wide_model() -> nn.Module:
    torch.manual_seed(0)
    sizes = {**SMALL_SIZES, "hidden_size": 256, "intermediate_size": 1024, "num_hidden_layers": 4}
    return AutoModelForCausalLM.from_config(LlamaConfig(**sizes, use_cache=False)).train()


@pytest.mark.parametrize("late", [False, True])
def test_a_plan_that_does_not_fit_is_made_smaller_in_its_first_two_steps(late, tmp_path):
    """The plan shrinks while another program uses most of the device.

    With `late`, it does so from the second step on, which needs more memory than the first,
    since the two overlap.
    """
    train_batches, messages, other = batches(4, batch=16, seq=64), list[str](), list[torch.Tensor]()

    def step_of(batch: dict[str, torch.Tensor]) -> None:
        session.model(**batch).loss.backward()

    def note(text: str) -> None:
        messages.append(text)
        other.clear()

    cuda.set_delays(0, 0, 0)
    with attached(wide_model(), tmp_path, batch=train_batches[0], device=Optimist()) as session:
        guard, before = OomGuard(session, note), session.plan.tier_bytes("device")
        if late:
            guard.run(lambda: step_of(train_batches[0]))
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        size = torch.cuda.mem_get_info()[0] - 24 * MiB
        other.append(torch.empty(size, dtype=torch.uint8, device="cuda"))
        while session.step < 3:
            guard.run(lambda: step_of(train_batches[session.step]))
        assert session.plan.tier_bytes("device") < before
        assert len(messages) == 1 and "ran out of memory in step" in messages[0]


def test_memory_that_ends_later_is_an_error_with_a_next_move(tmp_path):
    train_batches = batches(4, batch=16, seq=64)

    def step_of(batch: dict[str, torch.Tensor]) -> None:
        session.model(**batch).loss.backward()

    with attached(wide_model(), tmp_path, batch=train_batches[0], device=cuda_device()) as session:
        guard = OomGuard(session, lambda text: None)
        for batch in train_batches[:3]:
            guard.run(lambda batch=batch: step_of(batch))
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        cuda.set_memory(0, torch.cuda.memory_reserved())
        with pytest.raises(BudgetError, match=r"out of memory in step 4 .*--device-memory.*resume"):
            guard.run(lambda: step_of(train_batches[3]))


@pytest.mark.parametrize("late", [False, True])
def test_memory_that_ends_outside_the_allocator_is_out_of_memory(late, tmp_path):
    """A library fails to make its handle, with an error that is not torch's own."""
    train_batches = batches(4, batch=16, seq=64)
    cuda.set_delays(0, 0, 0)
    messages: list[str] = []

    def step_of(batch: dict[str, torch.Tensor]) -> None:
        if session.step == failing and not messages:
            raise RuntimeError(CUBLAS)
        session.model(**batch).loss.backward()

    failing = 3 if late else 1
    with attached(wide_model(), tmp_path, batch=train_batches[0], device=cuda_device()) as session:
        guard = OomGuard(session, messages.append)
        for batch in train_batches[:failing]:
            guard.run(lambda batch=batch: step_of(batch))
        if late:
            with pytest.raises(BudgetError, match=r"out of memory in step 4 .*CUBLAS.*resume"):
                guard.run(lambda: step_of(train_batches[3]))
        else:
            guard.run(lambda: step_of(train_batches[1]))
            assert "CUBLAS_STATUS_ALLOC_FAILED" in messages[0]


CUBLAS = "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"


def test_handles_of_libraries_are_made_before_free_memory_is_measured():
    """The handles of two threads, the opening one and autograd's, are all that a run needs."""
    device = cuda_device_in_thread(10 * MiB)
    assert device["free after"] <= device["free before"] - 10 * MiB
    assert device["later"] == device["free after"]


def cuda_device_in_thread(handle: int) -> dict[str, int]:
    """Open a device and multiply on a new thread, and return what was free in between."""
    collected: dict[str, int] = {}

    def work() -> None:
        collected["free before"] = torch.cuda.mem_get_info()[0]
        device = cuda_device()
        collected["free after"] = device.memory_bytes()
        matrix = torch.ones(8, 8, device="cuda", requires_grad=True)
        (matrix @ matrix).sum().backward()
        collected["later"] = device.memory_bytes()

    torch.cuda.empty_cache()
    cuda.set_handle(handle)
    try:
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
    finally:
        cuda.set_handle(0)
    return collected


def test_one_visible_device_for_each_rank(monkeypatch):
    """Launchers under SLURM show each rank its own devices, here rank 5 one of two."""
    for name, value in {"LOCAL_RANK": "5", "RANK": "5", "WORLD_SIZE": "8"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match=r"rank 5 .* has no device"):
        cuda_device()
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5")
    current = torch.cuda.current_device()
    try:
        assert cuda_device().torch_device == torch.device("cuda", 1)
    finally:
        torch.cuda.set_device(current)


WORKSPACE = 4 * MiB  # of cuBLAS, a thread; 8 MiB on a real card


class Limited(AcceleratorDevice):
    """Plans for less than there is, so that what is used beyond it shows."""

    def memory_bytes(self) -> int:
        return 200 * MiB


def test_what_is_reserved_is_what_was_planned(tmp_path):
    """Rounding, workspaces and attention's own are in the plan."""
    train_batches = batches(3, batch=16, seq=64)
    cuda.set_delays(0, 0, 0)
    cuda.set_poison(False)
    torch.cuda.set_device(0)
    torch.cuda.empty_cache()
    before = torch.cuda.memory_reserved()
    cuda.set_workspace(WORKSPACE)
    torch.cuda.reset_peak_memory_stats()
    try:
        with attached(wide_model(), tmp_path, batch=train_batches[0], device=Limited()) as session:
            for batch in train_batches:
                session.model(**batch).loss.backward()
            session.commit()
            planned = session.plan.tier_bytes("device")
        peak = torch.cuda.max_memory_reserved() - before
        assert peak <= 1.05 * planned, (peak / MiB, planned / MiB, session.plan.ledger)
    finally:
        cuda.set_workspace(0)
