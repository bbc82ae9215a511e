"""Test that the trial backend is as strict as a device: results require a wait.

No test here depends on time, since a stream can be held so that it starts nothing.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, ClassVar

import pytest
import torch

from tests.backend import NAME, register

pytestmark = pytest.mark.gpu
COUNT = 1000
trial: Any = register()


@contextmanager
def held(stream: torch.Stream) -> Iterator[None]:
    trial.hold(stream.stream_id, True)
    try:
        yield
    finally:
        trial.hold(stream.stream_id, False)
        torch.accelerator.synchronize()


@contextmanager
def current(stream: torch.Stream) -> Iterator[None]:
    before = torch.accelerator.current_stream()
    torch.accelerator.set_stream(stream)
    try:
        yield
    finally:
        torch.accelerator.set_stream(before)


def ones() -> torch.Tensor:
    tensor = torch.ones(COUNT).to(NAME)
    torch.accelerator.synchronize()
    return tensor


def test_it_is_the_accelerator():
    assert torch.accelerator.current_accelerator().type == NAME
    assert torch.accelerator.device_count() == 1
    with pytest.raises(RuntimeError, match="one trial device"):
        torch.accelerator.set_device_index(1)


@pytest.mark.parametrize("pinned", [True, False])
def test_copies_to_the_host_are_under_way_when_they_return(pinned):
    on_device, on_host = ones(), torch.zeros(COUNT, pin_memory=pinned)
    assert on_host.is_pinned() == pinned
    with held(stream := torch.accelerator.current_stream()):
        on_host.copy_(on_device, non_blocking=True)
        event = stream.record_event()
        assert not event.query() and torch.equal(on_host, torch.zeros(COUNT))
    event.synchronize()
    assert event.query() and torch.equal(on_host, torch.ones(COUNT))


def test_copies_that_block_are_done():
    assert torch.equal(ones().cpu(), torch.ones(COUNT))


def test_operators_are_given_and_done_later():
    on_device, before = ones(), trial.counts()
    with held(stream := torch.accelerator.current_stream()):
        tensor = (on_device * 2 + on_device).softmax(0)
        norm = torch.nn.functional.layer_norm(on_device, (COUNT,))
        assert not stream.query()
    after = trial.counts()
    assert after["operators"] > before["operators"] + 3
    assert after["waited for"] == before["waited for"]
    assert tensor.sum().item() == pytest.approx(1.0, abs=1e-3) and norm[0].item() == 0.0
    assert trial.counts()["waited for"] > after["waited for"]


@pytest.mark.parametrize("waits", [True, False])
def test_streams_do_not_wait_for_each_other_by_themselves(waits):
    """Copies from and to what compute on another stream has not come to."""
    on_device, on_host, seven = ones(), torch.zeros(COUNT), torch.full((COUNT,), 7.0)
    compute, other = torch.accelerator.current_stream(), torch.Stream(device=NAME)
    with held(compute):
        result, slot = on_device + 1, on_device * 1
        if waits:
            other.wait_event(compute.record_event())
        with current(other):
            on_host.copy_(result, non_blocking=True)
            slot.copy_(seven, non_blocking=True)
        if not waits:
            other.synchronize()
    assert torch.equal(on_host, torch.full((COUNT,), 2.0)) == waits
    assert torch.equal(slot.cpu(), seven) == waits


def test_times_between_events():
    stream = torch.accelerator.current_stream()
    first, second = (torch.Event(device=NAME, enable_timing=True) for _ in range(2))
    first.record(stream)
    ones()
    second.record(stream)
    second.synchronize()
    assert first.elapsed_time(second) > 0


def test_streams_belong_to_threads():
    stream, seen = torch.Stream(device=NAME), []
    with current(stream):
        thread = threading.Thread(target=lambda: seen.append(torch.accelerator.current_stream()))
        thread.start()
        thread.join()
        assert torch.accelerator.current_stream() == stream != seen[0]


class Look(torch.autograd.Function):
    seen: ClassVar[list[Any]] = []

    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        Look.seen.append((threading.get_ident(), torch.accelerator.current_stream()))
        return grad


def test_backward_runs_on_a_thread_of_the_device_on_the_stream_of_forward():
    stream, leaf = torch.Stream(device=NAME), ones().requires_grad_()
    with current(stream):
        Look.apply(leaf).sum().backward()
    ((thread, used),) = Look.seen
    assert thread != threading.get_ident() and used == stream
    torch.accelerator.synchronize()
    assert torch.equal(leaf.grad.cpu(), torch.ones(COUNT))


def test_allocation_beyond_the_limit_fails_and_leaks_nothing():
    torch.accelerator.synchronize()
    used = torch.accelerator.memory_allocated()
    trial.set_memory(used + 4 * COUNT)
    try:
        with pytest.raises(torch.OutOfMemoryError, match="trial device out of memory"):
            torch.empty(4 * COUNT + 1, dtype=torch.uint8, device=NAME)
        kept = torch.empty(4 * COUNT, dtype=torch.uint8, device=NAME)
        assert torch.accelerator.get_memory_info() == (0, used + 4 * COUNT)
        del kept
        assert torch.accelerator.memory_allocated() == used
    finally:
        trial.set_memory(1 << 30)


def test_memory_that_nobody_wrote_is_nan():
    assert torch.empty(COUNT, device=NAME).isnan().all()


@pytest.mark.parametrize("recorded", [True, False])
def test_released_memory_is_reused_at_once(recorded):
    """Reuse precedes a later copy on another stream, unless that stream was recorded."""
    on_device, on_host, other = ones(), torch.zeros(COUNT), torch.Stream(device=NAME)
    with held(other):
        with current(other):
            on_host.copy_(on_device, non_blocking=True)
        if recorded:
            on_device.record_stream(other)
        del on_device
        if not recorded:
            torch.accelerator.current_stream().synchronize()
    assert torch.equal(on_host, torch.ones(COUNT)) == recorded


def test_devices_are_not_mixed():
    with pytest.raises(RuntimeError, match="same device"):
        ones() + torch.ones(COUNT)
    with pytest.raises(RuntimeError, match="incompatible tensor type"):
        torch.nn.Parameter(torch.ones(COUNT)).data = ones()


def test_error_in_a_stream_is_raised_by_every_wait():
    index = torch.full((1,), COUNT).to(NAME)
    tensor = ones()[index]
    with pytest.raises(RuntimeError, match=r"out of (bounds|range)"):
        tensor.cpu()
    assert torch.equal(ones().cpu(), torch.ones(COUNT))


def test_device_has_its_own_random_generator():
    host = torch.get_rng_state()
    torch.trial.manual_seed_all(5)
    state = torch.trial.get_rng_state()
    first = torch.nn.functional.dropout(ones(), 0.5).cpu()
    torch.trial.set_rng_state(state)
    assert torch.equal(torch.nn.functional.dropout(ones(), 0.5).cpu(), first)
    assert not torch.equal(torch.nn.functional.dropout(ones(), 0.5).cpu(), first)
    assert torch.equal(torch.get_rng_state(), host)
