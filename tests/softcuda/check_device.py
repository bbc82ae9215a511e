"""Test that software CUDA is as strict as a GPU: results require a wait.

Streams can be held so that they start nothing; nothing here depends on time.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from lohan.device.accelerator import forget_error
from lohan.device.out_of_memory import is_out_of_memory
from lohan.util.units import MiB
from tests.softcuda import extension, waits

pytestmark = pytest.mark.gpu
COUNT = 1000
OLD = tuple(map(int, torch.__version__.split(".")[:2])) < (2, 7)
cuda = extension()


@contextmanager
def held(stream: torch.cuda.Stream) -> Iterator[None]:
    cuda.hold(stream.cuda_stream, True)
    try:
        yield
    finally:
        cuda.hold(stream.cuda_stream, False)
        torch.cuda.synchronize()


def ones(device: str = "cuda") -> torch.Tensor:
    tensor = torch.ones(COUNT).to(device)
    torch.cuda.synchronize()
    return tensor


def test_it_is_cuda_with_two_devices():
    assert torch.version.cuda and torch.cuda.is_available() and torch.cuda.device_count() == 2
    assert torch.cuda.get_device_capability(1) == (8, 9)
    assert (ones("cuda:1") + 1).device == torch.device("cuda", 1)
    with pytest.raises(RuntimeError, match="same device"):
        ones("cuda:1") + ones("cuda:0")


def test_operators_are_given_and_done_later():
    on_device, before = ones(), cuda.counts()
    with held(torch.cuda.current_stream()):
        tensor = (on_device * 2 + on_device).softmax(0)
        assert not torch.cuda.current_stream().query()
    after = cuda.counts()
    assert after["operators"] > before["operators"] + 2 and after["kernels"] == before["kernels"]
    assert tensor.sum().item() == pytest.approx(1.0, abs=1e-3)


@pytest.mark.parametrize("pinned", [True, False])
def test_only_pinned_memory_is_filled_later(pinned):
    """A copy to pageable memory blocks, as it does on CUDA."""
    on_device, on_host = ones(), torch.zeros(COUNT, pin_memory=pinned)
    with waits() as seen_waits:
        on_host.copy_(on_device, non_blocking=True)
    assert bool(seen_waits) == (not pinned)
    torch.cuda.synchronize()
    assert torch.equal(on_host, torch.ones(COUNT))


@pytest.mark.parametrize("portable", [True, False])
def test_registered_memory_is_pinned_for_one_device_unless_it_is_portable(portable):
    memory = np.zeros(3 * 4096, dtype=np.uint8)
    place = -memory.ctypes.data % 4096
    here, runtime = torch.from_numpy(memory[place : place + 4096]), torch.cuda.cudart()
    assert int(runtime.cudaHostRegister(here.data_ptr(), 4096, int(portable))) == 0
    try:
        for number, waited in ((0, False), (1, not portable)):
            on_device = torch.ones(4096, dtype=torch.uint8).to(f"cuda:{number}")
            torch.cuda.synchronize(number)
            with waits() as seen_waits:
                here.copy_(on_device, non_blocking=True)
            assert bool(seen_waits) == waited
            torch.cuda.synchronize(number)
    finally:
        assert int(runtime.cudaHostUnregister(here.data_ptr())) == 0


@pytest.mark.parametrize("waited", [True, False])
def test_streams_do_not_wait_for_each_other_by_themselves(waited):
    on_device, on_host = ones(), torch.zeros(COUNT).pin_memory()
    compute, other = torch.cuda.current_stream(), torch.cuda.Stream()
    with held(compute):
        result = on_device + 1
        if waited:
            other.wait_stream(compute)
        with torch.cuda.stream(other):
            on_host.copy_(result, non_blocking=True)
        if not waited:
            other.synchronize()
    assert torch.equal(on_host, torch.full((COUNT,), 2.0)) == waited
    assert bool(cuda.take_races()) == (not waited)


@pytest.mark.parametrize("recorded", [True, False])
def test_released_memory_is_reused_at_once(recorded):
    on_device, on_host, other = ones(), torch.zeros(COUNT).pin_memory(), torch.cuda.Stream()
    cuda.set_poison(True)
    try:
        with held(other):
            with torch.cuda.stream(other):
                on_host.copy_(on_device, non_blocking=True)
            if recorded:
                on_device.record_stream(other)
            del on_device
            torch.cuda.current_stream().synchronize()
    finally:
        cuda.set_poison(False)
    assert torch.equal(on_host, torch.ones(COUNT)) == recorded
    assert bool(cuda.take_races()) == (not recorded)


def test_host_cannot_read_device_memory():
    on_device = ones()
    with pytest.raises(TypeError, match="cuda"):
        on_device.numpy()
    assert cuda.counts()["kernels"] == 0


@pytest.mark.parametrize("expandable", [False, True])
def test_allocation_beyond_the_limit_fails(expandable):
    if expandable and OLD:
        pytest.skip("torch before 2.7 asks the driver itself for segments that grow")
    torch.cuda.empty_cache()
    settings = getattr(torch._C, "_accelerator_setAllocatorSettings", None)
    settings = settings or torch.cuda.memory._set_allocator_settings
    settings(f"expandable_segments:{expandable}")
    # Workspaces of libraries are outside of the allocator, so ask the device what is used.
    free, total = torch.cuda.mem_get_info(0)
    cuda.set_memory(0, 64 * MiB + total - free)
    try:
        kept = torch.empty(40 * MiB, dtype=torch.uint8, device="cuda")
        with pytest.raises(torch.cuda.OutOfMemoryError, match="out of memory"):
            torch.empty(40 * MiB, dtype=torch.uint8, device="cuda")
        del kept
        assert len(torch.empty(60 * MiB, dtype=torch.uint8, device="cuda")) == 60 * MiB
    finally:
        torch.cuda.empty_cache()
        cuda.set_memory(0, 1024 * MiB)
        settings("expandable_segments:False")


def test_error_stays_until_it_is_queried():
    """Registering twice fails, and so does the next launch, unless the error is taken away."""
    memory = np.zeros(3 * 4096, dtype=np.uint8)
    place = (memory.ctypes.data + 4095) // 4096 * 4096
    runtime = torch.cuda.cudart()
    assert int(runtime.cudaHostRegister(place, 4096, 0)) == 0
    for forgets in (False, True):
        assert int(runtime.cudaHostRegister(place, 4096, 0)) != 0
        if forgets:
            forget_error()
            assert (ones() + 1)[0].item() == 2
        else:
            with pytest.raises(RuntimeError, match="already mapped"):
                ones() + 1
    assert int(runtime.cudaHostUnregister(place)) == 0


def test_waits_of_the_host_are_known_with_their_stack():
    on_device = ones()
    with waits() as seen_waits:
        on_device.sum()  # none
        on_device.nonzero()
        on_device.sum().item()
        torch.nn.functional.dropout(on_device)  # none: draws are the device's own
    function = "test_waits_of_the_host_are_known_with_their_stack"
    assert len(seen_waits) == 2 and all(wait.site[1] == function for wait in seen_waits)
    assert {wait.thread for wait in seen_waits} == {threading.current_thread().name}


def test_events_that_block_do_not_spin():
    for blocking, spins in ((True, 0), (False, 1)):
        before = cuda.counts()["spins"]
        event = torch.cuda.Event(blocking=blocking)
        event.record()
        event.synchronize()
        assert cuda.counts()["spins"] == before + spins


def test_a_full_queue_blocks_the_launches_of_all_threads():
    """As with a real driver, a copy of another thread on another stream waits for the queue."""
    on_device, other = ones(), torch.cuda.Stream()
    copied = threading.Event()

    def copy() -> None:
        with torch.cuda.stream(other):
            ones() + 1
        copied.set()

    def fill() -> None:
        for _ in range(12):
            on_device.add_(1)

    threads = [threading.Thread(target=target) for target in (fill, copy)]
    cuda.set_queue(8)
    try:
        with held(torch.cuda.current_stream()):
            threads[0].start()
            while cuda.queued(torch.cuda.current_stream().cuda_stream) < 8:
                time.sleep(0.001)
            threads[1].start()
            assert not copied.wait(0.1)
    finally:
        cuda.set_queue(1024)
        for thread in threads:
            thread.join()
    assert copied.is_set() and on_device[0].item() == 13


def test_memory_is_pinned_by_whole_pages():
    memory = np.zeros(4 * 4096, dtype=np.uint8)
    start, runtime = memory.ctypes.data + -memory.ctypes.data % 4096, torch.cuda.cudart()
    assert int(runtime.cudaHostRegister(start, 100, 0)) == 0
    assert int(runtime.cudaHostRegister(start + 2048, 100, 0)) != 0
    forget_error()
    assert int(runtime.cudaHostUnregister(start)) == 0


def test_a_handle_of_a_library_takes_memory_outside_the_allocator():
    matrix, free = torch.ones(8, 8, device="cuda"), torch.cuda.mem_get_info()[0]
    failed: list[str] = []

    def multiply() -> None:
        try:
            matrix @ matrix
        except RuntimeError as error:
            failed.append(str(error))

    cuda.set_handle(2 * free)
    try:
        thread = threading.Thread(target=multiply)
        thread.start()
        thread.join()
    finally:
        cuda.set_handle(0)
    assert "CUBLAS_STATUS_ALLOC_FAILED" in failed[0]
    assert is_out_of_memory(RuntimeError(failed[0]))


TOUCHES = """
import sys, torch, lohan_softcuda as cuda
stream, host = torch.cuda.current_stream(), torch.zeros(1 << 20, dtype=torch.uint8).pin_memory()
there = torch.ones(1 << 20, dtype=torch.uint8, device="cuda")
torch.cuda.synchronize()
cuda.hold(stream.cuda_stream, True)
to_host = sys.argv[1] == "to the host"
host.copy_(there, non_blocking=True) if to_host else there.copy_(host, non_blocking=True)
if sys.argv[2] == "early":
    host[1 << 19] = 3
