"""A rank of two that makes each kind of mistake in the order of the net lane."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from lohan import _core
from lohan.device.accelerator import AcceleratorDevice
from lohan.device.ranks import ProcessGroup, join
from lohan.engine.attach import rank_device
from lohan.engine.gradients import StepCollectives
from lohan.model.layout import FlatGroup, TensorSpec
from tests.softcuda import extension

COUNT = 4096
CONFLICTS = {  # that each mistake makes
    "none": [],
    "no wait": ["read after write"],
    "no record_stream": ["write after read"],
    "wrong stream": ["write after read"],
}


def conflicts(group: ProcessGroup, device: AcceleratorDevice, mistake: str) -> list[str]:
    """Exchange gradients and weights on the net lane's stream, and return the races found."""
    cuda: Any = extension()
    compute, net = torch.cuda.current_stream(), device._streams["net"]
    spec = TensorSpec("a", (COUNT,), 0, COUNT, True, True)
    collectives = StepCollectives(group, [FlatGroup("g", (spec,), COUNT)])
    exchange = group.reduce_scatter

    def exchange_beside_backward(rows: torch.Tensor) -> torch.Tensor:
        with torch.cuda.stream(compute):
            torch.full((COUNT,), 2.0, device="cuda")  # the next gradient, in memory that is free
        return exchange(rows)

    def buffer() -> torch.Tensor:
        if mistake != "wrong stream":
            return device.allocate(COUNT)
        with torch.cuda.stream(net):
            return torch.empty(COUNT, dtype=torch.uint8, device="cuda")

    def gather() -> None:
        shard = (whole := buffer()).view(group.world, -1)[group.rank]
        with torch.cuda.stream(net):
            shard.fill_(1)
            group.all_gather_into(whole, shard)  # the host waits for it
        whole + 1

    grads = {0: torch.full((COUNT,), 1.0, device="cuda")}
    if mistake != "no wait":
        net.wait_stream(compute)
    record_stream = (lambda *_: None) if mistake == "no record_stream" else device.record_stream
    with (
        mock.patch.object(group, "reduce_scatter", exchange_beside_backward),
        mock.patch.object(device, "record_stream", record_stream),
        torch.cuda.stream(net),
    ):
        collectives.reduce_scatter(0, grads, device)
    for _ in range(2):
        gather()
    torch.cuda.synchronize()
    return sorted({text.partition(":")[0] for text in cuda.take_races()})


def main(folder: str) -> None:
    extension().set_order(True)
    group, device = join(), AcceleratorDevice()
    free = [device.memory_bytes()]
    rank_device(device, group)
    free.append(device.memory_bytes())
    group.all_gather_into(whole := device.allocate(2 * COUNT), whole[:COUNT])
    free.append(device.memory_bytes())
    result = {
        "conflicts": {mistake: conflicts(group, device, mistake) for mistake in CONFLICTS},
        "free": free,
        "threads": _core.threads(),
        "cores": len(os.sched_getaffinity(0)),
    }
    Path(folder, f"{group.rank}.json").write_text(json.dumps(result))
    group.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
