"""The run under test: the trainer's own session and step, with the weights read back."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch

from lohan.config import Config
from lohan.display import Display
from lohan.errors import BudgetError
from lohan.layout import groups_from_json
from lohan.meter import Meter
from lohan.model_files.checkpoint import StoreReader
from lohan.plan import Plan
from lohan.replanning import Replanner
from lohan.run import RunFolder
from lohan.session import Session
from lohan.starting import Inputs, open_session
from lohan.state import MODES
from lohan.storage.store import Store
from lohan.trainer import one_step
from lohan.verify.judging import Difference
from lohan.verify.reference import Recipe, Trajectory

MORE_HOST = 1.25


@dataclass(frozen=True)
class Made:
    """What a run through LoHan gave. `differences`: per step, where weights were looked at."""

    losses: tuple[float, ...]
    differences: tuple[tuple[Difference, ...], ...]
    digest: str  # of all weights at the end
    plan: Plan


def lohan_run(
    recipe: Recipe, config: Config, inputs: Inputs, beside: Trajectory, display: Display, *,
    stepwise: bool, from_host: int | None = None,
) -> Made:  # fmt: skip
    """With `stepwise` every step is brought to its end and its weights are compared; without, steps
    overlap as in any run, and only the end is looked at."""
    torch.manual_seed(recipe.seed)
    session = opened(RunFolder(config.out), config, inputs, display, from_host)
    losses: list[float] = []
    differences: list[tuple[Difference, ...]] = []
    with session:
        meter, replanner = Meter(session, session.executor.trace), Replanner(session)
        for step in range(recipe.steps):
            row = one_step(session, config, inputs.train, meter)
            losses.append(row["loss"])
            if stepwise:
                session.settle()
                differences.append(tuple(compare(session.store, beside, step + 1)))
            elif step + 1 < recipe.steps:
                moved = row["ssd_read_bytes"] + row["ssd_written_bytes"]
                replanner.after_step(meter.spans, moved_bytes=moved, step_s=row["step_s"])
        session.settle()
        return Made(tuple(losses), tuple(differences), digest(session.store), session.plan)


def opened(
    folder: RunFolder, config: Config, inputs: Inputs, display: Display, from_host: int | None
) -> Session:
    """With the smallest host budget from `from_host` on that is enough: a copy with few layers
    would otherwise lie in memory whole, and nothing would stream."""
    most = config.budget.host
    host = most if from_host is None or most is None else min(from_host, most)
    while True:
        asked = replace(config, budget=replace(config.budget, host=host))
        try:
            return open_session(folder, asked, inputs, display, resume=False)
        except BudgetError:
            if host is None or most is None or host >= most:
                raise
            host = min(most, int(host * MORE_HOST) + 1)


def weights_of(store: Store) -> Iterator[tuple[str, torch.Tensor]]:
    """fp32 values of every parameter of the committed step, one by one."""
    reader = StoreReader(
        store, groups_from_json(store.meta["layout"]), mode=MODES[store.meta["mode"]],
        chunk_params=store.meta["chunk_params"],
    )  # fmt: skip
    for name in reader.names():
        shape = torch.Size(reader.shape(name))
        yield name, reader.read_flat(name, 0, shape.numel()).view(shape)


def digest(store: Store) -> str:
    whole = hashlib.sha256()
    for name, weight in weights_of(store):
        whole.update(name.encode())
        whole.update(memoryview(weight.contiguous().numpy()))  # type: ignore[arg-type]
    return whole.hexdigest()


def compare(store: Store, beside: Trajectory, step: int) -> Iterator[Difference]:
    """Every tensor of the store against the in-memory run after the same step."""
    with beside.open(step) as after, beside.open(0) as start:
        trained = set(after.keys())
        missing = set(start.keys())
        for name, weight in weights_of(store):
            key = beside.alias.get(name, name)
            missing.discard(key)
            first = start.get_tensor(key)
            frozen = first.to(beside.dtype).float()
            wanted = after.get_tensor(key) if key in trained else frozen
            apart = weight - wanted
            yield Difference(
                name=key, distance=float(apart.norm()),
                largest=float(apart.abs().max()) if apart.numel() else 0.0,
                way=float((wanted - first).norm()) if key in trained else 0.0,
                size=float(wanted.norm()),
                count=wanted.numel(),
            )  # fmt: skip
    for key in sorted(missing):
        yield Difference(key, float("inf"), float("inf"), 0.0, 0.0, 0)
