"""What does Python cost per call of a block? Microseconds by part, against torch's checkpointing.

    python benchmarks/launch.py [--slices 1 2] [--steps 40] [--device cuda]

On a GPU the thread that launches must stay ahead of the device, so what counts is the time of that
thread and not what it computes. A Llama block of 32 features and 4 tokens costs little more than
its launches. It runs through LoHan on the CPU as a device with a memory of its own, as it would on
a GPU: other threads copy, update and write. Only the caller's own CPU time is counted, so other
work on the machine matters little. The measure is plain `torch.utils.checkpoint` of the same block:
at most 1.5 times that for a block that is recomputed, 2 times with a save plan.

`floor` is what torch itself takes for the same without anything around it: the block forward with a
graph, once more, and backward; with a save plan both forwards in a dispatch mode that does nothing,
since results are saved and put back below autograd. `selective` is torch's own checkpointing of the
same block that saves every operation. The total is without the clocks of parts, which a second run
of the same has.

With `--device cuda` both sides run there, in the environment of `make test-cuda` too: software CUDA
does operators on threads of its own, so that the caller's time is that of launches. Autograd then
runs backward on the calling thread, as it does on the CPU, so that one clock counts all.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch
from common import Report, parser_of, work_folder
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)
from transformers import AutoModelForCausalLM, LlamaConfig

import lohan
from lohan.capture.recompute import BlockState
from lohan.capture.saved_call import CallContext, SavedCall
from lohan.capture.tracing import SavePlans
from lohan.device.accelerator import AcceleratorDevice
from lohan.device.base import LinkedCpuDevice
from lohan.engine import wrapping
from lohan.engine.gradients import GradientCollector
from lohan.engine.offload import DeviceActivationOffload
from lohan.engine.scheduler import ActionScheduler
from lohan.engine.wrapping import BlockRunner, WrappedSite
from lohan.util.units import MiB

LAYERS, ROWS, TOKENS = 4, 2, 4
LIMITS = {"recompute": 1.5, "all": 2.0}
Parts = dict[str, list[tuple[Any, str]]]
# The functions that belong to each part of a call. Time inside a nested part is counted there.
PARTS: Parts = {
    "arguments": [
        (SavedCall, "__init__"),
        (SavedCall, "inputs"),
        (SavedCall, "arguments"),
        (WrappedSite, "check_values"),
        (WrappedSite, "_check_hidden"),
        (wrapping, "wrap_mappings"),
        (wrapping, "write_back_mappings"),
    ],
    "schedule": [
        (ActionScheduler, name)
        for name in ("begin_forward", "begin_backward", "end", "end_site_backward")
    ],
    "weights": [
        (BlockRunner, "_views"),
        (GradientCollector, "leaves"),
        (GradientCollector, "finish"),
        (GradientCollector, "fetch_aside"),
    ],
    "buffers": [(BlockState, "snapshot"), (BlockState, "changes_since")],
    "offload": [
        (DeviceActivationOffload, name)
        for name in (
            "save_inputs",
            "save_slice",
            "load_inputs",
            "load_slice",
            "release_slice",
            "release",
        )
    ],
    "save plan": [(SavePlans, "of")],
    "block": [(CallContext, "run")],
    "autograd": [(torch.autograd, "backward")],
}


def main() -> int:
    options = parse()
    report = Report(as_json=options.json)
    torch.set_num_threads(1)
    with (
        work_folder(options.work, "launch") as work,
        torch.autograd.set_multithreading_enabled(False),
    ):
        report.head(work, "lohan", "torch", "transformers")
        rows = [
            measured(work / f"{kept}-{slices}", kept, slices, options.steps, options.device)
            for slices in options.slices
            for kept in LIMITS
        ]
        report.table("microseconds of the launching thread per block and slice", rows)
        report.close()
    return 0


def parse() -> argparse.Namespace:
    parser = parser_of(__doc__)
    parser.add_argument("--slices", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    return parser.parse_args()


def measured(
    place: Path, kept: str, slices: int, steps: int, device: str = "cpu"
) -> dict[str, Any]:
    """Measure all sides in turn and return the minimum of each, since noise only adds."""
    place.mkdir()
    sides = torch_sides(kept, slices, device)
    taken: dict[str, list[float]] = {name: [] for name in sides}

    def between() -> None:
        for name, side in sides.items():
            taken[name].append(side())

    total = launched_us(place / "total", kept, slices, steps, device, between)["total"]
    parts = launched_us(place / "parts", kept, slices, steps, device, lambda: None, parts=PARTS)
    least = {name: min(item) for name, item in taken.items()}
    checkpoint_us = least["checkpoint"]
    return {
        "activations": kept,
        "slices": slices,
        "checkpoint": round(checkpoint_us),
        "floor": round(least["floor"]),
        "selective": round(least.get("selective", 0)) or "",
        "lohan": round(total),
        "ratio": round(total / checkpoint_us, 2),
        "limit": LIMITS[kept],
        "own": round(total - least["floor"]),
        **{name: round(parts.get(name, 0.0)) for name in ("other", *PARTS)},
    }


def model_of() -> Any:
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=64,
        use_cache=False,
        tie_word_embeddings=False,
    )
    return AutoModelForCausalLM.from_config(config).train()


class Nothing(TorchDispatchMode):
    """A dispatch mode that sees every operation and changes nothing."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


