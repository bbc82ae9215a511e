"""The checks of `lohan doctor --gpu` that compare gradient norms.

They are for two cards, for Liger's kernels, and for a GPU that computes in host memory.

Rounding changes a gradient norm far less than a missing or wrong gradient does. The loss of a model
with random weights reveals neither of them.

In the check of two ranks, each rank runs in its own process:
`python -m lohan.tools.gpu_norm_checks FOLDER REAL`. REAL is 1 on a real GPU and 0 on software CUDA.
"""

from __future__ import annotations

import importlib.util
import json
import math
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

import torch

from lohan.device.base import Device
from lohan.device.launch import launch
from lohan.device.ranks import ALONE, ProcessGroup, join
from lohan.tools.gpu_bench import Bench, CheckResult, WrongResult
from lohan.util.units import MiB

if TYPE_CHECKING:
    from lohan.engine.session import Session

RANKS = 2
TOLERANCE = 0.01  # largest relative difference of two gradient norms
CLIP = 1e-3  # Every norm exceeds it, so each step computes its norm.
REPEATS = 5  # repetitions of each collective; the median is reported


def ranks(bench: Bench) -> CheckResult:
    """Check that two ranks on two cards train like one rank, and measure their collectives."""
    count = torch.accelerator.device_count()
    if count < RANKS or bench.open().torch_device.type != "cuda":
        return CheckResult(facts={"skipped": f"needs two CUDA devices, {count} are visible"})
    expected, _ = train(bench, "alone")
    messages: list[str] = []
    arguments = ["-m", __name__, str(bench.folder), str(int(bench.real))]
    code = launch(RANKS, arguments, note=messages.append)
    files = [_result_file(bench.folder, rank) for rank in range(RANKS)]
    if code or not all(file.exists() for file in files):
        raise WrongResult(f"two ranks ended with code {code}: {' '.join(messages) or 'see above'}")
    results = [json.loads(file.read_text()) for file in files]
    for rank, result in enumerate(results):
        check_norms(result["norms"], expected, f"rank {rank} of two, and one rank alone")
    return CheckResult(facts=results[0]["rates"])


def liger(bench: Bench) -> CheckResult:
    """Check that a model with Liger's kernels plans, and trains like one without them."""
    if importlib.util.find_spec("liger_kernel") is None:
        return CheckResult(facts={"skipped": "liger_kernel is not installed"})
    from liger_kernel.transformers import _apply_liger_kernel_to_instance

    def patch(model: torch.nn.Module) -> None:
        _apply_liger_kernel_to_instance(
            model=model, fused_linear_cross_entropy=False, cross_entropy=False
        )

    expected, _ = train(bench, "plain")
    norms, _ = train(bench, "liger", patch=patch)
    check_norms(norms, expected, "with Liger's kernels, and without them")
    return CheckResult(facts={"gradient norms": norms})


def shared_memory(bench: Bench) -> CheckResult:
    """Check that a GPU without its own memory gives the same gradient norms as one with copies."""
    device = bench.open_integrated()
    if device is None:
        return CheckResult(facts={"skipped": "the device has its own memory"})
    expected, _ = train(bench, "copies")
    norms, _ = train(bench, "shared", device=device)
    check_norms(norms, expected, "in host memory, and with copies")
    return CheckResult(facts={"gradient norms": norms})


def check_norms(norms: Sequence[float], expected: Sequence[float], what: str) -> None:
    """Raise WrongResult if the gradient norms of two runs differ by more than TOLERANCE.

    `what` names the two runs in the message.
    """
    pairs = zip(norms, expected, strict=True)
    if not all(math.isclose(norm, other, rel_tol=TOLERANCE) for norm, other in pairs):
        raise WrongResult(f"{what}: gradient norms {norms} and {expected}")


def train(
    bench: Bench,
    name: str,
    *,
    group: ProcessGroup = ALONE,
    device: Device | None = None,
    patch: Callable[[torch.nn.Module], None] = lambda model: None,
    then: Callable[[Session], dict[str, str]] = lambda session: {},
) -> tuple[list[float], dict[str, str]]:
    """Train a small model on this rank's samples.

    Return the gradient norms, and the result of `then`, which is called with the session at the
    end. `patch` is applied to the model before training.
    """
    from lohan.engine.attach import attach
    from lohan.engine.policies import Budget
    from lohan.optim import AdamW
    from lohan.tools.gpu_checks import llama, step, tokens

    folder = bench.folder / name
    folder.mkdir()
    batches = [
        {key: values.chunk(group.world)[group.rank] for key, values in batch.items()}
        for batch in tokens(bench)
    ]
    model = llama(bench)
    patch(model)
    norms = []
    with attach(
        model,
        optimizer=AdamW(lr=1e-3),
        clip=CLIP,
        device=device or (bench.device_name if group.several else bench.open()),
        batch=batches[0],
        budget=Budget(host="1GiB", ssd=[folder]),
        process_group=group,
    ) as session:
        for batch in batches:
            step(session, batch)
            session.flush()
            norms.append(float(session.grad_norm or 0.0))
        return norms, then(session)


def collective_rates(group: ProcessGroup, device: Device, real: bool) -> dict[str, str]:
    """Return the rates of the collectives as text, alone and while both links are busy."""
    from lohan.tools.gpu_checks import busy_links

    size = 64 * MiB if real else MiB  # bytes of each rank
    whole = torch.zeros(group.world, size // 4, device=device.torch_device)
    collectives: dict[str, Callable[[], Any]] = {
        "all_gather": lambda: group.all_gather_into(whole.view(-1), whole[group.rank]),
        "reduce_scatter": lambda: group.reduce_scatter(whole),
    }
    moved = (group.world - 1) * size
    rates = {name: _rate(run, moved) for name, run in collectives.items()}
    with busy_links(device, size):
        rates |= {f"{name} beside copies": _rate(run, moved) for name, run in collectives.items()}
    return rates


def _rate(collective: Callable[[], Any], size: int) -> str:
    seconds = []
    for _ in range(REPEATS):
        start = time.perf_counter()
        collective()
        torch.accelerator.synchronize()
        seconds.append(time.perf_counter() - start)
    return f"{size / median(seconds) / 1e9:.2f} GB/s"


def _result_file(folder: Path, rank: int) -> Path:
    return folder / f"rank-{rank}.json"


def main(folder: str, real: str) -> None:
    group = join()
    bench = Bench("cuda", Path(folder), real=bool(int(real)))
    norms, rates = train(
        bench,
        f"rank-{group.rank}",
        group=group,
        then=lambda session: collective_rates(group, session.context.device, bench.real),
    )
    result = json.dumps({"norms": norms, "rates": rates})
    _result_file(bench.folder, group.rank).write_text(result)
    group.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
