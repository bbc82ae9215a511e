"""The workload of the step benchmarks: a Llama-shaped model with random weights, random tokens.

The children of all sides use it, so it needs neither LoHan nor DeepSpeed.
"""

from __future__ import annotations

import argparse
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from children import await_turn, default_threads, end_turn, run_child
from common import median, note, peak_bytes

LR, BETAS, EPS, WEIGHT_DECAY = 1e-4, (0.9, 0.95), 1e-8, 0.0
MACHINE = "machine.toml"  # the profile, in the work folder
WAY = {"clip": 0.0, "update_mode": "balanced"}  # the settings of LoHan's runs
SHAPE = ("hidden", "layers", "intermediate", "vocabulary", "heads")


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--intermediate", type=int, default=2816)
    parser.add_argument("--vocabulary", type=int, default=8192)
    parser.add_argument("--heads", type=int, default=16)
    parser.add_argument("--batch", type=int, default=2, help="sequences; tokens are shared out")
    parser.add_argument("--steps", type=int, default=4, help="measured steps of each child")
    parser.add_argument("--warmup", type=int, default=2, help="steps before those")
    parser.add_argument("--threads", type=int, default=default_threads(), help="of every side")
    parser.add_argument("--deadline", type=float, default=900.0, help="seconds for each child")


def write_model(
    options: argparse.Namespace, folder: Path, *, dtype: str = "fp32"
) -> dict[str, str]:
    """Write the checkpoint that all sides start from, and return a description of it."""
    import os

    import torch
    from transformers import LlamaConfig

    from lohan.checkpoint.safetensors import TensorFolder
    from tests.support.model_folders import write_random_checkpoint

    config = LlamaConfig(
        hidden_size=options.hidden,
        intermediate_size=options.intermediate,
        num_hidden_layers=options.layers,
        num_attention_heads=options.heads,
        num_key_value_heads=options.heads,
        vocab_size=options.vocabulary,
        max_position_embeddings=4096,
        tie_word_embeddings=False,
        use_cache=False,
        bos_token_id=1,
        eos_token_id=2,
    )
    torch_dtype = {"fp32": torch.float32, "bf16": torch.bfloat16}[dtype]
    write_random_checkpoint(folder, config, dtype=torch_dtype)
    os.sync()  # Pending writes to the drive would slow down the first side.
    tensors = TensorFolder(folder)
    count = sum(torch.Size(tensors.shape(name)).numel() for name in tensors.names())
    shape = ", ".join(f"{name} {getattr(options, name)}" for name in SHAPE)
    return {"model": f"Llama-shaped, {count / 1e6:.0f}M parameters, {dtype}, untied; {shape}"}


def spec_of(options: argparse.Namespace, model: Path, tokens: int) -> dict[str, Any]:
    """Return the settings of a child."""
    batch = min(options.batch, tokens)
    if tokens % batch:
        raise SystemExit(f"--tokens {tokens} is not a multiple of --batch {batch}")
    return {
        "model": str(model),
        "dtype": getattr(options, "dtype", "fp32"),
        "vocabulary": options.vocabulary,
        "batch": batch,
        "seq": tokens // batch,
        "steps": options.steps,
        "warmup": options.warmup,
    }


def batches(spec: dict[str, Any]) -> list[Any]:
    """Return the token ids of every step, which are the same on all sides."""
    import torch

    steps = spec.get("turns", 1) * (spec["warmup"] + spec["steps"])
    generator = torch.Generator().manual_seed(1)
    return list(
        torch.randint(
            0, spec["vocabulary"], (steps, spec["batch"], spec["seq"]), generator=generator
        )
    )