def save_all(*_: Any, **__: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE


def torch_sides(kept: str, slices: int, device: str) -> dict[str, Callable[[], float]]:
    """Return microseconds per block and slice of torch's own forward and backward."""
    model = model_of().to(device)
    x = torch.randn(ROWS // slices, TOKENS, 32, device=device, requires_grad=True)
    positions = torch.arange(TOKENS, device=device)[None]
    rotated = model.model.rotary_emb(x, positions)
    more = {"attention_mask": None, "position_embeddings": rotated, "position_ids": positions}

    def checkpointed(block: Any, hidden: torch.Tensor) -> torch.Tensor:
        return checkpoint(block, hidden, use_reentrant=False, **more)

    def selective(block: Any, hidden: torch.Tensor) -> torch.Tensor:
        contexts = partial(create_selective_checkpoint_contexts, save_all)
        return checkpoint(block, hidden, use_reentrant=False, context_fn=contexts, **more)

    def twice(block: Any, hidden: torch.Tensor) -> torch.Tensor:
        around = Nothing if kept == "all" else nullcontext
        with around():
            block(hidden, **more)
        with around():
            return block(hidden, **more)

    def timed(call: Callable[[Any, torch.Tensor], torch.Tensor]) -> Callable[[], float]:
        def step() -> float:
            start = time.thread_time_ns()
            for _ in range(slices):
                hidden = x
                for block in model.model.layers:
                    hidden = call(block, hidden)
                hidden.sum().backward()
            taken = (time.thread_time_ns() - start) / 1e3 / slices / LAYERS
            model.zero_grad()
            return taken

        return step

    sides = {"checkpoint": timed(checkpointed), "floor": timed(twice)}
    return sides | ({"selective": timed(selective)} if kept == "all" else {})


def launched_us(
    place: Path,
    kept: str,
    slices: int,
    steps: int,
    device: str,
    between: Callable[[], None],
    *,
    parts: Parts | None = None,
) -> dict[str, float]:
    """Return microseconds per block and slice by part, and the total of a step."""
    place.mkdir()
    ids = torch.randint(0, 64, (ROWS, TOKENS))
    batch = {"input_ids": ids, "labels": ids}
    clock = Clock(parts or {})
    per_step: list[dict[str, float]] = []
    lohan_device = AcceleratorDevice() if device == "cuda" else LinkedCpuDevice(32 * MiB)
    with (
        clock.measuring(),
        lohan.attach(
            model_of(),
            optimizer=lohan.AdamW(lr=1e-3),
            batch=batch,
            activations=kept,
            budget=lohan.Budget(host="64MiB", ssd=[place]),
            device=lohan_device,
            micro_batch=ROWS // slices,
            update_mode="optimized",
        ) as session,
    ):
        for _ in range(steps):
            clock.taken.clear()
            session.model(**batch).loss.backward()
            per_step.append({n: t / 1e3 / LAYERS / slices for n, t in clock.taken.items()})
            between()
    steady = per_step[4:]
    least = {name: min(step.get(name, 0.0) for step in steady) for name in steady[0]}
    return {**least, "total": min(sum(step.values()) for step in steady)}


class Clock:
    """CPU time of the calling thread inside the calls of blocks, by part, without parts inside."""

    def __init__(self, parts: Parts) -> None:
        self._parts = parts
        self.taken: dict[str, float] = defaultdict(float)
        self._stack: list[str] = []
        self._since = 0

    def _enter(self, part: str) -> None:
        now = time.thread_time_ns()
        if self._stack:
            self.taken[self._stack[-1]] += now - self._since
        self._stack.append(part)
        self._since = now

    def _leave(self) -> None:
        now = time.thread_time_ns()
        self.taken[self._stack.pop()] += now - self._since
        self._since = now

    def _timed(self, part: str, inner: Callable[..., Any], *, outer: bool) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            block = args[0] if outer else None
            if outer and not _is_layer(block):
                return inner(*args, **kwargs)
            if not outer and not self._stack:
                return inner(*args, **kwargs)
            self._enter(part)
            try:
                return inner(*args, **kwargs)
            finally:
                self._leave()

        return call

    @contextmanager
    def measuring(self) -> Iterator[None]:
        before = []

        def put(owner: Any, name: str, replacement: Any) -> None:
            before.append((owner, name, owner.__dict__[name]))
            setattr(owner, name, replacement)

        for part, functions in self._parts.items():
            for owner, name in functions:
                put(owner, name, self._timed(part, getattr(owner, name), outer=False))
        put(WrappedSite, "__call__", self._timed("other", WrappedSite.__call__, outer=True))
        inner = BlockRunner.backward
        timed = self._timed(
            "other", lambda site, runner, *rest: inner(runner, site, *rest), outer=True
        )
        put(BlockRunner, "backward", lambda runner, site, *rest: timed(site, runner, *rest))
        try:
            yield
        finally:
            for owner, name, original in reversed(before):
                setattr(owner, name, original)


def _is_layer(site: Any) -> bool:
    return ".layers." in site.site.name


if __name__ == "__main__":
    sys.exit(main())
