"""The run under test: the trainer's own session and step, with the weights read back."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch

from lohan.checkpoint.sources import ParameterSource
from lohan.checkpoint.team_reader import TeamReader, serve
from lohan.config import Config
from lohan.engine.replan import Replanner
from lohan.engine.session import Session, piece_reader, reader_of
from lohan.errors import BudgetError
from lohan.model.layout import Group
from lohan.model.plan import Plan
from lohan.tools.judging import Difference
from lohan.tools.reference import Recipe, Trajectory
from lohan.train.inputs import Inputs, open_session
from lohan.train.meter import Meter
from lohan.train.ranks import ALONE, Crew
from lohan.train.run_folder import RunFolder
from lohan.train.trainer import one_step
from lohan.util.display import Display

MORE_HOST = 1.25


@dataclass(frozen=True)
class Made:
    """What a run through LoHan gave. `differences`: per step, where weights were looked at."""

    losses: tuple[float, ...]
    differences: tuple[tuple[Difference, ...], ...]
    digest: str  # of all weights at the end
    plan: Plan


def lohan_run(
    recipe: Recipe, config: Config, inputs: Inputs, beside: Trajectory | None, display: Display, *,
    stepwise: bool, from_host: int | None = None, ranks: Crew = ALONE,
) -> Made:  # fmt: skip
    """With `stepwise` every step is brought to its end and its weights are compared; without, steps
    overlap as in any run, and only the end is looked at. Of several ranks the first does that; the
    others have nothing to compare with."""
    torch.manual_seed(recipe.seed)
    session = opened(RunFolder(config.out), config, inputs, display, from_host, ranks)
    losses: list[float] = []
    differences: list[tuple[Difference, ...]] = []
    with session:
        meter, replanner = Meter(session, session.executor.trace), Replanner(session)
        for step in range(recipe.steps):
            row = one_step(session, config, inputs, meter, ranks)
            losses.append(row["loss"])
            if stepwise:
                session.settle()
                with reading(session) as weights:
                    found = compare(weights, beside, step + 1) if beside is not None else ()
                    differences.append(tuple(found))
            elif step + 1 < recipe.steps:
                moved = row["ssd_read_bytes"] + row["ssd_written_bytes"]
                replanner.after_step(meter.spans, moved_bytes=moved, step_s=row["step_s"])
        session.settle()
        with reading(session) as weights:
            whole = digest(weights)
        return Made(tuple(losses), tuple(differences), whole, session.plan)


def opened(
    folder: RunFolder, config: Config, inputs: Inputs, display: Display, from_host: int | None,
    ranks: Crew,
) -> Session:  # fmt: skip
    """With the smallest host budget from `from_host` on that is enough: a copy with few layers
    would otherwise lie in memory whole, and nothing would stream. Several ranks do not try."""
    most = config.budget.host
    host = most
    if from_host is not None and most is not None and ranks.team is None:
        host = min(from_host, most)
    while True:
        asked = replace(config, budget=replace(config.budget, host=host))
        try:
            return open_session(folder, asked, inputs, display, resume=False, crew=ranks)
        except BudgetError:
            if host is None or most is None or host >= most:
                raise
            host = min(most, int(host * MORE_HOST) + 1)


Weights = Iterable[tuple[str, torch.Tensor]]  # fp32 values of every parameter


@contextmanager
def reading(session: Session) -> Iterator[Weights]:
    """The weights of the committed step, one by one. Ranks beside the first give theirs to it and
    have none."""
    team, groups = session.team, session.demand.blocks.groups
    if team is None:
        yield _weights(groups, reader_of(session.store))
        return
    own = piece_reader(session.store, team.ranks, ema=False)
    if team.ranks.first:
        with TeamReader(team, groups, own) as reader:
            yield _weights(groups, reader)
    else:
        serve(team, groups, own)
        yield ()


def _weights(groups: Sequence[Group], reader: ParameterSource) -> Weights:
    for group in groups:
        for tensor in group.tensors:
            flat = reader.read_flat(tensor.name, 0, tensor.numel)
            yield tensor.name, flat.view(tensor.shape)


def digest(weights: Weights) -> str:
    whole = hashlib.sha256()
    for name, weight in weights:
        whole.update(name.encode())
        whole.update(memoryview(weight.contiguous().numpy()))  # type: ignore[arg-type]
    return whole.hexdigest()


def compare(weights: Weights, beside: Trajectory, step: int) -> Iterator[Difference]:
    """Every tensor against the in-memory run after the same step."""
    with beside.open(step) as after, beside.open(0) as start:
        trained = set(after.keys())
        missing = set(start.keys())
        for name, weight in weights:
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