def time_steps(
    spec: dict[str, Any],
    step: Callable[[Any], float],
    *,
    begin: Callable[[], None] = lambda: None,
    end: Callable[[], None] = lambda: None,
) -> dict[str, Any]:
    """Return the seconds of every step, from the end of one to the end of the next, and losses.

    With `turns`, the process waits for each of its turns, which begins with warm-up steps.
    `begin` and `end` are called around the measured steps of a turn; at its end nothing may be
    in flight.
    """
    losses, seconds, early, rows = [], [], [], iter(batches(spec))
    if "turns" in spec:
        end_turn()  # end the preparation
    for _ in range(spec.get("turns", 1)):
        if "turns" in spec:
            await_turn()
        for number in range(spec["warmup"] + spec["steps"]):
            if number == spec["warmup"]:
                begin()
            start = time.perf_counter()
            losses.append(step(next(rows)))
            (early if number < spec["warmup"] else seconds).append(time.perf_counter() - start)
        end()
        if "turns" in spec:
            end_turn()
    if "turns" in spec:
        await_turn()
    return {
        "losses": losses,
        "step_s": seconds,
        "early_s": early,
        "turns": spec.get("turns", 1),
        "peak_bytes": peak_bytes(),
    }


def turn_of(options: argparse.Namespace, tokens: int) -> argparse.Namespace:
    """Return the options with the number of steps of a turn, which should take seconds."""
    steps = options.steps or min(8, max(1, 1024 // tokens))
    return argparse.Namespace(**{**vars(options), "steps": steps})


def rounds_of(child: dict[str, Any]) -> list[float]:
    """Return the seconds per step of each turn."""
    seconds = child["step_s"]
    size = len(seconds) // child["turns"]
    return [median(seconds[i : i + size]) for i in range(0, len(seconds), size)]


def speed(base: dict[str, Any], child: dict[str, Any]) -> tuple[float, str]:
    """Return the speed relative to another side: the median over rounds, and the range."""
    pairs = zip(rounds_of(base), rounds_of(child), strict=True)
    ratios = [reference_s / measured_s for reference_s, measured_s in pairs]
    return median(ratios), f"{min(ratios):.2f} .. {max(ratios):.2f}"


def first_steps(child: dict[str, Any]) -> dict[str, Any]:
    """Return the times of the first steps of a side that replans.

    The new plan is made after the third step. The time of the first step with it is included if
    the warm-up is long enough, and so is the time for replanning.
    """
    early, changes = child["early_s"], child.get("changes", [])
    return {
        "steps 1 .. 3 s": " ".join(f"{seconds:.2f}" for seconds in early[:3]),
        "step 4 s": early[3] if len(early) > 3 else None,
        "new plan s": sum(change["seconds"] for change in changes) if changes else None,
    }


def loss_text(losses: list[float]) -> str:
    return f"{losses[0]:.6f} .. {losses[-1]:.6f}"


def show(name: str, child: dict[str, Any]) -> None:
    seconds = " ".join(f"{s:.2f}" for s in child["step_s"])
    note(f"  {name}: {seconds} s, peak {child['peak_bytes'] / 2**30:.2f} GiB")


def profile_machine(options: argparse.Namespace, work: Path, name: str = MACHINE) -> None:
    """Measure the machine in a child, and write the profile to a file in `work`."""
    note("profiling the machine")
    run_child(
        "side_profile.py",
        {"ssd": str(work), "out": str(work / name)},
        threads=options.threads,
        deadline_s=options.deadline,
    )


def lohan_spec(
    options: argparse.Namespace, work: Path, tokens: int, *, host: str, activations: Any
) -> dict[str, Any]:
    return {
        **spec_of(options, work / "model", tokens),
        **WAY,
        "host": host,
        "ssd": str(work / "ssd"),
        "profile": str(work / MACHINE),
        "activations": activations,
    }


def run_side(
    script: str, options: argparse.Namespace, spec: dict[str, Any], name: str
) -> dict[str, Any]:
    """Run a child, remove its store afterwards, and show its steps."""
    try:
        child = run_child(script, spec, threads=options.threads, deadline_s=options.deadline)
    finally:
        shutil.rmtree(spec["ssd"], ignore_errors=True)
    show(name, child)
    return child
