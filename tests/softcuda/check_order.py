"""The order detector finds each kind of missing order for any timing, and lanes sleep."""

from __future__ import annotations

import json
from contextlib import suppress
from typing import Any

import pytest
import torch

from lohan.device.launch import launch
from lohan.device.out_of_memory import is_out_of_memory
from lohan.device.ranks import ProcessGroup, all_gather_into, distributed, reduce_scatter_rows
from lohan.engine.gradients import StepCollectives
from lohan.model.layout import FlatGroup, TensorSpec
from lohan.util.units import MiB
from tests.softcuda import extension, two_ranks, waits
from tests.softcuda.check_training import cuda_device
from tests.support.delayed_runs import CopiesAtOnce, NeverWaits, train_with_kept_slices

pytestmark = pytest.mark.gpu
COUNT = 1000
TWO_RANKS, CONFLICTS = two_ranks.__name__, two_ranks.CONFLICTS
cuda: Any = extension()


def races() -> set[str]:
    """Return the kinds of conflict that were found, and forget them."""
    torch.cuda.synchronize()
    return {text.partition(":")[0] for text in cuda.take_races()}


@pytest.mark.parametrize("waited", [True, False])
@pytest.mark.parametrize("conflict", ["read after write", "write after read", "write after write"])
def test_finds_a_missing_wait_between_streams(conflict, waited):
    memory, other = torch.zeros(COUNT, device="cuda"), torch.cuda.Stream()
    other.wait_stream(torch.cuda.current_stream())
    before, after = conflict.split(" after ")[::-1]
    use = {"read": lambda: memory + 1, "write": lambda: memory.fill_(2.0)}
    use[before]()
    if waited:
        other.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(other):
        use[after]()
    actual = races()
    assert conflict in actual if not waited else not actual


def test_a_wait_of_the_host_is_an_order():
    memory, other = torch.zeros(COUNT, device="cuda"), torch.cuda.Stream()
    torch.cuda.current_stream().synchronize()
    with torch.cuda.stream(other):
        memory.fill_(2.0)
    other.record_event().synchronize()
    memory.fill_(3.0)
    assert races() == set()


@pytest.mark.parametrize("recorded", [True, False])
def test_finds_a_missing_record_stream(recorded):
    """Memory is freed while another stream reads it, and its owner takes it again."""
    memory, other = torch.zeros(COUNT, device="cuda"), torch.cuda.Stream()
    host = torch.empty(COUNT).pin_memory()
    other.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(other):
        host.copy_(memory, non_blocking=True)
    if recorded:
        memory.record_stream(other)
    del memory
    torch.ones(COUNT, device="cuda")
    assert races() == (set() if recorded else {"write after read"})


@pytest.mark.parametrize("on_compute", [True, False])
def test_finds_an_allocation_on_the_wrong_stream(on_compute):
    """Memory that a lane takes from its own pool is free for the lane again while compute reads."""
    lane = torch.cuda.Stream()
    compute = torch.cuda.current_stream()
    with torch.cuda.stream(compute if on_compute else lane):
        memory = torch.empty(COUNT, device="cuda")
    lane.wait_stream(compute)
    with torch.cuda.stream(lane):
        memory.fill_(1.0)
    compute.wait_stream(lane)
    memory + 1
    del memory
    assert races() == (set() if on_compute else {"write after read"})


@pytest.mark.parametrize("first", ["all_gather", "nothing"])
def test_collectives_are_accesses(first):
    net, other = one_rank(), torch.cuda.Stream()
    rows = torch.ones(1, COUNT, device="cuda")
    if first == "all_gather":
        with torch.cuda.stream(other):
            net.reduce_scatter(rows)
    assert races() == ({"read after write"} if first == "all_gather" else set())


@pytest.mark.parametrize("careless", [NeverWaits, CopiesAtOnce])
def test_finds_a_missing_wait_of_the_engine(careless):
    """The race detector finds a missing wait without delays.

    The detector has one clock for the waits of all host threads. Devices that leave those out
    are found by their numbers (check_training.py).
    """
    with suppress(RuntimeError):  # the device's clock is read for events that have not come
        train_with_kept_slices(careless())
    assert races()


# -- the net lane ----------------------------------------------------------------------------------


class OneRank(ProcessGroup):
    """The collectives of several ranks in a group of one, over NCCL."""

    def reduce_scatter(self, rows: torch.Tensor) -> torch.Tensor:
        return reduce_scatter_rows(rows, None)


def one_rank() -> ProcessGroup:
    if not distributed().is_initialized():
        store = distributed().HashStore()
        distributed().init_process_group("nccl", store=store, rank=0, world_size=1)
    return OneRank()


def test_the_net_lane_sleeps_when_it_waits():
    """A reduce-scatter waits for its sum and for the flags, and never in a loop."""
    device, count = cuda_device(), 12
    specs = tuple(TensorSpec(str(i), (8,), 8 * i, 8, True, True) for i in range(count))
    collectives = StepCollectives(one_rank(), [FlatGroup("g", specs, 8 * count)])
    grads = {i: torch.full((8,), float(i), device="cuda") for i in range(count) if i != 5}
    wanted = {i: grad.tolist() for i, grad in grads.items()}
    with waits() as seen_waits:
        device._streams["net"].wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(device._streams["net"]):
            shard = collectives.reduce_scatter(0, grads, device)
    assert not grads and {i: grad.tolist() for i, grad in shard.items()} == wanted
    assert {wait.what for wait in seen_waits} == {"event"}, list(map(str, seen_waits))
    assert len(seen_waits) <= 2  # the sum, its flags
    assert device._streams["net"].priority < device._streams["h2d"].priority


def test_finds_mistakes_of_two_ranks(monkeypatch, tmp_path):
    """A missing wait, a missing record_stream, and an allocation on the stream of the net lane.

    The ranks also connect before they measure free memory, and divide the cores.
    """
    mib = 64
    monkeypatch.setenv("SOFTCUDA_NCCL_MIB", str(mib))
    messages: list[str] = []
    assert launch(2, ["-m", TWO_RANKS, str(tmp_path)], note=messages.append) == 0, messages
    for rank in range(2):
        actual = json.loads((tmp_path / f"{rank}.json").read_text())
        assert actual["conflicts"] == CONFLICTS
        before, connected, later = actual["free"]
        assert before - connected == mib * MiB and later == connected
        assert actual["threads"] <= max(1, actual["cores"] // 2)


def test_a_communicator_without_memory_is_out_of_memory(monkeypatch):
    """NCCL takes memory of the device with the first call of a group."""
    one_rank()
    monkeypatch.setenv("SOFTCUDA_NCCL_MIB", "4096")
    group, whole = distributed().new_group(backend="nccl"), torch.zeros(1, device="cuda")
    with pytest.raises(RuntimeError) as failed:
        all_gather_into(whole, whole[:1], group)
    assert is_out_of_memory(failed.value), failed.value
