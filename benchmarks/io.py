"""What the store moves, as a share of what fio moves on the same drive with as much in flight.

    python benchmarks/io.py [--size 1GiB] [--seconds 4] [--rounds 5]

Reads, writes and the mix of a training step (fp32: 4 bytes read for 3 written) go through the
store: its engine, checksums, generations and commits. fio does direct I/O with 4 MiB blocks and
with the engine's own pieces. All alternate. Shares carry the lowest and highest of the rounds: a
wide range means that the drive or its other users changed, and the median says little. KiB per
request is what reached the drive, other processes' I/O included.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from children import alternate
from common import Report, median, note, parser_of, work_folder

from lohan.engine.buffers import HostPool
from lohan.store.extents import Region
from lohan.store.io_engine import open_engine
from lohan.store.store import Store
from lohan.util.units import MiB, format_bytes, parse_bytes

KINDS = ("read", "write", "mixed")
# The defaults of the engine, which determine the I/O in flight at the drive.
DEPTH, PIECE = 32, MiB
WEIGHT_SHARE = 3  # of a step's state, one chunk in three is weights, which are read twice
Request = tuple[str, int]


@dataclass(frozen=True)
class Measured:
    bytes_per_s: float
    request_kib: float | None  # mean size of the requests that reached the drive


def main() -> int:
    options = parse()
    with work_folder(options.work, "io") as work:
        report = Report(as_json=options.json)
        report.head(work, "lohan", "numpy")
        fio = fio_version()
        report.facts(
            {
                "engine": f"{engine_text(work)}; {DEPTH} pieces of {format_bytes(PIECE)}, "
                f"{options.in_flight} chunks in flight",
                "fio": fio or "skipped: fio is not installed (apt install fio), so no shares",
                "settings": f"{options.rounds} rounds of {options.seconds:g} s, "
                f"{format_bytes(options.size)} in each of the store's two slots",
            }
        )
        stores = {size: Target(work / f"store-{size}", size, options) for size in options.chunks}
        try:
            for kind in options.kinds:
                note(kind)
                sides = sides_of(kind, options, work, stores, fio=fio is not None)
                watched = {name: partial(watch, work, side) for name, side in sides.items()}
                report.table(kind, rows_of(alternate(watched, options.rounds)))
        finally:
            for target in stores.values():
                target.store.close()
        report.close()
    return 0


def parse() -> argparse.Namespace:
    def size(text: str) -> int:
        return parse_bytes(text)

    parser = parser_of(__doc__)
    parser.add_argument("--chunks", nargs="+", type=size, default=[16 * MiB, 32 * MiB])
    parser.add_argument("--size", type=size, default=2**30, help="of one slot of the store")
    parser.add_argument("--seconds", type=float, default=4.0, help="at least, for each measurement")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS))
    parser.add_argument("--in-flight", type=int, default=4, help="chunks at once")
    parser.add_argument("--engine", default="auto", choices=["auto", "uring", "threads"])
    return parser.parse_args()


def engine_text(work: Path) -> str:
    engine: Any = open_engine("auto")
    engine.open(str(work / "probe"), size=4096, create=True)
    direct = "O_DIRECT" if engine.direct else "buffered: this file system has no O_DIRECT"
    engine.close()
    return f"{engine.name}, {direct}"


def sides_of(
    kind: str, options: argparse.Namespace, work: Path, stores: dict[int, Target], *, fio: bool
) -> dict[str, Callable[[], float]]:
    sides: dict[str, Callable[[], float]] = {
        f"store, {format_bytes(size)} chunks": partial(target.bytes_per_s, kind)
        for size, target in stores.items()
    }
    if fio:
        for block in (4 * MiB, PIECE):
            depth = DEPTH * PIECE // block
            name = f"fio, {format_bytes(block)} blocks, depth {depth}"
            sides[name] = partial(fio_bytes_per_s, kind, options, work, block, depth)
    return sides


def share_text(lohan_results: list[Measured], other: list[Measured]) -> str:
    """Return the median and the range of the ratios of the rounds."""
    shares = [a.bytes_per_s / b.bytes_per_s for a, b in zip(lohan_results, other, strict=True)]
    return f"{median(shares):.2f} ({min(shares):.2f} .. {max(shares):.2f})"


def watch(work: Path, side: Callable[[], float]) -> Measured:
    before = drive_counters(work)
    rate = side()
    after = drive_counters(work)
    if before is None or after is None or after[0] == before[0]:
        return Measured(rate, None)
    return Measured(rate, (after[1] - before[1]) / (after[0] - before[0]) / 1024)


def drive_counters(folder: Path) -> tuple[int, int] | None:
    """Return the requests and bytes of the drive of a folder since boot, or None if unknown."""
    device = folder.stat().st_dev
    file = Path(f"/sys/dev/block/{os.major(device)}:{os.minor(device)}/stat")
    if not file.exists():
        return None
    numbers = [int(word) for word in file.read_text().split()]
    return numbers[0] + numbers[4], (numbers[2] + numbers[6]) * 512


def rows_of(results: dict[str, list[Measured]]) -> list[dict[str, Any]]:
    rates = {name: median([m.bytes_per_s for m in values]) for name, values in results.items()}
    fio = [name for name in rates if name.startswith("fio")]
    rows = []
    for name, rate in rates.items():
        row: dict[str, Any] = {"side": name, "GB/s": rate / 1e9}
        seen = [m.bytes_per_s / 1e9 for m in results[name]]
        sizes = [m.request_kib for m in results[name] if m.request_kib is not None]
        row["rounds"] = f"{min(seen):.2f} .. {max(seen):.2f}"
        row["KiB/request"] = round(median(sizes)) if sizes else None
        if name not in fio:
            row |= {f"of {other}": share_text(results[name], results[other]) for other in fio}
        rows.append(row)
    return rows


# -- LoHan's store ---------------------------------------------------------------------------------


class Target:
    """A store of equal chunks with both generations written, and buffers to move them with."""

    def __init__(self, folder: Path, chunk: int, options: argparse.Namespace) -> None:
        self._count = max(WEIGHT_SHARE, options.size // chunk)
        self._chunk, self._seconds = chunk, options.seconds
        # Buffers come from the pool of a run, because other memory may be faster or slower.
        pool = HostPool(options.in_flight * chunk)
        self._buffers = [pool.allocate("chunks", chunk).bytes for _ in range(options.in_flight)]
        fill(self._buffers)
        region = Region("state", (chunk,) * self._count)
        self.store = Store.create([folder], [region], engine=options.engine)
        for _ in range(2):  # The first writes to a preallocated file are slower than later ones.
            self._move(("write", i) for i in range(self._count))

    def bytes_per_s(self, kind: str) -> float:
        before, start = self._moved(), time.perf_counter()
        while (elapsed := time.perf_counter() - start) < self._seconds or self._moved() == before:
            self._move(requests(kind, self._count))
        elapsed = time.perf_counter() - start
        return (self._moved() - before) / elapsed

    def _moved(self) -> int:
        return self.store.counters.bytes_read + self.store.counters.bytes_written

    def _move(self, wanted: Iterator[Request]) -> None:
        """Run all requests in order, with one in flight per buffer, and commit if any wrote."""
        under_way: deque[Any] = deque()
        wrote = False
        for number, (verb, index) in enumerate(wanted):
            if len(under_way) == len(self._buffers):
                self.store.wait(under_way.popleft())
            submit = self.store.read if verb == "read" else self.store.write
            under_way.append(submit("state", index, self._buffers[number % len(self._buffers)]))
            wrote |= verb == "write"
        for ticket in under_way:
            self.store.wait(ticket)
        if wrote:
            self.store.commit()


def requests(kind: str, count: int) -> Iterator[Request]:
    """Yield the requests of one pass.

    A "mixed" pass is like a step: all chunks are read and written, and weights are read again.
    """
    for index in range(count):
        if kind in ("read", "mixed"):
            yield "read", index
        if kind == "mixed" and index % WEIGHT_SHARE == 0:
            yield "read", (index + count // 2) % count
        if kind in ("write", "mixed"):
            yield "write", index


def fill(buffers: list[Any]) -> None:
    """Fill the buffers with random bytes, because drives may compress zeros."""
    import numpy as np

    generator = np.random.default_rng(0)
    for buffer in buffers:
        buffer[:] = generator.integers(0, 256, len(buffer), dtype=np.uint8)


# -- fio ------------------------------------------------------------------------------------------


def fio_version() -> str | None:
    if shutil.which("fio") is None:
        return None
    return subprocess.run(["fio", "--version"], capture_output=True, text=True).stdout.strip()


def fio_bytes_per_s(
    kind: str, options: argparse.Namespace, work: Path, block: int, depth: int
) -> float:
    file, size = work / "fio", 2 * options.size  # as much as the store's two slots
    if not file.exists():
        run_fio(file, size, ["--rw=write", "--bs=4M", "--iodepth=8"])
    mix = {"read": ["--rw=read"], "write": ["--rw=write"], "mixed": ["--rw=rw", "--rwmixread=57"]}
    timing = ["--time_based", f"--runtime={round(options.seconds * 1000)}ms"]
    job = run_fio(file, size, [*mix[kind], f"--bs={block}", f"--iodepth={depth}", *timing])
    return sum(float(job[way]["bw_bytes"]) for way in ("read", "write"))


def run_fio(file: Path, size: int, arguments: list[str]) -> dict[str, Any]:
    """Run one fio job with io_uring if the kernel allows it, otherwise with libaio."""
    engine = "io_uring" if open_engine("auto").name == "uring" else "libaio"
    ended = subprocess.run(
        [
            "fio",
            "--name=lohan",
            f"--filename={file}",
            f"--size={size}",
            "--direct=1",
            f"--ioengine={engine}",
            "--output-format=json",
            *arguments,
        ],
        capture_output=True,
        text=True,
        timeout=600,
    )
    if ended.returncode:
        raise SystemExit(f"fio failed: {ended.stderr or ended.stdout}")
    job: dict[str, Any] = json.loads(ended.stdout[ended.stdout.index("{") :])["jobs"][0]
    return job


if __name__ == "__main__":
    sys.exit(main())
