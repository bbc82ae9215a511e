"""One process that trains for an hour, and what it holds: file descriptors, threads, memory.

    python benchmarks/soak.py --minutes 60

Each cycle is a run of some seconds. Another process begins it and is killed (SIGKILL) at a random
instant; this one resumes it with an fsync that fails somewhere, then without faults to its end,
with evaluations on the way and a new plan after the third step; then it exports and evaluates the
run, and compares the weights with those of the first cycle of the same kind, bit for bit. A table
is printed at intervals. Exit code 1 if a result is wrong, or if anything that the process holds
grows after its warm-up (the first third of at least 48 cycles): file descriptors or threads at all,
the rest by more than LIMITS per cycle. Of memory the system sees pages, which come and go with the
allocators' holes; the two counts beside it see every block and every object that stays.
"""

from __future__ import annotations

import ctypes
import errno
import gc
import io
import itertools
import os
import random
import shutil
import signal
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from pathlib import Path
from statistics import median

sys.path.insert(0, str(Path(__file__).resolve().parent))
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from common import Report, note, parser_of, work_folder

from tests.support.forked_commands import (
    Ended,
    Forge,
    TinyResult,
    tiny_arguments,
    tiny_result,
    write_tiny_inputs,
)
from tests.support.process_hooks import replan_at_once

KINDS: dict[str, tuple[object, ...]] = {
    "plain": (),
    "balanced": ("--clip", 0, "--update-mode", "balanced", "--host", "500KiB"),
    "replanned": ("--activations", "holistic", "--host", "450KiB"),
    "snapshots": ("--set", "budget.snapshot_every=2"),
}
LIMITS = {  # The largest growth per cycle. 0 means that the second half must not exceed the first.
    "file descriptors": 0,
    "threads": 0,
    "memory": 8 * 1024,  # bytes in pages, as the system counts them
    "allocated": 3 * 1024,  # bytes in use in the C allocator
    "objects": 10,  # Python objects that the garbage collector tracks
}
SAMPLES = 20  # rows of the table
LOOKED_AT = 100  # The types of objects are printed if there are this many more than a cycle before.
# Cycles to run at least, however short the time. Caches have their final size after a third of
# them.
LEAST = 48


@contextmanager
def failing_fsync(at: int) -> Iterator[None]:
    """Make the `at`-th call of os.fsync, counted from 1, fail with an I/O error."""
    real, count = os.fsync, 0

    def fsync(fd: int) -> None:
        nonlocal count
        count += 1
        if count == at:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        real(fd)

    os.fsync = fsync  # type: ignore[assignment]
    try:
        yield
    finally:
        os.fsync = real


def lohan(*words: object) -> Ended:
    """Run `lohan WORDS` in this process."""
    from lohan.cli import main as cli

    out, err = io.StringIO(), io.StringIO()
    sys.argv = ["lohan", *map(str, words)]
    code = 0
    with redirect_stdout(out), redirect_stderr(err):
        try:
            cli.main()
        except SystemExit as end:
            code = end.code if isinstance(end.code, int) else int(end.code is not None)
    return Ended(code, out.getvalue(), err.getvalue())


def cycle(forge: Forge, inputs: Path, folder: Path, kind: str, draw: random.Random) -> TinyResult:
    out, data = folder / "run", inputs / "data.jsonl"
    more = (*KINDS[kind], "--eval-data", data, "--eval-every", 3)
    words = ("train", *tiny_arguments(inputs, out, *more))
    begun = forge.run(*words, kill_at=draw.randrange(250))
    assert begun.code in (0, -signal.SIGKILL), begun.err
    with failing_fsync(draw.randrange(1, 40)):
        go_on(words, out)
    ended = go_on(words, out)
    assert ended.code == 0, ended.err
    for further in (
        ("export", out, "--out", folder / "exported"),
        ("eval", out, "--data", data, "--batch", 2, "--host", "1MiB"),
    ):
        ended = lohan(*further)
        assert ended.code == 0, ended.err
    weights, rows = tiny_result(out)
    assert (folder / "exported" / "model.safetensors").read_bytes() == weights
    return weights, rows


def go_on(words: tuple[object, ...], out: Path) -> Ended:
    """Run the same command again, then follow the advice in its message."""
    ended = lohan(*words)
    if ended.code == 2 and f"lohan resume {out}" in ended.err:
        ended = lohan("resume", out)
    if ended.code == 2 and "there is no snapshot" in ended.err:
        shutil.rmtree(out)
        ended = lohan(*words)
    assert ended.code in (0, 2) and "Traceback" not in ended.err, ended.err
    return ended