cuda.hold(stream.cuda_stream, False)
torch.cuda.synchronize()
host[1 << 19] = 3
"""


@pytest.mark.parametrize("when", ["early", "in time"])
@pytest.mark.parametrize("way", ["to the host", "to the device"])
def test_the_host_cannot_touch_what_a_copy_in_flight_uses(way, when):
    done = subprocess.run(
        [sys.executable, "-c", TOUCHES, way, when],
        capture_output=True,
        text=True,
        env={**os.environ, "SOFTCUDA_GUARD": "1"},
    )
    assert done.returncode == (-signal.SIGSEGV if when == "early" else 0), done


CAPABILITY = (
    "import torch; from lohan.device.accelerator import AcceleratorDevice as D;"
    "q = torch.zeros(1, 2, 16, 8, dtype=torch.float16, device='cuda', requires_grad=True);"
    "out = torch.nn.functional.scaled_dot_product_attention(q, q, q);"
    "print(torch.cuda.get_device_capability(), D().default_dtype, out.grad_fn.name())"
)


NEWEST = "9.0" if OLD else "12.0"  # the last capability that torch has attention kernels for


@pytest.mark.parametrize(
    ("capability", "expected"), [("7.5", "fp16 .*Efficient"), (NEWEST, "bf16 .*Flash")]
)
def test_attention_is_chosen_by_capability(capability, expected):
    done = subprocess.run(
        [sys.executable, "-c", CAPABILITY],
        capture_output=True,
        text=True,
        env={**os.environ, "SOFTCUDA_CAPABILITY": capability},
    )
    numbers = capability.replace(".", ", ")
    assert re.search(rf"\({numbers}\) {expected}", done.stdout), done


def heads(device: str, dtype: torch.dtype, *, shared: int = 1) -> list[torch.Tensor]:
    torch.manual_seed(0)
    created = [torch.randn(2, 4 // n, 24, 8, dtype=dtype) for n in (1, shared, shared)]
    return [tensor.to(device).requires_grad_() for tensor in created]


MASK = torch.ones(2, 1, 24, 24, dtype=torch.bool).tril()
MASK[0, :, :, 3:7] = False
MASK[..., 0] = True


@pytest.mark.parametrize(
    ("dtype", "masked", "shared", "kernel"),
    [
        (torch.bfloat16, False, 1, "Flash"),
        (torch.bfloat16, False, 2, "Flash"),
        (torch.bfloat16, True, 1, "Efficient"),
        (torch.float32, False, 1, "Efficient"),
        (torch.float32, True, 1, "Efficient"),
    ],
)
def test_attention_is_the_kernel_that_cuda_chooses_with_the_bits_of_the_cpu(
    dtype, masked, shared, kernel
):
    if shared > 1 and OLD:
        pytest.skip("the CPU's kernel knows no shared heads before torch 2.7")
    collected = {}
    for device in ("cpu", "cuda"):
        inputs = heads(device, dtype, shared=shared)
        mask = MASK.to(device) if masked else None
        out = scaled_dot_product_attention(
            *inputs, attn_mask=mask, is_causal=not masked, enable_gqa=shared > 1
        )
        out.float().square().sum().backward()
        collected[device] = [out.detach().cpu(), *(tensor.grad.cpu() for tensor in inputs)]
        name = out.grad_fn.name()
    assert kernel in name
    for one, other in zip(collected["cpu"], collected["cuda"], strict=True):
        assert torch.equal(one, other)


def test_what_attention_kernels_return():
    """The random state of the efficient kernel is on the host, where its backward reads it."""
    query, key, value = (t.detach() for t in heads("cuda", torch.float32))
    out, sums, seed, offset = torch.ops.aten._scaled_dot_product_efficient_attention(
        query, key, value, None, True, 0.5, True
    )
    assert sums.shape == (2, 4, 32) and out.transpose(1, 2).is_contiguous()
    assert seed.device.type == offset.device.type == "cpu" and seed.shape == ()
    arguments = (torch.ones_like(out), query, key, value, None, out, sums)
    wanted = [True, True, True, False]
    backward = torch.ops.aten._scaled_dot_product_efficient_attention_backward
    schedule = backward(*arguments, seed, offset, 0.5, wanted, True)
    again = backward(*arguments, seed, offset, 0.5, wanted, True)
    assert torch.equal(schedule[0], again[0])
    with pytest.raises(RuntimeError, match="segmentation fault"):
        backward(*arguments, seed.cuda(), offset.cuda(), 0.5, wanted, True)
    half = (t.to(torch.bfloat16) for t in (query, key, value))
    results = torch.ops.aten._scaled_dot_product_flash_attention(*half, 0.5, True)
    assert results[6].device.type == ("cpu" if OLD else "cuda")
    assert results[1].shape == (2, 4, 24) and results[2] is None


def test_a_library_takes_a_workspace_of_every_thread(monkeypatch):
    matrix = torch.ones(8, 8, device="cuda")
    cuda.set_workspace(3 * MiB)
    try:
        before = torch.cuda.memory_allocated()
        for _ in range(2):
            thread = threading.Thread(target=lambda: matrix @ matrix)
            thread.start()
            thread.join()
        assert torch.cuda.memory_allocated() >= before + 3 * MiB
    finally:
        cuda.set_workspace(0)
