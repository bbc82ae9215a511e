"""What planning and running cost over depth, parameters and tensors: per block, it should be flat.

    python benchmarks/growth.py [--work DIR] [--blocks 8,32,126,400] [--experts 1,8,64] [--json]

Seconds are CPU seconds of all threads, so that other work on the machine matters little. Plans are
made for model shapes. All else is a model of small blocks with a loss of its own, in a process for
each size: what a step takes beyond the same step of plain PyTorch with checkpointing is LoHan's
own, and memory is what the process takes beyond what the plan counts. From the second row on,
figures are of each block (or tensor) more than the row before has.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from common import Report, parser_of, peak_bytes, work_folder
from torch import nn
from torch.utils.checkpoint import checkpoint

import lohan
from lohan.errors import ConfigError
from lohan.model.options import PlanOptions
from lohan.model.shapes import stacked
from lohan.planner import presets
from lohan.planner.forecast import Simulator
from lohan.planner.machine_plan import PlanRequest, load_of_shape, plan_for_machine
from lohan.planner.planner import PlanProblem, closed_form_plan

BLOCKS, EXPERTS, WIDER = (8, 32, 126, 400), (1, 8, 64), (1, 2, 4)
WIDTH, ROWS = 16, 2
WARM, STEPS = 2, 5
SHAPE, MACHINE = "llama-3-8b", "ratel-4090"


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--blocks", default=_joined(BLOCKS), help="depths, such as 8,32")
    parser.add_argument("--experts", default=_joined(EXPERTS), help="linear layers of a block")
    parser.add_argument("--one", default="", help="measure one size in this process: 8,1")
    options = parser.parse_args()
    if options.one:
        blocks, experts = _numbers("--one", options.one)
        print(json.dumps(run_cost(blocks, experts, options.work)))
        return
    depths, tensors = (_numbers(f"--{n}", getattr(options, n)) for n in ("blocks", "experts"))
    options.work.mkdir(parents=True, exist_ok=True)
    report = Report(as_json=options.json)
    report.head(options.work, "lohan", "torch")
    report.table(
        f"planning, blocks of {SHAPE} on {MACHINE}, ms per block",
        [plan_cost(blocks, 1) for blocks in depths],
    )
    report.table(
        f"planning, {depths[0]} blocks so many times as large, ms per block",
        [plan_cost(depths[0], wider) for wider in WIDER],
    )
    with work_folder(options.work, "growth") as folder:
        rows = [one(blocks, 1, folder) for blocks in depths]
        report.table("running, per block", per_each(rows, "blocks"))
        rows = [one(depths[0], experts, folder) for experts in tensors]
        report.table(f"running, {depths[0]} blocks, per tensor", per_each(rows, "tensors"))
    report.close()


def _joined(numbers: tuple[int, ...]) -> str:
    return ",".join(map(str, numbers))


def _numbers(option: str, text: str) -> list[int]:
    words = text.split(",")
    if not all(word.isdigit() and int(word) for word in words):
        raise ConfigError(f"{option} {text!r}: give whole numbers above 0, such as 8,32")
    return [int(word) for word in words]


# -- planning -------------------------------------------------------------------------------------


def plan_cost(blocks: int, wider: int) -> dict[str, Any]:
    """Measure the cost of the parts of a plan and of the whole plan."""
    model = presets.model(SHAPE)
    block = replace(model.blocks[0], parameters=wider * model.blocks[0].parameters)
    model = replace(model, blocks=stacked(block, blocks), name=f"{SHAPE} x {blocks}")
    request = PlanRequest(
        model=model,
        machine=presets.machine(MACHINE).with_drives(24),
        batch=8,
        seq=1024,
        options=PlanOptions(dtype="bf16", clip=1.0, can_rerun=True),
        host=10**12,
    )
    workload = load_of_shape(model, batch=8, seq=1024, dtype="bf16")
    how = {"host_bytes": request.host, "workload": workload, "profile": request.machine}
    closed_s, plan = timed(
        lambda: closed_form_plan(PlanProblem(request.blocks, request.options, **how))
    )
    simulated_s, result = timed(
        lambda: Simulator(request.machine, request.blocks, workload).forecast(plan)
    )
    whole_s, _ = timed(lambda: plan_for_machine(request))
    actions = sum(map(len, result.phases))
    each = 1e3 / blocks
    return {
        "blocks": blocks,
        "parameters": f"{model.parameters / 1e9:.1f}B",
        "closed form": closed_s * each,
        "schedule and simulation": simulated_s * each,
        "us per action": 1e6 * simulated_s / actions,
        "whole plan s": whole_s,
    }


def timed(work: Any) -> tuple[float, Any]:
    """Return the CPU seconds of `work`, the smaller of two runs, and its result."""
    taken = []
    for _ in range(2):
        start = time.process_time()
        result = work()
        taken.append(time.process_time() - start)
    return min(taken), result


# -- running --------------------------------------------------------------------------------------


class Block(nn.Module):
    def __init__(self, experts: int) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(experts))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for expert in self.experts:
            x = x + torch.tanh(expert(x))
        return x


class Net(nn.Module):
    """A stack of blocks with its own loss.

    `checkpointed` selects torch's checkpointing, as in a plain run. LoHan recomputes blocks itself.
    """

    def __init__(self, blocks: int, experts: int, *, checkpointed: bool) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(experts) for _ in range(blocks))
        self.checkpointed = checkpointed

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.checkpointed else block(x)
        return x.square().mean()


def one(blocks: int, experts: int, folder: Path) -> dict[str, Any]:
    """Measure one size in a process of its own."""
    words = [sys.executable, __file__, "--one", f"{blocks},{experts}", "--work", str(folder)]
    ended = subprocess.run(words, check=True, stdout=subprocess.PIPE, text=True)
    actual: dict[str, Any] = json.loads(ended.stdout)
    return actual


def per_each(rows: list[dict[str, Any]], of: str) -> list[dict[str, Any]]:
    """Return what each additional block or tensor costs.

    The first row has the cost per block or tensor of the smallest model.
    """
    sizes, result = ("blocks", "tensors"), []
    for before, row in zip([dict.fromkeys(rows[0], 0), *rows], rows, strict=False):
        more = row[of] - before[of]
        costs = {name: (row[name] - before[name]) / more for name in row if name not in sizes}
        result.append({name: row[name] for name in sizes} | costs)
    return result


def run_cost(blocks: int, experts: int, folder: Path) -> dict[str, float]:
    """Return sizes, milliseconds and KiB of the whole model."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    plain_s = plain_step_s(Net(blocks, experts, checkpointed=True))
    drive = Path(tempfile.mkdtemp(prefix="store-", dir=folder))
    model = Net(blocks, experts, checkpointed=False)
    before = peak_bytes()
    budget = lohan.Budget(ssd=[drive], host="64MiB")

    def attach(model: nn.Module, *, resume: bool) -> tuple[float, lohan.Session]:
        start, optimizer = time.process_time(), lohan.AdamW(lr=1e-3)
        session = lohan.attach(model, optimizer=optimizer, budget=budget, resume=resume)
        return time.process_time() - start, session

    attach_s, session = attach(model, resume=False)
    step_s = lohan_step_s(session, model)
    counted = session.plan.tier_bytes("host")
    beyond = peak_bytes() - before - counted
    session.close()
    load_s, session = attach(Net(blocks, experts, checkpointed=False), resume=True)
    session.close()
    return {
        "blocks": blocks,
        "tensors": blocks * experts,
        "attach ms": 1e3 * attach_s,
        "load ms": 1e3 * load_s,
        "step ms": 1e3 * step_s,
        "plain step ms": 1e3 * plain_s,
        "own ms": 1e3 * (step_s - plain_s),
        "KiB beyond the plan": max(0, beyond) / 1024,
    }


def plain_step_s(model: nn.Module) -> float:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    x = torch.ones(ROWS, WIDTH)

    def step() -> None:
        model(x).backward()
        optimizer.step()
        optimizer.zero_grad()

    return least_s(step)


def lohan_step_s(session: lohan.Session, model: nn.Module) -> float:
    x = torch.ones(ROWS, WIDTH)

    def step() -> None:
        model(x).backward()
        session.flush()

    return least_s(step)


def least_s(step: Any) -> float:
    taken = []
    for _ in range(WARM + STEPS):
        start = time.process_time()
        step()
        taken.append(time.process_time() - start)
    return min(taken[WARM:])


if __name__ == "__main__":
    main()
