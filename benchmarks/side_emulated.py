"""A child of emulated.py: steps on an emulated device with slowed drives and updates.

Without an update mode, it measures the machine through the same device instead.
"""

from __future__ import annotations

import json
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import side_lohan
from children import tell

Rates = dict[str, float]


class Pace:
    """A resource that serves one request after another, each for a given time."""

    def __init__(self) -> None:
        self._lock, self._free_s = threading.Lock(), 0.0

    def take(self, seconds: float) -> float:
        """Return the time at which work that is submitted now will be complete."""
        with self._lock:
            self._free_s = max(self._free_s, time.perf_counter()) + seconds
            return self._free_s


def sleep_until(done_s: float) -> None:
    if (left_s := done_s - time.perf_counter()) > 0:
        time.sleep(left_s)


class PacedEngine:
    """An I/O engine whose files are on a drive of given rates.

    Bytes are moved for real. A ticket is complete when such a drive would have served it and all
    earlier requests.
    """

    def __init__(self, inner: Any, rates: Rates, pace: Pace) -> None:
        self._inner, self._rates, self._pace = inner, rates, pace
        self._done: dict[int, float] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def read(self, file: int, offset: int, buffer: Any) -> int:
        done_s = self._pace.take(len(buffer) / self._rates["read"])
        return self._given(self._inner.read(file, offset, buffer), done_s)

    def write(self, file: int, offset: int, buffer: Any) -> int:
        done_s = self._pace.take(len(buffer) / self._rates["write"])
        return self._given(self._inner.write(file, offset, buffer), done_s)

    def _given(self, ticket: int, done_s: float) -> int:
        self._done[ticket] = done_s
        return ticket

    def wait(self, ticket: int, timeout_s: float) -> None:
        self._inner.wait(ticket, timeout_s)
        sleep_until(self._done.pop(ticket, 0.0))


def main() -> None:
    spec: dict[str, Any] = json.loads(sys.argv[1])
    from lohan.device.emulated import EmulatedDevice

    rates: Rates = spec["rates"]
    device = EmulatedDevice(
        spec["device_memory"], h2d=rates["link"], d2h=rates["link"], flops=rates["flops"]
    )
    tell(steps(spec, device, rates) if "update_mode" in spec else measured(spec, device, rates))


def steps(spec: dict[str, Any], device: Any, rates: Rates) -> dict[str, Any]:
    slow_updates(rates["adam"])
    slow_drives(rates)
    return side_lohan.run(spec, device=device)


def slow_drives(rates: Rates) -> None:
    """Give all stores, for state and for activations, a single drive of these rates."""
    from lohan.store import io_engine

    real, pace = io_engine.open_engine, Pace()
    io_engine.open_engine = lambda name: PacedEngine(real(name), rates, pace)


def slow_updates(rate: float) -> None:
    """Limit updates to `rate` parameters per second."""
    from lohan.engine import actions

    pace = Pace()

    def paced(update: Any) -> Any:
        def updated(group: Any, chunk: Any, **options: Any) -> Any:
            done_s = pace.take((chunk.stop - chunk.start) / rate)
            checksums = update(group, chunk, **options)
            sleep_until(done_s)
            return checksums

        return updated

    # The updates of several logged steps of a chunk are one pass over memory.
    actions.update_chunk, actions.replay_chunk = map(
        paced, (actions.update_chunk, actions.replay_chunk)
    )


def measured(spec: dict[str, Any], device: Any, rates: Rates) -> dict[str, Any]:
    """Return a profile with measured compute, links and fixed costs, and the given other rates."""
    from lohan.engine.probes import Effort, Sizes, profile
    from lohan.model.machine import Drive
    from lohan.util.units import MiB

    sizes = Sizes(
        hidden=spec["hidden"],
        inner=spec["intermediate"],
        heads=spec["heads"],
        vocabulary=spec["vocabulary"],
        copies=2,
        chunk_params=2**18,
    )
    effort = Effort(
        sizes=sizes,
        tokens=(spec["tokens"],),
        head_tokens=spec["tokens"],
        link_bytes=8 * MiB,
        drive_seconds=0.5,
        drive_bytes=64 * MiB,
        chunk_bytes=4 * MiB,
    )
    result = profile([Path(spec["ssd"])], effort=effort, device=device)
    device.close()
    (real,) = result.drives
    drive = Drive(
        name="paced",
        read=rates["read"],
        write=rates["write"],
        bytes=real.bytes,
        endurance_bytes=rates["endurance"],
    )
    machine = replace(result, name="emulated", drives=(drive,), adam=rates["adam"], ssd_limit=0.0)
    Path(spec["out"]).write_text(machine.to_toml())
    return {
        "flops": result.compute[0][1],
        "backward_flops": result.backward[0][1],
        "h2d": result.h2d,
        "d2h": result.d2h,
        "drive_read": real.read,
        "drive_write": real.write,
        "adam": result.adam,
    }


if __name__ == "__main__":
    main()
