"""Checks of `lohan doctor --gpu` for the host and driver: pinned memory and queued launches."""

from __future__ import annotations

import time
from threading import Thread
from typing import Any

import torch

from lohan.device import accelerator
from lohan.device.base import HostMemory, pages
from lohan.tools.gpu_bench import Bench, CheckResult, WrongResult
from lohan.util.memory import host_memory_bytes
from lohan.util.units import GiB, MiB, format_bytes

MOST_PINNED = 32 * GiB
HELD_CYCLES = 300_000_000  # Clock cycles for which compute is blocked; about 0.2 s.


def pinnable(bench: Bench) -> CheckResult:
    """Measure how much host memory can be pinned. WSL2 and containers may allow very little."""
    opened = bench.open()
    if not accelerator.can_register(opened.torch_device):
        return CheckResult(facts={"skipped": "this backend pins through torch's own allocator"})
    piece = 256 * MiB if bench.real else 4 * MiB
    tried = min(MOST_PINNED, host_memory_bytes() // 2) if bench.real else 4 * piece
    pieces: list[HostMemory] = []
    error = ""
    while not error and len(pieces) * piece < tried:
        memory = pages(piece)
        try:
            accelerator.register(memory)
        except RuntimeError as refused:
            error = str(refused).splitlines()[0]
        else:
            pieces.append(memory)
    pinned = len(pieces) * piece
    facts = {"tried": format_bytes(tried), "pinned": format_bytes(pinned), "refused": error}
    return CheckResult({"pinnable_share": pinned / max(tried, 1)}, facts)


def queue(bench: Bench) -> CheckResult:
    """Check that thousands of queued launches do not delay a copy started by another thread."""
    opened, launches = bench.open(), 3000 if bench.real else 50
    on_device = opened.allocate(MiB)
    host = torch.from_numpy(opened.host_memory(MiB)).zero_()
    counter = torch.zeros(64, device=opened.torch_device)
    opened.mark().synchronize()
    copied_s: list[float] = []

    def copy() -> None:
        opened.enter("h2d")
        time.sleep(0.05 if bench.real else 0.0)  # wait until the compute queue is full
        start = time.perf_counter()
        opened.copy("h2d", [(on_device, host)]).synchronize()
        copied_s.append(time.perf_counter() - start)

    thread = Thread(target=copy, name="copy beside launches")
    if bench.real and opened.torch_device.type == "cuda":
        sleep: Any = torch.cuda._sleep
        sleep(HELD_CYCLES)
    thread.start()
    start = time.perf_counter()
    for _ in range(launches):
        counter.add_(1)
    launched_s = time.perf_counter() - start
    thread.join()
    if counter.cpu().tolist() != [launches] * 64:
        raise WrongResult(f"{launches} additions of one give {counter.cpu()[0]}")
    if not copied_s:
        raise WrongResult("the copy beside the launches has failed; its error is above")
    figures = {"copy_beside_launches_s": copied_s[0]}
    return CheckResult(figures, {"launches": launches, "launched_s": launched_s})
