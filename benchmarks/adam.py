"""AdamW on the CPU: ns per parameter and share of memory bandwidth, against torch and DeepSpeed.

    python benchmarks/adam.py [--peer-python ~/peer/bin/python] [--threads 1 2] [--chunks 1Mi 4Mi]

Every library is a process of its own; passes over all parameters alternate between them. In 16-bit
modes torch and DeepSpeed keep fp32 parameters and copy them to the compute weights afterwards.
LoHan's kernel writes those itself.
"""

from __future__ import annotations

import argparse
import json
import select
import subprocess
import sys
import tempfile
from contextlib import ExitStack
from functools import partial
from typing import Any, Self

from children import alternate, environment
from common import HERE, Report, cores, has_deepspeed, median, note, parser_of

from lohan.errors import LohanError
from lohan.util.units import parse_bytes

# The bytes per parameter that must cross the memory bus: all arrays are read, and all but the
# gradient are written. The compute weights of fp16 are only written.
BYTES = {"fp32": 28, "bf16": 26, "fp16": 28}
COPY_BYTES = 6  # per parameter: the fp32 value read, the 16-bit one written
LOOPS = {"copy": 8, "triad": 12, "in place": 12}  # bytes per element
ANSWER_S = 1800.0  # DeepSpeed compiles its kernel on first use.


def main() -> int:
    options = parse()
    report = Report(as_json=options.json)
    report.head(options.work, "lohan", "torch")
    report.facts(
        {
            "settings": f"{options.parameters:,} parameters, {options.rounds} rounds, "
            "OMP_WAIT_POLICY=PASSIVE"
        }
    )
    pythons = {"lohan": sys.executable, "torch": sys.executable}
    if has_deepspeed(options.peer_python):
        pythons["deepspeed"] = options.peer_python
    else:
        report.facts({"deepspeed": f"skipped: {options.peer_python} has none (--peer-python)"})
    for threads in options.threads:
        with ExitStack() as stack:
            workers = {
                name: stack.enter_context(Worker(name, python, threads))
                for name, python in pythons.items()
            }
            bytes_per_s = bandwidth(workers["torch"], options)
            report.facts({f"memory, {threads}": text_of(bytes_per_s)})
            rows = rows_of(workers, options)
            set_shares(rows, max(bytes_per_s.values()))
            report.table(f"{threads} thread{'s' if threads > 1 else ''}", rows)
    report.close()
    return 0


def parse() -> argparse.Namespace:
    def count(text: str) -> int:
        """Parse a number such as 256Ki, 4Mi or 1000."""
        try:
            return parse_bytes(f"{text}B" if text.endswith("i") else text, name="parameters")
        except LohanError:
            raise argparse.ArgumentTypeError(f"{text!r}; write 256Ki, 4Mi or 65536") from None

    parser = parser_of(__doc__)
    parser.add_argument("--modes", nargs="+", choices=list(BYTES), default=list(BYTES))
    parser.add_argument(
        "--chunks",
        nargs="+",
        type=count,
        default=[2**18, 2**20, 2**22, 2**24],
        help="parameters per call, such as 256Ki 4Mi",
    )
    parser.add_argument("--parameters", type=count, default=2**25, help="in one pass")
    parser.add_argument(
        "--threads", nargs="+", type=int, default=list(range(1, min(2, cores()) + 1))
    )
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--peer-python", default=sys.executable, help="Python that has deepspeed")
    return parser.parse_args()


class Worker:
    """A process that runs passes of one library when asked."""

    def __init__(self, library: str, python: str, threads: int) -> None:
        env = {**environment(threads=threads, python=python), "DS_ACCELERATOR": "cpu"}
        if library == "deepspeed":
            env.pop("PYTHONPATH", None)
        self._library = library
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 - closed with the process
        self._process = subprocess.Popen(
            [python, str(HERE / "adam_worker.py"), library, str(threads)],
            env=env,
            text=True,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
        )

    def prepare(self, mode: str, parameters: int, chunk: int, loop: str | None = None) -> None:
        """Allocate new arrays and run warm-up passes over them."""
        request = {"mode": mode, "parameters": parameters, "chunk": chunk}
        self._ask(request | ({"loop": loop} if loop else {}))

    def seconds(self) -> float:
        """Return the seconds of one pass."""
        return self._ask({})

    def _ask(self, request: dict[str, Any]) -> float:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        ready, _, _ = select.select([self._process.stdout], [], [], ANSWER_S)
        answer = self._process.stdout.readline() if ready else ""
        if not answer:
            self._errors.seek(0)
            output = self._errors.read().decode(errors="replace")[-2000:]
            raise SystemExit(f"the {self._library} worker did not answer:\n{output}")
        return float(json.loads(answer))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.communicate()
        self._errors.close()


def bandwidth(worker: Worker, options: argparse.Namespace) -> dict[str, float]:
    """Return the bytes per second of plain loops over arrays of the same size, the best round."""
    collected = {}
    for loop, width in LOOPS.items():
        worker.prepare("fp32", options.parameters, options.parameters, loop)
        best_s = min(worker.seconds() for _ in range(options.rounds))
        collected[loop] = options.parameters * width / best_s
    return collected


def text_of(bytes_per_s: dict[str, float]) -> str:
    return ", ".join(f"{loop} {rate / 1e9:.1f} GB/s" for loop, rate in bytes_per_s.items())


def set_shares(rows: list[dict[str, Any]], loops: float) -> None:
    """Set the share of the memory bandwidth limit that each row reaches.

    The limit is the bandwidth of the plain loops, or that of any kernel that moved more: seven
    streams can keep memory busier than three.
    """
    moved = [loops]
    for row in rows:
        moved.append(BYTES[row["mode"]] / row["lohan ns"] * 1e9)
        others = BYTES["fp32"] + (COPY_BYTES if row["mode"] != "fp32" else 0)
        moved += [others / row[f"{n} ns"] * 1e9 for n in ("torch", "deepspeed") if f"{n} ns" in row]
    for row in rows:
        row["of roof"] = BYTES[row["mode"]] / row["lohan ns"] * 1e9 / max(moved)
        row["roof GB/s"] = max(moved) / 1e9


def rows_of(workers: dict[str, Worker], options: argparse.Namespace) -> list[dict[str, Any]]:
    rows = []
    for mode in options.modes:
        for chunk in options.chunks:
            if chunk > options.parameters:
                continue
            note(f"{mode}, chunks of {chunk}")
            for worker in workers.values():
                worker.prepare(mode, options.parameters, chunk)
            sides = {name: partial(worker.seconds) for name, worker in workers.items()}
            seconds = {
                name: median(values) for name, values in alternate(sides, options.rounds).items()
            }
            ns = {name: s / options.parameters * 1e9 for name, s in seconds.items()}
            rows.append(
                {
                    "mode": mode,
                    "chunk": f"{chunk / 2**20:g} Mi",
                    **{f"{name} ns": value for name, value in ns.items()},
                    **{
                        f"speed / {name}": value / ns["lohan"]
                        for name, value in ns.items()
                        if name != "lohan"
                    },
                }
            )
    return rows


if __name__ == "__main__":
    sys.exit(main())
