"""AdamW with checksums of the data that it writes, in one pass or in a separate pass afterwards.

    python benchmarks/checksum.py [--threads 1 2] [--chunk 1Mi]

Seconds are those of all cores together, so that other work on the machine changes little. Chunks
come from memory, not from a cache. `apart` is what writes to the store do with data that is not
from an update: CRC-32C of weights and state when a chunk is submitted. `update` computes no
checksum.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from functools import partial

import torch
from children import alternate
from common import Report, cores, median, note, parser_of

from lohan import _core
from lohan.capture.blocks import dtype_of, split
from lohan.engine.buffers import MASTER_ARRAYS, HostPool
from lohan.model.state import STATE_FORMATS, state_format_of
from lohan.optim import StateKind
from lohan.util.units import parse_bytes

NUMBERS = {"lr": 1e-4, "beta1": 0.9, "beta2": 0.95, "eps": 1e-8, "weight_decay": 0.01}
COPIES = 24  # chunks in turn


def main() -> int:
    parser = parser_of(__doc__)
    parser.add_argument("--chunk", default="1Mi", help="parameters")
    parser.add_argument("--threads", nargs="+", type=int, default=list(range(1, cores() + 1)))
    parser.add_argument("--rounds", type=int, default=100)
    options = parser.parse_args()
    count = parse_bytes(f"{options.chunk}B", name="--chunk")
    report = Report(as_json=options.json)
    report.head(options.work, "lohan", "torch")
    rows = []
    for threads in options.threads:
        _core.set_threads(threads)
        for mode, moments in (("bf16", "fp32"), ("bf16", "int8"), ("fp32", "fp32")):
            note(f"{threads} threads, {mode}, moments {moments}")
            sides = sides_of(mode, moments, count)
            for _ in range(COPIES):
                sides["update"]()
            actual = alternate({n: partial(timed, run) for n, run in sides.items()}, options.rounds)
            ns = {name: median(values) / count * 1e9 for name, values in actual.items()}
            rows.append(
                {"threads": threads, "weights": mode, "moments": moments}
                | {f"{name} ns": value for name, value in ns.items()}
                | {"in one / apart": ns["in one"] / ns["apart"]}
            )
    report.table("core time, ns per parameter", rows)
    report.close()
    return 0


def timed(run: Callable[[], object]) -> float:
    start = time.process_time()
    run()
    return time.process_time() - start


def sides_of(mode: str, moments: str, count: int) -> dict[str, Callable[[], object]]:
    kind = state_format_of(mode, StateKind(moments=moments))
    pool, dtype = HostPool(64 * COPIES * count), dtype_of(STATE_FORMATS[mode])
    kernel, chunks = getattr(_core, f"adamw_{mode}"), []
    for _ in range(COPIES):
        weights = pool.allocate("weights", count * kind.weight_bytes).tensor(dtype)
        state = pool.allocate("state", kind.state_size(count)).tensor(torch.uint8).zero_()
        arrays = split(kind, state, count)
        arrays_of_chunk = (
            weights.normal_(),
            *(arrays[n] for n in (*MASTER_ARRAYS[mode], "m", "v")),
        )
        scales = [arrays[n] for n in ("m_scale", "v_scale") if n in arrays]
        chunks.append((arrays_of_chunk, torch.randn(count).to(dtype), scales, state))
    turn = 0

    def run(checksums: bool, apart: bool) -> None:
        nonlocal turn
        arrays_of_chunk, grad, scales, state = chunks[turn % COPIES]
        turn += 1
        kernel(*arrays_of_chunk, grad, scales=scales, step=turn, checksums=checksums, **NUMBERS)
        if apart:
            _core.crc32c(arrays_of_chunk[0].view(torch.uint8))
            _core.crc32c(state)

    return {
        "update": partial(run, checksums=False, apart=False),
        "apart": partial(run, checksums=False, apart=True),
        "in one": partial(run, checksums=True, apart=False),
    }


if __name__ == "__main__":
    sys.exit(main())