# -- resources of the process ----------------------------------------------------------------------


class MallInfo(ctypes.Structure):
    """The struct mallinfo2 of glibc (malloc.h)."""

    _fields_ = [
        (name, ctypes.c_size_t)
        for name in (
            "arena",
            "ordblks",
            "smblks",
            "hblks",
            "hblkhd",
            "usmblks",
            "fsmblks",
            "uordblks",
            "fordblks",
            "keepcost",
        )
    ]


def held() -> dict[str, int]:
    gc.collect()
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    mallinfo2 = ctypes.CDLL(None).mallinfo2
    mallinfo2.restype = MallInfo
    actual = mallinfo2()
    return {
        # This call itself uses one descriptor.
        "file descriptors": len(list(Path("/proc/self/fd").iterdir())) - 1,
        "threads": int(status["Threads"]),
        "memory": int(status["RssAnon"].split()[0]) * 1024,
        "allocated": actual.uordblks + actual.hblkhd,
        "objects": len(gc.get_objects()),
    }


def types() -> Counter[str]:
    """Return the number of Python objects by type."""
    return Counter(type(item).__qualname__ for item in gc.get_objects())


def slope(values: list[int]) -> float:
    """Return the growth per cycle, the median over all pairs (Theil and Sen).

    A single jump does not change it.
    """
    pairs = itertools.combinations(range(len(values)), 2)
    return median((values[j] - values[i]) / (j - i) for i, j in pairs)


def growing(name: str, values: list[int]) -> bool:
    half = len(values) // 2
    if LIMITS[name]:
        return slope(values) > LIMITS[name]
    return max(values[half:]) > max(values[:half])


def main() -> int:
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # This must be set before torch is imported.
    parser = parser_of(__doc__)
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    report, draw = Report(as_json=given.json), random.Random(given.seed)
    samples: list[dict[str, int]] = []
    shown: list[dict[str, object]] = []
    expected: dict[str, TinyResult] = {}
    counts: Counter[str] = Counter()
    wrong = 0
    with work_folder(given.work, "soak") as place:
        report.head(place, "lohan", "torch")
        for name in ("forge", "inputs"):
            (place / name).mkdir()
        inputs, forge = write_tiny_inputs(place / "inputs"), Forge(place / "forge")
        replan_at_once()
        start_s = time.monotonic()
        seconds = 60 * given.minutes
        while (passed := time.monotonic() - start_s) < seconds or len(samples) < LEAST:
            kind = list(KINDS)[len(samples) % len(KINDS)]
            folder = place / f"cycle-{len(samples)}"
            folder.mkdir()
            actual = cycle(forge, inputs, folder, kind, draw)
            if expected.setdefault(kind, actual) != actual:
                wrong += 1
                note(f"cycle {len(samples)}, {kind}: another result")
            for path in (folder, *(place / "forge").iterdir()):
                shutil.rmtree(path)
            samples.append(held())
            before, counts = counts, types()
            if before and counts.total() - before.total() > LOOKED_AT:
                more = (counts - before).most_common(8)
                note(f"cycle {len(samples)}, {kind}: more objects than before, of {more}")
            if passed >= len(shown) * seconds / SAMPLES:
                row = {"minute": passed / 60, "cycles": len(samples), **samples[-1]}
                for name in ("memory", "allocated"):
                    row[name] = f"{samples[-1][name] / 2**20:.2f} MiB"
                shown.append(row)
                note("  ".join(f"{name} {value}" for name, value in row.items()))
        forge.close()
    report.table("held by the process after a cycle", shown)
    settled = samples[len(samples) // 3 :]
    rows, grown = [], False
    for name in samples[0]:
        values = [sample[name] for sample in settled]
        grows = growing(name, values)
        grown = grown or grows
        rows.append(
            {
                "after the first third": name,
                "least": min(values),
                "most": max(values),
                "per cycle": round(slope(values), 3),
                "limit": LIMITS[name],
                "": "GROWS" if grows else "flat",
            }
        )
    report.table(f"{len(samples)} cycles, {wrong} wrong", rows)
    report.close()
    return int(grown or bool(wrong))


if __name__ == "__main__":
    raise SystemExit(main())
